"""The train step of a config, compiled for virtual GPU devices: memory, collectives, kernels, and its time."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Any

import jax

from megajax.display.banner import Report, Section, Table
from megajax.display.text import byte_size, duration
from megajax.kernels.attention.capability import KernelChoice
from megajax.kernels.attention.request import KernelDevice
from megajax.mesh.config import ContextSharding
from megajax.models.facts import ChoosesKernels, facts_of
from megajax.models.protocol import ModelConfig
from megajax.pipeline.check import measure
from megajax.pipeline.schedule import Schedule
from megajax.planning.compiled import devices as devices
from megajax.planning.compiled.audit import audit, largest_arrays
from megajax.planning.compiled.devices import GIB, GPU, Cluster
from megajax.planning.compiled.hlo import Collective, CompiledProgram, Contents, read, rounds
from megajax.planning.compiled.instruction_times import InstructionTimes
from megajax.planning.compiled.scheduled_step import CostScheduler, rows_over_mean
from megajax.planning.compiled.timeline import Timeline, timeline
from megajax.planning.cost.estimate import Case, Estimate, bytes_per_step, speed, waiting
from megajax.planning.resolve import resolve
from megajax.planning.show import layout, memory_rows, placement, times, traffic_by_class
from megajax.processes.xla_options import DEVICELESS, Option, compiler_options
from megajax.training.program import Program
from megajax.training.run_config import RunConfig
from megajax.training.step import ScheduleChoice


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
    """Bytes in host memory: offloaded moments and activations."""

    @property
    def peak(self) -> int:
        """Arguments, temporaries, and outputs that reuse no argument's buffer."""
        return self.arguments + self.temporary + self.outputs - self.aliased


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """The compiled train step of a config on a cluster."""

    cfg: RunConfig
    cluster: Cluster
    mesh: dict[str, int]
    microbatches: int
    parameters: int
    """Parameters of the model."""
    kernels: Mapping[str, list[str]]
    """Kind of layer -> kernels of these layers, with the reason if one is not the fastest."""
    memory: Memory
    contents: Contents
    schedule: Schedule | None
    """None without a pipeline."""
    compile_seconds: float
    text: str
    """HLO of the compiled program."""
    scheduled: ScheduleChoice | None = None
    """How it was scheduled by the times of the cost model; None: by XLA's own."""

    @property
    def unknown_trips(self) -> int:
        """Trip count of an outermost loop whose count the compiler has lost.

        It loses that of the loop over microbatches when it peels off the first iteration to start the next one's
        collectives early, so all but one remain. Loops over the ticks of a pipeline keep their counts.
        """
        return max(1, self.microbatches - 1) if self.schedule is None else 1

    @cached_property
    def costs(self) -> InstructionTimes:
        """Of the instructions of the program."""
        device, _, per_node = self.cluster
        return InstructionTimes(CompiledProgram.read(self.text), self.mesh, device, per_node, rows_over_mean(self.cfg))

    @cached_property
    def timeline(self) -> Timeline:
        """When kernels and collectives of the program run."""
        return timeline(self.costs, self.unknown_trips)

    @property
    def pipeline_bubble(self) -> float:
        """Time that the stages of a pipeline idle, over the time they work; 0 without a pipeline."""
        return 0.0 if self.schedule is None else float(measure(self.schedule).pipeline_bubble)

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.usable_gib * GIB

    @property
    def usable_gib(self) -> float:
        """Memory of a device that the run reserves for arrays."""
        return self.cluster.gpu.usable_gib(self.cfg.xla.memory_fraction)


def compile_train_step(cfg: RunConfig, cluster: Cluster) -> TrainPlan:
    """Compile the train step that training would run on the cluster; needs neither GPUs nor data.

    Raises ConfigError for a layout that doesn't match the devices, UserError for a kernel they don't support.
    """
    # Without a device the compiler finds no deterministic kernels: see xla.DETERMINISTIC.
    settings = cfg.but(xla=replace(cfg.xla, deterministic=False))
    resolved = resolve(settings, devices.virtual_devices(cluster), device=kernel_device(cluster.gpu), may_replan=False)
    model, kernels = with_kernels(cfg.model, resolved.kernels)
    cfg, mesh = cfg.but(model=model), resolved.mesh
    settings = settings.but(model=model)
    program = Program.of(settings, mesh, resolved.options, CostScheduler.of(settings, mesh))
    state, batch = program.state_like(), program.batch_like()
    step: Any = program.train_step  # a jitted function, whose type lacks `lower`
    arguments = bytes_per_device((state.params, state.optimizer))
    started = time.monotonic()
    with jax.set_mesh(mesh), jax.default_matmul_precision(cfg.precision.matmul_precision()):
        limit = scheduler_memory(cfg.xla.memory_fraction, cluster.gpu, arguments)
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
        scheduled=next(iter(program.schedules()), None),
    )


def scheduler_memory(memory_fraction: float, gpu: GPU, arguments: int) -> Option:
    """The option that gives the scheduler as much memory to hide collectives as it would have on the real GPU.

    The scheduler may fill (base - arguments) x factor, and hides fewer collectives if that is not enough. Its base is
    the process's share of the GPU's memory; without a device, 0.8 of the memory (xla/service/gpu/gpu_hlo_schedule.cc).
    arguments: bytes of the step's arguments.
    """
    bases = gpu.usable_gib(memory_fraction), 0.8 * gpu.memory_gib
    real, deviceless = (base * GIB - arguments for base in bases)
    factor = round(95 * real / deviceless) if 0 < deviceless < real else 95
    return Option("xla_gpu_memory_limit_slop_factor", factor, "as much memory as the process would have on the GPU")


def kernel_device(gpu: GPU) -> KernelDevice:
    """The virtual device that kernels are chosen for."""
    return KernelDevice(name=gpu.description, capability=gpu.capability, cudnn=devices.CUDNN)


def with_kernels(model: ModelConfig, choices: Sequence[KernelChoice[str]]) -> tuple[ModelConfig, dict[str, list[str]]]:
    """The model with these kernels instead of `auto`, and a description of each choice."""
    if isinstance(model, ChoosesKernels):
        model = model.with_kernels([choice.kernel for choice in choices])
    described: dict[str, list[str]] = {}
    for choice in choices:
        reasons = f" ({'; '.join(choice.reasons)})" if choice.reasons else ""
        label = f"{choice.place} {choice.kernel}{reasons}".removeprefix(choice.layer).strip()
        described.setdefault(choice.layer, []).append(label)
    return model, described


def bytes_per_device(tree: object) -> int:
    """Bytes on one device of jax.ShapeDtypeStruct leaves with shardings."""
    leaves = jax.tree.leaves(tree)
    return sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def grouped(
    collectives: Iterable[Collective],
    unknown_trips: int | None = None,
    more: Callable[[Sequence[Collective]], Mapping[str, Any]] = lambda members: {},
) -> list[dict[str, Any]]:
    """Collectives with the same place, kind and axes, summed: rows of a table, in the order of places.

    docs/planning.md lists the keys. share: fraction of the runs that is not skipped; count and bytes: None as in
    `Place.runs`. more: further values of a row.
    """

    def key(item: Collective) -> tuple:
        place, groups = item.place, item.groups
        return place.path, item.kind, groups.name, groups.size, place.conditional, place.share

    rows = []
    for _, group in groupby(sorted(collectives, key=key), key):
        members = list(group)
        place, once = members[0].place, sum(collective.bytes for collective in members)
        times = place.runs(unknown_trips)
        rows.append(
            {
                "kind": members[0].kind,
                "axis": members[0].groups.name,
                "members": members[0].groups.size,
                "loop": place.name,
                "trips": list(place.trips),
                "inside_loop": bool(place.path),
                "conditional": place.conditional,
                "share": place.share,
                "instructions": len(members),
                "arrays": sum(collective.arrays for collective in members),
                "count": None if times is None else times * len(members),
                "bytes_once": once,
                "bytes": None if times is None else times * once,
                **more(members),
            }
        )
    return rows


def timed(plan: TrainPlan) -> list[dict[str, Any]]:
    """Rows of `grouped` with seconds and exposed seconds of a step, by the cost model; any model has them."""
    exposed, costs = plan.timeline.exposed, plan.costs
    instructions = Counter(collective.name for collective in plan.contents.collectives)

    def more(members: Sequence[Collective]) -> dict[str, float]:
        place, seconds = members[0].place, sum(map(costs.of_message, members))
        waits = (exposed.get(member.name, 0.0) / instructions[member.name] for member in members)
        times = place.share * rounds(place.trips, plan.unknown_trips)
        return {"seconds": times * seconds, "exposed_seconds": sum(waits)}

    return grouped(plan.contents.collectives, plan.unknown_trips, more)


def exposed_by_axis(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Mesh axes of collectives -> seconds of a step in which nothing runs beside them; rows: of `timed`."""
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[row["axis"]] = seconds.get(row["axis"], 0.0) + row["exposed_seconds"]
    return seconds


def with_program(formula: Estimate, rows: Iterable[Mapping[str, Any]]) -> Estimate:
    """An estimate with the collectives of the compiled program; rows: of `timed`.

    Idle ticks of a pipeline have collectives like all others, so the bubble is of computing alone.
    """
    run, compute, rows = formula.run, formula.compute_seconds, [*rows]
    exposed = sum(row["exposed_seconds"] for row in rows)
    hidden = sum(row["seconds"] for row in rows) - exposed
    exposed += run.device.contention * hidden
    bubble = run.schedule.fraction * compute
    exposed += waiting(run, compute + exposed + bubble)
    return replace(formula, exposed_seconds=exposed, hidden_seconds=hidden, bubble_seconds=bubble)


def report(plan: TrainPlan, *, audited: bool = False) -> tuple[Report, dict[str, Any]]:
    """The report of a compiled plan, and its JSON: memory, bytes and seconds are of one device.

    audited: with the bytes through memory. The time of a step is unknown where the formulas do not hold for the model.
    """
    rows, cluster, memory, options = timed(plan), plan.cluster, plan.memory, plan.cfg.xla.options
    fraction = plan.cfg.xla.memory_fraction
    parts = [
        ("weights", memory.parameters, "master weights"),
        ("optimizer", memory.optimizer, "its state"),
        ("temporary", memory.temporary, "weights in compute dtype, gradients, activations"),
        ("batch and rest", memory.arguments - memory.parameters - memory.optimizer, "other arguments of the step"),
        ("outputs", memory.outputs - memory.aliased, "not in the place of arguments"),
        ("peak", memory.peak, ""),
        ("usable", plan.usable_gib * GIB, f"of {cluster.gpu.memory_gib:g}: xla.memory_fraction={fraction:g}"),
        *[("in host memory", memory.host, "beside that")] * bool(memory.host),
    ]
    cut = ContextSharding.of(plan.cfg.parallel, causal=plan.cfg.model.ignores_later_positions())
    layers = {"attention": f" {cut.label()}"} if cut.devices > 1 else {}
    kernels = [f"{layer} {name}{layers.get(layer, '')}" for layer, names in plan.kernels.items() for name in names]
    formula = None if facts_of(plan.cfg.model) is None else Case(plan.cfg, plan.cluster).estimate
    if formula is None:
        step, seconds = None, [("unknown", "the cost model needs facts of the model (megajax.models.facts)")]
        sizes = placement(cluster.devices, cluster.per_node, plan.mesh, plan.parameters)
        sizes += [("microbatches", f"{plan.microbatches} of {plan.cfg.batch.micro_size} rows")]
    else:
        step = with_program(formula, rows)
        sizes, seconds = layout(step), times(step)
    blocks: list[Section | Table] = [
        ("layout", [*sizes, *[("kernels", "; ".join(dict.fromkeys(kernels)))] * bool(kernels)]),
        ("memory of one device, GiB", memory_rows(parts)),
        ("time of a step, by the cost model", seconds),
    ]
    figures = _figures(plan, rows) | speed(step)
    if audited:
        program = audit(plan.text, plan.unknown_trips, plan.costs.over_mean)
        predicted = None if formula is None else bytes_per_step(formula)
        blocks.append(traffic_by_class(program.by_class(), cluster.device, predicted, program.workspace()))
        figures |= program.to_dict()
        blocks.append(_streams(plan.timeline, rows))
    compiled = [("time", duration(plan.compile_seconds)), ("jax", jax.__version__)]
    compiled.append(("schedule", "XLA's own" if plan.scheduled is None else plan.scheduled.summary()))
    if options:
        compiled.append(("XLA, as asked", ", ".join(f"{name}={value}" for name, value in options.items())))
    blocks += [("compile", compiled), _collectives(plan, rows), *([] if plan.fits else [largest_arrays(plan.text)])]
    return Report(f"plan for {cluster.devices} x {cluster.gpu.description}", blocks), figures


def _streams(line: Timeline, rows: Iterable[Mapping[str, Any]]) -> Section:
    """Seconds of a step as two streams, and what is exposed over each axis."""
    waits = [(f"exposed over {axis}", f"{seconds:9.3f} s") for axis, seconds in exposed_by_axis(rows).items()]
    parts = [("step", f"{line.seconds:9.3f} s"), ("kernels", f"{line.computing:9.3f} s"), *waits]
    return "kernels and collectives as two streams, from the program alone", parts


def _figures(plan: TrainPlan, rows: list[dict[str, Any]]) -> dict[str, Any]:
    cluster, schedule = plan.cluster, plan.schedule
    names = ("kernels", "mesh", "microbatches", "parameters", "compile_seconds")
    sizes = ("peak", "arguments", "parameters", "optimizer", "host", "temporary", "outputs", "aliased")
    return {
        "fits": plan.fits,
        **{f"{name}_gib": getattr(plan.memory, name) / GIB for name in sizes},
        "usable_gib": plan.usable_gib,
        "device_gib": cluster.gpu.memory_gib,
        "bubble_fraction": plan.pipeline_bubble,
        "schedule": None if schedule is None else schedule.name,
        "virtual_stages": plan.cfg.parallel.virtual_stages,
        "ring_slots": None if schedule is None else schedule.ring_slots,
        "collectives": rows,
        "exposed_by_axis": exposed_by_axis(rows),
        "scheduled": {"by": "default"} if plan.scheduled is None else plan.scheduled.to_dict(),
        "streams": {"seconds": plan.timeline.seconds, "computing": plan.timeline.computing},
        "loops": [
            {
                "loop": loop.place.name,
                "trips": list(loop.place.trips),
                "count": loop.place.runs(plan.unknown_trips),
                "conditional": loop.place.conditional,
                "matmuls": loop.matmuls,
            }
            for loop in plan.contents.loops
        ],
        "device": cluster.device.name,
        "devices": cluster.devices,
        "gpus_per_node": cluster.per_node,
        **{name: getattr(plan, name) for name in names},
        "jax_version": jax.__version__,
    }


def _collectives(plan: TrainPlan, rows: Iterable[Mapping[str, Any]]) -> Table:
    """One line for each kind of collective of each loop, below the loop's own."""
    lines: list[Sequence[str]] = []
    for loop in plan.contents.loops:
        place = loop.place
        inside = [row for row in rows if row["loop"] == place.name]
        if not inside and not loop.matmuls:
            continue
        indent = "  " * len(place.path)
        trips = " x ".join("?" if trips is None else f"{trips:,}" for trips in place.trips)
        heading = (f"{place.name}: {trips} times" if place.path else "step") + " at most" * place.conditional
        lines.append((f"{indent}{heading}, {loop.matmuls} matmul{'s' * (loop.matmuls != 1)}", *[""] * 7))
        lines += [
            (
                f"{indent}  {row['kind']}{' (in a branch)' * row['conditional']}",
                row["axis"],
                str(row["instructions"]),
                f"{row['count']:,}",
                byte_size(row["bytes_once"] / row["instructions"]),
                byte_size(row["bytes"]),
                f"{row['seconds']:.3f}",
                f"{row['exposed_seconds']:.3f}",
            )
            for row in inside
        ]
    unknown = ", ".join(loop.place.name for loop in plan.contents.loops if loop.place.runs() is None)
    note = f"; ?: the compiler does not know the trip count of loop {unknown}, {plan.unknown_trips:,} is taken"
    headings = ("loop, collective", "axis", "in program", "per step", "bytes each time", "bytes per step")
    title = f"collectives of one device{note * bool(unknown)}"
    return Table(title, (*headings, "seconds", "exposed"), lines, (0, 1))
