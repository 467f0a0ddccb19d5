"""Learning rates and microbatch counts against what Megatron-LM's classes said, row by row, in float64."""

from typing import Any

import jax
import pytest
from megatron_cases import Comparison, cases, load_arrays, load_json, unsupported
from megatron_config import schedule_config

from megajax.precision.config import DynamicScaleConfig
from megajax.training.config import BatchConfig

TOLERANCE = 1e-12

RATES = load_json("schedules/optimizer_param_scheduler_settings.json")
COUNTS = load_json("schedules/num_microbatches.json")
SCALERS = load_json("schedules/dynamic_grad_scaler.json")


def numbered(rows: dict[str, list[Any]]) -> dict[str, Any]:
    """{"constant": [a, b]} -> {"constant-0": a, "constant-1": b}."""
    return {f"{kind}-{number}": row for kind, found in rows.items() for number, row in enumerate(found)}


@pytest.mark.parametrize("case", cases(RATES))
def test_learning_rate(case: str) -> None:
    """The rate of an update that follows n samples is Schedule.at(n); nothing else decays or ramps."""
    described = RATES[case]
    if described.get("param_groups"):
        unsupported("rates of parameter groups")
    config = schedule_config(described["settings"])
    assert not config.problems()
    stored = load_arrays("schedules/optimizer_param_scheduler.npz")
    samples, lr, decay = (stored[f"{case}/{name}"] for name in ("num_steps", "lr", "wd"))
    schedule = config.build(steps=int(samples[-1]), global_size=1)
    compare = Comparison(case)
    for n, theirs in zip(samples.tolist(), lr.tolist(), strict=True):
        compare.check("lr", schedule.at(n), theirs, TOLERANCE, name=f"after {n} samples")
    compare.check("weight decay", [described["settings"]["start_wd"]] * len(decay), decay, TOLERANCE)
    compare.finish()


@pytest.mark.parametrize("case", cases(numbered(COUNTS)))
def test_microbatches(case: str) -> None:
    if not case.startswith("constant-"):
        unsupported(f"{case.partition('-')[0]} batch sizes")
    row = numbered(COUNTS)[case]
    batch = BatchConfig(global_size=row["gbs"], micro_size=row["mbs"])
    problems = batch.problems() + batch.replica_problems(row["dp"])
    if row["decrease"] and problems:
        unsupported("a batch size that is decreased to fit")
    assert bool(problems) == ("error" in row), problems or row["error"]
    if "error" not in row:
        assert row["current"] == row["running"] == row["gbs"]
        assert batch.microbatches(row["dp"]) == row["num_micro_batches"]


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
