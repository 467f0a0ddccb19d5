"""Decoders that learn from another one. B rows, S positions, D hidden of the student, E hidden of the teacher."""

from jax import Array, lax

from megajax.batch import Rows
from megajax.kernels.distillation import Distillation, TeacherTargets
from megajax.layers.embedding import VocabularyLoss, vocabulary_loss
from megajax.mesh.layout import Layout
from megajax.models.decoder.module import DecoderLM, scaled
from megajax.models.distilled.config import DistilledDecoderConfig


class DistilledDecoder(DecoderLM):
    """A decoder with a frozen teacher, whose layers run within the loss and save nothing for a backward pass."""

    cfg: DistilledDecoderConfig

    def __init__(self, cfg: DistilledDecoderConfig, layout: Layout):
        super().__init__(cfg, layout)
        self.teacher: DecoderLM = cfg.teacher.build(layout)

    def token_loss(self, x: Array, batch: Rows, weights: Array) -> VocabularyLoss:
        """The divergence from the teacher and the cross-entropy, see `DecoderLM.token_loss`."""
        cfg, loss = self.cfg, self.cfg.distillation
        objective = Distillation(
            loss.mixture, loss.temperature, loss.weight, loss.label_weight, cfg.logit_cap, cfg.teacher.logit_cap
        )
        table, states = lax.stop_gradient((self.teacher.table(), self.teacher_states(batch)))
        targets = TeacherTargets(batch["labels"], states, table)
        head = scaled(x, cfg.logit_factor()), self.table(), targets, weights
        return vocabulary_loss(self.layout, cfg.vocabulary_size, cfg.loss_chunk, objective, *head)

    def teacher_states(self, batch: Rows) -> Array:
        """What the teacher's head reads, [B, S, E]."""
        return scaled(self.teacher.states(batch), self.cfg.teacher.logit_factor())
