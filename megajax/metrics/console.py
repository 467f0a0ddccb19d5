"""The output of a run: a progress bar that updates in place on a terminal, plain lines elsewhere."""

import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Protocol, TextIO

import rich.console
from rich.console import Group, RenderableType
from rich.constrain import Constrain
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

type Rename = Callable[[str], None]
"""Continues with another message; its time counts from here."""


class Console(Writer, Protocol):
    """A writer for people."""

    def say(self, message: str) -> None:
        """Print a line."""
        return

    def show(self, title: str, sections: Sequence[Section]) -> None:
        """Print a table of facts."""
        return

    @contextmanager
    def ticker(self, message: str, *, total: bool = True) -> Generator[Rename]:
        """Show that something long is running, and for how long. The block gets a function that renames it.

        The time it took is printed at the end if `total`, or if an exception ended it.
        """
        yield lambda message: None

    def stop_requested(self, message: str) -> None:
        """Say that the run was asked to stop; may be called from any thread."""
        print(f"megajax: {message}", file=sys.stderr, flush=True)

    def steps_over(self) -> None:
        """There are no more steps: show no time left."""
        return

    def release(self) -> None:
        """Restore the terminal at once, without waiting for a lock: the process is about to be killed."""
        return


class QuietConsole(Console):
    """Shows nothing: for all processes but the first."""


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
        self._printed = _Cadence(every=every, start_step=start_step, total_steps=total_steps, clock=clock)
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
    def ticker(self, message: str, *, total: bool = True) -> Generator[Rename]:
        done = threading.Event()
        ticking = _Ticking(message)

        def tick() -> None:
            while not done.wait(self._tick_seconds):
                self.say(f"{ticking.message} … {text.duration(ticking.seconds())}")

        def stop() -> None:
            done.set()
            thread.join()

        thread = threading.Thread(target=tick, name="ticker", daemon=True)
        thread.start()
        with ticking.ended(self.say, stop, total=total):
            yield ticking.rename


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
        self._printed = _Cadence(every=every, start_step=start_step, total_steps=total_steps, clock=clock)
        self._console = console or rich.console.Console()
        self._clock = clock
        self._latest: StepRecord | None = None
        """What the bar shows; None: no bar."""
        self._stopping = False
        self._tickers: list[_Ticking] = []
        self._live: Live | None = None
        self._height = 0
        """Lines that update in place."""

    def log(self, record: Record) -> None:
        self._start()
        if isinstance(record, EvaluationRecord):
            fields = [("loss", f"{record.loss:.4f}"), ("perplexity", f"{record.perplexity:,.2f}")]
            self._print(self._row(record.step, fields, name=record.split, style="green"))
            return
        self._latest = record
        if summary := self._printed.add(record):
            fields = lines.short_fields(summary, speed=not self._printed.first(record))
            broken = summary.skipped or summary.not_finite
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
        ticking = _Ticking(message)
        self._tickers.append(ticking)
        self._start()
        with ticking.ended(self.say, lambda: self._tickers.remove(ticking), total=total):
            yield ticking.rename

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def release(self) -> None:
        # Written to the descriptor: the interrupted thread may hold rich's lock.
        if self._live is not None and self._console.is_terminal:
            erase = b"\r\x1b[2K" + b"\x1b[1A\x1b[2K" * (self._height - 1)
            os.write(self._console.file.fileno(), erase + b"\x1b[?25h")

    def _print(self, what: RenderableType) -> None:
        self._console.print(what)

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

        Each leaves room for what the terminal echoes of the keyboard (^C): a line that the terminal wraps could not be
        erased completely.
        """
        width = max(self._console.width - _ECHO, 1)
        parts: list[RenderableType] = list(self._tickers)
        if self._latest is not None:
            parts += [self._bar(self._latest.step, width)]
            parts += [_figures(lines.short_fields(Summary.of([self._latest])), width, style="bold")]
        self._height = max(len(parts), 1)
        return Constrain(Group(*parts), width)

    def _bar(self, step: int, width: int) -> RenderableType:
        done = f"{step / max(self._total, 1):.0%} {step}/{self._total}"
        if self._stopping:
            done += "  stopping"
        elif self._printed.end is not None and step < self._total:
            left = max((self._printed.end - self._clock()).total_seconds(), 0.0)
            done += f"  {text.duration(left)} left, done at {text.finish_time(self._clock(), left)}"
        label = Text(done, no_wrap=True, overflow="ellipsis")
        room = min(width - label.cell_len - 1, 30)
        if room < 5:
            return label
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=self._total, completed=step, width=room), label)
        return bar


_ECHO = 5
"""Columns left free at the right: ^C twice, and the cursor."""


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


class _Ticking:
    """Something that is running, and for how long."""

    def __init__(self, message: str):
        self._spinner = Spinner("dots")
        self.rename(message)

    def rename(self, message: str) -> None:
        self.message, self._start = message, time.monotonic()

    def seconds(self) -> float:
        """Since the last rename."""
        return time.monotonic() - self._start

    @contextmanager
    def ended(self, say: Callable[[str], None], stop: Callable[[], None], *, total: bool) -> Generator[None]:
        """At the end of the block, call `stop`, then say how long it took: if `total`, or if an exception ended it."""
        how = None
        try:
            yield
            how = "" if total else None
        except BaseException:
            how = "stopped after "
            raise
        finally:
            stop()
            if how is not None:
                say(f"{self.message}: {how}{text.duration(self.seconds())}")

    def __rich__(self) -> RenderableType:
        line = Text(no_wrap=True, overflow="ellipsis")
        spinner = self._spinner.render(time.monotonic())
        line.append_text(spinner if isinstance(spinner, Text) else Text())
        return line.append(f" {self.message} … {self.seconds():.0f} s")


class _Cadence:
    """When to print a line: at the first step of an attempt, every `every` steps, 30 s after the last line, at the end.

    The time left is estimated without the first step, which includes compilation.
    """

    def __init__(self, *, every: int, start_step: int, total_steps: int, clock: Callable[[], datetime]):
        self._every = every
        self._first = start_step + 1
        self._total = total_steps
        self._clock = clock
        self._since: list[StepRecord] = []
        self._recent = RecentSteps()
        self._printed: datetime | None = None
        self.eta: float | None = None
        """Seconds left after the last step; None before the second step of an attempt."""
        self.end: datetime | None = None
        """When the run will be done, by this estimate."""

    def first(self, record: StepRecord) -> bool:
        """Whether this is the first step of the attempt."""
        return record.step == self._first

    def add(self, record: StepRecord) -> Summary | None:
        """Take a step -> a summary of the steps since the last line, if a line is due."""
        now = self._clock()
        self._since.append(record)
        if not self.first(record):
            self._recent.add(record.rates.step_seconds)
            self.eta = self._recent.eta(self._total - record.step)
        self.end = None if self.eta is None else now + timedelta(seconds=self.eta)
        silent = self._printed is None or now - self._printed >= _LONGEST_SILENCE
        if record.step % self._every and record.step != self._total and not silent:
            return None
        summary = Summary.of(self._since)
        self._since.clear()
        self._printed = now
        return summary


_LONGEST_SILENCE = timedelta(seconds=30)


def open_console(
    config: LoggingConfig, *, total_steps: int, start_step: int = 0, primary: bool = True, stream: TextIO | None = None
) -> Console:
    """A console for `stream`, by default standard output; a quiet one in all processes but the first."""
    if not primary:
        return QuietConsole()
    stream = stream or sys.stdout
    steps: dict[str, Any] = {"total_steps": total_steps, "start_step": start_step, "every": config.every}
    on_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    if config.live == "always" or (config.live == "auto" and on_terminal):
        return LiveConsole(console=rich.console.Console(file=stream, force_terminal=True), **steps)
    return PlainConsole(stream=stream, **steps)
