"""A decoder trained by a loss of whole answers. B rows, S positions, D hidden."""

import jax
from jax import Array, lax

from megajax.batch import Loss, Rows
from megajax.layers.context import Context
from megajax.mesh.layout import Layout
from megajax.models.answers.config import AnswerDecoderConfig
from megajax.models.answers.objectives import Objective, Terms
from megajax.models.decoder.module import DecoderLM
from megajax.models.reduction import LossReduction


class AnswerDecoder(DecoderLM):
    """A decoder whose loss is a function of the log-probabilities of labels."""

    def __init__(self, cfg: AnswerDecoderConfig, layout: Layout):
        super().__init__(cfg, layout)
        self.objective: Objective = cfg.objective.build()

    def loss(self, x: Array, batch: Rows, ctx: Context, reduction: LossReduction) -> Loss:
        """The objective's loss, from the output of the stack [B, S, D].

        A loss of sums over answers needs all log-probabilities before the gradient of any, so the head runs twice:
        without a gradient for the log-probabilities, and then as a cross-entropy whose token weights are
        -dloss/dlog p, with the gradients of that one.
        """
        del ctx
        x, labels, scale = self.final_norm(x), batch["labels"], reduction.scale
        log_p, _ = self.token_scores(x, labels)

        def objective(log_p: Array) -> tuple[Array, Terms]:
            terms = self.objective(log_p, batch)
            return terms.loss, terms

        gradient, terms = jax.grad(objective, has_aux=True)(log_p)
        share, weight = reduction.share(terms.weight)
        linear = self.vocabulary_loss(x, labels, -gradient * (share * scale)).minimised / scale
        return Loss(terms.loss * share + (linear - lax.stop_gradient(linear)), weight, terms.metrics)
