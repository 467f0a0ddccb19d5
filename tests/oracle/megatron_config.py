"""Megatron-LM's settings as MegaJAX configs; unsupported settings skip the case."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_cases import Settings, unsupported
from megatron_moe import mixtures

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mamba.config import Mamba2Config
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig, MLPConfig
from megajax.layers.norm.config import L2NormConfig, LayerNormConfig, NormConfig, RMSNormConfig
from megajax.layers.position.config import Llama3ScalingConfig, RopeConfig, YarnScalingConfig
from megajax.layers.stack.config import StackConfig, stack_of
from megajax.models.decoder.config import DecoderConfig, PredictionConfig, WidthScalingConfig
from megajax.optim.config import AdamWConfig, LionConfig, OptimizerConfig, ScheduleConfig, SGDConfig
from megajax.training.config import BatchConfig, LinearRampConfig, StepRampConfig

WITHOUT_EFFECT = {
    # Memory, speed, replaced initial values, or float16 only.
    "attention_backend", "autocast_dtype", "cross_entropy_fusion_impl", "cross_entropy_loss_fusion",
    "fp16_lm_cross_entropy", "log_max_attention_logit", "memory_efficient_layer_norm", "post_process", "pre_process",
    "scatter_embedding_sequence_parallel", "sequence_parallel", "test_mode", "transformer_impl", "variable_seq_lengths",
    "apply_query_key_layer_scaling", "apply_residual_connection_post_layernorm", "apply_rope_fusion",
    "attention_softmax_in_fp32", "bias_dropout_fusion", "deterministic_mode", "distribute_saved_activations",
    "embedding_init_method_std", "fp32_residual_connection", "gradient_accumulation_fusion", "init_method_std",
    "masked_softmax_fusion", "parallel_output", "params_dtype", "perform_initialization", "persist_layer_norm",
    "pipeline_dtype", "recompute_granularity", "recompute_method", "recompute_modules", "recompute_num_layers",
    "use_cpu_initialization",
}  # fmt: skip


def decoder_config(
    config: Mapping[str, Any], model: Mapping[str, Any], *, vocabulary: int, positions: int, latent: bool = False
) -> DecoderConfig:
    """The model of a TransformerConfig's and a GPTModel's arguments.

    positions: rows of a learned position table; latent: the config is a MLATransformerConfig.
    """
    core, outer = Settings(config), Settings(model)
    hidden, bias = core.take("hidden_size"), core.take("add_bias_linear", True)
    layers, norm = core.take("num_layers"), norm_config(core, "RMSNorm" if latent else "LayerNorm")
    learned = outer.left.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    ropes = _rotated_layers(core, layers)
    windows = _windowed_layers(core, layers, positions)
    mixer = _latent(core, outer, norm, bias) if latent else attention_config(core, outer, norm, bias, positions)
    mlp = mlp_config(core, core.take("ffn_hidden_size", 4 * hidden), bias)
    blocks = []
    for rotated, window, feed_forward in zip(ropes, windows, mixtures(core, mlp, layers), strict=True):
        changes = {"window": window} | ({} if rotated else {"rope": None})
        blocks.append(BlockConfig(mixer=replace(mixer, **changes), mlp=feed_forward, norm=norm))
    depth = core.take("mtp_num_layers", 0)
    factor = core.take("mtp_loss_scaling_factor", 0.1)
    decoder = DecoderConfig(
        hidden=hidden,
        vocabulary_size=vocabulary,
        sequence_length=positions,
        stack=stack_of(blocks),
        learned_positions=learned,
        norm=norm,
        tied=bool(outer.take("share_embeddings_and_output_weights", False)),
        prediction=_prediction(blocks, depth, factor) if depth else None,
        width_scaling=_width_scaling(core, hidden),
    )
    for name in ("hidden_dropout", "attention_dropout"):
        core.only(name, 0.0)
    for name in ("vocab_size", "max_sequence_length", "position_embedding_type"):
        outer.take(name)
    core.take("calculate_per_token_loss")  # The caller decides how gradients are averaged.
    core.finish(WITHOUT_EFFECT)
    outer.finish(WITHOUT_EFFECT)
    return decoder


def hybrid_config(
    config: Mapping[str, Any], model: Mapping[str, Any], pattern: str, *, vocabulary: int, length: int
) -> DecoderConfig:
    """The model of a HybridModel's arguments. Each symbol of the pattern is a layer with one sub-layer."""
    core, outer = Settings(config), Settings(model)
    hidden, bias = core.take("hidden_size"), core.take("add_bias_linear", True)
    core.only("num_layers", len(pattern))
    norm = norm_config(core, "LayerNorm")
    attention = attention_config(core, outer, norm, bias, length)
    mlp = mlp_config(core, core.take("ffn_hidden_size", 4 * hidden), bias)
    blocks = {
        "M": BlockConfig(mixer=_mamba(core, hidden), norm=norm),
        "*": BlockConfig(mixer=attention, norm=norm),
        "-": BlockConfig(mlp=mlp, norm=norm),
        "E": BlockConfig(mlp=mixtures(core, mlp, 1)[0], norm=norm),
    }
    if unknown := set(pattern) - set(blocks):
        unsupported(f"layers {sorted(unknown)} of a hybrid")
    decoder = DecoderConfig(
        hidden=hidden,
        vocabulary_size=vocabulary,
        sequence_length=length,
        stack=StackConfig.of([blocks[symbol] for symbol in pattern]),
        learned_positions=outer.take("position_embedding_type", "none") == "learned_absolute",
        norm=norm,
        tied=bool(outer.take("share_embeddings_and_output_weights", False)),
    )
    for name in ("hidden_dropout", "attention_dropout"):
        core.only(name, 0.0)
    core.finish({*WITHOUT_EFFECT, "is_hybrid_model", "use_mamba_mem_eff_path"})
    outer.finish(WITHOUT_EFFECT)
    return decoder


def _mamba(core: Settings, hidden: int) -> Mamba2Config:
    size = core.take("mamba_head_dim", 64)
    return Mamba2Config(
        heads=core.take("mamba_num_heads", 2 * hidden // size),
        head_dim=size,
        state=core.take("mamba_state_dim", 128),
        groups=core.take("mamba_num_groups", 8),
    )


def _prediction(blocks: list[BlockConfig], depth: int, factor: float) -> PredictionConfig:
    """Windows and rotation of the first layers number its blocks; the other settings are those of the last layers."""
    if any(block.mixer != blocks[0].mixer for block in blocks[:depth]):
        unsupported("blocks of multi-token prediction that differ")
    block = replace(blocks[0], mlp=blocks[-1].mlp)
    return PredictionConfig(depth=depth, weight=factor, block=block, reweighted="microbatches")


def _width_scaling(core: Settings, hidden: int) -> WidthScalingConfig | None:
    wanted = core.take("use_mup", False)
    base, size = core.take("mup_base_hidden_size", hidden), core.take("mup_base_head_dim")
    embedding, output = core.take("mup_embedding_mult", 1.0), core.take("mup_output_mult", 1.0)
    core.take("mup_width_mult")
    if not wanted:
        return None
    return WidthScalingConfig(
        base_hidden=base,
        base_head_dim=size,
        score_power=core.take("mup_attn_scale_power", 1.0),
        embedding=embedding,
        output=None if output == 1.0 else output,
    )


def _windowed_layers(core: Settings, layers: int, length: int) -> list[int | None]:
    """The window of each layer; a window as long as the row is none."""
    size, every = core.take("window_size"), core.take("window_attn_skip_freq")
    if size is None:
        return [None] * layers
    left, right = size
    if left < 0 or right != 0:
        unsupported(f"window_size={size}")
    if left >= length:
        return [None] * layers
    if isinstance(every, list):
        return [left if windowed else None for windowed in every]
    return [None if every and number % every == 0 else left for number in range(1, layers + 1)]


def _rotated_layers(core: Settings, layers: int) -> list[bool]:
    """Whether each layer rotates its queries and keys, where the model does."""
    every = core.take("no_rope_freq")
    if isinstance(every, list):
        return [not without for without in every]
    return [not every or number % every != 0 for number in range(1, layers + 1)]


SINKS = {"vanilla": "none", "off-by-one": "zero", "learnable": "learned"}


def attention_config(core: Settings, outer: Settings, norm: NormConfig, bias: bool, length: int) -> AttentionConfig:
    normed, without_gain = core.take("qk_layernorm", False), core.take("qk_l2_norm", False)
    qkv_bias = core.take("add_qkv_bias", False) or bias
    return AttentionConfig(
        heads=core.take("num_attention_heads"),
        kv_heads=core.take("num_query_groups"),
        head_dim=core.take("kv_channels"),
        bias=bias,
        qkv_bias=qkv_bias,
        qk_norm=L2NormConfig(epsilon=norm.epsilon) if without_gain else norm if normed else None,
        rope=_rope(core, outer, length),
        sink=SINKS[core.take("softmax_type", "vanilla")],
        gate=core.take("attention_output_gate", False),
        scale=core.take("softmax_scale"),
    )


def _latent(core: Settings, outer: Settings, norm: NormConfig, bias: bool) -> LatentAttentionConfig:
    """Settings and defaults of a MLATransformerConfig; the model's own settings of positions are not used."""
    outer.take("rotary_base")
    outer.take("rotary_percent")
    given = core.left.get("q_lora_rank", 512)
    core.take("q_lora_rank")
    content, place = core.take("qk_head_dim", 128), core.take("qk_pos_emb_head_dim", 64)
    kind, base, share = core.take("rope_type", "yarn"), core.take("rotary_base", 10000), core.take("rotary_percent", 1)
    yarn = YarnScalingConfig(
        factor=float(core.take("rotary_scaling_factor", 40.0)),
        original=core.take("original_max_position_embeddings", core.take("max_position_embeddings", 4096)),
        fast=core.take("beta_fast", 32.0),
        slow=core.take("beta_slow", 1.0),
        mscale=core.take("mscale", 1.0),
        mscale_all=core.take("mscale_all_dim", 0.0),
    )
    core.only("rotary_interleaved", False)
    core.take("kv_channels")
    core.take("num_query_groups")
    core.take("add_qkv_bias")
    # Scores have this scale for any kind, and muP or the config overrides it.
    core.take("softmax_scale")
    scale = yarn.mscale_factor(yarn.mscale_all) ** 2 * (content + place) ** -0.5
    if kind == "rope":
        rope = RopeConfig(base=float(base), fraction=float(share), interleaved=True)
    else:
        rope = RopeConfig(base=float(base), interleaved=True, scaling=yarn)
    return LatentAttentionConfig(
        heads=core.take("num_attention_heads"),
        query_rank=given,
        key_value_rank=core.take("kv_lora_rank", 512),
        content_dim=content,
        position_dim=place,
        value_dim=core.take("v_head_dim", 128),
        bias=bias,
        norm=norm if core.take("qk_layernorm", False) else None,
        rope=rope,
        sink=SINKS[core.take("softmax_type", "vanilla")],
        scale=scale,
    )


def _rope(core: Settings, outer: Settings, length: int) -> RopeConfig | None:
    kind = outer.left.get("position_embedding_type", "learned_absolute")
    base, stretched = outer.take("rotary_base", 10000), outer.take("rope_scaling", False)
    factor = outer.take("rope_scaling_factor", 8.0)
    share, interpolation = outer.take("rotary_percent", 1.0), outer.take("seq_len_interpolation_factor", 1.0)
    interleaved = core.take("rotary_interleaved", False)
    yarn = {name: core.take(name) for name in [name for name in core.left if name.startswith("yarn_")]}
    if kind not in ("rope", "yarn", "learned_absolute", "none"):
        unsupported(f"position_embedding_type={kind}")
    if kind not in ("rope", "yarn"):
        return None
    if kind == "yarn":
        given = {name.removeprefix("yarn_"): value for name, value in yarn.items() if value is not None}
        both = "mscale" in given and "mscale_all_dim" in given
        scaling = YarnScalingConfig(
            factor=float(given.get("rotary_scaling_factor", 1.0)),
            original=given.get("original_max_position_embeddings", length),
            fast=float(given.get("beta_fast", 32.0)),
            slow=float(given.get("beta_slow", 1.0)),
            rounded=given.get("correction_range_round_to_int", True),
            # A single one has no effect.
            mscale=given["mscale"] if both else None,
            mscale_all=given["mscale_all_dim"] if both else None,
        )
        return RopeConfig(base=float(base), scaling=scaling)
    # Megatron-LM fixes the other numbers of the stretch.
    scaling = Llama3ScalingConfig(factor=factor, low=1.0, high=4.0, original=8192) if stretched else None
    return RopeConfig(
        base=float(base), scaling=scaling, fraction=share, interleaved=interleaved, interpolation=float(interpolation)
    )


def norm_config(core: Settings, default: str) -> NormConfig:
    kind, epsilon = core.take("normalization", default), core.take("layernorm_epsilon", 1e-5)
    centred = core.take("layernorm_zero_centered_gamma", False)
    if kind not in ("LayerNorm", "RMSNorm"):
        unsupported(f"normalization={kind}")
    return (LayerNormConfig if kind == "LayerNorm" else RMSNormConfig)(epsilon=epsilon, zero_centred=centred)


ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "openai_gelu": "gelu_tanh", "gelu_impl": "gelu_tanh",
               "fast_gelu": "gelu_tanh", "gelu_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu",
               "squared_relu": "squared_relu"}  # fmt: skip


def mlp_config(core: Settings, ffn: int, bias: bool) -> MLPConfig:
    gated, named = core.take("gated_linear_unit", False), str(core.take("activation_func", "gelu"))
    activation = ACTIVATIONS.get(named.rsplit(".", 1)[-1])
    if activation is None:
        unsupported(f"activation_func={named}" + (" gated" if gated else ""))
    fused = core.take("bias_activation_fusion")
    if activation == "gelu" and fused:
        # The fused kernel is the tanh form.
        activation = "gelu_tanh"
    clamp, offset = core.take("activation_func_clamp_value"), core.take("glu_linear_offset", 0.0)
    if gated:
        return GatedMLPConfig(ffn=ffn, activation=activation, bias=bias, clamp=clamp, offset=offset)
    return DenseMLPConfig(ffn=ffn, activation=activation, bias=bias)


STYLES = {"inverse-square-root": "inverse_square_root", "WSD": "wsd"}


def schedule_config(settings: Mapping[str, Any]) -> ScheduleConfig:
    """The schedule of an OptimizerParamScheduler's arguments, all in samples."""
    given = Settings(settings)
    style = given.only("lr_decay_style", "linear", "constant", "cosine", *STYLES)
    annealing = {}
    if style == "WSD":
        annealing = {
            "anneal_samples": given.take("wsd_decay_steps"),
            "anneal_style": given.only("lr_wsd_decay_style", "exponential", "linear", "cosine", "minus_sqrt"),
        }
    start, span = given.take("start_wd"), given.take("wd_incr_steps")
    rise = given.only("wd_incr_style", "constant", "linear", "cosine")
    if given.take("end_wd") != start:
        annealing |= {"weight_decay_start": start, "weight_decay_style": rise, "weight_decay_samples": span}
    config = ScheduleConfig(
        lr=given.take("max_lr"),
        min_lr=given.take("min_lr"),
        style=STYLES.get(style, style),
        warmup_samples=given.take("lr_warmup_steps", 0),
        warmup_start=given.take("init_lr", 0.0),
        decay_samples=given.take("lr_decay_steps"),
        **annealing,
    )
    given.finish(
        {"wsd_decay_steps", "lr_wsd_decay_style", "use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler"}
    )
    return config


def batch_config(kind: str, row: Mapping[str, Any]) -> BatchConfig:
    """The sizes of a microbatch calculator's arguments. kind: constant, step, or rampup."""
    given = Settings(row)
    micro, decrease = given.take("mbs"), bool(given.take("decrease", False))
    if kind == "constant":
        return BatchConfig(global_size=given.take("gbs"), micro_size=micro, decrease=decrease)
    if kind == "step":
        ramp = StepRampConfig(sizes=given.take("schedule"), unit="tokens" if row.get("seq_length") else "samples")
        return BatchConfig(global_size=ramp.pairs()[-1][1], micro_size=micro, ramp=ramp, decrease=decrease)
    if kind != "rampup":
        unsupported(f"{kind} batch sizes")
    names = ("start", "increment", "samples")
    ramp = LinearRampConfig(**dict(zip(names, map(int, given.take("rampup_batch_size")), strict=True)))
    return BatchConfig(global_size=given.take("gbs"), micro_size=micro, ramp=ramp, decrease=decrease)


def optimizer_config(settings: Mapping[str, Any], weight_decay: float) -> OptimizerConfig:
    """The optimizer of an OptimizerConfig's arguments, with the scheduler's weight decay, which overrides its own."""
    given = Settings(settings)
    kind = given.only("optimizer", "adam", "sgd", "lion")
    given.only("bf16", False)
    given.only("fp16", False)
    shared = {
        "weight_decay": weight_decay,
        "clip": given.take("clip_grad", 1.0) or None,
        "embedding_lr": given.take("decoupled_lr"),
        "embedding_min_lr": given.take("decoupled_min_lr"),
        "decay_qk_norms": bool(given.take("apply_wd_to_qk_layernorm", False)),
    }
    decoupled = given.only("decoupled_weight_decay", True, False)
    averages = (given.take("adam_beta1", 0.9), given.take("adam_beta2", 0.999), given.take("adam_eps", 1e-8))
    momentum = given.take("sgd_momentum", 0.9)
    lion = {"beta1": given.take("lion_beta1", 0.95), "beta2": given.take("lion_beta2", 0.98)}
    given.finish({
        "lr", "min_lr", "weight_decay", "params_dtype", "use_distributed_optimizer", "barrier_with_L1_time",
        "log_num_zeros_in_grad", "use_torch_optimizer_for_cpu_offload",
    })  # fmt: skip
    if kind == "sgd":
        return SGDConfig(momentum=momentum, **shared)
    if kind == "lion":
        return LionConfig(**lion, **shared)
    beta1, beta2, epsilon = averages
    return AdamWConfig(beta1=beta1, beta2=beta2, epsilon=epsilon, decoupled=decoupled, **shared)
