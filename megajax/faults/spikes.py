"""Detection of loss spikes: losses above a multiple of earlier ones."""

import statistics
from collections import deque
from collections.abc import Mapping
from math import inf, isfinite
from typing import Any, Literal

LAG = 2
"""Steps between a loss and the first step that is compared with it, because results are fetched one step late. It is
the same for all steps, so that pauses for saving and resumes do not change results."""


class SpikeRule:
    """The spike threshold, from the losses of earlier steps.

    Args:
        factor: multiple of the reference above which a loss is a spike; None: no spikes.
        reference: "largest": the largest loss so far (Megatron-LM's rule, with factor 10); "median": the median of the
            last `window` losses.
        window: number of losses before spikes are detected.
    """

    def __init__(self, factor: float | None, reference: Literal["largest", "median"], window: int):
        self._factor, self._reference, self._window = factor, reference, window
        self._count, self._largest = 0, 0.0
        self._recent: deque[float] = deque(maxlen=window)
        self._waiting: deque[tuple[int, float]] = deque()

    def note(self, step: int, loss: float) -> None:
        """Records the loss of a step whose update was applied."""
        if self._factor is not None and isfinite(loss):
            self._waiting.append((step, loss))

    def limit(self, step: int) -> float:
        """The largest loss of `step` that is not a spike; infinite until there are `window` losses."""
        while self._waiting and self._waiting[0][0] <= step - LAG:
            _, loss = self._waiting.popleft()
            self._count += 1
            self._largest = max(self._largest, loss)
            self._recent.append(loss)
        if self._factor is None or self._count < self._window:
            return inf
        return self._factor * (self._largest if self._reference == "largest" else statistics.median(self._recent))

    def state(self) -> dict[str, Any]:
        """The state to save in a checkpoint, as plain values; {} without a factor."""
        if self._factor is None:
            return {}
        recent = list(self._recent) if self._reference == "median" else []
        return {"count": self._count, "largest": self._largest, "recent": recent, "waiting": list(self._waiting)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint; an empty one starts from scratch."""
        if self._factor is None or not state:
            return
        self._count, self._largest = int(state["count"]), float(state["largest"])
        self._recent.extend(state["recent"])
        if self._reference == "median" and len(self._recent) < self._window:
            self._count = len(self._recent)  # the saved run had another reference or a shorter window
        self._waiting.extend((int(step), float(loss)) for step, loss in state["waiting"])
