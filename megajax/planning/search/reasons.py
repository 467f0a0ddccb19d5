"""Why one layout is faster than another, and why well-known ones were not chosen, in words."""

from collections.abc import Mapping
from dataclasses import dataclass

from megajax.planning.cost.estimate import Estimate
from megajax.planning.program.devices import GIB
from megajax.planning.search.candidates import Choice
from megajax.planning.search.search import Entry, Group, Task, rank

MATTERS = 0.002
"""Share of a step below which a difference is not worth a word."""
AXES = {
    "tensor": "traffic over tensor",
    "data": "traffic over data",
    "pipeline": "traffic between stages",
    "pipeline+tensor": "sums of the loss",
    "context": "traffic over context",
}


def parts(found: Estimate) -> dict[str, float]:
    """Seconds of a step by cause; they add up to it."""
    split = {"computing": found.compute_seconds}
    for row in found.traffic:
        name = AXES.get(row.axis, f"traffic over {row.axis}")
        split[name] = split.get(name, 0.0) + row.exposed
    return split | {"bubble": found.bubble_seconds, "optimizer": found.optimizer_seconds}


def difference(this: Mapping[str, float], best: Mapping[str, float]) -> str:
    """ "+1.2 s traffic over data, -0.4 s bubble": the largest first, what does not matter left out."""
    least = MATTERS * sum(best.values())
    names = dict.fromkeys([*this, *best])
    changes = {name: this.get(name, 0.0) - best.get(name, 0.0) for name in names}
    told = sorted((name for name in names if abs(changes[name]) >= least), key=lambda name: -abs(changes[name]))
    return ", ".join(f"{changes[name]:+.{digits(sum(best.values()))}f} s {name}" for name in told[:4])


def digits(seconds: float) -> int:
    """Decimals that tell steps of about that long apart."""
    return 2 if seconds >= 10 else 3 if seconds >= 1 else 4


def strength(split: Mapping[str, float], room_gib: float) -> str:
    """Of the best: where its time goes, in seconds by cause, and what it has to spare."""
    losses = sorted((name for name in split if name != "computing"), key=lambda name: -split[name])
    step = sum(split.values())
    told = ", ".join(f"{name} {split[name] / step:.1%}" for name in losses[:2] if split[name] / step >= MATTERS)
    return f"{split['computing'] / step:.1%} of the step is computing{', ' + told if told else ''}; " + (
        f"{room_gib:.1f} GiB to spare"
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """On a well-known choice."""

    name: str
    text: str


def well_known(task: Task, found: Mapping[tuple[int, int, int], Group], best: Entry) -> list[Verdict]:
    """Pure FSDP, tensor parallelism without a pipeline, and the config as it was given."""
    space = task.space
    tensor = max((place[0] for place in found if place[1] == 1 and place[0] <= space.per_node), default=space.per_node)
    verdicts = [
        Verdict("pure FSDP", _of_group(task, found.get((1, 1, space.devices)), best, ("fsdp",))),
        Verdict(
            f"tensor {tensor} without a pipeline",
            _of_group(task, found.get((tensor, 1, space.devices // tensor)), best, ("replicate", "zero1", "fsdp")),
        ),
    ]
    given = space.given()
    return [*verdicts, Verdict(f"the config as given ({given.layout})", _of_choice(task, given, best))]


def _of_group(task: Task, group: Group | None, best: Entry, shardings: tuple[str, ...]) -> str:
    if group is None:
        fixed = ", ".join(f"{name}={value}" for name, value in task.space.fixed.items())
        return f"not tried: {fixed} is given" if fixed else "not tried: no such layout of these devices"
    fitting = [group.fastest[name] for name in shardings if name in group.fastest]
    if fitting:
        return _compared(task, min(fitting, key=rank).choice, best)
    small = [group.smallest[name] for name in shardings if name in group.smallest]
    if small:
        return _too_large(task, min(small, key=lambda entry: entry.peak))
    refusals = [group.refusals[name] for name in shardings if name in group.refusals]
    if refusals:
        return f"refused: {refusals[0]}"
    return f"not tried: nothing to shard over, data is {group.place[2]}" if group.place[2] == 1 else "not tried"


def _of_choice(task: Task, choice: Choice, best: Entry) -> str:
    if choice == best.choice:
        return "is the best"
    refusal = task.refusal(choice)
    if refusal:
        return f"refused: {refusal}"
    peak = task.estimated(choice).memory.peak
    if peak > task.limit:
        return _too_large(task, Entry(choice, 0.0, peak), "takes")
    return _compared(task, choice, best, "")


def _compared(task: Task, choice: Choice, best: Entry, at: str = " at its best") -> str:
    if choice == best.choice:
        return "is the best"
    this, first = task.estimated(choice), task.estimated(best.choice)
    slower = this.step_seconds / first.step_seconds - 1
    why = difference(parts(this), parts(first))
    told = f"{abs(slower):.1%} {'slower' if slower >= 0 else 'faster by formula'}"
    return f"{told}{at} ({choice.details})" + (f": {why}" if why else "")


def _too_large(task: Task, entry: Entry, takes: str = "takes at least") -> str:
    return (
        f"does not fit: {takes} {entry.peak / GIB:.1f} GiB ({entry.choice.details}), and {task.limit / GIB:.1f} may be "
        "taken"
    )
