"""Correctness and speed of single kernels: errors against a float32 reference, times, shares of the roofline."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.outcome import label
from benchmarks.roofline import Roof, roof_of
from benchmarks.stopwatch import readings_in
from megajax.config.class_references import resolve
from megajax.config.errors import UserError
from megajax.processes.xla_options import FP8, GPU, compiler_options

TOLERANCE, TOLERANCE_FP8 = 2e-2, 1e-1
"""Relative error of results and gradients against float32: bfloat16's 8 bits of precision leave 2e-3 to 1e-2, e4m3's 4
and e5m2's 3 bits 4e-2 to 8e-2."""
PARTS = {
    "attention": "benchmarks.kernels.attention:attention",
    "faults": "benchmarks.kernels.attention:faults",
    "loss": "benchmarks.kernels.loss:table",
    "norm": "benchmarks.kernels.cases:norm",
    "matmul": "benchmarks.kernels.cases:matmul",
    "recipes": "benchmarks.kernels.cases:recipes",
    "grouped": "benchmarks.kernels.cases:grouped",
    "state_space": "benchmarks.kernels.cases:state_space",
    "delta_rule": "benchmarks.kernels.cases:delta_rule",
}
"""Name in --parts -> function that makes its cases for (on_gpu, device); the loss measures its rows itself."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one size. Arguments are bfloat16. Costs are of the forward pass, and of both passes together."""

    name: str
    sizes: dict[str, int]
    call: Callable[..., Array]
    """The measured function of arrays, differentiable with respect to all of them."""
    reference: Callable[..., Array]
    """The same in plain operations."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the arguments."""
    flops: tuple[float, float]
    moved: tuple[float, float]
    """Minimum bytes of device memory."""
    fp8: bool = False
    """Whether it multiplies in 8 bits, which have another peak and another tolerance."""
    tolerance: float | None = None
    """Relative error; None: that of its dtype."""
    slices: int | None = None
    """For attention, the number of key-value heads: the reference computes one row and one of them at a time."""
    report: str | None = None
    """The public report of a fault. The result may be wrong, because the capability table refuses this case."""

    def expected(self) -> Callable:
        """(cotangent, *arguments) -> (result, gradients) of the reference."""
        run = with_gradients(self.reference)
        return run if self.slices is None else sliced(run, self.slices)

    def label(self) -> str:
        """Its name in tables."""
        return label(self.name, self.sizes)


def kernels(
    *, parts: tuple[str, ...] = tuple(PARTS), seconds: float = 0.3, peak_tflops: float | None = None
) -> Iterator[dict[str, Any]]:
    """Correctness and speed of single kernels, forward and backward.

    Each result and gradient is compared with a float32 reference on the same inputs by relative Euclidean error; an
    error above the tolerance makes the exit code 1. The minimum time is the larger of operations over the published
    peak and bytes over the published bandwidth, with each input read once and each output written once. Causal
    attention counts half the square; its backward pass counts five matmuls for two of the forward pass, because scores
    are recomputed. Uses one device, except for the loss, whose vocabulary is sharded over all devices. On a CPU, sizes
    are tiny. --seconds: duration of the timed calls for each figure. --peak-tflops: bfloat16 peak of a device that is
    not in the table.
    """
    if unknown := set(parts) - set(PARTS):
        raise UserError(f"--parts={','.join(sorted(unknown))}: unknown part; choose from {', '.join(PARTS)}")
    device = jax.devices()[0]
    roof = roof_of(device.device_kind, device.platform, peak_tflops=peak_tflops)
    figures: dict[str, Any] = {"device": roof.device, "parts": {}, "wrong": []}
    for part in parts:
        figures["parts"][part] = []
        for text, row in table(part, roof, on_gpu=device.platform == "gpu", seconds=seconds):
            print(text, flush=True)
            figures["parts"][part].append(row)
            figures["wrong"] += [] if row["right"] else [row["name"]]
            yield figures
    wrong = ", ".join(figures["wrong"])
    print(f"on {roof.device}; " + (f"WRONG: {wrong}" if wrong else "all results correct"))


def table(part: str, roof: Roof, *, on_gpu: bool, seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """(line, row) of each case of a part."""
    make = resolve(PARTS[part])
    if part == "loss":
        yield from make(roof, on_gpu=on_gpu, seconds=seconds)
        return
    for case in make(on_gpu, resolve("megajax.kernels.attention.attention:local_device")()):
        row = attempt(case, roof, seconds)
        yield line(row), row


def sliced(run: Callable, groups: int) -> Callable:
    """Attention on whole arrays [B, S, N, H] that computes one row and one key-value head at a time.

    The float32 scores of 8 rows of 4096 tokens and 32 heads take 16 GiB per array; those of one row and 4 heads take
    256 MiB.
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


def with_gradients(call: Callable[..., Array]) -> Callable:
    """(cotangent, *arguments) -> (result, gradients)."""

    def run(cotangent: Array, *arguments: Array) -> tuple[Array, tuple[Array, ...]]:
        out, pullback = jax.vjp(call, *arguments)
        return out, pullback(cotangent.astype(out.dtype))

    return run


def relative(actual: Array, expected: Array) -> float:
    """|actual - expected| / |expected| by Euclidean norms; NaN stays NaN."""
    gap = actual.astype(jnp.float32) - expected
    return float(jnp.linalg.norm(gap.ravel()) / jnp.linalg.norm(expected.ravel()))


def errors_of(results: Any, expected: Any) -> list[float]:
    """`relative` of each leaf."""
    return [relative(*pair) for pair in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)]


def measure(case: Case, roof: Roof, seconds: float) -> dict[str, Any]:
    """Errors against the reference in float32, times, floors and temporary memory of one case."""
    keys = jax.random.split(jax.random.key(0), len(case.shapes) + 1)
    arguments = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys[1:], case.shapes, strict=True)]
    cotangent = jax.random.normal(keys[0], jax.eval_shape(case.call, *arguments).shape, jnp.bfloat16)
    options = compiler_options(*GPU, *(FP8 if case.fp8 else ()))
    works = {"forward": (case.call, arguments), "both": (with_gradients(case.call), [cotangent, *arguments])}
    ready = {name: jax.jit(call).lower(*inputs).compile(options) for name, (call, inputs) in works.items()}
    results = ready["both"](cotangent, *arguments)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(case.expected())(*[x.astype(jnp.float32) for x in (cotangent, *arguments)])
    errors = errors_of(results, expected)
    del results, expected
    passes: dict[str, Any] = {}
    for (name, (_, inputs)), flops, moved in zip(works.items(), case.flops, case.moved, strict=True):
        statistics = readings_in(partial(ready[name], *inputs), jax.block_until_ready, seconds=seconds)
        floor = roof.floor_seconds(flops=flops, moved=moved, fp8=case.fp8)
        passes[name] = {
            "seconds": statistics.to_dict(),
            "tflops": flops / statistics.median / 1e12,
            "gigabytes_per_second": moved / statistics.median / 1e9,
            "floor_seconds": floor,
            "share_of_floor": None if floor is None else floor / statistics.median,
            "temporary_bytes": ready[name].memory_analysis().temp_size_in_bytes,
        }
    tolerance = case.tolerance or (TOLERANCE_FP8 if case.fp8 else TOLERANCE)
    right = all(error <= tolerance for error in errors)
    return {"name": case.name, "sizes": case.sizes, "errors": errors, **verdict(case, right=right), **passes}


def verdict(case: Case, *, right: bool) -> dict[str, Any]:
    """Whether the result is right. A case with a report may be wrong; its verdict says whether the fault is seen."""
    return {"right": right} if case.report is None else {"right": True, "report": case.report, "fault_seen": not right}


def attempt(case: Case, roof: Roof, seconds: float) -> dict[str, Any]:
    """`measure`; a kernel that fails to compile or run yields a row with its error, and the other cases go on."""
    try:
        return measure(case, roof, seconds)
    except Exception as error:  # the compiler and the device raise many types
        message = (str(error).strip().splitlines() or [""])[0]
        failed = {"name": case.name, "sizes": case.sizes, "fault": f"{type(error).__name__}: {message}"}
        return failed | verdict(case, right=False)


def line(row: dict[str, Any]) -> str:
    """The row of a case as text."""
    reported = ""
    if "report" in row:
        reported = f"; the fault of {row['report']} is " + ("here" if row["fault_seen"] else "not seen here")
    if "fault" in row:
        return f"{row['name']:<40} FAILED: {row['fault']}{reported}"
    parts = []
    for name in ("forward", "both"):
        figures = row[name]
        speed = f"{figures['tflops']:.0f} TFLOP/s"
        if figures["tflops"] < 1:
            speed = f"{figures['gigabytes_per_second']:.3g} GB/s"
        parts.append(f"{name} {1e3 * figures['seconds']['median']:.3f} ms {speed}{share_text(figures)}")
    return f"{head_text(row)} {'; '.join(parts)}; {error_text(row)}{reported}"


def head_text(row: dict[str, Any]) -> str:
    """Name and sizes, in columns."""
    return f"{row['name']:<40} {label('', row['sizes']).strip():<58}"


def share_text(figures: dict[str, Any]) -> str:
    return "" if figures["share_of_floor"] is None else f" {figures['share_of_floor']:.0%} of the roof"


def error_text(row: dict[str, Any]) -> str:
    return f"error {max(row['errors']):.1e}" + ("" if row["right"] else " WRONG")
