"""Cases of attention by every backend, and of faults that others reported."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from benchmarks.kernels.measure import Case
from megajax.kernels.attention.attention import Mask, attend, reference_attention
from megajax.kernels.attention.capability import BACKENDS
from megajax.kernels.attention.request import KernelDevice, KernelRequest

MASK, HALF_TILE, ONE_QUERY, FEW_HEADS, SINK, WINDOW, UNEVEN = (
    *("pytorch#196678", "cudnn-frontend#628", "cudnn-frontend#1072", "pytorch#193893", "TransformerEngine#3249"),
    *("TransformerEngine#2344", "cudnn-frontend#166"),
)
"""Public reports of wrong results."""


class AttentionCase(NamedTuple):
    """Attention by one backend."""

    rows: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    kernel: str
    documents: int = 1
    """Equal documents in a row, isolated from each other."""
    window: int | None = None
    causal: bool = True
    padded: bool = False
    """Whether the last quarter of each row is padding."""
    keys: int | None = None
    """Length of the sequence of keys and values in cross-attention."""
    value_dim: int | None = None
    """Size of a value head; None: that of a key head."""
    far: bool = False
    """Whether all scores are about -120, so that their log-sum-exp is far below 0."""
    sink: bool = False
    """Whether each query also has a score of 0 without a value."""
    report: str | None = None

    def request(self) -> KernelRequest:
        """The request to the backend."""
        return KernelRequest(
            dtype="bfloat16",
            key_dim=self.head_dim,
            value_dim=self.value_dim,
            sink=self.sink,
            length=self.length,
            key_length=self.keys,
            causal=self.causal,
            cross=self.keys is not None,
            window=self.window,
            documents=self.documents > 1,
            padded=self.padded,
        )

    def masks(self) -> tuple[Mask, Mask]:
        """The mask of all rows, and that of a single row for the reference."""
        ids = []
        for length in (self.length, self.keys or self.length):
            index = jnp.arange(length)
            row = index // (length // self.documents) if self.documents > 1 else (index < length * 3 // 4).astype(int)
            ids.append(row[None] if self.documents > 1 or self.padded else None)
        every = [None if row is None else jnp.broadcast_to(row, (self.rows, row.shape[1])) for row in ids]
        indices = jnp.arange(self.length), jnp.arange(self.keys or self.length)
        rest = self.window, self.causal, self.padded
        return Mask(*indices, *every, *rest), Mask(*indices, *ids, *rest)

    def case(self) -> Case:
        """The case with its costs.

        A query sees half the keys of its document, or as many as the window has. Without a causal mask it sees all, and
        three quarters of padded rows.
        """
        rows, length, heads, groups, head = self[:5]
        key_length = self.keys or length
        every, of_a_row = self.masks()
        queries, keys = (rows, length, heads, head), (rows, key_length, groups, head)
        values = (*keys[:3], head if self.value_dim is None else self.value_dim)
        keys_per_query = key_length / self.documents / (1 + self.causal) if self.window is None else self.window
        forward = 4 * rows * heads * head * length * keys_per_query * (0.75 if self.padded else 1)
        io_bytes = 2 * 2 * rows * head * (length * heads + key_length * groups)
        return Case(
            name=f"attention, {self.kernel}{self.kind()}",
            sizes=dict(zip(("rows", "length", "heads", "kv_heads", "head_dim"), self[:5], strict=True)),
            call=self.prepared(partial(attend, self.kernel, mask=every, scale=head**-0.5)),
            reference=self.prepared(partial(reference_attention, mask=of_a_row, scale=head**-0.5)),
            slices=groups,
            shapes=(queries, keys, values),
            report=self.report,
            flops=(forward, 3.5 * forward),
            # The backward pass reads queries, keys, values, output and its gradient, and writes three gradients.
            moved=(io_bytes, 3 * io_bytes),
        )

    def kind(self) -> str:
        """What is unlike plain causal attention, for the name."""
        kinds = {
            f"{self.documents} documents apart": self.documents > 1,
            f"window {self.window}": self.window is not None,
            "full": not self.causal and not self.padded and self.keys is None,
            f"across to {self.keys}": self.keys is not None,
            "padded": self.padded,
            f"values of {self.value_dim}": self.value_dim is not None,
            "scores far below 0": self.far,
            "sink": self.sink,
        }
        return "".join(f", {kind}" for kind, applies in kinds.items() if applies)

    def prepared(self, run: Callable[..., Array]) -> Callable[..., Array]:
        """Attention on random arrays, with the scores and the sink of this case."""

        def attention(q: Array, k: Array, v: Array) -> Array:
            if self.far:
                q = (0.1 * q).at[..., 0].set(1)
                k = (0.1 * k).at[..., 0].set(-120 * self.head_dim**0.5)
            return run(q, k, v, sink=jnp.zeros(q.shape[2])) if self.sink else run(q, k, v)

        return attention


def attention(on_gpu: bool, device: KernelDevice) -> list[Case]:
    """Attention by every backend that supports it.

    Plain, grouped and long rows; isolated documents; a window; and full, padded and cross-attention as in BERT-large
    and T5.
    """
    sizes = [(8, 2048, 16, 16, 128), (2, 4096, 32, 32, 128), (8, 4096, 32, 8, 64), (2, 4096, 32, 8, 128)]
    sizes.append((1, 8192, 32, 8, 128))
    sizes, special = (sizes, sizes[3]) if on_gpu else ([(1, 64, 4, 2, 16)], (1, 64, 4, 2, 16))
    encoder = (32, 512, 16, 16, 64) if on_gpu else (2, 64, 4, 4, 16)
    full: dict[str, Any] = {"causal": False}
    fused, window = ("cudnn", "pallas"), special[1] // 8
    kinds: list[tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]] = [
        *((size, fused, {}) for size in sizes),
        (special, (*fused, "cudnn_mask"), {"documents": 4}),
        (special, fused, {"window": window}),
        (encoder, (*fused, "reference"), full),
        (encoder, (*fused, "reference"), full | {"padded": True}),
        (encoder, (*fused, "reference"), full | {"padded": True, "keys": encoder[1] * 2}),
        (special, ("reference",), {}),
    ]
    candidates = [AttentionCase(*size, kernel=kernel, **kind) for size, names, kind in kinds for kernel in names]
    supported = [case for case in candidates if BACKENDS[case.kernel].refusal(case.request(), device) is None]
    return [candidate.case() for candidate in supported]


def faults(on_gpu: bool, device: KernelDevice) -> list[Case]:
    """Cases of public reports of wrong results, and similar ones, by every backend that supports them otherwise.

    A backend that the capability table refuses because of a report may be wrong. Without a GPU, the reference computes
    all cases.
    """
    rows, heads, head, unit = (2, 32, 128, 704) if on_gpu else (1, 8, 16, 64)
    long = 2048 if on_gpu else 128
    few, equal, one = (rows, long, heads, 4, head), (rows, unit, heads, heads, head), (rows, 1, heads, heads, head)
    wide = (rows, long, heads, 8, 3 * head // 2)
    kinds: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        (equal, {"documents": 2, "far": True, "report": MASK}),
        (equal, {"causal": False, "far": True, "report": HALF_TILE}),
        (equal, {"causal": False, "padded": True, "far": True}),
        (equal, {"far": True}),
        (one, {"causal": False, "keys": 128, "far": True, "report": ONE_QUERY}),
        ((rows, 1, heads, 4, head), {"causal": False, "keys": 128, "report": FEW_HEADS}),
        (few, {}),
        (few, {"far": True}),
        (few, {"documents": 2, "far": True}),
        (few, {"documents": 2, "window": long // 8, "report": WINDOW}),
        (wide, {"sink": True, "documents": 2, "report": SINK}),
        (wide, {"value_dim": 5 * head // 4, "report": UNEVEN}),
    ]
    cases = []
    for sizes, kind in kinds:
        for kernel in ("cudnn", "cudnn_mask", "pallas") if on_gpu else ("reference",):
            candidate = AttentionCase(*sizes, kernel=kernel, **kind)
            backend, request = BACKENDS[kernel], candidate.request()
            if replace(backend, faults=(), even=False).refusal(request, device) is None:
                refused = backend.refusal(request, device) is not None
                report = (candidate.report or "the capability table") if refused else None
                cases.append(candidate._replace(report=report).case())
    return cases
