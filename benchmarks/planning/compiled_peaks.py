"""Compiled memory of the shipped configs on virtual H100s, and the tables of docs made from it.

The tables are between `<!-- figures: NAME ... -->` and `<!-- end of figures -->` in PAGES; a test compares them with
the file of figures.
"""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.outcome import RESULTS, ROOT
from megajax.config import load
from megajax.pipeline.check import measure
from megajax.planning.choice import Choice
from megajax.planning.compiled.devices import GIB, GPUS, prepare, read_cluster
from megajax.planning.cost.description import describe
from megajax.planning.cost.estimate import Estimate, estimate
from megajax.planning.train_step import compile_train_step

FIGURES = RESULTS / "compiled_peaks.json"
TOLERANCE = 0.01

CONFIGS = {
    "gpt3_1_3b": "gpt3.py:gpt3_1_3b",
    "gpt3_6_7b": "gpt3.py:gpt3_6_7b",
    "gpt3_175b": "gpt3.py:gpt3_175b",
    "gpt3_175b_h200": "gpt3.py:gpt3_175b_h200",
    "llama3_8b": "llama3.py:llama3_8b",
    "llama3_8b_h200": "llama3.py:llama3_8b_h200",
    "llama3_70b": "llama3.py:llama3_70b",
    "llama3_70b_h200": "llama3.py:llama3_70b_h200",
    "llama3_405b": "llama3.py:llama3_405b",
    "llama3_405b_h200": "llama3.py:llama3_405b_h200",
    "mixtral_8x7b": "mixtral.py:mixtral_8x7b",
    "mixtral_8x7b_h200": "mixtral.py:mixtral_8x7b_h200",
    "qwen3_moe_30b_a3b": "qwen3_moe.py:qwen3_moe_30b_a3b",
    "qwen3_moe_30b_a3b_h200": "qwen3_moe.py:qwen3_moe_30b_a3b_h200",
    "qwen3_moe_235b_a22b": "qwen3_moe.py:qwen3_moe_235b_a22b",
    "deepseek_v2_lite": "deepseek.py:deepseek_v2_lite",
    "deepseek_v3": "deepseek.py:deepseek_v3",
    "deepseek_v3_h200": "deepseek.py:deepseek_v3_h200",
    "nemotron_h_8b": "nemotron_h.py:nemotron_h_8b",
    "llama3_8b_128k": "llama3.py:llama3_8b_128k",
    "t5_base": "t5.py:t5_base",
    "t5_11b": "t5.py:t5_11b",
}
"""Name in keys -> value of --config."""


@dataclass(frozen=True)
class Plan:
    """A config on a number of H100s, or of H200s if it is named so."""

    config: str
    """A name of CONFIGS."""
    gpus: int
    change: str = ""
    """Differences from the shipped config as text; "": none."""
    settings: tuple[str, ...] = ()
    """The same as overrides."""

    @property
    def gpu(self) -> str:
        """Key in GPUS."""
        return "h200" if self.config.endswith("_h200") else "h100"

    @property
    def key(self) -> str:
        """Key of its figures in the file."""
        return ", ".join([self.config, str(self.gpus), *([self.change] if self.change else [])])


def _stages(schedule: str, virtual: int, wait: int = 1) -> tuple[str, ...]:
    fields = {"schedule": schedule, "virtual_stages": virtual, "loss_wait": wait}
    return tuple(f"parallel.{name}={value}" for name, value in fields.items())


PLAIN = ("parallel.context=1", "parallel.context_strategy=all_gather")
EIGHT = ("parallel.tensor=8", "batch.side_by_side=1")
SMALL = ("parallel.data_sharding=zero1", "parallel.sequence=true", "batch.micro_size=1")
TENSOR_4 = ("parallel.tensor=4", *SMALL)
SELECTIVE_4 = (*TENSOR_4, "model.recompute=selective")
"""Of llama3_8b, which ships FSDP and two rows."""
FSDP = ("model.recompute=selective", "batch.micro_size=1")
STAGES_70B, STAGES_405B = (
    (*EIGHT, "parallel.pipeline=4", *PLAIN, *_stages("interleaved", 5)),
    (*EIGHT, "parallel.pipeline=16", "model.recompute=full", *PLAIN, *_stages("interleaved", 8)),
)
EXPERTS = ("parallel.expert=8", "parallel.tensor=1", "parallel.sequence=false", "parallel.data_sharding=zero1",
           "model.recompute=norm,activation,mlp", SMALL[-1])  # fmt: skip
V3 = ("model.recompute=full", "parallel.pipeline=32", "parallel.expert=4", "parallel.tensor=2")
EXPERT_64 = ("model.recompute=full", "parallel.pipeline=1", "parallel.expert=64", "parallel.tensor=1",
             "parallel.sequence=false", "parallel.data_sharding=fsdp")  # fmt: skip
PLANS = (
    Plan("gpt3_1_3b", 8),
    Plan("gpt3_1_3b", 8, "32 rows: one microbatch", ("batch.global_size=32",)),
    Plan("gpt3_6_7b", 64),
    Plan("llama3_8b", 8),
    Plan("llama3_8b", 8, "one row, selective", FSDP),
    Plan("llama3_8b", 8, "tensor 4", SELECTIVE_4),
    Plan("llama3_8b", 8, "tensor 4, no `sequence`",
         (*SELECTIVE_4, "parallel.sequence=false")),
    Plan("llama3_8b", 8, "tensor 4, none", (*TENSOR_4, "model.recompute=none")),
    Plan("llama3_8b", 8, "tensor 4, full, two rows", (*TENSOR_4, "model.recompute=full", "batch.micro_size=2")),
    Plan("llama3_8b_h200", 8),
    Plan("gpt3_175b", 128),
    Plan("gpt3_175b", 128, "tensor 8", EIGHT),
    Plan("gpt3_175b", 1024, "tensor 8", EIGHT),
    Plan("gpt3_175b", 128, "tensor 8, 6 virtual stages", (*EIGHT, *_stages("interleaved", 6))),
    Plan("gpt3_175b", 1024, "tensor 8, 6 virtual stages", (*EIGHT, *_stages("interleaved", 6))),
    Plan("gpt3_175b", 128, "tensor 8, loss does not wait", (*EIGHT, *_stages("1f1b", 1, 0))),
    Plan("gpt3_175b", 128, "tensor 8, 2 virtual stages", (*EIGHT, *_stages("interleaved", 2))),
    Plan("gpt3_175b", 128, "tensor 8, 3 virtual stages", (*EIGHT, *_stages("interleaved", 3))),
    Plan("gpt3_175b", 128, "tensor 8, 64 rows", (*EIGHT, "batch.global_size=64")),
    Plan("gpt3_175b", 128, "tensor 8, 64 rows, 6 virtual stages",
         (*EIGHT, "batch.global_size=64", *_stages("interleaved", 6))),
    Plan("gpt3_175b_h200", 128),
    Plan("llama3_70b", 64),
    Plan("llama3_70b", 128, "tensor 8, pipeline 4", STAGES_70B),
    Plan("llama3_70b", 128, "tensor 8, pipeline 4, 1f1b", (*STAGES_70B, *_stages("1f1b", 1))),
    Plan("llama3_70b", 128, "tensor 8, pipeline 4, 1f1b, loss does not wait", (*STAGES_70B, *_stages("1f1b", 1, 0))),
    Plan("llama3_70b", 128, "tensor 8, pipeline 4, 2 virtual stages", (*STAGES_70B, *_stages("interleaved", 2))),
    Plan("llama3_70b_h200", 64),
    Plan("llama3_405b", 1024),
    Plan("llama3_405b", 1024, "pipeline 16, full", (*STAGES_405B, *_stages("interleaved", 4))),
    Plan("llama3_405b", 1024, "pipeline 16, full, 1f1b", (*STAGES_405B, *_stages("1f1b", 1))),
    Plan("llama3_405b_h200", 1024),
    Plan("mixtral_8x7b", 64),
    Plan("mixtral_8x7b", 64, "pipeline 4, expert 8", (*EXPERTS, "parallel.pipeline=4", *_stages("interleaved", 4))),
    Plan("mixtral_8x7b_h200", 64),
    Plan("qwen3_moe_30b_a3b", 32),
    Plan("qwen3_moe_30b_a3b", 32, "expert 8", EXPERTS),
    Plan("qwen3_moe_30b_a3b_h200", 32),
    Plan("qwen3_moe_235b_a22b", 256),
    Plan("deepseek_v2_lite", 16),
    Plan("deepseek_v3", 1024),
    Plan("deepseek_v3", 1024, "pipeline 32, expert 4", V3),
    Plan("deepseek_v3", 1024, "pipeline 1, expert 64, fsdp", EXPERT_64),
    Plan("deepseek_v3_h200", 1024),
    Plan("nemotron_h_8b", 32),
    Plan("llama3_8b_128k", 16),
    Plan("t5_base", 8),
    Plan("t5_base", 8, "tensor 2", ("parallel.tensor=2", "parallel.sequence=true")),
    Plan("t5_11b", 64),
)  # fmt: skip

type Figures = Mapping[str, Mapping[str, Any]]
"""Key -> its figures."""


def compiled_peaks(*, only: tuple[str, ...] = (), check: bool = False, pages: bool = False) -> dict[str, Any]:
    """Compiled memory of the shipped configs on virtual H100s, with the tables of docs made from it.

    Needs the extra aot; no GPU. About 30 minutes on two cores. Writes benchmarks/results/compiled_peaks.json after each
    plan, with the commit at which it was compiled, and then the tables of docs. --only: plans whose key contains one of
    these. --check: compile and compare with the file, and write nothing; the exit code is 1 if a figure differs by more
    than 1 %. --pages: only write the tables again, with peaks by the present formulas.
    """
    figures, mismatches = stored_figures(), 0
    if not pages:
        prepare()
        for plan in PLANS:
            if only and not any(word in plan.key for word in only):
                continue
            now = compiled(plan)
            print(f"{plan.key}: {now['peak_gib']:.2f} GiB, by formula {now['formula_peak_gib']:.2f}", flush=True)
            if check:
                messages = list(differences(figures.get(plan.key, {}), now)) or ([] if plan.key in figures else ["new"])
                print("".join(f"  {line}\n" for line in messages), end="", flush=True)
                mismatches += bool(messages)
            else:
                figures[plan.key] = now
                keep(figures)
    if not check:
        for plan in PLANS:
            if plan.key in figures:
                figures[plan.key]["formula_peak_gib"] = round(formula_of(plan).memory.peak / GIB, 3)
        keep(figures)
        for name, table in PAGES.items():
            path = ROOT / name
            path.write_text(with_table(path.read_text(encoding="utf-8"), table, figures), encoding="utf-8")
    return {"wrong": mismatches}


def compiled(plan: Plan) -> dict[str, Any]:
    """GiB of one device, and the schedule of a pipeline."""
    cfg: Any = load(CONFIGS[plan.config], *plan.settings)
    cluster, _ = read_cluster(f"{plan.gpu}:{plan.gpus}")
    assert cluster is not None
    program = compile_train_step(cfg, cluster)
    jax.clear_caches()
    formula, memory = formula_of(plan), program.memory
    sizes = {name: getattr(memory, name) for name in ("parameters", "optimizer", "arguments", "temporary", "peak")}
    figures: dict[str, Any] = {"microbatches": program.microbatches}
    figures |= {f"{name}_gib": round(size / GIB, 3) for name, size in sizes.items()}
    figures["formula_peak_gib"] = round(formula.memory.peak / GIB, 3)
    if (schedule := program.schedule) is not None:
        bubble = measure(schedule).pipeline_bubble
        figures |= {"virtual_stages": cfg.parallel.virtual_stages, "loss_wait": schedule.loss_wait}
        figures |= {"ring_slots": schedule.ring_slots, "bubble": round(float(bubble), 5)}
    return figures | {"jax": jax.__version__, "commit": commit()}


def formula_of(plan: Plan) -> Estimate:
    """The plan by formula."""
    cfg: Any = load(CONFIGS[plan.config], *plan.settings)
    return estimate(describe(cfg, GPUS[plan.gpu], plan.gpus))


def commit() -> str:
    """The commit that last changed the compiled code."""
    command = ["git", "log", "-1", "--format=%h", "--", "megajax", "configs"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def stored_figures() -> dict[str, dict[str, Any]]:
    """The figures on file."""
    return json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}


def keep(figures: dict[str, dict[str, Any]]) -> None:
    """Write the figures in the order of PLANS, each with its plan; figures of former plans are removed."""
    ordered = {
        plan.key: {"config": CONFIGS[plan.config], "gpus": plan.gpus, "settings": list(plan.settings)}
        | {name: value for name, value in figures[plan.key].items() if name not in ("config", "gpus", "settings")}
        for plan in PLANS
        if plan.key in figures
    }
    FIGURES.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """A message for each figure that has changed."""
    for name, value in before.items():
        figure = now.get(name)
        if name in ("config", "gpus", "settings", "jax", "commit") or figure == value:
            continue
        if not isinstance(value, float) or abs(figure - value) > TOLERANCE * value:
            yield f"{name}: {value} on file, {figure} compiled"


def configs_table(figures: Figures) -> Iterator[str]:
    """The shipped configs, docs/layouts.md."""
    yield "| config | GPUs it is meant for | layout | peak memory by the compiler |"
    yield "|---|---|---|---:|"
    for plan in (plan for plan in PLANS if not plan.change):
        cfg: Any = load(CONFIGS[plan.config])
        choice = Choice.of(cfg, plan.gpus)
        peak = f"{figures[plan.key]['peak_gib']:.1f} of {GPUS[plan.gpu].usable_gib(cfg.xla.memory_fraction):.1f} GiB"
        hardware = f"{plan.gpus} {plan.gpu.upper()}"
        yield f"| `{CONFIGS[plan.config]}` | {hardware} | {choice.layout}; {choice.details} | {peak} |"


def formula_table(figures: Figures) -> Iterator[str]:
    """Formulas and compiled peaks, docs/planning.md."""
    yield "| config, devices | formula | compiled | |"
    yield "|---|---:|---:|---:|"
    others = []
    for plan in sorted(PLANS, key=lambda plan: (list(CONFIGS).index(plan.config), plan.gpus)):
        peak, formula = (figures[plan.key][name] for name in ("peak_gib", "formula_peak_gib"))
        error = formula / peak - 1
        if plan.change or plan.config.endswith("_h200"):
            others.append(error)
            continue
        yield f"| `{plan.config}`, {plan.gpus} | {formula:.1f} | {peak:.1f} | {error:+.1%} |".replace("%", " %")
    errors = f"{min(others):+.1%} to {max(others):+.1%}".replace("%", " %")
    yield f"| {len(others)} others: H200s, other settings | | | {errors} |"


def schedules_table(figures: Figures) -> Iterator[str]:
    """Schedules of the pipelines, docs/pipeline.md."""
    yield "| config, GPUs | M | V | wait | arguments | temporary | peak | slots | bubble |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name in CONFIGS:
        for plan in sorted((plan for plan in PLANS if plan.config == name), key=lambda plan: plan.gpus):
            figure = figures[plan.key]
            if "ring_slots" not in figure or name.endswith("_h200"):
                continue
            title = f"the same, {plan.change}" if plan.change else f"**`{name}`**, {plan.gpus}"
            schedule = " | ".join(str(figure[column]) for column in ("microbatches", "virtual_stages", "loss_wait"))
            sizes = " | ".join(f"{figure[f'{part}_gib']:.1f}" for part in ("arguments", "temporary", "peak"))
            yield (f"| {title} | {schedule} | {sizes} | {figure['ring_slots']} | {100 * figure['bubble']:.2g} % |")


TABLES: Mapping[str, Callable[[Figures], Iterator[str]]] = {
    "configs": configs_table,
    "formulas": formula_table,
    "schedules": schedules_table,
}
PAGES = {"docs/layouts.md": "configs", "docs/planning.md": "formulas", "docs/pipeline.md": "schedules"}
"""Page -> its table."""
BEGIN, END = "<!-- figures: {}, by python -m benchmarks compiled_peaks --pages -->", "<!-- end of figures -->"


def with_table(page: str, table: str, figures: Figures) -> str:
    """The text of a page with its table made from the figures. Raises ValueError without the two marks."""
    begin = BEGIN.format(table)
    before, marker, rest = page.partition(begin)
    _, ended, after = rest.partition(END)
    if not marker or not ended:
        raise ValueError(f"the marks {begin} and {END} are missing")
    return "\n".join([before + begin, *TABLES[table](figures), END]) + after
