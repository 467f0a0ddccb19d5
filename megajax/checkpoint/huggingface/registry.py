"""The families of Hugging Face models that can be read and written."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from megajax.checkpoint.huggingface.families import llama
from megajax.checkpoint.huggingface.family import Family, Settings
from megajax.config.dump import flatten
from megajax.config.errors import UserError
from megajax.config.nearest import did_you_mean


@cache
def families() -> Mapping[str, Family]:
    """By name."""
    return {family.name: family for family in (*llama.FAMILIES,)}


def family_of(given: Settings) -> Family:
    """The family of a config.json. Raises UserError for a model_type that none has."""
    kind = given.need("model_type") if "model_type" not in given.left else given.left["model_type"]
    by_type = {name: family for family in families().values() for name in family.model_types}
    if kind not in by_type:
        near = did_you_mean(str(kind), by_type) or f"supported: {', '.join(sorted(by_type))}"
        raise UserError(f"{given.where}: model_type={kind} is not supported; {near}")
    return by_type[kind]


TRAINING_ONLY = (
    "recompute", "recompute_layers", "layers_per_checkpoint", "offload", "unroll", "loss_chunk", "init_std",
    "embedding_std", "vocabulary_multiple", "dropout", "kernel", "label_smoothing", "z_loss", "residual",
)  # fmt: skip
"""Last names of settings that change how a model is trained or run, not what it computes."""


def expressed(cfg: object, family: Family) -> list[str]:
    """What of a model config is lost in a config.json of the family: lines, none if it can be had back."""
    try:
        back = family.model(Settings(family.settings(cfg)))
    except (AttributeError, KeyError, TypeError, ValueError, UserError) as error:
        return [f"it is no {family.name} model ({error})"]
    before, after = _explicit(flatten(cfg)), _explicit(flatten(back))
    names = [name for name in {**before, **after} if name.rpartition(".")[2] not in TRAINING_ONLY]
    absent = object()
    return [
        f"{name}: {before.get(name, 'absent')} here, {after.get(name, 'absent')} there"
        for name in names
        if before.get(name, absent) != after.get(name, absent)
    ]


def _explicit(leaves: dict[str, Any]) -> dict[str, Any]:
    """Settings with what follows from others where they are none: numbers and sizes of heads."""
    for name, value in leaves.items():
        block, _, last = name.rpartition(".")
        if value is None and last == "kv_heads":
            leaves[name] = leaves[f"{block}.heads"]
        if value is None and last == "head_dim" and f"{block}.heads" in leaves:
            leaves[name] = leaves["hidden"] // leaves[f"{block}.heads"]
    return leaves
