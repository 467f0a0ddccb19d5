"""Try every device jax finds, stage by stage, in a process of its own, for any stage may hang or crash.

Started by Machine; prints lines of JSON: {"begins": STAGE} and {"stage": STAGE, "found": ..., "seconds": ...}.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.config.errors import UserError
from megajax.kernels.attention import attend, local_device
from megajax.kernels.capability import BACKENDS, Request
from megajax.kernels.mask import Mask
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh, find_devices
from megajax.mesh.processes import each_process

SIZE = 512
"""Rows and columns of the matrices."""

ROWS, LENGTH, HEADS, GROUPS, HEAD = 2, 128, 4, 2, 64
"""Of the attention."""

REPEATS = 5
"""How often a matmul is done: twice the same is asked of a sound device."""

ELEMENTS = 1 << 18
"""float32 numbers each device brings to the sum."""


def versions() -> dict[str, str]:
    """Of what was imported, which is not always what is installed."""
    return {"jax": jax.__version__, "jaxlib": jax.lib.__version__, "numpy": np.__version__}


def found() -> list[dict[str, Any]]:
    """The local devices."""
    find_devices()  # says what to do where there are none
    return [
        {
            "id": device.id,
            "platform": device.platform,
            "kind": device.device_kind,
            "capability": getattr(device, "compute_capability", None),
            "memory": (device.memory_stats() or {}).get("bytes_limit"),
        }
        for device in jax.local_devices()
    ]


def matmul() -> list[dict[str, Any]]:
    """On each device: relative error (Frobenius norm) against numpy in float64, and whether it repeats itself."""
    random = np.random.default_rng(7)
    a, b = (random.standard_normal((SIZE, SIZE)).astype(np.float32) for _ in range(2))
    product = jax.jit(lambda x, y: jnp.dot(x, y, precision="highest", preferred_element_type=jnp.float32))
    results = []
    for device in jax.local_devices():
        for dtype in (jnp.float32, jnp.bfloat16):
            x, y = (jax.device_put(jnp.asarray(each, dtype), device) for each in (a, b))
            wanted = np.asarray(x, np.float64) @ np.asarray(y, np.float64)
            got = [np.asarray(product(x, y)) for _ in range(REPEATS)]
            results.append(
                {
                    "device": device.id,
                    "dtype": jnp.dtype(dtype).name,
                    "error": relative(got[0], wanted),
                    "repeats": all(np.array_equal(got[0], other) for other in got[1:]),
                }
            )
    return results


def attention() -> list[dict[str, Any]]:
    """Each backend that runs here against the formula in float64: causal, with grouped queries."""
    random = np.random.default_rng(11)
    shapes = ((ROWS, LENGTH, HEADS, HEAD), *[(ROWS, LENGTH, GROUPS, HEAD)] * 2)
    arrays = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    results = []
    for name, backend in BACKENDS.items():
        dtype = jnp.float32 if backend.dtypes is None else jnp.bfloat16
        request = Request(dtype=jnp.dtype(dtype).name, key_dim=HEAD, value_dim=HEAD, length=LENGTH)
        entry: dict[str, Any] = {"backend": name, "dtype": request.dtype}
        results.append(entry)
        if refusal := backend.refusal(request, local_device()):
            entry["refusal"] = f"{backend.says} {refusal}"
            continue
        index = np.arange(LENGTH, dtype=np.int32)
        program = jax.jit(partial(_attend, name, index))
        for device in jax.local_devices():
            q, k, v = (jax.device_put(jnp.asarray(each, dtype), device) for each in arrays)
            wanted = formula(*(np.asarray(each, np.float64) for each in (q, k, v)))
            # A GPU would round float32 to 10 bits otherwise; what is in 16 bits is left alone.
            with jax.default_matmul_precision("highest" if dtype == jnp.float32 else None):
                got = program(q, k, v)
            entry["error"] = max(entry.get("error", 0.0), relative(np.asarray(got, np.float64), wanted))
    return results


def _attend(name: str, index: np.ndarray, q: Array, k: Array, v: Array) -> Array:
    places = jnp.asarray(index)
    return attend(name, q, k, v, Mask(places, places, None, None), scale=HEAD**-0.5)


def formula(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """softmax(q k^T / sqrt(H)) v over keys at or before each query: q [B, S, N, H], k and v [B, S, K, H], float64."""
    k, v = (np.repeat(each, q.shape[2] // each.shape[2], axis=2) for each in (k, v))
    scores = np.einsum("bsnh,btnh->bnst", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnst,btnh->bsnh", weights / weights.sum(-1, keepdims=True), v)


def all_reduce() -> dict[str, Any]:
    """The sum over all local devices of whole numbers, another for each: exact, whatever the order."""
    devices = jax.local_devices()
    mesh = build_mesh(ParallelConfig(data=len(devices)), devices)
    values = np.random.default_rng(13).integers(-1000, 1000, (len(devices), ELEMENTS)).astype(np.float32)
    spread = jax.device_put(values, each_process(mesh, np.zeros(ELEMENTS, np.float32)).sharding)
    program = jax.jit(lambda x: x.sum(0)).lower(spread).compile()
    total = program(spread)
    wanted = values.sum(0)
    wrong = [
        shard.device.id for shard in total.addressable_shards if not np.array_equal(shard.data, wanted[shard.index])
    ]
    seconds = []
    for _ in range(REPEATS):
        begun = time.monotonic()
        jax.block_until_ready(program(spread))
        seconds.append(time.monotonic() - begun)
    return {
        "devices": len(devices),
        "wrong": wrong,
        "reduced": "all-reduce" in (program.as_text() or ""),
        "milliseconds": 1000 * min(seconds),
        "bytes": 4 * ELEMENTS,
    }


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """Frobenius norm of the difference over that of what was wanted; inf where it is not a number."""
    error = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
    return error if np.isfinite(error) else 1e308


STAGES: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("versions", versions),
    ("devices", found),
    ("matmul", matmul),
    ("attention", attention),
    ("all_reduce", all_reduce),
)


def main() -> None:
    """All stages; one that raises has {"error": ...} for its result."""
    for name, stage in STAGES:
        print(json.dumps({"begins": name}), flush=True)
        begun = time.monotonic()
        try:
            result: Any = stage()
        except Exception as error:
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            result = {"error": f"{kind}{error}"[:600]}
        print(json.dumps({"stage": name, "found": result, "seconds": time.monotonic() - begun}), flush=True)
        if stage is found and "error" in result:
            break
    print(json.dumps({"begins": ""}), flush=True)


if __name__ == "__main__":
    main()
