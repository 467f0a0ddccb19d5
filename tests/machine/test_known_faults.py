"""Each row of the table of known faults: where it is met, where it is not, and the text of its error."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from gpu_stand_in import CAPABILITY, stand_in
from small_jobs import model, run_config
from user_errors import user_error

from megajax.config.errors import ConfigError
from megajax.job.device_faults import device_fault
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import DispatchConfig, MoEConfig
from megajax.machine import known_faults
from megajax.machine.known_faults import KNOWN_FAULTS, RUN_FAULTS, explanation, met, notes, options, refusals
from megajax.machine.run_fault import Conditions, RunFault, processors, running_programs
from megajax.processes.installation import Installation
from megajax.processes.xla_options import XlaConfig, flag_values
from megajax.training.check_compiler_options import inference_options, refusal, run_conditions, run_options

NOW = Conditions(
    versions={"jaxlib": (0, 12, 0, 1), "driver": (590, 48), "nvidia-nccl-cu12": (2, 32, 3)},
    gpus=1,
    devices=8,
    processes=8,
    capability=(9, 0),
    names=("NVIDIA H100 80GB HBM3",),
    cpus=12,
    programs=set,
)
"""A run of today on eight H100s, one in each process, which meets no fault."""


def with_versions(**versions: tuple[int, ...]) -> Conditions:
    return replace(
        NOW, versions={**NOW.versions, **{name.replace("_", "-"): value for name, value in versions.items()}}
    )


PGLE = replace(NOW, environment={"JAX_ENABLE_PGLE": "true"})
AMPERE = replace(NOW, capability=(8, 6))
MET = {
    "graphs_with_vmm": (with_versions(driver=(550, 127)), replace(with_versions(driver=(550, 127)), devices=1)),
    "graphs_of_one_process": (replace(NOW, gpus=2), NOW),
    "ragged_without_nccl": (replace(NOW, ragged=8), NOW),
    "ragged_one_shot": (replace(NOW, ragged=8), replace(with_versions(jaxlib=(0, 10, 2)), ragged=8)),
    "ragged_beyond_barrier": (replace(NOW, ragged=64), replace(NOW, ragged=32)),
    "communicator_splitting": (with_versions(jaxlib=(0, 9, 2)), NOW),
    "nccl_mixture": (with_versions(NCCL=(2, 29, 3)), with_versions(NCCL=(2, 32, 3))),
    "nccl_launch_order": (with_versions(nvidia_nccl_cu12=(2, 25, 1)), NOW),
    "nccl_2_30_7": (with_versions(nvidia_nccl_cu12=(2, 30, 7)), with_versions(nvidia_nccl_cu12=(2, 31, 2))),
    "nccl_host_memory": (
        with_versions(driver=(570, 86)),
        replace(with_versions(driver=(570, 86)), environment={"NCCL_CUMEM_HOST_ENABLE": "0"}),
    ),
    "nvcc_12_6_77": (
        with_versions(nvidia_cuda_nvcc_cu12=(12, 6, 77)),
        with_versions(nvidia_cuda_nvcc_cu12=(12, 6, 85)),
    ),
    "cublas_on_b200": (
        replace(with_versions(nvidia_cublas=(13, 1, 0, 3)), capability=(10, 0)),
        with_versions(nvidia_cublas=(13, 1, 0, 3)),
    ),
    "pgle_of_several_processes": (PGLE, replace(PGLE, processes=1)),
    "pgle_beside_dcgm": (replace(PGLE, programs=lambda: {"bash", "nv-hostengine"}), PGLE),
    "eager_operations": (
        replace(AMPERE, versions={"driver": (610, 1), "jax-cuda13-plugin": (0, 12, 0, 1)}),
        replace(NOW, versions={"driver": (610, 1), "jax-cuda13-plugin": (0, 12, 0, 1)}),
    ),
    "virtual_gpu": (replace(NOW, names=("NVIDIA A100-10C",)), replace(NOW, names=("NVIDIA A100-SXM4-80GB",))),
    "cache_at_a_url": (replace(NOW, environment={"JAX_COMPILATION_CACHE_DIR": "gs://bucket/cache"}), NOW),
    "few_cpus": (replace(NOW, cpus=2), replace(NOW, cpus=0)),
    "symmetric_buffers": (
        replace(NOW, flags={"xla_gpu_experimental_enable_nccl_symmetric_buffers": "true"}),
        replace(NOW, flags={"xla_gpu_experimental_enable_nccl_symmetric_buffers": "false"}),
    ),
    "collectives_in_graphs": (
        replace(NOW, flags={"xla_gpu_enable_command_buffer": "FUSION,COLLECTIVES"}),
        replace(NOW, flags={"xla_gpu_enable_command_buffer": "FUSION"}),
    ),
    "inert_pipelining": (
        replace(NOW, flags={"xla_gpu_enable_pipelined_all_gather": "true"}),
        replace(NOW, flags={"xla_gpu_enable_pipelined_p2p": "true"}),
    ),
    "shared_programs": (replace(NOW, environment={"JAX_SHARE_BINARY_BETWEEN_HOSTS": "1"}), NOW),
}
"""Row -> conditions that meet it, and similar ones that do not."""

TEXTS = {
    "graphs_with_vmm": "INTERNAL: Failed to add memset node to a CUDA graph: CUDA_ERROR_INVALID_VALUE",
    "graphs_of_one_process": "INTERNAL: Failed to capture gpu graph: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
    "ragged_without_nccl": "INVALID_ARGUMENT: RaggedAllToAll fallback to NCCL is not allowed. This is likely",
    "ragged_one_shot": "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS in thunk ragged-all-to-all-start.3",
    "pinned_host_pool": "RESOURCE_EXHAUSTED: Failed to allocate a 268435456-byte pinned host staging buffer",
    "nccl_host_memory": "ncclCuMemHostEnable: unhandled cuda error",
    "pgle_of_several_processes": "ALREADY_EXISTS: Another profiling session active.",
    "pgle_beside_dcgm": "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED",
    "virtual_gpu": "Device 0 does not support CUDA Virtual Memory Management (VMM).",
    "autotuning_results": "INTERNAL: Autotuning failed for HLO: %fusion.7 = bf16[8,128]",
    "heartbeats_while_pinning": "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats): task 3",
    "nccl_buffers": "INTERNAL: NCCL operation ncclCommInitRankConfig failed: unhandled cuda error: out of memory",
    "cudnn_execution": "INTERNAL: CUDNN_STATUS_EXECUTION_FAILED in cuda_dnn.cc(5521)",
    "scheduler_memory": "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12884901888 bytes.",
    "b300": "INTERNAL: [cudnn_frontend] Error: No valid execution plans built.",
}
"""Row -> an error with its symptom, of the words in jaxlib's and the plugin's libraries."""
ALSO = {"pgle_of_several_processes": {"pgle_beside_dcgm"}}
"""Row -> others with the same text."""


def named(name: str) -> RunFault:
    (fault,) = [fault for fault in RUN_FAULTS if fault.name == name]
    return fault


def test_a_run_of_today_meets_none() -> None:
    assert met(NOW, "refuse", "set", "warn") == [] and options(NOW) == refusals(NOW) == notes(NOW) == []


@pytest.mark.parametrize("name", MET)
def test_a_row_is_met_where_it_was_reported_and_not_elsewhere(name: str) -> None:
    conditions, similar = MET[name]
    assert named(name).met(conditions) and not named(name).met(similar)
    assert named(name).report in named(name).text(conditions)


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_an_error_finds_its_row(name: str) -> None:
    assert {fault.name for fault in KNOWN_FAULTS if fault.shows(TEXTS[name])} == {name} | ALSO.get(name, set())


def test_every_row_has_a_test_a_source_and_a_cure() -> None:
    assert {fault.name for fault in KNOWN_FAULTS if fault.symptom} == set(TEXTS)
    before = {fault.name for fault in RUN_FAULTS if fault.answer in ("refuse", "set", "warn")}
    assert before == set(MET)
    names = [fault.name for fault in KNOWN_FAULTS]
    assert len(set(names)) == len(names)
    for fault in RUN_FAULTS:
        assert fault.cure and (fault.report.startswith("https://github.com/") or "release notes" in fault.report)
        assert bool(fault.options) == (fault.answer == "set"), fault.name


def test_the_compiler_knows_every_option_of_a_row() -> None:
    values = {option.name: option.value for fault in RUN_FAULTS for option in fault.options}
    assert refusal(values, jax.devices()[0]) is None


def test_a_banner_says_what_was_set_and_what_to_change() -> None:
    set_line, warning = notes(replace(with_versions(driver=(550, 127)), cpus=2))
    assert set_line.startswith("jaxlib 0.12.0.1, driver 550.127: CUDA graphs of programs over several GPUs")
    assert set_line.endswith("therefore xla_gpu_enable_command_buffer=")
    assert "2 CPUs for each GPU, which needs 4" in warning and "--cpus-per-task" in warning


@pytest.mark.parametrize("name", TEXTS)
def test_an_error_that_ends_a_run_has_the_cure_under_it(name: str, tmp_path: Path) -> None:
    fault = device_fault(jax.errors.JaxRuntimeError(TEXTS[name]), run_config(), tmp_path)
    (row,) = [row for row in KNOWN_FAULTS if row.name == name]
    text = str(fault)
    assert f"known fault ({name}): " in text and f"cure: {row.cure}" in text and row.report in text
    assert "traceback.txt" in text
    assert ("out of memory on" in text) == (name == "scheduler_memory"), "only that one is about a device's memory"


def ragged(expert: int = 4) -> Any:
    """A small run whose experts get their tokens in ragged exchanges."""
    dense = model()
    (block,) = dense.stack.pattern
    experts = MoEConfig(experts=64, expert=GatedMLPConfig(ffn=32), dispatch=DispatchConfig(way="ragged"))
    stack = replace(dense.stack, pattern=(replace(block, mlp=experts),))
    cfg = run_config(model=replace(dense, stack=stack))
    return cfg.but(parallel=replace(cfg.parallel, expert=expert, data=1))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight GPUs of one process, with a driver that refuses CUDA graphs with memory of XLA's allocator."""
    stand_in(monkeypatch)
    there = Installation(8, (550, 127), {}, frozenset())
    monkeypatch.setattr(known_faults, "find_installation", lambda: there)


@pytest.mark.usefixtures("gpus")
def test_conditions_are_those_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_dump_to")
    found = run_conditions(ragged(), jax.devices())
    assert (found.gpus, found.devices, found.processes, found.ragged) == (8, 8, 1, 4)
    assert found.versions["driver"] == (550, 127) and found.versions["jaxlib"] >= (0, 11)
    assert ".".join(map(str, found.capability or ())) == CAPABILITY
    assert found.flags == {"xla_gpu_autotune_level": "0", "xla_dump_to": "true"} and found.cpus == processors()


@pytest.mark.usefixtures("gpus")
def test_a_ragged_exchange_sets_its_options_and_the_driver_turns_graphs_off() -> None:
    cfg = ragged()
    chosen = run_options(cfg, SimpleNamespace(devices=SimpleNamespace(flat=jax.devices()[:4])))
    assert chosen["xla_gpu_unsupported_enable_ragged_all_to_all_decomposer"] is True
    assert chosen["xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback"] is True
    assert chosen["xla_gpu_enable_command_buffer"] == ""


@pytest.mark.usefixtures("gpus")
def test_a_ragged_exchange_of_more_devices_than_the_kernel_has_slots_is_refused() -> None:
    with user_error("ragged_beyond_barrier", kind=ConfigError):
        run_options(ragged(64), SimpleNamespace(devices=SimpleNamespace(flat=jax.devices()[:4])))


@pytest.mark.usefixtures("gpus")
def test_programs_that_generate_text_avoid_faults_too() -> None:
    assert inference_options(XlaConfig(), jax.devices()[0])["xla_gpu_enable_command_buffer"] == ""


def test_on_cpus_no_condition_is_read() -> None:
    assert run_conditions(ragged(), jax.devices()) == Conditions()


def test_virtual_gpus_have_settings_only() -> None:
    device = SimpleNamespace(platform="cuda")
    found = run_conditions(ragged(), [device] * 8)
    assert (found.ragged, found.devices, found.cpus) == (4, 8, 0) and "driver" not in found.versions
    assert [fault.name for fault in met(found, "refuse", "set", "warn")] == ["ragged_without_nccl", "ragged_one_shot"]


def test_programs_and_flags_are_read_from_the_machine(tmp_path: Path) -> None:
    for number, name in (("1", "bash"), ("27", "nv-hostengine")):
        (tmp_path / number).mkdir()
        (tmp_path / number / "comm").write_text(f"{name}\n")
    (tmp_path / "31" / "comm").mkdir(parents=True)
    assert running_programs(tmp_path) == {"bash", "nv-hostengine"}
    assert flag_values({}) == {} and flag_values({"XLA_FLAGS": "--a=b --c"}) == {"a": "b", "c": "true"}


def test_an_unknown_error_has_no_row() -> None:
    assert explanation("INVALID_ARGUMENT: shapes do not match") == []
