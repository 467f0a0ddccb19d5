"""Predicted speeds of Llama 8B, 70B and 405B by recipe of precision.matmul, beside published ones."""

from dataclasses import replace
from typing import Any

from benchmarks.planning.systems import MEGATRON, Published
from megajax.models.presets.llama import llama3
from megajax.planning.cost.description import MEGAJAX, OPERANDS
from megajax.planning.cost.estimate import estimate

BRIDGE = "Megatron Bridge"
RUNS: dict[tuple[str, str], tuple[dict[str, Any], dict[str, float]]] = {
    ("8b", "h100"): ({"devices": 8, "rows": 128, "fsdp": True}, {"fp8": 14_451}),
    ("8b", "b200"): ({"devices": 8, "rows": 128, "micro_size": 2}, {"fp8": 30_624}),
    ("8b", "gb300"): ({"devices": 8, "rows": 128, "micro_size": 2}, {"fp8": 37_556}),
    ("70b", "h100"): ({"devices": 64, "rows": 256, "tensor": 4, "pipeline": 8, "virtual_stages": 5}, {"fp8": 1_664}),
    ("70b", "b200"): ({"devices": 64, "rows": 256, "tensor": 2, "pipeline": 4, "virtual_stages": 5}, {}),
    ("70b", "gb200"): (
        {"devices": 64, "rows": 256, "tensor": 2, "pipeline": 4, "virtual_stages": 5},
        {"nvfp4": 4_864},
    ),
    ("70b", "gb300"): (
        {"devices": 64, "rows": 256, "pipeline": 4, "virtual_stages": 5},
        {"fp8": 5_248, "mxfp8": 4_864, "nvfp4": 7_397},
    ),
    ("405b", "h100"): (
        {"devices": 1024, "rows": 1536, "tensor": 8, "pipeline": 8, "virtual_stages": 8, "context": 2},
        {"fp8": 328},
    ),
    ("405b", "b200"): ({"devices": 256, "rows": 1536, "tensor": 4, "pipeline": 16, "virtual_stages": 8}, {"fp8": 661}),
    ("405b", "gb200"): (
        {"devices": 256, "rows": 1536, "tensor": 4, "pipeline": 16, "virtual_stages": 8},
        {"nvfp4": 1_166},
    ),
    ("405b", "gb300"): (
        {"devices": 256, "rows": 1536, "tensor": 4, "pipeline": 8, "virtual_stages": 4},
        {"fp8": 1_048, "mxfp8": 968, "nvfp4": 1_440},
    ),
}
"""(size, GPU) -> layout, and tokens per second and GPU that Megatron Bridge published (25.11 to 26.08), some with other
layouts."""


def recipe_plans() -> dict[str, Any]:
    """Tokens per second and GPU, and seconds of a step, by formula: of this program, and of published ones."""
    rows = []
    for (size, gpu), (layout, measured) in RUNS.items():
        for compute in ("bfloat16", *OPERANDS):
            run = Published(
                name=size,
                source=BRIDGE,
                device=gpu,
                tokens=measured.get(compute, 0.0),
                model=llama3(size, sequence_length=8192),
                system=MEGAJAX,
                compute=compute,
                reduce="bfloat16",
                **layout,
            )
            plan = estimate(run.described())
            low, high = plan.errors.speeds(speed := plan.tokens_per_second_per_device)
            rows.append({
                "model": size,
                "gpu": gpu,
                "gpus": run.devices,
                "matmul": compute,
                "step_seconds": round(plan.step_seconds, 3),
                "tokens": round(speed),
                "range": [round(low), round(high)],
                "published": run.tokens or None,
                **({"published_program": _steps(run)} if run.tokens else {}),
            })  # fmt: skip
    return {"runs": rows}


def _steps(run: Published) -> dict[str, float]:
    """Errors of predictions for a published run, from this program to that one, one difference after another."""
    alike = replace(MEGAJAX, overhead=MEGATRON.overhead)
    systems = {
        "megajax": MEGAJAX,
        "its kernels": alike,
        "its rounding": (alike := replace(alike, one_pass=True)),
        "its collectives over tensor": replace(alike, tensor_hidden=MEGATRON.tensor_hidden),
        "all of it": MEGATRON,
    }
    predicted = {
        name: estimate(replace(run, system=system).described()).tokens_per_second_per_device
        for name, system in systems.items()
    }
    return {name: round(speed / run.tokens - 1, 3) for name, speed in predicted.items()}
