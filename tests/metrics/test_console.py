"""Output of the consoles: exact where tools parse it."""

import contextlib
import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from datetime import datetime

import pytest
import rich.console
from waiting import wait_until

from megajax.display import text
from megajax.display.banner import plain
from megajax.metrics.config import LoggingConfig
from megajax.metrics.console import Console, LiveConsole, PlainConsole, open_console
from megajax.metrics.lines import Summary, Terms, step_line
from megajax.metrics.record import EvaluationRecord
from megajax.metrics.throughput import StepRate

NOW = datetime(2026, 11, 20, 18, 0, 0)
KNOWN = StepRate(devices=8, flops_per_token_causal=1e9, flops_per_token_full=1.2e9, peak_flops=312e12)


def plain_console(total: int = 500, **options) -> tuple[PlainConsole, io.StringIO]:
    stream = io.StringIO()
    return PlainConsole(total_steps=total, stream=stream, clock=lambda: NOW, **options), stream


def test_the_throughput_of_the_line_is_by_the_formula_of_megatron(step):
    """MFU stays that of the operations that the model needs; an unknown count has no field."""
    summary = Summary.of([step(99, rates=KNOWN.rates(0.1234, 12_177))])
    fields = {"total_steps": 500, "now": NOW, "eta": None}
    line = step_line(summary, **fields, terms=Terms(megatron=1.5))
    assert "throughput per GPU (TFLOP/s/GPU): 18.5 |" in line and "MFU: 4.0% |" in line
    assert "TFLOP/s" not in step_line(summary, **fields, terms=Terms(megatron=None))


def test_the_plain_line_has_the_format_of_megatron(step):
    console, stream = plain_console()
    console.log(step(99, rates=KNOWN.rates(0.1234, 12_177)))
    before = len(stream.getvalue())
    record = step(
        100, 2.345678, grad_norm=0.912, consumed_samples=3200, global_batch_size=32, loss_scale=1.0,
        rates=KNOWN.rates(0.1234, 12_177),
    )  # fmt: skip
    console.log(record)
    assert stream.getvalue()[before:] == (
        " [2026-11-20 18:00:00] iteration      100/     500 | consumed samples:         3200 | "
        "elapsed time per iteration (ms): 123.4 | throughput per GPU (TFLOP/s/GPU): 12.3 | "
        "learning rate: 3.000000E-04 | global batch size:    32 | lm loss: 2.345678E+00 | loss scale: 1.0 | "
        "grad norm: 0.912 | number of skipped iterations:   0 | number of nan iterations:   0 | "
        "tokens/s/device: 12334.9 | MFU: 4.0% | ETA: 49 s |\n"
    )


def test_the_plain_line_omits_unknown_fields(step):
    console, stream = plain_console(total=1)
    console.log(step(1, metrics={"router loss": 0.25}))
    assert stream.getvalue() == (
        " [2026-11-20 18:00:00] iteration        1/       1 | consumed samples:            4 | "
        "elapsed time per iteration (ms): 500.0 | learning rate: 3.000000E-04 | global batch size:     4 | "
        "lm loss: 2.500000E+00 | router loss: 2.500000E-01 | grad norm: 0.900 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 | tokens/s/device: 64.0 |\n"
    )


def test_a_model_without_text_has_no_perplexity_and_no_tokens(step):
    console, stream = plain_console(total=1, terms=Terms("positions"))
    console.log(step(1))
    console.log(EvaluationRecord(step=1, split="validation", loss=1.5))
    trained, evaluated = stream.getvalue().splitlines()
    assert "| loss: 2.500000E+00 |" in trained and "| positions/s/device: 64.0 |" in trained
    assert evaluated == " validation loss at iteration 1 | loss value: 1.500000E+00 |"
    screen = io.StringIO()
    live = LiveConsole(
        total_steps=1, console=rich.console.Console(file=screen, width=120), clock=lambda: NOW, terms=Terms("rows")
    )
    live.log(step(1))
    live.log(EvaluationRecord(step=1, split="validation", loss=1.5))
    live.close()
    assert "perplexity" not in screen.getvalue() and "tokens" not in screen.getvalue()


def test_the_plain_line_has_fields_for_phases_and_norms(step):
    console, stream = plain_console(total=25, every=2)
    console.log(step(1, float("nan"), phases={"data_wait": 0.002}))
    console.log(step(2, phases={"data_wait": 0.004, "save": 0.5}))
    console.log(step(3, phases={"data_wait": 0.001}))
    last = {"data_wait": 0.003, "data_wait_min": 0.001, "data_wait_max": 0.25, "save": 1.0}
    console.log(step(4, phases=last, metrics={"num_zeros": 12.0, "parameter_norm": 3.25}))
    first, second, third = stream.getvalue().splitlines()
    assert first.endswith("| data wait per iteration (ms): 2.0 |") and "| lm loss: NAN |" in first
    assert "| data wait per iteration (ms): 4.0 | save (ms): 500.0 | ETA: 12 s |" in second
    assert "| data wait per iteration (ms): 2.0 (processes: 1.0 to 250.0) | save (ms): 1000.0 | ETA" in third
    assert "| grad norm: 0.900 | num zeros: 12.0 | params norm: 3.250 | number of skipped" in third
    assert "parameter_norm" not in third


def test_lines_at_the_first_every_nth_and_last_step_summarize_those_between(step):
    console, stream = plain_console(total=25, every=10)
    rate = StepRate(devices=1)
    for number in range(1, 26):
        loss = float("nan") if number in (14, 15) else float(number)
        seconds = 2.0 if number == 12 else 1.0
        console.log(step(number, loss, skipped=number == 14, rates=rate.rates(seconds, 10)))
    lines = stream.getvalue().splitlines()
    assert [int(re.search(r"iteration +(\d+)/", line)[1]) for line in lines] == [1, 10, 20, 25]
    third = dict(part.split(": ") for part in lines[2].strip(" |").split(" | ")[1:])
    finite_losses = [11, 12, 13, 16, 17, 18, 19, 20]
    assert float(third["lm loss"]) == pytest.approx(sum(finite_losses) / len(finite_losses))
    assert third["elapsed time per iteration (ms)"] == "1100.0"
    assert third["tokens/s/device"] == "9.1"
    assert int(third["number of skipped iterations"]) == 1
    assert int(third["number of nan iterations"]) == 2  # skipped or not
    assert third["ETA"] == "5.0 s"


def test_the_evaluation_line():
    console, stream = plain_console()
    console.log(EvaluationRecord(step=100, split="validation", loss=2.3))
    assert stream.getvalue() == (
        " validation loss at iteration 100 | lm loss value: 2.300000E+00 | lm loss PPL: 9.974182E+00 |\n"
    )


def test_the_plain_ticker_prints_at_intervals_and_at_the_end():
    console, stream = plain_console(tick_seconds=0.05)
    with console.ticker("compiling the train step"):
        assert wait_until(lambda: stream.getvalue().count("\n") >= 2)
    with pytest.raises(KeyError), console.ticker("reading"):
        raise KeyError
    *ticks, total, failed = stream.getvalue().splitlines()
    assert all(re.fullmatch(r"compiling the train step … \d+\.\d s", line) for line in ticks)
    assert re.fullmatch(r"compiling the train step: \d+\.\d s", total) and float(total.split()[-2]) >= 0.1
    assert re.fullmatch(r"reading: stopped after \d+\.\d s", failed)


def live_console(total: int = 500) -> tuple[LiveConsole, io.StringIO]:
    stream = io.StringIO()
    terminal = rich.console.Console(file=stream, force_terminal=True, width=160, color_system=None)
    return LiveConsole(total_steps=total, console=terminal, clock=lambda: NOW), stream


def test_the_live_console_shows_bar_figures_and_lines_above(step):
    console, stream = live_console()
    with console.ticker("compiling the train step"):
        time.sleep(0.05)
    for number in range(1, 211):
        console.log(step(number, rates=KNOWN.rates(2.0, 12_000)))
    console.log(EvaluationRecord(step=210, split="validation", loss=2.3))
    console.say("saved [step 210]")
    console.close()
    output = stream.getvalue()
    assert "⠋ compiling the train step … 0 s" in output
    assert re.search(r"compiling the train step: \d+\.\d s\n", output)
    last = output.rsplit("━", 1)[1]
    assert "42% 210/500  9m40s left, done at 18:09" in last
    assert "loss 2.5000  grad norm 0.900  lr 3.00e-04  tokens/s/device 750  TFLOP/s/device 0.8  MFU 0.2%" in last
    assert "step 210/500  loss 2.5000" in output
    assert "validation 210/500  loss 2.3000  perplexity 9.97" in output
    assert "saved [step 210]\n" in output
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1


def test_the_kind_of_console_depends_on_config_and_stream():
    auto, always, never = (LoggingConfig(live=live) for live in ("auto", "always", "never"))
    pipe = io.StringIO()
    assert type(open_console(auto, total_steps=1, stream=pipe)) is PlainConsole
    assert type(open_console(always, total_steps=1, stream=pipe)) is LiveConsole
    assert type(open_console(always, total_steps=1, stream=pipe, primary=False)) is Console
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal:
        assert type(open_console(auto, total_steps=1, stream=terminal)) is LiveConsole
        assert type(open_console(never, total_steps=1, stream=terminal)) is PlainConsole
    os.close(leader)


def test_the_quiet_console_is_quiet(capfd, step):
    console = Console()
    with console.ticker("compiling"):
        console.log(step(1))
        console.say("hello")
        console.show("title", [])
    console.close()
    assert capfd.readouterr() == ("", "")


ON_TERMINAL = """
import os, sys, time
from megajax.metrics.config import LoggingConfig
from megajax.metrics.console import open_console
from megajax.metrics.record import StepRecord
from megajax.metrics.throughput import StepRate
from megajax.metrics.writer import Writers
console = open_console(LoggingConfig(), total_steps=1000)
counts = dict(grad_norm=1.0, lr=1.0, consumed_samples=1, consumed_tokens=1, global_batch_size=1)
with Writers([console]):
    for number in range(1, 1000):
        console.log(StepRecord(step=number, loss=2.5, rates=StepRate(devices=1).rates(1.0, 1), **counts))
        time.sleep(0.02)
        if number == 10 and sys.argv[1] == "exit":
            console.release()
            os._exit(130)
"""


@pytest.mark.parametrize(("way", "code"), [("ctrl-c", -signal.SIGINT), ("exit", 130)])
def test_the_terminal_is_usable_afterwards(way, code):
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ON_TERMINAL, way], stdin=follower, stdout=follower, stderr=follower,
        env=os.environ | {"TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(follower)
    output = b""
    while b"loss" not in output:
        output += os.read(leader, 4096)
    if way == "ctrl-c":
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # Raised at the end of a terminal.
        while data := os.read(leader, 4096):
            output += data
    assert process.wait(100) == code
    os.close(leader)
    assert output.count(b"\x1b[?25l") == output.count(b"\x1b[?25h") == 1
    assert output.rindex(b"\x1b[?25l") < output.rindex(b"\x1b[?25h")


def test_sections_are_aligned():
    sections = [
        ("work", [("steps", "100 (60 in this attempt)"), ("tokens/s, all included", "25.0k")]),
        ("kept", [("files", "/r/metrics.jsonl\n/r/loss.png")]),
    ]
    assert plain("done", sections).splitlines() == [
        "done",
        "  work",
        "    steps                   100 (60 in this attempt)",
        "    tokens/s, all included  25.0k",
        "  kept",
        "    files                   /r/metrics.jsonl",
        "                            /r/loss.png",
    ]
    console, stream = live_console()
    console.show("done", sections)
    assert re.search(r"│   tokens/s, all included  25\.0k +│", stream.getvalue())


def test_durations_and_counts_as_text():
    assert [text.duration(s) for s in (0.04, 9.94, 9.96, 59.6, 3599.4, 11_220, 187_000)] == [
        "0.0 s", "9.9 s", "10 s", "1m00s", "59m59s", "3h07m", "2d03h"
    ]  # fmt: skip
    assert [text.count(n) for n in (0, 9_999, 10_000, 124_439_808, 999_950, 1.3e12)] == [
        "0", "9,999", "10.0k", "124.4M", "1.00M", "1.30T"
    ]  # fmt: skip
