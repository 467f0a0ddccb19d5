"""Explains errors of devices and their libraries: what failed, the sizes or versions, and what to change."""

import os
import re
import time
import traceback
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax

from megajax.config.compose import override
from megajax.config.errors import UserError
from megajax.job.device_memory import compiled_memory, size
from megajax.machine.known_faults import explanation
from megajax.mesh.config import SIZED_AXES, ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.models.facts import facts_of
from megajax.models.protocol import ModelConfig
from megajax.precision.fp8 import capability_of
from megajax.processes.installation import find_installation
from megajax.processes.xla_options import memory_fraction
from megajax.storage.disk import open_regular
from megajax.training.program import Program
from megajax.training.run_config import RunConfig

EXHAUSTED = re.compile(
    r"\A(?!.*(host_bfc|pinned host|nccl)).*(RESOURCE_EXHAUSTED|out of memory|CUDA_ERROR_OUT_OF_MEMORY)", re.I | re.S
)
"""Of a device: the pool of pinned host memory and NCCL have known faults of their own."""
REQUESTED = re.compile(r"allocat\w*\s+(?:request for\s+)?(?P<number>[\d.]+)\s*(?P<unit>[KMGT]i?B|bytes|B)?", re.I)
UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
INSTALLATION = re.compile(
    r"DNN library|libcu\w+\.so|CUDNN_STATUS|cuDNN version|libdevice|ptxas|nvlink.*not found|no kernel image"
    r"|NO_BINARY_FOR_GPU|CUDA_ERROR_(?:NO_DEVICE|SYSTEM_DRIVER_MISMATCH|UNSUPPORTED_PTX_VERSION)"
    r"|driver version is insufficient|PJRT.*version",
    re.IGNORECASE,
)
PHASES = {"evaluate": "in an evaluation", "dispatch": "in a train step", "fetch": "in a train step"}
"""Function of this library -> the phase of the run."""


class DeviceFault(UserError):
    """A device has too little memory, or its libraries do not work; the traceback is in a file."""

    code = 1


def device_fault(error: BaseException, cfg: RunConfig, folder: Path) -> DeviceFault | None:
    """An error with an explanation, its traceback written into `folder`; None if no device caused it."""
    if not isinstance(error, RuntimeError | ValueError | MemoryError) or isinstance(error, UserError):
        return None
    text = str(error)
    known = explanation(text)
    if isinstance(error, MemoryError):
        reason = "the host, not a device, is out of memory: check data.loader and other processes"
    elif EXHAUSTED.search(text):
        reason = out_of_memory(error, cfg)
    elif INSTALLATION.search(text):
        reason = installation(text)
    elif known:
        reason = text.strip().splitlines()[0][:600]
    else:
        return None
    return DeviceFault("\n".join([reason, *known, _write_traceback(error, folder)]))


def installation(text: str) -> str:
    """Known faults of the installed GPU libraries, and their versions."""
    installed, devices = find_installation(), _devices()
    faults = installed.faults()
    for device in {device.device_kind: device for device in devices}.values():
        if len(capability := capability_of(device)) == 2:
            faults += filter(None, [installed.capability_fault(device.device_kind, (capability[0], capability[1]))])
    versions = ", ".join(f"{name} {version}" for name, version in installed.packages.items())
    first, *_ = text.strip().splitlines()
    lines = [f"the GPU's libraries do not work: {first[:300]}", *faults]
    if not faults:
        lines.append(
            "The versions seem to match. cuDNN also fails to start if another process fills the GPU's memory (see "
            "nvidia-smi), or if LD_LIBRARY_PATH points to another CUDA (unset it)."
        )
    return "\n".join([*lines, f"installed: {versions}"])


class Change(NamedTuple):
    """A setting that would save memory."""

    setting: str
    """The setting as on the command line, without dashes."""
    effect: str


def out_of_memory(error: BaseException, cfg: RunConfig) -> str:
    """The requested and available memory, what uses it, and the cheapest changes."""
    devices, requested = _devices(), requested_bytes(str(error))
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    limit = next(filter(None, limits), None)
    share = memory_fraction() if limit is not None and devices[0].platform == "gpu" else None
    lines = [
        f"out of memory on {devices[0].device_kind if devices else 'a device'}{_phase(error)}",
        f"  request: {'an unknown amount' if requested is None else size(requested)} more; "
        + ("the device's limit is unknown" if limit is None else f"the limit for arrays is {size(limit)} a device")
        + (f" (share {share})" if share else ""),
    ]
    step, state = compiled_memory(devices), state_bytes(cfg, jax.devices())
    if step is not None:
        arguments, temporary = (f"{size(n)} ({n / max(step.total, 1):.0%})" for n in (step.arguments, step.temporary))
        lines.append(
            f"  needed:  {size(step.total)} by the compiled train step: state and batch {arguments}, "
            f"activations, gradients and other temporaries {temporary}"
        )
    elif state is not None:
        lines.append(f"  needed:  {size(state)} for weights and optimizer alone; the step is not compiled")
    parallel, model = cfg.parallel, facts_of(cfg.model)
    mesh = ", ".join(f"{axis} {getattr(parallel, axis)}" for axis in SIZED_AXES)
    lines.append(
        f"  used:    micro_size {cfg.batch.micro_size}, data_sharding {parallel.data_sharding}, "
        f"{mesh.replace('None', 'the rest')}{'' if model is None else f', loss_chunk {model.head_facts().chunk}'}"
    )
    mostly_state = state is not None and step is not None and state > step.temporary
    changes = cheapest(cfg, len(jax.devices()), state, mostly_state=mostly_state)
    if changes:
        lines += ["  change, cheapest first:", *(f"    --{change.setting}  {change.effect}" for change in changes)]
    else:
        lines.append("  use more devices or a smaller model.sequence_length: no cheaper change is left")
    return "\n".join([*lines, "  `python -m megajax.plan` with the same settings predicts the memory of a run"])


def cheapest(cfg: RunConfig, devices: int, state: int | None, *, mostly_state: bool) -> list[Change]:
    """At most three changes that the config's checks allow, ordered by their cost in speed.

    state: bytes of weights and optimizer on a device. Changes of the layout must reduce them.
    """
    of_state, of_activations = (
        [*_state_changes(cfg.parallel)],
        [*_activation_changes(cfg.batch.micro_size, cfg.parallel, cfg.model)],
    )
    changes: list[Change] = []
    for change in of_state + of_activations if mostly_state else of_activations + of_state:
        try:
            changed_cfg = override(cfg, change.setting, devices=devices)
        except UserError:
            continue
        new_state = state_bytes(changed_cfg, jax.devices()) if change in of_state else None
        if state is not None and new_state is not None:
            if new_state >= state:
                continue
            change = change._replace(effect=f"{change.effect}: state {size(state)} -> {size(new_state)}")
        changes.append(change)
        if len(changes) == 3:
            break
    return changes


def _activation_changes(micro: int, parallel: ParallelConfig, config: ModelConfig) -> Iterator[Change]:
    model = facts_of(config)
    if micro > 1:
        yield Change(f"batch.micro_size={micro // 2}", "halves activations, doubles the number of microbatches")
    if parallel.tensor > 1 and not parallel.sequence:
        effect = f"shards activations between layers over the {parallel.tensor} devices of tensor"
        yield Change("parallel.sequence=true", effect)
    if model is None:
        return
    recompute = model.recomputing().recompute
    if recompute == "none":
        yield Change("model.recompute=selective", "saves inputs of matmuls, recomputes the rest")
    head = model.head_facts()
    logits = 4 * head.chunk * head.columns // (parallel.tensor * parallel.pipeline)
    if logits > 2**30:
        yield Change(f"model.loss_chunk={head.chunk // 2}", f"halves the logits, {size(logits)} at a time")
    if recompute != "full":
        yield Change("model.recompute=full", "saves only inputs of layers; a third more computation")
    if micro == 1 and config.allows_context():
        effect = "splits each row over twice as many devices, so half as many read different rows"
        yield Change(f"parallel.context={2 * parallel.context}", effect)


def _state_changes(parallel: ParallelConfig) -> Iterator[Change]:
    if parallel.data_sharding == "replicate":
        yield Change("parallel.data_sharding=zero1", "shards optimizer and master weights over data")
    if parallel.data_sharding != "fsdp":
        yield Change("parallel.data_sharding=fsdp", "shards weights too, and gathers them layer by layer")
    if parallel.shards is not None:
        yield Change("parallel.shards=none", "one copy over all devices of data, none for each group")
    yield Change(f"parallel.tensor={2 * parallel.tensor}", "shards each layer further")
    yield Change(f"parallel.pipeline={2 * parallel.pipeline}", "fewer layers on each device")


def state_bytes(cfg: RunConfig, devices: list[jax.Device]) -> int | None:
    """Bytes of weights and optimizer per device, computed from shapes; None if the config does not fit `devices`."""
    try:
        program = Program.of(cfg, build_mesh(cfg.parallel, devices), options={})  # shapes only: nothing is compiled
        with jax.set_mesh(program.mesh):
            leaves = jax.tree.leaves(program.state_like())
    except (UserError, RuntimeError, ValueError):
        return None
    return sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def requested_bytes(text: str) -> int | None:
    """Bytes of the failed allocation, from the runtime's message; None if it has no size."""
    match = REQUESTED.search(text)
    if match is None:
        return None
    unit = (match["unit"] or "b").lower()
    return round(float(match["number"].rstrip(".")) * UNITS.get(unit[0], 1))


def _devices() -> list[Any]:
    try:
        return jax.local_devices()
    except RuntimeError:  # the devices themselves fail
        return []


def _phase(error: BaseException) -> str:
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return next((f" {PHASES[name]}" for name in reversed(names) if name in PHASES), " while the run was set up")


def _write_traceback(error: BaseException, folder: Path) -> str:
    """Write the traceback to a file -> the path in a sentence; the traceback itself if it can't be written."""
    text = "".join(traceback.format_exception(error))
    rank = f"-process{jax.process_index()}" if _devices() and jax.process_count() > 1 else ""
    path = folder / f"traceback{rank}.txt"
    try:
        with open(open_regular(path, append=True), "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()}\n{text}\n")
    except OSError:
        return text
    return f"the traceback is in {path}"
