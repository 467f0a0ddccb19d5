"""Memory traffic by formula, against compiled programs and against values computed by hand."""

from dataclasses import replace
from typing import Any

import pytest
from descriptions import STAGES_70B, STAGES_405B, TENSOR_4, llama3_8b

from megajax.config import load
from megajax.layers.block.config import mixer_facts
from megajax.layers.delta.config import GatedDeltaNetConfig, KimiDeltaConfig
from megajax.layers.recompute import SavePolicy
from megajax.mesh.config import ParallelConfig
from megajax.models.presets.llama import llama3
from megajax.pipeline.executor import MOST_LOOPS
from megajax.planning.compiled.devices import GPUS
from megajax.planning.cost.description import MEGAJAX, Description, describe
from megajax.planning.cost.device_work import (
    Work,
    block_work,
    head_work,
    layers_work,
    once_work,
    products,
    step_work,
    table_work,
    tick_work,
)
from megajax.planning.cost.estimate import bytes_per_step, estimate, to_dict
from megajax.planning.cost.traffic import Traffic, memory_bytes

H100 = GPUS["h100"]
FSDP = ("model.recompute=selective", "batch.micro_size=1")
COMPILED: dict[str, tuple[str, int, tuple[str, ...], tuple[float, float, float]]] = {
    "llama3_8b": ("llama3_8b", 8, TENSOR_4, (48.04, 17.98, 22.53)),
    "llama3_8b, fsdp": ("llama3_8b", 8, FSDP, (36.06, 17.03, 14.19)),
    "llama3_70b": ("llama3_70b", 128, STAGES_70B, (20.58, 5.74, 10.82)),
    "llama3_70b, 20 chunks": (
        "llama3_70b",
        64,
        (*STAGES_70B, "parallel.tensor=4", "parallel.virtual_stages=20"),
        (43.11, 22.49, 15.57),
    ),
    "gpt3_175b": ("gpt3_175b", 128, ("parallel.tensor=8", "batch.side_by_side=1"), (51.56, 12.65, 32.97)),
    "llama3_405b": ("llama3_405b", 1024, STAGES_405B, (42.42, 10.01, 24.89)),
}
"""Config, H100s, settings; TiB a step of its compiled program (jax 0.12.0.1, cuBLAS for all matmuls, without cuBLAS's
scratch space): all, copies and elementwise, matmul. `python -m benchmarks traffic` compiles them again."""


@pytest.mark.parametrize("case", COMPILED)
def test_bytes_are_those_of_compiled_programs(case: str) -> None:
    name, devices, settings, (total, streamed, matmul) = COMPILED[case]
    cfg: Any = load(f"{name.split('_')[0]}.py:{name}", *settings)
    formula = {kind: size / 2**40 for kind, size in bytes_per_step(estimate(describe(cfg, H100, devices))).items()}
    assert formula["total"] == pytest.approx(total, rel=0.1)
    assert formula["copies"] + formula["elementwise"] == pytest.approx(streamed, rel=0.25)
    assert formula["matmul"] == pytest.approx(matmul, rel=0.12)
    assert formula["total"] == pytest.approx(sum(formula.values()) - formula["total"])


DELTA, KIMI = GatedDeltaNetConfig(heads=32, key_heads=16), KimiDeltaConfig(heads=32)


@pytest.mark.parametrize(
    ("mixer", "gibibytes"),
    [(DELTA, 25.5), (replace(DELTA, chunk=32), 33.2), (replace(DELTA, chunk=128), 23.5), (KIMI, 49.3)],
)
def test_bytes_of_delta_nets_are_those_of_compiled_programs(mixer: GatedDeltaNetConfig, gibibytes: float) -> None:
    """A row of 8192 positions in bfloat16, forward and backward (`compiled_kernels --parts=delta_rule`)."""
    facts = mixer_facts(mixer, mixer.tensors(2048), 2048, 8192, "bfloat16")
    assert not facts.fused
    elements = 3 * sum(part.total for part in facts.tensors) + facts.work.moved
    assert 2 * 8192 * elements / 2**30 == pytest.approx(gibibytes, rel=0.1)


def run(**changes: Any) -> Description:
    return llama3_8b(**{"parallel": ParallelConfig(tensor=4, sequence=True, data=2), "global_size": 64} | changes)


def of_block(described: Description, kept: SavePolicy | None = None) -> tuple[Any, Any, float]:
    """Bytes of the forward and backward pass of a block, and of its weights on a device."""
    (tower,) = described.towers
    (block,) = tower.blocks
    halves = block_work(tower, block, kept or tower.section.recomputing.policy())
    return *halves, block.local_size(described.parallel.tensor)


def test_a_product_reads_two_arrays_and_writes_the_third() -> None:
    joined = run(system=replace(MEGAJAX, xla=False))
    (block,) = joined.towers[0].blocks
    every = list(products(joined, block.matmuls, 8192, SavePolicy(parts=None)))
    assert len(every) == 3 * len(block.matmuls) and sum(one.backward for one in every) == 2 * len(block.matmuls)
    output = block.matmuls[1]
    rows, columns = output.inputs.total / 4, output.outputs.total
    forward = next(one for one in every if (one.contracted, one.columns) == (rows, columns))
    assert forward.bytes == 2 * (8192 * rows + rows * columns + 8192 * columns)
    gradient = next(one for one in every if one.contracted == 8192 and one.rows == rows)
    assert gradient.bytes == 2 * 8192 * (rows + columns) + 8 * rows * columns, "float32, read and written"


def test_rows_copied_from_stacks_are_counted_twice() -> None:
    """Weights in both passes, sums of gradients read and written: with more chunks than have their own loops."""
    layouts = (ParallelConfig(pipeline=2, virtual_stages=chunks, data=1) for chunks in (8, 16))
    in_place, copied = (of_block(run(parallel=layout)) for layout in layouts)
    more = sum(there.copies - in_place.copies for in_place, there in zip(in_place[:2], copied[:2], strict=True))
    assert more == pytest.approx((2 * (2 + 2) + 2 * (4 + 4)) * in_place[2])
    assert MEGAJAX.most_in_place == MOST_LOOPS


def test_fsdp_adds_its_shard_of_a_gradient() -> None:
    float32, shards = (
        of_block(run(parallel=ParallelConfig(data=8, data_sharding=kind)))[1] for kind in ("zero1", "fsdp")
    )
    weights = of_block(run(parallel=ParallelConfig(data=8)))[2]
    # A microbatch's gradient, for the scatter.
    assert float32.matmul - shards.matmul == pytest.approx((8 - 4) * weights)
    assert shards.elementwise - float32.elementwise == pytest.approx((4 + 8) * weights / 8)


def test_saved_tensors_are_copied_where_loops_stack_them() -> None:
    saved, full = run(), run(model=replace(llama3("8b"), recompute="full"))
    (tower,) = saved.towers
    (block,) = tower.blocks
    more = of_block(saved)[0].copies - of_block(full)[0].copies
    saved_bytes = block.saved_bytes(tower.section.recomputing.policy(), tower.share)
    assert more == 2 * (saved_bytes - 8192 * 4096 / 4 * 2), "all but the layer's input, read and written"


def test_the_loss_reads_its_table_once_per_chunk() -> None:
    one = replace(llama3("8b"), loss_chunk=8192)
    table = 128_256 / 4 * 4096
    small, large = (table_work(run(model=model)) for model in (one, replace(one, loss_chunk=1024)))
    assert large[0].matmul - small[0].matmul == pytest.approx(7 * 2 * table)
    assert large[1].matmul - small[1].matmul == pytest.approx(7 * (2 + 8) * table)
    assert large[0].elementwise == small[0].elementwise
    # cuBLAS needs multiples of 8: 32,003 columns are padded by copies.
    uneven = table_work(run(model=replace(one, vocabulary_size=4 * 32_003, vocabulary_multiple=4)))[1]
    assert uneven.copies - small[1].copies == pytest.approx(20 * table, rel=0.01)


def test_ticks_and_idle_forward_passes_count_in_a_pipeline() -> None:
    layout = ParallelConfig(pipeline=4, data=1)
    pipelined = run(parallel=layout, global_size=4)
    assert tick_work(run()).stream == 0 < tick_work(pipelined).stream
    small, large = (
        step_work(each, layers_work(each), head_work(each), Work())
        for each in (run(parallel=layout, global_size=count) for count in (4, 8))
    )
    # Twice the microbatches run fewer than twice the forward passes: 4 + 3 ticks and 8 + 3.
    assert large.matmul < 2 * small.matmul
    assert once_work(pipelined, 0.0, 10.0).elementwise == 10 * (16 + 16 + 2)


def test_copies_make_a_step_longer_and_plans_report_the_bytes() -> None:
    """What searches compare: a program that copies weights from their stack takes the time of these copies."""
    in_place, there = run(), run(system=replace(MEGAJAX, most_in_place=0))
    quick, slow = estimate(in_place), estimate(there)
    kinds = ("copies", "elementwise")
    more = sum(bytes_per_step(slow)[kind] - bytes_per_step(quick)[kind] for kind in kinds)
    assert more > 0
    seconds = MEGAJAX.overhead * more / (H100.bandwidth * H100.stream)
    assert slow.step_seconds - quick.step_seconds == pytest.approx(seconds, rel=1e-3)
    assert to_dict(quick)["bytes_per_step"] == bytes_per_step(quick)


def test_a_collective_reads_its_part_and_writes_the_whole() -> None:
    described = run(parallel=ParallelConfig(tensor=4, sequence=True, data=2, context=2))
    row = Traffic("all-gather", "tensor", "", 1, 800.0, 1.0, 0.0)
    assert memory_bytes(described, row) == 1000
    assert memory_bytes(described, replace(row, kind="all-reduce")) == 1600
    # In a formula, `data` includes all devices that hold the same weights; a program's axes are named one by one.
    assert memory_bytes(described, replace(row, axis="data")) == 1000
    assert memory_bytes(described, replace(row, axis="data+context (part)")) == 1000
