"""CPU runs keep freed memory, unless the user or the C library decides otherwise."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megajax.processes.xla_options import FREED_MEMORY, keep_freed_memory, keeps_freed_memory

COUNT_FAULTS = """
import resource, sys
import numpy as np
from megajax.command_line.device_flags import use_devices
use_devices(sys.argv[1])
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        np.ones(2**23)  # 64 MiB, above the largest limit of mapped blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def page_faults(devices: str, **variables: str) -> int:
    """Page faults of a process that allocates and frees 64 MiB five times."""
    command = [sys.executable, "-c", COUNT_FAULTS, devices]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables
    return int(subprocess.run(command, env=environment, check=True, capture_output=True, timeout=100).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_a_cpu_run_reuses_the_pages_it_freed() -> None:
    pages = 5 * 64 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    assert page_faults("cpu:2") < pages / 10000
    assert page_faults("cpu:2", GLIBC_TUNABLES="glibc.malloc.mmap_threshold=131072") > pages / 1000, (
        "the user's setting"
    )
    assert page_faults("gpu") > pages / 1000, "a GPU run is left alone"


@pytest.mark.parametrize("variable", ["MALLOC_ARENA_MAX=2", "GLIBC_TUNABLES=glibc.malloc.trim_threshold=0"])
def test_the_users_allocator_settings_stay(variable: str) -> None:
    calls: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *setting: calls.append(setting) or 1)
    name, _, value = variable.partition("=")
    environment = {name: value, FREED_MEMORY: "kept"}
    assert not keep_freed_memory(environment, library)
    assert not calls and not keeps_freed_memory(environment), "nor is the mark of a parent process kept"


def test_a_library_may_lack_or_refuse_the_settings() -> None:
    assert not keep_freed_memory({}, SimpleNamespace())
    assert not keep_freed_memory({}, SimpleNamespace(mallopt=lambda *setting: 0))
    environment: dict[str, str] = {}
    assert keep_freed_memory(environment, SimpleNamespace(mallopt=lambda *setting: 1))
    assert keeps_freed_memory(environment)
