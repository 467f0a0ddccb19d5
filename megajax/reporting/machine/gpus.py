"""Checks of NVIDIA GPUs by what their driver tells: nvidia-smi, and the kernel's log."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megajax.reporting.machine.check import Check, Finding, fail, ok, warn
from megajax.reporting.machine.machine import Machine, Output
from megajax.reporting.machine.software import judge_driver

SMI_SECONDS = 20.0
"""The driver may have to wake up first (persistence mode is off); a broken GPU may hang it."""

FIELDS = ("index", "name", "driver_version", "compute_cap", "memory.total", "memory.used")
HEALTH = ("index", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "temperature.gpu")
REMAPPED = ("index", "remapped_rows.pending", "remapped_rows.failure")
LINK = ("index", "pcie.link.width.current", "pcie.link.width.max", "persistence_mode", "mig.mode.current")
REASONS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")

BUSY_SHARE = 0.02
HOT = 87.0

FATAL = frozenset({48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143})
"""Xid errors of NVIDIA's catalogue that speak of broken hardware or a GPU that has to be reset."""


class Told(NamedTuple):
    """Answers of nvidia-smi."""

    rows: tuple[Mapping[str, str], ...]
    """GPU by GPU, field -> text."""
    why: str = ""
    """Why there are none."""


class Cards(NamedTuple):
    """What was asked, and how many GPUs the kernel shows."""

    told: Told
    files: int


def query(machine: Machine, fields: Sequence[str]) -> Told:
    """`fields` of every GPU."""
    asked = f"--query-gpu={','.join(fields)}"
    words = ("nvidia-smi", asked, "--format=csv,noheader,nounits")
    return machine.once(asked, lambda machine: read_query(machine.run(*words, seconds=SMI_SECONDS), fields))


def read_query(output: Output, fields: Sequence[str]) -> Told:
    """The lines of a query."""
    if output.code != 0:
        last = (output.out + output.err).strip().splitlines()
        return Told((), output.why or (last[-1] if last else f"ended with code {output.code}"))
    lines = [[part.strip() for part in line.split(",")] for line in output.out.splitlines() if line.strip()]
    if any(len(line) != len(fields) for line in lines):
        return Told((), f"answered with other than {len(fields)} fields: {output.out.splitlines()[0][:80]}")
    return Told(tuple(dict(zip(fields, line, strict=True)) for line in lines))


def _value(row: Mapping[str, str], name: str) -> float | None:
    try:
        return float(row.get(name, ""))
    except ValueError:
        return None


def judge_cards(found: Cards) -> Finding:
    """There are GPUs, and the driver answers for all of them."""
    rows = found.told.rows
    if not rows and not found.files:
        return warn("no NVIDIA GPU", "runs take the CPU: good for trying things out")
    if not rows:
        text = f"{found.files} GPUs by their device files, but nvidia-smi {found.told.why}"
        return fail(text, "reload the driver or reboot; in a container, see that the toolkit passes nvidia-smi in")
    if len(rows) < found.files:
        text = f"nvidia-smi tells of {len(rows)} GPUs, the kernel of {found.files}"
        return fail(text, "one has fallen off the bus, or belongs to another container: see dmesg")
    kinds: dict[str, int] = {}
    for row in rows:
        memory = _value(row, "memory.total")
        size = f", {memory / 1024:.0f} GiB" if memory else ""
        kind = f"{row['name']} (capability {row['compute_cap']}{size})"
        kinds[kind] = kinds.get(kind, 0) + 1
    text = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    if len(kinds) > 1:
        return warn(text, "one program runs on all: it goes at the pace and with the memory of the least")
    return ok(text)


def judge_memory(told: Told) -> Finding | None:
    """Nobody else is on the GPUs."""
    used = {
        row["index"]: (used, total)
        for row in told.rows
        if (used := _value(row, "memory.used")) is not None and (total := _value(row, "memory.total"))
    }
    if not used:
        return None
    busy = [f"GPU {name} {u:,.0f} MiB" for name, (u, total) in used.items() if u > BUSY_SHARE * total]
    if busy:
        return warn(f"in use already: {', '.join(busy)}", "end what runs there (nvidia-smi lists it)")
    return ok("GPU memory is free")


def judge_health(found: tuple[Told, Told]) -> Finding | None:
    """Errors the GPUs count themselves. (ecc and temperature, rows set aside)."""
    health, remapped = found
    if not health.rows:
        return None
    broken, doubtful = [], []
    for row in health.rows:
        errors = _value(row, "ecc.errors.uncorrected.volatile.total")
        if errors:
            broken.append(f"GPU {row['index']}: {errors:.0f} uncorrected memory errors")
        if row["ecc.mode.current"] == "Disabled":
            doubtful.append(f"GPU {row['index']}: ECC is off")
        if (heat := _value(row, "temperature.gpu")) is not None and heat >= HOT:
            doubtful.append(f"GPU {row['index']}: {heat:.0f} °C")
    for row in remapped.rows:
        if row["remapped_rows.failure"] in ("Yes", "1"):
            broken.append(f"GPU {row['index']}: no memory rows left to put in place of broken ones")
        if row["remapped_rows.pending"] in ("Yes", "1"):
            doubtful.append(f"GPU {row['index']}: waits for a reset to replace a broken memory row")
    if broken:
        return fail("; ".join(broken + doubtful), "take the machine out and have the GPU reset or replaced")
    if doubtful:
        return warn("; ".join(doubtful), "reset the GPU (nvidia-smi -r), turn ECC on (-e 1), look at the cooling")
    modes = sorted({row["ecc.mode.current"] for row in health.rows})
    return ok(f"no uncorrected memory errors; ECC {'/'.join(modes).lower()}")


def judge_slowdown(told: Told) -> Finding | None:
    """Nothing holds the clocks down."""
    if not told.rows:
        return None
    slow = [
        f"GPU {row['index']}: {name.rpartition('.')[2].replace('_', ' ')}"
        for row in told.rows
        for name, text in row.items()
        if text == "Active"
    ]
    if slow:
        return warn("; ".join(slow), "look at cooling and power supply: one slow GPU slows a whole run")
    return ok("clocks are not held down")


def judge_link(told: Told) -> Finding | None:
    """PCIe at full width, no slices."""
    if not told.rows:
        return None
    found = []
    for row in told.rows:
        width, most = (_value(row, f"pcie.link.width.{name}") for name in ("current", "max"))
        if width and most and width < most:
            found.append(f"GPU {row['index']}: PCIe x{width:.0f} of x{most:.0f}")
        if row["mig.mode.current"] == "Enabled":
            found.append(f"GPU {row['index']} is cut into slices (MIG)")
        if row["persistence_mode"] == "Disabled":
            found.append(f"GPU {row['index']}: persistence mode is off")
    if found:
        return warn("; ".join(found), "reseat the card; nvidia-smi -mig 0; nvidia-smi -pm 1")
    return ok("PCIe at full width, persistence mode on")


def judge_xid(found: tuple[Output, int]) -> Finding | None:
    """Errors in the kernel's log since the machine started. (dmesg, GPUs)."""
    output, gpus = found
    if not gpus:
        return None
    if output.code != 0:
        return warn("the kernel's log cannot be read", "run as root, or look for Xid in dmesg by hand")
    errors = re.findall(r"NVRM: Xid \((?:PCI:)?([\w:.]+)\): (\d+)", output.out)
    if not errors:
        return ok("no Xid errors in the kernel's log")
    text = ", ".join(f"Xid {number} at {place}" for place, number in dict.fromkeys(errors))
    if any(int(number) in FATAL for _, number in errors):
        return fail(text, "take the machine out: these speak of broken hardware, or of a GPU to be reset")
    return warn(text, "look the numbers up: they may come from programs as well")


def judge_topology(found: tuple[Output, int]) -> Finding | None:
    """GPUs see each other over NVLink. (nvidia-smi topo -m, GPUs)."""
    output, gpus = found
    if gpus < 2 or output.code != 0:
        return None
    links = read_topology(output.out)
    if not links:
        return warn("nvidia-smi topo -m tells nothing", "look at it by hand")
    kinds = sorted(set(links.values()))
    without = [f"{a}-{b} {kind}" for (a, b), kind in links.items() if not kind.startswith("NV")]
    if len(without) == len(links):
        return warn(f"no NVLink: {', '.join(kinds)}", "keep parallel.tensor=1: its exchanges would go over PCIe")
    if without:
        text = f"some pairs have no NVLink: {', '.join(without[:6])}"
        return warn(text, "right for cards bridged in pairs; else a link is down: nvidia-smi nvlink -s")
    if len(kinds) > 1:
        return warn(f"unequal NVLinks: {', '.join(kinds)}", "a link may be down: nvidia-smi nvlink -s")
    return ok(f"every pair of {gpus} GPUs by {kinds[0]}")


def read_topology(text: str) -> dict[tuple[str, str], str]:
    """Pairs of GPUs -> their link (NV18, PIX, SYS), from the matrix nvidia-smi prints."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    rows = [line.split() for line in plain.splitlines() if line.strip()]
    heading = next((row for row in rows if row[0] == "GPU0" and "X" not in row), [])
    names = [name for name in heading if re.fullmatch(r"GPU\d+", name)]
    cells = {row[0]: row[1 : 1 + len(names)] for row in rows if row[0] in names and "X" in row}
    pairs = [(a, b) for place, a in enumerate(names) for b in names[place + 1 :] if a in cells]
    return {(a, b): cells[a][names.index(b)] for a, b in pairs if names.index(b) < len(cells[a])}


def _slowdown(machine: Machine) -> Told:
    """The names of the reasons depend on the driver."""
    told = Told(())
    for family in ("clocks_event_reasons", "clocks_throttle_reasons"):
        told = query(machine, ("index", *(f"{family}.{name}" for name in REASONS)))
        if told.rows:
            return told
    return told


def _cards(machine: Machine) -> Cards:
    return Cards(query(machine, FIELDS), machine.gpu_files)


def _if_there(machine: Machine, fields: Sequence[str]) -> Told:
    return query(machine, fields) if machine.gpu_files else Told(())


def _driver(machine: Machine) -> tuple[str | None, Mapping[str, str]]:
    rows = _if_there(machine, FIELDS).rows
    return (rows[0]["driver_version"] if rows else None), machine.packages


CHECKS = (
    Check("GPUs", _cards, judge_cards),
    Check("driver", _driver, judge_driver),
    Check("GPU memory", lambda machine: _if_there(machine, FIELDS), judge_memory),
    Check("GPU errors", lambda machine: (_if_there(machine, HEALTH), _if_there(machine, REMAPPED)), judge_health),
    Check("GPU clocks", lambda machine: _slowdown(machine) if machine.gpu_files else Told(()), judge_slowdown),
    Check("GPU slots", lambda machine: _if_there(machine, LINK), judge_link),
    Check("GPU log", lambda machine: (machine.run("dmesg", seconds=5.0), machine.gpu_files), judge_xid),
    Check(
        "GPU links",
        lambda machine: (
            machine.run("nvidia-smi", "topo", "-m", seconds=SMI_SECONDS)
            if machine.gpu_files > 1
            else Output(0, "", ""),
            machine.gpu_files,
        ),
        judge_topology,
    ),
)
