"""Plans of rows sharded over `context`: the traffic of each strategy by hand, by formula and as compiled."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from descriptions import llama3_8b

from megajax.config import load
from megajax.mesh.config import ContextStrategy, ParallelConfig
from megajax.models.presets.deepseek import deepseek
from megajax.models.presets.hybrids.mamba_models import mamba2
from megajax.models.presets.llama import llama3
from megajax.planning.compiled.devices import GIB, GPUS, MIB
from megajax.planning.compiled.hlo import CompiledProgram, Groups, Message
from megajax.planning.compiled.instruction_times import InstructionTimes
from megajax.planning.cost.description import Description, describe
from megajax.planning.cost.estimate import Estimate, estimate
from megajax.planning.cost.traffic import Traffic

ROOT = Path(__file__).parents[2]
FIGURES: dict[str, Any] = json.loads((ROOT / "benchmarks/results/context.json").read_text("utf-8"))["figures"]
"""What `python -m benchmarks context` measured."""
T, C = 131_072, 8
KEYS = T // C * 2 * 4 * 128 * 2
"""Bytes of keys and values of 4 heads of 128 on a device of context 8, in bfloat16."""


def run(strategy: ContextStrategy, **changes: Any) -> Description:
    """Llama-3 8B, rows of 131,072 tokens, context 8 x tensor 2; a step is one microbatch."""
    layout = ParallelConfig(context=C, tensor=2, data=1, sequence=True, context_strategy=strategy)
    model = replace(llama3("8b", sequence_length=T), recompute=("norm", "mlp", "activation"))
    return llama3_8b(layout, 1, **{"model": model} | changes)


def rows(step: Estimate) -> list[Traffic]:
    return [row for row in step.traffic if row.axis == "context"]


def sent(step: Estimate, back: bool) -> float:
    """Bytes that a device sends for a layer, in the forward or in the backward pass."""
    total = 0.0
    for row in rows(step):
        devices = 2 if row.kind == "all-to-all" and step.run.parallel.exchanging() == 2 else C
        share = 1 if row.kind == "collective-permute" else (devices - 1) / devices
        total += row.bytes * share * (row.what.endswith("backward") == back)
    return total / 32


QUERIES = T // C * 16 * 128 * 2
BY_HAND: dict[ContextStrategy, tuple[float, float]] = {
    # Whole rows of keys and values; again, and their gradients.
    "all_gather": (7 * KEYS, 14 * KEYS),
    # Seven steps; again with gradients in float32, which arrive with an eighth in bfloat16.
    "ring": (7 * KEYS, 7 * KEYS + 14 * KEYS + KEYS),
    # Queries, outputs, and two copies of keys and values, whose four heads eight devices exchange; then all of these
    # and their gradients.
    "all_to_all": (7 / 8 * (2 * QUERIES + 2 * KEYS), 7 / 8 * 2 * (2 * QUERIES + 2 * KEYS)),
    # Halves between neighbours, and a ring of four pairs.
    "ring+all_to_all": (
        1 / 2 * (2 * QUERIES + KEYS) + 3 * KEYS,
        1 / 2 * 2 * (2 * QUERIES + KEYS) + 3 * KEYS + 6 * KEYS + KEYS,
    ),
}


@pytest.mark.parametrize("strategy", BY_HAND)
def test_a_strategy_sends_the_bytes_it_needs(strategy: ContextStrategy) -> None:
    step = estimate(run(strategy))
    assert (sent(step, False), sent(step, True)) == pytest.approx(BY_HAND[strategy], rel=1e-9)
    assert KEYS == 32 * MIB and QUERIES == 64 * MIB
    assert sum(min(row.seconds, row.hidden) for row in step.traffic) == pytest.approx(step.hidden_seconds)


def test_traffic_that_kernels_hide() -> None:
    """All of a ring; of gathers those of the backward pass; of exchanges a quarter of those."""
    device = replace(GPUS["h100"], contention=1e-9)
    exposed = {
        name: {row.what: round(row.exposed / row.seconds, 6) for row in rows(estimate(run(name, device=device)))}
        for name in BY_HAND
    }
    assert not any(exposed["ring"].values())
    gathers = exposed["all_gather"]
    assert gathers["keys and values, forward"] == 1 and gathers["keys and values, backward"] == 0
    assert exposed["all_to_all"] == pytest.approx({"heads, forward": 1, "heads, backward": 3 / 4})
    # A ring hides at most the time of its kernels: with short rows they take less than the transfers.
    short = replace(run("ring"), model=replace(run("ring").model, sequence_length=4096))
    assert sum(row.exposed for row in rows(estimate(short))) > 0


def test_a_ring_in_a_pipeline_sends_by_pairs() -> None:
    """Twice the bytes of permutes, once with two devices: see `from_before` of megajax.kernels.context.collectives."""
    for devices, times in ((2, 1), (8, 2)):
        layout = ParallelConfig(context=devices, data=1, context_strategy="ring")
        alone, staged = (estimate(replace(run("ring"), parallel=replace(layout, pipeline=n))) for n in (1, 2))
        assert {row.kind for row in rows(alone)} == {"collective-permute"}
        assert {row.kind for row in rows(staged)} == {"all-gather"}
        # A gather of two counts with its whole side, and a stage has half of the layers.
        assert sum(row.bytes for row in rows(staged)) == pytest.approx(times * sum(row.bytes for row in rows(alone)))


def test_recomputed_attention_sends_again() -> None:
    full = replace(run("ring"), model=replace(run("ring").model, recompute="full"))
    repeated = sum(row.bytes for row in rows(estimate(full))) - sum(row.bytes for row in rows(estimate(run("ring"))))
    assert repeated == pytest.approx(32 * 7 * KEYS)


def test_only_gathered_keys_take_memory() -> None:
    working = {name: estimate(run(name)).memory.working for name in BY_HAND}
    # Recomputed gate, up and activation with their gradients, against the backward pass of attention: gradients of
    # queries, outputs, keys and values, those of the MLP, whose weights wait, and whole rows of keys and values four
    # times.
    mlp, attention = 6 * 7168, 2 * 2048 + 2 * 512 + 3 * 7168
    assert working["all_gather"] - working["ring"] == pytest.approx(4 * C * KEYS - (mlp - attention) * T // C * 2)
    assert working["ring"] == working["all_to_all"]
    parts = estimate(run("ring"))
    assert parts.run.towers[0].tokens == T // C
    whole = estimate(replace(run("ring"), parallel=replace(parts.run.parallel, context=1, data=8)))
    assert parts.memory.activations == pytest.approx(whole.memory.activations / C)


def test_all_heads_of_latent_attention_are_sent_and_states_are_no_keys() -> None:
    layout = ParallelConfig(context=4, data=1)
    tower = llama3_8b(layout, 1, model=deepseek("v2-lite")).towers[-1]
    (mixer,) = {block.mixers[0] for block in tower.blocks}
    assert tower.attention_bytes[1] == tower.tokens * 2 * 16 * (128 + 64 + 128) * len(tower.blocks)
    assert mixer.heads == 16
    tower = llama3_8b(layout, 1, model=mamba2("130m")).towers[-1]
    assert tower.attention_bytes[1] == 0


@pytest.mark.parametrize("case", FIGURES["programs"])
def test_recipes_fit_and_send_the_least_bytes(case: str) -> None:
    """Compiled programs with Pallas are up to 16 % above the formulas, as those of 1M tokens are."""
    recipe, gpus, strategy = case.split(", ")
    one = FIGURES["programs"][case]
    assert one["fits"] and one["peak_gib"] + one["workspace_gib"] <= one["usable_gib"]
    assert one["sent_mib_a_layer"] == pytest.approx(one["least_mib_a_layer"], rel=0.01)
    cfg: Any = load(f"{ROOT}/configs/llama3.py:{recipe}", f"parallel.context_strategy={strategy}")
    step = estimate(describe(cfg, GPUS["h100"], int(gpus)))
    assert step.memory.peak / GIB == pytest.approx(one["formula_peak_gib"], abs=0.01), "run benchmarks context"
    assert step.memory.peak / GIB == pytest.approx(one["peak_gib"], rel=0.16)
    assert step.step_seconds == pytest.approx(one["step_seconds"], rel=0.06)


def test_neighbours_of_a_part_of_an_axis_share_a_node() -> None:
    """Context 8 x tensor 2 spans two nodes of 8; groups of two of `context` do not."""

    def seconds(groups: Groups) -> float:
        one = Message("all-to-all", groups, 256 * MIB, 1, 0)
        mesh = {"pipeline": 1, "data": 1, "expert": 1, "context": 8, "tensor": 2}
        return InstructionTimes(CompiledProgram({}, ""), mesh, GPUS["h100"], 8).of_message(one)

    whole, part = Groups(("context",), 8), Groups(("context",), 2, whole=False)
    assert seconds(part) < seconds(whole) / 3
    assert seconds(part) == pytest.approx(128 * MIB / (GPUS["h100"].nvlink * GPUS["h100"].nvlink_share), rel=0.1)
