"""Rows of conversations: loss, packing, and invalid lines."""

import json
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from user_errors import user_error

from megajax.config.compose import problems_of
from megajax.config.errors import UserError
from megajax.data.chat.config import ChatConfig
from megajax.data.rows.balancing import CAUSAL, document_lengths
from megajax.data.rows.packing import DOCUMENTS, Packing, balanced_fit, best_fit, padding_lengths
from megajax.data.rows.splits import Rows
from megajax.kernels.attention import cudnn
from megajax.models.decoder.config import text_schema
from megajax.tokenizers.config import ByteTokenizerConfig
from tests.data.text_jobs import lines as write
from tests.data.text_jobs import shown as text


def chat(question: str, answer: str, system: str | None = None) -> dict[str, Any]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*first, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def splits(path: Path, length: int = 40, rows: Rows | None = None, tokenizer: Any = None, **options: Any) -> Any:
    options = {"paths": (str(path),), "split": "1", "cache_dir": f"{path}-cache"} | options
    config = ChatConfig(**options)
    assert not problems_of(config)
    tokenizer = tokenizer or ByteTokenizerConfig().build()
    return config.build(tokenizer=tokenizer, schema=text_schema(length, 257), rows=rows or Rows(None), seed=3)


def test_a_row_of_two_conversations(tmp_path: Path) -> None:
    lines = [chat("a?", "bc"), chat("d", "e")]
    row = splits(write(tmp_path / "c", lines), 48, packing="lines").train[0]
    # One line each; only the last label has no token.
    assert text(row["tokens"]) == "user: a?\nassistant: bc\n|" + "|" * 24
    row = splits(write(tmp_path / "c", lines), 50).train[0]
    first, second = "user: a?\nassistant: bc\n|", "user: d\nassistant: e\n|"
    assert text(row["tokens"]) == first + second + "|" * (50 - len(first + second))
    learned = "".join(chr(label) for label in row["labels"][row["loss_mask"] == 1])
    assert learned == "bc\n\u0100e\n\u0100", "the answers and the ends of the conversations"
    borders = [len(first) - 1, len(first + second) - 1]
    assert (np.diff(row["segment_ids"]) == 1).nonzero()[0].tolist() == borders, "padding is a document of its own"
    assert row["positions"].tolist() == [*range(len(first)), *range(50 - len(first))]
    assert row["loss_mask"].dtype == np.float32 and row["labels"].dtype == row["tokens"].dtype == np.int32


def test_answers_may_have_weights(tmp_path: Path) -> None:
    """The end token has the weight of the last message. An invalid weight is reported with its line."""
    talk = {"messages": chat("a?", "bc")["messages"] + chat("d?", "ef")["messages"]}
    talk["messages"][1]["weight"], talk["messages"][3]["weight"] = 0, 0.25
    row = splits(write(tmp_path / "c", [talk]), 60).train[0]
    weighted = row["loss_mask"] > 0
    assert text(row["labels"][weighted]) == "ef\n|" and set(row["loss_mask"][weighted]) == {0.25}


@pytest.mark.parametrize("weight", ["-1", "1e37", "1e39", "1" + "0" * 400, "NaN", "1e-40", '"1"'])
def test_weights_that_float32_cannot_use_are_refused(tmp_path: Path, weight: str) -> None:
    line = json.dumps(chat("a", "b")).replace('"content": "b"', f'"content": "b", "weight": {weight}')
    with user_error():
        splits(write(tmp_path / "c", [line]), 60)


def test_lines_without_loss_are_skipped(tmp_path: Path) -> None:
    """A batch of such lines would divide by 0."""
    nothing, late_answer = chat("a", "b"), chat("q" * 40, "b")
    nothing["messages"][1]["weight"] = 0
    path = write(tmp_path / "c", [chat("a", "b"), nothing])
    with user_error():
        splits(path)
    rows = splits(path, on_error="skip", packing="lines").train
    assert rows.skipped == {"nothing to learn": 1} and len(rows) == 1
    path = write(tmp_path / "d", [late_answer, chat("a", "b")])
    with user_error():
        splits(path, cut_long=True)
    rows = splits(path, cut_long=True, on_error="skip").train
    assert rows.skipped == {"nothing to learn": 1} and rows[0]["loss_mask"].sum() == 3
    with user_error():
        splits(write(tmp_path / "e", [nothing]), on_error="skip")


DEEP = '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}"


def random_chats(count: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    return [chat(f"{n}" + "q" * int(draw.integers(0, 60)), "a" * int(draw.integers(1, 60))) for n in range(count)]


def test_each_pass_has_every_conversation_once_in_another_order(tmp_path: Path) -> None:
    lines = random_chats(60)
    rows = splits(write(tmp_path / "c", lines), 256, rows=Rows(50)).train
    pass_rows = len(splits(tmp_path / "c", 256).train)
    assert rows.passes == -(-50 // pass_rows) and len(rows) == 50
    passes = [[text(rows[n]["tokens"]) for n in range(start, start + pass_rows)] for start in (0, pass_rows)]
    for texts in passes:
        counts = Counter(part for row_text in texts for part in row_text.split("|") if part)
        expected = [m["messages"] for m in lines]
        assert counts == Counter(f"user: {q['content']}\nassistant: {a['content']}\n" for q, a in expected)
    assert passes[0] != passes[1] and sorted(passes[0]) == sorted(passes[1])
    assert rows.packing.fill > 0.95


def test_rows_are_a_pure_function_of_their_number(tmp_path: Path) -> None:
    path = write(tmp_path / "c", random_chats(40))
    rows, repeated = (splits(path, 256, rows=Rows(60)).train for _ in range(2))
    for number in (59, 3, 31, 3):
        for name, values in rows[number].items():
            np.testing.assert_array_equal(values, repeated[number][name])
    assert rows.order() == repeated.order() != splits(path, 256, seed=4).train.order()
    with pytest.raises(IndexError):
        rows[60]


@pytest.mark.parametrize(("packing", "conversations"), [("best_fit", 1), ("balanced", 1), ("lines", 2)])
def test_a_system_message_cuts_a_line_for_rows_of_lines_alone(tmp_path: Path, packing: str, conversations: int) -> None:
    """Lines of Megatron-LM may hold several conversations; elsewhere, later messages see earlier ones."""
    line = {"messages": chat("a", "b", "S")["messages"] + chat("c", "d", "T")["messages"]}
    row = splits(write(tmp_path / "c", [line]), 80, packing=packing).train[0]
    assert text(row["tokens"]).rstrip("|").count("|") == conversations - 1
    assert row["segment_ids"].max() == conversations, "the conversations and padding"
    learned = text(row["labels"][row["loss_mask"] > 0])
    assert learned == ("b\n|d\n|" if packing == "lines" else "b\nd\n|")


def test_names_of_other_programs(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    rows = splits(write(tmp_path / "c", [{"conversations": turns}, "", chat("c", "d")])).train
    assert text(splits(tmp_path / "c", packing="lines").train[0]["tokens"]).startswith("user: a\nassistant: b\n|")
    assert len(rows) == 2


BAD = [
    ("{", "not a conversation", r"not valid JSON"),
    (DEEP, "not a conversation", "not valid JSON .maximum recursion"),
    ('{"messages": ' + "9" * 5000 + "}", "not a conversation", "not valid JSON .Exceeds the limit"),
    ("[1]", "not a conversation", r"a JSON list, not an object"),
    ({"text": "a"}, "not a conversation", r"no list of messages.*the keys are 'text'"),
    ({"messages": ["a"]}, "not a conversation", r"message 1 is a str"),
    ({"messages": [{"role": "user"}]}, "not a conversation", r"the content of message 1 is missing"),
    ({"messages": [{"role": "narrator", "content": "a"}]}, "unknown role", r"the role 'narrator'; known roles are sys"),
    ({"messages": [{"role": "user", "content": "a"}]}, "no answer", r"without a message of the assistant"),
    (chat("a", ""), "no answer", r"an empty message of the assistant"),
]


@pytest.mark.parametrize(("line", "reason", "message"), BAD)
def test_invalid_conversations(tmp_path: Path, line: Any, reason: str, message: str) -> None:
    path = write(tmp_path / "c.jsonl", [chat("a", "b"), "", line, chat("c", "d")])
    with pytest.raises(UserError, match=rf"c\.jsonl, line 3: .*{message}.*data\.on_error=skip"):
        splits(path)
    for _ in range(2):  # Built, then from the cache.
        rows = splits(path, on_error="skip").train
        assert rows.skipped == {reason: 1} and len(rows) == 2


def test_a_template_refuses_a_conversation(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [chat("a", "b"), chat("a", "b", "S")])
    message = "{{ m.content if m.role != 'system' else raise_exception('no system') }}"
    template = "{% for m in messages %}" + message + "{% endfor %}"
    with user_error():
        splits(path, template=template)
    assert splits(path, template=template, on_error="skip").train.skipped == {"refused by the template": 1}


def test_lines_longer_than_a_row(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [chat("a", "b"), chat("a", "b" * 30)])
    message = r"c\.jsonl, line 2: 51 tokens, but a row has 40\. Raise model\.sequence_length"
    with pytest.raises(UserError, match=message):
        splits(path)
    rows = splits(path, on_error="skip").train
    assert rows.skipped == {"longer than a row": 1} and len(rows) == 1
    truncated = splits(path, cut_long=True, packing="lines").train
    assert text(truncated[1]["tokens"]) == ("user: a\nassistant: " + "b" * 30)[:40] and not truncated.skipped
    assert truncated[1]["loss_mask"][-1] == 0, "the label of the last token was cut off"


def test_splits_and_files_per_split(tmp_path: Path) -> None:
    path = write(tmp_path / "c", [chat(str(n), "b") for n in range(10)] + ["{"])
    row_sources = splits(path, split="8,2", rows=Rows(None, None, None), on_error="skip")
    assert (len(row_sources.train), len(row_sources.valid), row_sources.test) == (8, 2, None)
    assert row_sources.train.skipped == {"not a conversation": 1} and row_sources.valid.skipped == {}, "counted once"
    assert splits(path, split="8,2", rows=Rows(0, None), on_error="skip").valid.skipped == row_sources.train.skipped
    valid_path = write(tmp_path / "v", [chat("v", "b"), "{"])
    row_sources = splits(path, paths=(), train_paths=(str(path),), valid_paths=(str(valid_path),), on_error="skip",
                  rows=Rows(None, None))  # fmt: skip
    assert (len(row_sources.train), len(row_sources.valid)) == (10, 1)
    assert row_sources.valid.skipped == {"not a conversation": 1}
    with user_error():
        splits(path, split="99,1", rows=Rows(None, None), on_error="skip")


def test_files_that_are_missing_or_empty(tmp_path: Path) -> None:
    with user_error("data"):
        splits(tmp_path / "none.jsonl")
    with user_error():
        splits(write(tmp_path / "c", ["{", "["]), on_error="skip")
    assert [problem.setting for problem in problems_of(ChatConfig())] == ["paths"]
    with user_error("data.seed"):
        splits(tmp_path / "c", seed=-1)


def test_conversations_are_tokenized_once(tmp_path: Path) -> None:
    path = write(tmp_path / "c", random_chats(5))
    tokenizer = ByteTokenizerConfig().build()
    before = splits(path, 256, tokenizer=tokenizer).train[0]["tokens"]

    def refuse(content: str) -> np.ndarray:
        raise AssertionError("tokenized again")

    tokenizer.encode = refuse
    np.testing.assert_array_equal(splits(path, 256, tokenizer=tokenizer).train[0]["tokens"], before)
    with pytest.raises(AssertionError, match="again"):
        splits(write(path, random_chats(6)), 256, tokenizer=tokenizer)


def fewest(lengths: list[int], room: int) -> int:
    """Fewest rows by trying all partitions."""
    if not lengths:
        return 0
    first, rest = lengths[0], list(range(1, len(lengths)))
    return 1 + min(
        fewest([lengths[n] for n in rest if n not in companions], room)
        for size in range(len(lengths))
        for companions in combinations(rest, size)
        if first + sum(lengths[n] for n in companions) <= room
    )


def test_best_fit() -> None:
    draw = np.random.default_rng(1)
    for _ in range(20):
        lengths = draw.integers(1, 11, 7)
        rows = best_fit(lengths, 10)
        assert sorted(piece for row in rows for piece in row) == list(range(7))
        assert all(lengths[row].sum() <= 10 for row in rows)
        assert all(row == sorted(row) for row in rows) and all(a[0] < b[0] for a, b in pairwise(rows))
        assert len(rows) <= 11 / 9 * fewest(lengths.tolist(), 10) + 1
    sizes = draw.lognormal(5.5, 0.8, 20_000).clip(10, 2048).astype(int)
    assert sizes.sum() / (2048 * len(best_fit(sizes, 2048))) > 0.995
    assert best_fit(np.array([3, 7, 5, 5]), 10) == [[0, 1], [2, 3]]


def scores_of(lengths: np.ndarray, rows: list[list[int]]) -> np.ndarray:
    return np.array([CAUSAL.pairs(lengths[row]).sum() for row in rows])


def test_balanced_fit() -> None:
    """Rows are about as full, and their attention work is more even."""
    draw = np.random.default_rng(1)
    for median, sigma in ((300, 0.8), (1000, 1.0), (40, 1.5)):
        lengths = draw.lognormal(np.log(median), sigma, 4000).clip(1, 4096).astype(int)
        rows, tight = balanced_fit(lengths, 4096), best_fit(lengths, 4096)
        assert sorted(piece for row in rows for piece in row) == list(range(4000))
        assert all(lengths[row].sum() <= 4096 for row in rows)
        assert all(row == sorted(row) for row in rows) and all(a[0] < b[0] for a, b in pairwise(rows))
        assert len(rows) <= 1.01 * len(tight) + 1
        work, before = scores_of(lengths, rows), scores_of(lengths, tight)
        assert work.std() / work.mean() < before.std() / before.mean()
        assert np.quantile(work, 0.02) > 3 * np.quantile(before, 0.02)
    assert Packing.of(lengths, rows, 4096).fill == lengths.sum() / 4096 / len(rows)
    assert Packing.of(lengths, rows, 4096).imbalance == work.max() / work.mean()
    assert balanced_fit(np.array([], int), 10) == [] and balanced_fit(np.array([0, 10, 0]), 10) == [[0, 1, 2]]
    assert balanced_fit(np.array([7, 7, 7, 4, 4]), 11) == [[0], [1, 4], [2, 3]]


def test_balanced_rows_of_conversations(tmp_path: Path) -> None:
    path = write(tmp_path / "c", random_chats(60))
    tight, rows = splits(path, 256).train, splits(path, 256, packing="balanced").train
    assert len(rows) <= len(tight) + 1 and rows.packing.fill > 0.9
    assert rows.packing.imbalance < tight.packing.imbalance and rows.order() != tight.order()
    texts = ["".join(text(part[row]["tokens"]) for row in range(len(part))).split("|") for part in (rows, tight)]
    assert Counter(filter(None, texts[0])) == Counter(filter(None, texts[1])), "the same conversations"
    assert splits(path, 256, packing="lines").train.packing is None


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("packing", ["best_fit", "balanced", "lines"])
def test_documents_of_a_row_are_known(tmp_path: Path, packing: str, multiple: int) -> None:
    path = write(tmp_path / "c", [*random_chats(30), chat("q" * 600, "a"), chat("a", "b" * 300)])
    for apart in (False, True):
        options = {"pad_multiple": multiple, "cut_long": True, "on_error": "skip", "isolate_padding": apart}
        rows = splits(path, 512, packing=packing, **options).train
        for number in range(len(rows)):
            row = rows[number]
            np.testing.assert_array_equal(rows.document_lengths(number), document_lengths(row["segment_ids"]))
            starts = np.flatnonzero(np.diff(row["positions"]) < 1) + 1
            assert set(starts) <= set(np.flatnonzero(np.diff(row["segment_ids"])) + 1), "conversations are documents"
            assert apart or len(starts) == row["segment_ids"].max()


def test_padding_leaves_rows_to_cudnn() -> None:
    """Documents of padding do not count against the limit of documents."""
    assert DOCUMENTS == cudnn.DOCUMENTS
    cases = [(1, 1, 1), (128, 1, 1), (129, 63, 1), (10**5, 1, 63), (10**5, 64, 782), (5, 99, 1)]
    for padding, documents, parts in cases:
        lengths = padding_lengths(padding, documents)
        assert lengths.sum() == padding and len(lengths) == parts and lengths.max() - lengths.min() <= 1
