"""What families of decoders share: the settings and the names of Llama, which most later ones kept."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megajax.checkpoint.huggingface.family import Family, Settings, activation_name, layers_of
from megajax.checkpoint.huggingface.rotary import rope, rope_settings, window_settings, windows
from megajax.checkpoint.huggingface.rows import attention as attention_rows
from megajax.checkpoint.huggingface.rows import linear, norm, tokens
from megajax.checkpoint.weights.tensor_table import Row
from megajax.layers.config import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    GatedMLPConfig,
    MixerConfig,
    MoEConfig,
    RMSNormConfig,
    RouterConfig,
)
from megajax.layers.segments import stack_of
from megajax.models.config import DecoderConfig

LAYER = "model.layers.{layer}"


def attention(settings: Settings, *, base: float = 10000.0, partial: bool = False, **changes: Any) -> AttentionConfig:
    """Attention with rotary positions, see `rope`, and with `changes`."""
    heads, hidden = settings.count("num_attention_heads"), settings.peek("hidden_size")
    return AttentionConfig(
        heads=heads,
        kv_heads=settings.take("num_key_value_heads", heads),
        head_dim=settings.take("head_dim", hidden // heads),
        rope=rope(settings, settings.peek("max_position_embeddings"), base=base, partial=partial),
        **changes,
    )


def gated_mlp(settings: Settings, *, bias: bool = False) -> GatedMLPConfig:
    """A gated feed-forward layer."""
    activation: Any = settings.activation("hidden_act", "silu")
    return GatedMLPConfig(ffn=settings.need("intermediate_size"), activation=activation, bias=bias)


def router(settings: Settings, **changes: Any) -> RouterConfig:
    """A router by softmax, with the balancing loss that transformers adds if output_router_logits."""
    coefficient, used = settings.take("router_aux_loss_coef", 0.001), settings.take("output_router_logits", False)
    return RouterConfig(aux_loss=coefficient if used else 0.0, **changes)


def decoder(
    settings: Settings,
    mixer: MixerConfig,
    mlp: Callable[[int], FeedForwardConfig],
    *,
    slides: Callable[[int], bool] | None = None,
    zero_centred: bool = False,
    **changes: Any,
) -> DecoderConfig:
    """The model of these layers.

    mlp: that of a layer, by number. slides: whether a layer has the window, where layer_types does not say; None: the
    family has no windows. zero_centred: of norms.
    """
    layers, length = settings.layers(), settings.need("max_position_embeddings")
    norm = RMSNormConfig(epsilon=settings.need("rms_norm_eps"), zero_centred=zero_centred)
    mixers: list[Any] = [mixer] * layers
    if slides is not None:
        mixers = [replace(mixers[0], window=size) for size in windows(settings, layers, length, slides)]
    blocks = [BlockConfig(mixer=each, mlp=mlp(layer), norm=norm) for layer, each in enumerate(mixers)]
    return DecoderConfig(
        hidden=settings.need("hidden_size"),
        vocabulary_size=settings.need("vocab_size"),
        sequence_length=length,
        stack=stack_of(blocks),
        norm=norm,
        tied=settings.take("tie_word_embeddings", False),
        **changes,
    )


class FeedForwards(NamedTuple):
    """The feed-forward layers of a model with experts."""

    moe: Any
    """That of the first layer with experts."""
    dense: list[int]
    """Numbers of the layers without experts."""
    dense_ffn: int
    """Width of these; of an expert if there are none."""


def feed_forwards(cfg: Any) -> FeedForwards:
    """Raises ValueError for a model without experts."""
    mlps = [block.mlp for block in layers_of(cfg)]
    moe = next((mlp for mlp in mlps if isinstance(mlp, MoEConfig)), None)
    if moe is None:
        raise ValueError("no layer has experts")
    dense = [number for number, mlp in enumerate(mlps) if not isinstance(mlp, MoEConfig)]
    return FeedForwards(moe, dense, mlps[dense[0]].ffn if dense else moe.expert.ffn)


def model_settings(cfg: Any, mlp: Any) -> dict[str, Any]:
    """The settings of config.json that all these families have. mlp: of a layer or of an expert."""
    return {
        "hidden_size": cfg.hidden,
        "num_hidden_layers": cfg.stack.layers(),
        "rms_norm_eps": cfg.norm.epsilon,
        "max_position_embeddings": cfg.sequence_length,
        "vocab_size": cfg.vocabulary_size,
        "tie_word_embeddings": cfg.tied,
        "initializer_range": cfg.init_std,
        "hidden_act": activation_name(mlp.activation),
        "intermediate_size": mlp.ffn,
    }


def write(cfg: Any, *windows: str, moe: MoEConfig | None = None) -> dict[str, Any]:
    """The settings of Llama's blocks, with experts or without. windows: settings of windows that the family has."""
    blocks = layers_of(cfg)
    sliding, first = window_settings([block.mixer for block in blocks]), blocks[0].mixer
    return {
        **model_settings(cfg, blocks[0].mlp if moe is None else moe.expert),
        "num_attention_heads": first.heads,
        "num_key_value_heads": first.groups(),
        "head_dim": first.size(cfg.hidden),
        "attention_bias": first.bias,
        **rope_settings(first.rope),
        **{name: sliding[name] for name in windows},
        **({} if moe is None else _router_settings(moe)),
    }


def _router_settings(moe: MoEConfig) -> dict[str, Any]:
    loss = moe.router.aux_loss or moe.router.global_loss
    return {"num_experts_per_tok": moe.top_k, "router_aux_loss_coef": loss, "output_router_logits": loss > 0}


def ends(cfg: DecoderConfig) -> list[Row]:
    """Tables of tokens and the last norm."""
    return [*tokens(cfg, "model.embed_tokens.weight", "lm_head.weight"), *norm("model.norm", "norm")]


GATED = ("gate_proj", "up_proj", "down_proj")


def gated(theirs: str, ours: str, names: Sequence[str] = GATED) -> list[Row]:
    """A gated feed-forward layer. names: theirs of gate, up and down."""
    pairs = zip(names, ("gate", "up", "down"), strict=True)
    return [row for name, mine in pairs for row in linear(f"{theirs}.{name}", f"{ours}.{mine}")]


def experts(theirs: str, names: Sequence[str] = GATED) -> list[Row]:
    """A router, and experts with matrices of their own."""
    router = Row(f"{theirs}.gate.weight", "stack.*.mlp.router", "e d -> d e")
    return [router, *gated(f"{theirs}.experts.{{expert}}", "stack.*.mlp.experts", names)]


NORMS = [
    *norm(f"{LAYER}.input_layernorm", "stack.*.mixer_norm"),
    *norm(f"{LAYER}.post_attention_layernorm", "stack.*.mlp_norm"),
]
ATTENTION = [
    *attention_rows(f"{LAYER}.self_attn", "stack.*.mixer", ("q_proj", "k_proj", "v_proj", "o_proj")),
    *norm(f"{LAYER}.self_attn.q_norm", "stack.*.mixer.query_norm"),
    *norm(f"{LAYER}.self_attn.k_norm", "stack.*.mixer.key_norm"),
    *NORMS,
]
"""Attention and the norms of a block."""


def family(name: str, architecture: str, *, ignored: tuple[str, ...] = (), **parts: Any) -> Family:
    """A family whose head may be tied, with tables of angles in older files."""
    return Family(
        name=name,
        architecture=architecture,
        heads={"lm_head.weight": "model.embed_tokens.weight"},
        ignored=("model.layers.*.self_attn.rotary_emb.inv_freq", *ignored),
        **parts,
    )
