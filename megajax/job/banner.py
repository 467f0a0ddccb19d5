"""The start banner: the model's size, the layout, and the choices that were made for the user."""

import platform
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import log
from typing import Any

import jax
from jax.sharding import Mesh

from megajax.config.hints import listed
from megajax.data.chat.choose_template import described
from megajax.data.rows.loader import Loader
from megajax.display.text import count, skipped_rows
from megajax.job.description import RunFigures
from megajax.job.device_memory import size
from megajax.job.integrity.replicas import coverage
from megajax.job.start.compile_cache import cache_in_use
from megajax.kernels.attention.attention import local_device
from megajax.kernels.attention.capability import KernelChoice
from megajax.kernels.grouped.matmul import code_products
from megajax.layers.expert_facts import ExpertFacts, ExpertSharding
from megajax.layers.low_rank import LORA_A
from megajax.layers.recompute import SavePolicy, format_recompute
from megajax.machine.known_faults import notes
from megajax.mesh.config import BATCH_AXES, SHARDS, ContextSharding, ParallelConfig, devices_over
from megajax.mesh.zigzag_order import SequenceSharding
from megajax.metrics.config import LoggingConfig
from megajax.metrics.event_hook import LOG
from megajax.models.facts import Facts, SectionFacts
from megajax.models.memory import MemoryReport, SavedBytes
from megajax.models.protocol import ModelConfig
from megajax.pipeline.check import measure
from megajax.precision.config import Fp8BlocksConfig, Fp8CurrentConfig, Fp8DelayedConfig, MatmulConfig, PrecisionConfig
from megajax.precision.fp8 import capability_of
from megajax.precision.matmul import CODE_BLOCK, CodeProducts
from megajax.precision.recipes import codes_of, kernel_of
from megajax.processes.gpus import nccl_variables
from megajax.processes.world import find_world
from megajax.processes.xla_options import flag_names, keeps_freed_memory, memory_fraction
from megajax.training.check_compiler_options import run_conditions
from megajax.training.program import Program
from megajax.training.reference import Reference
from megajax.training.session import Parts, Run

type Section = tuple[str, list[tuple[str, str]]]


def banner(run: Run, description: RunFigures, origin: str) -> list[Section]:
    """Sections for display.banner: model, layout, training, run. What the run does not use has no line.

    origin: of the initial state.
    """
    parts, program = run.parts, run.program
    plan = parts.resolved.replan
    return [
        ("model", _model(program, parts.tokenizer.vocabulary_size)),
        ("layout", [*_layout(program, description), *(("elastic", line) for line in (plan.lines() if plan else ()))]),
        (
            "training",
            [*_batch(program), *_training(program, description, parts.resolved.kernels), *_loss_scale(run)],
        ),
        ("run", [*_run(parts, run.batches, origin), *_reference(run.reference)]),
    ]


def _model(program: Program, tokens: int) -> list[tuple[str, str]]:
    """tokens: those of the tokenizer."""
    cfg, model, besides, padded = program.cfg.model, program.summary, "", ""
    facts, vocabulary, columns = model.facts, model.vocabulary, model.columns
    total, predicted = program.parameters, vocabulary is not None
    shapes = [f"{stack.layers()} layers" for stack in cfg.stacks().values()]
    if facts is not None:
        parameters = facts.parameter_count()
        total, besides = parameters.total, f", without embeddings {count(parameters.layers)}"
        besides += f", active {count(parameters.active)}" if parameters.idle else ""
        shapes = _of_equal({section.path: _shape(section) for section in facts.section_facts()})
    if columns is not None and vocabulary is not None:
        predicted = columns >= vocabulary  # False for a text classifier
        padded = f", padded to {columns:,}" if predicted else ""
    rows = [
        ("parameters", f"{count(total)} ({total:,}){besides}"),
        *_trained(program),
        *(("shape", shape) for shape in shapes),
    ]
    if vocabulary is not None:
        unused = f" (the tokenizer has {tokens:,})" if tokens != vocabulary else ""
        rows.append(("vocabulary", f"{vocabulary:,}{unused}{padded}"))
    if model.flops is not None and program.mesh.devices.flat[0].platform != "cpu":  # elsewhere no line uses it
        rows.append((f"FLOPs per {model.unit.removesuffix('s')}", model.flops.text(megatron=True)))
    if predicted and vocabulary is not None:
        expected = cfg.first_loss()
        expected = f"ln {vocabulary} = {log(vocabulary):.3f}" if expected is None else expected
        rows += [("first loss", f"about {expected}")] * bool(expected)
    return rows


def _observers(cfg: LoggingConfig) -> list[tuple[str, str]]:
    """What else than the run folder gets metrics and events."""
    rows, telemetry = [], cfg.telemetry
    if telemetry is not None and telemetry.prometheus is not None:
        rows.append(("metrics", f"for Prometheus at http://{telemetry.prometheus}/metrics"))
    if telemetry is not None and telemetry.otlp is not None:
        rows.append(("metrics", f"to {telemetry.otlp} every {telemetry.every_seconds:g} s (OTLP)"))
    if cfg.on_event is not None:
        rows.append(("events", f"each runs: {cfg.on_event} (output: {LOG})"))
    return rows


def _trained(program: Program) -> list[tuple[str, str]]:
    """The number of trained weights, padding rows included; nothing if all weights are trained."""
    if len(program.optimizer.declared) == len(program.declared):
        return []
    stored, trained, low_rank = program.elements
    lora = program.cfg.model.lora
    text = f"{count(trained)} ({trained:,}), {trained / stored:.2%} of all"
    if lora is not None:
        adapters = sum(path.endswith(LORA_A) for path in program.adapters)
        text += f"; {count(low_rank)} in {adapters} adapters" + ", DoRA," * lora.decomposed
        text += f" of rank {lora.rank}, scale {lora.scale():g}"
    return [("trained", text)]


def _shape(section: SectionFacts) -> str:
    hidden = section.hidden
    kinds = Counter()
    for block, times in section.stack.repeated_blocks():
        kinds[block.summary(hidden)] += times
    blocks = "; ".join(kinds) if len(kinds) == 1 else "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return f"{section.stack.layers()} layers x {hidden} hidden, {blocks}"


def _layout(program: Program, description: RunFigures) -> list[tuple[str, str]]:
    parallel, mesh, available = program.cfg.parallel, program.mesh, jax.device_count()
    rest = f" ({mesh.size} of {available} used)" if mesh.size < available else ""
    processes, world = f"{jax.process_count()} process" + "es" * (jax.process_count() > 1), find_world()
    if mesh.devices.flat[0].platform == "gpu" and world is not None:
        of_machine = "" if world.local_count is None else f", {world.local_count} on this machine"
        processes += f"{of_machine}, this one with {jax.local_device_count()}"
    sharding = {
        "replicate": "replicate: none",
        "zero1": "zero1: master weights and optimizer state",
        "fsdp": "fsdp: weights and optimizer state",
    }
    groups, of_group = mesh.shape["replica"], devices_over(mesh.shape, SHARDS)
    layout = [", ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)]
    layout += [f"data sharding {sharding[parallel.data_sharding]}"] * (groups * of_group > 1)
    layout += [f"{groups} groups of {of_group} devices, each with a copy"] * (groups > 1)
    layout += ["sequence parallel"] * parallel.sequence
    return [
        ("devices", f"{mesh.size} x {mesh.devices.flat[0].device_kind}{rest}, {processes}"),
        *_idle(mesh),
        *([("mesh", "; ".join(layout))] if mesh.size > 1 else []),
        *_context(program.layout.rows, program.cfg.model),
        *_experts(parallel, mesh, description.mixtures, known=program.summary.facts is not None),
        *_pipeline(program),
    ]


def _idle(mesh: Mesh) -> list[tuple[str, str]]:
    """Devices outside the mesh."""
    used = set(mesh.devices.flat)
    idle = [f"{device} of process {device.process_index}" for device in jax.devices() if device not in used]
    return [("idle", listed(idle))] if idle else []


def _context(split: SequenceSharding, model: ModelConfig) -> list[tuple[str, str]]:
    """How rows are split over `context`."""
    if split.devices == 1:
        return []
    positions, chunks = model.row_positions() // split.unit, f"{split.chunks} chunk" + "s" * (split.chunks > 1)
    return [("rows over context", f"{chunks} of {positions:,} positions on each device")]


def _experts(
    parallel: ParallelConfig, mesh: Mesh, mixtures: Sequence[tuple[ExpertFacts, float]], *, known: bool
) -> list[tuple[str, str]]:
    """How tokens are dispatched to experts; without experts, what `parallel.expert` does.

    known: whether the model has facts, without which its mixtures are unknown.
    """
    layout = ExpertSharding.of(parallel)
    if not mixtures and layout.expert > 1 and known:
        return [("experts", f"none: the {layout.expert} devices of expert split the rows, like those of data")]
    texts = [experts.summary(tokens, layout) for experts, tokens in mixtures]
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    notes = [note for experts, _ in mixtures if (note := experts.way_note(layout, on_cpu=on_cpu))]
    return [("experts", text) for text in dict.fromkeys([*texts, *notes])]


def _pipeline(program: Program) -> list[tuple[str, str]]:
    schedule, partition = program.pipeline, program.partition
    if schedule is None:
        return []
    wait = f", losses delayed by {schedule.loss_wait} tick" if schedule.loss_wait else ""
    chunks = f" x {schedule.chunks} virtual" if schedule.chunks > 1 else ""
    text = (
        f"{schedule.name}, {schedule.stages} stages{chunks}{wait}; "
        f"bubble {float(measure(schedule).pipeline_bubble):.1%}; activations of {schedule.ring_slots} chunks kept"
    )
    sizes = "/".join(map(str, sorted(set(partition.repeats), reverse=True)))
    rows, layers = partition.rows * len(partition.repeats), sum(partition.repeats)
    padding = f"; {rows - layers} of {rows} rows are padding" if rows > layers else ""
    several = len(program.cfg.model.stack.parts()) > 1
    chunk = f"{sizes} layers, in one program for all" if several else f"{sizes} repeats of the pattern{padding}"
    return [("pipeline", f"{text}, each of {chunk}")]


def _batch(program: Program) -> list[tuple[str, str]]:
    cfg, replicas, unit = program.cfg, devices_over(program.mesh.shape, BATCH_AXES), program.summary.unit
    rows, length = program.sizes.sizes()[-1].rows, cfg.model.row_positions()
    split = f"{program.microbatches} microbatches x {replicas} data-parallel x {cfg.batch.micro_size} rows"
    positions = program.sizes.samples(cfg.steps) * length
    size = "" if unit == "rows" else f"; {rows * length:,} {unit}, {length} per row"
    more = list[tuple[str, str]]()
    if cfg.batch.side_by_side > 1:
        beside = "a forward beside a backward in full ticks" if cfg.parallel.pipeline > 1 else "layer by layer"
        more.append(("side by side", f"{cfg.batch.side_by_side} microbatches, {beside}"))
    return [
        ("rows per step", f"{rows} = {split}{size}"),
        *more,
        ("whole run", f"{cfg.steps:,} steps, {count(positions)} {unit}"),
        *([("loss average", cfg.batch.loss_average)] if cfg.batch.loss_average != "tokens" else []),
    ]


def _training(program: Program, description: RunFigures, kernels: Sequence[KernelChoice[str]]) -> list[tuple[str, str]]:
    cfg = program.cfg
    precision, optimizer, schedule = cfg.precision, cfg.optimizer, cfg.schedule
    clip = "none" if optimizer.clip is None else f"{optimizer.clip:g}"
    warmup, decay = (n / cfg.batch.global_size for n in (program.schedule.warmup, program.schedule.decay))
    dtypes = f"compute {precision.compute}, weights {precision.params}, gradients {precision.gradients}"
    rates = f"{schedule.style} {schedule.lr:g} to {schedule.min_lr:g}"
    return [
        ("precision", dtypes),
        *_matmuls(
            precision,
            program.mesh.devices.flat[0],
            {c.kernel for c in kernels if c.layer == "experts"},
            once=program.layout.matrices is not None,
        ),
        *_blocks(precision, cfg.parallel.tensor, program.summary.facts),
        *_kernels(cfg.model, cfg.parallel, program.summary.facts, kernels),
        *_recompute(program, description.saved),
        ("optimizer", f"{optimizer.name()}, decay {optimizer.weight_decay:g}, clip {clip}"),
        ("learning rate", f"{rates}, warm-up {warmup:g} steps, decay over {decay:g}"),
    ]


def _loss_scale(run: Run) -> list[tuple[str, str]]:
    """Of float16: why the first updates change nothing."""
    if run.cfg.precision.floor() is None:
        return []
    return [
        ("loss scale", f"starts at {float(run.state.loss_scale):,.0f}; updates are skipped until it has fallen enough")
    ]


def _kernels(
    model: ModelConfig, parallel: ParallelConfig, facts: Facts | None, kernels: Sequence[KernelChoice[str]]
) -> list[tuple[str, str]]:
    """Backends of each kind of layer; on a GPU, also why a faster one is not used."""
    choices = list(dict.fromkeys(kernels))
    backends: dict[str, list[str]] = {}
    for choice in choices:
        names = backends.setdefault(choice.place or "attention", [])
        names += [choice.kernel] * (choice.kernel not in names)
    split = ContextSharding.of(parallel, causal=model.ignores_later_positions()).label()
    over = {choice.place or "attention": f" {split}" for choice in choices if choice.layer == "attention" and split}
    texts = [f"{place} {'/'.join(names)}{over.get(place, '')}" for place, names in backends.items()]
    if facts is not None:
        texts.append(f"cross-entropy in chunks of {facts.head_facts().chunk} tokens")
    rows = [("kernels", ", ".join(texts))] if texts else []
    gpu = local_device().capability is not None
    why = dict.fromkeys(
        (choice.layer, f"{choice.place} {choice.kernel}, because {'; '.join(choice.reasons)}".strip())
        for choice in choices
        if choice.reasons
    )
    return rows + [reason for reason in why if gpu]


def _matmuls(
    precision: PrecisionConfig, device: jax.Device, experts: Collection[str], *, once: bool = True
) -> list[tuple[str, str]]:
    """The recipe, and what the device multiplies. experts: kernels of the grouped matmul, if there are experts; once:
    their matrices are rounded once a step."""
    recipe = precision.matmul
    if recipe is None:
        return []
    text = f"layers, {recipe.label}"
    codes = codes_of(recipe, code_products(capability_of(device)))
    if isinstance(recipe, Fp8DelayedConfig):
        last = recipe.history == 1 or recipe.algorithm == "most_recent"
        text += f" ({1 if last else recipe.history}), margin {recipe.margin} bits"
    if isinstance(recipe, Fp8CurrentConfig):
        adding = "in reduced precision" if recipe.fast_accumulation else "in float32"
        text += f"; forward pass accumulates {adding}"
    elif kernel_of(recipe, device) == "cudnn":
        text += "; by cuDNN"
    elif codes is not None:
        text += f"; by {codes.label}, where tokens and sides are multiples of {CODE_BLOCK}"
    else:
        text += f"; rounded, then multiplied in {_wide(recipe)}, because {_why_wide(recipe, device.device_kind)}"
    ends = recipe.layers(0) and f"; first {recipe.first_layers} and last {recipe.last_layers} layers in bfloat16"
    often = f"; matrices of experts rounded {'once a step' if once else 'for each microbatch'}"
    groups = f"{often}; experts too, {_of_experts(recipe, codes)}" if experts else ""
    return [("matmuls", text + (ends or "") + groups)]


def _blocks(precision: PrecisionConfig, tensor: int, facts: Facts | None) -> list[tuple[str, str]]:
    """Where blocks of weights lie on two devices: the sides that `tensor` divides into parts of other sizes."""
    if not isinstance(precision.matmul, Fp8BlocksConfig) or facts is None:
        return []
    undivided = {(side.setting, side.size) for side in facts.matmul_sides(1)}
    parts = dict.fromkeys((side.setting, side.size) for side in facts.matmul_sides(tensor))
    sides = [f"{name} ({size})" for name, size in parts if size % CODE_BLOCK and (name, size) not in undivided]
    text = f"each device rounds whole matrices, as parts of these are no multiples of {CODE_BLOCK}: {', '.join(sides)}"
    return [("blocks", text)] if sides else []


def _of_experts(recipe: MatmulConfig, codes: CodeProducts | None) -> str:
    """What multiplies experts."""
    if codes is not None:
        return f"by {codes.label}, where sides are multiples of {CODE_BLOCK}"
    why = "kernel=reference" if recipe.kernel == "reference" else "no kernel multiplies groups in fewer bits"
    return f"multiplied in {_wide(recipe)}: {why}"


def _wide(recipe: MatmulConfig) -> str:
    """The dtype that holds what the recipe rounded."""
    return "float32" if getattr(recipe, "scales", "") == "float32" else "bfloat16"


def _why_wide(recipe: MatmulConfig, kind: str) -> str:
    if recipe.kernel == "reference":
        return "kernel=reference"
    return "scales are float32" if _wide(recipe) == "float32" else f"{kind} has no products of blocks"


def _recompute(program: Program, saved: Mapping[str, Sequence[SavedBytes]]) -> list[tuple[str, str]]:
    """The tensors that layers save and recompute for the backward pass, and their bytes per layer."""
    facts = program.summary.facts
    if facts is None:
        return []
    remat, layers = facts.recomputing(), program.cfg.model.stack.layers()
    text = f"{format_recompute(remat.recompute)}: {_saved(remat.policy())}"
    if remat.layers_per_checkpoint > 1:
        group = remat.layers_per_checkpoint
        text = f"{format_recompute(remat.recompute)}: groups of {group} layers save the input of the first"
    if remat.layers is not None and remat.layers < layers:
        text += f" (first {remat.layers} layers of each chunk); other layers: {_saved(remat.lighter_policy())}"
    share = program.mesh.shape["tensor"] * program.mesh.shape["context"]
    over = f", over {share} devices" if share > 1 else ""
    costs_of = dict[str, str]()
    for path, costs in saved.items():
        cost = "; ".join(
            (f"{layer.layers:.0f} layers of a chunk " if len(costs) > 1 else "")
            + size(layer.device)
            + (f" and {size(layer.host)} in host memory" if layer.host else "")
            + f", {size(layer.recomputed)} recomputed"
            for layer in costs
        )
        costs_of[path] = f"per microbatch{over}: {cost}"
    return [("recompute", text), *(("saved by a layer", cost) for cost in _of_equal(costs_of))]


def _of_equal(texts: Mapping[str, str]) -> list[str]:
    """The texts of sections by their paths, equal ones once, after the paths. The main section has an empty path."""
    paths: dict[str, list[str]] = {}
    for path, text in texts.items():
        paths.setdefault(text, []).append(path)
    names = {text: ", ".join(path for path in sections if path) for text, sections in paths.items()}
    return [f"{name}: {text}" if name else text for text, name in names.items()]


def _saved(policy: SavePolicy) -> str:
    if policy.parts is None:
        return "save all inputs of the backward pass"
    names = ", ".join(f"{part} (in host memory)" if part in policy.offloaded else part for part in policy.parts)
    return f"save {names.replace('_', ' ')}; recompute the rest"


def memory_formula(report: MemoryReport | None) -> str:
    """Memory by Megatron-LM's formula, as the end of a line; "" without a report."""
    if report is None:
        return ""
    return (
        f"; Megatron-LM's formula, for 16-bit training: {size(report.total)} (weights and optimizer "
        f"{size(report.weights)}, activations {size(report.activations)})"
    )


def _compiler(program: Program) -> list[tuple[str, str]]:
    """Compiler options, versions, and the folder of compiled programs."""
    settings, options, cache, scheduler = program.cfg.xla, program.options, cache_in_use(), program.scheduler
    user_options = settings.options
    defaults = ", ".join(f"{name}={value}" for name, value in options.items() if name not in user_options)
    user_text = ", ".join(f"{name}={options[name]}" for name in user_options)
    on_gpus = program.mesh.devices.flat[0].platform == "gpu"
    freed = ["freed memory kept by this process (mallopt)"] * keeps_freed_memory()
    versions = f"jax {jax.__version__}, Python {platform.python_version()}"
    share, nccl = (memory_fraction(), nccl_variables()) if on_gpus else (None, "")
    return [
        *([("XLA", defaults)] if defaults else []),
        *([("XLA, as asked", user_text)] if user_text else []),
        *([("XLA, by environment", ", ".join(sorted(flag_names())))] if flag_names() else []),
        *(
            [("schedule", f"by kernel times of the cost model for {scheduler.device}; compiled twice")]
            if scheduler
            else []
        ),
        *([("deterministic", "on: no autotuning, sums in a fixed order")] if settings.deterministic else []),
        *([("NCCL", nccl)] if nccl else []),
        *([("GPU memory", f"{share} of it for arrays (xla.memory_fraction)")] if share else []),
        *(("known fault", line) for line in notes(run_conditions(program.cfg, list(program.mesh.devices.flat)))),
        (
            "software",
            "; ".join([versions, *freed, f"compiled programs {'not kept' if cache is None else f'in {cache}'}"]),
        ),
    ]


def _reference(reference: Reference | None) -> list[tuple[str, str]]:
    """The reference model of preference optimization."""
    if reference is None:
        return []
    source = f"log-probabilities: {f'{reference.scored:,} rows scored now' if reference.scored else 'read'}"
    files = ", ".join(map(str, reference.files))
    return [
        ("reference model", f"weights {reference.weights}; {'' if reference.scored is None else f'{source}, '}{files}")
    ]


def _passes(rows: object) -> str:
    """Number of passes over the data, if more than one, and a note. Row sources of users may lack both."""
    passes, note = getattr(rows, "passes", 1), getattr(rows, "note", "")
    return (f" ({passes:,} passes over the data)" if passes > 1 else "") + note


def _balance(train: object, balance: str, imbalance: tuple[Any, Any] | None) -> list[tuple[str, str]]:
    """Fill of packed rows, and the balance of attention's work among rows and among data groups."""
    rows = []
    if (packing := getattr(train, "packing", None)) is not None:
        rows = [("packed rows", f"{packing.fill:.1%} filled; most scores of a row {packing.imbalance:.2f} x the mean")]
    if imbalance is None:
        return rows
    as_read, balanced = ("step {:.3f}, microbatches {:.3f}".format(*ratios) for ratios in imbalance)
    text = f"by {balance}; busiest group over mean at the next step: {balanced} (in order: {as_read})"
    return [*rows, ("balanced rows", text)]


def _run(parts: Parts, batches: Loader, origin: str) -> list[tuple[str, str]]:
    splits, cfg, program = parts.splits, parts.cfg, parts.program
    named = [(name, part) for name, part in splits._asdict().items() if part is not None]
    rows = ", ".join(f"{name} {len(part):,}{_passes(part)}" for name, part in named)
    isolated = "; documents isolated" if "segment_ids" in program.schema else ""
    skipped = parts.skipped_rows()
    return [
        ("data", f"{type(cfg.data).__name__.removesuffix('Config')}; rows: {rows}{isolated}"),
        *([("rows skipped", skipped_rows(skipped))] if skipped else []),
        *_balance(splits.train, cfg.data.loader.balance, batches.imbalance()),
        *([("chat template", template)] if (template := described(cfg.data, cfg.tokenizer)[0]) else []),
        ("folder", f"{cfg.run_dir}, {origin}"),
        *_observers(cfg.logging),
        *coverage(cfg.resilience.replicas, program),
        *_compiler(program),
    ]
