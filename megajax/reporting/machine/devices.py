"""Test all devices of jax in stages, printing JSON lines. Any stage may hang or crash: see trial.py."""

import faulthandler
import json
import sys
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from megajax.config.errors import UserError
from megajax.kernels.attention import attend, local_device
from megajax.kernels.capability import BACKENDS, Request
from megajax.kernels.mask import Mask
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh, find_devices
from megajax.mesh.processes import each_process
from megajax.reporting.machine.machine import Finding, Machine, fail, ok, warn
from megajax.reporting.machine.trial import FIRST_AID, STAGES
from megajax.text import byte_size

SIZE = 512
"""Rows and columns of the matrices."""

ROWS, LENGTH, HEADS, GROUPS, HEAD = 2, 128, 4, 2, 64
"""Shape of the attention: batch B, sequence S, heads N, key heads K, head dimension H."""

REPEATS, ELEMENTS = 5, 1 << 18
"""Runs of each matmul; elements of each device in the all-reduce."""

TIGHT, ROUNDED = 1e-5, 1e-2
"""Relative error of an operation summed in float32; of attention in 16 bits, with 2^-9 per number and weight."""


def devices() -> Finding:
    """jax finds devices, among them all GPUs of this machine."""
    find_devices()
    kinds: Counter[str] = Counter()
    for device in jax.local_devices():
        capability = getattr(device, "compute_capability", None)
        size = (device.memory_stats() or {}).get("bytes_limit")
        kind = f"{device.device_kind} ({device.platform}" + (f", capability {capability}" if capability else "")
        kinds[kind + (f", {byte_size(size)} for jax)" if size else ")")] += 1
    text = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    gpus, used = Machine().gpu_files, sum(device.platform == "gpu" for device in jax.local_devices())
    if gpus and not used:
        return fail(f"{text}, with {gpus} GPUs", "uv sync --extra cuda12 (or cuda13); unset JAX_PLATFORMS")
    if used < gpus:
        return warn(f"{text}, {gpus} GPUs installed", "check CUDA_VISIBLE_DEVICES; nvidia-smi -L")
    return ok(text)


def matmul() -> Finding:
    """Matmuls of every device agree with numpy in float64 (error by Frobenius norm), and repeats are bit-equal."""
    random = np.random.default_rng(7)
    a, b = (random.standard_normal((SIZE, SIZE)).astype(np.float32) for _ in range(2))
    product = jax.jit(lambda x, y: jnp.dot(x, y, precision="highest", preferred_element_type=jnp.float32))
    failures, worst = [], 0.0
    for device in jax.local_devices():
        for dtype in (jnp.float32, jnp.bfloat16):
            x, y = (jax.device_put(jnp.asarray(array, dtype), device) for array in (a, b))
            first, *repeats = (np.asarray(product(x, y)) for _ in range(REPEATS))
            error = relative_error(first, np.asarray(x, np.float64) @ np.asarray(y, np.float64))
            worst = max(worst, error)
            name = f"device {device.id} {jnp.dtype(dtype).name}"
            failures += [f"{name}: error {error:.1e}"] * (error > TIGHT)
            failures += [f"{name}: not reproducible"] * any(not np.array_equal(first, repeat) for repeat in repeats)
    if failures:
        return fail("; ".join(failures), "take the device out of service: its results can't be trusted")
    return ok(f"correct and reproducible on all devices (relative error {worst:.0e})")


def attention() -> Finding:
    """Every attention kernel that runs here agrees with the float64 formula: causal, with grouped queries."""
    random = np.random.default_rng(11)
    shapes = ((ROWS, LENGTH, HEADS, HEAD), *[(ROWS, LENGTH, GROUPS, HEAD)] * 2)
    arrays = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    positions = jnp.arange(LENGTH, dtype=jnp.int32)
    mask = Mask(positions, positions, None, None)
    results, refused, failures = [], [], []
    for name, backend in BACKENDS.items():
        dtype = jnp.float32 if backend.dtypes is None else jnp.bfloat16
        request = Request(dtype=jnp.dtype(dtype).name, key_dim=HEAD, value_dim=HEAD, length=LENGTH)
        if refusal := backend.refusal(request, local_device()):
            refused.append(f"; not tested: {backend.label} {refusal}")
            continue
        program, error = jax.jit(lambda q, k, v, name=name: attend(name, q, k, v, mask, scale=HEAD**-0.5)), 0.0
        for device in jax.local_devices():
            q, k, v = (jax.device_put(jnp.asarray(array, dtype), device) for array in arrays)
            expected = formula(*(np.asarray(array, np.float64) for array in (q, k, v)))
            # By default, a GPU rounds float32 to TF32; 16-bit inputs are not affected.
            with jax.default_matmul_precision("highest" if dtype == jnp.float32 else None):
                error = max(error, relative_error(np.asarray(program(q, k, v), np.float64), expected))
        results.append(f"{name} ({request.dtype}) {error:.0e}")
        failures += results[-1:] * (error > (TIGHT if dtype == jnp.float32 else ROUNDED))
    if failures:
        advice = "set the mixer's kernel=reference, or use another cuDNN or jax"
        return fail(f"relative error too large: {', '.join(failures)}", advice)
    return ok(f"relative error: {', '.join(results)}{''.join(refused[:1])}")


def formula(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """softmax(q k^T / sqrt(H)) v over keys at or before each query: q [B, S, N, H], k and v [B, S, K, H], float64."""
    k, v = (np.repeat(array, q.shape[2] // array.shape[2], axis=2) for array in (k, v))
    scores = np.einsum("bsnh,btnh->bnst", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnst,btnh->bsnh", weights / weights.sum(-1, keepdims=True), v)


def all_reduce() -> Finding:
    """The sum of different integers on all local devices is exact, in any order of summation."""
    devices = jax.local_devices()
    mesh = build_mesh(ParallelConfig(data=len(devices)), devices)
    values = np.random.default_rng(13).integers(-1000, 1000, (len(devices), ELEMENTS)).astype(np.float32)
    sharded = jax.device_put(values, each_process(mesh, np.zeros(ELEMENTS, np.float32)).sharding)
    shards, expected = jax.jit(lambda x: x.sum(0))(sharded).addressable_shards, values.sum(0)
    failed_ids = [shard.device.id for shard in shards if not np.array_equal(shard.data, expected[shard.index])]
    if failed_ids:
        text = f"the sum over {len(devices)} devices is wrong on {failed_ids}"
        return fail(text, "set NCCL_DEBUG=WARN for details; if NCCL_P2P_DISABLE=1 helps, a link is at fault")
    return ok(f"exact over {len(devices)} devices" if len(devices) > 1 else "one device: nothing to reduce")


def relative_error(result: np.ndarray, expected: np.ndarray) -> float:
    """Frobenius norm of the difference divided by that of `expected`; inf if not finite."""
    error = float(np.linalg.norm(result - expected) / np.linalg.norm(expected))
    return error if np.isfinite(error) else np.inf


def main() -> None:
    """Run all stages; an exception fails a stage. argv[1] is the time limit of a stage, which ends the process."""
    functions: tuple[Callable[[], Finding], ...] = (devices, matmul, attention, all_reduce)
    for name, stage in zip(STAGES, functions, strict=True):
        print(json.dumps({"stage": name}))
        faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True)  # works even if a driver holds the GIL
        try:
            finding = stage()
        except Exception as error:
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            finding = fail(f"{kind}{error}"[:600], FIRST_AID)
        print(json.dumps({"stage": name, "finding": finding}))
        if name == STAGES[0] and finding.advice == FIRST_AID:  # it raised
            break


if __name__ == "__main__":
    main()
