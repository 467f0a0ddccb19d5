"""Log-probabilities of tokens under the weights of a run, on the mesh and in the dtypes of its training step.

Windows of tokens are sorted by length and padded to few lengths, so that few programs are compiled. Each window has its
own row: neither other windows of its batch nor the padding change its numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, islice
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.batch import SAMPLE, Batch, Loss, Params, Rows
from megajax.config.errors import UserError
from megajax.kernels.attention.tiles import QUERIES
from megajax.layers.context import Context
from megajax.mesh.config import BATCH_AXES, devices_over
from megajax.models.protocol import PredictingModel, ScoringModel, demand_causal
from megajax.tokenizers.base import Tokenizer
from megajax.training.gradients.staged import Head
from megajax.training.program import Program

SHORTEST = 64
"""Length of the shortest compiled row; others double it, up to the length of training."""
MOST_TOKENS = 16384
"""Limit of the tokens of a batch on a device, unless a single row has more."""
READ = ("tokens", "labels", "positions", "loss_mask", "segment_ids", "padding", "experts")
"""Leaves of rows that the Scorer can fill."""


class Window(NamedTuple):
    """Tokens that are scored in their own row."""

    tokens: np.ndarray
    """int32 [N]."""
    counted: int
    """Number of tokens at the end that are scored, each given all tokens before it; less than N."""


class WindowScore(NamedTuple):
    """The scores of a window."""

    log_probability: float
    """Sum over the scored tokens, in nats."""
    right: int
    """Number of scored tokens that the model predicts as likeliest."""


class AnswerCache(Protocol):
    """Answers from an earlier attempt."""

    def get(self, windows: Sequence[Window]) -> list[WindowScore | None]:
        """The stored answers of these windows; None for the others."""
        ...

    def put(self, windows: Sequence[Window], answers: Sequence[WindowScore]) -> None:
        """Store the answers of a batch."""
        ...


class Stopped(Exception):
    """An evaluation was stopped before its end."""


class Elsewhere(Exception):
    """The rest of a task is the work of other processes."""


class Scorer:
    """Runs a model with the current `weights`; several processes call the same methods in the same order.

    It scores windows of tokens with a causal language model, or returns the outputs of rows of other models.

    Attributes:
        program, tokenizer: of the run.
        weights: the weights for `Program.eval_step`; may be replaced between calls.
        cache: answers of earlier attempts with the same weights.
        stopping: called before each batch; True ends the evaluation with Stopped.
        progress: called after each batch with the numbers of finished and of all windows or rows.
        folder: for files that a task writes, for example predictions; None: no files.
        share: (a number, n): `answers` scores each n-th batch from this number on, for the cache, then raises
            Elsewhere; all else raises it at once. None: all batches.
    """

    share: tuple[int, int] | None = None

    def __init__(
        self,
        program: Program,
        tokenizer: Tokenizer,
        weights: Params,
        *,
        cache: AnswerCache | None = None,
        stopping: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda count, total: None,
        folder: Path | None = None,
        temperature: float = 1.0,
    ):
        """temperature: divisor of the logits in `scores`.

        Raises UserError for a model without outputs of rows and without probabilities of next tokens.
        """
        if not hasattr(program.abstract, "outputs"):
            demand_scores(program)
        self.folder, self._temperature = folder, temperature
        self.program, self.tokenizer, self.weights = program, tokenizer, weights
        self.cache, self.stopping, self.progress = cache, stopping, progress
        self.length: int = program.cfg.model.row_positions()
        self._tokens_per_replica = program.cfg.batch.micro_size * self.length
        parallel, chunks = program.cfg.parallel, program.layout.rows.chunks
        # cuDNN's attention needs chunks of even length.
        even = 2 if parallel.context > 1 else 1
        self._multiple = parallel.context * lcm(even * chunks, parallel.tensor if parallel.sequence else 1)
        self._steps: dict[tuple[int, ...], Any] = {}

    def answers(self, windows: Sequence[Window]) -> list[WindowScore]:
        """The answer of each window. Raises ValueError for a window longer than a row.

        Batches do not depend on answers in the cache: with some of them, the others have the same bits.
        """
        for window in windows:
            if not 0 < window.counted < len(window.tokens) <= self.length + 1:
                raise ValueError(f"{window.counted} of {len(window.tokens)} tokens counted, rows have {self.length}")
        answers = [None] * len(windows) if self.cache is None else self.cache.get(windows)
        first, stride = self.share or (0, 1)
        for places in islice(self._batches(windows), first, None, stride):
            if None not in [answers[place] for place in places]:
                continue
            batch = [windows[place] for place in places]
            scores = self.scores([row(window) for window in batch])
            new = [answered(window, *pair) for window, *pair in zip(batch, *scores, strict=True)]
            if self.cache is not None:
                self.cache.put(batch, new)
            for place, answer in zip(places, new, strict=True):
                answers[place] = answer
            self.progress(sum(answer is not None for answer in answers), len(windows))
        self.demand_all()
        return [answer for answer in answers if answer is not None]

    def demand_all(self) -> None:
        """Raises Elsewhere if this has a share of the work alone."""
        if self.share is not None:
            raise Elsewhere

    def next_tokens(self, prompts: Sequence[np.ndarray]) -> list[int]:
        """The likeliest token after each prompt, int32 [N] with 1 <= N <= `length`."""
        windows, tokens = [Window(np.append(prompt, 0), 1) for prompt in prompts], [0] * len(prompts)
        for places in self._batches(windows):
            likeliest = self.scores([row(windows[place]) for place in places])[1]
            for place, ids in zip(places, likeliest, strict=True):
                tokens[place] = int(ids[len(prompts[place]) - 1])
        return tokens

    def scores(self, rows: Sequence[Rows]) -> tuple[np.ndarray, np.ndarray]:
        """Rows of leaves [S] -> log-probability of each label and the likeliest token, float32 and int32 [rows, S].

        Shorter rows are padded at their ends. At most `rows_at_once` rows. Raises Stopped.
        """
        length = self.padded(max(len(leaves["tokens"]) for leaves in rows))
        total = self._rows(len(rows), length)
        names, schema = [name for name in READ if name in rows[0]], self.program.schema
        inner = {name: schema[name].shape[1:] for name in names if name in schema}
        batch = {name: np.zeros((total, length, *shape), schema[name].dtype) for name, shape in inner.items()}
        batch |= {"padding": np.ones((total, length), bool)} if "padding" in batch else {}
        for name, leaf in batch.items():
            for number, leaves in enumerate(rows):
                leaf[number, : len(leaves[name])] = leaves[name]
        head = partial(scores_of_rows, rows=total, length=length, temperature=self._temperature)
        sums = self._sums((total, length), batch, head)
        log_p, likeliest = (sums[name][: len(rows)] for name in ("log_p", "likeliest"))
        return log_p, likeliest.astype(np.int32)

    def outputs(self, rows: Sequence[Rows]) -> dict[str, np.ndarray]:
        """Rows of data with all leaves of the schema -> the model's outputs, float32 [rows, ...] by name.

        Raises Stopped.
        """
        self.demand_all()
        schema = {name: leaf for name, leaf in self.program.schema.items() if name != SAMPLE}
        total, parts = self._rows(len(rows), self.length), list[dict[str, np.ndarray]]()
        for first in range(0, len(rows), total):
            # The last batch repeats its last row.
            batch_rows = [rows[min(place, len(rows) - 1)] for place in range(first, first + total)]
            batch = {
                name: np.stack([leaves[name] for leaves in batch_rows]).astype(leaf.dtype)
                for name, leaf in schema.items()
            }
            parts.append(self._sums((total,), batch, partial(outputs_of_rows, rows=total)))
            self.progress(min(first + total, len(rows)), len(rows))
        return {name: np.concatenate([part[name] for part in parts])[: len(rows)] for name in parts[0]}

    def _sums(self, size: tuple[int, ...], batch: Mapping[str, np.ndarray], head: Head) -> dict[str, np.ndarray]:
        """The sums of `head` over rows [rows, ...], which are numbered from 0; compiled once for each size."""
        if self.stopping():
            raise Stopped
        program, numbers = self.program, np.arange(size[0], dtype=np.uint32)
        placed = placed_rows(program, {SAMPLE: numbers, **batch}, program.mesh.shape["pipeline"])
        if size not in self._steps:
            self._steps[size] = program.forward_step(head)
        precision = program.cfg.precision.matmul_precision()
        with jax.set_mesh(program.mesh), jax.default_matmul_precision(precision):
            sums = self._steps[size](self.weights, placed)
        return {name: np.asarray(total) for name, (total, _) in sums.items()}

    def padded(self, tokens: int) -> int:
        """Compiled row length for this number of tokens; devices have equal chunks of a row."""
        length = SHORTEST + -SHORTEST % self._multiple
        while length < tokens:
            length *= 2
        return min(length, self.length)

    def rows_at_once(self, length: int) -> int:
        """Largest number of rows in a batch: each device has the tokens of a training microbatch, up to MOST_TOKENS."""
        most = MOST_TOKENS * self.program.mesh.shape["context"]
        return self._devices() * max(1, min(self._tokens_per_replica, most) // length)

    def _devices(self) -> int:
        """Number of device groups with different rows, times the microbatches of a pipeline."""
        return devices_over(self.program.mesh.shape, (*BATCH_AXES, "pipeline"))

    def _rows(self, count: int, length: int) -> int:
        """Compiled number of rows for `count` rows: a power of two times the device groups, up to `rows_at_once`.

        With fewer than `QUERIES` tokens on a device, products of CPUs would have other bits than in training.
        """
        devices = rows = self._devices()
        while rows < count or rows * length < QUERIES * devices:
            rows *= 2
        return min(rows, self.rows_at_once(length))

    def _batches(self, windows: Sequence[Window]) -> Iterator[list[int]]:
        """Places of the windows, in batches of the same padded length, the longest first."""
        sizes = [self.padded(len(window.tokens) - 1) for window in windows]
        order = sorted(range(len(windows)), key=lambda place: -sizes[place])
        for length, places in groupby(order, key=lambda place: sizes[place]):
            group, size = list(places), self.rows_at_once(length)
            yield from (group[first : first + size] for first in range(0, len(group), size))


def row(window: Window) -> dict[str, np.ndarray]:
    """The leaves of a window's row."""
    length = len(window.tokens) - 1
    return {"tokens": window.tokens[:-1], "labels": window.tokens[1:], "positions": np.arange(length)} | {
        "loss_mask": np.ones(length),
        "segment_ids": np.zeros(length),
        "padding": np.zeros(length, bool),
    }


def counted(window: Window) -> slice:
    """The places of its scored tokens among the labels of its row."""
    return slice(len(window.tokens) - 1 - window.counted, len(window.tokens) - 1)


def answered(window: Window, log_p: np.ndarray, likeliest: np.ndarray) -> WindowScore:
    """The answer from the scores of a row; sums are in float64."""
    last = counted(window)
    correct = likeliest[last] == window.tokens[-window.counted :]
    return WindowScore(float(log_p[last].astype(np.float64).sum()), int(correct.sum()))


def scores_of_rows(
    model: ScoringModel, x: Array, batch: Rows, ctx: Context, _: object, *, rows: int, length: int, temperature: float
) -> Loss:
    """The scores of a microbatch as sums over the batch: rows at their own places in zeros [rows, length]."""

    def placed(values: Array) -> Array:
        zeros = jnp.zeros((rows, length), jnp.float32)
        return zeros.at[batch[SAMPLE][:, None], ctx.index[None]].add(values.astype(jnp.float32))

    log_p, likeliest = model.scores(x, batch["labels"], temperature)
    nothing = jnp.zeros((), jnp.float32)
    # float32 represents every integer up to 2**24, which exceeds any vocabulary.
    sums = {"log_p": (placed(log_p), nothing), "likeliest": (placed(likeliest), nothing)}
    return Loss(nothing, nothing, sums)


def outputs_of_rows(model: PredictingModel, x: Array, batch: Rows, ctx: Context, _: object, *, rows: int) -> Loss:
    """The outputs of a microbatch as sums over the batch: rows at their own places in zeros [rows, ...]."""
    nothing = jnp.zeros((), jnp.float32)

    def placed(values: Array) -> tuple[Array, Array]:
        zeros = jnp.zeros((rows, *values.shape[1:]), jnp.float32)
        return zeros.at[batch[SAMPLE]].add(values.astype(jnp.float32)), nothing

    outputs = model.outputs(x, batch, ctx)
    return Loss(nothing, nothing, {name: placed(values) for name, values in outputs.items()})


def demand_scores(program: Program) -> None:
    """Raises UserError for a model that does not predict next tokens from tokens alone."""
    model, name = program.cfg.model, type(program.cfg.model).__name__
    demand_causal(model)
    required = {leaf for leaf, spec in model.schema().items() if not spec.optional and not spec.loss_only}
    needed = sorted(required - {*READ})
    if needed:
        raise UserError(f"tasks have only tokens as inputs, and {name} also reads {', '.join(needed)}")
    if not hasattr(program.abstract, "scores"):
        raise UserError(f"{type(program.abstract).__name__} lacks scores(x, labels): see docs/evaluation.md")


def placed_rows(program: Program, leaves: Mapping[str, np.ndarray], microbatches: int) -> Batch:
    """Rows [microbatches * B, ...] on the devices, [microbatches, B, ...]; every process has all of them."""

    def placed(name: str, rows: np.ndarray) -> Array:
        split = rows.reshape(microbatches, -1, *rows.shape[1:])
        array = program.layout.rows.arranged(split, program.schema[name].batch_axes)
        return jax.make_array_from_callback(array.shape, program.batch_shardings[name], lambda index: array[index])

    return {name: placed(name, rows) for name, rows in leaves.items()}
