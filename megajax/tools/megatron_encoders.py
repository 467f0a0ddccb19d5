"""BERT and T5, and their data, from the flags of Megatron-LM's pretrain_bert.py and pretrain_t5.py."""

from dataclasses import replace
from typing import Any

from megajax.data.config import MaskedSentencesConfig, MaskedSpansConfig
from megajax.layers.config import (
    AnyBlockConfig,
    AttentionConfig,
    IdentityNormConfig,
    LatentAttentionConfig,
    RelativeBiasConfig,
    StackConfig,
)
from megajax.layers.config.cross import CrossAttentionConfig, CrossBlockConfig
from megajax.tools.flags import Arguments, Settings
from megajax.tools.megatron_data import files, ordered
from megajax.tools.megatron_model import MOST_LAYERS, embedding, layers, needed, positions, sequence_length, stack


def attention(block: AnyBlockConfig) -> AttentionConfig:
    """Its mixer; plain attention in place of another one, which is refused."""
    mixer = block.parts().get("mixer")
    if isinstance(mixer, AttentionConfig):
        return mixer
    return AttentionConfig(heads=mixer.heads if isinstance(mixer, LatentAttentionConfig) else 1)


def refuse_latent_and_windows(args: Arguments) -> None:
    """What decoders alone have here."""
    if args["multi-latent-attention"]:
        args.refuse("multi-latent-attention", "encoders have plain attention")
    if args["window-size"] is not None:
        args.refuse("window-size", "windows look back alone, and the tokens of an encoder see both sides")
    if args["num-experts"] is not None:
        args.refuse("num-experts", "layers with experts are those of causal models of text alone")
    if args["mtp-num-layers"]:
        args.refuse("mtp-num-layers", "heads that predict further are those of causal models of text alone")


def seeing_all(block: AnyBlockConfig, **changes: Any) -> AnyBlockConfig:
    """A block whose positions see all others."""
    return replace(block, mixer=replace(attention(block), causal=False, window=None, **changes))


def bert_stack(args: Arguments) -> Settings:
    """BERT: blocks whose tokens see all others, and its heads."""
    refuse_latent_and_windows(args)
    settings, binary = dict(stack(args, experts=False)), not args["bert-no-binary-head"]
    made: StackConfig = settings["model.stack"]
    settings["model.stack"] = made.with_pattern([seeing_all(block) for block in made.pattern])
    # Without the second head there are no token types either, there as here.
    settings |= {"model.next_sentence": binary, "model.token_types": 2 if binary else 0}
    return settings | {"model.type": "megajax.models.config.bert:BertConfig"}


def bert_embedding(args: Arguments) -> Settings:
    """Positions and both ends of BERT."""
    return {name: value for name, value in embedding(args).items() if name != "model.prediction"}


def t5_stack(args: Arguments) -> Settings:
    """T5: the blocks of the encoder, and those of the decoder, with attention to its output between their two parts."""
    refuse_latent_and_windows(args)
    settings = dict(stack(args, experts=False))
    made: StackConfig = settings["model.stack"]
    if len(made.pattern) > 1:
        args.refuse("no-rope-freq", "the layers of each section are alike")
    block, shared = made.pattern[0], {"relative": _relative(args)}
    reads = seeing_all(block, relative=shared["relative"] and replace(shared["relative"], both_ways=True))
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
    writes = CrossBlockConfig(mixer=mixer, cross=cross, mlp=mlp, norm=block.norm, dropout=block.dropout)
    count = args["decoder-num-layers"] or layers(args)
    settings["model.encoder"] = StackConfig(pattern=(reads,), repeats=min(max(layers(args), 1), MOST_LAYERS))
    settings["model.stack"] = StackConfig(pattern=(writes,), repeats=min(max(count, 1), MOST_LAYERS))
    if args["transformer-impl"] == "local":
        args.remark("transformer-impl", "local: no norm after the sections, there as here")
        settings["model.norm"] = IdentityNormConfig()
    return settings | {"model.type": "megajax.models.config.t5:T5Config"}


def _relative(args: Arguments) -> RelativeBiasConfig | None:
    """The bias by distance, whose table the layers of a section share."""
    if positions(args) != "relative":
        return None
    buckets, distance = args["relative-attention-num-buckets"], args["relative-attention-max-distance"]
    return RelativeBiasConfig(buckets=buckets, distance=distance, shared=True)


def t5_embedding(args: Arguments) -> Settings:
    """Positions, lengths and both ends of T5."""
    length, read, table = needed(args, "decoder-seq-length"), sequence_length(args), args["max-position-embeddings"]
    learned = positions(args) == "learned_absolute"
    if positions(args) == "mrope":
        args.refuse("position-embedding-type", "positions of images are not in this version")
    if table is not None and table < max(length, read):
        args.wrong("max-position-embeddings", f"{table} is below --encoder-seq-length {read} or the decoder's {length}")
    elif table is not None and learned and table > max(length, read):
        args.remark("max-position-embeddings", f"positions from {max(length, read)} on never occur")
    return {
        "model.hidden": needed(args, "hidden-size"),
        "model.encoder_length": read,
        "model.sequence_length": length,
        "model.learned_positions": learned,
        "model.dropout": args["hidden-dropout"],
        "model.embedding_std": args["embedding-init-method-std"],
    }


def masked_sentences(args: Arguments) -> Settings:
    """Sentences with masked words, for BERT."""
    settings = _masking(args) | {"next_sentence": not args["bert-no-binary-head"]}
    return ordered(args, files(args, MaskedSentencesConfig, settings))


def masked_spans(args: Arguments) -> Settings:
    """Text with blanks, for T5."""
    return ordered(args, files(args, MaskedSpansConfig, _masking(args)))


def _masking(args: Arguments) -> dict[str, Any]:
    if args["mock-data"]:
        args.refuse(
            "mock-data", "there are no made-up sentences: data.type=LibrarySentences or LibrarySpans is real text"
        )
    return {
        "cache_dir": args["data-cache-path"],
        "surplus": args["mid-level-dataset-surplus"],
        "mask_probability": args["mask-prob"],
        "short_probability": args["short-seq-prob"],
    }
