"""One session of eight fake CPU devices, strict about what jax would let pass."""

import gc
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

# The plugin of the extra `aot` compiles for virtual GPUs. Without these it looks for a CUDA installation and complains.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile much and run little: without LLVM's optimizations compiling takes half the time. XLA's own passes, which
# decide about collectives, memory and rounding, run as they do for users. Workers of pytest share the cores, so one
# that generates code in parallel only adds work: without it a test takes a seventh less processor time.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1",
)
# Nobody reads where in the source an operation of a test's program came from: without it a file of layouts takes an
# eighth less processor time to lower and compile.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Dozens of tests start processes: they and pytest itself keep the bytecode they make, whatever the machine's habit.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import jax
import pytest
from gangs import start_processes
from jax.experimental.compilation_cache import compilation_cache
from left_behind import LeftBehind
from shards import COUNT, ShardReport, is_sharded, shard, shard_of
from user_errors import MessagesPlugin

from megajax.planning.compiled.devices import missing_packages

__all__ = ["start_processes"]
sys.dont_write_bytecode = False
jax.config.update("jax_num_cpu_devices", 8)
# Tracing makes many objects and hardly any cycles: the collector looks at the whole heap less often.
gc.set_threshold(100_000, 50, 100)
# A shell that starts the tests in the background has them, and what they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the texts of tests/golden anew")
    parser.addoption("--shard", type=shard, help=f"of slow tests, those of one shard: a number of 1 to {COUNT}")


def pytest_configure(config: pytest.Config) -> None:
    """Files in the order of their names: by number of tests, those of one long test come last, one worker idle."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    for plugin in (ShardReport(), LeftBehind()):
        config.pluginmanager.register(plugin)
    if config.getoption("update_golden"):
        config.pluginmanager.register(MessagesPlugin())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` or `-m smoke`, files without such a test are not imported.

    A lent GPU machine has no data loader, for one; and importing all files takes as long as a third of the smoke tests.
    """
    mark = config.option.markexpr
    if mark in ("gpu", "smoke") and collection_path.suffix == ".py":
        return True if f"pytest.mark.{mark}" not in collection_path.read_text(encoding="utf-8") else None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of other shards leave; tests with the mark `aot` are skipped where its packages are missing."""
    if number := config.getoption("shard"):
        others = [item for item in items if is_sharded(item.keywords) and shard_of(item.nodeid) != number]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
    compiled = [item for item in items if item.get_closest_marker("aot")]
    if compiled and (missing := missing_packages()):
        skip = pytest.mark.skip(reason=f"compiles for virtual GPUs, and {' and '.join(missing)} is missing: extra aot")
        for item in compiled:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Caches and temporary files are in folders of this session, and in those of the processes that tests start.

    Its workers share the caches: a program is compiled once. What is left in the folder of temporary files is named.
    """
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    jax.config.update("jax_compilation_cache_dir", str(shared / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    compilation_cache.reset_cache()
    temporary = own / "temporary"
    temporary.mkdir()
    os.environ |= {"XDG_CACHE_HOME": str(shared / "cache"), "TMPDIR": str(temporary)}
    tempfile.tempdir = None  # Read the variable again.
    yield
    if left := [path.name for path in temporary.iterdir()]:
        warnings.warn(f"tests have left temporary files: {left}", stacklevel=1)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """It is restored, whatever a test made of it: a command line with --devices=cpu:8 is for later programs as well.

    Where Mosaic's libraries are stays: jax writes it down once, when it is first imported.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        if not name.startswith("MOSAIC_GPU_"):
            del os.environ[name]
    os.environ.update(before)
