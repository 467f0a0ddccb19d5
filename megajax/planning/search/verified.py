"""The most promising layouts of a search, compiled: each in a process of its own, several at once."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megajax.config.dump import to_yaml
from megajax.planning.cost.costs import Device
from megajax.planning.program.devices import Cluster
from megajax.planning.search.candidates import Choice, apply
from megajax.training.run_config import RunConfig

AT_MOST = 2
"""Times as many are compiled as were asked for, where some turn out not to fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What the compiler said of a layout."""

    error: str = ""
    """Last line of what it complained about; all else is 0 then."""
    peak_gib: float = 0.0
    fits: bool = False
    step_seconds: float = 0.0
    compute_seconds: float = 0.0
    exposed_seconds: float = 0.0
    bubble_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    tokens_per_second_per_device: float = 0.0
    mfu_causal: float = 0.0
    compile_seconds: float = 0.0

    @classmethod
    def read(cls, written: dict[str, Any]) -> "Compiled":
        """Of a plan's JSON."""
        return cls(**{name: written[name] for name in cls.__slots__ if name != "error"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiler:
    """How plans are compiled."""

    cfg: RunConfig
    cluster: Cluster
    device: Device

    def __call__(self, choice: Choice) -> Compiled:
        """One plan, in a process of its own."""
        with tempfile.TemporaryDirectory(prefix="megajax_search_") as folder:
            config, task, plan = (Path(folder) / name for name in ("config.yaml", "task.json", "plan.json"))
            config.write_text(to_yaml(apply(choice, self.cfg)), encoding="utf-8")
            told = {"config": str(config), "cluster": list(self.cluster), "device": asdict(self.device)}
            task.write_text(json.dumps(told), encoding="utf-8")
            asked = [sys.executable, "-m", "megajax.planning.program.compile_worker", str(task), str(plan)]
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if line.strip()]
                return Compiled(error=lines[-1].strip() if lines else f"ended with code {done.returncode}")
            return Compiled.read(json.loads(plan.read_text(encoding="utf-8")))


def compile_best(
    choices: Iterable[Choice],
    wanted: int,
    compiler: Callable[[Choice], Compiled],
    known: dict[Choice, Compiled],
    tell: Callable[[Choice, Compiled], None],
) -> None:
    """Compile the first `wanted` that fit, and at most AT_MOST times as many; `known` are not compiled again.

    tell: called as each is done, in any order.
    """
    waiting = list(choices)[: AT_MOST * wanted]
    with ThreadPoolExecutor(max(1, min(wanted, os.cpu_count() or 1))) as pool:
        fitting = 0
        while waiting and fitting < wanted:
            batch, waiting = waiting[: wanted - fitting], waiting[wanted - fitting :]
            jobs = {pool.submit(compiler, choice): choice for choice in batch if choice not in known}
            for job in as_completed(jobs):
                tell(jobs[job], job.result())
            fitting += sum(known[choice].fits for choice in batch)
