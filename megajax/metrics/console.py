"""Terminal output of a run: a progress bar that updates in place, or plain lines for files and pipes."""

import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, TextIO

import rich.console
from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from megajax.display import banner, text
from megajax.display.banner import Section
from megajax.metrics import lines
from megajax.metrics.config import LoggingConfig
from megajax.metrics.lines import LANGUAGE, Summary, Terms
from megajax.metrics.record import EvaluationRecord, Record, StepRecord
from megajax.metrics.writer import Writer

type Rename = Callable[[str], None]
"""Replaces the message of a ticker and restarts its time."""


class Console(Writer):
    """A writer for people. This base class prints nothing; all processes except the first use it."""

    def say(self, message: str) -> None:
        """Print a line."""

    def show(self, title: str, sections: Sequence[Section]) -> None:
        """Print a table of facts."""

    @contextmanager
    def ticker(self, message: str, *, total: bool = True) -> Generator[Rename]:
        """Show how long an operation has been running. Yields a function that replaces the message.

        The total time is printed at the end if `total` is set or an exception is raised.
        """
        yield lambda message: None

    def stop_requested(self, message: str) -> None:
        """Print that a stop was requested; may be called from any thread."""
        text.say(message)

    def steps_over(self) -> None:
        """Training has ended: remove the progress bar and the time left."""

    def release(self) -> None:
        """Restore the terminal at once, without waiting for a lock: the process is about to be killed."""


class PlainConsole(Console):
    """Lines of plain text, for files and pipes. cadence: keyword arguments of `Cadence`."""

    def __init__(
        self, *, stream: TextIO | None = None, tick_seconds: float = 30.0, terms: Terms = LANGUAGE, **cadence: Any
    ):
        self._printed, self._terms = Cadence(**cadence), terms
        self._stream = stream or sys.stdout
        self._tick_seconds = tick_seconds

    def log(self, record: Record) -> None:
        if isinstance(record, EvaluationRecord):
            self.say(lines.evaluation_line(record, self._terms))
        elif summary := self._printed.add(record):
            now, eta, total = self._printed.clock(), self._printed.eta, self._printed.total_steps
            self.say(lines.step_line(summary, total_steps=total, now=now, eta=eta, terms=self._terms))

    def say(self, message: str) -> None:
        # One write per line, so that lines of other threads and processes do not interleave.
        self._stream.write(message + "\n")
        self._stream.flush()

    def show(self, title: str, sections: Sequence[Section]) -> None:
        self.say(banner.plain(title, sections))

    @contextmanager
    def ticker(self, message: str, *, total: bool = True) -> Generator[Rename]:
        finished = threading.Event()
        ticker = _Ticker(message)

        def tick() -> None:
            while not finished.wait(self._tick_seconds):
                self.say(f"{ticker.message} … {text.duration(ticker.seconds())}")

        def stop() -> None:
            finished.set()
            thread.join()

        thread = threading.Thread(target=tick, name="ticker", daemon=True)
        thread.start()
        with ticker.running(self.say, stop, total=total):
            yield ticker.rename


class LiveConsole(Console):
    """A bar and the latest figures at the bottom of a terminal; lines scroll by above them.

    cadence: keyword arguments of `Cadence`.
    """

    def __init__(self, *, console: rich.console.Console | None = None, terms: Terms = LANGUAGE, **cadence: Any):
        self._printed, self._terms = Cadence(**cadence), terms
        self._total = self._printed.total_steps
        self._console = console or rich.console.Console()
        self._latest: StepRecord | None = None
        """The step that the bar shows; None: no bar."""
        self._stopping = False
        self._tickers: list[_Ticker] = []
        self._live: Live | None = None
        self._height = 0
        """Number of lines that update in place."""

    def log(self, record: Record) -> None:
        self._start()
        if isinstance(record, EvaluationRecord):
            fields = [] if record.loss is None else [("loss", f"{record.loss:.4f}")]
            if self._terms.perplexity and (perplexity := record.perplexity) is not None:
                fields.append(("perplexity", f"{perplexity:,.2f}"))
            fields += [(name.replace("_", " "), f"{value:.4f}") for name, value in record.metrics.items()]
            self._print(self._row(record.step, fields, name=record.split, style="green"))
            return
        self._latest = record
        if summary := self._printed.add(record):
            fields = lines.short_fields(summary, speed=not self._printed.first(record), terms=self._terms)
            broken = summary.skipped or summary.not_finite or summary.last.save_failed
            self._print(self._row(record.step, fields, style="red" if broken else "default"))

    def say(self, message: str) -> None:
        self._print(Text(message))

    def show(self, title: str, sections: Sequence[Section]) -> None:
        self._print(banner.box(title, sections))

    def stop_requested(self, message: str) -> None:
        self._stopping = True
        self._print(Text(message, style="yellow"))

    def steps_over(self) -> None:
        self._latest = None

    @contextmanager
    def ticker(self, message: str, *, total: bool = True) -> Generator[Rename]:
        ticker = _Ticker(message)
        self._tickers.append(ticker)
        self._start()
        with ticker.running(self.say, lambda: self._tickers.remove(ticker), total=total):
            yield ticker.rename

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def release(self) -> None:
        # Written directly to the file descriptor: the interrupted thread may hold rich's lock.
        if self._live is not None and self._console.is_terminal:
            erase = b"\r\x1b[2K" + b"\x1b[1A\x1b[2K" * (self._height - 1)
            os.write(self._console.file.fileno(), erase + b"\x1b[?25h")

    def _print(self, renderable: RenderableType) -> None:
        self._console.print(renderable)

    def _start(self) -> None:
        if self._live is None:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def _row(self, step: int, fields: Sequence[tuple[str, str]], *, style: str, name: str = "step") -> Text:
        width = len(str(self._total))
        row = Text(f"{name} {step:>{width}}/{self._total}  ", style=style)
        return row.append_text(_figures(fields, self._console.width - row.cell_len))

    def _render(self) -> RenderableType:
        """The lines that update in place: tickers, the bar, the figures of the last step.

        Each line leaves room for an echoed ^C: a line that the terminal wraps cannot be erased completely.
        """
        width = max(self._console.width - _ECHO, 1)
        parts: list[RenderableType] = list(self._tickers)
        if self._latest is not None:
            parts += [self._bar(self._latest.step, width)]
            fields = lines.short_fields(Summary.of([self._latest]), terms=self._terms)
            parts += [_figures(fields, width, style="bold")]
        self._height = max(len(parts), 1)
        return Constrain(Group(*parts), width)

    def _bar(self, step: int, width: int) -> RenderableType:
        progress = f"{step / max(self._total, 1):.0%} {step}/{self._total}"
        if self._stopping:
            progress += "  stopping"
        elif self._printed.end is not None and step < self._total:
            now, end = self._printed.clock(), self._printed.end
            at = end.strftime("%H:%M" if end.date() == now.date() else "%b %d %H:%M")
            progress += f"  {text.duration(max((end - now).total_seconds(), 0.0))} left, done at {at}"
        label = Text(progress, no_wrap=True, overflow="ellipsis")
        room = min(width - label.cell_len - 1, 30)
        if room < 5:
            return label
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=self._total, completed=step, width=room), label)
        return bar


_ECHO = 5
"""Free columns at the right edge: ^C twice, and the cursor."""


def _figures(fields: Sequence[tuple[str, str]], room: int, *, style: str = "") -> Text:
    """The fields that fit on a line of `room` columns; the least important ones are dropped first."""
    fields = list(fields)
    for name in lines.EXPENDABLE:
        if sum(len(key) + len(value) + 3 for key, value in fields) - 2 <= room:
            break
        fields = [field for field in fields if field[0] != name]
    figures = Text(style=style, no_wrap=True, overflow="ellipsis")
    for index, (key, value) in enumerate(fields):
        figures.append("  " if index else "").append(f"{key} ", style="dim").append(value)
    return figures


class _Ticker:
    """The message and the elapsed time of a running operation."""

    def __init__(self, message: str):
        self._spinner = Spinner("dots")
        self.rename(message)

    def rename(self, message: str) -> None:
        self.message, self._start = message, time.monotonic()

    def seconds(self) -> float:
        """Seconds since the last rename."""
        return time.monotonic() - self._start

    @contextmanager
    def running(self, say: Callable[[str], None], stop: Callable[[], None], *, total: bool) -> Generator[None]:
        """At the end of the block, call `stop`, then print the time if `total` is set or an exception is raised."""
        prefix = "stopped after "
        try:
            yield
            prefix = "" if total else None
        finally:
            stop()
            if prefix is not None:
                say(f"{self.message}: {prefix}{text.duration(self.seconds())}")

    def __rich__(self) -> RenderableType:
        line = Text(no_wrap=True, overflow="ellipsis")
        spinner = self._spinner.render(time.monotonic())
        line.append_text(spinner if isinstance(spinner, Text) else Text())
        return line.append(f" {self.message} … {self.seconds():.0f} s")


class Cadence:
    """Prints a line at the first step of an attempt, every `every` steps, 30 s after the last line, and at the end.

    The time left is estimated from the median time of recent steps, so that steps slowed by a checkpoint or an
    evaluation do not count. The first step, which includes compilation, is ignored.
    """

    def __init__(self, *, total_steps: int, every: int = 10, clock: Callable[[], datetime] = datetime.now):
        self.total_steps, self.clock = total_steps, clock
        self._every = every
        self._first: int | None = None
        self._since: list[StepRecord] = []
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._printed: datetime | None = None
        self.eta: float | None = None
        """Seconds left after the last step; None before the second step of an attempt."""
        self.end: datetime | None = None
        """Estimated time of the last step."""

    def first(self, record: StepRecord) -> bool:
        """Whether this is the first step of the attempt."""
        return record.step == self._first

    def add(self, record: StepRecord) -> Summary | None:
        """Add a step -> a summary of the steps since the last line, or None if no line is due."""
        now = self.clock()
        self._first = record.step if self._first is None else self._first
        self._since.append(record)
        if not self.first(record):
            self._recent.append(record.rates.step_seconds)
            self.eta = statistics.median_low(self._recent) * (self.total_steps - record.step)
            self.end = now + timedelta(seconds=self.eta)
        silent = self._printed is None or now - self._printed >= _LONGEST_SILENCE
        if record.step % self._every and record.step != self.total_steps and not silent:
            return None
        summary = Summary.of(self._since)
        self._since.clear()
        self._printed = now
        return summary


_LONGEST_SILENCE = timedelta(seconds=30)
_RECENT = 50
"""Number of steps whose median time gives the time left."""


def open_console(
    config: LoggingConfig,
    *,
    total_steps: int,
    primary: bool = True,
    stream: TextIO | None = None,
    terms: Terms = LANGUAGE,
) -> Console:
    """A console for `stream`, by default standard output; silent unless `primary`."""
    if not primary:
        return Console()
    stream = stream or sys.stdout
    steps: dict[str, Any] = {"total_steps": total_steps, "every": config.every, "terms": terms}
    on_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    if config.live == "always" or (config.live == "auto" and on_terminal):
        return LiveConsole(console=rich.console.Console(file=stream, force_terminal=True), **steps)
    return PlainConsole(stream=stream, **steps)
