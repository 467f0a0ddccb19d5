"""Two microbatches at a time: the same numbers bit for bit, the options, the memory, and what is refused."""

from dataclasses import replace
from typing import Any

import jax
import pytest
from tiny_runs import build_program, llama, losses_of_steps

from megajax.config import load
from megajax.job.banner import _batch
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.planning.compiled.devices import GPUS
from megajax.planning.cost.description import describe
from megajax.planning.cost.estimate import estimate
from megajax.processes.xla_options import SIDE_BY_SIDE, SIDE_BY_SIDE_IN_TICKS
from megajax.training.check_compiler_options import default_options
from megajax.training.gradients.accumulate import groups
from megajax.training.program import Program

TENSOR = ParallelConfig(data=2, tensor=2, context=2, sequence=True, data_sharding="zero1")


@pytest.mark.slow
def test_two_at_a_time_have_the_numbers_of_one() -> None:
    program = build_program(llama(), TENSOR, microbatches=4)
    two = Program.of(program.cfg.but(batch=replace(program.cfg.batch, side_by_side=2)), program.mesh)
    assert program.mesh.size == 8 and program.microbatches == 4
    assert losses_of_steps(two) == losses_of_steps(program)


def test_the_banner_names_what_is_side_by_side() -> None:
    plain = build_program(llama(), TENSOR, microbatches=4)
    pairs = plain.cfg.but(batch=replace(plain.cfg.batch, side_by_side=2))
    stages = pairs.but(parallel=ParallelConfig(data=2, tensor=2, pipeline=2))
    texts = [dict(_batch(Program.of(cfg, build_mesh(cfg.parallel)))) for cfg in (plain.cfg, pairs, stages)]
    assert [text.get("side by side") for text in texts] == [
        None,
        "2 microbatches, layer by layer",
        "2 microbatches, a forward beside a backward in full ticks",
    ]


def test_groups_have_microbatches_that_follow_each_other() -> None:
    batch: Any = {"tokens": jax.numpy.arange(6)[:, None]}
    (first, second), (whole,) = groups(batch, 2), groups(batch, 1)
    assert whole is batch
    assert (first["tokens"][:, 0].tolist(), second["tokens"][:, 0].tolist()) == ([0, 2, 4], [1, 3, 5])


LAYOUT = ("parallel.tensor=2", "parallel.data=2", "batch.global_size=8", "batch.micro_size=1")

DEEP = ("model.stack.repeats=4",)
INTERLEAVED = ("parallel.schedule=interleaved", "parallel.virtual_stages=2", *DEEP)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("parallel.pipeline=2", "parallel.loss_wait=0", *DEEP), "a backward wait for the forward of its tick"),
        (("parallel.pipeline=2", "parallel.schedule=gpipe", *DEEP), "does all forwards first"),
        (("parallel.pipeline=2", *INTERLEAVED), "parallel.virtual_stages=2 makes stages of several chunks"),
        (("parallel.pipeline=2", "model.stack.repeats=3"), "a stage needs two layers or more"),
        (("parallel.pipeline=2", "model.recompute_layers=2", *DEEP), "makes layers of two kinds"),
        (("parallel.pipeline=2", "batch.global_size=4", *DEEP), "with 2 microbatches, no tick has two for each of 2"),
        (("parallel.tensor=1",), "parallel.tensor=1 has no collectives over tensor"),
        (("parallel.data_sharding=fsdp",), "parallel.data_sharding=fsdp would hold two microbatches"),
        (("batch.global_size=6",), "a step has 3 microbatches, not a multiple of 2"),
    ],
)
def test_what_it_cannot_be_combined_with(settings: tuple[str, ...], reason: str) -> None:
    cfg: Any = load("llama3.py:debug", *LAYOUT, *settings)
    cfg = cfg.but(batch=replace(cfg.batch, side_by_side=2))
    (problem,) = cfg.problems(8 if "parallel.pipeline=2" in settings else 2 if "parallel.tensor=1" in settings else 4)
    assert problem.setting == "batch.side_by_side" and reason in problem.message


def test_options_and_memory() -> None:
    settings = ("parallel.tensor=4", "parallel.sequence=true", "parallel.data_sharding=zero1", "batch.micro_size=1")
    one: Any = load("llama3.py", "model.recompute=selective", *settings, devices=8)
    two = one.but(batch=replace(one.batch, side_by_side=2))
    assert not two.problems(8)
    limits = [[o for o in default_options(cfg, "gpu") if o.name == SIDE_BY_SIDE[0].name] for cfg in (one, two)]
    assert [limit[-1].value for limit in limits] == [6, 1], "the last one counts"
    plans = [estimate(describe(cfg, GPUS["h100"], 8)) for cfg in (one, two)]
    # Compiled, a second ring took 6.5 GiB more.
    assert plans[1].memory.peak_gib - plans[0].memory.peak_gib == pytest.approx(6.5, rel=0.12)
    assert plans[1].exposed_seconds < 0.5 * plans[0].exposed_seconds
    pipeline = two.but(parallel=replace(two.parallel, pipeline=2))
    names = [option.name for option in default_options(pipeline, "gpu") if option in SIDE_BY_SIDE_IN_TICKS]
    assert not pipeline.problems(8) and len(names) == 2
