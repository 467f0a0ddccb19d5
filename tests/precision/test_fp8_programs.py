"""Programs with 8-bit and quantized matmuls for virtual H100s, if the extra aot is installed.

The compiler silently runs unrecognized products in 16 bits, correct but slow, so every matmul is counted.
"""

import multiprocessing
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from megajax.config import load
from megajax.layers.quantized import Quantized, form_of
from megajax.mesh.config import ParallelConfig
from megajax.planning.compiled.devices import read_cluster, virtual_devices
from megajax.planning.compiled.hlo import Collective, CompiledProgram, Contents
from megajax.planning.train_step import TrainPlan, compile_train_step
from megajax.precision.config import (
    Fp8BlocksConfig,
    Fp8CurrentConfig,
    Fp8DelayedConfig,
    MatmulConfig,
    Mxfp8Config,
    Nvfp4Config,
    PrecisionConfig,
)
from megajax.processes.xla_options import GPU, INFERENCE
from megajax.training.run_config import RunConfig

LLAMA = 7
"""Matmuls of a layer: four of attention, and three of the feed-forward."""
OPERANDS = {"f8e4m3fn", "f8e5m2"}
pytestmark = pytest.mark.aot


def wide(family: str, parallel: ParallelConfig, fp8: MatmulConfig | None) -> RunConfig:
    """Sizes at which 8 bits pay, two layers and two microbatches a stage."""
    cfg = load({"llama": "llama3.py:debug", "gpt": "gpt3.py:gpt3_175b_debug"}[family])
    (block,) = cfg.model.stack.pattern
    block = replace(
        block, mixer=replace(block.mixer, heads=8, kv_heads=4, head_dim=128), mlp=replace(block.mlp, ffn=4096)
    )
    stack = replace(cfg.model.stack, pattern=(block,), repeats=2 * parallel.pipeline)
    return cfg.but(
        model=replace(cfg.model, hidden=1024, sequence_length=2048, stack=stack),
        parallel=parallel,
        precision=PrecisionConfig(matmul=fp8),
        xla=replace(cfg.xla, schedule="default"),  # one compilation
        batch=replace(cfg.batch, global_size=2 * 2 * parallel.pipeline, micro_size=1, side_by_side=1),
    )


@cache
def compiled(family: str, gpus: str, fp8: MatmulConfig | None, parallel: ParallelConfig) -> TrainPlan:
    """The train step for virtual GPUs."""
    cluster, _ = read_cluster(gpus)
    assert cluster is not None
    return compile_train_step(wide(family, parallel, fp8), cluster)


def text_of(gpus: str, fp8: MatmulConfig, parallel: ParallelConfig) -> str:
    return compiled("llama", gpus, fp8, parallel).text


def text_alone(gpus: str, fp8: MatmulConfig, parallel: ParallelConfig) -> str:
    """Of a process of its own: Mosaic compiles all kernels of one for the GPU that this process compiled for first."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(text_of, gpus, fp8, parallel).result()


def in_8_bits(plan: TrainPlan) -> Counter[tuple[str, str, str]]:
    """(formats of both operands, precision) -> matmuls in the program."""
    actual = Counter()
    for computation in CompiledProgram.read(plan.text).computations.values():
        for op in computation.values():
            if op.target == "__cublas$lt$matmul$f8":
                formats = [computation[name].shape.partition("[")[0] for name in op.operands[:2]]
                assert set(formats) <= OPERANDS
                precision = re.search(r'"operand_precision":\["(\w+)"', op.attributes)
                # Gradients of weights are computed in the dtype they are accumulated in, the others in bfloat16.
                assert precision is not None and op.shape.lstrip("(").startswith(("bf16[", "f32["))
                actual[(*sorted(formats), precision[1])] += 1
    return actual


def uncast_products(text: str) -> list[str]:
    """Results of the matmuls that are not in 8 bits; attention is a kernel and not among them."""
    return [
        op.shape
        for computation in CompiledProgram.read(text).computations.values()
        for op in computation.values()
        if op.opcode == "dot" or re.match(r"__cublas(?!\$lt\$matmul\$f8)", op.target or "")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "parallel"),
    [
        (Mxfp8Config(), ParallelConfig(data=1, pipeline=2)),
        (Nvfp4Config(first_layers=0, last_layers=0), ParallelConfig(data=1, tensor=2, sequence=True)),
    ],
)
def test_blocks_are_multiplied_by_blackwell_on_layouts(recipe: MatmulConfig, parallel: ParallelConfig) -> None:
    """Products of blocks that jax would partition do not compile within the step, so each device has its own."""
    assert_products("__cudnn$blockScaledDot", compiled("llama", "b200:2", recipe, parallel).text)


def assert_products(target: str, text: str) -> None:
    """All products of layers and no other call. A loop may be split, and a pipeline has phases."""
    programs = CompiledProgram.read(text).computations.values()
    targets = Counter(op.target for computation in programs for op in computation.values())
    assert targets[target] >= 3 * LLAMA and targets[target] % LLAMA == 0, targets


@pytest.mark.slow
def test_blocks_are_multiplied_by_hopper_in_a_pipeline() -> None:
    text = text_alone("h100:2", Fp8BlocksConfig(format="hybrid"), ParallelConfig(data=1, pipeline=2))
    assert_products("mosaic_gpu_v2", text)
    assert len({*uncast_products(text)}) == 3, "those of the head, in each phase of a pipeline"


def along_tensor(actual: Contents) -> Counter[tuple[tuple[int, ...], str]]:
    """(loop, kind) -> arrays above some size that travel over `tensor`."""
    counts = Counter()
    for collective in actual.collectives:
        if collective.groups.axes == ("tensor",) and collective.bytes > 2**16:
            counts[(collective.place.path, collective.kind)] += collective.arrays
    return counts


def in_layers(plan: TrainPlan, size: int) -> list[Collective]:
    """Of fewer bytes than that."""
    return [op for op in plan.contents.collectives if op.bytes < size and len(op.place.path) == 2]


HYBRID = Fp8CurrentConfig()
DELAYED = Fp8DelayedConfig(history=16, algorithm="max")
FORWARD, BACKWARD = ("f8e4m3fn", "f8e4m3fn", "DEFAULT"), ("f8e4m3fn", "f8e5m2", "HIGHEST")


@pytest.mark.slow
def test_16_bit_layers_are_chosen_without_a_branch_and_e4m3_accumulates_in_float32() -> None:
    fp8 = Fp8CurrentConfig(format="e4m3", fast_accumulation=False, first_layers=1)
    plan = compiled("llama", "h100:1", fp8, ParallelConfig(data=1))
    assert in_8_bits(plan) == {("f8e4m3fn", "f8e4m3fn", "HIGHEST"): 3 * LLAMA}
    assert len(uncast_products(plan.text)) == 3 + 3 * LLAMA
    assert "f8e4m3" not in "".join(line for line in plan.text.splitlines() if " conditional(" in line)


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [HYBRID, DELAYED])
def test_tensor_parallelism_moves_the_bytes_of_16_bits_and_a_few_amax(fp8: MatmulConfig) -> None:
    """Each layer's matmuls and both of their gradients are in 8 bits, and nothing else but the head's in 16."""
    parallel = ParallelConfig(data=2, tensor=2, sequence=True)
    small, wide = (compiled("llama", "h100:4", recipe, parallel) for recipe in (fp8, None))
    assert in_8_bits(small) == {FORWARD: LLAMA, BACKWARD: 2 * LLAMA}
    assert len(uncast_products(small.text)) == 3, "logits, and gradients of hidden states and table"
    assert along_tensor(small.contents) == along_tensor(wide.contents)
    amax = in_layers(small, 64 if fp8 is HYBRID else 128)
    assert {collective.kind for collective in amax} == {"all-reduce"}
    # Delayed scales need those of a layer together, when its gradients are computed: nothing waits for them.
    assert len(amax) <= 10 if fp8 is HYBRID else [one.groups.axes for one in amax] == [("tensor",)]


LAYERS, SIDE, MIB = 8, 4096, 2**20
LAYER = SIDE * SIDE * 2
"""Bytes of a layer's matrix in bfloat16."""


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "activations"), [("int4", False), ("fp8", True)])
def test_a_loop_over_layers_dequantizes_one_matrix_at_a_time(weights: str, activations: bool) -> None:
    cluster, _ = read_cluster("h100:1")
    assert cluster is not None
    sharding = SingleDeviceSharding(virtual_devices(cluster)[0])
    quantized = Quantized(form_of(weights, 128, 1, 1), activations=activations)
    declared = quantized.declared((LAYERS, SIDE, SIDE), ("layer", "embed", "mlp"))
    leaves = {end: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for end, (shape, _, dtype) in declared.items()}
    x = jax.ShapeDtypeStruct((64, 1, SIDE), jnp.bfloat16, sharding=sharding)

    def layers(leaves: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, layer: (quantized.product("bsd,df->bsf", x, layer), None), x, leaves)[0]

    options = {option.name: option.value for option in (*GPU, *INFERENCE)} | {"xla_gpu_autotune_level": 0}
    compiled = jax.jit(layers).lower(leaves, x).compile(compiler_options=options)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.temp_size_in_bytes < LAYER + 16 * MIB
    assert memory.argument_size_in_bytes < LAYERS * LAYER * (0.27 if weights == "int4" else 0.51)
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == activations
