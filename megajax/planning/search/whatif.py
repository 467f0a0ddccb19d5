"""A plan that does not fit: what takes most memory, and the cheapest changes that make it fit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from megajax.planning.cost.estimate import Estimate, footprint
from megajax.planning.program.audit import Array
from megajax.planning.program.devices import GIB
from megajax.planning.search.candidates import Case, Choice, Space, apply, divisors, problems, settings
from megajax.planning.search.search import HEADROOM, OFFLOADS
from megajax.planning.show import Table, memory_parts

SHOWN = 3
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
    if len(first) >= SHOWN:
        return first[:SHOWN]
    rest = [kind for kind, fitting in zip(kinds, single, strict=True) if not fitting]
    together = (
        _fitting(here, [a | b for a in one[-TRIED:] for b in other[-TRIED:] if not a.keys() & b.keys()], limit_gib)
        for one, other in combinations(rest, 2)
    )
    pairs = sorted((changes[0] for changes in together if changes), key=_seconds)
    more = sorted((change for fitting in single for change in fitting[1:]), key=_seconds)
    return sorted([*first, *pairs, *more][:SHOWN], key=_seconds)


def _seconds(change: Change) -> float:
    return change.estimate.step_seconds


def _kinds(here: Case) -> Iterator[list[dict[str, Any]]]:
    """Lists of alternatives, each as fields of a Choice and `loss_wait`; the smallest plan last."""
    cluster, repeats = here.cluster, here.cfg.model.stack.repeats
    choice = Choice.of(here.cfg, cluster.devices)
    yield [{"micro_size": n} for n in reversed(divisors(choice.micro_size, choice.micro_size - 1))]
    recomputes = Space(cfg=here.cfg, devices=cluster.devices, per_node=cluster.per_node).recomputes()
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


def advice(
    here: Case, *, excess_gib: float = 0.0, margin: float = HEADROOM, arrays: Sequence[Array] = ()
) -> list[Table]:
    """What takes most memory of a plan that does not fit, and the cheapest changes that make it fit.

    Of a compiled plan, excess_gib: by how much it is larger than the formula says, assumed to be the same for every
    change; arrays: the largest of its program. margin: fraction of usable memory that a change must leave.
    """
    now = here.estimate
    parts = sorted(memory_parts(now), key=lambda part: -part.size)
    rows = [(part.name, f"{part.size:.2f}", f"{part.size / now.memory.peak_gib:.0%}") for part in parts]
    tables = [Table("it does not fit: what takes most memory", ("part", "GiB", "of peak"), rows)]
    if arrays:
        tables.append(largest_table(arrays))
    changes = [
        (
            " ".join(f"--{one}" for one in change.settings),
            f"{change.estimate.memory.peak_gib + excess_gib:.2f}",
            f"{change.estimate.step_seconds:.3f}",
            f"{change.estimate.step_seconds / now.step_seconds - 1:+.1%}",
        )
        for change in cheapest(here, here.device.usable_gib * (1 - margin) - excess_gib)
    ] or [("none of those tried; --search tries all layouts, more devices make room", "", "", "")]
    return [*tables, Table("cheapest changes that make it fit", ("change", "peak, GiB", "step, s", "slower"), changes)]


def largest_table(arrays: Sequence[Array]) -> Table:
    """The largest arrays of a compiled program."""
    rows = [(one.shape, f"{one.bytes / GIB:.2f}", str(one.times), one.made_by) for one in arrays]
    return Table("largest arrays of the program", ("shape", "GiB", "in program", "made by"), rows, (0, 3))
