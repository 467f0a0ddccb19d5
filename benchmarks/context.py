"""Long-row configs on virtual H100s with each strategy of `context`: memory, transfers and their overlap.

Run:  nice python benchmarks/context.py                 (needs the extra aot; no GPU. About 15 minutes on two cores)
      python benchmarks/context.py llama3_8b_1m ring    only cases with all of these words
      python benchmarks/context.py --table              prints the figures on file as Markdown; compiles nothing

For each config and strategy:
- peak memory of a device, compiled and by formula;
- bytes that a device sends over `context` for one layer and microbatch, forward and backward, and the minimum of the
  strategy: keys and values in the compute dtype, gradients in float32 if a ring sums them
  (megajax.planning.cost.traffic);
- the number of these collectives with a matmul or an attention kernel between start and end;
- attention work of the busiest device over the mean, computed exactly, for rows of one document and packed rows.

Nothing is run, so no time is measured: `step_seconds` is an estimate of the cost model. Each case is written to
benchmarks/results/context.json when it is compiled.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import outcome

from megajax.command_line.parser import front_door
from megajax.config import load
from megajax.config.builds import resolve
from megajax.data.rows.balancing import RowWork, imbalance
from megajax.mesh.sequence_sharding import SequenceSharding
from megajax.planning.cost.description import Description, describe
from megajax.planning.cost.estimate import estimate
from megajax.planning.cost.traffic import sent_by_attention
from megajax.planning.program.hlo import Collective
from megajax.planning.virtual_devices import GIB, GPUS, MIB
from megajax.training.row_work import row_work

FIGURES = outcome.RESULTS / "context.json"
STRATEGIES = ("all_gather", "ring", "all_to_all", "ring+all_to_all")
ROUNDS = (1, 4, 16)
SEED, ROWS = 1234, 64


@dataclass(frozen=True, slots=True)
class Case:
    """A recipe on so many H100s, with a strategy."""

    recipe: str
    gpus: int
    strategy: str

    @property
    def key(self) -> str:
        """What its figures are filed under."""
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


def compiled(case: Case) -> dict[str, Any]:
    """Figures of the train step of a case."""
    cfg = case.config()
    cluster, _ = resolve("megajax.planning.virtual_devices:read_cluster")(f"h100:{case.gpus}")
    train_step = "megajax.planning.program.train_step"
    plan = resolve(f"{train_step}:compile_train_step")(cfg, cluster)
    rows = resolve(f"{train_step}:timed")(plan)
    resolve("jax:clear_caches")()
    described = describe(cfg, GPUS["h100"], case.gpus)
    formula = estimate(described)
    step = resolve(f"{train_step}:with_program")(formula, rows)
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


def workspace(cfg: Any, run: Description) -> float:
    """Bytes that cuDNN's backward kernel would take beside the plan: dK and dV of all query heads of a call."""
    mixer, parallel = cfg.model.stack.pattern[0].mixer, run.parallel
    apart = parallel.exchanging()
    ringed = parallel.context // apart if "ring" in parallel.context_strategy else 1
    keys, heads = cfg.model.sequence_length / ringed, mixer.heads / parallel.tensor / apart
    return 2 * keys * heads * mixer.size(cfg.model.hidden) * run.width


def context_traffic(run: Description, collectives: Sequence[Collective]) -> dict[str, Any]:
    """MiB that a device sends over `context` for a layer and microbatch, and what runs beside.

    The first or the last layer may stand outside of the loop over layers. In the recipes no weights are spread over
    `context` alone, and ids of documents are small, so that all large collectives over it are of attention.
    """
    layers = run.microbatches * run.towers[-1].repeats
    context_collectives = [
        collective for collective in collectives if collective.groups.axes == ("context",) and collective.bytes >= 2**20
    ]
    total = sum(
        _sent_of(collective.kind, collective.bytes, collective.groups.size) * _runs(run, collective)
        for collective in context_collectives
    )
    count = sum(_runs(run, collective) for collective in context_collectives)
    beside = sum(_runs(run, collective) for collective in context_collectives if collective.overlapped)
    group_sizes = {"all-to-all": run.parallel.exchanging()}
    devices = run.parallel.context
    least = sum(
        len(collective.parts)
        * _sent_of(collective.kind, collective.size(devices), group_sizes.get(collective.kind, devices))
        for collective in sent_by_attention(run.towers[-1])
    )
    kinds = sorted({collective.kind for collective in context_collectives})

    def runs_of(kind: str, *, overlapped: bool = False) -> float:
        of_kind = [c for c in context_collectives if c.kind == kind and (c.overlapped or not overlapped)]
        return sum(_runs(run, collective) for collective in of_kind)

    return {
        "sent_mib_a_layer": round(total / layers / MIB, 1),
        "least_mib_a_layer": round(least / MIB, 1),
        "collectives_a_layer": round(count / layers, 2),
        "beside_kernels": round(beside / count, 3),
        "beside_by_kind": {
            kind: f"{runs_of(kind, overlapped=True) / layers:.3g} of {runs_of(kind) / layers:.3g}" for kind in kinds
        },
    }


def _runs(run: Description, collective: Collective) -> int:
    unknown = max(1, run.microbatches - 1) if run.parallel.pipeline == 1 else 1
    return collective.place.runs(unknown) or 0


def _sent_of(kind: str, size: float, devices: int) -> float:
    """Bytes that a device sends for a collective of so many bytes on its full side."""
    return size if kind == "collective-permute" else size * (devices - 1) / devices


def balance(recipe: str, gpus: int) -> dict[str, Any]:
    """Work of the busiest device over the mean: of one document, and the mean of packed rows, by rounds.

    attention: scores alone; all: FLOPs of a step, in which those of short documents weigh little.
    """
    cfg: Any = load(f"llama3.py:{recipe}", devices=gpus)
    length, parallel = cfg.model.sequence_length, cfg.parallel
    numbers = np.random.default_rng(SEED)
    rows = [_packed(numbers, length) for _ in range(ROWS)]
    ratios: dict[str, Any] = {"context": parallel.context, "rounds": parallel.context_rounds}
    for name, work in {"attention": RowWork(), "all": row_work(cfg.model)}.items():

        def mean(batch: list[np.ndarray], rounds: int, work: RowWork = work) -> float:
            sharding = SequenceSharding.of(replace(parallel, context_rounds=rounds), causal=True)
            return round(float(np.mean([imbalance(work.of_devices(row, sharding)) for row in batch])), 4)

        ratios[name] = {"one_document": mean([np.array([length])], 1)}
        ratios[name] |= {f"packed_{rounds}": mean(rows, rounds) for rounds in ROUNDS}
    return ratios


def _packed(numbers: np.random.Generator, length: int) -> np.ndarray:
    """Lengths of documents of a row: log-normal with a median of 1,100 tokens; the last one is cut off."""
    lengths: list[int] = []
    while sum(lengths) < length:
        lengths.append(min(length - sum(lengths), 1 + int(numbers.lognormal(7.0, 1.5))))
    return np.array(lengths)


def table(figures: dict[str, Any]) -> str:
    """The figures on file as Markdown."""
    columns = (
        "recipe, H100s",
        "strategy",
        "kernel",
        "peak GiB",
        "formula",
        "MiB sent a layer",
        "least",
        "beside kernels",
    )
    lines = [f"| {' | '.join([*columns, 'step, s'])} |", "|---|---|---|---:|---:|---:|---:|---|---:|"]
    for key, figures_of_recipe in figures["programs"].items():
        recipe, gpus, strategy = key.split(", ")
        beside = ", ".join(f"{kind} {share}" for kind, share in figures_of_recipe["beside_by_kind"].items())
        cells = [
            f"`{recipe}`, {gpus}",
            f"`{strategy}`",
            figures_of_recipe["kernel"].split(" (")[0].removeprefix("attention "),
        ]
        cells += [
            f"{figures_of_recipe[name]:.1f}"
            for name in ("peak_gib", "formula_peak_gib", "sent_mib_a_layer", "least_mib_a_layer")
        ]
        lines.append(f"| {' | '.join([*cells, beside, format(figures_of_recipe['step_seconds'], '.1f')])} |")
    lines += ["", "| recipe | context | one document | packed, 1 round | 4 rounds | 16 rounds |", "|---|" + "---:|" * 5]
    for recipe, figures_of_recipe in figures["balance"].items():
        for name in ("attention", "all"):
            cells = [
                f"`{recipe}`, {name}",
                str(figures_of_recipe["context"]),
                *(f"{value:.3f}" for value in figures_of_recipe[name].values()),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    figures = json.loads(FIGURES.read_text())["figures"] if FIGURES.exists() else {"programs": {}}
    options = [word for word in argv if not word.startswith("--")]
    if "--table" not in argv:
        figures["balance"] = {recipe: balance(recipe, gpus) for recipe, gpus in RECIPES.items()}
        for case in CASES:
            if all(word in case.key.replace(",", "").split() for word in options):
                print(case.key, flush=True)
                figures["programs"][case.key] = compiled(case)
                order = {entry.key: place for place, entry in enumerate(CASES)}
                figures["programs"] = dict(sorted(figures["programs"].items(), key=lambda item: order[item[0]]))
                outcome.write_to(FIGURES, figures, announce=False)
    print(table(figures))


if __name__ == "__main__":
    front_door(main)
