"""Which curves a report shows, and what happened along them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np

from megajax.charts import Chart, Mark, Series
from megajax.metrics.plot import running_mean
from megajax.reporting.facts import details, mood_of
from megajax.reporting.history import History, Steps
from megajax.reporting.timeline import Attempt

WIDE, HIGH = 1160, 380
"""Size of the loss chart."""

MEANS = 200
"""Of a long run: a mean is of the run's steps over this, so that it lags little."""

MEAN_FROM, ZIGZAG = 10, 20.0
"""Steps in the mean of a curve, at least, for it to be shown, and the way such a curve goes over its height."""

UNCOMPILED = "without steps that compile"

KNOWN = frozenset(
    {
        *("loss", "grad_norm", "lr", "loss_scale", "skipped", "consumed_samples", "consumed_tokens", "step_seconds"),
        *("tokens_per_second", "tokens_per_second_per_device", "tflops_per_device_causal", "tflops_per_device_full"),
        *("mfu_causal", "mfu_full", "memory_device", "memory_device_peak", "memory_host"),
    }
)
"""Columns with a chart of their own, or none; all others but seconds of phases are what a model reports."""


def curves(history: History, found: Sequence[Attempt]) -> list[Chart]:
    """The loss first, then everything else there is a number of."""
    marks = list(_marks(found))
    lines = [mark for mark in marks if mark.line]
    last = float(history.steps.step[-1]) if len(history.steps) else 1.0
    charts = [_loss(history)] if len(history.steps) else []
    charts += _rest(history, {attempt.first_step + 1 for attempt in found})
    drawn = []
    for chart in charts:
        if any(np.isfinite(one.y).any() for one in chart.series) or chart.broken:
            wide = {"width": WIDE, "height": HIGH, "marks": marks} if chart.title == "Loss" else {"marks": lines}
            drawn.append(replace(chart, last=last, **wide))
    return drawn


def _loss(history: History) -> Chart:
    steps = history.steps
    series = list(_with_mean(Series("train", steps.step, steps.column("loss"), 0), always=True))
    for index, (split, (at, losses)) in enumerate(history.evaluations.items()):
        series.append(Series(split, at, losses, 1 + index % 5, "dots"))
    return Chart(title="Loss", unit="nats per token", series=series, broken=tuple(sorted(steps.broken.items())))


def _with_mean(series: Series, *, always: bool = False) -> Iterator[Series]:
    """A long curve that goes up and down all the time as what it is, faintly, and its running mean."""
    window = len(series.x) // MEANS
    finite = series.y[np.isfinite(series.y)]
    way = float(np.abs(np.diff(finite)).sum())
    if window < 2 or not (always or (window >= MEAN_FROM and way > ZIGZAG * float(np.ptp(finite)))):
        yield series
        return
    yield replace(series, style="faint")
    yield replace(series, name=f"{series.name}, mean of {window:,} steps", y=running_mean(series.y, window))


def _rest(history: History, compiling: Collection[int]) -> Iterator[Chart]:
    """compiling: steps whose time is that of a compilation; they are left out where they would flatten a curve."""
    steps = history.steps
    compiles = np.isin(steps.step, list(compiling)) if len(steps) > len(compiling) else np.zeros(len(steps), bool)

    def series(*named: tuple[str, str], all_steps: bool = True) -> list[Series]:
        found = []
        for index, (name, column) in enumerate(named):
            y = steps.column(column)
            y = y if all_steps else np.where(compiles, np.nan, y)
            if np.isfinite(y).any():
                found += _with_mean(Series(name, steps.step, y, index))
        return found

    norm = series(("gradient norm", "grad_norm"))
    skipped = tuple((int(step), "update not made") for step in steps.step[steps.column("skipped") == 1])
    yield Chart(title="Gradient norm", unit="before clipping", series=norm, broken=skipped)
    yield Chart(title="Learning rate", series=series(("learning rate", "lr")), linear=True)
    yield from _speed(steps, series)
    times = series(("step", "step_seconds"), ("of it waiting for rows", "seconds_data_wait"))
    yield Chart(title="Time of a step", unit="s", series=times)
    yield from _memory(steps)
    scale = steps.column("loss_scale")
    if np.isfinite(scale).any() and np.nanmin(scale) != np.nanmax(scale):
        yield Chart(title="Loss scale", series=series(("loss scale", "loss_scale")))
    for name in sorted(steps.columns.keys() - KNOWN):
        if not name.startswith("seconds_"):
            yield Chart(title=name.replace("_", " "), series=series((name.replace("_", " "), name)))


def _memory(steps: Steps) -> Iterator[Chart]:
    places = {
        "Memory of a device": (("in use after the step", "memory_device"), ("most so far", "memory_device_peak")),
        "Main memory": (("process 0", "memory_host"),),
    }
    for title, named in places.items():
        sizes = [Series(name, steps.step, steps.column(column) / 2**30, at) for at, (name, column) in enumerate(named)]
        yield Chart(title=title, unit="GiB", series=sizes, linear=True)


def _speed(steps: Steps, series: Callable[..., list[Series]]) -> Iterator[Chart]:
    total, each = steps.column("tokens_per_second"), steps.column("tokens_per_second_per_device")
    shown = series(("tokens/s", "tokens_per_second"), all_steps=False)
    yield Chart(title="Tokens per second", unit=f"all devices; {UNCOMPILED}", series=shown)
    if not np.array_equal(total, each, equal_nan=True):
        shown = series(("tokens/s per device", "tokens_per_second_per_device"), all_steps=False)
        yield Chart(title="Tokens per second and device", unit=UNCOMPILED, series=shown)
    names = ("attention causal", "causal"), ("attention in full", "full")
    if np.isfinite(steps.column("mfu_causal")).any():
        mfu = series(*((name, f"mfu_{column}") for name, column in names), all_steps=False)
        yield Chart(title="MFU", unit=f"model FLOP/s over the peak; {UNCOMPILED}", series=mfu, percent=True)
    else:
        tflops = series(*((name, f"tflops_per_device_{column}") for name, column in names), all_steps=False)
        yield Chart(title="TFLOP/s per device", unit=f"of the model; {UNCOMPILED}", series=tflops)


def _marks(found: Sequence[Attempt]) -> Iterator[Mark]:
    for attempt in found:
        if attempt.number > 1:
            yield Mark(
                attempt.first_step, "resume", f"attempt {attempt.number} goes on after step {attempt.first_step:,}"
            )
        for event in attempt.events:
            if event.step is None or event.name in ("start", "first_step", "compiled", "end", "metrics_superseded"):
                continue
            words = event.name.replace("_", " ")
            text = f"step {event.step:,}: {words} ({details(event)})"
            small = event.name in ("save", "evaluate")
            yield Mark(event.step, event.name if small else mood_of(event), text, line=not small)
