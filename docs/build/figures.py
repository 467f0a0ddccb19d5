"""Tables of docs/benchmarks.md, from the files of benchmarks/results: python -m docs.build.figures writes them."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks/results", ROOT / "docs/benchmarks.md"
BEGIN, END = "<!-- figures: {}, by python -m docs.build.figures -->", "<!-- end of figures -->"
GIB = 2**30
Figures = Mapping[str, Any]


def _saves(figures: Figures) -> Iterator[tuple[str, str]]:
    saves, size = figures["save"], f"{figures['state_bytes'] / 1e6:,.0f} MB of state on {figures['devices']}"
    yield f"{size}: training waits for a save, seconds", _ends(saves["blocking_seconds"])
    yield "the save is committed, seconds", _ends(saves["total_seconds"])
    yield (
        "read on another layout, after a check; seconds",
        f"{figures['restore_on_another_layout']['read_seconds']:.2g}",
    )


def _rows_of_data(figures: Figures) -> Iterator[tuple[str, str]]:
    yield "order of rows, tokens/s", _short(figures["index_tokens_per_second"])
    yield (
        "rows batched and put on the device by one thread, tokens/s; documents isolated",
        f"{_short(figures['rows_to_device_1_threads_tokens_per_second'])}; "
        f"{_short(figures['rows_isolated_to_device_1_threads_tokens_per_second'])}",
    )
    yield "a step of 20 ms waits for its batch, ms", f"{figures['data_wait_ms_at_20_ms_steps']:.2g}"


def _generation(figures: Figures) -> Iterator[tuple[str, str]]:
    bound, drafts = figures["bound"], figures["speculation"]
    rows = f"{figures['batch']} rows, {bound['weights_bytes'] / 4e6:.0f} M weights in float32"
    yield (
        f"decoding {rows}, tokens/s; share of the bound by bandwidth",
        (f"{bound['tokens_per_second']:.0f}; {bound['share_of_bound']:.2f}"),
    )
    yield (
        "with drafts over without; drafted tokens that were accepted",
        (f"{drafts['ratio']:.2f}; {drafts['accepted']} of {drafts['drafted']}"),
    )


def _layouts(figures: Figures) -> Iterator[tuple[str, str]]:
    worst = {key: max(line[key] for line in figures["lines"]) for key in ("loss", "gradient")}
    title = f"{len(figures['lines'])} layouts against one device in float32: error of losses; of gradients"
    yield title, f"{worst['loss']:.1e}; {worst['gradient']:.1e}"


def _kills_single(figures: Figures) -> Iterator[tuple[str, str]]:
    single = figures["single"]
    yield (
        f"{single['kills']} kills of a process that saves in a loop: lost commits; wrong resumes",
        f"{single['lost commits']}; {single['wrong resumes']}",
    )


def _kills_gang(figures: Figures) -> Iterator[tuple[str, str]]:
    gang = figures["gang"]
    yield (
        f"{gang['kills']} kills of a rank under megajax.launch: lost commits; steps whose loss differs in a bit",
        f"{gang['lost commits']}; {gang['steps whose loss differs in any bit']}",
    )


def _restarts(figures: Figures) -> Iterator[tuple[str, str]]:
    for title, key in (("all processes ended", "gang down"), ("the next step", "the next step")):
        seconds = figures[f"seconds to {key}"]
        yield (
            f"from a rank's death until {title}, seconds: median; worst of {figures['trials']}",
            f"{seconds['median']:.1f}; {seconds['worst']:.1f}",
        )


def _watchdog(figures: Figures) -> Iterator[tuple[str, str]]:
    limit = figures["limit of a step, seconds"]
    yield (
        f"all processes ended, with a limit of {limit:.0f} s a step: rank stuck; suspended, seconds",
        f"{figures['stuck']['seconds']['worst']:.1f}; {figures['frozen']['seconds']['worst']:.1f}",
    )


def _leaks(figures: Figures) -> Iterator[tuple[str, str]]:
    memory = figures["MiB"]
    yield (
        f"memory over {figures['steps']:,} steps with {figures['saves']} saves, MiB: first third; last third",
        f"{memory['median of the first third']}; {memory['median of the last third']}",
    )


MEASURED: Mapping[str, Callable[[Figures], Iterator[tuple[str, str]]]] = {
    "data": _rows_of_data,
    "checkpoint": _saves,
    "inference": _generation,
    "layouts": _layouts,
    "context_layouts": _layouts,
    "reliability_kills_single": _kills_single,
    "reliability_kills_gang": _kills_gang,
    "reliability_restarts": _restarts,
    "reliability_watchdog": _watchdog,
    "reliability_leaks": _leaks,
}
"""Files of benchmarks/results that were measured on a processor -> what they say."""


def measured() -> Iterator[str]:
    """What was measured on processors, with the machine and the date of each file."""
    yield from ("| file | measured | result | machine, date |", "|---|---|---|---|")
    for name, lines in MEASURED.items():
        stored = _stored(name)
        about = f"`{name}`", f"{stored['machine'].removesuffix(' at the end')}, {stored['date']}"
        for title, result in lines(stored["figures"]):
            yield f"| {about[0]} | {title} | {result} | {about[1]} |"
            about = "", ""


def audited() -> Iterator[str]:
    """Bytes through memory, and exposed communication, of programs compiled for virtual GPUs."""
    yield "| program | peak, GiB | bytes of a step, GiB | matmul | elementwise | copies | exposed, s | by XLA's times |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for name, program in _stored("program_audit")["figures"].items():
        if "bytes_per_step" not in program:  # only its kernels are on file
            continue
        moved = program["bytes_per_step"]
        parts = (f"{moved[part] / GIB:,.0f}" for part in ("total", "matmul", "elementwise", "copies"))
        schedule = program["schedule"]
        exposed = schedule and (schedule["exposed_seconds"], schedule["default_exposed_seconds"])
        seconds = (f"{one:.2f}" for one in exposed) if exposed else ("-", "-")
        yield f"| {name} | {program['peak_gib']:.1f} | {' | '.join((*parts, *seconds))} |"


TABLES: Mapping[str, Callable[[], Iterator[str]]] = {"measured": measured, "audited": audited}


def _stored(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _ends(values: list[float]) -> str:
    """The smallest and the largest value."""
    return f"{min(values):.2g} to {max(values):.2g}"


def _short(rate: float) -> str:
    return f"{rate / 1e9:.0f} G" if rate >= 1e9 else f"{rate / 1e6:.0f} M"


def with_tables(page: str) -> str:
    """The text of the page with all tables made anew. Raises ValueError without the marks of one."""
    for name, lines in TABLES.items():
        before, marker, rest = page.partition(BEGIN.format(name))
        _, ended, after = rest.partition(END)
        if not marker or not ended:
            raise ValueError(f"the marks {BEGIN.format(name)} and {END} are missing")
        page = "\n".join([before + marker, *lines(), END]) + after
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
