"""The representations of a run and its state in a Python prompt or a notebook."""

import html
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

type Rows = Sequence[tuple[str, str]]
"""(name, value) pairs, a line each."""


def plain(title: str, rows: Rows) -> str:
    """Aligned text in angle brackets."""
    width = max(len(name) for name, _ in rows)
    return "\n".join([f"<{title}", *[f"  {name:<{width}}  {value}" for name, value in rows]]) + ">"


def table(title: str, rows: Rows) -> str:
    """An HTML table with the title as its heading."""
    align = ' style="text-align: left"'
    cells = [
        f"<tr><th{align}>{html.escape(name)}</th><td{align}>{html.escape(value)}</td></tr>" for name, value in rows
    ]
    return f"<table><caption{align}>{html.escape(title)}</caption>{''.join(cells)}</table>"


def scalar_value(leaf: object) -> float | int | bool | None:
    """The value of a scalar array; None if it is donated, abstract, traced, or on other processes."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer) or leaf.is_deleted() or leaf.ndim:
        return None
    return leaf.item() if leaf.is_fully_replicated else None


def state_text(state: object) -> str:
    """A TrainState in one line: its scalars, and the numbers of arrays and values in its trees."""

    def text(value: object) -> str:
        leaves = jax.tree.leaves(value)
        if len(leaves) == 1 and (value_text := scalar_value(leaves[0])) is not None:
            return str(value_text)
        values = sum(getattr(leaf, "size", 0) for leaf in leaves)
        return f"<{len(leaves)} array{'s' * (len(leaves) != 1)}, {values:,} values>"

    return f"{type(state).__name__}({', '.join(f'{name}={text(value)}' for name, value in vars(state).items())})"


def info_text(info: Any) -> str:
    """A StepInfo on one line, without the fields that are empty or long."""
    hidden, texts = ("phases", "measured", "by_process", "guarded"), []
    for name, value in info._asdict().items():
        if isinstance(value, float):
            texts.append(f"{name}={value:.6g}")
        elif name not in hidden and value not in (None, False, {}):
            texts.append(f"{name}={value!r}")
    return f"StepInfo({', '.join(texts)})"
