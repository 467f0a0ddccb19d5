"""The cost model against groups of published runs that its constants were not fitted to."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planning import held_out, published
from benchmarks.planning.accuracy import RUNS
from benchmarks.planning.held_out import Group
from benchmarks.planning.systems import MEGATRON, MEGATRON_R08, PYTORCH_FSDP, UNTUNED
from megajax.mesh.config import SIZED_AXES
from megajax.planning.compiled.devices import GPUS
from megajax.planning.cost.estimate import RANGES, ErrorRange, estimate, range_of

pytestmark = pytest.mark.smoke


@pytest.fixture
def groups() -> list[Group]:
    if not (found := held_out.compared()):
        pytest.skip(f"no published runs at {published.FILE.resolve()}: set MEGAJAX_PUBLISHED_RUNS")
    return found


def test_groups_held_out_are_predicted(groups: list[Group]) -> None:
    kinds = held_out.summary(groups)["held_out"]
    assert kinds["dense"]["groups"] >= 10 and kinds["dense"]["median_error"] <= 0.06
    assert kinds["dense"]["groups_within_10_percent"] >= 0.8 * kinds["dense"]["groups"]
    assert kinds["mixture"]["median_error"] <= 0.15


def test_ranges_are_made_of_these_groups(groups: list[Group]) -> None:
    assert held_out.error_ranges(groups) == RANGES


def test_ranges_hold_runs_of_publishers_that_they_are_made_without(groups: list[Group]) -> None:
    tuned, every = (held_out.coverage(groups, program) for program in ("tuned", "any"))
    assert tuned["runs"] >= 0.88 and tuned["mean_of_groups"] >= 0.85
    assert every["runs"] >= 0.95 and every["mean_of_groups"] >= 0.95


def test_constants_are_those_of_the_fit(groups: list[Group]) -> None:
    del groups
    actual = held_out.fitted_constants(RUNS)
    assert actual["h100 matmul"] == pytest.approx(GPUS["h100"].matmul, abs=2e-3)
    assert actual["h100 matmul_fp8"] == pytest.approx(GPUS["h100"].matmul_fp8, abs=2e-3)
    assert actual["b200 matmul_fp8"] == pytest.approx(GPUS["b200"].matmul_fp8, abs=2e-3)
    assert actual["gb300 matmul_fp8"] == pytest.approx(GPUS["gb300"].matmul_fp8, abs=3e-3)
    assert actual["untuned overhead"] == pytest.approx(UNTUNED, abs=5e-3)
    assert actual["core r0.8 overhead"] == pytest.approx(MEGATRON_R08.overhead, abs=5e-3)
    assert actual["experts_wait"] == MEGATRON.experts_wait
    assert actual["scan"] == pytest.approx(GPUS["h100"].scan, abs=0.01)


def test_a_range_has_the_same_weight_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Group("large", "dense", False, (0.0,) * 100)
    small = [Group(str(index), "dense", False, (error,)) for index, error in enumerate((-0.3, -0.1, 0.2, 0.44))]
    monkeypatch.setattr(held_out, "INFLATION", 2.0)
    # 0.7^2 and 1.44^2: twice as far on a scale of ratios, rounded outward.
    assert held_out.error_range([large, *small]) == ErrorRange(-0.51, 1.08, 5)
    # It contains 0, and large counts as much as small.
    assert held_out.error_range([large, small[1]]) == ErrorRange(-0.19, 0.0, 2)


def test_a_plan_has_the_ranges_of_its_kind_and_precision() -> None:
    run = published.published(RECORD).described()
    assert range_of(run) == RANGES["any", "dense", True]
    step = estimate(replace(run, compute="bfloat16"))
    assert step.errors == RANGES["any", "dense", False] and step.errors_of("tuned") == RANGES["tuned", "dense", False]
    low, high = step.tokens_per_second_per_device_range
    inner = step.tokens_per_second_per_device_range_tuned
    assert low < inner[0] < step.tokens_per_second_per_device < inner[1] < high


RECORD: dict[str, Any] = {
    "id": "a run", "group": "a group", "software": "torchtitan", "gpu": "h100", "gpus": 64, "precision": "fp8",
    "network_GBps_per_gpu": 25.0, "model": {
        "kind": "llama", "layers": 8, "hidden": 1024, "heads": 8, "kv_heads": 2, "ffn": 4096, "vocab": 1000,
        "tied": True,
    },
    "seq": 2048, "gbs": 64, "mbs": 2, "tp": 2, "pp": 2, "vp": 2, "cp": 2, "cp_strategy": "ring", "ep": 1, "dp": 8,
    "sharding": "fsdp", "recompute": "full", "tp_overlap": "async", "tokens_per_s_per_gpu": 1000.0, "source": "a test",
    "gpu_variant": {"name": "H100 96GB", "bandwidth": 2.4e12, "memory_gib": 96, "power_w": 350}, "expressible": True,
}  # fmt: skip


def test_a_record_is_read(tmp_path: Path) -> None:
    file = tmp_path / "published_runs.jsonl"
    others = [RECORD | {"expressible": False}, RECORD | {"superseded": "by a later version"}]
    file.write_text("\n".join(map(json.dumps, [RECORD, *others])))
    (record,) = published.read(file)
    run = published.published(record).described()
    layout = {name: size for name, size in asdict(run.parallel).items() if name in SIZED_AXES}
    assert layout == {"pipeline": 2, "data": 8, "expert": 1, "context": 2, "tensor": 2}
    assert run.parallel.data_sharding == "fsdp" and run.parallel.sequence and run.parallel.virtual_stages == 2
    assert (run.devices, run.microbatches, run.compute, run.model.recompute) == (64, 4, "fp8", "full")
    assert (run.device.network, run.device.bandwidth, run.device.power) == (25e9, 2.4e12, 0.5)
    assert run.system.overhead == PYTORCH_FSDP.overhead and run.system.tensor_hidden == MEGATRON.tensor_hidden
    by_hand = 8 * (1024 * (1024 + 2 * 256 + 1024) + 3 * 1024 * 4096 + 2 * 1024) + 1000 * 1024 + 1024
    assert run.model.parameter_count().total == by_hand
    assert published.read(tmp_path / "absent.jsonl") == []


def test_a_recipe_is_described_as_itself_with_the_rounding_of_its_program() -> None:
    """NVFP4 multiplies faster than MXFP8, and takes longer where rounding is several passes, as in this program."""
    found, large = {}, RECORD["model"] | {"hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28_672}
    for precision in ("fp8", "mxfp8", "nvfp4"):
        record = RECORD | {"precision": precision, "gpu": "gb300", "software": "Megatron-Bridge"}
        run = published.published(record | {"model": large, "gpu_variant": None}).described()
        assert (run.compute, run.reduced_width) == (precision, 2)
        own, passes = (estimate(replace(run, system=replace(run.system, one_pass=one))) for one in (True, False))
        found[precision] = own.step_seconds
        assert (passes.step_seconds > own.step_seconds) == (precision != "fp8")
    assert found["nvfp4"] < found["mxfp8"]


def test_experts_are_laid_out() -> None:
    mixture = {"kind": "moe", "layers": 4, "hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 64, "experts": 32,
               "top_k": 4, "expert_ffn": 256, "vocab": 1000}  # fmt: skip
    record = RECORD | {"model": mixture, "cp": 1, "dp": 16, "ep": 16, "etp": 1, "software": "Megatron-Core MoE"}
    run = published.published(record).described()
    # Whole experts over 8 x 2 devices, the second of them those of `tensor`.
    assert (run.parallel.expert, run.parallel.data, run.parallel.expert_tensor) == (8, 2, "whole")
    assert run.spread.devices == 16
