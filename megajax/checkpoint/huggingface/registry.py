"""The families of Hugging Face models that can be read and written."""

from collections.abc import Mapping
from functools import cache

from megajax.checkpoint.huggingface.families import (
    bert,
    clip,
    deepseek,
    gemma,
    gpt2,
    gpt_oss,
    llama,
    llava,
    mamba,
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
    modules = (
        llama,
        mixtral,
        qwen_moe,
        deepseek,
        gpt_oss,
        gemma,
        phi3,
        gpt2,
        mamba,
        nemotron_h,
        bert,
        t5,
        vit,
        clip,
        llava,
    )
    return {family.name: family for module in modules for family in module.FAMILIES}


def family_of(settings: Settings) -> Family:
    """The family of a config.json. Raises UserError for a model_type that none has."""
    by_type = {name: family for family in families().values() for name in family.model_types}
    kind = settings.peek("model_type")
    if not isinstance(kind, str) or kind not in by_type:
        near = did_you_mean(str(kind), by_type) or f"supported: {', '.join(sorted(by_type))}"
        raise UserError(f"{settings.where}: model_type={kind} is not supported; {near}")
    return by_type[kind]


def expressed(cfg: object, family: Family) -> list[str]:
    """What of a model config is lost in a config.json of the family: lines, none if it gives the model back."""
    try:
        back = family.read(Settings(family.config_json(cfg)))
    except (AttributeError, KeyError, TypeError, ValueError, UserError) as error:
        return [f"it is not a {family.name} model ({error})"]
    return in_words(differences(cfg, back))
