"""A session fails if its tests leave files in the repository or in the user's home."""

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
    home = Path.home()
    for folder in (home, home / ".cache"):
        names |= {str(path) for path in folder.glob("*")}
    return names


class LeftBehind:
    """Compares before and after a session, in the process that has the workers."""

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Remember what is there."""
        self.before = present() if "PYTEST_XDIST_WORKER" not in os.environ else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Names what is there now as well."""
        self.left = [] if self.before is None else sorted(present() - self.before)
        if self.left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was left."""
        for name in self.left:
            terminalreporter.line(f"ERROR left behind by tests: {name}", red=True)
