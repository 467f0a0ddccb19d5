"""python -m megajax.plan --config --devices: plans compiled for virtual GPU devices."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import ONE, build_program, llama

from megajax.config import load
from megajax.plan import main
from megajax.planning.compiled.devices import GPUS, prepare, read_cluster
from megajax.planning.train_step import compile_train_step, kernel_device, with_kernels
from megajax.training.program import demand_kernels

ROOT = Path(__file__).parents[2]
DEBUG = "--config=llama3.py:debug"


TINY = (
    *("--precision.compute=bfloat16", "--model.stack.repeats=3", "--model.sequence_length=128"),
    *("--batch.global_size=16", "--parallel.data=2"),
)


WIDE = """
from dataclasses import replace
from megajax.config import load

def config():
    cfg = load("llama3.py:debug")
    (block,) = cfg.model.stack.pattern
    block = replace(block, mixer=replace(block.mixer, heads=16, kv_heads=4), mlp=replace(block.mlp, ffn=4096))
    model = replace(cfg.model, hidden=2048, sequence_length=2048, vocabulary_size=4096)
    return cfg.but(model=replace(model, stack=replace(cfg.model.stack, pattern=(block,), repeats=4)))
"""
"""A config whose traffic is mostly weights and activations; in the debug config small arrays dominate."""


def plan(folder: Path, *arguments: str, config: Sequence[str] = (DEBUG, *TINY)) -> tuple[dict[str, Any], str]:
    """It runs in a separate process, because the platform is chosen when jax is imported."""
    file = folder / "plan.json"
    command = [sys.executable, "-m", "megajax.plan", *config, f"--json={file}", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *filter(None, sys.path)]))}
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return json.loads(file.read_text()), process.stdout


def row(figures: dict[str, Any], **keys: Any) -> list[dict[str, Any]]:
    return [item for item in figures["collectives"] if all(item[key] == value for key, value in keys.items())]


@pytest.mark.aot
def test_a_train_step_for_virtual_gpus(tmp_path: Path) -> None:
    options = "--xla=xla_cpu_enable_fast_math=false,xla_gpu_enable_triton_gemm=no"
    layout = ("--devices=h100:8", "--parallel.data=4", "--parallel.tensor=2", "--parallel.sequence=true")
    figures, printed = plan(tmp_path, *layout, options)
    assert "xla_cpu_enable_fast_math=False, xla_gpu_enable_triton_gemm=False" in printed
    assert figures["fits"] is True and figures["devices"] == 8 and figures["mesh"]["tensor"] == 2
    assert figures["bubble_fraction"] == 0 and figures["microbatches"] == 4
    assert figures["kernels"]["attention"] == ["cudnn"]
    assert figures["peak_gib"] == pytest.approx(figures["arguments_gib"] + figures["temporary_gib"], rel=1e-2)
    # Two float32 moments for each float32 weight.
    assert figures["optimizer_gib"] == pytest.approx(2 * figures["parameters_gib"], rel=1e-3)
    # Per layer: attention and MLP each gather their input along the sequence and scatter their output.
    layers = [item for item in row(figures, kind="all-gather", axis="tensor") if item["trips"] == [4, 3]]
    rows = 128 * 64 * 2
    assert {item["bytes_once"] // item["arrays"] for item in layers} == {rows}
    loops = {item["loop"]: item["matmuls"] for item in figures["loops"] if item["trips"] == [4, 3]}
    forward_loop, backward_loop = sorted(loops, key=lambda loop: loops[loop])
    for loop, gathers in ((forward_loop, 2), (backward_loop, 4)):
        assert sum(item["arrays"] for item in row(figures, kind="all-gather", loop=loop)) == gathers
        assert sum(item["arrays"] for item in row(figures, kind="reduce-scatter", loop=loop)) == 2
        assert not row(figures, kind="all-reduce", loop=loop), "nothing is summed for all in a layer"
    data = row(figures, axis="data", kind="all-gather")
    assert data and not any(item["inside_loop"] for item in data), "zero1 gathers weights once a step"
    for text in ("plan for 8 x NVIDIA H100", "fits", "yes", "1: 4 times", "1.1: 4 x 3 times", "all-gather"):
        assert text in printed
    parts = ("compute_seconds", "exposed_seconds", "bubble_seconds", "optimizer_seconds")
    assert figures["step_seconds"] == pytest.approx(sum(figures[name] for name in parts))
    assert 0 < figures["mfu_causal"] < figures["mfu_full"] < 1
    assert figures["tokens_per_second_per_device"] == pytest.approx(16 * 128 / figures["step_seconds"] / 8)
    total = sum(item["seconds"] for item in figures["collectives"])
    slowed = GPUS["h100"].contention * figures["hidden_seconds"]  # one node: nothing waits for another
    assert total == pytest.approx(figures["exposed_seconds"] - slowed + figures["hidden_seconds"])
    waits = sum(item["exposed_seconds"] for item in figures["collectives"])
    assert 0 < waits == pytest.approx(total - figures["hidden_seconds"])
    assert sum(figures["exposed_by_axis"].values()) == pytest.approx(waits)
    streams = figures["streams"]
    assert streams["seconds"] - streams["computing"] == pytest.approx(waits)
    for text in ("time of a step, by the cost model", "exposed communication", "MFU"):
        assert text in printed


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("device", ["b200"])
def test_every_architecture_compiles(device: str, tmp_path: Path) -> None:
    figures, _ = plan(tmp_path, f"--devices={device}:2", "--parallel.data_sharding=fsdp")
    assert figures["fits"] is True
    inside = row(figures, kind="all-gather", axis="data", inside_loop=True)
    assert inside, "fsdp gathers weights layer by layer"


def test_float32_uses_the_reference_attention_and_the_plan_says_why() -> None:
    cfg = load("llama3.py:debug", "precision.compute=float32")
    _, kernels = with_kernels(cfg.model, demand_kernels(cfg, kernel_device(GPUS["b200"])))
    why = "cudnn, pallas, cudnn_mask: computes in bfloat16 or float16, not in float32"
    assert kernels["attention"] == [f"reference ({why})"]


@pytest.mark.aot
def test_a_pipeline_has_permutes_in_its_ticks_and_a_bubble(tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    layout = ("--parallel.pipeline=2", "--parallel.data=2", "--parallel.loss_wait=0", "--batch.global_size=16")
    config = (f"--config={tmp_path / 'wide.py'}", "--devices=h100:4", "--precision.compute=bfloat16", *layout)
    # The compiler combines the products of narrow models; their gradients are then added separately.
    plain = ("--xla=xla_gpu_dot_merger_threshold_mb=0", "--xla.schedule=default")
    figures, printed = plan(tmp_path, "--audit", *plain, config=config)
    assert figures["microbatches"] == 8 and figures["schedule"] == "1f1b"
    assert figures["bubble_fraction"] == pytest.approx(1 / 8), "(P-1)/M"
    permutes = row(figures, kind="collective-permute", axis="pipeline")
    assert sum(item["count"] for item in permutes) >= 2 * 8, "each microbatch's activations there, its gradients back"
    assert all(len(item["trips"]) <= 1 for item in permutes), "not in the loops over layers"
    assert "12.50% over ideal time" in printed
    moved = figures["bytes_per_step"]
    assert moved["total"] == sum(moved.values()) - moved["total"] and min(moved.values()) > 0
    assert all(item["count"] is not None for item in figures["loops"])
    assert "memory traffic of one device and step" in printed and "by formula" in printed
    main([*config, "--formula", f"--json={tmp_path / 'formula.json'}"])
    predicted = json.loads((tmp_path / "formula.json").read_text())["bytes_per_step"]
    actual = moved["total"] - figures["bytes_of_workspace"]
    assert predicted["total"] == pytest.approx(actual, rel=0.15)
    streamed = moved["copies"] + moved["elementwise"]
    assert predicted["copies"] + predicted["elementwise"] == pytest.approx(streamed, rel=0.25)


@pytest.mark.aot
def test_each_offloaded_array_has_a_buffer_in_host_memory_that_is_never_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are as large as values, and gates as the arrays they multiply: buffers of equal size become one."""
    for name in ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
        monkeypatch.setenv(name, "")
    prepare()
    model = replace(llama(), offload=("query_key_value", "mlp"))
    cfg = build_program(model, ONE, microbatches=2, compute="bfloat16").cfg
    cluster, _ = read_cluster("h100:1")
    assert cluster is not None
    text = compile_train_step(cfg, cluster).text
    assert len(re.findall(r'custom_call_target="AllocateBuffer"', text)) == len(("query", "key", "value", "gate", "up"))
    assert not re.findall(r"S\(5\)\} copy\(", text)
