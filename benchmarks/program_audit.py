"""Memory use of compiled train steps: kernels, bytes by kind of work, copies, float32 arrays, loss chunks.

Run:  python benchmarks/program_audit.py [--quick]            (needs the extra aot; no GPU. About two minutes)

Compiles gpt3.py:gpt3_1_3b and llama3.py for virtual H100s. The compiler cannot time matmul kernels there, so its choice
of them is not meaningful. Bytes are per device and step (counted as in planning/program/audit.py). Writes
benchmarks/results/program_audit.json; docs/speed.md describes the conclusions.
"""

import argparse
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any

import outcome

from megajax.command_line.parser import front_door
from megajax.config import load
from megajax.config.builds import resolve
from megajax.mesh.config import ParallelConfig
from megajax.planning.program.hlo import arrays
from megajax.planning.virtual_devices import prepare, read_cluster
from megajax.training.run_config import RunConfig

GIB, MIB = 2**30, 2**20
CHUNKS = (1024, 2048, 4096, 8192)

RUNS = re.compile(r"runs_\d+_of_\d+/")


def gpt() -> RunConfig:
    """GPT-3 1.3B, on one GPU with as many rows as it takes in 8 microbatches."""
    cfg = load("gpt3.py:gpt3_1_3b")
    return cfg.but(batch=replace(cfg.batch, global_size=8 * cfg.batch.micro_size))


def two_layers() -> RunConfig:
    """Llama-3 8B cut to 2 layers on one GPU, rows not cut into documents."""
    cfg = load("llama3.py")
    stack = replace(cfg.model.stack, repeats=2)
    return cfg.but(
        model=replace(cfg.model, stack=stack),
        parallel=ParallelConfig(),
        batch=replace(cfg.batch, global_size=4),
        data=replace(cfg.data, isolate_documents=False),
    )


def programs() -> dict[str, tuple[RunConfig, str]]:
    """Name -> config and devices."""
    return {
        "llama3_8b, 2 layers, h100:1": (two_layers(), "h100:1"),
        "gpt3_1_3b, h100:1": (gpt(), "h100:1"),
        "gpt3_1_3b, h100:8": (load("gpt3.py:gpt3_1_3b"), "h100:8"),
        "llama3_8b, h100:8": (load("llama3.py"), "h100:8"),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the first program")
    quick = parser.parse_args(argv).quick
    prepare()
    selected = dict(list(programs().items())[: 1 if quick else None])
    figures: dict[str, Any] = {name: audited(*case) for name, case in selected.items()}
    if not quick:
        figures["loss_chunk"] = {
            name: [chunked(selected[name], chunk) for chunk in CHUNKS]
            for name in ("gpt3_1_3b, h100:1", "llama3_8b, h100:8")
        }
    outcome.write("program_audit", figures)


def compiled(cfg: RunConfig, devices: str) -> tuple[Any, Any]:
    """(plan, audit)."""
    plan = resolve("megajax.planning.program.train_step:compile_train_step")(cfg, read_cluster(devices)[0])
    return plan, resolve("megajax.planning.program.audit:audit")(plan.text, plan.unknown_trips)


def audited(cfg: RunConfig, devices: str) -> dict[str, Any]:
    """All figures of one program."""
    plan, contents = compiled(cfg, devices)
    tokens = cfg.batch.micro_size * cfg.model.sequence_length
    most = tokens // plan.mesh["tensor"] * cfg.model.hidden
    wide = [
        kernel for kernel in contents.kernels if any(kind == "f32" and n >= most for kind, n in arrays(kernel.shape))
    ]
    moved = [kernel for kernel in contents.kernels if kernel.work in ("fill", "move")]
    calls: dict[str, Any] = {}
    for kernel in contents.kernels:
        if kernel.work == "attention" and kernel.target is not None:
            times = calls.setdefault(kernel.target, {"runs": 0, "in_branch": kernel.place.conditional})
            times["runs"] += kernel.place.runs()
    return {
        "kernels": plan.kernels,
        "temporary_gib": round(plan.memory.temporary / GIB, 3),
        "peak_gib": round(plan.memory.peak / GIB, 3),
        "state_bytes": plan.memory.parameters + plan.memory.optimizer,
        "aliased_bytes": plan.memory.aliased,
        "attention_calls": calls,
        **contents.to_dict(),
        "largest_kernels": rows(contents.kernels)[:12],
        "gib_by_work": {work: round(total / GIB, 2) for work, total in sorted(contents.by_work().items())},
        "gib_by_loop": by_loop(contents.kernels),
        "moved": short(rows(moved), 20),
        "computed": short(rows(kernel for kernel in contents.kernels if kernel.work in ("compute", "cast")), 20),
        "float32_in_loops": short(rows(kernel for kernel in wide if kernel.place.path), 12),
        "largest": [
            {
                "mib": round(kernel.bytes_written / MIB, 1),
                "result": kernel.shape[:90],
                "loop": kernel.place.name,
                "work": kernel.work,
            }
            for kernel in sorted(contents.kernels, key=lambda kernel: -kernel.bytes_written)[:10]
        ],
    }


def rows(kernels: Iterable[Any]) -> list[dict[str, Any]]:
    """Kernels with the same work, result, origin and trip counts, summed: rows of a table, most bytes per step first.

    loop: of the first, as loops over the chunks of a stage have the same kernels; runs: per step, of all of them;
    instructions: their number in the program; bytes_once: each run once.
    """

    def key(kernel: Any) -> tuple:
        trips = tuple(-1 if trips is None else trips for trips in kernel.place.trips)
        return trips, kernel.work, kernel.shape, RUNS.sub("", kernel.origin)

    table = []
    for (_, work, shape, origin), group in groupby(sorted(kernels, key=key), key):
        group_kernels = list(group)
        table.append(
            {
                "loop": group_kernels[0].place.name,
                "runs": round(sum(kernel.rounds * kernel.share for kernel in group_kernels)),
                "work": work,
                "result": shape,
                "instructions": len(group_kernels),
                "bytes_once": sum(kernel.bytes for kernel in group_kernels),
                "bytes": sum(kernel.total for kernel in group_kernels),
                "origin": origin,
            }
        )
    return sorted(table, key=lambda row: -row["bytes"])


def by_loop(kernels: Iterable[Any]) -> dict[str, dict[str, float]]:
    """Loop -> kind of work -> GiB per step."""
    sums: dict[str, dict[str, float]] = {}
    for kernel in kernels:
        works = sums.setdefault(kernel.place.name or "step", {})
        works[kernel.work] = works.get(kernel.work, 0) + kernel.total / GIB
    return {loop: {work: round(total, 2) for work, total in works.items()} for loop, works in sums.items()}


def short(table: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """The first rows, with figures for people."""
    return [
        {
            "loop": row["loop"] or "step",
            "runs": row["runs"],
            "gib": round(row["bytes"] / GIB, 2),
            "mib_once": round(row["bytes_once"] / MIB, 1),
            "instructions": row["instructions"],
            "result": row["result"][:90],
            "origin": row["origin"][-90:],
        }
        for row in table[:most]
    ]


def chunked(case: tuple[RunConfig, str], chunk: int) -> dict[str, Any]:
    """Memory and traffic with another loss_chunk."""
    cfg, devices = case
    plan, contents = compiled(cfg.but(model=replace(cfg.model, loss_chunk=chunk)), devices)
    loops = {kernel.place.path for kernel in contents.kernels if "cd,vd->cv" in kernel.origin}
    loss = sum(kernel.total for kernel in contents.kernels if kernel.place.path in loops)
    return {
        "loss_chunk": chunk,
        "temporary_gib": round(plan.memory.temporary / GIB, 3),
        "loss_gib": round(loss / GIB, 1),
        "all_gib": round(sum(contents.by_work().values()) / GIB, 1),
    }


if __name__ == "__main__":
    front_door(main)
