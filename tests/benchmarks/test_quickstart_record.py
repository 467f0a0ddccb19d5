"""The record of docs/record.md: its rules, one short run of each kind, and the rows of the table."""

import json
import re
from pathlib import Path

import pytest

import megajax as mj
from benchmarks.outcome import RESULTS, ROOT
from benchmarks.training.record import GIVEN, LOSS, ROWS, record, rules_for, timed
from megajax.config.errors import UserError

SETTINGS = """import megajax as mj

def config() -> mj.RunConfig:
    return mj.load("quickstart.py", "steps=2", "batch.micro_size=8", "batch.global_size=64", "model.stack.repeats=1")
"""


def test_the_shipped_quickstart_keeps_the_rules() -> None:
    cfg = mj.load("quickstart.py", *GIVEN)
    assert rules_for(cfg) == f"evaluation.batches={ROWS // cfg.batch.global_size}"


@pytest.mark.parametrize(
    "setting",
    [
        *("data.megabytes=16", "data.split=98,1,1", "model.sequence_length=256", "model.vocabulary_size=300"),
        *("checkpoint.load=runs/a", "batch.global_size=48", "evaluation.sets={a: {type: StandardLibraryConfig}}"),
    ],
)
def test_settings_that_are_not_comparable_are_refused(setting: str) -> None:
    with pytest.raises(UserError) as caught:
        rules_for(mj.load("quickstart.py", *GIVEN, setting, "batch.micro_size=16"))
    assert setting.partition("=")[0].split(".")[0] in str(caught.value)


def test_a_run_gives_a_row(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SETTINGS)
    row = record(settings=str(tmp_path / "mine.py"), seeds=(1,), loss=6.0)
    assert LOSS < row["validation_loss"] < 6 and "wrong" not in row
    assert row["processor_seconds"] > 1 and row["wall_seconds"] > 1 and len(row["runs"]) == 1


def test_the_means_of_the_seeds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter((1.5, 1.58, 1.6, 1.5, 1.5, 1.6))
    given = []

    def known(settings: str, words: tuple[str, ...]) -> dict[str, float]:
        given.append((settings, words[-1]))
        return {"validation_loss": next(losses), "processor_seconds": 50.0, "wall_seconds": 30.0}

    monkeypatch.setattr("benchmarks.training.record.timed", known)
    assert "above 1.55" in record()["wrong"]
    assert given == [("quickstart.py", f"seed={seed}") for seed in (1, 2, 3)]
    assert record()["validation_loss"] == pytest.approx(1.533)


def test_a_run_that_fails_shows_its_log() -> None:
    with pytest.raises(UserError) as caught:
        timed("nothing.py", ())
    assert "nothing.py" in str(caught.value)


def test_rows_of_the_table_are_those_of_the_files() -> None:
    text = (ROOT / "docs/record.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d{4}-\d\d-\d\d \| .*? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE)
    files = [json.loads(path.read_text(encoding="utf-8"))["figures"] for path in sorted(RESULTS.glob("record*.json"))]
    names = ("validation_loss", "processor_seconds", "wall_seconds")
    known = {tuple(round(float(figures[name]), 3 - (name != names[0]) * 2) for name in names) for figures in files}
    assert {tuple(map(float, row)) for row in rows} == known
    assert all(float(loss) <= LOSS for loss, *_ in rows)
    assert [float(seconds) for _, seconds, _ in rows] == sorted((float(row[1]) for row in rows), reverse=True)
