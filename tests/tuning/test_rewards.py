"""Reward functions run in processes of their own, and whatever they do is a reward."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megajax.config.errors import UserError
from megajax.tuning.rewards import RewardWorkers, Task

FUNCTIONS = """
import os, time

def judge(prompt, answer, row):
    print("this is no result")
    if answer == "wait":
        time.sleep(60)
    if answer == "end":
        os._exit(3)
    return {"right": 1.0, "nan": float("nan"), "text": "much", "cut": None}.get(answer, len(prompt) / row["length"])

def other(prompt, answer, row):
    return -1
"""


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardWorkers]:
    file = tmp_path_factory.mktemp("rewards") / "functions.py"
    file.write_text(FUNCTIONS)
    workers = RewardWorkers([f"{file}:judge", f"{file}:other"], workers=2, seconds=1.0)
    yield workers
    workers.close()


def test_a_function_that_fails_costs_its_reward_alone(workers: RewardWorkers) -> None:
    row, answers = {"prompt": "abc", "length": 6}, ("right", "wait", "half", "nan", "end", "text", "cut", "right")
    tasks = [*(Task(0, answer, row) for answer in answers), Task(1, "right", row)]
    values, failures = workers(tasks)
    assert values == [1, 0, 0.5, 0, 0, 0, 0, 1, -1]
    reasons = {1: "took too long", 3: "returned no finite number", 4: "ended its process"}
    assert {failure.task: failure.reason for failure in failures} == reasons | dict.fromkeys((5, 6), "raised an error")
    assert "exit code 3" in failures[2].detail and "could not convert string" in failures[3].detail
    assert workers(tasks[:1]) == ([1.0], [])


def test_functions_that_cannot_be_loaded_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    for reference, what in (("broken.py:judge", "No module named 'nothing_of_this_name'"), ("none.py:f", "none.py")):
        with pytest.raises(UserError, match=rf"data.rewards: .*{reference}: cannot be loaded: .*{what}"):
            RewardWorkers([f"{tmp_path}/{reference}"], workers=1, seconds=1.0)
