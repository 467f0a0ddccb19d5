"""cuDNN's fused attention, forward and backward, as XLA custom calls (`__cudnn$fmha...`).

jax's own wrapper is not used for three reasons: it queries the local GPU, which deviceless compilation does not have;
it does not name the log-sum-exp, so recomputation runs the forward kernel twice; and it does not expose the backward
kernel's inputs. The calls below are identical to jax's, which tests/kernels checks.

Documents are passed in one of two ways. `forward` and `backward` pass the start and length of each document, so cuDNN
skips the scores between documents. `masked_forward` and `masked_backward` pass a mask [B, 1, S, S]. For padded rows,
all four pass the lengths, so cuDNN skips the padding.

Without documents, keys may come from another sequence, with T positions.

B rows, S positions, N query heads, K key-value heads (N a multiple of K), H head size, U size of a value head,
M maximum number of documents in a row.
"""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.kernels.attention import pallas as pallas_attention
from megajax.kernels.attention.mask import Mask

DOCUMENTS = 64
"""Maximum number of documents in a row. cuDNN writes one log-sum-exp per document and position."""
ELEMENT = {jnp.dtype(jnp.bfloat16): "BF16", jnp.dtype(jnp.float16): "F16"}
"""XLA's names of the dtypes."""
LARGEST_PADDED = 128
"""Head size that every GPU supports. Up to it, smaller value heads are zero-padded, since not all GPUs support them."""


class _Call(NamedTuple):
    """The static arguments of both kernels."""

    scale: float
    mask_type: str
    window: int | None
    documents: int = 1
    """Maximum number of documents in a row."""

    def config(self, q: Array, k: Array, *, backward: bool) -> str:
        """XLA's CudnnfMHABackendConfig for arrays with the layout [B, S, N, H]."""
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
        inputs, mixed = ("0", "2"), ("0", "1")  # dimensions of batch and heads, in q, k, v and in the scores
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
                    "lhs_contracting_dimensions": [lhs],
                    "rhs_contracting_dimensions": [rhs],
                    "lhs_batch_dimensions": list(lhs_batch),
                    "rhs_batch_dimensions": list(rhs_batch),
                }
                for name, (lhs, rhs, lhs_batch, rhs_batch) in matmuls.items()
            },
            "dropout_rate": 0.0,
            "seed": 42,
            # cuDNN counts the query's own position.
            "sliding_window_length": 0 if self.window is None else self.window + 1,
            "max_seg_per_batch": self.documents,
            "is_paged_attention": False,
        }
        return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": config})


def _custom_call(target: str, shapes: list[jax.ShapeDtypeStruct], transposed: int, config: str, operands: list) -> list:
    """Calls the kernel. The first `transposed` results are [B, N, S, H] in memory and are returned as [B, S, N, H]."""
    layouts = [(0, 2, 1, 3)] * transposed + [tuple(range(len(shape.shape))) for shape in shapes[transposed:]]
    results = jax.ffi.ffi_call(
        target, shapes, output_layouts=layouts, custom_call_api_version=2, legacy_backend_config=config
    )(*operands)
    return [x.transpose(0, 2, 1, 3) if number < transposed else x for number, x in enumerate(results)]


def _transposed(x: Array) -> jax.ShapeDtypeStruct:
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
    mixed, statistics, _ = _custom_call(target, [out, statistics, WORKSPACE], 1, config, [q, k, v, *bias, *rest])
    return mixed, statistics


def _backward(
    call: _Call, arrays: tuple[Array, ...], bias: list[Array], parts: "Documents | Padding | None"
) -> tuple[Array, Array, Array]:
    """arrays: q, k, v, the output, its statistics and its gradient; -> gradients of q, k and v."""
    q, k, v, out, statistics, dout = arrays
    size, value_size = q.shape[-1], v.shape[-1]
    q, k, v = _same_head_size(q, k, v, always=isinstance(parts, Documents))
    out, dout = (_pad_heads(x, v.shape[-1]) for x in (out, dout.astype(q.dtype)))
    target = f"__cudnn$fmha{'ScaleBias' if bias else ''}SoftmaxBackward"
    shapes = [_transposed(q), _transposed(k), _transposed(v), WORKSPACE]
    operands = [q, k, v, statistics, dout, *bias, out, *([] if parts is None else parts.operands(q, k))]
    dq, dk, dv, _ = _custom_call(target, shapes, 3, call.config(q, k, backward=True), operands)
    return dq[..., :size], dk[..., :size], dv[..., :value_size]


class Documents(NamedTuple):
    """The documents of a batch, numbered through all rows, as cuDNN expects them."""

    number: Array
    """int32 [B, S]: document of each position."""
    position: Array
    """int32 [B, S]: position of each token in its document."""
    lengths: Array
    """int32 [B, M], flat: length of each document, 0 after the last one."""
    starts: Array
    """int32 [B, M + 1], flat: first position of each document in the batch, then the end of the batch."""
    fit: Array
    """bool []: no row has more than M documents, and every document is contiguous."""

    @classmethod
    def of(cls, segments: Array, maximum: int) -> "Documents":
        """segments int32 [B, S]: document of each position; maximum: M."""
        batch, length = segments.shape
        new = jnp.concatenate([jnp.ones((batch, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
        flat = new.reshape(batch * length)
        number = jnp.cumsum(flat, dtype=jnp.int32) - 1
        positions = jnp.arange(batch * length, dtype=jnp.int32)
        position = positions - lax.cummax(jnp.where(flat, positions, 0))
        lengths = jnp.zeros((batch * maximum,), jnp.int32).at[number].add(1, mode="drop")
        starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])
        starts = jnp.pad(starts, (0, batch - 1), constant_values=batch * length)
        fit = (new.sum(1) <= maximum).all() & (segments[:, 1:] >= segments[:, :-1]).all()
        shape = (batch, length)
        return cls(
            number.reshape(shape), position.reshape(shape), lengths.reshape(batch, maximum),
            starts.reshape(batch, maximum + 1), fit,
        )  # fmt: skip

    def operands(self, q: Array, k: Array) -> list[Array]:
        """Lengths of the documents of queries and of keys, and their starts, counted in elements."""
        starts = [self.starts * (x.shape[2] * x.shape[3]) for x in (q, k)]
        return [self.lengths, self.lengths, *starts]


class Padding(NamedTuple):
    """Rows of one text each, followed by padding, as cuDNN expects them."""

    queries: Array
    """bool [B, S]: queries that see a key."""
    keys: Array
    """bool [B, T]: keys that are not padding."""
    lengths: tuple[Array, Array]
    """int32 [B] each: number of these queries and keys, at least 1: cuDNN before 9.25 returns NaN for empty rows."""
    fit: Array
    """bool []: in every row, padding comes last."""

    @classmethod
    def of(cls, segments: Array, queries: int, window: int | None = None) -> "Padding":
        """segments int32 [B, T]: 0 for padding; queries: S; window: queries after the text may see padding only."""
        keys = segments != 0
        count = keys.sum(1, dtype=jnp.int32)
        seeing = jnp.where(count > 0, queries if window is None else jnp.minimum(count + window, queries), 0)
        fit = (keys[:, :-1] | ~keys[:, 1:]).all()
        lengths = jnp.maximum(seeing, 1), jnp.maximum(count, 1)
        return cls(jnp.arange(queries)[None] < seeing[:, None], keys, lengths, fit)

    def operands(self, q: Array, k: Array) -> list[Array]:
        """Lengths of the rows of queries and of keys."""
        del q, k
        return list(self.lengths)


def _same_head_size(q: Array, k: Array, v: Array, *, always: bool) -> tuple[Array, Array, Array]:
    """Zero-pads the smaller heads if keys and values must have the same head size."""
    size = max(q.shape[-1], v.shape[-1])
    if q.shape[-1] == v.shape[-1] or (size > LARGEST_PADDED and not always):
        return q, k, v
    return _pad_heads(q, size), _pad_heads(k, size), _pad_heads(v, size)


def _pad_heads(x: Array, size: int) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])]) if x.shape[-1] < size else x


def _mask_type(mask: Mask, *, lengths: bool) -> str:
    parts = ["PADDING"] * lengths + ["CAUSAL"] * mask.causal
    return "_".join(parts) or "NO_MASK"


def _by_document(x: Array, documents: Documents) -> Array:
    """float32 [B, N, S] of positions in rows -> [B * M, N, S] of positions in documents."""
    _, heads, length = x.shape
    empty = jnp.zeros((documents.lengths.size, heads, length), x.dtype)
    return empty.at[documents.number, :, documents.position].set(x.transpose(0, 2, 1), mode="drop")


def _maximum_documents(q: Array, v: Array, mask: Mask) -> int:
    """M, or 1 without documents; 0 where cuDNN's 32-bit offsets would overflow."""
    if mask.query_segments is None:
        return 1
    batch, length, heads, size = q.shape
    return min(DOCUMENTS, length) if batch * length * heads * max(size, v.shape[-1]) < 2**31 else 0


UNSEEN = 1e9
"""Log-sum-exp that stands for -inf in the backward kernel: it makes all weights 0."""


def _padded_forward(q: Array, k: Array, v: Array, mask: Mask, padding: Padding, scale: float) -> tuple[Array, Array]:
    call = _Call(scale, _mask_type(mask, lengths=True), mask.window)
    out, lse = _forward(call, *_same_head_size(q, k, v, always=False), [], padding.operands(q, k))
    out = jnp.where(padding.queries[:, :, None, None], out[..., : v.shape[-1]], 0)
    return out, jnp.where(padding.queries[:, None], lse, -jnp.inf)


def _padded_backward(
    arrays: tuple[Array, ...], mask: Mask, padding: Padding, scale: float
) -> tuple[Array, Array, Array]:
    """arrays: q, k, v, the output, its log-sum-exp and its gradient."""
    q, k, v, out, lse, dout = arrays
    call = _Call(scale, _mask_type(mask, lengths=True), mask.window)
    query_mask, key_mask = padding.queries[:, :, None, None], padding.keys[:, :, None, None]
    arrays = q, k, v, out, jnp.where(padding.queries[:, None], lse, UNSEEN), jnp.where(query_mask, dout, 0)
    dq, dk, dv = _backward(call, arrays, [], padding)
    return jnp.where(query_mask, dq, 0), jnp.where(key_mask, dk, 0), jnp.where(key_mask, dv, 0)


class Rectangle(NamedTuple):
    """The first queries of a chunk and the keys before the chunk that they see, at most those of one document."""

    queries: Array
    """int32 [B]: number of queries; 0 if they see no key."""
    first: Array | None
    """int32 [B]: the first key; None: 0."""
    keys: Array
    """int32 [B]: number of keys."""
    fit: Array | None
    """bool []: documents are contiguous and ascending, padding comes last; None: no segments."""

    @classmethod
    def of(cls, mask: Mask, rows: int) -> "Rectangle":
        """mask: causal, all queries at the position of the last key before the chunk, or -1; whole rows of keys."""
        length, start = mask.query_index.shape[0], mask.query_index[0] + 1
        if mask.query_segments is None or mask.key_segments is None:
            keys = jnp.full((rows,), start, jnp.int32)
            return cls(jnp.where(keys > 0, length, 0), None, keys, None)
        if mask.padded:
            text = mask.key_segments != 0
            keys = jnp.minimum(text.sum(1, dtype=jnp.int32), start)
            return cls(jnp.where(keys > 0, length, 0), None, keys, (text[:, :-1] | ~text[:, 1:]).all())
        document = mask.query_segments[:, :1]
        before = (mask.key_segments == document) & (mask.key_index < start)[None]
        keys = before.sum(1, dtype=jnp.int32)
        queries = (mask.query_segments == document).sum(1, dtype=jnp.int32)
        fit = (mask.key_segments[:, 1:] >= mask.key_segments[:, :-1]).all()
        return cls(jnp.where(keys > 0, queries, 0), start - keys, keys, fit)

    def padding(self, queries: int, keys: int) -> Padding:
        """The rectangle as padded rows whose keys are `aligned`."""
        query_mask, key_mask = (
            jnp.arange(n)[None] < x[:, None] for n, x in ((queries, self.queries), (keys, self.keys))
        )
        lengths = jnp.maximum(self.queries, 1), jnp.maximum(self.keys, 1)
        return Padding(query_mask, key_mask, lengths, jnp.ones((), bool))

    def aligned(self, x: Array, sign: int = -1) -> Array:
        """x [B, T, ...] rotated so that the first key comes first. sign: 1 for the inverse."""
        return x if self.first is None else jax.vmap(lambda row, n: jnp.roll(row, n, axis=0))(x, sign * self.first)


def _padding(mask: Mask) -> Padding | None:
    """None for rows that are not padded."""
    if mask.query_segments is None or mask.key_segments is None or not mask.padded:
        return None
    return Padding.of(mask.key_segments, mask.query_index.shape[0], mask.window)


def forward(q: Array, k: Array, v: Array, mask: Mask, *, scale: float) -> tuple[Array, Array]:
    """softmax(q k^T * scale) v over the visible keys, without storing the scores (Dao 2023).

    q [B, S, N, H], k [B, T, K, H], v [B, T, K, U] in bfloat16 or float16, whole rows in order; T is S unless the mask
    is not causal -> [B, S, N, U] in q's dtype, and the log-sum-exp of each query's scores, float32 [B, N, S]: 0 and
    -inf where a query sees no key. Not differentiable: `backward` is its gradient. A batch whose documents or
    padding do not `fit` is computed by the Pallas kernel; the program contains both kernels.
    """
    if (padding := _padding(mask)) is not None:
        return lax.cond(
            padding.fit,
            lambda: _padded_forward(q, k, v, mask, padding, scale),
            lambda: pallas_attention.forward(q, k, v, mask, scale=scale),
        )
    maximum, value_size = _maximum_documents(q, v, mask), v.shape[-1]
    if maximum == 0:
        return pallas_attention.forward(q, k, v, mask, scale=scale)
    call = _Call(scale, _mask_type(mask, lengths=mask.query_segments is not None), mask.window, maximum)
    if mask.query_segments is None:
        out, statistics = _forward(call, *_same_head_size(q, k, v, always=False), [], [])
        return out[..., :value_size], statistics
    documents = Documents.of(mask.query_segments, maximum)

    def ragged() -> tuple[Array, Array]:
        # cuDNN has one table of offsets for queries and output, and one for keys and values.
        padded = _same_head_size(q, k, v, always=True)
        out, statistics = _forward(call, *padded, [], documents.operands(*padded[:2]))
        return out[..., :value_size], statistics[documents.number, :, documents.position].transpose(0, 2, 1)

    return lax.cond(documents.fit, ragged, lambda: pallas_attention.forward(q, k, v, mask, scale=scale))


def backward(
    q: Array, k: Array, v: Array, mask: Mask, out: Array, lse: Array, dout: Array, *, scale: float
) -> tuple[Array, Array, Array]:
    """Gradients with respect to q, k and v, as `reference_backward` in kernels/attention/attention.py computes them."""
    if (padding := _padding(mask)) is not None:
        return lax.cond(
            padding.fit,
            lambda: _padded_backward((q, k, v, out, lse, dout), mask, padding, scale),
            lambda: pallas_attention.backward(q, k, v, mask, out, lse, dout, scale=scale),
        )
    maximum = _maximum_documents(q, v, mask)
    if maximum == 0:
        return pallas_attention.backward(q, k, v, mask, out, lse, dout, scale=scale)
    call = _Call(scale, _mask_type(mask, lengths=mask.query_segments is not None), mask.window, maximum)
    if mask.query_segments is None:
        return _backward(call, (q, k, v, out, lse, dout), [], None)
    documents = Documents.of(mask.query_segments, maximum)
    return lax.cond(
        documents.fit,
        lambda: _backward(call, (q, k, v, out, _by_document(lse, documents), dout), [], documents),
        lambda: pallas_attention.backward(q, k, v, mask, out, lse, dout, scale=scale),
    )


def rectangle_forward(q: Array, k: Array, v: Array, mask: Mask, *, scale: float) -> tuple[Array, Array]:
    """`forward` for a chunk of queries and the keys before it, given keys of whole rows; mask: see `Rectangle.of`.

    With segments, the program also contains the Pallas kernel, for rows that do not `fit`.
    """
    rectangle = Rectangle.of(mask, q.shape[0])

    def fused() -> tuple[Array, Array]:
        padding, keys = rectangle.padding(q.shape[1], k.shape[1]), rectangle.aligned(k)
        return _padded_forward(q, keys, rectangle.aligned(v), mask._replace(causal=False), padding, scale)

    if rectangle.fit is None:
        return fused()
    return lax.cond(rectangle.fit, fused, lambda: pallas_attention.forward(q, k, v, mask, scale=scale))


def rectangle_backward(
    q: Array, k: Array, v: Array, mask: Mask, out: Array, lse: Array, dout: Array, *, scale: float
) -> tuple[Array, Array, Array]:
    """`backward` of `rectangle_forward`; out and lse may cover more keys."""
    rectangle = Rectangle.of(mask, q.shape[0])

    def fused() -> tuple[Array, Array, Array]:
        arrays = q, rectangle.aligned(k), rectangle.aligned(v), out, lse, dout
        padding = rectangle.padding(q.shape[1], k.shape[1])
        dq, dk, dv = _padded_backward(arrays, mask._replace(causal=False), padding, scale)
        return dq, rectangle.aligned(dk, 1), rectangle.aligned(dv, 1)

    if rectangle.fit is None:
        return fused()
    return lax.cond(rectangle.fit, fused, lambda: pallas_attention.backward(q, k, v, mask, out, lse, dout, scale=scale))


def masked_forward(q: Array, k: Array, v: Array, mask: Mask, *, scale: float) -> tuple[Array, Array]:
    """`forward`, with documents as a bias [B, 1, S, S] in q's dtype."""
    if mask.query_segments is None or mask.padded:
        return forward(q, k, v, mask, scale=scale)
    call = _Call(scale, _mask_type(mask, lengths=False), None)
    out, lse = _forward(call, *_same_head_size(q, k, v, always=False), [_bias(mask, q.dtype)], [])
    return out[..., : v.shape[-1]], lse


def masked_backward(
    q: Array, k: Array, v: Array, mask: Mask, out: Array, lse: Array, dout: Array, *, scale: float
) -> tuple[Array, Array, Array]:
    """`backward`, with documents as a bias [B, 1, S, S]."""
    if mask.query_segments is None or mask.padded:
        return backward(q, k, v, mask, out, lse, dout, scale=scale)
    call = _Call(scale, _mask_type(mask, lengths=False), None)
    return _backward(call, (q, k, v, out, lse, dout), [_bias(mask, q.dtype)], None)


def _bias(mask: Mask, dtype: jnp.dtype) -> Array:
    """[B, 1, S, S]: 0 for visible keys, and a large negative number for masked ones.

    Not the lowest finite number: cuDNN subtracts two of them from each other.
    """
    lowest = -(2.0**41) if jnp.dtype(dtype) == jnp.bfloat16 else -(2.0**15)
    return jnp.where(mask.visible()[:, None], 0, lowest).astype(dtype)
