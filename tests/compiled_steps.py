"""Compiled steps of tiny models without an engine: rows of hand-made schedules, and the logits of each step."""

from collections import abc
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from megajax.inference.loaded_model import CacheSize, LoadedModel
from megajax.inference.programs import Programs
from megajax.inference.step_arrays import Bucket
from megajax.layers.param import Observation, bind, initial_values, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan

CHUNK = 8


class Logits(NamedTuple):
    """Gives the logits themselves."""

    def like(self, choices: int) -> tuple[()]:
        del choices
        return ()

    def __call__(self, layout: Layout, logits: jax.Array, tokens: jax.Array, inputs: tuple[()]) -> "AllLogits":
        del layout, tokens, inputs
        return AllLogits(logits, jnp.argmax(logits, axis=1).astype(jnp.int32))


class AllLogits(NamedTuple):
    logits: jax.Array
    token: jax.Array


@dataclass(eq=False)
class Row:
    tokens: list[int]
    blocks: list[int]
    slot: int
    memory: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)


@dataclass
class Step:
    decode: list[tuple[Row, int]] = field(default_factory=list)
    prompts: list[tuple[Row, int, int]] = field(default_factory=list)
    saves = restores = ()

    def parts(self) -> list[tuple[Row, int]]:
        return [*((row, at + 1) for row, at in self.decode), *((row, at + count) for row, at, count in self.prompts)]


def layout_of(**sizes: int) -> tuple[Layout, jax.sharding.Mesh]:
    """Of the first devices."""
    parallel = ParallelConfig(**{"data": 1, "data_sharding": "replicate", **sizes})
    return Layout(Plan.of(parallel)), build_mesh(parallel, jax.devices()[: int(np.prod([*sizes.values(), 1]))])


def loaded(cfg: Any, sizes: dict[str, int], seed: int = 0) -> LoadedModel:
    """The model with generic weights: gains and biases are not 1 and 0."""
    (layout, mesh), draw = layout_of(**sizes), np.random.default_rng(seed)
    abstract = nnx.eval_shape(lambda: cfg.build(layout))
    weights = {}
    declared = {**specs(abstract), **specs(abstract, Observation)}
    for path, value in initial_values(declared, seed).items():
        noise = 0.0 if declared[path].role == "weight" else 0.1 * draw.standard_normal(value.shape)
        spec = layout.plan.compute.spec(declared[path].axes)
        weights[path] = jax.device_put(jnp.asarray(value + noise, jnp.float32), NamedSharding(mesh, spec))
    return LoadedModel(cfg, abstract, weights, mesh, layout)


def programs_of(
    model: LoadedModel,
    choosers: abc.Sequence[Any],
    *,
    rows: int = 3,
    tile: int = 0,
    chunks: abc.Sequence[int] = (CHUNK,),
    drafts: int = 0,
    blocks: int,
    block: int = 4,
    length: int = 32,
    snapshots: int = 0,
    dtype: str = "float32",
    kernel: Any = "tiled",
    heads: Any = lambda size, **settings: None,
) -> Programs:
    """Steps of this many rows and as many slots. chunks: tokens of prompts, 0 for steps without one; tile: 0 for one
    prompt a step. heads: makes those that draft, from the same settings."""
    tiles = [(chunk // (tile or chunk), tile or chunk) if chunk else (0, 0) for chunk in chunks]
    buckets = [Bucket(rows, *shape, drafts) for shape in tiles]
    size = CacheSize(blocks=blocks, block=block, slots=rows, snapshots=snapshots)
    settings: Any = {"buckets": buckets, "length": length, "dtype": dtype, "kernel": kernel}
    return Programs(model, size, choosers=choosers, heads=heads(size, **settings), **settings)


def step_logits(programs: Programs, work: abc.Sequence[Step]) -> list[tuple[Row, int, np.ndarray]]:
    """Runs a step of each replica -> its rows, the position of the last token of each, and the logits there."""
    result = programs.start(work)
    logits, found = np.asarray(programs.choose(result, Logits(), ()).logits), list[tuple[Row, int, np.ndarray]]()
    for replica, step in enumerate(work):
        for number, (row, computed) in enumerate(step.parts()):
            found.append((row, computed - 1, logits[result.row(replica, number)]))
    return found


def whole_logits(model: LoadedModel, *tokens: np.ndarray, **leaves: np.ndarray) -> np.ndarray:
    """Of the trainer's forward pass over whole rows."""
    with jax.set_mesh(model.mesh):
        run = jax.jit(lambda weights, tokens, leaves: bind(model.model, weights)(*tokens, **leaves))
        return np.asarray(run(model.weights, tokens, leaves))
