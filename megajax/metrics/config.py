"""Settings of a run's logs and terminal output."""

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from megajax.config.bounds import Bounds, Count, NotEmpty
from megajax.config.class_references import Builds
from megajax.config.errors import Problem
from megajax.processes.world import split_address


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """A Weights & Biases run beside the run folder; needs the extra `wandb`.

    Example: `mj.LoggingConfig(wandb=mj.WandbConfig(project="pretraining"))`
    """

    project: Annotated[str, NotEmpty("set it to the name of a project")] = "megajax"
    """Project the run is filed under."""
    name: str | None = None
    """Display name of the run. None: the name of the run folder."""
    mode: Literal["online", "offline", "disabled"] = "offline"
    """online: upload during the run. offline: write RUN_DIR/wandb for a later `wandb sync`; needs no network."""


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Training metrics for Prometheus and OpenTelemetry, from process 0; needs the extra `telemetry`.

    Example: `mj.LoggingConfig(telemetry=mj.TelemetryConfig(prometheus="0.0.0.0:9464"))`
    """

    prometheus: str | None = None
    """HOST:PORT at which the process answers Prometheus, for example 0.0.0.0:9464. None: it does not."""
    otlp: str | None = None
    """URL of an OpenTelemetry collector (OTLP over HTTP), for example http://collector:4318. It gets metrics, and
    events as spans. Headers with credentials come from OTEL_EXPORTER_OTLP_HEADERS. None: nothing is sent."""
    every_seconds: Annotated[float, Bounds(at_least=1)] = 15.0
    """Seconds between two messages with metrics to the collector."""

    def problems(self) -> list[Problem]:
        problems = []
        if self.prometheus is None and self.otlp is None:
            problems.append(Problem("", "has neither prometheus nor otlp", "set one of them, or remove telemetry"))
        if self.prometheus is not None and split_address(self.prometheus) is None:
            problems.append(
                Problem("prometheus", f"expected HOST:PORT, got {self.prometheus!r}", "for example 0.0.0.0:9464")
            )
        if self.otlp is not None and not re.fullmatch(r"https?://[^\s/@]+(/[^\s@]*)?", self.otlp):
            hint = "for example http://collector:4318; credentials belong into OTEL_EXPORTER_OTLP_HEADERS"
            problems.append(Problem("otlp", "expected the URL of a collector, without credentials", hint))
        return problems


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Builds):
    """Logs and terminal output of a run; `build(folder, ...)` opens the writers (see metrics/writers.py).

    Example: `mj.LoggingConfig(every=10, prompt="Once upon a time")`
    """

    target: ClassVar[str] = "megajax.metrics.writers:open_writers"

    every: Count = 10
    """Steps between lines at the terminal. metrics.jsonl always gets a line for every step."""
    layers_every: Count = 100
    """Steps between lines of layers.jsonl, which has lists per layer, for example the tokens of each expert."""
    tensorboard: bool = False
    """Also write TensorBoard event files to RUN_DIR/tensorboard; needs the extra `log`."""
    wandb: WandbConfig | None = None
    """Also log to Weights & Biases. None: off."""
    telemetry: TelemetryConfig | None = None
    """Also offer metrics to Prometheus, and send metrics and events to an OpenTelemetry collector. None: off."""
    on_event: str | None = None
    """Shell command that runs for each line of events.jsonl, for example ./alert.sh: its name is in MEGAJAX_EVENT, the
    run folder in MEGAJAX_RUN, and the line at the standard input. It also runs for failures of other processes, and of
    the whole run if this machine lives. None: no command."""
    plot: bool = True
    """Draw RUN_DIR/loss.png at the end. Without the extra `plot`, the run prints a note instead."""
    report: bool = True
    """Write RUN_DIR/report.html at the end, as python -m megajax.report does."""
    live: Literal["auto", "always", "never"] = "auto"
    """Progress bar that updates in place. auto: only on a terminal. never: one plain line per `every` steps."""
    sample: bool | None = None
    """Print a sample at the end of training: a continued text, filled blanks or captions. None: if there is a `prompt`,
    or an evaluation at the end."""
    prompt: str | None = None
    """The text that a decoder continues. None: the start of a validation row."""

    def needed_packages(self) -> dict[str, str]:
        """See Builds."""
        packages = {"tensorboard": "tensorboardX", "wandb": "wandb", "telemetry": "opentelemetry"}
        return {name: package for name, package in packages.items() if getattr(self, name)}


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """A profiler trace of a few steps in RUN_DIR/profile, for xprof or Perfetto, with a summary.

    Example: `mj.ProfileConfig(steps="10:13")`
    """

    steps: str | None = None
    """FIRST:LAST, inclusive: 10:13 traces four steps. Avoid the first step of an attempt, which includes
    compilation. None: no trace."""
    processes: tuple[Annotated[int, Bounds(at_least=0, hint="processes count from 0")], ...] = (0,)
    """The processes that trace their devices."""
    top: Count = 15
    """Kernels in the summary, longest first."""

    def window(self) -> tuple[int, int] | None:
        """(first, last); None without a trace, or if `steps` is malformed (see `problems`)."""
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
                Problem("steps", f"{self.steps} contains no step", "steps count from 1, and FIRST is at most LAST")
            )
        return problems
