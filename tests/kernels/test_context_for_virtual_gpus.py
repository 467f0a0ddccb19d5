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
STEPS = CONTEXT - 1
CASES: dict[str, tuple[SequenceSharding, str, dict[str, Any], dict[str, int], int, dict[str, tuple[int, int]]]] = {
    # Keys with values in both passes, sums of their gradients in the second, and those on their way back.
    "a ring, of which all transfers but the last overlap with a kernel": (
        *(SequenceSharding(CONTEXT, 1, "ring"), "cudnn", {"fsdp": True}, {FORWARD: CONTEXT, BACKWARD: CONTEXT}),
        *(0, {"collective-permute": (3 * STEPS + 1, 1)}),
    ),
    # Forward the triangles run meanwhile, backward they run while gradients are scattered.
    "gathered keys of whole rows": (
        *(SequenceSharding(CONTEXT, 1, "all_gather"), "cudnn", {}, {FORWARD: 3, BACKWARD: 3}),
        *(0, {"all-gather": (4, 2), "reduce-scatter": (2, 0)}),
    ),
    "documents, with another kernel for rows that do not fit": (
        *(SequenceSharding(CONTEXT, 1, "all_gather"), "cudnn", {"segments": True}),
        *({FORWARD: 3, BACKWARD: 3, "triton": 9}, 6, {}),
    ),
    "a ring by pallas that skips keys out of reach": (
        *(SequenceSharding(CONTEXT, 1, "ring"), "pallas", {"segments": True, "window": LENGTH // 16}),
        *({"triton": 3 * STEPS}, 0, {"collective-permute": (3 * (STEPS - 1) + 1, 1)}),
    ),
    "rows both ways": (
        *(SequenceSharding(CONTEXT, 0, "all_gather"), "cudnn", {"causal": False}, {FORWARD: 1, BACKWARD: 1}, 0, {}),
    ),
}
"""Sharding, kernel and options -> kernels, branches, and by collective the arrays moved, and those beside no kernel."""


@pytest.mark.parametrize(
    "name", [c if n == 0 else pytest.param(c, marks=pytest.mark.slow) for n, c in enumerate(CASES)]
)
def test_kernels_branches_and_transfers(name: str) -> None:
    sharding, kernel, options, expected, conditionals, transfers = CASES[name]
    text, mesh = compiled(sharding, kernel, **options)
    assert kernels(text) == expected
    assert branches(text) == conditionals
    assert {kind: moved(text, mesh, kind) for kind in transfers} == transfers
