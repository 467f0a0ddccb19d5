"""Settings and tensor names that decoder families share: those of Llama, which most later families kept.

Windows have older and newer spellings in config.json.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from megajax.interop.huggingface.family import (
    Family,
    Settings,
    activation_name,
    class_settings,
    classes,
    final_norm,
    layers_of,
    linear,
    norm,
    tokens,
)
from megajax.interop.huggingface.family import attention as attention_rows
from megajax.interop.huggingface.rotary import FULL, SLIDING, rope, rope_settings
from megajax.interop.weights.name_mapping import Row
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig, MixerConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import FeedForwardConfig, MoEConfig, RouterConfig
from megajax.layers.norm.config import NormConfig, RMSNormConfig
from megajax.layers.stack.config import stack_of
from megajax.models.classifier.config import ClassHeadConfig, DecoderClassifierConfig, RegressionHeadConfig
from megajax.models.decoder.config import DecoderConfig

LAYER = "model.layers.{layer}"
OF_BLOCKS = ("norm_placement", "layer_scale", "beside", "sum_weights")
"""Fields of blocks that are the same in all layers."""


def attention(settings: Settings, *, base: float = 10000.0, partial: bool = False, **changes: Any) -> AttentionConfig:
    """Attention with rotary positions (see `rope`). changes: further fields of AttentionConfig."""
    rotation = rope(settings, settings.peek("max_position_embeddings"), base=base, partial=partial)
    return AttentionConfig(**heads(settings), rope=rotation, **changes)


def heads(settings: Settings) -> dict[str, Any]:
    """Numbers and size of heads."""
    heads, hidden = settings.count("num_attention_heads"), settings.peek("hidden_size")
    groups, size = settings.take("num_key_value_heads", heads), settings.take("head_dim", hidden // heads)
    return {"heads": heads, "kv_heads": groups, "head_dim": size}


def rotary_dim(settings: Settings) -> None:
    """The rotated dimensions of a head, in some published files, as partial_rotary_factor."""
    rotated = settings.take("rotary_dim", kind=int)
    if rotated is not None:
        settings.assume({"partial_rotary_factor": rotated / head_size(settings)})


def head_size(settings: Settings) -> int:
    """The size of a head, before its settings are taken."""
    names = ("num_attention_heads", "hidden_size")
    heads, hidden = (settings.remaining.setdefault(name, settings.count(name)) for name in names)
    size = settings.remaining.get("head_dim")
    return max(1, size if isinstance(size, int) else hidden // heads)


def gated_mlp(settings: Settings, *, bias: bool = False, activation: str = "hidden_act") -> GatedMLPConfig:
    """A gated feed-forward layer. activation: name of its setting."""
    function = settings.activation(activation, "silu")
    return GatedMLPConfig(ffn=settings.need("intermediate_size"), activation=function, bias=bias)


def router(settings: Settings, **changes: Any) -> RouterConfig:
    """A softmax router, with the balancing loss that transformers adds if output_router_logits is true."""
    coefficient, enabled = settings.take("router_aux_loss_coef", 0.001), settings.take("output_router_logits", False)
    return RouterConfig(aux_loss=coefficient if enabled else 0.0, **changes)


def decoder(
    settings: Settings,
    mixer: MixerConfig | Sequence[MixerConfig],
    mlp: Callable[[int], FeedForwardConfig],
    *,
    norm: NormConfig | None = None,
    **changes: Any,
) -> DecoderConfig:
    """A decoder of these layers.

    mixer: of all layers, or one for each. mlp: number of a layer -> its feed-forward config. norm: None: an RMSNorm.
    changes: further fields of the decoder and of its blocks (`OF_BLOCKS`).
    """
    layers, length = settings.layers(), settings.need("max_position_embeddings")
    norm = norm or RMSNormConfig(epsilon=settings.need("rms_norm_eps"))
    mixers: list[Any] = list(mixer) if isinstance(mixer, Sequence) else [mixer] * layers
    block = {name: changes.pop(name) for name in OF_BLOCKS if name in changes}
    blocks = [BlockConfig(mixer=mixer, mlp=mlp(layer), norm=norm, **block) for layer, mixer in enumerate(mixers)]
    following = replace(blocks[-1], mlp=mlp(layers))
    if (ahead := changes.get("prediction")) is not None and following != blocks[-1]:
        changes["prediction"] = replace(ahead, block=following)
    return DecoderConfig(
        hidden=settings.need("hidden_size"),
        vocabulary_size=settings.need("vocab_size"),
        sequence_length=length,
        stack=stack_of(blocks),
        norm=norm,
        tied=settings.take("tie_word_embeddings", False),
        **changes,
    )


SCORES, TEXTS = "ForSequenceClassification", "ForCausalLM"
"""Ends of the names of classes."""


def with_scores(settings: Settings, model: DecoderConfig) -> DecoderConfig | DecoderClassifierConfig:
    """A decoder with the head of the class that config.json names: scores of a whole text, or of the next token."""
    if not settings.architecture().endswith(SCORES):
        return model
    head: Any = {"pooling": "last", "pooler": False, "dropout": 0.0, "bias": False}
    count = classes(settings)
    head = RegressionHeadConfig(**head) if count == 1 else ClassHeadConfig(classes=count, **head)
    return DecoderClassifierConfig(head=head, **{f.name: getattr(model, f.name) for f in fields(model)})


def scores_settings(cfg: DecoderConfig, architecture: str) -> dict[str, Any]:
    """The reverse of `with_scores`; {} for a model without such a head. architecture: class of the family."""
    if not isinstance(cfg, DecoderClassifierConfig):
        return {}
    architectures = {"architectures": [architecture.replace(TEXTS, SCORES)]}
    return {**architectures, **class_settings(cfg.head.columns())}


def attention_mixers(cfg: DecoderConfig) -> list[AttentionConfig]:
    """The attention of the layers that have it. Raises ValueError for a model without such layers."""
    mixers = [block.mixer for block in layers_of(cfg) if isinstance(block.mixer, AttentionConfig)]
    if not mixers:
        raise ValueError("no layer has attention")
    return mixers


class FeedForwards(NamedTuple):
    """The feed-forward layers of a model with experts."""

    moe: Any
    """The config of the first layer with experts."""
    dense: list[int]
    """Numbers of the layers without experts."""
    dense_ffn: int
    """Width of the layers without experts; if there are none, of an expert."""


def feed_forwards(cfg: DecoderConfig) -> FeedForwards:
    """Prediction blocks count. Without any experts, `moe` has none: a folder may have only the layers before them."""
    mlps = [block.mlp for block in layers_of(cfg)]
    plain: Any = mlps[0]
    every = [*mlps, *(block.mlp for block in cfg.predicting_blocks())]
    moe = next((mlp for mlp in every if isinstance(mlp, MoEConfig)), MoEConfig(experts=0, top_k=1, expert=plain))
    dense = [number for number, mlp in enumerate(mlps) if not isinstance(mlp, MoEConfig)]
    return FeedForwards(moe, dense, mlps[dense[0]].ffn if dense else moe.expert.ffn)


def model_settings(cfg: DecoderConfig, mlp: Any) -> dict[str, Any]:
    """The settings of config.json that all these families share. mlp: config of a layer or an expert."""
    return {
        "hidden_size": cfg.hidden,
        "num_hidden_layers": cfg.stack.layers(),
        "rms_norm_eps": final_norm(cfg).epsilon,
        "max_position_embeddings": cfg.sequence_length,
        "vocab_size": cfg.vocabulary_size,
        "tie_word_embeddings": cfg.tied,
        "initializer_range": cfg.init_std,
        "hidden_act": activation_name(mlp.activation),
        "intermediate_size": mlp.ffn,
    }


def write(cfg: DecoderConfig, *windows: str, moe: MoEConfig | None = None) -> dict[str, Any]:
    """The settings of Llama's blocks, with experts or without. windows: names of the family's window settings."""
    blocks, mixers = layers_of(cfg), attention_mixers(cfg)
    sliding, first = window_settings(mixers), mixers[0]
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
    bias = Row("lm_head.bias", "head_bias", index=(slice(0, cfg.vocabulary_size),))
    scores = Row("score.weight", "head.linear.matrix", "o i -> i o")
    return [*tokens(cfg, "model.embed_tokens.weight", "lm_head.weight"), bias, scores, *norm("model.norm", "norm")]


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
MIXER = [
    replace(row, requires="stack.*.mixer.query")
    for row in (
        *attention_rows(f"{LAYER}.self_attn", "stack.*.mixer", ("q_proj", "k_proj", "v_proj", "o_proj")),
        *norm(f"{LAYER}.self_attn.q_norm", "stack.*.mixer.query_norm"),
        *norm(f"{LAYER}.self_attn.k_norm", "stack.*.mixer.key_norm"),
    )
]
"""Attention, with its norms of queries and keys."""
ATTENTION = [*MIXER, *NORMS]
"""Attention and the norms of a block."""


PREFIXES = (
    (r"^(embed_tokens|layers|norm|decoder)\.", r"model.\1."),
    (r"^(wte|wpe|h|ln_f|word_embeddings|word_embeddings_layernorm)\.", r"transformer.\1."),
)
"""The class without a head, in which BLOOM and embedding models are stored, has no prefix."""


def family(name: str, architecture: str, *, ignored: tuple[str, ...] = (), **parts: Any) -> Family:
    """A family whose head may be tied, and whose older files have tables of rotary angles."""
    return Family(
        name=name,
        architecture=architecture,
        task="CAUSAL_LM",
        heads={"lm_head.weight": "model.embed_tokens.weight"},
        ignored=("model.layers.*.self_attn.rotary_emb.inv_freq", *ignored),
        renamed=PREFIXES,
        **parts,
    )


def windows(
    settings: Settings, layers: int, length: int, slides: Callable[[int], bool]
) -> tuple[int | None, list[bool]]:
    """The window, without the query's own position, which transformers counts; and whether each layer has it.

    slides: number of a layer -> whether it has the window, used if there is no layer_types.
    """
    size, on = settings.take("sliding_window", kind=int), settings.take("use_sliding_window", True)
    kinds = layer_types(settings, layers, SLIDING, slides)
    return size - 1 if size and on and size <= length else None, [kind == SLIDING for kind in kinds]


def layer_types(settings: Settings, layers: int, other: str, is_other: Callable[[int], bool]) -> list[str]:
    """`other` or FULL for each layer. is_other: number of a layer -> its type if there is no layer_types."""
    kinds = settings.take("layer_types", kind=list) or [other if is_other(layer) else FULL for layer in range(layers)]
    if len(kinds) != layers:
        settings.refuse("layer_types", f"({len(kinds)} layers)", f"num_hidden_layers={layers}")
        kinds = [FULL] * layers
    for kind in sorted({*map(str, kinds)} - {other, FULL}):
        settings.refuse("layer_types", kind, f"only {FULL} and {other} are supported")
    return kinds


def window_settings(mixers: Sequence[Any]) -> Mapping[str, Any]:
    """sliding_window, and the layers that have it."""
    windowed = [number for number, mixer in enumerate(mixers) if mixer.window is not None]
    return {
        "sliding_window": max(mixers[number].window for number in windowed) + 1 if windowed else None,
        "use_sliding_window": bool(windowed),
        "max_window_layers": windowed[0] if windowed else len(mixers),
        "layer_types": [FULL if mixer.window is None else SLIDING for mixer in mixers],
    }
