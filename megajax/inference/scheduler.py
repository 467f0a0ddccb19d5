"""Scheduling: which sequences the next step of a replica computes, and which blocks of the cache they own.

A step computes a token of each decoding sequence, with those of its draft, and a chunk of tokens of prompts. The chunk
is divided in tiles: the oldest prompt gets half of them, and the others the rest, the shortest first, so that a long
prompt does not hold up those behind it, nor they it. Sequences are admitted by priority, then in order of arrival. If
no block is left, the last running sequence in this order is preempted: it releases its blocks, waits ahead of those
after it, and is recomputed. No sequence is preempted for one that waits.

Blocks know their tokens, so that equal prefixes of prompts are computed once: a full block is identified by a hash of
all tokens up to its end, and of `Sequence.origin`. Only full blocks are shared. A step writes all tokens
before it reads any, so a prompt shares the blocks that another one fills in the same step. A block is never written
after that, so copy-on-write is not needed. If all layers have a window, blocks behind it are freed while their sequence
runs.
All of it is plain Python.
"""

import os
import time
from array import array
from bisect import insort
from collections import OrderedDict, abc, deque
from dataclasses import replace
from hashlib import blake2b
from operator import attrgetter

from megajax.inference.request import FREED, EngineDevice, Sequence, Step

ORDER = attrgetter("priority", "order")
"""The order in which sequences are admitted and computed; the last one is preempted first."""
DIGEST = 16
"""Bytes of a hash."""
KEY = 32
"""Bytes of the key of hashes."""


class BlockPool:
    """The blocks of a replica, with reference counts.

    A block without owners but with known tokens is idle: it can be shared again. When no empty block is left, idle
    blocks are overwritten, the least recently used first.
    """

    def __init__(self, blocks: int, size: int, key: bytes | None = None):
        """size: tokens of a block; key: secret key of the hashes, None for a random one."""
        self.blocks, self.size = blocks, size
        self.owners = [0] * blocks
        self._empty = deque(range(blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        # A secret key: clients cannot construct a prompt with the hashes of another prompt's blocks.
        self._key = key or os.urandom(KEY)

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated."""
        return len(self._empty) + len(self._idle)

    @property
    def used(self) -> int:
        """Number of blocks with owners."""
        return self.blocks - self.available

    def digest(self, before: bytes, tokens: abc.Sequence[int]) -> bytes:
        """The hash of a full block, from the hash of the previous block and its tokens.

        before: for the first block, `Sequence.origin`.
        """
        return blake2b(before + array("q", tokens).tobytes(), digest_size=DIGEST, key=self._key).digest()

    def knows(self, digest: bytes) -> bool:
        """Whether a block with these tokens can be shared."""
        return digest in self._block_of

    def allocate(self) -> int:
        """Allocate a block with one owner, to be written. Raises IndexError if none is available."""
        if self._empty:
            block = self._empty.popleft()
        elif self._idle:
            block = self._idle.popitem(last=False)[0]
            del self._block_of[self._digest_of.pop(block)]
        else:
            raise IndexError("no block is available: check `available` first")
        self.owners[block] = 1
        return block

    def share(self, digest: bytes) -> int | None:
        """Add an owner to the block with these tokens -> the block, or None if there is none."""
        block = self._block_of.get(digest)
        if block is not None:
            self._idle.pop(block, None)
            self.owners[block] += 1
        return block

    def publish(self, block: int, digest: bytes) -> None:
        """Allow sharing of a block. The step that fills it must not run after a step that reads it."""
        if digest not in self._block_of:
            self._block_of[digest], self._digest_of[block] = block, digest

    def release(self, block: int) -> None:
        """Remove an owner."""
        if self.owners[block] < 1:
            raise ValueError(f"block {block} has no owner")
        self.owners[block] -= 1
        if not self.owners[block] and block in self._digest_of:
            self._idle[block] = None
        elif not self.owners[block]:
            self._empty.append(block)


class Snapshots:
    """The states of rows at the ends of prefixes, for layers that keep a state per row. The least recently used one is
    overwritten."""

    def __init__(self, first: int, count: int):
        """first: the first of their slots."""
        self._free, self._slot_of = list(range(first, first + count)), OrderedDict[bytes, int]()
        self.count = count

    def find(self, digest: bytes) -> int | None:
        """The slot of the state after the block with this hash."""
        if digest in self._slot_of:
            self._slot_of.move_to_end(digest)
        return self._slot_of.get(digest)

    def add(self, digest: bytes) -> int | None:
        """The slot to write a state to; None if there is one of this prefix."""
        if self.find(digest) is not None:
            return None
        self._slot_of[digest] = self._free.pop() if self._free else self._slot_of.popitem(last=False)[1]
        return self._slot_of[digest]


class Scheduler:
    """The sequences of a replica."""

    def __init__(
        self,
        pool: BlockPool,
        rows: int,
        chunk: int,
        tile: int,
        prefix_sharing: bool = True,
        window: int | None = None,
        snapshots: int = 0,
    ):
        """rows: maximum number of running sequences; the others: as in `Device`."""
        self.snapshots = Snapshots(rows, snapshots)
        self._saves: list[tuple[int, int]] = []
        self.pool, self.rows, self.chunk, self.tile = pool, rows, chunk, tile
        self.prefix_sharing, self.window = prefix_sharing, window
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._slots = list(range(rows))
        self.preemptions = self.prompt_tokens = self.shared_tokens = 0

    @property
    def load(self) -> int:
        """Number of sequences, running and waiting."""
        return len(self.running) + len(self.waiting)

    def known(self, sequence: Sequence) -> int:
        """Number of blocks of a new sequence that the pool knows."""
        if not self.prefix_sharing or sequence.whole:
            return 0
        full = (len(sequence.tokens) - 1) // self.pool.size
        unknown = (number for number in range(full) if not self.pool.knows(self._digest(sequence, number)))
        return next(unknown, full)

    def fits(self, tokens: int) -> bool:
        """Whether all blocks together are enough for a sequence of this many tokens."""
        return self._blocks(tokens) <= self.pool.blocks

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ValueError if it could wait forever."""
        if not self.fits(sequence.limit):
            blocks = f"{self._blocks(sequence.limit)} blocks for {sequence.limit} tokens"
            raise ValueError(f"a sequence needs {blocks}, the pool has {self.pool.blocks}")
        insort(self.waiting, sequence, key=ORDER)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or cancelled sequence; allowed at any time between two calls of `next`."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._drop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def fork(self, sequence: Sequence, order: tuple[int, int]) -> Sequence:
        """Queue a copy of a sequence; it will share the sequence's full blocks."""
        copy = replace(
            sequence,
            order=order,
            tokens=list(sequence.tokens),
            digests=list(sequence.digests),
            **{"blocks": array("i"), "slot": -1, "computed": 0, "published": 0, "preempted": 0, "freed": 0},
            **{"unscored": False, "paused": False, "guide": None, "awaited": 0},
        )
        self.add(copy)
        return copy

    def next(self) -> Step | None:
        """Schedule a step: reserve blocks and advance the sequences. None if no sequence can run, perhaps because the
        results of earlier steps are awaited."""
        while True:
            self._admit()
            step = self._step()
            if step is not None or not self.running or all(sequence.paused for sequence in self.waiting):
                return step
            if any(sequence.awaited for sequence in self.running):
                return None
            # All running sequences are paused, and no other sequence fits.
            self._preempt()

    def _step(self) -> Step | None:
        step, tiles, spare = Step([], []), self._tiles(), 0
        saves, restores = list[tuple[int, int]](), list[tuple[int, int]]()
        # Sequences are preempted only for those before them, so never after they are part of this step.
        for sequence in list(self.running):
            if sequence.idle or sequence.slot < 0:
                continue
            prompt, state, ends = _in_prompt(sequence), None, list[int]()
            if prompt and self.snapshots.count:
                state, ends = self._share_state(sequence)
            elif prompt:
                # Others may have computed the next blocks since.
                self._share(sequence)
            self._free_behind(sequence)
            remaining, granted = sequence.length - sequence.computed, tiles.get(sequence.order, 0) + spare
            parts = [granted * self.tile, *(end - sequence.computed for end in ends[:1])] if prompt else []
            count = min([remaining, *parts])
            if count < 1 or not self._reserve(sequence, sequence.computed + count):
                continue
            if prompt:
                restores += [] if state is None else [(state, sequence.slot)]
                step.prompts.append((sequence, sequence.computed, count))
                spare = granted - self._in_tiles(count)
            else:
                sequence.draft = self._draft(sequence)
                step.decode.append((sequence, sequence.computed))
            self.prompt_tokens += max(0, min(sequence.computed + count, sequence.prompt) - sequence.computed)
            sequence.computed += count
            sequence.awaited += sequence.computed == sequence.length
            self._publish(sequence)
            if sequence.computed in ends[:1]:
                slot = self.snapshots.add(self._digest(sequence, sequence.computed // self.pool.size - 1))
                saves += [] if slot is None else [(sequence.slot, slot)]
        if not (step.decode or step.prompts):
            return None
        before, self._saves = self._saves, saves
        return step._replace(saves=before, restores=restores)

    def _tiles(self) -> dict[tuple[int, int], int]:
        """The tiles of a step for each prompt that needs some, by the order of its sequence."""
        prompts = [sequence for sequence in self.running if _in_prompt(sequence)]
        if not prompts:
            return {}
        needed = {sequence.order: self._in_tiles(len(sequence.tokens) - sequence.computed) for sequence in prompts}
        left, oldest = self.chunk // self.tile, prompts[0].order
        granted = {oldest: min(needed[oldest], -(-left // 2))}
        left -= granted[oldest]
        for order in [*sorted(needed.keys() - {oldest}, key=lambda order: (needed[order], order)), oldest]:
            more = min(left, needed[order] - granted.get(order, 0))
            granted[order], left = granted.get(order, 0) + more, left - more
        return granted

    def _in_tiles(self, tokens: int) -> int:
        return -(-tokens // self.tile)

    def _admit(self) -> None:
        """Admit sequences, the first in order, while a step has tiles for more prompts and their next chunks fit."""
        while self._slots:
            prompts = [sequence for sequence in self.running if _in_prompt(sequence)]
            sequence = next((sequence for sequence in self.waiting if not sequence.paused), None)
            # A sequence that was preempted while a step chooses its next token waits for that token.
            if sequence is None or sequence.awaited or len(prompts) >= self.chunk // self.tile:
                return
            if not self.snapshots.count:
                self._share(sequence)
            need = sum(self._next_blocks(other) for other in (*prompts, sequence))
            # Keep a block for each running sequence, or the next steps would preempt the admitted sequence.
            if self.running and need + len(self.running) > self.pool.available:
                self._release(sequence)
                return
            self._count_shared(sequence, 0)
            if not sequence.preempted:
                sequence.admitted = time.monotonic()
            sequence.slot = self._slots.pop()
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=ORDER)

    def _next_blocks(self, sequence: Sequence) -> int:
        """Blocks that a prompt allocates for its next chunk."""
        return max(0, self._blocks(min(len(sequence.tokens), sequence.computed + self.chunk)) - len(sequence.blocks))

    def _share(self, sequence: Sequence) -> None:
        """Share existing blocks that continue a prompt. At least one token remains to be computed."""
        before = len(sequence.blocks)
        if not self.prefix_sharing or sequence.whole or sequence.computed != before * self.pool.size:
            return
        for number in range(before, (len(sequence.tokens) - 1) // self.pool.size):
            block = self.pool.share(self._digest(sequence, number))
            if block is None:
                break
            sequence.blocks.append(block)
        shared = len(sequence.blocks) - before
        sequence.published += shared
        sequence.computed += shared * self.pool.size
        if sequence.slot >= 0:
            self._count_shared(sequence, before * self.pool.size)

    def _share_state(self, sequence: Sequence) -> tuple[int | None, list[int]]:
        """Begin a prompt from the longest prefix whose state is known -> its slot, and where further states are saved.

        These are the end of the blocks that others have computed too, where prompts part, and the last end of a block.
        """
        size, state = self.pool.size, None
        if not self.prefix_sharing or sequence.whole:
            return None, []
        known = self.known(sequence)
        if not sequence.computed:
            for count in range(known, 0, -1):
                state = self.snapshots.find(self._digest(sequence, count - 1))
                if state is not None:
                    self._take(sequence, count)
                    break
        ends = sorted({known * size, (len(sequence.tokens) - 1) // size * size})
        return state, [end for end in ends if end > sequence.computed]

    def _take(self, sequence: Sequence, count: int) -> None:
        """Share the first blocks of a sequence that has none; all of them are known."""
        blocks = [self.pool.share(self._digest(sequence, number)) for number in range(count)]
        sequence.blocks.extend(block for block in blocks if block is not None)
        sequence.published, sequence.computed = count, count * self.pool.size
        self._count_shared(sequence, 0)

    def _count_shared(self, sequence: Sequence, first: int) -> None:
        """Count the shared tokens of the sequence's prompt from `first` on."""
        tokens = max(0, min(sequence.computed, sequence.prompt) - first)
        self.shared_tokens += tokens
        if not sequence.preempted:
            sequence.shared += tokens

    def _publish(self, sequence: Sequence) -> None:
        """Allow sharing of the sequence's full blocks of known tokens."""
        if self.prefix_sharing:
            for number in range(sequence.published, min(sequence.computed, len(sequence.tokens)) // self.pool.size):
                self.pool.publish(sequence.blocks[number], self._digest(sequence, number))
                sequence.published = number + 1

    def _digest(self, sequence: Sequence, number: int) -> bytes:
        size = self.pool.size
        while len(sequence.digests) <= number:
            first = len(sequence.digests) * size
            before = sequence.digests[-1] if sequence.digests else sequence.origin
            for image in sequence.images:
                # Its tokens do not say which image it is.
                before += image.digest * (image.first < first + size and first < image.first + image.count)
            sequence.digests.append(self.pool.digest(before, sequence.tokens[first : first + size]))
        return sequence.digests[number]

    def _free_behind(self, sequence: Sequence) -> None:
        """Release the blocks that no further token reads. They stay shareable until they are overwritten."""
        if self.window is None or sequence.keeps_blocks:
            return
        behind = max(0, sequence.computed - self.window) // self.pool.size
        while sequence.freed < behind:
            self.pool.release(sequence.blocks[sequence.freed])
            sequence.blocks[sequence.freed] = FREED
            sequence.freed += 1

    def _reserve(self, sequence: Sequence, until: int) -> bool:
        """Allocate blocks for the tokens before `until` -> False if the sequence itself was preempted."""
        while len(sequence.blocks) < self._blocks(until):
            if self.pool.available:
                sequence.blocks.append(self.pool.allocate())
            elif self._preempt() is sequence:
                return False
        return True

    def retract(self) -> None:
        """Preempt all running sequences."""
        while self.running:
            self._preempt()

    def _draft(self, sequence: Sequence) -> list[int]:
        """Tokens to verify after a sequence's last one: as many as fit into its limit, with the token that is chosen
        after them, and into blocks that no other sequence needs next. Their keys are not shared until the tokens are
        part of the sequence; those of other tokens are overwritten."""
        if sequence.drafter is None:
            return []
        end = len(sequence.tokens)
        draft = sequence.drafter.draft(sequence.tokens)[: max(0, sequence.limit - end - 1)]
        while len(sequence.blocks) < self._blocks(end + len(draft)) and self.pool.available > len(self.running):
            sequence.blocks.append(self.pool.allocate())
        return draft[: len(sequence.blocks) * self.pool.size - end]

    def _preempt(self) -> Sequence:
        """Preempt the last running sequence in order -> that sequence."""
        sequence = self.running.pop()
        self._drop(sequence)
        sequence.preempted += 1
        self.preemptions += 1
        insort(self.waiting, sequence, key=ORDER)
        return sequence

    def _drop(self, sequence: Sequence) -> None:
        self._release(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = -1

    def _release(self, sequence: Sequence) -> None:
        # So that blocks at the ends of prompts are overwritten before those at their starts.
        for block in reversed(sequence.blocks[sequence.freed :]):
            self.pool.release(block)
        sequence.blocks, sequence.computed, sequence.published, sequence.draft = array("i"), 0, 0, []
        sequence.freed = 0

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.pool.size)


def _in_prompt(sequence: Sequence) -> bool:
    """Whether the sequence needs a chunk of prompt tokens, as for the last token of an embedding or of an image."""
    remaining, at = len(sequence.tokens) - sequence.computed, sequence.computed
    begins = at == 0 or sequence.pooling is not None
    begins = begins or any(image.first <= at < image.first + image.count for image in sequence.images)
    return not sequence.paused and (remaining > 1 or (remaining == 1 and begins))


BUSIER = 4
"""A replica is passed over for a prefix if it has more sequences than the least busy one by more than this part of its
rows: 4 is a quarter."""


def replica_for(sequence: Sequence, schedulers: abc.Sequence[Scheduler]) -> Scheduler:
    """The replica that computes a request.

    Of the replicas that are not too busy, the one that knows most blocks of the prompt; of equal ones, the least busy.
    A replica is too busy if it has no free row while another has one, or by `BUSIER`. Computing a prefix again takes a
    few steps, and waiting for a row those of a whole answer.
    """
    if len(schedulers) == 1:
        return schedulers[0]
    least, rows = min(scheduler.load for scheduler in schedulers), schedulers[0].rows
    most = max(least, min(least + rows // BUSIER, rows - 1))
    near = [scheduler for scheduler in schedulers if scheduler.load <= most]
    return max(near, key=lambda scheduler: (scheduler.known(sequence), -scheduler.load))


def schedulers_of(device: EngineDevice) -> list[Scheduler]:
    """A scheduler for each replica. They have one key, so that a prompt has the same hashes on all of them."""
    key = os.urandom(KEY)
    return [
        Scheduler(
            *(BlockPool(device.blocks, device.block, key), device.rows, device.chunk, device.tile),
            prefix_sharing=device.prefix_sharing,
            window=device.window,
            snapshots=device.snapshots,
        )
        for _ in range(device.replicas)
    ]
