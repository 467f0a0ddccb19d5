"""The pages can be followed in one folder: no two commands write different files to the same path."""

import re
import shutil
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from megajax.config import load
from megajax.config.errors import UserError
from tests.docs.blocks import PAGES, ROOT, blocks, commands, without_runner
from tests.docs.prepared import prepare
from tests.docs.test_commands import RUN, run, steps_of

ELSEWHERE = ("--devices", "--resilience.exit_after_steps")
"""Flags by which commands differ that may go on with each other's run."""
FOLLOWED = (
    *("README.md", "docs/getting_started.md", "docs/first_config.md", "docs/generate.md", "docs/tuning.md"),
    *("docs/lora.md", "docs/evaluation.md", "docs/preprocess.md"),
)
"""Pages in the order in which a new user reads them."""


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
            first, _, _ = block.text.partition("\n")
            if block.language == "python" and first.startswith("# ") and first.endswith(".py"):
                written[first.removeprefix("# ")][block.text] = str(block)
            for arguments in map(without_runner, commands(block)) if block.language in ("bash", "console") else ():
                for place in writes(arguments):
                    written[place][same(arguments)] = str(block)
    assert {"data/mine", "runs/quickstart", "mine.py", "answers.jsonl"} <= written.keys()
    collisions = [f"{place}: {', '.join(by.values())}" for place, by in written.items() if len(by) > 1]
    assert not collisions, "written by different commands:\n" + "\n".join(collisions)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_first_pages_run_in_one_folder(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    for page in FOLLOWED:
        prepare(page, tmp_path)
        for block in blocks(ROOT / page):
            for arguments in steps_of(block, tmp_path) if block.language in RUN else ():
                run(arguments, tmp_path)


def test_the_readme_has_text_and_picture_of_one_run() -> None:
    """The losses named beside the picture are those of the quoted output; tests/docs/quickstart_picture.py draws it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for split in ("validation", "test"):
        (line,) = re.findall(rf"^ {split} loss at iteration 900 \| lm loss value: (\S+) ", text, re.MULTILINE)
        assert f"{split} loss {float(line):.4f}" in text.partition("![")[2]
