"""What the reader finds in compiled programs with known collectives, and in texts with asynchronous ones."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec

from megajax.planning.compiled.hlo import CompiledProgram, Contents, arrays, groups_of, read, size
from megajax.planning.train_step import grouped

AXES = {"pipeline": 2, "data": 2, "tensor": 2}
BOX = 16 * 32 * 4
"""Bytes of the float32 [16, 32] of the test program."""


def nested(x: Array, n: Array) -> Array:
    """Every kind of collective, inside and outside of loops; x [16, 32] float32."""

    def inner(_: int, x: Array) -> Array:
        return x + lax.all_gather(x, "tensor", axis=0, tiled=True).sum(0, keepdims=True)

    def outer(_: int, x: Array) -> Array:
        x = lax.fori_loop(0, 5, inner, x)
        x = lax.ppermute(x, "pipeline", [(0, 1), (1, 0)])
        x = lax.cond(n > 3, lambda x: lax.psum(x, ("data", "tensor")), lambda x: x, x)
        repeated = lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(lax.psum(c[1], "data"))), (0, x))
        return repeated[1] @ jnp.ones((32, 32))

    x = lax.fori_loop(0, 3, outer, x)
    x = lax.all_to_all(x, "data", 0, 0, tiled=True)
    return lax.psum_scatter(x, ("pipeline", "tensor"), scatter_dimension=0, tiled=True)


@pytest.fixture(scope="module")
def contents() -> Contents:
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * 3)
    everywhere, prefix = PartitionSpec(), PartitionSpec(("pipeline", "tensor"))
    mapped = jax.shard_map(nested, mesh=mesh, in_specs=(everywhere, everywhere), out_specs=prefix, check_vma=False)
    x, n = jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    return read(jax.jit(mapped).lower(x, n).compile().as_text(), AXES)


def test_every_collective_has_its_axis_and_bytes_and_count_and_place(contents: Contents) -> None:
    names = ("trips", "count", "bytes_once", "bytes", "inside_loop", "conditional")
    rows = grouped(contents.collectives)
    actual = {(row["kind"], row["axis"]): tuple(row[name] for name in names) for row in rows}
    assert actual == {
        ("all-to-all", "data"): ([], 1, BOX, BOX, False, False),
        ("reduce-scatter", "pipeline+tensor"): ([], 1, BOX, BOX, False, False),
        ("all-gather", "tensor"): ([3, 5], 15, 2 * BOX, 30 * BOX, True, False),
        ("collective-permute", "pipeline"): ([3], 3, BOX, 3 * BOX, True, False),
        ("all-reduce", "data+tensor"): ([3], 3, BOX, 3 * BOX, True, True),
        ("all-reduce", "data"): ([3, None], None, BOX, None, True, False),
    }
    assert not any(op.overlapped for op in contents.collectives), "nothing is asynchronous on CPU devices"
    assert len(contents.collectives) == 6


def test_loops_by_number_with_their_matmuls(contents: Contents) -> None:
    loops = [(loop.place.name, loop.place.trips, loop.matmuls) for loop in contents.loops]
    assert loops == [("", (), 0), ("1", (3,), 1), ("1.1", (3, 5), 0), ("1.2", (3, None), 0)]


def test_a_combined_collective_has_the_bytes_of_all() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def sums(a: Array, b: Array) -> tuple[Array, Array]:
        return lax.psum((a, b), "data")

    specs = PartitionSpec()
    mapped = jax.shard_map(sums, mesh=mesh, in_specs=(specs, specs), out_specs=(specs, specs), check_vma=False)
    like = jax.ShapeDtypeStruct((128,), jnp.float32), jax.ShapeDtypeStruct((64, 4), jnp.float32)
    (row,) = grouped(read(jax.jit(mapped).lower(*like).compile().as_text(), {"data": 8}).collectives)
    assert (row["kind"], row["axis"], row["count"], row["bytes"]) == ("all-reduce", "data", 1, (128 + 256) * 4)


def test_one_device_has_no_collectives() -> None:
    mesh = jax.make_mesh((1, 8), ("one", "eight"), axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(
        lambda x: lax.psum(x, "one"), mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    text = jax.jit(mapped).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile().as_text()
    assert not read(text, {"one": 1, "eight": 8}).collectives


ASYNCHRONOUS = Path(__file__).with_name("asynchronous.hlo.txt").read_text(encoding="utf-8")
ROWS = 8 * 64 * 2


def test_overlap_with_matmuls() -> None:
    actual = read(ASYNCHRONOUS, {"pipeline": 4, "tensor": 2})
    rows = [
        (op.kind, op.groups.name, op.place.name, op.overlapped, op.place.runs(), op.bytes) for op in actual.collectives
    ]
    assert rows == [
        ("ragged-all-to-all", "pipeline+tensor", "", False, 1, ROWS),
        ("collective-permute", "pipeline", "1", True, 10, ROWS),
        ("all-gather", "tensor", "1.1", False, 60, 2 * ROWS),
        ("all-reduce", "tensor", "1.1", False, 60, ROWS),
        ("reduce-scatter", "tensor", "1", True, 10, ROWS),
    ], "around the loop over layers; run in one piece; nothing but a negation in between; around the fused matmul"
    assert [(loop.place.name, loop.matmuls) for loop in actual.loops] == [("", 0), ("1", 1), ("1.1", 1)]


def test_shapes() -> None:
    shape = "(f32[2,3]{1,0}, /*index=1*/s32[], (bf16[4]{0:T(8,128)S(1)}, pred[<=8]))"
    assert arrays(shape) == [("f32", 6), ("s32", 1), ("bf16", 4), ("pred", 8)]
    sizes = {"bf16[3,5]": 30, "f8e4m3fn[7]": 7, "s4[3]": 2, "pred[2,2]": 4, "c64[2]": 16, "token[]": 0, "u32[]": 4}
    assert {shape: size(shape) for shape in sizes} == sizes


def test_other_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="ENTRY"):
        CompiledProgram.read("module @jit_step { }")


MESH = {"pipeline": 2, "data": 4, "expert": 1, "context": 1, "tensor": 2}
NAMED = "mesh['pipeline'=2,'data'=4,'expert'=1,'context'=1,'tensor'=2]"

FORMS = {
    "innermost axis, listed": ("replica_groups={{0,1},{2,3},{4,5},{6,7},{8,9},{10,11},{12,13},{14,15}}", "tensor", 2),
    "middle axis, listed": ("replica_groups={{0,2,4,6},{1,3,5,7},{8,10,12,14},{9,11,13,15}}", "data", 4),
    "members in another order": ("replica_groups={{6,0,4,2},{1,5,3,7},{14,8,10,12},{9,11,13,15}}", "data", 4),
    "everyone, not listed": ("replica_groups={}", "pipeline+data+tensor", 16),
    "innermost axis, counted": ("replica_groups=[8,2]<=[16]", "tensor", 2),
    "middle axis, counted": ("replica_groups=[4,4]<=[2,4,2]T(0,2,1)", "data", 4),
    "outermost axis, counted": ("replica_groups=[8,2]<=[2,8]T(1,0)", "pipeline", 2),
    "outer and inner axis, counted": ("replica_groups=[4,4]<=[2,4,2]T(1,0,2)", "pipeline+tensor", 4),
    "half an axis, counted": ("replica_groups=[8,2]<=[2,4,2]T(0,2,1)", "data (part)", 2),
    "one axis, named": (f"replica_groups={NAMED} {{'tensor'}}", "tensor", 2),
    "two axes, named": (f"replica_groups={NAMED} {{'data','tensor'}}", "data+tensor", 8),
    "an axis of one device, named": (f"replica_groups={NAMED} {{'expert'}}", "", 1),
    "the outer half of an axis, named": (f"replica_groups={NAMED} {{'data':(1)2}}", "data (part)", 2),
    "the whole axis by halves, named": (f"replica_groups={NAMED} {{'data':(2)2,'data':(1)2}}", "data", 4),
    "another mesh's names": ("replica_groups=mesh['a'=8,'b'=2] {'a'}", "pipeline+data", 8),
    "named, in another order": ("replica_groups=mesh['a'=8,'b'=2], device_ids=([2,8]T(1,0)) {'b'}", "pipeline", 2),
    "ring": ("source_target_pairs={{0,8},{8,0},{1,9},{9,1}}", "pipeline", 2),
    "open chain": ("source_target_pairs={{0,2},{2,4},{4,6},{8,10},{10,12},{12,14}}", "data", 4),
    "across two axes": ("source_target_pairs={{0,3},{3,0}}", "data+tensor", 8),
    "nothing moves": ("source_target_pairs={{0,0},{1,1}}", "", 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_axes(form: str) -> None:
    attributes, name, size = FORMS[form]
    groups = groups_of(f"), channel_id=1, {attributes}, use_global_device_ids=true, dimensions={{0}}", MESH)
    assert (groups.name, groups.size) == (name, size)


def test_an_unknown_form_is_an_error() -> None:
    with pytest.raises(ValueError, match="can't be read"):
        groups_of("), replica_groups=somehow", MESH)
