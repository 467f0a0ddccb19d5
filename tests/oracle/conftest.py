"""Where the reference values are: MEGAJAX_ORACLE_DIR, or ../shared/oracle beside the repository."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def oracle_dir() -> Path:
    default = Path(__file__).parents[2] / ".." / "shared" / "oracle"
    folder = Path(os.environ.get("MEGAJAX_ORACLE_DIR", default)).resolve()
    if not folder.is_dir():
        pytest.skip(f"no reference values at {folder}: set MEGAJAX_ORACLE_DIR")
    return folder
