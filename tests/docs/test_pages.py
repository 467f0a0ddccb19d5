"""What pages state about each other, events and faults is true."""

import ast
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from docs.build import quickstart
from megajax.config import load
from megajax.config.errors import UserError
from tests.docs.blocks import PAGES, ROOT, blocks
from tests.docs.test_commands import commands_of, file_of

RELIABILITY, SILENT_BUGS = ROOT / "docs/reliability.md", ROOT / "docs/silent_bugs.md"
ELSEWHERE = ("--devices", "--resilience.exit_after_steps")
"""Flags by which commands differ that may go on with each other's run."""
WRITERS = {"event", "_event", "_record_event", "_append", "append_event", "record", "_record", "record_failure"}
"""Functions that write events."""
FAULTS = [f"F{number:02d}" for number in range(1, 45)]
VERDICTS = {"holds", "in part"}


def writes(arguments: list[str]) -> list[str]:
    """The files, prefixes and run folders that a command writes, according to its arguments."""
    words = [*arguments]
    values = dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
    values |= {word: after for word, after in pairwise(words) if word.startswith("--")}
    found = [values[name] for name in ("--output-prefix", "--output") if name in values]
    if "megajax.train" in words and not {"--help", "--print-config"} & {word.split("=")[0] for word in words}:
        overrides = [word for word in words if word.startswith("--run_dir=")]
        try:
            found.append(load(values["--config"], *(word.removeprefix("--") for word in overrides)).run_dir)
        except UserError:  # A config that the page writes.
            found += [word.removeprefix("--run_dir=") for word in overrides]
    return found


def same(arguments: list[str]) -> str:
    """The common part of commands that may write to one place."""
    words = arguments[arguments.index("--") + 1 :] if "megajax.launch" in arguments else arguments
    return " ".join(word for word in words if word.split("=")[0] not in ELSEWHERE)


def test_no_two_pages_write_to_one_place() -> None:
    """Except for identical commands, such as the quickstart at the start of several pages."""
    written: dict[str, dict[str, str]] = defaultdict(dict)
    for page in PAGES:
        for block in blocks(page):
            if (file := file_of(block)) and not (ROOT / file).is_file():
                written[file][block.text] = str(block)
            for arguments in commands_of(block):
                for place in writes(arguments):
                    written[place][same(arguments)] = str(block)
    assert {"data/mine", "runs/quickstart", "mine.py", "answers.jsonl"} <= written.keys()
    collisions = [f"{place}: {', '.join(by.values())}" for place, by in written.items() if len(by) > 1]
    assert not collisions, "written by different commands:\n" + "\n".join(collisions)


def test_the_readme_has_text_and_picture_of_one_run() -> None:
    """docs/build/quickstart.py writes both from the output of one run."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = quickstart.BLOCK.findall(text)
    assert quickstart.excerpt(block) == block
    assert re.fullmatch(r"validation loss \d\.\d{4}, test loss \d\.\d{4}", quickstart.losses(block))
    assert f"![Report of this run: {quickstart.losses(block)}, timeline" in text


def test_an_excerpt_has_the_steps_of_the_readme_and_no_times() -> None:
    line = (
        " [2026-11-28 09:01:29] iteration       {}/     900 | consumed samples:          160 | elapsed (ms): 1260.1 | "
        "learning rate: 3.0E-04 | global batch size:    16 | lm loss: 5.0E+00 | loss scale: 1.0 | grad norm: 3.214 | x"
    )
    facts = ("MegaJAX", "  model", "    parameters         1", "    FLOPs   2", "  batch", "    mesh   3")
    output = ["setting up", *facts, line.format(10), line.format(20), "loss curve: a", "report: b", "sample (c):"]
    output += ["def", "", "done"]
    assert quickstart.excerpt("\n".join([*output, "  work"])).splitlines() == [
        *("MegaJAX", "  model", "    parameters         1", "  batch", "    mesh   3"),
        " iteration       10/     900 | ... | learning rate: 3.0E-04 | lm loss: 5.0E+00 | grad norm: 3.214 | ...",
        *("report: b", "sample (c):", "def"),
    ]


def recorded_events() -> set[str]:
    """First arguments of calls that write events, in code that belongs to training runs."""
    names = set()
    for folder in ("job", "faults", "launcher", "metrics", "checkpoint"):
        for path in (ROOT / "megajax" / folder).rglob("*.py"):
            for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
                method = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
                texts = [part.value for part in call.args[:2] if isinstance(part, ast.Constant)]
                names |= {text for text in texts if method in WRITERS and isinstance(text, str)}
    return names


def test_every_event_is_in_the_table() -> None:
    text = (ROOT / "docs/logging.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", text[text.index("## Events") :], re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {"start", "crash", "save_failed", "restart", "goodput"} <= recorded_events()
    assert recorded_events() - listed == set()


def fault_rows() -> list[list[str]]:
    """Cells of the table: id, fault, what happens, tests, verdict."""
    lines = [line for line in RELIABILITY.read_text().splitlines() if re.match(r"\| F\d\d ", line)]
    return [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines]


def test_every_fault_has_one_row() -> None:
    assert [cells[0] for cells in fault_rows()] == FAULTS


def test_every_row_has_a_verdict_and_a_test() -> None:
    for cells in fault_rows():
        assert len(cells) == 5, cells
        assert cells[4].partition(":")[0] in VERDICTS, cells
        assert cells[4] in VERDICTS - {"in part"} or cells[4].startswith("in part: "), cells
        assert re.search(r"`test_\w+::test_\w+`", cells[3]), cells


def missing_tests(page: Path) -> list[str]:
    tests = {path.stem: path for path in (ROOT / "tests").rglob("test_*.py")}
    named = sorted(set(re.findall(r"`(test_\w+)::(\w+)`", page.read_text(encoding="utf-8"))))
    return [f"{file}::{test}" for file, test in named if f"def {test}(" not in tests[file].read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", [RELIABILITY, SILENT_BUGS], ids=lambda page: page.stem)
def test_the_tests_that_rows_name_exist(page: Path) -> None:
    assert missing_tests(page) == []


def test_every_silent_bug_has_a_thread_and_a_test() -> None:
    rows = re.findall(r"^\| (?!what went|---)(.*) \|$", SILENT_BUGS.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 20
    for what, threads, test, why in (row.split(" | ") for row in rows):
        assert what and why and re.search(r"\[\w[\w-]*#\d+\]\(https://github\.com/\S+/(issues|pull)/\d+\)", threads), (
            what
        )
        assert re.search(r"`test_\w+::test_\w+`", test), what
