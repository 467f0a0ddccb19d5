"""Times one variant of the train step and starts it twice, for `xla_options.py`."""

import time
from typing import Any

import jax
from stopwatch import LEAST, WARM_UP, readings
from train_speed import Bench, synthetic_batch

from megajax.config.tree import check
from megajax.mesh.mesh import build_mesh, find_devices
from megajax.training.program import Program
from megajax.training.run_config import RunConfig


def measure(cfg: RunConfig, steps: int, repeated: int) -> dict[str, Any]:
    """Raises ConfigError for a config that does not fit the devices or the compiler."""
    devices = find_devices()
    check(cfg, len(devices))
    jax.clear_caches()
    program = Program.of(cfg, build_mesh(cfg.parallel, devices))
    with jax.set_mesh(program.mesh), jax.default_matmul_precision(cfg.precision.matmul_precision()):
        step: Any = program.train_step
        started = time.perf_counter()
        compiled = step.lower(program.state_like(), program.batch_like()).compile()
        seconds = time.perf_counter() - started
        fresh, batch = program.fresh_state(), synthetic_batch(program)
        starts = []
        for _ in range(2):
            bench = Bench(program, compiled, fresh(), batch)
            starts.append([float(bench.step()["loss"]).hex() for _ in range(repeated)])
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
