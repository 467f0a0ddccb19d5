"""A plan as one HTML page that needs nothing beside itself: a step's timeline, where time and memory go, the tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from megajax.config.errors import UserError
from megajax.metrics.banner import Section
from megajax.planning.bars import Curve, Part, bar, curves, legend
from megajax.planning.cost import formula
from megajax.planning.cost.estimate import Estimate
from megajax.planning.program.devices import GIB
from megajax.planning.search import search_report, sweep
from megajax.planning.search.compare import Side, differences, lines
from megajax.planning.search.ranking import Result
from megajax.planning.search.reasons import AXES, parts
from megajax.planning.search.sweep import Sweep
from megajax.planning.timeline import KINDS, draw, timeline

ABOUT = "Predicted by formulas"
COMPILED = "Compiled for GPUs that are not there; times by the cost model, the timeline by formulas"


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What is on it."""

    title: str
    subtitle: str
    blocks: Sequence[str]
    verdict: tuple[bool, str] | None = None
    figures: Sequence[tuple[str, str, str]] = ()
    """Name, value, remark."""

    def html(self) -> str:
        """All of it."""
        style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
        verdict = ""
        if self.verdict is not None:
            mood = "good" if self.verdict[0] else "bad"
            verdict = f'<span class="verdict {mood}">{escape(self.verdict[1])}</span> '
        cards = "".join(
            f"<div><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(remark)}</span></div>"
            for name, value, remark in self.figures
        )
        return "\n".join(
            [
                '<!doctype html><html lang="en"><head><meta charset="utf-8">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                '<meta name="color-scheme" content="light dark">',
                f"<title>{escape(self.title)}</title><style>{style}</style></head><body><main>",
                f"<header><h1>{escape(self.title)}</h1><p>{verdict}{escape(self.subtitle)}</p></header>",
                f'<div class="figures">{cards}</div>' if cards else "",
                *self.blocks,
                "</main></body></html>\n",
            ]
        )


def write(page: Page, path: Path) -> None:
    """Raises UserError where it can't be written."""
    try:
        path.write_text(page.html(), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html={path} can't be written: {error.strerror}") from error


def of_plan(found: Estimate, name: str, *, held: Sequence[Part] = (), about: str = ABOUT) -> Page:
    """Of one plan. held: its memory where a compiler said it; otherwise the formula's."""
    run = found.run
    room = run.device.usable_gib - (sum(part.size for part in held) or found.memory.peak_gib)
    return Page(
        title=f"{name} on {run.devices} x {run.device.name}",
        subtitle=f"{about}.",
        verdict=(
            room >= 0,
            f"fits, {room:.1f} GiB to spare" if room >= 0 else f"does not fit: {-room:.1f} GiB too much",
        ),
        figures=_figures(found, run.device.usable_gib - room),
        blocks=[*_pictures(found, held), *_sections(formula.sections(found), by_formula=bool(held))],
    )


def _figures(found: Estimate, peak: float) -> list[tuple[str, str, str]]:
    step = found.step_seconds
    return [
        ("step", f"{step:.3g} s", f"{found.run.step_tokens:,} tokens"),
        ("tokens/s", f"{found.tokens_per_second_per_device:,.0f}", "per GPU"),
        ("MFU", f"{found.mfu_causal:.1%}", f"{found.mfu_full:.1%} with full attention"),
        ("peak memory", f"{peak:.1f} GiB", f"of {found.run.device.usable_gib:.1f} usable"),
        ("bubble", f"{found.bubble_seconds / step:.1%}", "of the step"),
        ("exposed", f"{found.exposed_seconds / step:.1%}", "communication that nothing hides"),
    ]


def _pictures(found: Estimate, held: Sequence[Part]) -> list[str]:
    made = timeline(found)
    chunks = min(4, found.run.parallel.virtual_stages)
    keys = [Part(KINDS["forward"], 0, f"shades: {chunks} chunks" if chunks > 1 else "", "forward0")]
    keys.append(Part(KINDS["backward"], 0, "", "backward0"))
    keys += [Part(KINDS[name], 0, "", name) for name in ("loss", "exposed", "optimizer")]
    keys += [Part(KINDS["idle"], 0, "", "idle")] * (made.rows > 1)
    return [
        block("A step", f'<div class="scroll">{draw(made)}</div>{legend(keys)}', "time of each stage, by formulas"),
        block("Where the time goes", _time_bar(found), f"{found.step_seconds:.4g} s"),
        block("Memory of one device", memory_bar(found, held), "GiB"),
    ]


def _time_bar(found: Estimate) -> str:
    split = parts(found)
    del split["computing"]
    colors = {"bubble": "bubble", "optimizer": "optimizer"}
    rows = [
        ("matmuls", found.matmul_seconds, "forward0"),
        ("attention", found.attention_seconds, "forward1"),
        ("norms, activations and the like", found.stream_seconds, "forward3"),
        *((name, seconds, colors.get(name, _shade(name))) for name, seconds in split.items() if seconds > 0),
    ]
    return bar([Part(name, size, f"{size / found.step_seconds:.1%}", color) for name, size, color in rows])


def _shade(name: str) -> str:
    """Of what is exposed, by what it goes over."""
    return f"exposed pale{list(AXES.values()).index(name) if name in AXES.values() else 0}"


def memory_bar(found: Estimate, held: Sequence[Part] = ()) -> str:
    """Of the formula, unless given; with what is free, and the limit."""
    told = list(held) or [
        Part(name, size / GIB, f"{size / GIB:.1f}", color)
        for name, size, color in (
            ("master weights", found.memory.parameters, "master"),
            ("optimizer state", found.memory.optimizer, "state"),
            ("weights in compute dtype", found.memory.weights, "weights"),
            ("gradients", found.memory.gradients, "gradients"),
            ("activations", found.memory.activations, "activations"),
            ("of a layer or the loss", found.memory.working, "working"),
        )
        if size > 0
    ]
    usable = found.run.device.usable_gib
    free = usable - sum(part.size for part in told)
    told += [Part("free", free, f"{free:.1f}", "free")] * (free > 0)
    return bar(told, limit=(usable, f"usable {usable:.1f} of {found.run.device.memory_gib:g}"))


def block(title: str, body: str, remark: str = "") -> str:
    """A card."""
    small = f"<small>{escape(remark)}</small>" if remark else ""
    return f"<section><h2>{escape(title)}{small}</h2>{body}</section>"


def grid(
    headings: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = (0,), first: bool = False
) -> str:
    """A table; words: columns that are not numbers; first: the first row stands out."""
    kinds = ["" if place in words else ' class="n"' for place in range(len(headings))]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, headings, strict=True))
    body = "".join(
        f"<tr{' class=first' if first and not number else ''}>"
        + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _sections(given: Sequence[Section], by_formula: bool) -> list[str]:
    given = [(f"{title}, by formula" if by_formula and title.startswith("memory") else title, r) for title, r in given]
    return [block(title, grid(("", ""), rows, (0, 1)).replace("<thead><tr><th></th><th></th></tr></thead>", ""))
            for title, rows in given]  # fmt: skip


def of_search(found: Result, commands: Sequence[str], name: str) -> Page:
    """The best layouts, why, and the first of them in full."""
    best = found.best
    held = (
        [] if best.compiled is None else [Part("by the compiler", best.peak_gib, f"{best.peak_gib:.1f}", "activations")]
    )
    plan = of_plan(best.estimate, name, held=held)
    rows = [[str(place), *search_report.cells(row)] for place, row in enumerate(found.rows, 1)]
    listed = [f"<ol>{''.join(f'<li>{escape(row.why)}</li>' for row in found.rows)}</ol>"]
    rejected = "".join(f"<li>{escape(line)}</li>" for line in search_report.rejections(found))
    heading = search_report.heading(found).strip().splitlines()
    return Page(
        title=f"{plan.title}: {best.entry.choice.layout}",
        subtitle=f"{heading[1].strip()}.",
        verdict=plan.verdict,
        figures=[
            ("step", f"{best.step_seconds:.3g} s", "by the compiled program" if best.compiled else "by formula"),
            ("tokens/s", f"{best.tokens:,.0f}", "per GPU"),
            ("MFU", f"{best.mfu:.1%}", "causal attention"),
            *plan.figures[3:4],
            ("bubble", f"{best.bubble:.1%}", "of the step"),
            ("exposed", f"{best.exposed:.1%}", "communication that nothing hides"),
        ],
        blocks=[
            block("The best layouts", grid(("", *search_report.COLUMNS), rows, (0, 1, 2, 3, 5, 12), first=True)),
            block("Why in this order", "".join(listed)),
            block("Not chosen", f"<ul>{rejected}</ul>"),
            block("To use it", f"<pre>{escape(chr(10).join(commands))}</pre>"),
            *plan.blocks,
        ],
    )


def of_comparison(first: Side, second: Side) -> Page:
    """Two plans beside each other."""
    changed = "".join(f"<li><code>{escape(line)}</code></li>" for line in differences(first, second))
    blocks = [block("Side by side", grid(("", first.name, second.name, "ratio"), lines(first, second)))]
    blocks += [block("Settings that differ", f"<ul>{changed}</ul>")] if changed else []
    for side in (first, second):
        blocks.append(f"<h1>{escape(side.name)}</h1>")
        blocks += _pictures(side.found, ())
    return Page(title=f"{first.name} and {second.name}", subtitle=f"{ABOUT}.", blocks=blocks)


def of_sweep(found: Sweep, source: str) -> Page:
    """Curves and tables."""
    blocks = []
    if found.axis == sweep.DEVICES:
        there = {mode: [point for point in found.of(mode) if point.found] for mode in ("weak", "strong")}
        speed, share = [], []
        for mode, points in there.items():
            x = tuple(float(point.devices) for point in points)
            each = [point.found for point in points if point.found]
            if each:
                rates = tuple(one.tokens_per_second_per_device * one.run.devices for one in each)
                speed.append(Curve(f"{mode} scaling", x, rates))
                share.append(Curve(f"{mode} scaling", x, tuple(one.mfu_causal for one in each)))
        pictures = curves(speed, unit="tokens/s"), curves(share, unit="MFU", percent=True)
        cards = block("Tokens per second", pictures[0]), block("MFU, causal attention", pictures[1])
        blocks.append(f'<div class="two">{"".join(cards)}</div>')
    blocks += [block(title or found.axis, grid(names, rows)) for title, names, rows in sweep.tables(found)]
    refused = [f"<li>{escape(f'{p.mode} {p.value}: {p.refusal}'.strip())}</li>" for p in found.points if p.refusal]
    blocks += [block("Refused", f"<ul>{''.join(refused)}</ul>")] if refused else []
    heading = sweep.heading(found, source).splitlines()
    return Page(title=heading[0], subtitle=heading[-1].strip(), blocks=blocks)
