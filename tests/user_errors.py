"""Refusals: a test names the error and its setting; the words stand in tests/golden/messages.txt, all on one page.

`pytest --update-golden FILES` writes the messages of these files anew; the difference shows what users will read.
"""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megajax.config.errors import ConfigError, UserError

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests/golden/messages.txt"
type Texts = dict[str, list[str]]
"""Test id -> its messages, sorted."""


def parse(page: str) -> Texts:
    """The page's texts: a line with the test's id, then `- ` before each message, two spaces before its other lines."""
    texts: Texts = {}
    for line in page.splitlines():
        if line.startswith("- "):
            texts[next(reversed(texts))].append(line[2:])
        elif line.startswith("  "):
            texts[next(reversed(texts))][-1] += "\n" + line[2:]
        elif line:
            texts[line] = []
    return texts


def page(texts: Texts) -> str:
    """What `parse` reads."""
    blocks = []
    for test in sorted(texts):
        messages = ["- " + text.replace("\n", "\n  ") for text in sorted(texts[test])]
        blocks.append("\n".join([test, *messages]) + "\n")
    return "\n".join(blocks)


def without_places(text: str) -> str:
    """The message with names in place of what each run has for itself: folders, ports, space that is free."""
    text = re.sub(r"/[^\s'\"(]*?pytest-of-[^/\s]+/pytest-\d+(/popen-gw\d+)?/[\w.-]+?\d+(?![\w-]|\.\w)", "TMP", text)
    for pattern, name in (
        (rf"(?<=\b(?:by|on) ){re.escape(socket.gethostname())}\b", "HOST"),
        (r"\b(?=\d*[a-f])[0-9a-f]{16,}\b|(?<=\.)[0-9a-f]{12}(?=/)|\b[0-9a-f]{8}(?=\.converting)", "HASH"),
        (r"(?<=\bpid )\d+", "PID"),
        (r"(?<=127\.0\.0\.1:)\d+|(?<=--port=)\d{5}", "PORT"),
        (r"[\d,.]+(?= GiB (are )?free)", "SOME"),
    ):
        text = re.sub(pattern, name, text)
    return text.replace(str(ROOT), "REPOSITORY")


class Messages:
    """The page, and what this process has read on the way."""

    def __init__(self) -> None:
        self.golden = parse(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
        self.seen: Texts = {}
        self.update = False

    def take(self, test: str, text: str) -> None:
        """Notes or compares a message.

        Raises:
            AssertionError: the page has no such message for this test.
        """
        seen = self.seen.setdefault(test, [])
        if text not in seen:
            seen.append(text)
        known = self.golden.get(test, [])
        assert self.update or text in known, (
            f"{FILE.name} has other words for this refusal:\n{text}\ninstead of one of\n" + "\n".join(known) + "\n"
            "If the change is meant: pytest --update-golden " + test.partition("::")[0]
        )

    def write(self, seen: Texts) -> None:
        """The page with these tests' messages; functions that are gone leave."""
        sources = {
            file: (ROOT / file).read_text(encoding="utf-8")
            for file in {_file(test) for test in self.golden}
            if (ROOT / file).exists()
        }
        kept = {
            test: texts
            for test, texts in self.golden.items()
            if f"def {_function(test)}(" in sources.get(_file(test), "")
        }
        FILE.write_text(page(kept | seen), encoding="utf-8")


def _file(test: str) -> str:
    return test.partition("::")[0]


def _function(test: str) -> str:
    return test.partition("[")[0].rpartition("::")[2]


@cache
def messages() -> Messages:
    """Of this process."""
    return Messages()


class MessagesPlugin:
    """Writes the page at the end of a run with --update-golden, also of what workers of pytest-xdist have read."""

    def __init__(self) -> None:
        self.of_workers: Texts = {}
        messages().update = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.of_workers |= node.workeroutput.get("messages_of_tests", {})

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["messages_of_tests"] = messages().seen
        elif seen := messages().seen | self.of_workers:
            messages().write(seen)


@contextmanager
def user_error(
    setting: str = "", kind: type[UserError] = UserError, code: int | None = None
) -> Iterator[SimpleNamespace]:
    """The body ends with this error, of this setting, and its message is the one of the golden page.

    setting: dotted name or flag of one of the error's problems, or what the message begins with; "" if none is to
        blame (a file, a request).
    code: exit code; None: the class's, 2 but for errors that may not occur again.
    Yields: an object whose `value` is the error afterwards, as of `pytest.raises`.
    """
    found = SimpleNamespace(value=None)
    with pytest.raises(kind) as caught:
        yield found
    error = found.value = caught.value
    assert error.code == (code or kind.code), error.code
    if setting:
        settings = [problem.setting for problem in error.problems] if isinstance(error, ConfigError) else []
        assert setting in settings or str(error).startswith(setting), f"{setting} is not named first: {error}"
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    messages().take(test, without_places(str(error)))
