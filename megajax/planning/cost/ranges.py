"""How far published speeds are from predictions: the range that is printed beside each predicted speed.

The quantiles are those of runs that no constant was fitted to, each group of runs (software, network, precision) with
the same weight. `python -m benchmarks planner_accuracy` computes them, and a test compares.
"""

from typing import NamedTuple

from megajax.planning.cost.description import Description


class ErrorRange(NamedTuple):
    """Errors of predicted speeds, predicted / published - 1."""

    low: float
    high: float
    groups: int
    """Groups of runs behind it."""
    assumed: str = ""
    """What else widens it, to follow these groups."""

    def speeds(self, predicted: float) -> tuple[float, float]:
        """The lowest and the highest speed at these errors."""
        return predicted / (1 + self.high), predicted / (1 + self.low)

    def text(self, predicted: float) -> str:
        """These speeds, and what they stand for."""
        low, high = self.speeds(predicted)
        return f"{low:,.0f} to {high:,.0f} by the errors of {self.groups} groups of published runs{self.assumed}"

    def with_codes(self, slower: float, faster: float) -> "ErrorRange":
        """The range where kernels of codes may make a step take these many times as long."""
        low, high = CODES_SHARES
        assumed = f", and by {low:.0%} to {high:.0%} of the peak in the kernel of codes, which no run has timed"
        return ErrorRange((1 + self.low) * faster - 1, (1 + self.high) * slower - 1, self.groups, assumed)


CODES_SHARES = 0.25, 0.65
"""Shares of the peak that kernels of codes may reach: two thirds of what is assumed, and about cuBLASLt's."""
QUANTILES = (0.1, 0.9)
"""Of the errors; of fewer than FEW groups, the lowest and the highest error."""
FEW = 5

RANGES = {
    "dense": ErrorRange(-0.08, 0.25, 10),
    "mixture": ErrorRange(-0.31, 0.18, 2),
    "state space": ErrorRange(-0.08, 0.25, 10),
}
"""Kind of model -> errors. State spaces, with fewer than FEW groups of a single program, have those of dense models."""


def kind_of(run: Description) -> str:
    """`state space` with a mixer that is no attention; otherwise `mixture` with experts, or `dense`."""
    blocks = [(tower.section.length, block) for tower in run.towers for block in tower.blocks]
    if any(mixer.work.scores < mixer.heads * length for length, block in blocks for mixer in block.mixers):
        return "state space"
    return "mixture" if any(block.experts for _, block in blocks) else "dense"


def range_of(run: Description) -> ErrorRange:
    """Errors of runs of this kind."""
    return RANGES[kind_of(run)]
