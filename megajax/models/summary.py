"""What banners, logs and representations say of a model, computed once from its config."""

from dataclasses import dataclass
from typing import Literal

from megajax.layers.block.step_work import ALL
from megajax.models.facts import Facts, Flops, facts_of, flops_of
from megajax.models.protocol import ModelConfig, ids_below, position_unit


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """Figures of a model that follow from its config."""

    facts: Facts | None
    """None: the config, or one of its layers, has none."""
    flops: Flops | None
    """Operations of a training step per position; None: unknown."""
    vocabulary: int | None
    """Number of ids that the model reads; None: it reads no tokens."""
    unit: Literal["tokens", "positions", "rows"]
    """What `row_positions` counts."""
    trainable: tuple[str, ...]
    """Patterns of the names of trained weights, as optimizer.trainable."""

    @property
    def columns(self) -> int | None:
        """Scores per position of a model that reads tokens, padding included; None: no tokens, or no facts."""
        return None if self.facts is None or self.vocabulary is None else self.facts.head_facts().columns


def summarize(model: ModelConfig, trainable: tuple[str, ...] = ALL) -> ModelSummary:
    """The summary of a model config. trainable: as optimizer.trainable."""
    return ModelSummary(facts_of(model), flops_of(model, trainable), ids_below(model), position_unit(model), trainable)
