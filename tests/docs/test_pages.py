"""What pages state about each other, events and faults is true."""

import ast
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.build import quickstart, terminal
from megajax import plan
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


def test_the_readme_has_pictures_and_losses_of_one_run() -> None:
    """docs/build/quickstart.py makes all of them from one run, whose config is still the shipped one."""
    text, run = (ROOT / "README.md").read_text(encoding="utf-8"), terminal.stored()
    assert run.command == " ".join(quickstart.COMMAND) and run.command in text
    facts = " ".join(terminal.plain(line.text) for line in run.lines)
    cfg = load("quickstart.py")
    assert f"{cfg.steps} steps" in facts and f" {cfg.batch.global_size} = " in facts
    if run.bars:  # else only the start was recorded
        assert f"![Report of this run: {quickstart.losses(run)}, timeline" in text
        assert f"({run.lines[-1].seconds:.0f} s in this run" in text


def test_the_lines_of_a_plan_in_the_readme_are_those_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"```\n(plan for .*?)\n```", text, re.DOTALL)
    (words,) = re.findall(r"python -m megajax\.plan (.*)", text)
    assert plan.main(words.split()) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for block in shown for line in block.splitlines() if line not in printed] == [] and shown


def test_a_recording_keeps_what_stands_on_the_terminal_at_the_end() -> None:
    bar = ("\r\x1b[2K\x1b[38;5;197m━━\x1b[0m 8% 1/12\n\x1b[2mloss \x1b[0m5.0", "\r\x1b[2K\x1b[1A\r\x1b[2K")
    events = [(0.5, "setting up … 0 s"), (1.0, "\r\x1b[2K╭─ MegaJAX ─╮\r\n╰──╯\r\n"), (2.0, bar[0])]
    run = terminal.recording("train", [*events, (3.0, f"{bar[1]}step 100/600 \x1b[2mloss \x1b[0m4.0\n{bar[0]}")])
    assert [terminal.plain(line.text) for line in run.lines][:3] == ["╭─ MegaJAX ─╮", "╰──╯", "step 100/600 loss 4.0"]
    assert [line.seconds for line in run.lines][:3] == [1.0, 1.0, 3.0]
    assert [(begin, terminal.plain(figures)) for begin, _, figures in run.bars] == [
        (2.0, "loss 5.0"),
        (3.0, "loss 5.0"),
    ]
    picture = terminal.draw(run)
    assert ElementTree.fromstring(picture).tag.endswith("svg") and picture.count("@keyframes") >= 2


def test_files_that_the_map_of_the_code_names_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    folders = ("megajax", "tests", "configs", "notebooks", "benchmarks")
    files = {path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.*")}
    named = re.findall(r"`([a-z_]+/[\w/]+\.(?:py|txt|sh))`", text)
    assert [name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)] == [] and named


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
