"""python -m megajax.plan --search: ranking, fixed settings, errors, files, and resuming from the cache."""

import json
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from descriptions import STAGES_70B

from megajax.config import load
from megajax.config.errors import UserError
from megajax.mesh.config import ParallelConfig
from megajax.plan import main
from megajax.planning.choice import Choice, apply, changes, problems, refusal, settings
from megajax.planning.compiled.devices import GPUS, Cluster
from megajax.planning.cost.description import describe
from megajax.planning.cost.estimate import Case, Estimate, estimate
from megajax.planning.ranking import CompiledFigures, Standing, compile_best, find_best, likely, rank_rows
from megajax.planning.search import RankedLayout, Task, explore, ranked, search

ROOT = Path(__file__).parents[2]
H100 = GPUS["h100"]


def task(name: str, devices: int, *overrides: str, device: str = "h100", **fixed: Any) -> Task:
    file = "nemotron_h" if name.startswith("nemotron_h") else name.split("_")[0]
    cfg: Any = load(f"{file}.py:{name}", *overrides)
    gpu = GPUS[device]
    return Task(Case(cfg, Cluster(gpu, devices, gpu.per_node)), fixed)


def best_of(request: Task) -> list[RankedLayout]:
    return ranked(search(request))


def published(request: Task, devices: int, layout: ParallelConfig, **model: Any) -> Estimate:
    """The settings of a published layout, in this system."""
    described = describe(request.case.cfg, H100, devices)
    return estimate(replace(described, parallel=layout, micro_size=1, model=replace(described.model, **model)))


SIZES_70B = {"tensor": 4, "pipeline": 4, "virtual_stages": 5}
PUBLISHED: dict[str, tuple[str, int, dict[str, int]]] = {
    "Llama-3 70B, 64": ("llama3_70b", 64, SIZES_70B),
    "GPT-3 175B, 1024": ("gpt3_175b", 1024, {"tensor": 4, "pipeline": 8, "virtual_stages": 12}),
}
"""Config, H100s, and the layout of NeMo's published runs: one row per microbatch."""


LIGHT = ("norm", "activation", "query_key_value")


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.slow] * ("GPT" in name)) for name in PUBLISHED])
def test_the_search_finds_a_layout_no_slower_than_the_published_one(case: str) -> None:
    name, devices, sizes = PUBLISHED[case]
    request = task(name, devices, data_sharding="zero1", micro_size=1)
    best = best_of(request)[0]
    data = devices // (sizes["tensor"] * sizes["pipeline"])
    base = ParallelConfig(data=data, sequence=True, schedule="interleaved", data_sharding="zero1")
    layout = replace(base, **sizes)
    kept = [published(request, devices, layout, recompute=word) for word in ("none", "selective", LIGHT, "full")]
    fastest = min(another.step_seconds for another in kept if another.memory.peak <= request.limit)
    # Steps that differ in the fourth digit rank as equal.
    assert best.step_seconds <= fastest * 1.001
    assert best.peak <= request.limit
    # The result is a config that training accepts, with the predicted step time.
    cfg = apply(best.choice, request.case.cfg)
    assert not problems(cfg, devices)
    assert estimate(describe(cfg, H100, devices)).step_seconds == pytest.approx(best.step_seconds)


@cache
def eight_gpus() -> tuple[Task, list[RankedLayout]]:
    """A search for Llama-3 8B on 8 H100s, and what it lists."""
    request = task("llama3_8b", 8)
    return request, best_of(request)


def test_listed_layouts_are_legal_and_fit_and_are_unique() -> None:
    request, entries = eight_gpus()
    assert len({entry.choice.kind for entry in entries}) == len(entries)
    for entry in entries:
        case = request.with_choice(entry.choice)
        assert not refusal(case.cfg, case.cluster.devices)
        assert case.estimate.memory.peak == pytest.approx(entry.peak) and entry.peak <= request.limit
    seconds = [entry.step_seconds for entry in entries]
    assert seconds == pytest.approx(sorted(seconds), rel=1e-2)


def test_the_best_equals_that_of_an_exhaustive_search() -> None:
    """A search by brute force over a small part of the space finds no faster layout."""
    request = task("llama3_8b", 8, device="h100", data_sharding="zero1", recompute="selective", micro_size=1)
    entries = best_of(request)
    best = float("inf")
    sizes = (1, 2, 4, 8)
    for tensor, pipeline, chunks, sequence in product(sizes, sizes, (*sizes, 16, 32), (True, False)):
        if 8 % (tensor * pipeline) == 0:
            choice = Choice(
                tensor=tensor, pipeline=pipeline, virtual_stages=chunks, data=8 // (tensor * pipeline),
                data_sharding="zero1", sequence=sequence, micro_size=1,
            )  # fmt: skip
            case = request.with_choice(choice)
            if not problems(case.cfg, 8) and case.estimate.memory.peak <= request.limit:
                best = min(best, case.estimate.step_seconds)
    assert entries[0].step_seconds == pytest.approx(best, rel=5e-3)


def test_the_fewest_layers_that_fit_are_recomputed() -> None:
    request = task("llama3_70b", 64, tensor=1, pipeline=1, context=1, data_sharding="fsdp", micro_size=1)
    # Where this is the fastest choice; with a little more memory, a policy that saves some tensors of all layers is.
    request = replace(request, limit_gib=67.0)
    (entry,) = explore(request, (1, 1)).best
    assert entry.choice.recompute == "full" and entry.choice.recompute_layers is not None
    one_less = replace(entry.choice, recompute_layers=entry.choice.recompute_layers - 1)
    assert entry.peak <= request.limit < request.with_choice(one_less).estimate.memory.peak


def test_fsdp_in_groups_of_a_node_is_the_best_where_the_network_is_slow() -> None:
    """8B on 2 nodes: an all-reduce a step between nodes against gathers and scatters of each microbatch."""
    request = task("llama3_8b", 16)
    tried = {(layout.data_sharding, layout.shards) for layout in request.layouts((2, 1)) if layout.context == 1}
    assert tried == {("zero1", None), ("fsdp", None), ("fsdp", 4)}
    fixed = {"tensor": 1, "pipeline": 1, "context": 1}
    cluster = request.case.cluster
    for network, shards in ((50e9, None), (12.5e9, 8)):
        nodes = cluster._replace(device=replace(H100, network=network))
        best = best_of(Task(replace(request.case, cluster=nodes), fixed))[0]
        assert (best.choice.data_sharding, best.choice.shards) == ("fsdp", shards)
    assert best.choice.sharding == "fsdp, shards 8"
    assert apply(best.choice, request.case.cfg).parallel.shards == 8
    assert {choice.shards for choice in replace(request, fixed={"shards": 16}).layouts((1, 1))} == {16}


def test_long_rows_are_sharded_if_they_do_not_fit() -> None:
    """A row of 131,072 tokens of Llama-3 8B does not fit on one H100, even with full recomputation."""
    few = {"data_sharding": "fsdp", "pipeline": 1, "tensor": 1, "micro_size": 1, "recompute": "full"}
    request = task("llama3_8b_128k", 16, "parallel.context=1", **few)
    best = best_of(request)[0]
    assert best.choice.context > 1 and best.choice.data * best.choice.context == 16 and best.peak <= request.limit
    uncut = explore(replace(request, fixed={**few, "context": 1, "data": 16}), (1, 1))
    assert not uncut.best and uncut.smallest is not None and uncut.smallest.peak > request.limit
    # The result is a config that training accepts.
    assert not problems(request.config(best.choice), 16)
    assert "parallel.context=" in " ".join(settings(changes(request.case.cfg, request.config(best.choice))))


def test_illegal_contexts_are_not_proposed() -> None:
    """3 chunks of zigzag do not divide 131,072 positions; rows of a T5 are short."""
    fixed = {"pipeline": 1, "tensor": 1, "context": 3, "micro_size": 1, "data_sharding": "replicate"}
    request = task("llama3_8b_128k", 48, "parallel.context=1", **fixed)
    group = explore(request, (1, 1))
    assert not group.best and any("131072 positions" in reason for reason in group.refusals)
    assert {choice.context for choice in task("t5_base", 8).layouts((1, 1))} == {1}


def test_moments_are_offloaded_only_if_nothing_else_fits() -> None:
    tight = replace(H100, memory_gib=40.0)
    request = task("gpt3_6_7b", 8)
    group = explore(Task(replace(request.case, cluster=request.case.cluster._replace(device=tight))), (8, 1))
    assert group.best and all(entry.choice.offload == 0 for entry in group.best)
    tighter = request.case.cluster._replace(device=replace(H100, memory_gib=15.2))
    tighter = explore(Task(replace(request.case, cluster=tighter)), (8, 1))
    assert tighter.best and all(entry.choice.offload > 0 for entry in tighter.best)
    first = tighter.best[0].choice
    slow, quick = (request.with_choice(replace(first, offload=share)).estimate for share in (first.offload, 0.0))
    assert slow.optimizer_seconds > 10 * quick.optimizer_seconds and slow.memory.optimizer < quick.memory.optimizer


def search_json(
    folder: Path, *arguments: str, config: str = "llama3.py:llama3_70b", devices: str = "h100:64"
) -> dict[str, Any]:
    file = folder / "found.json"
    request = [f"--config={config}", f"--devices={devices}", "--search", "--compile=0", f"--json={file}", *arguments]
    assert main(request) == 0
    return json.loads(file.read_text())


def test_printed_table_json_and_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "best.yaml"
    figures = search_json(
        tmp_path, f"--out={out}", "--batch.global_size=256", "--parallel.tensor=8", "--batch.micro_size=1"
    )
    printed = capsys.readouterr().out
    for text in ("not chosen", "pure FSDP", "tensor 8 without a pipeline", "the config as given", "slower", "exposed"):
        assert text in printed
    assert f"--config={out}" in printed
    assert len(figures["best"]) == 5 and figures["tried"] > 500
    assert figures["well_known"][0] == {"choice": "pure FSDP", "verdict": "not tried: tensor=8, micro_size=1 is given"}
    # The first is the simplest of those that are within 3 % of the fastest.
    steps = [row["step_seconds"] for row in figures["best"]]
    assert steps[0] <= 1.03 * min(steps) and figures["best"][0]["slower"] == pytest.approx(steps[0] / min(steps) - 1)
    low, high = figures["best"][0]["tokens_per_second_per_device_range"]
    assert low < figures["best"][0]["tokens_per_second_per_device"] < high
    # The file is a config; so is the command line. Both equal the result.
    best: Any = load(str(out), devices=64)
    repeated: Any = load("llama3.py:llama3_70b", *figures["settings"], devices=64)
    assert best == repeated and best.batch.global_size == 256
    assert estimate(describe(best, H100, 64)).step_seconds == pytest.approx(figures["best"][0]["step_seconds"])
    assert "--batch.global_size=256" in printed


def test_a_written_config_loads_its_base_by_relative_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text((ROOT / "configs" / "llama3.py").read_text())
    out = tmp_path / "runs" / "best.yaml"
    out.parent.mkdir()
    search_json(tmp_path, f"--out={out}", config=f"{tmp_path}/mine.py:debug", devices="h100:8")
    assert load(str(out), devices=8) is not None and "../mine.py" in out.read_text()


def test_fixed_settings_are_kept(tmp_path: Path) -> None:
    figures = search_json(tmp_path, "--parallel.tensor=8", "--model.recompute", "full", "--batch.micro-size=2")
    for row in figures["best"]:
        assert (row["tensor"], row["recompute"], row["recompute_layers"], row["micro_size"]) == (8, "full", None, 2)
    assert figures["fixed"] == {"tensor": 8, "recompute": "full", "micro_size": 2}


def test_compiled_layouts_rank_by_their_programs_and_are_cached(tmp_path: Path) -> None:
    """The first is too large, the second has no program, the third is slow."""
    (request, entries), file = eight_gpus(), tmp_path / "search.json"
    # The fastest, then the simplest ones.
    order = list(dict.fromkeys([entries[0], *sorted(entries, key=Standing(entries).order)]))

    def compiled(case: Case) -> dict[str, Any]:
        (place,) = (n for n, one in enumerate(order) if apply(one.choice, request.case.cfg) == case.cfg)
        if place == 1:
            return {"fits": False, "error": "no such kernel"}
        seconds = 10 * entries[0].step_seconds * (1.2 if place == 2 else 1.01)
        return {"fits": place > 0, "peak_gib": order[place].peak / 2**30, "step_seconds": seconds}

    cache = CompiledFigures(file, request.fingerprint())
    compile_best(request, entries, 2, cache, compiled)
    assert [cache.get(entry.choice) is not None for entry in order[:5]] == [True] * 4 + [False]
    rows, rejected, standing = rank_rows(request, entries, cache)
    assert [row.entry for row in rows[:2]] == [order[3], order[2]], "confirmed ones first, by their own time"
    assert not any(row.compiled for row in rows[2:])
    assert {choice for choice, _ in rejected} == {entry.choice for entry in order[:2]}
    # Programs are compared with programs, formulas with formulas.
    behind = [standing.slowdown(row.entry.choice, row.entry.step_seconds) for row in rows]
    assert behind[0] == 0 and behind[1] == pytest.approx(1.2 / 1.01 - 1)
    least = min(standing.by_formula.values())
    assert behind[2:] == [row.entry.step_seconds / least - 1 for row in rows[2:]] and min(behind) >= 0
    another = task("llama3_8b", 8, "steps=400_000")
    assert CompiledFigures(file, request.fingerprint()).layouts == cache.layouts
    assert not CompiledFigures(file, another.fingerprint()).layouts


def test_layouts_like_one_that_was_too_large_are_not_compiled_or_listed() -> None:
    """Those whose program would be too large if it exceeded the formula by as much."""
    request, entries = eight_gpus()
    first, usable = entries[0], request.case.usable_gib
    cache = CompiledFigures()
    cache.add(first.choice, {"fits": False, "peak_gib": 2 * first.peak / 2**30, "step_seconds": 1.0})
    tight = [entry for entry in entries if entry.choice.family == first.choice.family]
    assert {*tight} - {*likely(request, cache, entries)} == {e for e in tight if 2 * e.peak > usable * 2**30}
    assert {*entries} - {*tight} <= {*likely(request, cache, entries)}


def test_nothing_is_recommended_if_no_compiled_layout_fits() -> None:
    """The message has each of them with its size or the compiler's error, and says what to change."""
    fixed = {"tensor": 1, "pipeline": 1, "context": 1, "data_sharding": "fsdp", "micro_size": 1}
    request, answers = task("llama3_8b", 8, **fixed), iter([{"error": "no such kernel"}])

    def compiled(case: Case) -> dict[str, Any]:
        return {"fits": False} | next(answers, {"peak_gib": 80.25, "step_seconds": 1.0})

    with pytest.raises(UserError) as refused:
        find_best(request, CompiledFigures(), 1, compiled)
    first, *layouts, advice = str(refused.value).splitlines()
    assert first == f"of {len(layouts)} compiled layouts none fits the 72.9 GiB of h100:"
    assert layouts[0].endswith("): no such kernel") and all(line.endswith("): 80.2 GiB") for line in layouts[1:])
    assert advice == f"Give --compile={2 * len(layouts)}, or more devices."


@pytest.mark.parametrize(
    ("given", "order"),
    [
        (None, "plain pipelined slow"),  # the simplest within 3 %
        ("plain", "plain pipelined slow"),
        ("pipelined", "pipelined plain slow"),  # as given is the fastest, though not the simplest
        ("slow", "plain pipelined slow"),
    ],
)
def test_a_simpler_layout_is_taken_if_it_is_within_3_percent_and_no_slower_than_as_given(
    given: str | None, order: str
) -> None:
    _, entries = eight_gpus()
    plain = replace(entries[0].choice, tensor=1, sequence=False, pipeline=1, virtual_stages=1, data_sharding="zero1")
    pipelined, slow = replace(plain, pipeline=2, virtual_stages=4), replace(plain, micro_size=64)
    named = {
        "pipelined": RankedLayout(pipelined, 10.0, 1.0),
        "plain": RankedLayout(plain, 10.2, 1.0),
        "slow": RankedLayout(slow, 10.5, 1.0),
    }
    standing = Standing([*named.values()], current=None if given is None else named[given].choice)
    assert sorted(named.values(), key=standing.order) == [named[name] for name in order.split()]


def test_the_fastest_config_is_kept_as_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A simpler layout of GPT-3 175B is 2.2 % slower than the shipped one."""
    figures = search_json(tmp_path, "--parallel.data=2", config="gpt3.py:gpt3_175b", devices="h100:128")
    printed = capsys.readouterr().out
    assert "as given is already the fastest" in printed and "differs from" not in printed
    assert min(row["slower"] for row in figures["best"]) == figures["best"][0]["slower"] == 0
    assert figures["settings"] == ["parallel.data=2"] and " x 2 side by side" in printed
    search_json(tmp_path, "--parallel.tensor=2", config="llama3.py:llama3_8b", devices="h100:8")
    printed = capsys.readouterr().out
    assert "parallel.data_sharding: fsdp -> zero1" in printed and "batch.side_by_side: 1 -> 2" in printed


def test_segments_are_pipelined_and_strategies_of_context_are_tried() -> None:
    hybrid = task("nemotron_h_8b", 8, tensor=1, micro_size=1, data_sharding="zero1")
    assert max(pipeline for _, pipeline in hybrid.groups()) == 8
    request = task(
        "llama3_70b", 64, *STAGES_70B, tensor=8, pipeline=4, micro_size=1, context=2, virtual_stages=5, sequence=True
    )
    choices = [request.with_choice(entry.choice) for entry in explore(request, (8, 4)).best]
    assert {case.cfg.parallel.context_strategy for case in choices} != {"all_gather"}


def test_experts_in_chunks_are_tried_where_no_token_is_dropped() -> None:
    free = task("mixtral_8x7b", 64, tensor=1, pipeline=4)
    assert {choice.dispatch_chunks for choice in free.layouts((1, 4))} == {1, 4}
    choice = next(choice for choice in free.layouts((1, 4)) if choice.dispatch_chunks == 4)
    assert free.with_choice(choice).cfg.model.stack.pattern[0].mlp.dispatch.chunks == 4
    dropping = task("mixtral_8x7b", 64, "model.stack.pattern.0.mlp.dispatch.room=1.5", tensor=1, pipeline=4)
    assert {choice.dispatch_chunks for choice in dropping.layouts((1, 4))} == {1}
