"""Scheduling of rows: the work of a replica's next step, and the blocks of the pool that rows own. Plain Python.

A row is an unfinished answer: its prompt and the tokens so far. A step computes a token of each decoding row, and a
chunk of one prompt. Rows are admitted in order of arrival. If no block is left, the youngest running row is preempted:
it releases its blocks, waits ahead of later arrivals, and is recomputed.
"""

from array import array
from bisect import insort
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megajax.inference.pool import Pool
from megajax.inference.request import Sampling


@dataclass(eq=False, kw_only=True)
class Row:
    """An unfinished answer, for scheduler and device."""

    order: tuple[int, int]
    """(arrival of the request, choice): the row with the smallest is never preempted for another."""
    tokens: list[int]
    """Prompt and answer. Grows only at its end; the last token has no keys yet."""
    limit: int
    """Maximum number of tokens, including the prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    """Seed of this answer. Sampling depends on it and on the number of tokens, not on the step."""
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end the answer; they may not be chosen before `sampling.min_tokens`."""
    memory: tuple[int, ...] = ()
    """Tokens for the encoder, which reads them when the row starts."""
    unscored: bool = False
    """Scores of the prompt are requested and incomplete: the whole prompt is computed, without sharing blocks."""
    top: int | None = None
    """Number of most likely tokens to report with each token; None for neither these nor ranks."""
    guide: Any = None
    """State of the constraint of the text."""
    paused: bool = False
    """Whether it waits for other rows of its request: it is neither computed nor admitted."""
    prompt: int = 0
    """Tokens of the prompt."""
    computed: int = 0
    """Number of tokens whose keys are in the row's blocks after the last scheduled step."""
    blocks: array[int] = field(default_factory=lambda: array("i"))
    slot: int = -1
    """Index into the cache leaves per row; -1 if the row does not run."""
    published: int = 0
    """Number of blocks that other rows may share."""
    digests: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks of `tokens`, computed when needed."""
    preempted: int = 0
    """Number of preemptions."""

    def __post_init__(self) -> None:
        self.prompt = self.prompt or len(self.tokens)

    @property
    def generated(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt

    @property
    def forbidden(self) -> frozenset[int]:
        """Tokens that may not be chosen next."""
        return self.end_tokens if self.generated < self.sampling.min_tokens else frozenset()


class Step(NamedTuple):
    """The work of a replica in a step."""

    decode: list[tuple[Row, int]]
    """Rows, and the position of the single token of each."""
    prompts: list[tuple[Row, int, int]]
    """At most one: a row, its first position, and the number of tokens."""

    def parts(self) -> list[tuple[Row, int]]:
        """Rows in the order of the device's results, and the number of computed tokens of each after the step."""
        return [(row, at + 1) for row, at in self.decode] + [(row, at + count) for row, at, count in self.prompts]


class Scheduler:
    """The rows of a replica."""

    def __init__(self, pool: Pool, *, rows: int, chunk: int, prefix_sharing: bool = True):
        """rows: maximum number of running rows; chunk: maximum number of prompt tokens in a step."""
        self.pool, self.rows, self.chunk, self.prefix_sharing = pool, rows, chunk, prefix_sharing
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        self._slots = list(range(rows))
        self.preemptions = self.prompt_tokens = self.shared_tokens = 0

    def fits(self, tokens: int) -> bool:
        """Whether all blocks together are enough for a row of this many tokens."""
        return self._blocks(tokens) <= self.pool.blocks

    def add(self, row: Row) -> None:
        """Queue a row. Raises ValueError if it could wait forever."""
        if not self.fits(row.limit):
            blocks = f"{self._blocks(row.limit)} blocks for {row.limit} tokens"
            raise ValueError(f"a row needs {blocks}, the pool has {self.pool.blocks}")
        insort(self.waiting, row, key=_order)

    def remove(self, row: Row) -> None:
        """Remove a finished or cancelled row; allowed at any time between two calls of `next`."""
        if row in self.running:
            self.running.remove(row)
            self._drop(row)
        elif row in self.waiting:
            self.waiting.remove(row)

    def fork(self, row: Row, order: tuple[int, int]) -> Row:
        """Queue a copy of a row; it will share the row's full blocks."""
        copy = Row(order=order, tokens=list(row.tokens), limit=row.limit, sampling=row.sampling, seed=row.seed)
        copy.end_tokens, copy.prompt, copy.top = row.end_tokens, row.prompt, row.top
        copy.digests, copy.memory = list(row.digests), row.memory
        self.add(copy)
        return copy

    def next(self) -> Step | None:
        """Schedule a step: reserve blocks and advance the rows. None if no row can run."""
        while True:
            self._admit()
            step = self._step()
            if step is not None or not self.running or all(row.paused for row in self.waiting):
                return step
            # All running rows are paused, and no other row fits.
            self._preempt()

    def _step(self) -> Step | None:
        step = Step([], [])
        # Rows are preempted only for older rows, so never after they are part of this step.
        for row in list(self.running):
            remaining = len(row.tokens) - row.computed
            single = remaining == 1 and row.computed > 0
            count = remaining if single else 0 if step.prompts else min(remaining, self.chunk)
            if row.paused or row.slot < 0 or count < 1 or not self._reserve(row, row.computed + count):
                continue
            if single:
                step.decode.append((row, row.computed))
            else:
                step.prompts.append((row, row.computed, count))
            self.prompt_tokens += max(0, min(row.computed + count, row.prompt) - row.computed)
            row.computed += count
            self._publish(row)
        return step if step.decode or step.prompts else None

    def _admit(self) -> None:
        """Admit rows, oldest first, one prompt at a time, while the next chunk fits beside the running rows."""
        while self._slots and not any(_in_prompt(row) for row in self.running):
            row = next((row for row in self.waiting if not row.paused), None)
            if row is None:
                return
            self._share(row)
            need = self._blocks(min(len(row.tokens), row.computed + self.chunk)) - len(row.blocks)
            # Keep a block for each running row, or the next steps would preempt the admitted row.
            if self.running and need + len(self.running) > self.pool.available:
                self._release(row)
                return
            self.shared_tokens += min(row.computed, row.prompt)
            row.slot = self._slots.pop()
            self.waiting.remove(row)
            insort(self.running, row, key=_order)

    def _share(self, row: Row) -> None:
        """Share existing blocks with a prefix of the row. At least one token remains to be computed."""
        if not self.prefix_sharing or row.unscored:
            return
        for number in range((len(row.tokens) - 1) // self.pool.size):
            block = self.pool.share(self._digest(row, number))
            if block is None:
                break
            row.blocks.append(block)
        row.published = len(row.blocks)
        row.computed = row.published * self.pool.size

    def _publish(self, row: Row) -> None:
        """Allow sharing of the row's full blocks."""
        if self.prefix_sharing:
            for number in range(row.published, row.computed // self.pool.size):
                self.pool.publish(row.blocks[number], self._digest(row, number))
                row.published = number + 1

    def _digest(self, row: Row, number: int) -> bytes:
        size = self.pool.size
        while len(row.digests) <= number:
            first = len(row.digests) * size
            before = row.digests[-1] if row.digests else b""
            row.digests.append(self.pool.digest(before, row.tokens[first : first + size]))
        return row.digests[number]

    def _reserve(self, row: Row, until: int) -> bool:
        """Allocate blocks for the tokens before `until` -> False if the row itself was preempted."""
        while len(row.blocks) < self._blocks(until):
            if self.pool.available:
                row.blocks.append(self.pool.allocate())
            elif self._preempt() is row:
                return False
        return True

    def _preempt(self) -> Row:
        """Preempt the youngest running row -> that row."""
        row = self.running.pop()
        self._drop(row)
        row.preempted += 1
        self.preemptions += 1
        insort(self.waiting, row, key=_order)
        return row

    def _drop(self, row: Row) -> None:
        self._release(row)
        self._slots.append(row.slot)
        row.slot = -1

    def _release(self, row: Row) -> None:
        # So that blocks at the ends of prompts are overwritten before those at their starts.
        for block in reversed(row.blocks):
            self.pool.release(block)
        row.blocks, row.computed, row.published = array("i"), 0, 0

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.pool.size)

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken: for tests."""
        owners = [0] * self.pool.blocks
        for row in self.running:
            for block in row.blocks:
                owners[block] += 1
        self.pool.check(owners)
        slots = [row.slot for row in self.running]
        assert sorted([*slots, *self._slots]) == list(range(self.rows)), "a slot was lost, or has two rows"
        assert all(not row.blocks and row.slot < 0 and not row.computed for row in self.waiting)
        for rows in (self.running, self.waiting):
            assert sorted(rows, key=_order) == rows
        assert all(
            row.computed <= len(row.tokens) and len(row.blocks) >= self._blocks(row.computed) for row in self.running
        )


def _order(row: Row) -> tuple[int, int]:
    return row.order


def _in_prompt(row: Row) -> bool:
    """Whether the row needs a chunk of prompt tokens."""
    remaining = len(row.tokens) - row.computed
    return not row.paused and (remaining > 1 or (remaining == 1 and row.computed == 0))
