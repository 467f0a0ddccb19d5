"""T5 1.0 and 1.1, and mT5: RMSNorm, tables of relative positions that layers share, scores without a scale."""

from dataclasses import replace
from typing import Any

from megajax.interop.huggingface.family import (
    ACTIVATIONS,
    Family,
    Names,
    Settings,
    activation_name,
    attention,
    final_norm,
    layers_of,
    linear,
    norm,
    to_settings,
    tokens,
)
from megajax.interop.weights.name_mapping import Row
from megajax.layers.attention.config import AttentionConfig, CrossAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig, MLPConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RelativeBiasConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.decoder.config import WidthScalingConfig
from megajax.models.t5.config import T5Config

UNUSED = frozenset({"classifier_dropout", "dense_act_fn", "dropout_rate", "is_gated_act", "output_past"})
SIZES: Names = {
    "hidden": ("d_model", 512),
    "vocabulary_size": ("vocab_size", 32128),
    # n_positions is in the first checkpoints only; decoder_positions is MegaJAX's.
    "encoder_length": ("n_positions", 512),
    "sequence_length": ("decoder_positions", 512),
    "tied": ("tie_word_embeddings", True),
}
HEADS: Names = {"heads": ("num_heads", 8), "head_dim": ("d_kv", 64)}
BUCKETS: Names = {
    "buckets": ("relative_attention_num_buckets", 32),
    "distance": ("relative_attention_max_distance", 128),
}
MT5 = {"vocab_size": 250112, "num_layers": 8, "num_heads": 6, "d_ff": 1024, "feed_forward_proj": "gated-gelu"}


def _read(settings: Settings) -> T5Config:
    multilingual = settings.remaining.get("model_type") == "mt5"
    settings.assume(MT5 if multilingual else {})
    sizes = settings.fields(SIZES)
    heads: dict[str, Any] = {**settings.fields(HEADS), "scale": 1.0}
    scaled = settings.take("scale_decoder_outputs", sizes["tied"]) and not multilingual
    scaling = (
        WidthScalingConfig(base_hidden=sizes["hidden"], output=max(1, sizes["hidden"]) ** -0.5) if scaled else None
    )
    relative = RelativeBiasConfig(**settings.fields(BUCKETS), shared=True)
    norm = RMSNormConfig(epsilon=settings.take("layer_norm_epsilon", 1e-6))
    parts: dict[str, Any] = {"mlp": feed_forward(settings), "norm": norm}
    settings.only("is_encoder_decoder", True)
    mixer = AttentionConfig(**heads, relative=relative)
    around = replace(mixer, relative=replace(relative, both_ways=True), causal=False)
    reads = BlockConfig(mixer=around, **parts)
    writes = BlockConfig(mixer=mixer, cross=CrossAttentionConfig(**heads), **parts)
    count = settings.layers("num_layers", 6)
    encoder = StackConfig(pattern=(reads,), repeats=count)
    stack = StackConfig(pattern=(writes,), repeats=settings.layers("num_decoder_layers", count))
    return T5Config(**sizes, encoder=encoder, stack=stack, norm=norm, head_bias=False, width_scaling=scaling)


def feed_forward(settings: Settings) -> MLPConfig:
    """The MLP of `feed_forward_proj`, for example relu or gated-gelu, which is the tanh form."""
    name = settings.take("feed_forward_proj", "relu")
    activation: Any = ACTIVATIONS.get("gelu_new" if name == "gated-gelu" else name.removeprefix("gated-"))
    if activation is None:
        names = ", ".join(ACTIVATIONS)
        settings.refuse("feed_forward_proj", name, f"only {names} are supported, with gated- or without")
    make = GatedMLPConfig if name.startswith("gated-") else DenseMLPConfig
    return make(ffn=settings.take("d_ff", 2048), activation=activation or "relu", bias=False)


def feed_forward_name(mlp: DenseMLPConfig | GatedMLPConfig) -> str:
    """`feed_forward_proj` in config.json."""
    if isinstance(mlp, DenseMLPConfig):
        return activation_name(mlp.activation)
    special = {"gelu_tanh": "gated-gelu", "gelu": "gated-gelu_python"}
    return special.get(mlp.activation, f"gated-{activation_name(mlp.activation)}")


def _write(cfg: T5Config) -> dict[str, Any]:
    block = layers_of(cfg)[0]
    return {
        **to_settings(cfg, SIZES),
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
        "num_layers": cfg.encoder.layers(),
        "num_decoder_layers": cfg.stack.layers(),
        **to_settings(block.mixer, HEADS),
        "d_ff": block.mlp.ffn,
        "feed_forward_proj": feed_forward_name(block.mlp),
        **to_settings(block.mixer.relative, BUCKETS),
        "layer_norm_epsilon": final_norm(cfg).epsilon,
        "scale_decoder_outputs": cfg.width_scaling is not None,
    }


def section(tensor: str, path: str, last: int, up: str) -> list[Row]:
    """Rows of `encoder` or `decoder`. last: number of the feed-forward sub-layer; up: name of its matrix."""
    layer, block = f"{tensor}.block.{{layer}}.layer", f"{path}stack.*"
    names, mlp = ("q", "k", "v", "o"), f"{layer}.{last}.DenseReluDense"
    table = f"{tensor}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return [
        *attention(f"{layer}.0.SelfAttention", f"{block}.mixer", names),
        *attention(f"{layer}.1.EncDecAttention", f"{block}.cross", names),
        *norm(f"{layer}.0.layer_norm", f"{block}.mixer_norm"),
        *norm(f"{layer}.1.layer_norm", f"{block}.cross_norm"),
        *norm(f"{layer}.{last}.layer_norm", f"{block}.mlp_norm"),
        *linear(f"{mlp}.wi_0", f"{block}.mlp.gate"),
        *linear(f"{mlp}.{up}", f"{block}.mlp.up"),
        *linear(f"{mlp}.wo", f"{block}.mlp.down"),
        Row(table, f"{path}stack.relative.table"),
        *norm(f"{tensor}.final_layer_norm", f"{path}norm"),
    ]


def _rows(cfg: T5Config) -> list[Row]:
    up = "wi_1" if isinstance(cfg.stack.pattern[0].mlp, GatedMLPConfig) else "wi"
    return [
        *tokens(cfg, "shared.weight", "lm_head.weight"),
        *section("encoder", "encoder.", 1, up),
        *section("decoder", "", 2, up),
    ]


FAMILIES = [
    Family(
        name=name,
        architecture=architecture,
        read=_read,
        write=_write,
        rows=_rows,
        unused=UNUSED,
        ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
        copies={f"{section}.embed_tokens.weight": "shared.weight" for section in ("encoder", "decoder")},
        heads={"lm_head.weight": "shared.weight"},
    )
    for name, architecture in (("t5", "T5ForConditionalGeneration"), ("mt5", "MT5ForConditionalGeneration"))
]
