"""The families of Hugging Face models that can be read and written, and the nearest ones to those that cannot."""

import re
from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module
from pkgutil import walk_packages
from typing import NamedTuple

from megajax.config.errors import UserError
from megajax.config.hints import either
from megajax.interop.huggingface import families as folder
from megajax.interop.huggingface.family import Family, Settings
from megajax.interop.stored.model_differences import describe_differences, differences

OTHER_MODEL = "it is not a"
"""Begins the line of a family of another kind of models."""


@cache
def families() -> Mapping[str, Family]:
    """Families by name, of all modules of the folder. A model is written as the first that loses no setting of it."""
    names = [module.name for module in walk_packages(folder.__path__, f"{folder.__name__}.") if not module.ispkg]
    modules = (import_module(name) for name in sorted(names, key=lambda name: name.rpartition(".")[2]))
    return {family.name: family for module in modules for family in module.FAMILIES}


def family_of(settings: Settings) -> Family:
    """The family of a config.json. Raises UserError for an unsupported model_type."""
    by_type = {name: family for family in families().values() for name in family.model_types}
    kind = settings.peek("model_type")
    if not isinstance(kind, str) or kind not in by_type:
        advice = hint(str(kind), by_type) or f"supported: {', '.join(sorted(by_type))}"
        raise UserError(f"{settings.where}: model_type={kind} is not supported; {advice}")
    return by_type[kind]


def lost_settings(cfg: object, family: Family) -> list[str]:
    """Settings of a model config that are lost in a config.json of the family, a line each."""
    try:
        restored = family.read(Settings(family.config_json(cfg)))
    except (AttributeError, KeyError, TypeError, ValueError, UserError) as error:
        return [f"{OTHER_MODEL} {family.name} model ({error})"]
    return describe_differences(differences(cfg, restored))


class Kin(NamedTuple):
    """Unsupported types with the same architecture."""

    types: str
    description: str
    nearest: tuple[str, ...]
    """Supported families."""


KINDS = (
    Kin("gpt_neo openai-gpt xglm biogpt", "a decoder with other positions or attention", ("gpt2", "opt")),
    Kin("gemma3n_text gemma4_text", "a decoder with norms after sub-layers", ("gemma2", "gemma3_text")),
    Kin("qwen chatglm", "a decoder with other rotary positions, norms or biases", ("qwen2", "glm")),
    Kin(
        "minicpm internlm internlm2 baichuan nanochat aquila stablelm_epoch bitnet",
        "a decoder with rotary positions and RMSNorm, but settings of its own",
        ("llama",),
    ),
    Kin("jetmoe grok-1", "a decoder with experts", ("mixtral",)),
    Kin("mimo_v2_flash", "a decoder with experts and windows", ("qwen3_moe", "gpt_oss", "mellum")),
    Kin("deepseek", "a decoder with shared experts", ("qwen2_moe", "glm4_moe")),
    Kin("deepseek_v32 longcat_flash glm_moe_dsa", "a decoder with latent attention", ("deepseek_v3",)),
    Kin("minicpm3", "a decoder with latent attention", ("deepseek_v2",)),
    Kin("olmo_hybrid", "a decoder with gated delta nets", ("qwen3_next", "qwen3_5_text")),
    Kin("qwen3_5 qwen3_5_moe", "a model of images and text", ("qwen3_5_text", "qwen3_5_moe_text")),
    Kin("zamba zamba2", "a hybrid of Mamba and attention", ("bamba", "jamba", "nemotron_h")),
    Kin("recurrent_gemma", "a hybrid of gated linear recurrences and attention", ("gemma",)),
    Kin(
        "roberta xlm-roberta camembert distilbert electra albert deberta deberta-v2 modernbert mobilebert mpnet ernie "
        "nomic_bert roformer big_bird longformer rembert",
        "an encoder with other embeddings, positions or sizes",
        ("bert",),
    ),
    Kin("umt5 longt5 switch_transformers t5gemma", "an encoder-decoder with other positions or layers", ("t5", "mt5")),
    Kin("bart mbart pegasus marian m2m_100 blenderbot", "an encoder-decoder with learned positions", ("t5",)),
    Kin("deit beit dinov2 dinov3_vit vit_mae vit_msn ijepa", "a vision transformer with other parts", ("vit",)),
    Kin("siglip2 siglip2_vision_model", "a vision tower with other image sizes", ("siglip",)),
    Kin("chinese_clip altclip metaclip_2 blip groupvit xclip", "a model with an image and a text tower", ("clip",)),
    Kin(
        "llava_next llava_onevision vipllava mllama mistral3 paligemma gemma3 internvl internvl_chat qwen2_vl "
        "qwen2_5_vl qwen3_vl_moe idefics2 idefics3 smolvlm llava_llama llama4 kimi_k25",
        "a model of images and text with other image parts",
        ("llava",),
    ),
)  # fmt: skip
"""One type is in one row."""


def hint(name: str, supported: Collection[str]) -> str:
    """The nearest supported families by architecture, or the supported name with other punctuation; "" if unknown."""
    if (kin := kin_of(name)) is not None:
        return f"it is {kin.description}; nearest of the supported: {either(kin.nearest)}"
    matches = [other for other in supported if _letters(other) == _letters(name)]
    return f"did you mean {matches[0]}?" if matches else ""


def kin_of(name: str) -> Kin | None:
    """The row of an unsupported type; None for an unknown one."""
    return next((kin for kin in KINDS if name in kin.types.split()), None)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
