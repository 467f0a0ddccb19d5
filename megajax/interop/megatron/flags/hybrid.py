"""Hybrids of Mamba-2, attention, MLPs and experts from the flags of pretrain_mamba.py and pretrain_hybrid.py."""

from typing import Any

from megajax.config.errors import UserError
from megajax.interop.megatron.flags.model import (
    PATTERN,
    attention,
    hybrid_pattern,
    latent_attention,
    layers,
    mlp,
    norm,
    prediction_settings,
    stack,
)
from megajax.interop.megatron.flags.moe import mixture
from megajax.interop.megatron.flags.reading import Arguments, Settings, needed
from megajax.layers.block.config import BlockConfig, MixerConfig
from megajax.layers.mamba.config import Mamba2Config
from megajax.layers.moe.config import FeedForwardConfig
from megajax.models.presets.hybrids.hybrid import HybridPattern, hybrid_pipeline, hybrid_prediction, hybrid_stack

STANDARD_LAYERS = ("mamba_stack_spec", "hybrid_stack_spec", "local", "transformer_engine")
"""Specifications of the same layers as without --spec."""
LETTERS = "M*+-E"
"""Letters of supported layers."""


def decoder_stack(args: Arguments) -> Settings:
    """The layers of a hybrid pattern, one letter for each; without a pattern, the layers of a GPT."""
    text = hybrid_pattern(args)
    if args["spec"] and args["spec"][-1] not in STANDARD_LAYERS:
        args.refuse("spec", "specifications are Megatron-LM's Python; set model.stack.pattern instead")
    if text is None:
        return stack(args)
    layers(args)  # compares the pattern with --num-layers
    try:
        parsed = HybridPattern.parse(text)
        parsed.demand_known(dict.fromkeys(LETTERS))
        letters = set(parsed.layers + parsed.ahead)
        blocks = _blocks(args, letters)
        prediction = hybrid_prediction(text, blocks, **prediction_settings(args))
        return {"model.stack": hybrid_stack(text, blocks), "model.norm": norm(args), "model.prediction": prediction}
    except UserError as error:
        args.problem(PATTERN, str(error))
        return {}


def hybrid_layout(args: Arguments) -> Settings:
    """Settings of the pipeline, if | in the pattern separates its chunks."""
    text, stages = hybrid_pattern(args), args["pipeline-model-parallel-size"]
    if text is None or "|" not in text:
        return {}
    stack_config = decoder_stack(args).get("model.stack")
    try:
        settings = {} if stack_config is None else hybrid_pipeline(text, stack_config, stages)
    except UserError as error:
        args.problem(PATTERN, str(error))
        settings = {}
    return {f"parallel.{name}": value for name, value in settings.items()}


def _blocks(args: Arguments, letters: set[str]) -> dict[str, BlockConfig]:
    """Letter -> layer for the letters that occur. Flags of other layers are not required."""
    normal, dropout = norm(args), args["hidden-dropout"]
    if args["window-size"] is not None:
        args.refuse("window-size", "attention of hybrids sees all earlier tokens: set windows in model.stack")
    mixers: dict[str, Any] = {"M": _mamba, "*": lambda args: attention(args, normal), "+": _latent}
    forwards: dict[str, Any] = {"-": mlp, "E": _experts}
    blocks: dict[str, BlockConfig] = {}
    for letter in letters & {*mixers}:
        mixer: MixerConfig = mixers[letter](args)
        blocks[letter] = BlockConfig(mixer=mixer, norm=normal, dropout=dropout)
    for letter in letters & {*forwards}:
        layer: FeedForwardConfig = forwards[letter](args)
        blocks[letter] = BlockConfig(mlp=layer, norm=normal, dropout=dropout)
    return blocks


def _latent(args: Arguments) -> MixerConfig:
    return latent_attention(args, norm(args))


def _experts(args: Arguments) -> FeedForwardConfig:
    needed(args, "num-experts")
    return mlp(args) if args["num-experts"] is None else mixture(args, mlp(args))


def _mamba(args: Arguments) -> Mamba2Config:
    size, hidden = args["mamba-head-dim"], needed(args, "hidden-size")
    return Mamba2Config(
        heads=args["mamba-num-heads"] or max(2 * hidden // max(size, 1), 1),
        head_dim=size,
        state=args["mamba-state-dim"],
        groups=args["mamba-num-groups"],
    )
