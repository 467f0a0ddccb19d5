"""Speed of the shipped train step on the devices of this machine."""

import gzip
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import log, prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from benchmarks.roofline import Roof, roof_of
from benchmarks.stopwatch import LEAST, WARM_UP, Spread, readings
from benchmarks.virtual_gpus import kernels as custom_calls
from megajax.batch import Batch
from megajax.config.errors import UserError
from megajax.display.banner import plain
from megajax.display.text import count, duration
from megajax.job.compile_log import CompileLog
from megajax.job.device_memory import peak_memory, size
from megajax.kernels.attention.capability import KernelChoice
from megajax.mesh.mesh import find_devices
from megajax.metrics.throughput import StepRate
from megajax.metrics.trace_summary import find_trace
from megajax.models.facts import flops_of
from megajax.planning.resolve import resolve
from megajax.processes.world import process_index
from megajax.processes.xla_options import memory_fraction
from megajax.training.program import Program
from megajax.training.resolved import Resolved
from megajax.training.run_config import RunConfig
from megajax.training.state import TrainState

ENVIRONMENT = ("XLA_FLAGS", "JAX_OPTIMIZATION_LEVEL", "CUDA_VISIBLE_DEVICES")
TRACED_STEPS = 2


def mfu(
    *,
    cfg: RunConfig,
    steps: int = 20,
    peak_tflops: float | None = None,
    trace: Path | None = None,
    export: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Speed of the shipped train step: tokens/s, TFLOP/s, MFU, memory, kernels.

    No data or tokenizer is loaded: all steps use one batch of random tokens, and the weights are freshly initialised.
    --steps: timed steps, after untimed warm-up steps. MFU is FLOP/s over the published bfloat16 peak, once with the
    attention scores that the mask leaves (causal) and once with all (full). A GPU without a known peak is an error
    (exit code 2) unless --peak-tflops has its bfloat16 peak; a CPU has no MFU. --trace=FILE: then trace two further
    steps into a compressed file for `python -m megajax.tools.trace FILE`. --export=FILE: weights and batch of the first
    step, for another trainer to start from. For several processes, start each as for training (docs/launch.md).
    """
    figures, bench = measure(cfg, steps=steps, peak_tflops=peak_tflops, export=export)
    if process_index() == 0:
        print(report(figures))
    yield figures
    # Last, so that the figures are written even if the profiler fails.
    if trace is not None:
        write_trace(bench, trace)
        print(f"trace: {trace}, {trace.stat().st_size / 2**20:.1f} MiB")


@dataclass
class Bench:
    """A compiled train step with its state and a batch."""

    program: Program
    compiled: Any
    """(state, batch) -> (state, metrics); the state passed in is donated."""
    state: TrainState
    batch: Batch

    def step(self) -> dict[str, Array]:
        """Dispatch one step and return its metrics."""
        self.state, metrics = self.compiled(self.state, self.batch)
        return metrics


def synthetic_batch(program: Program) -> Batch:
    """A global batch [M, B, S] of random tokens, one document per row, with the shardings of the step."""
    like, model = program.batch_like(), program.cfg.model
    shape = like["tokens"].shape
    tokens = np.random.default_rng(0).integers(0, model.vocabulary_size, (*shape[:2], shape[2] + 1), dtype=np.int32)
    values = {
        "tokens": tokens[..., :-1],
        "labels": tokens[..., 1:],
        "loss_mask": np.ones(shape, np.float32),
        "positions": np.broadcast_to(np.arange(shape[2], dtype=np.int32), shape),
        "segment_ids": np.zeros(shape, np.int32),
        "sample": np.arange(prod(shape[:2]), dtype=np.uint32).reshape(shape[:2]),
        "padding": np.zeros(shape, bool),
    }
    return jax.tree.map(
        lambda leaf, value: jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda part: value[part]),
        like,
        {name: values[name] for name in like},
    )


def measure(
    cfg: RunConfig, *, steps: int, peak_tflops: float | None = None, export: Path | None = None
) -> tuple[dict[str, Any], Bench]:
    """Compile the train step, warm it up, and time `steps` steps. Returns the figures and the bench.

    Raises ConfigError for a config that does not fit the devices, and UserError for a GPU without a known peak and for
    a loss that is not finite.
    """
    if steps < 1:
        raise UserError(f"--steps must be at least 1, got {steps}")
    device = find_devices()[0]
    roof = roof_of(device.device_kind, device.platform, peak_tflops=peak_tflops)
    with program_of(cfg) as (program, resolved):
        compiled, seconds = compiled_step(program)
        started = time.perf_counter()
        bench = Bench(program, compiled, jax.block_until_ready(program.fresh_state()()), synthetic_batch(program))
        seconds["fresh_weights"] = time.perf_counter() - started
        if export is not None:
            write_start(bench, export)
        warm = [jax.device_get(bench.step()) for _ in range(WARM_UP)]
        _demand_finite(warm[-1]["loss"])
        began = time.process_time()
        statistics = readings(bench.step, steps, jax.block_until_ready, least=LEAST)
        processor = (time.process_time() - began) / (steps + 1)
        last = float(bench.step()["loss"])
    _demand_finite(last)
    tokens = program.sizes.sizes()[-1].rows * cfg.model.sequence_length
    figures = {
        **speeds(cfg, program.mesh.size, roof, statistics, tokens),
        "processor_seconds": processor,
        "timed_steps": steps,
        "seconds": seconds,
        "memory": memory(compiled),
        "losses": [float(metrics["loss"]) for metrics in warm],
        "learning_rates": [float(metrics["lr"]) for metrics in warm],
        "last_loss": last,
        "run": facts(program, compiled, resolved.kernels),
    }
    return figures, bench


@contextmanager
def program_of(cfg: RunConfig) -> Iterator[tuple[Program, Resolved]]:
    """The shipped program of a config on all devices, within its mesh and matmul precision.

    Raises ConfigError for a config that does not fit the devices.
    """
    resolved = resolve(cfg)
    program = Program.of(resolved.cfg, resolved.mesh, resolved.options, resolved.scheduler)
    with jax.set_mesh(program.mesh), jax.default_matmul_precision(cfg.precision.matmul_precision()):
        yield program, resolved


def compiled_step(program: Program) -> tuple[Any, dict[str, Any]]:
    """The compiled train step, and {"lower", "compile": seconds, "compile_cached": whether it came from the compile
    cache}. To be called within the mesh of the program."""
    step: Any = program.train_step
    compilations: list[dict[str, Any]] = []
    started = time.perf_counter()
    lowered = step.lower(program.state_like(), program.batch_like())
    seconds: dict[str, Any] = {"lower": time.perf_counter() - started}
    started = time.perf_counter()
    with CompileLog(lambda line: None, lambda kind, **fields: compilations.append(fields)):
        compiled = lowered.compile()
    seconds["compile"] = time.perf_counter() - started
    seconds["compile_cached"] = any(entry["cached"] for entry in compilations if entry["name"] == "train_step")
    return compiled, seconds


def write_trace(bench: Bench, file: Path) -> None:
    """Write a profiler trace of TRACED_STEPS further steps (.xplane.pb.gz), for `megajax.tools.trace`."""
    options: Any = jax.profiler.ProfileOptions()
    # Python's own calls would fill the trace.
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        for number in range(TRACED_STEPS):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                metrics = bench.step()
        jax.block_until_ready(metrics)
        jax.profiler.stop_trace()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(find_trace(Path(folder)).read_bytes()))


def speeds(cfg: RunConfig, devices: int, roof: Roof, step: Spread, tokens: int) -> dict[str, Any]:
    """Rates of steps over `tokens` tokens that take `step` seconds; None where no peak is known.

    With fp8, the MFU is also relative to the 8-bit peak.
    """
    flops = flops_of(cfg.model, cfg.optimizer.trainable)
    if flops is None:
        raise UserError(f"{type(cfg.model).__name__} has no facts, so its FLOPs are unknown (docs/own_model.md)")
    rate = StepRate(
        devices=devices, flops_per_token_causal=flops.causal, flops_per_token_full=flops.full, peak_flops=roof.bf16
    )
    rates = rate.rates(step.median, tokens)
    tflops = {"causal": rates.tflops_per_device_causal, "full": rates.tflops_per_device_full}
    figures = {
        "device": roof.device,
        "devices": devices,
        "tokens_per_step": tokens,
        "flops_per_token": asdict(flops),
        "step_seconds": step.to_dict(),
        "tokens_per_second_per_device": step.into(tokens / devices).to_dict(),
        "tflops_per_device": tflops,
        "mfu": {"causal": rates.mfu_causal, "full": rates.mfu_full},
        "peak_bf16_tflops": None if roof.bf16 is None else roof.bf16 / 1e12,
        "peak_source": roof.source,
    }
    if cfg.precision.matmul is None:
        return figures
    share = {name: None if roof.fp8 is None else rate * 1e12 / roof.fp8 for name, rate in tflops.items()}
    return figures | {"mfu_of_fp8_peak": share, "peak_fp8_tflops": None if roof.fp8 is None else roof.fp8 / 1e12}


def memory(compiled: Any) -> dict[str, int | None]:
    """Bytes on a device: the compiler's plan, and the peak in use since the start of the process, if available."""
    plan, most = compiled.memory_analysis(), peak_memory() or (None, None)
    memory: dict[str, int | None] = {"peak_in_use": most[0], "limit": most[1]}
    if plan is None:
        return memory | {"planned_arguments": None, "planned_temporary": None, "planned_peak": None}
    arguments, temporary = plan.argument_size_in_bytes, plan.temp_size_in_bytes
    peak = arguments + temporary + plan.output_size_in_bytes - plan.alias_size_in_bytes
    return memory | {"planned_arguments": arguments, "planned_temporary": temporary, "planned_peak": peak}


def facts(program: Program, compiled: Any, kernels: tuple[KernelChoice, ...]) -> dict[str, Any]:
    """Sizes, settings, chosen kernels, custom calls of the compiled program, options and environment."""
    cfg, mesh = program.cfg, program.mesh
    model, device = cfg.model, mesh.devices.flat[0]
    return {
        "parameters": model.parameter_count().total,
        "layers": model.stack.layers(),
        "hidden": model.hidden,
        "sequence_length": model.sequence_length,
        "vocabulary": model.padded_vocabulary(),
        "first_loss_expected": log(model.vocabulary_size),
        "rows_per_step": program.sizes.sizes()[-1].rows,
        "microbatches": program.microbatches,
        "micro_size": cfg.batch.micro_size,
        "mesh": dict(mesh.shape),
        "data_sharding": cfg.parallel.data_sharding,
        "precision": asdict(cfg.precision),
        "optimizer": type(cfg.optimizer).__name__.removesuffix("Config"),
        "recompute": str(model.recompute),
        "attention": list(dict.fromkeys(choice.kernel for choice in kernels)),
        "why_not_faster": list(dict.fromkeys(reason for choice in kernels for reason in choice.reasons)),
        "loss_chunk": model.loss_chunk,
        "documents_isolated": "segment_ids" in cfg.data.leaves(),
        "custom_calls": custom_calls(compiled),
        "compiler_options": dict(program.options),
        "memory_fraction": memory_fraction() if device.platform == "gpu" else None,
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "backend": device.client.platform_version.replace("\n", ", "),
    }


def write_start(bench: Bench, file: Path) -> None:
    """Write float32 weights by path, and `batch.tokens` and `batch.labels` int32 [M, B, S], as numpy .npz."""
    arrays = {path: np.asarray(value) for path, value in bench.state.params.items()}
    arrays |= {f"batch.{name}": np.asarray(bench.batch[name]) for name in ("tokens", "labels")}
    np.savez(file, **arrays)


def report(figures: dict[str, Any]) -> str:
    """The figures as text."""
    run, memory, step, seconds = (figures[name] for name in ("run", "memory", "step_seconds", "seconds"))
    rate, flops = figures["tokens_per_second_per_device"], figures["tflops_per_device"]
    cached = "read from the compile cache, not compiled" if seconds["compile_cached"] else "not cached"
    timed = f"{figures['timed_steps']} steps in {step['readings']} readings, after {WARM_UP} untimed ones"
    first, last = figures["losses"][0], figures["last_loss"]
    speed = [
        ("tokens/s per device", f"{rate['median']:,.0f} ({_tails(rate, 1, 0)})"),
        ("TFLOP/s per device", f"{flops['causal']:.4g} causal, {flops['full']:.4g} full (no mask)"),
        ("MFU", _mfu(figures)),
        ("step", f"{1e3 * step['median']:.2f} ms ({_tails(step, 1e3, 2)}; {timed})"),
        ("compilation", f"{duration(seconds['compile'])}, after {duration(seconds['lower'])} of tracing; {cached}"),
    ]
    rows = f"{run['microbatches']} microbatches of {run['micro_size']} rows, {run['sequence_length']} tokens each"
    shape = [
        ("parameters", f"{count(run['parameters'])}: {run['layers']} layers of {run['hidden']}"),
        ("tokens per step", f"{figures['tokens_per_step']:,}: {rows}"),
        ("devices", f"{figures['devices']} x {figures['device']}, {run['backend']}"),
        ("precision", ", ".join(f"{name} {value}" for name, value in run["precision"].items() if value is not None)),
        ("attention", "; ".join(["/".join(run["attention"]), *run["why_not_faster"]])),
        ("recompute", run["recompute"]),
        ("custom calls", ", ".join(f"{name} {number}" for name, number in run["custom_calls"].items()) or "none"),
        ("compiler options", ", ".join(f"{name}={value}" for name, value in run["compiler_options"].items()) or "none"),
        ("loss", f"{first:.4f} first (fresh weights: about {run['first_loss_expected']:.4f}), {last:.4f} last"),
    ]
    used = "not available" if memory["peak_in_use"] is None else size(memory["peak_in_use"])
    planned = "not available" if memory["planned_peak"] is None else size(memory["planned_peak"])
    peaks = [("peak in use", used), ("planned by the compiler", planned)]
    return plain("train step", [("speed", speed), ("memory of a device", peaks), ("run", shape)])


def _tails(statistics: dict[str, float], factor: float, digits: int) -> str:
    low, high = (f"{factor * statistics[name]:,.{digits}f}" for name in ("p10", "p90"))
    return f"10 % below {low}, 10 % above {high}"


def _mfu(figures: dict[str, Any]) -> str:
    mfu, peak = figures["mfu"], figures["peak_bf16_tflops"]
    if mfu["causal"] is None:
        return f"none: no peak is known for {'CPU' if figures['device'] == 'cpu' else figures['device']}"
    of = f"of the bf16 peak, {peak:g} TFLOP/s ({figures['peak_source']})"
    text = f"{mfu['causal']:.1%} causal, {mfu['full']:.1%} full (no mask), {of}"
    if figures.get("peak_fp8_tflops") is None:
        return text
    share, peak = figures["mfu_of_fp8_peak"], figures["peak_fp8_tflops"]
    return f"{text}\n{share['causal']:.1%} and {share['full']:.1%} of the fp8 peak, {peak:g} TFLOP/s"


def _demand_finite(loss: Any) -> None:
    if not np.isfinite(loss):
        raise UserError(f"the loss is {loss}: such steps are skipped, so their speed is not meaningful")
