"""Long-row configs on virtual H100s with each strategy of `context`: memory, transfers and their overlap."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.outcome import RESULTS
from megajax.config import load
from megajax.planning.compiled.devices import GIB, GPUS, MIB, read_cluster
from megajax.planning.compiled.hlo import Collective
from megajax.planning.cost.description import Description, describe
from megajax.planning.cost.estimate import Estimate, estimate
from megajax.planning.cost.traffic import sent_by_attention
from megajax.planning.train_step import compile_train_step, timed, with_program

FIGURES = RESULTS / "context.json"
STRATEGIES = ("all_gather", "ring", "all_to_all", "ring+all_to_all")


@dataclass(frozen=True, slots=True)
class Case:
    """A recipe on a number of H100s, with a strategy."""

    recipe: str
    gpus: int
    strategy: str

    @property
    def key(self) -> str:
        """Key of its figures."""
        return f"{self.recipe}, {self.gpus}, {self.strategy}"

    def config(self) -> Any:
        """The recipe with the strategy."""
        return load(f"llama3.py:{self.recipe}", f"parallel.context_strategy={self.strategy}", devices=self.gpus)


RECIPES = {"llama3_8b_32k": 8, "llama3_8b_128k": 16, "llama3_70b_128k": 64, "llama3_8b_1m": 128}
CASES = [
    Case(recipe, gpus, strategy)
    for recipe, gpus in RECIPES.items()
    for strategy in STRATEGIES
    if recipe != "llama3_8b_32k" or strategy == "all_gather"
]


def context(*, only: tuple[str, ...] = (), table: bool = False) -> Iterator[dict[str, Any]]:
    """Long-row configs on virtual H100s with each strategy of `context`: memory, transfers and their overlap.

    Needs the extra aot; no GPU. About 15 minutes on two cores. For each config and strategy: peak memory of a device,
    compiled and by formula; bytes that a device sends over `context` for one layer and microbatch, forward and
    backward, and the minimum of the strategy (keys and values in the compute dtype, gradients in float32 if a ring sums
    them); and the number of these collectives that overlap with a matmul or an attention kernel. Nothing is run:
    `step_seconds` is an estimate of the cost model. `context_balance` has the work of the busiest device.

    --only: cases with all of these words; figures on file are kept for the others, but for peaks by formula. --table:
    compile nothing, and print the figures on file as Markdown.
    """
    figures = json.loads(FIGURES.read_text())["figures"] if FIGURES.exists() else {"programs": {}}
    if not table:
        order = [case.key for case in CASES]
        for case in CASES:
            if set(only) <= set(case.key.replace(",", "").split()):
                print(case.key, flush=True)
                programs = figures["programs"] | {case.key: compiled(case)}
                figures["programs"] = {key: programs[key] for key in sorted(programs, key=order.index)}
                yield figures
    for case in CASES:
        if case.key in figures["programs"]:
            figures["programs"][case.key]["formula_peak_gib"] = round(formula_of(case).memory.peak / GIB, 2)
    print(markdown(figures))
    yield figures


def compiled(case: Case) -> dict[str, Any]:
    """Figures of the train step of a case."""
    cfg = case.config()
    cluster, _ = read_cluster(f"h100:{case.gpus}")
    assert cluster is not None
    plan = compile_train_step(cfg, cluster)
    rows = timed(plan)
    jax.clear_caches()
    formula = formula_of(case)
    described = formula.run
    step = with_program(formula, rows)
    return {
        "mesh": {axis: size for axis, size in plan.mesh.items() if size > 1},
        "kernel": "; ".join(kernel for kernels in plan.kernels.values() for kernel in kernels),
        "arguments_gib": round(plan.memory.arguments / GIB, 2),
        "temporary_gib": round(plan.memory.temporary / GIB, 2),
        "peak_gib": round(plan.memory.peak / GIB, 2),
        "usable_gib": round(plan.usable_gib, 2),
        "fits": plan.fits,
        "formula_peak_gib": round(formula.memory.peak / GIB, 2),
        "workspace_gib": round(workspace(cfg, described) / GIB, 2),
        **context_traffic(described, plan.contents.collectives),
        "step_seconds": round(step.step_seconds, 2),
        "formula_step_seconds": round(formula.step_seconds, 2),
        "exposed_seconds": round(step.exposed_seconds, 3),
        "compile_seconds": round(plan.compile_seconds, 1),
    }


def formula_of(case: Case) -> Estimate:
    """The plan of a case by formula."""
    return estimate(describe(case.config(), GPUS["h100"], case.gpus))


def workspace(cfg: Any, run: Description) -> float:
    """Bytes that cuDNN's backward kernel allocates outside of the plan: dK and dV of all query heads of a call."""
    mixer, parallel = cfg.model.stack.pattern[0].mixer, run.parallel
    apart = parallel.exchanging()
    ringed = parallel.context // apart if "ring" in parallel.context_strategy else 1
    keys, heads = cfg.model.sequence_length / ringed, mixer.heads / parallel.tensor / apart
    return 2 * keys * heads * mixer.size(cfg.model.hidden) * run.width


def context_traffic(run: Description, collectives: Sequence[Collective]) -> dict[str, Any]:
    """MiB that a device sends over `context` for a layer and microbatch, and what overlaps with it.

    The first or the last layer may be outside of the loop over layers. In the recipes no weights are sharded over
    `context` alone, and ids of documents are small, so that all large collectives over it are of attention.
    """
    layers = run.microbatches * run.towers[-1].repeats
    unknown = max(1, run.microbatches - 1) if run.parallel.pipeline == 1 else 1
    large = [c for c in collectives if c.groups.axes == ("context",) and c.bytes >= MIB]
    runs = {id(collective): collective.place.runs(unknown) or 0 for collective in large}
    group_sizes, devices = {"all-to-all": run.parallel.exchanging()}, run.parallel.context
    total = sum(_sent_of(c.kind, c.bytes, c.groups.size) * runs[id(c)] for c in large)
    least = sum(
        len(sent.parts) * _sent_of(sent.kind, sent.size(devices), group_sizes.get(sent.kind, devices))
        for sent in sent_by_attention(run.towers[-1])
    )

    def count(kinds: Sequence[str], *, overlapped: bool = False) -> float:
        return sum(runs[id(c)] for c in large if c.kind in kinds and (c.overlapped or not overlapped)) / layers

    kinds = sorted({collective.kind for collective in large})
    beside = {kind: f"{count([kind], overlapped=True):.3g} of {count([kind]):.3g}" for kind in kinds}
    return {
        "sent_mib_a_layer": round(total / layers / MIB, 1),
        "least_mib_a_layer": round(least / MIB, 1),
        "collectives_a_layer": round(count(kinds), 2),
        "beside_kernels": round(count(kinds, overlapped=True) / count(kinds), 3),
        "beside_by_kind": beside,
    }


def _sent_of(kind: str, size: float, devices: int) -> float:
    """Bytes that a device sends for a collective with so many bytes on its full side."""
    return size if kind == "collective-permute" else size * (devices - 1) / devices


def markdown(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    columns = ("recipe, H100s", "strategy", "kernel", "peak GiB", "formula", "MiB sent a layer", "least")
    sizes = ("peak_gib", "formula_peak_gib", "sent_mib_a_layer", "least_mib_a_layer")
    lines = [f"| {' | '.join([*columns, 'beside kernels', 'step, s'])} |", "|---|---|---|---:|---:|---:|---:|---|---:|"]
    for key, program in figures["programs"].items():
        recipe, gpus, strategy = key.split(", ")
        kernel = program["kernel"].split(" (")[0].removeprefix("attention ")
        beside = ", ".join(f"{kind} {share}" for kind, share in program["beside_by_kind"].items())
        cells = [f"`{recipe}`, {gpus}", f"`{strategy}`", kernel, *(f"{program[name]:.1f}" for name in sizes)]
        lines.append(f"| {' | '.join([*cells, beside, format(program['step_seconds'], '.1f')])} |")
    return "\n".join(lines)
