"""Attention over sharded rows, forward and backward in a loop over layers, compiled for virtual H100s.

Within a loop, as in a model: otherwise forward and backward pass would share what they gather.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.kernels.attention.attention import OUTPUT, STATISTICS, attend
from megajax.kernels.attention.mask import Mask
from megajax.kernels.context.strategy import over_context
from megajax.mesh.zigzag_order import SequenceSharding
from megajax.planning.compiled import hlo
from megajax.planning.compiled.devices import GPUS, Cluster, virtual_devices
from megajax.processes.xla_options import DEVICELESS, FSDP, GPU, compiler_options

pytestmark = pytest.mark.aot
LENGTH, HEADS, SIZE, LAYERS = 8192, 4, 64, 3
CONTEXT, TENSOR = 4, 2


def compiled(
    sharding: SequenceSharding, kernel: str, *, segments: bool = False, fsdp: bool = False, **rest: Any
) -> tuple[str, Mapping]:
    """The program's text and its mesh. rest: of the mask."""
    mesh = Mesh(
        np.array(virtual_devices(Cluster(GPUS["h100"], CONTEXT * TENSOR, 8))).reshape(CONTEXT, TENSOR),
        ("context", "tensor"),
    )
    passes, heads = over_context(sharding, kernel), P(None, None, "tensor")

    def local(q: Array, k: Array, v: Array, index: Array, ids: Array | None) -> Array:
        return attend(passes, q, k, v, Mask(index, index, ids, ids, **rest), scale=0.1)

    def gradient(x: Array, ids: Array) -> Array:
        island = jax.shard_map(
            local, axis_names={"tensor"}, in_specs=(heads, heads, heads, P(), P()), out_specs=heads, check_vma=False
        )
        index = sharding.local_index(x.shape[1])

        def layer(x: Array, _: None) -> tuple[Array, None]:
            kv = x[:, :, :: HEADS // 2]
            return x + island(jnp.sin(x), 2 * kv, jnp.cos(kv), index, ids if segments else None), None

        policy = jax.checkpoint_policies.save_only_these_names(OUTPUT, STATISTICS)
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return jax.grad(lambda x: lax.scan(layer, x, None, length=LAYERS)[0].astype(jnp.float32).sum())(x)

    row = P(None, "context")
    sharded = jax.shard_map(
        gradient, mesh=mesh, axis_names={"context"}, in_specs=(row, row), out_specs=row, check_vma=False
    )
    x = jax.ShapeDtypeStruct((1, LENGTH, HEADS, SIZE), jnp.bfloat16, sharding=NamedSharding(mesh, P(*row, "tensor")))
    ids = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32, sharding=NamedSharding(mesh, row))
    options = compiler_options(*GPU, *(FSDP if fsdp else ()), *DEVICELESS)
    with jax.set_mesh(mesh):
        return jax.jit(sharded).lower(x, ids).compile(compiler_options=options).as_text(), dict(mesh.shape)


def kernels(text: str) -> Counter:
    """Calls in the program by kind; those in a loop count once."""
    return Counter(re.findall(r'custom_call_target="(?:__cudnn\$|__gpu\$xla.gpu.)(fmha\w+|triton)"', text))


def branches(text: str) -> int:
    """In the loops over layers."""
    return len(re.findall(r" conditional\(.*op_name=\"[^\"]*/while/body/", text))


def moved(text: str, mesh: Mapping[str, int], kind: str) -> tuple[int, int]:
    """Of keys, values and their gradients: arrays that collectives of a kind move, and those beside no kernel."""
    collectives = [
        c for c in hlo.read(text, mesh).collectives if c.kind == kind and c.bytes >= LENGTH // CONTEXT * SIZE
    ]
    return sum(c.arrays for c in collectives), sum(c.arrays for c in collectives if not c.overlapped)


FORWARD, BACKWARD = "fmhaSoftmax", "fmhaSoftmaxBackward"


def test_all_transfers_of_a_ring_but_the_last_overlap_with_a_kernel() -> None:
    text, mesh = compiled(SequenceSharding(CONTEXT, 1, "ring"), "cudnn", fsdp=True)
    assert kernels(text) == {FORWARD: CONTEXT, BACKWARD: CONTEXT}
    assert branches(text) == 0
    # Keys with values in both passes, sums of their gradients in the second, and those on their way back.
    assert moved(text, mesh, "collective-permute") == (3 * (CONTEXT - 1) + 1, 1)


@pytest.mark.slow
def test_gathered_keys_of_whole_rows_have_three_calls_and_no_branch() -> None:
    text, mesh = compiled(SequenceSharding(CONTEXT, 1, "all_gather"), "cudnn")
    assert kernels(text) == {FORWARD: 3, BACKWARD: 3}
    assert branches(text) == 0
    # Forward the triangles run meanwhile, backward they run while gradients are scattered.
    assert moved(text, mesh, "all-gather") == (4, 2)
    assert moved(text, mesh, "reduce-scatter") == (2, 0)


@pytest.mark.slow
def test_documents_have_another_kernel_for_rows_that_do_not_fit() -> None:
    text, _ = compiled(SequenceSharding(CONTEXT, 1, "all_gather"), "cudnn", segments=True)
    assert kernels(text) == {FORWARD: 3, BACKWARD: 3, "triton": 9}
    assert branches(text) == 6


@pytest.mark.slow
def test_a_ring_by_pallas_has_no_branch_and_skips_keys_out_of_reach() -> None:
    text, mesh = compiled(SequenceSharding(CONTEXT, 1, "ring"), "pallas", segments=True, window=LENGTH // 16)
    steps = CONTEXT - 1
    assert kernels(text) == {"triton": 3 * steps}
    assert branches(text) == 0
    assert moved(text, mesh, "collective-permute") == (3 * (steps - 1) + 1, 1)


@pytest.mark.slow
def test_bidirectional_rows_have_one_call_on_gathered_keys() -> None:
    text, _ = compiled(SequenceSharding(CONTEXT, 0, "all_gather"), "cudnn", causal=False)
    assert kernels(text) == {FORWARD: 1, BACKWARD: 1}
    assert branches(text) == 0
