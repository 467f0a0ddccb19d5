"""Starting from the weights of other runs, with everything else fresh."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax import Array

from megajax.batch import Params
from megajax.checkpoint.config import WeightsConfig
from megajax.checkpoint.reader import CheckpointReader, open_checkpoints
from megajax.config.errors import UserError
from megajax.job.layer_order import layers_of, like_stored, reorder, same_order, stored_chunks
from megajax.layers.param import ParamSpec
from megajax.layers.upcycling import Derived
from megajax.mesh.shardings import without_dimension
from megajax.pipeline.partition import row_order
from megajax.training.session import Parts
from megajax.training.state import TrainState

STORED = "params."
"""Before the path of a weight in a checkpoint."""


@dataclass(frozen=True)
class TakeWeights:
    """Makes the first state of a run."""

    sources: Sequence[WeightsConfig]
    say: Callable[[str], None]
    """Shows a line to people."""

    def __call__(self, parts: Parts, like: TrainState) -> TrainState:
        """A fresh state with the weights of the sources. Raises UserError for one that is missing or does not fit."""
        fresh, taken = cache(parts.program.fresh_state()), dict[str, Array]()
        for source in self.sources:
            taken |= Taking.of(source, parts, like).weights(lambda: fresh().params, self.say)
        state = fresh()
        return replace(state, params={**state.params, **taken})


@dataclass(frozen=True)
class Taking:
    """The weights of one source, by path in this model."""

    source: WeightsConfig
    parts: Parts
    reader: CheckpointReader
    step: int
    like: Mapping[str, jax.ShapeDtypeStruct]
    """Of the weights that are asked for."""
    names: Mapping[str, str]
    """Path in this model -> in the other."""
    everywhere: Any
    """The sharding of an array that all devices have."""

    @classmethod
    def of(cls, source: WeightsConfig, parts: Parts, state: TrainState) -> "Taking":
        """Raises UserError for a folder without checkpoints, and for names that no weight has."""
        like, (reader, step) = state.params, open_checkpoints(source.run)
        step = reader.newest_whole() if step is None else step
        if step is None:
            raise UserError(f"there are no checkpoints to take weights from: {source.run} holds none")
        before = f"{source.into}." if source.into else ""
        inside = [path for path in like if path.startswith(before)]
        if not inside:
            raise UserError(
                f"checkpoint.weights: into={source.into} is no part of the model, whose weights are {[*like]}"
            )
        for pattern in source.fresh:
            if not any(fnmatchcase(path, pattern) for path in inside):
                raise UserError(f"checkpoint.weights: fresh={pattern} names none of the weights {inside}")
        asked = [path for path in inside if not any(fnmatchcase(path, pattern) for pattern in source.fresh)]
        names = {path: path.removeprefix(before) for path in asked}
        wanted: dict[str, Any] = {path: like[path] for path in asked}
        return cls(source, parts, reader, step, wanted, names, getattr(state.step, "sharding", None))

    def weights(self, fresh: Callable[[], Params], say: Callable[[str], None]) -> dict[str, Array]:
        """All of them. Raises UserError with those that are missing or of another shape. fresh: all weights, drawn."""
        shapes, declared = self.reader.shapes(self.step), self.parts.program.declared
        same, other, made, wrong = list[str](), list[str](), dict[str, Derived](), list[str]()
        before = f"{self.source.into}." if self.source.into else ""
        there = {before + name.removeprefix(STORED): shape for name, shape in shapes.items() if name.startswith(STORED)}
        for path, like in self.like.items():
            spec, shape = declared[path], shapes.get(STORED + self.names[path])
            if shape is None:
                how = self.parts.cfg.model.derived(path, there)
                if how is None or how.problem:
                    wrong.append(f"{path}: {'not there' if how is None else how.problem}")
                elif how.source is not None and how.made_shape(like.shape[0]) != tuple(like.shape):
                    shape = list(how.made_shape(like.shape[0]))
                    wrong.append(f"{path}: {how.source} there makes {shape}, here it is {list(like.shape)}")
                else:
                    made[path] = how
            elif shape == tuple(like.shape) or (spec.layers and shape[1:] == tuple(like.shape[1:])):
                same.append(path)
            else:
                other.append(path)
        taken, settings = dict[str, Array](), self.reader.meta(self.step)["facts"]
        for path in other:
            fitted = self.parts.cfg.model.refit(path, self.whole(path, shapes[STORED + self.names[path]]), settings)
            if fitted is None or fitted.shape != tuple(self.like[path].shape):
                shape = shapes[STORED + self.names[path]]
                wrong.append(f"{path}: {list(shape)} there, {list(self.like[path].shape)} here")
            else:
                taken[path] = jax.device_put(fitted.astype(self.like[path].dtype), self.like[path].sharding)
        if wrong:
            raise UserError(
                f"the weights of {self.source.run} (step {self.step}) do not fit:\n"
                + "\n".join(f"  {line}" for line in wrong)
                + "\nName those that shall be drawn anew in checkpoint.weights.fresh, or change the model."
            )
        if same:
            read = self.in_order({self.names[path]: (self.like[path], declared[path]) for path in same})
            taken |= {path: read[self.names[path]] for path in same}
        for path, how in made.items():
            taken[path] = self.derived(how, path, fresh()[path])
        resized = f", {', '.join(other)} interpolated" if other else ""
        copies = sum(how.source is not None for how in made.values())
        copied = f", {copies} of them experts made from dense layers" if made else ""
        say(f"{len(taken)} weights of {self.source.run}, step {self.step}{resized}{copied}; the others are fresh")
        return taken

    def derived(self, how: Derived, path: str, fresh: Array) -> Array:
        """A weight made from another, of which each device reads what it has of the result in other dimensions."""
        like, given = self.like[path], fresh
        if how.source is not None:
            name = how.source.removeprefix(f"{self.source.into}." if self.source.into else "")
            wanted = jax.ShapeDtypeStruct(
                (like.shape[0], *how.shape), like.dtype, sharding=without_dimension(like.sharding, len(like.shape), 1)
            )
            given = self.in_order({name: (wanted, self.parts.program.declared[path])})[name]
        result = jax.jit(how.make, out_shardings=like.sharding)(given)
        result.block_until_ready()
        if given is not fresh:
            given.delete()
        return result

    def whole(self, path: str, shape: tuple[int, ...]) -> np.ndarray:
        """A weight as it is stored, on the host."""
        like = jax.ShapeDtypeStruct(shape, self.like[path].dtype, sharding=self.everywhere)
        read = self.reader.restore(self.step, {"params": {self.names[path]: like}}, partial=True)[0]
        return np.asarray(read["params"][self.names[path]])

    def in_order(self, wanted_by_name: Mapping[str, tuple[jax.ShapeDtypeStruct, ParamSpec]]) -> dict[str, Array]:
        """Stored weights by name, in the shapes, layouts and orders of layers that are given."""
        declared = {name: spec for name, (_, spec) in wanted_by_name.items()}
        like: dict[str, Any] = {"params": {name: each for name, (each, _) in wanted_by_name.items()}}
        chunks, shapes = stored_chunks(self.reader.meta(self.step)), self.reader.shapes(self.step)
        stored, wanted = partial(row_order, chunks), self.parts.program.partition.order_of
        numbers = {path: layers_of(spec) for path, spec in declared.items() if spec.layers}
        total = 1 + max((max(layers) for layers in numbers.values()), default=-1)
        if len(chunks) > 1 and total != sum(map(len, chunks)):
            raise UserError(f"{self.source.run} has {sum(map(len, chunks))} layers, this model {total}")
        for path, layers in numbers.items():
            if (there := shapes[STORED + path][0]) != len(stored(layers)):
                raise UserError(f"{self.source.run} has {there} layers with {path}, this model {len(layers)}")
        if same_order(declared, stored, wanted):
            read = self.reader.restore(self.step, like, partial=True)[0]
        else:
            read = self.reader.restore(self.step, like_stored(like, declared, stored), partial=True)[0]
            read = reorder(read, like, declared, stored, wanted)
        return read["params"]
