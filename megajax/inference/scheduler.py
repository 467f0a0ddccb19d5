"""Which rows run in the next step of a replica, and which blocks of the pool they own. Plain Python.

A row is one unfinished answer: its prompt and the tokens so far. A step computes one token of each row that decodes,
and one chunk of one prompt. Rows are admitted in the order in which they came. If no block is left, the youngest
running row gives its blocks up, waits in front of those that came later, and is computed again.
"""

from array import array
from bisect import insort
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megajax.inference.pool import Pool
from megajax.inference.request import Sampling


@dataclass(eq=False, kw_only=True)
class Row:
    """An unfinished answer, as scheduler and device see it."""

    order: tuple[int, int]
    """Requests in the order in which they came, then the choice: the smallest is never preempted for another."""
    tokens: list[int]
    """Prompt, then the answer. Grows only at its end; the last token has no keys yet."""
    limit: int
    """Most tokens, prompt included."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    """Of this answer: sampling depends on it and on the number of tokens, not on the step."""
    ends: frozenset[int] = frozenset()
    """Tokens that end the answer; they may not be chosen before `sampling.min_tokens`."""
    memory: tuple[int, ...] = ()
    """The text that an encoder reads when the row begins."""
    unscored: bool = False
    """Scores of the prompt are wanted and incomplete: all of it is computed, and no block of others is shared."""
    top: int | None = None
    """How many of the most likely tokens to report with each one. None: neither these nor ranks."""
    guide: Any = None
    """State of what constrains the text."""
    paused: bool = False
    """It waits for other rows of its request: it is neither computed nor admitted."""
    prompt: int = 0
    """Tokens of the prompt."""
    computed: int = 0
    """Tokens whose keys are in the row's blocks once the last step that was scheduled has run."""
    blocks: array[int] = field(default_factory=lambda: array("i"))
    slot: int = -1
    """Of what the layers keep per row; -1: the row does not run."""
    published: int = 0
    """Blocks that others may share."""
    digests: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks of `tokens`, as far as they were needed."""
    preempted: int = 0
    """How often the row gave up its blocks."""

    def __post_init__(self) -> None:
        self.prompt = self.prompt or len(self.tokens)

    @property
    def generated(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt

    @property
    def forbidden(self) -> frozenset[int]:
        """Tokens that may not be chosen next."""
        return self.ends if self.generated < self.sampling.min_tokens else frozenset()


class Step(NamedTuple):
    """What a replica computes in one step."""

    decode: list[tuple[Row, int]]
    """Rows, and the position of the one token of each."""
    prompts: list[tuple[Row, int, int]]
    """At most one: a row, its first position, and how many."""

    def parts(self) -> list[tuple[Row, int]]:
        """Rows in the order of the device's results, and the number of tokens that each has after the step."""
        return [(row, at + 1) for row, at in self.decode] + [(row, at + count) for row, at, count in self.prompts]


class Scheduler:
    """The rows of a replica."""

    def __init__(self, pool: Pool, *, rows: int, chunk: int, prefix_sharing: bool = True):
        """rows: most that run at the same time; chunk: most tokens of a prompt in a step."""
        self.pool, self.rows, self.chunk, self.prefix_sharing = pool, rows, chunk, prefix_sharing
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        self._slots = list(range(rows))
        self.preemptions = self.prompt_tokens = self.shared_tokens = 0

    def fits(self, tokens: int) -> bool:
        """Whether a row of this many tokens can ever run: alone, in all blocks."""
        return self._blocks(tokens) <= self.pool.blocks

    def add(self, row: Row) -> None:
        """The row waits. Raises ValueError if it could wait forever."""
        if not self.fits(row.limit):
            blocks = f"{self._blocks(row.limit)} blocks for {row.limit} tokens"
            raise ValueError(f"a row needs {blocks}, the pool has {self.pool.blocks}")
        insort(self.waiting, row, key=_order)

    def remove(self, row: Row) -> None:
        """Finished or cancelled, at any time between two calls of `next`."""
        if row in self.running:
            self.running.remove(row)
            self._drop(row)
        elif row in self.waiting:
            self.waiting.remove(row)

    def fork(self, row: Row, order: tuple[int, int]) -> Row:
        """A copy of a row, which waits; it will share the row's full blocks."""
        copy = Row(order=order, tokens=list(row.tokens), limit=row.limit, sampling=row.sampling, seed=row.seed)
        copy.ends, copy.prompt, copy.top = row.ends, row.prompt, row.top
        copy.digests, copy.memory = list(row.digests), row.memory
        self.add(copy)
        return copy

    def next(self) -> Step | None:
        """Decides, reserves blocks and advances the rows; None if no row can run."""
        while True:
            self._admit()
            step = self._step()
            if step is not None or not self.running or all(row.paused for row in self.waiting):
                return step
            # Every running row is paused, and no other fits beside them.
            self._preempt()

    def _step(self) -> Step | None:
        step = Step([], [])
        # Rows are preempted for older ones only: none of those that were already given a part.
        for row in list(self.running):
            left = len(row.tokens) - row.computed
            single = left == 1 and row.computed > 0
            count = left if single else 0 if step.prompts else min(left, self.chunk)
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
        """Oldest first, one prompt at a time, while the next chunk fits beside what is running."""
        while self._slots and not any(_in_prompt(row) for row in self.running):
            row = next((row for row in self.waiting if not row.paused), None)
            if row is None:
                return
            self._share(row)
            need = self._blocks(min(len(row.tokens), row.computed + self.chunk)) - len(row.blocks)
            # One block for each running row: else the next steps would preempt what was just admitted.
            if self.running and need + len(self.running) > self.pool.available:
                self._release(row)
                return
            self.shared_tokens += min(row.computed, row.prompt)
            row.slot = self._slots.pop()
            self.waiting.remove(row)
            insort(self.running, row, key=_order)

    def _share(self, row: Row) -> None:
        """Takes the blocks that have the beginning of the row. At least one token is left to compute."""
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
        """The full blocks of the row may be shared."""
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
        """Blocks for the tokens before `until`; False: the row itself had to give way."""
        while len(row.blocks) < self._blocks(until):
            if self.pool.available:
                row.blocks.append(self.pool.take())
            elif self._preempt() is row:
                return False
        return True

    def _preempt(self) -> Row:
        """The youngest running row gives way."""
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
        # The ends of prompts are overwritten before their beginnings.
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
    """The row needs a chunk of its own."""
    left = len(row.tokens) - row.computed
    return not row.paused and (left > 1 or (left == 1 and row.computed == 0))
