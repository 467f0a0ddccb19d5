"""The cost of a run's rows, by which they are balanced over data groups."""

from collections import defaultdict

from megajax.data.rows.balancing import RowWork
from megajax.models.summary import ModelSummary


def row_work(model: ModelSummary) -> RowWork:
    """FLOPs of a training step per position and per attention score of a row, from `count_flops`.

    In a layer with a window, only scores within it count. Of a model without facts, only scores count: all rows have
    the same number of positions, so the order of their work is the same unless windows differ.
    """
    facts, flops = model.facts, model.flops
    if facts is None or flops is None:
        return RowWork()
    pairs = defaultdict[int | None, float](float)
    for section in facts.section_facts():
        blocks = [*section.stack.repeated_blocks(), *((block, 1) for block in facts.head_facts().ahead)]
        for block, times in blocks:
            window: int | None = getattr(getattr(block, "mixer", None), "window", None)
            pairs[window] += times * block.multiply_adds(section.hidden, 0.0).per_pair
    # The two conventions differ by half of a row's square of scores.
    flops_per_multiply_add = 2 * (flops.full - flops.causal) / facts.row_positions() / (sum(pairs.values()) or 1)
    per_score = tuple((window, flops_per_multiply_add * count) for window, count in pairs.items() if count)
    return RowWork(2 * flops.causal - flops.full, per_score)
