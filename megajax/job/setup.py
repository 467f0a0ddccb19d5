"""Sets up a training job before its first step, in the order of the parts' dependencies."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax

from megajax.checkpoint.manager import CheckpointManager
from megajax.config.errors import UserError
from megajax.faults.activity import BACKGROUND_SAVE, Activity, Stage
from megajax.faults.drills import with_process_faults
from megajax.faults.signals import Signals
from megajax.interop.conversion.provenance import Provenance
from megajax.job import banner
from megajax.job.compile_log import CompileLog
from megajax.job.faults.failure import FailureLog
from megajax.job.faults.hang import Pulse
from megajax.job.faults.stop import Stopping
from megajax.job.saves.local_saves import LocalSaves, Start
from megajax.job.start.data_files import DataFiles
from megajax.job.start.equal_files import input_groups
from megajax.job.start.model_files import ModelFiles
from megajax.job.start.preflight import demand_health
from megajax.job.start.resume import Resume
from megajax.job.start.weights import InitialWeights, frozen_weights_warning
from megajax.metrics.console import Console, open_console
from megajax.metrics.event_log import EventLog
from megajax.metrics.lines import Terms
from megajax.metrics.runfolder import RunFolder
from megajax.models.protocol import position_unit
from megajax.training.run_config import RunConfig
from megajax.training.session import Run, setup


@dataclass(frozen=True, kw_only=True)
class JobSetup:
    """A job that is ready to write to its run folder and to train."""

    stack: ExitStack
    """Closes everything that the job opens."""
    started: float
    """Monotonic time at which this attempt began."""
    folder: RunFolder
    pulse: Pulse
    events: EventLog
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
        return self.pulse.activity

    @property
    def first(self) -> int:
        """Steps done before this attempt."""
        return 0 if self.start is None else self.start[1]


def set_up_job(
    cfg: RunConfig,
    stack: ExitStack,
    pulse: Pulse,
    failures: FailureLog,
    *,
    started: float,
    skip_train: bool,
    verify_data: bool,
) -> JobSetup:
    """Open the run folder and its checkpoints, set up the run, and print the banner.

    Raises UserError for settings, data or checkpoints that don't fit together.
    """
    activity, events = pulse.activity, EventLog()
    activity.stage(Stage.RUN_FOLDER)
    folder = RunFolder.create(cfg.run_dir)
    activity.stage(Stage.CHECKPOINTS)
    background = partial(activity.phase, BACKGROUND_SAVE)
    manager: CheckpointManager = stack.enter_context(
        cfg.checkpoint.build(folder.checkpoints, event=events.event, background=background)
    )
    if not skip_train:
        failures.open(folder.events, activity, events, jax.process_index())
    local = stack.enter_context(LocalSaves(cfg, manager, activity, events.event, skip_train=skip_train))
    activity.stage(Stage.CHECKPOINT)
    start = local.start()
    if skip_train and start is None:
        raise UserError(
            f"--skip-train: {cfg.run_dir} has no checkpoint to evaluate; set another --run_dir, or "
            "--checkpoint.load=RUN"
        )
    console, signals = _open_console_and_signals(cfg, stack, pulse, failures)
    stop = Stopping(cfg, pulse, signals, started=started)
    compiles = stack.enter_context(CompileLog(console.say, events.event))
    inputs = input_groups(cfg, fresh=start is None)
    data = DataFiles(verify=verify_data, inputs=inputs, say=console.say, progress=activity.progress)
    if cfg.resilience.health.before_run:
        activity.stage(Stage.HEALTH)
        demand_health(folder.path, console.say, events.event)
    with console.ticker("setting up data, model and state"):
        state = _initial_state(cfg, start, local, console, events, data)
        run = setup(cfg, start=state, activity=activity)
        if isinstance(state, Resume):  # perhaps of another step: a restore may find the first one damaged
            start = state.reader, state.step
        stop.begin(0 if start is None else start[1])
        data.read_sums(run.parts.splits)
    run.batches = with_process_faults(run.batches, cfg.resilience.process_drills(), run.step)
    stack.callback(stop.close, run.close)
    changes = _layout_changes(run, events)
    if state is None and (line := frozen_weights_warning(run.program)):
        console.say(line)
    console.show("MegaJAX", banner.banner(run, _origin(cfg, start), changes))
    ancestor, files = None if state is None else state.ancestor, None
    if not local.belongs_to_run(start):
        files = ModelFiles(run.cfg, run.parts.tokenizer, ancestor)
    return JobSetup(
        stack=stack,
        started=started,
        folder=folder,
        pulse=pulse,
        events=events,
        manager=manager,
        local=local,
        start=start,
        console=console,
        signals=signals,
        stop=stop,
        compiles=compiles,
        data=data,
        run=run,
        provenance=files.provenance if files else ancestor.provenance if ancestor else Provenance(),
        files=files,
    )


def _open_console_and_signals(
    cfg: RunConfig, stack: ExitStack, pulse: Pulse, failures: FailureLog
) -> tuple[Console, Signals]:
    console = open_console(
        cfg.logging,
        total_steps=cfg.steps,
        primary=jax.process_index() == 0,
        terms=Terms(position_unit(cfg.model), flops=jax.local_devices()[0].platform != "cpu"),
    )
    stack.enter_context(console)
    pulse.before_exit = console.release
    signals = Signals(
        announce=console.stop_requested,
        before_exit=pulse.exiting,
        polled=False,
        dump=pulse.dump,
        received=failures.signal,
    )
    return console, stack.enter_context(signals)


def _initial_state(
    cfg: RunConfig, start: Start | None, local: LocalSaves, console: Console, events: EventLog, data: DataFiles
) -> Resume | InitialWeights | None:
    """The source of the initial state; None for a new run."""

    def following() -> tuple[Any, int, bool]:
        # Never None: that a folder has no intact step left is a UserError.
        next_start = cast(Start, local.start())
        return *next_start, local.belongs_to_run(next_start)

    if start is not None:
        same_run = local.belongs_to_run(start)
        return Resume(*start, same_run, say=console.say, data=data, event=events.event, following=following)
    sources = cfg.checkpoint.sources()
    return InitialWeights(sources, console.say) if sources else None


def _origin(cfg: RunConfig, start: Start | None) -> str | None:
    """The banner's line about the initial state."""
    if start is not None:
        return f"step {start[1]} of {Path(start[0].folder).parent}"
    runs = ", ".join(str(source.run) for source in cfg.checkpoint.sources())
    return f"new run, from weights of {runs}" if runs else None


def _layout_changes(run: Run, events: EventLog) -> list[str]:
    """Lines on how parallel.elastic changed the layout; also logged as the event `replan`."""
    plan = run.parts.replan
    if plan is None or not plan.changes:
        return []
    events.event("replan", **plan.event())
    return [plan.text(), *plan.notes]
