"""Megatron-LM's settings as MegaJAX configs; what MegaJAX does not have yet leaves the case out."""

import shlex
from collections.abc import Collection, Mapping
from typing import Any

from megatron_cases import unsupported

from megajax.layers.config import (
    AttentionConfig,
    BlockConfig,
    DenseMLPConfig,
    GatedMLPConfig,
    LayerNormConfig,
    Llama3ScalingConfig,
    MLPConfig,
    NormConfig,
    RMSNormConfig,
    RopeConfig,
    StackConfig,
)
from megajax.models.config import DecoderConfig
from megajax.optim.config import AdamWConfig, ScheduleConfig

WITHOUT_EFFECT = {
    # Memory, speed, initial values that are replaced, or float16 alone.
    "apply_query_key_layer_scaling", "apply_residual_connection_post_layernorm", "apply_rope_fusion",
    "attention_softmax_in_fp32", "bias_dropout_fusion", "deterministic_mode", "distribute_saved_activations",
    "embedding_init_method_std", "fp32_residual_connection", "gradient_accumulation_fusion", "init_method_std",
    "masked_softmax_fusion", "parallel_output", "params_dtype", "perform_initialization", "persist_layer_norm",
    "pipeline_dtype", "recompute_granularity", "recompute_method", "recompute_modules", "recompute_num_layers",
    "use_cpu_initialization",
}  # fmt: skip


class Settings:
    """Settings that are read one by one; those that nothing read make the case unsupported."""

    def __init__(self, values: Mapping[str, Any]):
        self.left = dict(values)

    def take(self, name: str, default: Any = None) -> Any:
        value = self.left.pop(name, default)
        return default if value is None else value

    def only(self, name: str, *allowed: Any) -> Any:
        """A setting that must have one of these values; the first is the default."""
        value = self.take(name, allowed[0])
        if value not in allowed:
            unsupported(f"{name}={value}")
        return value

    def finish(self, ignored: Collection[str] = ()) -> None:
        """What is left must be off or have no effect on the numbers."""
        for name, value in self.left.items():
            if name not in ignored and value is not None and value is not False:
                unsupported(f"{name}={value}")


def decoder_config(
    config: Mapping[str, Any], model: Mapping[str, Any], *, vocabulary: int, positions: int
) -> DecoderConfig:
    """From a TransformerConfig's and a GPTModel's arguments. positions: rows of a learned position table."""
    core, outer = Settings(config), Settings(model)
    hidden, heads = core.take("hidden_size"), core.take("num_attention_heads")
    bias = core.take("add_bias_linear", True)
    rope = _rope(core, outer)
    learned = outer.take("position_embedding_type", "learned_absolute") == "learned_absolute"
    mixer = AttentionConfig(
        heads=heads,
        kv_heads=core.take("num_query_groups"),
        head_dim=core.take("kv_channels"),
        bias=bias,
        rope=rope,
    )
    if core.take("add_qkv_bias", False) and not bias:
        unsupported("add_qkv_bias without add_bias_linear")
    block = BlockConfig(mixer=mixer, mlp=_mlp(core, core.take("ffn_hidden_size", 4 * hidden), bias), norm=_norm(core))
    decoder = DecoderConfig(
        hidden=hidden,
        vocabulary_size=vocabulary,
        sequence_length=positions,
        stack=StackConfig(pattern=(block,), repeats=core.take("num_layers")),
        learned_positions=learned,
        norm=block.norm,
        tied=bool(outer.take("share_embeddings_and_output_weights", False)),
    )
    for name in ("hidden_dropout", "attention_dropout"):
        core.only(name, 0.0)
    for name in ("vocab_size", "max_sequence_length"):
        outer.take(name)
    # How gradients are averaged is the caller's affair.
    core.take("calculate_per_token_loss")
    core.finish(WITHOUT_EFFECT)
    outer.finish(WITHOUT_EFFECT)
    return decoder


def _rope(core: Settings, outer: Settings) -> RopeConfig | None:
    kind = outer.left.get("position_embedding_type", "learned_absolute")
    base, stretched = outer.take("rotary_base", 10000), outer.take("rope_scaling", False)
    factor = outer.take("rope_scaling_factor", 8.0)
    if kind not in ("rope", "learned_absolute", "none"):
        unsupported(f"position_embedding_type={kind}")
    if kind != "rope":
        return None
    outer.only("rotary_percent", 1.0)
    outer.only("seq_len_interpolation_factor", 1.0)
    core.only("rotary_interleaved", False)
    # Megatron-LM has the other numbers of the stretch fixed.
    scaling = Llama3ScalingConfig(factor=factor, low=1.0, high=4.0, original=8192) if stretched else None
    return RopeConfig(base=float(base), scaling=scaling)


def _norm(core: Settings) -> NormConfig:
    kind, epsilon = core.take("normalization", "LayerNorm"), core.take("layernorm_epsilon", 1e-5)
    if kind not in ("LayerNorm", "RMSNorm"):
        unsupported(f"normalization={kind}")
    return LayerNormConfig(epsilon=epsilon) if kind == "LayerNorm" else RMSNormConfig(epsilon=epsilon)


def _mlp(core: Settings, ffn: int, bias: bool) -> MLPConfig:
    gated, activation = core.take("gated_linear_unit", False), core.take("activation_func", "gelu")
    if activation == "gelu" and core.left.get("bias_activation_fusion"):
        # The fused kernel is the tanh form.
        activation = "gelu_tanh"
    core.take("bias_activation_fusion")
    known = ("silu", "gelu", "gelu_tanh") if gated else ("gelu", "gelu_tanh", "relu")
    if activation not in known:
        unsupported(f"activation_func={activation}" + (" gated" if gated else ""))
    return (GatedMLPConfig if gated else DenseMLPConfig)(ffn=ffn, activation=activation, bias=bias)


def schedule_config(settings: Mapping[str, Any]) -> ScheduleConfig:
    """From an OptimizerParamScheduler's arguments, all in samples."""
    given = Settings(settings)
    style = given.only("lr_decay_style", "linear", "constant", "cosine")
    if given.take("start_wd") != given.take("end_wd"):
        unsupported("weight decay that changes")
    config = ScheduleConfig(
        lr=given.take("max_lr"),
        min_lr=given.take("min_lr"),
        style=style,
        warmup_samples=given.take("lr_warmup_steps", 0),
        warmup_start=given.take("init_lr", 0.0),
        decay_samples=given.take("lr_decay_steps"),
    )
    given.finish(
        {
            "wd_incr_steps",
            "wd_incr_style",
            "wsd_decay_steps",
            "lr_wsd_decay_style",
            "use_checkpoint_opt_param_scheduler",
            "override_opt_param_scheduler",
        }
    )
    return config


def optimizer_config(settings: Mapping[str, Any], weight_decay: float) -> AdamWConfig:
    """From an OptimizerConfig's arguments. weight_decay: as the scheduler has it, which overrides the optimizer's."""
    given = Settings(settings)
    given.only("optimizer", "adam")
    given.only("bf16", False)
    given.only("fp16", False)
    given.only("decoupled_weight_decay", True)
    config = AdamWConfig(
        beta1=given.take("adam_beta1", 0.9),
        beta2=given.take("adam_beta2", 0.999),
        epsilon=given.take("adam_eps", 1e-8),
        weight_decay=weight_decay,
        clip=given.take("clip_grad", 1.0) or None,
    )
    given.finish({"lr", "min_lr", "weight_decay", "params_dtype", "use_distributed_optimizer"})
    return config


FLAGS_WITHOUT_FLOPS = {
    "max_position_embeddings", "micro_batch_size", "global_batch_size", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size", "sequence_parallel",
    "use_distributed_optimizer", "normalization", "norm_epsilon", "disable_bias_linear", "add_qkv_bias",
    "untie_embeddings_and_output_weights", "position_embedding_type", "rotary_base", "use_rope_scaling",
    "rope_scaling_factor", "num_layers_per_virtual_pipeline_stage", "recompute_activations", "recompute_granularity",
    "recompute_method", "recompute_num_layers", "recompute_modules", "vocab_size", "padded_vocab_size",
    "make_vocab_size_divisible_by", "ffn_hidden_size", "kv_channels", "bf16", "fp16", "train_iters", "lr",
}  # fmt: skip


def flag_config(line: str, *, padded_vocabulary: int, ffn: int, head_dim: int) -> DecoderConfig:
    """The shapes a command line asks for; of positions, norms and biases only what the count depends on (nothing)."""
    flags = Settings(_flags(line))
    heads, groups = int(flags.take("num_attention_heads")), int(flags.take("num_query_groups", 1))
    grouped = flags.take("group_query_attention", False)
    mixer = AttentionConfig(heads=heads, kv_heads=groups if grouped else heads, head_dim=head_dim)
    mlp = GatedMLPConfig(ffn=ffn) if flags.take("swiglu", False) else DenseMLPConfig(ffn=ffn)
    decoder = DecoderConfig(
        hidden=int(flags.take("hidden_size")),
        vocabulary_size=padded_vocabulary,
        vocabulary_multiple=1,
        sequence_length=int(flags.take("seq_length")),
        stack=StackConfig(pattern=(BlockConfig(mixer=mixer, mlp=mlp),), repeats=int(flags.take("num_layers"))),
    )
    flags.finish(FLAGS_WITHOUT_FLOPS)
    return decoder


def _flags(line: str) -> dict[str, Any]:
    """--num-layers 2 --swiglu -> {"num_layers": "2", "swiglu": True}."""
    found: dict[str, Any] = {}
    name = ""
    for word in shlex.split(line):
        if word.startswith("--"):
            name, _, value = word[2:].replace("-", "_").partition("=")
            found[name] = value or True
        else:
            found[name] = word if found[name] is True else f"{found[name]} {word}"
    return found
