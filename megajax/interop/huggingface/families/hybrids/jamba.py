"""Jamba: Mamba with norms inside in most layers, attention without positions in the others, experts in some."""

from collections.abc import Sequence
from math import ceil
from typing import Any

from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import LAYER, MIXER
from megajax.interop.huggingface.families.hybrids.granite_hybrid import FINAL_NAMES
from megajax.interop.huggingface.families.hybrids.mamba import MAMBA1_ROWS, of_hybrids
from megajax.interop.huggingface.family import Names, Settings, layers_of, norm, to_settings
from megajax.interop.huggingface.tables import Decoder, Experts, FeedForwardOf, NoPositions, sizes
from megajax.layers.mamba.config import Mamba1Config
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.models.decoder.config import DecoderConfig

MAMBA: Names = {
    "state": ("mamba_d_state", 16),
    "conv_kernel": ("mamba_d_conv", 4),
    "conv_bias": ("mamba_conv_bias", True),
    "bias": ("mamba_proj_bias", False),
}


def _period(settings: Settings, name: str) -> tuple[int, int]:
    """NAME_layer_period and NAME_layer_offset."""
    return settings.count(f"{name}_layer_period"), settings.need(f"{name}_layer_offset", int)


def _write_period(name: str, chosen: Sequence[int], layers: int) -> dict[str, int]:
    """Layers that are not at equal distances are lost."""
    period = chosen[1] - chosen[0] if len(chosen) > 1 else layers
    return {f"{name}_layer_period": period, f"{name}_layer_offset": chosen[0] if chosen else layers}


def _mixers(settings: Settings, attention: Sequence[Any]) -> list[Any]:
    (every, first), hidden = _period(settings, "attn"), settings.peek("hidden_size")
    rank = settings.take("mamba_dt_rank", "auto", object)
    space = Mamba1Config(
        inner=settings.take("mamba_expand", 2) * hidden,
        rank=ceil(hidden / 16) if rank == "auto" else rank,
        inner_norm=RMSNormConfig(epsilon=settings.peek("rms_norm_eps")),
        **settings.fields(MAMBA),
    )
    return [mixer if layer % every == first else space for layer, mixer in enumerate(attention)]


def _read(settings: Settings, mlp: GatedMLPConfig) -> FeedForwardOf:
    settings.only("hidden_act", "silu", "swish")  # which convolutions have too
    every, first = _period(settings, "expert")
    count, router = settings.count("num_experts"), decoders.router(settings, normalise="all")
    moe = MoEConfig(experts=count, top_k=settings.count("num_experts_per_tok"), expert=mlp, router=router)
    return lambda layer: moe if layer % every == first and count > 1 else mlp


def _write(cfg: DecoderConfig) -> dict[str, Any]:
    mlps = [block.mlp for block in layers_of(cfg)]
    sparse = [layer for layer, mlp in enumerate(mlps) if isinstance(mlp, MoEConfig)]
    count = mlps[sparse[0]].experts if sparse else 1
    return {"num_experts": count, **_write_period("expert", sparse, len(mlps))}


def _written(cfg: DecoderConfig) -> dict[str, Any]:
    mixers = [block.mixer for block in layers_of(cfg)]
    space = next((mixer for mixer in mixers if isinstance(mixer, Mamba1Config)), None)
    if space is None:
        raise ValueError("no layer is a Mamba")
    full = [layer for layer, mixer in enumerate(mixers) if not isinstance(mixer, Mamba1Config)]
    sizes = {"mamba_expand": space.inner // cfg.hidden, "mamba_dt_rank": space.rank}
    return {**to_settings(space, MAMBA), **sizes, **_write_period("attn", full, len(mixers))}


INNER = [
    row for name in ("dt", "b", "c") for row in norm(f"{LAYER}.mamba.{name}_layernorm", f"stack.*.mixer.{name}_norm")
]
TABLE = Decoder(
    "jamba", "JambaForCausalLM", sizes(65536, 4096, 14336, 32, 32, 8, None, 262144)
    | {"num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1}
    | {"attn_layer_period": 8, "attn_layer_offset": 4},
    {"num_local_experts": "num_experts"},
    {"mlp.gate.": "feed_forward.router.", **FINAL_NAMES},
    positions=NoPositions(), mixers=_mixers, experts=Experts(_read, _write), written=_written,
    mixer_rows=[*MIXER, *of_hybrids([*MAMBA1_ROWS, *INNER], f"{LAYER}.mamba")],
    unused=("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep",
            "calc_logits_for_entire_prompt", "mamba_inner_layernorms", "sliding_window", "layer_types",
            "layers_block_type"),
)  # fmt: skip
FAMILIES = [TABLE.family()]
