"""Rollouts of two processes: the answers, rewards and updates of one process, whoever is killed or fails."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gangs
import numpy as np
import pytest
from peer_threads import together
from run_folder import events, lines, timeless_steps
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.tuning.config import DigitSumsConfig
from megajax.tuning.judging import Judge
from megajax.tuning.prompts import PromptLine
from megajax.tuning.rollout_rows import SampledAnswer

REWARDS = '''
import os, signal, time

def reward(prompt, answer, row):
    """Fails for some answers. Kills process 1 of the run within its second rollout, if the file `kill` is there."""
    if os.path.exists("kill") and os.environ.get("MEGAJAX_PROCESS_ID") == "1":
        with open("calls", "a") as calls:
            calls.write("x")
        if os.path.getsize("calls") > 40:
            os.unlink("kill")
            with open(f"/proc/{os.getppid()}/stat") as guard:  # the run started it
                os.kill(int(guard.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
    first = sum(answer.encode()[:1])
    if first % 32 == 5:
        os._exit(3)
    if first % 64 == 6:
        time.sleep(60)
    return float("0" <= answer <= "9") - len(answer.encode()) / 100
'''
SAMPLING = """
import os, signal, sys
from megajax.inference.engine import Engine
from megajax.train import main

refit, step, steps = Engine.refit, Engine.step, []

def second(engine, *arguments, **settings):
    steps.append(0)
    return refit(engine, *arguments, **settings)

def dying(engine):
    if steps and os.path.exists("kill_sampling") and os.environ.get("MEGAJAX_PROCESS_ID", "0") == "0":
        if 0 < engine.requests < 8:
            os.unlink("kill_sampling")
            os.kill(os.getpid(), signal.SIGKILL)
    return step(engine)

Engine.refit, Engine.step = second, dying
sys.exit(main(sys.argv[1:]))
"""
"""A run whose process 0 is killed while the answers of its second rollout are sampled, if that file is there."""
SIZES = ("data.prompts=8", "data.answers=8", "data.passes=2", "batch.global_size=8", "batch.micro_size=2")
SETTINGS = ("logging.report=false", "data.rewards=rewards.py:reward", "data.reward_weights=1", "data.reward_seconds=4")
LAYOUT = ("parallel.data=2", "parallel.data_sharding=fsdp", "model.objective.kl_weight=0.1", "steps=8")


@contextmanager
def trained(folder: Path) -> Iterator[Any]:
    """trained(name, processes, *settings) -> the finished program of a run on two devices."""
    (folder / "rewards.py").write_text(REWARDS)
    with gangs.started(folder) as start:

        def train(name: str, processes: int, *settings: str, main: tuple[str, ...] = gangs.TRAIN) -> gangs.Started:
            words = [f"--{word}" for word in (*SIZES, *SETTINGS, *LAYOUT, f"run_dir={folder / name}", *settings)]
            front = gangs.launcher("--max-restarts=5", "--backoff=0.1", processes=processes)
            command = (*main, "--config=grpo.py:debug", f"--devices=cpu:{2 // processes}", *words)
            program = start("env", f"--chdir={folder}", *front, *command, name=name)
            assert program.wait(500) == 0, program.text
            return program

        yield train


@pytest.mark.slow
def test_two_processes_have_the_numbers_of_one(tmp_path: Path) -> None:
    """Answers, failed rewards and losses; then killed in a rollout and in an update, all numbers bit for bit."""
    with trained(tmp_path) as train:
        train("one", 1)
        assert "sampled" not in train("two", 2).text
        one, two = timeless_steps(tmp_path / "one"), timeless_steps(tmp_path / "two")
        for name in ("reward", "rewards_failed", "answer_tokens", "groups_equal"):
            assert one[1][name] == two[1][name], name
        assert one[1]["rewards_failed"] > 1 and [step for step in two if "reward" in two[step]] == [1, 5]
        for name in ("loss", "kl", "grad_norm"):
            columns = ([run[step][name] for step in range(1, 5)] for run in (two, one))
            np.testing.assert_allclose(*columns, rtol=1e-5, atol=1e-7, err_msg=name)
        failed = [{line["reason"] for line in lines(tmp_path / name, "reward_failures")} for name in ("one", "two")]
        assert failed[0] == failed[1] == {"ended its process", "took too long"}
        (tmp_path / "kill").touch()
        inject = "resilience.inject=kill:step=8:process=1:attempt=2"
        train("killed", 2, "checkpoint.every=1", inject)
        assert timeless_steps(tmp_path / "killed") == two
        assert [event["process"] for event in events(tmp_path / "killed", "restart")] == [1, 1]


@pytest.mark.slow
def test_a_run_whose_first_process_is_killed_has_the_same_numbers(tmp_path: Path) -> None:
    """It is killed while answers are sampled, some of which are complete, and between two steps of that rollout."""
    few = ("data.inference.rows=16", "checkpoint.every=1", "steps=7")
    with trained(tmp_path) as train:
        train("whole", 2, *few)
        (tmp_path / "kill_sampling").touch()
        inject = "resilience.inject=kill:step=7:process=0:attempt=2"
        train("killed", 2, *few, inject, main=(sys.executable, "-c", SAMPLING))
        assert not (tmp_path / "kill_sampling").exists()
        assert timeless_steps(tmp_path / "killed") == timeless_steps(tmp_path / "whole")
        assert [event["process"] for event in events(tmp_path / "killed", "restart")] == [0, 0]


def test_processes_share_rewards_and_failures(tmp_path: Path) -> None:
    """Answers are shared out; a failure in one process is 0 for all, and process 0 writes it down."""
    (tmp_path / "rewards.py").write_text("def reward(prompt, answer, row): return float(answer)")
    (tmp_path / "broken.py").write_text("nothing")
    settings: Any = {"reward_weights": (1.0,), "answers": 3, "workers": 1}
    cfg = DigitSumsConfig(rewards=(f"{tmp_path}/rewards.py:reward",), **settings)
    prompts = [PromptLine({"prompt": "1+1="}, (1,)), PromptLine({"prompt": "1+2="}, (2,))]

    def answers(*texts: str) -> list[SampledAnswer]:
        return [SampledAnswer((1,), (ord(text),), (-1.0,), text, cut=False) for text in texts]

    def judged(peers: Any) -> Any:
        with pytest.raises(UserError, match=r"^process [01]: data.rewards: .*/broken.py:reward: cannot be loaded"):
            Judge(DigitSumsConfig(rewards=(f"{tmp_path}/broken.py:reward",), **settings), tmp_path, peers)
        judge = Judge(cfg, tmp_path, peers)
        groups = [answers("1", "x", "3"), answers("4", "4", "4")]
        same = judge(prompts, groups)
        groups[1][0] = groups[1][0]._replace(log_p=(-2.0 - peers.index,))
        with user_error():
            judge(prompts, groups)
        judge.close()
        return same

    for groups, failures in together(2, judged):
        assert [group.rewards.tolist() for group in groups] == [[[1], [0], [3]], [[4], [4], [4]]]
        assert [group.equal for group in groups] == [False, True]
        assert failures["rewards: the function raised an error"] == 1
    (failure,) = lines(tmp_path, "reward_failures")
    assert failure["answer"] == "x" and "could not convert" in failure["detail"]
