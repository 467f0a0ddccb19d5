"""Random loads: every invariant after every step, the tokens of a row alone, and an end of all waiting."""

import random
from collections import abc
from dataclasses import replace
from typing import Any

import pytest
from stand_in import StandIn, check, check_pool, expected

from megajax.inference.request import FREED, Sequence
from megajax.inference.sampling_settings import Sampling
from megajax.inference.scheduler import BlockPool, Scheduler

GREEDY = Sampling(temperature=0)


def row(order: int, tokens: abc.Sequence[int], limit: int, **more: object) -> Sequence:
    return replace(Sequence(order=(order, 0), tokens=list(tokens), limit=limit, sampling=GREEDY), **more)


def made(
    scheduler: Scheduler,
    device: StandIn,
    rows: abc.Sequence[Sequence],
    after_step: abc.Callable[[], object] = lambda: None,
) -> list[Sequence]:
    """Runs until all rows have reached their limits -> the rows in the order of their ends."""
    ended: list[Sequence] = []
    for row in rows:
        scheduler.add(row)
    for _ in range(10_000):
        step = scheduler.next()
        check(scheduler)
        if step is None:
            break
        after_step()
        for (row, computed), result in zip(step.parts(), device.run([step])[0], strict=True):
            if computed == len(row.tokens):
                row.tokens.append(result.token)
            if len(row.tokens) == row.limit:
                scheduler.remove(row)
                check(scheduler)
                ended.append(row)
    assert not scheduler.running and not scheduler.waiting, "no progress"
    return ended


class Load:
    """Random rows with shared prefixes, some of which are cancelled or paused at any time."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        self.size, self.chunk = self.draw.choice([1, 2, 4, 16]), self.draw.choice([4, 8, 32])
        self.sharing, self.tile = self.draw.random() < 0.8, self.draw.choice([1, 2, 4, self.chunk])
        rows, blocks = self.draw.randint(1, 12), max(2, self.draw.randint(70, 140) // self.size + 1)
        self.window = self.draw.choice([None, None, 0, 5, 20])
        # Models with states compute one prompt in a step, and share only with snapshots of them.
        self.states = self.draw.random() < 0.4
        self.tile = self.chunk if self.states else self.tile
        snapshots = self.draw.choice([1, 3, 20]) if self.states and self.sharing else 0
        sizes: dict[str, Any] = {"rows": rows, "chunk": self.chunk, "tile": self.tile, "window": self.window}
        pool = BlockPool(blocks, self.size)
        self.scheduler = Scheduler(pool, prefix_sharing=self.sharing, snapshots=snapshots, **sizes)
        sizes |= {"snapshots": snapshots if self.states else None}
        self.device = StandIn(block=self.size, blocks=blocks, vocabulary=50, **sizes)
        self.heads = [[self.draw.randrange(50) for _ in range(self.draw.randint(0, 30))] for _ in range(3)]
        self.live: list[Sequence] = []
        self.freed = 0
        self.asked = self.finished = self.number = 0

    def arrive(self) -> None:
        prompt = [*self.draw.choice(self.heads), *(self.draw.randrange(50) for _ in range(self.draw.randint(1, 12)))]
        new = row(self.number, prompt, len(prompt) + self.draw.randint(1, 25))
        new.unscored, new.priority = self.draw.random() < 0.1, self.draw.choice([0, 0, -1, 5])
        new.origin = self.draw.choice([b"", b"", b"other"])
        self.number, self.asked = self.number + 1, self.asked + len(prompt)
        self.scheduler.add(new)
        self.live.append(new)

    def step(self) -> None:
        for row in self.live:
            row.paused = row.paused and self.draw.random() < 0.7
        if self.live and self.draw.random() < 0.03:
            self.scheduler.remove(self.live.pop(self.draw.randrange(len(self.live))))
        step = self.scheduler.next()
        check(self.scheduler)
        if step is None:
            assert all(row.paused for row in self.live)
            return
        for (row, computed), result in zip(step.parts(), self.device.run([step])[0], strict=True):
            row.unscored, self.freed = row.unscored and computed < row.prompt, self.freed + row.freed
            if computed == len(row.tokens):
                row.tokens.append(result.token)
                row.paused = self.draw.random() < 0.1
            if len(row.tokens) == row.limit:
                assert row.tokens[row.prompt :] == expected(row.tokens[: row.prompt], row.generated)
                self.scheduler.remove(row)
                self.live.remove(row)
                self.finished += 1


def test_random_loads() -> None:
    loads = [Load(seed) for seed in range(12)]
    for load in loads:
        steps = 0
        while load.number < 30 or load.live:
            if load.number < 30 and load.draw.random() < 0.6:
                load.arrive()
            load.step()
            steps += 1
            assert steps < 20_000, "no progress"
        assert load.finished > 15
        assert not any(load.scheduler.pool.owners)
        assert load.sharing or not load.scheduler.shared_tokens
        assert (load.freed > 0) == (load.window is not None)
    # The events that the loads are made for occur.
    assert sum(load.scheduler.preemptions for load in loads) > 50
    assert sum(load.scheduler.shared_tokens for load in loads) > 500


def test_lower_priorities_are_admitted_first_and_preempted_last() -> None:
    device = StandIn(rows=2, chunk=8, tile=4, block=4, blocks=12)
    scheduler = Scheduler(BlockPool(12, 4), rows=2, chunk=8, tile=4)
    rows = [row(number, [number, 1, 2], 40, priority=priority) for number, priority in enumerate((3, 0, 0, -7))]
    assert [item.order[0] for item in made(scheduler, device, rows)] == [3, 1, 2, 0]
    assert rows[3].preempted == 0 < rows[1].preempted
    assert all(item.tokens[3:] == expected(item.tokens[:3], 37) for item in rows)


PROMPT, LONG = list(range(21)), [number % 7 for number in range(41)]
ONE_BY_ONE = {"rows": 4, "chunk": 8, "tile": 8}
TOGETHER = {"rows": 8, "chunk": 32, "tile": 4}


@pytest.mark.parametrize(
    ("sizes", "prompts", "origins", "computed", "shared"),
    [
        pytest.param(ONE_BY_ONE, [PROMPT] * 3, b"aaa", 21 + 2 * 1, 2 * 20, id="equal"),
        # A step writes all tokens before it reads any; prompts that are computed together go on with each other's.
        pytest.param(TOGETHER, [LONG] * 3, b"aaa", 41 + 2 * 1, 2 * 40, id="equal in one step"),
        pytest.param(ONE_BY_ONE, [PROMPT, [7, *PROMPT]], b"aa", 21 + 22, 0, id="other prefixes"),
        pytest.param(TOGETHER, [PROMPT] * 4, b"abab", 2 * 21 + 2 * 1, 2 * 20, id="other origins"),
        pytest.param(ONE_BY_ONE | {"snapshots": 1}, [[*PROMPT, 9]] * 4, b"aaaa", 22 + 3 * 2, 3 * 20, id="states"),
    ],
)
def test_prompts_that_begin_alike_are_computed_once(
    sizes: dict[str, Any], prompts: list[list[int]], origins: bytes, computed: int, shared: int
) -> None:
    device, scheduler = StandIn(block=4, **sizes), Scheduler(BlockPool(64, 4), **sizes)
    rows = [
        row(number, prompt, len(prompt) + 4, origin=origins[number : number + 1])
        for number, prompt in enumerate(prompts)
    ]
    made(scheduler, device, rows)
    assert (scheduler.prompt_tokens, scheduler.shared_tokens) == (computed, shared)
    assert all(item.tokens[-4:] == expected(item.tokens[:-4], 4) for item in rows)


@pytest.mark.parametrize(("window", "most"), [(None, 2), (7, 8)])
def test_blocks_behind_the_window_make_room_for_more_rows(window: int | None, most: int) -> None:
    """A row of 40 tokens fills 10 of the 24 blocks. With a window of 7, it has 3 blocks at any time."""
    sizes: dict[str, Any] = {"rows": 8, "chunk": 8, "tile": 4, "window": window}
    device, scheduler, long = StandIn(block=4, blocks=24, **sizes), Scheduler(BlockPool(24, 4), **sizes), list[int]()
    rows = [row(number, [number] * 4, 40) for number in range(8)]
    made(scheduler, device, rows, lambda: long.append(sum(len(item.tokens) > 32 for item in scheduler.running)))
    assert max(long) == most and (scheduler.preemptions > 0) == (window is None)
    assert all(item.tokens[4:] == expected(item.tokens[:4], 36) for item in rows)


def test_a_prompt_begins_from_the_state_after_a_known_prefix() -> None:
    """The state after the last whole block of a prompt is kept, and that where two prompts part, for the third one."""
    sizes: dict[str, Any] = {"rows": 4, "chunk": 8, "tile": 8, "snapshots": 3}
    device, scheduler = StandIn(block=4, **sizes), Scheduler(BlockPool(64, 4), **sizes)
    head, computed = list(range(13)), []
    for number, tail in enumerate(([20] * 8, [20] * 8, [21] * 8, [22] * 8, [20] * 8, [22] * 8)):
        before = scheduler.prompt_tokens
        made(scheduler, device, [row(number, [*head, *tail], 25)])
        computed.append(scheduler.prompt_tokens - before)
    # The state after 20 tokens of the fourth prompt takes the place of the first one's, and this later of the third's.
    assert computed == [21, 1, 21, 9, 9, 1]


def test_rows_with_penalties_keep_their_blocks() -> None:
    """The device reads the tokens that are penalized from the blocks."""
    scheduler = Scheduler(BlockPool(24, 4), rows=8, chunk=32, tile=4, window=3)
    for number, sampling in enumerate((GREEDY, replace(GREEDY, frequency_penalty=0.5))):
        scheduler.add(row(number, [number] * 12, 40, sampling=sampling))
    scheduler.next()
    for item in scheduler.running:
        item.tokens.append(1)
    assert scheduler.next() is not None
    assert [list(item.blocks).count(FREED) for item in scheduler.running] == [2, 0]


def test_a_long_prompt_and_the_short_ones_behind_it_do_not_wait_for_each_other() -> None:
    """The oldest has half of each step, and all that the others leave."""
    scheduler = Scheduler(BlockPool(64, 4), rows=8, chunk=32, tile=4)
    for number, length in enumerate((60, 50, 6, 3)):
        scheduler.add(row(number, list(range(10 * number, 10 * number + length)), 70))
    first, second = scheduler.next(), scheduler.next()
    assert first is not None and second is not None
    assert {item.order[0]: count for item, _, count in first.prompts} == {0: 16, 1: 4, 2: 6, 3: 3}
    assert {item.order[0]: count for item, _, count in second.prompts} == {0: 16, 1: 16}


def test_the_least_recently_used_contents_are_overwritten() -> None:
    pool = BlockPool(2, 4)
    first, second = (pool.digest(b"", tokens) for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]))
    for digest in (first, second):
        block = pool.allocate()
        pool.publish(block, digest)
        pool.release(block)
    assert pool.available == 2
    used = pool.share(first)
    assert used is not None
    pool.release(used)
    pool.allocate()
    assert pool.share(second) is None and pool.share(first) == used
    check_pool(pool, [1, 1])


def test_an_impossible_row_is_refused() -> None:
    scheduler = Scheduler(BlockPool(4, 4), rows=2, chunk=8, tile=8)
    assert scheduler.fits(16) and not scheduler.fits(17)
    with pytest.raises(ValueError, match="5 blocks for 17 tokens, the pool has 4"):
        scheduler.add(row(0, [1], 17))
