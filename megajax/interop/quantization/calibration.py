"""What quantization of a stored model needs: calibration on a text, and a comparison with the model before.

Both read a model's weights layer by layer, for models larger than memory. Calibration gives factors of input channels
that reduce rounding errors, and scales of activations. Factors are searched as in AWQ (Lin et al. 2023,
"AWQ: Activation-aware Weight Quantization", section 3.2): an input channel is divided by s = mean(|x|)^a and its
weights are multiplied by s before they are rounded. The search tries several a in [0, 1] and takes the one with the
least error of the matrix's output; a = 0 changes nothing.

B rows, S positions, D hidden, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import exp
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from megajax.batch import Params
from megajax.checkpoint.boxes import Box
from megajax.checkpoint.weight_source import WeightSource
from megajax.config.errors import UserError
from megajax.interop.weights.foreign import declared_by, one_device
from megajax.interop.weights.quantize_on_load import Calibrated
from megajax.layers.context import Context
from megajax.layers.param import ParamSpec, bind, matrices_of, path_of
from megajax.layers.quantized import AMAX, FACTOR, Quantized
from megajax.layers.stack.stack import BLOCKS
from megajax.mesh.layout import exact
from megajax.models.protocol import demand_causal
from megajax.tokenizers.base import Tokenizer

POWERS = tuple(step / 10 for step in range(11))
SAMPLED = 256
"""Maximum number of tokens of a batch on which errors are measured."""
SMALLEST = 1e-4
"""Lower limit of a channel's mean magnitude relative to the largest, so that idle channels get no extreme factor."""
LETTERS = "abcdefgh"
STACK = "stack."
type MatrixInputs = Mapping[str, Array]
"""Path of a matrix in its block -> its inputs, [B, S, *inputs]."""
type Watch = Callable[["CalibratedLayer", Params, MatrixInputs], None]
"""Called with a layer, its weights by path in the block, and the inputs of its matrices."""


class CalibratedLayer(NamedTuple):
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

    def layers(self) -> list[CalibratedLayer]:
        """The layers in the order of the model."""
        numbers = enumerate(self._abstract.stack.numbers)
        layers = [CalibratedLayer(block, row, number) for block, rows in numbers for row, number in enumerate(rows)]
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
        stored = path in self._weights.shapes
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


class SampledInputs(NamedTuple):
    """Inputs of a matrix in one layer."""

    sample: Array
    """[tokens, *inputs]."""
    mean: Array
    """[*inputs]: mean magnitude."""
    largest: Array
    """[*inputs]: largest magnitude."""


class Calibration(NamedTuple):
    """Calibration of all matrices that the text reached."""

    matrices: Mapping[str, Calibrated]
    """Calibration of each matrix, by path."""
    errors: Mapping[str, tuple[float, float]]
    """Path -> relative error of the output, root mean square over layers: (without factors, with factors)."""


def calibrate(
    model: Any, weights: WeightSource, quantized: Mapping[str, Quantized], tokens: np.ndarray, *, rows: int
) -> Calibration:
    """Factors and activation scales from the float model and a text.

    quantized: path -> how the matrix will be stored; tokens: int32 [B, S]; rows: batch size.
    """
    parts = defaultdict[str, list[SampledInputs]](list)
    searched = defaultdict[str, list[tuple[np.ndarray, np.ndarray, float, float]]](list)
    batches = -(-len(tokens) // rows)

    def watch(layer: CalibratedLayer, values: Params, inputs: MatrixInputs) -> None:
        for name, x in inputs.items():
            path = f"stack.blocks.{layer.block}.{name}"
            scheme = quantized.get(path)
            if scheme is None or not (scheme.balanced or scheme.static):
                continue
            matrix_inputs = parts[path]
            matrix_inputs.append(_inputs(scheme.form.inputs, x))
            if len(matrix_inputs) == batches:
                searched[path].append(_search(scheme, values[name], _joined(matrix_inputs)))
                matrix_inputs.clear()

    LayerByLayer(model, weights).states(tokens, rows=rows, watch=watch)
    matrices, errors = {}, {}
    for path, layers in searched.items():
        factors, amaxes, before, after = zip(*layers, strict=True)
        scheme = quantized[path]
        matrices[path] = Calibrated(
            np.stack(factors) if scheme.balanced else None, np.stack(amaxes) if scheme.static else None
        )
        errors[path] = (float(np.mean(before)) ** 0.5, float(np.mean(after)) ** 0.5)
    return Calibration(matrices, errors)


@partial(jax.jit, static_argnums=0)
def _inputs(dimensions: int, x: Array) -> SampledInputs:
    flat = x.astype(jnp.float32).reshape(-1, *x.shape[x.ndim - dimensions :])
    every = max(1, flat.shape[0] // SAMPLED)
    return SampledInputs(flat[::every], jnp.abs(flat).mean(0), jnp.abs(flat).max(0))


def _joined(parts: list[SampledInputs]) -> SampledInputs:
    samples, means, largest = zip(*parts, strict=True)
    return SampledInputs(jnp.concatenate(samples), jnp.stack(means).mean(0), jnp.stack(largest).max(0))


def _search(scheme: Quantized, w: Array, inputs: SampledInputs) -> tuple[np.ndarray, np.ndarray, float, float]:
    """(factor [*inputs], amax [], relative square error without the factor, and with it)."""
    mean = jnp.maximum(inputs.mean, inputs.mean.max() * SMALLEST)
    # Constant if the text never reached the matrix.
    mean = jnp.where(mean.max() > 0, mean, 1.0)
    best: tuple[float, Array] | None = None
    first = 0.0
    for power in POWERS if scheme.balanced else POWERS[:1]:
        s = mean**power
        factor = jnp.sqrt(s.max() * s.min()) / s
        error = float(_error(scheme, w, inputs, factor))
        first = error if power == 0 else first
        if best is None or error < best[0]:
            best = error, factor
    assert best is not None
    error, factor = best
    return np.asarray(factor), np.asarray(_amax(inputs, factor)), first, error


@partial(jax.jit, static_argnums=0)
def _error(scheme: Quantized, w: Array, inputs: SampledInputs, factor: Array) -> Array:
    """Squared error of the outputs for the sample, relative to their sum of squares."""
    leaves = {FACTOR: factor if scheme.balanced else None, AMAX: _amax(inputs, factor) if scheme.static else None}
    output_dims, outputs = w.ndim - scheme.form.inputs, inputs.sample.ndim - 1
    second = LETTERS[:outputs] + LETTERS[outputs : outputs + output_dims].upper()
    equation = f"t{LETTERS[:outputs]},{second}->t{second[outputs:]}"
    exact_output = jnp.einsum(equation, inputs.sample, w)
    rounded_output = scheme.product(equation, inputs.sample, scheme.quantized(w, leaves[FACTOR], leaves[AMAX]))
    return jnp.sum((rounded_output - exact_output) ** 2) / jnp.maximum(jnp.sum(exact_output**2), 1e-30)


def _amax(inputs: SampledInputs, factor: Array) -> Array:
    """Largest input magnitude after scaling; 1 if the text never reached the matrix."""
    amax = jnp.max(inputs.largest * factor)
    return jnp.where(amax > 0, amax, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenDifference:
    """Difference between a model and a version derived from it, over the tokens of a text."""

    tokens: int
    """Number of predicted tokens."""
    largest_logit_difference: float
    mean_logit_difference: float
    """Mean magnitude over tokens and vocabulary."""
    kl_divergence: float
    """Mean of KL(before || after) over tokens, in nats."""
    same_likeliest: float
    """Share of tokens for which both have the same most likely next token."""
    loss_before: float
    """Mean negative log-likelihood of the text's tokens, in nats."""
    loss_after: float

    @property
    def perplexity_before(self) -> float:
        return exp(self.loss_before)

    @property
    def perplexity_after(self) -> float:
        return exp(self.loss_after)


def text_rows(tokenizer: Tokenizer, text: str, *, length: int, most: int) -> np.ndarray:
    """The first tokens of a text as rows int32 [B, S] of at most `length`, and at most `most` tokens in all.

    Raises UserError for a text of fewer than two tokens.
    """
    tokens = np.asarray(tokenizer.encode(text[: 16 * most]), np.int32)[:most]
    length = min(length, len(tokens))
    if length < 2:
        raise UserError(f"a text of {len(tokens)} tokens is too short: give a few thousand tokens")
    rows = len(tokens) // length
    return tokens[: rows * length].reshape(rows, length)


def compare(before: LayerByLayer, after: LayerByLayer, tokens: np.ndarray, *, rows: int) -> TokenDifference:
    """tokens: int32 [B, S]; every token but the first of each row is predicted. rows: rows of a forward pass."""
    states = [model.states(tokens, rows=rows) for model in (before, after)]
    sums: list[Sequence[Array]] = []
    for place, (x, y) in enumerate(zip(*states, strict=True)):
        part = tokens[place * rows : (place + 1) * rows]
        for row in range(len(part)):  # logits of one row at a time
            row_slice = slice(row, row + 1)
            sums.append(_sums(before.logits(x[row_slice]), after.logits(y[row_slice]), jnp.asarray(part[row_slice])))
    largest, *totals = (np.asarray(values, np.float64) for values in zip(*sums, strict=True))
    count = tokens.shape[0] * (tokens.shape[1] - 1)
    mean, kl, agreements, first, second = (float(values.sum() / count) for values in totals)
    return TokenDifference(
        tokens=count,
        largest_logit_difference=float(largest.max()),
        mean_logit_difference=mean,
        kl_divergence=kl,
        same_likeliest=agreements,
        loss_before=first,
        loss_after=second,
    )


@jax.jit
def _sums(before: Array, after: Array, tokens: Array) -> tuple[Array, ...]:
    """Sums of the differences of logits [B, S, V], over all but the last position."""
    before, after, labels = before[:, :-1], after[:, :-1], tokens[:, 1:, None]
    distance, (p, q) = jnp.abs(before - after), (jax.nn.log_softmax(values) for values in (before, after))
    return (
        distance.max(),
        distance.mean(-1).sum(),
        (jnp.exp(p) * (p - q)).sum(),
        (before.argmax(-1) == after.argmax(-1)).sum(),
        *(-jnp.take_along_axis(values, labels, -1).sum() for values in (p, q)),
    )
