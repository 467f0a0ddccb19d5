"""The families of Hugging Face models that can be read and written."""

from collections.abc import Mapping
from functools import cache

from megajax.checkpoint.huggingface.families import (
    bert,
    clip,
    deepseek_v2,
    deepseek_v3,
    gemma,
    gpt2,
    gpt_oss,
    llama,
    llava,
    mamba,
    mamba2,
    mixtral,
    nemotron_h,
    phi3,
    qwen_moe,
    t5,
    vit,
)
from megajax.checkpoint.huggingface.family import Family, Settings
from megajax.checkpoint.weights.model_differences import differences, in_words
from megajax.config.errors import UserError
from megajax.config.nearest import did_you_mean


@cache
def families() -> Mapping[str, Family]:
    """By name."""
    decoders = (
        llama,
        mixtral,
        qwen_moe,
        deepseek_v2,
        deepseek_v3,
        gpt_oss,
        gemma,
        phi3,
        gpt2,
        mamba,
        mamba2,
        nemotron_h,
    )
    files = (*decoders, bert, t5, vit, clip, llava)
    return {family.name: family for file in files for family in file.FAMILIES}


def family_of(given: Settings) -> Family:
    """The family of a config.json. Raises UserError for a model_type that none has."""
    kind = given.need("model_type") if "model_type" not in given.left else given.left["model_type"]
    by_type = {name: family for family in families().values() for name in family.model_types}
    if not isinstance(kind, str) or kind not in by_type:
        near = did_you_mean(str(kind), by_type) or f"supported: {', '.join(sorted(by_type))}"
        raise UserError(f"{given.where}: model_type={kind} is not supported; {near}")
    return by_type[kind]


def expressed(cfg: object, family: Family) -> list[str]:
    """What of a model config is lost in a config.json of the family: lines, none if it gives the model back."""
    try:
        back = family.model(Settings(family.settings(cfg)))
    except (AttributeError, KeyError, TypeError, ValueError, UserError) as error:
        return [f"it is not a {family.name} model ({error})"]
    return in_words(differences(cfg, back))
