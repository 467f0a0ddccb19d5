"""Sets up a training job before its first step, in the order of the parts' dependencies."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import jax

from megajax.checkpoint.config import CheckpointConfig, WeightsConfig
from megajax.checkpoint.local.manager import LocalCheckpoints
from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.reader import CheckpointReader
from megajax.config.errors import UserError
from megajax.data.rows.row_source import RunBatches
from megajax.faults.activity import BACKGROUND_SAVE, Activity, Stage
from megajax.faults.drills import with_process_faults
from megajax.faults.signals import Signals
from megajax.faults.watchdog import WatchdogConfig
from megajax.interop.stored.provenance import Provenance
from megajax.job import banner
from megajax.job.compile_log import CompileLog
from megajax.job.description import Description, describe
from megajax.job.faults.failure import FailureLog
from megajax.job.faults.hang import Pulse
from megajax.job.faults.stop import Stopping
from megajax.job.saves.local_saves import LocalSaves, Start
from megajax.job.start.data_files import DataFiles
from megajax.job.start.equal_files import input_groups
from megajax.job.start.model_files import ModelFiles
from megajax.job.start.preflight import demand_health
from megajax.job.start.resume import Resume
from megajax.job.start.reward_model import load_reward_model
from megajax.job.start.weights import InitialWeights, frozen_weights_warning
from megajax.metrics.console import Console, open_console
from megajax.metrics.event_log import EventLog
from megajax.metrics.lines import Terms
from megajax.metrics.runfolder import RunFolder
from megajax.models.facts import flops_of
from megajax.models.protocol import position_unit
from megajax.training.resolved import Resolved
from megajax.training.run_config import RunConfig
from megajax.training.session import Run, begin


class Attempt:
    """An attempt at a run, from its first moment: the watched process and the run folder, before settings are resolved.

    Attributes:
        job: set once the job is set up.
    """

    def __init__(
        self,
        run_dir: str | Path,
        watchdog: WatchdogConfig | None,
        started: float,
        *,
        skip_train: bool = False,
        verify_data: bool = False,
    ):
        """started: monotonic time at which this attempt began; the others: see `train`."""
        self.started, self.skip_train, self.verify_data = started, skip_train, verify_data
        self.folder = RunFolder(Path(run_dir).expanduser())
        self.activity, self.events, self.failures, self.stack = Activity(), EventLog(), FailureLog(), ExitStack()
        self.pulse = Pulse(run_dir, self.activity, watchdog)
        self.job: JobSetup | None = None

    def __enter__(self) -> Self:
        self.stack.enter_context(self.pulse)
        if not self.skip_train:
            self.pulse.events = self.folder.events
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def open_folder(self, config: CheckpointConfig) -> CheckpointManager:
        """The checkpoints of the run folder, which is created. From now on failures are recorded in it.

        Raises UserError for a folder that can't be written or that another run writes.
        """
        self.activity.stage(Stage.RUN_FOLDER)
        RunFolder.create(self.folder.path)
        self.activity.stage(Stage.CHECKPOINTS)
        background = partial(self.activity.phase, BACKGROUND_SAVE)
        manager = config.build(self.folder.checkpoints, event=self.events.event, background=background)
        self.stack.enter_context(manager)
        if not self.skip_train:
            self.failures.open(self.folder.events, self.activity, self.events, jax.process_index())
        return manager


@dataclass(frozen=True, kw_only=True)
class JobSetup:
    """A job that is ready to write to its run folder and to train."""

    attempt: Attempt
    manager: CheckpointManager
    local: LocalSaves
    start: Start | None
    """The checkpoint that the run starts from; None: a new run."""
    console: Console
    signals: Signals
    stop: Stopping
    compiles: CompileLog
    data: DataFiles
    run: Run
    description: Description
    provenance: Provenance
    """Of the run's weights, for checkpoints."""
    files: ModelFiles | None
    """Written for a new run; None: the run resumes."""

    @property
    def cfg(self) -> RunConfig:
        """The settings, with the layout that fits the devices."""
        return self.run.cfg

    @property
    def activity(self) -> Activity:
        return self.attempt.activity

    @property
    def event(self) -> Callable[..., None]:
        """Logs an event with its fields."""
        return self.attempt.events.event

    @property
    def first(self) -> int:
        """Steps done before this attempt."""
        return 0 if self.start is None else self.start[1]


def set_up_job(resolved: Resolved, attempt: Attempt, manager: CheckpointManager) -> JobSetup:
    """Choose the checkpoint to start from, begin the run, and print the banner.

    Raises UserError for data or checkpoints that don't fit the settings.
    """
    cfg, activity, event, stack = resolved.cfg, attempt.activity, attempt.events.event, attempt.stack
    local = stack.enter_context(LocalSaves(resolved, manager, activity, event, skip_train=attempt.skip_train))
    activity.stage(Stage.CHECKPOINT)
    start = local.start()
    if attempt.skip_train and start is None:
        raise UserError(
            f"--skip-train: {cfg.run_dir} has no checkpoint to evaluate; set another --run_dir, or "
            "--checkpoint.load=RUN"
        )
    console, signals = _open_console_and_signals(attempt, cfg)
    stop = Stopping(cfg.resilience, cfg.steps, attempt.pulse, signals, started=attempt.started)
    compiles = stack.enter_context(CompileLog(console.say, event))
    sources = cfg.checkpoint.sources()
    inputs = input_groups(resolved.settings, sources if start is None else ())
    data = DataFiles(verify=attempt.verify_data, inputs=inputs, say=console.say, progress=activity.progress)
    if cfg.resilience.health.before_run:
        activity.stage(Stage.HEALTH)
        demand_health(attempt.folder.path, console.say, event)
    state: Resume | InitialWeights | None = None
    if start is not None:
        state = _resume(start, local, console, event, data)
    elif sources:
        state = InitialWeights(sources, console.say)
    with console.ticker("setting up data, model and state"):
        load_model, reference = partial(load_reward_model, say=console.say), None
        if isinstance(state, Resume):
            reference = state.reference
        run = begin(resolved, state, activity, reference, load_model)
        if isinstance(run.batches, RunBatches):
            run.reference = run.batches.keep_reference(attempt.folder.path, reference)
        if isinstance(state, Resume):  # perhaps of another step: a restore may find the first one damaged
            start = state.reader, state.step
        stop.begin(0 if start is None else start[1])
        data.read_sums(run.parts.splits)
    run.batches = with_process_faults(run.batches, cfg.resilience.process_drills(), run.step)
    stack.callback(stop.close, run.close)
    if (plan := resolved.replan) is not None and plan.changes:
        event("replan", **plan.event())
    if state is None and (line := frozen_weights_warning(run.program)):
        console.say(line)
    description = describe(run.parts)
    console.show("MegaJAX", banner.banner(run, description, _origin(start, sources)))
    ancestor, files = None if state is None else state.ancestor, None
    if not local.belongs_to_run(start):
        files = ModelFiles(run.cfg, run.parts.tokenizer, ancestor)
    return JobSetup(
        attempt=attempt,
        manager=manager,
        local=local,
        start=start,
        console=console,
        signals=signals,
        stop=stop,
        compiles=compiles,
        data=data,
        run=run,
        description=description,
        provenance=files.provenance if files else ancestor.provenance if ancestor else Provenance(),
        files=files,
    )


def _open_console_and_signals(attempt: Attempt, cfg: RunConfig) -> tuple[Console, Signals]:
    flops = flops_of(cfg.model, cfg.optimizer.trainable)
    terms = Terms(
        position_unit(cfg.model),
        flops=jax.local_devices()[0].platform != "cpu",
        megatron=None if flops is None else flops.megatron_ratio,
        likelihood=cfg.model.first_loss() is None,
    )
    console = open_console(cfg.logging, total_steps=cfg.steps, primary=jax.process_index() == 0, terms=terms)
    attempt.stack.enter_context(console)
    attempt.pulse.before_exit = console.release
    signals = Signals(
        announce=console.stop_requested,
        before_exit=attempt.pulse.exiting,
        polled=False,
        dump=attempt.pulse.dump,
        received=attempt.failures.signal,
    )
    return console, attempt.stack.enter_context(signals)


def _resume(start: Start, local: LocalSaves, console: Console, event: Callable[..., None], data: DataFiles) -> Resume:
    def following() -> tuple[CheckpointReader | LocalCheckpoints, int, bool]:
        # Never None: that a folder has no intact step left is a UserError.
        next_start = cast(Start, local.start())
        return *next_start, local.belongs_to_run(next_start)

    return Resume(*start, local.belongs_to_run(start), say=console.say, data=data, event=event, following=following)


def _origin(start: Start | None, sources: Sequence[WeightsConfig]) -> str:
    """The banner's line about the initial state."""
    if start is not None:
        return f"step {start[1]} of {start[0].run}"
    runs = ", ".join(str(source.run) for source in sources)
    return f"new run, from weights of {runs}" if runs else "new run"
