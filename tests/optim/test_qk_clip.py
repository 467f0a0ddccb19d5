"""QK-clip: closed forms, bounds that every kernel gives, and training on several devices as on one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_runs import LENGTH, ONE, build_program, llama, place, rows, start, within

from megajax.kernels.attention.attention import PASSES, Mask, attend
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.norm.config import L2NormConfig
from megajax.layers.param import ParamSpec, specs
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.decoder.config import DecoderConfig
from megajax.optim.config import MuonConfig
from megajax.optim.qk_clip import clipped, head_parts
from megajax.training.program import Program

LIMIT = 2.0
LATENT = LatentAttentionConfig(heads=4, key_value_rank=8, content_dim=6, position_dim=2, value_dim=4)
MIXER = llama().stack.pattern[0].mixer


def model(**changes: object) -> DecoderConfig:
    """Two layers with changed attention."""
    (block,) = llama().stack.pattern
    return replace(llama(), stack=StackConfig(pattern=(replace(block, mixer=replace(MIXER, **changes)),), repeats=2))


def declared(cfg: DecoderConfig) -> dict[str, ParamSpec]:
    return specs(nnx.eval_shape(lambda: cfg.build(Layout(Plan.of(ONE)))))


def scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Largest score of each head [L, N]: x [S, D], q [L, D, N, H], k [L, D, K, H]."""
    x = np.random.default_rng(1).normal(size=(5, q.shape[1]))
    queries, keys = np.einsum("sd,ldnh->lnsh", x, q), np.einsum("sd,ldkh->lksh", x, k)
    keys = np.repeat(keys, queries.shape[1] // keys.shape[1], axis=1)
    return np.einsum("lnsh,lnth->lnst", queries, keys).max((2, 3))


@pytest.mark.parametrize("kv_heads", [8, 4])
def test_scores_above_the_limit_become_the_limit(kv_heads: int) -> None:
    """Both matrices get the square root; with shared keys, queries get the whole factor. Other heads are unchanged."""
    every, draw = declared(model(kv_heads=kv_heads)), np.random.default_rng(0)
    params = {path: jnp.asarray(draw.normal(size=spec.shape)) for path, spec in every.items()}
    query, key = (f"stack.blocks.0.mixer.{name}" for name in ("query", "key"))
    before = scores(params[query], params[key])
    limit = float(np.median(before))
    after = clipped(params, {"stack.blocks.0.mixer.core.scores.max": before}, head_parts(every), limit)
    np.testing.assert_allclose(scores(after[query], after[key]), np.minimum(before, limit), rtol=1e-5)
    changed = {path for path in params if not np.array_equal(params[path], after[path])}
    assert changed == ({query, key} if kv_heads == 8 else {query})
    ratios = np.asarray(after[query] / params[query])[0, 0, :, 0]
    expected = np.minimum(1, limit / before[0]) ** (0.5 if kv_heads == 8 else 1.0)
    np.testing.assert_allclose(ratios, expected, rtol=1e-5)


def test_rotary_parts_of_latent_attention_leave_the_shared_key() -> None:
    block = replace(llama().stack.pattern[0], mixer=LATENT)
    every = declared(replace(llama(), stack=StackConfig(pattern=(block,), repeats=2)))
    params = {path: jnp.ones(spec.shape) for path, spec in every.items()}
    bounds = jnp.broadcast_to(jnp.asarray([1.0, 4.0, 2.0, 8.0]), (2, 4))
    after = clipped(params, {"stack.blocks.0.mixer.core.scores.max": bounds}, head_parts(every), LIMIT)
    query, key = (after[f"stack.blocks.0.mixer.{name}"] for name in ("query", "key"))
    gamma = np.asarray([1, 0.5, 1, 0.25])
    np.testing.assert_allclose(query[1, 3, :, :6], np.repeat(np.sqrt(gamma)[:, None], 6, 1), rtol=1e-6)
    np.testing.assert_allclose(query[1, 3, :, 6:], np.repeat(gamma[:, None], 2, 1), rtol=1e-6)
    np.testing.assert_allclose(key[1, 3], np.repeat(np.sqrt(gamma)[:, None], 6, 1), rtol=1e-6)
    np.testing.assert_array_equal(after["stack.blocks.0.mixer.position_key"], 1)


@pytest.mark.parametrize("kernel", ["reference", "passes"])
@pytest.mark.parametrize("sink", [None, 1.0])
def test_bounds_are_the_log_sum_exps_of_the_scores(kernel: str, sink: float | None) -> None:
    """Above the largest score by at most the logarithm of the number of keys."""
    draw, length = np.random.default_rng(0), 6
    q, k = (draw.normal(size=(2, length, heads, 8)).astype(np.float32) * 3 for heads in (4, 2))
    mask = Mask(jnp.arange(length), jnp.arange(length), None, None)
    sinks = None if sink is None else jnp.full(4, sink)

    def total(bounds: jax.Array) -> jax.Array:
        backend = kernel if kernel == "reference" else PASSES["reference"]
        return attend(backend, q, k, k, mask, scale=0.5, sink=sinks, bounds=bounds).sum()

    observed = jax.grad(total)(jnp.zeros(4))
    products = 0.5 * np.einsum("bsnh,btnh->bnst", q, np.repeat(k, 2, axis=2))
    products = np.where(np.tril(np.ones((length, length), bool)), products, -np.inf)
    largest = products.max((0, 2, 3))
    exact = np.log(np.exp(products).sum(-1)).max((0, 2))
    np.testing.assert_allclose(observed, exact, rtol=1e-5)
    assert np.all(observed >= largest - 1e-5) and np.all(observed <= largest + np.log(length))


def program(cfg: DecoderConfig, parallel: ParallelConfig) -> Program:
    plain = build_program(cfg, parallel, microbatches=1)
    return Program.of(replace(plain.cfg, optimizer=MuonConfig(qk_clip=LIMIT)), plain.mesh)


@pytest.mark.slow
def test_tensor_parallel_training_clips_as_one_device() -> None:
    """The scores of the second step are near the limit that those of the first exceed."""
    results = {}
    for devices in (1, 2):
        run = program(model(scale=8.0), ParallelConfig(data=1, tensor=devices))
        with within(run):
            state, batch, bounds = start(run), place(run, rows()), []
            for _ in range(2):
                state, metrics = run.train_step(state, batch)
                bounds.append(metrics["stack.blocks.0.mixer.core.scores.max"])
        results[devices] = jax.device_get((bounds, state.params))
    (bounds, one), (other, two) = results[1], results[2]
    np.testing.assert_allclose(other, bounds, rtol=1e-4)
    for name in ("query", "key", "value", "output"):  # Adam, of the rest, divides small gradients by their size
        path = f"stack.blocks.0.mixer.{name}"
        np.testing.assert_allclose(two[path], one[path], rtol=0, atol=1e-4 * np.abs(one[path]).max(), err_msg=path)
    first, second = np.asarray(bounds)
    assert first.max() > LIMIT + np.log(LENGTH) > second.max()
    kinds = run.optimizer.kinds()
    assert kinds["stack.blocks.0.mixer.query"] == "Orthogonalised with QK-clip at 2"
    assert kinds["stack.blocks.0.mixer.output"] == "Orthogonalised"


def test_norms_of_queries_and_keys_are_refused() -> None:
    cfg = build_program(model(qk_norm=L2NormConfig()), ONE, microbatches=1).cfg
    (problem,) = replace(cfg, optimizer=MuonConfig(qk_clip=0.5)).problems()
    assert problem.setting == "optimizer.qk_clip" and "is 0.5, but qk_norm=L2NormConfig undoes" in problem.message
