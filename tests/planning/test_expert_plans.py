"""Plans of mixtures of experts by formula: memory of a device, rows of buffers, traffic, search."""

from dataclasses import replace
from typing import Any

import pytest

from megajax.config import load
from megajax.layers.block.config import BlockConfig
from megajax.layers.expert_facts import ExpertSharding
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import DispatchConfig, MoEConfig, RouterConfig, SharedExpertConfig
from megajax.layers.moe.dispatch import Dispatch
from megajax.layers.stack.config import SegmentsConfig, StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.facts import count_flops
from megajax.planning.compiled.devices import GPUS, Cluster
from megajax.planning.cost.description import Description, describe
from megajax.planning.cost.estimate import Case, estimate
from megajax.planning.cost.memory import footprint
from megajax.planning.search import Task
from megajax.planning.show import plan_report

EXPERTS, TOP_K, HIDDEN, FFN, TOKENS = 8, 2, 256, 512, 1024


def config(*, segments: bool = False, parallel: ParallelConfig | None = None, **dispatch: Any) -> Any:
    """A model of 4 layers with experts, after 2 without experts if it has segments."""
    cfg = load("llama3.py:debug", "precision.compute=bfloat16")
    parts = {"expert": GatedMLPConfig(ffn=FFN), "router": RouterConfig(), "dispatch": DispatchConfig(**dispatch)}
    moe = MoEConfig(experts=EXPERTS, top_k=TOP_K, **parts)
    (block,) = cfg.model.stack.pattern
    assert isinstance(block, BlockConfig)
    stack = StackConfig(pattern=(replace(block, mlp=moe),), repeats=4)
    if segments:
        stack = SegmentsConfig(segments=(StackConfig(pattern=(block,), repeats=2), stack))
    model = replace(cfg.model, hidden=HIDDEN, sequence_length=TOKENS, stack=stack)
    return cfg.but(model=model, parallel=parallel or ParallelConfig(), batch=replace(cfg.batch, global_size=64))


def described(parallel: ParallelConfig, **settings: Any) -> Description:
    return describe(config(parallel=parallel, **settings), GPUS["h100"], 16)


LAYOUTS = {
    "expert": ParallelConfig(expert=4),
    "all experts": ParallelConfig(expert=8),
    "fsdp": ParallelConfig(expert=4, data_sharding="fsdp"),
    "whole": ParallelConfig(expert=2, tensor=2, sequence=True, expert_tensor="whole"),
    "cut": ParallelConfig(expert=4, tensor=2, sequence=True),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("segments", [False, True])
def test_all_devices_together_hold_every_weight_once(name: str, segments: bool) -> None:
    run = described(LAYOUTS[name], segments=segments)
    count = run.model.parameter_count().total
    padding = (run.model.head_facts().columns - run.model.vocabulary_size) * HIDDEN  # type: ignore[attr-defined]
    # Gains and the router are replicated over `tensor`.
    vectors = sum(tower.vectors for tower in run.towers) + HIDDEN * EXPERTS * 4
    copies = (run.parallel.tensor - 1) * (vectors + HIDDEN)
    matrices = footprint(run).parameters / 4 * run.devices
    assert matrices == pytest.approx(count + 2 * padding + copies, rel=5e-3)


def test_a_device_holds_its_own_experts_in_compute_dtype_and_their_gradients() -> None:
    one, eight = (footprint(described(ParallelConfig(expert=size))) for size in (1, 8))
    experts = 4 * EXPERTS * 3 * HIDDEN * FFN
    assert one.weights - eight.weights == 2 * experts * 7 / 8
    assert one.gradients - eight.gradients == 4 * experts * 7 / 8


@pytest.mark.parametrize("room", [None, 1.5])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_equal_those_of_the_dispatcher(name: str, room: float | None) -> None:
    parallel = LAYOUTS[name]
    moe = config(parallel=parallel, room=room).model.stack.pattern[0].mlp
    facts, spread = moe.expert_facts(HIDDEN), ExpertSharding.of(parallel)
    buffer = Dispatch(experts=EXPERTS, top_k=TOP_K, room=room)
    # As `gather` does, for the tokens of all devices.
    tokens, local = TOKENS * spread.expert, EXPERTS // spread.devices
    rows = buffer.rows(tokens * TOP_K / spread.devices, tokens * min(TOP_K, local))
    assert rows - 8 < facts.rows(TOKENS, spread) <= rows
    assert facts.mean_rows(TOKENS, spread) == tokens * TOP_K / spread.devices


def test_traffic_equals_that_of_compiled_programs() -> None:
    """The table in docs/moe.md: five times all tokens by gather, five times k of n - 1 by ragged."""
    actual = {}
    for way in ("gather", "ragged", "capacity"):
        run = described(ParallelConfig(expert=8), way=way, room=1.25)
        rows = [row for row in estimate(run).traffic if "expert" in row.axis and "once a step" not in row.what]
        layers = run.microbatches * 4
        actual[way] = sum(row.bytes for row in rows) / layers / 2 / HIDDEN / TOKENS
        assert {row.axis for row in rows} == {"expert"}
    assert actual == {"gather": 5 * 8, "ragged": 5 * TOP_K, "capacity": 5 * TOP_K * 1.25}


def hidden(recompute: Any = "full", **settings: Any) -> dict[str, list[float]]:
    """Kind and pass -> shares of exchanges that are hidden, with layers as wide as Mixtral's."""
    cfg = config(parallel=ParallelConfig(expert=8), **settings)
    (block,) = cfg.model.stack.pattern
    wide = replace(block, mlp=replace(block.mlp, expert=GatedMLPConfig(ffn=14336)))
    stack = replace(cfg.model.stack, pattern=(wide,))
    model = replace(cfg.model, hidden=4096, sequence_length=4096, stack=stack, recompute=recompute)
    run = describe(cfg.but(model=model), GPUS["h100"], 16)
    shares: dict[str, list[float]] = {}
    for row in estimate(run).traffic:
        if "experts, " in row.what:
            shares.setdefault(f"{row.kind} {row.what.split()[-1]}", []).append(row.hidden / row.seconds)
    return shares


def test_exchanges_are_hidden_by_kernels_that_do_not_wait_for_them() -> None:
    """So it is in compiled programs, see docs/moe.md."""
    light, full = hidden("selective"), hidden()
    # The last exchange beside gradients of matrices; those before only beside what is computed again.
    assert light["reduce-scatter backward"] == [1.0] and light["all-gather backward"] == [0.0]
    assert full["reduce-scatter backward"] == [1.0] and full["all-gather backward"][0] > 0.1
    # In the forward pass, copies of saved tensors: more with light recomputation.
    assert 0 < full["all-gather forward"][0] < light["all-gather forward"][0] <= 1
    assert full["reduce-scatter forward"] == [0.0]
    one_by_one = hidden(chunks=4)
    assert one_by_one["all-gather forward"] == [0.0] == one_by_one["all-gather backward"]
    assert all(share == 0.0 for shares in hidden(way="ragged").values() for share in shares)
    # Of three exchanges of a backward pass one is the last.
    assert hidden("selective", way="capacity", room=1.25)["all-to-all backward"][0] == pytest.approx(1 / 3)


def test_a_shared_expert_runs_beside_the_exchanges_of_a_forward_pass() -> None:
    def exposed(ffn: int, tensor: int) -> float:
        cfg = config(parallel=ParallelConfig(expert=4, tensor=tensor, sequence=tensor > 1))
        (block,) = cfg.model.stack.pattern
        shared = SharedExpertConfig(mlp=GatedMLPConfig(ffn=ffn))
        stack = replace(cfg.model.stack, pattern=(replace(block, mlp=replace(block.mlp, shared=shared)),))
        run = describe(cfg.but(model=replace(cfg.model, stack=stack, recompute="full")), GPUS["h100"], 16)
        return sum(row.seconds - row.hidden for row in estimate(run).traffic if row.what == "experts, forward")

    assert exposed(16 * FFN, 1) < 0.8 * exposed(FFN, 1)
    # Cut along the sequence, its own gather waits behind the exchange.
    assert exposed(16 * FFN, 2) == pytest.approx(exposed(FFN, 2))


def test_auto_is_never_ragged_and_the_plan_gives_the_reason() -> None:
    facts = config().model.stack.pattern[0].mlp.expert_facts(HIDDEN)
    assert [facts.way_on(devices) for devices in (1, 2, 4, 8)] == ["gather"] * 4
    notes = [facts.way_note(ExpertSharding(expert=devices), on_cpu=False) for devices in (1, 2, 4, 8)]
    assert ["one-shot kernel" in note for note in notes] == [False, False, True, True]
    report = plan_report(estimate(described(ParallelConfig(expert=8)))).text()
    assert "dispatch.way=auto is not ragged, which sends fewer bytes" in report.replace("\n", " ")


def test_the_plan_states_the_worst_case() -> None:
    free = plan_report(estimate(described(ParallelConfig(expert=8)))).text()
    assert "1 of 8 experts on a device, gather; room for 8,192 rows, 4 x the mean: the worst case" in free
    bounded = plan_report(estimate(described(ParallelConfig(expert=8), room=1.5))).text()
    assert "room for 3,072 rows, 1.5 x the mean: dropped beyond that, the worst case is 8,192" in bounded


def test_buffers_for_all_tokens_take_the_memory_that_room_and_chunks_save() -> None:
    def peak(**dispatch: Any) -> float:
        return footprint(described(ParallelConfig(expert=8), **dispatch)).peak

    assert peak(chunks=4) < peak() and peak(room=1.5) < peak()


def task(cfg: Any, **fixed: Any) -> Task:
    return Task(Case(cfg, Cluster(GPUS["h100"], 16, 8)), fixed)


def test_a_search_tries_numbers_of_devices_that_divide_the_experts() -> None:
    def sizes(cfg: Any, **fixed: Any) -> set[tuple[int, int]]:
        searched = task(cfg, **fixed)
        layouts = [layout for group in searched.groups() if group == (1, 1) for layout in searched.layouts(group)]
        return {(choice.data, choice.expert) for choice in layouts}

    assert sizes(config()) == {(16, 1), (8, 2), (4, 4), (2, 8)}
    assert sizes(config(), expert=4) == {(4, 4)} and sizes(config(), data=2) >= {(2, 8)}
    assert sizes(load("llama3.py:debug")) == {(16, 1)}
    searched = task(config())
    choice = next(one for group in searched.groups() for one in searched.layouts(group) if one.expert == 8)
    assert searched.with_choice(choice).cfg.parallel.expert == 8 and "expert 8" in choice.layout


def test_up_projections_of_latents_are_not_sharded_at_rest() -> None:
    """A program for 1024 H100s, compiled with jax 0.12.0.1, has 15.07 GiB of weights; 1/1024 of all is 2.5."""
    layout = ("pipeline=1", "expert=64", "tensor=1", "sequence=false", "data_sharding=fsdp")
    cfg: Any = load("deepseek.py:deepseek_v3", *[f"parallel.{setting}" for setting in layout])
    actual = footprint(describe(cfg, GPUS["h100"], 1024))
    assert actual.parameters / 2**30 == pytest.approx(15.07, rel=0.01)
    assert actual.optimizer / 2**30 == pytest.approx(30.13, rel=0.01)


def test_operations_equal_those_that_Megatron_counts() -> None:
    """The work of the experts that a token passes, and of Mamba-2, is written out with the sizes of the models."""
    mixtral: Any = load("mixtral.py:mixtral_8x7b").model
    attention, core, experts = 4096 * (2 * 4096 + 2 * 1024), 4096 * 4096, 2 * 3 * 4096 * 14336
    counted = count_flops(mixtral)
    assert counted.megatron == 32 * 6 * (attention + core + experts) + 6 * 4096 * 32000
    # The router, and the pair of each query with its own key.
    assert counted.causal - counted.megatron == 32 * 6 * (4096 * 8 + 4096)
    mamba: Any = load("mamba2.py:mamba2_2_7b").model
    width, inner, state, heads = 2560, 5120, 128, 80
    layer = 2 * width * (2 * inner + 2 * state + heads) + 7 * inner * state + 2 * inner * width
    counted = count_flops(mamba)
    assert counted.causal == counted.full == counted.megatron == 64 * 3 * layer + 6 * width * mamba.head_facts().columns
