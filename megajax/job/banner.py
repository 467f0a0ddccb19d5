"""The start banner: the model's size, the layout, and the choices that were made for the user."""

import platform
from collections import Counter
from collections.abc import Sequence
from math import log
from typing import Any

import jax
import jax.numpy as jnp

from megajax.config.nearest import listed
from megajax.display.text import count, skipped_rows
from megajax.job.device_memory import size
from megajax.job.integrity.replicas import coverage
from megajax.job.start.compile_cache import cache_in_use
from megajax.kernels.attention.attention import local_device
from megajax.kernels.attention.capability import Choice
from megajax.layers.facts import Share
from megajax.layers.moe.facts import ExpertFacts, ExpertSharding
from megajax.layers.recompute import SavePolicy, format_recompute
from megajax.mesh.config import ParallelConfig
from megajax.mesh.context_sharding import ContextSharding
from megajax.mesh.processes.nccl import variables as nccl_variables
from megajax.mesh.processes.world import find_world
from megajax.mesh.xla import flag_names, memory_fraction
from megajax.models.facts import Facts, SectionFacts, block_facts, demand_facts, facts_of, flops_of
from megajax.models.memory import MemorySetting, SavedBytes, memory_report, saved_bytes
from megajax.models.protocol import ModelConfig, ids_below, position_unit
from megajax.pipeline.check import measure
from megajax.precision.config import PrecisionConfig
from megajax.training.program import weight_size
from megajax.training.session import Run

type Section = tuple[str, list[tuple[str, str]]]


def banner(run: Run, origin: str) -> list[Section]:
    """Sections for metrics.banner: model, layout, batch, training, run. origin: of the initial state."""
    plan = run.parts.resolved.replan
    return [
        ("model", _model(run)),
        ("layout", [*_layout(run), *(("elastic", line) for line in ([] if plan is None else plan.lines()))]),
        ("batch", _batch(run)),
        ("training", _training(run)),
        ("run", _run(run, origin)),
    ]


def _model(run: Run) -> list[tuple[str, str]]:
    cfg, tokens = run.cfg.model, run.parts.tokenizer.vocabulary_size
    facts, flops, vocabulary = facts_of(cfg), flops_of(cfg), ids_below(cfg)
    total, besides, padded, predicted = run.program.parameters, "", "", vocabulary is not None
    shapes = [f"{stack.layers()} layers" for stack in cfg.stacks().values()]
    if facts is not None:
        parameters = facts.parameter_count()
        total, besides = parameters.total, f", without embeddings {count(parameters.layers)}"
        besides += f", active {count(parameters.active)}" if parameters.idle else ""
        shapes = [_shape(section) for section in facts.section_facts()]
        columns = facts.head_facts().columns
        predicted = vocabulary is not None and columns >= vocabulary  # False for a text classifier
        padded = f", padded to {columns:,}" if predicted else ""
    rows = [
        ("parameters", f"{count(total)} ({total:,}){besides}"),
        *_trained(run),
        *(("shape", shape) for shape in shapes),
    ]
    if vocabulary is not None:
        unused = f" (the tokenizer has {tokens:,})" if tokens != vocabulary else ""
        rows.append(("vocabulary", f"{vocabulary:,}{unused}{padded}"))
    if flops is not None:
        by_attention = f"{flops.causal:.4g} with causal attention, {flops.full:.4g} with full"
        rows.append((f"FLOPs per {position_unit(cfg).removesuffix('s')}", by_attention))
    if predicted and vocabulary is not None:
        rows.append(("first loss", f"about ln {vocabulary} = {log(vocabulary):.3f}"))
    return rows


def _trained(run: Run) -> list[tuple[str, str]]:
    """The number of trained weights, padding rows included; nothing if all weights are trained."""
    program, adapters = run.program, run.program.adapters
    if len(program.optimizer.declared) == len(program.declared):
        return []
    total, trained, low_rank = (
        sum(weight_size(program.declared[path]) for path in paths)
        for paths in (program.declared, program.optimizer.declared, adapters)
    )
    lora = getattr(run.cfg.model, "lora", None)
    text = f"{count(trained)} ({trained:,}), {trained / total:.2%} of all"
    if lora is not None:
        text += f"; {count(low_rank)} in {len(adapters) // 2} adapters of rank {lora.rank}, scale {lora.scale():g}"
    return [("trained", text)]


def _shape(section: SectionFacts) -> str:
    hidden, prefix = section.hidden, f"{section.path}: " if section.path else ""
    kinds = Counter()
    for block, times in section.stack.repeated_blocks():
        kinds[block.summary(hidden)] += times
    blocks = "; ".join(kinds) if len(kinds) == 1 else "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return f"{prefix}{section.stack.layers()} layers x {hidden} hidden, {blocks}"


def _layout(run: Run) -> list[tuple[str, str]]:
    parallel, used, available = run.cfg.parallel, run.mesh.size, jax.device_count()
    rest = f" ({used} of {available} used)" if used < available else ""
    processes, world = f"{jax.process_count()} process" + "es" * (jax.process_count() > 1), find_world()
    if run.mesh.devices.flat[0].platform == "gpu" and world is not None:
        of_machine = "" if world.local_count is None else f", {world.local_count} on this machine"
        processes += f"{of_machine}, this one with {jax.local_device_count()}"
    sharding = {
        "replicate": "replicate: none",
        "zero1": "zero1: master weights and optimizer state",
        "fsdp": "fsdp: weights and optimizer state",
    }
    return [
        ("devices", f"{used} x {run.mesh.devices.flat[0].device_kind}{rest}, {processes}"),
        *_idle(run),
        ("mesh", ", ".join(f"{name} {size}" for name, size in run.mesh.shape.items())),
        ("data sharding", sharding[parallel.data_sharding]),
        ("sequence parallel", "on" if parallel.sequence else "off"),
        *_context(run),
        *_experts(run),
        *_pipeline(run),
    ]


def _idle(run: Run) -> list[tuple[str, str]]:
    """Devices outside the mesh."""
    used = set(run.mesh.devices.flat)
    idle = [f"{device} of process {device.process_index}" for device in jax.devices() if device not in used]
    return [("idle", listed(idle))] if idle else []


def _context(run: Run) -> list[tuple[str, str]]:
    """How rows are split over `context`."""
    split = run.program.layout.rows
    if split.devices == 1:
        return []
    positions, chunks = run.cfg.model.row_positions() // split.unit, f"{split.chunks} chunk" + "s" * (split.chunks > 1)
    return [("rows over context", f"{chunks} of {positions:,} positions on each device")]


def _mixtures(run: Run) -> list[tuple[ExpertFacts, float]]:
    """Distinct expert layers, each with the tokens of a microbatch on one group of `tensor` devices."""
    facts, layers = facts_of(run.cfg.model), []
    for section in () if facts is None else facts.section_facts():
        tokens = run.cfg.batch.micro_size * section.positions / run.mesh.shape["context"]
        sizes = {"hidden": section.hidden, "length": section.length, "memory_length": section.memory_length}
        blocks = (block.facts(dtype=run.cfg.precision.compute, **sizes) for block in section.stack.pattern)
        mixtures = [(experts, tokens) for block in blocks for experts in block.experts]
        layers += [layer for number, layer in enumerate(mixtures) if layer not in layers + mixtures[:number]]
    return layers


def _experts(run: Run) -> list[tuple[str, str]]:
    """How tokens are dispatched to experts; without experts, what `parallel.expert` does."""
    mixtures, layout = _mixtures(run), ExpertSharding.of(run.cfg.parallel)
    if not mixtures and layout.expert > 1 and facts_of(run.cfg.model) is not None:
        return [("experts", f"none: the {layout.expert} devices of expert split the rows, like those of data")]
    texts = [experts.summary(tokens, layout) for experts, tokens in mixtures]
    on_cpu = run.mesh.devices.flat[0].platform == "cpu"
    notes = [note for experts, _ in mixtures if (note := experts.way_note(layout, on_cpu=on_cpu))]
    return [("experts", text) for text in dict.fromkeys([*texts, *notes])]


def _pipeline(run: Run) -> list[tuple[str, str]]:
    schedule, partition = run.program.pipeline, run.program.partition
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
    if len(run.cfg.model.stack.parts()) > 1:
        return [("pipeline", text), ("layers of a chunk", f"{sizes}, in one program for all chunks")]
    return [("pipeline", text), ("layers of a chunk", f"{sizes} repeats of the pattern{padding}")]


def _batch(run: Run) -> list[tuple[str, str]]:
    batch, replicas = run.cfg.batch, run.mesh.shape["data"] * run.mesh.shape["expert"]
    rows, length = run.program.sizes.sizes()[-1].rows, run.cfg.model.row_positions()
    split = f"{run.program.microbatches} microbatches x {replicas} data-parallel x {batch.micro_size} rows"
    positions = run.program.sizes.samples(run.cfg.steps) * length
    unit = position_unit(run.cfg.model)
    more = [] if unit == "rows" else [(f"{unit} per step", f"{rows * length:,} ({length} per row)")]
    return [
        ("rows per step", f"{rows} = {split}"),
        *more,
        ("whole run", f"{run.cfg.steps:,} steps, {count(positions)} {unit}"),
        ("loss average", batch.loss_average),
    ]


def _training(run: Run) -> list[tuple[str, str]]:
    precision, optimizer, schedule = run.cfg.precision, run.cfg.optimizer, run.cfg.schedule
    clip = "none" if optimizer.clip is None else f"{optimizer.clip:g}"
    warmup, decay = (n / run.cfg.batch.global_size for n in (run.program.schedule.warmup, run.program.schedule.decay))
    dtypes = f"compute {precision.compute}, weights {precision.params}, gradients {precision.gradients}"
    rates = f"{schedule.style} {schedule.lr:g} to {schedule.min_lr:g}"
    return [
        ("precision", dtypes),
        *_fp8(precision, mixtures=bool(_mixtures(run))),
        *_kernels(run.cfg.model, run.cfg.parallel, run.parts.resolved.kernels),
        *_recompute(run),
        ("optimizer", f"{optimizer.name()}, decay {optimizer.weight_decay:g}, clip {clip}"),
        ("learning rate", f"{rates}, warm-up {warmup:g} steps, decay over {decay:g}"),
    ]


def _kernels(model: ModelConfig, parallel: ParallelConfig, kernels: Sequence[Choice[str]]) -> list[tuple[str, str]]:
    """Backends of each kind of layer; on a GPU, also why a faster one is not used."""
    facts, choices = facts_of(model), list(dict.fromkeys(kernels))
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


def _fp8(precision: PrecisionConfig, *, mixtures: bool) -> list[tuple[str, str]]:
    fp8 = precision.fp8
    if fp8 is None:
        return []
    gradients = {"hybrid": "e5m2", "e4m3": "e4m3"}[fp8.format]
    adding = "in reduced precision" if fp8.fast_accumulation else "in float32"
    scales, delayed = "scales from each tensor", fp8.delayed
    if delayed is not None:
        last = delayed.history == 1 or delayed.algorithm == "most_recent"
        scales = f"scales from the {'step' if last else f'{delayed.history} steps'} before"
        scales += f", margin {delayed.margin} bits" * (delayed.margin != 0)
    text = f"layers, e4m3 with gradients in {gradients}; {scales}; forward pass accumulates {adding}"
    # Grouped matmuls have no 8-bit recipe.
    return [("8-bit matmuls", text + f"; experts multiply in {precision.compute}" * mixtures)]


def _recompute(run: Run) -> list[tuple[str, str]]:
    """The tensors that layers save and recompute for the backward pass, and their bytes per layer."""
    facts = facts_of(run.cfg.model)
    if facts is None:
        return []
    remat, layers = facts.recomputing(), run.cfg.model.stack.layers()
    text = f"{format_recompute(remat.recompute)}: {_saved(remat.policy())}"
    if remat.layers_per_checkpoint > 1:
        group = remat.layers_per_checkpoint
        text = f"{format_recompute(remat.recompute)}: groups of {group} layers save the input of the first"
    if remat.layers is not None and remat.layers < layers:
        text += f" (first {remat.layers} layers of each chunk); other layers: {_saved(remat.lighter_policy())}"
    share = run.mesh.shape["tensor"] * run.mesh.shape["context"]
    over = f", over {share} devices" if share > 1 else ""
    rows = [("recompute", text)]
    for path, costs in saved_by_layers(run, facts).items():
        cost = "; ".join(
            (f"{saved.layers:.0f} layers of a chunk " if len(costs) > 1 else "")
            + size(saved.device)
            + (f" and {size(saved.host)} in host memory" if saved.host else "")
            + f", {size(saved.recomputed)} recomputed"
            for saved in costs
        )
        rows.append(("saved by a layer", f"{path}{': ' * bool(path)}per microbatch{over}: {cost}"))
    return rows


def saved_by_layers(run: Run, facts: Facts) -> dict[str, list[SavedBytes]]:
    """Bytes that the layers of each section save per microbatch, summed over the devices of `context` and `tensor`."""
    cfg, program = run.cfg, run.program
    width, saved = jnp.dtype(cfg.precision.compute).itemsize, {}
    kernel_facts = facts.with_kernels([choice.kernel for choice in run.parts.resolved.kernels])
    for section in demand_facts(kernel_facts).section_facts():
        share = Share(
            tokens=cfg.batch.micro_size * section.positions,
            width=width,
            residual_width=4 if section.residual == "float32" else width,
            operand_width=None if cfg.precision.fp8 is None else 1,
        )
        blocks, repeats = section.stack.pattern, section.stack.repeats
        if program.pipeline is not None and len(section.stack.parts()) > 1:
            longest = max(program.partition.stored(), key=len)
            blocks = blocks[longest.start : longest.stop]
        elif program.pipeline is not None:
            repeats = program.partition.rows
        pattern = block_facts(section, blocks, cfg.precision.compute)
        saved[section.path] = list(saved_bytes(section.recomputing, pattern, share, repeats))
    return saved


def _saved(policy: SavePolicy) -> str:
    if policy.parts is None:
        return "save all inputs of the backward pass"
    names = ", ".join(f"{part} (in host memory)" if part in policy.offloaded else part for part in policy.parts)
    return f"save {names.replace('_', ' ')}; recompute the rest"


def memory_formula(run: Run) -> str:
    """Memory by Megatron-LM's formula, as the end of a line; "" on CPUs, and for what the formula lacks."""
    facts, sizes = facts_of(run.cfg.model), run.mesh.shape
    if facts is None or sizes["context"] > 1 or run.mesh.devices.flat[0].platform == "cpu":
        return ""
    setting = MemorySetting.of(
        run.cfg.parallel,
        facts.recomputing().recompute,
        data=sizes["data"] * sizes["expert"],
        micro_size=run.cfg.batch.micro_size,
        microbatches=run.program.microbatches,
    )
    report = memory_report(facts, setting)
    return (
        ""
        if report is None
        else (
            f"; Megatron-LM's formula, for 16-bit training: {size(report.total)} (weights and optimizer "
            f"{size(report.weights)}, activations {size(report.activations)})"
        )
    )


def _compiler(run: Run) -> list[tuple[str, str]]:
    """Compiler options, and the folder of compiled programs."""
    user_options, options, cache = run.cfg.xla.options, run.program.options, cache_in_use()
    defaults = ", ".join(f"{name}={value}" for name, value in options.items() if name not in user_options)
    user_text = ", ".join(f"{name}={options[name]}" for name in user_options)
    on_gpus = run.mesh.devices.flat[0].platform == "gpu"
    share, nccl = (memory_fraction(), nccl_variables()) if on_gpus else (None, "")
    return [
        *([("XLA", defaults)] if defaults else []),
        *([("XLA, as asked", user_text)] if user_text else []),
        *([("XLA, by environment", ", ".join(sorted(flag_names())))] if flag_names() else []),
        *([("deterministic", "on: no autotuning, sums in a fixed order")] if run.cfg.xla.deterministic else []),
        *([("NCCL", nccl)] if nccl else []),
        *([("GPU memory", f"{share} of it for arrays (xla.memory_fraction)")] if share else []),
        ("compiled programs", "not kept" if cache is None else f"kept in {cache}"),
    ]


def _passes(rows: Any) -> str:
    """Number of passes over the data, if more than one. Row sources of users may lack `passes`."""
    passes = getattr(rows, "passes", 1)
    return f" ({passes:,} passes over the data)" if passes > 1 else ""


def _balance(run: Run) -> list[tuple[str, str]]:
    """Fill of packed rows, and the balance of attention's work among rows and among data groups."""
    packing, imbalance = getattr(run.parts.splits.train, "packing", None), run.batches.imbalance()
    text = (
        "" if packing is None else f"{packing.fill:.1%} filled; most scores of a row {packing.imbalance:.2f} x the mean"
    )
    rows = [] if packing is None else [("packed rows", text)]
    if imbalance is None:
        return rows
    as_read, balanced = ("step {:.3f}, microbatches {:.3f}".format(*ratios) for ratios in imbalance)
    text = (
        f"by {run.cfg.data.loader.balance}; busiest group over mean at the next step: {balanced} (in order: {as_read})"
    )
    return [*rows, ("balanced rows", text)]


def _run(run: Run, origin: str) -> list[tuple[str, str]]:
    splits: Any = run.parts.splits
    parts = [(name, part) for name, part in zip(splits._fields, splits, strict=True) if part is not None]
    rows = ", ".join(f"{name} {len(part):,}{_passes(part)}" for name, part in parts)
    isolated = "; documents isolated" if "segment_ids" in run.program.schema else ""
    skipped = run.parts.skipped_rows()
    return [
        ("data", f"{type(run.cfg.data).__name__.removesuffix('Config')}; rows: {rows}{isolated}"),
        *([("rows skipped", skipped_rows(skipped))] if skipped else []),
        *_balance(run),
        ("folder", str(run.cfg.run_dir)),
        ("start", origin),
        *coverage(run.cfg.resilience.replicas, run.program),
        ("software", f"jax {jax.__version__}, Python {platform.python_version()}"),
        *_compiler(run),
    ]
