"""T5 (Raffel et al. 2020), as Megatron-LM has it. B rows, S positions of the decoder, T of the encoder, D hidden.

With context parallelism, both sections shard rows into contiguous chunks: the encoder has no causal mask, and every
position of the decoder reads the whole encoder output, so the work is even.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.batch import SAMPLE, Rows
from megajax.layers.context import Context
from megajax.layers.decoding import Cache, rows_of
from megajax.layers.param import LayerSettings
from megajax.mesh.layout import Layout
from megajax.models.decoder.module import DecoderLM, batch_of, layer_settings
from megajax.models.protocol import Section
from megajax.models.t5.config import T5Config

ENCODER = 1
"""Folded into the random key of the encoder, so it differs from that of the decoder."""


class T5(DecoderLM):
    """Takes a text with masked spans; gives the loss or logits of the spans. The model is the decoder section."""

    def __init__(self, cfg: T5Config, layout: Layout):
        super().__init__(cfg, layout)
        self.cfg: T5Config = cfg
        self.encoder = Encoder(cfg, layer_settings(cfg, layout))

    @property
    def sections(self) -> Mapping[str, Section]:
        return {"encoder": EncoderSection(self), "": self}

    def __call__(
        self,
        tokens: Array,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        encoder_tokens: Array | None = None,
        encoder_segment_ids: Array | None = None,
    ) -> Array:
        """tokens int32 [B, S] after encoder_tokens int32 [B, T] -> logits float32 [B, S, vocabulary_size].

        segment_ids: 0 for padding; by default there is none. Raises ValueError without encoder_tokens.
        """
        if encoder_tokens is None:
            raise ValueError("T5 needs encoder_tokens, the input of its encoder")
        batch = batch_of(tokens=tokens, positions=positions, segment_ids=segment_ids)
        return self.logits(
            self.states(batch | batch_of(encoder_tokens=encoder_tokens, encoder_segment_ids=encoder_segment_ids))
        )

    def context(self, batch: Rows, key: Array | None = None) -> Context:
        """The context of the decoder, without the output of the encoder."""
        return super().context(batch, key)._replace(memory_segments=batch.get("encoder_segment_ids"))

    def remember(self, tokens: Array, cache: Cache, ctx: Context) -> Cache:
        """The cache with the encoder output for tokens int32 [R, L], in the slots of their rows."""
        (counts,), index = rows_of(ctx).counts, jnp.arange(tokens.shape[1])
        present = (index[None] < counts[:, None]).astype(jnp.int32)
        encoder, batch = EncoderSection(self), {"encoder_tokens": tokens, "encoder_segment_ids": present}
        inner = encoder.context(batch, None)
        memory = encoder.leave(encoder.stack(encoder.enter(encoder.embed(batch), inner), inner), inner)
        return self.stack.remember(cache, ctx._replace(memory=memory))


class Encoder(nnx.Module):
    """The layers of the encoder, and the norm after them."""

    def __init__(self, cfg: T5Config, settings: LayerSettings):
        self.stack = cfg.encoder.build(settings, recomputing=cfg.recomputing(), unroll=cfg.unroll)
        self.norm = cfg.norm.build(settings)


class EncoderSection:
    """The encoder as a section; it shares the tables of tokens and positions with the decoder."""

    def __init__(self, model: T5):
        self.model, self.stack = model, model.encoder.stack

    def context(self, batch: Rows, key: Array | None) -> Context:
        """Every token attends to all tokens of its row except padding."""
        rows = batch_of(tokens=batch["encoder_tokens"], segment_ids=batch.get("encoder_segment_ids"))
        rows |= {SAMPLE: batch[SAMPLE]} if SAMPLE in batch else {}
        encoder_key = None if key is None else jax.random.fold_in(key, ENCODER)
        return DecoderLM.context(self.model, rows, encoder_key)

    def embed(self, batch: Rows) -> Array:
        """Token embeddings [B, T, D]."""
        return self.model.embed_tokens(batch["encoder_tokens"])

    def enter(self, x: Array, ctx: Context) -> Array:
        """Positions and dropout [B, T, D]."""
        return self.model.enter(x, ctx)

    def leave(self, x: Array, ctx: Context) -> Array:
        """Normalised output of the layers [B, T, D]."""
        del ctx
        return self.model.layout.act(self.model.encoder.norm(x), "batch", "seq_residual", "embed")
