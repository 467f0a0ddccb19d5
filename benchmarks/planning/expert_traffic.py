"""Bytes that mixtures of experts send with each way of dispatch, compiled, and the minimum."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import comb
from typing import Any

from megajax.compiled import gpus
from megajax.compiled.audit import audit
from megajax.compiled.gpus import GIB, MIB
from megajax.config import load
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.expert_facts import ExpertSharding
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import DispatchConfig, MoEConfig, SharedExpertConfig
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.planning.cost.estimate import Case, bytes_per_step
from megajax.planning.program.train_step import compile_train_step, timed

PER_NODE, TOKENS, LAYERS, PASSES = 8, 4096, 2, 5
NODES = (1, 2)
SHARED = SharedExpertConfig(mlp=GatedMLPConfig(ffn=2048))
MODELS = {
    "mixtral": (4096, MoEConfig(experts=8, top_k=2, expert=GatedMLPConfig(ffn=14336))),
    "deepseek_v3": (7168, MoEConfig(experts=256, top_k=8, expert=GatedMLPConfig(ffn=2048), shared=SHARED)),
}
WAYS = {
    "gather": DispatchConfig(way="gather"),
    "ragged": DispatchConfig(way="ragged"),
    "capacity, room 1.25": DispatchConfig(way="capacity", room=1.25),
    "gather, 4 chunks": DispatchConfig(way="gather", chunks=4),
}


def moe_traffic(*, only: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Bytes that mixtures of experts send on 8 and 16 virtual H100s with each way of dispatch, and the minimum.

    Needs the extra aot; no GPU. About 20 minutes. The models have two layers, one row of 4096 tokens per device, and
    full recomputation. Bytes are received by one device for one layer in a forward and a backward pass. The minimum
    sends each token once to each device of its experts, five times (tokens and outputs forward; their gradients, and
    tokens again, backward). Formulas are those of plans, `seconds` those of a layer by the cost model: of the program's
    collectives, and by formula. --only: programs whose name contains one of these.
    """
    gpus.prepare()
    figures: dict[str, Any] = {}
    for name, (hidden, moe) in MODELS.items():
        for (way, dispatch), nodes in product(WAYS.items(), NODES):
            program = f"{name} {way}" + f", {nodes} nodes" * (nodes > 1)
            if not only or any(word in program for word in only):
                figures[program] = measure_traffic(hidden, replace(moe, dispatch=dispatch), nodes * PER_NODE)
                print(f"{program}: {figures[program]}", flush=True)
                yield figures


def config(hidden: int, moe: MoEConfig, devices: int) -> Any:
    """A run of a small decoder with these experts over all devices."""
    cfg = load("llama3.py:debug", "precision.compute=bfloat16")
    block = BlockConfig(mixer=AttentionConfig(heads=32, kv_heads=8), mlp=moe)
    stack = StackConfig(pattern=(block,), repeats=LAYERS)
    return cfg.but(
        model=replace(cfg.model, hidden=hidden, sequence_length=TOKENS, stack=stack, recompute="full"),
        parallel=ParallelConfig(expert=devices),
        batch=replace(cfg.batch, global_size=2 * devices, micro_size=1),
    )


def least(hidden: int, moe: MoEConfig, devices: int) -> float:
    """Minimum MiB if tokens choose experts evenly."""
    elsewhere = moe.experts - moe.experts // devices
    reached = (devices - 1) * (1 - comb(elsewhere, moe.top_k) / comb(moe.experts, moe.top_k))
    return PASSES * reached * TOKENS * hidden * 2 / MIB


def measure_traffic(hidden: int, moe: MoEConfig, devices: int) -> dict[str, Any]:
    """Figures of a compiled train step."""
    if moe.experts % devices:
        moe = replace(moe, experts=devices)
    cfg = config(hidden, moe, devices)
    plan = compile_train_step(cfg, gpus.Cluster(gpus.GPUS["h100"], devices, PER_NODE))
    collectives = [c for c in plan.contents.collectives if c.groups.name == "expert" and c.place.path]
    received: dict[str, float] = {}
    for collective in collectives:
        runs = collective.place.runs(plan.unknown_trips) or 0
        share = (devices - 1) / devices * collective.bytes * runs / (plan.microbatches * LAYERS) / MIB
        received[collective.kind] = received.get(collective.kind, 0.0) + share
    compiled_bytes = audit(plan.text, plan.unknown_trips, plan.costs.over_mean).to_dict()["bytes_per_step"]
    traffic = compiled_bytes, bytes_per_step(Case(cfg, plan.cluster).estimate)
    large = [collective for collective in collectives if collective.bytes > MIB]
    facts, sharding = moe.expert_facts(hidden), ExpertSharding(expert=devices)
    estimate, passes = Case(cfg, plan.cluster).estimate, plan.microbatches * LAYERS
    seconds = (
        sum(row["seconds"] for row in timed(plan) if row["axis"] == "expert" and row["inside_loop"]),
        sum(row.seconds for row in estimate.traffic if row.axis == "expert" and "once a step" not in row.what),
    )
    formula = sum(t.elements * (t.forward + t.backward + t.recompute) for t in facts.collectives(TOKENS, sharding))
    return {
        "received_mib": {kind: round(mib, 1) for kind, mib in received.items()},
        "total_mib": round(sum(received.values()), 1),
        "formula_mib": round(formula * 2 * (devices - 1) / devices / MIB, 1),
        "least_mib": round(least(hidden, moe, devices), 1),
        "milliseconds": [round(1e3 * total / passes, 3) for total in seconds],
        "large_collectives": len(large),
        "beside_matmuls": sum(collective.overlapped for collective in large),
        "memory_traffic_gib": {name: [round(by_class[name] / GIB, 2) for by_class in traffic] for name in traffic[0]},
        "temporary_gib": round(plan.memory.temporary / GIB, 2),
        "formula_rows": round(facts.rows(TOKENS, sharding)),
        "kernels": plan.kernels,
    }
