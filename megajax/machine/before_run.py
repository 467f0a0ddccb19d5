"""Tests devices, links, disks and clocks before a run begins, in all of its processes at once.

`python -m megajax.doctor` runs the same tests: those of one machine's devices in a process of their own, all of them
with --before-run.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from megajax.config.errors import UserError
from megajax.display.text import byte_size
from megajax.machine.check import OUT_OF_SERVICE, TESTS, Finding, fail, ok, warn
from megajax.machine.gpu_checks import health_of
from megajax.machine.gpu_health import GpuHealth, gpu_numbers, load_nvml
from megajax.machine.host_checks import free_space
from megajax.mesh.collectives import reduce_shards
from megajax.mesh.named_shardings import one_for_each_device
from megajax.processes.peers import Peers

ROWS = 512
"""Rows and columns of the test matrices."""
LARGEST = {jnp.float32: (4095, 7), jnp.bfloat16: (8, 8)}
"""Dtype -> largest integers of the two matrices: all sums are exact in float32, in every order. TF32 has no 4095."""
CHUNK_BYTES, MAX_BYTES = 2**22, 2**28
"""Bytes of a reduction's result on each device, and the limit of a device's contribution."""
REPEATS = 5
"""Runs of each product and reduction: the wrong reduce-scatter of jax issue 40830 was right in some runs."""
PERIOD = 997
TRANSFER_BYTES = 2**26
SLOW_SHARE = 0.5
"""A process below this share of the median transfer rate gets a warning."""
SKEW_SECONDS = 2.0

LINKS = (
    "set NCCL_DEBUG=WARN for details; if NCCL_P2P_DISABLE=1 helps, a link is at fault; test one machine after the "
    "other to find the one at fault"
)
"""What to do about wrong sums."""


class Unfit(UserError):
    """A machine failed a test before the run; another may pass."""

    code = 1


def tests(run_dir: Path, peers: Peers) -> Iterator[tuple[str, Finding]]:
    """Yields name and finding of each test as it ends. All processes run all tests together, even if one fails.

    What a process measures alone may fail; it then still takes part in what all do together.
    """
    functions = (
        lambda: attempt(matmul),
        lambda: all_reduce(peers),
        lambda: transfer(peers),
        lambda: clocks(peers),
        lambda: attempt(gpu_health),
        lambda: attempt(partial(free_space, run_dir)),
    )
    for name, test in zip(TESTS, functions, strict=True):
        if (finding := test()) is not None:
            yield name, finding


def attempt[F: Finding | None](test: Callable[[], F]) -> F | Finding:
    """The finding of what this process tests alone; an error is a failure."""
    try:
        return test()
    except (RuntimeError, ValueError, OSError) as error:
        return fail(f"{type(error).__name__}: {str(error)[:300]}", OUT_OF_SERVICE)


def matmul() -> Finding:
    """Multiplies matrices of integers, exact in every order of addition, on each device."""
    random, wrong = np.random.default_rng(7), []
    product = jax.jit(lambda x, y: jnp.dot(x, y, precision="highest", preferred_element_type=jnp.float32))
    for dtype, largest in LARGEST.items():
        a, b = (random.integers(-most, most + 1, (ROWS, ROWS)) for most in largest)
        expected = a @ b
        for device in jax.local_devices():
            x, y = (jax.device_put(jnp.asarray(matrix, dtype), device) for matrix in (a, b))
            if not all(np.array_equal(np.asarray(product(x, y)), expected) for _ in range(REPEATS)):
                wrong.append(f"{device.id} ({jnp.dtype(dtype).name})")
    if wrong:
        return fail(f"wrong products on devices {', '.join(wrong)}", OUT_OF_SERVICE)
    return ok(f"exact on {len(jax.local_devices())} devices, {REPEATS} times")


def all_reduce(peers: Peers) -> Finding:
    """All-reduces and reduce-scatters integers over all devices of all processes, exact in every order."""
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    if mesh.size == 1:
        return ok("one device: nothing to reduce")
    elements = max(min(CHUNK_BYTES, MAX_BYTES // mesh.size) // 4, 1)
    arrays: list[Array] = []

    def contribution(index: Any) -> np.ndarray:
        return ((np.arange(mesh.size * elements) + place_of(index)) % PERIOD).astype(np.float32)[None]

    def place() -> Finding | None:
        sharding = NamedSharding(mesh, one_for_each_device(mesh))
        arrays.append(jax.make_array_from_callback((mesh.size, mesh.size * elements), sharding, contribution))
        return None

    failure = attempt(place)
    # Processes also compile together, because XLA divides autotuning between them.
    if (problem := peers.agree(failure.state if failure else None)) is not None:
        return failure or warn(f"not run: {problem}", "see that process")
    return attempt(lambda: compare_sums(mesh, elements, arrays[0]))


def compare_sums(mesh: Mesh, elements: int, contributions: Array) -> Finding:
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
        return fail(f"wrong sums over {mesh.size} devices: {', '.join(sorted(failed))}", LINKS)
    return ok(f"exact over {mesh.size} devices, {REPEATS} times, in chunks of {byte_size(4 * elements)}")


def place_of(index: tuple[slice, ...]) -> int:
    """The first row of a shard."""
    return index[0].start or 0


def transfer(peers: Peers) -> Finding:
    """Measures bytes per second from the host to each device, and compares the slowest device of each process."""
    rates: list[float] = []
    failure = attempt(partial(measure_transfer, rates))
    measured = [rate for rate in peers.gather(None if failure else min(rates)) if rate is not None]
    if failure:
        return failure
    state = f"{byte_size(min(rates))}/s at least"
    if min(rates) < SLOW_SHARE * (median := float(np.median(measured))):
        state += f", the median of the processes is {byte_size(median)}/s"
        return warn(state, "compare PCIe generation and width: nvidia-smi -q -d PCI")
    return ok(state)


def measure_transfer(rates: list[float]) -> None:
    """Appends the bytes per second to each of this process's devices."""
    block = np.ones(TRANSFER_BYTES, np.uint8)
    for device in jax.local_devices():
        jax.block_until_ready(jax.device_put(block[:1024], device))
        start = time.monotonic()
        jax.block_until_ready(jax.device_put(block, device))
        rates.append(TRANSFER_BYTES / max(time.monotonic() - start, 1e-6))


def clocks(peers: Peers) -> Finding | None:
    """Measures the difference between the clocks of the processes, after a barrier."""
    if peers.count == 1:
        return None
    peers.agree()
    times = peers.gather(time.time())
    skew = max(times) - min(times)
    state = f"{skew:.2f} s apart, of {len(times)} processes"
    return warn(state, "run an NTP client: logs of processes can't be compared") if skew > SKEW_SECONDS else ok(state)


def gpu_health() -> Finding | None:
    """Reads the faults of this process's GPUs from the driver."""
    devices = jax.local_devices()
    if devices[0].platform != "gpu":
        return None
    nvml, why = load_nvml()
    if nvml is None:
        return warn(why, "pip install 'megajax[monitor]'")
    numbers = gpu_numbers((device.local_hardware_id for device in devices), os.environ)
    return health_of(GpuHealth(nvml, numbers).poll())


def demand_health(run_dir: Path, say: Callable[[str], None], event: Callable[..., None]) -> None:
    """Run the tests. Raises Unfit on every process if one of them failed a test."""
    start, peers = time.monotonic(), Peers("preflight")
    results = dict(tests(run_dir, peers))
    failed = refusals(peers, [*results.values()])
    event("health_checks", seconds=round(time.monotonic() - start, 3), failed=failed, **{
        name.replace(" ", "_").replace("-", "_"): finding.state for name, finding in results.items()
    })  # fmt: skip
    say("health before the run: " + "; ".join(f"{name} {finding.state}" for name, finding in results.items()))
    if failed:
        local = "; ".join(f"{name}: {finding.state}" for name, finding in results.items() if finding.status == "fail")
        processes = f"process{'es' * (len(failed) > 1)} {', '.join(map(str, failed))}"
        raise Unfit(
            f"{processes} of {jax.process_count()} failed a test before the run{f' ({local})' * bool(local)}; leave "
            "the machine out, or set resilience.health.before_run=false"
        )


def refusals(peers: Peers, findings: Sequence[Finding]) -> list[int]:
    """Indices of the processes on which a test failed; the same on all processes."""
    flags = peers.gather(any(finding.status == "fail" for finding in findings))
    return [index for index, failed in enumerate(flags) if failed]
