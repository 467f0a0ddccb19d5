"""Bytes that mixtures of experts send on 8 virtual H100s with each way of dispatch, compiled, and the minimum.

Run:  nice python benchmarks/moe_traffic.py             (needs the extra aot; no GPU. About ten minutes)
      python benchmarks/moe_traffic.py "mixtral gather"     only programs whose name contains this

The models have two layers, one row of 4096 tokens per device, and full recomputation. Bytes are received by one device
for one layer in a forward and a backward pass. The minimum sends each token once to each device of its experts, five
times (tokens and outputs forward; their gradients, and tokens again, backward). Formulas are those of plans.

Writes benchmarks/results/moe_traffic.json; docs/moe.md and docs/planning.md show it.
"""

import json
from dataclasses import replace
from math import comb
from typing import Any

import outcome

from megajax.command_line.parser import front_door
from megajax.config import load
from megajax.config.builds import resolve
from megajax.layers.configs import AttentionConfig, BlockConfig, GatedMLPConfig, StackConfig
from megajax.layers.moe.config import DispatchConfig, MoEConfig, SharedExpertConfig
from megajax.layers.moe.facts import ExpertSharding
from megajax.mesh.config import ParallelConfig
from megajax.planning import virtual_devices as devices
from megajax.planning.cost.estimate import Case, bytes_per_step
from megajax.planning.program.audit import audit
from megajax.planning.virtual_devices import MIB

DEVICES, TOKENS, LAYERS, PASSES = 8, 4096, 2, 5
MODELS = {
    "mixtral": (4096, MoEConfig(experts=8, top_k=2, expert=GatedMLPConfig(ffn=14336))),
    "deepseek_v3": (
        7168,
        MoEConfig(
            experts=256,
            top_k=8,
            expert=GatedMLPConfig(ffn=2048),
            shared=SharedExpertConfig(mlp=GatedMLPConfig(ffn=2048)),
        ),
    ),
}
WAYS = {
    "gather": DispatchConfig(way="gather"),
    "ragged": DispatchConfig(way="ragged"),
    "capacity, room 1.25": DispatchConfig(way="capacity", room=1.25),
    "gather, 4 chunks": DispatchConfig(way="gather", chunks=4),
}


def config(hidden: int, moe: MoEConfig) -> Any:
    """A run of a small decoder with these experts."""
    cfg = load("llama3.py:debug", "precision.compute=bfloat16")
    block = BlockConfig(mixer=AttentionConfig(heads=32, kv_heads=8), mlp=moe)
    stack = StackConfig(pattern=(block,), repeats=LAYERS)
    model = replace(cfg.model, hidden=hidden, sequence_length=TOKENS, stack=stack, recompute="full")
    return cfg.but(
        model=model,
        parallel=ParallelConfig(expert=DEVICES),
        batch=replace(cfg.batch, global_size=2 * DEVICES, micro_size=1),
    )


def least(hidden: int, moe: MoEConfig) -> float:
    """MiB, if tokens choose experts evenly."""
    elsewhere = moe.experts - moe.experts // DEVICES
    reached = (DEVICES - 1) * (1 - comb(elsewhere, moe.top_k) / comb(moe.experts, moe.top_k))
    return PASSES * reached * TOKENS * hidden * 2 / MIB


def measure_traffic(hidden: int, moe: MoEConfig) -> dict[str, Any]:
    """Of a compiled train step."""
    cfg = config(hidden, moe)
    cluster = devices.Cluster(devices.GPUS["h100"], DEVICES, 8)
    plan = resolve("megajax.planning.program.train_step:compile_train_step")(cfg, cluster)
    rows = [
        collective
        for collective in plan.contents.collectives
        if collective.groups.name == "expert" and collective.place.path
    ]
    times = plan.microbatches * LAYERS
    received: dict[str, float] = {}
    for collective in rows:
        runs = collective.place.runs(plan.unknown_trips) or 0
        share = (DEVICES - 1) / DEVICES * collective.bytes * runs / times / MIB
        received[collective.kind] = received.get(collective.kind, 0.0) + share
    step = Case(cfg, plan.cluster).estimate
    traffic = audit(plan.text, plan.unknown_trips).to_dict()["bytes_per_step"], bytes_per_step(step)
    large = [collective for collective in rows if collective.bytes > MIB]
    facts = moe.expert_facts(hidden)
    transfers = facts.collectives(TOKENS, ExpertSharding(expert=DEVICES))
    formula = sum(
        transfer.elements * (transfer.forward + transfer.backward + transfer.recompute) for transfer in transfers
    )
    return {
        "received_mib": {kind: round(mib, 1) for kind, mib in received.items()},
        "total_mib": round(sum(received.values()), 1),
        "formula_mib": round(formula * 2 * (DEVICES - 1) / DEVICES / MIB, 1),
        "least_mib": round(least(hidden, moe), 1),
        "large_collectives": len(large),
        "beside_matmuls": sum(collective.overlapped for collective in large),
        "memory_traffic_gib": {name: [round(by_class[name] / 2**30, 2) for by_class in traffic] for name in traffic[0]},
        "temporary_gib": round(plan.memory.temporary / 2**30, 2),
        "formula_rows": round(facts.rows(TOKENS, ExpertSharding(expert=DEVICES))),
        "kernels": plan.kernels,
    }


def main(argv: list[str]) -> None:
    devices.prepare()
    path = outcome.RESULTS / "moe_traffic.json"
    figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, (hidden, moe) in MODELS.items():
        for way, dispatch in WAYS.items():
            if not argv or any(word in f"{name} {way}" for word in argv):
                figures[f"{name} {way}"] = measure_traffic(hidden, replace(moe, dispatch=dispatch))
                print(f"{name} {way}: {figures[f'{name} {way}']}", flush=True)
                path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    front_door(main)
