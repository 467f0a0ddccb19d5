"""Effect of each XLA option on the devices of this machine: step time, compile time and memory with and without it.

Run:  python benchmarks/xla_options.py --config=FILE[:function] [--setting=value ...] [--try=NAME=VALUE;...] [--steps=N]

  --try=A=1;B=2,C=3  further variants, separated by semicolons, each with its options in addition to the shipped ones
  --steps=N          timed steps of each (default 20)
  --json[=FILE]      also write JSON; the default file is benchmarks/results/xla_options_NAME.json
  --devices=cpu:8    eight virtual CPU devices instead of the devices that jax finds

Compares the shipped train step, the same without each default option of these devices (CPUs have none), and with
xla.deterministic. Each variant is compiled without cache, warmed up and timed on the same batch. It is then started
twice from the same weights, and the program reports whether the losses are bitwise equal. Settings are those of
training; no data is read.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import outcome

from megajax.command_line.parser import Flag, front_door, parse
from megajax.config.builds import resolve
from megajax.config.errors import UserError
from megajax.config.tree import override
from megajax.mesh.xla import set_process

FLAGS = (Flag("steps", int, 20), Flag("json", None | bool | Path), Flag("try", str, ""))
REPEATED = 5
"""Steps whose losses are compared between two starts."""


def main(argv: list[str]) -> int:
    """Read the command line, import jax after that, measure, print.

    Raises:
        UserError: a config or an option that can't be had.
    """
    if {"-h", "--help"} & set(argv):
        print(__doc__.strip())
        return 0
    command = parse(argv, verb="xla_options", flags=FLAGS)
    if command.flags["steps"] < 1:
        raise UserError(f"--steps must be at least 1, got {command.flags['steps']}")
    set_process(command.config.xla)
    figures: dict[str, Any] = {}
    for name, cfg in variants(command.config, command.flags["try"]):
        figures[name] = measure(cfg, command.flags["steps"])
        ratio = figures[name]["step_seconds"]["median"] / figures["shipped"]["step_seconds"]["median"]
        figures[name]["step_over_shipped"] = ratio
        print(line(name, figures[name]), flush=True)
    if command.flags["json"]:
        outcome.write_to(outcome.file_for("xla_options", command.flags["json"], argv), figures)
    return 0


def variants(cfg: Any, tried: str) -> Iterator[tuple[str, Any]]:
    """Name and config: as shipped, deterministic, without each default option, with each of --try."""
    yield "shipped", cfg
    yield "deterministic", cfg.but(xla=replace(cfg.xla, deterministic=True))
    build_mesh, find_devices = (resolve(f"megajax.mesh.mesh:{name}") for name in ("build_mesh", "find_devices"))
    mesh = build_mesh(cfg.parallel, find_devices())
    for name, value in resolve("megajax.training.program:Program").of(cfg, mesh).options.items():
        if name not in cfg.xla.options and (off := OPPOSITE.get(name)) is not None:
            yield (
                f"{name}={off} instead of {value}",
                cfg.but(xla=replace(cfg.xla, options={**cfg.xla.options, name: off})),
            )
    for text in filter(None, tried.split(";")):
        options = override(cfg, f"xla.options={text}").xla.options
        yield text, cfg.but(xla=replace(cfg.xla, options={**cfg.xla.options, **options}))


OPPOSITE = {
    "xla_gpu_enable_latency_hiding_scheduler": False,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 1,
    "xla_gpu_all_reduce_combine_threshold_bytes": 30 * 2**20,
    "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_OFF",
    "xla_gpu_enable_triton_gemm": True,
}
"""Value of an option that is what XLA does by itself."""


def measure(cfg: Any, steps: int) -> dict[str, Any]:
    """Compile, time and repeat one variant."""
    return resolve("option_speed:measure")(cfg, steps, REPEATED)


def line(name: str, figures: dict[str, Any]) -> str:
    """One variant in words."""
    seconds, equality = figures["step_seconds"], "the same" if figures["same_bits"] else "OTHER"
    return (
        f"{name}: {1000 * seconds['median']:.1f} ms a step ({figures['step_over_shipped']:.3f} of shipped; p10 to p90: "
        f"{1000 * seconds['p10']:.1f} to {1000 * seconds['p90']:.1f}), compiled in {figures['compile_seconds']:.1f} s, "
        f"temporary {figures['temporary_bytes'] / 2**20:.0f} MiB; {equality} bits when started again"
    )


if __name__ == "__main__":
    front_door(main)
