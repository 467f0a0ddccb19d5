"""Builds a run from a config: mesh, tokenizer, data, program, state and loader."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from megajax.batch import Batch, Leaf, Params
from megajax.config.errors import UserError, demand_members
from megajax.config.field_types import members
from megajax.data.configs import DataConfig
from megajax.data.rows.balancing import Balancing, RowWork
from megajax.data.rows.config import RowsConfig
from megajax.data.rows.loader import Loader
from megajax.data.rows.row_source import MadeDuringRun, RowSource, RunBatches
from megajax.data.rows.splits import EvaluationSchedule, Rows, Splits, requested_rows
from megajax.display.text import count
from megajax.faults.activity import Activity, Stage
from megajax.layers.block.step_work import Training
from megajax.layers.multiply_adds import VisibleKeys
from megajax.layers.param import bind
from megajax.mesh.config import devices_over
from megajax.models.facts import ModelSummary, row_counts
from megajax.models.reduction import quotient
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.config import TokenizerBuilder, TokenizerConfig
from megajax.training.batch_sizes import BatchSizes
from megajax.training.config import EvaluationConfig
from megajax.training.loop import computing, run_step, run_steps
from megajax.training.own_batch import demand_batch, own_batch
from megajax.training.program import Program
from megajax.training.reference import Reference, attach_reference
from megajax.training.repr_text import Rows as Lines
from megajax.training.repr_text import plain, scalar_value, table
from megajax.training.resolved import Resolved
from megajax.training.run_config import RunConfig
from megajax.training.state import TrainState, own_buffers
from megajax.training.step import TrainStep
from megajax.training.step_report import StepInfo

type LoadModel = Callable[[str, "Parts"], Any]
"""(run, parts of the run) -> a `megajax.inference.loaded_model.LoadedModel` on its devices."""

type Stopping = Callable[[], bool]

type Start = Callable[["Parts", TrainState], TrainState | None]
"""(parts of the run, state of jax.ShapeDtypeStruct) -> the initial state; None: fresh."""


@dataclass(frozen=True)
class Parts:
    """The parts of a run that a config determines, without weights."""

    resolved: Resolved
    program: Program
    tokenizer: Tokenizer
    splits: Splits
    sets: Mapping[str, RowSource]
    """Additional validation sets: row sources by name."""
    load_model: LoadModel | None = None
    """Loads other models on the devices of the run; None: outside of a job."""

    @property
    def cfg(self) -> RunConfig:
        return self.resolved.cfg

    def __repr__(self) -> str:
        rows = {name: len(part) for name, part in self.splits._asdict().items() if part is not None}
        return f"<Parts: cfg, program, tokenizer {type(self.tokenizer).__name__}, splits of {rows} rows>"

    def skipped_rows(self) -> dict[str, dict[str, int]]:
        """Split -> reason -> rows that the row source has skipped so far; without empty splits and reasons."""
        sources = {**self.splits._asdict(), **self.sets}
        counts = {name: getattr(source, "skipped", {}) for name, source in sources.items()}
        skipped = {name: {why: int(n) for why, n in reasons.items() if n} for name, reasons in counts.items()}
        return {name: reasons for name, reasons in skipped.items() if reasons}

    def loader(self, source: RowSource, consumed: int, *, training: bool = False) -> Loader:
        """Global batches of `source` from row `consumed` on; of the last size, or in training of each step's size."""
        sizes = self.program.sizes
        return Loader(
            source,
            global_size=sizes.sizes()[-1].rows,
            microbatches=self.program.microbatches,
            schema=self.program.schema,
            shardings=self.program.batch_shardings,
            consumed=consumed,
            config=self.cfg.data.loader,
            size_at=(lambda rows: sizes.at(rows).rows) if training else None,
            sequence_sharding=self.program.layout.rows,
            balancing=self._balancing() if training else None,
        )

    def batches(self, consumed: int, progress: Callable[[], None]) -> Any:
        """The batches of training after `consumed` rows. progress: called in long waits, for the watchdog."""
        train = self.splits.train
        if isinstance(train, MadeDuringRun):
            return train.batches(self, consumed, progress)
        return self.loader(train, consumed, training=True)

    def _balancing(self) -> Balancing | None:
        """The balancing that `data.loader.balance` asks for; None: rows stay in order."""
        balance = self.cfg.data.loader.balance
        return None if balance == "none" else Balancing(row_work(self.program.summary), across=balance == "step")


@dataclass
class Run:
    """A run with its state: train it by `for info in run.steps(10): ...`, call its model by `run.model(tokens)`."""

    parts: Parts
    state: TrainState
    batches: Any
    """A `Loader`, or batches that are made of the run's own weights."""
    reference: Reference | None = None
    """The reference model of preference optimization; None: the loss reads none."""

    def __repr__(self) -> str:
        return plain("Run", self._summary())

    def _repr_html_(self) -> str:
        return table("Run", self._summary())

    def _summary(self) -> Lines:
        """Model, layout, batch and step."""
        program, step = self.program, scalar_value(self.state.step)
        cfg, mesh, batch = program.cfg, program.mesh, program.sizes.sizes()[-1]
        model, parallel, device = cfg.model, cfg.parallel, mesh.devices.flat[0]
        microbatches = f"{batch.microbatches} microbatch" + "es" * (batch.microbatches > 1)
        used = ", ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
        devices = f"{mesh.size} {device.device_kind} device" + "s" * (mesh.size > 1)
        kinds = [parallel.data_sharding, *["sequence parallel"] * parallel.sequence]
        rows, length = batch.rows, model.row_positions()
        unit, facts, vocabulary = program.summary.unit, program.summary.facts, program.summary.vocabulary
        per_row = "" if unit == "rows" else f" of {length:,} {unit}"
        layers = " + ".join(str(stack.layers()) for stack in model.stacks().values())
        progress = "unknown: a later step took its arrays" if step is None else f"{step:,} of {cfg.steps:,}"
        return (
            (
                "model",
                f"{type(program.abstract).__name__}, {count(program.parameters)} parameters: {layers} layers"
                + ("" if facts is None else f", hidden {facts.section_facts()[-1].hidden}")
                + ("" if vocabulary is None else f", vocabulary {vocabulary:,}"),
            ),
            ("layout", f"{devices}{': ' * bool(used)}{used}; {', '.join(kinds)}"),
            ("batch", f"{rows:,} rows{per_row}, {microbatches}"),
            ("step", progress),
        )

    @property
    def program(self) -> Program:
        return self.parts.program

    @property
    def train_step(self) -> TrainStep:
        """(state, batch) -> (state, metrics)."""
        return self.program.train_step

    @property
    def cfg(self) -> RunConfig:
        return self.parts.cfg

    @property
    def mesh(self) -> Mesh:
        return self.program.mesh

    @property
    def steps_done(self) -> int:
        """Number of finished steps; waits for the last one."""
        return int(self.state.step)

    def model(self, *arrays: jax.typing.ArrayLike, **keywords: jax.typing.ArrayLike) -> Array:
        """The output of the jitted module with the current weights: `run.model(tokens)` returns next-token logits.

        Any number of rows, and in causal models any number of positions up to the model's limit: inputs are padded to
        multiples of the mesh axes, and outputs are cut to size.

        Args:
            arrays: leaves of the model's schema, in the order of the module's `__call__`.
            keywords: leaves of the model's schema by name.

        Raises ValueError for other arrays, shapes and kinds of dtypes, and for ids out of range.
        """
        leaves = self._inputs(arrays, keywords)
        schema, causal = self.cfg.model.schema(), self.cfg.model.ignores_later_positions()
        rows, length = len(next(iter(leaves.values()))), 0
        for name, leaf in leaves.items():
            widths = [(0, -rows % self._multiple("batch"))]
            for size, axis in zip(leaf.shape[1:], schema[name].axes, strict=True):
                divisor = self._multiple("seq_residual") if axis == "seq" else 1
                if size % divisor and not causal:
                    raise ValueError(f"{name} have {size} positions: this layout needs a multiple of {divisor}")
                length = size if size % divisor else length
                widths.append((0, -size % divisor))
            leaves[name] = np.pad(leaf, widths)
        with jax.set_mesh(self.mesh), jax.default_matmul_precision(self.cfg.precision.matmul_precision()):
            result = self._forward(self.state.inputs, leaves)[:rows]
        return result[:, :length] if length else result

    def _inputs(self, arrays: Sequence[object], keywords: Mapping[str, object]) -> dict[str, np.ndarray]:
        """The arrays of a call by the names of their leaves, checked against the schema."""
        call, schema = signature(self.program.abstract), self.cfg.model.schema()
        try:
            inputs = call.bind(*arrays, **keywords).arguments
        except TypeError as error:
            raise ValueError(f"the model takes {', '.join(call.parameters)}: {error}") from None
        if unknown := [name for name in inputs if name not in schema]:
            raise ValueError(
                f"__call__ of the model takes {unknown[0]}, which is no leaf of its schema: {list(schema)}"
            )
        leaves = {name: checked_leaf(name, schema[name], array) for name, array in inputs.items()}
        sizes: set[tuple[Any, int]] = {("rows", len(array)) for array in leaves.values()}
        sizes |= {(schema[name].shape, leaves[name].shape[1]) for name in leaves if schema[name].axes == ("seq",)}
        if len(sizes) > len(dict(sizes)):
            shapes = ", ".join(f"{name} {array.shape}" for name, array in leaves.items())
            raise ValueError(f"the arrays of a call have equally many rows and positions; got {shapes}")
        return leaves

    def _multiple(self, axis: str) -> int:
        """Number of shards of a dimension with this logical axis."""
        return devices_over(self.mesh.shape, self.program.layout.plan.compute.mesh_axes(axis))

    def steps(self, count: int | None = None) -> Iterator[StepInfo]:
        """Train `count` steps (default: the rest of cfg.steps), yielding the report of each."""
        last = self.cfg.steps if count is None else self.steps_done + count
        return run_steps(self, last)

    def batch(self, tokens: jax.typing.ArrayLike | None = None, **leaves: jax.typing.ArrayLike) -> Batch:
        """The batch of a step from arrays on the host, for a loop of your own.

        tokens: int [rows, 2 to length + 1], a document a row; labels, weights and positions follow from them. With
        length + 1 tokens every position has a label; shorter rows are padded, without loss. leaves: arrays of other
        models, or instead of what follows, by their names in the schema.

        Raises UserError for another number of rows than a step has, and for arrays that do not match the schema.

        Example: `run.step(run.batch(tokens))`
        """
        return own_batch(self.program, int(self.state.consumed_samples), tokens, leaves)

    def step(self, batch: Batch) -> StepInfo:
        """Train on a batch, and wait for the report of the step. `steps` reads on from its own place in the data."""
        demand_batch(self.program, batch)
        return run_step(self, batch)

    def loss(self, batch: Batch) -> float:
        """The mean loss of the current weights on a batch, as in evaluations: without dropout and auxiliary losses."""
        demand_batch(self.program, batch)
        with computing(self):
            return float(quotient(*self.program.eval_step(self.state.inputs, batch)["loss"]))

    def evaluate(
        self, source: RowSource, *, first: int = 0, batches: int | None = None, stopping: Stopping = lambda: False
    ) -> float | None:
        """Mean loss per token; see `metrics`."""
        metrics = self.metrics(source, first=first, batches=batches, stopping=stopping)
        return None if metrics is None else metrics["loss"]

    def metrics(
        self,
        source: RowSource,
        *,
        first: int = 0,
        batches: int | None = None,
        stopping: Stopping = lambda: False,
        waiting: Callable[[int], AbstractContextManager[Any]] = nullcontext,
    ) -> dict[str, float] | None:
        """The model's metrics over global batches of `source` from row `first` on; nan for a total weight of 0.

        stopping: called before each batch; True ends the evaluation, which returns None. waiting: context around the
        wait for a batch; StopWaiting raised in it also ends the evaluation.
        """
        loader = self.parts.loader(source, first)
        totals: dict[str, list[np.ndarray]] = {"loss": [np.zeros(()), np.zeros(())]}
        with jax.set_mesh(self.mesh), jax.default_matmul_precision(self.cfg.precision.matmul_precision()), loader:
            for number in range(self.cfg.evaluation.batches if batches is None else batches):
                if stopping():
                    return None
                with waiting(number):
                    batch = next(loader)[0]
                for name, pair in self.program.eval_step(self.state.inputs, batch).items():
                    sums = totals.get(name, [np.zeros(()), np.zeros(())])
                    totals[name] = [total + np.asarray(new, np.float64) for total, new in zip(sums, pair, strict=True)]
        return {name: float(quotient(*sums, xp=np)) for name, sums in totals.items()}

    def close(self) -> None:
        """Stop the prefetch of batches."""
        self.batches.close()

    def __post_init__(self) -> None:
        def forward(params: Params, arrays: Mapping[str, Array]) -> Array:
            return bind(self.program.abstract, self.program.used(params))(**arrays)

        if isinstance(self.batches, RunBatches):
            self.batches.attach(self)
        self._forward = jax.jit(forward, compiler_options=dict(self.program.options))


def checked_leaf(name: str, leaf: Leaf, array: object) -> np.ndarray:
    """The rows of a leaf in its dtype.

    Raises ValueError for another shape or kind of dtype, and for ids out of range.
    """
    rows = np.asarray(array)
    if rows.size and np.issubdtype(leaf.dtype, np.integer) and not np.can_cast(rows.dtype, np.int64, "same_kind"):
        advice = ": round them yourself" if np.issubdtype(rows.dtype, np.floating) else ""
        raise ValueError(f"{name} are {rows.dtype}, the model takes {leaf.dtype}{advice}")
    if rows.ndim != 1 + len(leaf.shape):
        example = ": [[1, 2, 3]] is one row" if len(leaf.shape) == 1 else ""
        raise ValueError(
            f"expected rows of {name} with {1 + len(leaf.shape)} dimensions, got shape {rows.shape}{example}"
        )
    if leaf.below is not None and rows.size and not 0 <= rows.min() <= rows.max() < leaf.below:
        raise ValueError(f"{name} are {rows.min()} to {rows.max()}, the model takes 0 to {leaf.below - 1}")
    integers = np.iinfo(leaf.dtype) if np.issubdtype(leaf.dtype, np.integer) else None
    if integers and rows.size and not integers.min <= rows.min() <= rows.max() <= integers.max:
        raise ValueError(f"{name} are {rows.min()} to {rows.max()}, {leaf.dtype} is {integers.min} to {integers.max}")
    for size, expected, axis in zip(rows.shape[1:], leaf.shape, leaf.axes, strict=True):
        if axis != "seq" and size != expected:
            raise ValueError(f"rows of {name} have the shape {rows.shape[1:]}, the model takes {leaf.shape}")
    return rows.astype(leaf.dtype)


def begin(
    resolved: Resolved,
    start: Start | None = None,
    activity: Activity | None = None,
    reference: str | None = None,
    load_model: LoadModel | None = None,
) -> Run:
    """A run with fresh weights or the state of `start`; writes only data caches.

    activity: records the stages; reference: see `attach_reference`; load_model: see `Parts`.

    Raises UserError for data or a tokenizer that can't be loaded.
    """
    activity = activity or Activity()
    activity.stage(Stage.DATA)
    parts = replace(parts_of(resolved), load_model=load_model)
    program = parts.program
    activity.stage(Stage.STATE)
    with jax.set_mesh(program.mesh):
        state = None if start is None else start(parts, program.state_like())
        state = program.fresh_state()() if state is None else own_buffers(state)
    activity.stage(Stage.REFERENCE)
    sources = [*parts.splits, *parts.sets.values()]
    scored = attach_reference(program, parts.tokenizer, state, sources, expected=reference, progress=activity.progress)
    return Run(parts, state, parts.batches(int(state.consumed_samples), activity.progress), scored)


def parts_of(resolved: Resolved) -> Parts:
    """Builds tokenizer, data and the abstract model. Raises UserError for data or a tokenizer that can't be loaded."""
    cfg = resolved.cfg
    evaluation, program = cfg.evaluation, Program.of(cfg, resolved.mesh, resolved.options, resolved.scheduler)
    tokenizer = build_tokenizer(cfg.tokenizer, program.summary.vocabulary)
    _check_prompt(cfg.logging.prompt, tokenizer)
    rows, schema = rows_to_read(evaluation, cfg.steps, program.sizes), cfg.model.schema()

    def built(data: DataConfig | RowsConfig, rows: Rows) -> Splits:
        splits = data.build(tokenizer=tokenizer, schema=schema, rows=rows, seed=cfg.seed)
        demand_rows(splits, data)
        return splits

    def arranged(source: Any, rows: int | None) -> Any:
        """The rows in the order of data.loader; with rows=None, a single pass in the source's own order."""
        cyclic, shards = cfg.data.loader.cyclic, resolved.replicas
        if cyclic is None or source is None or rows is None:
            return source
        return cyclic.build(source=source, rows=rows, shards=shards, micro_rows=shards * cfg.batch.micro_size)

    splits = Splits(*map(arranged, built(cfg.data, rows), rows))
    sets = validation_sets(evaluation, lambda data: built(data, Rows(0, rows.valid))) if rows.valid != 0 else {}
    sets = {name: arranged(part, rows.valid) for name, part in sets.items()}
    named = [*zip(splits._fields, splits, rows, strict=True), *((*item, rows.valid) for item in sets.items())]
    for name, part, needed in named:
        if part is not None and needed is not None and len(part) < needed:
            raise UserError(
                f"the {name} split has {len(part)} rows, the run reads {needed}. Several data.paths without weights "
                "are read once: add weights (data.paths=0.5,A,0.5,B) for more epochs, or lower steps or "
                "evaluation.batches"
            )
    if evaluation.every is not None and splits.valid is None and evaluation.batches and not sets:
        raise UserError(
            f"evaluation.every={evaluation.every}, but the data has no validation split: set a share for it "
            "in data.split (or data.valid_paths), or set evaluation.every=none"
        )
    return Parts(resolved, program, tokenizer, splits, sets)


def build_tokenizer(config: TokenizerConfig | TokenizerBuilder, vocabulary: int | None, remedy: str = "") -> Tokenizer:
    """The tokenizer of a model. Raises UserError for a tokenizer with more tokens than the model.

    vocabulary: number of ids that the model reads; None: any. remedy: advice in that error; "": to change the model's
    vocabulary.
    """
    tokenizer = config.build()
    demand_members(tokenizer, sorted(members(Tokenizer)), f"the tokenizer of {type(config).__name__}")
    if vocabulary is not None and tokenizer.vocabulary_size > vocabulary:
        raise UserError(
            f"the tokenizer has {tokenizer.vocabulary_size} tokens, model.vocabulary_size is {vocabulary}: "
            f"{remedy or f'set model.vocabulary_size={tokenizer.vocabulary_size}'}"
        )
    return tokenizer


def _check_prompt(prompt: str | None, tokenizer: Tokenizer) -> None:
    """Raises UserError for a prompt that the tokenizer can't encode: otherwise it would fail after the last step."""
    if prompt is None:
        return
    try:
        tokenizer.encode(prompt)
    except UserError as error:
        raise UserError(f"logging.prompt={prompt!r}: {error}") from error


def demand_rows(splits: object, data: object) -> None:
    """Raises UserError unless a data config has built `Splits` of row sources."""
    whose = f"{type(data).__name__}.build"
    if not isinstance(splits, Splits):
        raise UserError(f"{whose} returned a {type(splits).__name__}, not an mj.Splits of row sources")
    for name, part in zip(splits._fields, splits, strict=True):
        if part is not None:
            demand_members(part, ("__len__", "__getitem__"), f"the {name} split of {whose}, a {type(part).__name__},")


def validation_sets(
    evaluation: EvaluationConfig, build: Callable[[DataConfig | RowsConfig], Splits]
) -> dict[str, RowSource]:
    """The additional validation sets. Raises UserError for a set without a validation split."""
    sets = {name: build(data).valid for name, data in evaluation.sets.items()}
    if missing := [name for name, rows in sets.items() if rows is None]:
        raise UserError(
            f"evaluation.sets.{missing[0]} has no validation split: set its valid_paths, or a share in its split"
        )
    return sets


def rows_to_read(config: EvaluationConfig, steps: int, sizes: BatchSizes) -> Rows:
    """Rows that a run of `steps` steps reads of each split, as in Megatron-LM."""
    every, size, at_least = config.every or steps + 1, sizes.sizes()[-1].rows, max(steps, 1)
    evaluation = EvaluationSchedule(every, config.batches, size) if config.batches else None
    rows = requested_rows(steps=at_least, global_size=size, evaluation=evaluation, rows=sizes.samples(at_least))
    return Rows(rows.train, None, None) if config.full and config.batches else rows


def row_work(model: ModelSummary) -> RowWork:
    """FLOPs of a training step per position and per attention score of a row, as `count_flops` counts them.

    Of a model without facts, only scores count: all rows have the same number of positions, so the order of their work
    is the same unless windows differ.
    """
    if (facts := model.facts) is None:
        return RowWork()
    positions, scores = 0.0, defaultdict[VisibleKeys, float](float)
    for row in row_counts(facts, Training(model.trainable, facts.lora)):
        positions += 2 * row.sequences * row.length * row.count.once / facts.row_positions()
        for visible, number in row.count.pairs:
            scores[visible] += 2 * row.sequences * number
    return RowWork(positions, tuple(scores.items()))
