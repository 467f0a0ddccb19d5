"""Settings and tensor names that decoder families share: those of Llama, which most later families kept."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megajax.checkpoint.weights.tensor_table import Row
from megajax.interop.huggingface.family import Family, Settings, activation_name, layers_of, linear, norm, tokens
from megajax.interop.huggingface.family import attention as attention_rows
from megajax.interop.huggingface.rotary import rope, rope_settings, window_settings, windows
from megajax.layers.configs import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    GatedMLPConfig,
    MixerConfig,
    MoEConfig,
    RMSNormConfig,
    RouterConfig,
)
from megajax.layers.stack.config import stack_of
from megajax.models.configs import DecoderConfig

LAYER = "model.layers.{layer}"


def attention(settings: Settings, *, base: float = 10000.0, partial: bool = False, **changes: Any) -> AttentionConfig:
    """Attention with rotary positions (see `rope`). changes: further fields of AttentionConfig."""
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
    """A softmax router, with the balancing loss that transformers adds if output_router_logits is true."""
    coefficient, enabled = settings.take("router_aux_loss_coef", 0.001), settings.take("output_router_logits", False)
    return RouterConfig(aux_loss=coefficient if enabled else 0.0, **changes)


def decoder(
    settings: Settings,
    mixer: MixerConfig,
    mlp: Callable[[int], FeedForwardConfig],
    *,
    slides: Callable[[int], bool] | None = None,
    zero_centred: bool = False,
    **changes: Any,
) -> DecoderConfig:
    """A decoder of these layers.

    mlp: number of a layer -> its feed-forward config. slides: number of a layer -> whether it has a sliding window,
    used if there is no layer_types; None if the family has no windows. zero_centred: setting of the norms.
    """
    layers, length = settings.layers(), settings.need("max_position_embeddings")
    norm = RMSNormConfig(epsilon=settings.need("rms_norm_eps"), zero_centred=zero_centred)
    mixers: list[Any] = [mixer] * layers
    if slides is not None:
        mixers = [replace(mixers[0], window=size) for size in windows(settings, layers, length, slides)]
    blocks = [BlockConfig(mixer=mixer, mlp=mlp(layer), norm=norm) for layer, mixer in enumerate(mixers)]
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
    """The config of the first layer with experts."""
    dense: list[int]
    """Numbers of the layers without experts."""
    dense_ffn: int
    """Width of the layers without experts; if there are none, of an expert."""


def feed_forwards(cfg: Any) -> FeedForwards:
    """Raises ValueError for a model without experts."""
    mlps = [block.mlp for block in layers_of(cfg)]
    moe = next((mlp for mlp in mlps if isinstance(mlp, MoEConfig)), None)
    if moe is None:
        raise ValueError("no layer has experts")
    dense = [number for number, mlp in enumerate(mlps) if not isinstance(mlp, MoEConfig)]
    return FeedForwards(moe, dense, mlps[dense[0]].ffn if dense else moe.expert.ffn)


def model_settings(cfg: Any, mlp: Any) -> dict[str, Any]:
    """The settings of config.json that all these families share. mlp: config of a layer or an expert."""
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
    """The settings of Llama's blocks, with experts or without. windows: names of the family's window settings."""
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


def outer_rows(cfg: DecoderConfig) -> list[Row]:
    """The embedding table, the head and the last norm."""
    return [*tokens(cfg, "model.embed_tokens.weight", "lm_head.weight"), *norm("model.norm", "norm")]


GATED = ("gate_proj", "up_proj", "down_proj")


def gated(tensor: str, path: str, names: Sequence[str] = GATED) -> list[Row]:
    """A gated feed-forward layer. names: of gate, up and down in the other library."""
    pairs = zip(names, ("gate", "up", "down"), strict=True)
    return [row for name, matrix in pairs for row in linear(f"{tensor}.{name}", f"{path}.{matrix}")]


def experts(tensor: str, names: Sequence[str] = GATED) -> list[Row]:
    """A router, and experts with separate matrices."""
    router = Row(f"{tensor}.gate.weight", "stack.*.mlp.router", "e d -> d e")
    return [router, *gated(f"{tensor}.experts.{{expert}}", "stack.*.mlp.experts", names)]


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
    """A family whose head may be tied, and whose older files have tables of rotary angles."""
    return Family(
        name=name,
        architecture=architecture,
        task="CAUSAL_LM",
        heads={"lm_head.weight": "model.embed_tokens.weight"},
        ignored=("model.layers.*.self_attn.rotary_emb.inv_freq", *ignored),
        **parts,
    )
