"""A device without a model: an answer repeats its prompt."""

import threading
import time
from collections import abc
from contextlib import contextmanager
from typing import Any

import numpy as np
from started_step import StandInStep

from megajax.config.errors import UserError
from megajax.inference.device import pooled_positions
from megajax.inference.request import ImageInput, Pooled, Sampled, Sequence, Step, TokenScore

BAD, DEATH = tuple(b"bad logits"), tuple(b"death")
"""Prompts with nonfinite logits, and prompts that lose the device."""


class EchoDevice:
    """Steps take `seconds`, and none ends inside `hanging`."""

    chunk, tile, block, replicas, vocabulary, top = 512, 32, 16, 1, 257, 20
    drafts, window, snapshots, generates = 0, None, 0, True

    def __init__(
        self,
        rows: int = 16,
        blocks: int = 4000,
        length: int = 4096,
        seconds: float = 0.0005,
        memory: int = 0,
        images: ImageInput | None = None,
    ):
        """memory: as of a model with an encoder, whose text an answer repeats; 0: of a decoder. images: as `Device`."""
        self.memory, self.prefix_sharing, self.images = memory, not memory, images
        self.rows, self.blocks, self.length, self.seconds = rows, blocks, length, seconds
        self._ends = threading.Event()
        self._ends.set()
        self.seen: list[Sequence] = []
        self.added: int | None = 0
        """Added to each token of an answer."""

    @contextmanager
    def hanging(self) -> abc.Iterator[threading.Event]:
        """Steps end when the event is set, and at the end of the block: a failed test stops no other."""
        self._ends.clear()
        try:
            yield self._ends
        finally:
            self._ends.set()

    def start(self, work: abc.Sequence[Step | None]) -> StandInStep:
        (step,) = work
        assert step is not None
        self.seen = [row for row, _ in step.parts()]
        return StandInStep(lambda: self._chosen(step))

    def _chosen(self, step: Step) -> list[list[Sampled]]:
        time.sleep(self.seconds)
        self._ends.wait()
        results = [self._next(row, computed) for row, computed in step.parts()]
        for number, (row, _, _) in enumerate(step.prompts):
            if positions := pooled_positions(step, number):
                states = np.array([state_of(row.tokens[at]) for at in positions], np.float32)
                place = len(step.decode) + number
                results[place] = results[place]._replace(pooled=Pooled(positions[0], states.sum(0)))
        return [results]

    def _next(self, row: Sequence, computed: int) -> Sampled:
        prompt = row.memory or tuple(row.tokens[: row.prompt])
        if prompt == DEATH:
            raise RuntimeError("the device is lost")
        if prompt == BAD:
            return Sampled(-1, float("nan"), finite=False)
        assert self.added is not None, "the device has no weights"
        token = prompt[max(0, computed - row.prompt) % len(prompt)] + self.added
        scores = tuple(_score(item) for item in prompt[1:]) if row.unscored and computed == row.prompt else ()
        listed = tuple((item, -item / 100) for item in row.sampling.logprob_tokens)
        return Sampled(token, -0.5, 1, listed or _score(token).top, prompt=scores)


def state_of(token: int) -> list[int]:
    """The state of a token, for embeddings."""
    return [token, 100, token % 7 - 3]


def _score(token: int) -> TokenScore:
    return TokenScore(token, -0.5, 1, tuple(((token + place) % 256, -0.5 - place) for place in range(20)))


class EchoWeights:
    """Weights are a number that is added to each token of an answer."""

    def __init__(self, device: EchoDevice):
        self.device = device

    def prepare(self, weights: Any, *, shared: bool = False) -> Any:
        return weights

    def replace(self, make: Any) -> None:
        self.device.added = make()

    def sleep(self, *, keep: bool) -> None:
        self.device.added = self.device.added if keep else None

    def wake(self) -> None:
        if self.device.added is None:
            raise UserError("the engine has no weights: call refit before it wakes up")
