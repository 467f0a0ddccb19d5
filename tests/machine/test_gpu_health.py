"""Health of GPUs during a run, through a stand-in of NVML."""

import json
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from gpu_stand_in import stand_in

from megajax.faults.config import HealthConfig
from megajax.job.integrity.integrity import message, watch_gpus
from megajax.machine.gpu_health import GpuHealth, HealthThread, Symptom, gpu_numbers, load_nvml
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh


class NvmlError(Exception):
    pass


class Nvml:
    """Two GPUs; what they report is set by tests."""

    NVMLError = NvmlError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_TEMPERATURE_GPU = 1, 0, 0
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, nvmlEventTypeXidCriticalError = 1, 8
    nvmlClocksThrottleReasonHwSlowdown, nvmlClocksThrottleReasonHwThermalSlowdown = 8, 64
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown, nvmlClocksThrottleReasonSwThermalSlowdown = 128, 32

    def __init__(self) -> None:
        self.errors, self.reasons, self.rows, self.temperature = [0, 0], [4, 0], [(0, 0, 0, 0)] * 2, [40, 40]
        self.limit, self.xids, self.watched = [700_000, 700_000], [], []

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return {"GPU-b": 1}[uuid]

    def nvmlDeviceGetIndex(self, handle):
        return handle

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, counter):
        return self.errors[handle]

    def nvmlDeviceGetRemappedRows(self, handle):
        return self.rows[handle]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.reasons[handle]

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return self.temperature[handle]

    def nvmlDeviceGetTemperatureThreshold(self, handle, kind):
        return 87

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return self.limit[handle]

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle):
        return 700_000

    def nvmlEventSetCreate(self):
        return "events"

    def nvmlDeviceRegisterEvents(self, handle, kinds, events):
        self.watched.append(handle)

    def nvmlEventSetWait_v2(self, events, milliseconds):
        if not self.xids:
            raise NvmlError("Timeout")
        return SimpleNamespace(device=1, eventData=self.xids.pop())


def test_only_changes_are_reported():
    nvml = Nvml()
    health = GpuHealth(nvml, [0, 1])
    assert nvml.watched == [0, 1]
    assert health.poll() == [], "a power cap (reason 4) is usual under load"
    nvml.reasons[1], nvml.errors[0], nvml.temperature[1] = 64 + 8, 3, 88
    assert health.poll() == [
        Symptom(0, "uncorrected_errors", 3),
        Symptom(1, "slowdowns", "HwSlowdown, HwThermalSlowdown"),
        Symptom(1, "temperature", "88 of at most 87 °C"),
    ]
    assert health.poll() == []
    nvml.reasons[1], nvml.temperature[1], nvml.limit[0], nvml.rows[0] = 0, 60, 500_000, (1, 2, 1, 0)
    nvml.xids = [79]
    symptoms = health.poll()
    assert symptoms == [
        Symptom(0, "retired_pages", 2),
        Symptom(0, "remap_pending", True),
        Symptom(0, "power_limit", "500 W, usually 700 W"),
        Symptom(1, "slowdowns", ""),
        Symptom(1, "temperature", ""),
        Symptom(1, "xid", 79),
    ]
    assert message(symptoms[2]) == "GPU 0: power limited: 500 W, usually 700 W"
    assert message(symptoms[1]) == "GPU 0: a memory row that the next reset replaces"
    assert message(symptoms[3]) == "GPU 1: no longer clocks slowed down"


def test_unsupported_readings_are_omitted(monkeypatch):
    def unsupported(*arguments):
        raise NvmlError("Not Supported")

    nvml = Nvml()
    for name in dir(nvml):
        if name.startswith("nvmlDeviceGet") and "Handle" not in name:
            monkeypatch.setattr(Nvml, name, unsupported)
    monkeypatch.setattr(Nvml, "nvmlEventSetCreate", unsupported)
    assert GpuHealth(nvml, [0]).poll() == []


def test_the_gpus_of_this_process():
    assert gpu_numbers([0, 1], {}) == [0, 1]
    assert gpu_numbers([0, 1], {"CUDA_VISIBLE_DEVICES": "4,6"}) == [4, 6]
    assert gpu_numbers([1], {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}) == ["GPU-b"]
    nvml = Nvml()
    nvml.errors[1] = 1
    assert GpuHealth(nvml, ["GPU-b"]).poll() == [Symptom(1, "uncorrected_errors", 1)]


def test_the_thread_survives_a_failing_driver():
    answers, symptoms, heard = iter([RuntimeError("lost"), [Symptom(0, "xid", 79)]]), [], threading.Event()

    def poll() -> list[Symptom]:
        answer = next(answers, [])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def on_change(symptom: Symptom) -> None:
        symptoms.append(symptom)
        heard.set()

    with HealthThread(poll, 0.01, on_change):
        assert heard.wait(100)
    assert symptoms == [Symptom(0, "xid", 79)]


@pytest.mark.parametrize("process", [0, 1])
def test_a_run_on_gpus_writes_events(process, tmp_path: Path, monkeypatch, capfd):
    mesh = build_mesh(ParallelConfig(data=2), jax.devices()[:2])
    lines, file = [], tmp_path / "events.jsonl"
    nvml = Nvml()
    nvml.errors[0] = 2
    stand_in(monkeypatch)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    changed = threading.Event()

    def record(name, **fields):
        file.write_text(json.dumps({"event": name} | fields))
        changed.set()

    with ExitStack() as stack:
        assert watch_gpus(HealthConfig(), mesh, stack, lines.append, record) == "health of GPUs: checked every 60 s"
        assert changed.wait(100)
    event = json.loads(file.read_text())
    assert event == {"event": "health", "process": process, "gpu": 0, "what": "uncorrected_errors", "value": 2}
    line = f"process {process}, GPU 0: uncorrected memory errors: 2"
    assert lines == [line] * (process == 0)
    assert (line in capfd.readouterr().err) == (process == 1)


def not_loaded() -> None:
    raise NvmlError("Driver Not Loaded")


def test_without_gpus_or_nvml_nothing_is_watched(monkeypatch, tmp_path):
    mesh = build_mesh(ParallelConfig(data=1), jax.devices()[:1])

    with ExitStack() as stack:
        assert watch_gpus(HealthConfig(), mesh, stack, print, print) is None
        stand_in(monkeypatch)
        monkeypatch.setitem(sys.modules, "pynvml", None)
        line = watch_gpus(HealthConfig(), mesh, stack, print, print)
        assert line is not None and "not watched, nvidia-ml-py is not installed" in line
        assert watch_gpus(HealthConfig(every_seconds=None), mesh, stack, print, print) is None
    broken = SimpleNamespace(NVMLError=NvmlError, nvmlInit=not_loaded)
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert load_nvml() == (None, "the driver does not answer: Driver Not Loaded")


def test_the_stand_in_has_names_that_nvml_has():
    pynvml = pytest.importorskip("pynvml", reason="needs the extra monitor")
    names = [name for name in dir(Nvml) if name.startswith(("nvml", "NVML"))]
    assert len(names) > 20 and [name for name in names if not hasattr(pynvml, name)] == []
