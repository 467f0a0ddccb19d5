"""Layouts on eight virtual devices compared with one device: losses, norms and all gradients."""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import jax

from benchmarks.outcome import ROOT
from megajax.config.errors import UserError

sys.path.append(str(ROOT / "tests"))

from families import TOLERANCE
from one_device import QUICKEST, SLOW, Case, difference


def selected(only: str) -> list[Case]:
    """The cases whose lines contain `only`. Raises UserError if there are none, or not eight CPU devices."""
    if (jax.default_backend(), jax.device_count()) != ("cpu", 8):
        raise UserError("this needs eight CPU devices: --devices=cpu:8")
    cases = [case for case in QUICKEST + SLOW if "bfloat16" not in case.words]
    if chosen := [case for case in cases if only in case.line]:
        return chosen
    raise UserError("\n  ".join([f"no case contains {only!r}; the cases are:", *(case.line for case in cases)]))


def layouts(*, only: str = "", quick: bool = False) -> Iterator[dict[str, Any]]:
    """Layouts on eight virtual devices compared with one device. Needs --devices=cpu:8.

    One line for each case of tests/one_device.py that contains --only: the largest relative error of a loss and of the
    gradient norm, and the largest error of a gradient over the largest gradient of its weight, with that weight.
    Computes in float32. The exit code is 1 if an error is above the tolerance of the case, usually 1e-5, or if a
    padding row of stacked weights is not zero. --quick: compile without optimizations, as in the tests.
    """
    print(f"{'loss':>9} {'norm':>9} {'gradient':>9}  {'of':32}         case")
    lines: list[dict[str, Any]] = []
    for case in selected(only):
        apart = difference(case.on_layout(quick=quick), case.on_one_device(quick=quick), case.family)
        equal = not apart.problems(case.family)
        figures = " ".join(f"{error:9.1e}" for error in (max(apart.loss, apart.later), apart.norm, apart.gradient))
        print(f"{figures}  {apart.weight:32} {'     ' if equal else 'WRONG'}  {case.line}", flush=True)
        jax.clear_caches()
        errors = {name: e if isinstance(e, str) else float(f"{e:.2e}") for name, e in asdict(apart).items()}
        lines.append({"case": case.line, **errors, "equal": equal})
        wrong = sum(not line["equal"] for line in lines)
        yield {"tolerance": TOLERANCE, "cases": len(lines), "wrong": wrong, "lines": lines}
