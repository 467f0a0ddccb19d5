"""Weights: made by one function, listed, initialised and put back into a module by their paths.

Outside modules, the weights of a model are a flat dict from dotted path to array; a stack's weights have a leading
`layer` dimension.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.batch import Params
from megajax.mesh.layout import Layout
from megajax.mesh.rules import LogicalAxes


@dataclass(frozen=True, slots=True)
class Normal:
    """Gaussian with mean 0."""

    std: float

    def draw(self, key: Array, shape: tuple[int, ...]) -> Array:
        return jax.random.normal(key, shape, jnp.float32) * self.std


@dataclass(frozen=True, slots=True)
class Constant:
    """The same value everywhere."""

    value: float

    def draw(self, key: Array, shape: tuple[int, ...]) -> Array:
        del key
        return jnp.full(shape, self.value, jnp.float32)


WEIGHTS_STREAM = 0
"""Tells the random numbers of initial weights from others that derive from the same seed."""

ZEROS, ONES = Constant(0.0), Constant(1.0)

type Init = Normal | Constant
type Role = Literal["weight", "bias", "gain", "maxima"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What every layer of a model shares."""

    layout: Layout
    hidden: int
    std: float
    """Standard deviation of initial weights."""
    output_std: float
    """The same for matrices that write to the residual stream."""
    score_scale: Callable[[int], float] = lambda size: size**-0.5
    """Factor on scores by size of a head, where a layer says none itself."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One weight as declared: everything its values, layouts and update rules derive from."""

    path: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init
    role: Role
    init_path: str
    """Path the initial values derive from: the same for a layer wherever it stands in a stack's pattern."""
    layers: tuple[int, ...]
    """Numbers of the layers along the leading dimension, -1 for a row that is no layer; () outside a stack."""


def param(shape: tuple[int, ...], axes: LogicalAxes, *, init: Init, role: Role = "weight") -> nnx.Param:
    """The only way to make a weight: shape, logical axes and initial values on one line. Zeros until initialised."""
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and logical axes {axes} differ in length")
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=tuple(axes), init=init, role=role, init_path=None, layers=())


class Maxima(nnx.Variable):
    """How large x, w and the result's gradient are expected to be where they are multiplied, float32 [3]: no weight."""


def maxima(site: Site, *names: str) -> nnx.Dict:
    """For each weight of these names that `Layout.dot` multiplies by; nothing where the layout does not track them.

    Their "gradients" are how large the three were.
    """
    metadata: Any = {"axes": (None,), "init": ZEROS, "role": "maxima", "init_path": None, "layers": ()}
    tracked = names if site.layout.tracked else ()
    return nnx.Dict({name: Maxima(jnp.zeros(3, jnp.float32), **metadata) for name in tracked})


def stacked(block: nnx.Module, layers: tuple[int, ...]) -> nnx.Module:
    """The same module with a leading `layer` dimension on every weight; `layers` are their numbers in the model."""
    graph, state = nnx.split(block)
    leaves = []
    for path, leaf in nnx.to_flat_state(state):
        value = jnp.zeros((len(layers), *leaf.shape), leaf.dtype)
        name = "layer." + dotted(path)
        leaves.append(
            (path, type(leaf)(value, **_metadata(leaf, axes=("layer", *leaf.axes), layers=layers, init_path=name)))
        )
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def reordered[M: nnx.Module](model: M, order: Sequence[int]) -> M:
    """An abstract module with the rows of its stacked weights in another order.

    order: for each row the number of the repeat whose weights it holds, or -1 for a row of zeros that is no layer.
    """
    graph, state = nnx.split(model)
    flat = []
    for path, leaf in nnx.to_flat_state(state):
        if leaf.layers:
            layers = tuple(-1 if repeat < 0 else leaf.layers[repeat] for repeat in order)
            value = jax.ShapeDtypeStruct((len(order), *leaf.shape[1:]), leaf.dtype)
            leaf = type(leaf)(value, **_metadata(leaf, layers=layers))
        flat.append((path, leaf))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def dotted(path: Sequence[object]) -> str:
    """The parts of a path as one name."""
    return ".".join(map(str, path))


def _metadata(leaf: nnx.Param, **changes: Any) -> dict[str, Any]:
    return {name: getattr(leaf, name) for name in ("axes", "init", "role", "init_path", "layers")} | changes


def specs(model: nnx.Module, kind: type[nnx.Variable] = nnx.Param) -> dict[str, ParamSpec]:
    """Every weight of a module, by path; or its Maxima."""
    found = {}
    for parts, leaf in nnx.to_flat_state(nnx.state(model, kind)):
        path = dotted(parts)
        found[path] = ParamSpec(
            path, tuple(leaf.shape), leaf.axes, leaf.init, leaf.role, leaf.init_path or path, leaf.layers
        )
    return found


def initial_values(declared: Mapping[str, ParamSpec], seed: int) -> Params:
    """Float32 weights from (seed, path, layer number) alone, on whatever layout they are made.

    The random bits are the same everywhere. Turning them into Gaussian values takes a logarithm, whose last bit a
    compiler may round otherwise in a vectorised loop: a few percent of the values differ by one unit in the last place
    (2e-7 relative) between layouts.
    """
    weights = jax.random.fold_in(jax.random.key(seed), WEIGHTS_STREAM)
    return {path: _draw(spec, weights) for path, spec in declared.items()}


def _draw(spec: ParamSpec, key: Array) -> Array:
    key = jax.random.fold_in(key, zlib.crc32(spec.init_path.encode()))
    if not spec.layers:
        return spec.init.draw(key, spec.shape)
    layers = jnp.asarray(spec.layers)
    keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(layers)
    drawn = jax.vmap(lambda key: spec.init.draw(key, spec.shape[1:]))(keys)
    if min(spec.layers) >= 0:
        return drawn
    return jnp.where(layers.reshape(-1, *[1] * (drawn.ndim - 1)) >= 0, drawn, 0)


def bind[M: nnx.Module](model: M, values: Params) -> M:
    """A copy of a (possibly abstract) module whose weights are `values`, by path."""
    graph, state = nnx.split(model)
    flat = [(parts, leaf.replace(values[dotted(parts)])) for parts, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))
