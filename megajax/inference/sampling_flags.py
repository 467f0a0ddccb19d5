"""Settings of an answer as flags of a command; imports neither jax nor flax."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megajax.command_line import Flag
from megajax.config.errors import ConfigError, UserError
from megajax.config.help import field_texts
from megajax.config.schema import hints
from megajax.inference.request import Sampling

MAX_TOKENS = 256
"""Most tokens of an answer, unless the flag says it."""


def sampling_flags() -> tuple[Flag, ...]:
    """One for each field of `Sampling`."""
    kinds, texts, usual = hints(Sampling), field_texts(Sampling), Sampling(max_tokens=MAX_TOKENS)
    kinds["guide"] = Path | None
    texts["guide"] = "A file with the JSON schema that the answer has to match."
    return tuple(
        Flag(each.name.replace("_", "-"), kinds[each.name], getattr(usual, each.name), texts.get(each.name, ""))
        for each in fields(Sampling)
    )


def sampling_of(flags: Mapping[str, Any]) -> Sampling:
    """The settings of the flags. Raises ConfigError for values that cannot be."""
    given = {each.name: flags[each.name] for each in fields(Sampling)}
    if given["guide"] is not None:
        try:
            given["guide"] = json.loads(given["guide"].read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"--guide={flags['guide']}: is not a file with a JSON schema: {error}") from error
    sampling = Sampling(**given)
    if problems := sampling.problems():
        named = [replace(problem, setting=f"--{problem.setting.replace('_', '-')}") for problem in problems]
        raise ConfigError(named, "command line")
    return sampling
