"""The adapters of a server's command line; imports neither jax nor flax."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megajax.config.errors import ConfigError, Problem
from megajax.inference.server.config import ServingConfig


def named_folders(flag: Sequence[str]) -> dict[str, Path]:
    """The folders of --adapters, by name. Raises ConfigError."""
    folders = {}
    for text in flag:
        name, _, folder = text.partition("=")
        if not (name and folder) or name in folders:
            problem = "a name twice" if name in folders else f"{text!r}"
            raise ConfigError([Problem("--adapters", f"has {problem}", "give NAME=DIR,NAME=DIR")], "command line")
        folders[name] = Path(folder).expanduser()
    return folders


def with_slots(config: ServingConfig, adapters: int) -> ServingConfig:
    """The settings with a slot for each adapter of the command line. Raises ConfigError for a server that could load
    adapters but has no slots."""
    slots = max(config.inference.adapters, adapters)
    if config.server.load_adapters and not slots:
        problem = Problem("server.load_adapters", "needs slots for adapters", "set inference.adapters=4, for example")
        raise ConfigError([problem], "command line")
    return replace(config, inference=replace(config.inference, adapters=slots))
