"""Figures of gpu_check by name, with the planner's predictions.

Does not import jax, so that the steps can use the whole GPU.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.outcome import ROOT, label

PREDICTIONS = ROOT / "benchmarks/predictions.json"
GIB = 2**30
CONSTANTS = ("matmul", "matmul_half", "matmul_fp8", "stream", "attention_forward", "attention_backward")
"""Fields of the cost model's Device that one GPU can measure."""

type Figures = dict[str, float | None]
type Predicted = Mapping[str, float | dict[str, float] | None]
"""Figure -> its prediction; {"predicted", "low", "high"} where the planner gives a range."""


def measured_figures(kind: str, figures: Any) -> Figures:
    """The figures of a step that are compared; empty if there are none."""
    return READERS[kind](figures) if figures else {}


def _train_step(figures: Any) -> Figures:
    memory, mfu = figures["memory"], figures["mfu"]
    peak = memory["peak_in_use"] or memory["planned_peak"]
    return {
        "step s": figures["step_seconds"]["median"],
        "tokens/s": figures["tokens_per_second_per_device"]["median"],
        "MFU causal": mfu["causal"],
        "MFU full": mfu["full"],
        "peak GiB": None if peak is None else peak / GIB,
    }


def _kernels(figures: Any) -> Figures:
    by_name: Figures = {}
    for row in (row for rows in figures["parts"].values() for row in rows):
        name = label(row["name"], row["sizes"])
        if "fault" in row:
            by_name[name] = None
        elif "both" in row:
            by_name |= {f"{name}: {work} ms": 1e3 * row[work]["seconds"]["median"] for work in ("forward", "both")}
        else:
            by_name[f"{name}: both ms"] = 1e3 * row["seconds"]["median"]
    return by_name


READERS: Mapping[str, Callable[[Any], Figures]] = {
    "device": lambda figures: {},
    "mfu": _train_step,
    "trace": lambda figures: {
        "busy ms a step": figures["busy"],
        "idle ms a step": figures["idle"],
        "exposed ms": figures["exposed"],
    },
    "tests": lambda figures: {name: figures[name] for name in ("failed", "passed", "skipped")},
    "kernels": _kernels,
    "calibrate": lambda figures: {name: value for name, value in figures["constants"].items() if name in CONSTANTS},
    "experts": lambda figures: {"wrong": figures["wrong"]},
    "schedules": lambda figures: {
        "default over costs": figures["default"]["over_costs"],
        "measured over costs": figures["measured"]["over_costs"],
        "share of names": figures["costs"]["matched"],
    },
}


def tests_of(file: Path) -> dict[str, Any]:
    """Numbers of tests, and names of failed ones, from pytest's XML. Raises ElementTree.ParseError if it is cut off."""
    cases = list(ElementTree.parse(file).getroot().iter("testcase"))
    failed = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(failed) - skipped
    return {"failed": len(failed), "passed": passed, "skipped": skipped, "which_failed": failed}


def predictions(device: str | None, *, tiny: bool, file: Path = PREDICTIONS) -> dict[str, Predicted]:
    """Step -> its predicted figures; those of an H200 for a device without its own.

    device: `device_kind` of jax. The predictions for tiny sizes are a GPU's: their ratios only show that this works.
    """
    predictions = json.loads(file.read_text())
    name = next((name for name, kind in predictions["kinds"].items() if kind == device), "h200")
    return predictions["tiny" if tiny else name]


def rows(predicted: Mapping[str, Predicted], kind: str, part: str, figures: Any) -> list[dict[str, Any]]:
    """One row for each figure of a step that was predicted or measured.

    `outside`: whether the measured figure lies outside the predicted range; None without one of them.
    """
    before, after = predicted.get(part, {}), measured_figures(kind, figures)
    table = []
    for name in dict.fromkeys([*before, *after]):
        known, actual = before.get(name), after.get(name)
        expected: Any = known if isinstance(known, dict) else {"predicted": known, "low": None, "high": None}
        ratio = None if actual is None or not expected["predicted"] else actual / expected["predicted"]
        outside = None
        if actual is not None and expected["low"] is not None:
            outside = not expected["low"] <= actual <= expected["high"]
        row = {"part": part, "figure": name, **expected, "measured": actual}
        table.append(row | {"measured_over_predicted": ratio, "outside": outside})
    return table


def heading(*, tiny: bool) -> str:
    """What the table compares."""
    scale = "; tiny sizes on a CPU, compared with predictions for a GPU: the ratios mean nothing" if tiny else ""
    return f"measured over predicted{scale}"


def table(records: list[dict[str, Any]]) -> str:
    """The rows as text: predicted (low to high) | measured, with a mark beside what lies outside of the range."""
    width = max((max(len(row["figure"]), len(row["part"])) for row in records), default=0)
    lines, part = [], None
    for row in records:
        if row["part"] != part:
            part = row["part"]
            lines.append(f"{part:<{width + 2}} {'predicted':>12} {'(low to high)':<26} | {'measured':>10} {'ratio':>8}")
        predicted, low, high, measured = (_number(row[name]) for name in ("predicted", "low", "high", "measured"))
        span = "" if row["low"] is None else f"({low} to {high})"
        ratio = row["measured_over_predicted"]
        ratio_text = "-" if ratio is None else f"{ratio:.3f}"
        text = f"  {row['figure']:<{width}} {predicted:>12} {span:<26} | {measured:>10} {ratio_text:>8}"
        lines.append(text + "  outside" * bool(row["outside"]))
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
