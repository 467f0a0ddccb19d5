"""Out of memory and broken libraries: messages and exit codes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from gpu_stand_in import KIND, stand_in
from small_jobs import model, run_config

from megajax.command_line.parser import front_door
from megajax.config.compose import override
from megajax.job.device_faults import (
    DeviceFault,
    cheapest,
    device_fault,
    installation,
    out_of_memory,
    requested_bytes,
    state_bytes,
)
from megajax.job.device_memory import compiled_memory, memory_in_use, peak_memory
from megajax.job.job import train
from megajax.mesh.config import ParallelConfig
from megajax.processes.installation import Installation
from megajax.processes.xla_options import MEMORY_FRACTION
from megajax.training.config import BatchConfig
from megajax.training.loop import Steps

EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12884901888 bytes."


def runtime_error(text: str) -> Exception:
    return jax.errors.JaxRuntimeError(text)


def failing(text: str) -> Any:
    def fetch(steps: object, flight: object) -> None:
        raise runtime_error(text)

    return fetch


@pytest.mark.slow
def test_out_of_memory_ends_a_run_with_advice_and_code_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Steps, "fetch", failing(EXHAUSTED))
    cfg = run_config(tmp_path / "run", evaluation=run_config().evaluation)
    with pytest.raises(DeviceFault) as fault:
        train(cfg)
    text = str(fault.value)
    assert "out of memory" in text and "in a train step" in text and "12.00 GiB more" in text
    assert "by the compiled train step: state and batch" in text and "other temporaries" in text
    assert "micro_size 4, data_sharding zero1" in text
    changes = [line.split()[0] for line in text.splitlines() if line.startswith("    --")]
    assert changes == ["--batch.micro_size=2", "--model.recompute=selective", "--model.recompute=full"]
    traceback_file = tmp_path / "run/traceback.txt"
    assert str(traceback_file) in text and "Traceback" not in text
    assert "Traceback" in traceback_file.read_text() and EXHAUSTED in traceback_file.read_text()

    def main(argv: list[str]) -> int:
        raise fault.value

    with pytest.raises(SystemExit) as ended:
        front_door(main)
    assert ended.value.code == 1
    assert "batch.micro_size=2" in capsys.readouterr().err


class Counting:
    """A device with memory statistics."""

    def __init__(self, now: int, most: int):
        self.stats = {"bytes_in_use": now, "peak_bytes_in_use": most, "bytes_limit": 100}

    def memory_stats(self) -> dict[str, int]:
        return self.stats


def test_memory_in_use_is_that_of_the_fullest_device(monkeypatch):
    assert set(memory_in_use()) == {"host"}, "this device does not count"
    monkeypatch.setattr(jax, "local_devices", lambda: [Counting(10, 60), Counting(20, 40)])
    actual = memory_in_use()
    assert (actual["device"], actual["device_peak"]) == (20, 60) and actual["host"] > 2**20


def test_GPUs_without_memory_statistics_are_skipped(monkeypatch):
    """Their allocator decides what they report: nothing, or only the limit."""
    silent, brief = Counting(0, 0), Counting(0, 0)
    silent.stats, brief.stats = None, {"bytes_limit": 100}
    monkeypatch.setattr(jax, "local_devices", lambda: [silent, brief])
    assert set(memory_in_use()) == {"host"} and peak_memory() is None
    monkeypatch.setattr(jax, "local_devices", lambda: [silent, Counting(10, 60), brief])
    assert memory_in_use()["device"] == 10 and peak_memory() == (60, 100)


def test_a_runtime_without_program_statistics_is_no_error():
    """The line is complete but for the memory of the first step."""

    class Program:
        def hlo_modules(self) -> list[object]:
            raise runtime_error("UNIMPLEMENTED: PJRT_Executable_OptimizedProgram")

    class Client:
        def live_executables(self) -> list[object]:
            return [Program()]

    device: Any = type("Device", (), {"client": Client()})()
    assert compiled_memory([device]) is None
    device.client = object()
    assert compiled_memory([device]) is None


@pytest.mark.parametrize(("count", "name"), [(1, "traceback.txt"), (2, "traceback-process1.txt")])
def test_each_process_keeps_its_own_traceback(count, name, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    fault = device_fault(runtime_error(EXHAUSTED), run_config(), tmp_path)
    assert f"the traceback is in {tmp_path / name}" in str(fault) and (tmp_path / name).exists()


@pytest.mark.parametrize("there", ["gpu", "cpu"])
def test_out_of_memory_reports_the_share_of_a_GPU_that_arrays_can_use(there, monkeypatch):
    if there == "gpu":
        stand_in(monkeypatch)
    monkeypatch.setenv(MEMORY_FRACTION[0], "0.92")
    text = out_of_memory(runtime_error(EXHAUSTED), run_config())
    assert f"out of memory on {KIND if there == 'gpu' else 'cpu'}" in text
    expected = "the limit for arrays is 72.00 GiB a device (share 0.92)" if there == "gpu" else "limit is unknown\n"
    assert expected in text


@pytest.mark.parametrize(("capability", "named"), [("6.1", True), ("9.0", False)])
def test_GPUs_too_old_for_their_CUDA_are_named(capability, named, monkeypatch):
    stand_in(monkeypatch, capability=capability, kind="NVIDIA P40")
    plugins = dict.fromkeys(("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt"), "0.12.0.1")
    there = Installation(8, (580, 65), plugins, frozenset({"cudnn", "cublas", "nccl"}))
    monkeypatch.setattr("megajax.job.device_faults.find_installation", lambda: there)
    text = installation("CUDNN_STATUS_NOT_INITIALIZED")
    assert ("NVIDIA P40 has compute capability 6.1; jax for CUDA 13 needs" in text) == named


def test_the_traceback_is_printed_if_it_cannot_be_stored(tmp_path):
    try:
        raise runtime_error(EXHAUSTED)
    except jax.errors.JaxRuntimeError as error:
        fault = device_fault(error, run_config(), tmp_path / "nowhere")
    assert "Traceback" in str(fault)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch": BatchConfig(global_size=8, micro_size=1)},
        {
            "parallel": ParallelConfig(data=4, data_sharding="replicate"),
            "batch": BatchConfig(global_size=8, micro_size=2),
        },
        {"model": model(recompute="full"), "batch": BatchConfig(global_size=8, micro_size=1)},
        {"parallel": ParallelConfig(tensor=2, data=1)},
    ],
)
def test_every_proposed_change_is_legal_in_the_config(changes):
    cfg = run_config(**changes)
    state = state_bytes(cfg, jax.devices())
    for mostly_state in (True, False):
        actual = cheapest(cfg, len(jax.devices()), state, mostly_state=mostly_state)
        assert 1 <= len(actual) <= 3
        assert all(override(cfg, change.setting, devices=len(jax.devices())) != cfg for change in actual)


def test_a_large_state_is_sharded_first():
    cfg = run_config(
        parallel=ParallelConfig(data=4, data_sharding="replicate"), batch=BatchConfig(global_size=8, micro_size=2)
    )
    state = state_bytes(cfg, jax.devices())
    first = cheapest(cfg, 8, state, mostly_state=True)[0]
    assert first.setting == "parallel.data_sharding=zero1"
    sharded = state_bytes(override(cfg, first.setting), jax.devices())
    assert state is not None and sharded is not None and sharded < 0.4 * state
    assert cheapest(cfg, 8, state, mostly_state=False)[0].setting == "batch.micro_size=1"


def test_large_logits_are_named():
    wide = replace(model(vocabulary_size=200_000), loss_chunk=4096)
    cfg = run_config(model=wide, batch=BatchConfig(global_size=8, micro_size=1))
    settings = [change.setting for change in cheapest(cfg, 8, None, mostly_state=False)]
    assert "model.loss_chunk=2048" in settings


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (EXHAUSTED, 12 * 2**30),
        ("Out of memory while trying to allocate 4.50GiB.", 4.5 * 2**30),
        ("RESOURCE_EXHAUSTED: Failed to allocate request for 176.00MiB (184549376B) on device ordinal 0", 176 * 2**20),
        ("RESOURCE_EXHAUSTED: out of something", None),
    ],
)
def test_the_requested_bytes_are_read_from_the_runtime_s_message(text, size):
    assert requested_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "FAILED_PRECONDITION: DNN library initialization failed. Look at the errors above for more details.",
        "INTERNAL: Could not load library libcudnn_graph.so.9",
        "INTERNAL: no kernel image is available for execution on the device",
        "CUDNN_STATUS_INTERNAL_ERROR in cuda_dnn.cc",
    ],
)
def test_broken_libraries_are_named_with_the_installed_version(text, tmp_path):
    fault = device_fault(runtime_error(text), run_config(), tmp_path)
    assert fault is not None and fault.code == 1
    assert f"the GPU's libraries do not work: {text}" in str(fault)
    assert f"jax {jax.__version__}" in str(fault) and "traceback.txt" in str(fault)


def test_other_errors_are_passed_on(tmp_path):
    for error in (
        ValueError("shapes do not fit"),
        KeyError("a"),
        runtime_error("INVALID_ARGUMENT: something"),
        OSError(),
    ):
        assert device_fault(error, run_config(), tmp_path) is None
    assert list(Path(tmp_path).iterdir()) == []


def test_a_machine_out_of_memory_is_not_reported_as_a_device(tmp_path):
    assert "the host, not a device, is out of memory" in str(device_fault(MemoryError(), run_config(), tmp_path))
