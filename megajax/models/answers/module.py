"""A decoder trained by a loss of whole answers. B rows, S positions, D hidden."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.batch import Loss, Rows
from megajax.layers.context import Context
from megajax.mesh.layout import Layout
from megajax.models.answers.config import AnswerDecoderConfig
from megajax.models.answers.objectives import AnswerObjective, LossTerms, TokenObjective
from megajax.models.decoder.module import DecoderLM
from megajax.models.reduction import LossReduction


class AnswerDecoder(DecoderLM):
    """A decoder whose loss is a function of the log-probabilities of labels."""

    def __init__(self, cfg: AnswerDecoderConfig, layout: Layout):
        super().__init__(cfg, layout)
        self.objective: AnswerObjective = cfg.objective.build()
        self.temperature: float = getattr(cfg.objective, "temperature", 1.0)

    def loss(self, x: Array, batch: Rows, ctx: Context, reduction: LossReduction) -> Loss:
        """The objective's loss, from the output of the stack [B, S, D].

        Its gradient is that of a cross-entropy whose token weights are -dloss/dlog p. A loss of sums over answers needs
        all log-probabilities before the gradient of any, so the head runs twice: without a gradient for the
        log-probabilities, and then with these weights. A `TokenObjective` gives the weights within one run.
        """
        del ctx
        x, labels, scale = self.final_norm(x), batch["labels"], reduction.scale
        if isinstance(self.objective, TokenObjective):
            return self._token_loss(self.objective, x, batch, reduction)
        log_p, _ = self.token_scores(x, labels, self.temperature)

        def objective(log_p: Array) -> tuple[Array, LossTerms]:
            terms = self.objective(log_p, batch)
            return terms.loss, terms

        gradient, terms = jax.grad(objective, has_aux=True)(log_p)
        share, weight = reduction.share(terms.weight)
        weights = -gradient * (share * scale)
        linear = self.vocabulary_loss(x, labels, weights, temperature=self.temperature).minimised / scale
        return Loss(terms.loss * share + (linear - lax.stop_gradient(linear)), weight, terms.metrics)

    def _token_loss(self, objective: TokenObjective, x: Array, batch: Rows, reduction: LossReduction) -> Loss:
        """`loss` of an objective whose gradient at a token depends on that token alone."""
        share, weight = reduction.share(objective.weight(batch))
        facts = objective.facts(batch)
        facts = facts.at[..., 0].multiply(share * reduction.scale)
        numbers = objective.entropy_weight, self.temperature
        sums = self.vocabulary_loss(x, batch["labels"], facts, objective.weigh, *numbers)
        linear = sums.minimised / reduction.scale
        assert sums.scores is not None  # because of `weigh`
        log_p, entropy = jnp.moveaxis(lax.stop_gradient(sums.scores), -1, 0)
        terms = objective(log_p, {**batch, "entropy": entropy})
        return Loss(terms.loss * share + (linear - lax.stop_gradient(linear)), weight, terms.metrics)
