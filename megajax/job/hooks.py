"""Hooks that evaluate between steps."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from megajax.data.rows.row_source import RowSource
from megajax.faults.signals import StopWaiting
from megajax.metrics.record import EvaluationRecord
from megajax.metrics.writer import Writer
from megajax.training.config import EvaluationConfig
from megajax.training.guarded.phase_timers import EVALUATION
from megajax.training.scorer import Scorer, Stopped
from megajax.training.session import Run

type Task = Callable[[], Mapping[str, Any]]
"""Evaluates the current weights of a Scorer: objects with a `value`, by name."""


@dataclass
class Evaluate:
    """Metrics on the validation sets every n steps; each time on the next rows, as in Megatron-LM, or on all rows."""

    cfg: EvaluationConfig
    log: Writer
    stopping: Callable[[], bool] = lambda: False
    """Called before each batch; True ends the evaluation."""
    ticker: Callable[[str], AbstractContextManager[Any]] = nullcontext
    """Shows that an evaluation is under way."""
    waiting: Callable[[int], AbstractContextManager[Any]] = nullcontext
    """Entered while the next batch is loaded; it may raise StopWaiting."""
    last: dict[str, dict[str, float]] = field(default_factory=dict)
    """Split -> metrics of its last evaluation."""
    phase: str = EVALUATION

    def due(self, step: int) -> bool:
        every = self.cfg.every
        return every is not None and self.cfg.batches > 0 and step % every == 0

    def __call__(self, run: Run, step: int) -> None:
        rows = self.cfg.batches * _batch_rows(run)
        for name, source in _validation_sets(run):
            self.measure(run, step, name, source, (step // (self.cfg.every or 1) - 1) * rows)

    def at_end(self, run: Run, step: int) -> None:
        """Evaluate on the next validation rows, unless this step has just been evaluated, then on the test split."""
        if self.cfg.batches == 0:
            return
        rows = self.cfg.batches * _batch_rows(run)
        first = step // self.cfg.every * rows if self.cfg.every else 0
        if not (step and self.due(step) and self.last):
            for name, source in _validation_sets(run):
                self.measure(run, step, name, source, first)
        self.measure(run, step, "test", run.parts.splits.test, 0)

    def measure(self, run: Run, step: int, split: str, source: RowSource | None, first: int) -> None:
        """Evaluate on one split and log the metrics; a split without rows is skipped."""
        if source is None:
            return
        started, batches = time.monotonic(), self.cfg.batches
        if self.cfg.full:
            source, first = PaddedRows(source, _batch_rows(run)), 0
            batches = len(source) // _batch_rows(run)
        with self.ticker(f"evaluating on the {split} split"):
            try:
                metrics = run.metrics(
                    source, first=first, batches=batches, stopping=self.stopping, waiting=self.waiting
                )
            except StopWaiting:
                metrics = None
        if metrics is None:
            self.log.event("evaluation_broken_off", step=step, split=split)
            return
        self.last[split] = metrics
        other_metrics = {name: value for name, value in metrics.items() if name != "loss"}
        likelihood = run.cfg.model.first_loss() is None
        self.log.log(
            EvaluationRecord(step=step, split=split, loss=metrics["loss"], metrics=other_metrics, likelihood=likelihood)
        )
        self.log.event("evaluate", step=step, split=split, seconds=round(time.monotonic() - started, 4))


@dataclass
class EvaluateTasks:
    """Metrics of evaluation.tasks every n steps and at the end."""

    cfg: EvaluationConfig
    log: Writer
    scorer: Scorer
    tasks: dict[str, Task]
    """Tasks by name, such as those of `megajax.tasks`."""
    ticker: Callable[[str], AbstractContextManager[Any]] = nullcontext
    """Shows that an evaluation is under way."""
    last_step: int | None = None
    """Step of the last evaluation."""
    phase: str = EVALUATION

    @classmethod
    def of(cls, run: Run, log: Writer, stopping: Callable[[], bool], ticker: Callable[[str], Any]) -> Self | None:
        """None for a run without tasks. Raises UserError if the data of a task can't be loaded."""
        cfg = run.cfg.evaluation
        if not cfg.tasks:
            return None
        scorer = Scorer(run.program, run.parts.tokenizer, {}, stopping=stopping, folder=Path(run.cfg.run_dir))
        return cls(cfg, log, scorer, {task.name: task.build(scorer) for task in cfg.tasks}, ticker)

    def due(self, step: int) -> bool:
        return self.cfg.tasks_every is not None and step % self.cfg.tasks_every == 0

    def __call__(self, run: Run, step: int) -> None:
        if self.last_step == step:
            return
        # Only during the evaluation: the next step donates the weights.
        self.scorer.weights = run.state.inputs
        try:
            for name, task in self.tasks.items():
                self.measure(step, name, task)
            self.last_step = step
        except Stopped:
            self.log.event("evaluation_broken_off", step=step, split="tasks")
        finally:
            self.scorer.weights = {}

    def measure(self, step: int, name: str, task: Task) -> None:
        """Evaluate on one task and log it."""
        started = time.monotonic()
        with self.ticker(f"evaluating on {name}"):
            values = {figure: metric.value for figure, metric in task().items()}
        loss = values.pop("loss", None)
        self.log.log(EvaluationRecord(step=step, split=name, loss=loss, metrics=values))
        self.log.event("evaluate", step=step, split=name, seconds=round(time.monotonic() - started, 4))


class PaddedRows:
    """The rows of a source, padded with rows without loss to a multiple of `size`."""

    def __init__(self, source: RowSource, size: int):
        self._source, self._length = source, -(-len(source) // size) * size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> Mapping[str, np.ndarray]:
        if row < len(self._source):
            return self._source[row]
        first, padding = self._source[0], {"padding": 1, "loss_mask": 0, "segment_ids": 0, "encoder_segment_ids": 0}
        return {**first, **{name: np.full_like(first[name], value) for name, value in padding.items() if name in first}}


def _batch_rows(run: Run) -> int:
    """Rows of an evaluation batch: the batch size at the end of training."""
    return run.program.sizes.sizes()[-1].rows


def _validation_sets(run: Run) -> Iterator[tuple[str, Any]]:
    yield "validation", run.parts.splits.valid
    yield from run.parts.sets.items()
