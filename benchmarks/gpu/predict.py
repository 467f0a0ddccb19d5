"""The planner's predictions for every step of gpu_check and node_check, written before anything is measured."""

import json
from collections.abc import Mapping
from datetime import date
from typing import Any

from benchmarks.gpu.comparison import CONSTANTS, GIB, PREDICTIONS, Figures, Predicted
from benchmarks.gpu.node_check import SPEEDS
from benchmarks.gpu.steps import ALL, Step
from benchmarks.kernels import loss
from benchmarks.kernels.measure import PARTS
from benchmarks.outcome import label, rounded
from benchmarks.roofline import Roof, roof_of
from megajax.config import load
from megajax.config.class_references import resolve
from megajax.kernels.attention.request import KernelDevice
from megajax.planning.compiled.devices import GPUS
from megajax.planning.cost.description import describe
from megajax.planning.cost.estimate import estimate

NAMES = ("h200", "h100")
HOPPER = KernelDevice(name="Hopper", capability=(9, 0), cudnn=(9, 28, 0))
CPU = KernelDevice(name="cpu")
STEPS = (*ALL, *SPEEDS)


def predict() -> dict[str, Any]:
    """The planner's predictions for gpu_check and node_check, into benchmarks/predictions.json. Needs no GPU.

    Train steps: time, tokens/s and MFU of the cost model with their ranges, and peak memory. Kernels: the minimum time
    by data sheets (the roofline). Calibration: the constants of the cost model. Run it again before a measurement if
    the cost model or a step has changed. --devices=cpu keeps it off a GPU.
    """
    predictions: dict[str, Any] = {
        "made_by": "python -m benchmarks predict",
        "date": date.today().isoformat(),
        "kinds": {name: GPUS[name].description for name in NAMES},
    }
    for name in NAMES:
        predictions[name] = {step.name: rounded(predicted(step, name, tiny=False), 5) for step in STEPS}
    # For dry runs: the same names at tiny sizes, as if on the first of them.
    predictions["tiny"] = {step.name: rounded(predicted(step, NAMES[0], tiny=True), 5) for step in STEPS}
    PREDICTIONS.write_text(json.dumps(predictions, indent=1) + "\n")
    print(f"written: {PREDICTIONS}")
    return predictions


def predicted(step: Step, name: str, *, tiny: bool) -> Predicted:
    """The figures of one step on devices of the cost model."""
    match step.kind:
        case "mfu":
            return train_step(step, name, tiny=tiny)
        case "trace":
            (traced,) = (step for step in ALL if any("--trace=" in word for word in step.program))
            seconds: Any = train_step(traced, name, tiny=tiny)["step s"]
            busy = {bound: 1e3 * value for bound, value in seconds.items()}
            return {"busy ms a step": busy, "idle ms a step": 0.0, "exposed ms": 0.0}
        case "kernels":
            roof = roof_of(GPUS[name].description, "gpu")
            return kernels(step.name.removeprefix("kernels_"), roof, tiny=tiny)
        case "calibrate":
            return {field: getattr(GPUS[name], field) for field in CONSTANTS}
        case "tests":
            return {"failed": 0}
        case "experts":
            return {"wrong": 0}
        case "schedules":  # on one GPU there is nothing to hide
            return {"default over costs": 1.0, "measured over costs": 1.0, "share of names": 1.0}
    return {}


def train_step(step: Step, name: str, *, tiny: bool) -> Predicted:
    """The figures of the train step that a command measures; times and speeds with the planner's ranges."""
    source, settings = settings_of(step, tiny=tiny)
    estimated = estimate(describe(load(source, *settings), GPUS[name], step.devices))
    slowest, fastest = estimated.errors.speeds(1.0)

    def ranged(predicted: float, low: float, high: float) -> dict[str, float]:
        return {"predicted": predicted, "low": low * predicted, "high": high * predicted}

    return {
        "step s": ranged(estimated.step_seconds, 1 / fastest, 1 / slowest),
        "tokens/s": ranged(estimated.tokens_per_second_per_device, slowest, fastest),
        "MFU causal": ranged(estimated.mfu_causal, slowest, fastest),
        "MFU full": ranged(estimated.mfu_full, slowest, fastest),
        "peak GiB": estimated.memory.peak / GIB,
    }


def settings_of(step: Step, *, tiny: bool) -> tuple[str, list[str]]:
    """The config of a step that trains, and the settings that its prediction depends on."""
    arguments = step.arguments(tiny=tiny)
    source = next(word for word in arguments if word.startswith("--config=")).partition("=")[2]
    parts = ("--model.", "--batch.", "--precision.", "--parallel.")
    return source, [word[2:] for word in arguments if word.startswith(parts)]


def kernels(part: str, roof: Roof, *, tiny: bool) -> Figures:
    """The minimum milliseconds of every case of a part."""

    def milliseconds(flops: float, moved: float, fp8: bool = False) -> float | None:
        seconds = roof.floor_seconds(flops=flops, moved=moved, fp8=fp8)
        return None if seconds is None else 1e3 * seconds

    figures: dict[str, float | None] = {}
    if part == "loss":
        for size in loss.SIZES[not tiny]:
            least = milliseconds(*loss.costs(size, 1))
            names: Mapping[str, Any] = dict.fromkeys(loss.names(loss.CHUNKS[not tiny]), loss.sizes(size, 1))
            figures |= {f"{label(name, sizes)}: both ms": least for name, sizes in names.items()}
        return figures
    for case in resolve(PARTS[part])(not tiny, CPU if tiny else HOPPER):
        for work, flops, moved in zip(("forward", "both"), case.flops, case.moved, strict=True):
            figures[f"{case.label()}: {work} ms"] = milliseconds(flops, moved, case.fp8)
    return figures
