"""Compile the most promising layouts of a search, each in a worker process: this module, run with -m.

`python -m megajax.planning.search.compile_worker TASK.json PREDICTION.json`
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from megajax.command_line import front_door
from megajax.config import load
from megajax.config.builds import resolve
from megajax.config.dump import to_yaml
from megajax.planning.cost.costs import Device
from megajax.planning.cost.estimate import Estimate
from megajax.planning.program.devices import GIB, Cluster, prepare
from megajax.planning.search.candidates import Case, Choice, apply

MAX_TRIES = 2
"""Layouts that are compiled at most, as a multiple of those asked for: some turn out not to fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Memory and time of a step on one device, by formula or of a compiled program."""

    error: str = ""
    """Last line of the compiler's message; all else is 0 then."""
    peak_gib: float = 0.0
    fits: bool = False
    step_seconds: float = 0.0
    exposed_seconds: float = 0.0
    bubble_seconds: float = 0.0
    tokens_per_second_per_device: float = 0.0
    mfu_causal: float = 0.0

    @classmethod
    def of(cls, times: Estimate, peak_gib: float) -> "Prediction":
        return cls(
            peak_gib=peak_gib,
            fits=peak_gib <= times.run.device.usable_gib,
            step_seconds=times.step_seconds,
            exposed_seconds=times.exposed_seconds,
            bubble_seconds=times.bubble_seconds,
            tokens_per_second_per_device=times.tokens_per_second_per_device,
            mfu_causal=times.mfu_causal,
        )


@dataclass(frozen=True, slots=True)
class Compiler:
    """Compiles layouts of a config."""

    case: Case

    def __call__(self, choice: Choice) -> Prediction:
        """One layout, in a worker process."""
        with tempfile.TemporaryDirectory(prefix="megajax_search_") as folder:
            config, task, prediction = (Path(folder) / name for name in ("config.yaml", "task.json", "prediction.json"))
            config.write_text(to_yaml(apply(choice, self.case.cfg)), encoding="utf-8")
            cluster, device = list(self.case.cluster), asdict(self.case.device)
            written = {"config": str(config), "cluster": cluster, "device": device}
            task.write_text(json.dumps(written), encoding="utf-8")
            command = [sys.executable, "-m", "megajax.planning.search.compile_worker", str(task), str(prediction)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if line.strip()]
                return Prediction(error=lines[-1].strip() if lines else f"ended with code {done.returncode}")
            return Prediction(**json.loads(prediction.read_text(encoding="utf-8")))


def compile_best(
    choices: Iterable[Choice],
    wanted: int,
    compiler: Callable[[Choice], Prediction],
    known: dict[Choice, Prediction],
    add: Callable[[Choice, Prediction], None],
) -> None:
    """Compile layouts until `wanted` of them fit, at most MAX_TRIES times as many; not again what is `known`.

    add: called with each result, in any order; must put it into `known`.
    """
    waiting = list(choices)[: MAX_TRIES * wanted]
    with ThreadPoolExecutor(max(1, min(wanted, os.cpu_count() or 1))) as pool:
        fitting = 0
        while waiting and fitting < wanted:
            batch, waiting = waiting[: wanted - fitting], waiting[wanted - fitting :]
            jobs = {pool.submit(compiler, choice): choice for choice in batch if choice not in known}
            for job in as_completed(jobs):
                add(jobs[job], job.result())
            fitting += sum(known[choice].fits for choice in batch)


def main(argv: list[str]) -> int:
    """The worker. TASK names a config file and has cluster and device; the prediction is written to the other file.

    Raises UserError as `compile_train_step` does.
    """
    task = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    prepare()  # before anything imports jax
    plan = resolve("megajax.planning.program.train_step:compile_train_step")(
        load(task["config"]), Cluster(*task["cluster"])
    )
    times = resolve("megajax.planning.cost.step_time:step_time")(plan, Device(**task["device"]))
    prediction = Prediction.of(times, plan.memory.peak / GIB)
    Path(argv[1]).write_text(json.dumps(asdict(prediction)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    front_door(main)
