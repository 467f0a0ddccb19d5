"""The compiled programs of an encoder: embeddings of texts, padded to a few lengths and numbers of texts."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.batch import Params
from megajax.inference.loaded_model import LoadedModel
from megajax.inference.request import Announced
from megajax.inference.step_arrays import lengths_up_to, smaller_counts

POOLINGS = ("first", "last", "mean")
"""The kinds of `request.Pooling`, numbered in this order."""


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

    def _everywhere(self, name: str, *arguments: Any) -> Any:
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
