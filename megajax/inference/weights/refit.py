"""The weights of an engine's steps, replaced by those of a training state, moved to the host's memory, or dropped."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.batch import Params
from megajax.config.errors import UserError
from megajax.inference.loaded_model import LoadedModel, in_step, stored_specs
from megajax.inference.programs import Programs
from megajax.layers.param import Adapter, Observation, ParamSpec, specs


class HostArray(NamedTuple):
    """An array in host memory: the parts of this process's devices."""

    shape: tuple[int, ...]
    sharding: Any
    parts: Mapping[Any, np.ndarray]
    """By the place of the part in the array; parts that several devices have are kept once."""
    places: tuple[tuple[jax.Device, Any], ...]
    """Each device with the place of its part."""

    @classmethod
    def of(cls, array: Array) -> "HostArray":
        """A copy of an array; on CPUs the array's own memory."""
        parts, places = {}, []
        for shard in array.addressable_shards:
            place = str(shard.index)
            parts.setdefault(place, np.asarray(shard.data))
            places.append((shard.device, place))
        return cls(array.shape, array.sharding, parts, tuple(places))

    def on_devices(self) -> Array:
        """The array on the devices."""
        parts = [jax.device_put(self.parts[place], device) for device, place in self.places]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)


class StepWeights:
    """Makes the weights of an engine's steps from those of a training state. Compiled once."""

    def __init__(self, loaded: LoadedModel):
        """loaded: with shapes in place of weights, as steps read them."""
        self._loaded, self._make = loaded, cache(self._program)
        self._declared = {**stored_specs(loaded.model), **specs(loaded.model, Observation)}

    def check(self, arrays: Mapping[str, Any]) -> None:
        """Raises UserError that lists the arrays that are missing, unknown, or of another shape, dtype or mesh."""
        problems = [f"{path}: not in the model" for path in arrays.keys() - self._declared.keys()]
        for path, spec in self._declared.items():
            if (problem := self._problem(spec, arrays.get(path))) is not None:
                problems.append(f"{path}: {problem}")
        if problems:
            raise UserError("\n  ".join(["the arrays are not this model's weights:", *sorted(problems)]))

    def _problem(self, spec: ParamSpec, array: Any) -> str | None:
        shape = spec.shape if spec.updater is None else spec.updater.shape(spec.shape)
        if array is None:
            return "missing"
        if tuple(array.shape) != shape:
            return f"{list(array.shape)} given, {list(shape)} in the model"
        dtype = jnp.dtype(spec.dtype)
        floats = all(jnp.issubdtype(kind, jnp.floating) for kind in (array.dtype, dtype))
        if array.dtype != dtype and not (floats and spec.role != "quantized"):
            return f"{array.dtype} given, {dtype} in the model"
        if isinstance(array, Array) and array.is_deleted():
            return "deleted: a step of training has taken its memory"
        if isinstance(array, Array) and array.sharding.device_set != set(self._loaded.mesh.devices.flat):
            return "on other devices than the engine's"
        return None

    def __call__(self, arrays: Params, *, shared: bool) -> Params:
        """The weights. Unless `shared`, they have memory of their own: a step of training may overwrite the arrays."""
        likes = self._loaded.weights
        ready = {path for path in self._declared if shared and self._is_ready(path, arrays[path])}
        others = {path: arrays[path] for path in self._declared if path not in ready}
        with jax.set_mesh(self._loaded.mesh):
            weights = self._make(frozenset(others))(others)
        # No copy: it gives an array on the same memory the name that steps have for its layout.
        return weights | {path: jax.device_put(arrays[path], likes[path].sharding) for path in ready}

    def _is_ready(self, path: str, array: Array) -> bool:
        """Whether steps read the array as it is."""
        like = self._loaded.weights[path]
        if isinstance(like, tuple) or self._declared[path].updater is not None:
            return False
        alike = (array.shape, array.dtype) == (like.shape, like.dtype)
        return alike and array.sharding.is_equivalent_to(like.sharding, array.ndim)

    def _program(self, paths: frozenset[str]) -> Callable[[Params], dict[str, Any]]:
        loaded, likes = self._loaded, {path: self._loaded.weights[path] for path in sorted(paths)}

        def make(arrays: Params) -> dict[str, Any]:
            weights: dict[str, Any] = {}
            for path, array in arrays.items():
                used = in_step(loaded.layout, self._declared[path], array, jax.tree.leaves(likes[path])[0].dtype)
                # Without a copy, jax returns an argument that the program does not change.
                weights[path] = tuple(used) if isinstance(likes[path], tuple) else jnp.copy(used)
            return weights

        return jax.jit(make, out_shardings=jax.tree.map(lambda like: like.sharding, likes))


class ModelWeights:
    """A `megajax.inference.request.Weights`: those of the compiled steps of a model."""

    def __init__(self, programs: Programs):
        self._programs, self._at_rest = programs, dict[str, Any]()
        self._slots = frozenset(specs(programs.loaded.model, Adapter))
        self._makes = StepWeights(programs.loaded)

    def prepare(self, weights: Any, *, shared: bool = False) -> Callable[[], Params]:
        """weights: the arrays of a training state by path; or a function that returns weights as steps read them.
        shared: see `Engine.refit`."""
        if callable(weights):
            return weights
        self._makes.check(weights)
        return partial(self._makes, weights, shared=shared)

    def replace(self, make: Callable[[], Params]) -> None:
        programs, likes = self._programs, self._programs.loaded.weights
        # Adapters stay.
        for weights in (self._at_rest, programs.weights):
            for path in weights.keys() - self._slots:
                del weights[path]
        new = make()
        demand_alike(new, {path: like for path, like in likes.items() if path not in self._slots})
        programs.weights |= new

    def sleep(self, *, keep: bool) -> None:
        programs = self._programs
        for path in [*programs.weights] if keep else self._slots & programs.weights.keys():
            self._at_rest[path] = jax.tree.map(HostArray.of, programs.weights[path])
        programs.weights.clear()
        programs.drop_cache()

    def wake(self) -> None:
        programs = self._programs
        if programs.loaded.weights.keys() - programs.weights.keys() - self._at_rest.keys():
            raise UserError("the engine has no weights: call refit before it wakes up")
        for path in [*self._at_rest]:
            stored, is_stored = self._at_rest.pop(path), lambda leaf: isinstance(leaf, HostArray)
            programs.weights[path] = jax.tree.map(HostArray.on_devices, stored, is_leaf=is_stored)
        programs.operate("allocate")


def demand_alike(weights: Params, likes: Mapping[str, Any]) -> None:
    """Raises UserError unless weights have the names, shapes, dtypes and layouts of others."""
    present, wanted = ({path: _described(w) for path, w in tree.items()} for tree in (weights, likes))
    if others := sorted(path for path in present.keys() | wanted.keys() if present.get(path) != wanted.get(path)):
        path = others[0]
        difference = f"{path} is {present.get(path)}, not {wanted.get(path)}"
        raise UserError(f"{len(others)} of {len(wanted)} weights do not fit the compiled steps: {difference}")


def _described(weight: Any) -> list[tuple[Any, ...]]:
    return [(leaf.shape, leaf.dtype.name, leaf.sharding) for leaf in jax.tree.leaves(weight)]
