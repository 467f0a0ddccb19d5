"""Llama 2 and 3, Mistral, Qwen 2 and Qwen 3: one table, of pre-norm blocks with rotary positions and gated layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megajax.checkpoint.huggingface.family import Family, Settings
from megajax.checkpoint.huggingface.rotary import rope, rope_settings, window_settings, windows
from megajax.checkpoint.tensor_table import Row
from megajax.layers.config import AttentionConfig, BlockConfig, GatedMLPConfig, RMSNormConfig, StackConfig
from megajax.models.config import DecoderConfig

ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def model(given: Settings) -> DecoderConfig:
    """The model of a config.json."""
    layers, length = given.need("num_hidden_layers"), given.need("max_position_embeddings")
    kind, epsilon = given.left.get("model_type", ""), given.take("rms_norm_eps", 1e-6)
    norm, heads = RMSNormConfig(epsilon=epsilon), given.need("num_attention_heads")
    mixer = AttentionConfig(
        heads=heads,
        kv_heads=given.take("num_key_value_heads", heads),
        head_dim=given.take("head_dim"),
        bias=given.take("attention_bias", False),
        qkv_bias=True if kind.startswith("qwen2") else None,
        qk_norm=norm if kind.startswith("qwen3") else None,
        rope=rope(given),
    )
    activation = given.choose("hidden_act", "silu", ACTIVATIONS)
    mlp = GatedMLPConfig(ffn=given.need("intermediate_size"), activation=activation, bias=given.take("mlp_bias", False))
    block = BlockConfig(mixer=mixer, mlp=mlp, norm=norm)
    blocks = [replace(block, mixer=replace(mixer, window=one)) for one in windows(given, layers, length)]
    return DecoderConfig(
        hidden=given.need("hidden_size"),
        vocabulary_size=given.need("vocab_size"),
        sequence_length=length,
        stack=StackConfig.of(blocks),
        norm=norm,
        tied=given.take("tie_word_embeddings", False),
    )


def settings_of(kind: str) -> Callable[[Any], dict[str, Any]]:
    """The config.json of a model as one of this model_type."""

    def settings(cfg: Any) -> dict[str, Any]:
        block = cfg.stack.pattern[0]
        mixer, mlp = block.mixer, block.mlp
        names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
        return {
            "model_type": kind,
            "architectures": [ARCHITECTURES[kind]],
            "hidden_size": cfg.hidden,
            "intermediate_size": mlp.ffn,
            "num_hidden_layers": cfg.stack.layers(),
            "num_attention_heads": mixer.heads,
            "num_key_value_heads": mixer.groups(),
            "head_dim": mixer.size(cfg.hidden),
            "attention_bias": mixer.bias,
            "mlp_bias": mlp.bias,
            "hidden_act": names[mlp.activation],
            "rms_norm_eps": cfg.norm.epsilon,
            "max_position_embeddings": cfg.sequence_length,
            "vocab_size": cfg.vocabulary_size,
            "tie_word_embeddings": cfg.tied,
            **rope_settings(mixer.rope),
            **window_settings([one.mixer for one in layers_of(cfg)]),
        }

    return settings


def layers_of(cfg: Any) -> list[Any]:
    """The block of each layer."""
    by_number = {number: block for block, numbers in cfg.stack.stored() for number in numbers}
    return [by_number[number] for number in sorted(by_number)]


LAYER = "model.layers.{layer}"


def rows(cfg: DecoderConfig) -> list[Row]:
    """The table."""
    return [*ends(cfg), *ATTENTION, *gated(f"{LAYER}.mlp", "stack.*.mlp")]


def ends(cfg: DecoderConfig) -> list[Row]:
    """Tables of tokens and the last norm."""
    tokens = (slice(0, cfg.vocabulary_size),)
    return [
        Row("model.embed_tokens.weight", "tokens", inside=tokens),
        Row("model.norm.weight", "norm.gain"),
        Row("lm_head.weight", "head", inside=tokens),
    ]


def gated(theirs: str, ours: str, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")) -> list[Row]:
    """A gated feed-forward layer. names: theirs of gate, up and down."""
    pairs = list(zip(names, ("gate", "up", "down"), strict=True))
    weights = [Row(f"{theirs}.{name}.weight", f"{ours}.{mine}", "o i -> i o") for name, mine in pairs]
    return weights + [Row(f"{theirs}.{name}.bias", f"{ours}.{mine}_bias") for name, mine in pairs]


MATRICES: Mapping[str, str] = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}

ATTENTION = [
    *[Row(f"{LAYER}.self_attn.{a}.weight", f"stack.*.mixer.{b}", "(n h) d -> d n h") for a, b in MATRICES.items()],
    *[Row(f"{LAYER}.self_attn.{a}.bias", f"stack.*.mixer.{b}_bias", "(n h) -> n h") for a, b in MATRICES.items()],
    Row(f"{LAYER}.self_attn.o_proj.weight", "stack.*.mixer.output", "d (n h) -> n h d"),
    Row(f"{LAYER}.self_attn.o_proj.bias", "stack.*.mixer.output_bias"),
    Row(f"{LAYER}.self_attn.q_norm.weight", "stack.*.mixer.query_norm.gain"),
    Row(f"{LAYER}.self_attn.k_norm.weight", "stack.*.mixer.key_norm.gain"),
    Row(f"{LAYER}.input_layernorm.weight", "stack.*.mixer_norm.gain"),
    Row(f"{LAYER}.post_attention_layernorm.weight", "stack.*.mlp_norm.gain"),
]
"""Attention and the norms of a block, which most families after Llama have."""

FAMILIES = [
    Family(
        name=kind,
        model_types=(kind,),
        model=model,
        settings=settings_of(kind),
        rows=rows,
        ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),
    )
    for kind in ARCHITECTURES
]
