"""Rows of preferences: pairs and judged answers, as texts and messages, and invalid lines."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_jobs import model
from user_errors import user_error

from megajax.config.compose import problems_of
from megajax.data.chat.config import PreferencesConfig
from megajax.data.chat.preferences import Judged, mismatched, nearest
from megajax.data.rows.splits import Rows
from megajax.models.answers.config import DPOConfig, KTOConfig, ORPOConfig, with_objective
from megajax.models.decoder.config import text_schema
from megajax.tokenizers.config import ByteTokenizerConfig
from tests.data.text_jobs import lines as write
from tests.data.text_jobs import shown as text

TEXT = {"prompt": "q: ", "chosen": "yes", "rejected": "no"}
USER = {"role": "user", "content": "q"}
YES, NO = ({"role": "assistant", "content": text} for text in ("yes", "no"))


def splits(path: Path, lines: list[Any], length: int = 64, objective: Any = None, **options: Any) -> Any:
    write(path, lines)
    options = {"paths": (str(path),), "split": "1", "cache_dir": f"{path}-cache"} | options
    config = PreferencesConfig(**options)
    assert not problems_of(config)
    schema = text_schema(length, 257) | (objective or ORPOConfig()).leaves(length)
    return config.build(tokenizer=ByteTokenizerConfig().build(), schema=schema, rows=Rows(None), seed=3)


def answers(row: dict[str, np.ndarray], leaf: str = "pairs") -> dict[int, str]:
    """Number of an answer -> its text."""
    numbers = sorted(set(row[leaf].tolist()) - {0})
    return {number: text(row["labels"][row[leaf] == number]) for number in numbers}


def test_pairs_of_a_row(tmp_path: Path) -> None:
    """The second pair of a row has the numbers 3 and 4; the end token belongs to the answer."""
    row = splits(tmp_path / "p", [TEXT, TEXT | {"prompt": "second "}]).train[0]
    assert text(row["tokens"]).startswith("q: yes|q: no|second yes|second no|")
    assert answers(row) == {1: "yes|", 2: "no|", 3: "yes|", 4: "no|"}
    assert (row["loss_mask"] == (row["pairs"] > 0)).all()
    first = len("q: yes|")
    assert row["positions"][: 2 * first - 1].tolist() == [*range(first), *range(first - 1)]
    assert row["segment_ids"][[0, first, 2 * first - 1]].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        {"prompt": [USER], "chosen": "yes", "rejected": "no"},
        {"chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": "q", "chosen": [USER, YES], "rejected": [USER, NO]},
    ],
)
def test_messages(tmp_path: Path, line: dict[str, Any]) -> None:
    row = splits(tmp_path / "p", [line]).train[0]
    assert text(row["tokens"]).startswith("user: q\nassistant: yes\n|user: q\nassistant: no\n|")
    assert answers(row) == {1: "yes\n|", 2: "no\n|"}


def test_earlier_answers_of_a_conversation_belong_to_the_prompt(tmp_path: Path) -> None:
    row = splits(tmp_path / "p", [{"prompt": [USER, NO, USER], "chosen": [YES], "rejected": [NO]}], 128).train[0]
    assert answers(row) == {1: "yes\n|", 2: "no\n|"}


def test_judged_answers(tmp_path: Path) -> None:
    """A good answer is the first of a group of three, a bad one the second, the answer of the line before the third."""
    lines = [
        {"prompt": "a ", "completion": "good", "label": True},
        {"prompt": "b ", "completion": "bad", "label": False},
        TEXT,
    ]
    row = splits(tmp_path / "p", lines, 128, answers="judged").train[0]
    numbers = {1: "good|", 5: "bad|", 6: "good|", 7: "yes|", 9: "bad|", 11: "no|", 12: "bad|"}
    assert answers(row, "judged") == numbers


def judged(prompt: str, completion: str, label: bool = True) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "label": label}


def other_answers(rows: Any) -> list[str]:
    """Of each judged answer in order, the answer to another prompt; "" without one."""
    conversations = rows.conversations
    spans = np.stack([conversations.starts[:-1], conversations.starts[1:]], 1)[2::3].tolist()
    return [text(conversations.tokens[a:b][conversations.weights[a:b] > 0]) for a, b in spans]


def test_the_other_answer_is_of_another_prompt_and_differs(tmp_path: Path) -> None:
    """The nearest earlier line with both; consecutive lines of one prompt, and equal answers, are passed over."""
    lines = [judged("p", "a"), judged("p", "b"), judged("q", "b"), judged("q", "a"), judged("r", "a"), judged("p", "b")]
    train = splits(tmp_path / "p", lines, 128, answers="judged").train
    assert other_answers(train) == ["", "", "a|", "b|", "b|", "a|"]
    assert train.note == ", 2 answers without another one for the KL baseline"
    rows = splits(tmp_path / "p", [judged("p", "a"), judged("p", "b")] * 4, 128, answers="judged").train
    assert other_answers(rows) == [""] * 8 and "8 answers without" in rows.note
    messages = [judged("p", "a"), {"prompt": [USER], "completion": [YES], "label": True}, judged("q", "b")]
    rows = splits(tmp_path / "p", messages, 128, answers="judged").train
    assert other_answers(rows) == ["", "", "a|"], "a text and messages do not mix"
    weighed = [{"prompt": [USER | {"weight": w}], "completion": [YES | {"weight": w}], "label": True} for w in (1, 0.5)]
    assert other_answers(splits(tmp_path / "p", weighed, 128, answers="judged").train) == ["", ""]
    trimmed = "{% for m in messages %}{{ m.content | trim }};{% endfor %}"
    pairs = (("a", "x"), ("b", "x "), ("c", "y "))
    same = [{"prompt": [USER | {"content": p}], "completion": answer, "label": True} for p, answer in pairs]
    assert other_answers(splits(tmp_path / "p", same, 128, answers="judged", template=trimmed).train) == ["", "", "x;|"]


def test_few_earlier_answers_decide_like_all_of_them() -> None:
    draw = np.random.default_rng(0)
    for choices in (2, 3, 5):
        kept, every = list[Judged](), list[Judged]()
        for _ in range(300):
            prompt, answer = (str(n) for n in draw.integers(0, choices, 2))
            forms: list[Any] = (
                [prompt, answer] if draw.random() < 0.7 else [[{"content": prompt}], [{"content": answer}]]
            )
            item = Judged(*forms, True)
            of_kept, of_every = (next((e for e in earlier if mismatched(item, e)), None) for earlier in (kept, every))
            assert of_kept == of_every
            kept, every = nearest((item, *kept)), [item, *every]
            assert len(kept) <= 12


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"prompt": "q", "chosen": "a"}, "no rejected answer"),
        (TEXT | {"rejected": ""}, "no rejected answer"),
        (TEXT | {"rejected": "yes"}, "equal answers"),
        ({"chosen": [USER, YES], "rejected": [USER, YES]}, "equal answers"),
        ({"prompt": [USER], "chosen": [YES], "rejected": [YES | {"name": "b"}]}, "equal answers"),
        ({"prompt": "q", "rejected": "a"}, "no answer"),
        ({"chosen": [YES], "rejected": [NO]}, "not a conversation"),
        ({"chosen": [USER], "rejected": [USER, NO]}, "no answer"),
        ({"chosen": [USER, YES], "rejected": [USER, YES, NO]}, "no answer"),
        ({"chosen": "a", "rejected": "b"}, "not a conversation"),
        (TEXT | {"prompt": ""}, "not a conversation"),
        ({"prompt": [USER], "chosen": [{"role": "judge", "content": "a"}], "rejected": [NO]}, "unknown role"),
        ("[]", "not a conversation"),
        (TEXT | {"prompt": "q" * 60}, "longer than a row"),
    ],
)
def test_invalid_lines_are_refused_or_counted(tmp_path: Path, line: Any, reason: str) -> None:
    with user_error():
        splits(tmp_path / "p", [TEXT, line])
    rows = splits(tmp_path / "p", [TEXT, line], on_error="skip").train
    assert rows.skipped == {reason: 1} and len(rows) == 1


def test_labels_are_true_or_false(tmp_path: Path) -> None:
    with user_error():
        splits(tmp_path / "p", [{"prompt": "a", "completion": "b", "label": 1}], answers="judged")


def test_data_and_objective_must_fit(tmp_path: Path) -> None:
    """A loss of judged answers does not run on pairs."""
    wanted = with_objective(model(), KTOConfig()).schema()
    assert set(wanted) - set(PreferencesConfig().leaves()) == {"judged"}
    assert set(wanted) <= set(PreferencesConfig(answers="judged").leaves())
    assert set(with_objective(model(), DPOConfig()).schema()) <= set(PreferencesConfig().leaves())


@pytest.mark.parametrize(("leaf", "objective", "size"), [("pairs", DPOConfig(), 64), ("judged", KTOConfig(), 128)])
def test_rows_of_a_reference_model(tmp_path: Path, leaf: str, objective: Any, size: int) -> None:
    """Scores of `whole` come to the labels of the rows, in whatever order these are."""
    lines = [TEXT | {"prompt": f"{'q' * number}: "} for number in range(1, 9)]
    train = splits(tmp_path / "p", lines, size, objective, answers=leaf).train
    with pytest.raises(RuntimeError, match="before the reference model"):
        train[0]
    whole = train.whole()
    every = [whole[row] for row in range(len(whole))]
    # The score of a label is its token and its position.
    scores = np.stack([row["labels"] + row["positions"] / 128 for row in every]).astype(np.float32)
    train.reference = train.unpacked(scores)
    for number in range(len(train)):
        row = train[number]
        expected = np.where(row[leaf] > 0, row["labels"] + row["positions"] / 128, 0)
        np.testing.assert_array_equal(row["reference"], expected.astype(np.float32))
    tokens = 8 * len("yes|no|") if leaf == "pairs" else (8 + 7) * len("yes|no|")
    assert sum((row[leaf] > 0).sum() for row in every) == tokens
