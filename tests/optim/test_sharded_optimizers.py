"""Every optimizer on a mesh of pipeline 2 x data 2 x tensor 2 equals one device."""

import re
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from megajax.layers.param import Normal, ParamSpec
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan
from megajax.optim.config import AdamWConfig, MuonConfig
from megajax.optim.optimizer import constant_rates, global_norm

LAYERS = 6
SHAPES = {
    "query": ((LAYERS, 8, 2, 4), ("layer", "embed", "heads", "head_dim")),
    "key": ((LAYERS, 8, 2, 2), ("layer", "embed", "kv_heads", "head_dim")),
    "output": ((LAYERS, 2, 4, 8), ("layer", "heads", "head_dim", "embed")),
    "up": ((LAYERS, 8, 12), ("layer", "embed", "mlp")),
    "narrow": ((LAYERS, 8, 4), ("layer", "embed", "mlp")),
    "down": ((LAYERS, 12, 8), ("layer", "mlp", "embed")),
    "tokens": ((12, 8), ("vocab", "embed")),
}
ROWS = (0, 1, 2, 3, 4, -1)
DECLARED = {
    path: ParamSpec(path, shape, axes, Normal(0.02), "weight", path, ROWS if axes[0] == "layer" else ())
    for path, (shape, axes) in SHAPES.items()
}
PARALLEL = ParallelConfig(pipeline=2, data=2, tensor=2, data_sharding="zero1")
PLAN, MESH = Plan.of(PARALLEL), build_mesh(PARALLEL)
type Declared = Mapping[str, ParamSpec]


def arrays(seed: int, declared: Declared = DECLARED) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = {path: rng.normal(size=spec.shape).astype(np.float32) for path, spec in declared.items()}
    for path, spec in declared.items():
        if -1 in spec.layers:
            values[path][-1] = 0  # a row that is no layer
    return values


def on_mesh(values: dict[str, np.ndarray], declared: Declared = DECLARED) -> dict[str, jax.Array]:
    """As the optimizer has them."""
    shardings = {path: NamedSharding(MESH, PLAN.optimizer.spec(spec.axes)) for path, spec in declared.items()}
    return {path: jax.device_put(x, shardings[path]) for path, x in values.items()}


def two_updates(cfg: Any, declared: Declared = DECLARED, *, sharded: bool = False, decay: float = 0.1) -> Any:
    """(weights, state), on one device or on the mesh."""
    optimizer = cfg.build(declared, *([PLAN] if sharded else []))
    place = partial(on_mesh, declared=declared) if sharded else dict
    update = jax.jit(partial(optimizer.update, rates=constant_rates(0.01, decay)))
    with jax.set_mesh(MESH) if sharded else nullcontext():
        params = place(arrays(0, declared))
        state = optimizer.init(params)
        for seed in (1, 2):
            params, state = update(place(arrays(seed, declared)), state, params)
    return jax.device_get((params, state))


@pytest.mark.parametrize(
    "cfg",
    [pytest.param(AdamWConfig(moments="float16"), marks=pytest.mark.slow), MuonConfig()],
    ids=lambda cfg: cfg.name(),
)
def test_losses_equal_those_of_one_device(cfg):
    (unsharded, _), (weights, _) = (two_updates(cfg, sharded=sharded) for sharded in (False, True))
    with jax.set_mesh(MESH):
        norm = jax.jit(global_norm)(on_mesh(arrays(1)))
    for path, expected in unsharded.items():
        np.testing.assert_allclose(weights[path], expected, rtol=1e-5, atol=1e-6, err_msg=path)
        if DECLARED[path].layers:
            np.testing.assert_array_equal(np.asarray(weights[path])[-1], 0)
    # Sharded over data, tensor and pipeline or replicated: an element counts once.
    exact = np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in arrays(1).values()))
    np.testing.assert_allclose(norm, exact, rtol=1e-6)


@pytest.mark.slow
def test_muon_moves_one_matrix_at_a_time():
    """It exchanges each weight twice over data; over tensor it sums the small side and gathers narrow matrices."""
    optimizer = MuonConfig().build(DECLARED, PLAN)
    shardings = {p: NamedSharding(MESH, PLAN.optimizer.spec(axes)) for p, (_, axes) in SHAPES.items()}
    like = {p: jax.ShapeDtypeStruct(s, jnp.float32, sharding=shardings[p]) for p, (s, _) in SHAPES.items()}
    state = jax.eval_shape(optimizer.init, like)
    state = {name: {p: like[p] for p in part} if isinstance(part, dict) else part for name, part in state.items()}
    with jax.set_mesh(MESH):
        update = partial(optimizer.update, rates=constant_rates(0.01, 0.1))
        text = jax.jit(update, out_shardings=(shardings, None)).lower(like, state, like).compile().as_text()
    counts = {
        kind: len(re.findall(rf"= \S.* {kind}(?:-start)?\(", text))
        for kind in ("all-to-all", "all-gather", "all-reduce", "reduce-scatter")
    }
    matrices = len(SHAPES) - 1
    assert counts["all-to-all"] == 2 * matrices
    # key [8, 4] and narrow [8, 4] are sharded along their shorter side.
    assert counts["all-gather"] == 2
    # Five products for each of the other four, and norms of one element.
    assert 4 * 5 <= counts["all-reduce"] <= 4 * 6
    assert counts["reduce-scatter"] == 0
    # 3 rows a stage on 2 devices: two rounds, and no array is as large as a stack.
    assert "f32[6,8,12]" not in text
