"""The end of a job: its last checkpoint and evaluations, the page, a sample, and the totals; or a numeric fault."""

import time
from collections.abc import Callable
from pathlib import Path

import jax

from megajax.job.device_memory import peak_memory, size
from megajax.job.setup import JobSetup
from megajax.job.steps import Steps
from megajax.job.watch import advice
from megajax.metrics.banner import Section
from megajax.metrics.goodput import Goodput
from megajax.metrics.layer_history import plot_layers
from megajax.metrics.plot import plot_loss
from megajax.metrics.record import read_metrics
from megajax.models.protocol import counted, ids_below
from megajax.resilience.beats import first_line
from megajax.resilience.exit_codes import NUMERIC_FAULT
from megajax.text import count, duration, skipped_rows
from megajax.training.loop import Corruption, NumericFault, StepInfo
from megajax.training.run_config import RunConfig
from megajax.training.session import Run

type Sampler = Callable[[Run, Path], str | None]
"""What shows the work of a trained model, None for nothing: `inference.sample.sample`.

Handed in by the front door, for training and inference never import each other."""

type Reporter = Callable[[Path, bool], tuple[str | None, Goodput | None]]
"""Run folder, and whether to leave a page there -> what to say of the page, and the goodput of the run:
`reporting.write.close_run`; from the front door too."""


class Ending:
    """The end of an attempt at a run: what is saved, evaluated, drawn and said."""

    def __init__(self, job: JobSetup, steps: Steps, sampler: Sampler | None, reporter: Reporter | None):
        self.run, self.folder, self.console, self._event = job.run, job.folder, job.console, job.events.event
        self._job, self._steps, self._sampler, self._reporter = job, steps, sampler, reporter
        self._consumed = int(job.run.state.consumed_samples)
        """Rows consumed before this attempt."""

    def finish(self, last: StepInfo | None) -> None:
        """Save, evaluate, draw, sample, and say what the run came to. last: the last step of this attempt."""
        job, steps, save, cfg = self._job, self._steps, self._steps.save, self.run.cfg
        step, stopped = self.run.step, self.run.step < cfg.steps
        steps.profile.stop(step)
        may_save = cfg.resilience.save_on_signal or job.signals.request is None
        save_now = stopped and may_save and step > job.first
        if save_now and save.saved != step:
            job.local.before_stop(self.run, step)
            save(self.run, step)  # before all else: time may be short
        if not stopped and cfg.evaluation.at_end:
            steps.evaluate.at_end(self.run, step)
            for tasks in steps.tasks:
                tasks(self.run, step)
        with self.console.ticker("finishing the checkpoint", total=False):
            save.finish(self.run, step, save=save_now, retry=may_save)
        job.local.finished()
        if stopped:
            kept, reason = f"step {step} saved" if save.saved == step else "nothing saved", job.stop.reason(step)
            self.console.say(
                f"stopped after step {step} of {cfg.steps} ({reason}); {kept}; the same command goes on from there"
            )
            self._event("stopped", step=step, saved=save.saved, reason=reason)
        steps.log_skipped_rows()
        self._event("end", step=step)
        if jax.process_index() == 0:
            self._summarize(last)

    def nothing_to_train(self) -> None:
        """The run has all its steps already."""
        cfg, first = self.run.cfg, self._job.first
        self.console.say(
            f"nothing to train: --run_dir={cfg.run_dir} is at step {first} of --steps={cfg.steps}. "
            f"Give more --steps to go on{_same_decay(cfg)}, another --run_dir to start anew, or --skip-train to "
            "evaluate it"
        )
        if not any(line["step"] == first for line in read_metrics(self.folder.metrics)[1]):
            self.finish(None)  # the attempt that trained the last step did not get to it

    def numeric_fault(self, fault: NumericFault | Corruption) -> int:
        """Training can't go on with these numbers: save nothing -> exit code."""
        self.console.steps_over()
        if isinstance(fault, Corruption):
            code, message, beat, line = NUMERIC_FAULT, first_line(fault), first_line(fault), str(fault)
        else:
            code, message, beat = fault.code, str(fault), f"numeric fault at {fault}"
            line = (
                f"stopped by a numeric fault at {fault}; the weights before it are kept, nothing was saved. "
                f"{advice(fault)}"
            )
        self._event("numeric_fault", message=message, exit_code=code)
        self._job.pulse.last_beat(beat, code)
        self.console.say(line)
        self._steps.save.abandon()
        self.failed()
        return code

    def failed(self) -> None:
        """The page and the goodput of a run that has failed."""
        self.console.steps_over()
        if (good := self._report()) is not None:
            self.console.say(f"goodput: {good.summary()}")

    def _summarize(self, last: StepInfo | None) -> None:
        """The loss curve, the page, a sample, and the totals."""
        if self.run.cfg.logging.plot:
            self._plot()
        good = self._report()
        self._sample()
        self.console.show("done" if self.run.step >= self.run.cfg.steps else "stopped", self._totals(last, good))

    def _plot(self) -> None:
        """The loss curve, and what layers reported."""
        title = f"{self.folder.path.name}: {self.run.step:,} steps"
        vocabulary = ids_below(self.run.cfg.model)
        try:
            self.console.say(plot_loss(self.folder.metrics, self.folder.loss_plot, title=title, vocabulary=vocabulary))
            if drawn := plot_layers(self.folder.metrics, self.folder.layers, self.folder.layers_plot):
                self.console.say(drawn)
        except OSError as error:
            self.console.say(f"no plot: {error.strerror or error}")

    def _sample(self) -> None:
        """What the model can do now: only after the last step, and by a single process. No run fails for want of it."""
        wanted = self.run.cfg.logging.sample and self.run.step >= self.run.cfg.steps
        if self._sampler is None or not wanted or jax.process_count() > 1:
            return
        try:
            with self.console.ticker("sampling", total=False):
                text = self._sampler(self.run, self.folder.path)
        except Exception as error:
            text = f"no sample: {type(error).__name__}: {error}"
        if text:
            self.console.say(text)

    def _totals(self, last: StepInfo | None, good: Goodput | None) -> list[Section]:
        """What the run came to. good: over all attempts."""
        step, first, seconds = self.run.step, self._job.first, time.monotonic() - self._job.started
        newest, rows = self._job.manager.newest(), int(self.run.state.consumed_samples) - self._consumed
        done = rows * self.run.cfg.model.row_positions()
        work = [
            ("steps", f"{step:,}" + (f" ({step - first:,} in this attempt)" if first else "")),
            (counted(self.run.cfg.model), count(done)),
            ("wall time", duration(seconds)),
            (f"{counted(self.run.cfg.model)}/s, all included", count(done / seconds)),
        ]
        if good is not None:
            work.append(("goodput", good.summary()))
        if (peak := peak_memory()) is not None:
            work.append(("peak memory of a device", f"{size(peak[0])} of {size(peak[1])}"))
        if skipped := self.run.parts.skipped_rows():
            work.append(("rows skipped", skipped_rows(skipped)))
        losses = [("train loss", f"{last.loss:.4f}")] if last is not None else []
        for split, metrics in self._steps.evaluate.last.items():
            losses += [(f"{split} {name.replace('_', ' ')}", f"{value:.4f}") for name, value in metrics.items()]
        kept = [] if newest is None else [("checkpoint", f"{self.folder.checkpoints} (step {newest})")]
        files = [
            path
            for path in (self.folder.metrics, self.folder.loss_plot, self.folder.layers_plot, self.folder.report)
            if path.exists()
        ]
        kept.append(("files", "\n".join(map(str, files))))
        return [section for section in (("work", work), ("loss", losses), ("kept", kept)) if section[1]]

    def _report(self) -> Goodput | None:
        """The page about the run, and its goodput; a run that has trained does not fail for want of them."""
        if self._reporter is None or jax.process_index():
            return None
        try:
            said, good = self._reporter(self.folder.path, self.run.cfg.logging.report)
        except Exception as error:
            self.console.say(f"no report: {error}; python -m megajax.report {self.folder.path} tries again")
            return None
        if said:
            self.console.say(said)
        if good is not None:
            self._event("goodput", **good.fields())
        return good


def _same_decay(cfg: RunConfig) -> str:
    """The setting that keeps the learning rate of a longer run what it was, where its decay ends with the run."""
    schedule = cfg.schedule
    if schedule.style == "constant" or schedule.decay_steps is not None or schedule.decay_samples is not None:
        return ""
    return f" (and --schedule.decay_steps={cfg.steps}, as the learning rate was planned)"
