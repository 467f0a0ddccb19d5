"""The cost of a run's rows, by which they are balanced over data groups."""

from collections import defaultdict

from megajax.data.rows.balancing import RowWork
from megajax.layers.multiply_adds import VisibleKeys
from megajax.models.facts import row_counts, training_of
from megajax.models.summary import ModelSummary


def row_work(model: ModelSummary) -> RowWork:
    """FLOPs of a training step per position and per attention score of a row, as `count_flops` counts them.

    Of a model without facts, only scores count: all rows have the same number of positions, so the order of their work
    is the same unless windows differ.
    """
    facts = model.facts
    if facts is None:
        return RowWork()
    positions, scores = 0.0, defaultdict[VisibleKeys, float](float)
    for row in row_counts(facts, training_of(facts, model.trainable)):
        positions += 2 * row.sequences * row.length * row.count.once / facts.row_positions()
        for visible, number in row.count.pairs:
            scores[visible] += 2 * row.sequences * number
    return RowWork(positions, tuple(scores.items()))
