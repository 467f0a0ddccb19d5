"""The families of Hugging Face models that can be read and written, and the nearest ones to those that cannot."""

import re
from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from megajax.config.errors import UserError
from megajax.config.hints import either
from megajax.interop.huggingface.family import Family, Settings, layers_of
from megajax.interop.weights.model_differences import describe_differences, differences
from megajax.layers.moe.config import MoEConfig

OTHER_MODEL = "it is not a"
"""Begins the line of a family of another kind of models."""


WITHOUT_EXPERTS = (
    "llama mistral qwen2 qwen3 gpt2 gemma gemma2 gemma3_text phi3 granite olmo olmo2 olmo3 phi opt gpt_neox gptj "
    "falcon bloom mpt stablelm starcoder2 cohere cohere2 glm glm4 smollm3 exaone exaone4 ernie4_5 helium arcee "
    "nemotron apertus seed_oss ministral ministral3 hyperclovax cwm hunyuan_v1_dense jais2 internlm3 iquestcoder "
    "persimmon codegen gpt_bigcode vaultgemma granite_swa youtu mamba mamba2 falcon_mamba falcon_h1 bamba "
    "granitemoehybrid lfm2 nemotron_h jamba minimax qwen3_next qwen3_5_text bert megatron-bert t5 mt5 vit siglip "
    "clip llava qwen3_vl"
)
WITH_EXPERTS = (
    "mixtral qwen2_moe qwen3_moe olmoe phimoe deepseek_v2 deepseek_v3 glm4_moe gpt_oss llama4_text minimax_m2 "
    "granitemoe dbrx granitemoeshared granitemoe_swa ernie4_5_moe dots1 solar_open exaone_moe hunyuan_v1_moe "
    "flex_olmo afmoe sarvam_moe sarvam_mla glm4_moe_lite mellum kimi_linear lfm2_moe qwen3_5_moe_text"
)
"""The families from the plainest on: a model of no known family is written as the first that loses nothing of it.
A model without experts is not one of a family that has them, though all its layers could be the dense ones."""


@cache
def families() -> Mapping[str, Family]:
    """Families by name, of all modules of the folder."""
    root = Path(__file__).with_name("families")
    files = sorted((path.relative_to(root).with_suffix("") for path in root.rglob("*.py")), key=lambda path: path.name)
    modules = (import_module(".".join(("megajax.interop.huggingface", root.name, *path.parts))) for path in files)
    return {family.name: family for module in modules for family in module.FAMILIES}


def candidates(model: Any) -> list[str]:
    """Names of the families that a model of no known family may be written as, from the plainest on."""
    experts = any(isinstance(block.mlp, MoEConfig) for block in layers_of(model))
    return [*WITHOUT_EXPERTS.split(), *WITH_EXPERTS.split() * experts]


def family_of(settings: Settings) -> Family:
    """The family of a config.json. Raises UserError for an unsupported model_type."""
    by_type = {name: family for family in families().values() for name in family.model_types}
    kind = settings.peek("model_type")
    if not isinstance(kind, str) or kind not in by_type:
        advice = hint(str(kind), by_type) or f"supported: {', '.join(sorted(by_type))}"
        raise UserError(f"{settings.where}: model_type={kind} is not supported; {advice}")
    return by_type[kind]


def lost_settings(cfg: object, family: Family) -> list[str]:
    """Settings of a model config that are lost in a config.json of the family or can't be read back, a line each."""
    try:
        settings = Settings(family.config_json(cfg))
        restored = family.read(settings)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, UserError) as error:
        return [f"{OTHER_MODEL} {family.name} model ({error})"]
    settings.close(family.unused)
    refused = [*settings.findings.problems, *(f"{name}={value}" for name, value in settings.findings.unknown.items())]
    return describe_differences(differences(cfg, restored)) or refused


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
