"""Health of the GPUs as the driver reports it through NVML: memory errors, slowdowns, power limits, Xid errors."""

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple, Self

SLOWDOWNS = ("HwSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "SwThermalSlowdown")
"""Reasons of low clocks that are faults, unlike SwPowerCap, which is normal under full load."""

NOT_INSTALLED = "nvidia-ml-py is not installed"


class Symptom(NamedTuple):
    """A change in the health of a GPU."""

    gpu: int
    """Index among all GPUs of the machine."""
    what: str
    """uncorrected_errors, remap_pending, remap_failed, retired_pages, slowdowns, temperature, power_limit, xid or
    driver; also a field of events.jsonl."""
    value: object
    """0, false or "" if the symptom has ended."""


def load_nvml() -> tuple[ModuleType | None, str]:
    """NVML, initialized, and ""; or None and the reason."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, NOT_INSTALLED
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return None, f"the driver does not answer: {error}"
    return nvml, ""


def gpu_numbers(local_ids: Iterable[int], environment: Mapping[str, str]) -> list[int | str]:
    """NVML's indices or UUIDs of the GPUs that this process sees as `local_ids`."""
    visible = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = [visible[i] if i < len(visible) else str(i) for i in local_ids]
    return [int(name) if name.isdigit() else name for name in names]


class GpuHealth:
    """Queries the driver. The first `poll` returns all symptoms, later ones only changes."""

    def __init__(self, nvml: Any, gpus: Iterable[int | str]):
        self._nvml = nvml
        self._handles = {index: handle for index, handle in map(self._handle_of, gpus) if handle is not None}
        self._last_values: dict[tuple[int, str], Any] = {}
        self._xids = self._registered()

    def poll(self) -> list[Symptom]:
        changes = []
        for gpu, handle in self._handles.items():
            for symptom, value in self._readings(handle):
                if value != self._last_values.get((gpu, symptom), type(value)()):
                    changes.append(Symptom(gpu, symptom, value))
                self._last_values[gpu, symptom] = value
        return [*changes, *self._new_xids()]

    def _handle_of(self, gpu: int | str) -> tuple[int, Any]:
        if isinstance(gpu, str):
            handle = self._query("nvmlDeviceGetHandleByUUID", gpu)
            return (self._query("nvmlDeviceGetIndex", handle) or 0, handle) if handle is not None else (0, None)
        return gpu, self._query("nvmlDeviceGetHandleByIndex", gpu)

    def _readings(self, handle: Any) -> Iterator[tuple[str, Any]]:
        """(symptom, value) of all symptoms that the GPU supports; values are 0, false or "" without a fault."""
        nvml = self._nvml
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        yield "uncorrected_errors", self._query("nvmlDeviceGetTotalEccErrors", handle, *kinds) or 0
        _, retired, pending, failed = self._query("nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
        yield "retired_pages", retired
        yield "remap_pending", bool(pending)
        yield "remap_failed", bool(failed)
        reasons = self._query("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        yield "slowdowns", ", ".join(n for n in SLOWDOWNS if reasons & getattr(nvml, f"nvmlClocksThrottleReason{n}"))
        temperature = self._query("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU) or 0
        limit = self._query("nvmlDeviceGetTemperatureThreshold", handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        yield "temperature", f"{temperature} of at most {limit} °C" if limit and temperature >= limit else ""
        now, usual = (self._query(f"nvmlDeviceGet{name}", handle) for name in _LIMITS)
        yield "power_limit", f"{now // 1000} W, usually {usual // 1000} W" if now and usual and now < usual else ""

    def _query(self, name: str, *arguments: Any) -> Any:
        """Call an NVML function; None if the GPU or the driver does not support it."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def _registered(self) -> Any:
        """The set of events that collects Xid errors; None if the driver has none."""
        events = self._query("nvmlEventSetCreate")
        if events is None:
            return None
        for handle in self._handles.values():
            self._query("nvmlDeviceRegisterEvents", handle, self._nvml.nvmlEventTypeXidCriticalError, events)
        return events

    def _new_xids(self) -> Iterator[Symptom]:
        # Without an error, the driver answers with a timeout: an NVMLError.
        while self._xids is not None and (event := self._query("nvmlEventSetWait_v2", self._xids, 0)) is not None:
            index = self._query("nvmlDeviceGetIndex", event.device)
            yield Symptom(-1 if index is None else index, "xid", int(event.eventData))


_LIMITS = ("EnforcedPowerLimit", "PowerManagementDefaultLimit")


class HealthThread:
    """Polls every `seconds` in a background thread, and passes changes to `on_change`."""

    def __init__(self, poll: Callable[[], list[Symptom]], seconds: float, on_change: Callable[[Symptom], None]):
        self._poll, self._seconds, self._on_change = poll, seconds, on_change
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu health", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        # A hanging driver must not keep the process alive.
        self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # a full disk or a missing driver must not end a run
                for symptom in self._poll():
                    self._on_change(symptom)
            if self._over.wait(self._seconds):
                return
