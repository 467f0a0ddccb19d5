"""What is wrong with a whole run, said with both values and what would do."""

import pytest
from small_jobs import model, run_config

from megajax.config.tree import check
from megajax.layers.config import RopeConfig
from megajax.mesh.config import ParallelConfig
from megajax.optim.config import ScheduleConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.run_config import RunConfig


def problems(cfg: RunConfig, devices: int | None = 8) -> dict[str, str]:
    return {problem.where: f"{problem.what} | {problem.hint}" for problem in cfg.problems(devices)}


def on(**sizes) -> ParallelConfig:
    return ParallelConfig(**{"data": 1} | sizes)


def test_the_small_run_is_fine():
    assert problems(run_config()) == {}
    check(run_config(), devices=8)


def test_tensor_must_divide_heads_kv_heads_and_ffn():
    found = problems(run_config(model=model(heads=6, hidden=12, kv_heads=3, ffn=30), parallel=on(tensor=4)))
    assert found["model.stack.pattern.0.mixer.heads"].startswith("heads=6 is not divisible by parallel.tensor=4")
    assert found["model.stack.pattern.0.mixer.heads"].endswith("parallel.tensor can be 1, 3")
    assert found["model.stack.pattern.0.mlp.ffn"].startswith("ffn=30 is not divisible by parallel.tensor=4")
    found = problems(run_config(parallel=on(tensor=4)))
    assert list(found) == ["model.stack.pattern.0.mixer.kv_heads"]
    assert found["model.stack.pattern.0.mixer.kv_heads"] == (
        "kv_heads=2 is not divisible by parallel.tensor=4 | parallel.tensor can be 1, 2"
    )


def test_sequence_parallelism_must_divide_the_sequence():
    cfg = run_config(model=model(sequence_length=15), parallel=on(tensor=2, sequence=True))
    assert problems(cfg)["model.sequence_length"].startswith("15 is not divisible by parallel.tensor=2")


@pytest.mark.parametrize(
    ("size", "micro", "data", "nearest"),
    [(10, 4, 1, "8, 12"), (8, 3, 2, "6, 12"), (3, 4, 2, "8"), (9, 1, None, "8, 16")],
)
def test_a_batch_that_does_not_divide_is_told_the_nearest_that_do(size, micro, data, nearest):
    cfg = run_config(
        batch=BatchConfig(global_size=size, micro_size=micro),
        parallel=ParallelConfig(data=data),
        model=model(hidden=32),
    )
    message = problems(cfg)["batch.global_size"]
    assert message.startswith(
        f"{size} rows are not divisible by micro_size={micro} x {data or 8} data-parallel devices"
    )
    assert message.endswith(f"nearest legal values: {nearest}")


def test_what_needs_the_number_of_devices_waits_for_it():
    cfg = run_config(batch=BatchConfig(global_size=9, micro_size=1), parallel=ParallelConfig())
    assert problems(cfg, devices=None) == {}
    assert "batch.global_size" in problems(cfg, devices=8)
    # Sizes that are all given tell the number themselves.
    assert "batch.global_size" in problems(cfg.but(parallel=ParallelConfig(data=2)), devices=None)


def test_fsdp_without_recomputation_is_refused():
    cfg = run_config(parallel=on(data=2, data_sharding="fsdp"), batch=BatchConfig(global_size=8, micro_size=4))
    assert "recompute=selective or full" in problems(cfg)["model.recompute"]
    assert problems(cfg.but(model=model(recompute="full"))) == {}


@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_spreading_weights_needs_a_hidden_size_that_divides(sharding):
    cfg = run_config(
        parallel=on(data=8, data_sharding=sharding),
        model=model(hidden=20, recompute="full"),
        batch=BatchConfig(global_size=8),
    )
    message = problems(cfg)["parallel.data_sharding"]
    assert message.startswith(f"{sharding} cuts hidden=20 over 8 data-parallel devices")
    assert "data_sharding=replicate" in message
    assert problems(cfg.but(parallel=on(data=8, data_sharding="replicate"))) == {}


def test_devices_seed_steps_and_schedule():
    found = problems(
        run_config(parallel=on(data=16), seed=-1, steps=-1, batch=BatchConfig(global_size=16), model=model())
    )
    assert found["parallel"].startswith("the axes multiply to 16 devices, there are 8")
    assert found["seed"].startswith("must be between 0 and 4294967295, got -1")
    assert found["steps"].startswith("must not be negative, got -1")
    found = problems(run_config(schedule=ScheduleConfig(warmup_steps=6)))
    assert found["schedule.decay_steps"].startswith("the decay ends after 48 samples, the warm-up after 48")


def test_every_problem_is_listed_at_once():
    cfg = run_config(
        model=model(heads=3, kv_heads=2, hidden=18, rope=RopeConfig()),
        batch=BatchConfig(global_size=0),
        evaluation=EvaluationConfig(every=0),
    )
    with pytest.raises(Exception, match="kv_heads") as refused:
        check(cfg, devices=8)
    for name in ("model.stack.pattern.0.mixer.kv_heads", "batch.global_size", "evaluation.every"):
        assert name in str(refused.value)
