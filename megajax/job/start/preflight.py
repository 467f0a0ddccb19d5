"""Tests devices, links, disks and clocks before a run begins, in all of its processes at once."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from megajax.config.errors import UserError
from megajax.faults.gpu_health import GpuHealth, gpu_numbers, load_nvml
from megajax.job.device_memory import size
from megajax.mesh.collectives import reduce_shards
from megajax.mesh.named_shardings import one_for_each_device
from megajax.mesh.processes.peers import Peers

ROWS = 512
"""Rows and columns of the test matrices."""
CHUNK_BYTES, MAX_BYTES = 2**22, 2**28
"""Bytes of a reduction's result on each device, and the limit of a device's contribution."""
REPEATS = 5
"""Runs of each reduction: the wrong reduce-scatter of jax issue 40830 was right in some runs."""
PERIOD = 997
TRANSFER_BYTES = 2**26
SLOW_SHARE = 0.5
"""A process below this share of the median transfer rate gets a warning."""
MIN_FREE_BYTES = 2**30
SKEW_SECONDS = 2.0


class Outcome(NamedTuple):
    """The result of a test on this process."""

    name: str
    status: Literal["ok", "warn", "fail"]
    """fail: refuse to train on this process's machine."""
    state: str


class Unfit(UserError):
    """A machine failed a test before the run; another may pass."""

    code = 1


def tests(run_dir: Path, peers: Peers) -> Iterator[Outcome]:
    """Yields the result of each test as it ends. All processes run all tests together, even if one fails.

    What a process measures alone may fail; it then still takes part in what all do together.
    """
    for name, test in (
        ("matmul", lambda: attempt(matmul)),
        ("all-reduce", lambda: all_reduce(peers)),
        ("host to device", lambda: transfer(peers)),
        ("clocks", lambda: clocks(peers)),
        ("GPU health", lambda: attempt(gpu_health)),
        ("disk", lambda: attempt(lambda: disk(run_dir))),
    ):
        status, state = test()
        if state:
            yield Outcome(name, status, state)


type Result = tuple[Literal["ok", "warn", "fail"], str]
"""Status and state; an empty state if the test does not apply."""


def attempt(test: Callable[[], Result]) -> Result:
    """The result of what this process tests alone; an error is a failure."""
    try:
        return test()
    except (RuntimeError, ValueError, OSError) as error:
        return "fail", f"{type(error).__name__}: {str(error)[:300]}"


def matmul() -> Result:
    """Multiplies matrices of small integers, exact in every order of addition, on each device."""
    random = np.random.default_rng(7)
    a, b = (random.integers(-8, 9, (ROWS, ROWS)) for _ in range(2))
    expected, failed = a @ b, []
    product = jax.jit(lambda x, y: jnp.dot(x, y, precision="highest", preferred_element_type=jnp.float32))
    for device in jax.local_devices():
        for dtype in (jnp.float32, jnp.bfloat16):
            x, y = (jax.device_put(jnp.asarray(matrix, dtype), device) for matrix in (a, b))
            if not np.array_equal(np.asarray(product(x, y)), expected):
                failed.append(f"{device.id} ({jnp.dtype(dtype).name})")
    if failed:
        return "fail", f"wrong products on devices {', '.join(failed)}"
    return "ok", f"exact on {len(jax.local_devices())} devices"


def all_reduce(peers: Peers) -> Result:
    """All-reduces and reduce-scatters integers over all devices of all processes, exact in every order."""
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    if mesh.size == 1:
        return "ok", "one device"
    elements = max(min(CHUNK_BYTES, MAX_BYTES // mesh.size) // 4, 1)
    arrays: list[Array] = []

    def contribution(index: Any) -> np.ndarray:
        return ((np.arange(mesh.size * elements) + place_of(index)) % PERIOD).astype(np.float32)[None]

    def place() -> Result:
        sharding = NamedSharding(mesh, one_for_each_device(mesh))
        arrays.append(jax.make_array_from_callback((mesh.size, mesh.size * elements), sharding, contribution))
        return "ok", ""

    status, state = attempt(place)
    # Processes also compile together, because XLA divides autotuning between them.
    if (problem := peers.agree(state if status == "fail" else None)) is not None:
        return status, state or f"not run: {problem}"
    return attempt(lambda: compare_sums(mesh, elements, arrays[0]))


def compare_sums(mesh: Mesh, elements: int, contributions: Array) -> Result:
    """Sums the contributions of all devices and compares. A collective. elements: of the result on each device."""
    spec, failed = one_for_each_device(mesh), set()
    # The sum of the contributions of places 0 to n - 1 repeats after PERIOD elements.
    indices = np.arange(PERIOD)
    total = sum(((indices + place) % PERIOD for place in range(mesh.size)), np.zeros(PERIOD, np.int64))
    total = total.astype(np.float32)

    def local(x: Array) -> tuple[Array, Array]:
        scattered = reduce_shards(x[0], ((0, "devices"),))
        summed = reduce_shards(x[0, :elements], (), ("devices",))
        return scattered[None], summed[None]

    reduce = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False))
    for _ in range(REPEATS):
        scattered, summed = reduce(contributions)
        for kind, array in (("reduce-scatter", scattered), ("all-reduce", summed)):
            for shard in array.addressable_shards:
                first = place_of(shard.index) * elements if kind == "reduce-scatter" else 0
                expected = total[np.arange(first, first + elements) % PERIOD]
                if not np.array_equal(np.asarray(shard.data)[0], expected):
                    failed.add(f"{kind} on device {shard.device.id}")
    if failed:
        return "fail", f"wrong sums over {mesh.size} devices: {', '.join(sorted(failed))}"
    return "ok", f"exact over {mesh.size} devices, {REPEATS} times, in chunks of {size(4 * elements)}"


def place_of(index: Any) -> int:
    """The first row of a shard."""
    return index[0].start or 0


def transfer(peers: Peers) -> Result:
    """Measures bytes per second from the host to each device, and compares the slowest device of each process."""
    rates: list[float] = []
    status, state = attempt(lambda: measure_transfer(rates))
    measured = [rate for rate in peers.gather(min(rates) if status == "ok" else None) if rate is not None]
    if status == "ok" and min(rates) < SLOW_SHARE * (median := float(np.median(measured))):
        return "warn", f"{state}, the median of the processes is {size(median)}/s"
    return status, state


def measure_transfer(rates: list[float]) -> Result:
    """Appends the bytes per second to each of this process's devices."""
    block = np.ones(TRANSFER_BYTES, np.uint8)
    for device in jax.local_devices():
        jax.block_until_ready(jax.device_put(block[:1024], device))
        start = time.monotonic()
        jax.block_until_ready(jax.device_put(block, device))
        rates.append(TRANSFER_BYTES / max(time.monotonic() - start, 1e-6))
    return "ok", f"{size(min(rates))}/s at least"


def clocks(peers: Peers) -> Result:
    """Measures the difference between the clocks of the processes, after a barrier."""
    if peers.count == 1:
        return "ok", ""
    peers.agree()
    times = peers.gather(time.time())
    skew = max(times) - min(times)
    return ("warn" if skew > SKEW_SECONDS else "ok"), f"{skew:.2f} s apart, of {len(times)} processes"


def gpu_health() -> Result:
    """Reads the faults of this process's GPUs from the driver."""
    devices = jax.local_devices()
    if devices[0].platform != "gpu":
        return "ok", ""
    nvml, why = load_nvml()
    if nvml is None:
        return "warn", why
    symptoms = GpuHealth(nvml, gpu_numbers((device.local_hardware_id for device in devices), os.environ)).poll()
    fatal = any(symptom.what in ("uncorrected_errors", "remap_failed", "xid") for symptom in symptoms)
    text = "; ".join(f"GPU {symptom.gpu}: {symptom.what.replace('_', ' ')} {symptom.value}" for symptom in symptoms)
    return ("fail" if fatal else "warn" if symptoms else "ok"), text or "no memory errors, no slowdown"


def disk(run_dir: Path) -> Result:
    """Checks the free space on the disk of the run folder."""
    run_folder = run_dir.expanduser().absolute()
    folder = next(path for path in (run_folder, *run_folder.parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    return ("fail" if free < MIN_FREE_BYTES else "ok"), f"{folder} has {size(free)} free"


def demand_health(run_dir: Path, say: Callable[[str], None], event: Callable[..., None]) -> None:
    """Run the tests. Raises Unfit on every process if one of them failed a test."""
    start, peers = time.monotonic(), Peers("preflight")
    results = [*tests(run_dir, peers)]
    failed = refusals(peers, results)
    event("health_checks", seconds=round(time.monotonic() - start, 3), failed=failed, **{
        result.name.replace(" ", "_").replace("-", "_"): result.state for result in results
    })  # fmt: skip
    say("health before the run: " + "; ".join(f"{result.name} {result.state}" for result in results))
    if failed:
        local = "; ".join(f"{result.name}: {result.state}" for result in results if result.status == "fail")
        processes = f"process{'es' * (len(failed) > 1)} {', '.join(map(str, failed))}"
        raise Unfit(
            f"{processes} of {jax.process_count()} failed a test before the run{f' ({local})' * bool(local)}; leave "
            "the machine out, or set resilience.health.before_run=false"
        )


def refusals(peers: Peers, results: Sequence[Outcome]) -> list[int]:
    """Indices of the processes on which a test failed; the same on all processes."""
    flags = peers.gather(any(result.status == "fail" for result in results))
    return [index for index, failed in enumerate(flags) if failed]
