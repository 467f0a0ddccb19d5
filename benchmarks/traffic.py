"""Bytes through memory by formula, compared with compiled programs.

Run:  python benchmarks/traffic.py [NAME ...]                 (needs the extra aot; no GPU. Minutes for each program)

Compiles each of `CASES` for virtual H100s, counts the bytes of its kernels (planning/program/audit.py) without cuBLAS's
scratch space, and compares them with planning/cost/work.py. Figures are per device and step. Writes
benchmarks/results/traffic.json.
"""

from typing import Any

import outcome

from megajax.command_line.parser import front_door
from megajax.config import load
from megajax.config.builds import resolve
from megajax.config.errors import UserError
from megajax.planning.cost.description import describe
from megajax.planning.cost.estimate import bytes_per_step, estimate
from megajax.planning.virtual_devices import GPUS, prepare, read_cluster

TIB = 2**40
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "llama3_8b": ("llama3.py", 8, ()),
    "llama3_8b, fsdp": (
        "llama3.py",
        8,
        (
            "parallel.tensor=1",
            "parallel.data=8",
            "parallel.sequence=false",
            "parallel.data_sharding=fsdp",
        ),
    ),
    "llama3_8b, none": ("llama3.py", 8, ("model.recompute=none",)),
    "gpt3_1_3b": ("gpt3.py:gpt3_1_3b", 8, ()),
    "gpt3_6_7b": ("gpt3.py:gpt3_6_7b", 64, ()),
    "llama3_70b": ("llama3.py:llama3_70b", 128, ()),
    "llama3_70b, 20 chunks": ("llama3.py:llama3_70b", 64, ("parallel.tensor=4", "parallel.virtual_stages=20")),
    "gpt3_175b": ("gpt3.py:gpt3_175b", 128, ()),
    "gpt3_175b, 6 chunks": ("gpt3.py:gpt3_175b", 128, ("parallel.virtual_stages=6", "parallel.schedule=interleaved")),
    "llama3_405b": ("llama3.py:llama3_405b", 1024, ()),
}
"""Config, H100s, settings."""


def main(names: list[str]) -> None:
    """Compare those named, or all. Raises UserError for a name that is none."""
    if unknown := [name for name in names if name not in CASES]:
        raise UserError(f"unknown case {unknown[0]}: choose from {', '.join(CASES)}")
    prepare()
    print("TiB of formula / compiled; ratios of copies, elementwise, matmul, attention, collective")
    figures = {name: compared(*CASES[name]) for name in names or CASES}
    for name, figure in figures.items():
        ratios = "  ".join(f"{figure['ratio'][kind]:9.2f}" for kind in list(figure["ratio"])[1:])
        total = (
            f"{figure['formula']['total']:6.2f} /{figure['compiled']['total']:6.2f} = {figure['ratio']['total']:.2f}"
        )
        print(f"{name:24}  {total}  {ratios}")
    if not names:
        outcome.write("traffic", figures)


def compared(config: str, devices: int, settings: tuple[str, ...]) -> dict[str, Any]:
    """TiB by class, and the formula's over the program's."""
    cfg: Any = load(config, *settings)
    cluster, _ = read_cluster(f"h100:{devices}")
    plan = resolve("megajax.planning.program.train_step:compile_train_step")(cfg, cluster)
    audited = resolve("megajax.planning.program.audit:audit")(plan.text, plan.unknown_trips)
    classes = audited.by_class()
    for kind in ("total", "matmul"):
        classes[kind] -= audited.workspace()
    predicted = bytes_per_step(estimate(describe(cfg, GPUS["h100"], devices)))
    return {
        "formula": {kind: round(size / TIB, 3) for kind, size in predicted.items()},
        "compiled": {kind: round(size / TIB, 3) for kind, size in classes.items()},
        "ratio": {kind: round(predicted[kind] / size, 3) for kind, size in classes.items()},
    }


if __name__ == "__main__":
    front_door(main)
