"""Effect of each XLA option on the train step."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax

from benchmarks.stopwatch import LEAST, WARM_UP, readings
from benchmarks.training.train_speed import Bench, program_of, synthetic_batch
from megajax.config.compose import override
from megajax.config.errors import UserError
from megajax.planning.resolve import resolve
from megajax.training.run_config import RunConfig

REPEATED = 5
"""Steps whose losses are compared between two starts."""
XLA_DEFAULTS = {
    "xla_gpu_enable_latency_hiding_scheduler": False,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 1,
    "xla_gpu_all_reduce_combine_threshold_bytes": 30 * 2**20,
    "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_OFF",
    "xla_gpu_enable_triton_gemm": True,
}
"""XLA's own values of the options that MegaJAX sets."""


def xla_options(*, cfg: RunConfig, steps: int = 20, tried: str = "") -> Iterator[dict[str, Any]]:
    """Effect of each XLA option: step time, compile time and memory of the train step with and without it.

    Compares the shipped train step, the same without each default option of these devices (CPUs have none), and with
    xla.deterministic. --tried="A=1;B=2,C=3": further variants, separated by semicolons, each with its options in
    addition to the shipped ones. Each variant is compiled without cache, warmed up and timed for --steps steps on the
    same batch. It is also started twice from the same weights; the report says whether the losses are bitwise equal.
    """
    if steps < 1:
        raise UserError(f"--steps must be at least 1, got {steps}")
    figures: dict[str, Any] = {}
    for name, variant in variants(cfg, tried):
        figures[name] = measure(variant, steps)
        ratio = figures[name]["step_seconds"]["median"] / figures["shipped"]["step_seconds"]["median"]
        figures[name]["step_over_shipped"] = ratio
        print(line(name, figures[name]), flush=True)
        yield figures


def variants(cfg: RunConfig, tried: str) -> Iterator[tuple[str, RunConfig]]:
    """(name, config): as shipped, deterministic, without each default option, with each of --tried."""
    yield "shipped", cfg
    yield "deterministic", cfg.but(xla=replace(cfg.xla, deterministic=True))
    for name, value in resolve(cfg).options.items():
        if name not in cfg.xla.options and name in XLA_DEFAULTS:
            off = XLA_DEFAULTS[name]
            changed = replace(cfg.xla, options={**cfg.xla.options, name: off})
            yield f"{name}={off} instead of {value}", cfg.but(xla=changed)
    for text in filter(None, tried.split(";")):
        more: Any = override(cfg, f"xla.options={text}")
        yield text, cfg.but(xla=replace(cfg.xla, options={**cfg.xla.options, **more.xla.options}))


def measure(cfg: RunConfig, steps: int) -> dict[str, Any]:
    """Compile, time and repeat one variant. Raises ConfigError if it does not fit the devices or the compiler."""
    jax.clear_caches()
    with program_of(cfg) as (program, _):
        step: Any = program.train_step
        started = time.perf_counter()
        compiled = step.lower(program.state_like(), program.batch_like()).compile()
        seconds = time.perf_counter() - started
        fresh, batch = program.fresh_state(), synthetic_batch(program)
        starts = []
        for _ in range(2):
            bench = Bench(program, compiled, fresh(), batch)
            starts.append([float(bench.step()["loss"]).hex() for _ in range(REPEATED)])
        for _ in range(WARM_UP):
            jax.block_until_ready(bench.step())
        statistics = readings(bench.step, steps, jax.block_until_ready, least=LEAST)
    return {
        "options": program.options,
        "compile_seconds": seconds,
        "step_seconds": statistics.to_dict(),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "same_bits": starts[0] == starts[1],
        "losses": starts[0],
    }


def line(name: str, figures: dict[str, Any]) -> str:
    """One variant as text."""
    seconds, equality = figures["step_seconds"], "the same" if figures["same_bits"] else "OTHER"
    return (
        f"{name}: {1000 * seconds['median']:.1f} ms a step ({figures['step_over_shipped']:.3f} of shipped; p10 to p90: "
        f"{1000 * seconds['p10']:.1f} to {1000 * seconds['p90']:.1f}), compiled in {figures['compile_seconds']:.1f} s, "
        f"temporary {figures['temporary_bytes'] / 2**20:.0f} MiB; {equality} bits when started again"
    )
