"""Processor time and page faults of a step on CPUs, with and without the memory that the step before freed."""

import resource
import tempfile
from statistics import median
from typing import Any

from benchmarks.processes import command_of, results_of

WARM_UP = 3


def freed_memory(*, config: str = "quickstart.py", steps: int = 10, rounds: int = 3) -> dict[str, Any]:
    """Steps that keep freed memory relative to steps that return it.

    Processes with and without it run by turns; processor seconds count, so other load on the machine matters little.
    --config: of the model; one CPU device trains it. --steps: counted, after 3 others. --rounds: processes of a kind.
    """
    command = command_of("benchmarks.training.freed_memory:train", config, steps)
    ways = {"returned": {"MALLOC_TOP_PAD_": "131072"}, "kept": {}}  # a setting of malloc leaves it as it is
    runs: dict[str, list[Any]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, environment in ways.items():
            runs[way] += results_of([command], **environment)
    names = ("seconds", "faults", "peak_mib")
    figures: dict[str, Any] = {way: {name: median(run[name] for run in runs[way]) for name in names} for way in ways}
    pairs = zip(runs["kept"], runs["returned"], strict=True)
    figures["ratio"] = round(median(kept["seconds"] / returned["seconds"] for kept, returned in pairs), 3)
    figures["wrong"] = len({run["loss"] for way in ways for run in runs[way]}) > 1
    return figures


def train(config: str, steps: str) -> dict[str, Any]:
    """Processor seconds and page faults per step of this process, and its last loss."""
    from megajax.command_line.devices import use_devices

    use_devices("cpu:1")
    import megajax as mj
    from megajax.mesh.processes.freed_memory import trim_once

    with tempfile.TemporaryDirectory() as folder:
        run, usage, info = mj.setup(mj.load(config, f"run_dir={folder}")), [], None
        for info in run.steps(WARM_UP + int(steps)):
            if info.step == 1:
                trim_once()
            usage.append(resource.getrusage(resource.RUSAGE_SELF))
    first, last = usage[WARM_UP - 1], usage[-1]
    seconds = last.ru_utime + last.ru_stime - first.ru_utime - first.ru_stime
    return {
        "seconds": round(seconds / int(steps), 4),
        "faults": round((last.ru_minflt - first.ru_minflt) / int(steps)),
        "peak_mib": last.ru_maxrss // 1024,
        "loss": None if info is None else info.loss,
    }
