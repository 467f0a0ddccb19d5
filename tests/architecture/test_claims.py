"""Docstrings and comments name only files and modules that exist, and a constant has one docstring."""

import io
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from source_tree import REPOSITORY

import megajax

FOLDERS = ("megajax", "tests", "benchmarks", "configs", "notebooks", "launch")
FILE = re.compile(r"(?<![\w.$*<{/:=-])((?:\.?[\w-]+/)*[a-z_]\w*\.(?:py|md))\b(?!:\w)")
"""A file; not FILE.py, and not file.py:name, which is an example of a reference."""
PATH = re.compile(
    rf"(?<![\w.$*<{{/:=-])((?:{'|'.join((*FOLDERS, 'docs'))})/(?>[a-z0-9_./-]*[a-z0-9_]))(?![/-]?[\w<{{*]|:\w)"
)
MODULE = re.compile(r"(?<![\w./-])megajax((?:\.[a-z_]\w*)+)")
OTHERS = re.compile(r"pretrain_\w+\.py|theoretical_memory_usage\.py|vllm/.*")
"""Files of other projects that are named."""


def prose(source: str) -> Iterator[tuple[int, str, bool]]:
    """Line and text of each docstring and comment, and whether the statement before a docstring is another one."""
    statement: list[tokenize.TokenInfo] = []
    follows_docstring = False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False
        elif token.type == tokenize.NEWLINE:
            is_docstring = len(statement) == 1 and statement[0].type == tokenize.STRING
            if is_docstring:
                yield statement[0].start[0], statement[0].string, follows_docstring
            statement, follows_docstring = [], is_docstring
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            statement.append(token)


@cache
def existing() -> frozenset[str]:
    """The ends of the paths of all files and folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [Path(name) for name in listed if (REPOSITORY / name).exists()]
    paths = {path for file in files for path in (file, *file.parents)}
    return frozenset("/".join(path.parts[start:]) for path in paths for start in range(len(path.parts)))


def is_module(name: str) -> bool:
    """Whether the dotted name after megajax is a module, or a public name of the package or of a module."""
    first, *_ = parts = name.strip(".").split(".")
    for count in range(len(parts), 0, -1):
        path = "/".join(("megajax", *parts[:count]))
        if path in existing() or f"{path}.py" in existing():
            return count == len(parts) or any(
                re.search(rf"\b{parts[count]}\b", (REPOSITORY / file).read_text(encoding="utf-8"))
                for file in (f"{path}.py", f"{path}/__init__.py")
                if (REPOSITORY / file).is_file()
            )
    return first in dir(megajax)


def dead_claims(texts: Iterable[tuple[int, str, bool]]) -> list[str]:
    problems = []
    for line, text, _ in texts:
        names = [*FILE.findall(text), *PATH.findall(text)]
        problems += [f"{line}: {name}" for name in names if name not in existing() and not OTHERS.fullmatch(name)]
        problems += [f"{line}: megajax{name}" for name in MODULE.findall(text) if not is_module(name)]
    return problems


@cache
def all_prose() -> dict[str, list[tuple[int, str, bool]]]:
    """The prose of each file."""
    files = [path for folder in FOLDERS for path in sorted((REPOSITORY / folder).rglob("*.py"))]
    return {str(path.relative_to(REPOSITORY)): list(prose(path.read_text(encoding="utf-8"))) for path in files}


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="not a git checkout")
def test_files_and_modules_that_are_named_exist() -> None:
    problems = [f"{name}:{problem}" for name, texts in all_prose().items() for problem in dead_claims(texts)]
    assert not problems, "\n".join(problems)


def test_a_name_has_one_docstring() -> None:
    assert not [f"{name}:{line}" for name, texts in all_prose().items() for line, _, is_second in texts if is_second]


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="not a git checkout")
@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('"""See history.py, megajax.train and reporting/history.py:262."""', 0),
        ('"""See clocks.py."""', 1),
        ("A = 1\n'''As in sets/history.py.'''  # and trial.py", 2),
        ("# megajax/tools/shell is gone", 1),
        ("# megajax.tools.shell is gone, and so is megajax.tools.merge.no_such_name_as_this", 2),
        ("# my_file.py:name, FILE.py, megajax/tools/*.py, megajax/tools/<name>.py, megajax.setup, docs/models.md", 0),
        ("print('clocks.py')", 0),
    ],
)
def test_the_reader_finds_such_names(source: str, count: int) -> None:
    assert len(problems := dead_claims(prose(source))) == count, problems


def test_a_second_docstring_is_found() -> None:
    texts = prose("A = 1\n'''a'''\nB = 2\n'''b'''\n'''a'''\n")
    assert [line for line, _, is_second in texts if is_second] == [5]
