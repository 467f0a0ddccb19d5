"""Training sends the tokens of rollouts to the experts that the engine chose."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import gangs
import jax
import numpy as np
import pytest
from run_folder import timeless_steps

from megajax.config import load
from megajax.job.notebook import set_up
from megajax.tuning.comparison import scores

MIXTURE = (
    *("model.stack.pattern.0.mlp.type=MoEConfig", "model.stack.pattern.0.mlp.experts=8"),
    *("model.stack.pattern.0.mlp.expert.type=GatedMLPConfig", "model.stack.pattern.0.mlp.expert.ffn=32"),
)
REPLAY = "model.objective.router_replay=rollout"
TEXT = "0123456789 abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def long_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Settings of rollouts with prompts and answers of several blocks of the cache."""
    monkeypatch.chdir(tmp_path)
    prompts = [{"prompt": TEXT[first : first + 5 + 3 * (first % 5)]} for first in range(12)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (tmp_path / "rewards.py").write_text("def reward(prompt, answer, row): return answer.count('e') - len(answer) / 9")
    return (
        *("data.type=RolloutsConfig", "data.paths=prompts.jsonl", "data.rewards=rewards.py:reward"),
        *("data.prompt_tokens=20", "data.max_tokens=12", "data.inference.block=4", "data.inference.rows=16"),
        *("model.sequence_length=64", "data.prompts=4", "data.answers=8", "batch.global_size=4", "batch.micro_size=2"),
        *("data.reward_weights=1", "logging.report=false", *MIXTURE),
    )


def run_of(*settings: str, devices: int = 1) -> Any:
    cfg = load("grpo.py:debug", *settings, devices=devices)
    return set_up(cfg, devices=jax.devices()[:devices])


@cache
def numbers(*settings: str, devices: int = 1) -> list[dict[str, Any]]:
    run = run_of(*settings, devices=devices)
    try:
        return [of_step(info) for info in run.steps()]
    finally:
        run.close()


def of_step(info: Any) -> dict[str, Any]:
    return info._asdict() | info.metrics | {name: measured.overall for name, measured in info.measured.items()}


@pytest.mark.slow
def test_updates_have_the_experts_that_the_engine_chose(long_answers: tuple[str, ...]) -> None:
    """Answers share blocks. With the weights of the engine no choice differs; after that some do, and the
    log-probabilities of the loss are those with the experts of the old weights."""
    run = run_of(*long_answers, REPLAY, "data.passes=3", "steps=6")
    steps = run.steps()
    infos, rollouts = [of_step(next(steps)) for _ in range(3)], run.batches
    block, scorer = rollouts._block, rollouts._comparison._scorer
    used = block["tokens"] > 0
    assert (block["experts"][used] > 0).all() and 0 < infos[0]["mismatch_most"] < 1e-5
    assert infos[0]["router_replay_differs"] == 0 < infos[2]["router_replay_differs"]
    scorer.weights = run.state.inputs
    given, own = scores(scorer, block, "experts"), scores(scorer, block)
    other = replace_experts(block, 1)
    assert np.abs(given - own)[used].max() > 1e-4
    assert np.abs(scores(scorer, other, "experts") - given)[used].max() > 1e-3
    none = {**block, "experts": np.zeros_like(block["experts"])}
    np.testing.assert_array_equal(scores(scorer, none, "experts"), own)
    run.close()


def replace_experts(block: dict[str, np.ndarray], by: int) -> dict[str, np.ndarray]:
    experts = block["experts"]
    return {**block, "experts": np.where(experts > 0, 1 + (experts - 1 + by) % 8, 0).astype(np.int16)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.pipeline=2", "parallel.virtual_stages=2", "parallel.data=2"),
        ("parallel.context=2", "parallel.data=2", "data.parallel.tensor=2", "data.parallel.expert=2"),
    ],
)
def test_layouts_train_alike(long_answers: tuple[str, ...], layout: tuple[str, ...]) -> None:
    words = (*long_answers, REPLAY, "steps=4", "data.passes=2", "batch.micro_size=1")
    expected, actual = numbers(*words), numbers(*words, *layout, devices=4)
    assert actual[0]["reward"] == expected[0]["reward"]
    for name in ("loss", "grad_norm", "router_replay_differs"):
        columns = ([line[name] for line in lines] for lines in (actual, expected))
        np.testing.assert_allclose(*columns, rtol=1e-4, atol=1e-6, err_msg=name)
    assert actual[0]["mismatch_most"] < 1e-5 and actual[0]["router_replay_differs"] == 0
    assert actual[-1]["router_replay_differs"] > 0


@pytest.mark.slow
def test_two_processes_and_runs_that_resume(tmp_path: Path, long_answers: tuple[str, ...]) -> None:
    """Killed between two steps of a rollout that is one rollout old: the same numbers, and those of one process."""
    words = (*long_answers, REPLAY, "data.passes=2", "steps=8", "checkpoint.every=1", "parallel.data=2")
    ahead = ("data.ahead=1", "data.old_log_p=trainer", "data.truncation=2")
    with gangs.started(tmp_path) as start:

        def train(name: str, processes: int, *settings: str) -> dict[int, Any]:
            flags = [f"--{word}" for word in (*words, *ahead, f"run_dir={tmp_path / name}", *settings)]
            front = gangs.launcher("--max-restarts=5", "--backoff=0.1") if processes > 1 else ()
            command = (*gangs.TRAIN, "--config=grpo.py:debug", f"--devices=cpu:{2 // processes}", *flags)
            program = start("env", f"--chdir={tmp_path}", *front, *command, name=name)
            assert program.wait(500) == 0, program.text
            return timeless_steps(tmp_path / name)

        two = train("two", 2)
        inject = "resilience.inject=kill:step=3:process=0:attempt=1,kill:step=6:process=1:attempt=2"
        assert train("killed", 2, inject) == two
        one = train("one", 1)
    assert (
        one[5]["router_replay_differs"] == two[5]["router_replay_differs"] > 0 and one[1]["reward"] == two[1]["reward"]
    )
    for name in ("loss", "grad_norm"):
        columns = ([lines[step][name] for step in range(1, 5)] for lines in (one, two))
        np.testing.assert_allclose(*columns, rtol=1e-5, atol=1e-7, err_msg=name)
