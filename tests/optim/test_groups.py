"""Learning rates of weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.config.errors import UserError
from megajax.layers.param import ONES, ParamSpec, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.presets.gpt import gpt2
from megajax.optim.config import AdamWConfig, GroupConfig, MuonConfig, ScheduleConfig, SGDConfig
from megajax.optim.groups import ParameterGroup, groups


@pytest.fixture(scope="module")
def declared() -> dict[str, ParamSpec]:
    return specs(nnx.eval_shape(lambda: gpt2("debug").build(Layout(Plan.of(ParallelConfig())))))


def test_matrices_decay_at_the_rate_of_the_schedule(declared):
    by_path = groups(AdamWConfig(), declared)
    assert set(by_path.values()) == {ParameterGroup(), ParameterGroup(decay=0.0)}
    undecayed = {path for path, group in by_path.items() if not group.decay}
    assert undecayed == {path for path in by_path if path.endswith(("bias", "gain"))}
    assert "stack.blocks.0.mixer.query_bias" in undecayed and not undecayed & {"tokens", "positions"}


def test_embeddings_may_be_excluded_from_the_decay(declared):
    before, after = groups(AdamWConfig(), declared), groups(AdamWConfig(decay_embeddings=False), declared)
    changed = {path for path in before if before[path] != after[path]}
    assert changed == {path for path in declared if path in ("tokens", "positions", "head")}
    assert changed >= {"tokens", "positions"}


def test_query_and_key_norms_may_decay():
    """Their biases too, and the norm of latent queries; the one of latent keys and values does not."""
    mixer, axes = "stack.blocks.0.mixer", {"query_norm": "head_dim", "key_norm": "head_dim", "norm": None}
    several = {
        path: ParamSpec(path, (4, 8), ("layer", axis), ONES, role, path, (0, 1, 2, 3))
        for name, axis in axes.items()
        for role in ("gain", "bias")
        if (path := f"{mixer}.{name}.{role}")
    }
    several["q"] = ParamSpec("latent.query_norm.gain", (4, 8), ("layer", None), ONES, "gain", "q", (0, 1, 2, 3))
    by_path = groups(AdamWConfig(decay_qk_norms=True), several)
    assert {path for path, group in by_path.items() if group.decay} == {
        path for path in several if ".norm." not in path
    }
    assert not any(group.decay for group in groups(AdamWConfig(), several).values())


def test_token_embedding_and_head_have_rates_of_their_own(declared):
    by_path = groups(AdamWConfig(embedding_lr=1e-4, embedding_min_lr=1e-6), declared)
    with_rate = {path for path, group in by_path.items() if group.lr is not None}
    assert with_rate == {path for path, spec in declared.items() if "vocab" in spec.axes}
    assert by_path["tokens"] == ParameterGroup(lr=1e-4, min_lr=1e-6)


def test_patterns_change_their_own_settings_and_later_ones_win(declared):
    cfg = AdamWConfig(
        groups=(
            GroupConfig(match="stack.*", lr_multiplier=0.5, decay=2.0),
            GroupConfig(match="*.mlp.up", lr_multiplier=3.0),
            GroupConfig(match="positions", decay=0.0),
        )
    )
    by_path = groups(cfg, declared)
    assert by_path["stack.blocks.0.mlp.up"] == ParameterGroup(lr_multiplier=3.0, decay=2.0)
    assert by_path["stack.blocks.0.mlp.down"] == ParameterGroup(lr_multiplier=0.5, decay=2.0)
    assert by_path["positions"] == ParameterGroup(decay=0.0)
    assert by_path["tokens"] == ParameterGroup()


def test_a_pattern_that_matches_nothing_names_the_nearest_paths(declared):
    with pytest.raises(UserError, match=r"groups\.1\.match=.*mlp\.upp matches no weight.*stack\.blocks\.0\.mlp\.up"):
        AdamWConfig(groups=(GroupConfig(match="*"), GroupConfig(match="stack.blocks.0.mlp.upp"))).build(declared)


def test_the_update_uses_the_rates_of_each_group():
    declared = {
        path: ParamSpec(path, (2, 2), ("embed", "mlp"), ONES, "weight", path, ()) for path in ("a", "b", "frozen")
    }
    cfg = SGDConfig(
        weight_decay=0.1,
        groups=(
            GroupConfig(match="b", lr=2e-2, min_lr=1e-2, decay=3.0),
            GroupConfig(match="frozen", lr_multiplier=0.0),
        ),
    )
    schedule = ScheduleConfig(lr=1e-2, style="linear").build(steps=10, global_size=1)
    optimizer = cfg.build(declared)
    params = {path: np.ones((2, 2), np.float32) for path in declared}

    def update(n):
        rates = lambda group: schedule.rates(n, cfg.weight_decay, group)  # noqa: E731
        return optimizer.update(params, optimizer.init(params), params, rates=rates)[0]

    updated = jax.jit(update)(jnp.int32(5))
    np.testing.assert_allclose(updated["a"], 1 - 5e-3 * 1.1, rtol=1e-6)
    np.testing.assert_allclose(updated["b"], 1 - 1.5e-2 * 1.3, rtol=1e-6)
    np.testing.assert_array_equal(updated["frozen"], 1)


def test_a_group_whose_rate_would_rise_is_refused():
    schedule = ScheduleConfig(lr=1e-2, min_lr=1e-3).build(steps=10, global_size=1)
    with pytest.raises(UserError, match=r"lr=0\.0001 of their own would rise to schedule\.min_lr=0\.001"):
        schedule.rates(jnp.int32(0), 0.1, ParameterGroup(lr=1e-4))
    with pytest.raises(UserError, match=r"min_lr=0\.1 of their own"):
        schedule.rates(jnp.int32(0), 0.1, ParameterGroup(min_lr=0.1))


def test_the_table_names_rule_rates_and_weights(declared):
    optimizer = MuonConfig(embedding_lr=1e-4, groups=(GroupConfig(match="positions", lr_multiplier=0.1),)).build(
        declared
    )
    rows = dict(optimizer.table())
    assert rows["Adam, lr 0.0001, decay"] == "tokens"
    assert rows["Adam, schedule's lr x 0.1, decay"] == "positions"
    assert "stack.blocks.0.mlp.up" in rows["Orthogonalised, schedule's lr, decay"]
    listed = sorted(path for weights in rows.values() for path in weights.split(", "))
    assert listed == sorted(declared)
    assert str(ParameterGroup()) == "schedule's lr, decay"
