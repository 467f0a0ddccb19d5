"""A training job from the run folder to the last line: what `python -m megajax.train` does."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path

import jax

from megajax.checkpoint.boundary import StepBoundary
from megajax.checkpoint.manager import CheckpointManager
from megajax.command_line import end_at_once
from megajax.config.dump import diff_from_defaults, flatten, to_yaml
from megajax.config.errors import UserError
from megajax.job import banner
from megajax.job.compile_log import CompileLog
from megajax.job.data_files import DataFiles
from megajax.job.device_faults import device_fault
from megajax.job.device_memory import compiled_memory, memory_in_use
from megajax.job.ending import Ending, Reporter, Sampler
from megajax.job.failure import FailureLog, says_lost_lines
from megajax.job.hang import Pulse
from megajax.job.hooks import Evaluate, EvaluateTasks
from megajax.job.integrity import Integrity
from megajax.job.local_saves import LocalSaves
from megajax.job.preflight import demand_health
from megajax.job.resume import Resume, stored
from megajax.job.save import Save, SavesFailed
from megajax.job.stop import Stopping
from megajax.job.watch import Watch, advice
from megajax.job.weights import TakeWeights, frozen_fresh
from megajax.mesh.mesh import find_devices
from megajax.metrics.console import open_console
from megajax.metrics.event_log import EventLog
from megajax.metrics.lines import Terms
from megajax.metrics.profile import Profile
from megajax.metrics.record import StepRecord, read_metrics
from megajax.metrics.runfolder import RunFolder
from megajax.metrics.throughput import StepRate, peak_bf16_flops
from megajax.metrics.writers import Writers, open_writers
from megajax.models.facts import flops_of
from megajax.models.protocol import counted
from megajax.resilience.activity import BACKGROUND_SAVE, FINISH, LOGGING, SETUP, Activity
from megajax.resilience.beats import first_line
from megajax.resilience.drills import drilled
from megajax.resilience.exit_codes import NUMERIC_FAULT
from megajax.resilience.signals import Signals, agree
from megajax.training.guard import Guard
from megajax.training.loop import Corruption, Hook, NumericFault, StepInfo, run_steps
from megajax.training.run_config import RunConfig
from megajax.training.session import Run, setup


class Job:
    """A job that is set up; `open` makes it ready to train, `work` trains.

    hooks: what runs between steps, in order. watches: take every step's numbers, in order.
    first: steps done before this attempt. started: of this attempt, by the monotonic clock.
    """

    def __init__(
        self,
        cfg: RunConfig,
        stack: ExitStack,
        *,
        pulse: Pulse,
        started: float,
        failures: FailureLog,
        skip_train: bool,
        verify_data: bool,
        sampler: Sampler | None,
        reporter: Reporter | None,
    ):
        self.cfg, self.stack, self.started, self.pulse = cfg, stack, started, pulse
        self.activity, self.events = pulse.activity, EventLog()
        self.folder = RunFolder.create(cfg.run_dir)
        background = partial(self.activity.phase, BACKGROUND_SAVE)
        self.manager: CheckpointManager = stack.enter_context(
            cfg.checkpoint.build(self.folder.checkpoints, event=self.events.event, background=background)
        )
        if not skip_train:
            pulse.events = self.folder.events
            failures.open(self.folder.events, self.activity, self.events, jax.process_index())
        self.local = LocalSaves(cfg, self.manager, self.activity, self.events.event, skip_train=skip_train)
        self.start = start = stack.enter_context(self.local).start()
        if skip_train and start is None:
            raise UserError(
                f"--skip-train: {cfg.run_dir} has no checkpoint to evaluate; give another --run_dir, or "
                "--checkpoint.load=RUN"
            )
        self.first = 0 if start is None else start[1]
        self.resumed = self.local.own(start)
        self.primary = jax.process_index() == 0
        console = open_console(
            cfg.logging,
            total_steps=cfg.steps,
            start_step=self.first,
            primary=self.primary,
            terms=Terms(counted(cfg.model)),
        )
        self.console = stack.enter_context(console)
        pulse.before_exit = console.release
        signals = Signals(
            announce=console.stop_requested,
            before_exit=pulse.exiting,
            polled=False,
            dump=pulse.dump,
            received=failures.signal,
        )
        self.signals = stack.enter_context(signals)
        self.stop = Stopping(cfg.resilience, pulse, signals, self.first)
        self.compiles = stack.enter_context(CompileLog(console.say, self.events.event))
        self.data = DataFiles(verify=verify_data, say=console.say, progress=self.activity.progress)
        if cfg.resilience.health.before_run:
            demand_health(self.folder.path, console.say, self.events.event)
        with console.ticker("setting up data, model and state"):
            resume = (
                None
                if start is None
                else Resume(*start, own=self.resumed, say=console.say, data=self.data, event=self.events.event)
            )
            sources = cfg.checkpoint.sources() if resume is None else ()
            if sources:
                resume = TakeWeights(sources, console.say)
            self.run = setup(cfg, start=resume)
            self.data.look(self.run.parts.splits)
        self.run.batches = drilled(self.run.batches, cfg.resilience.process_drills(), self.run.step)
        stack.callback(self.stop.close, self.run.close)
        self.cfg = self.run.cfg  # with the layout that fits the devices
        fitted = self.told_layout()
        if resume is None and (line := frozen_fresh(self.run.program)):
            console.say(line)
        self.ending = Ending(
            run=self.run,
            folder=self.folder,
            console=console,
            sampler=sampler,
            reporter=reporter,
            event=self.events.event,
            first=self.first,
            begun=int(self.run.state.consumed_samples),
            started=started,
        )
        self.told_skipped: dict[str, dict[str, int]] = {}
        read = None if start is None else f"step {self.first} of {Path(start[0].folder).parent}"
        if sources:
            read = f"new run, from weights of {', '.join(str(source.run) for source in sources)}"
        console.show("MegaJAX", banner.banner(self.run, read, fitted))

    def told_layout(self) -> list[str]:
        """What people read about a layout that parallel.elastic changed, a line each; events.jsonl gets the same."""
        plan = self.run.parts.replan
        if plan is None or not plan.changes:
            return []
        self.events.event("replan", **plan.event())
        return [plan.text(), *plan.notes]

    def open(self, sources: Mapping[str, str] | None) -> None:
        """Open the writers, and build what runs between steps."""
        cfg, folder, console, signals = self.cfg, self.folder, self.console, self.signals
        plan = self.run.parts.replan
        yaml = to_yaml(cfg, {**(sources or {}), **dict.fromkeys(plan.changes if plan else (), "parallel.elastic")})
        files = open_writers(cfg.logging, folder, start_step=self.first, primary=self.primary, run_config=flatten(cfg))
        self.log = Writers([self.stack.enter_context(files), console])
        if self.primary:
            folder.write_config(yaml, "\n".join(diff_from_defaults(cfg)) + "\n")
        # First, because it is what begins an attempt in events.jsonl; the early events follow, with their own times.
        self.log.event(
            "start",
            step=self.first,
            devices=self.run.mesh.size,
            processes=jax.process_count(),
            setup_seconds=round(time.monotonic() - self.started, 3),
        )
        self.events.open(self.log.event)
        self.tell_skipped()
        signals.polled = True
        self.guard = Guard(cfg.resilience, cfg.precision.floor(), self.run.mesh)
        if self.start is not None and self.resumed:
            self.guard.spikes.restore(self.start[0].meta(self.first).get("spikes", {}))
        show = partial(console.show, f"profile of {cfg.profile.steps}")
        self.profile = Profile(cfg.profile, folder.profile, self.first, lambda summary: show(summary.sections()))
        self.stack.callback(self.profile.close)
        ticker = partial(console.ticker, total=False)
        self.evaluate = Evaluate(cfg, self.log, self.evaluation_stops, ticker, self.stop.waiting)
        self.tasks = EvaluateTasks.of(self.run, self.log, self.evaluate.stopping, ticker)
        spikes = self.guard.spikes
        self.save = Save(
            self.manager,
            StepBoundary(self.manager.peers_for("retries"), self.first),
            self.events.event,
            console.say,
            self.activity,
            lambda: stored(self.run.parts, yaml, self.data) | {"spikes": spikes.state()},
            cfg.steps,
        )
        self.local.meta = self.save.meta
        saves = [self.save, self.local]
        self.integrity = Integrity(self.run, self.stack, self.events.event, console.say, folder.events, saves)
        if warning := self.manager.space_warning(self.run.state):
            console.say(warning)
        # Evaluated before saved: a checkpoint at a step means everything due at that step was done.
        self.hooks: list[Hook] = [*self.integrity.hooks, self.evaluate, *self.task_hooks(), self.save, self.local]
        watch = Watch(self.guard, cfg.precision.floor(), self.log, console.say)
        self.watches: list[Callable[[StepInfo], None]] = [
            lambda info: self.save.committed(),
            lambda info: self.local.committed(),
            watch,
            *self.integrity.watches,
        ]

    def work(self) -> int:
        """Train to the end -> exit code."""
        cfg, last = self.cfg, None
        if self.first >= cfg.steps:
            self.console.say(
                f"nothing to train: --run_dir={cfg.run_dir} is at step {self.first} of --steps={cfg.steps}. "
                f"Give more --steps to go on{_same_decay(cfg)}, another --run_dir to start anew, or --skip-train to "
                "evaluate it"
            )
            if not any(line["step"] == self.first for line in read_metrics(self.folder.metrics)[1]):
                self.finish(None)  # the attempt that trained the last step did not get to it
            return 0
        if self.first:
            self.manager.go_back(self.first)
        self.local.begin(self.run, self.first)
        try:
            for info in self.steps():
                last = info
            self.console.steps_over()
            self.integrity.at_end()
            with self.activity.phase(FINISH):
                self.finish(last)
        except Corruption as fault:
            self.console.steps_over()
            self.console.say(str(fault))
            self.events.event("numeric_fault", message=first_line(fault), exit_code=NUMERIC_FAULT)
            self.pulse.last_beat(first_line(fault), NUMERIC_FAULT)
            self.save.abandon()
            self.ending.failed()
            return NUMERIC_FAULT
        except NumericFault as fault:
            self.console.steps_over()
            self.events.event("numeric_fault", message=str(fault), exit_code=fault.code)
            self.pulse.last_beat(f"numeric fault at {fault}", fault.code)
            self.console.say(
                f"stopped by a numeric fault at {fault}; the weights before it are kept, nothing was saved. "
                f"{advice(fault)}"
            )
            self.save.abandon()
            self.ending.failed()
            return fault.code
        except SavesFailed:
            self.console.steps_over()
            self.ending.failed()
            raise
        return self.stop.code() if self.run.step < cfg.steps else 0

    def last(self) -> int:
        """The step this attempt ends after, unless it is asked to stop."""
        here = self.cfg.resilience.exit_after_steps
        return self.cfg.steps if here is None else min(self.cfg.steps, self.first + here)

    def steps(self) -> Iterator[StepInfo]:
        """Train, log every step, and stop at a signal or a numeric fault."""
        rate = step_rate(self.run)
        infos = run_steps(
            self.run,
            self.last(),
            (self.profile.ends(), *self.hooks, self.profile.begins()),
            self.stopping,
            guard=self.guard,
            tell_every=self.cfg.logging.every,
            activity=self.activity,
            stalled=self.integrity.stalled,
            waiting=self.stop.waiting,
        )
        if (first := self.first_step(infos)) is None:
            return
        self.events.event("first_step", step=first.step, seconds=round(first.seconds, 3))
        if memory := compiled_memory(self.run.mesh.local_devices):
            self.events.event("compiled", **asdict(memory))
            self.console.say(f"{memory.sentence()}{banner.memory_formula(self.run)}")
        for info in chain([first], infos):
            record = step_record(self.run, info, rate, detailed=self.detailed(info.step))
            with self.activity.phase(LOGGING, info.step):  # a file system may not answer
                self.log.log(replace(record, save_failed=self.save.failed is not None))
            for watch in self.watches:
                watch(info)
            yield info

    def task_hooks(self) -> list[EvaluateTasks]:
        """What evaluates on tasks; [] without tasks."""
        return [] if self.tasks is None else [self.tasks]

    def detailed(self, step: int) -> bool:
        """Whether all that layers report in this step is logged."""
        return step % self.cfg.logging.layers_every == 0 or step in (self.first + 1, self.last())

    def tell_skipped(self) -> None:
        """Log the rows that the row sources have left out so far, for the report."""
        skipped = self.run.parts.skipped_rows()
        if skipped != self.told_skipped:
            self.events.event("rows_skipped", splits=skipped)
            self.told_skipped = skipped

    def first_step(self, infos: Iterator[StepInfo]) -> StepInfo | None:
        """Wait for the first step; people see first that it compiles, then that it runs. None: the run stops before."""
        self.signals.when = "after the first step, which is being compiled"
        with self.console.ticker("compiling the train step", total=False) as rename:

            def compiled() -> None:
                rename("first step")
                self.signals.when = "after this step"

            with self.compiles.ready("train_step", compiled):
                first = next(infos, None)
        self.signals.when = "after this step"
        return first

    def stopping(self) -> bool:
        """Whether this process was asked to stop, or its time is up."""
        return self.signals.request is not None or self.out_of_time()

    def evaluation_stops(self) -> bool:
        """Asked before each batch of an evaluation."""
        self.activity.progress()
        return agree(self.signals.request is not None)

    def out_of_time(self) -> bool:
        """Whether the attempt has lasted as long as it may."""
        minutes = self.cfg.resilience.exit_after_minutes
        return minutes is not None and time.monotonic() - self.started >= 60 * minutes

    def reason(self) -> str:
        """Why training ended before its last step."""
        limits = self.cfg.resilience
        if self.signals.request is not None:
            return self.signals.request.signal
        if self.run.step >= self.last():
            return f"resilience.exit_after_steps={limits.exit_after_steps}"
        return f"resilience.exit_after_minutes={limits.exit_after_minutes:g}" if self.out_of_time() else "asked to stop"

    def finish(self, last: StepInfo | None) -> None:
        """Evaluate, draw, sample, and say what the run came to."""
        step, stopped = self.run.step, self.run.step < self.cfg.steps
        self.profile.stop(step)
        wanted = self.cfg.resilience.save_on_signal or self.signals.request is None
        save = stopped and wanted and step > self.first
        if save and self.save.saved != step:
            self.local.before_stop(self.run, step)
            self.save(self.run, step)  # before all else: time may be short
        if not stopped and self.cfg.evaluation.at_end:
            self.evaluate.at_end(self.run, step)
            for tasks in self.task_hooks():
                tasks(self.run, step)
        with self.console.ticker("finishing the checkpoint", total=False):
            self.save.finish(self.run, step, save=save, retry=wanted)
        self.local.finished()
        if stopped:
            kept = f"step {self.save.saved} saved" if self.save.saved == step else "nothing saved"
            self.console.say(
                f"stopped after step {step} of {self.cfg.steps} ({self.reason()}); {kept}; the same command goes on "
                "from there"
            )
            self.events.event("stopped", step=step, saved=self.save.saved, reason=self.reason())
        self.tell_skipped()
        self.events.event("end", step=step)
        if jax.process_index() == 0:
            self.ending.leave_behind(last, self.evaluate.last, self.manager.newest())


def step_record(run: Run, info: StepInfo, rate: StepRate, *, detailed: bool) -> StepRecord:
    """A step as the writers take it."""
    cfg = run.cfg
    return StepRecord(
        step=info.step,
        loss=info.loss,
        grad_norm=info.grad_norm,
        lr=info.lr,
        consumed_samples=info.consumed_samples,
        consumed_tokens=info.consumed_samples * cfg.model.row_positions(),
        rates=rate.rates(info.seconds, info.rows * cfg.model.row_positions()),
        loss_scale=info.loss_scale,
        skipped=info.skipped,
        global_batch_size=info.rows,
        metrics=info.metrics,
        measured=info.measured,
        detailed=detailed,
        phases=info.phases,
        memory=memory_in_use(),
    )


def step_rate(run: Run) -> StepRate:
    """What turns this run's step times into rates."""
    flops = flops_of(run.cfg.model)
    return StepRate(
        devices=run.mesh.size,
        flops_per_token_causal=None if flops is None else flops.causal,
        flops_per_token_full=None if flops is None else flops.full,
        peak_flops=peak_bf16_flops(run.mesh.devices.flat[0].device_kind),
    )


def train(
    cfg: RunConfig,
    *,
    skip_train: bool = False,
    verify_data: bool = False,
    sources: Mapping[str, str] | None = None,
    sampler: Sampler | None = None,
    reporter: Reporter | None = None,
    started: float | None = None,
) -> int:
    """Run the job; returns the exit code. Raises UserError for what is wrong before the first step.

    skip_train: only evaluate the newest checkpoint on the validation and test splits; nothing is written.
    verify_data: look at every byte of the data files, and compare with what was stored.
    sources: setting -> where its value came from, for config.yaml.
    sampler: shows what the model can do at the end of a finished run, where logging.sample asks for it.
    reporter: writes a page about the run at its end, unless logging.report is off.
    started: when this process began, by the monotonic clock; None: now.
    """
    started, failures = time.monotonic() if started is None else started, FailureLog()
    job: Job | None = None
    code = 0
    find_devices()
    with says_lost_lines(lambda: code), ExitStack() as stack:
        pulse = stack.enter_context(Pulse(cfg.run_dir, Activity(), cfg.resilience.watchdog))
        try:
            with pulse.activity.phase(SETUP):
                job = Job(
                    cfg,
                    stack,
                    pulse=pulse,
                    started=started,
                    failures=failures,
                    skip_train=skip_train,
                    verify_data=verify_data,
                    sampler=sampler,
                    reporter=reporter,
                )
            if skip_train:
                Evaluate(job.cfg, job.console, ticker=partial(job.console.ticker, total=False)).at_end(
                    job.run, job.first
                )
                return 0
            job.open(sources)
            code = job.work()
        except BaseException as error:
            fault = device_fault(error, cfg, Path(cfg.run_dir).expanduser())
            if job is not None and fault is None:
                job.local.rescue(job.run, error)
            fault = pulse.failed(fault or error) or fault
            failures.crash(fault or error, error)
            end_at_once(fault or error)
            if fault is not None:
                raise fault from error
            raise
    if job.stop.abandoned:
        job.stop.leave(code)
    return code


def _same_decay(cfg: RunConfig) -> str:
    """What keeps the learning rate of a longer run what it was, where its decay ends with the run."""
    schedule = cfg.schedule
    if schedule.style == "constant" or schedule.decay_steps is not None or schedule.decay_samples is not None:
        return ""
    return f" (and --schedule.decay_steps={cfg.steps}, as the learning rate was planned)"
