"""A session fails if its tests leave files in the repository or caches of MegaJAX in the user's home."""

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def present() -> set[str]:
    """Files in the repository that git neither has nor ignores, and entries of the user's home and caches."""
    command = ["git", "status", "--porcelain", "--untracked-files=all"]
    try:
        status = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout
    except OSError:  # a machine without git
        status = ""
    names = {line[3:] for line in status.splitlines() if line.startswith("??")}
    homes = Path.home(), Path.home() / ".cache"
    return names | {str(path) for folder in homes for path in folder.glob("*")}


class LeftBehind:
    """Compares before and after a session, in the process that has the workers."""

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Remember what is there."""
        self.before = present() if "PYTEST_XDIST_WORKER" not in os.environ else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Names what is there now as well."""
        self.left = [] if self.before is None else sorted(present() - self.before)
        # Other programs write into a home as well, so that only what can be ours fails a session.
        if session.exitstatus == pytest.ExitCode.OK and any("megajax" in n or n[0] != "/" for n in self.left):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was left."""
        for name in self.left:
            terminalreporter.line(f"left behind during the tests: {name}", red=True)
