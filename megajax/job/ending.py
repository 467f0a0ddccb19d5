"""What a job leaves behind at its end: the picture, the page, a sample, and the box with the totals."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from megajax.job.device_memory import peak_memory, size
from megajax.metrics.banner import Section
from megajax.metrics.console import Console
from megajax.metrics.goodput import Goodput
from megajax.metrics.layer_history import plot_layers
from megajax.metrics.plot import plot_loss
from megajax.metrics.runfolder import RunFolder
from megajax.metrics.text import count, duration, skipped_rows
from megajax.models.protocol import counted, ids_below
from megajax.training.loop import StepInfo
from megajax.training.session import Run

type Sampler = Callable[[Run, Path], str | None]
"""What shows the work of a trained model, None for nothing: `inference.sample.sample`.

Handed in by the front door, for training and inference never import each other."""

type Reporter = Callable[[Path, bool], tuple[str | None, Goodput | None]]
"""Run folder, and whether to leave a page there -> what to say of the page, and the goodput of the run:
`reporting.write.close_run`; from the front door too."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of an attempt at a run, on process 0."""

    run: Run
    folder: RunFolder
    console: Console
    sampler: Sampler | None
    reporter: Reporter | None
    event: Callable[..., None]
    """Takes the event `goodput`."""
    first: int
    """Steps done before this attempt."""
    begun: int
    """Rows consumed before it."""
    started: float
    """Of this attempt, by the monotonic clock."""

    def leave_behind(
        self, last: StepInfo | None, evaluations: Mapping[str, Mapping[str, float]], newest: int | None
    ) -> None:
        """All of it. last: the last step of this attempt; evaluations: of each split; newest: checkpoint."""
        step = self.run.step
        if self.run.cfg.logging.plot:
            self.plot()
        good = self.report()
        self.sample()
        totals = self.totals(last, evaluations, newest, good)
        self.console.show("done" if step >= self.run.cfg.steps else "stopped", totals)

    def plot(self) -> None:
        """The loss curve, and what layers reported."""
        title = f"{self.folder.path.name}: {self.run.step:,} steps"
        vocabulary = ids_below(self.run.cfg.model)
        try:
            self.console.say(plot_loss(self.folder.metrics, self.folder.loss_plot, title=title, vocabulary=vocabulary))
            if drawn := plot_layers(self.folder.metrics, self.folder.layers, self.folder.layers_plot):
                self.console.say(drawn)
        except OSError as error:
            self.console.say(f"no plot: {error.strerror or error}")

    def sample(self) -> None:
        """What the model can do now: only after the last step, and by a single process. No run fails for want of it."""
        wanted = self.run.cfg.logging.sample and self.run.step >= self.run.cfg.steps
        if self.sampler is None or not wanted or jax.process_count() > 1:
            return
        try:
            with self.console.ticker("sampling", total=False):
                text = self.sampler(self.run, self.folder.path)
        except Exception as error:
            text = f"no sample: {type(error).__name__}: {error}"
        if text:
            self.console.say(text)

    def totals(
        self,
        last: StepInfo | None,
        evaluations: Mapping[str, Mapping[str, float]],
        newest: int | None,
        good: Goodput | None,
    ) -> list[Section]:
        """What the run came to; arguments as for `leave_behind`. good: over all attempts."""
        step, here, seconds = self.run.step, self.run.step - self.first, time.monotonic() - self.started
        done = (int(self.run.state.consumed_samples) - self.begun) * self.run.cfg.model.row_positions()
        work = [
            ("steps", f"{step:,}" + (f" ({here:,} in this attempt)" if here != step else "")),
            (counted(self.run.cfg.model), count(done)),
            ("wall time", duration(seconds)),
            (f"{counted(self.run.cfg.model)}/s, all included", count(done / seconds)),
        ]
        if good is not None:
            work.append(("goodput", good.sentence()))
        if (peak := peak_memory()) is not None:
            work.append(("peak memory of a device", f"{size(peak[0])} of {size(peak[1])}"))
        if skipped := self.run.parts.skipped_rows():
            work.append(("rows skipped", skipped_rows(skipped)))
        losses = [("train loss", f"{last.loss:.4f}")] if last is not None else []
        for split, metrics in evaluations.items():
            losses += [(f"{split} {name.replace('_', ' ')}", f"{value:.4f}") for name, value in metrics.items()]
        kept = [] if newest is None else [("checkpoint", f"{self.folder.checkpoints} (step {newest})")]
        files = [
            path
            for path in (self.folder.metrics, self.folder.loss_plot, self.folder.layers_plot, self.folder.report)
            if path.exists()
        ]
        kept.append(("files", "\n".join(map(str, files))))
        return [section for section in (("work", work), ("loss", losses), ("kept", kept)) if section[1]]

    def failed(self) -> None:
        """The page and the goodput of a run that has failed."""
        if (good := self.report()) is not None:
            self.console.say(f"goodput: {good.sentence()}")

    def report(self) -> Goodput | None:
        """The page about the run, and its goodput; a run that has trained does not fail for want of them."""
        if self.reporter is None or jax.process_index():
            return None
        try:
            said, good = self.reporter(self.folder.path, self.run.cfg.logging.report)
        except Exception as error:
            self.console.say(f"no report: {error}; python -m megajax.report {self.folder.path} tries again")
            return None
        if said:
            self.console.say(said)
        if good is not None:
            self.event("goodput", **good.fields())
        return good
