"""BERT, T5 and their data from the flags of Megatron-LM's pretrain_bert.py and pretrain_t5.py."""

from dataclasses import replace
from typing import Any

from megajax.data.configs import MaskedSentencesConfig, MaskedSpansConfig
from megajax.interop.megatron.flags.data import files, ordered
from megajax.interop.megatron.flags.model import (
    MOST_LAYERS,
    embedding,
    layers,
    needed,
    positions,
    sequence_length,
    stack,
)
from megajax.interop.megatron.flags.reading import Arguments, Settings
from megajax.layers.block.cross_config import CrossAttentionConfig, CrossBlockConfig
from megajax.layers.configs import (
    AnyBlockConfig,
    AttentionConfig,
    IdentityNormConfig,
    LatentAttentionConfig,
    RelativeBiasConfig,
    StackConfig,
)


def attention(block: AnyBlockConfig) -> AttentionConfig:
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


def bidirectional(block: AnyBlockConfig, **changes: Any) -> AnyBlockConfig:
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
    decoder_block = CrossBlockConfig(mixer=mixer, cross=cross, mlp=mlp, norm=block.norm, dropout=block.dropout)
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
        "cache_dir": args["data-cache-path"],
        "surplus": args["mid-level-dataset-surplus"],
        "mask_probability": args["mask-prob"],
        "short_probability": args["short-seq-prob"],
    }
