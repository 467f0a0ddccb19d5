"""Checks for silent corruption, slow processes and failing devices: hooks, watches and a thread."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress

import jax
from jax.sharding import Mesh

from megajax.faults.config import HealthConfig, ResilienceConfig
from megajax.faults.drills import Drill, for_this_attempt
from megajax.job.integrity.recompute import CheckGradients
from megajax.job.integrity.replicas import CheckReplicas, FlipBit, most_copies, state_hash
from megajax.job.stragglers import Stalls, WatchStragglers
from megajax.machine.gpu_health import GpuHealth, HealthThread, Symptom, gpu_numbers, load_nvml
from megajax.training.guarded.loop import Hook
from megajax.training.session import Run
from megajax.training.step_report import StepInfo


class Integrity:
    """Built when the writers of a job are open.

    Attributes:
        hooks: run before all others, drills first.
        watches: called with the numbers of every step.
        stalled: seconds in which this process did not run.
    """

    def __init__(
        self,
        run: Run,
        stack: ExitStack,
        event: Callable[..., None],
        say: Callable[[str], None],
        record: Callable[..., None],
        saves: Sequence[Hook],
    ):
        """record: appends an event of any process. saves: hooks before which copies are compared."""
        cfg, self._run = run.cfg.resilience, run
        self.replicas = CheckReplicas(cfg.replicas, run.program, event, saves)
        drills = for_this_attempt(cfg.corruption_drills())
        flips = [FlipBit(drill) for drill in drills if drill.kind == "bitflip"]
        undetected = bool(flips) and most_copies(state_hash(run.program).leaves, run.mesh) < 2
        gradients = CheckGradients(cfg.recompute, run, event, say, drills)
        self.hooks: list[Hook] = [*flips, self.replicas, gradients]
        for line in idle_drills(cfg, run.cfg.steps, jax.process_count(), gradients.due):
            say(line)
        if undetected:
            sharding = f"parallel.data_sharding={run.cfg.parallel.data_sharding}"
            say(f"resilience.inject: no check can detect a bitflip, because no weight has a copy with {sharding}")
        if line := watch_gpus(cfg.health, run.mesh, stack, say, record):
            say(line)
        self.watches: list[Callable[[StepInfo], None]] = []
        self.stalled: Callable[[], float] = lambda: 0.0
        if jax.process_count() > 1 and cfg.stragglers.factor is not None:
            stalls = stack.enter_context(Stalls())
            self.stalled = lambda: stalls.seconds
            self.watches.append(WatchStragglers(cfg.stragglers, event, say))

    def at_end(self) -> None:
        """Compare copies before the last checkpoint. Raises Corruption."""
        self.replicas.at_end(self._run)


def idle_drills(cfg: ResilienceConfig, steps: int, processes: int, recomputed: Callable[[int], bool]) -> Iterator[str]:
    """A line for each fault that can't happen in this run. recomputed: whether a step's gradients are recomputed.

    Not an error: a run that resumes with fewer processes has the same command.
    """
    for text in cfg.inject:
        drill, why = Drill.parse(text), ""
        if drill.step > steps:
            why = f"the run has {steps} steps"
        elif drill.process is not None and drill.process >= processes:
            why = f"the last process is process {processes - 1}"
        elif drill.kind == "wrong_gradients" and not recomputed(drill.step):
            why = f"resilience.recompute does not check step {drill.step}"
        if why:
            yield f"resilience.inject={text} does nothing: {why}"


def watch_gpus(
    cfg: HealthConfig, mesh: Mesh, stack: ExitStack, say: Callable[[str], None], record: Callable[..., None]
) -> str | None:
    """Start to watch the GPUs of this process -> a line for the banner; None without GPUs, or if the watch is off."""
    devices = mesh.local_devices
    if cfg.every_seconds is None or devices[0].platform != "gpu":
        return None
    nvml, why = load_nvml()
    if nvml is None:
        return f"health of GPUs: not watched, {why} (pip install 'megajax[monitor]')"
    process, several = jax.process_index(), jax.process_count() > 1

    def report(symptom: Symptom) -> None:
        line = f"{f'process {process}, ' * several}{message(symptom)}"
        # Process 0 has the console; the launcher collects the output of the others.
        print(f"megajax: {line}", file=sys.stderr, flush=True) if process else say(line)
        with suppress(OSError):
            record("health", process=process, **symptom._asdict())

    health = GpuHealth(nvml, gpu_numbers((device.local_hardware_id for device in devices), os.environ))
    stack.enter_context(HealthThread(health.poll, cfg.every_seconds, report))
    return f"health of GPUs: checked every {cfg.every_seconds:g} s"


def message(symptom: Symptom) -> str:
    """A change of a GPU's health as a line."""
    names = {
        "uncorrected_errors": "uncorrected memory errors",
        "retired_pages": "memory rows replaced because of uncorrectable errors",
        "remap_pending": "a memory row that the next reset replaces",
        "remap_failed": "no spare memory rows left",
        "slowdowns": "clocks slowed down",
        "temperature": "too hot",
        "power_limit": "power limited",
        "xid": "Xid error",
    }
    name = names.get(symptom.what, symptom.what)
    if not symptom.value:
        return f"GPU {symptom.gpu}: no longer {name}"
    return f"GPU {symptom.gpu}: {name}" + ("" if symptom.value is True else f": {symptom.value}")
