"""Memory, traffic and time of a run by formulas: against compiled programs, tables of schedules, and by hand."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from descriptions import STAGES_70B, TENSOR_4, llama3_8b
from user_errors import user_error

from megajax.config import load
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import PredictionConfig
from megajax.models.presets.llama import llama3
from megajax.pipeline.check import measure
from megajax.pipeline.schedule import build
from megajax.planning.compiled.devices import GPUS
from megajax.planning.compiled.links import AxisSpan, seconds
from megajax.planning.cost.description import MEGAJAX, Description, describe
from megajax.planning.cost.estimate import RANGES, Estimate, estimate, kind_of, to_dict
from megajax.planning.show import cells, plan_report

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).parents[2]
H100 = GPUS["h100"]

COMPILED: dict[str, dict[str, Any]] = json.loads((ROOT / "benchmarks/results/compiled_peaks.json").read_text("utf-8"))
"""Plans compiled by `python -m benchmarks compiled_peaks`, GiB of one GPU."""


def shipped(name: str, devices: int, *overrides: str) -> Estimate:
    cfg: Any = load(f"{name.split('_')[0]}.py:{name}", *overrides)
    return estimate(describe(cfg, H100, devices))


@pytest.mark.parametrize("case", COMPILED)
def test_memory_equals_that_of_compiled_plans(case: str) -> None:
    plan = COMPILED[case]
    cfg: Any = load(f"{ROOT}/configs/{plan['config']}", *plan["settings"])
    gpu = GPUS["h200" if case.partition(",")[0].endswith("_h200") else "h100"]
    formula = to_dict(estimate(describe(cfg, gpu, plan["gpus"])))
    assert formula["parameters_gib"] == pytest.approx(plan["parameters_gib"], rel=5e-3)
    assert formula["optimizer_gib"] == pytest.approx(plan["optimizer_gib"], rel=5e-3)
    assert formula["peak_gib"] == pytest.approx(plan["peak_gib"], rel=0.05)
    # The accuracy that the page states is that of the present formula.
    assert formula["peak_gib"] == pytest.approx(plan["formula_peak_gib"], abs=1e-3)


def run(**changes: Any) -> Description:
    return llama3_8b(**{"parallel": ParallelConfig(tensor=8, sequence=True, data=1), "global_size": 8} | changes)


SIZES = ((2, 1, 1), (2, 1, 2), (2, 1, 4), (4, 1, 7), (4, 1, 8), (16, 1, 31), (16, 1, 64), (4, 2, 8), (4, 5, 128))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_bubble_equals_that_of_the_table(sizes: tuple[int, int, int]) -> None:
    stages, chunks, microbatches = sizes
    for name in ("gpipe", "1f1b" if chunks == 1 else "interleaved"):
        for wait in (0,) if name == "gpipe" else (0, 1):
            table = build(name, stages=stages, microbatches=microbatches, chunks=chunks, loss_wait=wait)
            layout = ParallelConfig(pipeline=stages, virtual_stages=chunks, schedule=name, loss_wait=wait, data=1)
            bubble = run(parallel=layout, global_size=microbatches).schedule
            assert (bubble.ticks, bubble.slots) == (table.ticks, table.ring_slots)
            assert bubble.fraction == pytest.approx(float(measure(table).pipeline_bubble))


def test_exposed_seconds_sum_up() -> None:
    step = shipped("llama3_70b", 128, *STAGES_70B)
    parts = (step.compute_seconds, step.exposed_seconds, step.bubble_seconds, step.optimizer_seconds)
    assert step.step_seconds == pytest.approx(sum(parts)) and min(parts) > 0
    collectives = sum(row.exposed for row in step.traffic)
    waited = H100.straggling * 4 * (step.compute_seconds + collectives + step.bubble_seconds)  # 16 nodes: 4 doublings
    assert step.exposed_seconds == pytest.approx(collectives + waited)
    assert step.hidden_seconds == pytest.approx(sum(min(row.seconds, row.hidden) for row in step.traffic))
    tokens = 512 * 8192 / step.step_seconds / 128
    assert step.tokens_per_second_per_device == pytest.approx(tokens)
    assert step.mfu_causal == pytest.approx(tokens * step.flops.causal / 989.4e12)
    assert step.mfu_causal < step.mfu_full < 1
    assert step.days == pytest.approx(3_600_000 * step.step_seconds / 86_400)


def test_traffic_equals_that_of_the_compiled_program() -> None:
    """Llama-3 8B in tensor 4 x data 2 on H100s: the plan in docs/planning.md."""
    traffic = shipped("llama3_8b", 8, *TENSOR_4).traffic
    rows = {(row.kind, row.axis, row.what.split(",")[-1].strip()): row for row in traffic}
    gathered = rows["all-gather", "tensor", "forward"]
    assert (gathered.count, gathered.bytes / gathered.count) == (16_384, 64 * 2**20)
    assert rows["all-gather", "tensor", "backward"].count == 32_768
    assert rows["reduce-scatter", "tensor", "backward"].count == 16_384
    assert rows["all-gather", "data", "once a step"].bytes / 2**30 == pytest.approx(3.74, rel=1e-2)
    assert rows["reduce-scatter", "data", "once a step"].bytes / 2**30 == pytest.approx(7.48, rel=1e-2)


def test_hidden_collectives_slow_kernels_down() -> None:
    device = replace(H100, contention=0.5)
    row = next(row for row in estimate(run(device=device)).traffic if 0 < row.hidden < row.seconds)
    assert row.exposed == pytest.approx(row.seconds - row.hidden + 0.5 * row.hidden)
    assert estimate(run(device=device)).exposed_seconds > estimate(run()).exposed_seconds


def test_a_power_limit_slows_matmuls() -> None:
    half = estimate(run(device=replace(H100, power=0.5)))
    assert half.matmul_seconds == pytest.approx(2 * estimate(run()).matmul_seconds, rel=0.05)
    assert half.stream_seconds == estimate(run()).stream_seconds


def test_a_range_is_of_the_kind_of_model() -> None:
    for name, kind in (("llama3_8b", "dense"), ("mixtral_8x7b", "mixture"), ("mamba2_1_3b", "state space")):
        step = shipped(name, 64)
        known = RANGES["any", "mixture" if kind == "mixture" else "dense", False]
        assert kind_of(step.run) == kind and step.errors == known
        low, high = step.tokens_per_second_per_device_range
        assert low < step.tokens_per_second_per_device < high
        # Predictions that are too high by the highest error are of the lowest speed.
        assert low * (1 + step.errors.high) == pytest.approx(step.tokens_per_second_per_device)
        assert to_dict(step)["tokens_per_second_per_device_range"] == (low, high)
        assert to_dict(step)["range_groups"] == known.groups >= 10
        text = f"{low:,.0f} to {high:,.0f}"
        assert f"{text} by the errors of {step.errors.groups} groups" in plan_report(step).text()
        assert text in cells(to_dict(step))
        low, high = to_dict(step)["tokens_per_second_per_device_range_tuned"]
        assert f"{low:,.0f} to {high:,.0f} if tuned as NVIDIA's" in plan_report(step).text()


@pytest.mark.parametrize(("reduce", "width"), [(None, 4), ("bfloat16", 2)])
def test_fsdp_gathers_in_compute_dtype_and_reduces_in_the_dtype_of_gradients(reduce: str | None, width: int) -> None:
    layout = ParallelConfig(data=8, data_sharding="fsdp")
    rows = {row.what: row.bytes for row in estimate(run(parallel=layout, reduce=reduce)).traffic}
    assert rows["a layer's gradients"] / width == rows["a layer's weights, forward"] / 2


def test_groups_gather_inside_nodes_and_sum_gradients_between_them() -> None:
    """Llama-3 8B on 8 nodes, with a copy of the weights in each: what a node alone does, and one all-reduce."""
    whole = run(parallel=ParallelConfig(data=64, data_sharding="fsdp"), global_size=64)
    node, groups = (replace(whole.parallel, **sizes) for sizes in ({"data": 8}, {"shards": 8}))
    alone, hybrid = estimate(replace(whole, parallel=node, global_size=8)), estimate(replace(whole, parallel=groups))
    (between,) = [row for row in hybrid.traffic if row.axis == "replica"]
    assert [row for row in hybrid.traffic if row is not between] == list(alone.traffic)
    parameters = whole.model.parameter_count().total
    assert (between.kind, between.count) == ("all-reduce", 1)
    assert between.bytes == pytest.approx(4 * parameters / 8, rel=1e-3)
    assert between.seconds == seconds("all-reduce", between.bytes, AxisSpan(8, 1), H100)
    assert hybrid.memory == alone.memory
    assert hybrid.memory.parameters == pytest.approx(8 * estimate(whole).memory.parameters)
    zero1 = replace(groups, data_sharding="zero1", tensor=2, data=32, shards=4)
    rows = {(row.kind, row.axis): row for row in estimate(replace(whole, parallel=zero1)).traffic}
    assert rows["all-reduce", "replica"].bytes == pytest.approx(rows["reduce-scatter", "data"].bytes / 4)
    gathered = rows["all-gather", "data"]
    assert gathered.seconds == pytest.approx(seconds("all-gather", gathered.bytes, AxisSpan(4, 4), H100))


def test_settings_change_only_their_own_figures() -> None:
    base = estimate(run())
    slow_links = estimate(run(device=replace(H100, nvlink=H100.nvlink / 4)))
    assert slow_links.exposed_seconds > 3 * base.exposed_seconds and slow_links.compute_seconds == base.compute_seconds
    full = estimate(run(model=replace(llama3("8b"), recompute="full")))
    assert full.memory.activations < base.memory.activations / 3
    assert full.matmul_seconds / base.matmul_seconds == pytest.approx(1.25, abs=0.05), "all but the last matmul again"
    partial = estimate(run(model=replace(llama3("8b"), recompute="full", recompute_layers=16)))
    assert full.memory.activations < partial.memory.activations and base.compute_seconds < partial.compute_seconds
    eight = estimate(run(compute="fp8"))
    assert base.matmul_seconds / 2.2 < eight.matmul_seconds < base.matmul_seconds / 1.5
    assert eight.stream_seconds > base.stream_seconds, "casts"


def test_heads_that_predict_further_ahead_are_counted() -> None:
    model = llama3("8b")
    ahead = estimate(run(model=replace(model, prediction=PredictionConfig(depth=2))))
    base = estimate(run(model=model))
    flops = ahead.flops.full / base.flops.full
    # Logits go through memory as well.
    assert ahead.compute_seconds / base.compute_seconds == pytest.approx(flops, rel=0.04)
    assert hash(ahead.run) != hash(base.run)


def test_copies_of_key_value_heads_are_counted() -> None:
    """If 2 heads are on 8 devices, each computes with one, as with 8 heads; at rest each has both."""
    model = llama3("8b")

    def with_heads(heads: int) -> Estimate:
        (block,) = model.stack.pattern
        block = replace(block, mixer=replace(block.mixer, kv_heads=heads))
        return estimate(run(model=replace(model, stack=replace(model.stack, pattern=(block,)))))

    sharded, copied = with_heads(8), with_heads(2)
    for name in ("weights", "gradients", "activations", "working"):
        assert getattr(copied.memory, name) == getattr(sharded.memory, name), name
    assert copied.matmul_seconds == sharded.matmul_seconds and copied.stream_seconds == sharded.stream_seconds
    head = 32 * 4096 * 2 * 128
    assert copied.memory.parameters - sharded.memory.parameters == 4 * head
    assert copied.memory.optimizer - sharded.memory.optimizer == 8 * head
    (row,) = [row for row in copied.traffic if "copied heads" in row.what]
    assert (row.count, row.bytes, len(copied.traffic)) == (1, 4 * 2 * head, len(sharded.traffic) + 1)


def test_a_free_running_pipeline_keeps_fewer_activations_and_its_last_stage_has_the_head() -> None:
    layout = ParallelConfig(pipeline=8, data=1)
    ours = estimate(run(parallel=layout, global_size=64))
    free_running = estimate(run(parallel=layout, global_size=64, system=replace(MEGAJAX, lockstep=False)))
    assert free_running.memory.activations == pytest.approx(ours.memory.activations * 8 / ours.run.schedule.slots)
    assert free_running.matmul_seconds > 1.2 * ours.matmul_seconds


def test_mfu_uses_the_same_peak_for_any_matmul_dtype() -> None:
    for compute in ("bfloat16", "fp8", "float32"):
        step = estimate(run(compute=compute))
        assert step.mfu_full == step.flops.full * step.tokens_per_second_per_device / step.run.device.peak


def test_fp8_needs_a_device_with_fp8() -> None:
    with user_error():
        estimate(run(compute="fp8", device=GPUS["a100-80gb"]))


def test_an_estimate_is_fast_and_deterministic() -> None:
    cfg: Any = load(str(ROOT / "configs" / "llama3.py:llama3_405b"))
    described = describe(cfg, H100, 1024)
    first, seconds = estimate(described), []
    for _ in range(20):
        started = time.perf_counter()
        repeated = estimate(described)
        seconds.append(time.perf_counter() - started)
        assert repeated == first
    assert min(seconds) < 2e-3


def test_no_jax_and_no_numpy() -> None:
    code = (
        "import sys; from megajax.plan import main;"
        "main(['--config=gpt3.py:gpt3_1_3b', '--devices=h100:8', '--formula']);"
        "assert not {'jax', 'numpy', 'flax'} & set(sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "fits" in process.stdout and "tokens/s" in process.stdout


def test_blocks_are_multiplied_by_blackwell_and_widened_elsewhere() -> None:
    times = {
        (gpu, compute): estimate(run(compute=compute, device=GPUS[gpu])).matmul_seconds
        for gpu in ("h100", "b200")
        for compute in ("bfloat16", "fp8", "fp8_blocks", "mxfp8", "nvfp4")
    }
    assert times["h100", "mxfp8"] == times["h100", "nvfp4"] == times["h100", "bfloat16"]
    assert times["b200", "fp8_blocks"] == times["b200", "mxfp8"]
    assert times["b200", "nvfp4"] < times["b200", "mxfp8"] == times["b200", "fp8"] < times["b200", "bfloat16"]
    assert GPUS["b200"].peak_of("nvfp4") == 9e15 and GPUS["b200"].peak_of("mxfp8") == 4.5e15
    casts = [estimate(run(compute=compute, device=GPUS["h100"])).stream_seconds for compute in ("bfloat16", "mxfp8")]
    assert casts[1] > casts[0]


def test_kernels_of_codes_have_a_rate_of_their_own() -> None:
    """Which no run has timed, so ranges are wider: fp8 blocks on Hopper."""
    library, codes = (estimate(run(compute=compute, device=H100)) for compute in ("fp8", "fp8_blocks"))
    equal = estimate(run(compute="fp8_blocks", device=replace(H100, matmul_codes=H100.matmul_fp8)))
    assert equal.matmul_seconds == pytest.approx(library.matmul_seconds)
    assert codes.matmul_seconds > 1.3 * library.matmul_seconds
    (low, high), (lowest, highest) = (plan.tokens_per_second_per_device_range for plan in (library, codes))
    assert highest / lowest > 1.3 * high / low
    text = codes.errors.text(1e4)
    assert text.endswith("25% to 65% of the peak in the kernel of codes, which no run has timed")
    assert "codes" not in library.errors.text(1e4)


def test_experts_are_planned_in_the_dtype_that_they_multiply_in() -> None:
    """Rounded numbers are widened again where no kernel takes their codes, or their sides."""
    cases = {(H100, "fp8"): "fp8", (H100, "mxfp8"): "bfloat16", (GPUS["b200"], "nvfp4"): "nvfp4"}
    for (device, compute), multiplied in cases.items():
        described = run(compute=compute, device=device)
        assert described.multiplied((256, 384), experts=True) == (multiplied, multiplied == compute)
        assert described.multiplied((256, 320), experts=True) == ("bfloat16", False)
    cfg: Any = load("mixtral.py:mixtral_8x7b", "precision.matmul=Mxfp8")
    steps = {gpu: estimate(describe(cfg, GPUS[gpu], 32)) for gpu in ("h100", "b200")}
    wide = estimate(replace(steps["b200"].run, compute="bfloat16"))
    assert steps["b200"].matmul_seconds < 0.9 * wide.matmul_seconds
    assert steps["b200"].errors.assumed and not steps["h100"].errors.assumed
