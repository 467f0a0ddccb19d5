"""The compiled steps of text generation on virtual H100s: collectives, and no copies of weights or the cache pool."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from test_golden_collectives import counts

from megajax.config import load
from megajax.inference.loaded_model import CacheSize, LoadedModel
from megajax.inference.programs import Programs
from megajax.inference.step_arrays import Bucket
from megajax.layers.lora.add_adapters import AdapterSlots
from megajax.layers.param import specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan
from megajax.planning.compiled import devices as devices
from megajax.planning.compiled.audit import audit
from megajax.planning.compiled.devices import GPUS, Cluster
from megajax.planning.compiled.hlo import read
from megajax.planning.cost.description import describe
from megajax.planning.cost.serving import servings
from megajax.processes.xla_options import DEVICELESS, GPU, INFERENCE, XlaConfig, compiler_options
from megajax.training.check_compiler_options import inference_options

MIB = 2**20
SIZE = CacheSize(blocks=4096, block=16, slots=64)


def programs(name: str, tensor: int, bucket: Bucket, slots: AdapterSlots | None = None) -> Programs:
    """Steps of a model with bfloat16 weights on this number of H100s. slots: of adapters."""
    cfg, parallel = load(name).model, ParallelConfig(tensor=tensor, data=1, data_sharding="replicate", sequence=False)
    mesh = build_mesh(parallel, devices.virtual_devices(Cluster(GPUS["h100"], tensor, 8)))
    layout = Layout(Plan.of(parallel))
    built = cfg if slots is None else replace(cfg, lora=slots)
    abstract = nnx.eval_shape(lambda: built.build(layout))
    weights: dict[str, Any] = {
        path: jax.ShapeDtypeStruct(
            one.shape, jnp.bfloat16, sharding=NamedSharding(mesh, layout.plan.compute.spec(one.axes))
        )
        for path, one in specs(abstract).items()
    }
    return Programs(
        LoadedModel(
            cfg,
            abstract,
            weights,
            mesh,
            layout,
            options=compiler_options(*GPU, *INFERENCE, *DEVICELESS),
            adapters=slots,
        ),
        SIZE,
        buckets=[bucket],
        choosers=[],
        length=8192,
        dtype="bfloat16",
        kernel="triton",
    )


STEPS = {
    "llama3_8b": ("llama3.py:llama3_8b", 1, Bucket(64)),
    "llama3_8b_prompt": ("llama3.py:llama3_8b", 1, Bucket(64, 16, 32)),
    "llama3_8b_drafts": ("llama3.py:llama3_8b", 1, Bucket(64, drafts=4)),
    "llama3_70b_tensor_8": ("llama3.py:llama3_70b", 8, Bucket(64)),
}


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize("step", STEPS)
def test_a_step_moves_neither_weights_nor_pool(step: str, golden: Callable[[str, str], None]) -> None:
    name, tensor, bucket = STEPS[step]
    steps = programs(name, tensor, bucket)
    program = steps.lowered(bucket).compile(steps.loaded.options)
    memory, text = program.memory_analysis(), program.as_text()
    leaves = steps.cache_like.values()
    pool = sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    assert memory.alias_size_in_bytes == pool, "the whole cache is updated in place"
    plans = servings(replace(describe(load(name), GPUS["h100"], tensor), compute="bfloat16"), tensor, 8192)
    plan = next(
        collective
        for collective in plans
        if (collective.tensor, collective.weights, collective.cache) == (tensor, "bfloat16", "bfloat16")
    )
    # The plan omits token ids in the cache and the scalar inputs of a step.
    arguments = plan.weight_bytes + SIZE.tokens() * plan.token_bytes
    assert 0 <= memory.argument_size_in_bytes - arguments < 4 * MIB
    copied = audit(text).by_class()["copies"]
    assert copied < 512 * MIB, "activations alone: copies of the keys' matrices of all layers would be as many"
    actual = read(text, {"tensor": tensor}).collectives
    if tensor > 1:
        layers = load(name).model.stack.layers()
        assert (
            sum(collective.place.runs() or 0 for collective in actual if collective.kind == "all-reduce")
            == 2 * layers + 1
        )
    lines = [
        f"{name}, tensor {tensor}, {bucket}, on H100",
        f"temporary: {memory.temp_size_in_bytes / MIB:.0f} MiB; copied: {copied / MIB:.0f} MiB",
        *counts(actual),
    ]
    golden(f"inference_{step}", "\n".join(lines) + "\n")


@pytest.mark.slow
@pytest.mark.aot
def test_slots_of_adapters_add_their_arrays_alone() -> None:
    """Nothing is copied, and the products of a layer with 8 slots need no more temporary memory."""
    memory = []
    for slots in (None, AdapterSlots(8, 16)):
        steps = programs("llama3.py:llama3_8b", 1, Bucket(64), slots)
        program = steps.lowered(Bucket(64)).compile(steps.loaded.options)
        memory.append(program.memory_analysis())
        assert audit(program.as_text()).by_class()["copies"] < 2 * MIB
    plain, adapted = memory
    assert adapted.temp_size_in_bytes - plain.temp_size_in_bytes < 2 * MIB
    # Inputs and outputs of query and output, of key and value, and of the three matrices of the MLP, for each layer.
    sides = 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    expected = sides * 8 * 16 * 2
    assert abs(adapted.argument_size_in_bytes - plain.argument_size_in_bytes - expected) < MIB


def test_inference_options_depend_on_the_platform() -> None:
    device = jax.devices()[0]
    options = inference_options(XlaConfig(options={"xla_cpu_enable_fast_math": True}), device)
    assert options == {"xla_cpu_enable_fast_math": True}
    assert inference_options(XlaConfig(), device) == {"xla_cpu_enable_fast_math": False}
