"""The lines that a run prints, with the field names of Megatron-LM's log, so that its parsers work."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType

from megajax.display import text
from megajax.metrics.record import EvaluationRecord, StepRecord
from megajax.metrics.throughput import Rates, mean_rates


@dataclass(frozen=True, slots=True)
class Terms:
    """Names of a model's loss and speed. For tokens, they are Megatron-LM's."""

    unit: str = "tokens"
    """Unit of the speed: tokens, positions or rows. Perplexity is shown for tokens only."""
    flops: bool = True
    """Whether FLOP/s are shown; on CPUs they are close to 0."""
    megatron: float | None = 1.0
    """FLOPs by Megatron-LM's formula over those that the model needs (causal), for the line that has the format of its
    log; None: not known."""
    likelihood: bool = True
    """Whether the loss is a mean of -log p, so that its exponential is a perplexity."""

    @property
    def loss(self) -> str:
        return "lm loss" if self.perplexity else "loss"

    @property
    def perplexity(self) -> bool:
        return self.unit == "tokens" and self.likelihood

    @property
    def speed(self) -> str:
        return f"{self.unit}/s/device"


LANGUAGE = Terms()


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A summary of the steps since the last line."""

    last: StepRecord
    loss: float
    """Mean over steps with a finite loss that were not skipped; the last step's loss without such steps."""
    rates: Rates
    skipped: int
    """Steps whose update was skipped."""
    not_finite: int
    """Steps with a nan or infinite loss, with or without an update."""
    phases: Mapping[str, float]
    """Seconds by phase: the mean of data_wait, the sum of others, the last known value of *_min and *_max."""

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> "Summary":
        """Summarize `records`, at least one, in order of step."""
        finite_losses = [record.loss for record in records if math.isfinite(record.loss) and not record.skipped]
        return cls(
            last=records[-1],
            loss=sum(finite_losses) / len(finite_losses) if finite_losses else records[-1].loss,
            rates=mean_rates([record.rates for record in records]),
            skipped=sum(record.skipped for record in records),
            not_finite=sum(not math.isfinite(record.loss) for record in records),
            phases=_phases(records),
        )


def _phases(records: Sequence[StepRecord]) -> dict[str, float]:
    phases: dict[str, float] = {}
    for record in records:
        for name, seconds in record.phases.items():
            phases[name] = seconds if name.endswith(("_min", "_max")) else phases.get(name, 0.0) + seconds
    if "data_wait" in phases:
        phases["data_wait"] /= len(records)
    return phases


_AFTER_NORM = MappingProxyType({"num_zeros": "num zeros: {:.1f}", "parameter_norm": "params norm: {:.3f}"})
"""Metrics with a fixed place and name in the line."""

_TIMES = MappingProxyType(
    {"data_wait": "data wait per iteration (ms)", "evaluation": "evaluation (ms)", "save": "save (ms)"}
)


def _times(phases: Mapping[str, float]) -> list[str]:
    """Seconds by phase as fields, with the smallest and largest over processes if known."""
    parts = []
    for name, title in _TIMES.items():
        time_text = f"{1000 * phases[name]:.1f}" if name in phases else None
        if f"{name}_max" in phases:
            extremes = " to ".join(f"{1000 * phases[f'{name}_{end}']:.1f}" for end in ("min", "max"))
            time_text = f"{time_text} (processes: {extremes})" if time_text else f"(processes: {extremes})"
        if time_text:
            parts.append(f"{title}: {time_text}")
    return parts


def _of_layers(record: StepRecord) -> list[tuple[str, str]]:
    """Names and values of the layers' metrics that a terminal shows."""
    return [(report.measure.label, report.text) for report in record.measured.values() if report.text]


def step_line(summary: Summary, *, total_steps: int, now: datetime, eta: float | None, terms: Terms = LANGUAGE) -> str:
    """The line of a training step. Unknown fields are omitted; `eta` is in seconds."""
    last, rates = summary.last, summary.rates
    parts = [
        f" [{now:%Y-%m-%d %H:%M:%S}] iteration {last.step:8d}/{total_steps:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {rates.step_seconds * 1000:.1f}",
    ]
    if terms.flops and terms.megatron is not None and rates.tflops_per_device_causal is not None:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {terms.megatron * rates.tflops_per_device_causal:.1f}")
    parts += [
        f"learning rate: {last.lr:.6E}",
        f"global batch size: {last.global_batch_size:5d}",
        f"{terms.loss}: {summary.loss:.6E}",
    ]
    parts += [f"{name}: {value:.6E}" for name, value in last.metrics.items() if name not in _AFTER_NORM]
    parts += [f"{name}: {value}" for name, value in _of_layers(last)]
    if last.loss_scale is not None:
        parts.append(f"loss scale: {last.loss_scale:.1f}")
    parts += [
        f"grad norm: {last.grad_norm:.3f}",
        *(field.format(last.metrics[name]) for name, field in _AFTER_NORM.items() if name in last.metrics),
        f"number of skipped iterations: {summary.skipped:3d}",
        f"number of nan iterations: {summary.not_finite:3d}",
    ]
    if rates.tokens_per_second_per_device is not None:
        parts.append(f"{terms.speed}: {rates.tokens_per_second_per_device:.1f}")
    if rates.mfu_causal is not None:
        parts.append(f"MFU: {rates.mfu_causal:.1%}")
    parts += _times(summary.phases)
    if last.save_failed:
        parts.append("ckpt: FAILED")
    if eta is not None and last.step < total_steps:
        parts.append(f"ETA: {text.duration(eta)}")
    return " | ".join(parts) + " |"


def evaluation_line(record: EvaluationRecord, terms: Terms = LANGUAGE) -> str:
    """The line of an evaluation."""
    parts = [f" {record.split} loss at iteration {record.step}"]
    if record.loss is not None:
        parts.append(f"{terms.loss} value: {record.loss:.6E}")
    if terms.perplexity and (perplexity := record.perplexity) is not None:
        parts.append(f"{terms.loss} PPL: {perplexity:.6E}")
    parts += [f"{name.replace('_', ' ')}: {value:.6E}" for name, value in record.metrics.items()]
    return " | ".join(parts) + " |"


SPEEDS = tuple(Terms(unit).speed for unit in ("tokens", "positions", "rows"))
EXPENDABLE = ("perplexity", "TFLOP/s/device", "lr", "MFU", *SPEEDS, "grad norm")
"""Fields that a narrow terminal omits, in this order."""


def short_fields(summary: Summary, *, speed: bool = True, terms: Terms = LANGUAGE) -> list[tuple[str, str]]:
    """(name, value) pairs for a terminal. Unknown figures are omitted, and speeds unless `speed`."""
    last, rates = summary.last, summary.rates
    pairs = [("loss", f"{summary.loss:.4f}"), ("grad norm", f"{last.grad_norm:.3f}"), ("lr", f"{last.lr:.2e}")]
    if speed and rates.tokens_per_second_per_device is not None:
        pairs.append((terms.speed, text.count(rates.tokens_per_second_per_device)))
    if speed and terms.flops and rates.tflops_per_device_causal is not None:
        pairs.append(("TFLOP/s/device", f"{rates.tflops_per_device_causal:.1f}"))
    if speed and rates.mfu_causal is not None:
        pairs.append(("MFU", f"{rates.mfu_causal:.1%}"))
    pairs += _of_layers(last)
    if summary.skipped:
        pairs.append(("skipped", str(summary.skipped)))
    if summary.not_finite:
        pairs.append(("not finite", str(summary.not_finite)))
    if last.save_failed:
        pairs.append(("ckpt", "FAILED"))
    return pairs
