"""Ticks, bubble, activations in flight and ring slots of pipeline schedules: from their tables and from formulas.

Run:  python benchmarks/schedules.py

Prints a line for each schedule and size: P stages, V chunks of layers per stage, M microbatches, and `wait`, the ticks
that a loss waits. Each table is checked (megajax.pipeline.check). Its figures are counted in the table and compared
with the formulas in this file and in the library. Exits with 1 if any two differ. Needs no device. Writes
benchmarks/results/schedules.json.
"""

import argparse
import sys
from fractions import Fraction
from typing import Any

import outcome

from megajax.pipeline.check import formulas, measure, violations
from megajax.pipeline.schedule import Schedule, build

SIZES = (
    *((2, 1, 1), (3, 1, 7), (4, 1, 2), (4, 1, 8), (8, 1, 64), (16, 1, 64), (16, 1, 1536)),
    *((2, 2, 4), (4, 2, 8), (4, 3, 16), (4, 5, 128), (8, 2, 16), (8, 6, 32), (16, 4, 256), (16, 6, 64)),
)
"""(P, V, M); fewer microbatches than stages, and one that stages do not divide, among them."""
HEAD = "schedule       P  V     M wait     F   F+B     B   bubble  slots  in flight"


def closed_form(name: str, sizes: tuple[int, int, int], wait: int) -> dict[str, Any]:
    """The figures of `counted`, without a table (Narayanan et al., 2104.04473, for stages that go in lockstep)."""
    stages, chunks, microbatches = sizes
    work = microbatches * chunks
    # Ticks of forwards alone, if all are done: until the first loss, and then as long as it waits.
    warm_up = work + stages - 1 if name == "gpipe" else min(stages * chunks - 1 + wait, work + stages - 1)
    ring = warm_up + stages if name != "gpipe" else work
    steady = work + stages - 1 - warm_up
    return {
        "ticks": [warm_up, steady, warm_up],
        "bubble": Fraction(stages - 1, work),
        "in_flight": [work if name == "gpipe" else min(work, ring - 2 * s) for s in range(stages)],
        "slots": min(work, ring),
    }


def count_costs(schedule: Schedule) -> dict[str, Any]:
    """ticks: of forwards alone, of both, of backwards alone; bubble over ideal time; in_flight by stage; slots."""
    figures = measure(schedule)
    ticks = [
        sum(phase.ticks for phase in schedule.phases if (phase.forward, phase.input_gradient) == kinds)
        for kinds in ((True, False), (True, True), (False, True))
    ]
    return {
        "ticks": ticks,
        "bubble": figures.pipeline_bubble,
        "in_flight": list(figures.in_flight),
        "slots": figures.slots,
    }


def line(name: str, sizes: tuple[int, int, int], wait: int) -> dict[str, Any]:
    """One schedule's figures, printed too, and whether all agree."""
    stages, chunks, microbatches = sizes
    schedule = build(name, stages=stages, microbatches=microbatches, chunks=chunks, loss_wait=wait)
    actual, expected, library = count_costs(schedule), closed_form(name, sizes, wait), formulas(schedule)
    equal = actual == expected and library == measure(schedule) and not violations(schedule)
    ticks = " ".join(f"{n:5}" for n in actual["ticks"])
    flight = " ".join(map(str, actual["in_flight"]))
    size = f"{stages:3} {chunks:2} {microbatches:5} {wait:4}"
    print(f"{name:12} {size} {ticks} {float(actual['bubble']):8.3%} {actual['slots']:6}  {flight}", flush=True)
    if not equal:
        print(f"  WRONG: the formulas say {expected} and {library}; {violations(schedule)[:3]}")
    return {
        "schedule": name,
        "stages": stages,
        "virtual_stages": chunks,
        "microbatches": microbatches,
        "loss_wait": wait,
        **actual,
        "bubble": str(actual["bubble"]),
        "spare_slot": schedule.spare_slot,
        "equal": equal,
    }


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(HEAD)
    lines = []
    for sizes in SIZES:
        lines.append(line("gpipe", sizes, 0))
        name = "1f1b" if sizes[1] == 1 else "interleaved"
        lines += [line(name, sizes, wait) for wait in (0, 1)]
    mismatches = sum(not record["equal"] for record in lines)
    print(f"{len(lines)} tables, {mismatches} differ from the formulas\n")
    outcome.write("schedules", {"tables": len(lines), "wrong": mismatches, "lines": lines})
    return 1 if mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
