"""The train step on the device that jax finds; on a CPU, the same tests run at the same sizes.

`pytest -m gpu` collects these and the tests of kernels, and imports no other test file.
"""

from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from benchmarks.training.train_speed import Bench, compiled_step, synthetic_batch
from megajax.config import load
from megajax.job.device_memory import peak_memory
from megajax.mesh.mesh import build_mesh
from megajax.optim.moments import HOST
from megajax.processes.xla_options import DETERMINISTIC, FP8, FSDP, GPU, Option
from megajax.training.check_compiler_options import refusal
from megajax.training.program import Program, demand_kernels
from megajax.training.state import own_buffers

SMALL = ("model.stack.repeats=1", "model.sequence_length=128", "batch.global_size=4", "batch.micro_size=2")
BFLOAT16 = "precision.compute=bfloat16"
STEPS = 3
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
"""Absolute differences of losses from float32 on a CPU; the loss of a fresh model is 6.2."""
CALLS = {"cudnn": "__cudnn$fmha", "pallas": "__gpu$xla.gpu.triton", "reference": "dot"}
"""Attention backend -> text in a program that uses it."""
EIGHT_BITS = {"gpu": "__cublas$lt$matmul$f8", "cpu": "f8e4m3fn"}

pytestmark = pytest.mark.gpu


class Trained(NamedTuple):
    losses: list[float]
    bench: Bench


@cache
def trained(platform: str | None, *settings: str) -> Trained:
    """A few steps of a small Llama on one device of a platform; None: jax's default."""
    cfg = load("bench.py:debug", *SMALL, *settings)
    mesh = build_mesh(cfg.parallel, jax.devices(platform)[:1])
    program = Program.of(cfg, mesh)
    with jax.set_mesh(mesh), jax.default_matmul_precision(cfg.precision.matmul_precision()):
        bench = Bench(program, compiled_step(program)[0], program.fresh_state()(), synthetic_batch(program))
        return Trained([float(bench.step()["loss"]) for _ in range(STEPS)], bench)


def platform() -> str:
    return jax.devices()[0].platform


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_train_step_agrees_with_float32_on_a_cpu(compute: str) -> None:
    setting = f"precision.compute={compute}"
    actual, expected = trained(None, setting), trained("cpu", "model.stack.pattern.0.mixer.kernel=reference")
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=0, atol=TOLERANCES[compute])
    assert actual.losses[-1] < actual.losses[0]
    (choice,) = demand_kernels(actual.bench.program.cfg)
    assert CALLS[choice.kernel] in actual.bench.compiled.as_text()


@pytest.mark.slow
def test_matmuls_in_8_bits_run_in_8_bits() -> None:
    actual, expected = trained(None, BFLOAT16, "precision.matmul=Fp8Current"), trained(None, BFLOAT16)
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=0, atol=5e-2)
    assert EIGHT_BITS[platform()] in actual.bench.compiled.as_text()


@pytest.mark.slow
def test_moments_in_host_memory_give_equal_losses() -> None:
    actual, expected = trained(None, BFLOAT16, "optimizer.offload=1.0"), trained(None, BFLOAT16)
    assert actual.losses == expected.losses
    moments = {name: part for name, part in actual.bench.state.optimizer.items() if isinstance(part, dict)}
    kinds = {leaf.sharding.memory_kind for part in moments.values() for leaf in part.values()}
    assert kinds == {HOST}


@pytest.mark.slow
def test_deterministic_programs_repeat_to_the_bit() -> None:
    run = trained(None, BFLOAT16, "xla.deterministic=true")
    program, compiled = run.bench.program, run.bench.compiled
    with jax.set_mesh(program.mesh):
        bench = Bench(program, compiled, program.fresh_state()(), synthetic_batch(program))
    assert [float(bench.step()["loss"]) for _ in range(STEPS)] == run.losses
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(bench.state), jax.device_get(run.bench.state))


@pytest.mark.parametrize("option", [*GPU, *FP8, *FSDP, *DETERMINISTIC], ids=lambda option: option.name)
def test_the_compiler_accepts_every_option(option: Option) -> None:
    """CPUs accept those of GPUs, without effect."""
    assert refusal({option.name: option.value}, jax.devices()[0]) is None


@pytest.mark.slow
def test_memory_is_counted_where_the_device_counts_it() -> None:
    run = trained(None, BFLOAT16)
    state: Any = jax.tree.leaves(run.bench.state)
    most = peak_memory()
    bytes_and_seconds = most if most is not None else (sum(leaf.nbytes for leaf in state), None)
    assert (most is None) == (platform() == "cpu")
    assert bytes_and_seconds[0] >= sum(leaf.nbytes for leaf in state if leaf.sharding.memory_kind != HOST)


def buffers(state: Any) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]


@pytest.mark.slow
def test_the_first_step_reuses_the_buffers_of_a_state_from_host_memory() -> None:
    """After a restore, arrays made from host memory are not always reused, without a warning (jax#18617)."""
    bench = trained(None, "precision.compute=float32").bench
    with jax.set_mesh(bench.program.mesh):
        values = jax.tree.map(np.array, bench.state)
        from_host = jax.tree.map(
            lambda x, old: jax.make_array_from_callback(x.shape, old.sharding, lambda index: x[index]),
            values,
            bench.state,
        )
        bench.state = own_buffers(from_host)
        before = buffers(bench.state)
        jax.block_until_ready(bench.step())
        assert buffers(bench.state) == before
