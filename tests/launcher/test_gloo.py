"""The collectives under every test with several processes: builds of jaxlib have summed large blocks wrongly."""

import sys
from pathlib import Path

import pytest
from gangs import launcher


@pytest.mark.slow
def test_a_reduce_scatter_of_4_mib_is_right(start):
    script = Path(__file__).with_name("reduce_scatter.py")
    gang = start(*launcher("--devices-per-process=1"), sys.executable, script, JAX_PLATFORMS="cpu")
    assert gang.wait() == 0, gang.text
    assert gang.text.count("0 of 20 wrong") == 2
