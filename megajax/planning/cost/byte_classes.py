"""Bytes through memory by class of kernel, as plans tell them, counted in a program or by formula."""

from collections.abc import Mapping

from megajax.metrics.banner import Section
from megajax.planning.cost.costs import Device

ABOUT = {
    "copies": "slices, updates, copies, transposes, zeros",
    "elementwise": "casts, additions, norms, activations, the optimizer",
    "matmul": "with what is fused into them",
    "attention": "",
    "collective": "what they read and write in memory",
}
"""Classes and what is in them."""
UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20))


def classes(sums: Mapping[str, float], device: Device, predicted: Mapping[str, float] | None = None) -> Section:
    """Bytes by class, counted or by formula; predicted: what a formula says beside what is counted."""
    total = sums["total"]
    name, unit = unit_of(total)

    def line(kind: str, share: str, about: str) -> tuple[str, str]:
        formula = "" if predicted is None else f"  by formula {predicted[kind] / unit:6.2f}"
        return kind, f"{sums[kind] / unit:8.2f} {share:>6}{formula}  {about}".rstrip()

    seconds = f"{total / device.bandwidth:.3g} s at the data sheet's {device.bandwidth / 1e12:.3g} TB/s"
    lines = [line(kind, f"{sums[kind] / total:.1%}", about) for kind, about in ABOUT.items()]
    return f"memory traffic of one device and step, {name}", [line("total", "", seconds), *lines]


def unit_of(total: float) -> tuple[str, int]:
    """Name and bytes of the unit that suits a total."""
    return next(((name, unit) for name, unit in UNITS if total >= unit), UNITS[-1])
