"""What the doctor makes of what it sees: every check with faked sights, good, doubtful and bad."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from megajax.reporting.machine import environment, gpus, software, storage, system, tried
from megajax.reporting.machine.check import Check, Finding, exit_code, fail, ok, run_checks, warn
from megajax.reporting.machine.examine import examine, table
from megajax.reporting.machine.gpus import Cards, Told
from megajax.reporting.machine.machine import Machine, Output, Stages
from megajax.reporting.machine.software import Needs
from megajax.reporting.machine.storage import GIB, MIB

JAX = {"jax": "0.12.0.1", "jaxlib": "0.12.0.1"}
CUDA = JAX | {"jax-cuda12-plugin": "0.12.0.1", "jax-cuda12-pjrt": "0.12.0.1"}
CORE = ("jax>=0.11.2", "flax>=0.12", "orbax-checkpoint>=0.12.4,<0.13")
INSTALLED = CUDA | {"flax": "0.12.12", "orbax-checkpoint": "0.12.8", "matplotlib": "3.10"}
EXTRAS = {"plot": ("matplotlib",), "hf": ("safetensors", "huggingface-hub")}
GPU = {
    **{"index": "0", "name": "NVIDIA H100 80GB HBM3", "driver_version": "550.54.15", "compute_cap": "9.0"},
    **{"memory.total": "81559", "memory.used": "4"},
}
HEALTHY = {
    "index": "0",
    "ecc.mode.current": "Enabled",
    "ecc.errors.uncorrected.volatile.total": "0",
    "temperature.gpu": "34",
}
ROWS = {"index": "0", "remapped_rows.pending": "No", "remapped_rows.failure": "No"}
LINK = {
    **{"index": "0", "pcie.link.width.current": "16", "pcie.link.width.max": "16"},
    **{"persistence_mode": "Enabled", "mig.mode.current": "Disabled"},
}
CLOCKS = {"index": "0", "clocks_event_reasons.hw_slowdown": "Not Active"}
DISK = {"bytes": 64 * MIB, "seconds": 0.1, "fsync": 0.001, "free": 500 * GIB, "inodes": 10**6, "skew": 0.0}
MATRIX = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tNV18\tPXB\t0-47\t0
GPU1\tNV18\t X \tNV18\tNODE\t0-47\t0
GPU2\tNV18\tNV18\t X \tNODE\t0-47\t0
NIC0\tPXB\tNODE\tNODE\t X \t\t

Legend:
  X    = Self
"""


def told(*rows: Mapping[str, str]) -> Told:
    return Told(tuple(rows))


def out(text: str = "", *, code: int | None = 0, err: str = "", why: str = "") -> Output:
    return Output(code, text, err, why)


def stages(**done: Any) -> Stages:
    return Stages(done, {})


def hung(stage: str, **done: Any) -> Stages:
    return Stages(done, {}, stage, "did not come back within 90 s")


def products(error: float = 1e-7, repeats: bool = True) -> list[dict[str, Any]]:
    return [{"device": 0, "dtype": "float32", "error": error, "repeats": repeats}]


def cpu(number: int = 1) -> list[dict[str, Any]]:
    return [{"id": 0, "platform": "cpu", "kind": "cpu", "capability": None, "memory": None}] * number


def h100() -> list[dict[str, Any]]:
    return [{"id": 0, "platform": "gpu", "kind": "NVIDIA H100", "capability": "9.0", "memory": 75 * 2**30}]


def summed(**changes: Any) -> dict[str, Any]:
    return {"devices": 8, "wrong": [], "reduced": True, "milliseconds": 0.5, "bytes": 2**20} | changes


def attended(error: float, backend: str = "cudnn", dtype: str = "bfloat16") -> list[dict[str, Any]]:
    refused = {"backend": "pallas", "dtype": "bfloat16", "refusal": "the Pallas kernel needs an NVIDIA GPU"}
    return [{"backend": backend, "dtype": dtype, "error": error}, refused]


CASES: tuple[tuple[Callable[[Any], Finding | None], Any, str | None, str], ...] = (
    (software.judge_python, (3, 12, 1), "ok", "3.12.1"),
    (software.judge_python, (3, 11, 9), "fail", "3.11.9"),
    (software.judge_packages, Needs(CORE, {}, INSTALLED), "ok", "orbax-checkpoint 0.12.8"),
    (
        software.judge_packages,
        Needs(CORE, {}, INSTALLED | {"orbax-checkpoint": "0.13.0"}),
        "fail",
        "0.13.0 is not >=0.12.4,<0.13",
    ),
    (software.judge_packages, Needs((*CORE, "grain>=0.2.18"), {}, INSTALLED), "fail", "not installed: grain"),
    (software.judge_plugin, JAX, "ok", "no CUDA plugin"),
    (software.judge_plugin, CUDA, "ok", "plugin for CUDA 12 are all 0.12.0.1"),
    (software.judge_plugin, JAX | {"jaxlib": "0.11.2"}, "fail", "jax 0.12.0.1 with jaxlib 0.11.2"),
    (software.judge_plugin, CUDA | {"jax-cuda12-plugin": "0.11.2"}, "fail", "jax-cuda12-plugin 0.11.2"),
    (software.judge_plugin, CUDA | {"jax-cuda13-plugin": "0.12.0.1"}, "fail", "CUDA 12 and CUDA 13 side by side"),
    (software.judge_plugin, JAX | {"jax-cuda12-plugin": "0.12.0.1"}, "fail", "only half"),
    (software.judge_plugin, {"jax": "0.12.0.1"}, "fail", "missing"),
    (software.judge_imported, (stages(versions={"jax": "0.12.0.1"}), JAX), "ok", "installed"),
    (software.judge_imported, (stages(versions={"jax": "0.9.0"}), JAX), "fail", "0.9.0 where 0.12.0.1 is installed"),
    (software.judge_imported, (hung("versions"), JAX), None, ""),
    (software.judge_extras, Needs(CORE, EXTRAS, INSTALLED), "ok", "plot; not there: hf"),
    (software.judge_extras, Needs(CORE, EXTRAS, INSTALLED | {"safetensors": "1"}), "ok", "hf lacks huggingface-hub"),
    (software.judge_driver, ("550.54.15", CUDA), "ok", "new enough"),
    (software.judge_driver, ("470.1", CUDA), "fail", "too old for CUDA 12"),
    (software.judge_driver, ("550.54", JAX | {"jax-cuda13-plugin": "0.12.0.1"}), "fail", "too old for CUDA 13"),
    (software.judge_driver, ("550.54", JAX), "warn", "no CUDA plugin"),
    (software.judge_driver, (None, CUDA), None, ""),
    (environment.judge_flags, ((), None), "ok", "none set"),
    (environment.judge_flags, (["xla_a"], out()), "ok", "xla_a: known"),
    (
        environment.judge_flags,
        (["xla_a"], out(code=-6, err="F1 Unknown flag in XLA_FLAGS: --xla_a=1\n")),
        "fail",
        "--xla_a=1 is not known",
    ),
    (environment.judge_flags, (["xla_a"], out(code=1, err="boom")), "fail", "jax does not start: boom"),
    (
        environment.judge_flags,
        (["xla_a"], out(code=None, why="did not come back within 60 s")),
        "warn",
        "did not come back",
    ),
    (environment.judge_platforms, environment.Platforms("", None, 8), "ok", "may choose"),
    (environment.judge_platforms, environment.Platforms("cpu", None, 8), "fail", "keeps jax from 8 GPUs"),
    (environment.judge_platforms, environment.Platforms("cuda,cpu", None, 8), "ok", "cuda"),
    (environment.judge_platforms, environment.Platforms("cuda", None, 0), "fail", "without a GPU"),
    (environment.judge_platforms, environment.Platforms("", "", 8), "fail", "hides all 8"),
    (environment.judge_platforms, environment.Platforms("", "0,1", 8), "warn", "2 of 8"),
    (environment.judge_paths, environment.Paths((), True), "ok", "no CUDA libraries"),
    (environment.judge_paths, environment.Paths(("/cuda (libcudart.so.11)",), True), "warn", "before jax's own"),
    (environment.judge_paths, environment.Paths(("/cuda (libcudart.so.12)",), False), "ok", "/cuda"),
    (environment.judge_variables, {"HOME": "/root", "NCCL_DEBUG": "WARN"}, "ok", "none"),
    (environment.judge_variables, {"JAX_DISABLE_JIT": "True", "HTTP_PROXY": "p:1"}, "warn", "HTTP_PROXY: connections"),
    (system.judge_processors, system.Processors(64, 64, None, 8), "ok", "64 of 64"),
    (system.judge_processors, system.Processors(64, 64, 2.5, 8), "warn", "2.5 of 64 may be used (limit"),
    (system.judge_processors, system.Processors(64, 1, None, 0), "warn", "1 of 64"),
    (system.judge_memory, system.Memory(64 * GIB, 60 * GIB, None, None), "ok", "60.0 of 64.0"),
    (system.judge_memory, system.Memory(64 * GIB, 60 * GIB, 8 * GIB, 6 * GIB), "warn", "6.0 of its 8.0"),
    (system.judge_shared, (64 * GIB, 8), "ok", "64.00 GiB"),
    (system.judge_shared, (64 * MIB, 0), "warn", "0.06 GiB"),
    (system.judge_shared, (64 * MIB, 8), "fail", "0.06 GiB"),
    (system.judge_shared, (None, 0), "warn", "not there"),
    (system.judge_files, (65536, 65536), "ok", "65,536"),
    (system.judge_files, (4096, 65536), "warn", "4,096"),
    (system.judge_files, (256, 256), "fail", "256"),
    (system.judge_locked, (8 * MIB, 0), "ok", "no InfiniBand"),
    (system.judge_locked, (8 * MIB, 2), "fail", "8 MiB"),
    (system.judge_locked, (-1, 2), "ok", "2 InfiniBand"),
    (system.judge_name, ("a", out("10.0.0.3\n10.0.0.3\n")), "ok", "a is 10.0.0.3"),
    (system.judge_name, ("a", out("127.0.1.1\n")), "warn", "other machines cannot reach"),
    (system.judge_name, ("a", out(code=1, err="gaierror: unknown\n")), "warn", "does not resolve: gaierror"),
    (system.judge_name, ("a", out(code=None, why="did not come back within 5 s")), "warn", "within 5 s"),
    (system.judge_synchronised, {"timedatectl": out("yes\n")}, "ok", "synchronised"),
    (system.judge_synchronised, {"timedatectl": out("no\n")}, "warn", "not synchronised"),
    (
        system.judge_synchronised,
        {"chronyc": out("System time     : 0.000012 seconds slow\nLeap status     : Normal\n")},
        "ok",
        "0.0 ms",
    ),
    (system.judge_synchronised, {"chronyc": out("Leap status     : Not synchronised\n")}, "warn", "not synchronised"),
    (system.judge_synchronised, {"timedatectl": out(code=None), "chronyc": out(code=None)}, "ok", "nobody"),
    (storage.judge_disk, ("/runs", DISK), "ok", "640 MiB/s"),
    (storage.judge_disk, ("/runs", DISK | {"seconds": 2.0}), "warn", "32 MiB/s"),
    (storage.judge_disk, ("/runs", DISK | {"fsync": 0.8}), "warn", "800.0 ms"),
    (storage.judge_disk, ("/runs", out(code=1, err="OSError: Read-only file system\n")), "fail", "Read-only"),
    (storage.judge_disk, ("/runs", out(code=None, why="did not come back within 30 s")), "fail", "within 30 s"),
    (storage.judge_space, ("/runs", DISK), "ok", "500.0 GiB"),
    (storage.judge_space, ("/runs", DISK | {"free": 5 * GIB}), "warn", "5.0 GiB"),
    (storage.judge_space, ("/runs", DISK | {"inodes": 50}), "warn", "50 files"),
    (storage.judge_space, ("/runs", DISK | {"free": MIB}), "fail", "0.0 GiB"),
    (storage.judge_space, ("/runs", out(code=1)), None, ""),
    (storage.judge_skew, ("/runs", DISK), "ok", "agree"),
    (storage.judge_skew, ("/runs", DISK | {"skew": -90.0}), "warn", "90.00 s behind"),
    (gpus.judge_cards, Cards(told(), 0), "warn", "no NVIDIA GPU"),
    (gpus.judge_cards, Cards(told(GPU), 1), "ok", "1 x NVIDIA H100 80GB HBM3 (capability 9.0, 80 GiB)"),
    (gpus.judge_cards, Cards(Told((), "did not come back within 20 s"), 8), "fail", "did not come back"),
    (gpus.judge_cards, Cards(told(GPU), 2), "fail", "1 GPUs, the kernel of 2"),
    (gpus.judge_cards, Cards(told(GPU, GPU | {"name": "NVIDIA A100"}), 2), "warn", "NVIDIA A100"),
    (gpus.judge_memory, told(GPU), "ok", "free"),
    (gpus.judge_memory, told(GPU | {"memory.used": "40000"}), "warn", "GPU 0 40,000 MiB"),
    (gpus.judge_memory, told(), None, ""),
    (gpus.judge_health, (told(HEALTHY), told(ROWS)), "ok", "ECC enabled"),
    (
        gpus.judge_health,
        (told(HEALTHY | {"ecc.errors.uncorrected.volatile.total": "3"}), told()),
        "fail",
        "3 uncorrected",
    ),
    (gpus.judge_health, (told(HEALTHY | {"ecc.mode.current": "Disabled"}), told()), "warn", "ECC is off"),
    (gpus.judge_health, (told(HEALTHY | {"temperature.gpu": "91"}), told()), "warn", "91 °C"),
    (gpus.judge_health, (told(HEALTHY), told(ROWS | {"remapped_rows.failure": "Yes"})), "fail", "no memory rows left"),
    (gpus.judge_health, (told(HEALTHY), told(ROWS | {"remapped_rows.pending": "Yes"})), "warn", "waits for a reset"),
    (gpus.judge_health, (told(HEALTHY | {"ecc.errors.uncorrected.volatile.total": "[N/A]"}), told()), "ok", "ECC"),
    (gpus.judge_slowdown, told(CLOCKS), "ok", "not held down"),
    (gpus.judge_slowdown, told(CLOCKS | {"clocks_event_reasons.hw_slowdown": "Active"}), "warn", "GPU 0: hw slowdown"),
    (gpus.judge_link, told(LINK), "ok", "full width"),
    (gpus.judge_link, told(LINK | {"pcie.link.width.current": "8"}), "warn", "x8 of x16"),
    (gpus.judge_link, told(LINK | {"mig.mode.current": "Enabled"}), "warn", "slices"),
    (gpus.judge_xid, (out("nothing"), 8), "ok", "no Xid"),
    (
        gpus.judge_xid,
        (out("[1.2] NVRM: Xid (PCI:0000:17:00): 79, GPU has fallen off the bus."), 8),
        "fail",
        "Xid 79 at 0000:17:00",
    ),
    (gpus.judge_xid, (out("NVRM: Xid (PCI:0000:17:00): 13, Graphics Exception"), 8), "warn", "Xid 13"),
    (gpus.judge_xid, (out(code=1), 8), "warn", "cannot be read"),
    (gpus.judge_xid, (out(), 0), None, ""),
    (gpus.judge_topology, (out(MATRIX), 3), "ok", "every pair of 3 GPUs by NV18"),
    (gpus.judge_topology, (out(MATRIX.replace("NV18", "PHB")), 3), "warn", "no NVLink"),
    (gpus.judge_topology, (out(MATRIX.replace("GPU0\t X \tNV18", "GPU0\t X \tSYS")), 3), "warn", "GPU0-GPU1 SYS"),
    (gpus.judge_topology, (out(MATRIX.replace("GPU0\t X \tNV18", "GPU0\t X \tNV12")), 3), "warn", "unequal"),
    (gpus.judge_topology, (out(), 1), None, ""),
    (tried.judge_devices, stages(devices=h100()), "ok", "NVIDIA H100 (gpu, capability 9.0, 75.0 GiB for jax)"),
    (tried.judge_devices, stages(devices={"error": "no cuda devices"}), "fail", "no cuda devices"),
    (tried.judge_devices, hung("devices"), "fail", "finding devices did not come back"),
    (tried.judge_devices, hung("versions"), "fail", "jax cannot be imported"),
    (tried.judge_found, (stages(devices=cpu()), 0), None, ""),
    (tried.judge_found, (stages(devices=cpu()), 8), "fail", "jax takes the CPU"),
    (tried.judge_found, (stages(devices=h100()), 8), "warn", "1 of 8"),
    (tried.judge_found, (stages(devices=h100()), 1), "ok", "all 1"),
    (tried.judge_matmul, stages(matmul=products()), "ok", "right on 1 device"),
    (tried.judge_matmul, stages(matmul=products(error=1e-3)), "fail", "error 1.0e-03"),
    (tried.judge_matmul, stages(matmul=products(repeats=False)), "fail", "differs from time to time"),
    (tried.judge_matmul, hung("devices"), "warn", "not tried"),
    (tried.judge_matmul, stages(devices={"error": "none"}), "warn", "no devices"),
    (tried.judge_attention, stages(attention=attended(3e-3)), "ok", "cudnn (bfloat16) 3e-03; not here: the Pallas"),
    (tried.judge_attention, stages(attention=attended(0.3)), "fail", "cudnn (bfloat16): error 3.0e-01"),
    (tried.judge_attention, stages(attention=attended(3e-3, "reference", "float32")), "fail", "reference"),
    (tried.judge_attention, stages(attention={"error": "RuntimeError: cuDNN"}), "fail", "RuntimeError: cuDNN"),
    (tried.judge_attention, hung("attention"), "fail", "attention did not come back"),
    (
        tried.judge_all_reduce,
        stages(all_reduce=summed()),
        "ok",
        "exact over 8 devices; 0.50 ms for 1 MiB (2,000 MiB/s)",
    ),
    (tried.judge_all_reduce, stages(all_reduce=summed(devices=1)), "ok", "one device"),
    (tried.judge_all_reduce, stages(all_reduce=summed(wrong=[3])), "fail", "wrong on [3]"),
    (tried.judge_all_reduce, stages(all_reduce=summed(reduced=False)), "warn", "no all-reduce"),
    (tried.judge_all_reduce, hung("all_reduce"), "fail", "the all-reduce did not come back"),
)


@pytest.mark.parametrize(("judge", "seen", "status", "words"), CASES)
def test_judgement(judge: Callable, seen: Any, status: str | None, words: str) -> None:
    finding = judge(seen)
    if status is None:
        assert finding is None
        return
    assert finding is not None and finding.status == status and words in finding.found, finding
    assert bool(finding.advice) == (status != "ok"), "what is not as it should be comes with what to do"


def test_every_check_of_the_table_is_tried_above() -> None:
    tried_here = {judge for judge, *_ in CASES}
    assert {check.judge for check in table()} == tried_here
    assert len({check.name for check in table()}) == len(table())


def test_a_probe_that_raises_is_a_warning() -> None:
    def broken(machine: Machine) -> None:
        raise OSError("no such thing")

    checks = [Check("a", broken, lambda seen: ok("never")), Check("b", lambda machine: 1, lambda seen: None)]
    (result,) = run_checks(checks, Machine())
    assert (result.status, result.found) == ("warn", "could not be looked at: OSError: no such thing")


def test_exit_codes(capsys: pytest.CaptureFixture) -> None:
    good, odd, bad = (
        Check(name, lambda machine: None, lambda seen, made=made: made)
        for name, made in (("g", ok("fine\nreally")), ("o", warn("odd", "do this")), ("b", fail("bad", "do that")))
    )
    assert examine(None, as_json=False, checks=[good, odd]) == 0
    shown = capsys.readouterr().out
    assert "1 ok, 1 to look at, 0 failed" in shown and "→ do this" in shown and "fine really" in shown
    assert examine(None, as_json=False, checks=[good, bad]) == 1
    assert exit_code([]) == 0


def test_versions() -> None:
    assert software.satisfies("0.12.0.1", "jax>=0.11.2") and not software.satisfies("0.11.1", "jax>=0.11.2")
    assert software.satisfies("2.5", "numpy>=2.2,<3") and not software.satisfies("3.0", "numpy>=2.2,<3")
    assert software.satisfies("1.0rc1", "rich") and software.satisfies("0.13", "x==0.13.0")


def test_control_groups_up_to_the_root() -> None:
    assert system.control_groups("0::/a/b\n") == ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup"]
    assert system.control_groups("1:cpu:/x\n") == ["/sys/fs/cgroup"]
