"""Rows of rollouts: answers in their slots, prompts in their order, and what does not fit is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from user_errors import user_error

from megajax.config.compose import problems_of
from megajax.data.rows.config import LoaderConfig
from megajax.data.rows.splits import Rows
from megajax.inference.request import Output, TokenScore
from megajax.tokenizers.config import ByteTokenizerConfig
from megajax.tuning.config import DigitSumsConfig, RolloutsConfig
from megajax.tuning.rollout_rows import SampledAnswer, packed, rows_of, unpacked
from megajax.tuning.rollouts import seed_of


def output(*tokens: int, finish: Any = "stop") -> Output:
    return Output(0, "", tokens, tuple(TokenScore(token, -9.0, 1, (), -token / 8) for token in tokens), finish)


def test_answers_have_slots_in_rows() -> None:
    """Two slots of four tokens in a row of nine; the labels of an answer begin at the last token of its prompt.

    Old log-probabilities are those of the distribution that a token was drawn from.
    """
    answers = [
        SampledAnswer.of((1, 2), output(3, 4)),
        SampledAnswer.of((5,), output(6)),
        SampledAnswer.of((7,), output(8, finish="error")),
    ]
    answers[1] = answers[1]._replace(advantage=0.5)
    block = rows_of(answers, slot=4, length=9)
    assert block["tokens"].tolist() == [[1, 2, 3, 0, 5, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0, 0, 0, 0]]
    assert block["labels"].tolist() == [[2, 3, 4, 0, 6, 0, 0, 0, 0], [8, 0, 0, 0, 0, 0, 0, 0, 0]]
    assert block["answers"].tolist() == [[0, 1, 1, 0, 2, 0, 0, 0, 0], [0] * 9]
    assert block["loss_mask"].tolist() == (block["answers"] > 0).tolist()
    assert block["old_log_p"][0].tolist() == [0, -3 / 8, -4 / 8, 0, -6 / 8, 0, 0, 0, 0]
    assert block["advantage"][0].tolist() == [0, 0, 0, 0, 0.5, 0, 0, 0, 0]
    assert block["positions"][0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert block["segment_ids"][0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    texts = [[0, 0, 0, 1, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1]]
    assert block["padding"].tolist() == np.array(texts, bool).tolist(), "the last token of an answer is no input"
    for name, leaf in unpacked(packed(block)).items():
        np.testing.assert_array_equal(leaf, block[name])
        assert leaf.dtype == block[name].dtype


def test_experts_of_tokens_are_in_the_slots_of_their_answers() -> None:
    """Prompts included; the last token of an answer is no input, and has none."""
    experts = 1 + np.arange(24, dtype=np.int16).reshape(6, 2, 2)
    first = SampledAnswer.of((1, 2), output(3, 4)._replace(experts=experts))
    block = rows_of([first, SampledAnswer.of((5,), output(6))], slot=4, length=9, experts=(2, 2))
    assert block["experts"].dtype == np.int16 and not block["experts"][:, 3:].any()
    np.testing.assert_array_equal(block["experts"][0, :3], experts[:3])
    np.testing.assert_array_equal(unpacked(packed(block))["experts"], block["experts"])


def source(folder: Path, *lines: str, **changes: Any) -> Any:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(lines))
    cfg = replace(RolloutsConfig(paths=(str(file),), rewards=("f.py:f",), prompt_tokens=20), **changes)
    return cfg.build(tokenizer=ByteTokenizerConfig().build(), schema={}, rows=Rows(64), seed=3).train


def test_files_of_a_run(tmp_path: Path) -> None:
    """Prompts, functions and the reward model are compared on all processes, and where a run resumes."""
    for name in ("run/checkpoints/00000002/manifest.json", "run/checkpoints/00000010/manifest.json", "hf/config.json",
                 "hf/model.safetensors", "f.py"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def files(model: str) -> list[str]:
        made = source(tmp_path, '{"prompt": "a"}', rewards=(f"{tmp_path}/f.py:f", "os:getcwd"), reward_model=model)
        return [str(Path(file).relative_to(tmp_path)) for file in made.files()]

    before = ["prompts.jsonl", "f.py"]
    assert files(f"{tmp_path}/run") == [*before, "run/checkpoints/00000010/manifest.json"]
    assert files(f"{tmp_path}/run/checkpoints/00000002") == [*before, "run/checkpoints/00000002/manifest.json"]
    assert files(f"hf:{tmp_path}/hf") == [*before, "hf/config.json", "hf/model.safetensors"]


def test_prompts_of_files_are_read_in_another_order_in_each_epoch(tmp_path: Path) -> None:
    texts = [json.dumps({"prompt": f"{number}", "answer": number}) for number in range(9)]
    prompts = source(tmp_path, *texts, json.dumps({"prompt": [65, 66]}), "")
    epochs = [[prompts.line(number).tokens for number in range(first, first + 10)] for first in (0, 10)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    assert (65, 66) in epochs[0] and {line.row["answer"] for line in prompts.lines[:9]} == {*range(9)}
    assert prompts.line(3) == source(tmp_path, *texts, json.dumps({"prompt": [65, 66]})).line(3)
    assert len({seed_of(seed, number) for seed in (0, 1) for number in range(100)}) == 200


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '{"prompt": ""}',
        '{"prompt": ["a"]}',
        json.dumps({"prompt": "a" * 21}),
        "",
    ],
)
def test_bad_lines(tmp_path: Path, line: str) -> None:
    with user_error():
        source(tmp_path, line)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"rewards": (), "reward_weights": ()}, "rewards"),
        ({"answers": 1}, "answers"),
        ({"reward_weights": (1.0,)}, "reward_weights"),
        ({"loader": LoaderConfig(threads=2)}, "loader"),
        ({"max_tokens": 4, "soft_tokens": 5}, "soft_tokens"),
        ({"truncation": 2.0}, "truncation"),
        ({"old_log_p": "trainer", "compare": False}, "old_log_p"),
        ({"mismatch_limit": 0.0}, "mismatch_limit"),
        ({"paths": ("a.jsonl",)}, "paths"),
    ],
)
def test_problems(changes: dict[str, Any], setting: str) -> None:
    assert [problem.setting for problem in problems_of(replace(DigitSumsConfig(), **changes))] == [setting]
