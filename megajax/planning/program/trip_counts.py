"""How often parts of a compiled program run in a step where its text does not say: trip counts and conditionals."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What is known of a train step beside its text."""

    microbatches: int
    chunks: int | None = None
    """Chunks of layers on a pipeline stage; None without a pipeline."""

    def rounds(self, trips: Sequence[int | None]) -> int:
        """Runs per step of what is in loops with these trip counts, outermost first; None: the compiler does not know.

        The compiler loses the trip count of the loop over microbatches when it peels the first iteration off to start
        the next one's collectives early, so all but one remain. Other loops count once: those of a pipeline's ticks
        keep their counts, and those within that take a turn or none say how often (`Instruction.share`).
        """
        outermost = 1 if self.chunks is not None else max(1, self.microbatches - 1)
        guesses = [outermost] + [1] * len(trips)
        return prod(guess if known is None else known for known, guess in zip(trips, guesses, strict=False))

    def busy_share(self, trips: Sequence[int | None]) -> float:
        """Share of a pipeline's ticks in which a conditional that does not say does its work: once a microbatch.

        trips: of the loops around it. A loop with fewer ticks than microbatches is the start or end of the schedule,
        where one tick in `chunks` has such work. 1 without a pipeline, and where the loop is not known.
        """
        if self.chunks is None or not trips or trips[0] is None:
            return 1.0
        ticks = trips[0]
        return self.microbatches / ticks if ticks >= self.microbatches else 1 / self.chunks
