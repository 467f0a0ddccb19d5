"""Settings of an answer as flags of a command; imports neither jax nor flax."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megajax.command_line.help import field_texts
from megajax.command_line.parser import Flag
from megajax.config.errors import ConfigError, UserError
from megajax.config.schema import hints
from megajax.inference.request import Sampling

MAX_TOKENS = 256
"""Default of the flag --max-tokens."""


def sampling_flags() -> tuple[Flag, ...]:
    """A flag for each field of `Sampling`."""
    kinds, texts, usual = hints(Sampling), field_texts(Sampling), Sampling(max_tokens=MAX_TOKENS)
    kinds["guide"] = Path | None
    texts["guide"] = "A file with the JSON schema that the answer has to match."
    names = [setting.name for setting in fields(Sampling)]
    return tuple(Flag(name.replace("_", "-"), kinds[name], getattr(usual, name), texts.get(name, "")) for name in names)


def sampling_of(flags: Mapping[str, Any]) -> Sampling:
    """The settings of the flags. Raises ConfigError for invalid values."""
    settings = {setting.name: flags[setting.name] for setting in fields(Sampling)}
    if settings["guide"] is not None:
        try:
            settings["guide"] = json.loads(settings["guide"].read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"--guide={flags['guide']}: is not a file with a JSON schema: {error}") from error
    sampling = Sampling(**settings)
    if problems := sampling.problems():
        flag_problems = [replace(problem, setting=f"--{problem.setting.replace('_', '-')}") for problem in problems]
        raise ConfigError(flag_problems, "command line")
    return sampling
