"""What a run shows while it goes: a bar that updates in place on a terminal, one plain line at a time elsewhere."""

import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Protocol, TextIO

import rich.console
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from megajax.metrics import banner, lines, text
from megajax.metrics.banner import Section
from megajax.metrics.config import LoggingConfig
from megajax.metrics.lines import Summary
from megajax.metrics.record import EvaluationRecord, Record, StepRecord
from megajax.metrics.throughput import RecentSteps
from megajax.metrics.writers import Writer


class Console(Writer, Protocol):
    """A writer that people watch."""

    def say(self, message: str) -> None:
        """Print a line; it stays."""
        return

    def show(self, title: str, sections: Sequence[Section]) -> None:
        """Print a table of facts."""
        return

    @contextmanager
    def ticker(self, message: str) -> Generator[None]:
        """Show that something long is under way, and for how long; print its total time at the end."""
        yield

    def release(self) -> None:
        """Leave the terminal usable, at once and without waiting for any lock: for a process about to be ended."""
        return


class QuietConsole(Console):
    """Shows nothing: for every process but the first."""


class PlainConsole(Console):
    """Lines of plain text, for files and pipes."""

    def __init__(
        self,
        *,
        total_steps: int,
        start_step: int = 0,
        every: int = 10,
        stream: TextIO | None = None,
        tick_seconds: float = 30.0,
        clock: Callable[[], datetime] = datetime.now,
    ):
        self._total = total_steps
        self._printed = _Cadence(every=every, start_step=start_step, total_steps=total_steps)
        self._stream = stream or sys.stdout
        self._tick_seconds = tick_seconds
        self._clock = clock

    def log(self, record: Record) -> None:
        if isinstance(record, EvaluationRecord):
            self.say(lines.evaluation_line(record))
        elif summary := self._printed.add(record):
            eta = self._printed.eta
            self.say(lines.step_line(summary, total_steps=self._total, now=self._clock(), eta=eta))

    def say(self, message: str) -> None:
        # One write per line: lines of a second thread or process must not land inside it.
        self._stream.write(message + "\n")
        self._stream.flush()

    def show(self, title: str, sections: Sequence[Section]) -> None:
        self.say(banner.plain(title, sections))

    @contextmanager
    def ticker(self, message: str) -> Generator[None]:
        done = threading.Event()
        start = time.monotonic()

        def tick() -> None:
            while not done.wait(self._tick_seconds):
                self.say(f"{message} … {text.duration(time.monotonic() - start)}")

        thread = threading.Thread(target=tick, name="ticker", daemon=True)
        thread.start()
        outcome = "stopped after "
        try:
            yield
            outcome = ""
        finally:
            done.set()
            thread.join()
            self.say(f"{message}: {outcome}{text.duration(time.monotonic() - start)}")


class LiveConsole(Console):
    """A bar and the latest figures at the bottom of a terminal; lines scroll by above them."""

    def __init__(
        self,
        *,
        total_steps: int,
        start_step: int = 0,
        every: int = 10,
        console: rich.console.Console | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ):
        self._total = total_steps
        self._step = start_step
        self._printed = _Cadence(every=every, start_step=start_step, total_steps=total_steps)
        self._console = console or rich.console.Console()
        self._clock = clock
        self._latest: StepRecord | None = None
        self._tickers: list[_Ticking] = []
        self._live: Live | None = None

    def log(self, record: Record) -> None:
        self._start()
        if isinstance(record, EvaluationRecord):
            fields = [("loss", f"{record.loss:.4f}"), ("perplexity", f"{record.perplexity:,.2f}")]
            self._print(self._row(record.step, fields, name=record.split, style="green"))
            return
        self._latest, self._step = record, record.step
        if summary := self._printed.add(record):
            broken = summary.skipped or summary.not_finite
            self._print(self._row(record.step, lines.short_fields(summary), style="red" if broken else "default"))

    def say(self, message: str) -> None:
        self._print(Text(message))

    def show(self, title: str, sections: Sequence[Section]) -> None:
        self._print(banner.box(title, sections))

    @contextmanager
    def ticker(self, message: str) -> Generator[None]:
        start = time.monotonic()
        ticking = _Ticking(message, start)
        self._tickers.append(ticking)
        self._start()
        outcome = "stopped after "
        try:
            yield
            outcome = ""
        finally:
            self._tickers.remove(ticking)
            self.say(f"{message}: {outcome}{text.duration(time.monotonic() - start)}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def release(self) -> None:
        # Straight to the descriptor: whoever holds rich's lock may be the thread that was interrupted.
        if self._live is not None and self._console.is_terminal:
            os.write(self._console.file.fileno(), b"\x1b[?25h\r\n")

    def _print(self, what: RenderableType) -> None:
        self._console.print(what, soft_wrap=isinstance(what, Text))

    def _start(self) -> None:
        if self._live is None:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
            self._live.start()

    def _row(self, step: int, fields: Sequence[tuple[str, str]], *, style: str, name: str = "step") -> Text:
        width = len(str(self._total))
        row = Text(f"{name} {step:>{width}}/{self._total}", style=style)
        for key, value in fields:
            row.append("  ").append(f"{key} ", style="dim").append(value)
        return row

    def _render(self) -> RenderableType:
        """The part that updates in place: what is under way, the bar, the figures of the last step."""
        parts: list[RenderableType] = list(self._tickers)
        if self._latest is not None:
            bar = Table.grid(padding=(0, 1))
            left = self._printed.eta
            cells: list[RenderableType] = [
                ProgressBar(total=self._total, completed=self._step, width=30),
                f"{self._step / max(self._total, 1):.0%}",
                f"{self._step}/{self._total}",
            ]
            if left is not None and self._step < self._total:
                cells.append(f"{text.duration(left)} left, done at {text.finish_time(self._clock(), left)}")
            bar.add_row(*cells)
            figures = Text(style="bold")
            for key, value in lines.short_fields(Summary.of([self._latest])):
                # A narrow terminal breaks the line between fields, not between a name and its value.
                figures.append(f"{key}\N{NO-BREAK SPACE}", style="dim").append(value).append("  ")
            parts += [bar, figures]
        return Group(*parts)


class _Ticking:
    """A spinner and how long it has been going."""

    def __init__(self, message: str, start: float):
        self._spinner = Spinner("dots")
        self._message = message
        self._start = start

    def __rich__(self) -> RenderableType:
        self._spinner.update(text=Text(f"{self._message} … {time.monotonic() - self._start:.0f} s"))
        return self._spinner


class _Cadence:
    """When a line is due: at the first step of an attempt, every `every` steps, at the last."""

    def __init__(self, *, every: int, start_step: int, total_steps: int):
        self._every = every
        self._first = start_step + 1
        self._total = total_steps
        self._since: list[StepRecord] = []
        self._recent = RecentSteps()
        self.eta: float | None = None
        """Seconds left for the run, None before its first step."""

    def add(self, record: StepRecord) -> Summary | None:
        """Take a step; what to print of the steps since the last line, if one is due."""
        self._since.append(record)
        self._recent.add(record.rates.step_seconds)
        self.eta = self._recent.eta(self._total - record.step)
        if record.step % self._every and record.step not in (self._first, self._total):
            return None
        summary = Summary.of(self._since)
        self._since.clear()
        return summary


def open_console(
    config: LoggingConfig, *, total_steps: int, start_step: int = 0, primary: bool = True, stream: TextIO | None = None
) -> Console:
    """The console for where `stream` (standard output unless given) goes; one that is quiet off the first process."""
    if not primary:
        return QuietConsole()
    stream = stream or sys.stdout
    steps: dict[str, Any] = {"total_steps": total_steps, "start_step": start_step, "every": config.every}
    on_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    if config.live == "always" or (config.live == "auto" and on_terminal):
        return LiveConsole(console=rich.console.Console(file=stream, force_terminal=True), **steps)
    return PlainConsole(stream=stream, **steps)
