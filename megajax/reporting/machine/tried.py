"""Checks of what came of trying the devices."""

from typing import Any, NamedTuple

from megajax.reporting.machine.check import Check, Finding, fail, ok, warn
from megajax.reporting.machine.machine import Stages

TIGHT = 1e-5
"""Relative error of one operation in float32, and of a product of bfloat16 numbers summed in float32."""

ROUNDED = 1e-2
"""Of an attention whose result is rounded to 16 bits: 2^-9 for each number, and weights are rounded as well."""

ORDER = ("versions", "devices", "matmul", "attention", "all_reduce")
NAMES = {
    "versions": "importing jax",
    "devices": "finding devices",
    "matmul": "the matmul",
    "all_reduce": "the all-reduce",
}
FIRST_AID = "end what else runs on the devices; look at the driver and dmesg; try CUDA_VISIBLE_DEVICES=N one by one"


class Tried(NamedTuple):
    """What a stage found."""

    found: Any
    """None where it did not end."""
    finding: Finding | None
    """What is to be said where it did not."""


def tried(stages: Stages, stage: str) -> Tried:
    """A stage's result; where there is none, who is to blame: only the stage that hung, crashed or raised fails."""
    found = stages.done.get(stage)
    if isinstance(found, dict) and "error" in found:
        return Tried(None, fail(found["error"], FIRST_AID))
    if found is not None:
        return Tried(found, None)
    if not stages.stopped_in:
        return Tried(None, warn("not tried: jax finds no devices", "see there"))
    name = NAMES.get(stages.stopped_in, stages.stopped_in)
    if stages.stopped_in == stage or (stages.stopped_in == "start" and stage == "devices"):
        return Tried(None, fail(f"{name} {stages.why}", FIRST_AID))
    return Tried(None, warn(f"not tried: {name} {stages.why}", "see there"))


def judge_devices(stages: Stages) -> Finding:
    """jax finds devices."""
    found, finding = tried(stages, "devices")
    if finding is not None:
        if stages.stopped_in == "versions":
            return fail(f"jax cannot be imported: it {stages.why}", "install it anew: uv sync")
        return finding
    kinds: dict[str, int] = {}
    for device in found:
        memory = f", {device['memory'] / 2**30:.1f} GiB for jax" if device.get("memory") else ""
        capability = f", capability {device['capability']}" if device.get("capability") else ""
        kind = f"{device['kind']} ({device['platform']}{capability}{memory})"
        kinds[kind] = kinds.get(kind, 0) + 1
    return ok(", ".join(f"{number} x {kind}" for kind, number in kinds.items()))


def judge_found(found: tuple[Stages, int]) -> Finding | None:
    """jax found the GPUs that are there. (stages, GPUs by their device files)."""
    stages, gpus = found
    devices = stages.done.get("devices")
    if not gpus or not isinstance(devices, list):
        return None
    there = sum(device["platform"] == "gpu" for device in devices)
    if not there:
        return fail(f"{gpus} GPUs, and jax takes the CPU", "uv sync --extra cuda12 (or cuda13); unset JAX_PLATFORMS")
    if there < gpus:
        return warn(f"jax finds {there} of {gpus} GPUs", "see CUDA_VISIBLE_DEVICES; nvidia-smi -L")
    return ok(f"jax finds all {gpus} GPUs")


def judge_matmul(stages: Stages) -> Finding:
    """Every device multiplies right, and twice the same."""
    found, finding = tried(stages, "matmul")
    if finding is not None:
        return finding
    wrong = [f"device {r['device']} {r['dtype']}: error {r['error']:.1e}" for r in found if r["error"] > TIGHT]
    odd = [f"device {r['device']} {r['dtype']}: differs from time to time" for r in found if not r["repeats"]]
    if wrong or odd:
        return fail("; ".join(wrong + odd), "take the device out of service: its numbers cannot be trusted")
    worst = {kind: max(r["error"] for r in found if r["dtype"] == kind) for kind in sorted({r["dtype"] for r in found})}
    listed = ", ".join(f"{kind} {error:.0e}" for kind, error in worst.items())
    number = len({r["device"] for r in found})
    return ok(f"right on {number} device{'s' * (number > 1)} and the same each time (relative error: {listed})")


def judge_attention(stages: Stages) -> Finding:
    """Every backend that runs here gives what the formula gives."""
    found, finding = tried(stages, "attention")
    if finding is not None:
        return finding
    ran = [r for r in found if "error" in r]
    wrong = [
        f"{r['backend']} ({r['dtype']}): error {r['error']:.1e}"
        for r in ran
        if r["error"] > (TIGHT if r["dtype"] == "float32" else ROUNDED)
    ]
    if wrong:
        return fail("; ".join(wrong), "set the mixer's kernel=reference, or use another cuDNN or jax")
    listed = ", ".join(f"{r['backend']} ({r['dtype']}) {r['error']:.0e}" for r in ran)
    refused = [r["refusal"] for r in found if "refusal" in r]
    return ok(f"relative error: {listed}" + (f"; not here: {refused[0]}" if refused else ""))


def judge_all_reduce(stages: Stages) -> Finding | None:
    """The local devices add up right."""
    found, finding = tried(stages, "all_reduce")
    if finding is not None:
        return finding
    number = found["devices"]
    if found["wrong"]:
        text = f"the sum over {number} devices is wrong on {found['wrong']}"
        return fail(text, "NCCL_DEBUG=WARN tells more; NCCL_P2P_DISABLE=1 shows whether a link is at fault")
    if number == 1:
        return ok("one device: nothing to add up")
    if not found["reduced"]:
        return warn(f"the sum over {number} devices is right, but took no all-reduce", "tell the developers")
    speed = found["bytes"] / found["milliseconds"] * 1e3 / 2**20
    return ok(f"exact over {number} devices; {found['milliseconds']:.2f} ms for 1 MiB ({speed:,.0f} MiB/s)")


CHECKS = (
    Check("devices", lambda machine: machine.stages, judge_devices),
    Check("GPUs in jax", lambda machine: (machine.stages, machine.gpu_files), judge_found),
    Check("matmul", lambda machine: machine.stages, judge_matmul),
    Check("attention", lambda machine: machine.stages, judge_attention),
    Check("all-reduce", lambda machine: machine.stages, judge_all_reduce),
)
