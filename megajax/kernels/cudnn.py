"""cuDNN's fused attention, forward and backward, called as XLA knows it (custom calls `__cudnn$fmha...`).

jax's own wrapper asks the local GPU what it can do, which is not there in deviceless compilation;
keeps the log-sum-exp without a name, so that recomputation runs the forward kernel twice; and gives no say in what its
backward kernel is handed. The calls below are the same to the letter: tests/kernels compares them with jax's.

Documents go in one of two ways. `forward` and `backward` hand over where each begins and how long it is, so that cuDNN
computes nothing between them; `masked_forward` and `masked_backward` hand over a mask [B, 1, S, S].

B rows, S positions, N query heads, K key-value heads (N a multiple of K), H head size, U size of a value head,
M documents a row at most.
"""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.kernels import pallas_attention
from megajax.kernels.mask import Mask

DOCUMENTS = 64
"""Documents of a row that are laid out for. cuDNN writes a log-sum-exp for each of them times each position."""
ELEMENT = {jnp.dtype(jnp.bfloat16): "BF16", jnp.dtype(jnp.float16): "F16"}
"""XLA's names of what it computes in."""
WIDEST_PADDED = 128
"""Up to here every GPU takes heads, but not all take values of another size than keys: the narrower get zeros."""


class _Call(NamedTuple):
    """What both kernels are told beside arrays."""

    scale: float
    mask_type: str
    window: int | None
    documents: int = 1
    """At most in a row; 1: rows are whole."""

    def config(self, q: Array, k: Array, *, backward: bool) -> str:
        """XLA's CudnnfMHABackendConfig for arrays laid out as [B, S, N, H]."""
        batch, queries, heads, _ = q.shape
        dimensions = [str(n) for n in (batch, heads, queries, k.shape[1])]
        scores = {
            "element_type": ELEMENT[q.dtype],
            "dimensions": dimensions,
            "tuple_shapes": [],
            "layout": {
                **{"dim_level_types": [], "dim_unique": [], "dim_ordered": []},
                "minor_to_major": ["3", "2", "1", "0"],
                "tiles": [],
                "element_size_in_bits": "0",
                "memory_space": "0",
                "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
                "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
                "dynamic_shape_metadata_prefix_bytes": "0",
            },
            "is_dynamic_dimension": [False] * 4,
        }
        inputs, mixed = ("0", "2"), ("0", "1")  # where batch and heads are: of q, k, v; of the scores
        if backward:
            matmuls = {
                "bmm1_grad_gemm1": ("2", "1", mixed, inputs),
                "bmm1_grad_gemm2": ("3", "1", mixed, inputs),
                "bmm2_grad_gemm1": ("2", "1", mixed, inputs),
                "bmm2_grad_gemm2": ("3", "3", inputs, inputs),
            }
        else:
            matmuls = {"bmm1": ("3", "3", inputs, inputs), "bmm2": ("3", "1", mixed, inputs)}
        config = {
            "algorithm": {
                "algo_id": "0",
                "math_type": "TENSOR_OP_MATH",
                "tuning_knobs": {"17": "1", "24": "0"},
                "is_cudnn_frontend": True,
                "workspace_size": "0",
            },
            "fmha_scale": self.scale,
            "intermediate_tensor_shape": scores,
            "is_flash_attention": True,
            "mask_type": self.mask_type,
            **{
                f"{name}_dot_dimension_numbers": {
                    "lhs_contracting_dimensions": [left],
                    "rhs_contracting_dimensions": [right],
                    "lhs_batch_dimensions": list(left_batch),
                    "rhs_batch_dimensions": list(right_batch),
                }
                for name, (left, right, left_batch, right_batch) in matmuls.items()
            },
            "dropout_rate": 0.0,
            "seed": 42,
            # cuDNN counts the query's own place.
            "sliding_window_length": 0 if self.window is None else self.window + 1,
            "max_seg_per_batch": self.documents,
            "is_paged_attention": False,
        }
        return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": config})


def _custom_call(target: str, shapes: list[jax.ShapeDtypeStruct], turned: int, config: str, operands: list) -> list:
    """The first `turned` results are [B, N, S, H] laid out as [B, S, N, H], and come back as that."""
    layouts = [(0, 2, 1, 3)] * turned + [tuple(range(len(shape.shape))) for shape in shapes[turned:]]
    found = jax.ffi.ffi_call(
        target, shapes, output_layouts=layouts, custom_call_api_version=2, legacy_backend_config=config
    )(*operands)
    return [x.transpose(0, 2, 1, 3) if place < turned else x for place, x in enumerate(found)]


def _turned(x: Array) -> jax.ShapeDtypeStruct:
    batch, length, heads, size = x.shape
    return jax.ShapeDtypeStruct((batch, heads, length, size), x.dtype)


WORKSPACE = jax.ShapeDtypeStruct((0,), jnp.uint8)


def _forward(call: _Call, q: Array, k: Array, v: Array, bias: list[Array], rest: list[Array]) -> tuple[Array, Array]:
    """bias: [] or one [B or 1, 1, S, S]; -> [B, S, N, U] and the statistics float32 [B * M, N, S]."""
    batch, queries, heads, _ = q.shape
    statistics = jax.ShapeDtypeStruct((batch * call.documents, heads, queries), jnp.float32)
    out = jax.ShapeDtypeStruct((batch, heads, queries, v.shape[-1]), q.dtype)
    target = f"__cudnn$fmha{'ScaleBias' if bias else ''}Softmax"
    config = call.config(q, k, backward=False)
    mixed, found, _ = _custom_call(target, [out, statistics, WORKSPACE], 1, config, [q, k, v, *bias, *rest])
    return mixed, found


def _backward(
    call: _Call, saved: tuple[Array, Array, Array, Array, Array], dout: Array, bias: list[Array], rest: list[Array]
) -> tuple[Array, Array, Array]:
    """saved: q, k, v, the output and the statistics."""
    q, k, v, out, statistics = saved
    target = f"__cudnn$fmha{'ScaleBias' if bias else ''}SoftmaxBackward"
    shapes = [_turned(q), _turned(k), _turned(v), WORKSPACE]
    operands = [q, k, v, statistics, dout, *bias, out, *rest]
    dq, dk, dv, _ = _custom_call(target, shapes, 3, call.config(q, k, backward=True), operands)
    return dq, dk, dv


class Documents(NamedTuple):
    """Of a batch, as cuDNN wants them: numbered through all rows."""

    number: Array
    """int32 [B, S]: of the document of each position."""
    place: Array
    """int32 [B, S]: of each position in its document."""
    lengths: Array
    """int32 [B, M], read as one line: positions of each document, 0 where there are no more."""
    begins: Array
    """int32 [B, M + 1], read as one line: first position of each document in the batch, behind them the batch's end."""
    fit: Array
    """bool []: there are at most B * M, in every row M, and none is in two pieces."""

    @classmethod
    def of(cls, segments: Array, most: int) -> "Documents":
        """segments int32 [B, S]: number of the document of each position; most: M."""
        batch, length = segments.shape
        new = jnp.concatenate([jnp.ones((batch, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
        flat = new.reshape(batch * length)
        number = jnp.cumsum(flat, dtype=jnp.int32) - 1
        places = jnp.arange(batch * length, dtype=jnp.int32)
        place = places - lax.cummax(jnp.where(flat, places, 0))
        lengths = jnp.zeros((batch * most,), jnp.int32).at[number].add(1, mode="drop")
        begins = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])
        begins = jnp.pad(begins, (0, batch - 1), constant_values=batch * length)
        fit = (new.sum(1) <= most).all() & (segments[:, 1:] >= segments[:, :-1]).all()
        shape = (batch, length)
        return cls(
            number.reshape(shape), place.reshape(shape), lengths.reshape(batch, most),
            begins.reshape(batch, most + 1), fit,
        )  # fmt: skip

    def operands(self, q: Array, k: Array) -> list[Array]:
        """Lengths of queries and keys, and where they begin, counted in numbers rather than positions."""
        starts = [self.begins * (x.shape[2] * x.shape[3]) for x in (q, k)]
        return [self.lengths, self.lengths, *starts]


def _of_one_size(q: Array, k: Array, v: Array, *, always: bool) -> tuple[Array, Array, Array]:
    """With zeros at the ends of narrower heads, where values may not have a size of their own."""
    size, wide = q.shape[-1], v.shape[-1]
    if size == wide or (max(size, wide) > WIDEST_PADDED and not always):
        return q, k, v
    return _widened(q, max(size, wide)), _widened(k, max(size, wide)), _widened(v, max(size, wide))


def _widened(x: Array, size: int) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])]) if x.shape[-1] < size else x


def _type(mask: Mask, *, documents: bool) -> str:
    words = ["PADDING"] * documents + ["CAUSAL"] * mask.causal
    return "_".join(words) or "NO_MASK"


def _spread(x: Array, documents: Documents) -> Array:
    """float32 [B, N, S], place in row -> [B * M, N, S], document and place in it."""
    _, heads, length = x.shape
    empty = jnp.zeros((documents.lengths.size, heads, length), x.dtype)
    return empty.at[documents.number, :, documents.place].set(x.transpose(0, 2, 1), mode="drop")


def _ragged(q: Array, v: Array, mask: Mask) -> int:
    """Documents a row that are laid out for, 1 for whole rows; 0 where cuDNN's 32-bit counts would not reach."""
    if mask.query_segments is None:
        return 1
    batch, length, heads, size = q.shape
    return min(DOCUMENTS, length) if batch * length * heads * max(size, v.shape[-1]) < 2**31 else 0


def forward(q: Array, k: Array, v: Array, mask: Mask, *, scale: float) -> tuple[Array, Array]:
    """softmax(q k^T * scale) v over the keys the mask shows, never holding the scores (Dao 2023).

    q [B, S, N, H], k [B, S, K, H], v [B, S, K, U] in bfloat16 or float16, whole rows in order
    -> [B, S, N, U] in q's dtype, and the log-sum-exp of each query's scores, float32 [B, N, S].
    Not to be differentiated: `backward` is its gradient. Rows with more than DOCUMENTS documents, or with one in two
    pieces, have the whole batch computed by the Pallas kernel: both are in the program.
    """
    most, wide = _ragged(q, v, mask), v.shape[-1]
    if most == 0:
        return pallas_attention.forward(q, k, v, mask, scale=scale)
    call = _Call(scale, _type(mask, documents=mask.query_segments is not None), mask.window, most)
    if mask.query_segments is None:
        out, statistics = _forward(call, *_of_one_size(q, k, v, always=False), [], [])
        return out[..., :wide], statistics
    documents = Documents.of(mask.query_segments, most)

    def ragged() -> tuple[Array, Array]:
        # cuDNN counts where heads begin once for queries and output, once for keys and values.
        alike = _of_one_size(q, k, v, always=True)
        out, statistics = _forward(call, *alike, [], documents.operands(*alike[:2]))
        return out[..., :wide], statistics[documents.number, :, documents.place].transpose(0, 2, 1)

    return lax.cond(documents.fit, ragged, lambda: pallas_attention.forward(q, k, v, mask, scale=scale))


def backward(
    q: Array, k: Array, v: Array, mask: Mask, out: Array, lse: Array, dout: Array, *, scale: float
) -> tuple[Array, Array, Array]:
    """Gradients with respect to q, k and v, from the output [B, S, N, U], its log-sum-exp [B, N, S] and its gradient.

    out and lse may be those of a softmax over further keys too: then this is those keys' share (Liu et al. 2023).
    """
    most, size, wide = _ragged(q, v, mask), q.shape[-1], v.shape[-1]
    if most == 0:
        return pallas_attention.backward(q, k, v, mask, out, lse, dout, scale=scale)
    call = _Call(scale, _type(mask, documents=mask.query_segments is not None), mask.window, most)

    def fused(statistics: Array, documents: Documents | None) -> tuple[Array, Array, Array]:
        a, b, c = _of_one_size(q, k, v, always=documents is not None)
        ends = [_widened(x, c.shape[-1]) for x in (out, dout.astype(q.dtype))]
        rest = [] if documents is None else documents.operands(a, b)
        dq, dk, dv = _backward(call, (a, b, c, ends[0], statistics), ends[1], [], rest)
        return dq[..., :size], dk[..., :size], dv[..., :wide]

    if mask.query_segments is None:
        return fused(lse, None)
    documents = Documents.of(mask.query_segments, most)
    return lax.cond(
        documents.fit,
        lambda: fused(_spread(lse, documents), documents),
        lambda: pallas_attention.backward(q, k, v, mask, out, lse, dout, scale=scale),
    )


def masked_forward(q: Array, k: Array, v: Array, mask: Mask, *, scale: float) -> tuple[Array, Array]:
    """As `forward`, with documents in a mask [B, 1, S, S] in q's dtype, of which every score has a number added."""
    if mask.query_segments is None:
        return forward(q, k, v, mask, scale=scale)
    call = _Call(scale, _type(mask, documents=False), None)
    out, lse = _forward(call, *_of_one_size(q, k, v, always=False), [_added(mask, q.dtype)], [])
    return out[..., : v.shape[-1]], lse


def masked_backward(
    q: Array, k: Array, v: Array, mask: Mask, out: Array, lse: Array, dout: Array, *, scale: float
) -> tuple[Array, Array, Array]:
    """As `backward`, with documents in a mask [B, 1, S, S]."""
    if mask.query_segments is None:
        return backward(q, k, v, mask, out, lse, dout, scale=scale)
    a, b, c = _of_one_size(q, k, v, always=False)
    ends = [_widened(x, c.shape[-1]) for x in (out, dout.astype(q.dtype))]
    call = _Call(scale, _type(mask, documents=False), None)
    dq, dk, dv = _backward(call, (a, b, c, ends[0], lse), ends[1], [_added(mask, q.dtype)], [])
    return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]]


def _added(mask: Mask, dtype: Any) -> Array:
    """[B, 1, S, S]: 0 where a query sees a key; where not, a number whose exponential is 0 beside any other score's.

    Not the lowest there is: cuDNN subtracts such numbers from each other.
    """
    lowest = -(2.0**41) if jnp.dtype(dtype) == jnp.bfloat16 else -(2.0**15)
    return jnp.where(mask.visible()[:, None], 0, lowest).astype(dtype)
