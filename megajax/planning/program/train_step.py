"""The real train step of a config, compiled for devices that are not there, and what the compiler says of it."""

import time
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax

from megajax.config.tree import check
from megajax.kernels.capability import Device
from megajax.mesh.mesh import build_mesh
from megajax.mesh.xla import ABSENT_GPU, Option, compiler_options
from megajax.pipeline.check import measure
from megajax.pipeline.schedule import Schedule
from megajax.planning.program.collectives import Contents, read
from megajax.planning.program.deviceless import devices
from megajax.planning.program.devices import CUDNN, GIB, GPU, Cluster
from megajax.planning.program.trip_counts import StepCounts
from megajax.training.kernels import demand_kernels
from megajax.training.program import Program
from megajax.training.run_config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one device."""

    arguments: int
    """State and batch, as the step gets them."""
    outputs: int
    """State and metrics, as it leaves them."""
    aliased: int
    """Of the outputs, what takes the place of arguments."""
    temporary: int
    """At most at one time, beside arguments and outputs: weights in compute dtype, gradients, activations."""
    parameters: int
    """Of the arguments, master weights."""
    optimizer: int
    """Of the arguments, optimizer state."""
    host: int = 0
    """In the memory of its host: moments and kept tensors that wait there."""

    @property
    def peak(self) -> int:
        """Arguments, temporaries, and outputs that take no argument's place."""
        return self.arguments + self.temporary + self.outputs - self.aliased


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainPlan:
    """A config on a cluster, compiled."""

    cfg: RunConfig
    cluster: Cluster
    mesh: dict[str, int]
    microbatches: int
    kernels: tuple[str, ...]
    """Attention kernel of each block of the pattern, with the reason where it is not cuDNN's."""
    memory: Memory
    contents: Contents
    schedule: Schedule | None
    """Of the pipeline; None without one."""
    compile_seconds: float
    text: str
    """Of the compiled program."""

    @property
    def counts(self) -> StepCounts:
        """What is known of its loops and conditionals beside the text."""
        return StepCounts(self.microbatches, None if self.schedule is None else self.schedule.chunks)

    @property
    def bubble(self) -> float:
        """Time the stages of a pipeline wait, over the time they work; 0 without one."""
        return 0.0 if self.schedule is None else float(measure(self.schedule).bubble)

    @property
    def fits(self) -> bool:
        """Whether the peak is within what a device has for arrays."""
        return self.memory.peak <= self.cluster.gpu.usable_gib * GIB


def compile_train_step(cfg: RunConfig, cluster: Cluster) -> TrainPlan:
    """Compile what training would run there; needs neither the GPUs nor the data.

    Raises ConfigError for a config that doesn't fit those devices, UserError for a kernel they can't have.
    """
    check(cfg, cluster.devices)
    cfg, kernels = with_kernels(cfg, cluster.gpu)
    mesh = build_mesh(cfg.parallel, devices(cluster))
    # Without a device the compiler chooses no kernels, deterministic or not: see xla.DETERMINISTIC.
    program = Program.of(cfg.but(xla=replace(cfg.xla, deterministic=False)), mesh)
    state, batch = program.state_like(), program.batch_like()
    # Any: a jitted function also has `lower`.
    step: Any = program.train_step
    held = bytes_per_device((state.params, state.optimizer))
    started = time.monotonic()
    with jax.set_mesh(mesh), jax.default_matmul_precision(cfg.precision.matmul_precision()):
        memory = scheduler_memory(cfg, cluster.gpu, held)
        asked = compiler_options(*ABSENT_GPU, *[memory] * (memory.name not in cfg.xla.options))
        compiled = step.lower(state, batch).compile(compiler_options=asked)
    seconds = time.monotonic() - started
    found, text = compiled.memory_analysis(), compiled.as_text()
    memory = Memory(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        temporary=found.temp_size_in_bytes,
        parameters=bytes_per_device(state.params),
        optimizer=bytes_per_device(state.optimizer) - found.host_argument_size_in_bytes,
        host=found.host_argument_size_in_bytes + found.host_temp_size_in_bytes,
    )
    return TrainPlan(
        cfg=cfg,
        cluster=cluster,
        mesh=dict(mesh.shape),
        microbatches=program.microbatches,
        kernels=kernels,
        memory=memory,
        contents=read(text, mesh.shape),
        schedule=program.pipeline,
        compile_seconds=seconds,
        text=text,
    )


def scheduler_memory(cfg: RunConfig, gpu: GPU, held: int) -> Option:
    """What lets the scheduler use as much memory to hide collectives as it would where the GPU is there.

    It may fill (base - arguments) x factor, and hides less and less where that is not enough. Its base is what the
    process has of the GPU's memory, or, of an absent one, 0.8 of it (xla/service/gpu/gpu_hlo_schedule.cc). held: bytes
    of the arguments.
    """
    there, absent = (share * gpu.memory_gib * GIB - held for share in (cfg.xla.memory_fraction, 0.8))
    factor = round(95 * there / absent) if 0 < absent < there else 95
    return Option("xla_gpu_memory_limit_slop_factor", factor, "as much memory as the process would have on the GPU")


def with_kernels(cfg: RunConfig, gpu: GPU) -> tuple[RunConfig, tuple[str, ...]]:
    """The config with `auto` attention kernels as they would be on this GPU, and the choices in words.

    Raises UserError where one is asked for by name and can't compute this there.
    """
    chosen = demand_kernels(cfg, Device(name=gpu.description, capability=gpu.capability, cudnn=CUDNN))
    pattern = tuple(
        replace(block, mixer=replace(block.mixer, kernel=choice.kernel))
        for block, choice in zip(cfg.model.stack.pattern, chosen, strict=True)
    )
    stack = replace(cfg.model.stack, pattern=pattern)
    words = (f"{kernel} ({'; '.join(reasons)})" if reasons else kernel for kernel, reasons in chosen)
    return cfg.but(model=replace(cfg.model, stack=stack)), tuple(words)


def bytes_per_device(tree: Any) -> int:
    """Of arrays described by jax.ShapeDtypeStruct with shardings."""
    leaves = jax.tree.leaves(tree)
    return sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
