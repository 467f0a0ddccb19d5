"""The curves of a report, with marks for the events of the run."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megajax.display.charts import LineChart, Mark, Series
from megajax.metrics.plots import running_mean
from megajax.reporting.attempts import Attempt
from megajax.reporting.history import ROUTINE, STATUS, History
from megajax.reporting.run_summary import details

LOSS_SIZE = {"width": 1160, "height": 380}

MEANS = 200
"""A running mean covers 1/MEANS of the run's steps."""

MEAN_FROM, ZIGZAG = 10, 20.0
"""Curves other than the loss get a running mean if it covers MEAN_FROM steps, and if their total variation exceeds
ZIGZAG times their range."""

WITHOUT_COMPILATION = "without steps that compile"

PLOTTED = frozenset(
    {
        *("loss", "grad_norm", "lr", "loss_scale", "skipped", "consumed_samples", "consumed_tokens", "step_seconds"),
        *("tokens_per_second", "tokens_per_second_per_device", "tflops_per_device_causal", "tflops_per_device_full"),
        *("mfu_causal", "mfu_full", "memory_device", "memory_device_peak", "memory_host", "save_failed"),
    }
)
"""Columns with a dedicated chart or without one. The others, except seconds of phases, are metrics of the model."""

UNMARKED = ROUTINE - {"save_committed", "evaluate"} | {"start", "end", "restart"}
"""Events without a mark."""


def curves(history: History, runs: Sequence[Attempt]) -> list[LineChart]:
    """The loss, then all other metrics with finite values."""
    marks = list(_marks(runs))
    lines = [mark for mark in marks if mark.line]
    last = float(history.steps.step[-1]) if len(history.steps) else 1.0
    charts = [_loss(history)] if len(history.steps) else []
    charts += _other_charts(history, {run.first_step + 1 for run in runs})
    return [
        replace(chart, last=last, **(LOSS_SIZE | {"marks": marks} if chart.title == "Loss" else {"marks": lines}))
        for chart in charts
        if any(np.isfinite(np.asarray(series.y)).any() for series in chart.series) or chart.crosses
    ]


def _loss(history: History) -> LineChart:
    steps = history.steps
    series = _with_mean(Series("train", steps.step, steps.column("loss")), always=True)
    for index, (split, (at, losses)) in enumerate(history.evaluations.items()):
        series.append(Series(split, at, losses, 1 + index % 5, "dots"))
    crosses = tuple(sorted(steps.nonfinite.items()))
    return LineChart(title="Loss", unit="nats per token", series=series, crosses=crosses)


def _with_mean(series: Series, *, always: bool = False) -> list[Series]:
    """The curve; a long, jittering curve is drawn faintly behind its running mean."""
    window = len(series.x) // MEANS
    y = np.asarray(series.y)
    finite = y[np.isfinite(y)]
    jitters = window >= MEAN_FROM and float(np.abs(np.diff(finite)).sum()) > ZIGZAG * float(np.ptp(finite))
    if window < 2 or not (always or jitters):
        return [series]
    name = f"{series.name}, mean of {window:,} steps"
    return [replace(series, style="faint"), replace(series, name=name, y=running_mean(y, window))]


def _other_charts(history: History, compiling: Collection[int]) -> Iterator[LineChart]:
    """All charts except the loss. compiling: steps whose time includes a compilation, omitted from curves of speed."""
    steps, layers = history.steps, history.layers.values
    compiles = np.isin(steps.step, list(compiling)) if len(steps) > len(compiling) else np.zeros(len(steps), bool)

    def chart(
        title: str, unit: str, columns: Mapping[str, str], *, factor: float = 1.0, speed: bool = False, **options: Any
    ) -> LineChart:
        """columns: name of the curve -> column, multiplied by `factor`."""
        series: list[Series] = []
        for index, (name, column) in enumerate(columns.items()):
            y = np.where(compiles & speed, np.nan, steps.column(column) * factor)
            if np.isfinite(y).any():
                series += _with_mean(Series(name, steps.step, y, index))
        return LineChart(title=title, unit=unit + WITHOUT_COMPILATION * speed, series=series, **options)

    skipped = tuple((int(step), "update skipped") for step in steps.step[steps.column("skipped") == 1])
    yield chart("Gradient norm", "before clipping", {"gradient norm": "grad_norm"}, crosses=skipped)
    yield chart("Learning rate", "", {"learning rate": "lr"}, scale="linear")
    total, per_device = "tokens_per_second", "tokens_per_second_per_device"
    yield chart("Tokens per second", "all devices; ", {"tokens per second": total}, speed=True)
    if not np.array_equal(steps.column(total), steps.column(per_device), equal_nan=True):
        yield chart("Tokens per second and device", "", {"tokens per second": per_device}, speed=True)
    if steps.median("mfu_causal") is not None:
        mfu = {"causal attention": "mfu_causal", "full attention": "mfu_full"}
        yield chart("MFU", "model FLOP/s over the peak; ", mfu, percent=True, speed=True)
    elif history.shows_flops:
        tflops = {"causal attention": "tflops_per_device_causal", "full attention": "tflops_per_device_full"}
        yield chart("TFLOP/s per device", "of the model; ", tflops, speed=True)
    yield chart("Step time", "s", {"step": "step_seconds", "waiting for data": "seconds_data_wait"})
    device = {"in use after the step": "memory_device", "peak so far": "memory_device_peak"}
    yield chart("Device memory", "GiB", device, factor=2**-30, scale="linear")
    yield chart("Host memory", "GiB", {"process 0": "memory_host"}, factor=2**-30, scale="linear")
    scales = steps.column("loss_scale")
    if np.isfinite(scales).any() and np.nanmin(scales) != np.nanmax(scales):
        yield chart("Loss scale", "", {"loss scale": "loss_scale"})
    for name in sorted(steps.columns.keys() - PLOTTED):
        # Metrics of layers that are always 0, for example dropped tokens, are omitted.
        if not name.startswith("seconds_") and not (name in layers and not np.nan_to_num(steps.column(name)).any()):
            scale = "linear" if name.startswith("reward") else "auto"
            yield chart(name.replace("_", " "), "", {name.replace("_", " "): name}, scale=scale)


def _marks(runs: Sequence[Attempt]) -> Iterator[Mark]:
    for run in runs:
        if run.number > 1:
            yield Mark(run.first_step, "resume", f"attempt {run.number} resumes after step {run.first_step:,}")
        for event in run.events:
            if event.step is not None and event.name not in UNMARKED:
                text = f"step {event.step:,}: {event.name.replace('_', ' ')} ({details(event)})"
                routine = {"save_committed": "save", "evaluate": "evaluate"}.get(event.name)
                yield Mark(event.step, routine or STATUS.get(event.name, "plain"), text, line=routine is None)
