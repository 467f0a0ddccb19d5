"""Speed of steps: tokens per second, FLOP/s, and the share of the hardware's peak (MFU); and goodput of a run.

MFU, model FLOPs utilisation, is defined in PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): the FLOP/s a
model needs, without recomputation, divided by the peak of the devices. It is given twice: causal, with the attention
scores that the mask leaves, and full, with all scores, as without a mask. Published figures use either. The FLOPs are
those of `megajax.models.facts.count_flops`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megajax.display.text import duration

# The first match applies. The name of a partition of a device (MIG) does not tell its share of the peak.
_PEAK_TFLOPS: tuple[tuple[str, float | None], ...] = (
    (r"\bMIG\b", None),
    (r"\bGB[23]00\b", 2500),
    (r"\bB[23]00\b", 2250),
    (r"\bGH200\b", 989),
    (r"\bH200 NVL\b", 835),
    (r"\bH200\b", 989),
    (r"\bH100 NVL\b", 835),
    (r"\bH[18]00 PCIe\b", 756),
    (r"\bH[18]00\b", 989),
    (r"\bH20\b", 148),
    (r"\bA[18]00\b", 312),
    (r"\bA30\b", 165),
    (r"\bA40\b", 149.7),
    (r"\bA10G\b", 70),
    (r"\bA10\b", 125),
    (r"\bL40S\b", 362),
    (r"\bL40\b", 181),
    (r"\bL4\b", 121),
    (r"\bRTX A6000\b", 154.8),
    (r"\bRTX 6000 Ada\b", 364.2),
    (r"\bRTX 5090\b(?! D| Laptop)", 209.5),
    (r"\bRTX 4090\b(?! D| Laptop)", 165.2),
    (r"\bRTX 3090\b(?! Ti)", 71.2),
)


def peak_bf16_flops(device_kind: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of one device with float32 accumulation, as published, not measured here.

    device_kind: `jax.devices()[0].device_kind`. None for CPUs and for kinds missing from the table.
    """
    for pattern, tflops in _PEAK_TFLOPS:
        if re.search(pattern, device_kind):
            return None if tflops is None else tflops * 1e12
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Speed of a step, or the mean over several; None if unknown. The field names are keys of metrics.jsonl."""

    step_seconds: float
    """Wall time of the step, s."""
    tokens_per_second: float | None
    """Throughput of all devices together."""
    tokens_per_second_per_device: float | None
    tflops_per_device_causal: float | None
    """Model TFLOP/s per device, with the attention scores that the mask leaves."""
    tflops_per_device_full: float | None
    """Model TFLOP/s per device, with all attention scores."""
    mfu_causal: float | None
    """Fraction of the peak, 0 to 1."""
    mfu_full: float | None
    """Fraction of the peak, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRate:
    """Converts the seconds of a step into rates.

    `flops_per_token_causal` and `flops_per_token_full` count forward and backward passes without recomputation, at the
    run's sequence length; `peak_flops` is the FLOP/s of a device. Rates that depend on a None are None.
    """

    devices: int
    flops_per_token_causal: float | None = None
    flops_per_token_full: float | None = None
    peak_flops: float | None = None

    def rates(self, seconds: float, tokens: int) -> Rates:
        """Rates of a step over `tokens` tokens (its whole global batch) that took `seconds` of wall time."""
        speed = tokens / seconds if seconds > 0 else None
        per_device = None if speed is None else speed / self.devices
        causal = _product(per_device, self.flops_per_token_causal)
        full = _product(per_device, self.flops_per_token_full)
        return Rates(
            step_seconds=seconds,
            tokens_per_second=speed,
            tokens_per_second_per_device=per_device,
            tflops_per_device_causal=_product(causal, 1e-12),
            tflops_per_device_full=_product(full, 1e-12),
            mfu_causal=_product(causal, self._per_peak),
            mfu_full=_product(full, self._per_peak),
        )

    @property
    def _per_peak(self) -> float | None:
        return 1 / self.peak_flops if self.peak_flops else None


def _product(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


def mean_rates(steps: Sequence[Rates]) -> Rates:
    """The rates over all `steps` (at least one): total work divided by total time."""
    seconds = [step.step_seconds for step in steps]
    means: dict[str, float | None] = {"step_seconds": sum(seconds) / len(seconds)}
    for name in (field.name for field in fields(Rates) if field.name != "step_seconds"):
        values = [getattr(step, name) for step in steps]
        all_known = all(value is not None for value in values) and sum(seconds) > 0
        means[name] = sum(v * s for v, s in zip(values, seconds, strict=True)) / sum(seconds) if all_known else None
    return Rates(**means)  # type: ignore[arg-type]


SMALLEST, MOST = 0.005, 4
"""A summary lists causes with at least this share of the wall time, and at most this many."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Wall time of a run over all its attempts, in seconds."""

    elapsed: float
    """Wall time from the beginning of the first attempt."""
    effective: float
    """Time in steps whose result was kept."""
    attempts: int
    lost_seconds: Mapping[str, float]
    """Cause -> seconds; together the difference of `elapsed` and `effective`."""

    @property
    def share(self) -> float:
        """effective / elapsed, 0 to 1."""
        return self.effective / self.elapsed if self.elapsed > 0 else 0.0

    def summary(self) -> str:
        """For example "93.1% of 2h14m in 3 attempts; lost: 3.0% between attempts, 2.0% saving"."""
        plural = "" if self.attempts == 1 else "s"
        text = f"{self.share:.1%} of {duration(self.elapsed)} in {self.attempts} attempt{plural}"
        shares = (
            {cause: seconds / self.elapsed for cause, seconds in self.lost_seconds.items()} if self.elapsed > 0 else {}
        )
        largest = sorted(shares.items(), key=lambda item: -item[1])[:MOST]
        parts = [f"{share:.1%} {cause}" for cause, share in largest if share >= SMALLEST]
        return text + ("; lost: " + ", ".join(parts) if parts else "")

    def fields(self) -> dict[str, Any]:
        """Fields of the event `goodput`."""
        return {
            "effective": round(self.share, 5),
            "elapsed_seconds": round(self.elapsed, 3),
            "effective_seconds": round(self.effective, 3),
            "attempts": self.attempts,
            "lost_seconds": {cause: round(seconds, 3) for cause, seconds in self.lost_seconds.items()},
        }
