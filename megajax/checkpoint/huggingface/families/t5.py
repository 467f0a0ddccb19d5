"""T5 1.0 and 1.1, and mT5: RMSNorm, tables of relative positions that layers share, scores without a scale."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megajax.checkpoint.huggingface.activations import feed_forward, feed_forward_name
from megajax.checkpoint.huggingface.family import Family, Names, Settings, written
from megajax.checkpoint.huggingface.rows import attention, linear, norm
from megajax.checkpoint.weights.tensor_table import Row
from megajax.layers import config as layers
from megajax.layers.config.cross import CrossAttentionConfig, CrossBlockConfig
from megajax.models.config import T5Config, WidthScalingConfig

UNUSED = frozenset({"classifier_dropout", "dense_act_fn", "dropout_rate", "is_gated_act", "output_past"})
SIZES: Names = {
    "hidden": ("d_model", 512),
    "vocabulary_size": ("vocab_size", 32128),
    # transformers knows no lengths; n_positions is of the first checkpoints, decoder_positions is ours.
    "encoder_length": ("n_positions", 512),
    "sequence_length": ("decoder_positions", 512),
    "tied": ("tie_word_embeddings", True),
}
HEADS: Names = {"heads": ("num_heads", 8), "head_dim": ("d_kv", 64)}
COUNT: Names = {"buckets": ("relative_attention_num_buckets", 32)}
BUCKETS: Names = {**COUNT, "distance": ("relative_attention_max_distance", 128)}
MT5 = {"vocab_size": 250112, "num_layers": 8, "num_heads": 6, "d_ff": 1024, "feed_forward_proj": "gated-gelu"}


def model(given: Settings) -> T5Config:
    """The model of a config.json."""
    multilingual = given.left.get("model_type") == "mt5"
    given.assume(MT5 if multilingual else {})
    sizes = given.fields(SIZES)
    heads: dict[str, Any] = {**given.fields(HEADS), "scale": 1.0}
    scaled = given.take("scale_decoder_outputs", sizes["tied"]) and not multilingual
    scaling = (
        WidthScalingConfig(base_hidden=sizes["hidden"], output=max(1, sizes["hidden"]) ** -0.5) if scaled else None
    )
    relative = layers.RelativeBiasConfig(**given.fields(BUCKETS), shared=True)
    norm = layers.RMSNormConfig(epsilon=given.take("layer_norm_epsilon", 1e-6))
    parts: dict[str, Any] = {"mlp": feed_forward(given), "norm": norm}
    given.only("is_encoder_decoder", True)
    mixer = layers.AttentionConfig(**heads, relative=relative)
    around = replace(mixer, relative=replace(relative, both_ways=True), causal=False)
    reads = layers.BlockConfig(mixer=around, **parts)
    writes = CrossBlockConfig(mixer=mixer, cross=CrossAttentionConfig(**heads), **parts)
    count = given.layers("num_layers", 6)
    encoder = layers.StackConfig(pattern=(reads,), repeats=count)
    stack = layers.StackConfig(pattern=(writes,), repeats=given.layers("num_decoder_layers", count))
    return T5Config(**sizes, encoder=encoder, stack=stack, norm=norm, head_bias=False, width_scaling=scaling)


def settings_of(kind: str, name: str) -> Callable[[Any], dict[str, Any]]:
    """The config.json of a model as one of this model_type, whose classes begin with `name`."""

    def settings(cfg: Any) -> dict[str, Any]:
        block = cfg.stack.pattern[0]
        return {
            "model_type": kind,
            "architectures": [f"{name}ForConditionalGeneration"],
            **written(cfg, SIZES),
            "is_encoder_decoder": True,
            "decoder_start_token_id": 0,
            "num_layers": cfg.encoder.layers(),
            "num_decoder_layers": cfg.stack.layers(),
            **written(block.mixer, HEADS),
            "d_ff": block.mlp.ffn,
            "feed_forward_proj": feed_forward_name(block.mlp),
            **written(block.mixer.relative, BUCKETS),
            "layer_norm_epsilon": cfg.norm.epsilon,
            "scale_decoder_outputs": cfg.width_scaling is not None,
        }

    return settings


def section(theirs: str, ours: str, last: int, up: str) -> list[Row]:
    """Of `encoder` or `decoder`. last: number of the feed-forward sub-layer; up: name of its matrix."""
    layer, block = f"{theirs}.block.{{layer}}.layer", f"{ours}stack.*"
    names, mlp = ("q", "k", "v", "o"), f"{layer}.{last}.DenseReluDense"
    table = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return [
        *attention(f"{layer}.0.SelfAttention", f"{block}.mixer", names),
        *attention(f"{layer}.1.EncDecAttention", f"{block}.cross", names),
        *norm(f"{layer}.0.layer_norm", f"{block}.mixer_norm"),
        *norm(f"{layer}.1.layer_norm", f"{block}.cross_norm"),
        *norm(f"{layer}.{last}.layer_norm", f"{block}.mlp_norm"),
        *linear(f"{mlp}.wi_0", f"{block}.mlp.gate"),
        *linear(f"{mlp}.{up}", f"{block}.mlp.up"),
        *linear(f"{mlp}.wo", f"{block}.mlp.down"),
        Row(table, f"{ours}stack.relative.table"),
        *norm(f"{theirs}.final_layer_norm", f"{ours}norm"),
    ]


def rows(cfg: Any) -> Sequence[Row]:
    """The table."""
    tokens, gated = (slice(0, cfg.vocabulary_size),), isinstance(cfg.stack.pattern[0].mlp, layers.GatedMLPConfig)
    up = "wi_1" if gated else "wi"
    return [
        Row("shared.weight", "tokens", inside=tokens),
        *section("encoder", "encoder.", 1, up),
        *section("decoder", "", 2, up),
        Row("lm_head.weight", "head", inside=tokens),
    ]


FAMILIES = [
    Family(
        name=kind,
        model_types=(kind,),
        model=model,
        settings=settings_of(kind, name),
        rows=rows,
        unused=UNUSED,
        ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
        copies={f"{each}.embed_tokens.weight": "shared.weight" for each in ("encoder", "decoder")},
        heads={"lm_head.weight": "shared.weight"},
    )
    for kind, name in (("t5", "T5"), ("mt5", "MT5"))
]
