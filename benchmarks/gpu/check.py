"""Runs the steps of gpu_check.sh in sequence; gpu_check.sh describes its variables and sets OUT.

Does not import jax, so that the steps can use the whole GPU.
"""

import contextlib
import importlib.util
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

from benchmarks.gpu import comparison
from benchmarks.gpu.steps import BUDGET, LISTS, Step
from benchmarks.outcome import ROOT

TINY_PATIENCE = 6
"""Factor on time limits in a dry run, whose machine may be slow and busy."""
LEAST = 20
"""Minimum remaining seconds to start a step."""
GRACE = 10
"""Seconds between the interrupt of a step and its kill."""
TIMED_OUT = 124
"""Exit code of a step that exceeded its limit, as of `timeout`."""
OPTIONAL = ("grain", "orbax.checkpoint", "array_record", "tyro", "tensorboardX", "zstandard", "xprof")
SMI = ["nvidia-smi", "--format=csv,noheader"]


@dataclass
class Check:
    """One call: the steps to run, the folder of results, and the results so far."""

    gpu: str | None
    """Name of the GPU; None: a dry run at tiny sizes on the CPU."""
    out: Path
    budget: float
    python: str
    folder: Path
    """The folder of the steps' figures."""
    results: dict[str, Any] = field(default_factory=dict)
    """Step -> its exit code, times and figures."""
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
        """Variables of every step. All steps share one compile cache, which the machine keeps between calls."""
        return {
            "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / "megajax_gpu_check"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.25",
            **os.environ,
            "JAX_PLATFORMS": "cpu" if self.tiny else "cuda,cpu",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1" if self.tiny else "",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "PYTHONUNBUFFERED": "1",
        }

    def run(self, step: Step) -> None:
        """Run a step in the remaining time, and record its result."""
        remaining = self.remaining_seconds()
        if remaining < LEAST:
            self.results[step.name] = {"code": None, "left_out": "the time was over"}
            self.write()
            return
        limit = min(step.limit * (TINY_PATIENCE if self.tiny else 1), remaining)
        print(f"\n######## {step.name} (at most {limit:.0f} s, {remaining:.0f} s left)", flush=True)
        json_file = self.folder / f"{step.name}.json"
        places = {"json": json_file, "folder": self.folder, "out": self.out}
        started = time.monotonic()
        command = step.command(self.python, {name: str(place) for name, place in places.items()}, tiny=self.tiny)
        code = exit_code(command, limit, self.environment())
        record: dict[str, Any] = {"code": code, "seconds": round(time.monotonic() - started, 1), "limit": round(limit)}
        if code:
            print(f"######## {step.name} failed with {code}", flush=True)
        self.results[step.name] = record | written_by(step, json_file)
        self.write()

    def write(self) -> None:
        """Write all results so far, including those of earlier calls. The file is replaced at once."""
        text = json.dumps({"gpu": self.gpu, "parts": self.results, "comparison": self.compared()}, indent=1)
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(text + "\n")
        os.replace(temporary, self.file)

    def compared(self) -> list[dict[str, Any]]:
        """Measured and predicted figures."""
        predicted = comparison.predictions(self.gpu, tiny=self.tiny)
        kinds = {step.name: step.kind for steps in LISTS.values() for step in steps}
        rows: list[dict[str, Any]] = []
        for name, result in self.results.items():
            if name in kinds:
                rows += comparison.rows(predicted, kinds[name], name, figures(result))
        return rows


def figures(result: Mapping[str, Any]) -> Any:
    """Figures of a step's result; None if it wrote none."""
    outcome = result.get("outcome")
    return outcome.get("figures", outcome) if isinstance(outcome, dict) else None


def written_by(step: Step, json_file: Path) -> dict[str, Any]:
    """{"outcome": the step's figures}; {} if it wrote none."""
    try:
        if step.kind == "tests":
            return {"outcome": comparison.tests_of(json_file.with_suffix(".xml"))}
        return {"outcome": json.loads(json_file.read_text())}
    except FileNotFoundError:
        return {}
    except (ValueError, ElementTree.ParseError):
        return {"outcome": "incomplete file"}


def exit_code(command: list[str], limit: float, environment: dict[str, str]) -> int:
    """The exit code of a program. It is interrupted at its limit and killed, with all its children, GRACE later.

    On the interrupt, pytest prints its failures.
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


def select_steps(lists: str, only: str) -> tuple[Step, ...]:
    """Steps of the named lists, `first,second` or `all`, whose names match. Raises SystemExit for an unknown list."""
    names = _list_names(lists)
    if unknown := [name for name in names if name not in LISTS]:
        sys.exit(f"PARTS={','.join(unknown)}: unknown list; choose from {', '.join(LISTS)} and all")
    return tuple(step for name in names for step in LISTS[name] if re.search(only, step.name))


def _list_names(lists: str) -> list[str]:
    return list(LISTS) if lists == "all" else lists.split(",")


def gpu_name() -> str | None:
    """Name of the first GPU, which driver and jax agree on; None without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    listed = subprocess.run([*SMI, "--query-gpu=name"], capture_output=True, text=True, check=False)
    return listed.stdout.partition("\n")[0].strip() or None if listed.returncode == 0 else None


def listed() -> str:
    """All steps with their limits, and the sum of each list."""
    lines = []
    for name, steps in LISTS.items():
        lines.append(f"{name}: {sum(step.limit for step in steps)} s of {BUDGET}")
        lines += [f"  {step.limit:4} s  {step.name}" for step in steps]
    return "\n".join(lines)


def gpu_check() -> dict[str, Any]:
    """The main benchmarks and the GPU tests on one GPU, in calls of ten minutes: run gpu_check.sh, which explains it.

    The exit code is 1 if a step failed.
    """
    variables = os.environ
    if variables.get("LIST") == "1":
        print(listed())
        return {}
    if "OUT" not in variables:
        sys.exit("run benchmarks/gpu_check.sh, which sets OUT")
    lists, only = variables.get("PARTS", "first"), variables.get("ONLY", ".")
    gpu = None if variables.get("TINY") == "1" else gpu_name()
    steps = select_steps(lists, only)
    out = Path(variables["OUT"]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    budget = float(variables.get("BUDGET") or BUDGET * (1 if gpu else TINY_PATIENCE) * len(_list_names(lists)))
    # A shell that starts this in the background makes it and its children ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        check = Check(gpu, out, budget, sys.executable, Path(folder))
        if (lists, only) != ("first", ".") and check.file.is_file():
            check.results = json.loads(check.file.read_text())["parts"]
        for step in steps:
            check.run(step)
    print(f"\n######## {comparison.heading(tiny=check.tiny)}\n{comparison.table(check.compared())}")
    print(f"\n######## {time.monotonic() - check.began:.0f} s; results in {check.file}")
    codes = {step.name: check.results[step.name]["code"] for step in steps}
    if over := [name for name, code in codes.items() if code is None]:
        print(f"not run, out of time: {', '.join(over)}")
    failed = [f"{name} ({code})" for name, code in codes.items() if code]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return {"wrong": failed}


def device() -> dict[str, Any]:
    """The device, the versions and the missing optional packages of this machine."""
    import jax
    import jax.numpy as jnp

    first, smi = jax.devices()[0], None
    if shutil.which(SMI[0]):
        query = "--query-gpu=name,memory.total,driver_version,clocks.max.sm,power.limit"
        smi = subprocess.run([*SMI, query], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "python": sys.version.split()[0],
        "jax": jax.__version__,
        "device_kind": first.device_kind,
        "platform": first.platform,
        "backend": first.client.platform_version.replace("\n", ", "),
        "computes": float(jax.jit(lambda x: (x @ x).sum())(jnp.ones((128, 128)))) == 128.0**3,
        "memory": first.memory_stats(),
        "nvidia_smi": smi,
        "missing": [name for name in OPTIONAL if not _installed(name)],
    }


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
