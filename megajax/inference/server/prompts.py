"""Prompts of tokens from the field `prompt` of /v1/completions."""

from collections.abc import Mapping, Sequence
from typing import Any

from megajax.inference.sampling_settings import abbreviated
from megajax.inference.server.errors import invalid
from megajax.inference.server.models import ServedModel

PROMPT_TYPES = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


async def read_prompts(values: Mapping[str, Any], model: ServedModel, most: int) -> list[list[int]]:
    """Tokens of each prompt.

    Raises RequestError for a value of another type, an empty prompt, more than `most` prompts, or tokens outside the
    vocabulary.
    """
    prompts = split_prompts(values.get("prompt", None), most)
    flags = values.get("special_tokens", False), values.get("add_special_tokens", True)
    return [await _encode(prompt, model, *flags) for prompt in prompts]


def split_prompts(value: Any, most: int, name: str = "prompt") -> list[str | list[int]]:
    """Prompts, each a text or tokens. Raises RequestError."""
    prompts = value if isinstance(value, list) and value and not _is_token(value[0]) else [value]
    if len(prompts) > most:
        raise invalid(name, f"{name} has {len(prompts):,} prompts, at most {most} are allowed")
    for prompt in prompts:
        if isinstance(prompt, list) and not all(map(_is_token, prompt)):
            invalid_part = next(part for part in prompt if not _is_token(part))
            raise invalid(name, f"{name} must be {PROMPT_TYPES}, got {abbreviated(invalid_part)} in a list")
        if not isinstance(prompt, (str, list)):
            raise invalid(name, f"{name} must be {PROMPT_TYPES}, got {abbreviated(prompt)}")
    kinds = {type(prompt) for prompt in prompts}
    if len(kinds) > 1:
        raise invalid(name, f"{name} must be {PROMPT_TYPES}, got strings and lists")
    if any(len(prompt) == 0 for prompt in prompts):
        raise invalid(name, f"{name} is empty: a model continues at least one token")
    return prompts


async def _encode(prompt: str | Sequence[int], model: ServedModel, special_tokens: bool, prefix: bool) -> list[int]:
    if isinstance(prompt, str):
        return await model.encode(prompt, special_tokens=special_tokens, prefix=prefix)
    model.demand_tokens(prompt, "prompt")
    return list(prompt)


def _is_token(value: Any) -> bool:
    return type(value) is int
