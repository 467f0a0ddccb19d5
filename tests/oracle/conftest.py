"""Location of the reference values (MEGAJAX_ORACLE_DIR, or ../shared/oracle beside the repository) and a summary."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from megatron_cases import FOLDER


@pytest.fixture(scope="session")
def oracle_dir() -> Path:
    if not FOLDER.is_dir():
        pytest.skip(f"no reference values at {FOLDER}: set MEGAJAX_ORACLE_DIR")
    return FOLDER


def outcome_of(report: Any) -> str:
    """passed, failed, skipped, or unsupported: MegaJAX does not have it yet."""
    return "unsupported" if report.skipped and "unsupported: " in str(report.longrepr) else report.outcome


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Number of cases of each kind that agreed: `oracle numerics: 5 passed, 9 unsupported`."""
    counts: dict[str, Counter[str]] = {}
    for report in (report for actual in terminalreporter.stats.values() for report in actual):
        file = Path(getattr(report, "nodeid", "").partition("::")[0])
        if (
            file.parts[-2:-1] == ("oracle",)
            and hasattr(report, "when")
            and not (report.when != "call" and report.passed)
        ):
            counts.setdefault(file.stem.removeprefix("test_"), Counter())[outcome_of(report)] += 1
    for kind, actual in sorted(counts.items()):
        terminalreporter.write_line(
            f"oracle {kind}: " + ", ".join(f"{n} {outcome}" for outcome, n in sorted(actual.items()))
        )
