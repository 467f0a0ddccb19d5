"""Learning rates, weight decay and batch sizes against Megatron-LM's classes, row by row."""

from typing import Any

import jax
import numpy as np
import pytest
from megatron_cases import Settings, cases, load_arrays, load_json
from megatron_config import batch_config, schedule_config
from user_errors import user_error

from megajax.config.compose import problems_of
from megajax.optim.groups import ParameterGroup
from megajax.precision.config import DynamicScaleConfig
from megajax.training.batch_sizes import BatchSizes

TOLERANCE = 1e-6
"""Of each rate: they are computed in float32."""

RATES = load_json("schedules/optimizer_param_scheduler_settings.json")
COUNTS = load_json("schedules/num_microbatches.json")
SCALERS = load_json("schedules/dynamic_grad_scaler.json")


def numbered(rows: dict[str, list[Any]]) -> dict[str, Any]:
    """{"constant": [a, b]} -> {"constant-0": a, "constant-1": b}."""
    return {f"{kind}-{number}": row for kind, actual in rows.items() for number, row in enumerate(actual)}


@pytest.mark.parametrize("case", cases(RATES))
def test_rates(case: str) -> None:
    """The rates of an update that follows n samples."""
    described = RATES[case]
    config, end = schedule_config(described["settings"]), described["settings"]["end_wd"]
    assert not config.problems()
    stored = load_arrays("schedules/optimizer_param_scheduler.npz")
    samples = stored[f"{case}/num_steps"]
    schedule = config.build(steps=int(samples[-1]), global_size=1)
    for place, settings in enumerate(described.get("param_groups") or [{}]):
        group = rates_group(settings)
        ours = jax.jit(jax.vmap(lambda n, group=group: schedule.rates(n, end, group)))(samples.astype(np.int32))
        for kind, rates in zip(("lr", "wd"), ours, strict=True):
            theirs = stored[f"{case}/{kind}"].reshape(len(samples), -1)[:, place]
            # Their last sample of the decay is a rounding error of float64.
            np.testing.assert_allclose(rates, theirs, rtol=TOLERANCE, atol=1e-15, err_msg=f"{kind}, group {place}")


def rates_group(settings: dict[str, Any]) -> ParameterGroup:
    """A parameter group's own rates."""
    given = Settings({name: value for name, value in settings.items() if name != "params"})
    group = ParameterGroup(
        lr=given.take("max_lr"),
        min_lr=given.take("min_lr"),
        lr_multiplier=given.take("lr_mult", 1.0),
        decay=given.take("wd_mult", 1.0),
    )
    given.finish({"default_config", "lr", "weight_decay", "betas", "eps", "n", "names"})
    return group


@pytest.mark.parametrize("case", cases(numbered(COUNTS)))
def test_microbatches(case: str) -> None:
    row, kind = numbered(COUNTS)[case], case.partition("-")[0]
    batch = batch_config(kind, row)
    # Here, invalid sizes are reported before the run, and sizes may not decrease; theirs reports both during the run.
    problems = problems_of(batch) + batch.replica_problems(row["dp"])
    if "error" in row and "divi" not in row["error"] and "at least 1" not in row["error"]:
        # They refuse the text, or thresholds that become the same row, of which the later counts here.
        assert problems or len(batch.build(row["dp"], sequence_length=row["seq_length"]).thresholds) < len(
            batch.ramp.pairs()
        )
        return
    uneven = [rows for _, rows, running, count in rows_of(row) if count * row["mbs"] * row["dp"] != running]
    assert bool(problems) == ("error" in row or bool(uneven) or shrinks(row))
    sizes = batch.build(row["dp"], sequence_length=row.get("seq_length"))
    if "parsed" in row:
        assert [list(pair) for pair in sizes.thresholds] == row["parsed"]
    for consumed, nominal, running, microbatches in rows_of(row):
        assert sizes.nominal(consumed) == nominal, f"at {consumed}"
        if nominal in uneven:
            # Unchecked, they skip rows that count as read; here it is an error.
            with user_error():
                sizes.at(consumed)
            continue
        assert sizes.at(consumed) == (running, microbatches), f"at {consumed}"
    if "error" in row:
        refused(sizes)


def refused(sizes: BatchSizes) -> None:
    """Some size of the run is impossible."""
    with user_error():
        sizes.sizes()


def shrinks(row: dict[str, Any]) -> bool:
    """Whether a later step has fewer rows."""
    actual = [nominal for _, nominal, *_ in rows_of(row)]
    return actual != sorted(actual)


def rows_of(row: dict[str, Any]) -> list[list[int]]:
    """(consumed, global batch, running batch, microbatches), up to the first error."""
    if "rows" in row:
        return row["rows"]
    return [] if "error" in row else [[0, row["current"], row["running"], row["num_micro_batches"]]]


@pytest.mark.parametrize("case", cases(numbered({"scaler": SCALERS or []})))
def test_loss_scale(case: str) -> None:
    given = numbered({"scaler": SCALERS or []})[case]
    config = DynamicScaleConfig(
        initial=given["initial_scale"],
        floor=given["min_scale"],
        window=given["growth_interval"],
        hysteresis=given["hysteresis"],
        growth=given["growth_factor"],
        backoff=given["backoff_factor"],
    )
    scaler = config.build()
    scale, counters = scaler.start()
    update = jax.jit(scaler.update)
    for found_inf, *expected in given["rows"]:
        scale, counters = update(scale, counters, not found_inf)
        assert [float(scale), *counters.tolist(), 1 / float(scale)] == expected
