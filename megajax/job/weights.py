"""Starting from the weights of other runs or libraries, with everything else fresh."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.batch import Params
from megajax.checkpoint.config import WeightsConfig
from megajax.checkpoint.weights.foreign import declared_by
from megajax.checkpoint.weights.model_differences import differences, in_words
from megajax.config.errors import UserError
from megajax.config.nearest import listed
from megajax.job.stored_weights import StoredWeights, Wanted, open_weights
from megajax.layers.upcycling import Derived
from megajax.mesh.shardings import without_dimension
from megajax.models.protocol import ids_below
from megajax.training.program import Program
from megajax.training.session import Parts
from megajax.training.state import TrainState

FREE = ("sequence_length", "vocabulary_size", "prediction*", "lora*")
"""Settings of a model that may differ from its source's: rows may be shorter, tables grow, and there may be more."""


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
        if others := sorted(set(state.params) - set(taken)):
            self.say(f"fresh weights: {listed(others)}")
        return replace(state, params=_over(state.params, taken), observed=_over(state.observed, taken))


def frozen_fresh(program: Program) -> str:
    """A line on the weights that a run without a source neither loads nor trains; "" if there are none."""
    frozen = [path for path in program.declared if path not in program.optimizer.declared]
    if not frozen:
        return ""
    others = "adapters" if program.adapters else "the others"
    return (
        f"{others} are trained beside fresh, frozen weights: set checkpoint.load to start from trained ones. "
        f"Frozen at random values: {listed(frozen)}"
    )


def _over(fresh: Params, taken: Mapping[str, Array]) -> Params:
    return {path: taken.get(path, array) for path, array in fresh.items()}


@dataclass(frozen=True)
class Taking:
    """The weights of one source, by path in this model."""

    source: WeightsConfig
    parts: Parts
    stored: StoredWeights
    wanted: Mapping[str, Wanted]
    """Of the weights that are asked for."""
    optional: Mapping[str, Wanted]
    """Of observations, which are taken where they are there and fit, such as the biases of experts."""
    everywhere: Any
    """The sharding of an array that all devices have."""

    @classmethod
    def of(cls, source: WeightsConfig, parts: Parts, state: TrainState) -> "Taking":
        """Raises UserError for a folder without checkpoints, and for names that no weight has."""
        inside = _inside(source.into, state.params)
        if not inside:
            raise UserError(
                f"checkpoint.weights: into={source.into} is no part of the model, whose weights are {[*state.params]}"
            )
        for pattern in source.fresh:
            if not any(fnmatchcase(path, pattern) for path in inside):
                raise UserError(f"checkpoint.weights: fresh={pattern} names none of the weights {inside}")
        asked = [path for path in inside if not any(fnmatchcase(path, pattern) for pattern in source.fresh)]
        observed, before = _inside(source.into, state.observed), _before(source.into)
        alone = declared_by(parts.cfg.model)
        declared = {path.removeprefix(before): alone[path] for path in (*inside, *observed)}
        names = {path.removeprefix(before) for path in (*asked, *observed)}
        everywhere = getattr(state.step, "sharding", None)
        stored = open_weights(source.run, declared, names, everywhere)
        arrays: dict[str, Any] = {**state.params, **state.observed}
        wanted = {path: Wanted(arrays[path], parts.program.arrays[path]) for path in (*asked, *observed)}
        optional = {path: wanted.pop(path) for path in observed}
        return cls(source, parts, stored, wanted, optional, everywhere)

    def weights(self, fresh: Callable[[], Params], say: Callable[[str], None]) -> dict[str, Array]:
        """All of them. Raises UserError with those that are missing or of another shape. fresh: all weights, drawn."""
        self._demand_alike()
        before, wrong = _before(self.source.into), list[str]()
        there = {before + name: shape for name, shape in self.stored.shapes().items()}
        same = {path: one for path, one in self.optional.items() if path in there and one.fits(there[path])}
        tables, other, made = list[str](), list[str](), dict[str, Derived]()
        for path, one in self.wanted.items():
            if path not in there and path in self.parts.program.adapters:
                continue  # adapters start fresh, unless the source has some
            if path not in there:
                how = self.parts.cfg.model.derived(path, there)
                if how is None:
                    wrong.append(f"{path}: missing")
                elif misfit := how.problem or _misfit(how, one):
                    wrong.append(f"{path}: {misfit}")
                else:
                    made[path] = how
            elif "vocab" in one.spec.axes and self._vocabulary() not in (None, self._own_vocabulary()):
                tables.append(path)
            elif one.fits(there[path]):
                same[path] = one
            else:
                (tables if "vocab" in one.spec.axes else other).append(path)
        taken = self._refitted(other, there, wrong) | self._tables(tables, there, fresh, wrong)
        if wrong:
            raise UserError(
                f"the weights of {self.stored.where} do not fit:\n"
                + "\n".join(f"  {line}" for line in wrong)
                + "\nName those that shall be drawn anew in checkpoint.weights.fresh, or change the model."
            )
        taken |= self._read(same)
        taken |= {path: self._derived(how, path, fresh) for path, how in made.items()}
        resized = f", {', '.join(other)} resized" if other else ""
        copies = sum(how.source is not None for how in made.values())
        copied = f", {copies} of them experts made from dense layers" if made else ""
        grown = f", {', '.join(tables)} for {self._own_vocabulary()} tokens" if tables else ""
        say(f"{len(set(taken) & set(self.wanted))} weights of {self.stored.where}{resized}{grown}{copied}")
        return taken

    def _demand_alike(self) -> None:
        """Raises UserError where the settings of another library's model say that it computes something else."""
        model = self.parts.cfg.model
        here = getattr(model, self.source.into, None) if self.source.into else model
        if (there := self.stored.model()) is None or here is None:
            return
        # What is drawn anew may have other settings.
        allowed = (*FREE, *self.source.changed, *self.source.fresh)
        pairs = differences(here, there)
        pairs = [pair for pair in pairs if not any(fnmatchcase(pair.name, each) for each in allowed)]
        if pairs:
            raise UserError(
                f"{self.stored.where} is another model than this run's:\n"
                + "\n".join(f"  {line}" for line in in_words(pairs))
                + "\nChange the model's settings, or name them in checkpoint.weights.changed if that is intended."
            )

    def _read(self, wanted: Mapping[str, Wanted]) -> dict[str, Array]:
        before = _before(self.source.into)
        by_name = {path.removeprefix(before): one for path, one in wanted.items()}
        read = self.stored.read(by_name, self.parts.program.partition.order_of) if by_name else {}
        return {before + name: array for name, array in read.items()}

    def _refitted(
        self, paths: Iterable[str], there: Mapping[str, tuple[int, ...]], wrong: list[str]
    ) -> dict[str, Array]:
        """Weights of other shapes that the model makes its own, such as positions."""
        fitted, before, settings = dict[str, Array](), _before(self.source.into), self.stored.settings()
        for path in paths:
            like = self.wanted[path].like
            weight = self.parts.cfg.model.refit(path, self.stored.whole(path.removeprefix(before)), settings)
            if weight is None or weight.shape != tuple(like.shape):
                wrong.append(f"{path}: {list(there[path])} there, {list(like.shape)} here")
            else:
                fitted[path] = jax.device_put(weight.astype(like.dtype), like.sharding)
        return fitted

    def _tables(
        self,
        paths: Iterable[str],
        there: Mapping[str, tuple[int, ...]],
        fresh: Callable[[], Params],
        wrong: list[str],
    ) -> dict[str, Array]:
        """Tables with a row for each token, for another number of tokens or other padding behind them."""
        tables, before, new = dict[str, Array](), _before(self.source.into), self._own_vocabulary()
        for path in paths:
            like, axes = self.wanted[path]
            at, shape = axes.axes.index("vocab"), there[path]
            old = self._vocabulary() or shape[at]
            if shape[:at] + shape[at + 1 :] != tuple(like.shape[:at] + like.shape[at + 1 :]):
                wrong.append(f"{path}: {list(shape)} there, {list(like.shape)} here")
            elif new is not None and old > new:
                wrong.append(f"{path}: {old} tokens there, {new} here")
            elif new is not None and old < new and self.source.new_tokens is None:
                hint = "checkpoint.weights.new_tokens=drawn or mean fills the others"
                wrong.append(f"{path}: {old} tokens there, {new} here; {hint}")
            else:
                rows = np.take(self.stored.whole(path.removeprefix(before)), range(old), axis=at)
                make = partial(_grown, at=at, mean=self.source.new_tokens == "mean")
                placed = jax.device_put(rows, self.everywhere)
                tables[path] = jax.jit(make, out_shardings=like.sharding)(fresh()[path], placed)
        return tables

    def _vocabulary(self) -> int | None:
        return self.stored.vocabulary()

    def _own_vocabulary(self) -> int | None:
        return ids_below(self.parts.cfg.model)

    def _derived(self, how: Derived, path: str, fresh: Callable[[], Params]) -> Array:
        """A weight made from another, of which each device reads what it has of the result in other dimensions."""
        like, spec = self.wanted[path]
        given = fresh()[path]
        if how.source is not None:
            shape, sharding = (like.shape[0], *how.shape), without_dimension(like.sharding, len(like.shape), 1)
            wanted = jax.ShapeDtypeStruct(shape, like.dtype, sharding=sharding)
            given = self._read({how.source: Wanted(wanted, spec)})[how.source]
        result = jax.jit(how.make, out_shardings=like.sharding)(given)
        result.block_until_ready()
        if how.source is not None:
            given.delete()
        return result


def _before(into: str) -> str:
    return f"{into}." if into else ""


def _inside(into: str, paths: Iterable[str]) -> list[str]:
    return [path for path in paths if path.startswith(_before(into))]


def _misfit(how: Derived, wanted: Wanted) -> str:
    """Why a weight that is made from another has not the shape that is wanted; "" if it has."""
    like = tuple(wanted.like.shape)
    if how.source is None or how.made_shape(like[0]) == like:
        return ""
    return f"{how.source} there makes {list(how.made_shape(like[0]))}, here it is {list(like)}"


def _grown(fresh: Array, rows: Array, *, at: int, mean: bool) -> Array:
    """Rows of a table along dimension `at`, with the others of the fresh table, or the mean of the rows, behind."""
    count = rows.shape[at]
    behind = jax.lax.slice_in_dim(fresh, count, None, axis=at)
    if mean:
        behind = jnp.broadcast_to(rows.mean(at, keepdims=True), behind.shape)
    return jnp.concatenate([rows.astype(fresh.dtype), behind.astype(fresh.dtype)], axis=at)
