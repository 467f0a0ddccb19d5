"""Functions of benchmarks that run in processes of their own, and the memory of processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megajax.config.class_references import resolve


def command_of(target: str, *arguments: object) -> list[str]:
    """The command line that calls a function, "package.module:name", with words, and prints its result as JSON."""
    return [sys.executable, "-m", "benchmarks.processes", target, *map(str, arguments)]


def results_of(commands: list[list[str]], **environment: str) -> list[Any]:
    """What functions return that run at the same time. Raises SystemExit if one of them fails."""
    pipes: Any = {"stdout": subprocess.PIPE, "text": True, "env": os.environ | environment}
    running = [subprocess.Popen(command, **pipes) for command in commands]
    outputs = [process.communicate()[0] for process in running]
    if failed := [process.args for process in running if process.returncode]:
        raise SystemExit(f"this process failed: {failed[0]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def memory(process: int | str = "self") -> dict[str, int]:
    """Bytes by the names of /proc/PID/status, such as VmRSS and RssAnon; {} for a process that has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: 1024 * int(size.split()[0]) for name, _, size in (ln.partition(":") for ln in lines) if "kB" in size}


if __name__ == "__main__":
    print(json.dumps(resolve(sys.argv[1])(*sys.argv[2:])))
