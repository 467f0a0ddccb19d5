"""Runs in recipes: gone on with on another layout; evaluated; adapters beside a recipe."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_jobs import model, run_config
from tiny_runs import with_block

from megajax import convert
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.reader import open_checkpoints
from megajax.interop.weights.formats import open_stored
from megajax.job.job import train
from megajax.job.notebook import set_up
from megajax.job.start.resume import Resume
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig
from megajax.layers.param import Matrix, Normal, param
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.decoder.config import PredictionConfig
from megajax.optim.config import ScheduleConfig
from megajax.precision.block_recipes import nvfp4
from megajax.precision.config import Fp8DelayedConfig, MatmulConfig, Nvfp4Config, PrecisionConfig
from megajax.precision.matmul import RoundedMatmul
from megajax.training.run_config import RunConfig
from megajax.training.session import Run

DENSE = {"stack.blocks.0.mlp.up.amax.max", "predictions.0.from_state.amax.max"}
DELAYED = Fp8DelayedConfig(history=3, algorithm="max")
AHEAD = replace(model(hidden=64, ffn=64, dropout=0.0), prediction=PredictionConfig())
"""A model with a head that predicts further ahead, whose products are outside the stack."""


def job(recipe: MatmulConfig, folder: Path | str = "unused", **changes: Any) -> RunConfig:
    mixture = MoEConfig(experts=4, expert=GatedMLPConfig(ffn=64))
    small = with_block(model(hidden=64, dropout=0.0, repeats=1), mlp=mixture)
    settings = {"model": small, "precision": PrecisionConfig(matmul=recipe), "steps": 4}
    return run_config(folder, **settings | {"schedule": ScheduleConfig(lr=1e-2, style="constant")} | changes)


def state(folder: Path, cfg: RunConfig) -> Run:
    """The run as of its last checkpoint."""
    reader, _ = open_checkpoints(folder)
    return set_up(cfg, start=Resume(reader, reader.newest(), same_run=False, say=print))


@pytest.mark.slow
def test_another_layout_gets_the_same_histories(tmp_path: Path) -> None:
    assert train(job(DELAYED, tmp_path, model=AHEAD)) == 0
    here = state(tmp_path, job(DELAYED, model=AHEAD))
    elsewhere = state(tmp_path, job(DELAYED, model=AHEAD, parallel=ParallelConfig(data=1, pipeline=2)))
    assert all(run.state.observed.keys() >= DENSE for run in (here, elsewhere))
    for path, values in here.state.observed.items():
        np.testing.assert_array_equal(elsewhere.state.observed[path], values)
        assert "amax" not in path or (np.asarray(values) > 0).all()
    after = [next(iter(run.steps(1))).loss for run in (here, elsewhere)]
    assert after[1] == pytest.approx(after[0], abs=2e-3)


@pytest.mark.slow
def test_evaluation_and_the_model_use_the_scales_and_do_not_change_them() -> None:
    run = set_up(job(DELAYED, model=model(hidden=64, ffn=64, dropout=0.0, repeats=1)))
    for _ in run.steps(1):
        pass
    before = jax.device_get(run.state.observed)
    loss = run.evaluate(run.parts.splits.valid, batches=1)
    tokens = np.zeros((2, 16), np.int32)
    logits = np.asarray(run.model(tokens))
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(run.state.observed))
    assert np.isfinite(loss) and np.isfinite(logits).all()
    tight = {path: np.full_like(history, 1e-3) for path, history in before.items()}
    run.state = replace(run.state, observed=jax.device_put(tight, run.program.shardings.observed))
    assert run.evaluate(run.parts.splits.valid, batches=1) != loss
    assert np.abs(np.asarray(run.model(tokens)) - logits).max() > 0


@pytest.mark.slow
def test_adapters_beside_a_rounded_matrix_are_not_rounded() -> None:
    """Its product and gradients are those of the matrix in the recipe and of the adapter in float32, added."""
    matmul, rng = RoundedMatmul(nvfp4(Nvfp4Config(stochastic=False))), np.random.default_rng(0)
    layout = Layout(Plan.of(ParallelConfig()), matmul)
    x, w, a, b, dy = (
        rng.normal(size=shape).astype(np.float32) for shape in ((2, 16, 32), (32, 48), (32, 4), (4, 48), (2, 16, 48))
    )

    def adapted(x: Any, a: Any, b: Any) -> jax.Array:
        matrix = Matrix(layout, param((32, 48), ("embed", "mlp"), init=Normal(1)))
        matrix.adapt(4, 0.5, 0.0)
        matrix.array[...], matrix.lora_a[...], matrix.lora_b[...] = jnp.asarray(w), a, b
        return layout.dot("bsd,df->bsf", x, matrix, "batch", "seq", "mlp")

    y, pull = jax.vjp(adapted, x, a, b)
    rounded, pull_rounded = jax.vjp(lambda x: matmul("bsd,df->bsf", x, w), x)
    inner = partial(np.einsum, optimize=True)
    np.testing.assert_allclose(y, rounded + 0.5 * (x @ a) @ b, rtol=1e-5, atol=1e-5)
    dx, da, db = pull(dy)
    np.testing.assert_allclose(dx, pull_rounded(dy)[0] + 0.5 * dy @ b.T @ a.T, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(da, 0.5 * inner("bsd,bsr->dr", x, dy @ b.T), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(db, 0.5 * inner("bsr,bsf->rf", x @ a, dy), rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_adapters_beside_rounded_experts_from_start_to_export(tmp_path: Path) -> None:
    """They train while the base keeps its bits, and are added to experts."""
    recipe = Fp8DelayedConfig()
    base, run = tmp_path / "base", tmp_path / "run"
    assert train(job(recipe, base)) == 0
    plain = job(recipe).model
    settings = {"model": replace(plain, lora=LoRAConfig(rank=4, alpha=8.0)), "steps": 6}
    settings["checkpoint"] = CheckpointConfig(load=base, parts="weights", every=3)
    assert train(job(recipe, run, **settings)) == 0

    assert convert.main([f"--from={run}", f"--to={tmp_path / 'merged'}", "--merge", "--verify"]) == 0
    before, trained, merged = (open_stored(folder).weights for folder in (base, run, tmp_path / "merged"))

    def read(weights: Any, path: str) -> np.ndarray:
        return np.asarray(weights.read(path, tuple(slice(0, size) for size in weights.shapes[path])), np.float32)

    assert merged.shapes == before.shapes
    for name in ("up", "down"):
        path = f"stack.blocks.0.mlp.experts.{name}"
        np.testing.assert_array_equal(read(trained, path), read(before, path))
        added = 2.0 * read(trained, f"{path}.lora_a") @ read(trained, f"{path}.lora_b")
        assert np.abs(added).max() > 1e-4
        np.testing.assert_allclose(read(merged, path), read(before, path) + added, rtol=0, atol=1e-6)
