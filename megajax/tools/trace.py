"""Summarise a profiler trace: `python -m megajax.tools.trace FOLDER_OR_FILE`."""

import json
from pathlib import Path

from megajax.command_line import Flag, front_door, parse
from megajax.config.builds import resolve
from megajax.config.errors import UserError

USAGE = """python -m megajax.tools.trace FOLDER_OR_FILE [--top=20] [--steps=N] [--json[=FILE]]

Summarises a trace of jax's profiler: the longest kernels, idle gaps, busy time of each stream, and collectives with
nothing computed beside them. It reads *.trace.json.gz, the newest one where a folder is given: RUN_DIR/profile of a run
with --profile.steps=10:12, or what benchmarks/mfu.py --trace=FILE wrote. Needs no jax.

  --top=N          kernels listed (default 20)
  --steps=N        steps the trace holds; by default those marked in it, or one
  --json[=FILE]    print JSON instead, or write it to a file as well
"""
FLAGS = (Flag("top", int, 20), Flag("steps", int | None), Flag("json", None | bool | Path))


def main(argv: list[str]) -> int:
    """Print the summary.

    Raises:
        UserError: no trace there, one without kernels, or a wrong command line.
    """
    if not argv or {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    if argv[0].startswith("-"):
        raise UserError(f"the first word must be a folder or a file, got {argv[0]}\n{USAGE.splitlines()[0]}")
    flags = parse(argv[1:], verb="tools.trace", flags=FLAGS, with_config=False).flags
    if flags["top"] < 1 or (flags["steps"] is not None and flags["steps"] < 1):
        raise UserError("--top and --steps must be at least 1")
    # By name, so that the front door can report a package that is not installed.
    trace = resolve("megajax.metrics.chrome_trace:read")(Path(argv[0]))
    if not trace.devices:
        raise UserError(f"{trace.file} has no kernels: nothing ran on a device while it was recorded")
    summary, plain = resolve("megajax.metrics.trace:summary"), resolve("megajax.metrics.banner:plain")
    found = summary(trace.devices, steps=flags["steps"] or trace.steps or 1, top=flags["top"])
    text = json.dumps(found.values() | {"complete": trace.complete}, indent=1)
    if flags["json"] is True:
        print(text)
        return 0
    if flags["json"]:
        _write(flags["json"], text)
    print(plain(str(trace.file), found.sections()))
    if not trace.complete:
        most = resolve("megajax.metrics.chrome_trace:MOST_EVENTS")
        print(f"the file has {most:,} events, after which the profiler drops the rest: trace fewer steps")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}") from error


if __name__ == "__main__":
    front_door(main)
