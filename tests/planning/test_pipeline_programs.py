"""Collectives, overlap and memory of a pipeline's compiled train step.

Compiled for virtual H100s if the extra aot is installed, and one tiny program for CPU devices, whose compiler overlaps
nothing and leaves all-reduces in layers where a GPU's makes reduce-scatters.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import pytest

from megajax.config import load
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.planning.compiled.audit import CompiledKernel, audit
from megajax.planning.compiled.devices import MIB, prepare, read_cluster
from megajax.planning.compiled.hlo import Collective, Contents, LoopNest, read
from megajax.planning.train_step import compile_train_step
from megajax.processes.xla_options import XlaConfig
from megajax.training.program import Program
from megajax.training.run_config import RunConfig


@dataclass(frozen=True)
class Compiled:
    """A train step."""

    contents: Contents
    temporary: int
    """Bytes of one device."""
    residual: int
    """Bytes of one activation between layers, on one device."""
    positions: int
    """Bytes of the gradient of learned positions on one device, 0 without them."""
    forwards: int
    """Runs of a layer's forward pass, per step and device."""
    moved: tuple[CompiledKernel, ...] = ()
    """Kernels without arithmetic that write at least a mebibyte at once, in programs for GPUs."""
    products: tuple[CompiledKernel, ...] = ()
    """Kernels that multiply matrices into float32 arrays."""
    attention: tuple[CompiledKernel, ...] = ()
    """Those of cuDNN."""


def debug(family: str, schedule: str, microbatches: int, *, stages: int, data: int, layers: int) -> RunConfig:
    """llama: RMSNorm, gated MLP, rope, grouped queries. gpt: LayerNorm, biases, learned positions, tied head."""
    cfg = load({"llama": "llama3.py:debug", "gpt": "gpt3.py:gpt3_175b_debug"}[family])
    return cfg.but(
        model=replace(cfg.model, stack=replace(cfg.model.stack, repeats=layers)),
        parallel=ParallelConfig(
            pipeline=stages,
            data=data,
            tensor=2,
            sequence=True,
            schedule=schedule,
            virtual_stages=2 if schedule == "interleaved" else 1,
            loss_wait=1,
        ),
        batch=replace(cfg.batch, global_size=data * microbatches, micro_size=1, side_by_side=1),
    )


def wide(cfg: RunConfig) -> RunConfig:
    """In bfloat16, and activations between layers of 16 MiB.

    Reductions of less than 1 MiB the compiler joins. Those of 1 to 8 MiB over at most eight devices connected by NVLink
    become kernels of its own (in jax 0.12), not all of which it puts beside the layers. Products of one input it joins
    up to 32 MiB; those of large models are larger.
    """
    (block,) = cfg.model.stack.pattern
    groups = None if block.mixer.kv_heads is None else 8
    block = replace(block, mixer=replace(block.mixer, heads=16, kv_heads=groups), mlp=replace(block.mlp, ffn=4096))
    model = replace(cfg.model, hidden=2048, sequence_length=8192)
    return cfg.but(
        model=replace(model, stack=replace(cfg.model.stack, pattern=(block,))),
        precision=replace(cfg.precision, compute="bfloat16"),
        xla=XlaConfig(options={"xla_gpu_dot_merger_threshold_mb": 0}),
    )


def over(axis: str, found: Contents) -> list[Collective]:
    return [op for op in found.collectives if axis in op.groups.axes]


def permuting(found: Contents) -> list[LoopNest]:
    """Loops with a transfer to the next or the previous stage, counted once each."""
    return [op.place for op in found.collectives if op.kind == "collective-permute" and op.place.path]


def exposed(found: Contents) -> list[Collective]:
    """What the stages wait for in the loop of forward and backward passes: transfers without work beside them."""
    (steady,) = (place for place, permutes in Counter(permuting(found)).items() if permutes == 2)
    among = [op for op in found.collectives if op.place == steady and op.groups.axes == ("pipeline",)]
    assert "collective-permute" in {op.kind for op in among}
    return [op for op in among if not op.overlapped]


def in_loop(found: Contents, path: tuple[int, ...], axis: str) -> Counter[str]:
    """Kind -> arrays moved along an axis in one iteration of a loop."""
    moves: Counter[str] = Counter()
    for op in over(axis, found):
        if op.place.path == path:
            moves[op.kind] += op.arrays
    return moves


def check_axes(step: Compiled) -> None:
    """What no pipeline program may move, on any devices."""
    between = over("pipeline", step.contents)
    assert {op.kind for op in between} == {"collective-permute", "all-reduce"}
    ticks = [op for op in between if op.place.path]
    assert max(op.bytes / op.arrays for op in ticks) <= step.residual, "no weight, nor its gradient, goes anywhere"
    # Once a step: gradients of the weights that all stages have, gains and learned positions.
    assert max(op.bytes / op.arrays for op in between) <= max(step.residual, step.positions)
    assert all(op.arrays == 1 for op in between if op.kind == "collective-permute")
    assert all(len(op.place.path) <= 1 for op in between if op.kind == "collective-permute"), "not for each layer"
    # zero1: weights are gathered, and their gradients summed, once a step.
    data = over("data", step.contents)
    assert not [op for op in data if op.place.path]
    assert {"all-gather", "reduce-scatter"} <= {op.kind for op in data}


MICROBATCHES, MORE = 8, 32
STAGES, DATA, LAYERS = 4, 4, 16
"""A stage fills a node if tensor is 2."""


@pytest.fixture(scope="module")
def deviceless() -> Iterator[Compiled]:
    """The step of a GPT with an interleaved schedule on 32 virtual H100s."""
    cluster, _ = read_cluster("h100:32")
    assert cluster is not None

    def compiled() -> Compiled:
        cfg = wide(debug("gpt", "interleaved", MICROBATCHES, stages=STAGES, data=DATA, layers=LAYERS))
        cfg = cfg.but(xla=replace(cfg.xla, schedule="default"))  # one compilation
        plan = compile_train_step(cfg, cluster)
        assert plan.kernels == {"attention": ["cudnn"]}
        numbers = cfg.model.sequence_length * cfg.model.hidden // 2
        assert plan.schedule is not None
        positions = 4 * numbers * cfg.model.learned_positions
        rows = LAYERS // STAGES // plan.schedule.chunks
        # Idle chunks are skipped: only the microbatches' forward passes run.
        ticks = MICROBATCHES * plan.schedule.chunks
        program = audit(plan.text, plan.unknown_trips)
        return Compiled(
            plan.contents,
            plan.memory.temporary,
            2 * numbers,
            positions,
            ticks * rows,
            tuple(op for op in program.kernels if op.work in ("fill", "move") and op.bytes_written >= MIB),
            tuple(op for op in program.kernels if op.work == "matmul" and op.shape.startswith("(f32[")),
            tuple(op for op in program.kernels if "fmha" in (op.target or "")),
        )

    with pytest.MonkeyPatch.context() as patch:
        # `prepare` sets variables that other tests must not inherit.
        for name in ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
            patch.setenv(name, "")
        prepare()
        yield compiled()


@pytest.mark.aot
def test_only_activations_travel_between_stages(deviceless: Compiled) -> None:
    check_axes(deviceless)


@pytest.mark.aot
def test_transfers_between_stages_overlap_with_layers(deviceless: Compiled) -> None:
    assert exposed(deviceless.contents) == []


@pytest.mark.aot
def test_sums_over_stages_run_where_a_microbatch_enters_or_leaves(deviceless: Compiled) -> None:
    """Of two chunks, one enters in half of the ticks of the steady loop."""
    program = deviceless.contents
    (steady,) = (place for place, permutes in Counter(permuting(program)).items() if permutes == 2)
    among = [op for op in program.collectives if op.place.path == steady.path and op.groups.axes == ("pipeline",)]
    sums = [op for op in among if op.kind == "all-reduce"]
    (ticks,) = steady.trips
    assert sum(op.arrays for op in sums) == 4
    for op in sums:
        # The steady loop starts and ends with losses: a few ticks at its edges lack one or the other.
        assert op.place.runs() == pytest.approx(ticks / 2, abs=STAGES)


@pytest.mark.aot
def test_weight_gradients_are_accumulated_in_place(deviceless: Compiled) -> None:
    """Products are added to rows of float32 stacks. No loop copies an accumulator, or a row of one."""
    step = deviceless
    # [rows, ...] is a stack of accumulators, [1, ...] one row; attention's statistics have more leading dimensions.
    stack = re.compile(rf"f32\[({LAYERS // STAGES}|1),(?!1,)")
    copied = [op for op in step.moved if op.place.path and stack.match(op.shape)]
    assert [(op.shape, op.place.name) for op in copied] == []
    stacks = {op.shape for op in step.products if op.shape.startswith(f"(f32[{LAYERS // STAGES},")}
    assert len(stacks) >= 2


@pytest.mark.aot
def test_a_layer_has_no_collective_over_all_axes(deviceless: Compiled) -> None:
    step = deviceless
    forwards = {op.place.path for op in step.attention if "Backward" not in (op.target or "")}
    backwards = {op.place.path for op in step.attention if "Backward" in (op.target or "")}
    assert forwards and backwards and not forwards & backwards
    for path in forwards:
        assert in_loop(step.contents, path, "tensor") == {"all-gather": 2, "reduce-scatter": 2}
    for path in backwards:
        # Two of the gathers are of the inputs of recomputation.
        assert in_loop(step.contents, path, "tensor") == {"all-gather": 4, "reduce-scatter": 2}


@pytest.mark.aot
def test_attention_is_never_recomputed(deviceless: Compiled) -> None:
    step = deviceless
    runs = sum(op.rounds * op.share for op in step.attention if "Backward" not in (op.target or ""))
    assert runs == pytest.approx(step.forwards)


@cache
def on_cpu(schedule: str, microbatches: int) -> Compiled:
    """A tiny step for eight CPU devices, compiled without optimization of machine code."""
    cfg = debug("llama", schedule, microbatches, stages=2, data=2, layers=4)
    program = Program.of(cfg, build_mesh(cfg.parallel, jax.devices()[:8]))
    step: Any = program.train_step
    with jax.set_mesh(program.mesh):
        lowered = step.lower(program.state_like(), program.batch_like())
        compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    contents = read(compiled.as_text(), program.mesh.shape)
    residual = cfg.model.sequence_length // 2 * cfg.model.hidden * 4
    return Compiled(contents, compiled.memory_analysis().temp_size_in_bytes, residual, 0, 0)


@pytest.mark.slow
def test_on_CPU_devices_only_activations_travel_between_stages() -> None:
    step = on_cpu("1f1b", MICROBATCHES)
    check_axes(step)
    assert max(Counter(permuting(step.contents)).values()) == 2


def test_on_CPU_devices_a_layer_gathers_its_shards_only() -> None:
    program = on_cpu("1f1b", MICROBATCHES).contents
    layers = [
        (loop.matmuls, in_loop(program, loop.place.path, "tensor")) for loop in program.loops if loop.matmuls >= 5
    ]
    forward = min(matmuls for matmuls, _ in layers)
    for matmuls, moved in layers:
        assert moved.keys() == {"all-gather", "all-reduce"}
        assert moved["all-gather"] == (2 if matmuls == forward else 4)
        # In the backward pass, this compiler sums the gradients of queries, keys and values, gate and up one by one.
        assert moved["all-reduce"] == (2 if matmuls == forward else 5)


@pytest.mark.slow
def test_on_cpu_devices_memory_of_gpipe_grows_with_microbatches_and_that_of_1f1b_does_not() -> None:
    for schedule, grows in (("1f1b", False), ("gpipe", True)):
        short, long = (on_cpu(schedule, microbatches).temporary for microbatches in (MICROBATCHES, MORE))
        assert long > 1.5 * short if grows else long == pytest.approx(short, rel=0.02)
