"""The code blocks of README.md and docs/*.md: `bash` and `console` blocks hold commands, `python` blocks programs."""

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
RUNNER = ("uv", "run")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    return tuple(
        Block(name, text.count("\n", 0, fence.start()) + 1, fence[1], fence[2]) for fence in FENCE.finditer(text)
    )


def commands(block: Block) -> list[list[str]]:
    """The words of each command, without comments; a `\\` at the end of a line continues it.

    In a `console` block the lines with `$ ` are commands and the others are what they print.
    """
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [arguments for line in lines if (arguments := shlex.split(line, comments=True))]


def without_runner(arguments: list[str]) -> list[str]:
    """The command behind `uv run [--extra NAME]`: tests run in the environment that it would make."""
    if tuple(arguments[:2]) != RUNNER:
        return arguments
    rest = arguments[2:]
    while rest and rest[0].startswith("--"):
        rest = rest[2:] if rest[0] in ("--extra", "--group", "--with") else rest[1:]
    return rest
