"""Scaling curves: the same layout on more and more devices, or with one setting at several values; by formulas."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any, Literal, TextIO

import rich.console
from rich.table import Table

from megajax.config.dump import flatten
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.missing import require
from megajax.config.nearest import did_you_mean
from megajax.config.tree import override
from megajax.planning.cost.costs import Device
from megajax.planning.cost.description import describe
from megajax.planning.cost.estimate import Estimate, estimate, to_dict
from megajax.planning.program.devices import Cluster, read_cluster
from megajax.planning.search.search_command import write_json
from megajax.training.run_config import RunConfig

DEVICES = "devices"
MOST_POINTS = 64
OF_STEPS = ("steps", "schedule.", "profile.", "optimizer.")
"""Where problems lie that a larger batch in fewer steps may bring, and that are none of the layout."""
type Mode = Literal["weak", "strong", ""]
"""The batch grows with the devices, or stays; "" of a sweep over a setting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One plan of a sweep."""

    value: str
    mode: Mode
    devices: int
    global_size: int
    found: Estimate | None
    """None where the config's rules refuse it."""
    refusal: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """All plans, those of weak scaling first."""

    axis: str
    cfg: RunConfig
    device: Device
    points: tuple[Point, ...]

    def of(self, mode: Mode) -> list[Point]:
        return [point for point in self.points if point.mode == mode]


def run(*, cfg: RunConfig, source: str, cluster: Cluster, device: Device, flags: Mapping[str, Any]) -> Sweep:
    """Sweep, print, and write what the flags ask for. Raises UserError for what the user has to change."""
    axis, values = read(flags["sweep"], cfg)
    if axis == DEVICES:
        found = over_devices(cfg, cluster, device, [int(value) for value in values])
    else:
        found = over_setting(cfg, (cluster, device), axis, values)
    if all(point.found is None for point in found.points):
        raise UserError(f"--sweep={flags['sweep']}: no point passes the checks; the first: {found.points[0].refusal}")
    if flags["png"] is not None:
        save_picture(found, flags["png"])
    print(heading(found, source))
    show(found)
    if flags["png"] is not None:
        print(f"\npicture {flags['png']}")
    if flags["json"] is not None:
        write_json([plain(point) for point in found.points], flags["json"])
    return found


def read(text: str, cfg: RunConfig) -> tuple[str, list[str]]:
    """ "devices:64,128,...,512" -> ("devices", ["64", "128", "256", "512"]).

    Raises UserError for an unknown axis and for values that are none.
    """
    axis, colon, written = text.partition(":")
    values = [value.strip() for value in written.split(",") if value.strip()]
    if not colon or not values:
        raise UserError(
            f"--sweep={text!r} must be AXIS:VALUE,VALUE,...\nE.g. devices:64,128,...,16384 or batch.micro_size:1,2,4"
        )
    if axis != DEVICES and axis not in flatten(cfg):
        near = did_you_mean(axis, [DEVICES, *flatten(cfg)])
        raise UserError(f"--sweep: unknown axis {axis!r}; {near or 'devices, or a setting such as batch.micro_size'}")
    values = _continued(text, values)
    if axis == DEVICES and (wrong := [value for value in values if not re.fullmatch(r"[1-9]\d{0,5}", value)]):
        raise UserError(f"--sweep={text!r}: {wrong[0]!r} is no number of devices")
    return axis, values


def _continued(text: str, values: list[str]) -> list[str]:
    """With "..." filled in: by a factor where that leads to the last, else by a difference."""
    if "..." not in values:
        return values
    place = values.index("...")
    before, after = values[:place], values[place + 1 :]
    if len(before) < 2 or len(after) != 1 or not all(value.isdigit() for value in (*before, *after)):
        raise UserError(f"--sweep={text!r}: '...' stands between two or more numbers and the last one: 64,128,...,1024")
    start, second, last = int(before[-2]), int(before[-1]), int(after[0])
    for following in (lambda n: n * second // start if second % start == 0 else 0, lambda n: n + second - start):
        found, n = list(before), second
        while n < last and following(n) > n and len(found) < MOST_POINTS:
            n = following(n)
            found.append(str(n))
        if n == last:
            return found
    raise UserError(f"--sweep={text!r}: {start}, {second}, ... does not lead to {last} in {MOST_POINTS} steps")


def over_devices(cfg: RunConfig, cluster: Cluster, device: Device, counts: Sequence[int]) -> Sweep:
    """The layout stays, `data` grows. Weak: rows for each device as at the first count; strong: rows of a step stay."""
    cfg = cfg.but(parallel=replace(cfg.parallel, data=None))
    points = []
    for mode in ("weak", "strong"):
        for devices in counts:
            rows, over = divmod(cfg.batch.global_size * devices, counts[0])
            steps = cfg.steps * counts[0] // devices  # the same tokens in all
            there = cfg if mode == "strong" else cfg.but(batch=replace(cfg.batch, global_size=rows), steps=steps)
            where = Cluster(cluster.name, devices, cluster.per_node)
            uneven = f"{cfg.batch.global_size} rows on {counts[0]} are no whole number of rows on {devices}"
            refusal = uneven if over and mode == "weak" else _devices_problem(where, device)
            points.append(_point(there, where, device, (str(devices), mode), refusal))
    return Sweep(axis=DEVICES, cfg=cfg, device=device, points=tuple(points))


def over_setting(cfg: RunConfig, there: tuple[Cluster, Device], name: str, values: Sequence[str]) -> Sweep:
    """One setting at several values, on the same devices."""
    points = []
    for value in values:
        changed, refusal = cfg, ""
        try:
            changed = override(cfg, f"{name}={value}")
        except ConfigError as error:
            refusal = _first(error.problems)
        points.append(_point(changed, *there, (value, ""), refusal))
    return Sweep(axis=name, cfg=cfg, device=there[1], points=tuple(points))


def _devices_problem(where: Cluster, device: Device) -> str:
    _, problems = read_cluster(f"{where.name}:{where.devices}", where.per_node, {device.name: where.per_node})
    return _first(problems)


def _first(problems: Sequence[Problem]) -> str:
    return f"{problems[0].where}: {problems[0].what}" if problems else ""


def _point(cfg: RunConfig, where: Cluster, device: Device, named: tuple[str, Mode], refusal: str) -> Point:
    found = None
    if not refusal:
        try:
            override(cfg, devices=where.devices)
        except ConfigError as error:
            refusal = _first([one for one in error.problems if not one.where.startswith(OF_STEPS)])
    if not refusal:
        found = estimate(describe(cfg, device, where.devices, where.per_node))
    value, mode = named
    return Point(
        value=value, mode=mode, devices=where.devices, global_size=cfg.batch.global_size, found=found, refusal=refusal
    )


def plain(point: Point) -> dict[str, Any]:
    """For JSON."""
    told = {"value": point.value, "mode": point.mode, "devices": point.devices, "global_size": point.global_size}
    return told | ({"refusal": point.refusal} if point.found is None else to_dict(point.found))


def heading(found: Sweep, source: str) -> str:
    """What stays and what changes."""
    if found.axis != DEVICES:
        return f"{source} by {found.axis}, {found.points[0].devices} x {found.device.name}"
    parallel = found.cfg.parallel
    chunks = f" x {parallel.virtual_stages}" if parallel.virtual_stages > 1 else ""
    return (
        f"{source} on more and more {found.device.name}\n"
        f"  stays: tensor {parallel.tensor}, pipeline {parallel.pipeline}{chunks}, {parallel.data_sharding}, "
        f"{found.cfg.batch.micro_size} row{'s' * (found.cfg.batch.micro_size > 1)} of a microbatch; grows: data"
    )


TITLES: dict[Mode, str] = {
    "weak": "weak scaling: the batch grows with the devices",
    "strong": "strong scaling: the batch stays",
}


def efficiency(points: Sequence[Point]) -> list[float | None]:
    """Tokens per second and device over those of the first point that could be."""
    speeds = [point.found.tokens_per_second_per_device if point.found else None for point in points]
    first = next((one for one in speeds if one), None)
    return [one / first if one and first else None for one in speeds]


def tables(found: Sweep) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, headings and rows of each mode."""
    made = []
    for mode in dict.fromkeys(point.mode for point in found.points):
        points = found.of(mode)
        names = [found.axis, *(["data"] if mode else []), "rows", "microbatches", "step, s", "tokens/s/GPU", "tokens/s"]
        names += ["MFU", "efficiency", "bubble", "exposed", "peak GiB", "fits"]
        rows = [_row(point, share) for point, share in zip(points, efficiency(points), strict=True)]
        made.append((TITLES.get(mode, ""), names, rows))
    return made


def _row(point: Point, share: float | None) -> list[str]:
    one = point.found
    if one is None:
        return [point.value, *[""] * (11 if point.mode else 10), "refused"]
    step = one.step_seconds
    return [
        point.value,
        *([str(one.run.parallel.data)] if point.mode else []),
        f"{point.global_size:,}",
        f"{one.run.microbatches:,}",
        f"{step:.3f}",
        f"{one.tokens_per_second_per_device:,.0f}",
        f"{one.tokens_per_second_per_device * one.run.devices:,.0f}",
        f"{one.mfu_causal:.1%}",
        "" if share is None else f"{share:.1%}",
        f"{one.bubble_seconds / step:.1%}",
        f"{one.exposed_seconds / step:.1%}",
        f"{one.memory.peak_gib:.1f}",
        "yes" if one.fits else "NO",
    ]


def show(found: Sweep, file: TextIO | None = None) -> None:
    """Print the tables."""
    drawn = StringIO()
    console = rich.console.Console(file=drawn, width=170, highlight=False, color_system=None)
    for title, names, rows in tables(found):
        made = Table(box=None, pad_edge=False, title=title or None, title_justify="left", title_style="")
        for name in names:
            made.add_column(name, justify="right")
        for row in rows:
            made.add_row(*row)
        console.print("", made)
    lines = [line.rstrip() for line in drawn.getvalue().splitlines()]
    refused = [f"  {point.mode} {point.value}: {point.refusal}" for point in found.points if point.refusal]
    print("\n".join([*lines, *["", "refused"] * bool(refused), *refused]), file=file or sys.stdout)


def save_picture(found: Sweep, path: Path) -> None:
    """Tokens per second and model FLOP utilization as curves, a PNG. Raises UserError where that can't be."""
    figures = require("matplotlib.figure", f"--png={path}", otherwise="leave out --png")
    # A bare Figure: pyplot would keep it, and look for a display.
    figure = figures.Figure(figsize=(11, 4.5), dpi=140, layout="constrained")
    speed, share = figure.subplots(1, 2)
    for mode in dict.fromkeys(point.mode for point in found.points):
        points = [point for point in found.of(mode) if point.found is not None]
        if not points:
            continue
        x = [point.devices if mode else place for place, point in enumerate(points)]
        rates = [point.found.tokens_per_second_per_device * point.devices for point in points if point.found]
        speed.plot(x, rates, marker="o", label=mode or "tokens/s")
        share.plot(x, [100 * point.found.mfu_causal for point in points if point.found], marker="o", label=mode)
        if mode == "weak":
            ideal = [rates[0] * n / x[0] for n in x]
            speed.plot(x, ideal, linestyle=":", color="gray", label="ideal")
        if not mode:
            for axes in (speed, share):
                axes.set_xticks(x, [point.value for point in points])
    if found.axis == DEVICES:
        speed.set_xscale("log", base=2)
        speed.set_yscale("log")
        share.set_xscale("log", base=2)
        for axes in (speed, share):
            axes.set_xticks(sorted({p.devices for p in found.points}))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            axes.tick_params(axis="x", rotation=45)
    for axes, name in ((speed, "tokens/s"), (share, "MFU, causal attention, %")):
        axes.set_xlabel(found.axis)
        axes.set_ylabel(name)
        axes.grid(alpha=0.25)
    share.set_ylim(bottom=0)
    speed.legend(frameon=False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UserError(f"--png={path} can't be written: {error.strerror}") from error
