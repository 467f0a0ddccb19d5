"""Settings of a run's logs and terminal output."""

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from megajax.config.builds import Builds
from megajax.config.errors import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbConfig:
    """A Weights & Biases run beside the run folder; needs the extra `wandb`."""

    project: str = "megajax"
    """Project the run is filed under."""
    name: str | None = None
    """Name shown for the run; none = the name of the run folder."""
    mode: Literal["online", "offline", "disabled"] = "offline"
    """online sends as it goes; offline writes RUN_DIR/wandb for `wandb sync` later and needs no network."""

    def problems(self) -> list[Problem]:
        if not self.project:
            return [Problem("project", "is empty", "name the project the run belongs to")]
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig(Builds):
    """What is logged, where and how often; `build(folder, ...)` opens the writers (see metrics/writers.py)."""

    target: ClassVar[str] = "megajax.metrics.writers:open_writers"

    every: int = 10
    """Steps between lines at the terminal. metrics.jsonl gets a line for every step whatever this is."""
    layers_every: int = 100
    """Steps between lines of layers.jsonl: lists of each layer, as the tokens of its experts."""
    tensorboard: bool = False
    """Also write TensorBoard event files to RUN_DIR/tensorboard; needs the extra `log`."""
    wandb: WandbConfig | None = None
    """Also log to Weights & Biases; none = off."""
    plot: bool = True
    """Draw RUN_DIR/loss.png at the end; needs the extra `plot`, and is left out with a note where that is missing."""
    report: bool = True
    """Write RUN_DIR/report.html at the end, as python -m megajax.report does."""
    live: Literal["auto", "always", "never"] = "auto"
    """Progress bar that updates in place: auto = on a terminal; never = one plain line per `every` steps."""
    sample: bool = True
    """Show at the end of training what the model can do: it continues a text, fills blanks, or draws its mistakes."""
    prompt: str | None = None
    """The text that is continued or filled; none = a validation row."""

    def problems(self) -> list[Problem]:
        return [
            Problem(name, f"is {value}, but lines are at least 1 step apart", "set it to 1 or more")
            for name, value in {"every": self.every, "layers_every": self.layers_every}.items()
            if value < 1
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """A profiler trace of a few steps in RUN_DIR/profile, for xprof or Perfetto, and a summary of it."""

    steps: str | None = None
    """FIRST:LAST, both traced: 10:13 is four steps; none: no trace. Spare the first steps of an attempt: they
    compile."""
    processes: tuple[int, ...] = (0,)
    """The processes that trace what their devices do."""
    top: int = 15
    """Kernels in the summary, longest first."""

    def window(self) -> tuple[int, int] | None:
        """(first, last); None: no trace, or what `problems` lists."""
        match = re.fullmatch(r"(\d+)(?::(\d+))?", (self.steps or "").strip())
        return None if match is None else (int(match[1]), int(match[2] or match[1]))

    def problems(self) -> list[Problem]:
        problems = []
        window = self.window()
        if self.steps is not None and window is None:
            problems.append(
                Problem("steps", f"expected FIRST:LAST, got {self.steps!r}", "for example profile.steps=10:13")
            )
        elif window is not None and not 1 <= window[0] <= window[1]:
            problems.append(
                Problem("steps", f"{self.steps} holds no step", "steps count from 1, and FIRST comes first")
            )
        problems += [Problem("processes", f"count from 0, got {n}") for n in self.processes if n < 0]
        if self.top < 1:
            problems.append(Problem("top", f"must be at least 1, got {self.top}"))
        return problems
