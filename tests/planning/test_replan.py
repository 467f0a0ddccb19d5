"""Layouts for other numbers of devices, against all possible layouts; the runs are in test_elastic_runs.py."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from small_jobs import model, run_config
from tiny_runs import with_block
from user_errors import user_error

from megajax.config import load
from megajax.config.compose import problems_of
from megajax.config.errors import ConfigError, Problem, TooFewDevices
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig
from megajax.mesh.config import SIZED_AXES, ParallelConfig
from megajax.planning.replan import Replan, elastic_hint, replanned
from megajax.training.config import BatchConfig, LinearRampConfig
from megajax.training.run_config import RunConfig


def job(rows: int = 24, micro_size: int = 1, *, average: str = "tokens", ramp=None, decrease: bool = False, **parallel):
    """A model with six heads and four layers; many numbers of devices divide its hidden size of 48."""
    settings = {name: parallel.pop(name) for name in ("model", "data_config") if name in parallel}
    return run_config(
        model=settings.get("model", model(hidden=48, heads=6, kv_heads=6, ffn=96, repeats=4, vocabulary_multiple=384)),
        parallel=ParallelConfig(**parallel),
        batch=BatchConfig(global_size=rows, micro_size=micro_size, loss_average=average, ramp=ramp, decrease=decrease),
    )


def with_experts(**router):
    plain = model(hidden=48, heads=6, kv_heads=6, ffn=96, repeats=4, vocabulary_multiple=384)
    mixture = MoEConfig(experts=6, router=RouterConfig(**router), expert=GatedMLPConfig(ffn=32))
    return with_block(plain, mlp=mixture)


def sizes(plan: Replan) -> dict[str, int]:
    """The sizes of the axes longer than 1, and the number of microbatches."""
    axes = {name: size for name, size in plan.cfg.parallel.sizes(plan.used).items() if size > 1}
    return axes | {"micro_size": plan.cfg.batch.micro_size}


def every_layout(cfg: RunConfig, devices: int, least: int) -> Iterator[RunConfig]:
    """All layouts with the same rows per step, no larger microbatches and no more ZeRO, legal or not."""
    batch, now = cfg.batch, cfg.parallel
    shardings = ("replicate", "zero1", "fsdp")
    shardings = shardings[: shardings.index(now.data_sharding) + 1]
    for axes in product(range(1, devices + 1), repeat=5):
        parallel = ParallelConfig(**dict(zip(SIZED_AXES, axes, strict=True)))
        if not least <= parallel.without_data() * axes[1] <= devices:
            continue
        for micro_size, sharding, virtual, rounds in product(
            range(1, batch.micro_size + 1), shardings, {1, now.virtual_stages}, {1, now.context_rounds}
        ):
            if batch.loss_average == "microbatches" and micro_size != batch.micro_size:
                continue
            kept = now.layers if parallel.pipeline * virtual == now.chunks() else None
            layout = replace(
                now, **dict(zip(SIZED_AXES, axes, strict=True)), data_sharding=sharding, virtual_stages=virtual,
                context_rounds=rounds, layers=kept, sequence=now.sequence and axes[4] > 1,
                schedule="1f1b" if virtual == 1 and now.schedule == "interleaved" else now.schedule,
                context_heads=1 if axes[3] % now.context_heads else now.context_heads,
            )  # fmt: skip
            yield cfg.but(parallel=layout, batch=replace(batch, micro_size=micro_size))


def wrong(cfg: RunConfig) -> list[Problem]:
    """Problems of a config on the devices of its layout."""
    return [*cfg.parallel.problems(), *cfg.batch.problems()] or cfg.problems(
        cfg.parallel.without_data() * (cfg.parallel.data or 1)
    )


JOBS = {
    "data": job(data=8),
    "odd rows": job(15, data=5, data_sharding="replicate"),
    "pipeline": job(pipeline=2, data=4),
    "interleaved": job(pipeline=2, virtual_stages=2, schedule="interleaved", data=2),
    "uneven stages": job(pipeline=2, layers=(3, 1), data=2),
    "context": job(context=2, context_rounds=2, context_strategy="ring", data=2),
    "whole experts": job(expert=1, tensor=2, sequence=True, expert_tensor="whole", data=2, model=with_experts()),
    "means of microbatches": job(24, 2, average="microbatches", data=4),
    "ramp": job(24, 2, ramp=LinearRampConfig(start=8, increment=8, samples=100), data=4),
    "two key-value heads": job(8, model=model(), data=8),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_layout_is_legal_and_refused_only_if_none_exists(name):
    """It is tried on 1 to 7 devices, of one process and of as many processes as devices."""
    cfg = JOBS[name]
    for devices in range(1, 8):
        for per_process in ((devices,), (1,) * devices):
            try:
                plan = replanned(cfg, per_process)
            except ConfigError as error:
                legal = [each for each in every_layout(cfg, devices, len(per_process)) if not wrong(each)]
                assert not legal, (per_process, legal[0].parallel, legal[0].batch)
                assert error.problems[0].setting == "parallel.elastic"
                continue
            chosen = plan.cfg.parallel
            assert not wrong(plan.cfg.but(parallel=replace(chosen, data=chosen.data_size(plan.used))))
            assert len(per_process) <= plan.used <= devices == plan.present
            assert plan.cfg.batch == replace(cfg.batch, micro_size=plan.cfg.batch.micro_size)
            assert plan.cfg.batch.micro_size <= cfg.batch.micro_size


CHOICES = {
    # the layout fits
    "8": (job(data=8), (8,), {"data": 8, "micro_size": 1}),
    # Fewer devices of data, then smaller microbatches.
    "8 -> 6": (job(data=8), (6,), {"data": 6, "micro_size": 1}),
    "8 -> 4": (job(48, 2, data=8), (4,), {"data": 4, "micro_size": 2}),
    "8 -> 6, smaller": (job(48, 3, data=8), (6,), {"data": 6, "micro_size": 2}),
    # More devices, and axes without a given size.
    "4 -> 8": (job(data=4), (8,), {"data": 8, "micro_size": 1}),
    "any -> 8": (job(24, 2), (8,), {"data": 8, "micro_size": 1}),
    "any of 6": (job(24, 2, tensor=2), (3, 3), {"data": 3, "tensor": 2, "micro_size": 2}),
    # Rows that six devices do not divide: another axis, or idle devices.
    "tensor instead": (job(8, data=8), (6,), {"data": 2, "tensor": 3, "micro_size": 1}),
    "idle instead": (job(8, data=8), (2, 2, 2), {"data": 4, "micro_size": 1}),
    "idle, no heads for it": (job(8, data=8, model=model()), (6,), {"data": 4, "micro_size": 1}),
    "none may be idle": (job(8, data=4), (1, 1, 1), {"pipeline": 3, "micro_size": 1}),
    # Axes that hold the model are kept, and given up where they do not fit.
    "tensor kept": (job(tensor=2, data=4, sequence=True), (6,), {"data": 3, "tensor": 2, "micro_size": 1}),
    "pipeline kept": (job(pipeline=2, data=4), (4,), {"pipeline": 2, "data": 2, "micro_size": 1}),
    "experts kept": (job(expert=2, data=4, model=with_experts()), (6,), {"expert": 2, "data": 3, "micro_size": 1}),
    "tensor rather idle": (job(tensor=6), (5,), {"tensor": 3, "micro_size": 1}),
    "one left": (job(tensor=2, pipeline=2, data=2), (1,), {"micro_size": 1}),
    # Microbatches that losses depend on.
    "fixed": (job(24, 2, average="microbatches", data=12), (8,), {"data": 4, "tensor": 2, "micro_size": 2}),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_chosen_layout(name):
    cfg, per_process, expected = CHOICES[name]
    assert sizes(replanned(cfg, per_process)) == expected


def test_changes_are_reported():
    plan = replanned(job(48, 3, data=8), (6,))
    assert plan.text() == "8 devices wanted, 6 present: data 8 -> 6, micro_size 3 -> 2, microbatches 2 -> 4"
    plan = replanned(job(8, data=8, model=model()), (6,))
    assert plan.text() == "8 devices wanted, 6 present, 2 idle: data 8 -> 4, microbatches 1 -> 2"
    assert plan.event()["changes"] == {"parallel.data": [8, 4], "microbatches": [1, 2]}
    assert replanned(job(24, 2), (8,)).text() == "8 present: data 8, micro_size 2 -> 1, microbatches 3"
    assert not replanned(job(data=8), (8,)).changes and not replanned(job(), (6,)).changes


def test_settings_that_depend_on_an_axis_change_with_it():
    plan = replanned(job(tensor=2, sequence=True, pipeline=2, virtual_stages=2, schedule="interleaved", data=1), (1,))
    new = plan.cfg.parallel
    assert (new.sequence, new.schedule, new.virtual_stages) == (False, "1f1b", 1)
    assert {"parallel.sequence", "parallel.schedule", "parallel.virtual_stages"} <= plan.changes.keys()
    assert "each device holds 1/1 of the layers' weights, before 1/4" in plan.notes
    plan = replanned(job(pipeline=2, layers=(3, 1), data=1), (1,))
    assert plan.cfg.parallel.layers is None and "layers 3,1 -> none" in plan.text()


def test_changes_of_losses_are_reported():
    for router, before in (({"aux_loss": 0.01}, True), ({"row_loss": 0.01}, False)):
        plan = replanned(job(data=8, model=with_experts(**router)), (6,))
        note = "aux_loss depends on the rows of a microbatch, which has 6, before 8: other losses"
        assert any(text.endswith(note) for text in plan.notes) == before, plan.notes
    assert not replanned(job(data=8), (6,)).notes


def test_rounding_down_keeps_the_rows_of_the_requested_layout():
    """Eight devices read 24 of 30 rows; five would read 30, so four are used."""
    assert sizes(replanned(job(30, data=8, decrease=True, model=model()), (5,))) == {"data": 4, "micro_size": 1}


def test_an_invalid_config_stays_invalid():
    with user_error("batch.global_size", kind=ConfigError):
        replanned(job(24, 2, data=8), (6,))


def test_a_refusal_gives_a_reason_for_each_axis():
    with pytest.raises(ConfigError) as refused:
        replanned(job(8, 2, average="microbatches", data=4, model=model()), (1, 1, 1))
    where = dict.fromkeys(problem.setting for problem in refused.value.problems)
    axes = [f"parallel.{axis}=3" for axis in ("data", "tensor", "context", "pipeline")]
    assert list(where) == ["parallel.elastic", "batch.micro_size", *axes]
    text = str(refused.value)
    assert "there are 3 devices in 3 processes, and the layout of the config takes 4" in text
    assert "8 rows are not divisible by micro_size=2 x 3 data-parallel devices = 6" in text
    assert "start fewer processes" in text and "batch.loss_average=microbatches" in text


def test_an_error_about_devices_proposes_elastic():
    cfg = job(data=8)
    error = ConfigError([Problem("steps", "wrong"), *map(named, cfg.parallel.device_problems(6))])
    hinted = elastic_hint(error, cfg, (6,))
    assert "--parallel.elastic trains on 6 of 6 with the same rows per step: data 8 -> 6, microbatches 3 -> 4" in str(
        hinted
    )
    assert isinstance(hinted.problems[1], TooFewDevices), "its own hints come on top"
    for other in (ConfigError([Problem("steps", "wrong")]), ConfigError([Problem("batch.micro_size", "wrong")])):
        assert elastic_hint(other, cfg, (6,)) is other
    impossible = job(8, data=4, model=model())
    error = ConfigError(map(named, impossible.parallel.device_problems(3)))
    assert elastic_hint(error, impossible, (1, 1, 1)) is error
    negative = job(data=-1)
    error = ConfigError(map(named, problems_of(negative.parallel)))
    assert elastic_hint(error, negative, (1,)) is error, "a wrong size is not a number of devices that changed"


def named(problem: Problem) -> Problem:
    return replace(problem, setting=f"parallel.{problem.setting}".rstrip("."))


@pytest.mark.parametrize("nodes", [7, 127])
def test_large_layouts_are_chosen_quickly(nodes):
    """A node is lost, and the layout of each copy of the model stays."""
    cfg = load("llama3.py:llama3_8b", "parallel.data=2", "parallel.tensor=4")
    plan = replanned(cfg, (8,) * nodes)
    assert plan.cfg.parallel.tensor == 4 and plan.used > 4 * nodes
