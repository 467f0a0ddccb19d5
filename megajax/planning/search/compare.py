"""Plans by formula beside a plan: another one, a sweep, and the cheapest changes where it does not fit."""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from megajax.config import load
from megajax.config.builds import resolve
from megajax.config.dump import diff, flatten
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.nearest import did_you_mean
from megajax.config.tree import override
from megajax.metrics.banner import Report, Section, Table
from megajax.metrics.text import count, duration
from megajax.planning.cost.estimate import SPEED, Case, to_dict
from megajax.planning.program.devices import GIB, GPUS, OTHER_NAMES, read_cluster
from megajax.planning.search.search import HEADROOM, Choice, Entry, Task, changes, rank, ranked, search, settings
from megajax.planning.show import FIGURES, cells, memory_parts
from megajax.training.run_config import RunConfig

# Two plans

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
    devices, configs = ([word for word in named if _is_device(word) == device] for device in (True, False))
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
    device = case.device if cluster.name == case.cluster.name else GPUS[cluster.name]
    return Case(case.cfg, cluster, device)


def comparison(names: tuple[str, str], cases: tuple[Case, Case]) -> tuple[Report, dict[str, Any]]:
    """Two plans side by side, and their JSON: both plans, and the ratios of the second's figures to the first's."""
    plans = [to_dict(case.estimate) for case in cases]
    first, second = plans
    ratios = {name: second[name] / first[name] for name in (*SPEED, "peak_gib") if first[name]}
    facts: dict[str, Callable[[Case], str]] = {
        "devices": lambda case: f"{case.cluster.devices} x {case.device.name}",
        "parameters": lambda case: count(case.described.model.parameter_count().total),
        "mesh": lambda case: ", ".join(f"{axis} {n}" for axis, n in case.described.sizes.items() if n > 1) or "1",
        "microbatches": lambda case: f"{case.described.microbatches} x {case.described.micro_size} rows",
        "fits": lambda case: "yes" if case.estimate.fits else "NO",
        "whole run": lambda case: duration(case.estimate.days * 86_400) if case.described.steps else "",
    }
    rows = [[name, *map(fact, cases), ""] for name, fact in facts.items()]
    rows += [
        [name.replace("_", " "), f"{first[name]:.4g}", f"{second[name]:.4g}", f"{ratio:.3f}"]
        for name, ratio in ratios.items()
    ]
    changed = diff(cases[0].cfg, cases[1].cfg)
    more = [f"and {len(changed) - MAX_DIFFERENCES} more"] if len(changed) > MAX_DIFFERENCES else []
    differing: Section = ("settings that differ", [("", line) for line in [*changed[:MAX_DIFFERENCES], *more]])
    blocks = [Table("side by side", ("", *names, "ratio"), rows), *[differing] * bool(changed)]
    return Report(" and ".join(names), blocks), {"first": first, "second": second, "ratios": ratios}


# Sweeps

DEVICES_AXIS = "devices"
MAX_POINTS = 64
STEP_SETTINGS = ("steps", "schedule.", "profile.", "optimizer.")
"""Problems with these settings are no problems of a layout; a larger batch in fewer steps may cause them."""
MODES = {
    "weak": "weak scaling: the batch grows with the devices",
    "strong": "strong scaling: the batch stays the same",
    "": "one setting at several values",
}
type Point = dict[str, Any]
"""JSON of a plan of a sweep: `value`, `mode`, `devices`, `global_size`, and its figures or the rules' `refusal`."""


def sweep(text: str, case: Case, source: str, picture: Path | None) -> tuple[Report, list[Point]]:
    """The plans that --sweep asks for: a table of each mode, and JSON; picture: also draw them there.

    Raises UserError for other text, if the checks refuse every point, and if the picture can't be made.
    """
    axis, values = read_axis(text, case.cfg)
    points = _over_devices(case, [*map(int, values)]) if axis == DEVICES_AXIS else [*_over(case, axis, values)]
    refused = [("", f"{one['mode']} {one['value']}: {one['refusal']}".strip()) for one in points if "refusal" in one]
    if len(refused) == len(points):
        raise UserError(f"--sweep={text}: no point passes the checks; the first: {points[0]['refusal']}")
    curves = {title: [one for one in points if one["mode"] == mode] for mode, title in MODES.items()}
    columns = (axis, "data", "rows", "microbatches", "efficiency", "tokens/s", *FIGURES)
    tables = [Table(title, columns, [*_rows(curve)], ()) for title, curve in curves.items() if curve]
    if picture is not None:
        log = "log" if axis == DEVICES_AXIS else "linear"

        def plot(axes: Any) -> None:
            for title, curve in curves.items():
                if ran := [point for point in curve if "refusal" not in point]:
                    speeds = [point["tokens_per_second_per_device"] * point["devices"] for point in ran]
                    axes.plot([point["value"] for point in ran], speeds, marker="o", label=title)
            axes.set(title="Tokens per second", xlabel=axis, yscale=log)
            axes.legend()

        resolve("megajax.pipeline.drawing:save_as_asked")(plot, picture, inches=(8, 4.5))
    return Report(f"{source} by {axis}", [*tables, *[("refused", refused)] * bool(refused)]), points


def _rows(points: Sequence[Point]) -> Iterator[list[str]]:
    ran = [point["tokens_per_second_per_device"] for point in points if "refusal" not in point]
    for point in points:
        about = ["refused", "", "", "", ""]
        if "refusal" not in point:
            speed, counts = point["tokens_per_second_per_device"], (point["global_size"], point["microbatches"])
            about = [f"{n:,}" for n in (point["mesh"]["data"], *counts)]
            about += [f"{speed / ran[0]:.1%}", f"{speed * point['devices']:,.0f}"]
        yield [point["value"], *about, *cells(point)]


def read_axis(text: str, cfg: RunConfig) -> tuple[str, list[str]]:
    """ "devices:64,128,...,512" -> ("devices", ["64", "128", "256", "512"]).

    Raises UserError for an unknown axis and for wrong values.
    """
    axis, _, written = text.partition(":")
    values = [value.strip() for value in written.split(",") if value.strip()]
    if not values:
        raise UserError(
            f"--sweep={text!r} must be AXIS:VALUE,VALUE,...\nE.g. devices:64,128,...,16384 or batch.micro_size:1,2,4"
        )
    names = [DEVICES_AXIS, *flatten(cfg)]
    if axis not in names:
        near = did_you_mean(axis, names)
        raise UserError(f"--sweep: unknown axis {axis!r}; {near or 'devices, or a setting such as batch.micro_size'}")
    values = _continued(text, values) if "..." in values else values
    if axis == DEVICES_AXIS and (wrong := [value for value in values if not re.fullmatch(r"[1-9]\d{0,5}", value)]):
        raise UserError(f"--sweep={text!r}: {wrong[0]!r} is no number of devices")
    return axis, values


def _continued(text: str, values: list[str]) -> list[str]:
    """With "..." filled in, by a constant factor."""
    place = values.index("...")
    before, after = values[:place], values[place + 1 :]
    if len(before) < 2 or len(after) != 1 or not all(value.isdigit() for value in (*before, *after)):
        raise UserError(f"--sweep={text!r}: '...' stands between two or more numbers and the last one: 64,128,...,1024")
    start, filled, last = int(before[-2]), [int(before[-1])], int(after[0])
    while start and filled[-1] < last and filled[0] > start and len(filled) < MAX_POINTS:
        filled.append(filled[-1] * filled[0] // start)
    if filled[-1] != last:
        raise UserError(f"--sweep={text!r}: {start}, {filled[0]}, ... does not lead to {last} by a constant factor")
    return [*before[:-1], *map(str, filled)]


def _over_devices(case: Case, counts: Sequence[int]) -> list[Point]:
    """The same layout with more `data`. Weak: rows per device as at the first count; strong: the same global batch."""
    cfg = case.cfg.but(parallel=replace(case.cfg.parallel, data=None))
    size, name, per_node = cfg.batch.global_size, case.cluster.name, case.cluster.per_node
    weak, strong = [], []
    for devices in counts:
        wrong = read_cluster(f"{name}:{devices}", per_node, {name: per_node})[1]
        there = replace(case, cfg=cfg, cluster=case.cluster._replace(devices=devices))
        strong.append(_point(there, str(devices), wrong, mode="strong"))
        rows, over = divmod(size * devices, counts[0])
        if over:
            wrong = [Problem(f"{size} rows on {counts[0]}", f"no whole number of rows on {devices}")]
        steps = cfg.steps * counts[0] // devices  # the same number of tokens
        there = replace(there, cfg=cfg.but(batch=replace(cfg.batch, global_size=rows), steps=steps))
        weak.append(_point(there, str(devices), wrong, mode="weak"))
    return [*weak, *strong]


def _over(case: Case, name: str, values: Sequence[str]) -> Iterator[Point]:
    """The same config with values of a setting."""
    for value in values:
        try:
            yield _point(replace(case, cfg=override(case.cfg, f"{name}={value}")), value)
        except ConfigError as error:
            yield _point(case, value, error.problems)


def _point(case: Case, value: str, wrong: Sequence[Problem] = (), *, mode: str = "") -> Point:
    if not wrong:
        try:
            override(case.cfg, devices=case.cluster.devices)
        except ConfigError as error:
            wrong = [one for one in error.problems if not one.where.startswith(STEP_SETTINGS)]
    size = case.cfg.batch.global_size
    point = {"value": value, "mode": mode, "devices": case.cluster.devices, "global_size": size}
    return point | ({"refusal": f"{wrong[0].where}: {wrong[0].what}"} if wrong else to_dict(case.estimate))


# Changes that make a plan fit

MOST_CHANGES = 3
"""Changes that are shown."""
KINDS = (
    ("micro_size",),
    ("recompute", "recompute_layers"),
    ("data_sharding",),
    ("sequence",),
    ("virtual_stages",),
    ("tensor", "data", "sequence"),
    ("pipeline", "data"),
    ("context", "data"),
    ("offload",),
)
"""Fields of a Choice that are changed together."""


def cheapest(here: Case, limit_gib: float) -> list[Case]:
    """Changed configs with a peak of at most `limit_gib` by formula, fastest first.

    The best that a search finds where it may set one kind of fields alone; if these are too few, pairs of kinds that
    are not enough alone, and further layouts of one.
    """
    now = asdict(Choice.of(here.cfg, here.cluster.devices))

    def entries_with(kind: Sequence[str]) -> list[Entry]:
        task = Task(here, {name: value for name, value in now.items() if name not in kind}, limit_gib)
        return ranked({group.place: group for group in search(task)})

    single = {kind: entries_with(kind) for kind in KINDS}
    best = sorted((entries[0] for entries in single.values() if entries), key=rank)
    if len(best) < MOST_CHANGES:
        pairs = combinations([kind for kind, entries in single.items() if not entries], 2)
        best += sorted((entry for one, two in pairs for entry in entries_with((*one, *two))[:1]), key=rank)
        best += sorted((entry for entries in single.values() for entry in entries[1:]), key=rank)
    chosen = list({entry.choice: entry for entry in best}.values())[:MOST_CHANGES]
    return [replace(here, cfg=Task(here).config(entry.choice)) for entry in sorted(chosen, key=rank)]


def advice(here: Case, *, excess_gib: float = 0.0, margin: float = HEADROOM) -> list[Table]:
    """What takes most memory of a plan that does not fit, and the cheapest changes that make it fit.

    Of a compiled plan, excess_gib: by how much it is larger than the formula says, assumed to be the same for every
    change. margin: fraction of usable memory that a change must leave.
    """
    now = here.estimate
    parts = sorted(memory_parts(now), key=lambda part: -part[1])
    rows = [(name, f"{size / GIB:.2f}", f"{size / now.memory.peak:.0%}", about) for name, size, about in parts if size]
    fixes = [
        (
            " ".join(f"--{one}" for one in settings(changes(here.cfg, change.cfg))),
            f"{change.estimate.memory.peak_gib + excess_gib:.2f}",
            f"{change.estimate.step_seconds:.3f}",
            f"{change.estimate.step_seconds / now.step_seconds - 1:+.1%}",
        )
        for change in cheapest(here, here.device.usable_gib * (1 - margin) - excess_gib)
    ] or [("none of those tried; --search tries all layouts, more devices make room", "", "", "")]
    return [
        Table("it does not fit: what takes most memory", ("part", "GiB", "of peak", ""), rows, (0, 3)),
        Table("cheapest changes that make it fit", ("change", "peak, GiB", "step, s", "slower"), fixes),
    ]
