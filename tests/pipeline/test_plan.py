"""python -m megajax.plan: the drawn tables, the picture, and refusals."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.pipeline.check import measure
from megajax.pipeline.drawing import report, save_picture, table
from megajax.pipeline.schedule import one_f_one_b
from megajax.plan import main

ROOT = Path(__file__).parents[2]

P4_M8 = """\
tick    0  1  2  3  4  5  6  7  8  9 10 11 12 13
F s0    0  1  2  3  4  5  6  7  .  .  .  .  .  .
F s1    .  0  1  2  3  4  5  6  7  .  .  .  .  .
F s2    .  .  0  1  2  3  4  5  6  7  .  .  .  .
F s3    .  .  .  0  1  2  3  4  5  6  7  .  .  .
B s0    .  .  .  .  .  .  0  1  2  3  4  5  6  7
B s1    .  .  .  .  .  0  1  2  3  4  5  6  7  .
B s2    .  .  .  .  0  1  2  3  4  5  6  7  .  .
B s3    .  .  .  0  1  2  3  4  5  6  7  .  .  .
phase  |-- F -- |-------- F+B --------- |-- B -- |"""

P2_V2_M4 = """\
tick    0  1  2  3  4  5  6  7  8  9 10 11
F s0   0a 1a 0b 1b 2a 3a 2b 3b  .  .  .  .
F s1    . 0a 1a 0b 1b 2a 3a 2b 3b  .  .  .
B s0    .  .  .  . 0b 1b 0a 1a 2b 3b 2a 3a
B s1    .  .  . 0b 1b 0a 1a 2b 3b 2a 3a  .
phase  |-- F -- |----- F+B ------ |-- B -- |"""

FIGURES = """
ticks       14: 3 F, 8 F+B, 3 B
bubble      37.50% over ideal time (3/8), 27.27% of the total
in flight   7 5 3 1 by stage, in microbatches
ring slots  7 per stage
"""


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_1f1b_with_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--schedule=1f1b", "--stages=4", "--microbatches=8")
    assert text == f"1f1b: 4 stages, 8 microbatches\n\n{P4_M8}\n{FIGURES}"


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_interleaved(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, f"--schedule={name}", "--stages=2", "--microbatches=4", "--virtual-stages=2")
    assert text.startswith(f"interleaved: 2 stages, 2 chunks each, 4 microbatches\n\n{P2_V2_M4}\n")
    assert "5 3 by stage, in chunks of 1/2 stage\n" in text


def test_gpipe_reports_its_activations(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--schedule=gpipe", "--stages=2", "--microbatches=3", "--virtual-stages=1")
    assert "ticks       8: 4 F, 4 B\n" in text
    assert "ring slots  3 per stage, and 1 for idle forwards to write to: 4\n" in text
    assert "outputs     3 wait for their loss\n" in text


def test_with_the_loss_wait_of_training(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--schedule=1f1b", "--stages=4", "--microbatches=8", "--loss-wait=1")
    assert "ticks       15: 4 F, 7 F+B, 4 B\nbubble      37.50%" in text
    assert "in flight   8 6 4 2 by stage" in text and "outputs     2 wait for their loss\n" in text


def test_a_long_table_wraps_at_the_terminal_width() -> None:
    folded = table(one_f_one_b(4, 8), width=40)
    assert max(map(len, folded.splitlines())) <= 40
    blocks = [block.splitlines() for block in folded.split("\n\n")]
    assert len(blocks) == 2
    joined = [first + second[6:] for first, second in zip(*(block[:-1] for block in blocks), strict=True)]
    assert joined == P4_M8.splitlines()[:-1]
    assert table(one_f_one_b(4, 8), width=1).count("tick") == 14, "one tick a block where nothing fits"


def test_columns_are_aligned_for_large_numbers() -> None:
    lines = table(one_f_one_b(12, 120, 30)).splitlines()
    rows = lines[:-1]
    assert len({len(row) for row in rows}) == 1
    assert "0.29" in rows[1], "more chunks than letters"
    column_ends = np.cumsum([len(part) for part in rows[0].replace(" ", "\0 ").split("\0")])
    assert column_ends[-1] == len(rows[0])


def test_the_picture_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    path = tmp_path / "schedule.png"
    text = printed(
        capsys, "--schedule=interleaved", "--stages=4", "--microbatches=8", "--virtual-stages=2", f"--png={path}"
    )
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert text.endswith(f"picture     {path}\n")


def test_the_picture_has_the_duration_of_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy time and total time of the boxes give the bubble, for backward passes twice as long as forward passes."""
    axes_module = pytest.importorskip("matplotlib.axes", reason="needs the extra plot")
    drawings = []
    original = axes_module.Axes.broken_barh

    def spy(self: object, boxes: list[tuple[int, int]], rows: tuple[float, float], **style: object) -> object:
        drawings.append((boxes, rows))
        return original(self, boxes, rows, **style)

    monkeypatch.setattr(axes_module.Axes, "broken_barh", spy)
    schedule = one_f_one_b(4, 8, 2)
    save_picture(schedule, tmp_path / "x.png")
    ((_, timeline),), _ = drawings[0]
    for stage in range(4):
        boxes = sorted(box for boxes, rows in drawings[1:] if rows[0] == stage - 0.45 for box in boxes)
        busy = sum(length for _, length in boxes)
        assert busy == 8 * 2 * 3
        assert timeline == busy * (1 + measure(schedule).pipeline_bubble)
        assert all(start + length <= after for (start, length), (after, _) in pairwise(boxes))


class WithoutMatplotlib:
    """Finds modules as if matplotlib were not installed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_without_matplotlib_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [WithoutMatplotlib, *sys.meta_path])
    with user_error("--png"):
        main(["--schedule=1f1b", "--stages=2", "--microbatches=2", f"--png={tmp_path / 'x.png'}"])


def test_a_picture_too_large_to_read_is_refused(tmp_path: Path) -> None:
    with user_error("--png"):
        save_picture(one_f_one_b(8, 4000), tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


REFUSED = {
    "no stages": (["--schedule=1f1b", "--stages=0", "--microbatches=8"], "--stages: must be at least 1, got 0"),
    "no groups": (
        ["--schedule=interleaved", "--stages=4", "--microbatches=6", "--virtual-stages=2"],
        "6 is not a multiple of 4",
    ),
    "misspelt": (["--schedule=gpip", "--stages=4", "--microbatches=6"], "did you mean gpipe?"),
    "missing": (["--schedule=gpipe"], "--stages: must be given"),
    "longer wait": (
        ["--schedule=1f1b", "--stages=2", "--microbatches=6", "--loss-wait=2"],
        "--loss-wait: expected one",
    ),
    "no number": (["--schedule=gpipe", "--stages=two", "--microbatches=6"], "expected a whole number, got 'two'"),
    "unknown flag": (["--schedule=gpipe", "--stages=2", "--microbatch=6"], "did you mean microbatches?"),
    "endless": (["--schedule=gpipe", "--stages=1000", "--microbatches=100000"], "more than the 1,000,000"),
    "no folder": (["--schedule=gpipe", "--stages=2", "--microbatches=2", "--png=/no/folder/x.png"], "can't be written"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    if case == "no folder":
        pytest.importorskip("matplotlib", reason="needs the extra plot")
    arguments, message = REFUSED[case]
    with pytest.raises(UserError) as caught:
        main(arguments)
    assert message in str(caught.value)


def test_help_is_quick_and_an_error_ends_with_code_2() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "megajax.plan"]
    help_run = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "dataclasses" in help_run.stderr and not {"jax", "numpy"} & set(help_run.stderr.split())
    command = [sys.executable, "-m", "megajax.plan"]
    for flag in ("--schedule", "--stages", "--microbatches", "--virtual-stages", "--loss-wait", "--png", "--devices"):
        assert flag in help_run.stdout
    refused_run = subprocess.run(
        [*command, *REFUSED["no groups"][0]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert refused_run.returncode == 2 and not refused_run.stdout
    assert "set microbatches to 4 or 8" in refused_run.stderr and "Traceback" not in refused_run.stderr


def test_a_closed_pipe_ends_it_silently() -> None:
    """The table does not fit into the pipe's buffer."""
    command = [sys.executable, "-m", "megajax.plan", "--schedule=1f1b", "--stages=4", "--microbatches=4000"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_the_page_shows_the_output_of_the_program() -> None:
    assert report(one_f_one_b(4, 8)) in (ROOT / "docs/pipeline.md").read_text()
