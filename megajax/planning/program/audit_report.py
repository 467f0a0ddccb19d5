"""The part of a compiled plan that `--audit` adds: bytes through memory by class, and the kernels that move most."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from megajax.metrics.banner import Section
from megajax.planning.cost.byte_classes import classes, unit_of
from megajax.planning.cost.costs import Device
from megajax.planning.program.audit import Audit, rows

KERNELS = 12
"""Rows of the table."""
EVERYWHERE = ("while", "body", "eval_jaxpr", "shard_map", "checkpoint")
"""Parts of an operation's path that say little."""


def to_dict(found: Audit) -> dict[str, Any]:
    """Bytes of one device and step, under the names of a plan's JSON."""
    branches = [one for one in found.kernels if one.place.conditional]
    return {
        "bytes_per_step": found.by_class(),
        "bytes_of_workspace": found.workspace(),
        "bytes_in_branches": {
            "counted": sum(one.total for one in branches),
            "if_all_ran": sum(one.most for one in branches),
        },
        "loops_of_unknown_rounds": found.unknown_loops(),
        "largest_kernels": rows(found.kernels)[:KERNELS],
    }


def section(found: Audit, device: Device, predicted: Mapping[str, float]) -> Section:
    """Bytes by class, and how conditionals and loops of unknown trip count are counted. predicted: by formula."""
    (_, unit), told = unit_of(found.by_class()["total"]), to_dict(found)
    title, (*lines,) = classes(found.by_class(), device, predicted)
    if workspace := told["bytes_of_workspace"]:
        lines.append(("cuBLAS workspace", f"{workspace / unit:8.2f}  of matmul: scratch space, at most"))
    branches = told["bytes_in_branches"]
    if branches["if_all_ran"]:
        counted, most = branches["counted"] / unit, branches["if_all_ran"] / unit
        text = f"{counted:8.2f}  of it in conditionals; {most:.2f} if every branch ran"
        lines.append(("in branches", text))
    if loops := told["loops_of_unknown_rounds"]:
        some = ", ".join(loops[:4]) + (f" and {len(loops) - 4} more" if len(loops) > 4 else "")
        lines.append(("unknown trip counts", f"of loop {some}; counted as docs/planning.md says"))
    return title, lines


def kernel_table(found: Audit) -> Table:
    """The kernels that move most bytes per step; alike ones are one row."""
    name, unit = unit_of(found.by_class()["total"])
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
            f"{row['runs']:,}",
            f"{once / 2**20:,.1f}",
            row["result"],
            short(row["origin"]),
        )
    return table


def short(origin: str, most: int = 60) -> str:
    """The end of an operation's path, without the parts that say little."""
    text = "/".join(part for part in origin.split("/") if part not in EVERYWHERE)
    return text if len(text) <= most else f"...{text[3 - most :]}"
