"""Sets up a training job before its first step, in the order of the parts' dependencies."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import jax

from megajax.checkpoint.checkpoint_manager import CheckpointManager
from megajax.checkpoint.config import CheckpointConfig, WeightsConfig
from megajax.checkpoint.local.local_checkpoints import LocalCheckpoints
from megajax.checkpoint.reader import CheckpointReader
from megajax.config.errors import UserError
from megajax.data.chat.choose_template import described
from megajax.data.rows.row_source import RunBatches
from megajax.faults.activity import BACKGROUND_SAVE, START, Activity, Stage
from megajax.faults.drills import with_process_faults
from megajax.faults.failure_log import FailureLog
from megajax.faults.pulse import Pulse
from megajax.faults.signals import Signals
from megajax.faults.stopping import Stopping
from megajax.faults.watchdog import WatchdogConfig
from megajax.interop.weights.provenance import Provenance
from megajax.job import banner
from megajax.job.compile_log import CompileLog
from megajax.job.description import RunFigures, describe
from megajax.job.saves.local_saves import LocalSaves, Start
from megajax.job.start.equal_inputs import DataFiles, input_groups
from megajax.job.start.model_files import ModelFiles
from megajax.job.start.resume import Resume
from megajax.job.start.weights import InitialWeights, frozen_weights_warning, load_reward_model
from megajax.machine.before_run import demand_health
from megajax.metrics.config import LoggingConfig
from megajax.metrics.console import Console, open_console
from megajax.metrics.event_log import EventLog, next_attempt
from megajax.metrics.lines import Terms
from megajax.metrics.run_folder import RunFolder
from megajax.models.facts import flops_of
from megajax.models.protocol import ModelConfig, position_unit
from megajax.training.resolved import Resolved
from megajax.training.run_config import RunConfig
from megajax.training.session import Run, begin


class JobStart:
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
        self.activity, self.events, self.stack = Activity(), EventLog(self.folder.events), ExitStack()
        self.failures = FailureLog(self.activity, lambda: self.events.opened)
        self.pulse = Pulse(run_dir, self.activity, watchdog)
        self.job: JobSetup | None = None

    def __enter__(self) -> Self:
        self.stack.enter_context(self.pulse)
        # Before the processes connect: none of them has written an event of this attempt yet.
        with self.activity.phase(START):
            self.events.attempt = self.pulse.attempt = next_attempt(self.folder.events)
        if not self.skip_train:
            self.pulse.record = self.events.append
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
            self.failures.open(self.events.append, jax.process_index(), jax.process_count())
        return manager


@dataclass(frozen=True, kw_only=True)
class JobSetup:
    """A job that is ready to write to its run folder and to train."""

    attempt: JobStart
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
    description: RunFigures
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
        return _steps_before(self.start)


def set_up_job(resolved: Resolved, attempt: JobStart, manager: CheckpointManager) -> JobSetup:
    """Choose the checkpoint to start from, begin the run, and print the banner.

    Raises UserError for data or checkpoints that don't fit the settings.
    """
    cfg, event, sources = resolved.cfg, attempt.events.event, resolved.cfg.checkpoint.sources()
    local, start = _choose_checkpoint(resolved, attempt, manager)
    console = _open_console(attempt, cfg.logging, cfg.steps, _terms(cfg.model, cfg.optimizer.trainable))
    signals = _handle_signals(attempt, console)
    stop = Stopping(cfg.resilience, cfg.steps, attempt.pulse, signals, started=attempt.started)
    compiles = attempt.stack.enter_context(CompileLog(console.say, event))
    inputs = input_groups(resolved.settings, sources if start is None else ())
    data = DataFiles(verify=attempt.verify_data, inputs=inputs, say=console.say, progress=attempt.activity.progress)
    if cfg.resilience.health.before_run:
        attempt.activity.stage(Stage.HEALTH)
        demand_health(attempt.folder.path, console.say, event)
    state = _initial_state(start, sources, local, console.say, event, data)
    with console.ticker("setting up data, model and state"):
        run = _begin_run(resolved, attempt, state, console.say)
        if isinstance(state, Resume):  # perhaps of another step: a restore may find the first one damaged
            start = state.reader, state.step
        stop.begin(_steps_before(start))
        data.read_sums(run.parts.splits)
    run.batches = with_process_faults(run.batches, cfg.resilience.process_drills(), run.steps_done)
    attempt.stack.callback(stop.close, run.close)
    _tell_what_changed(run, state, console.say, event)
    description = describe(run.parts)
    console.show("MegaJAX", banner.banner(run, description, _origin(start, sources)))
    ancestor = None if state is None else state.ancestor
    files = None if local.belongs_to_run(start) else ModelFiles(run.cfg, run.parts.tokenizer, ancestor)
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


def _choose_checkpoint(
    resolved: Resolved, attempt: JobStart, manager: CheckpointManager
) -> tuple[LocalSaves, Start | None]:
    """The local saves, and the checkpoint that the run starts from. Raises UserError if there is none to evaluate."""
    event, record, skip_train = attempt.events.event, attempt.events.append, attempt.skip_train
    local = LocalSaves(resolved, manager, attempt.activity, event, record=record, skip_train=skip_train)
    attempt.stack.enter_context(local)
    attempt.activity.stage(Stage.CHECKPOINT)
    start = local.start()
    if skip_train and start is None:
        raise UserError(
            f"--skip-train: {resolved.cfg.run_dir} has no checkpoint to evaluate; set another --run_dir, or "
            "--checkpoint.load=RUN"
        )
    return local, start


def _terms(model: ModelConfig, trainable: tuple[str, ...]) -> Terms:
    """The terms of the console's lines."""
    flops = flops_of(model, trainable)
    return Terms(
        position_unit(model),
        flops=jax.local_devices()[0].platform != "cpu",
        megatron=None if flops is None else flops.megatron_ratio,
        likelihood=model.first_loss() is None,
    )


def _open_console(attempt: JobStart, logging: LoggingConfig, steps: int, terms: Terms) -> Console:
    console = open_console(logging, total_steps=steps, primary=jax.process_index() == 0, terms=terms)
    attempt.pulse.before_exit = console.release
    return attempt.stack.enter_context(console)


def _handle_signals(attempt: JobStart, console: Console) -> Signals:
    signals = Signals(
        announce=console.stop_requested,
        before_exit=attempt.pulse.exiting,
        polled=False,
        dump=attempt.pulse.dump,
        received=attempt.failures.signal,
    )
    return attempt.stack.enter_context(signals)


def _initial_state(
    start: Start | None,
    sources: Sequence[WeightsConfig],
    local: LocalSaves,
    say: Callable[[str], None],
    event: Callable[..., None],
    data: DataFiles,
) -> Resume | InitialWeights | None:
    """What gives the run its state: a checkpoint, or weights of other runs; None: fresh weights."""
    if start is None:
        return InitialWeights(sources, say) if sources else None

    def following() -> tuple[CheckpointReader | LocalCheckpoints, int, bool]:
        # Never None: that a folder has no intact step left is a UserError.
        next_start = cast(Start, local.start())
        return *next_start, local.belongs_to_run(next_start)

    return Resume(*start, local.belongs_to_run(start), say=say, data=data, event=event, following=following)


def _begin_run(
    resolved: Resolved, attempt: JobStart, state: Resume | InitialWeights | None, say: Callable[[str], None]
) -> Run:
    """The run with its initial state, and the rows of its reference model."""
    reference = state.reference if isinstance(state, Resume) else None
    run = begin(resolved, state, attempt.activity, reference, partial(load_reward_model, say=say))
    if isinstance(run.batches, RunBatches):
        run.reference = run.batches.keep_reference(attempt.folder.path, reference)
    return run


def _tell_what_changed(
    run: Run, state: Resume | InitialWeights | None, say: Callable[[str], None], event: Callable[..., None]
) -> None:
    """Another layout than that of the settings, frozen weights that are fresh, and the template of conversations."""
    if (plan := run.parts.resolved.replan) is not None and plan.changes:
        event("replan", **plan.event())
    frozen = frozen_weights_warning(run.program) if state is None else ""
    for line in filter(None, (frozen, described(run.cfg.data, run.cfg.tokenizer)[1])):
        say(line)


def _steps_before(start: Start | None) -> int:
    """Steps done before an attempt."""
    return 0 if start is None else start[1]


def _origin(start: Start | None, sources: Sequence[WeightsConfig]) -> str:
    """The banner's line about the initial state."""
    if start is not None:
        return f"step {start[1]} of {start[0].run}"
    runs = ", ".join(str(source.run) for source in sources)
    return f"new run, from weights of {runs}" if runs else "new run"
