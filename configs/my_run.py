# configs/my_run.py
from dataclasses import replace

from megajax.training.run_config import RunConfig


def config() -> RunConfig:
    return RunConfig(model=..., data=..., steps=10_000)


def debug() -> RunConfig:
    return replace(config(), steps=20)
