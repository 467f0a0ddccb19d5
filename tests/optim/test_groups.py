"""Learning rates of weights, also of a model wider than the one its settings were tuned on (muP, Yang et al. 2022)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from user_errors import user_error

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.param import ONES, ParamSpec, bind, initial_values, specs
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.decoder.config import DecoderConfig, PredictionConfig, WidthScalingConfig
from megajax.models.presets.gpt import gpt2
from megajax.optim.config import AdamWConfig, GroupConfig, LionConfig, MuonConfig, ScheduleConfig, SGDConfig
from megajax.optim.groups import ParameterGroup, groups
from megajax.optim.optimizer import constant_rates


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
    with user_error():
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
    with user_error():
        schedule.rates(jnp.int32(0), 0.1, ParameterGroup(lr=1e-4))
    with user_error():
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


LAYOUT = Layout(Plan.of(ParallelConfig()))


def model(hidden: int = 32, **changes) -> DecoderConfig:
    mixer = AttentionConfig(heads=hidden // 8, bias=True)
    settings = {
        "hidden": hidden,
        "vocabulary_size": 64,
        "vocabulary_multiple": 1,
        "sequence_length": 8,
        "learned_positions": True,
        "stack": StackConfig(pattern=(BlockConfig(mixer=mixer, mlp=DenseMLPConfig(ffn=2 * hidden)),), repeats=1),
    }
    return DecoderConfig(**settings | changes)


def declared_by(cfg: DecoderConfig) -> dict:
    return specs(nnx.eval_shape(lambda: cfg.build(LAYOUT)))


EVERYTHING = declared_by(model(prediction=PredictionConfig()))
TABLES = {"tokens", "positions"}
VECTORS = {path for path in EVERYTHING if path.endswith(("bias", "gain"))}
MATRICES = set(EVERYTHING) - TABLES - VECTORS


def widths(cfg, weights=EVERYTHING, width: float = 4.0) -> dict[str, float]:
    return {path: group.width for path, group in cfg.build(weights, None, width).groups.items()}


def test_the_kinds_of_weights():
    assert {"head", "predictions.0.from_state", "stack.blocks.0.mlp.up"} <= MATRICES
    assert any(path.startswith("predictions.0.block") for path in MATRICES)


@pytest.mark.parametrize(
    ("cfg", "matrices", "others"),
    [(AdamWConfig(), 1 / 4, 1), (LionConfig(), 1 / 4, 1), (SGDConfig(), 1, 4)],
    ids=["adam", "lion", "sgd"],
)
def test_rates_of_weights(cfg, matrices, others):
    assert widths(cfg) == {path: matrices if path in MATRICES else others for path in EVERYTHING}
    assert set(widths(cfg, width=1.0).values()) == {1.0}


def test_muon_does_not_change_the_rates_of_its_own_matrices():
    factors = widths(MuonConfig())
    stacked = {path for path in MATRICES if EVERYTHING[path].layers}
    assert {path for path in factors if factors[path] != 1} == MATRICES - stacked
    assert factors["head"] == 1 / 4


def test_a_head_that_shares_the_embedding_counts_as_an_embedding():
    assert widths(AdamWConfig(), declared_by(model(tied=True)))["tokens"] == 1


def test_epsilon_scales_with_the_rate():
    rules = AdamWConfig(epsilon=1e-8).build(EVERYTHING, None, 4.0).rules
    assert {path for path in rules if rules[path].epsilon == 2.5e-9} == MATRICES
    assert {rules[path].epsilon for path in TABLES | VECTORS} == {1e-8}
    # Megatron-LM does not change Adam's epsilon beside Muon.
    beside = MuonConfig(epsilon=1e-8).build(EVERYTHING, None, 4.0).rules
    assert {rule.epsilon for path, rule in beside.items() if hasattr(rule, "epsilon")} == {1e-8}


def test_highest_and_lowest_rate_are_divided_and_the_start_of_the_warm_up_is_not():
    cfg = ScheduleConfig(lr=1e-2, min_lr=1e-3, warmup_start=4e-4, warmup_steps=10, style="linear")
    schedule = cfg.build(steps=110, global_size=1)
    wide = AdamWConfig().build(EVERYTHING, None, 4.0).groups
    for n in (0, 5, 10, 60, 110, 200):
        decayed = max(n - 10, 0) / 100
        exact = 4e-4 + (2.5e-3 - 4e-4) * n / 10 if n <= 10 else 2.5e-4 + max(1 - decayed, 0) * (2.5e-3 - 2.5e-4)
        lr, decay = schedule.rates(jnp.int32(n), 0.1, wide["head"])
        assert float(lr) == pytest.approx(exact, rel=1e-6)
        assert float(decay) == pytest.approx(0.1)
        narrow, _ = schedule.rates(jnp.int32(n), 0.1, wide["tokens"])
        assert narrow == schedule(jnp.int32(n))


def test_explicit_rates_of_weights_are_not_divided():
    schedule = ScheduleConfig(lr=1e-2, min_lr=1e-3, style="constant").build(steps=10, global_size=1)
    cfg = AdamWConfig(
        embedding_lr=5e-3,
        groups=(GroupConfig(match="stack.*.up", lr=2e-3), GroupConfig(match="stack.*.down", lr_multiplier=0.5)),
    )
    optimizer = cfg.build(EVERYTHING, None, 4.0)

    def rate(path: str) -> float:
        return float(schedule.rates(jnp.int32(0), 0.1, optimizer.groups[path])[0])

    assert rate("head") == rate("tokens") == pytest.approx(5e-3)
    assert rate("stack.blocks.0.mlp.up") == pytest.approx(2e-3)
    assert rate("stack.blocks.0.mlp.down") == pytest.approx(1.25e-3)
    assert rate("stack.blocks.0.mixer.query") == pytest.approx(2.5e-3)
    assert optimizer.rules["head"].epsilon == 2.5e-9
    assert "Adam, schedule's lr x 0.25 for the width, decay" in dict(optimizer.table())


def moved(hidden: int) -> float:
    """How far three updates move the logits of a fixed batch (root mean square)."""
    wide = model(hidden, width_scaling=WidthScalingConfig(base_hidden=16, base_head_dim=8), tied=True)
    cfg, lr = AdamWConfig(weight_decay=0.0), 1e-2
    weights, abstract = declared_by(wide), nnx.eval_shape(lambda: wide.build(LAYOUT))
    tokens = jax.random.randint(jax.random.key(0), (4, 9), 0, 64)
    optimizer = cfg.build(weights, None, wide.width_ratio())
    schedule = ScheduleConfig(lr=lr, style="constant").build(steps=3, global_size=1)

    def loss(params):
        scores = jax.nn.log_softmax(bind(abstract, params)(tokens[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], -1))

    def update(step, carry):
        params, state = carry
        return optimizer.update(jax.grad(loss)(params), state, params, rates=lambda g: schedule.rates(step, 0.0, g))

    @jax.jit
    def distance():
        first = initial_values(weights, 7)
        last, _ = jax.lax.fori_loop(0, 3, update, (first, optimizer.init(first)))
        before, after = (bind(abstract, params)(tokens[:, :-1]) for params in (first, last))
        return jnp.sqrt(jnp.mean(jnp.square(after - before)))

    return float(distance())


@pytest.mark.slow
def test_updates_move_the_logits_of_wide_and_narrow_models_equally_far():
    """One has eight times the width of the other; without scaling its logits move four times as far."""
    base = moved(16)
    assert base > 0.05
    assert 0.75 < moved(128) / base < 1.33


def test_constant_rates_ignore_the_width():
    assert float(constant_rates(1.0)(AdamWConfig().build(EVERYTHING, None, 4.0).groups["head"])[0]) == 1
