"""What routers report, against counts by hand."""

from types import SimpleNamespace

import numpy as np

from megajax.layers.moe.router import REPORTED, load_measures, report_measures
from megajax.mesh.layer_metrics import layer_values
from megajax.training.observations import measurements


def declared(layers: tuple[int, ...], measures: tuple) -> SimpleNamespace:
    updater = SimpleNamespace(measures=lambda: measures)
    return SimpleNamespace(layers=layers, observed=lambda: updater)


def report(**entries: float) -> list[float]:
    return [entries.get(name, 0.0) for name in REPORTED]


LOADS = np.array(
    [[[0, 0, 0, 0], tokens] for tokens in ([4, 4, 4, 4], [9, 9, 9, 9], [16, 0, 0, 0], [2, 2, 4, 0])], float
)


def test_load_of_experts_is_in_the_order_of_layers_without_padding_rows() -> None:
    path = "stack.blocks.0.mlp.load.sum"
    metrics = measurements({path: declared((5, -1, 3, 4), load_measures())}, {path: LOADS})
    largest, entropy, tokens = (
        metrics[name] for name in ("expert_load_max_over_mean", "expert_load_entropy", "expert_tokens")
    )
    assert largest.layers == (3, 4, 5)
    np.testing.assert_allclose(largest.values, [4, 2, 1])
    assert (largest.overall, largest.text) == (4.0, "4.00x")
    # Shares 1/4, 1/4, 1/2: 1.5 bits of the 2 that four experts can have.
    np.testing.assert_allclose(entropy.values, [0, 0.75, 1], atol=1e-15)
    assert entropy.overall == 0
    assert tokens.of(4) == [2, 2, 4, 0] and tokens.of(2) is None and tokens.text == ""


def test_losses_are_means_over_microbatches_and_dropped_tokens_are_fractions() -> None:
    measures = report_measures(("aux", "z"), "dispatch.room")
    observed = np.array([report(aux=8, z=2, chosen=64, parts=4), report(aux=4, z=6, chosen=64, dropped=16, parts=4)])
    metrics = measurements(
        {"stack.blocks.0.mlp.report.sum": declared((0, 1), measures)}, {"stack.blocks.0.mlp.report.sum": observed}
    )
    assert [*metrics] == ["dropped_share", "router_aux_loss", "router_z_loss", "router_not_finite"]
    np.testing.assert_allclose(metrics["router_aux_loss"].values, [2, 1])
    np.testing.assert_allclose(metrics["router_z_loss"].values, [0.5, 1.5])
    np.testing.assert_allclose(metrics["dropped_share"].values, [0, 0.25])
    assert (metrics["dropped_share"].overall, metrics["dropped_share"].text) == (0.125, "12.5%")
    assert "raise dispatch.room" in metrics["dropped_share"].measure.warning


def test_before_the_first_step_numbers_are_null_and_zero_drops_are_not_shown() -> None:
    of_load, of_report = declared((0,), load_measures()), declared((0,), report_measures(("aux",), ""))
    metrics = measurements(
        {"a.load.sum": of_load, "a.report.sum": of_report},
        {"a.load.sum": LOADS[:1] * 0, "a.report.sum": np.zeros((1, len(REPORTED)))},
    )
    assert np.isnan(metrics["expert_load_max_over_mean"].overall) and np.isnan(metrics["router_aux_loss"].overall)
    assert not metrics["dropped_share"].is_shown and metrics["dropped_share"].text == ""


def test_layers_of_other_stacks_and_outside_of_stacks_have_names() -> None:
    spec = declared((0, 1), load_measures())
    paths = {"encoder.stack.blocks.0.mlp.load.sum": spec, "stack.blocks.1.mlp.load.sum": spec}
    paths["predictions.1.block.mlp.load.sum"] = declared((), load_measures())
    metrics = measurements(paths, {**dict.fromkeys([*paths][:2], LOADS[:2]), [*paths][2]: LOADS[2]})
    values = layer_values([metrics["expert_load_max_over_mean"]])
    assert values["layers"] == [0, 1, "encoder.0", "encoder.1", "predictions.1"]
    assert values["expert_load_max_over_mean"] == [1, 1, 1, 1, 4]
