"""The loop: dispatch a step, hand on what the step before it reported, do what is due."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from megajax.mesh.processes import StopFlags
from megajax.resilience.signals import agree
from megajax.training.step import STOP, Metrics

KEYS = ("loss", "grad_norm", "lr", "loss_scale", "skipped")


class NumericFault(Exception):
    """A step whose loss or gradients were not finite; its update was not made."""


class StepInfo(NamedTuple):
    """What a step reported, on the host."""

    step: int
    """Number of the step, from 1."""
    loss: float
    grad_norm: float
    lr: float
    loss_scale: float
    skipped: bool
    consumed_samples: int
    """Rows read since the start of the run, this step's among them."""
    seconds: float
    """From the step before being done (or this one being dispatched, if later) to this one being done."""
    metrics: dict[str, float]
    """What else the loss reports."""
    stop: bool = False
    """Whether some process was asked to stop when this step was dispatched; told by several processes only."""


class Hook(Protocol):
    """Something to do between steps, when `due(step)`."""

    def due(self, step: int) -> bool: ...

    def __call__(self, run: Any, step: int) -> None: ...


class Pending(NamedTuple):
    """A dispatched step whose numbers have not been fetched."""

    step: int
    consumed: int
    metrics: Metrics
    dispatched: float

    def fetch(self, since: float) -> tuple[StepInfo, float]:
        """Wait for the step. since: when the one before was done. -> its numbers and when it was done."""
        values = {name: value.item() for name, value in jax.device_get(dict(self.metrics)).items()}
        done = time.monotonic()
        known = {name: values.pop(name) for name in KEYS} | {"stop": bool(values.pop(STOP, False))}
        return StepInfo(
            self.step,
            **known,
            consumed_samples=self.consumed,
            seconds=done - max(since, self.dispatched),
            metrics=values,
        ), done


def run_steps(
    run: Any, last: int, hooks: Sequence[Hook] = (), stopping: Callable[[], bool] = lambda: False
) -> Iterator[StepInfo]:
    """Train up to and including step `last`, yielding what each step reported, one step late.

    Numbers are fetched while the next step runs, so that reporting never holds the devices up; before a hook runs,
    everything up to its step has been yielded. `stopping` says whether this process was asked to stop; it is asked
    after each step and ends the loop. Of several processes each sends its answer along with a step instead, and all
    end after the same one, at most three steps after one of them was asked: nothing is exchanged between steps.
    """
    flags = StopFlags(run.mesh) if jax.process_count() > 1 else None
    step, done, pending = run.step, time.monotonic(), None
    precision = run.cfg.precision.matmul_precision()
    while step < last:
        step += 1
        dispatched = time.monotonic()
        with jax.set_mesh(run.mesh), jax.default_matmul_precision(precision):
            batch, consumed = next(run.batches)
            told = () if flags is None else (flags(stopping()),)
            run.state, metrics = run.train_step(run.state, batch, *told)
        stop = False
        if pending is not None:
            info, done = pending.fetch(done)
            stop = info.stop
            yield info
        pending = Pending(step, consumed, metrics, dispatched)
        due = [hook for hook in hooks if hook.due(step)]
        stop = stop or (flags is None and stopping())
        if due or stop or step == last:
            info, done = pending.fetch(done)
            pending, stop = None, stop or info.stop
            yield info
        for hook in due:
            hook(run, step)
        if due:
            done = time.monotonic()
            # A hook may take long, and end early because of the same request.
            stop = stop or agree(stopping())
        if stop:
            return
