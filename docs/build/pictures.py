"""Draw the pictures of the pages that follow from the code: `python -m docs.build.pictures`."""

import ast
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

from docs.build import badges, terminal
from megajax.mesh.config import MESH_AXES
from megajax.pipeline.schedule import build

ROOT = Path(__file__).parents[2]
DARK, FORWARD, BACKWARD, PALE, LINE = "#1f3a5f", "#8fb8e0", "#f3b878", "#eef3f9", "#9fb3c8"
FONT = "font-family='Helvetica,Arial,sans-serif'"


def box(x: float, y: float, size: tuple[float, float], fill: str, text: str = "", *, font: int = 12) -> str:
    """A rectangle with centred text."""
    width, height = size
    shape = f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='3' fill='{fill}' stroke='{LINE}'/>"
    return shape + (label(x + width / 2, y + height / 2 + font * 0.36, text, font=font) if text else "")


def label(x: float, y: float, text: str, *, font: int = 12, anchor: str = "middle") -> str:
    return f"<text x='{x}' y='{y:.1f}' font-size='{font}' text-anchor='{anchor}' fill='{DARK}' {FONT}>{text}</text>"


def svg(width: float, height: float, parts: list[str]) -> str:
    """White behind all of it: readers may have a dark page."""
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' width='{width:g}'>"
    return "\n".join([head, f"<rect width='{width:g}' height='{height:g}' fill='white'/>", *parts, "</svg>", ""])


def architecture() -> str:
    """Packages by rank: imports go down only. From the table that tests/architecture checks."""
    tree = ast.parse((ROOT / "tests/architecture/test_imports.py").read_text(encoding="utf-8"))
    table = next(node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RANKS")
    ranks = next(node.args[0] for node in ast.walk(table) if isinstance(node, ast.Call))
    commands = ("train", "generate", "serve", "evaluate", "convert", "plan", "launch", "report", "doctor")
    rows = [commands, *reversed(ast.literal_eval(ast.unparse(ranks)))]
    parts = [label(20, 24, "imports go down only", anchor="start")]
    for row, names in enumerate(rows):
        y = 36 + 38 * row
        parts.append(box(20, y, (760, 32), PALE))
        width = min(150, 740 / len(names) - 6)
        start = 400 - (width + 6) * len(names) / 2 + 3
        fill = BACKWARD if row == 0 else FORWARD
        parts += [box(start + (width + 6) * i, y + 4, (width, 24), fill, name) for i, name in enumerate(names)]
    return svg(800, 46 + 38 * len(rows), parts)


def mesh() -> str:
    """16 devices with 2 stages, 2 data shards and 4 tensor shards; the last axis has the closest devices."""
    sizes = {"pipeline": 2, "data": 2, "tensor": 4}
    assert [axis for axis in MESH_AXES if axis in sizes] == [*sizes]
    parts = [label(20, 24, "pipeline=2, data=2, tensor=4 on 16 devices: the device number in each box", anchor="start")]
    for device in range(16):
        stage, rest = divmod(device, 8)
        shard, tensor = divmod(rest, 4)
        x, y = 110 + 330 * shard, 62 + 118 * stage
        if tensor == 0:
            parts += [box(x, y, (300, 92), PALE), label(x + 150, y + 18, f"data {shard}")]
            parts += [label(60, y + 50, f"stage {stage}")] if shard == 0 else []
        parts.append(box(x + 14 + 70 * tensor, y + 28, (62, 34), BACKWARD if stage else FORWARD, str(device)))
        parts.append(label(x + 45 + 70 * tensor, y + 80, f"tensor {tensor}", font=10))
    return svg(790, 300, parts)


def pipeline() -> str:
    """Ticks of 1F1B on 4 stages with 8 microbatches, from the table that the executor runs."""
    schedule = build("1f1b", stages=4, microbatches=8)
    cell, parts = 34, [label(20, 20, "1F1B, 4 stages, 8 microbatches: a column is a tick", anchor="start")]
    for stage in range(schedule.stages):
        y = 34 + 56 * stage
        parts.append(label(44, y + 28, f"stage {stage}"))
        for tick in range(schedule.ticks):
            x = 80 + cell * tick
            for row, (work, fill) in enumerate(((schedule.forward, FORWARD), (schedule.backward, BACKWARD))):
                microbatch = int(work.microbatch[tick, stage])
                text = str(microbatch) if microbatch >= 0 else ""
                parts.append(box(x, y + 22 * row, (cell - 2, 20), fill if text else PALE, text, font=11))
    y = 34 + 56 * schedule.stages
    parts += [box(80, y, (20, 16), FORWARD), label(106, y + 12, "forward", anchor="start")]
    parts += [box(180, y, (20, 16), BACKWARD), label(206, y + 12, "backward", anchor="start")]
    return svg(90 + cell * schedule.ticks, y + 28, parts)


def recorded_terminal() -> str:
    """The terminal of the quickstart's recorded run."""
    return terminal.draw(terminal.stored())


DRAWN: MappingProxyType[str, Callable[[], str]] = MappingProxyType(
    {
        **{"architecture": architecture, "mesh": mesh, "pipeline": pipeline},
        **{"terminal": recorded_terminal, "badges": badges.draw},
    }
)


if __name__ == "__main__":
    for name, draw in DRAWN.items():
        (ROOT / f"docs/pictures/{name}.svg").write_text(draw(), encoding="utf-8")
