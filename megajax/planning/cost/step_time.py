"""How long a compiled train step takes: the cost model's times, with the collectives that are in the program."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megajax.planning.cost.costs import Device, known_device
from megajax.planning.cost.description import describe
from megajax.planning.cost.estimate import Estimate, estimate
from megajax.planning.cost.traffic import Span, Traffic, seconds
from megajax.planning.program.collectives import grouped
from megajax.planning.program.hlo import rounds
from megajax.planning.program.train_step import TrainPlan


def step_time(plan: TrainPlan, device: Device | None = None) -> Estimate:
    """The estimate of a compiled plan, with the collectives of its program. device: None for a known one.

    What the compiler put beside matmuls counts as hidden, as far as there is computing to hide it. Ticks of a pipeline
    in which a stage is idle have collectives like all others, so the bubble is of computing alone. For an
    outermost loop of unknown trip count see `TrainPlan.unknown_trips`. Raises UserError as `describe` does.
    """
    device = device or known_device(plan.cluster.name)
    formula = estimate(describe(plan.cfg, device, plan.cluster.devices, plan.cluster.per_node))
    rows = program_traffic(plan, device)
    hidden = min(sum(row.hidden for row in rows), formula.compute_seconds)
    return replace(
        formula,
        traffic=tuple(rows),
        exposed_seconds=sum(row.seconds for row in rows) - hidden,
        hidden_seconds=hidden,
        bubble_seconds=formula.schedule.fraction * formula.compute_seconds,
    )


def program_traffic(plan: TrainPlan, device: Device) -> list[Traffic]:
    """The collectives of a compiled program with their times, in the order of `grouped`; any model has them."""
    return [_traffic(row, plan, device) for row in grouped(plan.contents.collectives)]


def _traffic(row: Mapping[str, Any], plan: TrainPlan, device: Device) -> Traffic:
    """Of a row of `grouped`."""
    count = row["instructions"] * row["share"] * rounds(row["trips"], plan.unknown_trips)
    axes = row["axis"].partition(" ")[0]  # without "(part)"
    span = Span.along(axes.split("+"), plan.mesh, plan.cluster.per_node)
    size = row["bytes_once"] / row["instructions"]
    total = count * seconds(row["kind"], size, span, device)
    what = f"loop {row['loop']}" if row["loop"] else "once a step"
    return Traffic(row["kind"], row["axis"], what, count, count * size, total, total if row["overlapped"] else 0.0)
