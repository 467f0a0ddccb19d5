"""The screen of a terminal of a given width, computed from the bytes written to it."""

import io
import re
from datetime import datetime, timedelta

import pytest
import rich.console

from megajax.display import text
from megajax.metrics.console import LiveConsole, PlainConsole
from megajax.metrics.record import EvaluationRecord
from megajax.metrics.throughput import StepRate

KNOWN = StepRate(devices=8, flops_per_token_causal=1e9, flops_per_token_full=1.2e9, peak_flops=312e12)
FAST = KNOWN.rates(2.0, 12_000)


class Terminal(io.StringIO):
    """Interprets a program's output: \\r, \\n, cursor up, erase the line, and line breaks at the right edge."""

    def __init__(self, width: int):
        super().__init__()
        self.width, self.lines, self.row, self.column = width, [""], 0, 0

    def write(self, output: str) -> int:
        for control, character in re.findall(r"(\x1b\[[?\d;]*[A-Za-z])|(.)", output, re.DOTALL):
            if control.endswith("A"):
                self.row = max(self.row - int(control[2:-1] or 1), 0)
            elif control.endswith("K"):
                self.lines[self.row] = ""
            elif character == "\r":
                self.column = 0
            elif character == "\n":
                self._next_line()
            elif character:
                self._put_character(character)
        return len(output)

    def _next_line(self) -> None:
        self.row, self.column = self.row + 1, 0
        self.lines += [""] * (self.row + 1 - len(self.lines))

    def _put_character(self, character: str) -> None:
        if self.column == self.width:
            self._next_line()
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
        self.column += 1

    def screen(self) -> list[str]:
        """The lines, without empty lines at the end."""
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n").split("\n")


class Clock:
    """A clock that moves only by `wait`."""

    def __init__(self):
        self.now = datetime(2026, 11, 20, 18, 0, 0)

    def __call__(self) -> datetime:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def live(width: int, total: int = 500, **options) -> tuple[LiveConsole, Terminal]:
    terminal = Terminal(width)
    console = rich.console.Console(file=terminal, force_terminal=True, width=width, color_system=None)
    return LiveConsole(total_steps=total, console=console, clock=Clock(), **options), terminal


def refresh(console: LiveConsole) -> None:
    """Redraw the lines that update in place, without waiting for rich's thread."""
    assert console._live is not None
    console._live.refresh()


WIDTHS = pytest.mark.parametrize("width", [40, 80, 120])


@WIDTHS
def test_a_stop_request_is_printed_in_full_and_removes_the_time_left(step, width):
    console, terminal = live(width)
    for number in (1, 2, 3):
        console.log(step(number, rates=FAST))
    refresh(console)
    assert any("left, done at 18:" in line for line in terminal.screen()) or width == 40
    terminal.write("^C")  # A terminal echoes it at the cursor.
    console.stop_requested("SIGINT received: stopping after this step; press Ctrl-C again to exit at once, unsaved")
    console.log(step(4, rates=FAST))
    refresh(console)
    screen = terminal.screen()
    joined = " ".join(screen)
    assert "SIGINT received: stopping after this step; press Ctrl-C again to exit at once, unsaved" in joined
    assert "^C" not in joined and "left, done" not in joined
    assert [line for line in screen if "4/500" in line and "stopping" in line] == [screen[-2]]
    console.close()


@WIDTHS
def test_the_bar_is_erased_at_the_end(step, width):
    console, terminal = live(width, total=3)
    with console.ticker("compiling the train step", total=False) as rename:
        refresh(console)
        rename("first step")
        console.log(step(1, rates=FAST))
        refresh(console)
    for number in (2, 3):
        console.log(step(number, rates=FAST))
        refresh(console)
    console.steps_over()
    refresh(console)
    console.say("done")
    console.close()
    first, *between, last = terminal.screen()
    assert first.startswith("step 1/3  loss 2.5000") and last == "done"
    assert [line[:8] for line in between] == ["step 3/3"]
    assert "\x1b[?25h" not in first


@WIDTHS
def test_the_bar_is_erased_after_a_crash_and_echoed_keys(step, width):
    console, terminal = live(width)
    with pytest.raises(KeyError), console.ticker("a message " * 20):
        for number in (None, 1):
            if number is not None:
                console.log(step(number, rates=FAST))
            for _ in range(3):
                refresh(console)
                terminal.write("^C^C")
        console.say("between")
        raise KeyError
    console.close()
    screen = terminal.screen()
    assert screen[0].startswith("step   1/500") and screen[1] == "between"
    assert " ".join(screen[2:]).startswith("a message a message") and re.search(r"stopped after \d+\.\d s$", screen[-1])
    assert not any("━" in line or "^C" in line for line in screen)


@WIDTHS
def test_lines_of_figures_never_wrap(step, width):
    console, terminal = live(width, every=1)
    console.log(step(1, rates=FAST))
    console.log(step(2, rates=FAST))
    console.log(step(3, float("nan"), rates=FAST))
    console.log(EvaluationRecord(step=3, split="validation", loss=2.3))
    console.steps_over()
    console.close()
    screen = terminal.screen()
    assert len(screen) == 4
    assert re.search(r"loss nan .*not finite 1$", screen[2])
    assert ("TFLOP" in screen[1]) == (width == 120)
    assert "tokens/s/device" not in screen[0], "most of the first step's time is compilation"


def test_release_erases_the_bar_of_a_process_that_exits_immediately(step, tmp_path):
    with (tmp_path / "terminal").open("w") as file:
        console = LiveConsole(total_steps=9, console=rich.console.Console(file=file, force_terminal=True, width=80))
        console.log(step(1))
        refresh(console)
        console.release()
        terminal = Terminal(80)
        terminal.write((tmp_path / "terminal").read_bytes().decode())
        assert terminal.column == 0 and [line[:8] for line in terminal.screen()] == ["step 1/9"]
        console.close()


def test_the_time_left_excludes_compilation(step):
    clock, stream = Clock(), io.StringIO()
    console = PlainConsole(total_steps=100, every=1, stream=stream, clock=clock)
    for number, seconds in ((1, 300.0), (2, 1.0), (3, 2.0)):
        console.log(step(number, rates=KNOWN.rates(seconds, 10)))
    first, second, third = stream.getvalue().splitlines()
    assert "ETA" not in first and "| ETA: 1m38s |" in second and "| ETA: 1m37s |" in third


def test_the_estimated_end_does_not_move_during_a_step(step):
    console, terminal = live(120)
    for number in (1, 2):
        console.log(step(number, rates=KNOWN.rates(60.0, 10)))
    refresh(console)
    assert "8h18m left, done at Nov 21 02:18" in terminal.screen()[-2]
    console._printed.clock.wait(120)
    refresh(console)
    assert "8h16m left, done at Nov 21 02:18" in terminal.screen()[-2]
    console.close()


@pytest.mark.parametrize(
    ("seconds", "printed"),
    [(0.01, [1, 100, 200, 300]), (1.0, [1, 31, 61, 91, 100, 130, 160, 190, 200, 230, 260, 290, 300]),
     (100.0, list(range(1, 301)))],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["plain", "live"])
def test_a_line_is_printed_at_least_every_30_seconds(step, kind, seconds, printed):
    clock, stream = Clock(), io.StringIO()
    if kind == "plain":
        console = PlainConsole(total_steps=300, every=100, stream=stream, clock=clock)
    else:
        screen = rich.console.Console(file=stream, width=80, color_system=None)
        console = LiveConsole(total_steps=300, every=100, console=screen, clock=clock)
    for number in range(1, 301):
        clock.wait(seconds)
        console.log(step(number))
    console.steps_over()
    console.close()
    assert [int(number) for number in re.findall(r"(?:iteration|step) +(\d+)/", stream.getvalue())] == printed


def test_control_characters_are_escaped():
    assert text.visible("a\tb\n\x00\x1b[2J\r\x7f\x9b\u202e\ud800") == ("a\tb\n\\x00\\x1b[2J\\r\\x7f\\x9b\\u202e\\ud800")
    unchanged = "h\u00e9 \u00a0\u3000 \u4e2d \U0001f469\u200d\U0001f680 \u0646\u200c\u0647 \ufffd \\x1b"
    assert text.visible(unchanged) == unchanged
