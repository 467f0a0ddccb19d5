"""Accuracy of the cost model on groups of published runs. Its constants were fitted to one half of the groups."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from hashlib import sha256
from itertools import accumulate, product
from math import ceil, floor
from statistics import fmean, median
from typing import Any

from benchmarks.planning.published import published, read
from benchmarks.planning.systems import MEGATRON_R08, UNTUNED, Published
from megajax.planning.cost.description import OPERANDS, Description
from megajax.planning.cost.estimate import ErrorRange, Program, estimate, kind_of, kind_of_errors

QUANTILES = (0.05, 0.95)
"""Of the errors, each group with the same weight."""
INFLATION = 1.75
"""Power of the ratios of predicted and published speeds at these quantiles. The groups of this folder were known when
it was chosen what to model. On 162 runs of groups that were not, ranges that held 88 % here held 65 %, as if errors
were 1.7 (normal distribution) to 2.0 (exponential) times as large."""
FEW = 5
"""Fewer groups of a precision also have the range of both precisions."""

type Change = Callable[[Description], Description]
"""Other constants in the description of a run."""


@dataclass(frozen=True)
class Group:
    """Runs of a kind of model with the same software, network and precision; judged by the median of their errors."""

    name: str
    kind: str
    fitted: bool
    """Whether constants are fitted to it."""
    errors: tuple[float, ...]
    """Predicted over published speeds, less 1."""
    tuned: bool = False
    """Whether the program is NVIDIA's."""
    narrow: bool = False
    """Whether matmuls are in 8 bits or fewer."""

    @property
    def publisher(self) -> str:
        return self.name.partition("-")[0]

    @property
    def median(self) -> float:
        return median(self.errors)


def is_fitted(name: str) -> bool:
    """The half of a group, by a hash of its name."""
    return sha256(name.encode()).digest()[0] % 2 == 0


def errors(runs: Iterable[tuple[Description, float]], change: Change = lambda run: run) -> tuple[float, ...]:
    """Relative errors of descriptions with their speeds."""
    return tuple(estimate(change(run)).tokens_per_second_per_device / tokens - 1 for run, tokens in runs)


@cache
def described() -> Mapping[tuple[str, str], list[tuple[Description, float]]]:
    """(Group, kind of model) -> descriptions and speeds; empty without the folder of published runs."""
    groups: dict[tuple[str, str], list[tuple[Description, float]]] = {}
    for record in read():
        run = published(record)
        described = run.described()
        groups.setdefault((record["group"], kind_of(described)), []).append((described, run.tokens))
    return groups


def compared(change: Change = lambda run: run) -> list[Group]:
    """All groups of the folder."""
    return [
        Group(name, kind, is_fitted(name), errors(runs, change), run.system.tuned, run.compute in OPERANDS)
        for (name, kind), runs in sorted(described().items())
        for run, _ in runs[:1]
    ]


def error_range(groups: Sequence[Group]) -> ErrorRange:
    """QUANTILES of the errors in these groups and INFLATION."""
    weighted = sorted((error, 1 / len(group.errors) / len(groups)) for group in groups for error in group.errors)
    sums = [*accumulate(weight for _, weight in weighted)]
    low, high = (weighted[bisect_left(sums, quantile - 1e-9)][0] for quantile in QUANTILES)
    low, high = ((1 + error) ** INFLATION - 1 for error in (min(low, 0.0), max(high, 0.0)))
    return ErrorRange(floor(100 * low) / 100, ceil(100 * high) / 100, len(groups))


def error_ranges(groups: Sequence[Group]) -> dict[tuple[Program, str, bool], ErrorRange]:
    """The ranges of predictions: see RANGES. All groups count, those that constants were fitted to as well.

    Of mixtures only NVIDIA's runs are known: any program has their range and that of others' dense models.
    """
    found: dict[tuple[Program, str, bool], ErrorRange] = {}
    for kind, narrow in product(("dense", "mixture"), (False, True)):
        tuned = _of_precision([group for group in groups if group.tuned and group.kind == kind], narrow=narrow)
        others = _of_precision([group for group in groups if not group.tuned], narrow=narrow)
        found["tuned", kind, narrow] = tuned
        found["any", kind, narrow] = _both(tuned, others, tuned.groups + others.groups)
    return found


def _of_precision(groups: Sequence[Group], *, narrow: bool) -> ErrorRange:
    alike, every = [group for group in groups if group.narrow == narrow], error_range(groups)
    if len(alike) >= FEW or not alike:
        return error_range(alike or groups)
    return _both(error_range(alike), every, every.groups)


def _both(first: ErrorRange, second: ErrorRange, groups: int) -> ErrorRange:
    """The range that contains two."""
    return ErrorRange(min(first.low, second.low), max(first.high, second.high), groups)


def coverage(groups: Sequence[Group], program: Program) -> dict[str, float]:
    """Share of runs in the ranges that are made without any run of their publisher. tuned: of NVIDIA's programs.

    Without Megatron Bridge, one run is left of the mixtures in 8 bits, so their ranges are those of all precisions.
    """
    chosen = [group for group in groups if group.tuned or program == "any"]
    inside = []
    for group in chosen:
        ranges = error_ranges([other for other in groups if other.publisher != group.publisher])
        errors = ranges[program, kind_of_errors(group.kind), group.narrow]
        inside.append(sum(errors.low <= error <= errors.high for error in group.errors))
    runs = [len(group.errors) for group in chosen]
    return {
        "runs": round(sum(inside) / sum(runs), 3),
        "mean_of_groups": round(fmean(number / count for number, count in zip(inside, runs, strict=True)), 3),
    }


def summary(groups: Sequence[Group]) -> dict[str, Any]:
    """Figures of the groups that nothing was fitted to, by kind of model."""
    found: dict[str, Any] = {"held_out": {kind: _figures(held) for kind, held in _held_out(groups).items()}}
    programs: tuple[Program, ...] = ("tuned", "any") if groups else ()
    return found | {"coverage": {program: coverage(groups, program) for program in programs}}


def _held_out(groups: Sequence[Group]) -> dict[str, list[Group]]:
    kinds: dict[str, list[Group]] = {}
    for group in groups:
        if not group.fitted:
            kinds.setdefault(group.kind, []).append(group)
    return kinds


def _figures(groups: Sequence[Group]) -> dict[str, Any]:
    medians, runs = [group.median for group in groups], [error for group in groups for error in group.errors]
    return {
        "groups": len(groups),
        "runs": len(runs),
        "median_error": round(median(map(abs, medians)), 4),
        "bias": round(median(medians), 4),
        "groups_within_10_percent": sum(abs(error) <= 0.1 for error in medians),
        "mean_error": round(fmean(map(abs, medians)), 4),
        "median_error_of_runs": round(median(map(abs, runs)), 4),
    }


def held_out_table(groups: Sequence[Group]) -> str:
    """Markdown tables of all groups, those that nothing was fitted to first."""
    if not groups:
        return "The folder of published runs is absent."
    head = "| group | model | runs | median error | lowest | highest |\n|---|---|---:|---:|---:|---:|"
    parts = []
    for fitted, title in ((False, "Groups that nothing was fitted to"), (True, "Groups that constants were fitted to")):
        rows = [
            f"| {group.name} | {group.kind} | {len(group.errors)} | {group.median:+.1%} | {min(group.errors):+.1%} | "
            f"{max(group.errors):+.1%} |"
            for group in sorted(groups, key=lambda group: (group.kind, group.name))
            if group.fitted == fitted
        ]
        parts.append("\n".join([f"## {title}\n", head, *rows]))
    return "\n\n".join(parts)


def ranges_text(groups: Sequence[Group]) -> str:
    """What the groups that nothing was fitted to show, the ranges that all groups make, and how many runs they hold."""
    rows = ["| model | groups | median error | bias | groups within 10 % |", "|---|---:|---:|---:|---:|"]
    for kind, held in _held_out(groups).items():
        part = _figures(held)
        rows.append(
            f"| {kind} | {part['groups']} | {part['median_error']:.1%} | {part['bias']:+.1%} | "
            f"{part['groups_within_10_percent']} |"
        )
    if not groups:
        return "\n".join(rows)
    rows += ["", "| program | model | matmuls | groups | range |", "|---|---|---|---:|---|"]
    for (program, kind, narrow), span in sorted(error_ranges(groups).items(), reverse=True):
        bits = "8 bits or fewer" if narrow else "16 bits"
        rows.append(f"| {program} | {kind} | {bits} | {span.groups} | {span.low:+.0%} to {span.high:+.0%} |")
    for program, part in summary(groups)["coverage"].items():
        rows += ["", f"{program}: ranges made without a publisher hold {part['runs']:.0%} of the runs, "
                     f"{part['mean_of_groups']:.0%} in the mean of the groups."]  # fmt: skip
    return "\n".join(rows)


def constants(**values: float) -> Change:
    """Other constants of the device."""
    return lambda run: replace(run, device=replace(run.device, **values))


def system(name: str = "", **values: Any) -> Change:
    """Other properties of the systems with this in their name."""
    return lambda run: replace(run, system=replace(run.system, **values)) if name in run.system.name else run


def of_gpus(prefixes: tuple[str, ...], **values: float) -> Change:
    """Other constants of these GPUs."""
    return lambda run: constants(**values)(run) if run.device.name.startswith(prefixes) else run


def _untuned(overhead: float) -> Change:
    """Another overhead of the programs that have UNTUNED."""
    return lambda run: system(overhead=overhead)(run) if run.system.overhead == UNTUNED else run


WITHOUT: Mapping[str, Change] = {
    "contention": constants(contention=0.0),
    "straggling": constants(straggling=0.0),
    "overhead of untuned programs": _untuned(1.0),
    "power limits": constants(power=1.0),
    "attention of Blackwell (0.60, 0.45)": of_gpus(("b200", "gb200"), attention_forward=0.60, attention_backward=0.45),
    "scans of state spaces": constants(scan=1.0),
    "hidden dispatch to experts": system(experts_hidden=0.0),
    "the same, but hidden as in MegaJAX's programs": system(experts_hidden=None),
    "wait for the host in layers of experts": system(experts_wait=0.0),
}
"""Constant -> the model without it."""


def ablations() -> str:
    """A Markdown table: median error of the groups that nothing was fitted to, without each constant."""
    full = summary(compared())["held_out"]
    if not full:
        return ""
    kinds = [*full]
    rows = [f"| without | {' | '.join(kinds)} |", f"|---|{'---:|' * len(kinds)}"]
    for name, change in {"nothing": constants(), **WITHOUT}.items():
        part = summary(compared(change))["held_out"]
        sizes = (f"{part[kind]['median_error']:.1%}, {part[kind]['mean_error']:.1%}" for kind in kinds)
        rows.append(f"| {name} | {' | '.join(sizes)} |")
    return "\n".join(["Median and mean error of groups that nothing was fitted to:\n", *rows])


HOPPER, BLACKWELL, ULTRA = ("h100", "h200"), ("b200", "gb200"), ("b300", "gb300")


def fitted_constants(listed: Sequence[Published]) -> dict[str, float]:
    """The constants at which the median error of their groups is 0, one after another.

    listed: runs to fit to beside half of the groups in the folder; without the folder, the constants of these alone.
    """
    groups: dict[str, list[tuple[Description, float]]] = {}
    for run in listed:
        about = run.described()
        name = f"{run.name.partition(',')[0]}, {about.device.name}, {run.compute}"
        groups.setdefault(name, []).append((about, run.tokens))
    for (name, kind), runs in described().items():
        if is_fitted(name):
            groups[f"{name}, {kind}"] = runs
    found: dict[str, float] = {}
    changes: list[Change] = []

    def fit(name: str, parts: tuple[str, ...], change: Callable[[float], Change], low: float, high: float) -> None:
        chosen = [runs for group, runs in groups.items() if any(part in group for part in parts)]
        if chosen:
            found[name] = _solve(lambda value: _bias(chosen, [*changes, change(value)]), low, high)
            changes.append(change(found[name]))

    fit("h100 matmul", ("NeMo, h100, bfloat16", "MaxText, h100, bfloat16", "MaxText, h200, bfloat16"),
        lambda value: of_gpus(HOPPER, matmul=value), 0.4, 1.0)  # fmt: skip
    fit("h100 matmul_fp8", (", h100, fp8", "maxtext-h100-ib400-fp8", "nemo-h100-ib400-fp8"),
        lambda value: of_gpus(HOPPER, matmul_fp8=value), 0.4, 1.0)  # fmt: skip
    fit(
        "b200 matmul_fp8", (", b200, fp8", ", gb200, fp8"), lambda value: of_gpus(BLACKWELL, matmul_fp8=value), 0.4, 1.0
    )
    fit("gb300 matmul_fp8", ("bridge-dense-gb300",), lambda value: of_gpus(ULTRA, matmul_fp8=value), 0.4, 1.0)
    fit("untuned overhead", ("llmfoundry", "megatron-sc21", "pax"), _untuned, 1.6, 1.0)
    fit("core r0.8 overhead", (MEGATRON_R08.name,),
        lambda value: system(MEGATRON_R08.name, overhead=value), 1.6, 1.0)  # fmt: skip
    if mixtures := [runs for group, runs in groups.items() if group.endswith(", mixture")]:
        # Errors of mixtures scatter too much for the median of a few groups: the least mean error of runs.
        waits = {value: system("Transformer", experts_wait=value) for value in (k / 1e3 for k in range(8))}
        found["experts_wait"] = min(waits, key=lambda value: _mean_error(mixtures, [*changes, waits[value]]))
    fit("scan", (", state space",), lambda value: constants(scan=value), 0.05, 1.0)
    return found


def _bias(groups: Sequence[Sequence[tuple[Description, float]]], changes: Sequence[Change]) -> float:
    """The median of the groups' medians."""
    return median(median(errors(runs, _all(changes))) for runs in groups)


def _mean_error(groups: Sequence[Sequence[tuple[Description, float]]], changes: Sequence[Change]) -> float:
    """The mean over groups of the mean size of errors."""
    return fmean(fmean(map(abs, errors(runs, _all(changes)))) for runs in groups)


def _all(changes: Sequence[Change]) -> Change:
    """These changes, one after another."""
    return lambda run: reduce(lambda described, change: change(described), changes, run)


def _solve(bias: Callable[[float], float], low: float, high: float) -> float:
    """Where predictions that grow from `low` to `high` have no bias."""
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if bias(middle) < 0 else (low, middle)
    return (low + high) / 2
