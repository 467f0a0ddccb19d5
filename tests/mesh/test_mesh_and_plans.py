"""Axis sizes, the tables from logical to mesh axes, and the plans made of them."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.mesh.config import MESH_AXES, ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan, Rules

pytestmark = pytest.mark.smoke


def test_the_mesh_has_all_axes_with_tensor_innermost():
    mesh = build_mesh(ParallelConfig(tensor=2))
    assert mesh.axis_names == MESH_AXES == ("pipeline", "replica", "data", "expert", "context", "tensor")
    assert dict(mesh.shape) == {"pipeline": 1, "replica": 1, "data": 4, "expert": 1, "context": 1, "tensor": 2}
    neighbours = mesh.devices[0, 0, 1, 0, 0]
    assert [device.id for device in neighbours] == [2, 3]


class VirtualDevice:
    """A virtual device, for meshes larger than the tests' eight devices."""

    def __init__(self, number: int):
        self.id, self.process_index, self.platform, self.device_kind = number, number // 8, "gpu", "virtual"


def groups(mesh: jax.sharding.Mesh, axis: str) -> list[list[int]]:
    """Ids of the devices that communicate along an axis."""
    ids = np.moveaxis(mesh.device_ids, mesh.axis_names.index(axis), -1)
    return sorted(ids.reshape(-1, ids.shape[-1]).tolist())


def test_groups_of_sixteen_devices_match_megatron():
    """Two-way tensor, four-way pipeline, 16 GPUs: the example of Megatron-LM's initialize_model_parallel."""
    mesh = build_mesh(ParallelConfig(tensor=2, pipeline=4), [VirtualDevice(number) for number in range(16)])
    assert groups(mesh, "tensor") == [[first, first + 1] for first in range(0, 16, 2)]
    assert groups(mesh, "data") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups(mesh, "pipeline") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_groups_of_shards_are_within_nodes(sharding):
    """A group of parallel.shards x tensor devices is one node of 8, and `replica` connects those of equal places."""
    parallel = ParallelConfig(tensor=2, pipeline=2, data_sharding=sharding, shards=4)
    mesh = build_mesh(parallel, [VirtualDevice(number) for number in range(32)])
    assert dict(mesh.shape) == {"pipeline": 2, "replica": 2, "data": 4, "expert": 1, "context": 1, "tensor": 2}
    assert groups(mesh, "data") == [
        [*range(first, first + 8, 2)] for node in range(0, 32, 8) for first in (node, node + 1)
    ]
    assert groups(mesh, "replica") == [[n, n + 8] for n in (*range(8), *range(16, 24))]
    plan = Plan.of(parallel)
    assert plan.compute.spec(("batch", "seq")) == P(("replica", "data", "expert"), "context")
    assert plan.optimizer.spec(("embed", "mlp")) == P(("data", "expert", "context"), "tensor")
    assert plan == Plan.of(ParallelConfig(tensor=2, data_sharding=sharding)), "shards change the mesh alone"


def test_one_process_may_leave_devices_unused():
    assert build_mesh(ParallelConfig(data=3, tensor=2)).size == 6
    assert build_mesh(ParallelConfig(), jax.devices()[:2]).shape["data"] == 2


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            ParallelConfig(data=5, tensor=2),
            "parallel: the axes multiply to 10 devices (data 5 x tensor 2), there are 8",
        ),
        (ParallelConfig(data=5, tensor=2), "parallel.data can be at most 4, or give more devices"),
        (ParallelConfig(pipeline=4, tensor=4), "make parallel.pipeline or parallel.tensor smaller, or give more"),
        (ParallelConfig(tensor=3), "parallel.tensor: 8 devices are not divisible by 3"),
        (ParallelConfig(pipeline=3), "parallel.pipeline: 8 devices are not divisible by 3"),
        (ParallelConfig(pipeline=3), "parallel.data=2 uses 6 of them"),
        (ParallelConfig(tensor=0), "parallel.tensor: must be at least 1, got 0"),
        (ParallelConfig(virtual_stages=2), "parallel.virtual_stages: 2 virtual stages need a pipeline"),
        (ParallelConfig(pipeline=2, schedule="interleaved"), "interleaved needs parallel.virtual_stages > 1"),
        (ParallelConfig(pipeline=4, layers=(1, 2)), "parallel.layers: 1,2 must be 4 numbers above 0"),
        (ParallelConfig(pipeline=2, layers=(0, 4)), "parallel.layers.0: must be at least 1, got 0"),
        (ParallelConfig(pipeline=2, layers=(4,)), "4 must be 2 numbers above 0, one for each of parallel.pipeline=2"),
        (ParallelConfig(pipeline=2, virtual_stages=0), "parallel.virtual_stages: must be at least 1, got 0"),
        (ParallelConfig(pipeline=2, loss_wait=2), "parallel.loss_wait: expected one of 0, 1, got 2"),
        (ParallelConfig(sequence=True), "parallel.sequence: sequence parallelism needs parallel.tensor > 1"),
        (ParallelConfig(data=8, shards=0), "parallel.shards: must be at least 1, got 0"),
        (ParallelConfig(data=8, shards=3), "parallel.shards: groups of 3 devices do not divide parallel.data=8"),
        (ParallelConfig(tensor=2, shards=8), "parallel.shards: groups of 8 devices do not divide parallel.data=4"),
        (ParallelConfig(tensor=2, shards=8), "use 1 or 2, or none for one group"),
        (ParallelConfig(shards=4, data_sharding="replicate"), "shard nothing with parallel.data_sharding=replicate"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(parallel, message):
    with pytest.raises(UserError) as refused:
        build_mesh(parallel)
    assert message in str(refused.value)


def test_sizes_without_devices_at_hand():
    parallel = ParallelConfig(tensor=4)
    assert parallel.sizes(32) == {"pipeline": 1, "replica": 1, "data": 8, "expert": 1, "context": 1, "tensor": 4}
    assert parallel.without_data() == 4
    assert parallel.data_size(2) == 1
    assert next(str(p) for p in parallel.device_problems(2)).startswith(
        ": the axes multiply to 4 devices (tensor 4), there"
    )
    assert parallel.device_problems(12) == []


def test_specs_from_logical_axes():
    rules = Rules()
    assert rules.spec(("vocab", "embed")) == P(("pipeline", "tensor"), None)
    assert rules.spec((None, "batch", "seq")) == P(None, ("replica", "data", "expert"), "context")
    assert rules.spec(("batch", "heads"), keep=("data", "tensor")) == P("data", "tensor")
    assert rules.spec(("batch", "heads"), keep=()) == P(None, None)
    with pytest.raises(ValueError, match="mesh axis on two dimensions"):
        rules.spec(("heads", "mlp"))
    with user_error():
        rules.spec(("hedas",))


def test_plans_differ_in_the_sharding_of_embed():
    axes, sharded = ("embed", "mlp"), P(("data", "expert", "context"), "tensor")
    by_axis = {}
    for sharding in ("replicate", "zero1", "fsdp"):
        plan = Plan.of(ParallelConfig(data_sharding=sharding))
        layer = plan.rules_in_step(("layer", *axes))
        by_axis[sharding] = [rules.spec(axes) for rules in (plan.compute, layer, plan.params, plan.optimizer)]
        # Tables outside the stack are used whole at once: gathering them later has no advantage.
        assert plan.rules_in_step(("vocab", "embed")) == plan.compute
    gathered = P(None, "tensor")
    assert by_axis == {
        "replicate": [gathered] * 4,
        "zero1": [gathered, gathered, sharded, sharded],
        "fsdp": [gathered, sharded, sharded, sharded],
    }


def test_sequence_parallelism_shards_only_the_residual_stream():
    plain, sequence_parallel = (Plan.of(ParallelConfig(tensor=2, sequence=flag)).compute for flag in (False, True))
    residual = ("batch", "seq_residual", "embed")
    assert plain.spec(residual) == P(("replica", "data", "expert"), "context", None)
    assert sequence_parallel.spec(residual) == P(("replica", "data", "expert"), ("context", "tensor"), None)
    assert sequence_parallel.spec(("batch", "seq", "heads")) == plain.spec(("batch", "seq", "heads"))
    assert hash(Plan.of(ParallelConfig())) == hash(Plan.of(ParallelConfig()))
