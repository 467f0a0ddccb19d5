"""The representations of a run and its state in a Python prompt or a notebook."""

import html
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from megajax.display.text import count
from megajax.models.facts import facts_of
from megajax.models.protocol import ids_below, position_unit

type Rows = Sequence[tuple[str, str]]
"""(name, value) pairs, a line each."""


def run_rows(program: Any, step: int | None) -> Rows:
    """Model, layout, batch and step of a run. step: finished steps; None if a later step took the state."""
    cfg, mesh, batch = program.cfg, program.mesh, program.sizes.sizes()[-1]
    model, parallel, device = cfg.model, cfg.parallel, mesh.devices.flat[0]
    microbatches = f"{batch.microbatches} microbatch" + "es" * (batch.microbatches > 1)
    used = ", ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    devices = f"{mesh.size} {device.device_kind} device" + "s" * (mesh.size > 1)
    kinds = [parallel.data_sharding, *["sequence parallel"] * parallel.sequence]
    rows, length = batch.rows, model.row_positions()
    per_row = "" if position_unit(model) == "rows" else f" of {length:,} {position_unit(model)}"
    facts, vocabulary = facts_of(model), ids_below(model)
    layers = " + ".join(str(stack.layers()) for stack in model.stacks().values())
    progress = "unknown: a later step took its arrays" if step is None else f"{step:,} of {cfg.steps:,}"
    return (
        (
            "model",
            f"{type(program.abstract).__name__}, {count(program.parameters)} parameters: {layers} layers"
            + ("" if facts is None else f", hidden {facts.section_facts()[-1].hidden}")
            + ("" if vocabulary is None else f", vocabulary {vocabulary:,}"),
        ),
        ("layout", f"{devices}{': ' * bool(used)}{used}; {', '.join(kinds)}"),
        ("batch", f"{rows:,} rows{per_row}, {microbatches}"),
        ("step", progress),
    )


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


def scalar_value(leaf: Any) -> Any:
    """The value of a scalar array; None if it is donated, abstract, traced, or on other processes."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer) or leaf.is_deleted() or leaf.ndim:
        return None
    return leaf.item() if leaf.is_fully_replicated else None


def state_text(state: Any) -> str:
    """A TrainState in one line: its scalars, and the numbers of arrays and values in its trees."""

    def text(value: Any) -> str:
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
