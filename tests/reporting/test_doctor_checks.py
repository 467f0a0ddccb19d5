"""Every check of the doctor on faked machines: good, doubtful and bad."""

import json
import resource
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megajax.reporting.machine import devices, environment, gpus, software, storage, system, trial
from megajax.reporting.machine.check import Check, fail, ok, run_checks, warn
from megajax.reporting.machine.examine import CHECKS, examine
from megajax.reporting.machine.machine import Machine, Output

JAX = {"jax": "0.12.0.1", "jaxlib": "0.12.0.1"}
CUDA = JAX | {"jax-cuda12-plugin": "0.12.0.1", "jax-cuda12-pjrt": "0.12.0.1"}
NEEDS = {"megajax": ["jax>=0.11.2", "orbax-checkpoint<0.13,>=0.12.4", "tiktoken; extra == 'tokenizers'"]}
INSTALLED = CUDA | {"orbax-checkpoint": "0.12.8"}
GIB, MIB = 2**30, 2**20
GPU = {
    **{"name": "NVIDIA H100", "capability": "9.0", "memory_total": 80 * GIB, "memory_used": 4 * MIB, "ecc": 1},
    **{"uncorrected_errors": 0, "remap_pending": 0, "remap_failed": 0, "temperature": 34, "slowdowns": []},
    **{"pcie_width": 16, "pcie_width_max": 16, "persistence": 1, "mig": 0, "nvlinks": 18},
}
MEMINFO = "MemTotal: 67108864 kB\nMemAvailable: 62914560 kB\n"


class FakeMachine(Machine):
    """A machine of which everything is given. run: program or last word of a command -> its output."""

    def __init__(
        self,
        *,
        packages: Mapping[str, str] = JAX,
        requires: Mapping[str, list[str]] = NEEDS,
        files: Mapping[str, str] | None = None,
        run: Mapping[str, Output] | Output | None = None,
        gpu_files: int = 0,
        run_dir: Path | None = None,
        **variables: str,
    ):
        super().__init__(run_dir, variables)
        self.packages, self.gpu_files, self._requires, self._files = packages, gpu_files, requires, files or {}
        self._outputs = run or {}

    def run(self, *command: str, seconds: float = 10.0, **variables: str) -> Output:
        return self._outputs if isinstance(self._outputs, Output) else self._outputs[command[0]]

    def read(self, path: str) -> str:
        return self._files.get(path, "")

    def requires(self, package: str) -> list[str]:
        return list(self._requires.get(package, []))


def out(text: str = "", *, code: int | None = 0, err: str = "", why: str = "") -> Output:
    return Output(code, text, err, why)


def machine(**given: Any) -> Machine:
    return FakeMachine(**given)


def with_gpus(*given: Mapping[str, Any], number: int | None = None, **facts: Any) -> Machine:
    """A machine whose driver says this."""
    found = {"gpus": given, "version": "550.54.15", "without_nvlink": []} | facts
    packages = facts.pop("packages", CUDA)
    found.pop("packages", None)
    count = len(given) if number is None else number
    return FakeMachine(run=out(json.dumps(found)), gpu_files=count, packages=packages)


def tried(*lines: dict[str, Any], **failed: Any) -> Machine:
    """A machine on which the process that tries the devices printed these lines, and how it ended."""
    return FakeMachine(run=Output(failed.get("code", 0), "\n".join(map(json.dumps, lines)), failed.get("err", "")))


def stage(name: str, *finding: str) -> list[dict[str, Any]]:
    return [{"stage": name}, {"stage": name, "finding": finding}]


DEVICES = stage("devices", "ok", "8 x H100", "")

CASES = (
    (software.packages, machine(packages=INSTALLED), "ok", "orbax-checkpoint 0.12.8"),
    (software.packages, machine(packages=JAX), "fail", "installed is none"),
    (software.packages, machine(packages=INSTALLED | {"orbax-checkpoint": "0.13.0"}), "fail", "installed is 0.13.0"),
    (
        software.packages,
        machine(packages=INSTALLED | {"jaxlib": "0.11.2"}, requires=NEEDS | {"jax": ["jaxlib>=0.12"]}),
        "fail",
        "jax requires jaxlib>=0.12, installed is 0.11.2",
    ),
    (software.packages, machine(requires={}), "warn", "megajax is not installed"),
    (software.cuda_plugin, machine(), "ok", "none"),
    (software.cuda_plugin, machine(packages=CUDA), "ok", "plugin are both 0.12.0.1"),
    (software.cuda_plugin, machine(packages=CUDA | {"jax-cuda12-plugin": "0.11.2"}), "fail", "plugin 0.11.2"),
    (software.cuda_plugin, machine(packages=CUDA | {"jax-cuda13-plugin": "1"}), "fail", "cuda12 and cuda13 are both"),
    (software.cuda_plugin, machine(packages=JAX | {"jax-cuda12-plugin": "0.12.0.1"}), "fail", "jaxlib 0.12.0.1 with"),
    (environment.compiler_flags, machine(), "ok", "none set"),
    (environment.compiler_flags, machine(XLA_FLAGS="--xla_a=1", run=out()), "ok", "xla_a: known"),
    (
        environment.compiler_flags,
        machine(XLA_FLAGS="--xla_a=1", run=out(code=-6, err="F1 Unknown flag in XLA_FLAGS: --xla_a=1\n")),
        "fail",
        "--xla_a=1 is not known",
    ),
    (environment.compiler_flags, machine(XLA_FLAGS="--xla_a=1", run=out(code=1, err="boom")), "fail", "code 1: boom"),
    (environment.platforms, machine(gpu_files=8), "ok", "may choose"),
    (environment.platforms, machine(gpu_files=8, JAX_PLATFORMS="cpu"), "fail", "JAX_PLATFORMS=cpu with 8 GPUs"),
    (environment.platforms, machine(gpu_files=8, JAX_PLATFORMS="cuda,cpu"), "ok", "cuda"),
    (environment.platforms, machine(JAX_PLATFORMS="cuda"), "fail", "with no GPUs"),
    (environment.platforms, machine(JAX_PLATFORMS="cpu"), "ok", "cpu"),
    (environment.platforms, machine(gpu_files=8, CUDA_VISIBLE_DEVICES=""), "fail", "shows 0 of 8"),
    (environment.platforms, machine(gpu_files=8, CUDA_VISIBLE_DEVICES="0,1"), "warn", "shows 2 of 8"),
    (environment.variables, machine(HOME="/root", NCCL_DEBUG="WARN"), "ok", "none"),
    (environment.variables, machine(JAX_DISABLE_JIT="True", HTTP_PROXY="p:1"), "warn", "HTTP_PROXY=p:1: connections"),
    (system.memory, machine(files={"/proc/meminfo": MEMINFO}), "ok", "60.0 GiB of 64.0 GiB"),
    (
        system.memory,
        machine(
            files={
                "/proc/meminfo": MEMINFO,
                "/proc/self/cgroup": "0::/job/step\n",
                "/sys/fs/cgroup/job/memory.max": str(8 * GIB),
                "/sys/fs/cgroup/job/memory.current": str(6 * GIB),
            }
        ),
        "warn",
        "2.0 GiB of the control group's 8.0 GiB free",
    ),
    (system.host_name, machine(run=out("10.0.0.3\n10.0.0.3\n")), "ok", "is 10.0.0.3"),
    (system.host_name, machine(run=out("127.0.1.1\n")), "warn", "other machines can't reach"),
    (system.host_name, machine(run=out(code=1, err="gaierror: unknown\n")), "warn", "gaierror: unknown"),
    (system.host_name, machine(run=out(code=None, why="gave no answer within 5 s")), "warn", "within 5 s"),
    (storage.disk, machine(run=out(str(640 * MIB))), "ok", "640.0 MiB/s"),
    (storage.disk, machine(run=out(str(32 * MIB))), "warn", "32.0 MiB/s"),
    (storage.disk, machine(run=out(code=1, err="OSError: Read-only file system\n")), "fail", "Read-only"),
    (storage.disk, machine(run=out(code=None, why="gave no answer within 30 s")), "fail", "within 30 s"),
    (gpus.count, with_gpus(), "warn", "no NVIDIA GPU"),
    (gpus.count, with_gpus(GPU), "ok", "1 x NVIDIA H100 (capability 9.0, 80.0 GiB)"),
    (gpus.count, with_gpus(GPU, number=2), "fail", "knows 1 GPUs, the kernel 2"),
    (gpus.count, with_gpus(GPU, GPU | {"name": "NVIDIA A100"}), "warn", "NVIDIA A100"),
    (gpus.count, machine(gpu_files=8, run=out(code=None, why="gave no answer within 20 s")), "fail", "no answer"),
    (gpus.count, machine(gpu_files=8, run=out(code=1, err="No module named 'pynvml'")), "warn", "is not installed"),
    (gpus.version, with_gpus(GPU), "ok", "new enough"),
    (gpus.version, with_gpus(GPU, version="470.1"), "fail", "too old for jax-cuda12-plugin"),
    (gpus.version, with_gpus(GPU, packages=JAX), "warn", "no CUDA plugin"),
    (gpus.version, machine(run=out(code=1)), None, ""),
    (gpus.health, with_gpus(GPU), "ok", "no memory errors"),
    (gpus.health, with_gpus(), None, ""),
    (gpus.health, with_gpus(GPU | {"uncorrected_errors": 3}), "fail", "GPU 0 has 3 uncorrected"),
    (gpus.health, with_gpus(GPU | {"remap_failed": 1, "mig": 1}), "fail", "no spare memory rows"),
    (gpus.health, with_gpus(GPU, GPU | {"remap_pending": 1}), "warn", "GPU 1 needs a reset"),
    (gpus.health, with_gpus(GPU | {"ecc": 0}), "warn", "ECC off"),
    (gpus.health, with_gpus(GPU | {"temperature": 91}), "warn", "91 °C"),
    (gpus.health, with_gpus(GPU | {"slowdowns": ["HwSlowdown"]}), "warn", "HwSlowdown"),
    (gpus.health, with_gpus(GPU | {"memory_used": 40 * GIB}), "warn", "40,960 MiB in use"),
    (gpus.health, with_gpus(GPU | {"pcie_width": 8}), "warn", "x8 of x16"),
    (gpus.health, with_gpus(GPU | {"mig": 1}), "warn", "partitioned"),
    (gpus.health, with_gpus(GPU | {"persistence": 0}), "warn", "persistence mode off"),
    (gpus.health, with_gpus(GPU | dict.fromkeys(("ecc", "temperature", "pcie_width_max", "mig"))), "ok", "free"),
    (gpus.log, machine(run=out("nothing"), gpu_files=8), "ok", "no Xid"),
    (gpus.log, machine(run=out("NVRM: Xid (PCI:0000:17:00): 79, fallen off"), gpu_files=8), "fail", "79 at 0000:17:00"),
    (gpus.log, machine(run=out("NVRM: Xid (PCI:0000:17:00): 13, Graphics"), gpu_files=8), "warn", "Xid 13"),
    (gpus.log, machine(run=out(code=1), gpu_files=8), "warn", "can't be read"),
    (gpus.log, machine(), None, ""),
    (gpus.links, with_gpus(GPU, GPU), "ok", "NVLink between all 2 GPUs, 18 links each"),
    (gpus.links, with_gpus(GPU, GPU, without_nvlink=["0-1"]), "warn", "no NVLink"),
    (gpus.links, with_gpus(GPU, GPU, GPU, without_nvlink=["0-2"]), "warn", "pairs without: 0-2"),
    (gpus.links, with_gpus(GPU, GPU | {"nvlinks": 12}), "warn", "[12, 18]"),
    (gpus.links, with_gpus(GPU), None, ""),
)
TRIED = (
    ("devices", tried(*DEVICES, *stage("matmul", "ok", "fine", "")), "ok", "8 x H100"),
    ("devices", tried(code=1, err="ImportError: jax"), "fail", "jax can't be imported: it ended with code 1"),
    ("devices", tried({"stage": "devices"}, code=-9), "fail", "devices was killed by signal 9"),
    ("matmul", tried({"stage": "devices"}, code=-9), "warn", "not run: devices was killed"),
    ("matmul", tried(*DEVICES, {"stage": "matmul"}, code=1, err="Timeout (0:01:30)!\n"), "fail", "no answer within 90"),
    ("matmul", tried(*stage("devices", "fail", "no cuda devices", "x")), "warn", "not run: no devices"),
)


def check(finding: Any, status: str | None, words: str) -> None:
    if status is None:
        assert finding is None
        return
    assert finding.status == status and words in finding.found, finding
    assert bool(finding.advice) == (status != "ok"), "a problem comes with advice"


@pytest.mark.parametrize(("look", "given", "status", "words"), CASES)
def test_findings(look: Any, given: Machine, status: str | None, words: str) -> None:
    check(look(given), status, words)


@pytest.mark.parametrize(("name", "given", "status", "words"), TRIED)
def test_findings_of_the_trial(name: str, given: Machine, status: str, words: str) -> None:
    check(trial.check_stage(name, given), status, words)


@pytest.mark.parametrize(
    ("affinity", "quota", "given", "status", "words"),
    [
        (64, "max 100000", 8, "ok", "64 of 64"),
        (64, "250000 100000", 8, "warn", "2.5 of 64 usable, for 8 GPUs"),
        (1, "", 0, "warn", "1 of 64"),
    ],
)
def test_cores(affinity: int, quota: str, given: int, status: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(system.os, "sched_getaffinity", lambda _: range(affinity), raising=False)
    check(system.cores(machine(files={"/sys/fs/cgroup/cpu.max": quota}, gpu_files=given)), status, words)


@pytest.mark.parametrize(
    ("size", "given", "status"), [(64 * GIB, 8, "ok"), (64 * MIB, 0, "warn"), (64 * MIB, 8, "fail"), (None, 0, "warn")]
)
def test_shared_memory(size: int | None, given: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def statvfs(path: str) -> SimpleNamespace:
        if size is None:
            raise FileNotFoundError(path)
        return SimpleNamespace(f_blocks=size, f_frsize=1)

    monkeypatch.setattr(system.os, "statvfs", statvfs)
    check(system.shared_memory(machine(gpu_files=given)), status, "/dev/shm")


@pytest.mark.parametrize(
    ("files", "locked", "infiniband", "status"),
    [(65536, 8 * MIB, False, "ok"), (4096, -1, False, "warn"), (256, -1, False, "fail"), (65536, MIB, True, "fail")],
)
def test_limits(files: int, locked: int, infiniband: bool, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: (files, files), resource.RLIMIT_MEMLOCK: (locked, locked)}
    monkeypatch.setattr(system.resource, "getrlimit", limits.get)
    given = machine()
    given.once("infiniband", lambda _: infiniband)
    check(system.limits(given), status, "")


@pytest.mark.parametrize(
    ("free", "inodes", "status"), [(500, 10**6, "ok"), (5, 10**6, "warn"), (500, 9, "warn"), (0, 9, "fail")]
)
def test_disk_space(free: int, inodes: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = SimpleNamespace(f_bavail=free * GIB, f_frsize=1, f_favail=inodes, f_files=10**6)
    monkeypatch.setattr(storage.os, "statvfs", lambda _: figures)
    check(storage.disk(machine(run=out(str(640 * MIB)))), status, "free")


def test_cuda_libraries_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "libcudart.so.11").touch()
    path = {"LD_LIBRARY_PATH": str(tmp_path)}
    check(environment.library_path(machine()), "ok", "no CUDA libraries")
    check(environment.library_path(machine(**path)), "ok", "libcudart.so.11")
    wheels = JAX | {"nvidia-cuda-runtime-cu12": "12"}
    check(environment.library_path(machine(packages=wheels, **path)), "warn", "before those of jax's wheels")


@pytest.mark.parametrize("look", [devices.matmul, devices.attention])
def test_wrong_results_fail(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "relative_error", lambda result, expected: 0.3)
    check(look(), "fail", "3")


def test_results_that_change_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.np, "array_equal", lambda a, b: False)
    check(devices.matmul(), "fail", "not reproducible")
    check(devices.all_reduce(), "fail", "is wrong on")


def test_a_result_that_is_not_finite_has_an_infinite_error() -> None:
    assert devices.relative_error(np.array([np.nan]), np.array([1.0])) == np.inf


def test_every_check_is_tested_above() -> None:
    here = {look for look, *_ in CASES} | {system.cores, system.shared_memory, system.limits, environment.library_path}
    assert {look for name, look in CHECKS if name not in trial.STAGES} == here
    assert len({name for name, _ in CHECKS}) == len(CHECKS)


def test_an_exception_becomes_a_warning() -> None:
    def broken(given: Machine) -> None:
        raise OSError("no such thing")

    checks: list[Check] = [("a", broken), ("b", lambda given: None)]
    ((name, finding, _),) = run_checks(checks, Machine())
    assert (name, finding.status, finding.found) == ("a", "warn", "could not be checked: OSError: no such thing")


def test_exit_codes(capsys: pytest.CaptureFixture) -> None:
    good, odd, bad = (
        (name, lambda given, made=made: made)
        for name, made in (("g", ok("fine\nreally")), ("o", warn("odd", "do this")), ("b", fail("bad", "do that")))
    )
    assert examine(None, as_json=False, checks=[good, odd]) == 0
    shown = capsys.readouterr().out
    assert "1 ok, 1 warnings, 0 failed" in shown and "→ do this" in shown and "fine really" in shown
    assert examine(None, as_json=True, checks=[good, bad]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["exit_code"] == 1 and [each["status"] for each in values["checks"]] == ["ok", "fail"]
