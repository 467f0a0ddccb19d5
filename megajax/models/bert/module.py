"""BERT (Devlin et al. 2019), original or as in Megatron-LM. B rows, S positions, D hidden, V padded vocabulary."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.batch import Loss, Rows
from megajax.layers.context import Context
from megajax.layers.mlp.module import ACTIVATIONS
from megajax.layers.param import ZEROS, LayerSettings, Normal, param
from megajax.mesh.layout import Layout
from megajax.models.bert.config import BertConfig
from megajax.models.decoder.module import DecoderLM, batch_of
from megajax.models.reduction import LossReduction, over_context

RESIDUAL = ("batch", "seq_residual", "embed")


class Bert(DecoderLM):
    """Takes masked tokens; gives the loss or logits of the original tokens."""

    def __init__(self, cfg: BertConfig, layout: Layout):
        super().__init__(cfg, layout)
        self.cfg: BertConfig = cfg
        if cfg.token_types:
            self.types = param((cfg.token_types, cfg.hidden), (None, "embed"), init=Normal(cfg.init_std))

    def add_head(self, settings: LayerSettings) -> None:
        super().add_head(settings)
        cfg = self.cfg
        self.masked = Dense(settings)
        self.masked_norm = cfg.masked_norm().build(settings)
        self.masked_bias = param((cfg.padded_vocabulary(),), ("vocab",), init=ZEROS, role="bias")
        if cfg.next_sentence:
            self.pooler = Dense(settings)
            self.order = param((cfg.hidden, 2), ("embed", None), init=Normal(cfg.init_std))
            self.order_bias = param((2,), (None,), init=ZEROS, role="bias")

    def __call__(
        self,
        tokens: Array,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        token_types: Array | None = None,
    ) -> Array:
        """tokens int32 [B, S] -> logits of the original tokens, float32 [B, S, vocabulary_size]; by plain jax.jit.

        positions, segment_ids (0 for padding), token_types: int32 [B, S]; by default in order, no padding, all 0.
        """
        types = jnp.zeros_like(tokens) if token_types is None else token_types
        batch = batch_of(tokens=tokens, positions=positions, segment_ids=segment_ids, token_types=types)
        return self.logits(self.masked_states(self.states(batch)))

    def embed(self, batch: Rows) -> Array:
        """Embeddings of tokens and of their types [B, S, D]."""
        x = self.embed_tokens(batch["tokens"])
        return x + self.layout.act(self.types[...][batch["token_types"]], *RESIDUAL) if self.cfg.token_types else x

    def masked_states(self, x: Array) -> Array:
        """Normalised output of the stack [B, S, D] -> states that are scored against the table [B, S, D]."""
        x = ACTIVATIONS[self.cfg.head_activation](self.masked(x))
        return self.layout.act(self.masked_norm(x), *RESIDUAL)

    def logit_bias(self) -> Array:
        """The bias of the head of masked tokens [V]."""
        return self.masked_bias[...]

    def order_logits(self, x: Array) -> Array:
        """Normalised output of the stack [B, S, D] -> float32 [B, 2]: the second part follows, or is random."""
        pooled = jnp.tanh(self.pooler(x[:, :1]))[:, 0]
        return (pooled @ self.order[...]).astype(jnp.float32) + self.order_bias[...][None]

    def loss(self, x: Array, batch: Rows, ctx: Context, reduction: LossReduction) -> Loss:
        """Cross-entropy of the masked tokens, plus that of the sentence order.

        The order of a row has the weight of its masked tokens (loss_average=tokens), or rows have equal weights within
        the microbatch (loss_average=microbatches, as in Megatron-LM). With context parallelism, the device with the
        first position of a row counts it.
        """
        mask, scale = batch["loss_mask"], reduction.scale
        count = jnp.sum(mask)
        share, weight = reduction.share(count)
        x = self.final_norm(x)
        sums = self.vocabulary_loss(self.masked_states(x), batch["labels"], mask * (share * scale))
        total = sums.minimised / scale
        metrics = {name: (value / scale / share, count) for name, value in sums.losses.items()}
        if self.cfg.next_sentence:
            log_p = jax.nn.log_softmax(self.order_logits(x))
            losses = -jnp.take_along_axis(log_p, batch["is_random"][:, None], axis=1)[:, 0]
            has_first = (ctx.index[0] == 0).astype(jnp.float32)
            total = total + jnp.sum(losses * reduction.row_weights(mask)) * has_first
            counted = (over_context(mask.sum(1)) > 0).astype(jnp.float32) * has_first
            metrics["next_sentence_loss"] = (jnp.sum(losses * counted), jnp.sum(counted))
        return Loss(total, weight, metrics)


class BertEncoder(Bert):
    """Takes texts; gives the states of their tokens."""

    def add_head(self, settings: LayerSettings) -> None:
        """No head."""

    def text_states(self, tokens: Array, segment_ids: Array) -> Array:
        """tokens int32 [B, S], segment_ids (0 for padding) -> normalised output of the stack [B, S, D]."""
        return self.states({"tokens": tokens, "segment_ids": segment_ids, "token_types": jnp.zeros_like(tokens)})


class Dense(nnx.Module):
    """x matrix + bias, [B, S, D] -> [B, S, D], replicated over `tensor`."""

    def __init__(self, settings: LayerSettings):
        hidden = settings.hidden
        self.matrix = param((hidden, hidden), ("embed", None), init=Normal(settings.std))
        self.bias = param((hidden,), (None,), init=ZEROS, role="bias")

    def __call__(self, x: Array) -> Array:
        return jnp.einsum("bsd,de->bse", x, self.matrix[...]) + self.bias[...][None, None]
