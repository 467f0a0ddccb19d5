"""Runs the parts of gpu_check.sh in sequence; see there for its variables. gpu_check.sh sets OUT.

Does not import jax, so that the parts can use the whole GPU.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import comparison
from gpu_parts import BUDGET, LISTS, Part

ROOT = Path(__file__).resolve().parents[1]
TINY_PATIENCE = 6
"""Factor on time limits in a dry run, whose machine may be slow and busy."""
LEAST = 20
"""Minimum remaining seconds to start a part."""
GRACE = 10
"""Seconds between the interrupt of a part and its kill."""
TIMED_OUT = 124
"""Exit code of a part that exceeded its limit, as of `timeout`."""


@dataclass
class Check:
    """One call: the parts to run, the folder of results, and the results so far."""

    parts: tuple[Part, ...]
    gpu: str | None
    """Name of the GPU; None: a dry run at tiny sizes on the CPU."""
    out: Path
    budget: float
    python: str
    torch_python: str
    folder: Path
    """The folder of the parts' figures."""
    results: dict[str, Any] = field(default_factory=dict)
    """Part -> its exit code, times and figures."""
    began: float = field(default_factory=time.monotonic)

    @property
    def tiny(self) -> bool:
        return self.gpu is None

    @property
    def file(self) -> Path:
        return self.out / "gpu_check.json"

    def remaining_seconds(self) -> float:
        return self.budget - (time.monotonic() - self.began)

    def environment(self) -> dict[str, str]:
        """Of every part. One cache of compiled programs serves all of them; the machine keeps it between calls."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return {
            "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / "megajax_gpu_check"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.25",
            **os.environ,
            "JAX_PLATFORMS": "cpu" if self.tiny else "cuda,cpu",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1" if self.tiny else "",
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
        }

    def run(self, part: Part) -> None:
        """Run a part in the remaining time, and record its result."""
        remaining = self.remaining_seconds()
        if remaining < LEAST:
            self.results[part.name] = {"code": None, "left_out": "the time was over"}
            self.write()
            return
        limit = min(part.limit * (TINY_PATIENCE if self.tiny else 1), remaining)
        print(f"\n######## {part.name} (at most {limit:.0f} s, {remaining:.0f} s left)", flush=True)
        json_file = self.folder / f"{part.name}.json"
        places = {"json": json_file, "folder": self.folder, "out": self.out, "torch_python": self.torch_python}
        started = time.monotonic()
        command = part.command(self.python, {name: str(place) for name, place in places.items()}, tiny=self.tiny)
        code = ended(command, limit, self.environment())
        record: dict[str, Any] = {"code": code, "seconds": round(time.monotonic() - started, 1), "limit": round(limit)}
        if code:
            print(f"######## {part.name} failed with {code}", flush=True)
        self.results[part.name] = record | left_by(part, json_file)
        self.write()

    def write(self) -> None:
        """Write all results so far, including those of earlier calls; the file is always complete."""
        text = json.dumps({"gpu": self.gpu, "parts": self.results, "comparison": self.compared()}, indent=1)
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(text + "\n")
        os.replace(temporary, self.file)

    def compared(self) -> list[dict[str, Any]]:
        """Measured and predicted figures."""
        predicted = comparison.predictions(self.gpu, tiny=self.tiny)
        kinds = {part.name: part.kind for parts in LISTS.values() for part in parts}
        rows: list[dict[str, Any]] = []
        for name, result in self.results.items():
            if name in kinds:
                rows += comparison.rows(predicted, kinds[name], name, figures(result))
        return rows


def figures(result: Mapping[str, Any]) -> Any:
    """Figures of a part's result; None if it wrote none."""
    outcome = result.get("outcome")
    return outcome.get("figures", outcome) if isinstance(outcome, dict) else None


def left_by(part: Part, json_file: Path) -> dict[str, Any]:
    """{"outcome": the part's figures}; {} if it wrote none."""
    try:
        if part.kind == "tests":
            return {"outcome": comparison.tests_of(json_file.with_suffix(".xml"))}
        return {"outcome": json.loads(json_file.read_text())}
    except FileNotFoundError:
        return {}
    except (ValueError, ElementTree.ParseError):
        return {"outcome": "incomplete file"}


def ended(command: list[str], limit: float, environment: dict[str, str]) -> int:
    """Exit code of a program, which gets an interrupt at its limit and is killed, with all it started, GRACE later.

    An interrupt lets pytest say what failed and peers.py end the other trainer.
    """
    running = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return running.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(GRACE)
        return TIMED_OUT
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def listed_parts(lists: str) -> list[str]:
    """Lists that PARTS selects."""
    return list(LISTS) if lists == "all" else lists.split(",")


def select_parts(lists: str, only: str) -> tuple[Part, ...]:
    """Parts of the lists named, `first,second` or `all`, whose names match. Raises SystemExit for an unknown list."""
    names = listed_parts(lists)
    if unknown := [name for name in names if name not in LISTS]:
        sys.exit(f"PARTS={','.join(unknown)}: unknown list; choose from {', '.join(LISTS)} and all")
    return tuple(part for name in names for part in LISTS[name] if re.search(only, part.name))


def gpu_name() -> str | None:
    """Name of the first GPU, as in its driver and jax; None without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    query_result = subprocess.run(query, capture_output=True, text=True, check=False)
    names = query_result.stdout.split("\n") if query_result.returncode == 0 else []
    return names[0].strip() or None if names else None


def listed() -> str:
    """All parts with their limits, and the sum of each list."""
    lines = []
    for name, parts in LISTS.items():
        lines.append(f"{name}: {sum(part.limit for part in parts)} s of {BUDGET}")
        lines += [f"  {part.limit:4} s  {part.name}" for part in parts]
    return "\n".join(lines)


def main() -> int:
    """Exit code: 1 if a part failed."""
    variables = os.environ
    if variables.get("LIST") == "1":
        print(listed())
        return 0
    lists, only = variables.get("PARTS", "first"), variables.get("ONLY", ".")
    gpu = None if variables.get("TINY") == "1" else gpu_name()
    parts = select_parts(lists, only)
    out = Path(variables["OUT"]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    # A shell that starts this in the background has it, and what it starts, ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        check = Check(
            parts=parts,
            gpu=gpu,
            out=out,
            budget=float(variables.get("BUDGET") or BUDGET * (1 if gpu else TINY_PATIENCE) * len(listed_parts(lists))),
            python=sys.executable,
            torch_python=variables.get("TORCH_PYTHON") or sys.executable,
            folder=Path(folder),
        )
        if (lists, only) != ("first", ".") and check.file.is_file():
            check.results = json.loads(check.file.read_text())["parts"]
        for part in parts:
            check.run(part)
    rows = check.compared()
    scale = "; tiny sizes on a CPU, compared with predictions for a GPU: the ratios mean nothing" if gpu is None else ""
    print(f"\n######## measured over predicted{scale}\n{comparison.table(rows)}")
    print(f"\n######## {time.monotonic() - check.began:.0f} s; results in {check.file}")
    selected = {part.name: check.results[part.name] for part in parts}
    if over := [name for name, result in selected.items() if result["code"] is None]:
        print(f"not run, out of time: {', '.join(over)}")
    if failed := [f"{name} ({result['code']})" for name, result in selected.items() if result["code"]]:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
