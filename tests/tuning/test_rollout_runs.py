"""Runs of GRPO: they learn, resume where they were killed, and are alike on layouts."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from run_folder import timeless_steps
from user_errors import user_error

from megajax.config import load
from megajax.config.errors import UserError
from megajax.job import job
from megajax.job.notebook import set_up
from megajax.training.reference import UNRECORDED
from megajax.tuning.comparison import REMEDY

SIZES = ("data.prompts=8", "data.answers=8", "data.passes=2", "batch.global_size=8", "batch.micro_size=2")
SETTINGS = (*SIZES, "logging.report=false")
"""Rollouts of four steps."""
REWARDS = '''
import os, signal

def reward(prompt, answer, row):
    """Kills the run within its second rollout, if the file `kill` is there."""
    if os.path.exists("kill"):
        with open("calls", "a") as calls:
            calls.write("x")
        if os.path.getsize("calls") > 100:
            os.unlink("kill")
            with open(f"/proc/{os.getppid()}/stat") as guard:  # the run started it
                os.kill(int(guard.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
    return float("0" <= answer <= "9") - len(answer.encode()) / 100
'''


@cache
def steps(*settings: str, devices: int = 1) -> list[dict[str, Any]]:
    """The numbers of each step of a run in this process."""
    cfg = load("grpo.py:debug", *SETTINGS, *settings, devices=devices)
    run = set_up(cfg, devices=jax.devices()[:devices])
    try:
        return [info._asdict() | info.metrics for info in run.steps()]
    finally:
        run.close()


def train(folder: Path, run: str, *settings: str, program: tuple[str, ...] = ("-m", "megajax.train")) -> int:
    """`megajax.train` in a process -> its exit code, negative for a signal."""
    (folder / "rewards.py").write_text(REWARDS)
    words = (*SETTINGS, "data.rewards=rewards.py:reward", "data.reward_weights=1")
    command = [sys.executable, *program, "--config=grpo.py:debug", "--devices=cpu:1", f"--run_dir={run}"]
    root = str(Path(__file__).parents[2])
    flags = [f"--{word}" for word in (*words, "steps=8", "checkpoint.every=1", *settings)]
    return subprocess.run(
        [*command, *flags], cwd=folder, env={**os.environ, "PYTHONPATH": root}, check=False
    ).returncode


def test_the_last_box_has_the_reward_and_the_lengths_of_the_last_rollout(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The last step trains on answers of an earlier one."""
    cfg: Any = load(
        "grpo.py:debug", *SETTINGS, "steps=2", f"run_dir={tmp_path}", "logging.plot=false", "batch.micro_size=1"
    )
    assert job.train(cfg) == 0
    box = capfd.readouterr().out.partition("\ndone\n")[2]
    lines = {" ".join(name): value for *name, value in map(str.split, filter(str.strip, box.splitlines()))}
    first, second = timeless_steps(tmp_path).values()
    assert "reward" not in second and "train loss" in lines
    for name in ("reward", "answer tokens", "answers cut"):
        assert float(lines[name]) == pytest.approx(first[name.replace(" ", "_")], rel=1e-3)


@pytest.mark.slow
def test_a_killed_run_with_a_rollout_ahead_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Answers of weights that are gone are in the checkpoint; killed within a rollout, and between two.

    test_rollouts_in_processes.py has runs without a rollout ahead, of one process as well.
    """
    words = ("data.ahead=1", "data.old_log_p=trainer", "data.truncation=2")
    assert train(tmp_path, "whole", *words, "steps=12") == 0
    (tmp_path / "kill").touch()
    for step in (6, 6, 9):  # at first within the second rollout's rewards
        assert train(tmp_path, "killed", *words, "steps=12", f"resilience.inject=kill:step={step}") == -9
    assert train(tmp_path, "killed", *words, "steps=12") == 0
    expected, actual = timeless_steps(tmp_path / "whole"), timeless_steps(tmp_path / "killed")
    assert actual == expected and len(expected) == 12
    assert [step for step, line in expected.items() if "reward" in line] == [1, 5, 9]
    # The first two rollouts are of the first weights; the second one is then used by later ones.
    assert expected[1]["mismatch_most"] < 1e-5 < expected[5]["mismatch_most"]


def damages(content: bytes) -> Iterator[bytes]:
    """The file cut off, empty, and with changed bytes in each part of it."""
    yield from (b"", content[:10], content[: len(content) // 2], content[:-1], b"PK" + bytes(200), b"text")
    for place in (0, 8, 26, 40, *np.linspace(100, len(content) - 1, 20).astype(int).tolist()):
        yield content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :]


def test_the_weights_of_the_reference_are_read_whole_or_not_at_all(tmp_path: Path) -> None:
    """Another layout reads them too. A damaged file, another run's, and none are one message each."""

    def keep(*settings: str, devices: int = 1) -> Any:
        cfg = load("grpo.py:debug", *SETTINGS, "model.objective.kl_weight=0.1", *settings, devices=devices)
        run = set_up(cfg, devices=jax.devices()[:devices])
        run.close()
        return partial(run.batches.keep_reference, tmp_path), run.batches._reference

    first, reference = keep()
    kept = first(None)
    path, expected = tmp_path / "reference_weights.npz", reference._weights
    assert kept.files == (path,) and [*tmp_path.iterdir()] == [path]
    content, refused = path.read_bytes(), 0
    for damaged in damages(content):
        path.write_bytes(damaged)
        try:
            first(kept.weights)
        except UserError as error:
            assert str(error).startswith(f"{path}: ") and str(error).endswith(REMEDY)
            refused += 1
        else:  # a byte that says nothing, such as a date
            assert all(np.array_equal(x, expected[name]) for name, x in reference._weights.items())
    assert refused > 20
    path.write_bytes(content)
    staged, on_stages = keep("parallel.pipeline=3", devices=3)
    assert staged(kept.weights).weights == kept.weights
    layered = [name for name, spec in on_stages._declared.items() if spec.layers]
    assert any(on_stages._weights[name].shape != expected[name].shape for name in layered)
    other, _ = keep("seed=7")
    other(None)
    with user_error():
        first(kept.weights)
    with user_error():
        first(UNRECORDED)
    path.unlink()
    with user_error():
        first(kept.weights)


DYING = """
import os, signal, sys
import numpy as np
from megajax.train import main

def dying(file, **arrays):
    file.write(b"half a file")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

np.savez = dying
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_stores_its_reference_starts_again(tmp_path: Path) -> None:
    """The half-written file never has its name, and all numbers are those of a run that was not killed."""
    words = ("model.objective.kl_weight=0.1", "steps=5")
    assert train(tmp_path, "whole", *words) == 0
    assert train(tmp_path, "killed", *words, program=("-c", DYING)) == -9
    (left,) = (tmp_path / "killed").glob("reference_weights.npz*")
    assert left.suffix == ".tmp" and left.read_bytes() == b"half a file"
    assert train(tmp_path, "killed", *words) == 0
    assert [path.name for path in (tmp_path / "killed").glob("reference_weights*")] == ["reference_weights.npz"]
    assert timeless_steps(tmp_path / "killed") == timeless_steps(tmp_path / "whole")


@pytest.mark.slow
def test_temperature_and_filters() -> None:
    """The trainer has the engine's log-probabilities at a temperature; a filter makes those of kept tokens larger."""
    tempered = steps("model.objective.temperature=0.7", "steps=1", "data.passes=1")[0]
    assert tempered["mismatch_most"] < 1e-5 and abs(tempered["policy_kl"]) < 1e-9
    sequence = steps("model.objective.temperature=0.7", "model.objective.ratio=sequence", "steps=1", "data.passes=1")[0]
    assert abs(sequence["policy_kl"]) < 1e-9
    filtered = steps("data.top_p=0.5", "steps=1", "data.passes=1")[0]
    assert np.log(1 / 0.6) < filtered["mismatch_mean"] < np.log(2) + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.tensor=2", "parallel.data=2", "parallel.data_sharding=fsdp"),
        ("parallel.pipeline=3", "model.objective.kl_weight=0.1"),
        ("parallel.context=2", "parallel.pipeline=2", "data.parallel.tensor=2", "model.objective.ratio=sequence"),
    ],
)
def test_layouts_train_alike(layout: tuple[str, ...]) -> None:
    """The first rollout has the same answers, and its steps the same losses; engines of pipelines have their own layout
    and the layers in order, where stages have them in another one or are padded."""
    same = [word for word in layout if word.startswith("model")]
    expected = steps(*same, "steps=4")
    actual = steps(*layout, "steps=4", devices=3 if "parallel.pipeline=3" in layout else 4)
    assert actual[0]["reward"] == expected[0]["reward"]
    for name in ("loss", "grad_norm", "clip_high"):
        columns = ([line[name] for line in lines] for lines in (actual, expected))
        np.testing.assert_allclose(*columns, rtol=1e-4, atol=1e-6, err_msg=name)
    assert 0 < actual[0]["mismatch_most"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("data.more_rollouts=2", "model.objective.average=tokens", "model.objective.entropy_weight=0.01"),
        ("data.old_log_p=trainer", "data.truncation=2", "model.objective.ratio=sequence", "data.mismatch_limit=1e-7"),
        ("model.objective.kl_weight=0.1", "model.objective.loss=cispo", "data.scale=none", "data.cut_answers=mask"),
    ],
)
def test_other_settings(words: tuple[str, ...], tmp_path: Path) -> None:
    lines = steps(*words, "steps=3", "batch.global_size=16", "model.sequence_length=24", f"run_dir={tmp_path}")
    assert np.isfinite([line["loss"] for line in lines]).all()
    if "data.more_rollouts=2" in words:
        assert all(0 <= line["groups_equal"] < 1 for line in lines if "reward" in line)
    if "data.truncation=2" in words:
        assert 0 < lines[0]["mismatch_masked"] < 1
    if "model.objective.kl_weight=0.1" in words:
        assert lines[0]["kl"] == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("data.prompt_tokens=30",),
        ("data.prompts=7",),
        ("data.rewards=nothing.py:f", "data.reward_weights=1"),
        ("data.reward_model=runs/reward",),
        ("data.parallel.tensor=3",),
        ("data.mismatch_limit=1e-12", "data.on_mismatch=stop"),
        ("data.inference.equal_to_training=true", "data.top_k=5", "model.sequence_length=8"),
    ],
)
def test_refusals(words: tuple[str, ...]) -> None:
    with user_error():
        steps(*words, "steps=1")
