"""Rewards of the answers of a rollout: each process of a run judges a share of them, and all have all rewards."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import numpy as np

from megajax.config.errors import UserError
from megajax.models.answers.advantages import total_reward
from megajax.processes.peers import Peers
from megajax.storage.disk import open_regular
from megajax.tuning.config import RolloutsConfig
from megajax.tuning.rewards import RewardTask, RewardWorkers
from megajax.tuning.rollout_rows import SampledAnswer

FAILURES_FILE, MOST_FAILURES, DETAIL = "reward_failures.jsonl", 100, 2000
"""The file of the first failures, their number, and the characters of what each tells."""
UNFINISHED, NOT_FINITE = "answers that the engine did not complete", "rewards: the model gave no finite number"


class AnswerGroup(NamedTuple):
    """The answers to a prompt, and their rewards [n, F]."""

    answers: list[SampledAnswer]
    rewards: np.ndarray
    equal: bool


class OrderedThread:
    """A thread that does work in order. The program can end while it waits for other processes."""

    def __init__(self):
        self._queue = SimpleQueue[tuple[Callable[[], Any], Future[Any]]]()
        Thread(target=self._run, name="rewards", daemon=True).start()

    def submit[T](self, work: Callable[[], T]) -> Future[T]:
        """The result of `work`, later."""
        future = Future[T]()
        self._queue.put((work, future))
        return future

    def _run(self) -> None:
        while True:
            work, future = self._queue.get()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


class Judge:
    """Gives answers their rewards. All processes call it in the same order, with the same answers."""

    def __init__(self, cfg: RolloutsConfig, folder: Path, peers: Peers):
        """folder: of the run. Raises UserError in all processes for functions that one of them can't load."""
        self._cfg, self._path, self._peers = cfg, folder / FAILURES_FILE, peers
        self._workers: RewardWorkers

        def load() -> None:
            workers = cfg.workers if cfg.rewards else 0
            self._workers = RewardWorkers(cfg.rewards, workers=workers, seconds=cfg.reward_seconds)

        peers.check(load)

    def close(self) -> None:
        """End the processes of rewards."""
        self._workers.close()

    def weights(self) -> np.ndarray:
        """Weights of the columns of rewards."""
        weights = self._cfg.reward_weights or (1.0,) * len(self._cfg.rewards)
        model = [self._cfg.reward_model_weight] * (self._cfg.reward_model is not None)
        return np.array([*weights, *model, *[1.0] * bool(self._cfg.soft_tokens)])

    def names(self) -> list[str]:
        """Names of the columns of rewards but the last, if that is the length rule's."""
        names = [reference.rpartition(":")[2] for reference in self._cfg.rewards]
        return [*names, *["model"] * (self._cfg.reward_model is not None)]

    def __call__(
        self, lines: Sequence[Any], groups: Sequence[list[SampledAnswer]]
    ) -> tuple[list[AnswerGroup], Counter[str]]:
        """The groups of answers to these lines, and counts of the reasons why rewards are 0 or answers do not count.

        Raises UserError, in all processes, if functions can no longer be loaded or answers differ between processes.
        """
        cfg, functions = self._cfg, range(len(self._cfg.rewards))
        tasks = [
            RewardTask(function, answer.text, line.row)
            for line, group in zip(lines, groups, strict=True)
            for answer in group
            for function in functions
        ]
        sampled = repr([(answer.tokens, answer.log_p, answer.score) for group in groups for answer in group])
        values, failed = self._everywhere(tasks, blake2b(sampled.encode(), digest_size=8).hexdigest())
        failures = Counter(f"rewards: the function {failure['reason']}" for failure in failed)
        failures[UNFINISHED] += sum(not answer.counts for group in groups for answer in group)
        rewards = values.reshape(len(lines), cfg.answers, len(functions))
        if cfg.reward_model is not None:
            scores = np.array([[answer.score for answer in group] for group in groups])
            failures[NOT_FINITE] += int((~np.isfinite(scores)).sum())
            rewards = np.concatenate([rewards, np.where(np.isfinite(scores), scores, 0)[..., None]], axis=2)
        if cfg.soft_tokens:
            over = [[len(a.tokens) - cfg.max_tokens + cfg.soft_tokens for a in group] for group in groups]
            penalty = -np.clip(np.array(over) / cfg.soft_tokens, 0, 1)
            rewards = np.concatenate([rewards, penalty[..., None]], axis=2)
        totals = [total_reward(of_group, self.weights()) for of_group in rewards]
        equal = [bool(np.ptp(of_group) == 0) for of_group in totals]
        return [*map(AnswerGroup, groups, rewards, equal)], failures

    def _everywhere(self, tasks: Sequence[RewardTask], sampled: str) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """The reward of each task, and what is known about those that failed. sampled: a digest of the answers."""
        peers, problem, values, failures = self._peers, "", list[float](), list[Any]()
        share = range(peers.index, len(tasks), peers.count)
        try:
            values, failures = self._workers([tasks[number] for number in share])
        except UserError as error:
            problem = str(error)
        lost = [
            {"task": share[task], "reason": reason, "detail": detail[:DETAIL] if place < MOST_FAILURES else ""}
            for place, (task, reason, detail) in enumerate(failures)
        ]
        parts: list[Any] = peers.gather({"problem": problem, "sampled": sampled, "values": values, "failures": lost})
        for number, part in enumerate(parts):
            if part["problem"]:
                raise UserError(part["problem"])
            if part["sampled"] != parts[0]["sampled"]:
                raise UserError(
                    f"processes 0 and {number} sampled different answers from the same weights: their devices compute "
                    "differently. Use devices and software of one kind, or one process"
                )
        rewards = np.zeros(len(tasks))
        for number, part in enumerate(parts):
            rewards[number :: peers.count] = part["values"]
        failed = sorted((failure for part in parts for failure in part["failures"]), key=lambda entry: entry["task"])
        if peers.first:
            self._record([tasks[entry.pop("task")]._asdict() | entry for entry in failed])
        return rewards, failed

    def _record(self, failures: Sequence[Mapping[str, Any]]) -> None:
        """Write the first failures of rewards to a file."""
        before = self._path.read_text(encoding="utf-8").count("\n") if self._path.exists() else 0
        if failures and before < MOST_FAILURES and self._path.parent.is_dir():
            with open(open_regular(self._path, append=True), "a", encoding="utf-8") as file:
                file.writelines(json.dumps(failure) + "\n" for failure in failures[: MOST_FAILURES - before])
