"""Settings for saving, keeping and loading checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megajax.config.builds import Builds
from megajax.config.errors import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsConfig:
    """Weights of another run, for the start of this one."""

    run: Path
    """Its run folder, its checkpoints folder or one step in it."""
    into: str = ""
    """Path of the part of this model that takes them, such as a tower; empty: the whole model."""
    fresh: tuple[str, ...] = ()
    """Weights by path in this model, with * for any text, that are not taken: head.* for other classes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(Builds):
    """Saving, keeping and loading of checkpoints; `build(folder)` gives the `CheckpointManager` of a run's folder."""

    target: ClassVar[str] = "megajax.checkpoint.manager:CheckpointManager"

    every: int | None = 1000
    """Steps between checkpoints; none: only at the end and when the run is asked to stop."""
    keep_last: int | None = 3
    """How many of the newest checkpoints to keep; none: all."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this are kept for good; none: no such checkpoints."""
    asynchronous: bool = True
    """Write in the background: training waits for the copy to host memory only."""
    at_end: bool = True
    """Write a checkpoint after the last step."""
    load: Path | None = None
    """Start from another run's state: its run folder, its checkpoints folder or one step in it.
    Ignored by a run that has checkpoints of its own: it resumes from its newest."""
    weights: tuple[WeightsConfig, ...] = ()
    """Start from weights of other runs, with a fresh optimizer, schedule and order of rows, as for fine-tuning.
    Ignored by a run that has checkpoints of its own. On the command line: --checkpoint.weights='[{run: runs/a}]'."""
    step: int | None = None
    """The step to start from, in `load` or else in the run's own folder; none: the newest intact one.
    Going back in the run's own folder sets the later steps aside."""

    def problems(self) -> list[Problem]:
        """Problems of the settings themselves; the manager checks the folders."""
        problems = [
            Problem(name, f"is {value}, but must be at least {minimum}", hint)
            for name, value, minimum, hint in (
                ("every", self.every, 1, "use none to save only at the end"),
                ("keep_last", self.keep_last, 1, "use none to keep all"),
                ("keep_every", self.keep_every, 1, "use none to keep no step for good"),
                ("step", self.step, 0, "use none for the newest"),
            )
            if value is not None and value < minimum
        ]
        if self.load is not None and self.weights:
            what = "takes weights alone, load the whole state"
            problems.append(Problem("weights", what, "set one of the two to none"))
        if not problems and self.every and self.keep_every and self.keep_every % self.every:
            what = f"is {self.keep_every}, which is not a multiple of every = {self.every}"
            problems.append(Problem("keep_every", what, "only steps that are saved can be kept"))
        return problems
