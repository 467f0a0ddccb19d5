"""Plans by formula side by side: two plans, or a sweep over numbers of devices or values of a setting."""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megajax import charts, pages
from megajax.charts import LineChart, Series
from megajax.config import load
from megajax.config.dump import diff, flatten
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.nearest import did_you_mean
from megajax.config.tree import override
from megajax.metrics.banner import Section
from megajax.metrics.text import count, duration
from megajax.planning.cost.costs import known_device
from megajax.planning.cost.estimate import Estimate, to_dict
from megajax.planning.program.devices import GPUS, OTHER_NAMES, read_cluster
from megajax.planning.search.candidates import Case
from megajax.planning.show import Report, Table, memory_parts, pictures
from megajax.training.run_config import RunConfig

MAX_DIFFERENCES = 12
"""Differing settings that a comparison lists."""


def other(case: Case, asked: str, per_node: int | None) -> Case:
    """What --compare describes: words as on a command line, a config and a device each at most once.

    What they don't name is that of `case`. Raises UserError for other words, and for none.
    """
    try:
        words = shlex.split(asked)
    except ValueError as error:
        raise UserError(f"--compare={asked!r}: {error}") from error
    overrides = [word.removeprefix("--") for word in words if word.startswith("--")]
    named = [word for word in words if not word.startswith("--")]
    devices = [word for word in named if _is_device(word)]
    configs = [word for word in named if not _is_device(word)]
    if not words or len(devices) > 1 or len(configs) > 1:
        raise UserError(
            f"--compare={asked!r} names {'nothing' if not words else 'more than one of a kind'} to compare with.\n"
            "Give another config, another device, or settings: --compare=OTHER.py, --compare=h200:64, "
            '--compare="--parallel.tensor=4", or several in one pair of quotes.'
        )
    there = _on_devices(case, devices[0], per_node) if devices else case
    number = there.cluster.devices
    if configs:
        return replace(there, cfg=load(configs[0], *overrides, devices=number))
    return replace(there, cfg=override(case.cfg, *overrides, devices=number, place=f"--compare={asked}"))


def _is_device(word: str) -> bool:
    name = word.partition(":")[0].lower()
    return name in GPUS or name in OTHER_NAMES or bool(re.fullmatch(r"[\w-]+:\d+", word))


def _on_devices(case: Case, text: str, per_node: int | None) -> Case:
    text = text if ":" in text else f"{text}:{case.cluster.devices}"
    cluster, wrong = read_cluster(text, per_node, {case.device.name: case.device.per_node})
    if cluster is None:
        raise ConfigError([Problem("--compare", one.what, one.hint) for one in wrong], "command line")
    device = case.device if cluster.name == case.cluster.name else known_device(cluster.name)
    return Case(case.cfg, cluster, device)


COMPARED: tuple[tuple[str, Callable[[Estimate], float], str], ...] = (
    ("step, s", lambda plan: plan.step_seconds, ".3f"),
    ("tokens/s per device", lambda plan: plan.tokens_per_second_per_device, ",.0f"),
    ("tokens/s", lambda plan: plan.tokens_per_second_per_device * plan.run.devices, ",.0f"),
    ("MFU, causal attention", lambda plan: plan.mfu_causal, ".1%"),
    ("computing, s", lambda plan: plan.compute_seconds, ".3f"),
    ("exposed communication, s", lambda plan: plan.exposed_seconds, ".3f"),
    ("bubble, s", lambda plan: plan.bubble_seconds, ".3f"),
    ("optimizer, s", lambda plan: plan.optimizer_seconds, ".3f"),
    ("peak, GiB", lambda plan: plan.memory.peak_gib, ".2f"),
    ("usable, GiB", lambda plan: plan.run.device.usable_gib, ".2f"),
    ("tokens of a step", lambda plan: plan.run.step_tokens, ",.0f"),
    ("GPU hours", lambda plan: plan.device_hours, ",.0f"),
)
"""Figures that are compared: name, value, format."""


def ratios(first: Estimate, second: Estimate) -> dict[str, float | None]:
    """The second over the first, by name of COMPARED; None if the first is 0."""
    pairs = {name: (value(first), value(second)) for name, value, _ in COMPARED}
    return {name: there / here if here else None for name, (here, there) in pairs.items()}


def comparison_report(names: tuple[str, str], cases: tuple[Case, Case]) -> Report:
    """Two plans side by side."""
    first, second = (case.estimate for case in cases)
    facts: dict[str, Callable[[Case], str]] = {
        "devices": lambda case: f"{case.cluster.devices} x {case.device.name}",
        "parameters": lambda case: count(case.described.model.parameter_count().total),
        "mesh": lambda case: ", ".join(f"{axis} {n}" for axis, n in case.described.sizes.items() if n > 1) or "1",
        "microbatches": lambda case: f"{case.described.microbatches} x {case.described.micro_size} rows",
        "fits": lambda case: "yes" if case.estimate.fits else "NO",
        "whole run": lambda case: duration(case.estimate.days * 86_400) if case.described.steps else "",
    }
    rows = [[name, *map(fact, cases), ""] for name, fact in facts.items()]
    over = ratios(first, second)
    for name, value, style in COMPARED:
        ratio = over[name]
        rows.append([name, format(value(first), style), format(value(second), style), f"{ratio:.3f}" if ratio else ""])
    changed = diff(cases[0].cfg, cases[1].cfg)
    more = [f"and {len(changed) - MAX_DIFFERENCES} more"] if len(changed) > MAX_DIFFERENCES else []
    differing: Section = ("settings that differ", [("", line) for line in [*changed[:MAX_DIFFERENCES], *more]])
    title = " and ".join(names)
    return Report(
        title=title,
        blocks=[Table("side by side", ("", *names, "ratio"), rows), *[differing] * bool(changed)],
        page_title=title,
        pictures=lambda: [*_cards(names[0], first), *_cards(names[1], second)],
    )


def _cards(name: str, plan: Estimate) -> list[str]:
    return [pages.header(name), *pictures(plan, memory_parts(plan))]


# Sweeps

DEVICES = "devices"
MAX_POINTS = 64
STEP_SETTINGS = ("steps", "schedule.", "profile.", "optimizer.")
"""Problems with these settings are no problems of a layout; a larger batch in fewer steps may cause them."""
type Mode = Literal["weak", "strong", ""]
"""The batch grows with the devices, or stays; "" of a sweep over a setting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One plan of a sweep."""

    value: str
    mode: Mode
    devices: int
    global_size: int
    estimate: Estimate | None
    """None if the config's rules refuse it."""
    refusal: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        point = {"value": self.value, "mode": self.mode, "devices": self.devices, "global_size": self.global_size}
        return point | ({"refusal": self.refusal} if self.estimate is None else to_dict(self.estimate))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """All plans of a sweep, those of weak scaling first."""

    axis: str
    case: Case
    points: tuple[Point, ...]

    def modes(self) -> list[tuple[Mode, list[Point]]]:
        """The points by mode."""
        modes = dict.fromkeys(point.mode for point in self.points)
        return [(mode, [point for point in self.points if point.mode == mode]) for mode in modes]

    def refusals(self) -> list[str]:
        return [f"{p.mode} {p.value}: {p.refusal}".strip() for p in self.points if p.refusal]


def sweep(text: str, case: Case) -> Sweep:
    """The sweep that --sweep asks for. Raises UserError for other text, and if the checks refuse every point."""
    axis, values = read_axis(text, case.cfg)
    points = [_at_setting(case, axis, value) for value in values] if axis != DEVICES else [
        *_over_devices(case, [*map(int, values)])
    ]  # fmt: skip
    if all(point.estimate is None for point in points):
        raise UserError(f"--sweep={text}: no point passes the checks; the first: {points[0].refusal}")
    return Sweep(axis=axis, case=case, points=tuple(points))


def read_axis(text: str, cfg: RunConfig) -> tuple[str, list[str]]:
    """ "devices:64,128,...,512" -> ("devices", ["64", "128", "256", "512"]).

    Raises UserError for an unknown axis and for wrong values.
    """
    axis, colon, written = text.partition(":")
    values = [value.strip() for value in written.split(",") if value.strip()]
    if not colon or not values:
        raise UserError(
            f"--sweep={text!r} must be AXIS:VALUE,VALUE,...\nE.g. devices:64,128,...,16384 or batch.micro_size:1,2,4"
        )
    names = [DEVICES, *flatten(cfg)]
    if axis not in names:
        near = did_you_mean(axis, names)
        raise UserError(f"--sweep: unknown axis {axis!r}; {near or 'devices, or a setting such as batch.micro_size'}")
    values = _continued(text, values)
    if axis == DEVICES and (wrong := [value for value in values if not re.fullmatch(r"[1-9]\d{0,5}", value)]):
        raise UserError(f"--sweep={text!r}: {wrong[0]!r} is no number of devices")
    return axis, values


def _continued(text: str, values: list[str]) -> list[str]:
    """With "..." filled in: by a constant factor if that leads to the last value, else by a constant difference."""
    if "..." not in values:
        return values
    place = values.index("...")
    before, after = values[:place], values[place + 1 :]
    if len(before) < 2 or len(after) != 1 or not all(value.isdigit() for value in (*before, *after)):
        raise UserError(f"--sweep={text!r}: '...' stands between two or more numbers and the last one: 64,128,...,1024")
    start, second, last = int(before[-2]), int(before[-1]), int(after[0])
    for following in (lambda n: n * second // start if second % start == 0 else 0, lambda n: n + second - start):
        filled, n = list(before), second
        while n < last and following(n) > n and len(filled) < MAX_POINTS:
            n = following(n)
            filled.append(str(n))
        if n == last:
            return filled
    raise UserError(f"--sweep={text!r}: {start}, {second}, ... does not lead to {last} in {MAX_POINTS} steps")


def _over_devices(case: Case, counts: Sequence[int]) -> Iterator[Point]:
    """The same layout with more `data`. Weak: rows per device as at the first count; strong: the same global batch."""
    cfg = case.cfg.but(parallel=replace(case.cfg.parallel, data=None))
    size, cluster = cfg.batch.global_size, case.cluster
    for mode in ("weak", "strong"):
        for devices in counts:
            there = replace(case, cfg=cfg, cluster=cluster._replace(devices=devices))
            _, wrong = read_cluster(f"{cluster.name}:{devices}", cluster.per_node, {cluster.name: cluster.per_node})
            refusal = _first(wrong)
            if mode == "weak":
                rows, over = divmod(size * devices, counts[0])
                steps = cfg.steps * counts[0] // devices  # the same number of tokens
                there = replace(there, cfg=cfg.but(batch=replace(cfg.batch, global_size=rows), steps=steps))
                if over:
                    refusal = f"{size} rows on {counts[0]} are no whole number of rows on {devices}"
            yield _point(there, str(devices), mode, refusal)


def _at_setting(case: Case, name: str, value: str) -> Point:
    try:
        return _point(replace(case, cfg=override(case.cfg, f"{name}={value}")), value)
    except ConfigError as error:
        return _point(case, value, refusal=_first(error.problems))


def _first(problems: Sequence[Problem]) -> str:
    return f"{problems[0].where}: {problems[0].what}" if problems else ""


def _point(case: Case, value: str, mode: Mode = "", refusal: str = "") -> Point:
    if not refusal:
        try:
            override(case.cfg, devices=case.cluster.devices)
        except ConfigError as error:
            refusal = _first([one for one in error.problems if not one.where.startswith(STEP_SETTINGS)])
    return Point(
        value=value,
        mode=mode,
        devices=case.cluster.devices,
        global_size=case.cfg.batch.global_size,
        estimate=None if refusal else case.estimate,
        refusal=refusal,
    )


def efficiency(points: Sequence[Point]) -> list[float | None]:
    """Tokens per second and device over those of the first point that is not refused."""
    speeds = [point.estimate.tokens_per_second_per_device if point.estimate else None for point in points]
    first = next((one for one in speeds if one), None)
    return [one / first if one and first else None for one in speeds]


MODES = {
    "weak": "weak scaling: the batch grows with the devices",
    "strong": "strong scaling: the batch stays the same",
    "": "one setting at several values",
}


def sweep_report(sweep: Sweep, source: str) -> Report:
    """Tables of the points, and for devices the curves of weak and strong scaling."""
    title = f"{source} by {sweep.axis}, {sweep.points[0].devices} x {sweep.case.device.name}"
    about: list[Section] = []
    if sweep.axis == DEVICES:
        parallel, rows = sweep.case.cfg.parallel, sweep.case.cfg.batch.micro_size
        chunks = f" x {parallel.virtual_stages}" if parallel.virtual_stages > 1 else ""
        kept = f"tensor {parallel.tensor}, pipeline {parallel.pipeline}{chunks}, {parallel.data_sharding}, " \
            f"{rows} row{'s' * (rows > 1)} of a microbatch"  # fmt: skip
        title = f"{source} on more and more {sweep.case.device.name}"
        about = [("layout", [("fixed", kept), ("grows", "data")])]
    names = ("rows", "microbatches", "step, s", "tokens/s/GPU", "tokens/s", "MFU", "efficiency", "bubble", "exposed")
    tables = [
        Table(MODES[mode], (sweep.axis, *["data"] * bool(mode), *names, "peak GiB", "fits"), [*_sweep_rows(points)], ())
        for mode, points in sweep.modes()
    ]
    refused: Section = ("refused", [("", line) for line in sweep.refusals()])
    drawn = chart(sweep)
    return Report(
        title=title,
        blocks=[*about, *tables, *[refused] * bool(refused[1])],
        page_title=title,
        pictures=lambda: [pages.section(drawn.title, drawn.svg() + _chart_legend(drawn))] * drawn.log_x,
    )


def _sweep_rows(points: Sequence[Point]) -> Iterator[list[str]]:
    for point, share in zip(points, efficiency(points), strict=True):
        plan = point.estimate
        if plan is None:
            yield [point.value, *[""] * (11 if point.mode else 10), "refused"]
            continue
        yield [
            point.value,
            *([str(plan.run.parallel.data)] if point.mode else []),
            f"{point.global_size:,}",
            f"{plan.run.microbatches:,}",
            f"{plan.step_seconds:.3f}",
            f"{plan.tokens_per_second_per_device:,.0f}",
            f"{plan.tokens_per_second_per_device * plan.run.devices:,.0f}",
            f"{plan.mfu_causal:.1%}",
            "" if share is None else f"{share:.1%}",
            f"{plan.bubble_seconds / plan.step_seconds:.1%}",
            f"{plan.exposed_seconds / plan.step_seconds:.1%}",
            f"{plan.memory.peak_gib:.1f}",
            "yes" if plan.fits else "NO",
        ]


def chart(sweep: Sweep) -> LineChart:
    """Tokens per second over devices, or over the number of the point."""
    over_devices = sweep.axis == DEVICES
    series = []
    for color, (mode, points) in enumerate(sweep.modes()):
        plans = [(place, point.estimate) for place, point in enumerate(points) if point.estimate is not None]
        x = [float(plan.run.devices if over_devices else place) for place, plan in plans]
        y = [plan.tokens_per_second_per_device * plan.run.devices for _, plan in plans]
        series += [Series(f"{mode} scaling" if mode else "tokens/s", x, y, color, "dots")] * bool(plans)
    places = [at for one in series for at in one.x]
    return LineChart(
        title="Tokens per second",
        series=series,
        unit="tokens/s",
        x_label=sweep.axis,
        width=1180,
        height=320,
        scale="log" if over_devices else "linear",
        log_x=over_devices,
        first=min(places),
        last=max(places),
    )


def _chart_legend(drawn: LineChart) -> str:
    return charts.legend((f"c{one.color}", one.name, "") for one in drawn.series)


def save_chart(sweep: Sweep, path: Path) -> None:
    """The chart as a PNG. Raises UserError without matplotlib, and if the file can't be written."""
    drawn = chart(sweep)
    values = [point.value for point in sweep.modes()[0][1]]

    def draw(axes: Any) -> None:
        drawn.plot(axes)
        if drawn.log_x:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        axes.set_xticks([*map(int, values)] if drawn.log_x else range(len(values)), values)

    try:
        charts.save_png(draw, path, inches=(8, 4.5), dpi=140)
    except ModuleNotFoundError as error:
        raise UserError(f"--png={path}: {error}; or leave out --png") from error
    except OSError as error:
        raise UserError(f"--png={path} can't be written: {error.strerror}") from error
