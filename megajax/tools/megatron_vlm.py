"""LLaVA and its data, from the flags of Megatron-LM's pretrain_vlm.py."""

from dataclasses import replace
from math import lcm

from megajax.data.config import MockCaptionsConfig
from megajax.layers.config import (
    AnyBlockConfig,
    GatedMLPConfig,
    IdentityNormConfig,
    Llama3ScalingConfig,
    RopeConfig,
    StackConfig,
)
from megajax.models.config import ProjectorConfig
from megajax.models.config.vision import CLIP_DEVIATION, CLIP_MEAN, VisionTowerConfig
from megajax.tools.flags import Arguments, Settings
from megajax.tools.megatron_data import ordered
from megajax.tools.megatron_encoders import attention, refuse_latent_and_windows, seeing_all
from megajax.tools.megatron_memory import recompute
from megajax.tools.megatron_model import (
    MOST_LAYERS,
    layers,
    mlp,
    needed,
    norm,
    padded,
    positions,
    refuse_positions,
    sequence_length,
    stack,
)
from megajax.tools.megatron_run import optimizer
from megajax.tools.megatron_tokenizer import IMAGE, tokenizer_with_images

CLASS_TOKENS = 1
"""Of CLIP's tower."""
FILES = ("data-path", "data-args-path", "per-split-data-args-path", "train-data-path")


def vlm_stack(args: Arguments) -> Settings:
    """The blocks of the decoder, the tower that is made of the same ones, and the projector."""
    refuse_latent_and_windows(args)
    if args["use-mup"]:
        args.refuse("use-mup", "widths of a tower and a decoder together are not scaled in this version")
    settings = dict(stack(args, args["decoder-num-layers"], experts=False))
    made: StackConfig = settings["model.stack"]
    language = made.with_pattern([_reading(block) for block in made.pattern])
    block = language.pattern[0]
    if args["transformer-impl"] == "local":
        args.remark("transformer-impl", "local: patches of the tower see all others here; there they see earlier ones")
    return settings | {
        "model.type": "megajax.models.config.llava:LlavaConfig",
        "model.stack": language,
        "model.vision": _tower(args, seeing_all(block, rope=None)),
        "model.projector": _projector(args),
        "model.keep_class_tokens": not args["disable-vision-class-token"],
    }


def _reading(block: AnyBlockConfig) -> AnyBlockConfig:
    """A block of the decoder: pretrain_vlm.py has no norm of queries and keys, and RoPE's own base and factor."""
    mixer = attention(block)
    rope = mixer.rope
    if isinstance(rope, RopeConfig):
        scaling = replace(rope.scaling, factor=8.0) if isinstance(rope.scaling, Llama3ScalingConfig) else rope.scaling
        rope = replace(rope, base=10_000.0, interpolation=1.0, scaling=scaling)
    return replace(block, mixer=replace(mixer, window=None, qk_norm=None, rope=rope))


def _tower(args: Arguments, block: AnyBlockConfig) -> VisionTowerConfig:
    """CLIP's: a norm before the blocks and none after them, no bias of patches."""
    count, tensor = min(max(layers(args), 1), MOST_LAYERS), max(args["tensor-model-parallel-size"], 1)
    again = {name.removeprefix("model."): value for name, value in recompute(args).items()}
    return VisionTowerConfig(
        hidden=needed(args, "hidden-size"),
        stack=StackConfig(pattern=(block,), repeats=count),
        height=args["img-h"],
        width=args["img-w"],
        patch=args["patch-dim"],
        patch_bias=False,
        class_tokens=CLASS_TOKENS,
        mean=CLIP_MEAN,
        deviation=CLIP_DEVIATION,
        positions_multiple=lcm(8, tensor),
        entry_norm=norm(args),
        norm=IdentityNormConfig(),
        residual="float32" if args["fp32-residual-connection"] else "compute",
        init_std=args["init-method-std"],
        **again,
    )


def _projector(args: Arguments) -> ProjectorConfig:
    """An MLP like those of the layers."""
    like = mlp(args)
    if isinstance(like, GatedMLPConfig) and (like.clamp is not None or like.offset):
        name = "activation-func-clamp-value" if like.clamp is not None else "glu-linear-offset"
        args.remark(name, "of the layers alone here; there, of the projector too")
    gated = isinstance(like, GatedMLPConfig)
    return ProjectorConfig(ffn=like.ffn, activation=like.activation, gated=gated, bias=like.bias)


def vlm_embedding(args: Arguments) -> Settings:
    """Positions, the length of rows and both ends of the decoder."""
    refuse_positions(args)
    learned = positions(args) == "learned_absolute"
    if learned:
        text = "learned positions are those of a row, images included; there the words alone have them"
        args.remark("position-embedding-type", text)
    return {
        "model.hidden": needed(args, "hidden-size"),
        "model.sequence_length": _row_length(args),
        "model.learned_positions": learned,
        "model.tied": False,
        "model.dropout": args["hidden-dropout"],
        "model.embedding_std": args["embedding-init-method-std"],
    }


def _row_length(args: Arguments) -> int:
    """Text and the positions of an image, in multiples of the tensor devices that share them."""
    text, patch = args["dataloader-seq-length"] or sequence_length(args), max(args["patch-dim"], 1)
    kept = 0 if args["disable-vision-class-token"] else CLASS_TOKENS
    length = text + kept + (args["img-h"] // patch) * (args["img-w"] // patch)
    tensor = args["tensor-model-parallel-size"] if args["sequence-parallel"] else 1
    if tensor <= 1:
        return length
    if not args["decoder-tp-comm-overlap"]:
        return -(-length // tensor) * tensor
    told = needed(args, "decoder-seq-length")
    if told < length:
        args.wrong("decoder-seq-length", f"{told} is below the {text} tokens of text and {length - text} of an image")
    return told


def vlm_vocabulary(args: Arguments) -> Settings:
    """Tokenizer and vocabulary with a token for images."""
    tokenizer, size, image = tokenizer_with_images(args)
    args.remark("tokenizer-type", f"{IMAGE} has an id of its own, {image}; Megatron-LM's is -200")
    return {**padded(args, tokenizer, size), "model.image_token": image}


def captions(args: Arguments) -> Settings:
    """Made-up images with captions: pretrain_vlm.py reads no others."""
    text = "images of shapes with captions of a few words; there, black images and made-up tokens in whole rows"
    name = next((name for name in FILES if args.given(name)), "mock-data")
    if args.given(name) and name in FILES:
        text = f"is not read, there as here; data.type=ImageTextConfig reads images and captions. Made up are {text}"
    args.remark(name, text)
    return ordered(args, {"data": MockCaptionsConfig()})


def partly_frozen(args: Arguments) -> Settings:
    """The update rule, and the parts that are not trained."""
    made = optimizer(args)["optimizer"]
    trained = ["projector.*"]
    if args["freeze-LM"]:
        made = replace(made, groups=())
    else:
        tables = ["tokens", "positions"] if positions(args) == "learned_absolute" else ["tokens"]
        trained += [*tables, "stack.*", "norm.*", "head"]
    if not args["freeze-ViT"]:
        trained.append("vision.*")
    frozen = args["freeze-LM"] or args["freeze-ViT"]
    return {"optimizer": replace(made, trainable=tuple(trained)) if frozen else made}
