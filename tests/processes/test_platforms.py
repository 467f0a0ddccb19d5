"""Decisions by platform before a mesh exists: devices found, how processes connect, what jax is told."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from user_errors import user_error

from megajax.command_line import device_flags as command_line
from megajax.config.errors import ConfigError
from megajax.mesh import mesh
from megajax.mesh.mesh import find_devices, select_devices
from megajax.processes import start as processes
from megajax.processes.gpus import ONE_GPU, SET_BY_MEGAJAX, SEVERAL_GPUS, assign, nccl_variables
from megajax.processes.installation import Installation
from megajax.processes.start import Membership
from megajax.processes.world import World

GPUS = Installation(8, (550, 54), {"jax": "0.12.0.1", "jaxlib": "0.12.0.1"}, frozenset())


@pytest.fixture
def actual(monkeypatch) -> list[object]:
    """What jax.devices returns; an error is raised. No platform is requested."""
    answers: list[object] = []

    def devices() -> object:
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr(mesh, "find_installation", lambda: GPUS)
    monkeypatch.setattr(mesh.jax, "config", SimpleNamespace(jax_platforms=None))
    return answers


def test_GPUs_are_used_without_a_warning(actual, recwarn):
    actual.append(SimpleNamespace(platform="gpu"))
    assert find_devices() == actual and not recwarn


def test_falling_back_to_the_CPU_with_GPUs_is_a_warning(actual, monkeypatch, recwarn):
    actual.append(SimpleNamespace(platform="cpu"))
    with pytest.warns(UserWarning, match="(?s)training on the CPU: 8 NVIDIA GPUs found, but no CUDA plugin"):
        find_devices()
    recwarn.clear()
    monkeypatch.setattr(mesh.jax, "config", SimpleNamespace(jax_platforms="cpu"))
    find_devices()
    monkeypatch.setattr(mesh.jax, "config", SimpleNamespace(jax_platforms=None))
    monkeypatch.setattr(mesh, "find_installation", lambda: Installation(0, None, GPUS.packages, frozenset()))
    find_devices()
    assert not recwarn, "asked for, or no GPUs there"


@pytest.mark.parametrize(
    ("found_gpus", "texts"), [(GPUS, "8 NVIDIA GPUs found"), (Installation(0, None, {}, frozenset()), "extra cuda12")]
)
def test_missing_GPUs_are_an_error_with_the_remedy(actual, found_gpus, texts, monkeypatch):
    actual.append(RuntimeError("no CUDA-capable device"))
    monkeypatch.setattr(mesh, "find_installation", lambda: found_gpus)
    with user_error() as refused:
        find_devices()
    assert texts in str(refused.value)


def devices_of(*counts: int) -> list[Any]:
    """Stand-ins for the devices of so many processes."""
    return [SimpleNamespace(process_index=index, id=n) for index, count in enumerate(counts) for n in range(count)]


@pytest.mark.parametrize(
    ("counts", "used", "neighbours", "expected"),
    [
        ((8,), 6, 4, [6]),
        ((2, 2, 2), 4, 1, [2, 1, 1]),
        ((2, 2, 2), 4, 2, [2, 1, 1]),
        ((4, 4, 4), 8, 2, [4, 2, 2]),
        ((4, 4, 4), 12, 3, [4, 4, 4]),
        ((3, 1), 3, 1, [2, 1]),
        ((4, 4), 4, 4, [2, 2]),
        ((1, 1, 1), 3, 1, [1, 1, 1]),
    ],
)
def test_each_process_has_devices_in_the_mesh(counts, used, neighbours, expected):
    devices = devices_of(*counts)
    part = select_devices(devices, used, neighbours)
    assert [sum(device.process_index == index for device in part) for index in range(len(counts))] == expected
    assert part == [device for device in devices if device in part], "in their order"


def test_a_mesh_smaller_than_the_number_of_processes_is_refused():
    with user_error("parallel", kind=ConfigError):
        select_devices(devices_of(2, 2, 2), 2)


VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "JAX_LOCAL_DEVICE_IDS",
    "XLA_FLAGS",
    SET_BY_MEGAJAX,
    SEVERAL_GPUS.name,
    ONE_GPU.name,
)


@pytest.fixture
def told(monkeypatch) -> dict[str, Any]:
    """What `start` tells jax. Variables that it sets are removed afterwards."""
    settings: dict[str, Any] = {}
    monkeypatch.setattr(processes.jax.distributed, "initialize", lambda *_, **more: settings.update(more))
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return settings


def start_on(monkeypatch, told: dict[str, Any], devices: Path, platforms: str | None, count: int) -> None:
    """Start process 1 of `count` on one machine, or a process alone."""
    config = SimpleNamespace(jax_platforms=platforms, update=told.__setitem__)
    monkeypatch.setattr(processes.jax, "config", config)
    monkeypatch.setattr(processes, "find_world", lambda: None if count == 1 else World(count, 1, "node:1", 1, count))
    # All processes of the machine see what this one sees.
    monkeypatch.setattr(
        processes, "meet", lambda world, claim, **_: Membership("", assign(dict.fromkeys(range(count), claim))[1])
    )
    processes.start(devices=devices)


def device_folder(folder: Path, gpus: int) -> Path:
    for name in (*(f"nvidia{number}" for number in range(gpus)), "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("platforms", "gpus", "expected"),
    [("cpu", 8, True), ("cuda", 8, False), ("cuda", 0, False), (None, 8, False), (None, 0, True)],
)
def test_processes_on_CPUs_connect_over_gloo_and_those_on_GPUs_do_not(
    platforms, gpus, expected, told, tmp_path, monkeypatch
):
    start_on(monkeypatch, told, device_folder(tmp_path, gpus), platforms, 2)
    assert told.get("jax_cpu_collectives_implementation") == ("gloo" if expected else None)
    assert ("xla_cpu_collective_call" in os.environ.get("XLA_FLAGS", "")) == expected
    assert told["local_device_ids"] == ([4, 5, 6, 7] if gpus and platforms != "cpu" else None)


@pytest.mark.parametrize(
    ("platforms", "gpus", "count", "variable"),
    [
        (None, 8, 1, SEVERAL_GPUS),
        (None, 8, 2, SEVERAL_GPUS),
        (None, 8, 8, ONE_GPU),
        (None, 1, 1, None),
        ("cpu", 8, 8, None),
        (None, 0, 8, None),
    ],
)
def test_NCCL_is_told_how_many_GPUs_a_process_drives(platforms, gpus, count, variable, told, tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    start_on(monkeypatch, told, device_folder(tmp_path, gpus), platforms, count)
    present = {each.name: os.environ.get(each.name) for each in (SEVERAL_GPUS, ONE_GPU)}
    assert present == {each.name: each.value if each is variable else None for each in (SEVERAL_GPUS, ONE_GPU)}
    text = nccl_variables({name: value for name, value in os.environ.items() if name in (*VARIABLES, "NCCL_DEBUG")})
    own = [f"{variable.name}={variable.value} (MegaJAX)"] if variable else []
    assert text == ", ".join(["NCCL_DEBUG=WARN (environment)", *own])


def test_the_user_s_NCCL_variable_is_kept(told, tmp_path, monkeypatch):
    monkeypatch.setenv(ONE_GPU.name, "0")
    start_on(monkeypatch, told, device_folder(tmp_path, 8), None, 8)
    assert nccl_variables({ONE_GPU.name: os.environ[ONE_GPU.name]}) == f"{ONE_GPU.name}=0 (environment)"
    assert SET_BY_MEGAJAX not in os.environ


@pytest.mark.parametrize("files", [(), ("nvidia0", "nvidiactl")])
@pytest.mark.parametrize(
    ("devices", "platforms", "count"),
    [(None, None, None), ("gpu", "cuda", None), ("cuda", "cuda", None), ("cpu:4", "cpu", "4")],
)
def test_local_device_ids(devices, platforms, count, files, tmp_path, monkeypatch):
    names = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(command_line, "Path", lambda path: tmp_path if path == "/dev" else Path(path))
    command_line.use_devices(devices)
    # With a GPU, the check of its libraries stays on.
    assert [os.environ.get(name) for name in names] == [platforms, count, None if files else "1"]
