"""The families of Hugging Face models that can be read and written."""

from collections.abc import Mapping
from functools import cache

from megajax.config.errors import UserError
from megajax.interop.conversion.model_differences import describe_differences, differences
from megajax.interop.huggingface import kin
from megajax.interop.huggingface.families import (
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
from megajax.interop.huggingface.family import Family, Settings


@cache
def families() -> Mapping[str, Family]:
    """Families by name."""
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
    """The family of a config.json. Raises UserError for an unsupported model_type."""
    by_type = {name: family for family in families().values() for name in family.model_types}
    kind = settings.peek("model_type")
    if not isinstance(kind, str) or kind not in by_type:
        advice = kin.hint(str(kind), by_type) or f"supported: {', '.join(sorted(by_type))}"
        raise UserError(f"{settings.where}: model_type={kind} is not supported; {advice}")
    return by_type[kind]


def lost_settings(cfg: object, family: Family) -> list[str]:
    """Settings of a model config that are lost in a config.json of the family, a line each."""
    try:
        restored = family.read(Settings(family.config_json(cfg)))
    except (AttributeError, KeyError, TypeError, ValueError, UserError) as error:
        return [f"it is not a {family.name} model ({error})"]
    return describe_differences(differences(cfg, restored))
