"""Reward models: trained on pairs of answers, and the reward of a run beside functions."""

import json
from pathlib import Path
from typing import Any

import gangs
import jax
import numpy as np
import pytest
from run_folder import steps
from user_errors import user_error

from megajax.config import load
from megajax.data.chat.config import PreferencesConfig
from megajax.data.rows.splits import Rows
from megajax.inference.assembly import engine_layout
from megajax.inference.loaded_model import model_on_mesh
from megajax.job.notebook import set_up
from megajax.tokenizers.config import ByteTokenizerConfig
from megajax.tuning.rollout_rows import SampledAnswer
from megajax.tuning.rollouts import RewardModel

DEBUG, GRPO = "dpo.py:reward_llama3_8b_debug", "grpo.py:debug"
PAIRS = (
    *("data.type=PreferencesConfig", "data.answers=choices", "data.end_token=template", "data.split=100,0,0"),
    *("evaluation.batches=0", "model.sequence_length=8", "steps=200", "logging.report=false"),
)
SIZES = ("data.prompts=8", "data.answers=16", "batch.global_size=32", "batch.micro_size=8", "logging.report=false")


def write_pairs(file: Path) -> None:
    """The sum of two digits is preferred to another digit, and a digit to another character."""
    with file.open("w") as lines:
        for a, b in np.ndindex(5, 5):
            others = [str(digit) for digit in range(10) if digit != a + b] + list("aZ .!qQ~")
            for other in others:
                lines.write(json.dumps({"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": other}) + "\n")


def test_choices_are_two_sequences_in_a_row(tmp_path: Path) -> None:
    """Each answer has the length of a row; a longer one is refused, and epochs have other orders."""
    file, tokenizer = tmp_path / "pairs.jsonl", ByteTokenizerConfig().build()
    lines = [{"prompt": "ab", "chosen": "c" * (1 + number % 3), "rejected": "d"} for number in range(20)]
    file.write_text("\n".join(map(json.dumps, lines)))

    def built(length: int) -> Any:
        cfg = load(DEBUG, f"model.sequence_length={length}", devices=1).model
        data = PreferencesConfig(
            paths=(str(file),), answers="choices", split="100,0,0", cache_dir=str(tmp_path), end_token="append"
        )
        return data.build(tokenizer=tokenizer, schema=cfg.schema(), rows=Rows(40), seed=0).train

    rows, end = built(6), tokenizer.eod
    numbers = [rows.pack(number) for number in range(40)]
    assert sorted(numbers) == sorted([*range(20), *range(20)]) and numbers[:20] != numbers[20:] != [*range(20)]
    row = rows[numbers.index(1)]
    assert row["tokens"].tolist() == [[97, 98, 99, 99, end, end], [97, 98, 100, end, end, end]]
    assert row["segment_ids"].tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]] and row["labels"] == 0
    with user_error():
        built(5)


@pytest.mark.slow
def test_scores_are_those_of_the_model_and_the_loss_is_bradley_terry() -> None:
    """One program scores any number of answers, on tensor 2 x data 2."""
    words = ("model.sequence_length=32", "batch.global_size=2", "batch.micro_size=1")
    run = set_up(load(DEBUG, *words, devices=1), devices=jax.devices()[:1])
    draw = np.random.default_rng(0)
    answers = [
        SampledAnswer((1, 2, *draw.integers(0, 200, n % 3)), (*draw.integers(0, 200, 1 + n % 4),), (), "", cut=False)
        for n in range(37)
    ]
    split: Any = run.parts.splits.train
    tokens, segments = (np.zeros((2, 2, 32), np.int32) for _ in range(2))
    for number in range(4):
        text = (*answers[number].prompt, *answers[number].tokens)
        tokens.reshape(4, 32)[number, : len(text)], segments.reshape(4, 32)[number, : len(text)] = text, 1
    expected = np.asarray(run.model(tokens, segment_ids=segments))
    assert split.document_lengths(0).tolist() == [32, 32]
    cfg = run.cfg
    for count in (1, 4):
        layout = ("parallel.tensor=2", "parallel.data=2") if count == 4 else ()
        other = set_up(load(DEBUG, *words, *layout, devices=count), devices=jax.devices()[:count])
        parallel, mesh = engine_layout(other.mesh)
        weights = {path: np.asarray(x) for path, x in run.state.inputs.items()}
        placed = {path: jax.device_put(weights[path], x.sharding) for path, x in other.state.inputs.items()}
        loaded = model_on_mesh(cfg.model, placed, parallel, mesh, cfg.precision, {})
        model = RewardModel(loaded, slot=8, answers=20)
        scores = model(answers)
        np.testing.assert_allclose(scores[:4], expected.reshape(-1), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(model(answers[30:]), scores[30:], rtol=1e-6, atol=1e-6)
    chosen, rejected = expected.T
    rows = [{"tokens": tokens[n], "segment_ids": segments[n], "labels": np.zeros((), np.int32)} for n in range(2)]
    with run.parts.loader(rows, 0) as loader:
        loss, weight = run.program.eval_step(run.state.inputs, next(loader)[0])["loss"]
    assert float(loss / weight) == pytest.approx(np.log1p(np.exp(rejected - chosen)).mean(), rel=1e-5)
    with user_error("data.reward_model"):
        RewardModel(loaded, slot=33, answers=1)


@pytest.mark.slow
def test_a_model_learns_what_a_reward_model_prefers(tmp_path: Path) -> None:
    """Trained on pairs, its score is the only reward that counts; two processes have it too."""
    write_pairs(tmp_path / "pairs.jsonl")
    with gangs.started(tmp_path) as start:

        def train(name: str, config: str, *settings: str, processes: int = 1, code: int = 0) -> str:
            words = [f"--{word}" for word in (f"run_dir={tmp_path / name}", *settings)]
            front = gangs.launcher() if processes > 1 else ()
            program = start(*front, *gangs.TRAIN, f"--config={config}", *words, name=name)
            assert program.wait(400) == code, program.text
            return program.text

        one, model = ("devices=cpu:1",), f"data.reward_model={tmp_path / 'reward'}"
        train("reward", DEBUG, *PAIRS, f"data.paths={tmp_path / 'pairs.jsonl'}", *one)
        trained = steps(tmp_path / "reward")
        assert trained[1]["loss"] == pytest.approx(np.log(2), abs=0.05)
        assert np.mean([trained[step]["accuracy"] for step in range(150, 201)]) > 0.9
        text = train("tuned", GRPO, *SIZES, *one, model, "data.reward_weights=0,0", "steps=40")
        assert f"reward model: {tmp_path / 'reward'}" in text
        lines = [line for line in steps(tmp_path / "tuned").values() if "reward" in line]
        assert all(line["reward"] == line["reward_model"] for line in lines)
        before, after = (np.mean([line["reward_model"] for line in part]) for part in (lines[:5], lines[-5:]))
        assert after > before + 1
        short = (*SIZES, model, "data.reward_weights=0,1", "steps=2", "parallel.data=2")
        train("two_devices", GRPO, *short, "devices=cpu:2")
        train("two_processes", GRPO, *short, *one, processes=2)
        for name in ("reward", "reward_model", "loss", "grad_norm"):
            columns = (
                [line[name] for line in steps(tmp_path / run).values()] for run in ("two_devices", "two_processes")
            )
            np.testing.assert_allclose(*columns, rtol=1e-5, atol=1e-7, err_msg=name)
        message = train("refused", GRPO, *SIZES, *one, f"data.reward_model={tmp_path / 'tuned'}", code=2)
        assert "has no score for each answer, but" in message
        missing = train("foreign", GRPO, *SIZES, *one, "data.reward_model=hf:models/a", code=2)
        assert "there is no folder models/a" in missing
