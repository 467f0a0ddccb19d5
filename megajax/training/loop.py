"""The training loop: dispatches a step, yields the report of the step before it, and runs the hooks that are due."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isfinite
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax import Array

from megajax.batch import SAMPLE
from megajax.faults.activity import COMPILE, STEP, Activity
from megajax.faults.exit_codes import NUMERIC_FAULT, TRANSIENT_FAULT
from megajax.faults.signals import StopWaiting, agree
from megajax.mesh.measures import Measured
from megajax.mesh.processes.agreement import StopFlags
from megajax.mesh.processes.peers import Peers
from megajax.training.gradients.exchange import SECONDS, STOP
from megajax.training.gradients.nonfinite import nonfinite_message
from megajax.training.guarded.guard import Guard
from megajax.training.guarded.step import RERUN, GuardLimits, StepControl
from megajax.training.observations import measurements
from megajax.training.step import Metrics
from megajax.training.timing import DATA_WAIT, PhaseTimes

KEYS = ("loss", "grad_norm", "lr", "loss_scale", "skipped")


class NumericFault(Exception):
    """A step whose loss or gradients are invalid; its update was not applied."""

    code = NUMERIC_FAULT
    """Exit code of the run."""


class UnrepeatedFault(NumericFault):
    """The step failed twice from the same state and rows with different numbers: neither data nor model is the cause.

    Megatron-LM's codes differ. It exits with 16 for a result that repeats on this machine, so that a run on another
    machine tells a broken machine from a bad batch, and then with 17. Here a result that repeats exits with 17: the
    data may be the cause, and a supervisor may restart on the same machine, which would repeat it. A result that does
    not repeat exits with 16: it may not occur after a restart.
    """

    code = TRANSIENT_FAULT


class Corruption(Exception):
    """Devices that should agree hold or compute different values: nothing may be saved. The message is for users."""


class StepInfo(NamedTuple):
    """The report of a step, on the host."""

    step: int
    """Number of the step, from 1."""
    loss: float
    grad_norm: float
    lr: float
    loss_scale: float
    skipped: bool
    """Whether its update was not applied."""
    consumed_samples: int
    """Rows read since the start of the run, this step's among them."""
    rows: int
    """Rows of this step."""
    seconds: float
    """Seconds from the end of the step before (or the dispatch of this one, if later) to the end of this one."""
    metrics: dict[str, float]
    """Other metrics of the loss."""
    phases: dict[str, float]
    """Seconds of this process in the wait for the step's rows and in hooks before the step; in some steps also the
    least and the largest of all processes (see PhaseTimes)."""
    measured: Mapping[str, Measured] = MappingProxyType({})
    """Measures of layers by name."""
    stop: bool = False
    """Whether any process was asked to stop when this step was dispatched; always false for a single process."""
    rerun: bool = False
    """Whether the step was suspicious, changed nothing and will be run again; `run_steps` yields no such report."""
    limits: GuardLimits | None = None
    """The limits of the step; None without a guard."""
    first_try: "StepInfo | None" = None
    """The report of the first run, if the step was run again."""
    nonfinite: str | None = None
    """The weights whose gradients were not finite in the second run; None if all were finite."""
    by_process: np.ndarray | None = None
    """float32 [processes, timing.EXCHANGED]: seconds of each phase in each process; None in most steps."""

    def __repr__(self) -> str:
        empty = (None, False, {})
        fields = {
            name: value for name, value in self._asdict().items() if name not in ("phases", "measured", "by_process")
        }
        texts = [
            f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value!r}"
            for name, value in fields.items()
            if isinstance(value, float) or value not in empty
        ]
        return f"StepInfo({', '.join(texts)})"


class Hook(Protocol):
    """Work between steps, called after each step for which `due(step)` is true."""

    phase: str
    """The phase of its time."""

    def due(self, step: int) -> bool:
        """The same on all processes, which run a collective after the hooks that are due: a function of the settings
        and the step, or of a decision that they have taken together."""
        ...

    def __call__(self, run: Any, step: int) -> None: ...


class StepInput(NamedTuple):
    """A batch on the devices and its accounts, kept until its step needs no rerun."""

    step: int
    batch: Any
    consumed: int
    phases: dict[str, float]
    account: Array | None
    """float32 [devices, phases]: seconds of each phase in each process, exchanged with the step."""
    fresh: bool
    """Whether `account` is new."""

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.batch[SAMPLE].size


class Flight(NamedTuple):
    """A dispatched step whose metrics have not been fetched."""

    step_input: StepInput
    limits: GuardLimits | None
    metrics: Metrics
    dispatched: float


def run_steps(
    run: Any,
    last: int,
    hooks: Sequence[Hook] = (),
    stopping: Callable[[], bool] = lambda: False,
    *,
    guard: Guard | None = None,
    exchange_every: int = 10,
    activity: Activity | None = None,
    stalled: Callable[[], float] = lambda: 0.0,
    waiting: Callable[[int], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[StepInfo]:
    """Train up to and including step `last`, yielding the report of each step one step late.

    Metrics are fetched while the next step runs, so that reports never delay the devices. Before a hook runs, all steps
    up to its own have been yielded. Every `exchange_every` steps, several processes exchange their seconds by phase.

    Args:
        run: a `Run`.
        last: the last step.
        hooks: called between steps, in this order.
        stopping: whether this process was asked to stop; called after each step. Several processes exchange the
            results within the step, and all end after the same step, at most three steps after the request.
        guard: runs suspicious steps again, and then the steps that followed them, so that a transient fault changes no
            result. Without a guard, updates that are not finite are skipped.
        exchange_every: steps between exchanges of seconds.
        activity: records the phases of the loop.
        stalled: see PhaseTimes.
        waiting: context around the wait for the rows of a step; StopWaiting raised in it ends the loop.
    """
    times = PhaseTimes(run.mesh, exchange_every if jax.process_count() > 1 else None, stalled)
    loop = _Loop(run, stopping, guard, activity or Activity(), times)
    loop.waiting = waiting
    step, flights = run.step, deque[Flight]()
    while step < last:
        step += 1
        try:
            step_input = loop.read(step)
        except StopWaiting:
            while flights:
                yield loop.land(flights)
            return
        flights.append(loop.dispatch(step_input))
        stop = False
        if len(flights) > 1:
            info = loop.land(flights)
            stop = info.stop
            yield info
        due_hooks = [hook for hook in hooks if hook.due(step)]
        stop = stop or (loop.flags is None and stopping())
        if due_hooks or stop or step == last:
            info = loop.land(flights)
            stop = stop or info.stop
            yield info
        for hook in due_hooks:
            with loop.times.measure(hook.phase), loop.activity.phase(hook.phase, step):
                hook(run, step)
        if due_hooks:
            loop.last_end = time.monotonic()
            # A request may arrive during a long hook, which may end early because of it.
            stop = stop or agree(stopping())
        if stop:
            return


class _Loop:
    """Dispatches the steps of `run_steps` and fetches their numbers."""

    def __init__(
        self, run: Any, stopping: Callable[[], bool], guard: Guard | None, activity: Activity, times: PhaseTimes
    ):
        self.run, self.stopping, self.guard, self.activity = run, stopping, guard, activity
        self.waiting: Callable[[int], AbstractContextManager[Any]] = nullcontext
        activity.step = run.step
        # Batch sizes. Each has its own program, which another process may still compile when this one runs it.
        self.compiled: set[int] = set()
        self.landed: set[int] = set()
        self.flags = StopFlags(run.mesh) if jax.process_count() > 1 else None
        self.peers = Peers()  # with a token of its own: a notebook makes several loops
        self.times, self.first = times, run.step + 1
        self.rerun = None if guard is None else guard.no_rerun
        self.last_end = time.monotonic()
        self.precision = run.cfg.precision.matmul_precision()

    def read(self, step: int) -> StepInput:
        """The next batch."""
        waiting = self.activity.phase(DATA_WAIT, step)
        with self.times.measure(DATA_WAIT), waiting, jax.set_mesh(self.run.mesh), self.waiting(step):
            batch, consumed = next(self.run.batches)
        fresh = self.times.due(step)
        return StepInput(step, batch, consumed, self.times.take_step(), self.times.account(fresh), fresh)

    def dispatch(self, step_input: StepInput, limits: GuardLimits | None = None) -> Flight:
        """Dispatches a step, with `limits` or else the guard's."""
        if limits is None and self.guard is not None:
            limits = self.guard.limits(step_input.step)
        phase = STEP if step_input.rows in self.compiled else COMPILE
        self.compiled.add(step_input.rows)
        dispatched, running = (
            time.monotonic(),
            self.activity.phase(phase, step_input.step, first=self.is_first_of_size(step_input)),
        )
        with running, jax.set_mesh(self.run.mesh), jax.default_matmul_precision(self.precision):
            control = self.control(step_input, limits)
            more = () if all(part is None for part in control) else (control,)
            if phase == COMPILE and self.peers.count > 1:
                self.compile_together(step_input.batch, *more)
            with jax.profiler.StepTraceAnnotation("train", step_num=step_input.step):
                self.run.state, metrics = self.run.train_step(self.run.state, step_input.batch, *more)
        if self.guard is not None:
            self.rerun = metrics[RERUN]
        return Flight(step_input, limits, metrics, dispatched)

    def compile_together(self, *inputs: Any) -> None:
        """Compile the step, then wait until all processes have compiled it.

        A program connects devices when it first runs, and this has a short limit of its own (30 s with gloo), while
        processes on busy hosts take different times to compile.
        """
        self.run.train_step.lower(self.run.state, *inputs).compile()
        self.peers.agree()

    def control(self, step_input: StepInput, limits: GuardLimits | None) -> StepControl:
        """The inputs of a step besides state and batch."""
        return StepControl(
            None if self.flags is None else self.flags(self.stopping()),
            step_input.account,
            None if self.guard is None or limits is None else self.guard.on_devices(limits),
            self.rerun,
        )

    def land(self, flights: deque[Flight]) -> StepInfo:
        """Removes the oldest step from `flights` and returns its report, after a second run if it needs one."""
        flight = flights.popleft()
        info = self.fetch(flight)
        if self.guard is not None and info.rerun:
            later_inputs = [later.step_input for later in flights]
            flights.clear()
            self.rerun = self.guard.no_rerun
            limits = self.guard.rerun_limits(info.step, info.limits or GuardLimits())
            second = self.fetch(self.dispatch(flight.step_input, limits))
            cause = None
            if not isfinite(second.grad_norm):
                cause = self.nonfinite_weights(flight.step_input.batch, limits, second)
            stop, seconds = info.stop or second.stop, info.seconds + second.seconds
            info = second._replace(first_try=info, stop=stop, seconds=seconds, nonfinite=cause)
            flights.extend(self.dispatch(step_input) for step_input in later_inputs)
        if self.guard is not None and not info.skipped:
            self.guard.spikes.note(info.step, info.loss)
        return info

    def nonfinite_weights(self, batch: Any, limits: GuardLimits | None, info: StepInfo) -> str:
        """A message about the weights whose gradients are not finite, for a step that changed no weight."""
        program, factor = self.run.program, np.float32((limits or GuardLimits()).gradient_factor)
        with jax.set_mesh(self.run.mesh), jax.default_matmul_precision(self.precision):
            nonfinite, observations = jax.device_get(
                program.nonfinite_gradients(self.run.state.inputs, batch, np.float32(info.loss_scale), factor)
            )
        return nonfinite_message(nonfinite, program.declared, measurements(program.observed, observations).values())

    def is_first_of_size(self, step_input: StepInput) -> bool:
        """Whether no step with this batch size has finished yet."""
        return step_input.rows not in self.landed

    def fetch(self, flight: Flight) -> StepInfo:
        """Wait for a step."""
        first = self.is_first_of_size(flight.step_input)
        with self.activity.phase(STEP, flight.step_input.step, first=first), self.times.waiting():
            values = jax.device_get(dict(flight.metrics))
        self.activity.step = flight.step_input.step
        self.landed.add(flight.step_input.rows)
        since, self.last_end = max(self.last_end, flight.dispatched), time.monotonic()
        if flight.step_input.step == self.first:
            self.times.forget()
        extremes, by_process = self.times.received(values.pop(SECONDS, None), flight.step_input.fresh)
        observed = self.run.program.observed
        observations = {path: values.pop(path) for path in observed if path in values}
        numbers = {name: value.item() for name, value in values.items()}
        step_numbers = {name: numbers.pop(name) for name in KEYS}
        return StepInfo(
            flight.step_input.step,
            **step_numbers,
            consumed_samples=flight.step_input.consumed,
            rows=flight.step_input.rows,
            seconds=self.last_end - since,
            stop=bool(numbers.pop(STOP, False)),
            rerun=bool(numbers.pop(RERUN, False)),
            metrics=numbers,
            measured=measurements(observed, observations),
            phases=flight.step_input.phases | extremes,
            limits=flight.limits,
            by_process=by_process,
        )
