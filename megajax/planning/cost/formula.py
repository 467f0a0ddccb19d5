"""A plan without a compiler: a config's memory, traffic and speed by formulas, printed or written, in a second."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from megajax.config.errors import Problem, UserError
from megajax.metrics import banner
from megajax.metrics.banner import Section
from megajax.metrics.text import count, duration
from megajax.planning.cost.byte_classes import classes
from megajax.planning.cost.costs import Device, calibrated, known_device, read_device
from megajax.planning.cost.description import describe
from megajax.planning.cost.estimate import Estimate, bytes_per_step, estimate, to_dict
from megajax.planning.program.devices import GIB, Cluster, read_cluster
from megajax.planning.search import whatif
from megajax.training.run_config import RunConfig

GIGA = 1e9


def read_target(flags: Mapping[str, Any]) -> tuple[Cluster | None, list[Problem]]:
    """Cluster that --devices, --gpus-per-node and --device-file ask for; None with problems where they don't.

    Raises UserError for a --device-file that can't be read.
    """
    file = flags["device_file"]
    described = {}
    if file is not None:
        own = read_device(file)
        described[own.name.lower()] = own.per_node
    return read_cluster(flags["devices"], flags["gpus_per_node"], described)


def device_of(cluster: Cluster, flags: Mapping[str, Any]) -> Device:
    """What it can do: known or described, with what --calibration, --nvlink and --network say put in place.

    Raises UserError for files that can't be read or are of another device.
    """
    file = flags["device_file"]
    own = None if file is None else read_device(file)
    chosen = own if own is not None and own.name.lower() == cluster.name else known_device(cluster.name)
    if flags["calibration"] is not None:
        chosen = calibrated(chosen, flags["calibration"])
    for name in ("nvlink", "network"):
        rate = flags[name]
        if rate is not None:
            if not 0 < rate < float("inf"):
                raise UserError(f"--{name} must be above 0 GB/s, got {rate:g}")
            chosen = replace(chosen, **{name: rate * GIGA})
    return chosen


def plan(cfg: RunConfig, cluster: Cluster, device: Device) -> Estimate:
    """The estimate of a config that passes its checks on those devices. Raises UserError as `estimate` does."""
    return estimate(describe(cfg, device, cluster.devices, cluster.per_node))


def run(cfg: RunConfig, cluster: Cluster, device: Device, flags: Mapping[str, Any]) -> Estimate:
    """Plan, print, and write what the flags ask for. Raises UserError as `plan` does, and for files."""
    found = plan(cfg, cluster, device)
    show(found)
    if not found.fits:
        whatif.show(whatif.Situation(cfg=cfg, cluster=cluster, device=device))
    if flags["json"] is not None:
        write_json(found, flags["json"])
    return found


def write_json(found: Estimate, path: Path) -> None:
    """Raises UserError where the file can't be written."""
    written = to_dict(found) | {"parameters": found.run.model.parameter_count().total}
    try:
        path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}") from error


def show(found: Estimate, file: TextIO | None = None) -> None:
    """Print it as sections of names and values."""
    run = found.run
    title = f"plan for {run.devices} x {run.device.name}, by formula"
    print(banner.plain(title, sections(found)), file=file or sys.stdout)


def sections(found: Estimate) -> list[Section]:
    """What `show` prints."""
    run, memory = found.run, found.memory
    room = run.device.usable_gib - memory.peak_gib
    parameters = run.model.parameter_count()
    layout = [
        ("devices", f"{run.devices} in nodes of {run.per_node}"),
        ("mesh", ", ".join(f"{name} {size}" for name, size in run.sizes.items())),
        ("parameters", f"{count(parameters.total)} ({parameters.total:,})"),
        ("FLOPs per token", f"{found.flops.causal:.4g} with causal attention, {found.flops.full:.4g} with full"),
        (
            "microbatches",
            f"{run.microbatches} of {run.micro_size} rows, {run.model.sequence_length} tokens each",
        ),
    ]
    if run.parallel.pipeline > 1:
        slots, chunks = found.schedule.slots, run.parallel.virtual_stages
        layout.append(("schedule", f"{run.parallel.schedule}, {chunks} chunks a stage, {slots} ring slots"))
        layout.append(("bubble", f"{found.schedule.fraction:.2%} over ideal time"))
    held = [
        ("weights", f"{_gib(memory.parameters)}  master weights"),
        ("optimizer", f"{_gib(memory.optimizer)}  its state"),
        ("weights in use", f"{_gib(memory.weights)}  in compute dtype"),
        ("gradients", f"{_gib(memory.gradients)}  added up over microbatches"),
        ("activations", f"{_gib(memory.activations)}  kept for the backward pass"),
        ("working", f"{_gib(memory.working)}  of a layer or the loss, and under way"),
        ("peak", _gib(memory.peak)),
        ("usable", f"{run.device.usable_gib:8.2f}  of {run.device.memory_gib:g}"),
        ("fits", f"{'yes' if found.fits else 'NO':>8}  {abs(room):.2f} {'to spare' if room >= 0 else 'too much'}"),
        ("Megatron-LM says", f"{_gib(found.report.total)}  by its own report"),
    ]
    return [
        ("layout", layout),
        ("memory of one device, GiB", held),
        ("collectives of one device and step", _traffic(found)),
        classes(bytes_per_step(found), run.device),
        ("time of a step", times(found)),
    ]


def times(found: Estimate) -> list[tuple[str, str]]:
    """Names and values of the section on time, of any plan."""
    run, step = found.run, found.step_seconds
    parts = [
        ("compute", found.compute_seconds, "matmuls {:.0%}, attention {:.0%}, bound by memory {:.0%}"),
        ("exposed communication", found.exposed_seconds, f"{found.hidden_seconds:.3f} s more are hidden"),
        ("bubble", found.bubble_seconds, ""),
        ("optimizer", found.optimizer_seconds, ""),
    ]
    split = [part / found.compute_seconds for part in (found.matmul_seconds, found.attention_seconds)]
    shares = (*split, 1 - sum(split))
    rows = [
        (name, f"{value:9.3f} s {value / step:6.1%}  {note.format(*shares)}".rstrip()) for name, value, note in parts
    ]
    rows.append(("step", f"{step:9.3f} s"))
    rows.append(("tokens/s", f"{found.tokens_per_second_per_device:9,.0f} per device"))
    of = ", of the bfloat16 peak" if run.compute != "bfloat16" else ""
    rows.append(("MFU", f"{found.mfu_causal:9.1%} with causal attention, {found.mfu_full:.1%} with full{of}"))
    if run.steps:
        rows.append(
            (
                "whole run",
                f"{run.steps:,} steps, {count(found.tokens)} tokens: {duration(found.days * 86_400)}, "
                f"{found.device_hours:,.0f} GPU hours",
            )
        )
    return rows


def _traffic(found: Estimate) -> list[tuple[str, str]]:
    return [
        (
            f"{row.axis}: {row.kind}",
            f"{row.count:9,.0f} x {row.bytes / row.count / 2**20:8,.1f} MiB {row.seconds:9.3f} s, "
            f"{row.exposed:.3f} exposed  {row.what}",
        )
        for row in found.traffic
    ] or [("none", "")]


def _gib(size: float) -> str:
    return f"{size / GIB:8.2f}"
