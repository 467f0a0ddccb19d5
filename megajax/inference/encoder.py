"""An engine of models that read whole texts and give their embeddings, and no text: compiled programs, padded to a few
lengths and numbers of texts, and a device that takes whole prompts. There is no cache, and no next token."""

from collections import abc
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.batch import Params
from megajax.inference.loaded_model import LoadedModel
from megajax.inference.request import Announced, Pooled, Sampled, Sequence, Step
from megajax.inference.step_arrays import lengths_up_to, smaller_counts

POOLINGS = ("first", "last", "mean")
"""The kinds of `request.Pooling`, numbered in this order."""
TILE = 32
"""Tokens in which the scheduler counts prompts."""


class EncoderPrograms:
    """The programs of a model that has `text_states`, one for each number and length of texts."""

    def __init__(self, loaded: LoadedModel, *, rows: int, length: int):
        """rows: maximum number of texts of a replica in a program; length: maximum number of tokens of a text."""
        self.loaded, self.weights = loaded, dict(loaded.weights)
        self.replicas = loaded.replicas
        self.counts, self.lengths = smaller_counts(rows, least=1), lengths_up_to(length)
        self.announced: Announced = lambda name, arguments: nullcontext()
        self._compiled: dict[tuple[int, int], jax.stages.Compiled] = {}

    @property
    def count(self) -> int:
        """Programs that `compile` compiles."""
        return len(self.counts) * len(self.lengths)

    def compile(self) -> Iterator[str]:
        """Compile all programs; yields the name of each after its compilation."""
        for count, length in product(self.counts, self.lengths):
            self._everywhere("compile", count, length)
            yield f"{count} texts of {length} tokens"

    def embed(self, tokens: np.ndarray, counts: np.ndarray, poolings: np.ndarray) -> Array:
        """Dispatch texts of all replicas -> float32 [texts, D]: the sums of the states that are pooled.

        tokens: int32 [texts, L], padded; counts: int32 [texts], tokens of each; poolings: int32 [texts], as `POOLINGS`.
        """
        return self._everywhere("embed", tokens, counts, poolings)

    def _everywhere(self, name: str, *arguments: object) -> Any:
        """Run an operation on the devices of all processes -> its result."""
        with self.announced(name, arguments):
            return self.operate(name, *arguments)

    def operate(self, name: str, *arguments: Any) -> Any:
        """Run this process's part of an operation, as in `Programs`."""
        match name, arguments:
            case "embed", (tokens, counts, poolings):
                program = self._program(len(tokens) // self.replicas, tokens.shape[1])
                return program(self.weights, tokens, counts, poolings)
            case "compile", (count, length):
                return self._program(count, length)
            case _:
                raise ValueError(f"{name} is no operation")

    def _program(self, count: int, length: int) -> jax.stages.Compiled:
        """The program of so many texts of each replica, compiled when first needed."""
        loaded = self.loaded

        def embed(weights: Params, tokens: Array, counts: Array, poolings: Array) -> Array:
            index = jnp.arange(length)[None]
            present = index < counts[:, None]
            states = loaded.bound(weights).text_states(tokens, present.astype(jnp.int32)).astype(jnp.float32)
            chosen = [index == 0, index == counts[:, None] - 1, present]
            pooled = jnp.select([poolings[:, None] == number for number in range(len(POOLINGS))], chosen)
            return jnp.einsum("bld,bl->bd", states, pooled.astype(jnp.float32))

        if (count, length) not in self._compiled:
            with jax.set_mesh(loaded.mesh), jax.default_matmul_precision(loaded.matmul_precision):
                jitted, texts = jax.jit(embed, out_shardings=loaded.sharding()), loaded.like(count)
                lowered = jitted.lower(loaded.described().weights, loaded.like(count, length), texts, texts)
                self._compiled[count, length] = lowered.compile(compiler_options=dict(loaded.options))
        return self._compiled[count, length]


class EncoderDevice:
    """A `megajax.inference.request.EngineDevice`. Prompts of one step are grouped by their padded lengths."""

    top, drafts, prefix_sharing, window, snapshots, memory, images = 0, 0, False, None, 0, 0, None
    generates = False
    experts: abc.Callable[[int, Sequence], Any] | None = None

    def __init__(self, programs: EncoderPrograms, vocabulary: int):
        """vocabulary: ids in use."""
        self.programs, self.vocabulary, self.length = programs, vocabulary, programs.lengths[-1]
        self.rows, self.replicas = programs.counts[-1], programs.replicas
        self.tile = self.block = TILE
        blocks = -(-self.length // TILE)
        self.chunk, self.blocks = self.rows * blocks * TILE, self.rows * blocks

    def start(self, work: abc.Sequence[Step | None]) -> "EncoderStep":
        """Dispatch the prompts of a step. A part of a prompt waits until the step with its end."""
        complete = [
            [row for row, start, count in step.prompts if start + count == row.prompt] if step else [] for step in work
        ]
        groups = []
        for shorter, length in zip((0, *self.programs.lengths), self.programs.lengths, strict=False):
            rows = [[row for row in replica if shorter < row.prompt <= length] for replica in complete]
            if any(rows):
                groups.append(self._group(rows, length))
        return EncoderStep(work, groups)

    def _group(self, rows: abc.Sequence[abc.Sequence[Sequence]], length: int) -> "TextGroup":
        """The dispatched texts of each replica, all padded to a length."""
        most = max(map(len, rows))
        count = next(count for count in self.programs.counts if count >= most)
        tokens = np.zeros((self.replicas * count, length), np.int32)
        counts, poolings = (np.zeros(len(tokens), np.int32) for _ in range(2))
        places: dict[Sequence, int] = {}
        for replica, texts in enumerate(rows):
            for place, row in enumerate(texts, start=replica * count):
                tokens[place, : row.prompt], counts[place] = row.tokens[: row.prompt], row.prompt
                poolings[place], places[row] = POOLINGS.index(row.pooling or "mean"), place
        return TextGroup(places, self.programs.embed(tokens, counts, poolings))


class TextGroup(NamedTuple):
    """Texts of one padded length."""

    places: dict[Sequence, int]
    sums: Array
    """float32 [texts, D]."""


class EncoderStep:
    """A `megajax.inference.request.StartedStep` of an encoder."""

    def __init__(self, work: abc.Sequence[Step | None], groups: abc.Sequence[TextGroup]):
        self._work, self._groups = work, groups

    def choose(self) -> None:
        """There is no next token to choose."""

    def results(self) -> list[list[Sampled]]:
        vectors: dict[Sequence, np.ndarray] = {}
        for group in self._groups:
            sums = jax.device_get(group.sums)
            vectors |= {row: sums[place] for row, place in group.places.items()}
        return [[_result(vectors.get(row)) for row, _ in step.parts()] if step else [] for step in self._work]


def _result(vector: np.ndarray | None) -> Sampled:
    """The token has no meaning: no text follows."""
    if vector is None:
        return Sampled(0, 0.0)
    return Sampled(0, 0.0, finite=bool(np.isfinite(vector).all()), pooled=Pooled(0, vector))
