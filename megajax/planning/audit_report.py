"""The part of a compiled plan that `--audit` adds: bytes through memory by class, and the kernels that move most."""

from typing import Any

from rich.table import Table

from megajax.metrics.banner import Section
from megajax.planning.audit import Audit, rows
from megajax.planning.costs import Device

KERNELS = 12
"""Rows of the table."""
ABOUT = {
    "copies": "slices, updates, copies, transposes, zeros",
    "elementwise": "casts, additions, norms, activations, the optimizer",
    "matmul": "with what is fused into them",
    "attention": "",
    "collective": "what they read and write in memory",
}
EVERYWHERE = ("while", "body", "eval_jaxpr", "shard_map", "checkpoint")
"""Parts of an operation's path that say little."""
UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20))


def to_dict(found: Audit) -> dict[str, Any]:
    """Bytes of one device and step, under the names of a plan's JSON."""
    branches = [one for one in found.kernels if one.place.conditional]
    return {
        "bytes_per_step": found.by_class(),
        "bytes_in_branches": {
            "counted": sum(one.total for one in branches),
            "if_all_ran": sum(one.most for one in branches),
        },
        "loops_of_unknown_rounds": found.unknown_loops(),
        "largest_kernels": rows(found.kernels)[:KERNELS],
    }


def section(found: Audit, device: Device) -> Section:
    """Bytes by class, and how conditionals and loops of unknown trip count are counted."""
    sums, (name, unit) = found.by_class(), _unit(found)
    title, total = f"memory traffic of one device and step, {name}", sums.pop("total")
    seconds = f"{total / device.bandwidth:.3g} s at the data sheet's {device.bandwidth / 1e12:.3g} TB/s"
    lines = [("total", f"{total / unit:8.2f}  {seconds}")]
    lines += [(kind, f"{size / unit:8.2f} {size / total:6.1%}  {ABOUT[kind]}".rstrip()) for kind, size in sums.items()]
    told = to_dict(found)
    branches = told["bytes_in_branches"]
    if branches["if_all_ran"]:
        counted, most = branches["counted"] / unit, branches["if_all_ran"] / unit
        text = f"{counted:8.2f}  of it in conditionals; {most:.2f} if every branch always ran"
        lines.append(("in branches", text))
    if loops := told["loops_of_unknown_rounds"]:
        lines.append(("unknown trip counts", f"of loop {', '.join(loops)}: rounds counted as docs/planning.md says"))
    return title, lines


def kernel_table(found: Audit) -> Table:
    """The kernels that move most bytes per step; alike ones of a loop are one row."""
    name, unit = _unit(found)
    table = Table(box=None, pad_edge=False, title="kernels that move most", title_justify="left", title_style="")
    for heading, justify in ((name, "right"), ("work", "left"), ("loop", "left"), ("runs", "right")):
        table.add_column(heading, justify=justify)
    table.add_column("MiB each", justify="right")
    table.add_column("result", overflow="ellipsis", no_wrap=True, max_width=44)
    table.add_column("origin", overflow="ellipsis", no_wrap=True, max_width=60)
    for row in rows(found.kernels)[:KERNELS]:
        once = row["bytes_once"] / row["instructions"]
        table.add_row(
            f"{row['bytes'] / unit:.2f}",
            row["work"],
            row["loop"] or "step",
            f"{row['instructions'] * row['runs'] * row['share']:,.0f}",
            f"{once / 2**20:,.1f}",
            row["result"],
            short(row["origin"]),
        )
    return table


def short(origin: str, most: int = 60) -> str:
    """The end of an operation's path, without the parts that say little."""
    text = "/".join(part for part in origin.split("/") if part not in EVERYWHERE)
    return text if len(text) <= most else f"...{text[3 - most :]}"


def _unit(found: Audit) -> tuple[str, int]:
    """Name and bytes of the unit that suits the total."""
    total = found.by_class()["total"]
    return next(((name, unit) for name, unit in UNITS if total >= unit), UNITS[-1])
