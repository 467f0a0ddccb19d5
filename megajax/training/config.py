"""Settings of batch and evaluation, without importing jax."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Protocol

from megajax.config.bounds import Bounds, Index, Size
from megajax.config.class_references import Builds
from megajax.config.compose import UnknownValue
from megajax.config.errors import Problem
from megajax.config.hints import nearest_divisors
from megajax.data.configs import DataConfig

NUMBER = r"(\d+(?:\.\d*)?|\.\d+)([KMBT]?)"
THRESHOLD = re.compile(f"{NUMBER}:{NUMBER}", re.IGNORECASE)
MOST_SIZES = 1000
"""Limit of the increments of a ramp."""
SUFFIXES = (("", 1), ("K", 10**3), ("M", 10**6), ("B", 10**9), ("T", 10**12))


def _number(number: str, suffix: str) -> int:
    """("1.5", "B") -> 1500000000; rounded down, as in Megatron-LM."""
    return int(float(number) * dict(SUFFIXES)[suffix.upper()])


@dataclass(frozen=True, kw_only=True)
class LinearRampConfig:
    """From `start` rows to batch.global_size in equal increments, each for as many samples (Brown et al. 2020).

    Example: `mj.BatchConfig(global_size=512, ramp=mj.LinearRampConfig(start=64, increment=64, samples=100_000))`
    """

    start: Size
    """Rows per step at first."""
    increment: Size
    """Rows added at a time."""
    samples: Size
    """Samples after which batch.global_size is reached."""

    def size_problems(self, global_size: int) -> list[Problem]:
        """Conflicts with the final batch size."""
        gap = global_size - self.start
        if gap < 0:
            return [Problem("start", f"start={self.start} is above global_size={global_size}")]
        if gap % self.increment:
            legal = ", ".join(str(n) for n in nearest_divisors(gap, self.increment))
            message = (
                f"increment={self.increment} does not divide global_size={global_size} - start={self.start} = {gap}"
            )
            return [Problem("increment", message, f"nearest divisors: {legal}")]
        if gap // self.increment > MOST_SIZES:
            message = (
                f"increment={self.increment} makes {gap // self.increment + 1} batch sizes, each a program to compile"
            )
            hint = f"use {-(-gap // MOST_SIZES)} or more: at most {MOST_SIZES + 1} sizes"
            return [Problem("increment", message, hint)]
        return []

    def nominal(self, consumed: int, global_size: int) -> int:
        """Rows of a step after `consumed` samples."""
        increments = (global_size - self.start) // self.increment
        if consumed > self.samples or not increments:
            return global_size
        return min(self.start + int(consumed / (self.samples / increments)) * self.increment, global_size)

    def thresholds(self, global_size: int, sequence_length: int | None) -> tuple[tuple[int, int], ...]:
        """(samples before the size starts, rows), in order."""
        steps = [(0, self.nominal(0, global_size))]
        increments = (global_size - self.start) // self.increment
        for number in range(1, increments + 1):
            rows = self.start + number * self.increment
            # Search near the exact quotient: `nominal`, with its rounding, defines the first sample.
            first = self.samples * number // increments
            while first > 0 and self.nominal(first - 1, global_size) >= rows:
                first -= 1
            while self.nominal(first, global_size) < rows:
                first += 1
            steps = [*steps, (first, rows)] if first > steps[-1][0] else [*steps[:-1], (first, rows)]
        return tuple(steps)


@dataclass(frozen=True, kw_only=True)
class StepRampConfig:
    """Batch sizes, each with the threshold at which it starts; the last must be batch.global_size.

    Example: `mj.StepRampConfig(sizes="0:768 1.5B:1K")`
    """

    sizes: str
    """Pairs threshold:rows with blanks or commas between: "0:768 1.5B:1K"; K, M, B and T are 10^3 to 10^12."""
    unit: Literal["tokens", "samples"] = "tokens"
    """Unit of the thresholds; tokens are divided by the sequence length, rounded down."""

    def problems(self) -> list[Problem]:
        words = self.sizes.replace(",", " ").split()
        invalid = [word for word in words if not THRESHOLD.fullmatch(word)]
        if invalid or not words:
            message = f"{invalid[0]!r} is not threshold:rows" if invalid else "is empty"
            return [Problem("sizes", message, "write for example 0:768 250B:1536")]
        pairs = self.pairs()
        problems = []
        if pairs[0][0]:
            problems.append(Problem("sizes", f"must begin at 0, got {pairs[0][0]}", "the first threshold is 0"))
        for (threshold, rows), (next_threshold, more) in pairwise(pairs):
            if next_threshold <= threshold:
                problems.append(
                    Problem("sizes", f"threshold {next_threshold} is given twice", "each must be above the one before")
                )
            if more <= rows:
                problems.append(
                    Problem("sizes", f"{rows} rows are followed by {more}", "a batch may only grow in a run")
                )
        if pairs[0][1] < 1:
            problems.append(Problem("sizes", f"rows must be at least 1, got {pairs[0][1]}"))
        return problems

    def pairs(self) -> list[tuple[int, int]]:
        """(threshold in units, rows), by threshold."""
        matches = [THRESHOLD.fullmatch(word) for word in self.sizes.replace(",", " ").split()]
        return sorted((_number(m[1], m[2]), _number(m[3], m[4])) for m in matches if m)

    def size_problems(self, global_size: int) -> list[Problem]:
        """Conflicts with the final batch size; those of the sizes alone, if there are any."""
        if (problems := self.problems()) or (last := self.pairs()[-1][1]) == global_size:
            return problems
        return [
            Problem("sizes", f"must end at global_size={global_size} rows, got {last}", f"set batch.global_size={last}")
        ]

    def thresholds(self, global_size: int, sequence_length: int | None) -> tuple[tuple[int, int], ...]:
        """(samples before the size starts, rows), in order."""
        length = 1
        if self.unit == "tokens":
            if not sequence_length:
                raise ValueError("thresholds in tokens need a sequence length")
            length = sequence_length
        return tuple((threshold // length, rows) for threshold, rows in self.pairs())


type RampConfig = LinearRampConfig | StepRampConfig


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Builds):
    """Rows per step, and rows per microbatch.

    Example: `mj.BatchConfig(global_size=512, micro_size=4)`
    """

    target: ClassVar[str] = "megajax.training.batch_sizes:BatchSizes"
    global_size: Size = 8
    """Rows per step over all devices; with a ramp, at its end."""
    micro_size: Size = 1
    """Rows of a microbatch on each data-parallel device. The microbatches of a step run one after another."""
    side_by_side: Annotated[int, Bounds(at_least=1, at_most=2, hint="two hide the collectives of each other")] = 1
    """2: two microbatches at a time, each layer of both in one loop, so that one computes beside the collectives over
    `tensor` of the other. Needs the memory of both. In a pipeline: the forward of one and the backward of another,
    which it holds anyway."""
    loss_average: Literal["tokens", "microbatches"] = "tokens"
    """tokens: the mean over all counted tokens. microbatches: the mean over microbatches of their mean losses, as in
    Megatron-LM without --calculate-per-token-loss. The reported loss is the mean over tokens in both cases."""
    ramp: RampConfig | None = None
    """Smaller batches at the start of training; none: always global_size."""
    decrease: bool = False
    """Round the batch down to a multiple of micro_size x data-parallel devices. Without it, a batch that is not a
    multiple is an error."""

    def problems(self) -> list[Problem]:
        problems = []
        with suppress(UnknownValue):  # of the ramp, whose other settings are checked
            sizes = [] if self.ramp is None else self.ramp.size_problems(self.global_size)
            problems = [replace(problem, setting=f"ramp.{problem.setting}") for problem in sizes]
        if not problems and self.global_size % self.micro_size and not self.decrease:
            legal = ", ".join(str(n) for n in nearest_divisors(self.global_size, self.micro_size))
            message = f"micro_size={self.micro_size} does not divide global_size={self.global_size}"
            problems.append(Problem("micro_size", message, f"nearest divisors: {legal}; or set global_size too"))
        return problems

    def replica_problems(self, replicas: int) -> list[Problem]:
        """Problems of these sizes on `replicas` data-parallel devices."""
        unit = self.micro_size * replicas
        if self.global_size % unit == 0 or (self.decrease and self.global_size >= unit):
            return self._ramp_problems(unit)
        below = self.global_size // unit * unit
        legal = [str(n) for n in (below, below + unit) if n > 0]
        smaller = [n for n in range(1, self.micro_size) if self.global_size % (n * replicas) == 0]
        hint = f"set micro_size={max(smaller)}, or " if smaller else ""
        return [
            Problem(
                "global_size",
                f"{self.global_size} rows are not divisible by micro_size={self.micro_size} x "
                f"{replicas} data-parallel devices = {unit}",
                f"{hint}nearest legal values: {', '.join(legal)}",
            )
        ]

    def _ramp_problems(self, unit: int) -> list[Problem]:
        if self.ramp is None or self.ramp.size_problems(self.global_size):
            return []
        # The rows of all sizes do not depend on the sequence length.
        sizes = [rows for _, rows in self.ramp.thresholds(self.global_size, 1)]
        invalid = [rows for rows in sizes if (rows < unit if self.decrease else rows % unit)]
        if not invalid:
            return []
        return [
            Problem(
                "ramp",
                f"goes through {', '.join(map(str, invalid))} rows, which micro_size={self.micro_size} x data-parallel "
                f"devices = {unit} {'are more than' if self.decrease else 'do not divide'}",
                "use multiples of it" + ("" if self.decrease else ", or batch.decrease=true for the next lower one"),
            )
        ]


class TaskBuilder(Protocol):
    """A task to evaluate a model on: one of megajax.tasks.config, or your own."""

    name: str
    """Name of its figures in reports, beside train, validation and test."""

    def build(self, scorer: Any) -> Any:
        """A function without arguments that returns `Figures`. scorer: a `megajax.training.scorer.Scorer`.

        Raises UserError if its data can't be loaded.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation of the loss on the validation and test splits.

    Example: `mj.EvaluationConfig(every=250, batches=8)`
    """

    every: Annotated[int, Bounds(at_least=1, hint="every=none: no evaluation between steps")] | None = None
    """Steps between evaluations on the validation split; none: only what `at_end` asks for."""
    batches: Index = 10
    """Global batches of each evaluation; 0: no evaluation."""
    full: bool = False
    """Evaluate on all rows of a split each time, not on the next `batches` batches."""
    sets: Mapping[str, DataConfig] = field(default_factory=dict)
    """Additional validation sets by name. The validation split of each is evaluated and reported separately.
    On the command line: --evaluation.sets='{code: {type: BlendConfig, valid_paths: [PREFIX]}}'."""
    at_end: bool | None = None
    """Evaluate on the validation and test splits, and on the tasks, when training ends. None: if `every`,
    `tasks_every`, `sets` or `tasks` is set."""
    tasks: tuple[TaskBuilder, ...] = ()
    """Tasks to evaluate on, such as megajax.tasks.config:LambadaConfig.
    On the command line: --evaluation.tasks='[{type: "megajax.tasks.config:LambadaConfig", path: FILE}]'."""
    tasks_every: Annotated[int, Bounds(at_least=1, hint="none: at the end")] | None = None
    """Steps between evaluations on the tasks; none: evaluate on them at the end only."""

    def ends_with_one(self) -> bool:
        """Whether to evaluate when training ends."""
        return bool(self.every or self.tasks_every or self.sets or self.tasks) if self.at_end is None else self.at_end

    def problems(self) -> list[Problem]:
        problems = []
        names = [task.name for task in self.tasks]
        for number, name in enumerate(names):
            if name in ("train", "validation", "test", *self.sets, *names[:number]):
                message = f"the name {name} is already the name of a split, a set or another task"
                problems.append(Problem(f"tasks.{number}.name", message, "use another"))
        for name in self.sets:
            if not re.fullmatch(r"[\w.-]+", name):
                problems.append(
                    Problem("sets", f"the name {name!r} is not made of letters, digits, underscores, dots and dashes")
                )
            elif name in ("train", "validation", "test"):
                problems.append(Problem("sets", f"{name} is the name of a split of the run's own data", "use another"))
        return problems
