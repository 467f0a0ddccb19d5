"""Every check of the doctor on fake machines: ok, warn and fail."""

import json
import resource
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from megajax.machine import device_trial, examine, gpu_checks, host_checks, known_faults
from megajax.machine.check import STAGES, Check, CommandOutput, Machine, fail, ok, run_checks, warn
from megajax.processes.installation import Installation

NEEDS = {"megajax": ["jax>=0.11.2", "orbax-checkpoint<0.13,>=0.12.4", "tiktoken; extra == 'tokenizers'"]}
INSTALLED = {"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "orbax-checkpoint": "0.12.8"}
GIB, MIB = 2**30, 2**20
GPU = {**{"name": "NVIDIA H100", "capability": "9.0", "memory_total": 80 * GIB, "memory_used": 4 * MIB}}


class FakeMachine(Machine):
    """A machine on which every command has the output `run`."""

    def __init__(self, run: CommandOutput | None = None, gpu_files: int = 0, **variables: str):
        super().__init__(None, variables)
        self.gpu_files, self._output = gpu_files, run or CommandOutput(0)
        self.variables: dict[str, str] = {}

    def run(self, *command: str, seconds: float = 10.0, **variables: str) -> CommandOutput:
        self.variables = variables
        return self._output


def out(text: str = "", *, code: int | None = 0, err: str = "", why: str = "") -> CommandOutput:
    return CommandOutput(code, text, err, why)


def machine(**options: Any) -> Machine:
    return FakeMachine(**options)


def with_gpus(
    *reports: Mapping[str, Any],
    number: int | None = None,
    symptoms: Sequence[tuple[int, str, Any]] = (),
    without_nvlink: tuple[str, ...] = (),
) -> Machine:
    """A machine whose driver reports these GPUs."""
    answers = {"gpus": reports, "symptoms": symptoms, "without_nvlink": without_nvlink}
    return FakeMachine(run=out(json.dumps(answers)), gpu_files=len(reports) if number is None else number)


def tried(*lines: dict[str, Any], **failed: Any) -> Machine:
    """A machine on which the process that tests the devices printed these lines. failed: exit code, standard error."""
    return FakeMachine(
        run=CommandOutput(failed.get("code", 0), "\n".join(map(json.dumps, lines)), failed.get("err", ""))
    )


def stage(name: str, *finding: str) -> list[dict[str, Any]]:
    return [{"stage": name}, {"stage": name, "finding": finding}]


DEVICES = stage("devices", "ok", "8 x H100", "")

CASES = (
    (host_checks.compiler_flags, machine(), "ok", "none set"),
    (host_checks.compiler_flags, machine(XLA_FLAGS="--xla_a=1", run=out()), "ok", "xla_a: known"),
    (
        host_checks.compiler_flags,
        machine(XLA_FLAGS="--xla_a=1", run=out(code=-6, err="F1 Unknown flag in XLA_FLAGS: --xla_a=1\n")),
        "fail",
        "--xla_a=1 is not known",
    ),
    (host_checks.compiler_flags, machine(XLA_FLAGS="--xla_a=1", run=out(code=1, err="boom")), "fail", "code 1: boom"),
    (host_checks.platforms, machine(gpu_files=8), "ok", "may choose"),
    (host_checks.platforms, machine(gpu_files=8, JAX_PLATFORMS="cpu"), "fail", "JAX_PLATFORMS=cpu with 8 GPUs"),
    (host_checks.platforms, machine(JAX_PLATFORMS="cuda"), "fail", "with no GPUs"),
    (host_checks.platforms, machine(gpu_files=8, CUDA_VISIBLE_DEVICES=""), "fail", "shows 0 of 8"),
    (host_checks.platforms, machine(gpu_files=8, CUDA_VISIBLE_DEVICES="0,9,1"), "warn", "shows 1 of 8"),
    (host_checks.processes, machine(gpu_files=8), "ok", "start 8, with one GPU each and NCCL_LAUNCH_ORDER_IMPLICIT=1"),
    (host_checks.processes, machine(gpu_files=8), "ok", "drive 8 GPUs, with NCCL_LAUNCH_MODE=GROUP"),
    (host_checks.processes, machine(gpu_files=2, NCCL_DEBUG="WARN"), "ok", "set here: NCCL_DEBUG=WARN (environment)"),
    (host_checks.processes, machine(gpu_files=8, CUDA_VISIBLE_DEVICES="3"), None, ""),
    (host_checks.processes, machine(), None, ""),
    (host_checks.variables, machine(HOME="/root", NCCL_P2P_DISABLE="0"), "ok", "none"),
    (host_checks.variables, machine(JAX_DISABLE_JIT="True"), "warn", "JAX_DISABLE_JIT=True: nothing is compiled"),
    (host_checks.disk, machine(run=out(code=1, err="OSError: Read-only file system\n")), "fail", "Read-only"),
    (host_checks.disk, machine(run=out(code=None, why="gave no answer within 30 s")), "fail", "within 30 s"),
    (gpu_checks.count, with_gpus(), "warn", "no NVIDIA GPU"),
    (gpu_checks.count, with_gpus(GPU), "ok", "1 x NVIDIA H100 (capability 9.0, 80.0 GiB)"),
    (gpu_checks.count, with_gpus(GPU, number=2), "fail", "knows 1 GPUs, the kernel 2"),
    (gpu_checks.count, with_gpus(GPU, GPU | {"name": "NVIDIA A100"}), "warn", "NVIDIA A100"),
    (gpu_checks.count, machine(gpu_files=8, run=out(code=None, why="gave no answer within 20 s")), "fail", "no answer"),
    (
        gpu_checks.count,
        machine(gpu_files=8, run=out('{"gpus": [], "why": "nvidia-ml-py is not installed"}')),
        "warn",
        "is not installed",
    ),
    (gpu_checks.health, with_gpus(GPU), "ok", "no memory errors"),
    (gpu_checks.health, with_gpus(), None, ""),
    (gpu_checks.health, with_gpus(GPU, symptoms=[(0, "uncorrected_errors", 3)]), "fail", "GPU 0: uncorrected errors 3"),
    (
        gpu_checks.health,
        with_gpus(GPU, symptoms=[(0, "remap_failed", True), (0, "slowdowns", "HwSlowdown")]),
        "fail",
        "remap failed True; GPU 0: slowdowns HwSlowdown",
    ),
    (gpu_checks.health, with_gpus(GPU, GPU, symptoms=[(1, "remap_pending", True)]), "warn", "GPU 1: remap pending"),
    (gpu_checks.health, with_gpus(GPU, symptoms=[(0, "slowdowns", "HwSlowdown")]), "warn", "HwSlowdown"),
    (gpu_checks.health, with_gpus(GPU | {"memory_used": 40 * GIB}), "warn", "GPU 0: memory in use 40.0 GiB"),
    (gpu_checks.links, with_gpus(GPU, GPU), "ok", "NVLink between all 2 GPUs"),
    (gpu_checks.links, with_gpus(GPU, GPU, without_nvlink=("0-1",)), "warn", "no NVLink"),
    (gpu_checks.links, with_gpus(GPU), None, ""),
)
TRIED = (
    ("devices", tried(*DEVICES, *stage("matmul", "ok", "fine", "")), "ok", "8 x H100"),
    ("devices", tried(code=1, err="ImportError: jax"), "fail", "jax can't be imported: it ended with code 1"),
    ("devices", tried({"stage": "devices"}, code=-9), "fail", "devices was killed by signal 9"),
    ("matmul", tried({"stage": "devices"}, code=-9), "warn", "not run: devices was killed"),
    ("matmul", tried(*DEVICES, {"stage": "matmul"}, code=1, err="Timeout (0:01:30)!\n"), "fail", "no answer within 90"),
    ("matmul", tried(*stage("devices", "fail", "no cuda devices", "x")), "warn", "not run: no devices"),
)


def check(finding: Any, status: str | None, text: str) -> None:
    if status is None:
        assert finding is None
        return
    assert finding.status == status and text in finding.state, finding
    assert bool(finding.advice) == (status != "ok"), "problems have advice"


@pytest.mark.parametrize(("run", "machine_state", "status", "text"), CASES)
def test_findings(run: Any, machine_state: Machine, status: str | None, text: str) -> None:
    check(run(machine_state), status, text)


@pytest.mark.parametrize(("name", "machine_state", "status", "text"), TRIED)
def test_findings_of_the_trial(name: str, machine_state: Machine, status: str, text: str) -> None:
    check(examine.check_stage(name, machine_state), status, text)


@pytest.mark.parametrize(
    ("size", "gpu_files", "status"),
    [(64 * GIB, 8, "ok"), (64 * MIB, 0, "warn"), (64 * MIB, 8, "fail"), (None, 0, "warn")],
)
def test_shared_memory(size: int | None, gpu_files: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def statvfs(path: str) -> SimpleNamespace:
        if size is None:
            raise FileNotFoundError(path)
        return SimpleNamespace(f_blocks=size, f_frsize=1)

    monkeypatch.setattr(host_checks.os, "statvfs", statvfs)
    check(host_checks.shared_memory(machine(gpu_files=gpu_files)), status, "/dev/shm")


@pytest.mark.parametrize(
    ("files", "locked", "infiniband", "status"),
    [(65536, 8 * MIB, False, "ok"), (4096, -1, False, "warn"), (256, -1, False, "fail"), (65536, MIB, True, "fail")],
)
def test_limits(files: int, locked: int, infiniband: bool, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: (files, files), resource.RLIMIT_MEMLOCK: (locked, locked)}
    monkeypatch.setattr(host_checks.resource, "getrlimit", limits.get)
    monkeypatch.setattr(host_checks, "Path", lambda path: SimpleNamespace(glob=lambda pattern: ["mlx5_0"] * infiniband))
    check(host_checks.limits(machine()), status, "")


@pytest.mark.parametrize(
    ("free", "speed", "status"), [(500, 640, "ok"), (500, 32, "warn"), (5, 640, "warn"), (0, 640, "fail")]
)
def test_disk(free: int, speed: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "free_bytes", lambda folder: free * GIB)
    check(host_checks.disk(machine(run=out(str(speed * MIB)))), status, f"{speed}.0 MiB/s")


@pytest.mark.parametrize(
    ("needs", "versions", "status", "text"),
    [
        (NEEDS, INSTALLED, "ok", "orbax-checkpoint 0.12.8"),
        (NEEDS, {"jax": "0.12.0.1"}, "fail", "installed is none"),
        (NEEDS, INSTALLED | {"orbax-checkpoint": "0.13.0"}, "fail", "installed is 0.13.0"),
        (NEEDS | {"jax": ["jaxlib>=0.13"]}, INSTALLED, "fail", "jax requires jaxlib>=0.13, installed is 0.12.0.1"),
        ({}, INSTALLED, "warn", "megajax is not installed"),
    ],
)
def test_packages(needs: dict, versions: dict, status: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "_requirements", lambda package: needs.get(package, []))
    monkeypatch.setattr(host_checks, "_version", versions.get)
    check(host_checks.packages(machine()), status, text)


@pytest.mark.parametrize(
    ("number", "driver", "packages", "status", "text"),
    [
        (8, (550, 54), {"jax-cuda12-plugin": "1"}, "ok", "driver 550.54, plugin for CUDA 12"),
        (8, (470, 1), {"jax-cuda12-plugin": "1"}, "fail", "the NVIDIA driver is 470.1"),
        (8, (550, 54), {}, "fail", "no CUDA plugin of jax"),
        (0, None, {"jax-cuda12-plugin": "1"}, None, ""),
    ],
)
def test_installation(
    number: int, driver: Any, packages: dict, status: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = Installation(number, driver, packages, frozenset(("cudnn", "cublas", "nccl")))
    monkeypatch.setattr(gpu_checks, "find_installation", lambda: installed)
    check(gpu_checks.installation(machine()), status, text)


@pytest.mark.parametrize(
    ("number", "installed", "driver", "cpus", "status", "text"),
    [
        (8, {"nvidia-nccl-cu12": "2.25.1"}, 580, 64, "warn", "nvidia-nccl-cu12 2.25.1: ignores NCCL_LAUNCH_ORDER_IMPL"),
        (8, {"nvidia-nccl-cu13": "2.26.2.post1"}, 580, 64, "ok", "none"),
        (8, {}, 580, 64, "ok", "none"),
        (1, {"nvidia-nccl-cu12": "2.25.1"}, 580, 64, "ok", "none"),
        (0, {"nvidia-nccl-cu12": "2.25.1"}, 580, 64, None, ""),
        (8, {}, 580, 16, "warn", "2 CPUs for each GPU, which needs 4"),
        (8, {"jaxlib": "0.12.0.1"}, 550, 64, "ok", "avoided by runs: jaxlib 0.12.0.1, driver 550.54: CUDA graphs"),
        (1, {"nvidia-cuda-nvcc-cu12": "12.6.77"}, 580, 64, "fail", "gathers give wrong numbers"),
    ],
)
def test_known_faults_that_a_run_here_would_meet(
    number: int, installed: dict, driver: int, cpus: int, status: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_faults, "installed_version", lambda package: installed.get(package, ""))
    there = Installation(number, (driver, 54), {}, frozenset())
    monkeypatch.setattr(known_faults, "find_installation", lambda: there)
    monkeypatch.setattr(known_faults, "processors", lambda: cpus)
    check(known_faults.known_faults(with_gpus(*[GPU] * number)), status, text)


@pytest.mark.slow
@pytest.mark.parametrize("run", [device_trial.attention, device_trial.grouped])
def test_wrong_results_fail(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_trial, "relative_error", lambda result, expected: 0.3)
    check(run(), "fail", "3")


def test_a_non_finite_result_has_an_infinite_error() -> None:
    assert device_trial.relative_error(np.array([np.nan]), np.array([1.0])) == np.inf


def test_every_check_is_tested_above() -> None:
    tested = {run for run, *_ in CASES} | {
        host_checks.shared_memory,
        host_checks.limits,
        host_checks.packages,
        gpu_checks.installation,
        known_faults.known_faults,
    }
    assert {run for name, run in examine.CHECKS if name not in STAGES} == tested
    assert len({name for name, _ in examine.CHECKS}) == len(examine.CHECKS)


def test_an_exception_becomes_a_warning() -> None:
    def broken(machine_state: Machine) -> None:
        raise OSError("no such thing")

    checks: list[Check] = [("a", broken), ("b", lambda machine_state: None)]
    ((name, finding, _),) = run_checks(checks, Machine())
    assert (name, finding.status, finding.state) == ("a", "warn", "could not be checked: OSError: no such thing")


def test_exit_codes(capsys: pytest.CaptureFixture) -> None:
    passing, odd, failing = (
        (name, lambda machine_state, finding=finding: finding)
        for name, finding in (("g", ok("fine\nreally")), ("o", warn("odd", "do this")), ("b", fail("bad", "do that")))
    )
    assert examine.examine(None, as_json=False, checks=[passing, odd]) == 0
    output = capsys.readouterr().out
    assert "1 ok, 1 warnings, 0 failed" in output and "→ do this" in output and "fine really" in output
    assert examine.examine(None, as_json=True, checks=[passing, failing]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["exit_code"] == 1 and [result["status"] for result in values["checks"]] == ["ok", "fail"]


def test_a_stage_that_fails_as_a_known_fault_does_has_its_cure() -> None:
    text = "Device 0 does not support CUDA Virtual Memory Management (VMM)"
    finding = examine.check_stage("devices", tried(*stage("devices", "fail", text, "see dmesg")))
    assert finding.advice.startswith("set XLA_FLAGS=--xla_gpu_experimental_vmm_disabled=true")
    assert finding.advice.endswith("; see dmesg")
    passing = tried(*DEVICES, *[{"stage": "NCCL"}, {"stage": "NCCL", "finding": None}])
    assert examine.check_stage("NCCL", passing) is None, "without a GPU there is nothing to say"


def test_operations_outside_of_jit_are_compared_with_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = jax.local_devices()[:2]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    check(device_trial.eager(), "ok", f"{len(device_trial.EAGER)} operations as in numpy, one by one and compiled")
    wrong = {"sqrt": lambda xp: xp.sqrt(xp.full(3, 512.0)) * (0 if xp is device_trial.jnp else 1)}
    monkeypatch.setattr(device_trial, "EAGER", wrong)
    check(device_trial.eager(), "fail", "sqrt (eager, device 0), sqrt (compiled, device 0), sqrt (eager, device 1)")


class Nccl:
    """A library of NCCL, with the C function that gives its version."""

    def __init__(self, number: int):
        self.number = number

    def ncclGetVersion(self, result: Any) -> None:
        result._obj.value = self.number


@pytest.mark.parametrize(
    ("maps", "number", "installed", "status", "text"),
    [
        ("7f00 r-xp 00:00 /usr/lib/libc.so.6\n", 0, {}, None, ""),
        ("7f00 r-xp 00:00 /v/nccl/lib/libnccl.so.2\n" * 3, 23203, {"nvidia-nccl-cu12": "2.32.3"}, "ok", "NCCL 2.32.3"),
        ("1 /v/libnccl.so.2\n", 23007, {"nvidia-nccl-cu12": "2.30.7"}, "warn", "2.30.7: the first collective hangs"),
        ("1 /opt/libnccl.so.2\n", 22903, {"nvidia-nccl-cu12": "2.32.3"}, "warn", "is not the installed one"),
        ("1 /v/libnccl.so.2\n2 /opt/libnccl.so.2.29.3\n", 23203, {}, "fail", "several are loaded: NCCL 2.32.3"),
    ],
)
def test_the_loaded_NCCL_is_the_installed_one_without_a_fault(
    maps: str, number: int, installed: dict, status: Any, text: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "maps").write_text(maps)
    monkeypatch.setattr(known_faults, "installed_version", lambda package: installed.get(package, ""))
    check(device_trial.nccl(tmp_path / "maps", lambda path: Nccl(number)), status, text)


@pytest.mark.parametrize(("gpus", "expected"), [(8, "GROUP"), (1, None), (0, None)])
def test_the_devices_are_tried_with_the_variables_of_a_run(gpus, expected):
    fake = FakeMachine(gpu_files=gpus)
    examine.run_trial(fake)
    assert fake.variables.get("NCCL_LAUNCH_MODE") == expected
