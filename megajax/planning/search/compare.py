"""Plans by formula beside a plan: another one, a sweep, and the cheapest changes where it does not fit."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from megajax import charts
from megajax.config import load
from megajax.config.dump import diff, flatten
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.nearest import did_you_mean
from megajax.config.tree import override
from megajax.metrics.banner import Section
from megajax.metrics.text import count, duration
from megajax.planning.cost.estimate import Case, Estimate, to_dict
from megajax.planning.cost.work import footprint
from megajax.planning.program.devices import DEVICES, GIB, GPUS, OTHER_NAMES, read_cluster
from megajax.planning.search.search import HEADROOM, OFFLOADS, Choice, Task, apply, divisors, problems, settings
from megajax.planning.show import Report, Table, memory_parts
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
    device = case.device if cluster.name == case.cluster.name else DEVICES[cluster.name]
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
    return Report(
        " and ".join(names), [Table("side by side", ("", *names, "ratio"), rows), *[differing] * bool(changed)]
    )


# Sweeps

OVER_DEVICES = "devices"
MAX_POINTS = 64
STEP_SETTINGS = ("steps", "schedule.", "profile.", "optimizer.")
"""Problems with these settings are no problems of a layout; a larger batch in fewer steps may cause them."""
type Mode = Literal["weak", "strong", ""]
MODES: dict[Mode, str] = {
    "weak": "weak scaling: the batch grows with the devices",
    "strong": "strong scaling: the batch stays the same",
    "": "one setting at several values",
}


@dataclass(frozen=True, slots=True)
class Point:
    """One plan of a sweep."""

    value: str
    mode: Mode
    case: Case
    refusal: str = ""
    """Why the config's rules refuse it; it has no estimate then."""

    @property
    def estimate(self) -> Estimate | None:
        return None if self.refusal else self.case.estimate

    @property
    def speed(self) -> float:
        """Tokens per second and device; 0 if refused."""
        return self.estimate.tokens_per_second_per_device if self.estimate else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        size = self.case.cfg.batch.global_size
        point = {"value": self.value, "mode": self.mode, "devices": self.case.cluster.devices, "global_size": size}
        return point | ({"refusal": self.refusal} if self.estimate is None else to_dict(self.estimate))


@dataclass(frozen=True, slots=True)
class Sweep:
    """All plans of a sweep."""

    axis: str
    modes: dict[Mode, list[Point]]

    @property
    def points(self) -> list[Point]:
        """Of all modes, those of weak scaling first."""
        return [point for points in self.modes.values() for point in points]

    @classmethod
    def of(cls, text: str, case: Case) -> "Sweep":
        """The sweep that --sweep asks for. Raises UserError for other text, and if the checks refuse every point."""
        axis, values = read_axis(text, case.cfg)
        over_devices = axis == OVER_DEVICES
        sweep = cls(axis, _over_devices(case, [*map(int, values)]) if over_devices else _over(case, axis, values))
        if all(point.refusal for point in sweep.points):
            raise UserError(f"--sweep={text}: no point passes the checks; the first: {sweep.points[0].refusal}")
        return sweep

    def to_list(self) -> list[dict[str, Any]]:
        """For JSON."""
        return [point.to_dict() for point in self.points]

    def report(self, source: str) -> Report:
        """A table of each mode."""
        names = ("rows", "microbatches", "step, s", "tokens/s/GPU", "tokens/s", "MFU", "efficiency", "bubble",
                 "exposed", "peak GiB", "fits")  # fmt: skip
        tables = [
            Table(MODES[mode], (self.axis, "data", *names), _sweep_rows(points), ())
            for mode, points in self.modes.items()
        ]
        refused = [("", f"{one.mode} {one.value}: {one.refusal}".strip()) for one in self.points if one.refusal]
        return Report(f"{source} by {self.axis}", [*tables, *[("refused", refused)] * bool(refused)])

    def save_picture(self, path: Path) -> None:
        """Tokens per second as a PNG. Raises UserError without matplotlib, and if the file can't be written."""

        def draw(axes: Any) -> None:
            for mode, points in self.modes.items():
                ran = [point for point in points if not point.refusal]
                speeds = [point.speed * point.case.cluster.devices for point in ran]
                axes.plot([point.value for point in ran], speeds, marker="o", label=MODES[mode])
            axes.set(title="Tokens per second", xlabel=self.axis, yscale="log" if "weak" in self.modes else "linear")
            axes.legend()

        try:
            charts.save_png(draw, path, inches=(8, 4.5), dpi=140)
        except ModuleNotFoundError as error:
            raise UserError(f"--png={path}: {error}; or leave out --png") from error
        except OSError as error:
            raise UserError(f"--png={path} can't be written: {error.strerror}") from error


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
    names = [OVER_DEVICES, *flatten(cfg)]
    if axis not in names:
        near = did_you_mean(axis, names)
        raise UserError(f"--sweep: unknown axis {axis!r}; {near or 'devices, or a setting such as batch.micro_size'}")
    values = _continued(text, values)
    if axis == OVER_DEVICES and (wrong := [value for value in values if not re.fullmatch(r"[1-9]\d{0,5}", value)]):
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


def _over_devices(case: Case, counts: Sequence[int]) -> dict[Mode, list[Point]]:
    """The same layout with more `data`. Weak: rows per device as at the first count; strong: the same global batch."""
    cfg = case.cfg.but(parallel=replace(case.cfg.parallel, data=None))
    size, name, per_node = cfg.batch.global_size, case.cluster.name, case.cluster.per_node
    weak, strong = [], []
    for devices in counts:
        refusal = _first(read_cluster(f"{name}:{devices}", per_node, {name: per_node})[1])
        there = replace(case, cfg=cfg, cluster=case.cluster._replace(devices=devices))
        strong.append(_point(there, str(devices), "strong", refusal))
        rows, over = divmod(size * devices, counts[0])
        if over:
            refusal = f"{size} rows on {counts[0]} are no whole number of rows on {devices}"
        steps = cfg.steps * counts[0] // devices  # the same number of tokens
        there = replace(there, cfg=cfg.but(batch=replace(cfg.batch, global_size=rows), steps=steps))
        weak.append(_point(there, str(devices), "weak", refusal))
    return {"weak": weak, "strong": strong}


def _over(case: Case, name: str, values: Sequence[str]) -> dict[Mode, list[Point]]:
    """The same config with values of a setting."""
    points = []
    for value in values:
        try:
            points.append(_point(replace(case, cfg=override(case.cfg, f"{name}={value}")), value))
        except ConfigError as error:
            points.append(Point(value, "", case, _first(error.problems)))
    return {"": points}


def _first(problems: Sequence[Problem]) -> str:
    return f"{problems[0].where}: {problems[0].what}" if problems else ""


def _point(case: Case, value: str, mode: Mode = "", refusal: str = "") -> Point:
    if not refusal:
        try:
            override(case.cfg, devices=case.cluster.devices)
        except ConfigError as error:
            refusal = _first([one for one in error.problems if not one.where.startswith(STEP_SETTINGS)])
    return Point(value, mode, case, refusal)


def _sweep_rows(points: Sequence[Point]) -> list[list[str]]:
    first = next((point.speed for point in points if point.speed), 0.0)
    rows = []
    for point in points:
        plan = point.estimate
        if plan is None:
            rows.append([point.value, *[""] * 11, "refused"])
            continue
        rows.append(
            [
                point.value,
                str(plan.run.parallel.data),
                f"{plan.run.global_size:,}",
                f"{plan.run.microbatches:,}",
                f"{plan.step_seconds:.3f}",
                f"{point.speed:,.0f}",
                f"{point.speed * plan.run.devices:,.0f}",
                f"{plan.mfu_causal:.1%}",
                f"{point.speed / first:.1%}",
                f"{plan.bubble_seconds / plan.step_seconds:.1%}",
                f"{plan.exposed_seconds / plan.step_seconds:.1%}",
                f"{plan.memory.peak_gib:.1f}",
                "yes" if plan.fits else "NO",
            ]
        )
    return rows


# Changes that make a plan fit

MOST_CHANGES = 3
"""Changes that are shown."""
TRIED = 8
"""Alternatives of a kind, the smallest plans, that are tried in pairs with those of another kind."""
SHARDINGS = ("replicate", "zero1", "fsdp")
"""Data sharding, from the largest plan to the smallest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Settings that make a config fit."""

    settings: tuple[str, ...]
    """Such as "parallel.data_sharding=fsdp"."""
    estimate: Estimate


def cheapest(here: Case, limit_gib: float) -> list[Change]:
    """Changes with a peak of at most `limit_gib` by formula, fastest first.

    One of each kind; then pairs of kinds that are not enough alone.
    """
    kinds = list(_kinds(here))
    single = [_fitting(here, kind, limit_gib) for kind in kinds]
    first = sorted((changes[0] for changes in single if changes), key=_seconds)
    if len(first) >= MOST_CHANGES:
        return first[:MOST_CHANGES]
    rest = [kind for kind, fitting in zip(kinds, single, strict=True) if not fitting]
    together = (
        _fitting(here, [a | b for a in one[-TRIED:] for b in other[-TRIED:] if not a.keys() & b.keys()], limit_gib)
        for one, other in combinations(rest, 2)
    )
    pairs = sorted((changes[0] for changes in together if changes), key=_seconds)
    more = sorted((change for fitting in single for change in fitting[1:]), key=_seconds)
    return sorted([*first, *pairs, *more][:MOST_CHANGES], key=_seconds)


def _seconds(change: Change) -> float:
    return change.estimate.step_seconds


def _kinds(here: Case) -> Iterator[list[dict[str, Any]]]:
    """Lists of alternatives, each as fields of a Choice and `loss_wait`; the smallest plan last."""
    cluster, repeats = here.cluster, here.cfg.model.stack.repeats
    choice = Choice.of(here.cfg, cluster.devices)
    yield [{"micro_size": n} for n in reversed(divisors(choice.micro_size, choice.micro_size - 1))]
    recomputes = Task(here).recomputes()
    known = choice.recompute in recomputes and choice.recompute_layers is None
    later = recomputes[recomputes.index(choice.recompute) + 1 :] if known else recomputes
    rows, size = -(-repeats // here.cfg.parallel.chunks()), len(here.cfg.model.stack.pattern)
    some = [{"recompute": "full", "recompute_layers": n * size} for n in range(1, rows)]
    yield [*some, *({"recompute": policy, "recompute_layers": None} for policy in later)]
    yield [{"data_sharding": name} for name in SHARDINGS[SHARDINGS.index(choice.data_sharding) + 1 :]]
    if choice.tensor > 1 and not choice.sequence:
        yield [{"sequence": True}]
    if choice.pipeline > 1:
        yield [{"virtual_stages": n} for n in range(choice.virtual_stages + 1, repeats // choice.pipeline + 1)]
        yield [{"loss_wait": 0}] if here.cfg.parallel.loss_wait else []
    for name in ("tensor", "pipeline"):
        now = getattr(choice, name)
        sequence = {"sequence": True} if name == "tensor" else {}
        yield [
            {name: now * by, "data": choice.data // by} | sequence
            for by in (2, 4)
            if choice.data % by == 0 and (name == "pipeline" or now * by <= cluster.per_node)
        ]
    yield [{"offload": share} for share in OFFLOADS if share > choice.offload]


def _fitting(here: Case, alternatives: list[dict[str, Any]], limit_gib: float) -> list[Change]:
    """Those that the config's rules allow and that fit, fastest first."""
    changes = (_change(here, one, limit_gib) for one in alternatives)
    return sorted((change for change in changes if change is not None), key=_seconds)


def _change(here: Case, fields: Mapping[str, Any], limit_gib: float) -> Change | None:
    chosen = {name: value for name, value in fields.items() if name != "loss_wait"}
    cfg = apply(replace(Choice.of(here.cfg, here.cluster.devices), **chosen), here.cfg)
    loss_wait = fields.get("loss_wait", cfg.parallel.loss_wait)
    data = None if here.cfg.parallel.data is None else cfg.parallel.data
    cfg = cfg.but(parallel=replace(cfg.parallel, loss_wait=loss_wait, data=data))
    if problems(cfg, here.cluster.devices):
        return None
    there = replace(here, cfg=cfg)
    if footprint(there.described).peak_gib > limit_gib:
        return None
    return Change(settings=tuple(settings(here.cfg, cfg)), estimate=there.estimate)


def advice(here: Case, *, excess_gib: float = 0.0, margin: float = HEADROOM) -> list[Table]:
    """What takes most memory of a plan that does not fit, and the cheapest changes that make it fit.

    Of a compiled plan, excess_gib: by how much it is larger than the formula says, assumed to be the same for every
    change. margin: fraction of usable memory that a change must leave.
    """
    now = here.estimate
    parts = sorted(memory_parts(now), key=lambda part: -part[1])
    rows = [(name, f"{size / GIB:.2f}", f"{size / now.memory.peak:.0%}", about) for name, size, about in parts if size]
    changes = [
        (
            " ".join(f"--{one}" for one in change.settings),
            f"{change.estimate.memory.peak_gib + excess_gib:.2f}",
            f"{change.estimate.step_seconds:.3f}",
            f"{change.estimate.step_seconds / now.step_seconds - 1:+.1%}",
        )
        for change in cheapest(here, here.device.usable_gib * (1 - margin) - excess_gib)
    ] or [("none of those tried; --search tries all layouts, more devices make room", "", "", "")]
    return [
        Table("it does not fit: what takes most memory", ("part", "GiB", "of peak", ""), rows, (0, 3)),
        Table("cheapest changes that make it fit", ("change", "peak, GiB", "step, s", "slower"), changes),
    ]
