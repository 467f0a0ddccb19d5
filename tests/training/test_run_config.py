"""Problems of a whole run, reported with both values and a remedy."""

import re

import pytest
from small_jobs import model, run_config

from megajax.config.compose import check, problems_of
from megajax.config.errors import ConfigError
from megajax.config.field_types import names
from megajax.mesh.config import ParallelConfig
from megajax.optim.config import AdamWConfig, GroupConfig, ScheduleConfig
from megajax.training.config import BatchConfig
from megajax.training.run_config import COMMON, RunConfig


def problems(cfg: RunConfig, devices: int | None = 8) -> dict[str, str]:
    return {problem.setting: f"{problem.message} | {problem.hint}" for problem in cfg.problems(devices)}


def on(**sizes) -> ParallelConfig:
    return ParallelConfig(**{"data": 1} | sizes)


def test_the_small_run_has_no_problems():
    assert problems(run_config()) == {}
    check(run_config(), devices=8)


def test_tensor_must_divide_heads_and_ffn():
    actual = problems(run_config(model=model(heads=6, hidden=12, kv_heads=3, ffn=30), parallel=on(tensor=4)))
    assert actual["model.stack.pattern.0.mixer.heads"].startswith("heads=6 is not divisible by parallel.tensor=4")
    assert actual["model.stack.pattern.0.mixer.heads"].endswith("parallel.tensor can be 1, 3, 6")
    assert actual["model.stack.pattern.0.mlp.ffn"] == (
        "ffn=30 is not divisible by parallel.tensor=4 | use ffn=28 or 32; parallel.tensor can be 1, 3, 6"
    )


def test_key_value_heads_and_tensor_divide_one_another():
    assert problems(run_config(parallel=on(tensor=4), model=model(kv_heads=2))) == {}
    actual = problems(run_config(parallel=on(tensor=4), model=model(heads=12, hidden=24, kv_heads=6)))
    assert actual == {
        "model.stack.pattern.0.mixer.kv_heads": (
            "kv_heads=6 and parallel.tensor=4: one must be a multiple of the other | parallel.tensor can be 1, 2"
        )
    }


def test_a_pipeline_needs_a_repeat_for_each_chunk():
    cut = run_config(parallel=on(pipeline=4, virtual_stages=2, schedule="interleaved"), model=model(repeats=6))
    assert problems(cut)["parallel.pipeline"] == (
        "4 stages x 2 virtual stages need as many repeats of the model's stack, which has 6 | "
        "pipeline x virtual_stages can be at most 6"
    )
    assert "parallel.pipeline" not in problems(cut.but(model=model(repeats=8)))


@pytest.mark.parametrize(
    ("size", "micro", "pipeline", "data", "count", "nearest"),
    [(12, 2, 4, 1, 6, "8 or 16"), (4, 1, 4, 2, 2, "8"), (12, 1, 4, 2, 6, "8 or 16"), (1, 1, 2, 1, 1, "2")],
)
def test_interleaved_microbatches_are_multiples_of_the_stages(size, micro, pipeline, data, count, nearest):
    cfg = run_config(
        parallel=on(pipeline=pipeline, data=data, virtual_stages=2, schedule="interleaved"),
        model=model(repeats=8),
        batch=BatchConfig(global_size=size, micro_size=micro),
    )
    assert problems(cfg) == {
        "parallel.virtual_stages": f"microbatches go in groups of parallel.pipeline={pipeline} with 2 virtual stages, "
        f"and a step has {count} | set batch.global_size={nearest}, or parallel.virtual_stages=1"
    }
    for legal in nearest.split(" or "):
        assert problems(cfg.but(batch=BatchConfig(global_size=int(legal), micro_size=micro))) == {}
    # 1F1B takes any number.
    assert problems(cfg.but(parallel=on(pipeline=pipeline, data=data))) == {}


def test_given_layers_match_those_of_the_model():
    cfg = run_config(parallel=on(pipeline=4, layers=(1, 2, 1, 2)), model=model(repeats=7))
    assert problems(cfg)["parallel.layers"] == (
        "1,2,1,2 are 6 in all, the model's stack has 7 | 2,2,2,1, which none stands for, is as even as can be"
    )
    assert problems(cfg.but(model=model(repeats=6))) == {}


@pytest.mark.parametrize(
    ("sizes", "multiple", "cuts", "legal"),
    [
        ({"pipeline": 3}, 128, "parallel.pipeline=3 x parallel.tensor=1 = 3", 384),
        ({"pipeline": 4, "tensor": 2}, 4, "parallel.pipeline=4 x parallel.tensor=2 = 8", 8),
        ({"tensor": 2}, 67, "parallel.pipeline=1 x parallel.tensor=2 = 2", 134),
    ],
)
def test_the_vocabulary_is_sharded_over_pipeline_and_tensor(sizes, multiple, cuts, legal):
    few = {"repeats": 6, "vocabulary_size": 60}
    cfg = run_config(parallel=on(**sizes), model=model(vocabulary_multiple=multiple, **few))
    padded = -(-60 // multiple) * multiple
    assert problems(cfg) == {
        "model.vocabulary_multiple": f"the vocabulary, padded to {padded}, is sharded over {cuts} devices, which do "
        f"not divide it | set model.vocabulary_multiple={legal}"
    }
    assert problems(cfg.but(model=model(vocabulary_multiple=legal, **few))) == {}


@pytest.mark.parametrize(
    ("settings", "where", "message"),
    [
        ({"pipeline": 2, "schedule": "interleaved"}, "schedule", "needs parallel.virtual_stages > 1, which is 1"),
        ({"schedule": "interleaved"}, "schedule", "which is 1, and a pipeline, parallel.pipeline is 1"),
        ({"virtual_stages": 2}, "virtual_stages", "2 virtual stages need a pipeline, parallel.pipeline is 1"),
        ({"pipeline": 2, "layers": (1, 2, 1)}, "layers", "1,2,1 must be 2 numbers above 0"),
        ({"pipeline": 2, "sequence": True}, "sequence", "needs parallel.tensor > 1, which is 1"),
        ({"pipeline": 4, "tensor": 4}, "", "the axes multiply to 16 devices (pipeline 4 x tensor 4), there are 8"),
    ],
)
def test_pipeline_settings_that_contradict_each_other(settings, where, message):
    """One problem each, with its remedy; problems that follow from it are not reported."""
    cfg = run_config(parallel=on(**settings), model=model(kv_heads=4, repeats=4))
    with pytest.raises(
        ConfigError, match=rf"{re.escape(f'parallel.{where}'.rstrip('.'))}: .*{re.escape(message)}"
    ) as refused:
        check(cfg, devices=8)
    (problem,) = refused.value.problems
    assert problem.hint


@pytest.mark.parametrize(
    ("settings", "where", "what"),
    [
        ({"embedding_lr": 1e-4}, "embedding_min_lr", "lr=0.0001 of their own and would rise to 0.001"),
        ({"embedding_min_lr": 0.1}, "embedding_min_lr", "0.1 is above schedule.lr=0.01"),
        ({"groups": (GroupConfig(match="head", lr=1e-4),)}, "groups.0.min_lr", "would rise to 0.001"),
        (
            {"groups": (GroupConfig(match="*.up", decay=0.0), GroupConfig(match="head", min_lr=0.1))},
            "groups.1.min_lr",
            "is above",
        ),
    ],
)
def test_rates_of_weight_groups_that_do_not_fit_the_schedule(settings, where, what):
    """Reported with the config's other problems, before anything is compiled."""
    cfg = run_config(optimizer=AdamWConfig(**settings), schedule=ScheduleConfig(lr=1e-2, min_lr=1e-3))
    assert list(problems(cfg)) == [f"optimizer.{where}"]
    assert what in problems(cfg)[f"optimizer.{where}"]


def test_rates_given_by_several_rules_are_not_judged_separately():
    rules = (GroupConfig(match="head", lr=1e-4), GroupConfig(match="h*", min_lr=1e-5))
    low = ScheduleConfig(lr=1e-2, min_lr=1e-3)
    assert problems(run_config(optimizer=AdamWConfig(groups=rules), schedule=low)) == {}
    both = AdamWConfig(embedding_lr=1e-4, embedding_min_lr=1e-5, groups=rules[:1])
    assert problems(run_config(optimizer=both, schedule=low)) == {}


def test_sequence_parallelism_must_divide_the_sequence():
    cfg = run_config(model=model(sequence_length=15), parallel=on(tensor=2, sequence=True))
    assert problems(cfg)["model.sequence_length"].startswith("15 is not divisible by parallel.tensor=2")


@pytest.mark.parametrize(
    ("size", "micro", "data", "smaller", "nearest"),
    [(10, 4, 1, 2, "8, 12"), (8, 3, 2, 2, "6, 12"), (3, 4, 2, None, "8"), (9, 1, None, None, "8, 16")],
)
def test_an_indivisible_batch_names_the_nearest_divisible_ones(size, micro, data, smaller, nearest):
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
    assert (f"set micro_size={smaller}, or" in message) == (smaller is not None)


def test_checks_that_need_the_number_of_devices_wait_for_it():
    cfg = run_config(batch=BatchConfig(global_size=9, micro_size=1), parallel=ParallelConfig())
    assert problems(cfg, devices=None) == {}
    assert "batch.global_size" in problems(cfg, devices=8)
    # Sizes that are all given determine the number themselves.
    assert "batch.global_size" in problems(cfg.but(parallel=ParallelConfig(data=2)), devices=None)


def test_fsdp_without_recomputation_is_refused():
    cfg = run_config(parallel=on(data=2, data_sharding="fsdp"), batch=BatchConfig(global_size=8, micro_size=4))
    assert "recompute=selective or full" in problems(cfg)["model.recompute"]
    assert problems(cfg.but(model=model(recompute="full"))) == {}


@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_sharding_weights_needs_a_divisible_hidden_size(sharding):
    cfg = run_config(
        parallel=on(data=8, data_sharding=sharding),
        model=model(hidden=20, recompute="full"),
        batch=BatchConfig(global_size=8),
    )
    message = problems(cfg)["model.hidden"]
    assert message.startswith(f"parallel.data_sharding={sharding} shards hidden=20 over 8 data-parallel devices")
    assert "data_sharding=replicate" in message
    assert problems(cfg.but(parallel=on(data=8, data_sharding="replicate"))) == {}


def test_devices_seed_steps_and_schedule():
    cfg = run_config(parallel=on(data=16), seed=-1, steps=-1, batch=BatchConfig(global_size=16), model=model())
    actual = {problem.setting: problem.message for problem in problems_of(cfg, 8)}
    assert actual["parallel"].startswith("the axes multiply to 16 devices (data 16), there are 8")
    assert actual["seed"].startswith("must be between 0 and 4294967295, got -1")
    assert actual["steps"].startswith("must be at least 0, got -1")
    actual = problems(run_config(schedule=ScheduleConfig(warmup_steps=6)))
    assert actual["schedule.warmup_steps"].startswith("the warm-up takes 48 samples (warmup_steps=6)")


def test_the_settings_that_help_lists_exist():
    assert set(COMMON) <= set(names(RunConfig))
