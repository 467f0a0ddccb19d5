"""Memory use of compiled train steps: kernels, bytes by kind of work, loss chunks."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from benchmarks.planning.compiled_peaks import EIGHT, FSDP, SELECTIVE_4, STAGES_70B, STAGES_405B, TENSOR_4
from megajax.config import load
from megajax.config.errors import UserError
from megajax.mesh.config import ParallelConfig
from megajax.planning.compiled.audit import audit
from megajax.planning.compiled.devices import GIB, GPUS, prepare, read_cluster
from megajax.planning.cost.description import describe
from megajax.planning.cost.estimate import bytes_per_step, estimate
from megajax.planning.train_step import compile_train_step, exposed_by_axis, timed
from megajax.training.run_config import RunConfig

TIB = 2**40
CHUNKS = (1024, 2048, 4096, 8192)
RUNS = re.compile(r"runs_\d+_of_\d+/")


def program_audit(*, quick: bool = False) -> Iterator[dict[str, Any]]:
    """Memory use of compiled train steps: kernels, bytes by kind of work, loss chunks.

    Compiles gpt3.py:gpt3_1_3b and llama3.py for virtual H100s (extra aot; no GPU; two minutes). The compiler cannot
    time matmul kernels there, so its choice of them is not meaningful. Bytes are per device and step. --quick: only the
    first program. docs/benchmarks.md has the table.
    """
    prepare()
    selected = dict(list(programs().items())[: 1 if quick else None])
    figures: dict[str, Any] = {}
    for name, case in selected.items():
        figures[name] = audited(*case)
        yield figures
    if not quick:
        chunked_programs = ("gpt3_1_3b, h100:1", "llama3_8b, tensor 4, h100:8")
        chunks = {name: [chunked(*selected[name], chunk) for chunk in CHUNKS] for name in chunked_programs}
        yield figures | {"loss_chunk": chunks}


def programs() -> dict[str, tuple[RunConfig, str]]:
    """Name -> config and devices: also GPT-3 1.3B on one GPU with 8 microbatches, and two layers of Llama-3 8B."""
    gpt, llama = load("gpt3.py:gpt3_1_3b"), load("llama3.py")
    two_layers = llama.but(
        model=replace(llama.model, stack=replace(llama.model.stack, repeats=2)),
        parallel=ParallelConfig(),
        batch=replace(llama.batch, global_size=4, micro_size=1),
        data=replace(llama.data, isolate_documents=False),
    )
    one_gpu = gpt.but(batch=replace(gpt.batch, global_size=8 * gpt.batch.micro_size))
    return {
        "llama3_8b, 2 layers, h100:1": (two_layers, "h100:1"),
        "gpt3_1_3b, h100:1": (one_gpu, "h100:1"),
        "gpt3_1_3b, h100:8": (gpt, "h100:8"),
        "llama3_8b, h100:8": (llama, "h100:8"),
        "llama3_8b, tensor 4, h100:8": (load("llama3.py", *SELECTIVE_4), "h100:8"),
    }


def compiled(cfg: RunConfig, devices: str) -> tuple[Any, Any]:
    """(plan, audit)."""
    cluster, _ = read_cluster(devices)
    assert cluster is not None
    plan = compile_train_step(cfg, cluster)
    return plan, audit(plan.text, plan.unknown_trips, plan.costs.over_mean)


def audited(cfg: RunConfig, devices: str) -> dict[str, Any]:
    """All figures of one program."""
    plan, contents = compiled(cfg, devices)
    kernels = contents.kernels
    calls: dict[str, Any] = {}
    for kernel in kernels:
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
        "schedule": None if plan.scheduled is None else plan.scheduled.to_dict(),
        "exposed_by_axis": {axis: round(waits, 4) for axis, waits in exposed_by_axis(timed(plan)).items()},
        "largest_kernels": rows(kernels)[:12],
        "gib_by_work": {work: round(total / GIB, 2) for work, total in sorted(contents.by_work().items())},
    }


def rows(kernels: Iterable[Any]) -> list[dict[str, Any]]:
    """Kernels with the same work, result, origin and trip counts, summed into rows; most bytes per step first.

    loop: of the first kernel, because loops over the chunks of a stage have the same kernels; runs: per step, of all
    kernels; instructions: their number in the program; bytes_once: bytes if each ran once.
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


def chunked(cfg: RunConfig, devices: str, chunk: int) -> dict[str, Any]:
    """Memory and traffic with another loss_chunk."""
    plan, contents = compiled(cfg.but(model=replace(cfg.model, loss_chunk=chunk)), devices)
    return {
        "loss_chunk": chunk,
        "temporary_gib": round(plan.memory.temporary / GIB, 3),
        "all_gib": round(sum(contents.by_work().values()) / GIB, 1),
    }


TRAFFIC: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "llama3_8b": ("llama3.py", 8, ()),
    "llama3_8b, one row, selective": ("llama3.py", 8, FSDP),
    "llama3_8b, tensor 4": ("llama3.py", 8, SELECTIVE_4),
    "llama3_8b, tensor 4, none": ("llama3.py", 8, (*TENSOR_4, "model.recompute=none")),
    "gpt3_1_3b": ("gpt3.py:gpt3_1_3b", 8, ()),
    "gpt3_6_7b": ("gpt3.py:gpt3_6_7b", 64, ()),
    "llama3_70b": ("llama3.py:llama3_70b", 128, STAGES_70B),
    "llama3_70b, 20 chunks": (
        "llama3.py:llama3_70b",
        64,
        (*STAGES_70B, "parallel.tensor=4", "parallel.virtual_stages=20"),
    ),
    "gpt3_175b": ("gpt3.py:gpt3_175b", 128, EIGHT),
    "llama3_405b": ("llama3.py:llama3_405b", 1024, (*STAGES_405B, "parallel.virtual_stages=4")),
}
"""Config, number of H100s, settings."""


def traffic(*, only: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Bytes through memory by formula (planning/cost/device_work.py), compared with compiled programs, in TiB.

    Compiles TRAFFIC for virtual H100s (extra aot; no GPU; minutes each), and counts the bytes of its kernels without
    cuBLAS's workspace. Figures are per device and step. --only: cases by name.
    """
    if unknown := [name for name in only if name not in TRAFFIC]:
        raise UserError(f"unknown case {unknown[0]}: choose from {', '.join(TRAFFIC)}")
    prepare()
    print("TiB of formula / compiled; ratios of copies, elementwise, matmul, attention, collective")
    figures: dict[str, Any] = {}
    for name in only or TRAFFIC:
        config, gpus, settings = TRAFFIC[name]
        cfg: Any = load(config, *settings)
        _, contents = compiled(cfg, f"h100:{gpus}")
        classes = contents.by_class()
        for kind in ("total", "matmul"):
            classes[kind] -= contents.workspace()
        predicted = bytes_per_step(estimate(describe(cfg, GPUS["h100"], gpus)))
        ratio = {kind: round(predicted[kind] / size, 3) for kind, size in classes.items()}
        figures[name] = {
            "formula": {kind: round(size / TIB, 3) for kind, size in predicted.items()},
            "compiled": {kind: round(size / TIB, 3) for kind, size in classes.items()},
            "ratio": ratio,
        }
        total = f"{predicted['total'] / TIB:6.2f} /{classes['total'] / TIB:6.2f} = {ratio['total']:.2f}"
        print(f"{name:24}  {total}  {'  '.join(f'{ratio[kind]:9.2f}' for kind in list(ratio)[1:])}", flush=True)
        yield figures
