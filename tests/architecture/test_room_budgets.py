"""Each room of the library has a budget of lines and files. It only falls."""

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from room_sizes import REPOSITORY, TABLE, Size, budgets, comments, git, of_the_tree, sizes, written

pytestmark = pytest.mark.smoke

SLACK = 40
"""Lines that a budget may lie above its room, so that not every mended line is also a new number; of megajax/, tests/,
docs/ and benchmarks/ ten times as many."""
RAISED = re.compile(
    r"^# \d{4}-\d\d-\d\d: budget of (\S+) raised by (\d+) lines(?: and (\d+) files)? for \S", re.MULTILINE
)
"""A comment at the end of the table that allows a higher budget: its date, the room, how much, and what was dropped."""


def test_no_room_is_above_its_budget() -> None:
    limits, now = budgets(TABLE.read_text(encoding="utf-8")), of_the_tree()
    above = {room: (size, limits.get(room)) for room, size in now.items() if not size.fits(limits.get(room, Size()))}
    assert not above, "larger than the budget, a pair of (lines, files): take something out"


def test_budgets_follow_rooms_that_became_smaller() -> None:
    limits, now = budgets(TABLE.read_text(encoding="utf-8")), of_the_tree()
    assert limits.keys() <= now.keys(), "a room that left has no budget"
    for room, limit in limits.items():
        slack = SLACK * (10 if room.endswith("/") else 1)
        assert limit.lines - now[room].lines <= slack and limit.files == now[room].files, (
            f"{room} became smaller: python tests/architecture/room_sizes.py --lower"
        )


def rises(versions: Sequence[str]) -> dict[str, Size]:
    """Room -> what its budgets rose by in all, beyond what dated comments of the newest table allow.

    versions: of the table, newest first. A room may be new, or divided: then the total of the library decides.
    """
    tables, left = [budgets(text) for text in versions], Counter[tuple[str, str]]()
    for newer, older in pairwise(tables):
        for room in newer.keys() & older.keys():
            left[room, "lines"] += max(newer[room].lines - older[room].lines, 0)
            left[room, "files"] += max(newer[room].files - older[room].files, 0)
    for room, lines, files in RAISED.findall(versions[0]):
        left.subtract({(room, "lines"): int(lines), (room, "files"): int(files or 0)})
    rooms = {room for (room, _), rise in left.items() if rise > 0}
    return {room: Size(max(left[room, "lines"], 0), max(left[room, "files"], 0)) for room in rooms}


def test_no_budget_was_raised_without_a_decision() -> None:
    name, text = TABLE.relative_to(REPOSITORY).as_posix(), TABLE.read_text(encoding="utf-8")
    try:
        commits = git("log", "-n", "40", "--format=%H", "--", name).decode().split()
        versions = [git("show", f"{commit}:{name}").decode() for commit in commits]
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git history")
    assert not rises([text, *versions]), f"say what left for it at the end of {name}"


def test_a_raised_budget_is_found_and_a_decision_allows_as_much_as_it_says() -> None:
    low, high = written({"data": Size(100, 3), "optim": Size(10, 1)}), written({"data": Size(101, 3)})
    more = written({"data": Size(500, 4)})
    allowed = "# 2026-12-01: budget of data raised by 1 lines for the reader that left\n"
    assert rises([high, low]) == {"data": Size(1, 0)} and not rises([low, high])
    assert not rises([high + allowed, low]) and rises([high + allowed.replace("data", "mesh"), low])
    assert rises([more + allowed, high, low]) == {"data": Size(399, 1)}
    assert not rises([more + "# 2026-12-01: budget of data raised by 400 lines and 1 files for a room\n", low])
    assert comments(written(budgets(high), allowed)) == allowed


def test_files_count_for_their_rooms() -> None:
    files = {"megajax/train.py": b"1\n2\n", "megajax/data/rows/a.py": b"1\n", "tests/a.py": b"1\n", "docs/a.md": b"1\n"}
    counted = sizes([*files, "docs/a.svg", "README.md", "megajax/data/a.json"], lambda path: files[path])
    assert counted == {
        **{"commands": Size(2, 1), "data": Size(1, 1), "docs/": Size(1, 1), "tests/": Size(1, 1)},
        "megajax/": Size(3, 2),
    }
    assert Path(TABLE).exists()
