"""XLA options: checked against the installed compiler, and passed to the programs of a run."""

from types import SimpleNamespace

import jax
import jaxlib
import numpy as np
import pytest
from small_jobs import model, run_config

from megajax.config.errors import ConfigError
from megajax.faults.config import ResilienceConfig
from megajax.faults.watchdog import WatchdogConfig
from megajax.job.notebook import prepare
from megajax.machine.known_faults import NO_GRAPHS
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import exact, exact_on_cpus
from megajax.mesh.mesh import build_mesh
from megajax.precision.config import Fp8CurrentConfig, PrecisionConfig
from megajax.processes.xla_options import (
    CPU,
    DEFAULTS,
    DETERMINISTIC,
    FP8,
    FSDP,
    GPU,
    MOST_QUICK,
    XlaConfig,
    compiler_options,
    options_for_once,
    termination,
)
from megajax.training.check_compiler_options import accepted_options, default_options, refusal, run_options
from megajax.training.program import Program
from megajax.training.run_config import RunConfig
from megajax.training.session import Run


def device() -> jax.Device:
    return jax.devices()[0]


def test_the_installed_compiler_knows_all_our_options():
    """Options of GPU programs too: one table holds those of all devices."""
    assert refusal(compiler_options(*CPU, *GPU, *FSDP, *FP8, *DETERMINISTIC, *termination(1800.0)), device()) is None


def test_unsupported_defaults_are_omitted_with_a_warning():
    requested = {"xla_gpu_gone_since": True, "xla_gpu_enable_triton_gemm": True, "xla_gpu_autotune_level": "high"}
    with pytest.warns(UserWarning, match="xla_gpu_") as warned:
        assert accepted_options(requested, {}, device()) == {"xla_gpu_enable_triton_gemm": True}
    texts = "\n".join(str(warning.message) for warning in warned)
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
def test_values_are_converted_to_the_compiler_s_types(given, typed):
    (settled,) = accepted_options({}, given, device()).values()
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
def test_unsupported_options_of_the_user_are_refused(given, says):
    with pytest.raises(ConfigError) as refused:
        accepted_options({"xla_gpu_enable_triton_gemm": True}, given, device())
    assert says in str(refused.value) and f"--xla={next(iter(given))}" in str(refused.value)
    assert refused.value.code == 2


def names(cfg: RunConfig, platform: str) -> set[str]:
    return {option.name for option in default_options(cfg, platform)}


def test_options_follow_from_the_config_and_the_platform():
    always = {option.name for option in (*GPU, *termination(1.0))}
    cfg = run_config()
    unwatched = cfg.but(resilience=ResilienceConfig(watchdog=None))
    assert names(unwatched, "gpu") == {option.name for option in GPU}
    assert names(cfg, "gpu") == names(cfg, "cuda") == always
    assert names(cfg, "cpu") == {option.name for option in CPU}
    assert names(cfg, "of another kind") == set()
    fsdp = {"data_sharding": "fsdp", "data": 2}
    cfg = run_config(model=model(recompute="full"), parallel=ParallelConfig(**fsdp))
    assert names(cfg, "gpu") == always | {option.name for option in FSDP}
    # Pipelining inside layer loops would undo the order of a pipeline's tick.
    assert names(cfg.but(parallel=ParallelConfig(**fsdp, pipeline=2)), "gpu") == always
    exact = run_config(xla=XlaConfig(deterministic=True))
    assert names(exact, "gpu") == always | {option.name for option in DETERMINISTIC}
    fp8 = run_config(precision=PrecisionConfig(matmul=Fp8CurrentConfig()))
    assert names(fp8, "gpu") == always | {option.name for option in FP8}


def test_xla_waits_longer_than_the_watchdog():
    cfg = run_config(resilience=ResilienceConfig(watchdog=WatchdogConfig(compile=900.0, step=1200.5)))
    values = {option.name: option.value for option in default_options(cfg, "gpu")}
    assert values["xla_gpu_execution_terminate_timeout"] == "1800s"
    assert values["xla_gpu_nccl_termination_timeout_seconds"] == 1800


def test_the_platform_of_the_tests_has_defaults():
    """Without these tests only GPUs would reach the lines that choose and pass options."""
    assert DEFAULTS["cpu"].always


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_options_are_chosen_inside_a_mesh_of_several_devices(platform, monkeypatch):
    """The compiler is asked about one device, whatever the surrounding mesh."""
    monkeypatch.setattr(jaxlib._jax.Device, "platform", property(lambda device: platform))
    cfg = run_config(
        parallel=ParallelConfig(data=2, tensor=2), xla=XlaConfig(options={"xla_gpu_enable_triton_gemm": "no"})
    )
    mesh = build_mesh(cfg.parallel, jax.devices())
    with jax.set_mesh(mesh):
        program = Program.of(cfg, mesh)
    actual = program.options
    assert program.layout.matmul is (exact_on_cpus if platform == "cpu" else exact)
    graphs = {"gpu": {NO_GRAPHS.name: NO_GRAPHS.value}}.get(platform, {})  # of several GPUs in a process
    assert actual == compiler_options(*default_options(cfg, platform)) | {"xla_gpu_enable_triton_gemm": False} | graphs


def test_options_of_a_process_are_checked_on_a_device_of_its_own(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "megajax.training.check_compiler_options.accepted_options", lambda *_: calls.append(_[-1]) or {}
    )
    devices = [SimpleNamespace(platform="gpu", device_kind="H100", process_index=number) for number in (1, 0)]
    run_options(run_config(), SimpleNamespace(devices=np.array(devices)))
    assert calls == [devices[1]]
    # Only virtual devices of other processes.
    run_options(run_config(), SimpleNamespace(devices=np.array(devices[:1])))
    assert calls[1:] == [devices[0]]


def test_options_reach_every_program_of_a_run(monkeypatch):
    cfg = run_config(xla=XlaConfig(options={"xla_gpu_enable_triton_gemm": "no"}))
    jitted, plain = [], jax.jit
    monkeypatch.setattr(jax, "jit", lambda f, **more: jitted.append(more.get("compiler_options")) or plain(f, **more))
    parts = prepare(cfg)
    program = parts.program
    jitted.clear()
    (
        program.fresh_state(),
        program.train_step,
        program.eval_step,
        program.nonfinite_gradients,
        Run(parts, program.state_like(), None),
    )
    assert [options for options in jitted if options is not None] == [dict(program.options)] * 5
    assert program.options == compiler_options(*CPU) | {"xla_gpu_enable_triton_gemm": False}


@pytest.mark.slow
def test_initial_weights_of_small_models_are_compiled_quickly(monkeypatch):
    """The results have the same bits on CPUs. The tests set level 0 for all programs, in XLA_FLAGS."""
    monkeypatch.setenv("XLA_FLAGS", "")
    name = "xla_backend_optimization_level"
    assert options_for_once({}, "cpu", MOST_QUICK) == {name: 1} and options_for_once({}, "cpu", MOST_QUICK + 1) == {}
    assert options_for_once({name: 2}, "cpu", 1) == {name: 2} and options_for_once({}, "gpu", 1) == {}
    cfg = run_config()
    program = Program.of(cfg, build_mesh(cfg.parallel, jax.devices()[:1]))
    with jax.set_mesh(program.mesh):
        quick, whole = (jax.jit(program._fresh, compiler_options={name: level})() for level in (1, 3))
    for one, other in zip(jax.tree.leaves(quick), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(one, other)


def test_default_options_of_CPUs_change_no_program():
    """They state what XLA does by default: the compiled programs are equal, with the same numbers and collectives."""
    cfg = run_config(parallel=ParallelConfig(data=2))
    mesh = build_mesh(cfg.parallel, jax.devices())
    texts = []
    for options in ({}, compiler_options(*CPU)):
        program = Program.of(cfg, mesh, options)
        assert program.options == options
        with jax.set_mesh(mesh):
            lowered = program.eval_step.lower(program.state_like().params, program.batch_like())
            texts.append(lowered.compile().as_text())
    assert texts[0] == texts[1]
