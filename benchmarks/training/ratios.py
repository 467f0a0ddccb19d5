"""Costs relative to an alternative, timed in turns on the devices of this machine.

Short rounds of the alternatives take turns, so that other load on the machine affects all of them. Ratios are of the
medians and of the fastest rounds.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.compiled import delta_gradients, delta_shapes, scan_gradients, scan_shapes
from benchmarks.stopwatch import alternate, milliseconds, ratios, timed
from megajax.compiled.gpus import GIB, MIB, prepare, read_cluster
from megajax.config import UserError, load
from megajax.job.description import describe
from megajax.kernels.ssm.gated_delta import gated_delta, gated_delta_reference
from megajax.kernels.ssm.ssd import ssd, ssd_reference
from megajax.planning.program.train_step import compile_train_step
from megajax.training.run_config import RunConfig
from megajax.training.session import Run, setup


def step_seconds(run: Run, batch: object, steps: int) -> float:
    """Seconds of one train step."""
    start = time.perf_counter()
    for _ in range(steps):
        run.state, metrics = run.train_step(run.state, batch)
    jax.block_until_ready(metrics)
    return (time.perf_counter() - start) / steps


def on_mesh(stack: ExitStack, run: Run) -> None:
    """Enter the mesh and the matmul precision of a run."""
    stack.enter_context(jax.set_mesh(run.mesh))
    stack.enter_context(jax.default_matmul_precision(run.cfg.precision.matmul_precision()))


def optimizer(*, config: str = "quickstart.py", rounds: int = 12, steps: int = 4) -> dict[str, Any]:
    """Cost of Muon relative to AdamW on a small model: the update alone, and the whole train step."""
    runs = {kind: setup(load(config, f"optimizer.type={kind}", "parallel.data=1")) for kind in ("AdamW", "Muon")}
    with ExitStack() as stack:
        for run in runs.values():
            stack.callback(run.close)
        on_mesh(stack, runs["AdamW"])
        updates = {kind: partial(timed, update_of(run), steps, jax.block_until_ready) for kind, run in runs.items()}
        batches = {kind: next(run.batches)[0] for kind, run in runs.items()}
        whole = {kind: partial(step_seconds, run, batches[kind], steps) for kind, run in runs.items()}
        seconds = {"update": alternate(updates, rounds), "train_step": alternate(whole, rounds)}
        weights = sum(weight.size for weight in runs["AdamW"].state.params.values())
    return {
        "config": config,
        "weights": weights,
        "device": jax.devices()[0].device_kind,
        **{name: milliseconds(values) | ratios(values, "Muon", "AdamW") for name, values in seconds.items()},
    }


def update_of(run: Run) -> Callable[[], Any]:
    """One update of the optimizer, with gradients as large as the weights."""
    program, params, state = run.program, run.state.params, run.state.optimizer
    rates = partial(program.schedule.rates, jnp.int32(1), run.cfg.optimizer.weight_decay)
    return partial(jax.jit(partial(program.optimizer.update, rates=rates)), params, state, params)


def adapters(*, config: str = "quickstart.py", rank: int = 16, rounds: int = 8, steps: int = 3) -> dict[str, Any]:
    """Cost of DoRA relative to LoRA, on all matrices of a small model: step time and temporary memory."""
    lora = f"model.lora={{rank: {rank}, alpha: {2 * rank}, decomposed: "
    words = {"LoRA": "false}", "DoRA": "true}"}
    runs = {name: setup(load(config, lora + word, "parallel.data=1")) for name, word in words.items()}
    with ExitStack() as stack:
        for run in runs.values():
            stack.callback(run.close)
        on_mesh(stack, runs["LoRA"])
        batches = {name: next(run.batches)[0] for name, run in runs.items()}
        memory = {name: kept_memory(run, batches[name])["temporary_mib"] for name, run in runs.items()}
        seconds = alternate({n: partial(step_seconds, run, batches[n], steps) for n, run in runs.items()}, rounds)
    device = jax.devices()[0].device_kind
    times = milliseconds(seconds) | ratios(seconds, "DoRA", "LoRA")
    return {"config": config, "rank": rank, "device": device, "temporary_mib": memory, "train_step": times}


RECOMPUTE = {
    "none": ["recompute=none"],
    "norm": ["recompute=norm"],
    "selective": ["recompute=selective"],
    "selective, mlp": ["recompute=norm,latent,activation,mlp"],
    "selective, residual": ["recompute=norm,latent,activation,residual"],
    "selective, core_attention": ["recompute=norm,latent,activation,core_attention"],
    "selective in half the layers": ["recompute=selective", "recompute_layers=HALF"],
    "full in half the layers": ["recompute=full", "recompute_layers=HALF"],
    "selective, no loop over layers": ["recompute=selective", "unroll=none"],
    "full": ["recompute=full"],
    "full, in twos": ["recompute=full", "layers_per_checkpoint=2"],
    "selective, mlp on the host": ["recompute=selective", "offload=mlp"],
    "full, input on the host": ["recompute=full", "offload=input"],
}
"""Name -> settings of the model, where HALF is half its layers."""


def recompute(
    *, config: str = "quickstart.py", rounds: int = 8, steps: int = 3, deviceless: str = "", gpus: str = "h100:8"
) -> Iterator[dict[str, Any]]:
    """Cost of each recomputation setting: compile time, memory, and step time relative to `none`.

    Temporary memory is the compiler's; kept memory is computed from the shapes of the tensors that layers save for a
    microbatch. --deviceless=CONFIG: also compiles a config for virtual GPUs (extra aot), without times.
    """
    figures: dict[str, Any] = {"config": config, "device": jax.devices()[0].device_kind}
    if deviceless:
        figures[f"{deviceless} on {gpus}, deviceless"] = compiled_recompute(deviceless, gpus)
        yield figures
    runs = {name: setup(recomputing(config, name)) for name in RECOMPUTE}
    rows: dict[str, Any] = {}
    with ExitStack() as stack:
        for run in runs.values():
            stack.callback(run.close)
        on_mesh(stack, runs["none"])
        calls = {}
        for name, run in runs.items():
            batch = next(run.batches)[0]
            rows[name] = kept_memory(run, batch)
            calls[name] = partial(step_seconds, run, batch, steps)
        seconds = alternate(calls, rounds)
    for name, row in rows.items():
        row |= {"step_ms": round(1e3 * statistics.median(seconds[name]), 2)} | ratios(seconds, name, "none")
    yield figures | {"here": rows}


def recomputing(config: str, name: str) -> RunConfig:
    """A config with a setting of RECOMPUTE."""
    half = str(load(config).model.stack.layers() // 2)
    return load(config, *[f"model.{setting}".replace("HALF", half) for setting in RECOMPUTE[name]])


def kept_memory(run: Run, batch: object) -> dict[str, Any]:
    """Compile time and memory of the train step."""
    start = time.perf_counter()
    memory = run.train_step.lower(run.state, batch).compile().memory_analysis()
    seconds, saved = time.perf_counter() - start, describe(run.parts).saved[""]
    return {
        "compile_seconds": round(seconds, 2),
        "temporary_mib": round(memory.temp_size_in_bytes / MIB, 1),
        "kept_mib_per_layer": [round(layer.device / MIB, 2) for layer in saved],
        "kept_on_the_host_mib_per_layer": [round(layer.host / MIB, 2) for layer in saved],
    }


def compiled_recompute(config: str, gpus: str) -> dict[str, Any]:
    """Compile time and GiB of one of the virtual GPUs."""
    prepare()
    cluster, problems = read_cluster(gpus, 8)
    if cluster is None:
        raise UserError(f"--gpus={gpus}: {problems[0].message}")
    rows = {}
    for name in RECOMPUTE:
        start = time.perf_counter()
        plan = compile_train_step(recomputing(config, name), cluster)
        rows[name] = {
            "compile_seconds": round(time.perf_counter() - start, 1),
            "temporary_gib": round(plan.memory.temporary / GIB, 2),
            "peak_gib": round(plan.memory.peak / GIB, 2),
        }
        print(name, rows[name], flush=True)
    return rows


def state_space(*, rounds: int = 5, length: int = 2048) -> dict[str, Any]:
    """The chunked form of Mamba-2's recurrence against the recurrence position by position, on this machine.

    Forward and backward passes on one row in float32, with the largest difference of gradients relative to the largest
    gradient. `compiled_kernels --parts=state_space` has memory and operations; `kernels --parts=state_space` the speed
    on a GPU.
    """
    sizes = {"length": length, "heads": 4, "size": 64, "groups": 1, "states": 128}
    rng = np.random.default_rng(0)
    inputs = {name: rng.normal(size=shape).astype(np.float32) for name, shape in scan_shapes(**sizes).items()}
    inputs["dt"] = np.exp(rng.uniform(-7, -2, inputs["dt"].shape)).astype(np.float32)
    methods = {"recurrence": ssd_reference, **{f"chunks of {n}": partial(ssd, chunk=n) for n in (64, 128)}}
    return {"sizes": sizes, "methods": beside_recurrence(methods, scan_gradients, inputs, rounds)}


def delta_rule(*, rounds: int = 5, length: int = 2048) -> dict[str, Any]:
    """The chunked form of the gated delta rule against the recurrence position by position, on this machine.

    As `state_space`. `compiled_kernels --parts=delta_rule` has memory and operations.
    """
    sizes = {"length": length, "heads": 4, "groups": 2, "keys": 128, "size": 128}
    rng = np.random.default_rng(0)
    inputs = {name: rng.normal(size=shape).astype(np.float32) for name, shape in delta_shapes(**sizes).items()}
    inputs |= {name: inputs[name] / np.linalg.norm(inputs[name], axis=-1, keepdims=True) for name in ("q", "k")}
    inputs |= {"g": -np.exp(inputs["g"] - 3), "beta": rng.random(inputs["beta"].shape, np.float32)}
    chunks = {f"chunks of {n}": partial(gated_delta, chunk=n) for n in (32, 64, 128)}
    methods = {"recurrence": gated_delta_reference, **chunks}
    return {"sizes": sizes, "methods": beside_recurrence(methods, delta_gradients, inputs, rounds)}


def beside_recurrence(
    methods: dict[str, Callable], gradients: Callable[[Callable], Callable], inputs: dict[str, np.ndarray], rounds: int
) -> dict[str, Any]:
    """Speed, memory and gradients of each method beside those of `recurrence`."""
    calls = {name: jax.jit(gradients(method)).lower(inputs).compile() for name, method in methods.items()}
    expected = calls["recurrence"](inputs)
    waits = {name: partial(timed, partial(call, inputs), 1, jax.block_until_ready) for name, call in calls.items()}
    seconds, rows = alternate(waits, rounds), {}
    for name, call in calls.items():
        actual = call(inputs)
        apart = [jnp.abs(actual[part] - expected[part]).max() / jnp.abs(expected[part]).max() for part in expected]
        rows[name] = ratios(seconds, name, "recurrence") | {
            "seconds": statistics.median(seconds[name]),
            "gradients_apart": float(max(apart)),
            "temporary_mib": round(call.memory_analysis().temp_size_in_bytes / MIB, 1),
        }
    return rows
