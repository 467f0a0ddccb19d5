"""Pipeline schedules as integer tables: the microbatch of each stage in each tick, and the slot of its activations.

P stages, V chunks per stage (virtual stages), M microbatches, T ticks; s stage, c chunk, i microbatch.
The layers of a model are divided into P·V chunks; stage s has chunks s, P+s, 2P+s, ..., numbered c = 0, 1, 2, ...

All stages run each tick together. In a tick, a stage runs at most one forward, then at most one backward. It sends the
results to its neighbours, which must use them in the next tick. A tick takes the time of all kinds of work in its
phase, even if a stage is idle. So forwards come first, then ticks with both kinds, then backwards, and the bubble is
the usual one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from megajax.config.errors import ConfigError, Problem
from megajax.config.hints import did_you_mean, either


class StageWork(NamedTuple):
    """One kind of work, three int32 [T, P] arrays.

    An idle entry has microbatch -1, chunk 0 and a slot that is not in use. An executor may therefore run it like any
    other entry, if it does not accumulate the result.
    """

    microbatch: np.ndarray
    """Microbatch; -1 if the stage is idle."""
    chunk: np.ndarray
    """Chunk of the stage."""
    slot: np.ndarray
    """Slot in the stage's ring of saved activations: a forward writes it, a backward reads it."""


class Phase(NamedTuple):
    """Ticks [start, stop) with the same kinds of work: one loop of the executor."""

    start: int
    stop: int
    forward: bool
    backward: bool

    @property
    def ticks(self) -> int:
        return self.stop - self.start

    @property
    def label(self) -> str:
        """F, F+B or B."""
        return "+".join(filter(None, ("F" * self.forward, "B" * self.backward))) or "idle"


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """The schedule of one step; `megajax.pipeline.check` defines which tables are valid."""

    name: str
    stages: int
    chunks: int
    """Chunks per stage, V."""
    microbatches: int
    slots: int
    """Slots of a stage's ring: the maximum number of live chunk activations over all stages."""
    spare_slot: bool
    """Whether idle forwards need one more slot, number `slots`, because all others are in use."""
    loss_wait: int
    """Ticks added between a microbatch's last forward and its loss: see `one_f_one_b`."""
    output_slots: int
    """Maximum number of outputs of the last chunk that wait for their loss; 0 if each loss follows its forward."""
    phases: tuple[Phase, ...]
    """All ticks, in order."""
    forward: StageWork
    backward: StageWork
    embed: np.ndarray
    """Int32 [T]: microbatch to embed for stage 0, before the tick's forward; -1 for none."""
    head: np.ndarray
    """Int32 [T]: microbatch whose loss and output gradient are computed, before the tick's backward; -1 for none."""
    embed_gradient: np.ndarray
    """Int32 [T]: microbatch whose gradient leaves stage 0 for the embedding, after the backward; -1 for none."""
    output_written: np.ndarray
    """Int32 [T]: output slot that stores the output of the last stage's forward; -1 for none."""
    output_read: np.ndarray
    """Int32 [T]: output slot that `head` reads; -1 if it reads the output of the same tick."""

    @property
    def ticks(self) -> int:
        return len(self.embed)

    @property
    def ring_slots(self) -> int:
        """Slots to allocate."""
        return self.slots + self.spare_slot


def gpipe(stages: int, microbatches: int, chunks: int = 1, *, loss_wait: int = 0) -> Schedule:
    """All forwards, then all backwards: keeps the activations of all microbatches (Huang et al., 1811.06965).

    With several chunks per stage it is the circular pipeline of MaxText and praxis. The outputs of all microbatches
    wait for their loss; loss_wait has no effect.
    """
    del loss_wait
    return _in_turn("gpipe", stages, microbatches, chunks, first_backward=microbatches * chunks + stages - 1)


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1, *, loss_wait: int = 0) -> Schedule:
    """Each backward as early as possible (Narayanan et al., 2104.04473); with several chunks per stage, interleaved.

    With one chunk, it keeps activations of 2(P-s)-1 microbatches. Asynchronous stages would keep P-s; running ticks
    together costs the rest. Several chunks make 1/V of the bubble and V times the traffic: groups of P microbatches
    pass through the first chunk, then through the next, and a microbatch that leaves the last stage enters the first
    one in the next tick.

    loss_wait: ticks between a microbatch's last forward and its loss. With 1, sending the output to all stages overlaps
    with a backward, and sending back the gradient of the loss overlaps with a forward; with 0 all stages wait for both.
    It costs one more activation in flight, and no time: one tick of both kinds becomes one of each.
    """
    name = "1f1b" if chunks == 1 else "interleaved"
    return _in_turn(name, stages, microbatches, chunks, first_backward=stages * chunks - 1, loss_wait=loss_wait)


SCHEDULES: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": one_f_one_b}
)
"""Name in configs -> function of (stages, microbatches, chunks, loss_wait=)."""


def build(name: str, *, stages: int, microbatches: int, chunks: int = 1, loss_wait: int = 0) -> Schedule:
    """The schedule with this name. Raises ConfigError for the problems of `problems`."""
    if faults := problems(name, stages=stages, microbatches=microbatches, chunks=chunks):
        raise ConfigError(faults, "the pipeline schedule")
    return SCHEDULES[name](stages, microbatches, chunks, loss_wait=loss_wait)


def problems(name: str, *, stages: int, microbatches: int, chunks: int) -> list[Problem]:
    """Problems of these sizes: an unknown name, a number below 1, microbatches not in groups of the stages."""
    problems = []
    if name not in SCHEDULES:
        hint = did_you_mean(name, SCHEDULES) or f"there are {', '.join(SCHEDULES)}"
        problems.append(Problem("schedule", f"there is no schedule {name!r}", hint))
    numbers = {"stages": stages, "microbatches": microbatches, "virtual_stages": chunks}
    problems += [
        Problem(setting, f"must be at least 1, got {number}", "give 1 or more")
        for setting, number in numbers.items()
        if number < 1
    ]
    if min(numbers.values()) >= 1 and chunks > 1 and microbatches % stages:
        below = microbatches - microbatches % stages
        nearest = either(str(number) for number in (below, below + stages) if number)
        groups = f"with virtual_stages={chunks}, microbatches go in groups of {stages}, the stages"
        message = f"{groups}, and {microbatches} is not a multiple of {stages}"
        problems.append(Problem("microbatches", message, f"set microbatches to {nearest}, or virtual_stages to 1"))
    return problems


def _in_turn(
    name: str, stages: int, microbatches: int, chunks: int, *, first_backward: int, loss_wait: int = 0
) -> Schedule:
    """Consecutive forwards on each stage from tick s on, and backwards from tick `first_backward` + P-1-s on.

    Both in groups of P microbatches, chunk by chunk; backwards from the last chunk to the first.
    """
    i, c, s = np.indices((microbatches, chunks, stages))
    group, member = np.divmod(i, stages)
    start = group * stages * chunks + member
    forward = start + c * stages + s
    backward = first_backward + loss_wait + start + (chunks - 1 - c) * stages + (stages - 1 - s)
    return assemble(name, forward=forward, backward=backward, loss_wait=loss_wait)


def assemble(name: str, *, forward: np.ndarray, backward: np.ndarray, loss_wait: int = 0) -> Schedule:
    """A schedule from the ticks of each kind of work, int [M, V, P] each; assigns slots, and does not check the result.

    Each forward gets the lowest free slot, so a ring is no larger than necessary. A forward writes its slot before the
    tick's backward frees its own. Raises ValueError if a stage has two pieces of work of one kind in one tick, or a
    backward before its forward.
    """
    microbatches, chunks, stages = forward.shape
    kinds = {"forward": forward, "backward": backward}
    by_stage = {kind: when.reshape(microbatches * chunks, stages) for kind, when in kinds.items()}
    for kind, when in by_stage.items():
        if (np.diff(np.sort(when, axis=0), axis=0) == 0).any():
            raise ValueError(f"schedule {name}: a stage has two pieces of work of kind {kind} in one tick")
    first, last = by_stage["forward"], by_stage["backward"]
    if (last < first).any():
        raise ValueError(f"schedule {name}: backward comes before forward")
    ticks = 1 + max(int(when.max()) for when in kinds.values())
    slots = max(int(_alive(first[:, s], last[:, s], ticks).max()) for s in range(stages))
    assigned = [_assign(first[:, s], last[:, s], ticks) for s in range(stages)]
    slot = np.stack([slots_of_stage for slots_of_stage, _ in assigned], axis=1).reshape(forward.shape)
    tables = [_table(when, slot, ticks) for when in kinds.values()]
    phases = _phases(tables)
    free = np.stack([free for _, free in assigned], axis=1)
    spare_slot = _idle_slots(tables[0], free, phases, slots)
    output_first, output_last = forward[:, -1, -1], backward[:, -1, -1]
    output_written, output_read = np.full((2, ticks), -1, np.int32)
    if (output_first != output_last).any():
        output_slot, _ = _assign(output_first, output_last, ticks)
        output_written[output_first] = output_read[output_last] = output_slot
    schedule = Schedule(
        name=name,
        stages=stages,
        chunks=chunks,
        microbatches=microbatches,
        slots=slots,
        spare_slot=spare_slot,
        loss_wait=loss_wait,
        output_slots=int(output_written.max()) + 1,
        phases=phases,
        forward=tables[0],
        backward=tables[1],
        embed=entering(tables[0], 0, 0),
        head=entering(tables[1], stages - 1, chunks - 1),
        embed_gradient=entering(tables[1], 0, 0),
        output_written=output_written,
        output_read=output_read,
    )
    lines = (schedule.embed, schedule.head, schedule.embed_gradient, output_written, output_read)
    for array in (*schedule.forward, *schedule.backward, *lines):
        array.setflags(write=False)
    return schedule


def entering(work: StageWork, stage: int, chunk: int) -> np.ndarray:
    """Microbatch of a chunk of a stage in each tick, int32 [T]; -1 for none."""
    return np.where(work.chunk[:, stage] == chunk, work.microbatch[:, stage], np.int32(-1))


def _alive(first: np.ndarray, last: np.ndarray, ticks: int) -> np.ndarray:
    """Number of items in use in each tick, int [T], from their ticks of first and last use, int [N]."""
    change = np.bincount(first, minlength=ticks + 1) - np.bincount(last + 1, minlength=ticks + 1)
    return np.cumsum(change)[:ticks]


def _assign(first: np.ndarray, last: np.ndarray, ticks: int) -> tuple[np.ndarray, np.ndarray]:
    """Slot of each item, int32 [N], and a free slot in each tick in which no item begins, int32 [T]; -1 for none.

    No two items begin, and no two end, in the same tick.
    """
    free = list(range(int(_alive(first, last, ticks).max())))
    slots, idle = np.zeros(len(first), np.int32), np.full(ticks, -1, np.int32)
    starting, ending = (dict(zip(at.tolist(), range(len(at)), strict=True)) for at in (first, last))
    for tick in range(ticks):
        if tick in starting:
            slots[starting[tick]] = heappop(free)
        elif free:
            idle[tick] = free[0]
        if tick in ending:
            heappush(free, int(slots[ending[tick]]))
    return slots, idle


def _table(when: np.ndarray, slot: np.ndarray, ticks: int) -> StageWork:
    i, c, s = np.indices(when.shape)
    shape = (ticks, when.shape[2])
    work = StageWork(np.full(shape, -1, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32))
    for array, values in zip(work, (i, c, slot), strict=True):
        array[when, s] = values
    return work


def _phases(tables: list[StageWork]) -> tuple[Phase, ...]:
    kinds = np.stack([(work.microbatch >= 0).any(axis=1) for work in tables], axis=1)
    borders = [0, *(np.flatnonzero((kinds[1:] != kinds[:-1]).any(axis=1)) + 1).tolist(), len(kinds)]
    return tuple(Phase(start, stop, *kinds[start].tolist()) for start, stop in pairwise(borders))


def _idle_slots(forward: StageWork, free: np.ndarray, phases: tuple[Phase, ...], slots: int) -> bool:
    """Assigns unused slots to idle forwards, in phases with forwards; returns whether one needs the spare slot."""
    runs = np.zeros(len(free), bool)
    for phase in phases:
        runs[phase.start : phase.stop] = phase.forward
    idle = runs[:, None] & (forward.microbatch < 0)
    # If all slots that a stage uses are taken, the next one is free: another stage needs it, or it is the spare one.
    used = forward.slot.max(axis=0) + 1
    forward.slot[idle] = np.where(free < 0, np.minimum(used, slots), free)[idle]
    return bool((forward.slot == slots).any())
