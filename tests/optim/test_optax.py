"""optax transformations as the optimizer: each layer's own arrays, on a mesh as on one device, and refusals."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_sharded_optimizers
from test_sharded_optimizers import two_updates
from user_errors import user_error

from megajax.config import load
from megajax.config.compose import override
from megajax.layers.param import ONES, Normal, ParamSpec
from megajax.optim.config import AdamWConfig, GroupConfig, MuonConfig, OptaxConfig
from megajax.optim.optax_export import scale_by_rule, transformation
from megajax.optim.optimizer import Adam, Momentum, SignOfAverage, constant_rates

LAYERS = 4
SHAPES = {
    "query": ((LAYERS, 8, 2, 4), ("layer", "embed", "heads", "head_dim")),
    "up": ((LAYERS, 8, 12), ("layer", "embed", "mlp")),
    "gain": ((LAYERS, 8), ("layer", "embed")),
    "other": ((2, 8, 4), ("layer", "embed", "mlp")),
    "tokens": ((12, 8), ("vocab", "embed")),
    "norm": ((8,), ("embed",)),
}
ROWS = (0, 1, 2, -1)
DECLARED = {
    path: ParamSpec(
        path,
        shape,
        axes,
        ONES if path in ("gain", "norm") else Normal(0.02),
        "gain" if path in ("gain", "norm") else "weight",
        path,
        () if axes[0] != "layer" else ROWS if shape[0] == LAYERS else (0, 1),
    )
    for path, (shape, axes) in SHAPES.items()
}
HERE = "test_optax"


def heads_joined(params: Any) -> Any:
    """Every matrix of a layer for Muon; heads and head_dim are one dimension of a query."""
    by_rank = {2: optax.contrib.MuonDimensionNumbers(0, 1), 3: optax.contrib.MuonDimensionNumbers((0,), (1, 2))}
    return {path: None if path == "tokens" else by_rank.get(getattr(p, "ndim", 0)) for path, p in params.items()}


def muon(learning_rate: Any, **settings: Any) -> optax.GradientTransformation:
    return optax.contrib.muon(learning_rate, muon_weight_dimension_numbers=heads_joined, **settings)


def of_a_user(learning_rate: Any, momentum: float = 0.9) -> optax.GradientTransformation:
    """Momentum, a norm per weight, an update count, and NaN where a weight has no gradient."""

    def init(params: Any) -> Any:
        return {"momentum": jax.tree.map(jnp.zeros_like, params), "norm": jax.tree.map(lambda p: 0.0, params), "n": 0}

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        moved = jax.tree.map(lambda m, g: momentum * m + g, state["momentum"], grads)
        norm = jax.tree.map(lambda m: jnp.sqrt(jnp.sum(jnp.square(m))), moved)
        updates = jax.tree.map(lambda m, n: -learning_rate * m / n, moved, norm)
        return updates, {"momentum": moved, "norm": norm, "n": state["n"] + 1}

    return optax.GradientTransformation(init, update)


ADAFACTOR = OptaxConfig(make="optax:adafactor", settings={"min_dim_size_to_factor": 4}, weight_decay=0.1)
MUON = OptaxConfig(make=f"{HERE}:muon", settings={"weight_decay": 0.1, "ns_steps": 2})
OWN = OptaxConfig(make=f"{HERE}:of_a_user", settings={"momentum": 0.8})
CLIPPED = OptaxConfig(make=f"{HERE}:clipped", per_layer=False)
EVERY = {"adafactor": ADAFACTOR, "muon": MUON, "a user's": OWN, "stacked": CLIPPED}
SLOW = ("adafactor", "muon", "stacked")


def clipped(learning_rate: Any) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(learning_rate))


arrays = partial(test_sharded_optimizers.arrays, declared=DECLARED)


def by_layer(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every layer's weights as arrays of their own, under names unknown to the code."""
    split = {
        (path, row): values[path][row]
        for path, spec in DECLARED.items()
        for row, layer in enumerate(spec.layers)
        if layer >= 0
    }
    unstacked = {(path, None): values[path] for path, spec in DECLARED.items() if not spec.layers}
    return {f"{path}/{row}": x for (path, row), x in (split | unstacked).items()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in EVERY])
def test_layers_are_arrays_of_their_own_on_any_layout(name: str) -> None:
    """optax treats a list of layers' weights in this way, on one device and on pipeline 2 x data 2 x tensor 2."""
    cfg = EVERY[name]
    expected = by_layer(arrays(0))
    tx = {"adafactor": partial(optax.adafactor, min_dim_size_to_factor=4), "muon": muon}
    tx = tx.get(name, {"a user's": partial(of_a_user, momentum=0.8), "stacked": clipped}.get(name))(0.01)
    if name == "muon":
        numbers = {path: heads_joined({path.split("/")[0]: x})[path.split("/")[0]] for path, x in expected.items()}
        tx = optax.contrib.muon(0.01, muon_weight_dimension_numbers=lambda _: numbers, weight_decay=0.1, ns_steps=2)
    state = tx.init(expected)
    for seed in (1, 2):
        updates, state = jax.jit(tx.update)(by_layer(arrays(seed)), state, expected)
        decay = {path: 0.01 * cfg.weight_decay * x * (np.ndim(x) > 1) for path, x in expected.items()}
        expected = {path: x + updates[path] - decay[path] for path, x in expected.items()}

    for sharded in (False, True):
        params, kept = two_updates(cfg, DECLARED, sharded=sharded, decay=cfg.weight_decay)
        for path, x in by_layer(params).items():
            np.testing.assert_allclose(x, expected[path], rtol=1e-5, atol=1e-5, err_msg=path)
        for part in (params, *(part for part in kept.values() if isinstance(part, dict))):
            for path, x in part.items():
                assert np.isfinite(x).all(), path
                if -1 in DECLARED[path].layers:
                    np.testing.assert_array_equal(x[-1], 0, err_msg=path)


def of_all_weights(learning_rate: Any) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(learning_rate))


def prodigy(learning_rate: Any) -> optax.GradientTransformation:
    """Stores a number that depends on all weights."""
    return optax.contrib.prodigy(learning_rate)


def starting_together(learning_rate: Any) -> optax.GradientTransformation:
    """An update depends on its own weight only, but the first state on all."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: p + optax.tree.norm(params), params), lambda g, state, params: (g, state)
    )


def shrinking(learning_rate: Any) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, params: jax.tree.map(lambda g: -learning_rate * g.sum(), updates))


def halving(learning_rate: Any) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, params: jax.tree.map(lambda g: g.astype(jnp.bfloat16), updates))


def growing(learning_rate: Any) -> optax.GradientTransformation:
    return optax.GradientTransformation(lambda params: {"n": 0}, lambda g, state, params: (g, {"n": 0, "more": 1}))


def flat(learning_rate: Any) -> optax.GradientTransformation:
    return optax.flatten(optax.sgd(learning_rate, 0.9))


def noisy(learning_rate: Any) -> optax.GradientTransformation:
    return optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.sgd(learning_rate))


def of_the_loss(learning_rate: Any) -> optax.GradientTransformation:
    return optax.contrib.reduce_on_plateau()


NO_FUNCTION = 3

REFUSED = {
    "no_such_module:make": "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'",
    "optax:adamfactor": "cannot be loaded: AttributeError.*adamfactor",
    "no/such/file.py:make": "cannot be loaded: FileNotFoundError.*no/such/file.py",
    f"{HERE}:NO_FUNCTION": "is of type int, not a function",
    f"{HERE}:by_layer": "failed: TypeError.*learning_rate",
    "builtins:dict": "returned a dict, not an optax.GradientTransformation",
    f"{HERE}:of_all_weights": "combines weights: the update of .* depends on .*optimizer.clip.*per_layer=false",
    f"{HERE}:prodigy": "combines weights",
    f"{HERE}:starting_together": "combines weights: the state of .* depends on",
    f"{HERE}:shrinking": r"changes updates .* to float32\[\]",
    f"{HERE}:halving": "changes updates .* to bfloat16",
    f"{HERE}:growing": "another structure from its update than from its init",
    f"{HERE}:noisy": "keeps random keys",
    f"{HERE}:of_the_loss": "failed: TypeError.*value",
}


@pytest.mark.parametrize("make", REFUSED)
def test_an_unsuitable_transformation_is_one_clear_message(make: str) -> None:
    with user_error("optimizer.make") as error:
        OptaxConfig(make=make).build(DECLARED)
    assert error.value.code == 2


def test_state_without_rows_is_refused_where_layers_are_stacked() -> None:
    for make in (f"{HERE}:flat", "optax:adafactor"):
        with user_error("optimizer.make"):
            OptaxConfig(make=make, per_layer=False).build(DECLARED)
    state = jax.eval_shape(OptaxConfig(make=f"{HERE}:prodigy", per_layer=False).build(DECLARED).init, arrays(0))
    assert state["estim_lr"].shape == () and state["exp_avg"]["up"].shape == SHAPES["up"][0]


def test_rates_other_than_the_schedule_s_are_refused() -> None:
    invalid = OptaxConfig(
        make="adafactor",
        settings={"learning_rate": 1},
        moments="bfloat16",
        embedding_lr=1e-3,
        groups=(GroupConfig(match="tokens", decay=2.0), GroupConfig(match="up", lr_multiplier=0.5)),
    )
    settings = [problem.setting for problem in invalid.problems()]
    assert settings == ["make", "settings.learning_rate", "moments", "embedding_lr", "groups.1"]
    assert not ADAFACTOR.problems()
    with user_error("model.width_scaling"):
        ADAFACTOR.build(DECLARED, None, 2.0)


PAIRS = {
    "SGD": (lambda: scale_by_rule(Momentum(0.9)), lambda: optax.trace(0.9), 1e-6),
    "Lion": (lambda: scale_by_rule(SignOfAverage(0.9, 0.99)), lambda: optax.scale_by_lion(0.9, 0.99), 0.0),
    # optax computes 1 - beta^t in float32: a relative error of 1e-5 at beta2 = 0.999.
    "Adam": (lambda: scale_by_rule(Adam(0.9, 0.999, 1e-8)), lambda: optax.scale_by_adam(0.9, 0.999, 1e-8), 1.2e-5),
}


@pytest.mark.parametrize("name", PAIRS)
def test_rules_as_transformations_agree_with_optax(name: str) -> None:
    """Five updates of a tree of any shape have the same directions."""
    rule, theirs, tolerance = PAIRS[name]
    rng = np.random.default_rng(0)
    params = {"a": jnp.zeros((3, 4)), "b": [jnp.zeros(5)]}
    states = [rule().init(params), theirs().init(params)]
    for _ in range(5):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
        updates, states[0] = rule().update(grads, states[0])
        expected, states[1] = theirs().update(grads, states[1])
        jax.tree.map(partial(np.testing.assert_allclose, rtol=tolerance, atol=0), updates, expected)


@pytest.mark.parametrize(
    "cfg", [AdamWConfig(), pytest.param(MuonConfig(), marks=pytest.mark.slow)], ids=lambda c: type(c).__name__
)
def test_an_optimizer_is_a_transformation(cfg: Any) -> None:
    """Its update equals the change of the weights by the optimizer itself."""
    optimizer, params = cfg.build(DECLARED), arrays(0)
    tx = transformation(optimizer, constant_rates(0.01, 0.1))
    expected, _ = optimizer.update(arrays(1), optimizer.init(params), params, rates=constant_rates(0.01, 0.1))
    updates, _ = tx.update(arrays(1), tx.init(params), params)
    updated = optax.apply_updates(params, updates)
    for path in params:
        np.testing.assert_allclose(updated[path], expected[path], rtol=1e-6, atol=1e-7, err_msg=path)


def test_settings_of_the_function_are_given_separately():
    optax_run = ("optimizer.type=Optax", "optimizer.make=optax:adafactor")
    cfg = load("quickstart.py", *optax_run, "optimizer.settings.factored=false", "optimizer.settings.decay_rate=0.7")
    assert cfg.optimizer.settings == {"factored": False, "decay_rate": 0.7}
    assert override(cfg, "optimizer.settings.factored=true").optimizer.settings == {"factored": True, "decay_rate": 0.7}
