"""Checks of NVIDIA GPUs: what the driver says through NVML, and the kernel log."""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from packaging.version import Version

from megajax.metrics.text import byte_size
from megajax.reporting.machine.check import Check, Finding, fail, ok, warn
from megajax.reporting.machine.machine import Machine

NVML_SECONDS = 20.0
"""The driver may have to wake up first (persistence mode is off)."""

DRIVERS = {"jax-cuda12-plugin": "525.60.13", "jax-cuda13-plugin": "580"}
"""The oldest driver each plugin runs on, from jax's installation guide."""

BUSY_SHARE, HOT = 0.02, 87
NOT_INSTALLED = "nvidia-ml-py is not installed"

FATAL_XIDS = frozenset({48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143})
"""Xid errors that NVIDIA's catalogue attributes to broken hardware or to a GPU that needs a reset."""


class Driver(NamedTuple):
    """What the driver said, in the terms of nvml.py."""

    gpus: Sequence[Mapping[str, Any]] = ()
    version: str | None = None
    without_nvlink: Sequence[str] = ()
    why: str = ""
    """Why it said nothing."""


def driver(machine: Machine) -> Driver:
    """Ask NVML once."""
    return machine.once("nvml", _ask)


def _ask(machine: Machine) -> Driver:
    output = machine.run(sys.executable, "-m", "megajax.reporting.machine.nvml", seconds=NVML_SECONDS)
    if "No module named 'pynvml'" in output.err:
        return Driver(why=NOT_INSTALLED)
    if output.code != 0:
        return Driver(why=f"the driver does not answer: {output.reason}")
    return Driver(**json.loads(output.out.splitlines()[-1]))


def count(machine: Machine) -> Finding:
    """There are GPUs, and the driver knows all of them."""
    known, files = driver(machine), machine.gpu_files
    if not known.gpus and not files:
        return warn("no NVIDIA GPU", "runs use the CPU: enough to try things out")
    if known.why == NOT_INSTALLED:
        return warn(f"{files} device files; not checked: {known.why}", "pip install 'megajax[monitor]'")
    if not known.gpus:
        return fail(f"{files} device files; {known.why or 'the driver knows no GPU'}", "reload the driver, or reboot")
    if len(known.gpus) < files:
        text = f"the driver knows {len(known.gpus)} GPUs, the kernel {files}"
        return fail(text, "one has fallen off the bus, or belongs to another container: see dmesg")
    kinds = Counter(f"{g['name']} (capability {g['capability']}, {byte_size(g['memory_total'])})" for g in known.gpus)
    text = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    if len(kinds) > 1:
        return warn(text, "a program that runs on all of them has the speed and the memory of the smallest")
    return ok(text)


def version(machine: Machine) -> Finding | None:
    """The driver is new enough for jax's plugin."""
    installed = driver(machine).version
    if installed is None:
        return None
    for plugin, oldest in DRIVERS.items():
        if plugin in machine.packages and Version(installed) < Version(oldest):
            text = f"driver {installed} is too old for {plugin}"
            return fail(text, f"update it to {oldest} or newer, or use an older CUDA")
    if not DRIVERS.keys() & machine.packages.keys():
        return warn(f"driver {installed}, but no CUDA plugin for jax", "uv sync --extra cuda12 (or cuda13)")
    return ok(f"{installed}, new enough for jax's plugin")


def health(machine: Machine) -> Finding | None:
    """Memory errors, temperature, clocks, PCIe and modes; nothing else runs on the GPUs."""
    gpus = driver(machine).gpus
    problems = [
        (status, f"GPU {i} {text}", advice) for i, g in enumerate(gpus) for status, text, advice in _problems(g)
    ]
    if not problems:
        return ok("free, no memory errors, no slowdown, full PCIe width") if gpus else None
    advice = "; ".join(dict.fromkeys(advice for _, _, advice in problems))
    status = "fail" if any(status == "fail" for status, _, _ in problems) else "warn"
    return Finding(status, "; ".join(text for _, text, _ in problems), advice)


def _problems(gpu: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Status, text and advice."""
    replace = "drain the machine, and have the GPU reset or replaced"
    if gpu["uncorrected_errors"]:
        yield "fail", f"has {gpu['uncorrected_errors']} uncorrected memory errors", replace
    if gpu["remap_failed"]:
        yield "fail", "has no spare memory rows left to replace broken ones", replace
    if gpu["remap_pending"]:
        yield "warn", "needs a reset to replace a broken memory row", "nvidia-smi -r"
    if gpu["ecc"] == 0:
        yield "warn", "has ECC off", "nvidia-smi -e 1"
    if gpu["slowdowns"] or (gpu["temperature"] or 0) >= HOT:
        text = f"has {gpu['temperature']} °C, slowdowns: {', '.join(gpu['slowdowns']) or 'none'}"
        yield "warn", text, "check cooling and power supply: one slow GPU slows the whole run"
    if gpu["memory_used"] > BUSY_SHARE * gpu["memory_total"]:
        yield "warn", f"has {gpu['memory_used'] / 2**20:,.0f} MiB in use", "stop what runs there (see nvidia-smi)"
    if (gpu["pcie_width"] or 0) < (gpu["pcie_width_max"] or 0):
        yield "warn", f"has PCIe x{gpu['pcie_width']} of x{gpu['pcie_width_max']}", "reseat the card"
    if gpu["mig"]:
        yield "warn", "is partitioned (MIG)", "nvidia-smi -mig 0"
    if gpu["persistence"] == 0:
        yield "warn", "has persistence mode off", "nvidia-smi -pm 1"


def log(machine: Machine) -> Finding | None:
    """Xid errors in the kernel log since the machine started."""
    if not machine.gpu_files:
        return None
    output = machine.run("dmesg", seconds=5.0)
    if output.code != 0:
        return warn("the kernel log can't be read", "run as root, or search dmesg for Xid by hand")
    xids = re.findall(r"NVRM: Xid \((?:PCI:)?([\w:.]+)\): (\d+)", output.out)
    text = ", ".join(f"Xid {number} at {place}" for place, number in dict.fromkeys(xids))
    if any(int(number) in FATAL_XIDS for _, number in xids):
        return fail(text, "drain the machine: broken hardware, or a GPU that needs a reset")
    return warn(text, "look the numbers up: programs cause some of them") if xids else ok("no Xid errors")


def links(machine: Machine) -> Finding | None:
    """NVLink between all GPUs."""
    known = driver(machine)
    number, counts = len(known.gpus), sorted({gpu["nvlinks"] for gpu in known.gpus})
    if number < 2:
        return None
    if len(known.without_nvlink) == number * (number - 1) // 2:
        return warn("no NVLink between GPUs", "keep parallel.tensor=1: its communication would use PCIe")
    if known.without_nvlink or len(counts) > 1:
        text = f"NVLinks per GPU: {counts}; pairs without: {', '.join(known.without_nvlink[:6]) or 'none'}"
        return warn(text, "expected for cards bridged in pairs; otherwise a link is down: nvidia-smi nvlink -s")
    return ok(f"NVLink between all {number} GPUs, {counts[0]} links each")


CHECKS: tuple[Check, ...] = (
    ("GPUs", count),
    ("driver", version),
    ("GPU health", health),
    ("GPU log", log),
    ("GPU links", links),
)
