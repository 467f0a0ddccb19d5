"""Test all devices of jax in stages, printing JSON lines. Any stage may hang or crash: see examine.py."""

import ctypes
import faulthandler
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.config.errors import UserError
from megajax.display.text import byte_size
from megajax.kernels.attention.attention import attend, local_device
from megajax.kernels.attention.capability import BACKENDS
from megajax.kernels.attention.mask import Mask
from megajax.kernels.attention.request import KernelRequest
from megajax.kernels.grouped.capability import GROUPED_BACKENDS, GroupedKernel, GroupedSizes
from megajax.kernels.grouped.matmul import grouped_matmul
from megajax.machine import known_faults
from megajax.machine.before_run import all_reduce, matmul
from megajax.machine.check import FIRST_AID, OUT_OF_SERVICE, STAGES, Finding, Machine, fail, ok, warn
from megajax.machine.run_fault import Conditions
from megajax.mesh.mesh import find_devices
from megajax.processes.known_fault import dotted
from megajax.processes.peers import Peers

ROWS, LENGTH, HEADS, GROUPS, HEAD = 2, 128, 4, 2, 64
"""Shape of the attention: batch B, sequence S, heads N, key heads K, head dimension H."""

DOCUMENT_ENDS = (1, 50)
"""Ends of the first documents of a row; the last one has the rest."""

EXPERT_ROWS = (50, 0, 70, 5)
"""Rows of each expert, three fewer than there are: some have none, none is a whole tile."""

TIGHT, ROUNDED = 1e-5, 1e-2
"""Relative error of an operation summed in float32; of attention in 16 bits, with 2^-9 per number and weight. Gradients
have twice as many roundings."""


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


EAGER: dict[str, Callable[[Any], Any]] = {
    "sqrt": lambda xp: xp.sqrt(xp.arange(1, 1025, dtype=xp.float32)),
    "exp": lambda xp: xp.exp(xp.linspace(-4, 4, 257, dtype=xp.float32)),
    "sum": lambda xp: xp.arange(4096, dtype=xp.float32).reshape(64, 64).sum(axis=1),
    "cumsum": lambda xp: xp.cumsum(xp.arange(1000, dtype=xp.int32)),
    "sort": lambda xp: xp.sort(xp.arange(1000, dtype=xp.int32) * 7919 % 1009),
    "gather": lambda xp: xp.arange(1000, dtype=xp.float32)[xp.arange(0, 1000, 7) * 3 % 1000],
    "where": lambda xp: xp.where(xp.arange(300) % 3 == 0, xp.float32(1), xp.float32(-1)),
}
"""Small operations as functions of numpy or jax.numpy. `known_faults` has one that was wrong outside of jit."""


def eager() -> Finding:
    """Small operations give the same numbers one by one, compiled together, and in numpy, on each device."""
    wrong = []
    for device in jax.local_devices():
        with jax.default_device(device):
            results = [{name: operation(jnp) for name, operation in EAGER.items()}]
            results.append(jax.jit(lambda: {name: operation(jnp) for name, operation in EAGER.items()})())
        for kind, values in zip(("eager", "compiled"), results, strict=True):
            wrong += [
                f"{name} ({kind}, device {device.id})"
                for name, operation in EAGER.items()
                if relative_error(np.asarray(values[name], np.float64), np.asarray(operation(np), np.float64)) > TIGHT
            ]
    if wrong:
        return fail(f"wrong results: {', '.join(wrong)}", f"use another driver or jax, or {OUT_OF_SERVICE}")
    return ok(f"{len(EAGER)} operations as in numpy, one by one and compiled")


def nccl(maps: Path = Path("/proc/self/maps"), load: Callable[[str], Any] = ctypes.CDLL) -> Finding | None:
    """One NCCL is loaded, the installed one, without a known fault. After `devices`, for which jax loads it."""
    paths = dict.fromkeys(re.findall(r"/\S*libnccl\.so\S*", maps.read_text()))
    if not paths:
        return None
    number = ctypes.c_int()
    load(next(iter(paths))).ncclGetVersion(ctypes.byref(number))
    release = number.value // 10000, number.value // 100 % 100, number.value % 100
    conditions = Conditions(versions=known_faults.versions() | {"NCCL": release}, devices=2)
    problems = [fault for fault in known_faults.met(conditions, "warn") if fault.name.startswith("nccl")]
    text = f"NCCL {dotted(release)} is loaded, from {', '.join(paths)}"
    if len(paths) > 1:
        return fail(f"several are loaded: {text}", "unset LD_LIBRARY_PATH and LD_PRELOAD: one of them must go")
    if problems:
        texts = "; ".join(fault.text(conditions) for fault in problems)
        return warn(f"{text}; {texts}", "; ".join(fault.cure for fault in problems))
    return ok(text)


def attention() -> Finding:
    """Every attention kernel that runs here agrees with float64, forward and backward, also on rows of documents.

    Causal attention with grouped queries; one document has a single token.
    """
    random = np.random.default_rng(11)
    shapes = ((ROWS, LENGTH, HEADS, HEAD), *[(ROWS, LENGTH, GROUPS, HEAD)] * 2, (ROWS, LENGTH, HEADS, HEAD))
    arrays = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    results, refused, failures = [], [], []
    for name, backend in BACKENDS.items():
        dtype = jnp.float32 if backend.dtypes is None else jnp.bfloat16
        tight = dtype == jnp.float32
        request = KernelRequest(dtype=jnp.dtype(dtype).name, key_dim=HEAD, value_dim=HEAD, length=LENGTH)
        errors = {}
        for kind, ids in (("causal", None), ("documents", np.searchsorted(DOCUMENT_ENDS, np.arange(LENGTH), "right"))):
            if refusal := backend.refusal(replace(request, documents=ids is not None), local_device()):
                refused.append(f"; not tested: {backend.label} {refusal}")
                continue
            inputs = [np.asarray(jnp.asarray(array, dtype), np.float64) for array in arrays]
            expected = formula(*inputs, np.zeros(LENGTH) if ids is None else ids)
            actual = with_gradients(name, arrays, dtype, ids)
            forward, *backward = (
                max(relative_error(results_of[place], expected[place]) for results_of in actual) for place in range(4)
            )
            errors[kind] = forward, max(backward)
            text = f"{kind} forward {forward:.0e}, backward {errors[kind][1]:.0e}"
            limits = (TIGHT, TIGHT) if tight else (ROUNDED, 2 * ROUNDED)
            wrong = any(error > limit for error, limit in zip(errors[kind], limits, strict=True))
            failures += [f"{name} ({request.dtype}) {text}"] * wrong
        if errors:
            worst = [max(pair) for pair in zip(*errors.values(), strict=True)]
            kinds = " and ".join(errors)
            results.append(f"{name} ({request.dtype}) {worst[0]:.0e}, backward {worst[1]:.0e}, {kinds}")
    if failures:
        advice = "set the mixer's kernel=reference, or use another cuDNN or jax"
        return fail(f"relative error too large: {', '.join(failures)}", advice)
    return ok(f"relative error: {'; '.join(results)}{''.join(refused[:1])}")


def with_gradients(name: str, arrays: list[np.ndarray], dtype: Any, ids: np.ndarray | None) -> list[list[np.ndarray]]:
    """Output and gradients of q, k and v on each local device. arrays: q, k, v, the gradient of the output."""
    positions = jnp.arange(LENGTH, dtype=jnp.int32)
    segments = None if ids is None else jnp.asarray(np.broadcast_to(ids, (ROWS, LENGTH)), jnp.int32)
    mask = Mask(positions, positions, segments, segments)

    @jax.jit
    def program(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> tuple[jax.Array, ...]:
        out, back = jax.vjp(lambda q, k, v: attend(name, q, k, v, mask, scale=HEAD**-0.5), q, k, v)
        return out, *back(dout)

    results = []
    for device in jax.local_devices():
        inputs = [jax.device_put(jnp.asarray(array, dtype), device) for array in arrays]
        # By default, a GPU rounds float32 to TF32; 16-bit inputs are not affected.
        with jax.default_matmul_precision("highest" if dtype == jnp.float32 else None):
            results.append([np.asarray(x, np.float64) for x in program(*inputs)])
    return results


def formula(q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, ids: np.ndarray) -> list[np.ndarray]:
    """softmax(q k^T / sqrt(H)) v over the keys of the same document up to each query, and its gradients, in float64.

    q and dout [B, S, N, H], k and v [B, S, K, H], ids [S].
    """
    groups, repeats, scale = k.shape[2], q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    k, v = (np.repeat(array, repeats, axis=2) for array in (k, v))
    scores = np.einsum("bsnh,btnh->bnst", q, k) * scale
    visible = np.tri(q.shape[1], dtype=bool) & (ids[:, None] == ids[None])
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    dweights = np.einsum("bsnh,btnh->bnst", dout, v)
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True)) * scale
    dk, dv = (
        np.einsum("bnst,bsnh->btnh", factor, array).reshape(*k.shape[:2], groups, repeats, -1).sum(3)
        for factor, array in ((dscores, q), (weights, dout))
    )
    return [np.einsum("bnst,btnh->bsnh", weights, v), np.einsum("bnst,btnh->bsnh", dscores, k), dk, dv]


def grouped() -> Finding:
    """Every kernel of grouped matmuls that runs here agrees with float64: rows of experts, and both gradients."""
    random, counts = np.random.default_rng(17), np.array(EXPERT_ROWS)
    sizes = GroupedSizes(LENGTH, len(counts), HEAD, 2 * HEAD)
    shapes = (sizes.rows, sizes.inner), sizes[1:], (sizes.rows, sizes.outer)
    arrays, used = [random.standard_normal(shape).astype(np.float32) for shape in shapes], counts.sum()
    results, failures = [], []
    for name, backend in GROUPED_BACKENDS.items():
        dtype = jnp.float32 if backend.dtypes is None else jnp.bfloat16
        if backend.refusal(jnp.dtype(dtype).name, local_device(), sizes):
            continue
        expected = grouped_formula(*(np.asarray(jnp.asarray(array, dtype), np.float64) for array in arrays), counts)

        @jax.jit
        def program(x: jax.Array, w: jax.Array, dy: jax.Array, name: GroupedKernel = name) -> tuple[jax.Array, ...]:
            y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, jnp.asarray(counts, jnp.int32), kernel=name), x, w)
            dx, dw = back(dy)
            # Rows past the groups may hold anything.
            return y[:used], dx[:used], dw

        error = 0.0
        for device in jax.local_devices():
            inputs = [jax.device_put(jnp.asarray(array, dtype), device) for array in arrays]
            with jax.default_matmul_precision("highest" if dtype == jnp.float32 else None):
                pairs = zip(program(*inputs), expected, strict=True)
                error = max(error, *(relative_error(np.asarray(x, np.float64), right) for x, right in pairs))
        results.append(f"{name} ({jnp.dtype(dtype).name}) {error:.0e}")
        failures += results[-1:] * (error > (TIGHT if dtype == jnp.float32 else ROUNDED))
    if failures:
        return fail(f"relative error too large: {', '.join(failures)}", "set the experts' kernel=reference")
    return ok(f"relative error: {', '.join(results)}")


def grouped_formula(x: np.ndarray, w: np.ndarray, dy: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Rows of each group times its matrix, and the gradients of rows and matrices, in float64."""
    ends = counts.cumsum()
    parts = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
    y = np.concatenate([x[part] @ matrix for part, matrix in zip(parts, w, strict=True)])
    dx = np.concatenate([dy[part] @ matrix.T for part, matrix in zip(parts, w, strict=True)])
    return [y, dx, np.stack([x[part].T @ dy[part] for part in parts])]


def relative_error(result: np.ndarray, expected: np.ndarray) -> float:
    """Frobenius norm of the difference divided by that of `expected`; inf if not finite."""
    error = float(np.linalg.norm(result - expected) / np.linalg.norm(expected))
    return error if np.isfinite(error) else np.inf


def main() -> None:
    """Run all stages; an exception fails a stage. argv[1] is the time limit of a stage, which ends the process."""
    functions: tuple[Callable[[], Finding | None], ...] = (
        devices,
        eager,
        nccl,
        matmul,
        attention,
        grouped,
        partial(all_reduce, Peers("doctor")),
    )
    for name, stage in zip(STAGES, functions, strict=True):
        print(json.dumps({"stage": name}))
        faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True)  # works even if a driver holds the GIL
        try:
            finding = stage()
        except Exception as error:
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            finding = fail(f"{kind}{error}"[:600], FIRST_AID)
        print(json.dumps({"stage": name, "finding": finding}))
        if name == STAGES[0] and finding is not None and finding.advice == FIRST_AID:  # it raised
            break


if __name__ == "__main__":
    main()
