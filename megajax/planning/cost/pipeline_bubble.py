"""What a pipeline's schedule costs, in closed form: no table is made, so any number of microbatches is quick.

Narayanan et al. (2104.04473), for stages that go in lockstep; megajax.pipeline.check holds tables to the same formulas.
"""

from dataclasses import dataclass

from megajax.planning.cost.description import Description


@dataclass(frozen=True, slots=True)
class Bubble:
    """Of one step; P stages, V chunks on each, M microbatches."""

    fraction: float
    """Time stages wait over the time they work: (P-1)/(V*M)."""
    ticks: int
    """Of the schedule."""
    alone: int
    """Ticks of forwards alone, and as many of backwards alone."""
    slots: int
    """Of the ring that keeps activations on each stage, each for one chunk and microbatch."""


def bubble(run: Description) -> Bubble:
    """Of a run's schedule; a run without a pipeline has one stage, no bubble, and keeps one microbatch."""
    parallel = run.parallel
    stages, chunks = parallel.pipeline, parallel.virtual_stages
    work = run.microbatches * chunks
    if stages == 1:
        return Bubble(0.0, work, 0, 1)
    fraction = (stages - 1) / work
    if not run.system.lockstep:
        # The first stage of a free-running pipeline: Narayanan et al., section 2.2.
        kept = stages * chunks + stages - 1 if chunks > 1 else stages
        return Bubble(fraction, work + stages - 1, stages - 1, min(work, kept))
    last = work + stages - 1
    alone = last if parallel.schedule == "gpipe" else min(stages * chunks - 1 + parallel.loss_wait, last)
    held = work if parallel.schedule == "gpipe" else min(work, alone + stages)
    # Where forwards end before the first slot is free again, those of idle stages need one to write to.
    spare = work < alone + stages
    return Bubble(fraction, last + alone, alone, held + spare)
