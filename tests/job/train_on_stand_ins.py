"""`python -m megajax.train` on CPU devices that present themselves as GPUs; for tests of several processes."""

import os

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}  # Before the stand-ins import jax.

import pytest
from gpu_stand_in import stand_in

from megajax.command_line.parser import front_door
from megajax.train import main


def start(argv: list[str]) -> int:
    """Train."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        return main(argv)


if __name__ == "__main__":
    front_door(start)
