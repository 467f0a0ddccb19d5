"""The end of a job: the last checkpoint and evaluations, the report, a sample and the totals; or a numeric fault."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax

from megajax.config.errors import first_line
from megajax.data.rows.row_source import RunBatches
from megajax.display.banner import Section
from megajax.display.text import count, duration, skipped_rows
from megajax.faults.activity import FINISH
from megajax.faults.attempt_end import ATTEMPT_END, end_of_run, stopped_end
from megajax.faults.exit_codes import NUMERIC_FAULT, SUCCESS
from megajax.job.device_memory import peak_memory, size
from megajax.job.setup import JobSetup
from megajax.job.steps import LoggedSteps
from megajax.job.suspicious_steps import advice
from megajax.metrics.line_file import FileDeleted
from megajax.metrics.plots import plot_layers, plot_loss
from megajax.metrics.record import read_metrics
from megajax.metrics.throughput import Goodput
from megajax.optim.config import ScheduleConfig
from megajax.processes.peers import Peers
from megajax.storage.write_errors import write_fault
from megajax.training.guarded.guard import Corruption, NumericFault
from megajax.training.session import Run
from megajax.training.step_report import StepInfo

type Sampler = Callable[[Run, Path], str | None]
"""Returns a text sample of a trained model, or None: `inference.samples.sample`.

Passed in by the front door, because training and inference never import each other."""

type Reporter = Callable[[Path, bool], tuple[str | None, Goodput | None]]
"""(Run folder, whether to write the report) -> (a line about the report, the goodput of the run):
`reporting.write.close_run`; also passed in by the front door."""


class Ending:
    """The end of an attempt at a run: saves, evaluates, plots and summarizes."""

    def __init__(self, job: JobSetup, steps: LoggedSteps, sampler: Sampler | None, reporter: Reporter | None):
        self.run, self.folder, self.console, self._event = job.run, job.attempt.folder, job.console, job.event
        self._job, self._steps, self._sampler, self._reporter = job, steps, sampler, reporter
        self._consumed = int(job.run.state.consumed_samples)
        """Rows consumed before this attempt."""
        self._phase = partial(job.activity.phase, FINISH)

    def finish(self, last: StepInfo | None) -> int:
        """Save, evaluate, plot, sample, and print the totals -> exit code. last: the last step of this attempt.

        Raises Corruption if the copies of the state differ.
        """
        self.console.steps_over()
        with self._phase():
            self._steps.integrity.at_end()
            self._finish(last)
        return self._job.stop.code() if self.run.steps_done < self.run.cfg.steps else 0

    def _finish(self, last: StepInfo | None) -> None:
        job, steps, save, cfg = self._job, self._steps, self._steps.save, self.run.cfg
        step, stopped = self.run.steps_done, self.run.steps_done < cfg.steps
        steps.profile.stop(step)
        may_save = not job.stop.agree_on_signal() or cfg.resilience.save_on_signal
        save_now = stopped and may_save and step > job.first
        if save_now and save.saved != step:
            job.local.before_stop(self.run, step)
            save(self.run, step)  # first: time may be short
        if not stopped and cfg.evaluation.ends_with_one():
            steps.evaluate.at_end(self.run, step)
            for tasks in steps.tasks:
                tasks(self.run, step)
        with self.console.ticker("finishing the checkpoint", total=False):
            save.finish(self.run, step, save=save_now, retry=may_save)
        job.local.finished()
        if stopped:
            saved, reason = f"step {step} saved" if save.saved == step else "nothing saved", job.stop.reason(step)
            self.console.say(
                f"stopped after step {step} of {cfg.steps} ({reason}); {saved}; the same command resumes the run"
            )
            self._event("stopped", step=step, saved=save.saved, reason=reason)
        steps.log_skipped_rows()
        if jax.process_index() == 0:
            self.folder.demand_config()
            self._demand_checkpoint(save.saved)
        self._event("end", step=step)
        end = stopped_end(step, save.saved, job.stop.reason(step), job.stop.code()) if stopped else None
        self._event(ATTEMPT_END, **(end or end_of_run(SUCCESS, "done", "done", step)))
        if jax.process_index() == 0:
            self._summarize(last)

    def _demand_checkpoint(self, step: int | None) -> None:
        """Raises UserError if the checkpoint that was saved last no longer exists. step: its step."""
        newest = self._job.manager.newest()
        if step is not None and (newest is None or newest < step):
            raise FileDeleted(
                f"the checkpoint of step {step} in {self.folder.checkpoints} was deleted while the run trained"
                f"{'; there is no other' if newest is None else f'; the newest is of step {newest}'}"
            )

    def nothing_to_train(self) -> int:
        """The run has all its steps already -> exit code."""
        with self._phase():
            self._evaluate_again()
        return 0

    def _evaluate_again(self) -> None:
        """Say what can be done with a finished run, and evaluate it if the attempt that finished it did not."""
        cfg, first = self.run.cfg, self._job.first
        decay = _same_decay(cfg.schedule, cfg.steps)
        self.console.say(
            f"nothing to train: --run_dir={cfg.run_dir} is at step {first} of --steps={cfg.steps}. "
            f"Increase --steps to continue{decay}, set another --run_dir for a new run, or --skip-train to "
            "evaluate this one"
        )
        # Process 0 writes the file and reads it for all, because `finish` evaluates.
        evaluated = jax.process_index() == 0 and any(
            line["step"] == first for line in read_metrics(self.folder.metrics)[1]
        )
        if not Peers("ending").broadcast(evaluated):
            self._finish(None)  # the attempt that trained the last step ended before it could
        else:
            self._event(ATTEMPT_END, **end_of_run(SUCCESS, "done", "nothing to train", first))

    def numeric_fault(self, fault: NumericFault | Corruption) -> int:
        """Training can't continue with these numbers: save nothing -> exit code."""
        if isinstance(fault, Corruption):
            code, message, beat, line = NUMERIC_FAULT, first_line(fault), first_line(fault), str(fault)
        else:
            code, message, beat = fault.code, str(fault), f"numeric fault at {fault}"
            line = (
                f"stopped by a numeric fault at {fault}; nothing was saved, earlier checkpoints are kept. "
                f"{advice(fault)}"
            )
        self.console.steps_over()
        with self._phase():
            self._event("numeric_fault", message=message, exit_code=code)
            self._event(ATTEMPT_END, **end_of_run(code, "numeric_fault", message, self.run.steps_done))
            self._job.attempt.pulse.last_beat(beat, code)
            self.console.say(line)
            self._steps.save.abandon()
        self.failed()
        return code

    def failed(self) -> None:
        """Write the report and print the goodput of a run that has failed."""
        self.console.steps_over()
        with self._phase():
            if (goodput := self._report()) is not None:
                self.console.say(f"goodput: {goodput.summary()}")

    def _summarize(self, last: StepInfo | None) -> None:
        """Write the plots and the report, and print a sample and the totals."""
        if self.run.cfg.logging.plot:
            self._plot()
        goodput = self._report()
        self._sample()
        title = "done" if self.run.steps_done >= self.run.cfg.steps else "stopped"
        unchanged = ", and nothing was learned" * (0 < self.run.steps_done == int(self.run.state.skipped))
        self.console.show(f"{title}{unchanged}", self._totals(last, goodput))

    def _plot(self) -> None:
        """Plot the loss and the measures of layers."""
        title = f"{self.folder.path.name}: {self.run.steps_done:,} steps"
        vocabulary = None if self.run.cfg.model.first_loss() else self.run.program.summary.vocabulary
        try:
            self.console.say(plot_loss(self.folder.metrics, self.folder.loss_plot, title=title, vocabulary=vocabulary))
            if line := plot_layers(self.folder.metrics, self.folder.layers, self.folder.layers_plot):
                self.console.say(line)
        except OSError as error:
            self.console.say(f"no plot: {write_fault(error)}")

    def _sample(self) -> None:
        """Print a sample of the trained model, only after the last step and in a single process. Errors are printed."""
        logging, evaluation = self.run.cfg.logging, self.run.cfg.evaluation
        wanted = logging.prompt is not None or evaluation.ends_with_one() if logging.sample is None else logging.sample
        if self._sampler is None or not wanted or self.run.steps_done < self.run.cfg.steps or jax.process_count() > 1:
            return
        try:
            with self.console.ticker("sampling", total=False):
                text = self._sampler(self.run, self.folder.path)
        except Exception as error:
            text = f"no sample: {type(error).__name__}: {error}"
        if text:
            self.console.say(text)

    def _totals(self, last: StepInfo | None, goodput: Goodput | None) -> list[Section]:
        """Totals of this attempt. goodput: over all attempts."""
        step, first, seconds = self.run.steps_done, self._job.first, time.monotonic() - self._job.attempt.started
        newest, rows = self._job.manager.newest(), int(self.run.state.consumed_samples) - self._consumed
        positions, unit = rows * self.run.cfg.model.row_positions(), self.run.program.summary.unit
        work = [
            ("steps", f"{step:,}" + (f" ({step - first:,} in this attempt)" if first else "")),
            (unit + " of this attempt" * bool(first), count(positions)),
            ("wall time", duration(seconds)),
            (f"{unit}/s, all included", count(positions / seconds)),
        ]
        if goodput is not None:
            work.append(("goodput", goodput.summary()))
        if (peak := peak_memory()) is not None:
            work.append(("peak memory of a device", f"{size(peak[0])} of {size(peak[1])}"))
        if skipped := self.run.parts.skipped_rows():
            work.append(("rows skipped", skipped_rows(skipped)))
        if updates := int(self.run.state.skipped):
            work.append(("updates skipped", f"{updates:,} of {step:,}{self._scale(last)}"))
        losses = [] if last is None else [("train loss", f"{round(last.loss, 4) + 0.0:.4f}")]  # never -0.0000
        for split, metrics in self._steps.evaluate.last.items():
            losses += [(f"{split} {name.replace('_', ' ')}", f"{value:.4f}") for name, value in metrics.items()]
        results = [] if newest is None else [("checkpoint", f"{self.folder.checkpoints} (step {newest})")]
        files = [
            path
            for path in (self.folder.metrics, self.folder.loss_plot, self.folder.layers_plot, self.folder.report)
            if path.exists()
        ]
        results.append(("files", "\n".join(map(str, files))))
        answers = ("answers of the last rollout", self._answers())
        return [section for section in (("work", work), ("loss", losses), answers, ("kept", results)) if section[1]]

    def _answers(self) -> list[tuple[str, str]]:
        """Rewards and lengths of the answers of the last rollout, if the run has any: not each step has one."""
        if not isinstance(self.run.batches, RunBatches):
            return []
        lines = read_metrics(self.folder.metrics)[0]
        rollout = next((line for line in reversed(lines) if "reward" in line), {})
        names = [name for name in rollout if name.startswith(("reward", "answer"))]
        return [(name.replace("_", " "), f"{rollout[name]:.4g}") for name in names]

    def _scale(self, last: StepInfo | None) -> str:
        """What the loss scale did, for float16."""
        if (floor := self.run.cfg.precision.floor()) is None:
            return ""
        scale = float(self.run.state.loss_scale)
        if last is None or not last.skipped or scale <= floor:
            return f"; the loss scale fell to {scale:,.0f}"
        return f"; the loss scale still falls, now {scale:,.0f}: train longer, or from a lower scale"

    def _report(self) -> Goodput | None:
        """Write the report -> the goodput. Errors are printed: they do not fail a run that has trained."""
        if self._reporter is None or jax.process_index():
            return None
        try:
            line, goodput = self._reporter(self.folder.path, self.run.cfg.logging.report)
        except Exception as error:
            self.console.say(f"no report: {error}; to try again, run python -m megajax.report {self.folder.path}")
            return None
        if line:
            self.console.say(line)
        if goodput is not None:
            self._event("goodput", **goodput.fields())
        return goodput


def _same_decay(schedule: ScheduleConfig, steps: int) -> str:
    """The setting that keeps the learning rates when the run gets longer; "" if its decay does not end with the run."""
    if schedule.style == "constant" or schedule.decay_steps is not None or schedule.decay_samples is not None:
        return ""
    return f" (with --schedule.decay_steps={steps} to keep the learning rates)"
