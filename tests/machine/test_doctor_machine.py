"""The doctor on this machine: commands that hang, a fake driver, and a complete run of all checks."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest
from gpu_stand_in import stand_in

from megajax.kernels.attention.attention import PASSES
from megajax.kernels.attention.capability import BACKENDS
from megajax.kernels.grouped.matmul import grouped_matmul
from megajax.machine import device_trial, examine, gpu_checks, host_checks
from megajax.machine.check import Machine, run_checks, run_limited

PYNVML = '''
"""NVML with two H100 GPUs; the second does not support remapped rows."""
from types import SimpleNamespace
class NVMLError(Exception): pass
NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_TEMPERATURE_GPU = 1, 0, 0
NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1
nvmlClocksThrottleReasonHwSlowdown, nvmlClocksThrottleReasonHwThermalSlowdown = 8, 64
nvmlClocksThrottleReasonHwPowerBrakeSlowdown, nvmlClocksThrottleReasonSwThermalSlowdown = 128, 32
def nvmlInit(): {init}
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(h): return "NVIDIA H100 80GB HBM3"
def nvmlDeviceGetCudaComputeCapability(h): return (9, 0)
def nvmlDeviceGetMemoryInfo(h): return SimpleNamespace(total=80 * 2**30, used=2**20)
def nvmlDeviceGetTotalEccErrors(h, kind, counter): return 0
def nvmlDeviceGetTemperature(h, sensor): return 33
def nvmlDeviceGetCurrentClocksThrottleReasons(h): return 64 if h else 1
def nvmlDeviceGetP2PStatus(a, b, index): return 0
def nvmlDeviceGetRemappedRows(h):
    if h: raise NVMLError("Not Supported")
    return (0, 0, 0, 0)
'''


class TwoGpus(Machine):
    """This machine with two GPU device files."""

    gpu_files = 2


def with_driver(folder: Path, init: str = "pass") -> Machine:
    """A machine with a fake pynvml."""
    (folder / "pynvml.py").write_text(PYNVML.replace("{init}", init))
    return TwoGpus(environment=os.environ | {"PYTHONPATH": str(folder)})


def test_a_command_that_hangs_is_killed_with_its_children() -> None:
    start = time.monotonic()
    output = run_limited(["sh", "-c", "echo before; sleep 60 & sleep 60"], seconds=0.3)
    assert time.monotonic() - start < 30
    assert output.code is None and output.out == "before\n" and output.why == "gave no answer within 0.3 s"
    missing = run_limited(["/no/such/program"], seconds=1)
    assert missing.code is None and "cannot be started" in missing.why


def test_driver_reports(tmp_path: Path) -> None:
    results = {name: (f.status, f.state) for name, f, _ in run_checks(gpu_checks.CHECKS, with_driver(tmp_path))}
    assert results["GPUs"] == ("ok", "2 x NVIDIA H100 80GB HBM3 (capability 9.0, 80.0 GiB)")
    assert results["GPU health"] == ("warn", "GPU 1: slowdowns HwThermalSlowdown")
    assert results["GPU links"] == ("ok", "NVLink between all 2 GPUs")


def test_a_driver_that_hangs_is_queried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = with_driver(tmp_path, f"open({str(tmp_path / 'asked')!r}, 'a').write('x'); __import__('time').sleep(60)")
    monkeypatch.setattr(gpu_checks, "NVML_SECONDS", 3.0)
    results = {name: finding for name, finding, _ in run_checks(gpu_checks.CHECKS, machine)}
    assert results["GPUs"].status == "fail" and "gave no answer within 3 s" in results["GPUs"].state
    assert (tmp_path / "asked").read_text() == "x"


def test_a_broken_driver_and_none(tmp_path: Path) -> None:
    finding = gpu_checks.count(with_driver(tmp_path, 'raise NVMLError("Driver Not Loaded")'))
    assert finding.status == "fail" and "Driver Not Loaded" in finding.state
    (tmp_path / "pynvml.py").write_text("raise ModuleNotFoundError(\"No module named 'pynvml'\", name='pynvml')")
    machine = TwoGpus(environment=os.environ | {"PYTHONPATH": str(tmp_path)})
    results = {name: finding for name, finding, _ in run_checks(gpu_checks.CHECKS, machine)}
    assert results["GPUs"].status == "warn" and "megajax[monitor]" in results["GPUs"].advice
    assert results.keys() <= {"GPUs", "CUDA"}


def test_nvidia_ml_py_has_all_names_of_the_fake() -> None:
    pynvml = pytest.importorskip("pynvml", reason="needs the extra monitor")
    fake: dict = {}
    exec(PYNVML.replace("{init}", "pass"), fake)
    names = [name for name in fake if name.startswith(("nvml", "NVML"))]
    assert len(names) > 18 and [name for name in names if not hasattr(pynvml, name)] == []


def test_the_disk_below_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    finding = host_checks.disk(Machine(tmp_path / "runs" / "first"))
    assert finding.status != "fail" and finding.state.startswith(f"{tmp_path} has")
    assert list(tmp_path.iterdir()) == [], "the check deletes its file"


def test_a_stage_that_hangs_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import sys, time; from megajax.machine import device_trial\n"
        "device_trial.devices = lambda: device_trial.ok('one')\n"
        "device_trial.eager = device_trial.nccl = lambda: None\n"
        "device_trial.matmul = lambda: time.sleep(60)\n"
        "sys.argv = ['devices', '0.5']; device_trial.main()"
    )

    class Hanging(Machine):
        def run(self, *command, seconds=10.0, **variables):
            return super().run(sys.executable, "-u", "-c", program, seconds=seconds, **variables)

    machine = Hanging()
    assert examine.check_stage("devices", machine).state == "one"
    assert examine.check_stage("matmul", machine).state == "matmul gave no answer within 90 s"
    assert "not run: matmul" in examine.check_stage("attention", machine).state


def test_this_machine(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "NCCL_"))}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    command = [sys.executable, "-m", "megajax.doctor", f"--run-dir={tmp_path}", "--json"]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    values = json.loads(process.stdout)
    checks = {check["name"]: check for check in values["checks"]}
    failed = [check for check in values["checks"] if check["status"] == "fail"]
    assert process.returncode == values["exit_code"] == int(bool(failed))
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        assert not failed and checks["GPUs"]["status"] == "warn"
        assert checks["devices"]["state"] == "2 x cpu (cpu)"
        assert checks["all-reduce"]["state"].startswith("exact over 2 devices, 5 times")
        assert checks["matmul"]["status"] == checks["attention"]["status"] == "ok"
    assert {"packages", "disk", "limits"} <= checks.keys()


def test_stages_on_GPUs_try_every_kernel_and_report_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU devices present themselves as GPUs; kernels compute the reference."""
    local_devices = jax.local_devices()
    monkeypatch.setattr(jax, "local_devices", lambda: local_devices[:1])
    on_cpu = device_trial.attention().state
    assert "reference (float32)" in on_cpu and "not tested" in on_cpu
    stand_in(monkeypatch)
    attended = device_trial.attention()
    assert attended.status == "ok" and "not tested" not in attended.state
    assert all(f"{name} (" in attended.state for name in ("cudnn", "pallas", "cudnn_mask", "reference"))
    assert attended.state.count("causal and documents") == len(BACKENDS)
    matmuls = []

    def reference(x: Any, w: Any, sizes: Any, kernel: str) -> Any:
        matmuls.append(kernel)
        return grouped_matmul(x, w, sizes, kernel="reference")

    monkeypatch.setattr(device_trial, "grouped_matmul", reference)
    assert device_trial.grouped().status == "ok" and set(matmuls) == {"mosaic", "reference"}
    assert "(gpu, capability 9.0, 72.0 GiB for jax)" in device_trial.devices().state
    monkeypatch.setattr(device_trial.Machine, "gpu_files", 2)
    assert device_trial.devices().status == "warn" and "2 GPUs installed" in device_trial.devices().state


@pytest.mark.parametrize(("documents", "gradient"), [(False, 0), (True, 2)])
def test_wrong_gradients_and_documents_on_a_GPU_are_detected(
    documents: bool, gradient: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports about cuDNN had a correct result with NaN in one gradient, of some rows only."""
    local_devices = jax.local_devices()
    monkeypatch.setattr(jax, "local_devices", lambda: local_devices[:1])
    stand_in(monkeypatch)

    def backward(q: Any, k: Any, v: Any, mask: Any, *rest: Any, scale: float) -> Any:
        gradients = list(PASSES["reference"].backward(q, k, v, mask, *rest, scale=scale))
        if (mask.query_segments is not None) == documents:
            gradients[gradient] = gradients[gradient].at[0, 0, 0, 0].set(float("nan"))
        return tuple(gradients)

    faulty = PASSES["reference"]._replace(backward=backward)
    monkeypatch.setattr(
        "megajax.kernels.attention.attention.PASSES",
        {**PASSES, "cudnn": faulty, "pallas": PASSES["reference"], "cudnn_mask": PASSES["reference"]},
    )
    finding = device_trial.attention()
    assert finding.status == "fail" and "cudnn (bfloat16)" in finding.state and "backward inf" in finding.state
    assert ("documents forward" in finding.state) == documents and "pallas" not in finding.state
