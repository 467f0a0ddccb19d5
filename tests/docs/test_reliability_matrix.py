"""The fault matrix of docs/reliability.md: each fault appears once, with a verdict and existing tests."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "reliability.md"
FAULTS = [f"F{number:02d}" for number in range(1, 45)]
VERDICTS = {"holds", "in part"}


def rows() -> list[list[str]]:
    """Cells of the table: id, fault, what happens, tests, verdict."""
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\| F\d\d ", line)]
    return [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines]


def test_every_fault_has_one_row() -> None:
    assert [cells[0] for cells in rows()] == FAULTS


def test_every_row_has_a_verdict_and_a_test() -> None:
    for cells in rows():
        assert len(cells) == 5, cells
        assert cells[4].partition(":")[0] in VERDICTS, cells
        assert cells[4] in VERDICTS - {"in part"} or cells[4].startswith("in part: "), cells
        assert re.search(r"`test_\w+::test_\w+`", cells[3]), cells


def test_the_tests_that_rows_name_exist() -> None:
    tests = {path.stem: path for path in (REPOSITORY / "tests").rglob("test_*.py")}
    named_tests = set(re.findall(r"`(test_\w+)::(\w+)`", PAGE.read_text()))
    missing = [
        f"{file}::{test}"
        for file, test in named_tests
        if file not in tests or f"def {test}(" not in tests[file].read_text()
    ]
    assert not missing
