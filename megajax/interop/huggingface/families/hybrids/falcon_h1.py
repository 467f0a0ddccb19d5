"""Falcon-H1: attention and Mamba-2 side by side in each layer, with fixed factors on most of their products.

Factors on the input of attention become part of those on its scores and on its output.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megajax.interop.huggingface.decoders import LAYER, MIXER
from megajax.interop.huggingface.families.hybrids.granite_hybrid import FINAL_NAMES, MAMBA, state_space
from megajax.interop.huggingface.families.hybrids.mamba import MAMBA2_ROWS, of_hybrids, write_step_limit
from megajax.interop.huggingface.family import Settings, layers_of, to_settings
from megajax.interop.huggingface.tables import Decoder, Experts, FeedForwardOf, sizes
from megajax.layers.mamba.config import Mamba2Config
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import SumWeightsConfig
from megajax.models.decoder.config import DecoderConfig, WidthScalingConfig

MULTIPLIERS = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
OPTIONAL_NORM = {"normalised": ("mamba_rms_norm", False), "norm_before_gate": ("mamba_norm_before_gate", True)}
ONES = (1.0,) * 5
DIGITS = 12
"""Of the factor on scores, so that it comes back from the setting that is made of it."""


def _mixers(settings: Settings, attention: Sequence[Any]) -> list[Any]:
    factor = settings.take("attention_in_multiplier") ** 2 * settings.take("key_multiplier")
    factor = round(factor, DIGITS)
    return [replace(mixer, scale=None if factor == 1 else factor / mixer.head_dim**0.5) for mixer in attention]


def _feed_forward(settings: Settings, mlp: GatedMLPConfig) -> FeedForwardOf:
    mlp = replace(mlp, gate_factor=settings.take("mlp_multipliers")[0])
    return lambda _: mlp


def _model(settings: Settings) -> dict[str, Any]:
    for name in ("projectors_bias", "mamba_proj_bias"):
        settings.only(name, False)
    optional, scale = settings.fields(OPTIONAL_NORM), settings.take("ssm_in_multiplier")
    factors: Any = tuple(scale * factor for factor in settings.take("ssm_multipliers"))
    weights = SumWeightsConfig(
        mixer_output=settings.peek("attention_in_multiplier") * settings.take("attention_out_multiplier"),
        beside_output=settings.take("ssm_out_multiplier"),
        mlp_output=settings.peek("mlp_multipliers")[1],
    )
    ends = {"embedding": settings.take("embedding_multiplier"), "output": settings.take("lm_head_multiplier")}
    scaling = WidthScalingConfig(base_hidden=settings.peek("hidden_size"), score_power=0.5, **ends)
    return {
        "beside": replace(state_space(settings), input_factors=None if factors == ONES else factors, **optional),
        "sum_weights": None if weights == SumWeightsConfig() else weights,
        "width_scaling": None if set(ends.values()) == {1.0} else scaling,
    }


def _written(cfg: DecoderConfig) -> dict[str, Any]:
    block = layers_of(cfg)[0]
    mixer, beside, weights = block.mixer, block.beside, block.sum_weights or SumWeightsConfig()
    if not isinstance(beside, Mamba2Config):
        raise ValueError("no layer has a Mamba-2 beside its attention")
    return {
        **to_settings(beside, {**MAMBA, **OPTIONAL_NORM}),
        "mamba_d_ssm": beside.inner,
        **write_step_limit(beside),
        "key_multiplier": 1.0 if mixer.scale is None else round(mixer.scale * mixer.head_dim**0.5, DIGITS),
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": weights.mixer_output,
        "ssm_in_multiplier": 1.0,
        "ssm_multipliers": list(beside.input_factors or ONES),
        "ssm_out_multiplier": weights.beside_output,
        "mlp_multipliers": [block.mlp.gate_factor, weights.mlp_output],
        "embedding_multiplier": 1.0 if cfg.width_scaling is None else cfg.width_scaling.embedding,
        "lm_head_multiplier": cfg.logit_factor(),
    }


DEFAULTS = sizes(128000, 4096, 14336, 32, 32, 8, None, 8192, rms_norm_eps=1e-5, mamba_d_ssm=1024)
DEFAULTS |= {f"{name}_multiplier": 1.0 for name in MULTIPLIERS}
DEFAULTS |= {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": list(ONES)}
TABLE = Decoder(
    "falcon_h1", "FalconH1ForCausalLM", DEFAULTS, mlp_bias="mlp_bias", mixers=_mixers, model=_model, written=_written,
    experts=Experts(_feed_forward, lambda cfg: {}),
    mixer_rows=[*MIXER, *of_hybrids(MAMBA2_ROWS, f"{LAYER}.mamba", "beside")],
    tensors=FINAL_NAMES,
    unused=(
        # Settings of initial values, of generation, and of names of layers, which are all alike.
        "time_step_min", "time_step_max", "time_step_floor", "num_logits_to_keep", "layer_types", "layers_block_type",
        # Settings that transformers does not read.
        "mamba_use_mlp", "mlp_expansion_factor",
    ),
)  # fmt: skip
FAMILIES = [TABLE.family()]
