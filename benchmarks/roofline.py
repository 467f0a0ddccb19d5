"""Limits of a device: published peaks, and the minimum time of operations and bytes."""

import re
from dataclasses import dataclass

from megajax.config.errors import UserError
from megajax.metrics.throughput import peak_bf16_flops
from megajax.planning.compiled.devices import GPUS

# Data-centre chips from Hopper on multiply 8-bit floats at twice the rate of 16-bit ones (data sheets, dense).
_TWICE_IN_FP8 = re.compile(r"\b(GB[23]00|B[23]00|GH200|H200|H[18]00)\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class Roof:
    """Peaks of one device. A peak that is not known is None, and no share of it is reported."""

    device: str
    """`device_kind` of jax."""
    bf16: float | None = None
    """Dense bfloat16 FLOP/s with float32 accumulation."""
    fp8: float | None = None
    """Dense 8-bit FLOP/s."""
    bandwidth: float | None = None
    """Bytes per second of device memory."""
    source: str = "data sheet"
    """Origin of the numbers."""

    def floor_seconds(self, *, flops: float, moved: float, fp8: bool = False) -> float | None:
        """The minimum time for so many operations and bytes; None if either peak is unknown."""
        peak = self.fp8 if fp8 else self.bf16
        if peak is None or self.bandwidth is None:
            return None
        return max(flops / peak, moved / self.bandwidth)


def roof_of(kind: str, platform: str, *, peak_tflops: float | None = None) -> Roof:
    """The peaks of a device, by `device_kind` and `platform` of jax. A CPU has none.

    peak_tflops: the user's bfloat16 peak in place of the table's. Raises UserError for any other device without a known
    peak, because a share of a guessed peak would look like a measurement.
    """
    if peak_tflops is not None and not peak_tflops > 0:
        raise UserError(f"--peak-tflops must be above 0, got {peak_tflops:g}")
    if peak_tflops is not None:
        return Roof(device=kind, bf16=peak_tflops * 1e12, bandwidth=_bandwidth(kind), source="given with --peak-tflops")
    if platform == "cpu":
        return Roof(device=kind, source="none is known for CPU")
    peak = peak_bf16_flops(kind)
    if peak is None:
        raise UserError(
            f"no peak is known for {kind!r}, so no MFU can be told.\nGive the bfloat16 TFLOP/s of its data sheet, "
            "dense and with float32 accumulation: --peak-tflops=N"
        )
    fp8 = 2 * peak if _TWICE_IN_FP8.search(kind) else None
    return Roof(device=kind, bf16=peak, fp8=fp8, bandwidth=_bandwidth(kind))


def _bandwidth(kind: str) -> float | None:
    return next((gpu.bandwidth for gpu in GPUS.values() if gpu.description == kind), None)
