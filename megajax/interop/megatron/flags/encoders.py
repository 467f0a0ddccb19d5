"""BERT, T5, LLaVA and their data from Megatron-LM's flags: of pretrain_bert.py, pretrain_t5.py and pretrain_vlm.py."""

from dataclasses import replace
from math import lcm
from typing import Any

from megajax.data.images.config import MockCaptionsConfig
from megajax.data.masked.config import MaskedSentencesConfig, MaskedSpansConfig
from megajax.interop.megatron.flags.data import IMAGE, cache_folder, files, ordered, tokenizer_with_images
from megajax.interop.megatron.flags.layout import recompute
from megajax.interop.megatron.flags.model import (
    MOST_LAYERS,
    embedding,
    layers,
    mlp,
    norm,
    padded,
    positions,
    refuse_positions,
    sequence_length,
    stack,
)
from megajax.interop.megatron.flags.reading import Arguments, Settings, needed
from megajax.interop.megatron.flags.run import optimizer
from megajax.layers.attention.config import AttentionConfig, CrossAttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import IdentityNormConfig
from megajax.layers.position.config import Llama3ScalingConfig, RelativeBiasConfig, RopeConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.llava.config import ProjectorConfig
from megajax.models.vision.config import CLIP_DEVIATION, CLIP_MEAN, VisionTowerConfig


def attention(block: BlockConfig) -> AttentionConfig:
    """The block's attention; plain attention in place of other mixers, which are refused."""
    mixer = block.parts().get("mixer")
    if isinstance(mixer, AttentionConfig):
        return mixer
    return AttentionConfig(heads=mixer.heads if isinstance(mixer, LatentAttentionConfig) else 1)


def refuse_decoder_features(args: Arguments) -> None:
    """Refuse the flags of features that only causal text models have here."""
    if args["multi-latent-attention"]:
        args.refuse("multi-latent-attention", "encoders have plain attention")
    if args["window-size"] is not None:
        args.refuse("window-size", "windows are causal, and attention of an encoder is bidirectional")
    if args["num-experts"] is not None:
        args.refuse("num-experts", "only causal text models have experts")
    if args["mtp-num-layers"]:
        args.refuse("mtp-num-layers", "only causal text models have multi-token prediction")


def bidirectional(block: BlockConfig, **changes: Any) -> BlockConfig:
    """The block with bidirectional attention."""
    return replace(block, mixer=replace(attention(block), causal=False, window=None, **changes))


def bert_stack(args: Arguments) -> Settings:
    """BERT: blocks with bidirectional attention, and its heads."""
    refuse_decoder_features(args)
    settings, binary = dict(stack(args, experts=False)), not args["bert-no-binary-head"]
    decoder: StackConfig = settings["model.stack"]
    settings["model.stack"] = decoder.with_pattern([bidirectional(block) for block in decoder.pattern])
    # Without the second head there are no token types either, as in Megatron-LM.
    settings |= {"model.next_sentence": binary, "model.token_types": 2 if binary else 0}
    return settings | {"model.type": "megajax.models.bert.config:BertConfig"}


def bert_embedding(args: Arguments) -> Settings:
    """Positions, embedding and head of BERT."""
    return {name: value for name, value in embedding(args).items() if name != "model.prediction"}


def t5_stack(args: Arguments) -> Settings:
    """T5: the blocks of the encoder, and blocks of the decoder with cross-attention between their two parts."""
    refuse_decoder_features(args)
    settings = dict(stack(args, experts=False))
    shared_stack: StackConfig = settings["model.stack"]
    if len(shared_stack.pattern) > 1:
        args.refuse("no-rope-freq", "all layers of a section must be equal")
    block, shared = shared_stack.pattern[0], {"relative": _relative(args)}
    encoder_block = bidirectional(block, relative=shared["relative"] and replace(shared["relative"], both_ways=True))
    mixer = replace(attention(block), window=None, **shared)
    cross = CrossAttentionConfig(
        heads=mixer.heads,
        kv_heads=mixer.kv_heads,
        head_dim=mixer.head_dim,
        bias=mixer.bias,
        qkv_bias=mixer.qkv_bias,
        qk_norm=mixer.qk_norm,
        scale=mixer.scale,
        dropout=mixer.dropout,
        kernel=mixer.kernel,
    )
    mlp = block.parts()["mlp"]
    decoder_block = BlockConfig(mixer=mixer, cross=cross, mlp=mlp, norm=block.norm, dropout=block.dropout)
    count = args["decoder-num-layers"] or layers(args)
    settings["model.encoder"] = StackConfig(pattern=(encoder_block,), repeats=min(max(layers(args), 1), MOST_LAYERS))
    settings["model.stack"] = StackConfig(pattern=(decoder_block,), repeats=min(max(count, 1), MOST_LAYERS))
    if args["transformer-impl"] == "local":
        args.remark("transformer-impl", "local: no norm after the sections, as in Megatron-LM")
        settings["model.norm"] = IdentityNormConfig()
    return settings | {"model.type": "megajax.models.t5.config:T5Config"}


def _relative(args: Arguments) -> RelativeBiasConfig | None:
    """The bias by distance, with one table for all layers of a section."""
    if positions(args) != "relative":
        return None
    buckets, distance = args["relative-attention-num-buckets"], args["relative-attention-max-distance"]
    return RelativeBiasConfig(buckets=buckets, distance=distance, shared=True)


def t5_embedding(args: Arguments) -> Settings:
    """Positions, lengths, embedding and head of T5."""
    decoder_length, encoder_length, table = (
        needed(args, "decoder-seq-length"),
        sequence_length(args),
        args["max-position-embeddings"],
    )
    learned = positions(args) == "learned_absolute"
    if positions(args) == "mrope":
        args.refuse("position-embedding-type", "multimodal RoPE is not supported")
    if table is not None and table < max(decoder_length, encoder_length):
        args.problem(
            "max-position-embeddings",
            f"{table} is below --encoder-seq-length {encoder_length} or the decoder's {decoder_length}",
        )
    elif table is not None and learned and table > max(decoder_length, encoder_length):
        args.remark("max-position-embeddings", f"positions from {max(decoder_length, encoder_length)} on never occur")
    return {
        "model.hidden": needed(args, "hidden-size"),
        "model.encoder_length": encoder_length,
        "model.sequence_length": decoder_length,
        "model.learned_positions": learned,
        "model.dropout": args["hidden-dropout"],
        "model.embedding_std": args["embedding-init-method-std"],
    }


def masked_sentences(args: Arguments) -> Settings:
    """Data of sentence pairs with masked tokens, for BERT."""
    settings = _masking(args) | {"next_sentence": not args["bert-no-binary-head"]}
    return ordered(args, files(args, MaskedSentencesConfig, settings))


def masked_spans(args: Arguments) -> Settings:
    """Data of text with masked spans, for T5."""
    return ordered(args, files(args, MaskedSpansConfig, _masking(args)))


def _masking(args: Arguments) -> dict[str, Any]:
    if args["mock-data"]:
        args.refuse("mock-data", "no mock sentences: use the real text of data.type=LibrarySentences or LibrarySpans")
    return {
        "cache_dir": cache_folder(args),
        "surplus": args["mid-level-dataset-surplus"],
        "mask_probability": args["mask-prob"],
        "short_probability": args["short-seq-prob"],
    }


CLASS_TOKENS = 1
"""Number of class tokens of CLIP's tower."""
FILES = ("data-path", "data-args-path", "per-split-data-args-path", "train-data-path")


def vlm_stack(args: Arguments) -> Settings:
    """The blocks of the decoder, the tower with the same kind of blocks, and the projector."""
    refuse_decoder_features(args)
    if args["use-mup"]:
        args.refuse("use-mup", "width scaling of a model with a tower is not supported")
    settings = dict(stack(args, args["decoder-num-layers"], experts=False))
    decoder: StackConfig = settings["model.stack"]
    language = decoder.with_pattern([_decoder_block(block) for block in decoder.pattern])
    block = language.pattern[0]
    if args["transformer-impl"] == "local":
        args.remark("transformer-impl", "local: attention of the tower is bidirectional here, causal in Megatron-LM")
    return settings | {
        "model.type": "megajax.models.llava.config:LlavaConfig",
        "model.stack": language,
        "model.vision": _tower(args, bidirectional(block, rope=None)),
        "model.projector": _projector(args),
        "model.keep_class_tokens": not args["disable-vision-class-token"],
    }


def _decoder_block(block: BlockConfig) -> BlockConfig:
    """A block of the decoder: pretrain_vlm.py has no query and key norm, and RoPE's default base and factor."""
    mixer = attention(block)
    rope = mixer.rope
    if isinstance(rope, RopeConfig):
        scaling = replace(rope.scaling, factor=8.0) if isinstance(rope.scaling, Llama3ScalingConfig) else rope.scaling
        rope = replace(rope, base=10_000.0, interpolation=1.0, scaling=scaling)
    return replace(block, mixer=replace(mixer, window=None, qk_norm=None, rope=rope))


def _tower(args: Arguments, block: BlockConfig) -> VisionTowerConfig:
    """CLIP's tower: a norm before the blocks and none after them, no bias of patches."""
    count, tensor = min(max(layers(args), 1), MOST_LAYERS), max(args["tensor-model-parallel-size"], 1)
    recompute_settings = {name.removeprefix("model."): value for name, value in recompute(args).items()}
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
        **recompute_settings,
    )


def _projector(args: Arguments) -> ProjectorConfig:
    """The projector, an MLP like those of the layers."""
    layer_mlp = mlp(args)
    if isinstance(layer_mlp, GatedMLPConfig) and (layer_mlp.clamp is not None or layer_mlp.offset):
        name = "activation-func-clamp-value" if layer_mlp.clamp is not None else "glu-linear-offset"
        args.remark(name, "applies only to layers here; in Megatron-LM, to the projector too")
    gated = isinstance(layer_mlp, GatedMLPConfig)
    return ProjectorConfig(ffn=layer_mlp.ffn, activation=layer_mlp.activation, gated=gated, bias=layer_mlp.bias)


def vlm_embedding(args: Arguments) -> Settings:
    """Positions, length of rows, embedding and head of the decoder."""
    refuse_positions(args)
    learned = positions(args) == "learned_absolute"
    if learned:
        text = "learned positions cover images too; in Megatron-LM, only text has them"
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
    """Text and the positions of an image, padded to a multiple of the tensor devices if rows are sharded over them."""
    text, patch = args["dataloader-seq-length"] or sequence_length(args), max(args["patch-dim"], 1)
    class_tokens = 0 if args["disable-vision-class-token"] else CLASS_TOKENS
    length = text + class_tokens + (args["img-h"] // patch) * (args["img-w"] // patch)
    tensor = args["tensor-model-parallel-size"] if args["sequence-parallel"] else 1
    if tensor <= 1:
        return length
    if not args["decoder-tp-comm-overlap"]:
        return -(-length // tensor) * tensor
    decoder_length = needed(args, "decoder-seq-length")
    if decoder_length < length:
        args.problem(
            "decoder-seq-length", f"{decoder_length} is below the {text} tokens of text and {length - text} of an image"
        )
    return decoder_length


def vlm_vocabulary(args: Arguments) -> Settings:
    """Tokenizer and vocabulary, with a token for images."""
    tokenizer, size, image = tokenizer_with_images(args)
    args.remark("tokenizer-type", f"{IMAGE} has the id {image}; Megatron-LM's is -200")
    return {**padded(args, tokenizer, size), "model.image_token": image}


def captions(args: Arguments) -> Settings:
    """Mock images with captions: pretrain_vlm.py reads no real ones."""
    text = "images of shapes with short captions; in Megatron-LM, black images and rows full of mock tokens"
    name = next((name for name in FILES if args.is_given(name)), "mock-data")
    if args.is_given(name) and name in FILES:
        text = f"is not read, as in Megatron-LM; data.type=ImageTextConfig reads images and captions. Mock data: {text}"
    args.remark(name, text)
    return ordered(args, {"data": MockCaptionsConfig()})


def partly_frozen(args: Arguments) -> Settings:
    """The update rule and the trainable parts."""
    rule = optimizer(args)["optimizer"]
    trained = ["projector.*"]
    if args["freeze-LM"]:
        rule = replace(rule, groups=())
    else:
        tables = ["tokens", "positions"] if positions(args) == "learned_absolute" else ["tokens"]
        trained += [*tables, "stack.*", "norm.*", "head"]
    if not args["freeze-ViT"]:
        trained.append("vision.*")
    frozen = args["freeze-LM"] or args["freeze-ViT"]
    return {"optimizer": replace(rule, trainable=tuple(trained)) if frozen else rule}
