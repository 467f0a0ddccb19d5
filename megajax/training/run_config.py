"""The settings of a run as one frozen tree, and the checks that need several of its parts."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Annotated, Any

from megajax.checkpoint.config import CheckpointConfig
from megajax.config.bounds import LARGEST, Bounds, NotEmpty
from megajax.config.compose import UnknownValue
from megajax.config.dump import default_leaves, flatten, scalar_text
from megajax.config.errors import Problem
from megajax.config.hints import divisors_of, either
from megajax.config.paths_and_store_urls import PathText
from megajax.data.configs import DataConfig
from megajax.data.rows.config import RowsConfig
from megajax.faults.config import ResilienceConfig
from megajax.layers.facts import Side
from megajax.layers.recompute import Recomputing
from megajax.layers.stack.config import SegmentsConfig
from megajax.mesh.config import ContextSharding, ParallelConfig
from megajax.metrics.config import LoggingConfig, ProfileConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.facts import facts_of
from megajax.models.protocol import ModelConfig
from megajax.optim.config import AdamWConfig, OptimizerBuilder, OptimizerConfig, ScheduleConfig, score_limit
from megajax.precision.config import PrecisionConfig
from megajax.processes.xla_options import XlaConfig
from megajax.tokenizers.config import ByteTokenizerConfig, TokenizerBuilder, TokenizerConfig
from megajax.training.batch_sizes import BatchSizes
from megajax.training.check_row_balance import balance_problems
from megajax.training.config import BatchConfig, EvaluationConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a training run depends on.

    Example: `mj.RunConfig(model=mj.gpt3("50m"), data=mj.MockConfig(), steps=100)`
    """

    model: DecoderConfig | ModelConfig
    """The network."""
    data: DataConfig | RowsConfig
    """The rows it is trained on."""
    tokenizer: TokenizerConfig | TokenizerBuilder = field(default_factory=ByteTokenizerConfig)
    """Text to token ids and back."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the devices share the work."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Dtypes."""
    optimizer: OptimizerConfig | OptimizerBuilder = field(default_factory=AdamWConfig)
    """The update rule."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the run."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """Rows per step and per microbatch."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Loss on the other splits."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is saved and kept, and where to start from."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """What the run tells and where."""
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    """Signals and faults."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """A trace of a few steps."""
    xla: XlaConfig = field(default_factory=XlaConfig)
    """How programs are compiled and kept."""
    steps: Annotated[int, Bounds(at_least=0, at_most=LARGEST)] = 1000
    """Training steps."""
    seed: Annotated[int, Bounds(at_least=0, at_most=2**32 - 1)] = 1234
    """Everything random derives from it: weights, data order, dropout."""
    run_dir: Annotated[PathText, NotEmpty("name the run's folder: run_dir=runs/NAME")] = "runs/run"
    """The run's folder; a run that finds a checkpoint in it goes on from there."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The text in IPython: the settings that differ from the defaults."""
        del cycle
        defaults = default_leaves(self)
        printer.text("RunConfig, settings that differ from the defaults (all of them: print(cfg))")
        for name, value in flatten(self).items():
            if name not in defaults or defaults[name] != value:
                printer.break_()
                printer.text(f"  {name}: {scalar_text(value)}")

    def problems(self, devices: int | None = None) -> list[Problem]:
        """Problems that no part can check alone. devices: None: skip the checks that need their number.

        With parallel.elastic, the layout is adapted to the number of devices later, see `replan`.
        """
        problems: list[Problem] = []
        data, model, parallel, batch = self.data, self.model, self.parallel, self.batch
        devices = None if parallel.elastic else devices
        total = replicas = sizes = None
        with suppress(UnknownValue):  # of a part with a wrong value, which is reported; so below
            total = _known_devices(parallel, devices)
            replicas = None if total is None else parallel.replicas(total)
            if replicas is not None and not batch.problems() and not batch.replica_problems(replicas):
                sizes = self.batch_sizes(replicas)
        for check in (
            _clipped_scores(self.optimizer, model),
            _leaves(data, model),
            _evaluation(self.evaluation, data, model),
            _profile(self.profile, self.steps),
            _rows(self.steps, batch),
            _devices(parallel, devices),
            _model(model, parallel, total),
            _context(parallel, data, model),
            balance_problems(data, batch, model),
            _batch(batch, replicas),
            _side_by_side(batch, parallel, model, sizes),
            _pipeline(parallel, model, total, sizes),
            _schedule(self.schedule, self.steps, batch, sizes),
            _rates(self.optimizer, self.schedule),
            _matmul(self.precision, parallel, batch, model),
            _quantized(model, self.checkpoint),
        ):
            with suppress(UnknownValue):
                problems.extend(check)
        return problems

    def batch_sizes(self, replicas: int) -> BatchSizes:
        """The BatchSizes of the run on this many data-parallel devices."""
        return self.batch.build(replicas, sequence_length=self.model.row_positions())

    def but(self, **changes: Any) -> "RunConfig":
        """A copy with these fields replaced."""
        return replace(self, **changes)


COMMON = (
    *("steps", "run_dir", "seed"),
    *("data.type", "data.paths", "data.split", "tokenizer.type"),
    *("model.sequence_length", "model.recompute", "precision.compute"),
    *("batch.global_size", "batch.micro_size"),
    *("schedule.lr", "schedule.min_lr", "schedule.warmup_steps", "optimizer.type", "optimizer.weight_decay"),
    *("parallel.data", "parallel.tensor", "parallel.pipeline", "parallel.data_sharding"),
    *("evaluation.every", "checkpoint.every", "checkpoint.load", "logging.every"),
)
"""The settings that most users change, shown by --help."""


def _under(part: str, problems: Iterable[Problem]) -> Iterator[Problem]:
    """Problems of a part of the config, with its settings named from the root."""
    return (replace(problem, setting=f"{part}.{problem.setting}".rstrip(".")) for problem in problems)


def _known_devices(parallel: ParallelConfig, devices: int | None) -> int | None:
    """Devices of the mesh; None if unknown, or if the layout fits none."""
    if parallel.problems():
        return None
    return devices if parallel.data is None else parallel.without_data() * parallel.data


def _rows(steps: int, batch: BatchConfig) -> Iterator[Problem]:
    if (rows := steps * batch.global_size) > LARGEST:
        message = f"{steps} steps of {batch.global_size} rows are {rows} rows, a run counts up to {LARGEST}"
        yield Problem("steps", message, "use fewer steps or longer rows")


def _devices(parallel: ParallelConfig, devices: int | None) -> Iterator[Problem]:
    if devices is not None and not parallel.problems():
        yield from _under("parallel", parallel.device_problems(devices))


def _pipeline(
    parallel: ParallelConfig, model: ModelConfig, total: int | None, sizes: BatchSizes | None
) -> Iterator[Problem]:
    stack = model.stack
    repeats = stack.layers() // max(1, stack.cut_unit())
    if parallel.pipeline == 1 or parallel.problems():
        return
    if len(model.stacks()) > 1:
        names = ", ".join(path or "stack" for path in model.stacks())
        message = f"the model has several sections ({names}), and stages cut the layers of one"
        data = None if total is None else total * parallel.pipeline // parallel.without_data()
        nearest = f" and parallel.data={data}" if data else ", and its devices for parallel.data"
        yield Problem("parallel.pipeline", message, f"use 1{nearest}, with parallel.tensor={parallel.tensor} as it is")
        return
    unit = "repeats" if len(stack.parts()) == 1 else "layers"
    if parallel.chunks() > repeats:
        yield Problem(
            "parallel.pipeline",
            f"{parallel.pipeline} stages x {parallel.virtual_stages} virtual stages need as many {unit} of the "
            f"model's stack, which has {repeats}",
            f"pipeline x virtual_stages can be at most {repeats}",
        )
    elif parallel.layers is not None and sum(parallel.layers) != repeats:
        per_chunk, more = divmod(repeats, parallel.chunks())
        even = ",".join(str(per_chunk + (chunk < more)) for chunk in range(parallel.chunks()))
        yield Problem(
            "parallel.layers",
            f"{','.join(map(str, parallel.layers))} are {sum(parallel.layers)} in all, the model's stack has {repeats}",
            f"{even}, which none stands for, is as even as can be",
        )
    if sizes is None or parallel.virtual_stages == 1:
        return
    for microbatches in {size.microbatches: None for size in sizes.sizes()}:
        if microbatches % parallel.pipeline == 0:
            continue
        below = microbatches - microbatches % parallel.pipeline
        rows = [count * sizes.unit for count in (below, below + parallel.pipeline) if count]
        yield Problem(
            "parallel.virtual_stages",
            f"microbatches go in groups of parallel.pipeline={parallel.pipeline} with "
            f"{parallel.virtual_stages} virtual stages, and a step has {microbatches}",
            f"set batch.global_size={' or '.join(map(str, rows))}, or parallel.virtual_stages=1",
        )


def _model(model: ModelConfig, parallel: ParallelConfig, total: int | None) -> Iterator[Problem]:
    """Conflicts between the model and the mesh."""
    shards = None if total is None else parallel.sharding_devices(total)
    yield from _under("model", model.parallel_problems(parallel, shards))


def _context(parallel: ParallelConfig, data: DataConfig | RowsConfig, model: ModelConfig) -> Iterator[Problem]:
    """The devices of `context` need equal parts of each row."""
    if parallel.context == 1:
        return
    if not model.allows_context():
        other_axes = "parallel.data, parallel.tensor or parallel.pipeline"
        mixers: dict[str, Any] = getattr(model, "mixers_of_whole_rows", dict)()
        mixer_names = [f"{type(mixer).__name__} (model.{place})" for place, mixer in mixers.items()]
        who = " and ".join(mixer_names) or type(model).__name__
        message = f"{who} needs whole rows, and parallel.context={parallel.context} cuts them"
        yield Problem("parallel.context", message, f"set it to 1, and use {other_axes}")
        return
    if parallel.context_rounds > 1 and not model.ignores_later_positions():
        message = (
            f"{parallel.context_rounds} rounds balance the work of causal models; the positions of "
            f"{type(model).__name__} see later ones, and devices hold one chunk of each row"
        )
        yield Problem("parallel.context_rounds", message, "set it to 1")
        return
    causal = model.ignores_later_positions()
    for name, leaf in model.schema().items():
        length, unit = leaf.positions(), _unit(parallel, causal, parallel.context_rounds)
        if "seq" in leaf.axes and length % unit and name in data.leaves():
            yield _uneven_rows(parallel, causal, name, length)
            return


def _unit(parallel: ParallelConfig, causal: bool, rounds: int) -> int:
    """Divisor of the positions of a row with this number of rounds over `context`."""
    split = ContextSharding.of(replace(parallel, context_rounds=rounds), causal=causal)
    return lcm(split.unit, parallel.context * (parallel.tensor if parallel.sequence else 1))


def _uneven_rows(parallel: ParallelConfig, causal: bool, name: str, length: int) -> Problem:
    """Rows that can't be split into equal chunks, with the nearest lengths and rounds that can."""
    rounds, chunks = parallel.context_rounds, ContextSharding.of(parallel, causal=causal).chunks
    unit = _unit(parallel, causal, rounds)
    causes = [f"parallel.context={parallel.context}", f"{chunks} chunks on each" if chunks > 1 else ""]
    causes += [f"parallel.context_rounds={rounds}" if rounds > 1 else ""]
    causes += [f"parallel.tensor={parallel.tensor} with parallel.sequence=true" if parallel.sequence else ""]
    message = f"rows of {length} positions ({name}) are not divisible by {unit}: {', '.join(filter(None, causes))}"
    below = length // unit * unit
    lengths = either(str(multiple) for multiple in (below, below + unit) if multiple)
    hint = f"use rows of {lengths} positions (model.sequence_length)"
    legal = [] if rounds == 1 else [n for n in divisors_of(length) if length % _unit(parallel, causal, n) == 0]
    nearest = [*[n for n in legal if n < rounds][-1:], *[n for n in legal if n > rounds][:1]]
    if nearest:
        hint += f", or parallel.context_rounds={either(map(str, nearest))}"
    return Problem("parallel.context_rounds" if nearest else "parallel.context", message, hint)


def _batch(batch: BatchConfig, replicas: int | None) -> Iterator[Problem]:
    if replicas is not None:
        yield from _under("batch", batch.replica_problems(replicas))


def _side_by_side(
    batch: BatchConfig, parallel: ParallelConfig, model: ModelConfig, sizes: BatchSizes | None
) -> Iterator[Problem]:
    """Two microbatches at a time hide collectives over `tensor`: two of a group, or two that meet in a pipeline."""
    if batch.side_by_side == 1:
        return
    refusals = {
        "parallel.tensor=1 has no collectives over tensor": parallel.tensor == 1,
        "parallel.data_sharding=fsdp would hold two microbatches and hide less": parallel.data_sharding == "fsdp",
        "the model has several sections": len(model.stacks()) > 1,
        **(_refusals_in_ticks(parallel, model) if parallel.pipeline > 1 else {}),
    }
    reason = next((reason for reason, refused in refusals.items() if refused), None)
    if reason is None and sizes is not None:
        counts = [size.microbatches for size in sizes.sizes()]
        odd = next((count for count in counts if count % batch.side_by_side), None)
        if parallel.pipeline > 1 and min(counts) < 2 * parallel.pipeline:
            reason = f"with {min(counts)} microbatches, no tick has two for each of {parallel.pipeline} stages"
        elif parallel.pipeline == 1 and odd is not None:
            reason = f"a step has {odd} microbatches, not a multiple of {batch.side_by_side}"
    if reason is not None:
        yield Problem("batch.side_by_side", f"can't be {batch.side_by_side}: {reason}", "set batch.side_by_side=1")


def _refusals_in_ticks(parallel: ParallelConfig, model: ModelConfig) -> dict[str, bool]:
    """Reason -> whether it forbids a forward and a backward in one loop; see megajax.pipeline.side_by_side."""
    stack, facts = model.stack, facts_of(model)
    recomputing = Recomputing() if facts is None else facts.recomputing()
    layers = stack.layers() // stack.cut_unit() // parallel.pipeline
    return {
        f"parallel.virtual_stages={parallel.virtual_stages} makes stages of several chunks": parallel.virtual_stages
        > 1,
        f"parallel.schedule={parallel.schedule} does all forwards first": parallel.schedule == "gpipe",
        "parallel.loss_wait=0 makes a backward wait for the forward of its tick": parallel.loss_wait == 0,
        "the layers are of several kinds": isinstance(stack, SegmentsConfig),
        f"model.recompute_layers={recomputing.layers} makes layers of two kinds": recomputing.layers is not None,
        "model.offload moves what one saves while the other reads": bool(recomputing.offload),
        "a stage needs two layers or more": layers < 2,
    }


def _schedule(schedule: ScheduleConfig, steps: int, batch: BatchConfig, sizes: BatchSizes | None) -> Iterator[Problem]:
    samples = None if sizes is None else sizes.samples
    problems = schedule.run_problems(steps=steps, global_size=batch.global_size, samples=samples)
    yield from _under("schedule", problems)


def _rates(optimizer: OptimizerConfig | OptimizerBuilder, schedule: ScheduleConfig) -> Iterator[Problem]:
    yield from _under("optimizer", optimizer.rate_problems(schedule))


def _profile(profile: ProfileConfig, steps: int) -> Iterator[Problem]:
    window = profile.window()
    if window is not None and window[1] > steps:
        yield Problem("profile.steps", f"{profile.steps} ends after the run, which has {steps} steps")


def _evaluation(evaluation: EvaluationConfig, data: DataConfig | RowsConfig, model: ModelConfig) -> Iterator[Problem]:
    for whose, leaves in (("the model reads", model.schema()), ("the data makes", data.leaves())):
        if evaluation.full and "loss_mask" not in leaves:
            message = f"fills the last batch with rows that do not count; {whose} no loss_mask, which would say so"
            yield Problem("evaluation.full", message, "use false, with evaluation.batches for all rows")
    reads = model.schema()
    of_run = {leaf: dtype for leaf, dtype in data.leaves().items() if leaf in reads}
    for name, other in evaluation.sets.items():
        of_set = {leaf: dtype for leaf, dtype in other.leaves().items() if leaf in reads}
        if of_set != of_run:
            yield Problem(
                f"evaluation.sets.{name}",
                f"makes {_leaf_text(of_set)}, the run's data {_leaf_text(of_run)}",
                "training and evaluation read the same leaves; segment_ids come with isolate_documents=true",
            )


def _leaves(data: DataConfig | RowsConfig, model: ModelConfig) -> Iterator[Problem]:
    """The data must have the leaves that the model reads."""
    makes, reads = data.leaves(), model.schema()
    whose, reader = type(data).__name__, type(model).__name__
    missing = {name: leaf.dtype for name, leaf in reads.items() if name not in makes and not leaf.optional}
    if missing:
        needed = _leaf_text({name: leaf.dtype for name, leaf in reads.items() if not leaf.optional})
        message = f"{whose} makes {_leaf_text(makes)}; {reader} reads {needed}; missing: {', '.join(missing)}"
        yield Problem("data", message, f"choose data that makes {' and '.join(missing)}, or another model")
    for name, leaf in reads.items():
        if name in makes and makes[name] != leaf.dtype:
            message = f"{whose} makes {name} of dtype {makes[name]}, {reader} reads {leaf.dtype}"
            yield Problem("data", message, "use the same dtype in both")


def _leaf_text(leaves: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({dtype})" for name, dtype in leaves.items()) or "nothing"


def _matmul(
    precision: PrecisionConfig, parallel: ParallelConfig, batch: BatchConfig, model: ModelConfig
) -> Iterator[Problem]:
    """Sides of the matrices on one device, and tokens, must be multiples; those of latents are checked when traced."""
    recipe = precision.matmul
    stacks = {name or "stack": stack.layers() for name, stack in model.stacks().items()}
    if recipe is not None and recipe.layers(0) and len({*stacks.values()}) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in stacks.items())
        message = (
            f"keeps layers at both ends in bfloat16 in sections of equally many layers, and these differ: {counts}"
        )
        yield Problem("precision.matmul", message, "set first_layers=0 and last_layers=0")
    facts = facts_of(model)
    if facts is None or recipe is None:
        return
    tensor, context = parallel.tensor, parallel.context
    first, last, layers = recipe.first_layers, recipe.last_layers, model.stack.layers()
    if first + last >= layers:
        message = f"first_layers={first} and last_layers={last} leave none of the {layers} layers to it"
        yield Problem("precision.matmul", message, "use fewer, or matmul=none")
    sides = []
    for section in facts.section_facts():
        rows = f"batch.micro_size={batch.micro_size} rows of {section.positions}"
        tokens, over = divmod(batch.micro_size * section.positions, context)
        place = section.path or "sequence_length"
        sides += [Side(place, f"{rows} over parallel.context={context} are", tokens)] * (not over)
    for side in (*sides, *facts.matmul_sides(tensor)):
        if side.size % recipe.multiple:
            message = f"{side.text} {side.size}, but precision.matmul needs a multiple of {recipe.multiple}"
            yield Problem(f"model.{side.setting}", message, "or set precision.matmul=none")


def _quantized(model: ModelConfig, checkpoint: CheckpointConfig) -> Iterator[Problem]:
    """Quantized weights can't be trained, but adapters beside them."""
    quantization = getattr(model, "quantization", None)
    if quantization is None:
        return
    if getattr(model, "lora", None) is None:
        message = (
            f"the weights are quantized ({quantization.weights}, model.quantization), which no optimizer can train"
        )
        hint = "train adapters beside them (model.lora), or the weights they were made of, and quantize the result"
        yield Problem("optimizer", message, hint)
    if quantization.activations != "none":
        message = f"{quantization.activations} rounds inputs, through which no gradient flows"
        yield Problem("model.quantization.activations", message, "set it to none to train")
    if checkpoint.load is None and not checkpoint.weights:
        message = "quantized weights start from stored ones, and there are none"
        yield Problem("checkpoint.load", message, "set it to a run or to hf:DIR")


def _clipped_scores(optimizer: OptimizerConfig | OptimizerBuilder, model: ModelConfig) -> Iterator[Problem]:
    """A norm of queries and keys undoes QK-clip."""
    limit = score_limit(optimizer)
    stacks = () if limit is None else model.stacks().values()
    mixers = [mixer for stack in stacks for block, _ in stack.stored() for mixer in block.mixers().values()]
    norms = [norm for mixer in mixers if (norm := getattr(mixer, "qk_norm", None)) is not None]
    if norms:
        message = f"is {limit}, but qk_norm={type(norms[0]).__name__} undoes changes of queries and keys"
        yield Problem("optimizer.qk_clip", message, "set one of them to none")
