"""Starts a run from the weights of other runs or libraries; the rest of the state is fresh."""

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
from megajax.checkpoint.weights.quantize_on_load import Quantizing
from megajax.config.errors import UserError
from megajax.config.hints import listed
from megajax.interop.huggingface.format import LENGTHS
from megajax.interop.stored.model_differences import describe_differences, differences
from megajax.interop.stored.provenance import Ancestor
from megajax.job.start.same_tokens import demand_same_tokens
from megajax.job.start.stored_weights import StoredWeights, TargetArray, open_weights, read_intact, shape_problem
from megajax.layers.moe.upcycling import Derived
from megajax.mesh.named_shardings import without_dimension
from megajax.models.protocol import ids_below
from megajax.training.program import Program
from megajax.training.session import Parts
from megajax.training.state import TrainState

IGNORED_SETTINGS = ("sequence_length", "vocabulary_size", "prediction*", "lora*", "quantization*")
"""Settings that may differ from the source's: rows may be shorter, tables may grow, and parts may be added."""


@dataclass
class InitialWeights:
    """Builds the first state of a run from stored weights."""

    sources: Sequence[WeightsConfig]
    say: Callable[[str], None]
    """Prints a line."""
    ancestor: Ancestor | None = None
    """The source of the whole model, known after the call; None: there are only sources of parts."""

    def __call__(self, parts: Parts, like: TrainState) -> TrainState:
        """A fresh state with the weights of the sources. Raises UserError for one that is missing or does not fit."""
        fresh, loaded = cache(parts.program.fresh_state()), dict[str, Array]()
        for source in self.sources:
            if whose := compared_model(source, parts):
                demand_same_tokens(parts.tokenizer, source.run, whose, self.say)
            weights = SourceWeights.of(source, parts, like)
            loaded |= read_intact(weights.stored, partial(weights.weights, lambda: fresh().params, self.say))
            if not source.into:
                self.ancestor = weights.stored.ancestor()
        state = fresh()
        if fresh_paths := sorted(set(state.params) - set(loaded)):
            self.say(f"fresh weights: {listed(fresh_paths)}")
        return replace(state, params=_replaced(state.params, loaded), observed=_replaced(state.observed, loaded))


def compared_model(source: WeightsConfig, parts: Parts) -> str:
    """The role of a source whose token ids must be those of the run: a teacher or a reference model; "" for others."""
    if source.into == "teacher":
        return "the teacher"
    return "the reference model" * ("reference" in parts.program.schema and not source.into)


def frozen_weights_warning(program: Program) -> str:
    """A warning about weights that a run neither loads nor trains; "" if it has none."""
    frozen = [path for path in program.declared if path not in program.optimizer.declared]
    if not frozen:
        return ""
    trained = "adapters" if program.adapters else "the others"
    return (
        f"{trained} are trained beside fresh, frozen weights: set checkpoint.load to start from trained ones. "
        f"Frozen at random values: {listed(frozen)}"
    )


def _replaced(fresh: Params, loaded: Mapping[str, Array]) -> Params:
    return {path: loaded.get(path, array) for path, array in fresh.items()}


@dataclass(frozen=True)
class SourceWeights:
    """The weights of one source, by path in this model."""

    source: WeightsConfig
    parts: Parts
    stored: StoredWeights
    targets: Mapping[str, TargetArray]
    """The weights to load."""
    optional: Mapping[str, TargetArray]
    """Observations, for example biases of experts: loaded only if they are stored and fit."""
    replicated: Any
    """The sharding of an array that every device holds whole."""

    @classmethod
    def of(cls, source: WeightsConfig, parts: Parts, state: TrainState) -> "SourceWeights":
        """Raises UserError for a folder without checkpoints, and for names that match no weight."""
        inside = _below(source.into, state.params)
        if not inside:
            raise UserError(
                f"checkpoint.weights: into={source.into} is not a part of the model; its weights are {[*state.params]}"
            )
        for pattern in source.fresh:
            if not any(fnmatchcase(path, pattern) for path in inside):
                raise UserError(f"checkpoint.weights: fresh={pattern} names none of the weights {inside}")
        paths = [path for path in inside if not any(fnmatchcase(path, pattern) for pattern in source.fresh)]
        declarations, before = declared_by(parts.cfg.model), _prefix(source.into)
        # Those of a recipe (largest magnitudes of earlier steps) are of a run, not of its weights.
        observed = [path for path in _below(source.into, state.observed) if path in declarations]
        declared = {path.removeprefix(before): declarations[path] for path in (*inside, *observed)}
        names = {path.removeprefix(before) for path in (*paths, *observed)}
        replicated = getattr(state.step, "sharding", None)
        quantizing = Quantizing.if_any(parts.cfg.model)
        if quantizing is not None and source.into:
            raise UserError(
                f"checkpoint.weights: into={source.into} is a part of a quantized model, which is loaded as a whole\n"
                "Quantize the model with all its parts: python -m megajax.convert --quantize."
            )
        stored = open_weights(source.run, declared, names, replicated, parts.cfg.checkpoint.ignore, quantizing)
        arrays: dict[str, Any] = {**state.params, **state.observed}
        required = {path: TargetArray(arrays[path], parts.program.arrays[path]) for path in (*paths, *observed)}
        optional = {path: required.pop(path) for path in observed}
        return cls(source, parts, stored, required, optional, replicated)

    def weights(self, fresh: Callable[[], Params], say: Callable[[str], None]) -> dict[str, Array]:
        """The weights of this source.

        Raises UserError, which lists all weights that are missing or have another shape.

        fresh: returns all weights at their initial values.
        """
        self._demand_same_model()
        before, problems = _prefix(self.source.into), list[str]()
        shapes = {before + name: shape for name, shape in self.stored.shapes().items()}
        matching = {
            path: target for path, target in self.optional.items() if path in shapes and target.fits(shapes[path])
        }
        tables, reshaped, derived = list[str](), list[str](), dict[str, Derived]()
        for path, target in self.targets.items():
            if path not in shapes and path in self.parts.program.adapters:
                continue  # adapters start fresh unless the source has them
            if path not in shapes:
                rule = self.parts.cfg.model.derived(path, shapes)
                if rule is None:
                    problems.append(f"{path}: missing")
                elif misfit := rule.problem or _misfit(rule, target):
                    problems.append(f"{path}: {misfit}")
                else:
                    derived[path] = rule
            elif "vocab" in target.spec.axes and self._vocabulary() not in (None, self._own_vocabulary()):
                tables.append(path)
            elif target.fits(shapes[path]):
                matching[path] = target
            else:
                (tables if "vocab" in target.spec.axes else reshaped).append(path)
        loaded = self._refitted(reshaped, shapes, problems) | self._tables(tables, shapes, fresh, problems)
        if problems:
            raise UserError(
                f"the weights of {self.stored.where} do not fit:\n"
                + "\n".join(f"  {line}" for line in problems)
                + (self._lengths(shapes) or "\nTo initialize them randomly, name them in checkpoint.weights.fresh")
                + "; or change the model."
            )
        loaded |= self._load(matching)
        loaded |= {path: self._derived(rule, path, fresh) for path, rule in derived.items()}
        resized = f", {', '.join(reshaped)} resized" if reshaped else ""
        copies = sum(rule.source is not None for rule in derived.values())
        copied = f", {copies} of them experts from dense layers" if derived else ""
        grown = f", {', '.join(tables)} for {self._own_vocabulary()} tokens" if tables else ""
        changes = f"{resized}{grown}{copied}{self.stored.note()}"
        say(f"{len(set(loaded) & set(self.targets))} weights of {self.stored.where}{changes}")
        return loaded

    def _demand_same_model(self) -> None:
        """Raises UserError if the settings of another library's model differ in what they compute."""
        model = self.parts.cfg.model
        own_model = getattr(model, self.source.into, None) if self.source.into else model
        if (stored_model := self.stored.model()) is None or own_model is None:
            return
        # Weights that start fresh may have other settings.
        allowed = (*IGNORED_SETTINGS, *self.source.changed, *self.source.fresh)
        pairs = differences(own_model, stored_model)
        pairs = [pair for pair in pairs if not any(fnmatchcase(pair.name, pattern) for pattern in allowed)]
        if pairs:
            raise UserError(
                f"{self.stored.where} is not the model of this run:\n"
                + "\n".join(f"  {line}" for line in describe_differences(pairs))
                + "\nChange the model's settings, or name them in checkpoint.weights.changed if that is intended."
            )

    def _lengths(self, stored_shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Advice to set the lengths of rows to those of the source, if its learned positions fit then; else ""."""
        settings = self.stored.settings()
        model: Any = self.parts.cfg.model
        lengths = {name: settings.get(f"model.{name}") for name in LENGTHS if hasattr(model, name)}
        others = {name: size for name, size in lengths.items() if size and size != getattr(model, name)}
        if self.source.into or not others:
            return ""
        before, after = declared_by(model), declared_by(replace(model, **others))
        tables = [path for path in after if after[path].shape != before[path].shape]
        if not tables or any(stored_shapes.get(path) != after[path].shape for path in tables):
            return ""
        flags = " ".join(f"--model.{name}={size}" for name, size in others.items())
        return f"\nSet {flags} to keep the learned positions of the source"

    def _load(self, targets: Mapping[str, TargetArray]) -> dict[str, Array]:
        before = _prefix(self.source.into)
        by_name = {path.removeprefix(before): target for path, target in targets.items()}
        arrays = self.stored.read(by_name, self.parts.program.partition.order_of) if by_name else {}
        return {before + name: array for name, array in arrays.items()}

    def _refitted(
        self, paths: Iterable[str], stored_shapes: Mapping[str, tuple[int, ...]], problems: list[str]
    ) -> dict[str, Array]:
        """Weights of other shapes that the model resizes, for example positions."""
        resized, before, settings = dict[str, Array](), _prefix(self.source.into), self.stored.settings()
        for path in paths:
            like = self.targets[path].like
            weight = self.parts.cfg.model.refit(path, self.stored.host_array(path.removeprefix(before)), settings)
            if weight is None or weight.shape != tuple(like.shape):
                problems.append(shape_problem(path, stored_shapes[path], like.shape))
            else:
                resized[path] = jax.device_put(weight.astype(like.dtype), like.sharding)
        return resized

    def _tables(
        self,
        paths: Iterable[str],
        stored_shapes: Mapping[str, tuple[int, ...]],
        fresh: Callable[[], Params],
        problems: list[str],
    ) -> dict[str, Array]:
        """Tables with a row per token, for another number of tokens or other padding."""
        tables, before, new = dict[str, Array](), _prefix(self.source.into), self._own_vocabulary()
        for path in paths:
            like, axes = self.targets[path]
            at, shape = axes.axes.index("vocab"), stored_shapes[path]
            stored_tokens = self._vocabulary() or shape[at]
            if shape[:at] + shape[at + 1 :] != tuple(like.shape[:at] + like.shape[at + 1 :]):
                problems.append(shape_problem(path, shape, like.shape))
            elif new is not None and stored_tokens > new:
                problems.append(f"{path}: stored for {stored_tokens} tokens, this model has only {new}")
            elif new is not None and stored_tokens < new and self.source.new_tokens is None:
                hint = "checkpoint.weights.new_tokens=drawn or mean fills the other rows"
                problems.append(f"{path}: stored for {stored_tokens} tokens, this model has {new}; {hint}")
            else:
                rows = np.take(self.stored.host_array(path.removeprefix(before)), range(stored_tokens), axis=at)
                make = partial(_grown, at=at, mean=self.source.new_tokens == "mean")
                placed = jax.device_put(rows, self.replicated)
                tables[path] = jax.jit(make, out_shardings=like.sharding)(fresh()[path], placed)
        return tables

    def _vocabulary(self) -> int | None:
        return self.stored.vocabulary()

    def _own_vocabulary(self) -> int | None:
        return ids_below(self.parts.cfg.model)

    def _derived(self, rule: Derived, path: str, fresh: Callable[[], Params]) -> Array:
        """A weight computed from another, which is sharded like the result except in dimension 1."""
        like, spec = self.targets[path]
        source = fresh()[path]
        if rule.source is not None:
            shape, sharding = (like.shape[0], *rule.shape), without_dimension(like.sharding, len(like.shape), 1)
            struct = jax.ShapeDtypeStruct(shape, like.dtype, sharding=sharding)
            source = self._load({rule.source: TargetArray(struct, spec)})[rule.source]
        result = jax.jit(rule.make, out_shardings=like.sharding)(source)
        result.block_until_ready()
        if rule.source is not None:
            source.delete()
        return result


def _prefix(into: str) -> str:
    return f"{into}." if into else ""


def _below(into: str, paths: Iterable[str]) -> list[str]:
    return [path for path in paths if path.startswith(_prefix(into))]


def _misfit(rule: Derived, target: TargetArray) -> str:
    """Why a derived weight does not have the shape of its target; "" if it has."""
    like = tuple(target.like.shape)
    if rule.source is None or rule.made_shape(like[0]) == like:
        return ""
    return f"{rule.source} gives shape {list(rule.made_shape(like[0]))}, this model has {list(like)}"


def _grown(fresh: Array, rows: Array, *, at: int, mean: bool) -> Array:
    """Rows of a table along dimension `at`, followed by the other rows of the fresh table or the mean of the rows."""
    count = rows.shape[at]
    added = jax.lax.slice_in_dim(fresh, count, None, axis=at)
    if mean:
        added = jnp.broadcast_to(rows.mean(at, keepdims=True), added.shape)
    return jnp.concatenate([rows.astype(fresh.dtype), added.astype(fresh.dtype)], axis=at)
