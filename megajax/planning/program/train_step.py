"""The train step of a config, compiled for virtual GPU devices: memory, collectives, kernels."""

import time
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax

from megajax.config.tree import check
from megajax.kernels.capability import Device
from megajax.mesh.mesh import build_mesh
from megajax.mesh.xla import DEVICELESS, Option, compiler_options
from megajax.models.facts import ChoosesKernels
from megajax.pipeline.check import measure
from megajax.pipeline.schedule import Schedule
from megajax.planning.program.collectives import Contents, read
from megajax.planning.program.devices import CUDNN, GIB, GPU, Cluster, virtual_devices
from megajax.training.kernels import demand_kernels
from megajax.training.program import Program
from megajax.training.run_config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one device."""

    arguments: int
    """State and batch, the inputs of the step."""
    outputs: int
    """State and metrics, its outputs."""
    aliased: int
    """Outputs that reuse buffers of arguments."""
    temporary: int
    """Peak of temporaries: weights in compute dtype, gradients, activations."""
    parameters: int
    """Master weights, part of the arguments."""
    optimizer: int
    """Optimizer state, part of the arguments."""
    host: int = 0
    """In host memory: offloaded moments and activations."""

    @property
    def peak(self) -> int:
        """Arguments, temporaries, and outputs that reuse no argument's buffer."""
        return self.arguments + self.temporary + self.outputs - self.aliased


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainPlan:
    """The compiled train step of a config on a cluster."""

    cfg: RunConfig
    cluster: Cluster
    mesh: dict[str, int]
    microbatches: int
    parameters: int
    """Of the model."""
    kernels: tuple[str, ...]
    """Attention kernel of each block of the pattern, with the reason if it is not cuDNN's; () if they are unknown."""
    memory: Memory
    contents: Contents
    schedule: Schedule | None
    """None without a pipeline."""
    compile_seconds: float
    text: str
    """HLO of the compiled program."""

    @property
    def unknown_trips(self) -> int:
        """Trip count of an outermost loop whose count the compiler has lost.

        It loses that of the loop over microbatches when it peels off the first iteration to start the next one's
        collectives early, so all but one remain. Loops over the ticks of a pipeline keep their counts.
        """
        return max(1, self.microbatches - 1) if self.schedule is None else 1

    @property
    def bubble(self) -> float:
        """Time that the stages of a pipeline idle, over the time they work; 0 without a pipeline."""
        return 0.0 if self.schedule is None else float(measure(self.schedule).bubble)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the usable memory."""
        return self.memory.peak <= self.cluster.gpu.usable_gib * GIB


def compile_train_step(cfg: RunConfig, cluster: Cluster) -> TrainPlan:
    """Compile the train step that training would run on the cluster; needs neither GPUs nor data.

    Raises ConfigError for a layout that doesn't match the devices, UserError for a kernel they don't support.
    """
    check(cfg, cluster.devices)
    cfg, kernels = with_kernels(cfg, cluster.gpu)
    mesh = build_mesh(cfg.parallel, virtual_devices(cluster))
    # Without a device the compiler finds no deterministic kernels: see xla.DETERMINISTIC.
    program = Program.of(cfg.but(xla=replace(cfg.xla, deterministic=False)), mesh)
    state, batch = program.state_like(), program.batch_like()
    step: Any = program.train_step  # a jitted function, whose type lacks `lower`
    arguments = bytes_per_device((state.params, state.optimizer))
    started = time.monotonic()
    with jax.set_mesh(mesh), jax.default_matmul_precision(cfg.precision.matmul_precision()):
        limit = scheduler_memory(cfg, cluster.gpu, arguments)
        options = compiler_options(*DEVICELESS, *[limit] * (limit.name not in cfg.xla.options))
        compiled = step.lower(state, batch).compile(compiler_options=options)
    seconds = time.monotonic() - started
    analysis, text = compiled.memory_analysis(), compiled.as_text()
    memory = Memory(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        temporary=analysis.temp_size_in_bytes,
        parameters=bytes_per_device(state.params),
        optimizer=bytes_per_device(state.optimizer) - analysis.host_argument_size_in_bytes,
        host=analysis.host_argument_size_in_bytes + analysis.host_temp_size_in_bytes,
    )
    return TrainPlan(
        cfg=cfg,
        cluster=cluster,
        mesh=dict(mesh.shape),
        microbatches=program.microbatches,
        parameters=program.parameters,
        kernels=kernels,
        memory=memory,
        contents=read(text, mesh.shape),
        schedule=program.pipeline,
        compile_seconds=seconds,
        text=text,
    )


def scheduler_memory(cfg: RunConfig, gpu: GPU, arguments: int) -> Option:
    """The option that gives the scheduler as much memory to hide collectives as it would have on the real GPU.

    The scheduler may fill (base - arguments) x factor, and hides fewer collectives if that is not enough. Its base is
    the process's share of the GPU's memory; without a device, 0.8 of the memory (xla/service/gpu/gpu_hlo_schedule.cc).
    arguments: bytes of the step's arguments.
    """
    real, deviceless = (share * gpu.memory_gib * GIB - arguments for share in (cfg.xla.memory_fraction, 0.8))
    factor = round(95 * real / deviceless) if 0 < deviceless < real else 95
    return Option("xla_gpu_memory_limit_slop_factor", factor, "as much memory as the process would have on the GPU")


def with_kernels(cfg: RunConfig, gpu: GPU) -> tuple[RunConfig, tuple[str, ...]]:
    """The config with `auto` attention kernels resolved for this GPU, and a description of each choice.

    Raises UserError for a kernel that is named in the config and not supported there.
    """
    chosen = demand_kernels(cfg, Device(name=gpu.description, capability=gpu.capability, cudnn=CUDNN))
    model = cfg.model
    if isinstance(model, ChoosesKernels):
        model = model.with_kernels([choice.kernel for choice in chosen])
    described = (f"{kernel} ({'; '.join(reasons)})" if reasons else kernel for kernel, reasons in chosen)
    return cfg.but(model=model), tuple(described)


def bytes_per_device(tree: Any) -> int:
    """Bytes on one device of jax.ShapeDtypeStruct leaves with shardings."""
    leaves = jax.tree.leaves(tree)
    return sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
