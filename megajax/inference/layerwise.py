"""The forward pass of a language model, reading its weights layer by layer, for models larger than memory.

B rows, S positions, D hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from megajax.batch import Params
from megajax.checkpoint.boxes import Box
from megajax.checkpoint.weights.foreign import WeightSource, declared_by, one_device
from megajax.config.errors import UserError
from megajax.layers.context import Context
from megajax.layers.param import ParamSpec, bind, matrices_of, path_of
from megajax.layers.stack.stack import BLOCKS
from megajax.mesh.layout import exact
from megajax.models.protocol import demand_causal

STACK = "stack."
type MatrixInputs = Mapping[str, Array]
"""Path of a matrix in its block -> its inputs, [B, S, *inputs]."""
type Watch = Callable[["Layer", Params, MatrixInputs], None]
"""Called with a layer, its weights by path in the block, and the inputs of its matrices."""


class Layer(NamedTuple):
    """A layer of the stack."""

    block: int
    """Number of the stacked block with its weights."""
    row: int
    """Row of the stacked weights."""
    number: int
    """Number of the layer in the model."""


class LayerByLayer:
    """A causal model with a single stack, in float32 on one device."""

    def __init__(self, model: Any, weights: WeightSource):
        """Raises UserError for another kind of model."""
        demand_causal(model)
        if len(model.stacks()) > 1:
            raise UserError(
                f"{type(model).__name__} has several stacks: only models with one can be read layer by layer"
            )
        self.model, self._weights, self._declared = model, weights, declared_by(model)
        self._abstract: Any = nnx.eval_shape(one_device(model))

    def states(self, tokens: np.ndarray, *, rows: int, watch: Watch | None = None) -> list[Array]:
        """tokens int32 [B, S] -> the output of the stack in parts of at most `rows` rows, [rows, S, D] each."""
        parts = [jnp.asarray(tokens[first : first + rows]) for first in range(0, len(tokens), rows)]
        states = [self._enter(self._outer, part) for part in parts]
        for layer in self.layers():
            values = dict(self._values(f"{STACK}{BLOCKS}{layer.block}.", layer.row))
            for place, x in enumerate(states):
                run_block = self._block(layer.block, watch is not None)
                states[place], inputs = run_block(values, self._shared, x, layer.number)
                if watch is not None:
                    watch(layer, values, inputs)
        return states

    def logits(self, x: Array) -> Array:
        """Output of the stack [B, S, D] -> float32 [B, S, V]."""
        return self._leave(self._outer, x)

    def layers(self) -> list[Layer]:
        """The layers in the order of the model."""
        numbers = enumerate(self._abstract.stack.numbers)
        layers = [Layer(block, row, number) for block, rows in numbers for row, number in enumerate(rows)]
        return sorted(layers, key=lambda layer: layer.number)

    @cached_property
    def _outer(self) -> Params:
        """Weights that do not belong to a layer."""
        outer = [path for path in self._declared if not path.startswith((STACK, "predictions."))]
        return {path: self._read_weight(path, None) for path in outer}

    @cached_property
    def _shared(self) -> Params:
        """Weights that all layers share, by path in the stack."""
        paths = [path for path in self._declared if path.startswith(STACK) and not self._declared[path].layers]
        return {path.removeprefix(STACK): self._read_weight(path, None) for path in paths}

    def _values(self, prefix: str, row: int) -> Iterator[tuple[str, Array]]:
        for path in self._declared:
            if path.startswith(prefix):
                yield path.removeprefix(prefix), self._read_weight(path, row)

    def _read_weight(self, path: str, row: int | None) -> Array:
        """Read a weight, or a row of it; zeros for an observation that is not stored."""
        spec: ParamSpec = self._declared[path]
        sides = [slice(0, size) for size in spec.shape]
        box: Box = tuple(sides) if row is None else (slice(row, row + 1), *sides[1:])
        stored = path in self._weights.shapes()
        values = self._weights.read(path, box) if stored else np.zeros([side.stop - side.start for side in box])
        return jnp.asarray(values if row is None else values[0], spec.dtype)

    @cached_property
    def _enter(self) -> Callable[[Params, Array], Array]:
        def enter(values: Params, tokens: Array) -> Array:
            model = _partly_bound(self._abstract, values)
            return model.enter(model.embed_tokens(tokens), _context(tokens.shape))

        return jax.jit(enter)

    @cached_property
    def _leave(self) -> Callable[[Params, Array], Array]:
        def leave(values: Params, x: Array) -> Array:
            model = _partly_bound(self._abstract, values)
            return model.logits(model.final_norm(x))

        return jax.jit(leave)

    def _block(self, number: int, watched: bool) -> Callable[..., tuple[Array, MatrixInputs]]:
        return self._blocks.setdefault((number, watched), jax.jit(partial(self._run_block, number, watched)))

    @cached_property
    def _blocks(self) -> dict[tuple[int, bool], Callable[..., tuple[Array, MatrixInputs]]]:
        return {}

    def _run_block(
        self, number: int, watched: bool, values: Params, shared: Params, x: Array, layer: Array
    ) -> tuple[Array, MatrixInputs]:
        graph, state = nnx.split(self._abstract.stack.blocks[number])
        block, inputs = bind(nnx.merge(graph, state), values), dict[str, Array]()
        for path, matrix in matrices_of(block).items() if watched else ():
            matrix.quantized = InputRecorder(path, inputs)
        ctx = _context(x.shape[:2])._replace(bias=shared.get("relative.table"))
        return block(x, ctx.for_layer(layer)), inputs


class InputRecorder:
    """Takes the place of a matrix's `Quantized` and records the matrix's inputs. The matrix is stored as floats."""

    def __init__(self, path: str, inputs: dict[str, Array]):
        self._path, self._inputs = path, inputs

    def product(self, equation: str, x: Array, leaves: Mapping[str, Array]) -> Array:
        self._inputs[self._path] = x
        return exact(equation, x, leaves[""])

    def whole(self, leaves: Mapping[str, Array]) -> Array:
        return leaves[""]


def _context(shape: Sequence[int]) -> Context:
    index = jnp.arange(shape[1])
    return Context(jnp.broadcast_to(index[None], tuple(shape)), index)


def _partly_bound[M: nnx.Module](model: M, values: Params) -> M:
    """The abstract module with these values; its other leaves stay abstract."""
    graph, state = nnx.split(model)
    flat = [
        (parts, leaf.replace(values[path_of(parts, leaf)]) if path_of(parts, leaf) in values else leaf)
        for parts, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(flat))
