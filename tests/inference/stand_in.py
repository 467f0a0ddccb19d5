"""A device without a model: the next token is a hash of the row's tokens, read back from the blocks of its cache."""

import random
from collections import abc
from concurrent.futures import Future
from hashlib import blake2b
from typing import NamedTuple

from started_step import StandInStep

from megajax.inference.request import ImageInput, Sampled, Sequence, Step, TokenScore
from megajax.inference.scheduler import BlockPool, Scheduler


def hashed(tokens: abc.Sequence[int], vocabulary: int, seed: int = 0) -> int:
    """The next token."""
    digest = blake2b(repr((list(tokens), seed)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % vocabulary


class Part(NamedTuple):
    """The tokens of a row in a step."""

    row: Sequence
    first: int
    count: int
    slot: int
    cached: list[tuple[int, int]]
    """Position and token in each place of its blocks, up to the last of these tokens."""


class StandIn:
    """Stores the writes to each place of each block, and checks that a row reads its own tokens.

    tile: by default `chunk`, for one prompt a step. Rows with a temperature depend on their seed. Tokens in `bad` give
    nonfinite logits.
    """

    generates = True

    def __init__(
        self,
        *,
        rows: int = 4,
        chunk: int = 8,
        tile: int = 0,
        block: int = 4,
        blocks: int = 64,
        replicas: int = 1,
        length: int = 64,
        vocabulary: int = 50,
        prefix_sharing: bool = True,
        window: int | None = None,
        snapshots: int | None = None,
        memory: int = 0,
        drafts: int = 0,
        images: ImageInput | None = None,
        bad: abc.Sequence[int] = (),
    ):
        self.rows, self.chunk, self.block, self.blocks, self.replicas = rows, chunk, block, blocks, replicas
        self.tile = tile or chunk
        self.length, self.vocabulary, self.prefix_sharing, self.memory = length, vocabulary, prefix_sharing, memory
        self.images, self.snapshots = images, snapshots or 0
        # Tokens behind the state in each slot; None without states.
        self._states: list[dict[int, list[int]]] | None = None if snapshots is None else [{} for _ in range(replicas)]
        self.top, self.drafts, self.window = vocabulary, drafts, window
        self.bad, self.steps = frozenset(bad), 0
        self.computed: list[tuple[Sequence, int, int]] = []
        self._cells: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in range(replicas)]
        self._latest: list[dict[int, int]] = [{} for _ in range(replicas)]

    def start(self, work: abc.Sequence[Step | None]) -> "StandInStep":
        assert len(work) == self.replicas and any(work)
        self.steps += 1
        written = [[] if step is None else self._write(step, replica) for replica, step in enumerate(work)]
        return StandInStep(lambda: self.chosen(written))

    def run(self, work: abc.Sequence[Step | None]) -> list[list[Sampled]]:
        """The results of a step, which are received: no token is awaited."""
        started = self.start(work)
        started.choose()
        for row, computed in [part for step in work if step is not None for part in step.parts()]:
            row.awaited -= computed == len(row.tokens)
        return started.results()

    def chosen(self, written: abc.Sequence[abc.Sequence[Part]]) -> list[list[Sampled]]:
        """The results of each replica, from the present state of the rows."""
        results = [[self._result(part) for part in parts] for parts in written]
        for parts, replica, latest in zip(written, results, self._latest, strict=True):
            latest |= {part.slot: result.token for part, result in zip(parts, replica, strict=True)}
        return results

    def _write(self, step: Step, replica: int) -> list[Part]:
        cells, latest = self._cells[replica], self._latest[replica]
        assert len(step.decode) + len(step.prompts) <= self.rows
        assert sum(-(-count // self.tile) for _, _, count in step.prompts) <= self.chunk // self.tile
        assert all(len(row.draft) <= self.drafts for row, _ in step.decode)
        parts = [*((row, at, 1 + len(row.draft)) for row, at in step.decode), *step.prompts]
        writers: dict[int, Sequence] = {}
        if self._states is not None:
            self._advance(step, self._states[replica])
        # All rows are written before any is read, as on a device.
        for row, first, count in parts:
            assert first + count <= row.limit, "a token without a place in the tables"
            for at in range(first, first + count):
                place = row.blocks[at // self.block], at % self.block
                assert writers.setdefault(place[0], row) is row, "a block has two writers"
                tokens = [*row.tokens, *row.draft]
                assert at < len(tokens) or (at == len(tokens) and row.awaited == 2), "a token that nothing chooses"
                cells[place] = at, tokens[at] if at < len(tokens) else latest[row.slot]
        self.computed += parts

        def cached(row: Sequence, first: int, count: int) -> list[tuple[int, int]]:
            places = range(self._seen(first), first + count)
            return [cells[row.blocks[at // self.block], at % self.block] for at in places]

        return [Part(row, first, count, row.slot, cached(row, first, count)) for row, first, count in parts]

    def _advance(self, step: Step, states: dict[int, list[int]]) -> None:
        """Saves and restores states, and advances those of rows, which must be those of their earlier tokens."""
        for copies in (step.saves, step.restores):
            states |= {target: states[source] for source, target in copies}
        for row, first, count in [*((row, at, 1) for row, at in step.decode), *step.prompts]:
            state = states[row.slot] if first else []
            assert len(state) == first, f"{row.order}: the state of another number of tokens"
            assert all(known in (-1, token) for known, token in zip(state, row.tokens, strict=False)), "another state"
            states[row.slot] = [*state, *row.tokens[first : first + count]]
            # The last token may be awaited.
            states[row.slot] += [-1] * (first + count - len(states[row.slot]))

    def _seen(self, first: int) -> int:
        """The first position that the token at `first` reads."""
        return 0 if self.window is None else max(0, first - self.window)

    def _result(self, part: Part) -> Sampled:
        row, first, count, _, cached_tokens = part
        if row.slot < 0:
            return Sampled(-1, 0.0)
        expected_tokens = list(enumerate([*row.tokens, *row.draft]))[self._seen(first) : first + count]
        assert cached_tokens == expected_tokens, f"{row.order}: other keys"
        certain = count - len(row.draft)
        result, *following = (self._sampled(row, first, certain, ahead) for ahead in range(len(row.draft) + 1))
        return result._replace(following=tuple(following))

    def _sampled(self, row: Sequence, first: int, count: int, ahead: int) -> Sampled:
        """The result after `count` tokens of the row and `ahead` tokens of its draft."""
        known = [*row.tokens[: first + count], *row.draft[:ahead]]
        if self.bad.intersection(known):
            return Sampled(-1, float("nan"), finite=False)
        tokens = self.candidates(row, known, ahead)
        following = range(first + 1, min(first + count + 1, row.prompt))
        scores = tuple(TokenScore(row.tokens[at], -at / 8, 1, ()) for at in following) if row.unscored else ()
        top = tuple((token, -0.5 - place / 8) for place, token in enumerate(tokens[: row.top or 0]))
        return Sampled(tokens[0], -0.5, None if row.top is None else 1, top, prompt=scores)

    def candidates(self, row: Sequence, tokens: abc.Sequence[int], ahead: int = 0) -> list[int]:
        """Different tokens that may follow, the most likely first. ahead: as in `Sequence.forbidden`."""
        seed = row.seed if row.sampling.temperature > 0 else 0
        first = hashed(tokens, self.vocabulary, seed)
        order = [(first + place) % self.vocabulary for place in range(self.vocabulary)]
        return [token for token in order if token not in row.forbidden(ahead)]


class Known:
    """Drafts of a text that is known, with a share of wrong tokens."""

    def __init__(self, tokens: abc.Sequence[int], wrong: float):
        self.tokens, self.wrong, self.draw = tokens, wrong, random.Random(1)

    def draft(self, tokens: list[int]) -> list[int]:
        right = self.tokens[len(tokens) : len(tokens) + 4]
        return [7 if self.draw.random() < self.wrong else token for token in right]


def at_once[T](state: T) -> Future[T]:
    """The state of a guide that needs no time."""
    future = Future[T]()
    future.set_result(state)
    return future


def expected(prompt: abc.Sequence[int], count: int, vocabulary: int = 50, seed: int = 0) -> list[int]:
    """The answer of a row alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(hashed(tokens, vocabulary, seed))
    return tokens[len(prompt) :]


def check_pool(pool: BlockPool, owners: abc.Sequence[int]) -> None:
    """Raises AssertionError unless every block is in exactly one state. owners: counts according to the sequences."""
    assert list(owners) == pool.owners, "a block was lost, or has an owner too many"
    free = [*pool._empty, *pool._idle]
    assert len(set(free)) == len(free), "a block is free twice"
    assert {block for block, count in enumerate(owners) if not count} == set(free), "a block is neither free nor owned"
    assert {block: digest for digest, block in pool._block_of.items()} == pool._digest_of
    assert set(pool._idle) == {block for block in pool._digest_of if not owners[block]}


def check(scheduler: Scheduler) -> None:
    """Raises AssertionError if an invariant of a scheduler or its pool is broken."""
    owners = [0] * scheduler.pool.blocks
    for sequence in scheduler.running:
        assert set(sequence.blocks[: sequence.freed]) <= {-1}
        for block in sequence.blocks[sequence.freed :]:
            owners[block] += 1
    check_pool(scheduler.pool, owners)
    slots = [sequence.slot for sequence in scheduler.running]
    assert sorted([*slots, *scheduler._slots]) == list(range(scheduler.rows)), "a slot was lost, or has two sequences"
    assert all(not waiting.blocks and waiting.slot < 0 and not waiting.computed for waiting in scheduler.waiting)
    for sequences in (scheduler.running, scheduler.waiting):
        assert sorted(sequences, key=lambda sequence: (sequence.priority, sequence.order)) == sequences
    for running in scheduler.running:
        assert running.computed <= running.length and len(running.blocks) >= scheduler._blocks(running.computed)
        assert running.published * scheduler.pool.size <= running.computed, "a block without its tokens is shared"
