"""The cases of `kernels.py`: the function to call, its expected result, and the minimum cost."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import loss_cases
import numpy as np
from jax import Array
from outcome import label
from roofline import Roof, roof_of
from stopwatch import readings_in

from megajax.kernels.attention.attention import Mask, attend, local_device, reference_attention
from megajax.kernels.attention.capability import BACKENDS, Device, Request
from megajax.kernels.grouped.capability import GROUPED_BACKENDS, GroupedKernel, GroupedSizes
from megajax.kernels.grouped.matmul import grouped_matmul
from megajax.kernels.ssm.ssd import Scan, ssd, ssd_reference
from megajax.layers.configs import LayerNormConfig, RMSNormConfig
from megajax.layers.param import LayerSettings
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.rules import Plan
from megajax.mesh.xla import FP8, GPU, compiler_options
from megajax.precision.config import Fp8Config
from megajax.precision.fp8 import OLDEST

TOLERANCE, TOLERANCE_FP8 = 2e-2, 1e-1
"""Relative error of results and gradients against float32: bfloat16's 8 bits of precision leave 2e-3 to 1e-2, e4m3's 4
and e5m2's 3 bits 4e-2 to 8e-2."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one size."""

    name: str
    sizes: dict[str, int]
    call: Callable[..., Array]
    """What is measured: of arrays, differentiable with respect to all of them."""
    reference: Callable[..., Array]
    """The same, to be right rather than fast."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the arguments, which are bfloat16."""
    flops: tuple[float, float]
    """Of the forward pass, and of forward and backward together."""
    moved: tuple[float, float]
    """Bytes of device memory at least, likewise."""
    fp8: bool = False
    """Multiplied in 8 bits: another peak, another tolerance."""
    slices: int | None = None
    """Key-value heads, of attention: the reference then works on one row and one of them at a time."""
    report: str | None = None
    """Where others reported that it is wrong: it may be, since the capability table or another rule refuses it."""

    def expected(self) -> Callable:
        """(cotangent, *arguments) -> (result, gradients) of the reference."""
        run = with_gradients(self.reference)
        return run if self.slices is None else sliced(run, self.slices)

    def label(self) -> str:
        """What its row is called in tables."""
        return label(self.name, self.sizes)


def attention(on_gpu: bool, device: Device) -> list[Case]:
    """Attention by every backend that can: plain, grouped, long; with documents apart and with a window; full, padded
    and across two sequences, as BERT-large and T5 have it.
    """
    sizes = [
        (8, 2048, 16, 16, 128),
        (2, 4096, 32, 32, 128),
        (8, 4096, 32, 8, 64),
        (2, 4096, 32, 8, 128),
        (1, 8192, 32, 8, 128),
    ]
    sizes, special = (sizes, sizes[3]) if on_gpu else ([(1, 64, 4, 2, 16)], (1, 64, 4, 2, 16))
    plain = [AttentionCase(*size, kernel=kernel) for size in sizes for kernel in ("cudnn", "pallas")]
    apart = [AttentionCase(*special, kernel=kernel, documents=4) for kernel in ("cudnn", "pallas", "cudnn_mask")]
    windows = [AttentionCase(*special, kernel=kernel, window=special[1] // 8) for kernel in ("cudnn", "pallas")]
    encoder = (32, 512, 16, 16, 64) if on_gpu else (2, 64, 4, 4, 16)
    kinds = (
        {"causal": False},
        {"causal": False, "padded": True},
        {"causal": False, "padded": True, "keys": encoder[1] * 2},
    )
    both_ways = [
        AttentionCase(*encoder, kernel=kernel, **kind) for kind in kinds for kernel in ("cudnn", "pallas", "reference")
    ]
    candidates = [*plain, *apart, *windows, *both_ways, AttentionCase(*special, kernel="reference")]
    return [
        candidate.case()
        for candidate in candidates
        if BACKENDS[candidate.kernel].refusal(candidate.request(), device) is None
    ]


class AttentionCase(NamedTuple):
    """Attention by one backend."""

    rows: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    kernel: str
    documents: int = 1
    """Equal documents in a row, that do not see each other."""
    window: int | None = None
    causal: bool = True
    padded: bool = False
    """The last quarter of each row is padding."""
    keys: int | None = None
    """Positions of the other sequence, which keys and values are of."""
    value_dim: int | None = None
    """Size of a value head; None: that of a key head."""
    far: bool = False
    """All scores are about -120, so their log-sum-exp is far below 0."""
    sink: bool = False
    """A score of 0 without a value beside the keys."""
    report: str | None = None
    """Where others reported a fault."""

    def request(self) -> Request:
        """What the backend is asked for."""
        return Request(
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
        """Of all rows, and of one for all: the reference sees one row at a time."""
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
        """With its costs: a query sees half the keys of its document, or about as many as the window has.

        Without a causal mask it sees all; of what is padded, three quarters.
        """
        rows, length, heads, groups, head = self[:5]
        key_length = self.keys or length
        every, of_a_row = self.masks()
        queries, keys = (rows, length, heads, head), (rows, key_length, groups, head)
        values = (*keys[:3], head if self.value_dim is None else self.value_dim)
        keys_per_query = key_length / self.documents / (1 + self.causal) if self.window is None else self.window
        forward = 4 * rows * heads * head * length * keys_per_query * (0.75 if self.padded else 1)
        io_bytes = 2 * 2 * rows * head * (length * heads + key_length * groups)
        kind = f", {self.documents} documents apart" * (self.documents > 1)
        kind += "" if self.window is None else f", window {self.window}"
        kind += ", full" * (not self.causal and not self.padded and self.keys is None)
        kind += f", across to {self.keys}" * (self.keys is not None) + ", padded" * self.padded
        kind += f", values of {self.value_dim}" * (self.value_dim is not None)
        kind += ", scores far below 0" * self.far + ", sink" * self.sink
        return Case(
            name=f"attention, {self.kernel}{kind}",
            sizes=dict(zip(("rows", "length", "heads", "kv_heads", "head_dim"), self[:5], strict=True)),
            call=self.prepared(partial(attend, self.kernel, mask=every, scale=head**-0.5)),
            reference=self.prepared(partial(reference_attention, mask=of_a_row, scale=head**-0.5)),
            slices=groups,
            shapes=(queries, keys, values),
            report=self.report,
            flops=(forward, 3.5 * forward),
            # The backward reads queries, keys, values, output and its gradient, and writes three gradients.
            moved=(io_bytes, 3 * io_bytes),
        )

    def prepared(self, run: Callable[..., Array]) -> Callable[..., Array]:
        """Attention of arrays drawn at random, with the scores and the sink of this case."""

        def of_drawn(q: Array, k: Array, v: Array) -> Array:
            if self.far:
                q = (0.1 * q).at[..., 0].set(1)
                k = (0.1 * k).at[..., 0].set(-120 * self.head_dim**0.5)
            return run(q, k, v, sink=jnp.zeros(q.shape[2])) if self.sink else run(q, k, v)

        return of_drawn


MASK, HALF_TILE, ONE_QUERY, FEW_HEADS, SINK, WINDOW, UNEVEN = (
    *("pytorch#196678", "cudnn-frontend#628", "cudnn-frontend#1072", "pytorch#193893", "TransformerEngine#3249"),
    *("TransformerEngine#2344", "cudnn-frontend#166"),
)


def faults(on_gpu: bool, device: Device) -> list[Case]:
    """What others reported to be wrong, and its neighbours: by every backend that would compute it without the report.

    A backend that the table refuses for a report may be wrong. Without a GPU, the reference computes all of them.
    """
    rows, heads, head, unit = (2, 32, 128, 704) if on_gpu else (1, 8, 16, 64)
    long = 2048 if on_gpu else 128
    few = rows, long, heads, 4, head
    kinds: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        ((rows, unit, heads, heads, head), {"documents": 2, "far": True, "report": MASK}),
        ((rows, unit, heads, heads, head), {"causal": False, "far": True, "report": HALF_TILE}),
        ((rows, unit, heads, heads, head), {"causal": False, "padded": True, "far": True}),
        ((rows, unit, heads, heads, head), {"far": True}),
        ((rows, 1, heads, heads, head), {"causal": False, "keys": 128, "far": True, "report": ONE_QUERY}),
        ((rows, 1, heads, 4, head), {"causal": False, "keys": 128, "report": FEW_HEADS}),
        (few, {}),
        (few, {"far": True}),
        (few, {"documents": 2, "far": True}),
        (few, {"documents": 2, "window": long // 8, "report": WINDOW}),
        ((rows, long, heads, 8, 3 * head // 2), {"sink": True, "documents": 2, "report": SINK}),
        ((rows, long, heads, 8, 3 * head // 2), {"value_dim": 5 * head // 4, "report": UNEVEN}),
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


def sliced(run: Callable, groups: int) -> Callable:
    """run of attention -> the same of whole arrays [B, S, N, H], one row and one key-value head after the other.

    Scores in float32 of 8 rows of 4096 tokens and 32 heads take 16 GiB an array; of a row and a group of 4 heads 256
    MiB.
    """

    def split(x: Array) -> Array:
        rows, length, heads, size = x.shape
        apart = x.reshape(rows, length, groups, heads // groups, size).transpose(0, 2, 1, 3, 4)
        return apart.reshape(rows * groups, 1, length, heads // groups, size)

    def joined(x: Array) -> Array:
        pieces, _, length, heads, size = x.shape
        grouped = x.reshape(pieces // groups, groups, length, heads, size).transpose(0, 2, 1, 3, 4)
        return grouped.reshape(pieces // groups, length, groups * heads, size)

    def in_pieces(*arrays: Array) -> Any:
        return jax.tree.map(joined, jax.lax.map(lambda pieces: run(*pieces), tuple(map(split, arrays))))

    return in_pieces


def norm(on_gpu: bool, device: Device) -> list[Case]:
    """RMSNorm and LayerNorm over the residual stream of 16,384 tokens."""
    tokens, hidden = (16384, 4096) if on_gpu else (64, 32)
    settings = LayerSettings(layout=Layout(Plan.of(ParallelConfig())), hidden=hidden, std=0.02, output_std=0.02)
    cases = []
    for name, cfg, vectors in (("RMSNorm", RMSNormConfig(), 1), ("LayerNorm", LayerNormConfig(), 2)):
        array = 2 * tokens * hidden
        cases.append(
            Case(
                name=name,
                sizes={"tokens": tokens, "hidden": hidden},
                call=cfg.build(settings).normalise,
                reference=_layer_norm if vectors == 2 else _rms_norm,
                shapes=((1, tokens, hidden), *[(hidden,)] * vectors),
                flops=(0.0, 0.0),
                moved=(2 * array, 5 * array),
            )
        )
    return cases


def _rms_norm(x: Array, gain: Array) -> Array:
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * gain[None, None]


def _layer_norm(x: Array, gain: Array, bias: Array) -> Array:
    mean = jnp.mean(x, -1, keepdims=True)
    return (x - mean) / jnp.sqrt(jnp.mean((x - mean) ** 2, -1, keepdims=True) + 1e-5) * gain[None, None] + bias[
        None, None
    ]


def matmul(on_gpu: bool, device: Device) -> list[Case]:
    """The matmuls of a Llama-3 8B layer on 8192 tokens, and a square one: in bfloat16 and, where it can, in 8 bits."""
    sizes = [(8192, 8192, 8192), (8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (8192, 2048, 8192)]
    if not on_gpu:
        sizes = [(64, 32, 48)]
    eight_bits = not on_gpu or (device.capability or ()) >= OLDEST
    return [_matmul(size, fp8) for fp8 in (False, True)[: 1 + eight_bits] for size in sizes]


def _matmul(size: tuple[int, int, int], fp8: bool) -> Case:
    tokens, inner, outer = size
    plain = partial(jnp.einsum, "ti,io->to")
    forward = 2.0 * tokens * inner * outer
    arrays = 2 * (tokens * inner + inner * outer + tokens * outer)
    return Case(
        name="matmul, fp8 with its scaling" if fp8 else "matmul, bfloat16",
        sizes={"tokens": tokens, "inner": inner, "outer": outer},
        call=partial(Fp8Config().build(), "ti,io->to") if fp8 else plain,
        reference=plain,
        shapes=((tokens, inner), (inner, outer)),
        flops=(forward, 3 * forward),
        moved=(arrays, 3 * arrays),
        fp8=fp8,
    )


def grouped(on_gpu: bool, device: Device) -> list[Case]:
    """A matrix of experts by every kernel that can: Qwen3-30B-A3B's, DeepSeek-V3's with 32 experts a device, and
    Mixtral 8x7B's. Beside each, the same rows times one matrix: the same operations, done by cuBLAS.
    """
    sizes = [
        GroupedSizes(65536, 128, 2048, 768),
        GroupedSizes(32768, 32, 7168, 2048),
        GroupedSizes(16384, 8, 4096, 14336),
    ]
    cases = []
    for size in sizes if on_gpu else [GroupedSizes(64, 4, 32, 48)]:
        cases.append(_grouped(size, None))
        for kernel, backend in GROUPED_BACKENDS.items():
            # The reference is what the others are compared with, and slow.
            if backend.refusal("bfloat16", device, size) is None and (kernel != "reference" or not on_gpu):
                cases.append(_grouped(size, kernel))
    return cases


def uneven(rows: int, groups: int) -> list[int]:
    """Rows of each group, drawn: the last is to have three times as many as the first."""
    shares = np.linspace(0.5, 1.5, groups) / groups
    return np.random.default_rng(0).multinomial(rows, shares / shares.sum()).tolist()


def _grouped(size: GroupedSizes, kernel: GroupedKernel | None) -> Case:
    """None: one dense matmul."""
    forward = 2.0 * size.rows * size.inner * size.outer
    matrices = 1 if kernel is None else size.groups
    shapes = (size.rows, size.inner), (size.inner, size.outer) if kernel is None else size[1:]
    arrays = 2 * (size.rows * (size.inner + size.outer) + matrices * size.inner * size.outer)
    counts = jnp.array(uneven(size.rows, size.groups), jnp.int32)
    dense = partial(jnp.einsum, "ti,io->to")
    return Case(
        name="grouped matmul, dense" if kernel is None else f"grouped matmul, {kernel}",
        sizes=size._asdict(),
        call=dense if kernel is None else partial(grouped_matmul, sizes=counts, kernel=kernel),
        reference=dense if kernel is None else partial(grouped_matmul, sizes=counts, kernel="reference"),
        shapes=shapes,
        flops=(forward, 3 * forward),
        moved=(arrays, 3 * arrays),
    )


def state_space(on_gpu: bool, device: Device) -> list[Case]:
    """The recurrence of Mamba-2 by chunks of several sizes. Its reference is one position after another."""
    rows, length, heads, head, states = (2, 4096, 32, 64, 128) if on_gpu else (1, 32, 2, 8, 8)
    inner, io_bytes = heads * head, rows * length * 2 * (2 * heads * head + heads + 2 * states)

    def scan(x: Array, dt: Array, b: Array, c: Array) -> Scan:
        steps = jax.nn.softplus(dt.astype(jnp.float32) - 4)
        return Scan(x, steps, -jnp.linspace(1, 16, heads), b, c, jnp.ones(heads))

    return [
        Case(
            name=f"state space, chunks of {chunk}",
            sizes={"rows": rows, "length": length, "heads": heads, "head_dim": head, "states": states},
            call=lambda *arrays, chunk=chunk: ssd(scan(*arrays), chunk)[0],
            reference=lambda *arrays: ssd_reference(scan(*arrays))[0],
            shapes=((rows, length, heads, head), (rows, length, heads), *[(rows, length, 1, states)] * 2),
            flops=_with_backward(2.0 * rows * length * (chunk * (states + inner) + 2 * inner * states)),
            moved=(io_bytes, 3 * io_bytes),
        )
        for chunk in ((64, 128, 256) if on_gpu else (16,))
    ]


def _with_backward(forward: float) -> tuple[float, float]:
    return forward, 3 * forward


def with_gradients(call: Callable[..., Array]) -> Callable:
    """(cotangent, *arguments) -> (result, gradients)."""

    def run(cotangent: Array, *arguments: Array) -> tuple[Array, tuple[Array, ...]]:
        out, pullback = jax.vjp(call, *arguments)
        return out, pullback(cotangent.astype(out.dtype))

    return run


def measure(case: Case, roof: Roof, seconds: float) -> dict[str, Any]:
    """Errors against the reference in float32, times, floors and memory of one case."""
    keys = jax.random.split(jax.random.key(0), len(case.shapes) + 1)
    arguments = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys[1:], case.shapes, strict=True)]
    shape = jax.eval_shape(case.call, *arguments).shape
    cotangent = jax.random.normal(keys[0], shape, jnp.bfloat16)
    options = compiler_options(*GPU, *(FP8 if case.fp8 else ()))
    works = {"both": (with_gradients(case.call), [cotangent, *arguments]), "forward": (case.call, arguments)}
    ready = {name: jax.jit(call).lower(*inputs).compile(options) for name, (call, inputs) in works.items()}
    results = ready["both"](cotangent, *arguments)
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in (cotangent, *arguments)]
        expected = jax.jit(case.expected())(*wide)
    errors = [
        loss_cases.relative(*pair) for pair in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    ]
    del results, expected, wide
    passes: dict[str, Any] = {}
    for place, name in enumerate(("forward", "both")):
        compiled, inputs = ready[name], works[name][1]
        statistics = readings_in(partial(compiled, *inputs), jax.block_until_ready, seconds=seconds)
        floor = roof.floor_seconds(flops=case.flops[place], moved=case.moved[place], fp8=case.fp8)
        passes[name] = {
            "seconds": statistics.to_dict(),
            "tflops": case.flops[place] / statistics.median / 1e12,
            "gigabytes_per_second": case.moved[place] / statistics.median / 1e9,
            "floor_seconds": floor,
            "share_of_floor": None if floor is None else floor / statistics.median,
            "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        }
    right = all(error <= (TOLERANCE_FP8 if case.fp8 else TOLERANCE) for error in errors)
    return {"name": case.name, "sizes": case.sizes, "errors": errors, **verdict(case, right=right), **passes}


def verdict(case: Case, *, right: bool) -> dict[str, Any]:
    """Whether a result is right or may be wrong; of what others reported also whether it is wrong here."""
    return {"right": right} if case.report is None else {"right": True, "report": case.report, "fault_seen": not right}


def attempt(case: Case, roof: Roof, seconds: float) -> dict[str, Any]:
    """`measure`; a kernel that can't be compiled or run here does not take the others' figures with it."""
    try:
        return measure(case, roof, seconds)
    except Exception as error:  # of the compiler or the device: many kinds
        message = (str(error).strip().splitlines() or [""])[0]
        failed = {"name": case.name, "sizes": case.sizes, "fault": f"{type(error).__name__}: {message}"}
        return failed | verdict(case, right=False)


def line(record: dict[str, Any]) -> str:
    """One case as a line."""
    reported = ""
    if "report" in record:
        reported = f"; the fault of {record['report']} is " + ("here" if record["fault_seen"] else "not seen here")
    if "fault" in record:
        return f"{record['name']:<40} FAILED: {record['fault']}{reported}"
    sizes = " ".join(f"{name}={size}" for name, size in record["sizes"].items())
    error = f"error {max(record['errors']):.1e}" + ("" if record["right"] else " WRONG")
    parts = []
    for name in ("forward", "both"):
        figures = record[name]
        share = "" if figures["share_of_floor"] is None else f" {figures['share_of_floor']:.0%} of the roof"
        speed = (
            f"{figures['tflops']:.0f} TFLOP/s"
            if figures["tflops"] >= 1
            else f"{figures['gigabytes_per_second']:.3g} GB/s"
        )
        parts.append(f"{name} {1e3 * figures['seconds']['median']:.3f} ms {speed}{share}")
    return f"{record['name']:<40} {sizes:<58} {'; '.join(parts)}; {error}{reported}"


def table(part: str, *, seconds: float, peak_tflops: float | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(device, line, row) of each case of a part, as they come. Raises UserError as `roof_of` does."""
    device = jax.devices()[0]
    roof = roof_of(device.device_kind, device.platform, peak_tflops=peak_tflops)
    on_gpu = device.platform == "gpu"
    if part == "loss":
        for row in loss_cases.table(roof, on_gpu=on_gpu, seconds=seconds):
            yield roof.device, loss_cases.line(row), row
        return
    for case in MAKERS[part](on_gpu, local_device()):
        row = attempt(case, roof, seconds)
        yield roof.device, line(row), row


MAKERS: dict[str, Callable[[bool, Device], list[Case]]] = {
    "attention": attention,
    "faults": faults,
    "norm": norm,
    "matmul": matmul,
    "grouped": grouped,
    "state_space": state_space,
}
"""Part -> its cases at the sizes of a GPU, or tiny ones, as far as a device can compute them."""
