"""Two plans side by side: of two configs, of one with other settings, or on two kinds of devices; by formulas."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, TextIO

import rich.console
from rich.table import Table

from megajax.config import load
from megajax.config.dump import diff
from megajax.config.errors import ConfigError, UserError
from megajax.config.tree import override
from megajax.metrics.text import count, duration
from megajax.planning.cost.costs import Device, known_device
from megajax.planning.cost.description import describe
from megajax.planning.cost.estimate import Estimate, estimate, to_dict
from megajax.planning.program.devices import GPUS, OTHER_NAMES, Cluster, read_cluster
from megajax.planning.search.search_command import write_json
from megajax.training.run_config import RunConfig

MOST_DIFFERENCES = 12
"""Settings that differ and are told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A plan."""

    name: str
    cfg: RunConfig
    found: Estimate


def run(
    *, cfg: RunConfig, source: str, cluster: Cluster, device: Device, flags: Mapping[str, Any]
) -> tuple[Side, Side]:
    """Compare, print, and write what the flags ask for. Raises UserError for what the user has to change."""
    first = Side(name=source, cfg=cfg, found=estimate(describe(cfg, device, cluster.devices, cluster.per_node)))
    second = other(first, flags["compare"], (cluster, device), flags["gpus_per_node"])
    show(first, second)
    if flags["json"] is not None:
        write_json({"first": to_dict(first.found), "second": to_dict(second.found), "ratios": ratios(first, second)},
                   flags["json"])  # fmt: skip
    return first, second


def other(first: Side, asked: str, there: tuple[Cluster, Device], per_node: int | None) -> Side:
    """The side that --compare describes: words as on a command line, a config and a device each at most once.

    there: cluster and device of the first. Raises UserError for words that are none of these, and for nothing.
    """
    try:
        words = shlex.split(asked)
    except ValueError as error:
        raise UserError(f"--compare={asked!r}: {error}") from error
    settings = [word.removeprefix("--") for word in words if word.startswith("--")]
    named = [word for word in words if not word.startswith("--")]
    devices = [word for word in named if _is_device(word)]
    configs = [word for word in named if not _is_device(word)]
    if not words or len(devices) > 1 or len(configs) > 1:
        raise UserError(
            f"--compare={asked!r} names {'nothing' if not words else 'more than one of a kind'} to compare with.\n"
            "Give another config, another device, or settings: --compare=OTHER.py, --compare=h200:64, "
            '--compare="--parallel.tensor=4", or several in one pair of quotes.'
        )
    cluster, device = there
    if devices:
        cluster, device = _cluster(devices[0], there, per_node)
    if configs:
        cfg = load(configs[0], *settings, devices=cluster.devices)
    else:
        cfg = override(first.cfg, *settings, devices=cluster.devices, place=f"--compare={asked}")
    found = estimate(describe(cfg, device, cluster.devices, cluster.per_node))
    return Side(name=asked, cfg=cfg, found=found)


def _is_device(word: str) -> bool:
    name = word.partition(":")[0].lower()
    return name in GPUS or name in OTHER_NAMES or bool(re.fullmatch(r"[\w-]+:\d+", word))


def _cluster(text: str, there: tuple[Cluster, Device], per_node: int | None) -> tuple[Cluster, Device]:
    cluster, device = there
    same = {device.name: device.per_node}
    found, problems = read_cluster(text if ":" in text else f"{text}:{cluster.devices}", per_node, same)
    if found is None:
        raise ConfigError([type(one)("--compare", one.what, one.hint) for one in problems], "command line")
    return found, device if found.name == cluster.name else known_device(found.name)


ROWS = (
    ("step, s", lambda found: found.step_seconds, "{:.3f}"),
    ("tokens/s per device", lambda found: found.tokens_per_second_per_device, "{:,.0f}"),
    ("tokens/s", lambda found: found.tokens_per_second_per_device * found.run.devices, "{:,.0f}"),
    ("MFU, causal attention", lambda found: found.mfu_causal, "{:.1%}"),
    ("computing, s", lambda found: found.compute_seconds, "{:.3f}"),
    ("exposed communication, s", lambda found: found.exposed_seconds, "{:.3f}"),
    ("bubble, s", lambda found: found.bubble_seconds, "{:.3f}"),
    ("optimizer, s", lambda found: found.optimizer_seconds, "{:.3f}"),
    ("peak, GiB", lambda found: found.memory.peak_gib, "{:.2f}"),
    ("usable, GiB", lambda found: found.run.device.usable_gib, "{:.2f}"),
    ("tokens of a step", lambda found: found.run.step_tokens, "{:,.0f}"),
    ("GPU hours", lambda found: found.device_hours, "{:,.0f}"),
)
"""What is compared, in words, from an estimate, and as it is written."""


def ratios(first: Side, second: Side) -> dict[str, float | None]:
    """The second over the first by name of ROWS; None where the first is 0."""
    pairs = {name: (value(first.found), value(second.found)) for name, value, _ in ROWS}
    return {name: there / here if here else None for name, (here, there) in pairs.items()}


def lines(first: Side, second: Side) -> list[tuple[str, str, str, str]]:
    """Name, both values, ratio."""
    told = [
        (name, describing(first), describing(second), "")
        for name, describing in (
            ("devices", lambda side: f"{side.found.run.devices} x {side.found.run.device.name}"),
            ("parameters", lambda side: count(side.cfg.model.parameter_count().total)),
            ("mesh", lambda side: ", ".join(f"{name} {n}" for name, n in side.found.run.sizes.items() if n > 1) or "1"),
            ("microbatches", lambda side: f"{side.found.run.microbatches} x {side.found.run.micro_size} rows"),
            ("fits", lambda side: "yes" if side.found.fits else "NO"),
            ("whole run", lambda side: duration(side.found.days * 86_400) if side.found.run.steps else ""),
        )
    ]
    over = ratios(first, second)
    for name, value, style in ROWS:
        ratio = over[name]
        both = style.format(value(first.found)), style.format(value(second.found))
        told.append((name, *both, "" if ratio is None else f"{ratio:.3f}"))
    return told


def differences(first: Side, second: Side) -> list[str]:
    """Settings that are not alike, a line each."""
    found = diff(first.cfg, second.cfg)
    more = [f"and {len(found) - MOST_DIFFERENCES} more"] if len(found) > MOST_DIFFERENCES else []
    return [*found[:MOST_DIFFERENCES], *more]


def show(first: Side, second: Side, file: TextIO | None = None) -> None:
    """Print the table, and which settings differ."""
    made = Table(box=None, pad_edge=False)
    made.add_column("")
    for name in (first.name, second.name, "ratio"):
        made.add_column(name, justify="right", overflow="fold", max_width=60)
    rows: Sequence[tuple[str, str, str, str]] = lines(first, second)
    for row in rows:
        made.add_row(*row)
    drawn = StringIO()
    rich.console.Console(file=drawn, width=160, highlight=False, color_system=None).print(made)
    told = [line.rstrip() for line in drawn.getvalue().splitlines()]
    changed = differences(first, second)
    told += ["", "settings that differ", *(f"  {line}" for line in changed)] if changed else []
    print("\n".join(told), file=file or sys.stdout)
