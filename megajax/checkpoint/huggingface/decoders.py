"""What families of decoders share: the settings and the names of Llama, which most later ones kept."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megajax.checkpoint.huggingface.activations import ACTIVATIONS, theirs
from megajax.checkpoint.huggingface.family import Family, Settings
from megajax.checkpoint.huggingface.rotary import rope_settings
from megajax.checkpoint.huggingface.rows import attention as attention_rows
from megajax.checkpoint.huggingface.rows import linear, norm
from megajax.checkpoint.weights.tensor_table import Row
from megajax.layers.config import AttentionConfig, BlockConfig, GatedMLPConfig, MoEConfig, RouterConfig
from megajax.layers.segments import blocks_of, stack_of
from megajax.models.config import DecoderConfig

LAYER = "model.layers.{layer}"
UNTIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""A head that may stand beside the table that it is tied to."""


def decoder(given: Settings, blocks: Sequence[BlockConfig], length: int, **more: Any) -> DecoderConfig:
    """The model of these layers. length: max_position_embeddings."""
    return DecoderConfig(
        hidden=given.need("hidden_size"),
        vocabulary_size=given.need("vocab_size"),
        sequence_length=length,
        stack=stack_of(blocks),
        norm=blocks[0].norm,
        tied=given.take("tie_word_embeddings", False),
        **more,
    )


def attention(given: Settings, **more: Any) -> AttentionConfig:
    """Numbers and sizes of heads; `more` are other settings."""
    heads, hidden = given.count("num_attention_heads"), given.seen("hidden_size")
    groups, size = given.take("num_key_value_heads", heads), given.take("head_dim", hidden // heads)
    return AttentionConfig(heads=heads, kv_heads=groups, head_dim=size, **more)


def gated_mlp(given: Settings, name: str = "intermediate_size", **more: Any) -> GatedMLPConfig:
    """A gated feed-forward layer. name: of the setting of its width."""
    return GatedMLPConfig(ffn=given.need(name), activation=given.choose("hidden_act", "silu", ACTIVATIONS), **more)


def router(given: Settings, **more: Any) -> RouterConfig:
    """A router by softmax, with the balancing loss that transformers adds if output_router_logits; `more` are other
    settings."""
    coefficient, used = given.take("router_aux_loss_coef", 0.001), given.take("output_router_logits", False)
    return RouterConfig(aux_loss=coefficient if used else 0.0, **more)


def router_settings(moe: MoEConfig) -> dict[str, Any]:
    """Experts of a token, and the balancing loss."""
    loss = moe.router.aux_loss or moe.router.global_loss
    return {
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": loss,
        "output_router_logits": loss > 0,
    }


def windowed(block: BlockConfig, windows: Sequence[int | None]) -> list[BlockConfig]:
    """A block for each layer."""
    mixer: Any = block.mixer
    return [replace(block, mixer=replace(mixer, window=one)) for one in windows]


def layers_of(cfg: DecoderConfig) -> tuple[Any, ...]:
    """The block of each layer."""
    return blocks_of(cfg.stack)


def mixture_of(cfg: DecoderConfig) -> tuple[Any, list[int], int]:
    """The experts of a model, numbers of the layers that have none, and the ffn of these. Raises ValueError."""
    mlps = [block.mlp for block in layers_of(cfg)]
    mixtures = [mlp for mlp in mlps if isinstance(mlp, MoEConfig)]
    if not mixtures:
        raise ValueError("no layer has experts")
    dense = [number for number, mlp in enumerate(mlps) if not isinstance(mlp, MoEConfig)]
    return mixtures[0], dense, mlps[dense[0]].ffn if dense else mixtures[0].expert.ffn


def settings_of(cfg: Any, kind: str, architecture: str) -> dict[str, Any]:
    """What config.json says of every decoder, but for its layers' own settings."""
    return {
        "architectures": [architecture],
        "model_type": kind,
        "hidden_size": cfg.hidden,
        "num_hidden_layers": cfg.stack.layers(),
        "rms_norm_eps": cfg.norm.epsilon,
        "max_position_embeddings": cfg.sequence_length,
        "vocab_size": cfg.vocabulary_size,
        "tie_word_embeddings": cfg.tied,
        "initializer_range": cfg.init_std,
    }


def attention_settings(mixer: AttentionConfig, hidden: int) -> dict[str, Any]:
    """Heads, biases and rotary positions."""
    return {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.groups(),
        "head_dim": mixer.size(hidden),
        "attention_bias": mixer.bias,
        **rope_settings(mixer.rope),
    }


def activation_setting(mlp: GatedMLPConfig) -> dict[str, str]:
    """hidden_act."""
    return {"hidden_act": theirs(mlp.activation)}


def ends(cfg: DecoderConfig) -> list[Row]:
    """Tables of tokens and the last norm."""
    tokens = (slice(0, cfg.vocabulary_size),)
    return [
        Row("model.embed_tokens.weight", "tokens", inside=tokens),
        Row("model.norm.weight", "norm.gain"),
        Row("lm_head.weight", "head", inside=tokens),
    ]


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
INPUTS_AND_OUTPUT = ("q_proj", "k_proj", "v_proj", "o_proj")
ATTENTION = [
    *attention_rows(f"{LAYER}.self_attn", "stack.*.mixer", INPUTS_AND_OUTPUT),
    *norm(f"{LAYER}.self_attn.q_norm", "stack.*.mixer.query_norm"),
    *norm(f"{LAYER}.self_attn.k_norm", "stack.*.mixer.key_norm"),
    *NORMS,
]
"""Attention and the norms of a block."""


def family(name: str, *, ignored: tuple[str, ...] = (), **more: Any) -> Family:
    """A family with one model_type, its name, a head that may be tied, and tables of angles in older files."""
    angles = "model.layers.*.self_attn.rotary_emb.inv_freq"
    return Family(name=name, model_types=(name,), heads=UNTIED, ignored=(angles, *ignored), **more)
