"""The model from Megatron-LM's flags, with Megatron-LM's defaults for flags that are not given."""

import ast
from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import Any

from megajax.interop.megatron.flags.data import tokenizer_of
from megajax.interop.megatron.flags.moe import mixture
from megajax.interop.megatron.flags.reading import Arguments, Settings, needed
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig, MLPConfig
from megajax.layers.moe.config import FeedForwardConfig
from megajax.layers.norm.config import L2NormConfig, LayerNormConfig, NormConfig, RMSNormConfig
from megajax.layers.position.config import Llama3ScalingConfig, RopeConfig, YarnScalingConfig
from megajax.layers.stack.config import SegmentsConfig, StackConfig
from megajax.models.decoder.config import PredictionConfig, WidthScalingConfig
from megajax.tokenizers.config import TokenizerConfig

MOST_LAYERS = 100_000
PATTERN = "hybrid-layer-pattern"
SINKS = {"vanilla": "none", "off-by-one": "zero", "learnable": "learned"}
KERNELS = {"auto": "auto", "flash": "auto", "fused": "auto", "unfused": "reference", "local": "reference"}
NORMS: dict[str, type[LayerNormConfig] | type[RMSNormConfig]] = {"LayerNorm": LayerNormConfig, "RMSNorm": RMSNormConfig}


def layers(args: Arguments) -> int:
    """Number of layers."""
    if (pattern := hybrid_pattern(args)) is not None:
        count = sum(map(len, pattern.partition("/")[0].split("|")))
        if args["num-layers"] not in (None, count):
            args.problem("num-layers", f"{args['num-layers']} layers, but --{PATTERN} has {count}", "leave it out")
        return count
    if args["num-layers"] is None and args["encoder-num-layers"] is not None:
        return args["encoder-num-layers"]
    return needed(args, "num-layers")


def sequence_length(args: Arguments) -> int:
    """Tokens in a row."""
    if args["seq-length"] is None and args["encoder-seq-length"] is not None:
        return args["encoder-seq-length"]
    return needed(args, "seq-length")


def hybrid_pattern(args: Arguments) -> str | None:
    """One letter for each layer of a hybrid; after each /, the layers of a depth of multi-token prediction."""
    text, ahead = args[PATTERN], args["mtp-hybrid-override-pattern"]
    if text is None and (args["hybrid-attention-ratio"] or args["hybrid-mlp-ratio"]):
        text = _even_pattern(needed(args, "num-layers"), args["hybrid-attention-ratio"], args["hybrid-mlp-ratio"])
        args.remark("hybrid-attention-ratio", f"removed from Megatron-LM; its layers are --{PATTERN} {text}")
    if text is None or ahead is None or "/" in text:
        return text
    return text + f"/{ahead}" * (args["mtp-num-layers"] or 1)


def _even_pattern(count: int, attention_share: float, mlp_share: float) -> str:
    """Layers of a hybrid from the shares of attention and MLPs, spread evenly as Megatron-LM up to 0.15 did."""
    letters = ["M"] * max(count, 1)
    attention_count, mlp_count = round(count * attention_share), round(count * mlp_share)
    mamba_count = count - attention_count
    intervals = [("*", mamba_count / (attention_count + 1))]
    if mlp_count:
        intervals.append(("-", (mamba_count - mlp_count) / mlp_count))
    for letter, interval in intervals:
        left = interval
        for place, current in enumerate(letters):
            if current == "M":
                is_due = left < 0.5
                letters[place] = letter if is_due else "M"
                left += interval if is_due else -1
    return "".join(letters)


def stack(args: Arguments, count: int | None = None, *, experts: bool = True) -> Settings:
    """The stack of blocks and the final norm.

    count: number of layers, by default --num-layers; experts: whether layers may have experts.
    """
    normal = norm(args)
    mixer = latent_attention(args, normal) if args["multi-latent-attention"] else attention(args, normal)
    count = min(max(count or layers(args), 1), MOST_LAYERS)
    dropout, layer = args["hidden-dropout"], mlp(args)
    forwards = _feed_forwards(args, layer, count) if experts else [layer] * count
    blocks = []
    for window, rotated, forward in zip(_windows(args, count), _rotated(args, count), forwards, strict=True):
        changes = {"window": window}
        if not rotated and isinstance(mixer, AttentionConfig):
            changes["rope"] = None
        layer_mixer = replace(mixer, **changes)
        blocks.append(BlockConfig(mixer=layer_mixer, mlp=forward, norm=normal, dropout=dropout))
    return {"model.stack": _repeated(blocks), "model.norm": normal}


def _repeated(blocks: Sequence[BlockConfig]) -> StackConfig | SegmentsConfig:
    """A repeated pattern, or a sequence of repeated patterns if that is less to compile."""
    single, segments = StackConfig.of(blocks), SegmentsConfig.of(blocks)
    return segments if sum(len(part.pattern) for part in segments.parts()) < len(single.pattern) else single


def _feed_forwards(args: Arguments, layer: MLPConfig, count: int) -> list[FeedForwardConfig]:
    """The feed-forward part of each layer: experts, or `layer`."""
    if args["num-experts"] is None:
        return [layer] * count
    problems = len(args.problems)
    has_experts = _chosen_layers(args, "moe-layer-freq", count, ones=True, first=0)
    if not any(has_experts) and len(args.problems) == problems:
        args.problem("moe-layer-freq", f"{args['moe-layer-freq']} leaves no layer with experts")
    experts = mixture(args, layer)
    return [experts if is_mixture else layer for is_mixture in has_experts]


def norm(args: Arguments) -> NormConfig:
    """The norm of the blocks."""
    kind = args.one_of("normalization", NORMS)
    return kind(epsilon=args["norm-epsilon"], zero_centred=args["apply-layernorm-1p"])


def attention(args: Arguments, normal: NormConfig) -> AttentionConfig:
    """Plain attention, before windows and layers without rotation."""
    if not args["group-query-attention"] and args.is_given("num-query-groups"):
        args.remark("num-query-groups", "has no effect without --group-query-attention, as in Megatron-LM")
    bias = not args["disable-bias-linear"]
    l2_norm = L2NormConfig(epsilon=args["norm-epsilon"]) if args["qk-l2-norm"] else None
    return AttentionConfig(
        heads=needed(args, "num-attention-heads"),
        kv_heads=args["num-query-groups"] if args["group-query-attention"] else None,
        head_dim=args["kv-channels"],
        bias=bias,
        qkv_bias=True if args["add-qkv-bias"] and not bias else None,
        qk_norm=normal if args["qk-layernorm"] else l2_norm,
        rope=_rope(args),
        sink=args.one_of("softmax-type", SINKS),
        gate=args["attention-output-gate"],
        scale=args["softmax-scale"],
        dropout=args["attention-dropout"],
        kernel=args.one_of("attention-backend", KERNELS),
    )


def positions(args: Arguments) -> str:
    """The kind of positions: learned_absolute, rope (with or without YaRN), relative, mrope, or none."""
    kind = "rope" if args["use-rotary-position-embeddings"] else args["position-embedding-type"]
    if kind == "yarn":
        return "rope"
    if kind not in ("learned_absolute", "rope", "relative", "mrope", "none"):
        args.problem("position-embedding-type", f"expected learned_absolute, rope, yarn or none, got {kind}")
    return kind


def refuse_positions(args: Arguments) -> None:
    """Refuse kinds of positions that decoders do not have here, or not by this flag."""
    reasons = {
        "relative": "set a bias of scores by distance with model.stack.pattern.0.mixer.relative",
        "mrope": "multimodal RoPE is not supported",
    }
    if (kind := positions(args)) in reasons:
        args.refuse("position-embedding-type", reasons[kind])


def _rope(args: Arguments) -> RopeConfig | None:
    if positions(args) != "rope":
        return None
    scaling: Llama3ScalingConfig | YarnScalingConfig | None = None
    if args["position-embedding-type"] == "yarn" and not args["use-rotary-position-embeddings"]:
        # Outside of latent attention, YaRN scales queries and keys instead of scores.
        scaling = replace(_yarn(args, "yarn-"), rounded=not args["no-yarn-correction-range-round-to-int"])
    elif args["use-rope-scaling"]:
        scaling = Llama3ScalingConfig(factor=args["rope-scaling-factor"])
    return RopeConfig(
        base=float(args["rotary-base"]),
        scaling=scaling,
        fraction=args["rotary-percent"],
        interleaved=args["rotary-interleaved"],
        interpolation=float(args["rotary-seq-len-interpolation-factor"] or 1),
    )


def _yarn(args: Arguments, prefix: str = "") -> YarnScalingConfig:
    """YaRN. prefix: of its flags' names, except for latent attention."""
    return YarnScalingConfig(
        factor=args["rotary-scaling-factor"],
        original=args[f"{prefix}original-max-position-embeddings"],
        fast=args[f"{prefix}beta-fast"],
        slow=args[f"{prefix}beta-slow"],
        mscale=args["mscale"],
        mscale_all=args["mscale-all-dim"],
    )


def latent_attention(args: Arguments, normal: NormConfig) -> LatentAttentionConfig:
    """Latent attention with the defaults of the command line, which differ from Megatron-LM's MLATransformerConfig."""
    if args["position-embedding-type"] != "rope" and not args["use-rotary-position-embeddings"]:
        args.remark("multi-latent-attention", "uses RoPE, whatever --position-embedding-type says")
    yarn, scaled = _yarn(args), args.one_of("rope-type", {"yarn": True, "rope": False})
    content, place = args["qk-head-dim"], args["qk-pos-emb-head-dim"]
    rope = RopeConfig(base=float(args["rotary-base"]), interleaved=True)
    rope = replace(rope, scaling=yarn) if scaled else replace(rope, fraction=args["rotary-percent"])
    return LatentAttentionConfig(
        heads=needed(args, "num-attention-heads"),
        query_rank=args["q-lora-rank"],
        key_value_rank=args["kv-lora-rank"],
        content_dim=content,
        position_dim=place,
        value_dim=args["v-head-dim"],
        bias=not args["disable-bias-linear"],
        norm=normal if args["qk-layernorm"] else None,
        rope=rope,
        # Megatron-LM scales scores as with YaRN even if the frequencies are plain, and regardless of muP.
        scale=None
        if scaled and not args["use-mup"]
        else yarn.mscale_factor(args["mscale-all-dim"]) ** 2 * (content + place) ** -0.5,
        sink=args.one_of("softmax-type", SINKS),
        dropout=args["attention-dropout"],
        kernel=args.one_of("attention-backend", KERNELS),
    )


def _windows(args: Arguments, count: int) -> list[int | None]:
    """The window of each layer."""
    text = args["window-size"]
    if text is None:
        return [None] * count
    sides = text.strip("()").replace(" ", "").split(",")
    if len(sides) != 2 or not all(side.lstrip("-").isdigit() for side in sides):
        args.problem("window-size", f"expected two numbers such as 127,0, got {text}")
        return [None] * count
    before, after = map(int, sides)
    if after != 0:
        args.refuse("window-size", "decoders are causal; the second number must be 0")
    window = None if before < 0 else before
    if window is not None and window >= sequence_length(args):
        args.remark("window-size", f"{before} is at least the length of a row: attention is full, as in Megatron-LM")
        window = None
    full_layers = _chosen_layers(args, "window-attn-skip-freq", count, ones=False)
    return [None if is_full else window for is_full in full_layers]


def _rotated(args: Arguments, count: int) -> list[bool]:
    """Whether each layer rotates queries and keys."""
    return [not unrotated for unrotated in _chosen_layers(args, "no-rope-freq", count, ones=True)]


def _chosen_layers(args: Arguments, name: str, count: int, *, ones: bool, first: int = 1) -> list[bool]:
    """For each layer, whether a flag chooses it.

    The flag is N for every N-th layer, counted from `first`, or a list expression of 0 and 1; ones: which of the two
    chooses a layer.
    """
    text = args[name]
    if text is None:
        return [False] * count
    if text.isdigit():
        return [int(text) > 0 and number % int(text) == 0 for number in range(first, count + first)]
    try:
        entries = _listed(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError):
        entries = None
    if not isinstance(entries, list) or len(entries) != count:
        actual = f"a list of {len(entries)}" if isinstance(entries, list) else text
        args.problem(name, f"expected a number or a list of {count} zeros and ones (--num-layers), got {actual}")
        return [False] * count
    return [bool(entry) == ones for entry in entries]


def _listed(node: ast.AST) -> list[int] | int:
    """The value of an expression of lists, numbers, + and *, without eval. Raises ValueError for other expressions."""
    match node:
        case ast.Constant(value=int() as number) if 0 <= number <= MOST_LAYERS:
            return number
        case ast.List(elts=entries):
            return [entry for entry in map(_listed, entries) if isinstance(entry, int)]
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as op, right=right):
            first, second = _listed(left), _listed(right)
            if isinstance(first, list) and isinstance(second, list):
                return first + second if isinstance(op, ast.Add) else []
            if isinstance(first, list) and isinstance(second, int) and len(first) * second <= MOST_LAYERS:
                return first * second
    raise ValueError("not a list expression")


def mlp(args: Arguments) -> MLPConfig:
    """The feed-forward part of the blocks."""
    bias = not args["disable-bias-linear"]
    hidden, ffn = needed(args, "hidden-size"), args["ffn-hidden-size"]
    if args["swiglu"]:
        # Two thirds of 4 * hidden, rounded down to a multiple of 64: about as many weights as without a gate.
        width = ffn or int((4 * hidden * 2 / 3) / 64) * 64
        return GatedMLPConfig(ffn=width, activation="silu", bias=bias, offset=args["glu-linear-offset"])
    width = ffn or 4 * hidden
    if args["quick-geglu"]:
        clamp, offset = args["activation-func-clamp-value"], args["glu-linear-offset"]
        return GatedMLPConfig(ffn=width, activation="quick_gelu", bias=bias, clamp=clamp, offset=offset)
    if args["squared-relu"]:
        return DenseMLPConfig(ffn=width, activation="squared_relu", bias=bias)
    # The kernel fused with the bias, the default, computes the tanh form; without a bias nothing is fused.
    fused = bias and not args["no-bias-gelu-fusion"]
    return DenseMLPConfig(ffn=width, activation="gelu_tanh" if fused or args["openai-gelu"] else "gelu", bias=bias)


def embedding(args: Arguments) -> Settings:
    """Positions, embedding and head of the model."""
    refuse_positions(args)
    length, table = sequence_length(args), args["max-position-embeddings"]
    learned = not args["multi-latent-attention"] and positions(args) == "learned_absolute"
    if table is not None and table < length:
        args.problem("max-position-embeddings", f"{table} is below --seq-length {length}")
    elif table is not None and learned and table > length:
        args.remark("max-position-embeddings", f"positions from {length} on never occur; the table has {length} rows")
    settings = {
        "model.hidden": needed(args, "hidden-size"),
        "model.sequence_length": length,
        "model.learned_positions": learned,
        "model.dropout": args["hidden-dropout"],
        "model.embedding_std": args["embedding-init-method-std"],
    }
    if args["mtp-num-layers"] and hybrid_pattern(args) is None:
        settings["model.prediction"] = _prediction(args)
    return settings


def _prediction(args: Arguments) -> PredictionConfig:
    """Multi-token prediction with windows and rotation of the first layers and the experts of the last.

    Megatron-LM numbers these blocks from 1 on.
    """
    depth, pattern = args["mtp-num-layers"], stack(args)["model.stack"].pattern
    first = [pattern[number % len(pattern)] for number in range(min(depth, len(pattern)))]
    blocks = [replace(block, mlp=pattern[-1].mlp) for block in first]
    if any(block != blocks[0] for block in blocks):
        message = "all blocks of multi-token prediction must be equal, but the first layers differ"
        args.refuse("mtp-num-layers", message)
    block = blocks[0] if blocks and blocks[0] != pattern[-1] else None
    return PredictionConfig(depth=depth, block=block, **prediction_settings(args))


def prediction_settings(args: Arguments) -> dict[str, Any]:
    """The settings of multi-token prediction except depth and blocks."""
    # Has an effect only if gradients are averaged by tokens.
    reweighted = "microbatches" if args["calculate-per-token-loss"] else "rows"
    return {"weight": args["mtp-loss-scaling-factor"], "reweighted": reweighted}


def width_scaling(args: Arguments) -> Settings:
    """Width scaling (muP) of hyperparameters that were tuned on a narrower model."""
    if not args["use-mup"]:
        return {}
    hidden = needed(args, "hidden-size")
    if args["mup-base-hidden-size"] is None:
        args.remark("use-mup", "without --mup-base-hidden-size the model is its own base, as in Megatron-LM")
    size, output = args["mup-base-head-dim"], args["mup-output-mult"]
    if size is not None and size != int(size):
        args.refuse("mup-base-head-dim", "a head has a whole number of elements")
    scaling = WidthScalingConfig(
        base_hidden=args["mup-base-hidden-size"] or hidden,
        base_head_dim=None if size is None else int(size),
        score_power=args["mup-attn-scale-power"],
        embedding=args["mup-embedding-mult"],
        # In Megatron-LM, 1 means the default: one over the ratio of widths.
        output=None if output == 1 else output,
    )
    return {"model.width_scaling": scaling}


def vocabulary(args: Arguments) -> Settings:
    """Tokenizer, and size and padding of the vocabulary."""
    return padded(args, *tokenizer_of(args))


def padded(args: Arguments, tokenizer: TokenizerConfig, size: int) -> Settings:
    """Tokenizer, and size and padding of the vocabulary. size: number of ids."""
    tensor, pipeline = args["tensor-model-parallel-size"], args["pipeline-model-parallel-size"]
    padded_size = args["padded-vocab-size"]
    if padded_size is not None and padded_size < size:
        args.problem("padded-vocab-size", f"{padded_size} is below the vocabulary's {size}")
    multiple = padded_size or args["make-vocab-size-divisible-by"] * tensor
    settings = {"tokenizer": tokenizer, "model.vocabulary_size": size, "model.vocabulary_multiple": multiple}
    cuts = max(tensor * pipeline, 1)
    rows = -(-size // max(multiple, 1)) * multiple
    if rows % cuts:
        settings["model.vocabulary_multiple"] = lcm(multiple, cuts)
        flag = "padded-vocab-size" if padded_size else "make-vocab-size-divisible-by"
        text = (
            f"{rows} rows are not divisible by the {tensor} x {pipeline} devices that hold them: padded to a multiple"
        )
        args.remark(flag, f"{text} of {lcm(multiple, cuts)} instead. The softmax excludes padding here")
    return settings
