"""Predicted speeds of the shipped large configs, of what a search finds, and of published layouts, in one table."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.outcome import RESULTS, ROOT
from megajax.config import load
from megajax.planning.choice import Choice, changes, settings
from megajax.planning.compiled.devices import GIB, GPUS, Cluster
from megajax.planning.cost.estimate import Case, Estimate
from megajax.planning.search import Task, ranked, search

FIGURES = RESULTS / "shipped_layouts.json"
PAGE = ROOT / "docs/planning.md"
BEGIN, END = "<!-- shipped, by python -m benchmarks shipped_layouts -->", "<!-- end of shipped -->"


@dataclass(frozen=True)
class Published:
    """A config on H100s, and the layout of the fastest published run in bfloat16, or in fp8 where there is no other."""

    config: str
    gpus: int
    layout: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Key of its figures."""
        return f"{self.config.partition(':')[2]}, {self.gpus}"


def _pipeline(stages: int, chunks: int, **axes: Any) -> dict[str, Any]:
    return {"pipeline": stages, "virtual_stages": chunks, **axes}


ROWS = (
    Published("llama3.py:llama3_8b", 8, {"context": 2}),
    Published("llama3.py:llama3_70b", 64, _pipeline(4, 5, tensor=4, context=2, sequence=True)),
    Published("gpt3.py:gpt3_175b", 128, _pipeline(8, 6, tensor=4, sequence=True)),
    Published("llama3.py:llama3_405b", 1024, _pipeline(8, 8, tensor=8, context=2, sequence=True)),
    Published("mixtral.py:mixtral_8x7b", 64, _pipeline(4, 8, expert=8)),
    Published("qwen3_moe.py:qwen3_moe_30b_a3b", 32, _pipeline(2, 12, expert=8)),
    Published("deepseek.py:deepseek_v3", 1024, _pipeline(8, 4, tensor=2, expert=32, sequence=True)),
)
"""Layouts of ../shared/published_runs: NeMo and Megatron Core; of Qwen3 and DeepSeek-V3, Megatron Bridge in fp8."""


def shipped_layouts(*, only: tuple[str, ...] = (), table: bool = False) -> dict[str, Any]:
    """Predicted speeds of the shipped large configs, of the fastest layouts by formula, and of published layouts.

    In tokens per second and GPU, with the range of published runs' errors. Searches take about six minutes of a core;
    the settings they find, over the shipped ones, are kept in benchmarks/results/shipped_layouts.json. A published
    layout is predicted for this system, with the shipped rows per step and the least recomputation that fits.
    --only: rows whose key contains one of these. --table: no search, but the layouts on file with the present formulas.
    """
    found = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    for row in ROWS:
        if not table and (not only or any(word in row.key for word in only)):
            found[row.key] = searched(row)
            print(f"{row.key}: {' '.join(found[row.key])}", flush=True)
            FIGURES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text("\n".join([before + BEGIN, *lines(found), END]) + rest.partition(END)[2], encoding="utf-8")
    return {"rows": len(found)}


def case_of(row: Published, *words: str, gpu: str = "h100") -> Case:
    """The config on its GPUs, with settings."""
    config = row.config if gpu == "h100" else f"{row.config}_{gpu}"
    cfg: Any = load(config, *words, devices=row.gpus)
    return Case(cfg, Cluster(GPUS[gpu], row.gpus, 8))


def searched(row: Published) -> list[str]:
    """The settings that the fastest layout by formula changes."""
    task = Task(case_of(row))
    return settings(changes(task.case.cfg, task.config(ranked(search(task))[0].choice)))


def published(row: Published) -> Estimate | None:
    """The published layout with the least recomputation that fits; None if none does."""
    task = Task(case_of(row))
    one: dict[str, Any] = dict.fromkeys(("tensor", "pipeline", "virtual_stages", "expert", "context", "data"), 1)
    choice = Choice(**one | {"data_sharding": "zero1", "sequence": False, "micro_size": 1} | dict(row.layout))
    data = row.gpus // (choice.tensor * choice.pipeline * choice.expert * choice.context)
    for recompute in task.recomputes():
        plan = task.with_choice(replace(choice, data=data, recompute=recompute)).estimate
        if plan.fits:
            return plan
    return None


def lines(found: Mapping[str, list[str]]) -> list[str]:
    """The table."""
    header = [
        "| config, GPUs | shipped | fastest by formula | published layout | shipped on H200s | fastest: layout, GiB |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in ROWS:
        if row.key not in found:
            continue
        best = case_of(row, *found[row.key])
        choice = Choice.of(best.cfg, row.gpus)
        plans = case_of(row).estimate, best.estimate, published(row), case_of(row, gpu="h200").estimate
        speeds = map(_speed, plans)
        layout = f"{choice.layout}; {choice.details}, {best.estimate.memory.peak / GIB:.1f}"
        header.append(f"| `{row.key.partition(',')[0]}`, {row.gpus} | {' | '.join(speeds)} | {layout} |")
    return header


def _speed(plan: Estimate | None) -> str:
    if plan is None:
        return "does not fit"
    low, high = plan.tokens_per_second_per_device_range
    return f"{plan.tokens_per_second_per_device:,.0f} ({low:,.0f} to {high:,.0f})"
