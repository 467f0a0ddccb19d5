"""The steps of a training job, with the hooks between them and logging."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import chain

from megajax.checkpoint.agree_on_boundary import StepBoundary
from megajax.faults.activity import LOGGING
from megajax.job import banner
from megajax.job.device_memory import compiled_memory, memory_in_use
from megajax.job.hooks import Evaluate, EvaluateTasks
from megajax.job.integrity.integrity import Integrity
from megajax.job.saves.save import Save
from megajax.job.setup import JobSetup
from megajax.job.start.resume import checkpoint_meta
from megajax.job.suspicious_steps import Watch
from megajax.metrics.profile import Profile
from megajax.metrics.record import StepRecord
from megajax.metrics.throughput import StepRate, peak_bf16_flops
from megajax.metrics.writer import Writer
from megajax.processes.xla_options import trim_once
from megajax.training.guarded.guard import Guard
from megajax.training.guarded.loop import Hook, run_guarded_steps
from megajax.training.session import Run
from megajax.training.step_report import StepInfo


class LoggedSteps:
    """Iterating trains; each step is logged before it is yielded.

    Attributes:
        hooks: called between steps when they are due, in this order.
        watches: called with the numbers of every step, in this order.
    """

    def __init__(self, job: JobSetup, log: Writer, config_yaml: str):
        """config_yaml: the settings, for checkpoints."""
        cfg, console, event = job.cfg, job.console, job.event
        self._job, self._log = job, log
        self._skipped_rows: dict[str, dict[str, int]] = {}
        self.log_skipped_rows()
        self._guard = guard = Guard(cfg.resilience, cfg.precision.floor(), job.run.mesh)
        if job.start is not None and job.local.belongs_to_run(job.start):
            guard.spikes.restore(job.start[0].meta(job.first).get("spikes", {}))
            job.run.batches.restore(job.start[0].meta(job.first).get("batches", {}))
        show = partial(console.show, f"profile of {cfg.profile.steps}")
        self.profile = Profile(
            cfg.profile, job.attempt.folder.profile, job.first, lambda summary: show(summary.sections())
        )
        job.attempt.stack.callback(self.profile.close)
        start_profile, stop_profile = self.profile.start_hook(), self.profile.stop_hook()
        ticker = partial(console.ticker, total=False)
        self.evaluate = Evaluate(cfg.evaluation, log, job.stop.requested_anywhere, ticker, job.stop.waiting)
        tasks = EvaluateTasks.of(job.run, log, job.stop.requested_anywhere, ticker)
        self.tasks = [] if tasks is None else [tasks]
        self.save = Save(
            job.manager,
            StepBoundary(job.manager.peers_for("retries"), job.first),
            event,
            console.say,
            job.activity,
            lambda: (
                checkpoint_meta(job.run.parts, config_yaml, job.data, job.provenance)
                | {"spikes": guard.spikes.state(), "batches": job.run.batches.state()}
                | {"reference": job.run.reference and job.run.reference.weights}
            ),
            cfg.steps,
        )
        job.local.meta = self.save.meta
        saves = (self.save, job.local)
        self.integrity = Integrity(job.run, job.attempt.stack, event, console.say, job.attempt.events.append, saves)
        if warning := job.manager.space_warning(job.run.state):
            console.say(warning)
        # Evaluate before saving: a checkpoint of a step implies that all other hooks of that step have run.
        between = (*self.integrity.hooks, self.evaluate, *self.tasks, *saves)
        self.hooks: tuple[Hook, ...] = (stop_profile, *between, start_profile)
        self.watches: tuple[Callable[[StepInfo], None], ...] = (
            lambda info: self.save.committed(),
            lambda info: job.local.committed(),
            Watch(guard, cfg.precision.floor(), log, console.say),
            *self.integrity.watches,
        )

    def begin(self) -> None:
        """Set checkpoints of later steps aside, and begin the local saves."""
        job = self._job
        if job.first:
            job.manager.go_back(job.first)
        job.local.begin(job.run, job.first)

    def train(self) -> StepInfo | None:
        """Train until the last step, a request to stop, or a numeric fault -> the last step of this attempt."""
        last = None
        for info in self:
            last = info
        return last

    def __iter__(self) -> Iterator[StepInfo]:
        """Train as `train`; each step is yielded after it is logged."""
        job, rate = self._job, step_rate(self._job.run)
        infos = run_guarded_steps(
            job.run,
            job.stop.last_step,
            self.hooks,
            job.stop.requested,
            guard=self._guard,
            exchange_every=job.cfg.logging.every,
            activity=job.activity,
            stalled=self.integrity.stalled,
            waiting=job.stop.waiting,
        )
        if (first := first_step(job, infos)) is None:
            return
        job.event("first_step", step=first.step, seconds=round(first.seconds, 3))
        if memory := compiled_memory(job.run.mesh.local_devices):
            job.event("compiled", **asdict(memory))
            on_cpu = job.run.mesh.devices.flat[0].platform == "cpu"
            job.console.say(memory.description() + banner.memory_formula(None if on_cpu else job.description.memory))
        for scheduled in job.run.program.schedules():
            job.event("schedule", **scheduled.to_dict())
            job.console.say(f"schedule of the train step: {scheduled.summary()}")
        for info in chain([first], infos):
            record = step_record(job.run, info, rate, detailed=self._detailed(info.step))
            with job.activity.phase(LOGGING, info.step):  # a file system may not answer
                self._log.log(replace(record, save_failed=self.save.failed is not None))
            for watch in self.watches:
                watch(info)
            yield info

    def log_skipped_rows(self) -> None:
        """Log the rows that the row sources have skipped so far, if the numbers have changed."""
        skipped = self._job.run.parts.skipped_rows()
        if skipped != self._skipped_rows:
            self._job.event("rows_skipped", splits=skipped)
            self._skipped_rows = skipped

    def _detailed(self, step: int) -> bool:
        """Whether all measures of layers are logged in this step."""
        job = self._job
        return step % job.cfg.logging.layers_every == 0 or step in (job.first + 1, job.stop.last_step)


def first_step(job: JobSetup, infos: Iterator[StepInfo]) -> StepInfo | None:
    """Wait for the first step, and show whether it compiles or runs. None: the run stops before."""
    job.signals.when = "after the first step, which is being compiled"
    with job.console.ticker("compiling the train step", total=False) as rename:

        def compiled() -> None:
            rename("first step")
            job.signals.when = "after this step"

        with job.compiles.ready("train_step", compiled):
            first = next(infos, None)
    job.signals.when = "after this step"
    trim_once()
    return first


def step_record(run: Run, info: StepInfo, rate: StepRate, *, detailed: bool) -> StepRecord:
    """The record of a step for the writers."""
    positions = run.cfg.model.row_positions()
    return StepRecord(
        step=info.step,
        loss=info.loss,
        grad_norm=info.grad_norm,
        lr=info.lr,
        consumed_samples=info.consumed_samples,
        consumed_tokens=info.consumed_samples * positions,
        rates=rate.rates(info.seconds, info.rows * positions),
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
    """Converts this run's step times to rates."""
    flops = run.program.summary.flops
    return StepRate(
        devices=run.mesh.size,
        flops_per_token_causal=None if flops is None else flops.causal,
        flops_per_token_full=None if flops is None else flops.full,
        peak_flops=peak_bf16_flops(run.mesh.devices.flat[0].device_kind),
    )
