"""Options of XLA are asked of the installed compiler, and reach the programs of a run."""

from typing import Any

import jax
import pytest
from small_jobs import run_config

from megajax.config.errors import ConfigError
from megajax.config.xla import DETERMINISTIC, FP8, FSDP, GPU, XlaConfig, compiler_options
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.training.compiler_options import refusal, settle
from megajax.training.program import Program


def device() -> jax.Device:
    return jax.devices()[0]


def test_the_installed_compiler_knows_every_option_of_ours():
    """Options of GPU programs too: one table for all devices."""
    assert refusal(compiler_options(*GPU, *FSDP, *FP8, *DETERMINISTIC), device()) is None


def test_defaults_it_does_not_take_are_left_out_with_a_warning():
    wanted = {"xla_gpu_gone_since": True, "xla_gpu_enable_triton_gemm": True, "xla_gpu_autotune_level": "high"}
    with pytest.warns(UserWarning, match="xla_gpu_") as warned:
        assert settle(wanted, {}, device()) == {"xla_gpu_enable_triton_gemm": True}
    texts = "\n".join(str(one.message) for one in warned)
    assert "does not know the option xla_gpu_gone_since" in texts
    assert "takes no 'high' for the option xla_gpu_autotune_level" in texts


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        ({"xla_gpu_enable_triton_gemm": 0}, False),
        ({"xla_gpu_enable_triton_gemm": "yes"}, True),
        ({"xla_gpu_autotune_level": 2}, 2),
        ({"xla_gpu_all_gather_combine_threshold_bytes": "4Mi"}, 2**22),
        ({"xla_gpu_enable_command_buffer": None}, ""),
        ({"xla_gpu_enable_command_buffer": "FUSION,CUBLAS"}, "FUSION,CUBLAS"),
        ({"xla_disable_hlo_passes": "one,two"}, "one,two"),
        ({"optimization_level": "O1"}, "O1"),
    ],
)
def test_values_become_what_the_compiler_wants(given, typed):
    (settled,) = settle({}, given, device()).values()
    assert settled == typed and type(settled) is type(typed)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"xla_gpu_autotune_level": "high"}, "expected a value of kind int32, got 'high'"),
        ({"xla_gpu_enable_command_buffer": "ALL"}, "expected a value of kind enum, got 'ALL'"),
        ({"optimization_level": "O9"}, "O0 to O3"),
        ({"xla_gpu_enable_triton_gem": True}, "did you mean xla_gpu_enable_triton_gemm?"),
    ],
)
def test_what_a_user_gives_and_it_does_not_take_is_refused(given, says):
    with pytest.raises(ConfigError) as refused:
        settle({"xla_gpu_enable_triton_gemm": True}, given, device())
    assert says in str(refused.value) and f"--xla={next(iter(given))}" in str(refused.value)
    assert refused.value.code == 2


def test_what_a_user_gives_goes_over_the_defaults():
    assert settle({"xla_gpu_autotune_level": 4}, {"xla_gpu_autotune_level": 0}, device()) == {
        "xla_gpu_autotune_level": 0
    }


class Elsewhere:
    """A mesh of one GPU, for choosing options."""

    platform, process_index = "gpu", 0


def chosen(monkeypatch, **changes: Any) -> set[str]:
    """Names of the options a config on GPUs asks for."""
    cfg = run_config(**changes)
    program = Program.of(cfg, build_mesh(cfg.parallel, jax.devices()))
    asked = []
    monkeypatch.setattr("megajax.training.program.settle", lambda defaults, given, there: asked.append(defaults) or {})
    mesh = type("Mesh", (), {"devices": type("Devices", (), {"flat": [Elsewhere()]})()})()
    object.__setattr__(program, "mesh", mesh)
    assert program.options == {}
    return set(asked[0])


def test_options_follow_from_the_config(monkeypatch):
    always = set(compiler_options(*GPU))
    assert chosen(monkeypatch) == always
    fsdp = {"data_sharding": "fsdp", "data": 2}
    model = run_config().model
    whole = {"model": model.__class__(**{f: getattr(model, f) for f in model.__slots__} | {"recompute": "full"})}
    assert chosen(monkeypatch, parallel=ParallelConfig(**fsdp), **whole) == always | set(compiler_options(*FSDP))
    # Pipelining inside layer loops would take apart what a pipeline's tick is arranged for.
    assert chosen(monkeypatch, parallel=ParallelConfig(**fsdp, pipeline=2), **whole) == always
    exact = chosen(monkeypatch, xla=XlaConfig(deterministic=True))
    assert exact == always | set(compiler_options(*DETERMINISTIC))


def test_options_reach_every_program_of_a_run(monkeypatch):
    cfg = run_config(xla=XlaConfig(options={"xla_cpu_enable_fast_math": "false"}))
    jitted, plain = [], jax.jit
    monkeypatch.setattr(jax, "jit", lambda f, **more: jitted.append(more.get("compiler_options")) or plain(f, **more))
    program = Program.of(cfg, build_mesh(cfg.parallel, jax.devices()))
    jitted.clear()
    program.fresh_state(), program.train_step, program.eval_step
    wanted = {"xla_cpu_enable_fast_math": False}
    assert [options for options in jitted if options is not None] == [wanted] * 3
