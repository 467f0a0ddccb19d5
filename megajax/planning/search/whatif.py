"""What to do about a plan that does not fit: what takes most, and the cheapest changes that make it fit."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, TextIO

from megajax.metrics import banner
from megajax.metrics.banner import Section
from megajax.planning.cost.costs import Device
from megajax.planning.cost.description import describe
from megajax.planning.cost.estimate import Estimate, estimate, footprint
from megajax.planning.program.devices import GIB, Cluster
from megajax.planning.program.largest import Array
from megajax.planning.search import changes
from megajax.planning.search.candidates import Choice, Space, apply, divisors, problems
from megajax.planning.search.search import AWAY, HEADROOM
from megajax.training.run_config import RunConfig

SHOWN = 3
"""Changes that are told."""

TRIED = 8
"""Of the alternatives of a kind, the smallest plans, that are tried together with those of another."""
SPREAD = ("replicate", "zero1", "fsdp")
"""Data sharding, from the one that holds most."""
PARTS = {
    "parameters": "master weights",
    "optimizer": "optimizer state",
    "weights": "weights in compute dtype",
    "gradients": "gradients, added up",
    "activations": "activations kept for the backward pass",
    "working": "of a layer or the loss, and under way",
}
"""Fields of Footprint, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A way to make a config smaller, on its own or two together."""

    settings: tuple[str, ...]
    """ "parallel.data_sharding=fsdp"."""
    peak_gib: float
    estimate: Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """A config that does not fit, and where."""

    cfg: RunConfig
    cluster: Cluster
    device: Device
    excess: float = 0.0
    """GiB by which the compiled program is larger than the formula's, which changes are taken not to alter."""
    margin: float = HEADROOM
    """Share of usable memory that a change must leave, as in a search."""

    @property
    def choice(self) -> Choice:
        return Choice.of(self.cfg, self.cluster.devices)

    @property
    def now(self) -> Estimate:
        """By formula."""
        return estimate(describe(self.cfg, self.device, self.cluster.devices, self.cluster.per_node))


def parts_of(now: Estimate) -> list[tuple[str, float]]:
    """What the peak is made of, in words and GiB, largest first."""
    return sorted(((told, getattr(now.memory, name) / GIB) for name, told in PARTS.items()), key=lambda pair: -pair[1])


def cheapest(here: Situation) -> list[Change]:
    """Changes that make it fit, fastest first: one of each kind, pairs of kinds not enough alone, more of one kind."""
    kinds = list(_kinds(here))
    single = [_fitting(here, kind) for kind in kinds]
    found = sorted((changes[0] for changes in single if changes), key=_seconds)
    if len(found) >= SHOWN:
        return found[:SHOWN]
    rest = [kind for kind, fitting in zip(kinds, single, strict=True) if not fitting]
    together = (
        _fitting(here, [a | b for a in one[-TRIED:] for b in other[-TRIED:] if not a.keys() & b.keys()])
        for one, other in combinations(rest, 2)
    )
    pairs = sorted((changes[0] for changes in together if changes), key=_seconds)
    further = sorted((change for fitting in single for change in fitting[1:]), key=_seconds)
    return sorted([*found, *pairs, *further][:SHOWN], key=_seconds)


def _seconds(change: Change) -> float:
    return change.estimate.step_seconds


def _kinds(here: Situation) -> Iterator[list[dict[str, Any]]]:
    """Lists of alternatives, each as fields of a Choice and other values; the smallest plan last."""
    choice, cluster = here.choice, here.cluster
    space = Space(cfg=here.cfg, devices=cluster.devices, per_node=cluster.per_node)
    yield [{"micro_size": n} for n in reversed(divisors(choice.micro_size, choice.micro_size - 1))]
    recomputes = space.recomputes()
    known = choice.recompute in recomputes and choice.recompute_layers is None
    later = recomputes[recomputes.index(choice.recompute) + 1 :] if known else recomputes
    rows = -(-here.cfg.model.stack.repeats // here.cfg.parallel.chunks())
    size = len(here.cfg.model.stack.pattern)
    some = [{"recompute": "full", "recompute_layers": n * size} for n in range(1, rows)]
    yield [*some, *({"recompute": again, "recompute_layers": None} for again in later)]
    yield [{"data_sharding": name} for name in SPREAD[SPREAD.index(choice.data_sharding) + 1 :]]
    if choice.tensor > 1 and not choice.sequence:
        yield [{"sequence": True}]
    if choice.pipeline > 1:
        more = range(choice.virtual_stages + 1, here.cfg.model.stack.repeats // choice.pipeline + 1)
        yield [{"virtual_stages": n} for n in more]
        yield [{"loss_wait": 0}] if here.cfg.parallel.loss_wait else []
    for name in ("tensor", "pipeline"):
        larger = [getattr(choice, name) * by for by in (2, 4) if choice.data % by == 0]
        sequence = {"sequence": True} if name == "tensor" else {}
        yield [
            {name: n, "data": choice.data * getattr(choice, name) // n} | sequence
            for n in larger
            if name == "pipeline" or n <= cluster.per_node
        ]
    yield [{"offload": share} for share in AWAY if share > choice.offload]


def _fitting(here: Situation, alternatives: list[dict[str, Any]]) -> list[Change]:
    """Fastest first."""
    found = [change for one in alternatives if (change := _change(here, one)) is not None]
    return sorted(found, key=_seconds)


def _change(here: Situation, fields: Mapping[str, Any]) -> Change | None:
    """None where the config's rules refuse it or it does not fit either."""
    cluster, chosen = here.cluster, {name: value for name, value in fields.items() if name != "loss_wait"}
    cfg = apply(replace(here.choice, **chosen), here.cfg)
    cfg = cfg.but(
        parallel=replace(
            cfg.parallel,
            loss_wait=fields.get("loss_wait", cfg.parallel.loss_wait),
            data=None if here.cfg.parallel.data is None else cfg.parallel.data,
        )
    )
    if problems(cfg, cluster.devices):
        return None
    described = describe(cfg, here.device, cluster.devices, cluster.per_node)
    peak = footprint(described).peak_gib + here.excess
    if peak > here.device.usable_gib * (1 - here.margin):
        return None
    return Change(settings=tuple(changes.settings(here.cfg, cfg)), peak_gib=peak, estimate=estimate(described))


def sections(here: Situation, arrays: tuple[Array, ...] = ()) -> list[Section]:
    """What `show` prints. arrays: the largest of a compiled program."""
    now = here.now
    found: list[Section] = [
        (
            "what takes most, GiB",
            [(told, f"{size:8.2f}  {size / now.memory.peak_gib:.0%}") for told, size in parts_of(now)],
        )
    ]
    if arrays:
        rows = [(one.shape, f"{one.bytes / GIB:8.2f}  {one.times} in the program; {one.made_by}") for one in arrays]
        found.append(("largest arrays of the program, GiB", rows))
    told = [
        (
            " ".join(f"--{one}" for one in change.settings),
            f"peak {change.peak_gib:6.2f} GiB, step {change.estimate.step_seconds:.3f} s "
            f"({change.estimate.step_seconds / now.step_seconds - 1:+.1%})",
        )
        for change in cheapest(here)
    ]
    none = [("none of those tried", "--search tries all layouts, more devices make room")]
    return [*found, ("cheapest changes that make it fit", told or none)]


def show(here: Situation, arrays: tuple[Array, ...] = (), file: TextIO | None = None) -> None:
    """Print it."""
    print("\n" + banner.plain("it does not fit", sections(here, arrays)), file=file or sys.stdout)
