"""A training job from the run folder to the last line: what `python -m megajax.train` does."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NoReturn

import jax

from megajax.checkpoint.checkpoint_manager import CheckpointManager
from megajax.command_line.parser import end_at_once
from megajax.config.class_references import demand_packages
from megajax.config.dump import diff_from_defaults, to_yaml
from megajax.data.preprocessing.missing_token_files import demand_files
from megajax.faults.activity import SETUP, START, Stage
from megajax.faults.pulse import Pulse
from megajax.faults.signals import agree
from megajax.job.device_faults import device_fault
from megajax.job.ending import Ending, Reporter, Sampler
from megajax.job.hooks import Evaluate
from megajax.job.saves.save import SavesFailed
from megajax.job.setup import JobSetup, JobStart, set_up_job
from megajax.job.start.compile_cache import use_cache
from megajax.job.steps import LoggedSteps
from megajax.mesh.mesh import find_devices
from megajax.metrics.event_hook import event_hook
from megajax.metrics.line_file import FileDeleted, report_lost_lines
from megajax.metrics.writer import Writers
from megajax.metrics.writers import open_writers
from megajax.planning.resolve import resolve
from megajax.processes.peers import Peers
from megajax.processes.xla_options import XlaConfig
from megajax.training.guarded.guard import Corruption, NumericFault
from megajax.training.resolved import Resolved
from megajax.training.run_config import RunConfig


def train(
    cfg: RunConfig,
    *,
    skip_train: bool = False,
    verify_data: bool = False,
    sources: Mapping[str, str] | None = None,
    sampler: Sampler | None = None,
    reporter: Reporter | None = None,
    connect: Callable[[], object] | None = None,
    patience: float = 0.0,
    started: float | None = None,
) -> int:
    """Run the job; returns the exit code. Raises UserError for errors before the first step.

    skip_train: only evaluate the newest checkpoint on the validation and test splits; nothing is written.
    verify_data: compare every byte of the data files with the stored checksums.
    sources: setting -> the source of its value, for config.yaml.
    sampler: returns a sample of the trained model, if logging.sample is on.
    reporter: writes a report of the run at its end, unless logging.report is off.
    connect: connects this process with the others of its run; None: they are connected, and the caller has set up the
        compile cache.
    patience: seconds that `connect` waits for the other processes.
    started: monotonic time at which this process began; None: now.
    """
    started = time.monotonic() if started is None else started
    attempt, code = (
        JobStart(cfg.run_dir, cfg.resilience.watchdog, started, skip_train=skip_train, verify_data=verify_data),
        0,
    )
    with report_lost_lines(lambda: code), attempt:
        try:
            demand_packages(cfg)
            devices = connect_devices(attempt.pulse, connect, patience, cfg.xla)
            with attempt.activity.phase(SETUP):
                demand_files(cfg.data, cfg.tokenizer)
                resolved = resolve(cfg, devices)
                manager = attempt.open_folder(cfg.checkpoint)  # a refused config leaves no folder
                if jax.process_index() == 0 and not skip_train:
                    attempt.stack.enter_context(event_hook(attempt.folder.path, cfg.logging.on_event))
            changed = () if resolved.replan is None else resolved.replan.changes
            config_yaml = to_yaml(resolved.cfg, {**(sources or {}), **dict.fromkeys(changed, "parallel.elastic")})
            code = run_attempt(resolved, attempt, manager, config_yaml, sampler, reporter)
        except BaseException as error:
            fail(error, cfg, attempt)
    if attempt.job is not None and attempt.job.stop.abandoned:
        attempt.job.stop.leave(code)
    return code


def connect_devices(
    pulse: Pulse, connect: Callable[[], object] | None, patience: float, xla: XlaConfig
) -> list[jax.Device]:
    """Connect the processes, then their devices, in stages with their own limits -> all devices. See `train`."""
    activity = pulse.activity
    with activity.phase(START):
        if connect is not None:
            activity.stage(Stage.CONNECT, allowance=patience)
            connect()
        pulse.peers.join()
        activity.stage(Stage.DEVICES)
        devices = find_devices()
        activity.stage(Stage.FIRST_COLLECTIVE)
        # gloo waits only 30 s for a process that is still finding its devices.
        Peers("devices").agree()
        # The communicator of all devices is created here, so that a network that does not connect is known at once.
        agree(False)
        if connect is not None:
            activity.stage(Stage.COMPILE_CACHE)
            use_cache(xla)
    return devices


def run_attempt(
    resolved: Resolved,
    attempt: JobStart,
    manager: CheckpointManager,
    config_yaml: str,
    sampler: Sampler | None,
    reporter: Reporter | None,
) -> int:
    """Set up the job and train, or only evaluate with `attempt.skip_train` -> exit code."""
    with attempt.activity.phase(SETUP):
        attempt.job = job = set_up_job(resolved, attempt, manager)
    if attempt.skip_train:
        Evaluate(job.cfg.evaluation, job.console, ticker=partial(job.console.ticker, total=False)).at_end(
            job.run, job.first
        )
        return 0
    with attempt.activity.phase(SETUP):
        attempt.activity.stage(Stage.LOGS)
        steps = LoggedSteps(job, open_log(job, config_yaml), config_yaml)
        if job.first < job.cfg.steps:
            steps.begin()
    ending = Ending(job, steps, sampler, reporter)
    if job.first >= job.cfg.steps:
        return ending.nothing_to_train()
    try:
        return ending.finish(steps.train())
    except (Corruption, NumericFault) as fault:
        return ending.numeric_fault(fault)
    except SavesFailed:
        ending.failed()
        raise


def open_log(job: JobSetup, config_yaml: str) -> Writers:
    """Open the files of the run folder and log the event `start`; from now on a stopped run saves."""
    primary = jax.process_index() == 0
    settings = job.run.parts.resolved.settings
    files = open_writers(
        job.cfg.logging,
        job.attempt.folder,
        start_step=job.first,
        attempt=job.attempt.events.attempt,
        primary=primary,
        run_config=settings,
    )
    log = Writers([job.attempt.stack.enter_context(files), job.console])
    if primary:
        job.attempt.folder.write_config(config_yaml, "\n".join(diff_from_defaults(job.cfg)) + "\n")
        if job.files is not None and (line := job.files.write(job.attempt.folder.path)):
            job.console.say(line)
    # First, because `start` begins an attempt in events.jsonl; earlier events follow, with their own times.
    log.event(
        "start",
        step=job.first,
        devices=job.run.mesh.size,
        device_kind=job.run.mesh.devices.flat[0].device_kind,
        processes=jax.process_count(),
        setup_seconds=round(time.monotonic() - job.attempt.started, 3),
    )
    job.attempt.events.open(log.event)
    job.signals.polled = True
    return log


def fail(error: BaseException, cfg: RunConfig, attempt: JobStart) -> NoReturn:
    """Save if possible, record the error for the launcher and the report, and raise it, with an explanation if known.

    With several processes, this one exits here.
    """
    fault, job = device_fault(error, cfg, attempt.folder.path), attempt.job
    if job is not None and fault is None:
        job.local.rescue(job.run, error)
    fault = attempt.pulse.failed(fault or error) or fault
    if not isinstance(error, FileDeleted) or attempt.folder.events.exists():  # a deleted folder stays so
        attempt.failures.crash(fault or error, error)
    end_at_once(fault or error)
    if fault is not None:
        raise fault from error
    raise error
