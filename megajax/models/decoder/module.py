"""Decoder language models. B rows, S positions, D hidden, V padded vocabulary."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.batch import SAMPLE, Loss, Rows
from megajax.kernels.cross_entropy import Objective
from megajax.kernels.soft_cap import soft_capped
from megajax.layers.cache_spec import below
from megajax.layers.context import Context, dropout, keys_of_rows
from megajax.layers.decoding import Cache, in_layer
from megajax.layers.embedding import (
    VocabularyLoss,
    embed,
    embedded_beside_loss,
    vocabulary_loss,
    vocabulary_token_scores,
)
from megajax.layers.param import ZEROS, LayerSettings, Normal, param
from megajax.layers.remat import checkpointed
from megajax.mesh.layout import Layout
from megajax.models.decoder.config import DecoderConfig
from megajax.models.decoder.multi_token_prediction import mtp_targets, shifted
from megajax.models.protocol import Section, last_output
from megajax.models.reduction import LossReduction

EMBEDDING_PLACE = 2**31 - 1
"""A row's key is folded with this for the embedding and with its number for a layer: no layer has this number."""


class DecoderLM(nnx.Module):
    """Takes tokens; gives the loss or logits. The model is its own section, see megajax.models.protocol."""

    def __init__(self, cfg: DecoderConfig, layout: Layout):
        settings = layer_settings(cfg, layout)
        vocabulary, init = cfg.padded_vocabulary(), Normal(cfg.embedding_std or cfg.init_std)
        self.cfg, self.layout = cfg, layout
        self.tokens = param((vocabulary, cfg.hidden), ("vocab", "embed"), init=init)
        if cfg.learned_positions:
            self.positions = param((cfg.position_count(), cfg.hidden), (None, "embed"), init=init)
        if cfg.embedding_norm is not None:
            self.embedding_norm = cfg.embedding_norm.build(settings)
        self.stack = cfg.stack.build(settings, recomputing=cfg.recomputing(), unroll=cfg.unroll)
        self.norm = cfg.norm.build(settings)
        self.add_head(settings)
        self.predictions = nnx.List()
        if cfg.prediction is not None:
            for number, block in enumerate(cfg.predicting_blocks(), start=cfg.stack.layers()):
                self.predictions.append(cfg.prediction.build(settings, block=block, norm=cfg.norm, number=number))

    def add_head(self, settings: LayerSettings) -> None:
        """Declare the weights that only the loss and the logits read."""
        del settings
        if self.cfg.head_bias:
            self.head_bias = param((self.cfg.padded_vocabulary(),), ("vocab",), init=ZEROS, role="bias")
        if not self.cfg.tied:
            shape, init = (self.cfg.padded_vocabulary(), self.cfg.hidden), Normal(self.cfg.init_std)
            self.head = param(shape, ("vocab", "embed"), init=init)

    @property
    def sections(self) -> Mapping[str, Section]:
        return {"": self}

    def __call__(self, tokens: Array, positions: Array | None = None, segment_ids: Array | None = None) -> Array:
        """tokens int32 [B, S] -> logits float32 [B, S, vocabulary_size]; by plain jax.jit on any mesh."""
        length = tokens.shape[1]
        if self.cfg.learned_positions and length > self.cfg.sequence_length:
            raise ValueError(f"rows have {length} tokens, the table of positions {self.cfg.sequence_length}")
        ctx = DecoderLM.context(self, batch_of(tokens=tokens, positions=positions, segment_ids=segment_ids))
        return self.logits(self.hidden_states(tokens, ctx))

    def context(self, batch: Rows, key: Array | None = None) -> Context:
        """The context of a microbatch [B, S]. key: random key of the run, None for a deterministic forward.

        Where the batch has `segment_ids`, tokens of different documents in a row do not attend to each other. Where it
        has no `positions`, they are in order.
        """
        row_keys = None
        if key is not None and self.cfg.has_dropout():
            row_keys = keys_of_rows(key, batch[SAMPLE])
        index, segments = self.layout.row_index(batch["tokens"].shape[1]), batch.get("segment_ids")
        padding = segments == 0 if segments is not None and self.cfg.pads_rows() else batch.get("padding")
        positions = batch["positions"] if "positions" in batch else jnp.broadcast_to(index[None], batch["tokens"].shape)
        return Context(positions, index, segments, row_keys, experts=batch.get("experts"), padding=padding)

    def hidden_states(self, tokens: Array, ctx: Context) -> Array:
        """tokens int32 [B, S] -> normalised output of the stack [B, S, D]."""
        return self.final_norm(self.stack(self.enter(self.embed_tokens(tokens), ctx), ctx))

    def states(self, batch: Rows) -> Array:
        """A microbatch -> normalised output of the last section [B, S, D], without random numbers."""
        return self.final_norm(last_output(self.sections, batch)[0])

    def step(self, tokens: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """The tokens of a decoding step, int32 [T, 1] -> output of the stack [T, 1, D], and the cache.

        ctx: positions int32 [T, 1], and `rows`; cache: leaves by block, as `Stack.step` has them.
        """
        return self.stack.step(self.enter(self.embed_tokens(tokens), ctx), cache, ctx)

    def embed(self, batch: Rows) -> Array:
        """Token embeddings [B, S, D]: the part of the input layers that is sharded over pipeline stages."""
        return self.embed_tokens(batch["tokens"])

    def embed_tokens(self, tokens: Array) -> Array:
        """tokens int32 [B, S] -> embeddings [B, S, D]."""
        return embed(self.layout, self.tokens[...], tokens)

    def enter(self, x: Array, ctx: Context) -> Array:
        """Positions and dropout, [B, S, D] -> [B, S, D] laid out (batch, seq_residual, embed)."""
        x = x.astype(jnp.float32) if self.cfg.residual == "float32" else x
        if self.cfg.learned_positions:
            x = x + self.layout.act(
                self.positions[...][ctx.positions + self.cfg.first_position], "batch", "seq_residual", "embed"
            )
        x = self.embedded(scaled(x, 1.0 if self.cfg.width_scaling is None else self.cfg.width_scaling.embedding))
        return dropout(x, self.cfg.dropout, ctx, EMBEDDING_PLACE, self.layout)

    def embedded(self, x: Array) -> Array:
        """The sum of all embeddings [B, S, D] after `embedding_norm`, before dropout."""
        norm = self.cfg.embedding_norm
        return x if norm is None else self.layout.act(self.embedding_norm(x), "batch", "seq_residual", "embed")

    def final_norm(self, x: Array) -> Array:
        """Output of the stack [B, S, D] -> normalised, laid out (batch, seq_residual, embed)."""
        return self.layout.act(self.norm(x), "batch", "seq_residual", "embed")

    def mtp_states(self, x: Array, tokens: Array, ctx: Context) -> list[Array]:
        """States that predict the second next token, the third next, and so on, each [B, S, D] like `final_norm`'s.

        x [B, S, D]: from `final_norm`; tokens int32 [B, S]. A head reads the embedding of the token before the one it
        predicts, at that token's position; zeros beyond the end of a row or of an isolated document.
        """
        states, positions = [], ctx.positions
        for depth, head in enumerate(self.predictions, start=1):
            tokens, positions = (shifted(self.layout, array, ctx.segments) for array in (tokens, positions))
            head_ctx = ctx._replace(positions=positions).for_layer(EMBEDDING_PLACE - depth)
            embedded = self.enter(embedded_beside_loss(self.layout, self.embed_tokens(tokens)), head_ctx)
            run = checkpointed(head, self.cfg.recomputing().policy())
            x = self.layout.act(run(x, embedded, ctx), "batch", "seq_residual", "embed")
            states.append(x)
        return states

    def predict(self, head: int, x: Array, tokens: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """A head, by number, in a decoding step: states [T, 1, D] and the tokens int32 [T, 1] that they predict -> the
        states that predict the following tokens, and the cache.

        x: of the previous head, for the first one from `final_norm`. cache: leaves of a block with a layer for each
        head, "0.mixer.key"; ctx: positions int32 [T, 1] of the tokens from which the states are, and `rows`.
        """
        embedded = self.enter(self.embed_tokens(tokens), ctx._replace(positions=ctx.positions + head + 1))
        x, leaves = self.predictions[head].step(x, embedded, below(cache, "0"), in_layer(ctx, head))
        return self.layout.act(x, "batch", "seq_residual", "embed"), {
            f"0.{name}": leaf for name, leaf in leaves.items()
        }

    def table(self) -> Array:
        """The head's table [V, D]."""
        return self.tokens[...] if self.cfg.tied else self.head[...]

    def logit_bias(self) -> Array | None:
        """A bias of the head [V]; None without."""
        return self.head_bias[...] if self.cfg.head_bias else None

    def loss(self, x: Array, batch: Rows, ctx: Context, reduction: LossReduction) -> Loss:
        """Next-token loss of the tokens in `loss_mask`, from the output of the stack [B, S, D].

        Cross-entropy, with label smoothing and z-loss if configured; the metric `loss` is the cross-entropy without
        them. Each head of multi-token prediction adds a loss.
        """
        mask, scale = batch["loss_mask"], reduction.scale
        count = jnp.sum(mask)
        share, weight = reduction.share(count)
        x = self.final_norm(x)
        sums = self.token_loss(x, batch, mask * (share * scale))
        total = sums.minimised / scale
        metrics = {name: (value / scale / share, count) for name, value in sums.losses.items()}
        states = self.mtp_states(x, batch["tokens"], ctx)
        prediction = self.cfg.prediction
        targets = () if prediction is None else mtp_targets(prediction, self.layout, batch, ctx.segments, reduction)
        for depth, (state, target) in enumerate(zip(states, targets, strict=False), start=2):
            sums = self.vocabulary_loss(state, target.labels, target.weights * (target.share * scale))
            total = total + sums.minimised / scale * target.coefficient
            metrics[f"loss_{depth}_ahead"] = (sums.losses["loss"] / scale / target.share, target.counted)
        return Loss(total, weight, metrics)

    def token_loss(self, x: Array, batch: Rows, weights: Array) -> VocabularyLoss:
        """The loss of next tokens, see `vocabulary_loss`."""
        return self.vocabulary_loss(x, batch["labels"], weights)

    def vocabulary_loss(
        self,
        x: Array,
        labels: Array,
        weights: Array,
        weigh: Callable[[Array, Array], Array] | None = None,
        entropy_weight: float = 0.0,
        temperature: float = 1.0,
    ) -> VocabularyLoss:
        """Weighted sums of token losses over the local rows: the minimised loss and the reported ones.

        x [B, S, D]: from `final_norm`; weigh, entropy_weight, temperature: see `kernels.cross_entropy.Objective`. Apply
        the loss scale to the weights, see `layers.embedding.vocabulary_loss`.
        """
        cfg, x = self.cfg, scaled(x, self.cfg.logit_factor())
        objective = Objective(cfg.label_smoothing, cfg.z_loss, cfg.logit_cap, weigh, entropy_weight, temperature)
        return vocabulary_loss(
            self.layout,
            cfg.vocabulary_size,
            cfg.loss_chunk,
            objective,
            x,
            self.table(),
            labels,
            weights,
            self.logit_bias(),
        )

    def token_scores(self, x: Array, labels: Array, temperature: float = 1.0) -> tuple[Array, Array]:
        """Log-probability of each label and the likeliest token, float32 and int32 [B, S]; x [B, S, D] as above.

        temperature: divisor of the logits.
        """
        cfg, x = self.cfg, scaled(x, self.cfg.logit_factor())
        head = self.table(), labels, self.logit_bias(), cfg.logit_cap, temperature
        return vocabulary_token_scores(self.layout, cfg.vocabulary_size, cfg.loss_chunk, x, *head)

    def scores(self, x: Array, labels: Array, temperature: float = 1.0) -> tuple[Array, Array]:
        """`token_scores` from the output of the stack [B, S, D]; see `megajax.models.protocol.ScoringModel`."""
        return self.token_scores(self.final_norm(x), labels, temperature)

    def next_logits(self, x: Array) -> Array:
        """Output of the stack [T, 1, D] -> logits of the next token, float32 [T, 1, V] with columns for padding."""
        return self.padded_logits(self.final_norm(x))

    def logits(self, x: Array) -> Array:
        """Hidden states [B, S, D] -> float32 [B, S, vocabulary_size]."""
        return self.padded_logits(x)[..., : self.cfg.vocabulary_size]

    def padded_logits(self, x: Array) -> Array:
        """Hidden states [B, S, D] -> float32 [B, S, V], laid out (batch, seq, vocab), with columns for padding."""
        x = scaled(self.layout.act(x, "batch", "seq", "embed"), self.cfg.logit_factor())
        scores = jnp.einsum("bsd,vd->bsv", x, self.table(), preferred_element_type=jnp.float32)
        bias = self.logit_bias()
        scores = scores if bias is None else scores + bias.astype(jnp.float32)[None, None]
        return self.layout.act(soft_capped(scores, self.cfg.logit_cap), "batch", "seq", "vocab")


def layer_settings(cfg: DecoderConfig, layout: Layout) -> LayerSettings:
    """Settings that the layers of the model share."""
    std, scaling = cfg.init_std / cfg.width_ratio() ** 0.5, cfg.width_scaling
    output_std = std / cfg.stack.sub_layers() ** 0.5
    settings = LayerSettings(
        layout=layout,
        hidden=cfg.hidden,
        std=std,
        output_std=output_std,
        length=cfg.sequence_length,
        padded=cfg.pads_rows(),
        replays_experts=cfg.replays_experts(),
    )
    return settings if scaling is None else replace(settings, score_scale=scaling.score_scale)


def scaled(x: Array, factor: float) -> Array:
    """x * factor in x's dtype."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


def batch_of(**leaves: Array | None) -> dict[str, Array]:
    """A microbatch of the leaves that are not None."""
    return {name: leaf for name, leaf in leaves.items() if leaf is not None}
