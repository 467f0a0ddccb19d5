"""Granite 4 hybrids: Mamba-2 in most layers, attention in the others, usually without rotary positions.

All layers have Granite's factors, and experts with a shared one, or only the latter as their feed-forward.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import LAYER, MIXER
from megajax.interop.huggingface.families import granite
from megajax.interop.huggingface.families.hybrids import mamba
from megajax.interop.huggingface.family import Names, Settings, layers_of, to_settings
from megajax.interop.huggingface.rotary import FULL, LINEAR
from megajax.interop.huggingface.tables import Decoder, Experts, FeedForwardOf, Positions, RopeOf, sizes
from megajax.interop.weights.name_mapping import Row
from megajax.layers.mamba.config import Mamba2Config
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig
from megajax.models.decoder.config import DecoderConfig

OLDER = {"mamba": LINEAR, "attention": FULL}
"""Names of the types of layers before transformers 5."""
MAMBA: Names = {
    "heads": ("mamba_n_heads", 128),
    "head_dim": ("mamba_d_head", 64),
    "state": ("mamba_d_state", 256),
    "groups": ("mamba_n_groups", 1),
    "conv_kernel": ("mamba_d_conv", 4),
    "conv_bias": ("mamba_conv_bias", True),
    "bias": ("mamba_proj_bias", False),
    "chunk": ("mamba_chunk_size", 256),
}
MAMBA_ROWS = mamba.of_hybrids(mamba.MAMBA2_ROWS, f"{LAYER}.mamba")
FINAL_NAMES = {
    "mlp.": "feed_forward.",
    "post_attention_layernorm": "pre_ff_layernorm",
    "model.norm.": "model.final_layernorm.",
}
"""Parts of names of tensors in hybrids by the names of Llama's."""


def state_space(settings: Settings) -> Mamba2Config:
    """The Mamba-2 layers. Falcon-H1 has their width, mamba_d_ssm."""
    hidden, epsilon = settings.peek("hidden_size"), settings.peek("rms_norm_eps")
    expanded = settings.take("mamba_expand", 2, float) * hidden
    inner = settings.take("mamba_d_ssm", kind=int) or expanded
    if settings.remaining.get("mamba_d_head", "auto") == "auto":
        settings.remaining["mamba_d_head"] = int(inner) // settings.take("mamba_n_heads", 128)
    mixer = Mamba2Config(**settings.fields(MAMBA), norm_epsilon=epsilon, dt_limit=mamba.step_limit(settings))
    if mixer.inner != inner:
        settings.refuse("mamba_n_heads", mixer.heads, f"with mamba_d_head={mixer.head_dim} they are not {inner} wide")
    return mixer


def write_state_space(cfg: DecoderConfig) -> dict[str, Any]:
    """The settings of the Mamba-2 layers. Raises ValueError if there are none."""
    mixer = next((block.mixer for block in layers_of(cfg) if isinstance(block.mixer, Mamba2Config)), None)
    if mixer is None:
        raise ValueError("no layer is a Mamba-2")
    expand = mixer.inner / cfg.hidden
    return {
        **to_settings(mixer, MAMBA),
        "mamba_expand": int(expand) if expand == int(expand) else expand,
        **mamba.write_step_limit(mixer),
    }


def _mixers(settings: Settings, attention: Sequence[Any]) -> list[Any]:
    if kinds := settings.take("layer_types", kind=list):
        settings.remaining["layer_types"] = [OLDER.get(kind, kind) for kind in kinds]
    kinds, linear = decoders.layer_types(settings, len(attention), LINEAR, lambda _: True), state_space(settings)
    return [linear if kind == LINEAR else mixer for kind, mixer in zip(kinds, attention, strict=True)]


class OptionalPositions(Positions):
    """Rotary positions if position_embedding_type says so."""

    def read(self, settings: Settings) -> RopeOf:
        rotated = settings.take("position_embedding_type", kind=str) == "rope"
        rotation = super().read(settings)
        return rotation if rotated else lambda layer, slides: None

    def write(self, cfg: DecoderConfig) -> dict[str, Any]:
        rotated = decoders.attention_mixers(cfg)[0].rope is not None
        return {**super().write(cfg), "position_embedding_type": "rope"} if rotated else {}


def _read(settings: Settings, mlp: GatedMLPConfig) -> FeedForwardOf:
    """A layer without experts has only the shared one."""
    shared = settings.count("shared_intermediate_size")
    feed_forward = granite.experts(settings, mlp, shared) if settings.peek("num_local_experts") else None
    layer = feed_forward or replace(mlp, ffn=shared)
    return lambda _: layer


def _write(cfg: DecoderConfig) -> dict[str, Any]:
    mlp = layers_of(cfg)[0].mlp
    if isinstance(mlp, MoEConfig):
        return granite.write_experts(cfg)
    return {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": mlp.ffn}


def _written(cfg: DecoderConfig) -> dict[str, Any]:
    kinds = [LINEAR if isinstance(block.mixer, Mamba2Config) else FULL for block in layers_of(cfg)]
    return {**granite.written(cfg), **write_state_space(cfg), "layer_types": kinds}


def _of_layers(rows: list[Row], cfg: DecoderConfig) -> list[Row]:
    return [*rows, *(granite.FUSED if isinstance(layers_of(cfg)[0].mlp, GatedMLPConfig) else granite.FUSED_EXPERTS)]


FACTORS: dict[str, Any] = granite.FACTORS | {"written": _written}
TABLE = Decoder(
    "granitemoehybrid", "GraniteMoeHybridForCausalLM", granite.MOE | {"shared_intermediate_size": 1024},
    **FACTORS, positions=OptionalPositions(), mixers=_mixers,
    experts=Experts(_read, _write), mixer_rows=[*MIXER, *MAMBA_ROWS], mlp_rows=(), finish=_of_layers,
    unused=(
        # Positions that no layer has, and settings of experts of a model without them.
        "rope_theta", "rope_scaling", "rope_parameters", "num_local_experts", "num_experts_per_tok",
        "output_router_logits", "router_aux_loss_coef",
        # Settings that transformers does not read.
        "init_method", "normalization_function",
    ),
)  # fmt: skip


def _bamba_prepare(settings: Settings) -> None:
    """The layers with attention are listed, and half of each head is rotated, whatever config.json says."""
    listed = settings.take("attn_layer_indices", [])
    kinds = [FULL if layer in listed else LINEAR for layer in range(settings.peek("num_hidden_layers"))]
    settings.remaining["layer_types"] = kinds
    for name in ("partial_rotary_factor", "layers_block_type"):
        settings.take(name, kind=object)


def _bamba_written(cfg: DecoderConfig) -> dict[str, Any]:
    listed = [layer for layer, block in enumerate(layers_of(cfg)) if not isinstance(block.mixer, Mamba2Config)]
    return {**write_state_space(cfg), "attn_layer_indices": listed}


BAMBA = Decoder(
    "bamba", "BambaForCausalLM", sizes(128000, 4096, 14336, 32, 32, 8, None, 262144, rms_norm_eps=1e-5),
    bias="attention_bias", mlp_bias="mlp_bias", positions=Positions(fraction=0.5), prepare=_bamba_prepare,
    mixers=_mixers, written=_bamba_written, mixer_rows=[*MIXER, *MAMBA_ROWS],
    tensors=FINAL_NAMES,
    unused=("num_logits_to_keep", "z_loss_coefficient", "num_experts*", "expert_layer_*"),
)  # fmt: skip
FAMILIES = [TABLE.family(), BAMBA.family()]
