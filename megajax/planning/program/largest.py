"""The largest arrays of a compiled program, read from its text."""

import re
from dataclasses import dataclass
from math import prod

WIDTHS = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "s64": 8, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "pred": 1}
MADE = re.compile(r"^\s*(?:ROOT )?%?\S+ = (\w+)\[([\d,]+)\]\S* ([\w-]+)\(")
NAMED = re.compile(r'op_name="([^"]*)"')
NO_ARRAYS = frozenset({"parameter", "get-tuple-element", "bitcast"})
"""Instructions that give a name to what is there already."""
INSIDE = re.compile(r"^%?fused|^%?wrapped")


@dataclass(frozen=True, slots=True)
class Array:
    """One shape, on one device."""

    shape: str
    """As in f32[24,5,8192]."""
    bytes: int
    times: int
    """Instructions that make one; not all are alive at once."""
    made_by: str
    """Last parts of what the traced program calls the first of them."""


def largest(text: str, count: int = 5) -> tuple[Array, ...]:
    """Of a compiled program's text; what is inside of fused computations is never in memory, and left out."""
    found: dict[tuple[str, str], list[str]] = {}
    inside = False
    for line in text.splitlines():
        if line and not line[0].isspace() and line.endswith("{"):
            inside = bool(INSIDE.match(line))
        made = None if inside else MADE.match(line)
        if made is None or made[3] in NO_ARRAYS or made[1] not in WIDTHS:
            continue
        name = NAMED.search(line)
        found.setdefault((made[1], made[2]), []).append(name[1] if name else made[3])
    arrays = [
        Array(f"{kind}[{sizes}]", WIDTHS[kind] * prod(map(int, sizes.split(","))), len(names), _short(names[0]))
        for (kind, sizes), names in found.items()
    ]
    return tuple(sorted(arrays, key=lambda array: -array.bytes)[:count])


def _short(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("while", "body", "closed_call", "cond", "shard_map")]
    return "/".join(parts[-3:])
