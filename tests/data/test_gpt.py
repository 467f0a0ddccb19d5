"""Rows of language models: content, loss masks, positions, segments, and errors."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from token_files import EOD, tokenizer, write, write_random
from user_errors import user_error

from megajax.config.compose import problems_of
from megajax.data.preprocessing.preprocessing import preprocess_text
from megajax.data.rows.splits import Rows
from megajax.data.text.config import BlendConfig, MockConfig
from megajax.data.text.gpt import MockTokens
from megajax.models.decoder.config import text_schema
from megajax.tokenizers.config import ByteTokenizerConfig

pytestmark = pytest.mark.smoke


def build(prefix: Path, length: int, rows: Rows, tokens: Any = None, **options: Any) -> Any:
    config = BlendConfig(paths=(str(prefix),), cache_dir=str(prefix.parent / "cache"), **options)
    assert not problems_of(config)
    return config.build(tokenizer=tokens or tokenizer(), schema=text_schema(length, 2**31), rows=rows, seed=3)


def one_row(tmp_path: Path, documents: list[list[int]], length: int, tokens: Any = None, **options: Any) -> Any:
    """The only row of a corpus written so that shuffling cannot change it."""
    dataset = build(write(tmp_path / "c", documents), length, Rows(None), tokens, split="1", **options).train
    assert len(dataset) == 1
    return dataset[0]


def test_a_plain_row(tmp_path: Path) -> None:
    row = one_row(tmp_path, [[1, 2, EOD, 4, 5]], 4)
    assert {name: values.tolist() for name, values in row.items()} == {
        "tokens": [1, 2, EOD, 4],
        "labels": [2, EOD, 4, 5],
        "loss_mask": [1, 1, 1, 1],
        "positions": [0, 1, 2, 3],
        "segment_ids": [0, 0, 0, 0],
        "padding": [False] * 4,
    }
    assert [values.dtype.name for values in row.values()] == ["int32", "int32", "float32", "int32", "int32", "bool"]
    assert not any(values.flags.writeable for values in row.values())


@pytest.mark.parametrize("flags", list(itertools.product((False, True), repeat=3)))
def test_each_of_the_reset_and_mask_settings_has_its_own_effect(flags: tuple[bool, ...], tmp_path: Path) -> None:
    names = ("reset_positions", "reset_attention_mask", "eod_mask_loss")
    row = one_row(tmp_path, [[1, 2, EOD, 4, EOD, EOD, 7, 8]], 7, **dict(zip(names, flags, strict=True)))
    assert row["positions"].tolist() == ([0, 1, 2, 0, 1, 0, 0] if flags[0] else [*range(7)])
    assert row["segment_ids"].tolist() == ([0, 0, 0, 1, 1, 2, 3] if flags[1] else [0] * 7)
    assert row["loss_mask"].tolist() == ([1, 1, 0, 1, 0, 0, 1] if flags[2] else [1] * 7)


def test_isolation_follows_stored_borders(tmp_path: Path) -> None:
    """Documents without end tokens are isolated; an end token inside a document is not a border."""
    repeated = [[5, EOD, 5], [5, EOD, 5], [5, EOD, 5]]
    row = one_row(tmp_path, repeated, 8, isolate_documents=True)
    assert row["tokens"].tolist() == [5, EOD, 5, 5, EOD, 5, 5, EOD]
    assert row["segment_ids"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert row["positions"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_without_the_extra_token_the_last_label_is_masked(tmp_path: Path) -> None:
    row = one_row(tmp_path, [[1, 2, 3, 4]], 4, extra_token=False)
    assert row["tokens"].tolist() == [1, 2, 3, 4] and row["labels"].tolist() == [2, 3, 4, 0]
    assert row["loss_mask"].tolist() == [1, 1, 1, 0]


def test_padding(tmp_path: Path) -> None:
    """The kept tail of a validation set: no loss on padding, which becomes 0 and extends the last segment."""
    prefix = write(tmp_path / "c", [[1, 2, 3], [4, 5, 6]])
    options = {"split": "0,1", "drop_last": False, "isolate_documents": True}
    dataset = build(prefix, 4, Rows(0, None), **options).valid
    assert len(dataset) == 2
    tail = next(row for row in map(dataset.__getitem__, range(2)) if row["loss_mask"].sum() == 1)
    assert tail["loss_mask"].tolist() == [1, 0, 0, 0] and tail["tokens"][2:].tolist() == [0, 0]
    assert tail["labels"][1:].tolist() == [0, 0, 0] and tail["segment_ids"].tolist() == [0, 0, 0, 0]
    assert tail["padding"].tolist() == [False, False, True, True]
    masks = [dataset[row]["loss_mask"].sum() for row in (0, 1, 0, 1)]
    assert masks[:2] == masks[2:] and sorted(masks[:2]) == [1, 4]


def test_pad_token_of_the_tokenizer(tmp_path: Path) -> None:
    """A pad token found in the data is padding; one that also ends documents is not."""
    row = one_row(tmp_path, [[1, 7, 3, 4]], 3, tokenizer(pad=7))
    assert row["tokens"].tolist() == [1, 0, 3] and row["labels"].tolist() == [0, 3, 4]
    assert row["loss_mask"].tolist() == [0, 1, 1] and row["padding"].tolist() == [False, True, False]
    row = one_row(tmp_path, [[1, EOD, 3, 4]], 3, tokenizer(pad=EOD))
    assert row["tokens"].tolist() == [1, EOD, 3] and row["loss_mask"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("dtype", "token"), [(np.uint16, 100), (np.int32, -5), (np.int64, 2**32 + 1)])
def test_tokens_outside_the_vocabulary(tmp_path: Path, dtype: type, token: int) -> None:
    documents = [[1] * 6, [2] * 6, [3, 3, 3, token, 3, 3]]
    dataset = build(write(tmp_path / "c", documents, dtype), 5, Rows(None), split="1").train
    with user_error():
        [dataset[row] for row in range(len(dataset))]


def test_floating_point_files_are_refused(tmp_path: Path) -> None:
    with user_error():
        build(write(tmp_path / "c", [[1, 2, 3]], np.float32), 2, Rows(None), split="1")


def test_rows_are_a_pure_function_of_their_number(tmp_path: Path) -> None:
    prefix = write_random(tmp_path / "c", documents=30)
    dataset = build(prefix, 16, Rows(100), split="1", isolate_documents=True).train
    isolated = build(prefix, 16, Rows(100), split="1", isolate_documents=True).train
    forward = [dataset[row] for row in range(100)]
    for row in reversed(range(100)):
        assert all((forward[row][name] == values).all() for name, values in isolated[row].items())
    for number in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset[number]
    neighbours = np.argsort(dataset.index.shuffle)
    for first, second in zip(neighbours[:-1].tolist(), neighbours[1:].tolist(), strict=True):
        assert dataset[first]["labels"][-1] == dataset[second]["tokens"][0]


@pytest.mark.parametrize("name", ["documents", "samples", "shuffle"])
@pytest.mark.parametrize("value", [-2, 1 << 20])
def test_a_damaged_index_is_named(tmp_path: Path, name: str, value: int) -> None:
    """Its arrays are not verified at each start."""
    prefix = write_random(tmp_path / "c", documents=20)
    dataset = build(prefix, 8, Rows(None), split="1").train
    (file,), array = dataset.index_files, getattr(dataset.index, name)
    content = file.read_bytes()
    file.write_bytes(content.replace(array.tobytes(), np.full(array.shape, value).astype(array.dtype).tobytes()))
    with user_error():
        build(prefix, 8, Rows(None), split="1").train[0]


def test_mock_documents() -> None:
    tokens = MockTokens(vocabulary_size=1000, eod=999)
    lengths = np.random.default_rng(0).integers(1, 4096, size=100_000, dtype=np.int32)
    assert (tokens.lengths == lengths).all()
    fewer = MockTokens(vocabulary_size=1000, eod=999, documents=300)
    assert (fewer.lengths == lengths[:300]).all() and fewer.identity(Path()) != tokens.identity(Path())
    number = int(np.argmax(lengths > 1500))
    expected = [*(np.arange(1, lengths[number]) % 1000).tolist(), 999]
    assert tokens.sequence(number).tolist() == expected
    assert tokens.sequence(number, 1200, 1210).tolist() == expected[1200:1210]
    assert tokens.sequence(number, 1200, 99999).tolist() == expected[1200:]


def test_mock_splits_are_thirds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = MockConfig(isolate_documents=True)
    splits = config.build(tokenizer=tokenizer(), schema=text_schema(32, 2**31), rows=Rows(10, 10, 0), seed=1)
    assert splits.test is None
    assert splits.train.index.documents.max() == 33332 and splits.valid.index.documents.min() == 33333
    few = MockConfig(documents=30).build(tokenizer=tokenizer(), schema=text_schema(32, 2**31), rows=Rows(10), seed=1)
    assert sorted(few.train.index.documents) == [*range(10)]
    row = splits.train[5]
    starts = np.flatnonzero(row["positions"] == 0)
    assert row["segment_ids"][starts].tolist() == list(range(len(starts)))


@pytest.mark.parametrize(("rows", "passes"), [(10, 1), (100, 2), (1000, 20), (None, 1)])
def test_passes_over_a_corpus_of_50_rows(rows: int | None, passes: int, tmp_path: Path) -> None:
    """40 documents of 40 bytes and an end token are 1640 tokens; 1000 rows of 32 and the last label take 32,001."""
    byte_tokenizer = ByteTokenizerConfig().build()
    preprocess_text(["x" * 40] * 40, tmp_path / "corpus", byte_tokenizer)
    config = BlendConfig(paths=(str(tmp_path / "corpus"),), split="1,0,0", cache_dir=str(tmp_path / "cache"))
    splits = config.build(tokenizer=byte_tokenizer, schema=text_schema(32, 2**31), rows=Rows(rows), seed=1)
    assert splits.train.passes == passes
    assert len(splits.train) >= (rows or 49)
