"""An animated picture of a recorded run's terminal. Without animations it shows the end of the run.

docs/build/quickstart.py records a run into quickstart_run.json; `draw` makes the picture of it.
"""

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("quickstart_run.json")

COLUMNS, ROWS = 100, 60
"""Size of the terminal in which a run is recorded."""
KEPT = (
    *("parameters", "shape", "first loss", "devices", "rows per step", "whole run", "precision", "optimizer"),
    *("learning rate", "data ", "folder"),
)
"""Facts of the start box that the picture shows, beside its sections."""
BESIDE = ("╭", "╰", "compiled the train step", "validation", "test ", "report:", "sample (")
"""How the other lines begin."""
SAMPLE = 6
"""Lines of the text that the model writes."""
STEPS = ("1", "100", "200", "300", "400", "500", "600")
SECONDS, REST = 12, 6
"""Length of the run in the picture, and how long its end stands."""
WIDTH, HEIGHT, MARGIN = 7.4, 17, 14
"""Of a character, of a line, and around the text."""
FRAMES = 20
CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")
STYLES = {"36": "c", "2": "d", "1": "o", "38;5;197": "p", "38;5;237": "g", "32": "n", "38;5;106": "n"}
"""Codes of colours and weights that the console uses -> classes of the picture."""
COLOURS = {
    "t": ("#1f2328", "#e6edf3"), "c": ("#0b7285", "#56d4dd"), "d": ("#57606a", "#9198a1"),
    "p": ("#c2185b", "#ff5c93"), "g": ("#d0d7de", "#3d444d"), "n": ("#1a7f37", "#3fb950"),
}  # fmt: skip
"""Class -> colour on a light page and on a dark one."""


class Line(NamedTuple):
    """What stands in a row of the terminal, with codes of colours, and since when."""

    seconds: float
    text: str


class Recording(NamedTuple):
    """A run's lines that stayed, and what stood below them while it trained: the bar and the figures."""

    command: str
    lines: Sequence[Line]
    bars: Sequence[tuple[float, str, str]]


def recording(command: str, events: Sequence[tuple[float, str]]) -> Recording:
    """What a terminal shows of an output. events: seconds since the start, and what was written then."""
    rows, place, bars = [Line(0.0, "")], 0, []
    for seconds, output in events:
        for token in CONTROL.finditer(output):
            code, kind = token[1], token[2]
            if token[0] == "\n" or (kind == "A"):
                place += 1 if kind is None else -int(code or 1)
                rows += [Line(seconds, "")] * (place == len(rows))
            elif token[0] == "\r" or kind == "K":
                rows[place] = Line(seconds, "") if kind == "K" else rows[place]
            elif kind in (None, "m"):
                rows[place] = Line(seconds, rows[place].text + token[0])
        if place and "━" in plain(rows[place - 1].text):
            bars.append((seconds, rows[place - 1].text, rows[place].text))
    return Recording(command, [row for row in rows if plain(row.text).strip()], bars)


def stored() -> Recording:
    """The run of the README."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return Recording(found["command"], [Line(*line) for line in found["lines"]], [tuple(bar) for bar in found["bars"]])


def store(run: Recording) -> None:
    """Keep what the picture shows of a run."""
    bars = [[begin, *texts] for begin, _, *texts in frames(run.bars)] + [[*bar] for bar in run.bars[-1:]]
    found = {"command": run.command, "lines": excerpt(run), "bars": bars}
    FILE.write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


def plain(text: str) -> str:
    """Text without codes of colours."""
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", text)


def excerpt(run: Recording) -> list[Line]:
    """The lines of the picture: the start box with its main facts, steps, evaluations, and the sample."""
    kept, title, sampled = [], "", 0
    for line in run.lines:
        text = plain(line.text)
        if text.startswith("╭─ done"):
            break
        if re.match(r"│ \w", text):
            title = line.text
        elif text.startswith("│   ") and text[4:].startswith(KEPT):
            kept += [Line(line.seconds, title)] * bool(title) + [line]
            title = ""
        elif found := re.match(r"step +(\d+)/", text):
            kept += [line] * (found[1] in STEPS)
        elif sampled or text.startswith(BESIDE):
            kept += [line] * (sampled <= SAMPLE)
            sampled += bool(sampled) or text.startswith("sample (")
    return kept


def draw(run: Recording) -> str:
    """The picture as SVG. Each line appears when it was written, by rules of CSS without a script."""
    lines = [Line(0.0, f"$ {run.command}"), *excerpt(run)]
    # The start box stands from the beginning.
    begin = next((line.seconds for line in lines if plain(line.text).startswith("╰")), 0.0)
    scale = SECONDS / (SECONDS + REST) * 100 / ((max(line.seconds for line in lines) - begin) or 1.0)
    rules, parts = [], []
    for number, line in enumerate(lines):
        name = f"l{number}" if line.seconds > begin else None
        if name:
            rules.append(f"@keyframes {name}{{0%{{opacity:0}}{(line.seconds - begin) * scale:.2f}%{{opacity:1}}}}")
        parts.append(row(line.text, number, name))
    for number, (start, stop, *texts) in enumerate(frames(run.bars)):
        shown, gone = ((seconds - begin) * scale for seconds in (start, stop))
        place = sum(line.seconds <= start for line in lines)
        rules.append(f"@keyframes f{number}{{0%{{opacity:0}}{shown:.2f}%{{opacity:1}}{gone:.2f}%{{opacity:0}}}}")
        parts += [row(text, place + i, f"f{number}", hidden=True) for i, text in enumerate(texts)]
    size = round(2 * MARGIN + COLUMNS * WIDTH), 2 * MARGIN + len(lines) * HEIGHT
    light, dark = ("".join(f".{name}{{fill:{pair[i]}}}" for name, pair in COLOURS.items()) for i in (0, 1))
    style = (
        "text{font:12.3px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}"
        f"g{{animation:{SECONDS + REST}s step-end infinite}}.o{{font-weight:600}}{light}"
        ".s{fill:#fbfcfd;stroke:#d0d7de}"
        f"@media(prefers-color-scheme:dark){{{dark}.s{{fill:#0d1117;stroke:#3d444d}}}}"
        "@media(prefers-reduced-motion:reduce){g{animation:none!important}}"
    )
    return "\n".join([
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {size[0]} {size[1]}' width='{size[0]}' role='img'>",
        f"<title>{html.escape(run.command)}</title>", f"<style>{style}{''.join(rules)}</style>",
        f"<rect class='s' x='.5' y='.5' width='{size[0] - 1}' height='{size[1] - 1}' rx='8' fill='#fbfcfd'/>",
        *parts, "</svg>", "",
    ])  # fmt: skip


def frames(bars: Sequence[tuple[float, str, str]]) -> list[tuple[float, float, str, str]]:
    """Some of the bars, evenly in time: from when, until when, and both lines."""
    chosen = bars[:-1][:: max(1, len(bars) // FRAMES)]
    ends = [*(begin for begin, *_ in chosen[1:]), *(begin for begin, *_ in bars[-1:])]
    return [(begin, end, *texts) for (begin, *texts), end in zip(chosen, ends, strict=True)]


def row(text: str, number: int, name: str | None, *, hidden: bool = False) -> str:
    """A line of the terminal. name: of the rule by which it appears; None: always there."""
    y, column, style, spans = MARGIN + HEIGHT * (number + 0.75), 0, "t", []
    for token in CONTROL.finditer(text):
        if token[2] == "m":
            codes = [code for code in STYLES if re.search(rf"(^|;){code}($|;)", token[1])]
            style = " ".join(["t"] * (not {"36", "2"} & {*codes}) + [STYLES[code] for code in codes])
        elif token[2] is None and token[0].strip():
            found = token[0].rstrip()
            blanks = len(found) - len(found.lstrip())
            x, length = MARGIN + (column + blanks) * WIDTH, (len(found) - blanks) * WIDTH
            head = f"<text class='{style}' x='{x:.1f}' y='{y:g}' textLength='{length:.1f}'"
            spans.append(f"{head} lengthAdjust='spacingAndGlyphs'>{html.escape(found.lstrip())}</text>")
        column += len(token[0]) * (token[2] is None)
    attributes = f" style='animation-name:{name}'" * (name is not None) + " opacity='0'" * hidden
    return f"<g{attributes}>{''.join(spans)}</g>"
