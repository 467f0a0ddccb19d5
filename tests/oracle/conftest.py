"""Location of the reference values: MEGAJAX_ORACLE_DIR, or ../shared/oracle beside the repository."""

from pathlib import Path

import pytest
from megatron_cases import FOLDER


@pytest.fixture(scope="session")
def oracle_dir() -> Path:
    if not FOLDER.is_dir():
        pytest.skip(f"no reference values at {FOLDER}: set MEGAJAX_ORACLE_DIR")
    return FOLDER
