"""Batches made during a run: answers by an engine on the run's weights, their rewards, and the rows of both.

A rollout is a function of the weights, the seed and the number of prompts consumed. So a run that is killed within a
rollout samples the same answers again; between the updates of a rollout, a checkpoint has the rows that are left.
Rewards by a model, a classifier's score of a prompt and an answer, are computed on the mesh of the run.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from megajax.batch import SAMPLE, Batch, Params
from megajax.config.errors import UserError
from megajax.inference.assembly import engine_layout, engine_of_run, model_refusal
from megajax.inference.engine import Engine
from megajax.inference.loaded_model import LoadedModel
from megajax.inference.sampling_settings import Sampling
from megajax.inference.worker import complete
from megajax.kernels.attention.tiles import TILE
from megajax.mesh.named_shardings import replicated, unsharded_rows
from megajax.models.answers.advantages import group_advantages, total_reward
from megajax.models.protocol import ModelConfig
from megajax.processes.peers import Peers
from megajax.tokenizers.base import end_tokens_of
from megajax.training.check_compiler_options import inference_options
from megajax.training.program import Program
from megajax.training.scorer import placed_rows
from megajax.tuning.comparison import Comparison, StartingWeights, layer_rows
from megajax.tuning.config import RolloutsConfig
from megajax.tuning.judging import UNFINISHED, AnswerGroup, Judge, OrderedThread
from megajax.tuning.rollout_rows import SampledAnswer, ScoredRows, packed, rows_of, unpacked

MOST_TOKENS = 16384
"""Limit of the tokens that a device scores at a time, unless a single row has more."""


class RewardModel:
    """Scores answers. All processes call it in the same order, with the same answers."""

    def __init__(self, loaded: LoadedModel, slot: int, answers: int):
        """loaded: a classifier with one score for each sequence; slot: tokens of a prompt and its answer; answers:
        usual number of a call. Raises UserError for a model whose rows are shorter."""
        cfg = loaded.cfg
        if slot > cfg.sequence_length:
            raise UserError(
                f"data.reward_model reads {cfg.sequence_length} tokens, data.prompt_tokens + data.max_tokens are "
                f"{slot}: lower them, or take another model"
            )
        sequences, shards = cfg.head.sequences(), loaded.replicas
        rows = min(ceil(answers / sequences / shards), max(1, MOST_TOKENS // (slot * sequences)))
        self._loaded, self._shape = loaded, (shards * rows, sequences, slot)
        self._sharding = loaded.sharding("batch", None, None)

        def scores(weights: Params, tokens: Array, segments: Array) -> Array:
            # A model of single sequences reads [B, S].
            leaves = (x if sequences > 1 else x[:, 0] for x in (tokens, segments))
            return loaded.bound(weights)(next(leaves), segment_ids=next(leaves)).reshape(-1)

        self._scores = jax.jit(scores, out_shardings=replicated(loaded.mesh), compiler_options=dict(loaded.options))

    def __call__(self, answers: Sequence[SampledAnswer]) -> list[float]:
        """The score of each answer after its prompt."""
        rows, sequences, slot = self._shape
        size, results = rows * sequences, list[float]()
        for first in range(0, len(answers), size):
            tokens, segments = (np.zeros((size, slot), np.int32) for _ in range(2))
            part = answers[first : first + size]
            for number, answer in enumerate(part):
                text = (*answer.prompt, *answer.tokens)
                tokens[number, : len(text)], segments[number, : len(text)] = text, 1
            loaded, placed = self._loaded, [self._placed(x.reshape(self._shape)) for x in (tokens, segments)]
            with jax.set_mesh(loaded.mesh), jax.default_matmul_precision(loaded.matmul_precision):
                results += np.asarray(self._scores(loaded.weights, *placed))[: len(part)].tolist()
        return results

    def _placed(self, rows: np.ndarray) -> Array:
        return jax.make_array_from_callback(rows.shape, self._sharding, lambda index: rows[index])


class OrderedLayers:
    """Gathers the rows of stacked weights in the order of the layers, without padding. Compiled once."""

    def __init__(self, program: Program):
        state, sources = program.state_like(), dict[str, np.ndarray]()
        for path, spec in program.arrays.items():
            source = layer_rows(spec.layers)
            if source is not None and not np.array_equal(source, np.arange(len(spec.layers))):
                sources[path] = source
        likes = {path: {**state.params, **state.observed}[path] for path in sources}
        shapes = {path: (len(sources[path]), *like.shape[1:]) for path, like in likes.items()}
        shardings = {path: unsharded_rows(like.sharding, shapes[path]) for path, like in likes.items()}
        self._paths = [*sources]
        self._gather = jax.jit(
            lambda arrays: {path: x[jnp.asarray(sources[path])] for path, x in arrays.items()}, out_shardings=shardings
        )

    def __call__(self, inputs: Params) -> Params:
        """The weights and observations of a state."""
        if not self._paths:
            return inputs
        return {**inputs, **self._gather({path: inputs[path] for path in self._paths})}


WAIT_SECONDS = 0.5
"""Between signs of progress while rewards are awaited."""
EQUAL = "groups with equal rewards"


class Rollout(NamedTuple):
    """Answers with their advantages, before the trainer has scored them."""

    block: ScoredRows
    metrics: dict[str, float]
    counts: dict[str, int]
    """Reason -> number, of what it left out."""
    prompts: int
    """Prompts consumed after it."""

    def as_plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {**self._asdict(), "block": packed(self.block)}

    @classmethod
    def of_plain(cls, values: Mapping[str, Any]) -> Self:
        """From `as_plain`."""
        return cls(unpacked(values["block"]), values["metrics"], values["counts"], values["prompts"])


class RolloutSizes(NamedTuple):
    """Sizes of a rollout."""

    slot: int
    """Tokens of a prompt and its answer."""
    rows: int
    batch: int
    """Rows of a step."""
    steps: int

    @classmethod
    def of(cls, parts: Any) -> "RolloutSizes":
        """Raises UserError for settings that do not fit each other."""
        cfg, data, length = parts.cfg, parts.cfg.data, parts.cfg.model.row_positions()
        slot, batch, answers = data.prompt_tokens + data.max_tokens, cfg.batch.global_size, data.prompts * data.answers
        if "old_log_p" not in parts.program.schema:
            raise UserError(
                "data makes rollouts, and the model has no loss of them: mj.with_objective(model, GRPOConfig)"
            )
        if slot > length:
            raise UserError(
                f"data.prompt_tokens={data.prompt_tokens} + data.max_tokens={data.max_tokens} are {slot} tokens, "
                f"model.sequence_length is {length}: lower them, or raise it"
            )
        if data.inference.equal_to_training and length // slot > 1 and slot % TILE:
            raise UserError(
                f"data.inference.equal_to_training=true: rows hold several answers of data.prompt_tokens + "
                f"data.max_tokens = {slot} tokens, and equal sums need a multiple of {TILE}: change one of the two"
            )
        drawing = ("top_p", data.top_p, 1), ("top_k", data.top_k, 0), ("min_p", data.min_p, 0)
        changed = [f"data.{name}={value}" for name, value, unfiltered in drawing if value != unfiltered]
        if (temperature := cfg.model.objective.temperature) != 1:
            changed.append(f"model.objective.temperature={temperature}")
        if data.inference.equal_to_training and changed:
            raise UserError(
                f"data.inference.equal_to_training=true: with {changed[0]} the probabilities that tokens are drawn "
                "from are not equal bit for bit to those of the loss: leave one of the two out"
            )
        if cfg.batch.ramp is not None:
            raise UserError("batch.ramp changes the rows of a step, and rollouts have fixed sizes: set it to none")
        rows, over = divmod(answers, length // slot)
        if over or rows * data.passes % batch:
            raise UserError(
                f"data.prompts={data.prompts} x data.answers={data.answers}, {length // slot} in a row, and "
                f"data.passes={data.passes} are {answers * data.passes / (length // slot):g} rows, which "
                f"batch.global_size={batch} does not divide: change one of them"
            )
        return cls(slot, rows, batch, rows * data.passes // batch)


def demand_engine(model: ModelConfig, mesh: Mesh, data: RolloutsConfig) -> None:
    """Raises UserError for a model or a layout that the engine of rollouts does not have."""
    parallel = engine_layout(mesh)[0] if data.parallel is None else data.parallel.layout()
    if (why := model_refusal(model, parallel.tensor)) is not None:
        raise UserError(f"data makes rollouts by an engine: {why}")
    shards = parallel.tensor * parallel.expert
    if shards * (parallel.data or mesh.size // shards) != mesh.size:
        sizes = f"tensor={parallel.tensor}, expert={parallel.expert} and data={parallel.data or 'none'}"
        raise UserError(f"data.parallel has {sizes}, which do not give the {mesh.size} devices of the run: change them")
    axes = [f"parallel.{name}={mesh.shape[name]}" for name in ("pipeline", "context") if mesh.shape[name] > 1]
    if data.inference.equal_to_training and axes:
        raise UserError(
            f"data.inference.equal_to_training=true: {axes[0]} computes in another order than an engine: leave one of "
            "the two out"
        )


class Rollouts:
    """Iterator over (batch, rows consumed after it, metrics of the rollout with its first batch)."""

    def __init__(self, source: Any, parts: Any, consumed: int, progress: Callable[[], None]):
        """source: a `PromptSource`. Raises UserError; see `PromptSource.batches`."""
        demand_engine(parts.cfg.model, parts.program.mesh, source.cfg)
        self._ordered = OrderedLayers(parts.program)
        self.sizes, self.consumed, self.cfg = RolloutSizes.of(parts), consumed, source.cfg
        self._source, self._parts, self._progress = source, parts, progress
        self._comparison = Comparison(parts, self.cfg)
        self._reference = StartingWeights(parts) if "reference" in parts.program.schema else None
        self._model = self._reward_model()
        self._judge = Judge(self.cfg, Path(parts.cfg.run_dir).expanduser(), Peers())
        self._background = OrderedThread()
        self._engine: Engine | None = None
        self._run: Any = None
        self._block, self._first = dict[str, np.ndarray](), consumed
        self._metrics = dict[str, float]()
        self._before = self._after = 0
        """Prompts consumed before and after the present rollout."""
        self._next: Future[Rollout] | None = None
        """With data.ahead, the rollout after the present one."""
        self._returned: float | None = None
        leaf = parts.program.schema.get("experts")
        self._experts = None if leaf is None else leaf.shape[1:]

    def _reward_model(self) -> RewardModel | None:
        cfg, load = self.cfg, self._parts.load_model
        if cfg.reward_model is None:
            return None
        if load is None:
            raise UserError(f"data.reward_model={cfg.reward_model} is read by megajax.train alone: remove it here")
        return RewardModel(load(cfg.reward_model, self._parts), self.sizes.slot, cfg.prompts * cfg.answers)

    def __repr__(self) -> str:
        return f"<Rollouts: of {len(self._source.lines):,} prompts, {self.consumed:,} rows consumed>"

    def attach(self, run: Any) -> None:
        """Take weights from this run."""
        self._run = run

    def keep_reference(self, folder: Path, expected: str | None) -> Any:
        """Store or read the weights of the reference model; see `StartingWeights.keep`. None: the loss reads none."""
        return None if self._reference is None else self._reference.keep(self._run.state.inputs, folder, expected)

    def imbalance(self) -> None:
        """Rows are not balanced."""

    def close(self) -> None:
        """End the processes of rewards."""
        self._judge.close()

    def state(self) -> dict[str, Any]:
        """What a run needs to go on after the present step, as plain values."""
        used, state = int(self._run.state.consumed_samples) - self._first, {"skipped": dict(self._source.skipped)}
        resampled = used == 0 and not self.cfg.ahead  # it is made again, from the same weights
        if not resampled and self._block and used < self.sizes.steps * self.sizes.batch:
            state["rollout"] = {"first": self._first, "rows": packed(self._block), "metrics": self._metrics}
        if self._next is not None:
            state["next"] = self._finished(self._next).as_plain()
        return {**state, "prompts": self._before if resampled else self._after}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._before = self._after = int(state.get("prompts", 0))
        self._source.skipped.update(state.get("skipped", {}))
        if rollout := state.get("rollout"):
            self._first, self._block = int(rollout["first"]), unpacked(rollout["rows"])
            self._metrics = dict(rollout.get("metrics", {}))
        if stored := state.get("next"):
            self._next = self._background.submit(partial(Rollout.of_plain, stored))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Batch, int, dict[str, float]]:
        if not self._block or self.consumed == self._first + self.sizes.steps * self.sizes.batch:
            self._roll_out()
        metrics = self._metrics if self.consumed == self._first else {}
        first, size = self.consumed - self._first, self.sizes.batch
        turn, place = divmod(first, self.sizes.rows)
        order = np.arange(self.sizes.rows)
        if turn:
            order = np.random.default_rng([self._source.seed, self._first, turn]).permutation(order)
        batch = self._placed(order[place : place + size])
        self.consumed += size
        self._returned = self._returned or time.monotonic()
        return batch, self.consumed, metrics

    def _placed(self, rows: np.ndarray) -> Batch:
        """Rows of the block on the devices."""
        numbers = np.arange(self.consumed, self.consumed + len(rows)).astype(np.uint32)
        leaves = {name: self._block[name][rows] for name in self._parts.program.schema if name != SAMPLE}
        return placed_rows(self._parts.program, {SAMPLE: numbers} | leaves, self._parts.program.microbatches)

    def _roll_out(self) -> None:
        """Make the rows of the next rollout."""
        weights = jax.block_until_ready(self._run.state.inputs)
        started, after = time.monotonic(), self.consumed + self.sizes.steps * self.sizes.batch
        rollout = self._judged_rollout(weights, self._after) if self._next is None else self._finished(self._next)
        self._next = None
        if self.cfg.ahead and after < len(self._source):
            self._wake(weights)
            prompts = rollout.prompts
            lines, answers, seconds = self._sampled(range(prompts, prompts + self.cfg.prompts))
            self._sleep()
            rest = partial(self._rollout, prompts=prompts + self.cfg.prompts, seconds=seconds)
            self._next = self._background.submit(lambda: rest(*self._judge(lines, answers)))
        metrics = rollout.metrics | self._comparison(weights, rollout.block)
        if self._reference is not None:
            rollout.block["reference"] = self._reference(weights, rollout.block, new=self.consumed == 0)
        if self._returned is not None:
            positions = self.sizes.steps * self.sizes.batch * self._parts.cfg.model.row_positions()
            metrics["update_tokens_per_second"] = positions / (started - self._returned)
        for reason, count in rollout.counts.items():
            self._source.skipped[reason] = self._source.skipped.get(reason, 0) + count
        self._block, self._metrics, self._first, self._returned = rollout.block, metrics, self.consumed, None
        self._before, self._after = self._after, rollout.prompts

    def _finished[T](self, work: Future[T]) -> T:
        while not wait([work], WAIT_SECONDS).done:
            self._progress()
        return work.result()

    def _judged_rollout(self, weights: Params, prompts: int) -> Rollout:
        """A rollout after this number of prompts, with rewards."""
        groups, failures, seconds = list[AnswerGroup](), Counter[str](), 0.0
        self._wake(weights)
        for _ in range(1 + self.cfg.more_rollouts):
            missing = self.cfg.prompts - sum(not group.equal for group in groups)
            if not missing:
                break
            lines, answers, sampling = self._sampled(range(prompts, prompts + missing))
            more, failed = self._finished(self._background.submit(partial(self._judge, lines, answers)))
            groups, failures, seconds, prompts = groups + more, failures + failed, seconds + sampling, prompts + missing
        self._sleep()
        return self._rollout(groups, failures, prompts=prompts, seconds=seconds)

    def _rollout(
        self, groups: Sequence[AnswerGroup], failures: Counter[str], *, prompts: int, seconds: float
    ) -> Rollout:
        answers = self._with_advantages(self._chosen(groups))
        length = self._parts.cfg.model.row_positions()
        block = rows_of(answers, slot=self.sizes.slot, length=length, experts=self._experts)
        tokens = sum(len(answer.tokens) for group in groups for answer in group.answers)
        metrics = self._metrics_of(groups, answers, failures)
        metrics |= {"rollout_seconds": seconds, "rollout_tokens_per_second": tokens / seconds}
        counts = failures + Counter({EQUAL: sum(group.equal for group in groups)})
        return Rollout(block, metrics, dict(counts), prompts)

    def _wake(self, weights: Params) -> None:
        """The engine, with these weights."""
        parts, inference, length, layout = self._parts, self.cfg.inference, self.sizes.slot, self.cfg.parallel
        weights = self._ordered(weights)
        if self._engine is not None:
            self._engine.refit(weights, running="abort", shared=True)
            self._engine.wake()
            return
        tokens = inference.rows * -(-length // inference.block) * inference.block
        self._engine = engine_of_run(
            parts.cfg,
            weights,
            parts.program.mesh,
            inference_options(parts.cfg.xla, parts.program.mesh.devices.flat[0]),
            parts.tokenizer,
            replace(inference, cache_tokens=inference.cache_tokens or tokens),
            end_tokens=end_tokens_of(parts.tokenizer),
            length=length,
            queue=self.cfg.prompts * self.cfg.answers,
            parallel=None if layout is None else layout.layout(),
        )

    def _sleep(self) -> None:
        """Release weights and cache: steps of training need the memory, and replace the weights."""
        if self._engine is not None:
            self._engine.sleep(level=2, running="abort")

    def _sampled(self, numbers: Sequence[int]) -> tuple[list[Any], list[list[SampledAnswer]], float]:
        """The prompts with these numbers, answers to each, and the seconds that they took."""
        lines, cfg, source = [self._source.line(number) for number in numbers], self.cfg, self._source
        assert self._engine is not None
        started, temperature = time.monotonic(), self._parts.cfg.model.objective.temperature
        filters = {name: getattr(cfg, name) for name in ("max_tokens", "top_k", "top_p", "min_p", "stop")}
        requests = [
            (line.tokens, Sampling(n=cfg.answers, seed=seed, logprobs=0, temperature=temperature, **filters))
            for line, seed in zip(lines, (seed_of(source.seed, number) for number in numbers), strict=True)
        ]
        replays = self._experts is not None
        outputs = complete(self._engine, requests, show=lambda output: self._progress(), experts=replays)
        answers = [
            [SampledAnswer.of(line.tokens, out) for out in outs] for line, outs in zip(lines, outputs, strict=True)
        ]
        if self._model is not None:
            scores = iter(self._model([answer for group in answers for answer in group]))
            answers = [[answer._replace(score=next(scores)) for answer in group] for group in answers]
        return lines, answers, time.monotonic() - started

    def _chosen(self, groups: Sequence[AnswerGroup]) -> list[AnswerGroup]:
        """The groups of the rows. With dynamic sampling those with equal rewards only fill up, and do not count."""
        if not self.cfg.more_rollouts:
            return [*groups]
        chosen = sorted(groups, key=lambda group: group.equal)[: self.cfg.prompts]
        return [
            group._replace(answers=[a._replace(counts=a.counts and not group.equal) for a in group.answers])
            for group in chosen
        ]

    def _with_advantages(self, groups: Sequence[AnswerGroup]) -> list[SampledAnswer]:
        rewards, cfg = np.concatenate([group.rewards for group in groups]), self.cfg
        arguments = {"scale": cfg.scale, "aggregation": cfg.aggregation}
        advantages = group_advantages(rewards, self._judge.weights(), cfg.answers, **arguments)
        answers, masked = [answer for group in groups for answer in group.answers], cfg.cut_answers == "mask"
        return [
            answer._replace(advantage=float(advantage), counts=answer.counts and not (answer.cut and masked))
            for answer, advantage in zip(answers, advantages, strict=True)
        ]

    def _metrics_of(
        self, groups: Sequence[AnswerGroup], answers: Sequence[SampledAnswer], failures: Mapping[str, int]
    ) -> dict[str, float]:
        """Means over all answers of the rollout."""
        rewards = np.concatenate([group.rewards for group in groups])
        totals, lengths = total_reward(rewards, self._judge.weights()), [len(answer.tokens) for answer in answers]
        metrics = {
            "reward": totals.mean(),
            "reward_deviation": totals.std(),
            "answer_tokens": np.mean(lengths),
            "answer_tokens_most": np.max(lengths),
            "answers_cut": np.mean([answer.cut for answer in answers]),
            "groups_equal": np.mean([group.equal for group in groups]),
            "rewards_failed": sum(count for reason, count in failures.items() if reason != UNFINISHED),
            "negative_log_p": -np.mean([p for answer in answers for p in answer.log_p]),
        }
        if len(names := self._judge.names()) > 1:
            metrics |= {f"reward_{name}": rewards[:, place].mean() for place, name in enumerate(names)}
        return {name: float(value) for name, value in metrics.items()}


def seed_of(seed: int, number: int) -> int:
    """The seed of the answers to a prompt."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> np.uint64(1))
