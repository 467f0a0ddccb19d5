"""The stored weights that a run starts from, and those of its reward model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.batch import Params
from megajax.checkpoint.config import WeightsConfig
from megajax.config.errors import UserError
from megajax.config.hints import below, listed
from megajax.inference.assembly import engine_layout
from megajax.inference.loaded_model import LoadedModel, load_weights
from megajax.interop.huggingface.format import LENGTHS
from megajax.interop.weights.fit import (
    StoredWeights,
    TargetArray,
    fit,
    host_array,
    joined,
    read_arrays,
    read_intact,
    shape_problem,
    source_of,
    stored_shapes,
    weights_of,
)
from megajax.interop.weights.foreign import declared_by
from megajax.interop.weights.formats import open_stored, split_name
from megajax.interop.weights.model_differences import demand_same_model
from megajax.interop.weights.model_parts import served
from megajax.interop.weights.provenance import Ancestor
from megajax.interop.weights.quantize_on_load import Quantizing
from megajax.job.start.equal_inputs import demand_same_tokens
from megajax.layers.moe.upcycling import Derived
from megajax.mesh.named_shardings import without_dimension
from megajax.mesh.sharding_rules import Plan
from megajax.models.classifier.config import ChoiceHeadConfig, RegressionHeadConfig
from megajax.models.protocol import ids_below
from megajax.precision.config import PrecisionConfig
from megajax.training.check_compiler_options import inference_options
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
        stored = source_of(source.run, declared, names, parts.cfg.checkpoint.ignore, quantizing)
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
        shapes = {before + name: shape for name, shape in stored_shapes(self.stored).items()}
        fitting, missing, reshaped = fit(shapes, self.targets)
        others = (
            reshaped if self.stored.vocabulary() in (None, ids_below(self.parts.cfg.model)) else [*fitting, *reshaped]
        )
        tables = [path for path in others if "vocab" in self.targets[path].spec.axes]
        reshaped = [path for path in reshaped if path not in tables]
        matching = {path: target for path, target in fitting.items() if path not in tables}
        matching |= fit(shapes, self.optional).fitting
        derived = dict[str, Derived]()
        for path in missing:
            if path in self.parts.program.adapters:
                continue  # adapters start fresh unless the source has them
            rule = self.parts.cfg.model.derived(path, shapes)
            if rule is None:
                problems.append(f"{path}: missing")
            elif misfit := rule.problem or _misfit(rule, self.targets[path]):
                problems.append(f"{path}: {misfit}")
            else:
                derived[path] = rule
        loaded = self._refitted(reshaped, shapes, problems) | self._tables(tables, shapes, fresh, problems)
        if problems:
            raise UserError(
                below(f"the weights of {self.stored.name} do not fit:", problems)
                + (self._lengths(shapes) or "\nTo initialize them randomly, name them in checkpoint.weights.fresh")
                + "; or change the model."
            )
        loaded |= self._load(matching)
        loaded |= {path: self._derived(rule, path, fresh) for path, rule in derived.items()}
        resized = f", {', '.join(reshaped)} resized" if reshaped else ""
        copies = sum(rule.source is not None for rule in derived.values())
        copied = f", {copies} of them experts from dense layers" if derived else ""
        grown = f", {', '.join(tables)} for {ids_below(self.parts.cfg.model)} tokens" if tables else ""
        source = f"{self.stored.name}{resized}{grown}{copied}"
        say(f"{len(set(loaded) & set(self.targets))} weights of {joined(source, self.stored.note)}")
        return loaded

    def _demand_same_model(self) -> None:
        """Raises UserError if the settings of another library's model differ in what they compute."""
        model = self.parts.cfg.model
        own_model = getattr(model, self.source.into, None) if self.source.into else model
        if (stored_model := self.stored.model) is None or own_model is None:
            return
        # Weights that start fresh may have other settings.
        demand_same_model(
            own_model,
            stored_model,
            f"{self.stored.name} is not the model of this run:",
            advice="\nChange the model's settings, or name them in checkpoint.weights.changed if that is intended.",
            allowed=(*IGNORED_SETTINGS, *self.source.changed, *self.source.fresh),
        )

    def _lengths(self, stored_shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Advice to set the lengths of rows to those of the source, if its learned positions fit then; else ""."""
        settings = self.stored.settings
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
        arrays = read_arrays(self.stored, by_name, self.parts.program.partition.order_of) if by_name else {}
        return {before + name: array for name, array in arrays.items()}

    def _refitted(
        self, paths: Iterable[str], stored_shapes: Mapping[str, tuple[int, ...]], problems: list[str]
    ) -> dict[str, Array]:
        """Weights of other shapes that the model resizes, for example positions."""
        resized, before, settings = dict[str, Array](), _prefix(self.source.into), self.stored.settings
        for path in paths:
            like = self.targets[path].like
            weight = self.parts.cfg.model.refit(path, host_array(self.stored, path.removeprefix(before)), settings)
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
        tables, before, new = dict[str, Array](), _prefix(self.source.into), ids_below(self.parts.cfg.model)
        for path in paths:
            like, axes = self.targets[path]
            at, shape = axes.axes.index("vocab"), stored_shapes[path]
            stored_tokens = self.stored.vocabulary() or shape[at]
            if shape[:at] + shape[at + 1 :] != tuple(like.shape[:at] + like.shape[at + 1 :]):
                problems.append(shape_problem(path, shape, like.shape))
            elif new is not None and stored_tokens > new:
                problems.append(f"{path}: stored for {stored_tokens} tokens, this model has only {new}")
            elif new is not None and stored_tokens < new and self.source.new_tokens is None:
                hint = "checkpoint.weights.new_tokens=drawn or mean fills the other rows"
                problems.append(f"{path}: stored for {stored_tokens} tokens, this model has {new}; {hint}")
            else:
                rows = np.take(host_array(self.stored, path.removeprefix(before)), range(stored_tokens), axis=at)
                make = partial(_grown, at=at, mean=self.source.new_tokens == "mean")
                placed = jax.device_put(rows, self.replicated)
                tables[path] = jax.jit(make, out_shardings=like.sharding)(fresh()[path], placed)
        return tables

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


def load_reward_model(source: str, parts: Parts, *, say: Callable[[str], None]) -> LoadedModel:
    """The model of a run or of hf:DIR, on the devices of these parts, in their compute dtype; sharded as an engine's
    where its sizes allow, else each device has all of it.

    Raises UserError for a model without one score for each sequence, and for one with other tokens.
    """
    path = Path(source).expanduser()
    if (library := split_name(path)[0]) not in ("", "hf"):
        raise UserError(f"data.reward_model={source}: must be a run or hf:DIR, got {library}:")
    stored = open_stored(path)
    cfg = served(stored.model)
    if not isinstance(head := getattr(cfg, "head", None), ChoiceHeadConfig | RegressionHeadConfig):
        what = type(cfg if head is None else head).__name__
        raise UserError(
            f"data.reward_model={source}: has no score for each answer, but {what}. Use a run of a model with "
            "ChoiceHeadConfig or RegressionHeadConfig, or a ForSequenceClassification of transformers with num_labels=1"
        )
    demand_same_tokens(parts.tokenizer, path, "the reward model", say)
    cfg = replace(cfg, head=replace(head, dropout=0.0))
    layout, mesh = engine_layout(parts.program.mesh)
    sharded = not any(True for _ in cfg.parallel_problems(layout, None))
    plan = Plan.of(layout) if sharded else Plan.of(layout).over_batch()
    weights, precision = weights_of(stored, cfg), PrecisionConfig(compute=parts.cfg.precision.compute)
    options = inference_options(parts.cfg.xla, mesh.devices.flat[0])
    loaded = load_weights(cfg, weights, plan, mesh, precision, options)
    say(f"reward model: {weights.where}")
    return loaded
