"""Scaling curves: plans by formula over numbers of devices, or over the values of a setting."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from megajax.config.dump import flatten
from megajax.config.errors import Problem, UserError
from megajax.config.nearest import did_you_mean
from megajax.config.patch import patch_of, setting
from megajax.config.tree import assemble
from megajax.metrics.banner import Report, Section, Table
from megajax.planning.cost.estimate import Case, to_dict
from megajax.planning.program.devices import read_cluster
from megajax.planning.show import FIGURES, cells

DEVICES = "devices"
MODES = {
    "weak": "weak scaling: the batch grows with the devices",
    "strong": "strong scaling: the batch stays the same",
    "": "one setting at several values",
}
MAX_POINTS = 64
STEP_SETTINGS = ("steps", "schedule.", "profile.", "optimizer.")
"""Problems with these settings do not concern the layout; a larger batch in fewer steps may cause them."""
type Point = dict[str, Any]
"""JSON of a plan: `value`, `mode`, `devices`, `global_size`, and its figures or the `refusal` of the rules."""


def read_axis(text: str, cfg: Any) -> tuple[str, list[str]]:
    """ "devices:64,128,...,512" -> ("devices", ["64", "128", "256", "512"]).

    Raises UserError for an unknown axis and for other values.
    """
    axis, _, listed = text.partition(":")
    values = [value.strip() for value in listed.split(",") if value.strip()]
    if not values:
        raise UserError(
            f"--sweep={text!r} must be AXIS:VALUE,VALUE,...\nE.g. devices:64,128,...,16384 or batch.micro_size:1,2,4"
        )
    names = [DEVICES, *flatten(cfg)]
    if axis not in names:
        hint = did_you_mean(axis, names) or "devices, or a setting such as batch.micro_size"
        raise UserError(f"--sweep: unknown axis {axis!r}; {hint}")
    if "..." in values:
        values = _continued(text, values)
    for value in values:
        if axis == DEVICES and not re.fullmatch(r"[1-9]\d{0,5}", value):
            raise UserError(f"--sweep={text!r}: {value!r} is no number of devices")
    return axis, values


def _continued(text: str, values: list[str]) -> list[str]:
    """The values with "..." filled in, by a constant factor."""
    place = values.index("...")
    before, after = values[:place], values[place + 1 :]
    if len(before) < 2 or len(after) != 1 or not all(value.isdigit() for value in (*before, *after)):
        raise UserError(f"--sweep={text!r}: '...' stands between two or more numbers and the last one: 64,128,...,1024")
    start, second, last = int(before[-2]), int(before[-1]), int(after[0])
    filled = [second]
    while 0 < start < second and filled[-1] < last and len(filled) < MAX_POINTS:
        filled.append(filled[-1] * second // start)
    if filled[-1] != last:
        raise UserError(f"--sweep={text!r}: {start}, {second}, ... does not lead to {last} by a constant factor")
    return [*before[:-1], *map(str, filled)]


def sweep_points(case: Case, axis: str, values: Sequence[str]) -> list[Point]:
    """A plan for each value. Over devices, `data` grows, for weak and for strong scaling."""
    if axis != DEVICES:
        return [_point(case, "", value, [f"{axis}={value}"]) for value in values]
    cluster, rows, first, points = case.cluster, case.cfg.batch.global_size, int(values[0]), []
    for mode, value in product(("weak", "strong"), values):
        devices, settings = int(value), ["parallel.data=none"]
        _, problems = read_cluster(f"{cluster.device.name}:{value}", cluster.per_node, cluster.device)
        if mode == "weak":
            weak_rows, remainder = divmod(rows * devices, first)
            if remainder:
                problems = [Problem(f"{rows} rows on {first}", f"no whole number of rows on {devices}")]
            # As many tokens in all.
            settings += [f"batch.global_size={weak_rows}", f"steps={case.cfg.steps * first // devices}"]
        scaled = replace(case, cluster=cluster._replace(devices=devices))
        points.append(_point(scaled, mode, value, settings, problems))
    return points


def _point(case: Case, mode: str, value: str, settings: list[str], problems: Sequence[Problem] = ()) -> Point:
    """A plan of the case with other settings. problems: those of its devices."""
    devices, patch = case.cluster.devices, patch_of(map(setting, settings))
    cfg, rules = assemble(type(case.cfg), case.cfg, patch, devices)
    refusals = [*problems, *(rule for rule in rules if not (mode and rule.setting.startswith(STEP_SETTINGS)))]
    rows = (cfg or case.cfg).batch.global_size
    point = {"value": value, "mode": mode, "devices": devices, "global_size": rows}
    if refusals:
        return point | {"refusal": f"{refusals[0].setting}: {refusals[0].message}"}
    return point | to_dict(replace(case, cfg=cfg).estimate)


def tokens_per_second(point: Point) -> float:
    """Of all devices."""
    return point["tokens_per_second_per_device"] * point["devices"]


def sweep_report(source: str, axis: str, points: Sequence[Point]) -> Report:
    """A table of each mode, and the points that the rules refuse."""
    columns = (axis, "data", "rows", "microbatches", "efficiency", "tokens/s", *FIGURES)
    blocks: list[Section | Table] = []
    for mode, title in MODES.items():
        rows, base = [], 0.0
        for point in points:
            if point["mode"] != mode:
                continue
            texts = ["refused", "", "", "", ""]
            if "refusal" not in point:
                speed = point["tokens_per_second_per_device"]
                base = base or speed
                counts = point["mesh"]["data"], point["global_size"], point["microbatches"]
                texts = [*(f"{n:,}" for n in counts), f"{speed / base:.1%}", f"{tokens_per_second(point):,.0f}"]
            rows.append([point["value"], *texts, *cells(point)])
        if rows:
            blocks.append(Table(title, columns, rows, ()))
    refused = [f"{point['mode']} {point['value']}: {point['refusal']}" for point in points if "refusal" in point]
    if refused:
        blocks.append(("refused", [("", line.strip()) for line in refused]))
    return Report(f"{source} by {axis}", blocks)


def draw_sweep(axis: str, points: Sequence[Point], axes: Any) -> None:
    """Tokens per second, a curve of each mode, on matplotlib axes."""
    for mode, title in MODES.items():
        if curve := [point for point in points if point["mode"] == mode and "refusal" not in point]:
            axes.plot([point["value"] for point in curve], [*map(tokens_per_second, curve)], marker="o", label=title)
    axes.set(title="Tokens per second", xlabel=axis, yscale="log" if axis == DEVICES else "linear")
    axes.legend()
