"""Layouts on eight virtual devices compared with one device: the losses of five steps, and all gradients."""

import sys
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks.outcome import ROOT
from megajax.config.errors import UserError

sys.path.append(str(ROOT / "tests"))

from combinations import COMBINATIONS, TOLERANCE, difference
from context_cases import CASES


def selected(cases: Any, only: str) -> list[Any]:
    """The cases whose names contain `only`. Raises UserError if there are none, or not eight CPU devices."""
    if (jax.default_backend(), jax.device_count()) != ("cpu", 8):
        raise UserError("this needs eight CPU devices: --devices=cpu:8")
    if chosen := [case for case in cases if only in case.name]:
        return chosen
    raise UserError("\n  ".join([f"no case contains {only!r}; the cases are:", *(case.name for case in cases)]))


def layouts(*, only: str = "", quick: bool = False) -> Iterator[dict[str, Any]]:
    """Layouts on eight virtual devices compared with one device. Needs --devices=cpu:8.

    One line for each combination of tests/combinations.py whose name contains --only: the largest relative error of a
    loss of five steps and of the gradient norm, the largest error of a gradient over the largest gradient of its
    weight, that weight, and the compile time in seconds. Computes in float32. The exit code is 1 if an error is above
    1e-5, or if a padding row of stacked weights is not zero. --quick: compile without optimizations, as in the tests.
    """
    print(f"{'loss':>9} {'norm':>9} {'gradient':>9}  {'of':32} compile s         combination")
    lines: list[dict[str, Any]] = []
    for case in selected(COMBINATIONS, only):
        apart = difference(case.run(quick=quick), case.on_one_device(quick=quick))
        errors = {"loss": apart.loss, "norm": apart.norm, "gradient": apart.gradient}
        equal = max(errors.values()) <= TOLERANCE and apart.padding == 0
        figures = " ".join(f"{error:9.1e}" for error in errors.values())
        print(
            f"{figures}  {apart.weight:32} {apart.seconds:7.1f}  {'     ' if equal else 'WRONG'}  {case.name}",
            flush=True,
        )
        jax.clear_caches()
        more = {"weight": apart.weight, "padding": apart.padding, "compile_seconds": round(apart.seconds, 1)}
        lines.append({"combination": case.name, **short(errors), **more, "equal": bool(equal)})
        yield summary("combinations", lines)


def context_layouts(*, only: str = "") -> Iterator[dict[str, Any]]:
    """One step with rows sharded over 2, 4 and 8 devices by every strategy, compared with one device.

    The cases are those of tests/context_cases.py whose names contain --only. Prints the largest differences of each
    model and strategy. Needs --devices=cpu:8.
    """
    print(f"{'loss':>9} {'gradient':>9}         case")
    lines: list[dict[str, Any]] = []
    for case in selected(CASES, only):
        apart = case.difference()
        errors = {"loss": apart.loss, "gradient": apart.gradient}
        equal = max(errors.values()) <= TOLERANCE
        print(f"{apart.loss:9.1e} {apart.gradient:9.1e}  {'     ' if equal else 'WRONG'}  {case.name}", flush=True)
        more = {"weight": apart.weight, "equal": bool(equal)}
        lines.append({"model": case.model, "cut": case.sharding, **short(errors), **more})
        yield summary("cases", lines)
    models, every = (list(dict.fromkeys(line[name] for line in lines)) for name in ("model", "cut"))
    largest = {(line["model"], line["cut"]): max(line["loss"], line["gradient"]) for line in lines}
    print("", f"| | {' | '.join(models)} |", "|---" * (len(models) + 1) + "|", sep="\n")
    for cut in every:
        cells = [f"{largest[model, cut]:.1e}" if (model, cut) in largest else "-" for model in models]
        print(f"| {cut} | {' | '.join(cells)} |")


def short(errors: dict[str, Any]) -> dict[str, float]:
    return {name: float(f"{error:.2e}") for name, error in errors.items()}


def summary(name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """All lines and the number of wrong ones."""
    wrong = sum(not line["equal"] for line in lines)
    return {"tolerance": TOLERANCE, name: len(lines), "wrong": wrong, "lines": lines}
