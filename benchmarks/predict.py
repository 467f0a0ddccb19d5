"""The planner's predictions for every part of gpu_check.sh, written before anything is measured.

Run:  python benchmarks/predict.py            writes benchmarks/predictions.json; imports jax, needs no GPU

Train steps: time, tokens/s, MFU and peak memory of the cost model. Kernels: the minimum time by data sheets (the
roofline). Calibration: the constants of the cost model. Run it again before a measurement whenever the cost model or a
part has changed.
"""

import json
import os
import sys
from datetime import date
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import kernel_cases
import loss_cases
from comparison import CONSTANTS, GIB, PREDICTIONS, Figures
from gpu_parts import ALL, Part
from outcome import label
from roofline import Roof, roof_of

from megajax.config import load
from megajax.kernels.attention.capability import Device
from megajax.planning.cost.description import describe
from megajax.planning.cost.estimate import estimate
from megajax.planning.virtual_devices import GPUS

NAMES = ("h200", "h100")
HOPPER = Device(name="Hopper", capability=(9, 0), cudnn=(9, 28, 0))
CPU = Device(name="cpu")


def predicted(part: Part, name: str, *, tiny: bool) -> Figures:
    """Of one part on one device of the cost model."""
    roof = roof_of(GPUS[name].description, "gpu")
    match part.kind:
        case "mfu" | "peers":
            return train_step(part.arguments(tiny=tiny), name)
        case "trace":
            (traced,) = (traced_part for traced_part in ALL if any("--trace=" in word for word in traced_part.program))
            step = train_step(traced.arguments(tiny=tiny), name)["step s"]
            return {"busy ms a step": 1e3 * (step or 0.0), "idle ms a step": 0.0, "exposed ms": 0.0}
        case "kernels":
            return kernels(part.name.removeprefix("kernels_"), roof, tiny=tiny)
        case "calibrate":
            return {field: getattr(GPUS[name], field) for field in CONSTANTS}
        case "tests":
            return {"failed": 0}
        case "experts":
            return {"wrong": 0}
    return {}


def train_step(arguments: tuple[str, ...], name: str) -> Figures:
    """By the words of its command."""
    source = next(word for word in arguments if word.startswith("--config=")).partition("=")[2]
    settings = [word[2:] for word in arguments if word.startswith(("--model.", "--batch.", "--precision."))]
    estimated = estimate(describe(load(source, *settings), GPUS[name], 1))
    return {
        "step s": estimated.step_seconds,
        "tokens/s": estimated.tokens_per_second_per_device,
        "MFU causal": estimated.mfu_causal,
        "MFU full": estimated.mfu_full,
        "peak GiB": estimated.memory.peak / GIB,
    }


def kernels(part: str, roof: Roof, *, tiny: bool) -> Figures:
    """The least time of every case of a part, in ms."""
    figures: Figures = {}
    if part == "loss":
        for size in loss_cases.SIZES[not tiny]:
            flops, moved = loss_cases.costs(size, 1)
            names = [loss_cases.NAME.format("plain"), *map(loss_cases.chunked, loss_cases.CHUNKS[not tiny])]
            least = roof.floor_seconds(flops=flops, moved=moved)
            figures |= {f"{label(objective, loss_cases.sizes(size, 1))}: both ms": _ms(least) for objective in names}
        return figures
    for case in kernel_cases.MAKERS[part](not tiny, CPU if tiny else HOPPER):
        for place, work in enumerate(("forward", "both")):
            least = roof.floor_seconds(flops=case.flops[place], moved=case.moved[place], fp8=case.fp8)
            figures[f"{case.label()}: {work} ms"] = _ms(least)
    return figures


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _rounded(figures: Figures) -> Figures:
    return {name: None if value is None else float(f"{value:.5g}") for name, value in figures.items()}


def everything() -> dict[str, Any]:
    """As it is written."""
    predictions: dict[str, Any] = {
        "made_by": "python benchmarks/predict.py",
        "date": date.today().isoformat(),
        "kinds": {name: GPUS[name].description for name in NAMES},
    }
    for name in NAMES:
        predictions[name] = {part.name: _rounded(predicted(part, name, tiny=False)) for part in ALL}
    # For dry runs: the same names at tiny sizes, as if on the first of them.
    predictions["tiny"] = {part.name: _rounded(predicted(part, NAMES[0], tiny=True)) for part in ALL}
    return predictions


def main() -> int:
    PREDICTIONS.write_text(json.dumps(everything(), indent=1) + "\n")
    print(f"written: {PREDICTIONS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
