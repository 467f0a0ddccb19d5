"""Weights and observations: declared on one line, listed, initialised and put back into a module by their paths.

Outside modules, the weights of a model are a flat dict from dotted path to array; a stack's weights have a leading
`layer` dimension.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import EllipsisType, MappingProxyType
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.batch import Params
from megajax.kernels.grouped.capability import GroupedKernel, GroupedSizes
from megajax.kernels.grouped.matmul import capable, grouped_matmul
from megajax.layers.low_rank import ADAPTERS, LORA_A, LORA_B, MAGNITUDE, Decomposed, LowRank
from megajax.layers.quantized import BESIDE, Quantized, StoredProduct
from megajax.mesh.layer_observations import REDUCTIONS, Observed, Reduction, Updater
from megajax.mesh.layout import Layout, Matmul
from megajax.mesh.replicated_heads import copy_heads
from megajax.mesh.sharding_rules import LogicalAxes


@dataclass(frozen=True, slots=True)
class Normal:
    """Gaussian with mean 0."""

    std: float

    def draw(self, key: Array, shape: tuple[int, ...]) -> Array:
        return jax.random.normal(key, shape, jnp.float32) * self.std


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform between two numbers."""

    low: float
    high: float

    def draw(self, key: Array, shape: tuple[int, ...]) -> Array:
        return jax.random.uniform(key, shape, jnp.float32, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Constant:
    """The same value everywhere."""

    value: float

    def draw(self, key: Array, shape: tuple[int, ...]) -> Array:
        del key
        return jnp.full(shape, self.value, jnp.float32)


ROUNDED = ".rounded"
"""Path suffix of the operands of a `Matrix`, see `operands_for_step`."""
WEIGHTS_STREAM = 0
"""Stream of the random numbers of initial weights, separate from others with the same seed."""

ZEROS, ONES = Constant(0.0), Constant(1.0)

type RowOrder = Callable[[Sequence[int]], tuple[int, ...]]
"""Layer numbers of a stacked weight, in order -> for each row the index of its layer; -1 for a padding row of zeros."""
type Role = Literal["weight", "filter", "bias", "gain", "rate", "quantized", "observation"]
"""Kinds of weights that update rules distinguish. A filter is a convolution kernel and decays like a matrix. A rate
belongs to a recurrence: no weight decay, used in float32. Quantized values and their scales are not trained or cast."""


class Init(Protocol):
    """Initial values; a frozen dataclass, so two are equal if their settings are."""

    def draw(self, key: Array, shape: tuple[int, ...]) -> Array:
        """Float32 values that depend only on the key of the weight (and layer)."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSettings:
    """Settings that all layers of a model share."""

    layout: Layout
    hidden: int
    std: float
    """Standard deviation of initial weights."""
    output_std: float
    """Standard deviation for matrices that write to the residual stream."""
    score_scale: Callable[[int], float] = lambda size: size**-0.5
    """Head size -> factor on attention scores, for layers without their own."""
    length: int | None = None
    """Tokens of the longest text that the model takes; None: unknown."""
    padded: bool = False
    """Rows hold one text followed by padding with segment 0."""
    replays_experts: bool = False
    """Batches may have the experts of tokens, see `Context.experts`."""
    on_every_stage: bool = False
    """All pipeline stages run the layer on the same tokens (layers after the stack): each stage contributes a share of
    the gradients and observations that the layer makes itself."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Declaration of a weight or observation: determines its values, layout and update rule."""

    path: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init
    role: Role
    init_path: str
    """Path that seeds the initial values, independent of the place of the layer in a pattern."""
    layers: tuple[int, ...]
    """Layer numbers along the leading dimension, -1 for a padding row; () outside a stack."""
    updater: Updater | None = None
    """Updater of an observation; None for a weight."""
    dtype: str = "float32"

    def keeps_dtype(self) -> bool:
        """Whether layers use the stored dtype; other weights are cast to the compute dtype."""
        return self.role in ("rate", "quantized", "observation")

    def observed(self) -> Updater:
        """The updater of an observation. Raises TypeError for a weight."""
        if self.updater is None:
            raise TypeError(f"{self.path} is a weight, not an observation")
        return self.updater


def param(shape: tuple[int, ...], axes: LogicalAxes, *, init: Init, role: Role = "weight") -> nnx.Param:
    """Declare a weight: shape, logical axes, initial values. Zeros until initialised."""
    return _leaf(nnx.Param, shape, axes, init=init, role=role)


class Observation(nnx.Variable):
    """A leaf whose cotangent is an observed statistic; see megajax.mesh.layer_observations."""

    reduction: Reduction


def observation(declared: Observed) -> Observation:
    """Declare an observation of a layer, an argument of `observe`.

    Raises ValueError for the axis `embed`: ZeRO and FSDP shard weights along it, but not observations.
    """
    if "embed" in declared.axes:
        raise ValueError(f"observations are not sharded over embed: use None in the axes {declared.axes}")
    more: dict[str, Any] = {"reduction": declared.reduction, "updater": declared.updater}
    return _leaf(Observation, declared.shape, declared.axes, init=ZEROS, role="observation", **more)


class Adapter(nnx.Param):
    """A weight of a low-rank adapter: trained while the weights of the model are frozen."""


class Matrix(nnx.Module):
    """A weight for `Layout.dot` or a grouped matmul, with its recipe state, adapter and quantization.

    The array has the path of the matrix itself (`query`). Below it are the observations of the recipe
    (`query.amax.max`), the weights of an adapter (`query.lora_a`, `query.lora_b`, `query.lora_magnitude`) and the
    scales of a quantized array (`query.scale`).
    """

    def __init__(
        self, layout: Layout, array: nnx.Param, beside: Mapping[str, Observed] = MappingProxyType({}), inputs: int = 1
    ):
        """beside: observations by name; inputs: number of contracted dimensions, the first ones after those of layers
        and experts."""
        self.layout, self.array, self.inputs = layout, array, inputs
        self.low_rank: LowRank | None = None
        self.quantized: StoredProduct | None = None
        self.rounded: Any = None
        self.names = tuple(beside)
        for name, declared in beside.items():
            setattr(self, name, observation(declared))

    def __getitem__(self, key: EllipsisType) -> Array:
        """matrix[...]: the array for products, with a copy of each key-value head on every device that uses it.
        A training step passes weights with these copies; elsewhere they are made here."""
        del key
        return self.multiplied(self._stored())

    def product(self, multiply: Matmul, equation: str, x: Array, *out: str | None) -> Array:
        """Product of x and the array with its adapter, if any. multiply: the recipe for arrays that are not quantized;
        out: logical axes of the product."""
        product = partial(self._product, multiply, equation)
        if self.low_rank is None:
            return product(x)
        leaves = {end: with_head_copies(self.layout, leaf) for end, leaf in self._adapter_leaves().items()}
        return self.low_rank.adapted(self.layout, equation, x, product, lambda: self[...], leaves, *out)

    def _product(self, multiply: Matmul, equation: str, x: Array) -> Array:
        if self.quantized is not None:
            return self.quantized.product(equation, x, self._stored())
        return multiply(equation, x, self[...], **{name: getattr(self, name)[...] for name in self.names})

    def axes(self) -> LogicalAxes:
        """Logical axes of the array for products."""
        return self.array.axes[len(self.array.axes) - self.array[...].ndim :]

    def multiplied(self, values: Mapping[str, Array]) -> Array:
        """The array for products, from the values of `leaves`; float32 if it is quantized."""
        return values[""] if self.quantized is None else self.quantized.whole(values)

    def grouped(self, rows: Array, sizes: Array, kernel: GroupedKernel, values: Mapping[str, Array]) -> Array:
        """Each row times the array of its group, plus the output of the adapter, if any; in an island.

        values: of `leaves`, on this device.
        """
        array, multiply = self.multiplied(values), self.layout.grouped
        if multiply is None or self.quantized is not None:
            y = grouped_matmul(rows, array, sizes, kernel)
        else:
            kernels = partial(capable, kernel, GroupedSizes(rows.shape[0], *array.shape))
            beside = {name: values[f".{name}"] for name in self.names}
            axes, rounded = self.layout.sharded_axes("expert_mlp"), values.get(ROUNDED)
            y = multiply(rows, array, sizes, kernels, axes=axes, rounded=rounded, **beside)
        if self.low_rank is None:
            return y
        return y + self.low_rank.grouped(rows, values[LORA_A], values[LORA_B], sizes, kernel)

    def _stored(self) -> dict[str, Array]:
        return {end: with_head_copies(self.layout, leaf) for end, leaf in self._own_leaves().items()}

    def _own_leaves(self) -> dict[str, nnx.Param]:
        """The leaves without those of the adapter."""
        return {"": self.array} | {end: getattr(self, end[1:]) for end in BESIDE if hasattr(self, end[1:])}

    def leaves(self) -> dict[str, nnx.Variable]:
        """The array, its scales, its adapter and observations, by path suffix after the path of the matrix."""
        observed = {f".{name}": getattr(self, name) for name in self.names}
        return {**self._own_leaves(), **self._adapter_leaves(), **observed}

    def _adapter_leaves(self) -> dict[str, Adapter]:
        return {end: getattr(self, end[1:]) for end in ADAPTERS if hasattr(self, end[1:])}

    def smaller_side(self) -> int:
        """The smaller of the numbers of inputs and outputs: the maximum rank."""
        shape = self.array.shape[sum(name in ("layer", "expert") for name in self.array.axes) :]
        return min(prod(shape[: self.inputs]), prod(shape[self.inputs :]))

    def quantize(self, quantized: Quantized) -> None:
        """Store the array in this form. Call `adapt` before, if there is an adapter."""
        self.quantized = quantized
        array = self.array
        for end, (shape, axes, dtype) in quantized.declared(array.shape, array.axes).items():
            leaf = _leaf(nnx.Param, shape, axes, init=ZEROS, role="quantized", dtype=dtype)
            origin = f"{array.init_path}{end}" if array.layers else None
            setattr(self, end[1:] or "array", _changed(leaf, leaf[...], layers=array.layers, init_path=origin))

    def adapt(self, rank: int, scale: float, rate: float, *, decomposed: bool = False) -> None:
        """Add an adapter: A [inputs, rank] and B [rank, outputs], laid out like the array.

        scale: factor on its output; rate: dropout rate of its input; decomposed: `Decomposed`, with a magnitude of each
        output. Initial values as in PEFT: A uniform up to 1 / sqrt(inputs), which is Kaiming's with a = sqrt(5), B
        zeros.
        """
        shape, axes = self.array.shape, self.array.axes
        first = sum(name in ("layer", "expert") for name in axes)
        end = first + self.inputs
        bound = prod(shape[first:end]) ** -0.5
        self.low_rank = (Decomposed if decomposed else LowRank)(scale, tuple(axes[first:end]), rate)
        self._add(LORA_A, (*shape[:end], rank), (*axes[:end], "rank"), Uniform(-bound, bound))
        self._add(LORA_B, (*shape[:first], rank, *shape[end:]), (*axes[:first], "rank", *axes[end:]), ZEROS)
        if decomposed:
            # Not `embed`: a gain of the residual stream would have a copy on each device of `tensor`.
            outputs = (None if axis == "embed" else axis for axis in axes[end:])
            self._add(MAGNITUDE, (*shape[:first], *shape[end:]), (*axes[:first], *outputs), ZEROS, role="gain")

    def _add(self, end: str, shape: tuple[int, ...], axes: LogicalAxes, init: Init, role: Role = "weight") -> None:
        origin, layers = self.array.init_path, self.array.layers
        leaf = _leaf(Adapter, shape, axes, init=init, role=role)
        setattr(self, end[1:], _changed(leaf, leaf[...], layers=layers, init_path=f"{origin}{end}" if layers else None))


def operands_for_step(layout: Layout, model: Any, weights: Params) -> dict[str, Any]:
    """What `Layout.matrices` makes of the experts [layers, E, K, N] of stacks, layer by layer, by path; arrays have the
    leading dimension of the weights. model: a module; weights: as layers use them, by path in it."""
    rounded: dict[str, Any] = {}
    if layout.matrices is None:
        return rounded
    for path, of in matrices_of(model).items():
        axes = {"": of.array.axes} | {f".{name}": getattr(of, name).axes for name in of.names}
        if axes[""][:2] == ("layer", "expert") and of.quantized is None:
            leaves = {"": weights[path]}
            leaves |= {f".{name}": weights[f"{path}.{name}.{getattr(of, name).reduction}"] for name in of.names}
            rounded[path + ROUNDED] = _operands(layout, layout.matrices, leaves, axes)
    return rounded


def _operands(
    layout: Layout, make: Callable[..., Any], leaves: Mapping[str, Array], axes: Mapping[str, LogicalAxes]
) -> Any:
    def of_layer(layer: Mapping[str, Array], over: tuple[str, ...] = layout.sharded_axes("expert_mlp")) -> Any:
        return make(layer[""], *(layer[end] for end in axes if end), axes=over)

    like = {end: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for end, leaf in leaves.items()}
    out = operand_axes(jax.eval_shape(partial(of_layer, over=()), like), axes[""][1:], ("layer",))
    return layout.island(partial(jax.lax.map, of_layer), (axes,), out)(leaves)


def give_operands(block: nnx.Module, weights: Mapping[str, Any], prefix: str) -> None:
    """Gives the matrices of a block the operands among the weights of a layer, by prefix and path in the block."""
    rounded = {path for path in weights if path.startswith(prefix) and path.endswith(ROUNDED)}
    for path, of in matrices_of(block).items() if rounded else ():
        of.rounded = nnx.data(weights.get(f"{prefix}{path}{ROUNDED}"))


def operand_axes(rounded: Any, axes: LogicalAxes, before: LogicalAxes = ()) -> Any:
    """Logical axes of the arrays of such operands, from those of the matrices [E, K, N]; with more axes before.

    Along sharded axes every device has its own, also of arrays that are smaller than the matrices.
    """
    first, inner, outer = axes
    orders = (first, outer, inner), (first, inner, outer)
    return tuple(
        jax.tree.map(lambda leaf, order=order: (*before, *order[: 3 if leaf.ndim == 3 else 1]), operand)
        for operand, order in zip(rounded, orders, strict=True)
    )


def with_head_copies(layout: Layout, leaf: nnx.Param) -> Array:
    """A weight, with a copy of each key-value head (or group) on every device that uses it."""
    array = leaf[...]
    return copy_heads(layout, array, leaf.axes[len(leaf.axes) - array.ndim :])


def matrix(
    settings: LayerSettings, shape: tuple[int, ...], axes: LogicalAxes, *, init: Init | None = None, inputs: int = 1
) -> Matrix:
    """Declare a weight for `Layout.dot`. init: by default that of matrices that do not write to the residual stream;
    inputs: number of leading dimensions that a product contracts."""
    array = param(shape, axes, init=init or Normal(settings.std))
    return Matrix(settings.layout, array, settings.layout.beside(shape, axes), inputs)


def matrices_of(module: nnx.Module) -> dict[str, Matrix]:
    """The matrices of a module by path."""
    nodes = nnx.iter_graph(module)
    return {".".join(map(str, path)): node for path, node in nodes if isinstance(node, Matrix)}


def _leaf[V: nnx.Variable](
    kind: type[V], shape: tuple[int, ...], axes: LogicalAxes, *, dtype: str = "float32", **metadata: Any
) -> V:
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and logical axes {axes} differ in length")
    return kind(jnp.zeros(shape, dtype), axes=tuple(axes), init_path=None, layers=(), **metadata)


def stacked(block: nnx.Module, layers: tuple[int, ...]) -> nnx.Module:
    """The module with a leading `layer` dimension on every leaf. layers: layer numbers in the model."""
    graph, state = nnx.split(block)
    leaves = []
    for parts, leaf in nnx.to_flat_state(state):
        value = jnp.zeros((len(layers), *leaf.shape), leaf.dtype)
        name = "layer." + path_of(parts, leaf)
        leaves.append((parts, _changed(leaf, value, axes=("layer", *leaf.axes), layers=layers, init_path=name)))
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def reordered[M: nnx.Module](model: M, order_of: RowOrder) -> M:
    """An abstract module with the rows of its stacked leaves in another order."""
    graph, state = nnx.split(model)
    flat = []
    for parts, leaf in nnx.to_flat_state(state):
        if leaf.layers:
            layers = tuple(-1 if row < 0 else leaf.layers[row] for row in order_of(leaf.layers))
            leaf = _changed(leaf, jax.ShapeDtypeStruct((len(layers), *leaf.shape[1:]), leaf.dtype), layers=layers)
        flat.append((parts, leaf))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _changed[V: nnx.Variable](leaf: V, value: Array | jax.ShapeDtypeStruct, **changes: Any) -> V:
    return type(leaf)(value, **(leaf.get_metadata() | changes))


def path_of(parts: Sequence[object], leaf: nnx.Variable) -> str:
    """Path of a leaf in a module; that of an observation ends in its reduction. See also `Matrix`."""
    names = [str(part) for part in parts]
    if isinstance(leaf, Observation):
        return ".".join([*names, leaf.reduction])
    names = names[:-1] if names[-1] == "array" else names
    if names[-1] in REDUCTIONS:
        raise ValueError(f"{'.'.join(names)}: {names[-1]} is the name of a reduction of observations, not of a weight")
    return ".".join(names)


def specs(model: nnx.Module, kind: type[nnx.Variable] = nnx.Param) -> dict[str, ParamSpec]:
    """Every weight of a module, or every observation, by path."""
    declared = {}
    for parts, leaf in nnx.to_flat_state(nnx.state(model, kind)):
        path, shape, updater = path_of(parts, leaf), tuple(leaf.shape), leaf.get_metadata().get("updater")
        origin = leaf.init_path or path
        metadata = leaf.axes, leaf.init, leaf.role, origin, leaf.layers, updater, leaf.dtype.name
        declared[path] = ParamSpec(path, shape, *metadata)
    return declared


def initial_values(declared: Mapping[str, ParamSpec], seed: int) -> Params:
    """Weights that depend only on (seed, path, layer number), not on the layout; float32 unless quantized.

    The random bits are equal on all layouts. The Gaussian transform takes a logarithm, whose last bit may round
    differently in a vectorised loop: a few percent of the values differ by one unit in the last place (2e-7 relative)
    between layouts.
    """
    weights = jax.random.fold_in(jax.random.key(seed), WEIGHTS_STREAM)
    return {path: _draw(spec, weights).astype(spec.dtype) for path, spec in declared.items()}


def _draw(spec: ParamSpec, key: Array) -> Array:
    key = jax.random.fold_in(key, zlib.crc32(spec.init_path.encode()))
    if not spec.layers:
        return spec.init.draw(key, spec.shape)
    layers = jnp.asarray(spec.layers)
    keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(layers)
    values = jax.vmap(lambda key: spec.init.draw(key, spec.shape[1:]))(keys)
    if min(spec.layers) >= 0:
        return values
    return jnp.where(layers.reshape(-1, *[1] * (values.ndim - 1)) >= 0, values, 0)


def bind[M](model: M, values: Params) -> M:
    """A copy of a (possibly abstract) module whose leaves are `values`, by path."""
    graph, state = nnx.split(model)
    flat = [(parts, leaf.replace(values[path_of(parts, leaf)])) for parts, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))
