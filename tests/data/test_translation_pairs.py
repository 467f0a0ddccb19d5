"""Rows of texts in pairs."""

from types import SimpleNamespace

import numpy as np
import pytest
from user_errors import user_error

from megajax.batch import Leaf
from megajax.config.compose import problems_of
from megajax.data.masked.config import MaskedSpansConfig, PairsConfig
from megajax.data.rows.splits import Rows
from megajax.data.text.indexed_dataset import IndexedWriter
from megajax.data.translation_pairs import shuffled_passes

PAD, BOS, EOS = 7, 4, 5
PAIRS = [([10 + n] * (1 + n % 5), [30 + n, 31 + n] * (1 + n % 3)) for n in range(20)]
LENGTHS = (4, 6)
ROWS = Rows(20)


def tokenizer(**changes):
    special = {"pad": PAD, "specials": {"bos": BOS, "eos": EOS}, "sentinels": (), "continues": None}
    return SimpleNamespace(**{"vocabulary_size": 100, "identity": "pairs", **special, **changes})


def write(prefix, documents, dtype="<u2"):
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for ids in documents:
            writer.add_document([np.array(ids)] if len(ids) else [])


@pytest.fixture
def prefix(tmp_path):
    for place, key in enumerate(("source", "target")):
        write(tmp_path / f"x_{key}_document", [pair[place] for pair in PAIRS])
    return str(tmp_path / "x")


def build(prefix, rows=ROWS, special_tokenizer=None, **settings):
    config = PairsConfig(paths=(prefix,), **{"split": "1", "cache_dir": f"{prefix}-cache", **settings})
    assert not problems_of(config)
    leaves = zip(("encoder_tokens", "tokens"), LENGTHS, strict=True)
    schema = {name: Leaf("int32", (length,), ("seq",)) for name, length in leaves}
    return config.build(tokenizer=special_tokenizer or tokenizer(), schema=schema, rows=rows, seed=3)


def test_the_encoder_reads_one_text_and_the_decoder_writes_the_other(prefix):
    data = build(prefix).train
    assert sorted(data.numbers.tolist()) == list(range(20)) and data.numbers.tolist() != list(range(20))
    for number, row in zip(data.numbers.tolist(), (data[n] for n in range(20)), strict=True):
        source, target = PAIRS[number][0][:4], [*PAIRS[number][1], EOS][:6]
        assert row["encoder_tokens"].tolist() == source + [PAD] * (4 - len(source))
        assert row["encoder_segment_ids"].tolist() == [1] * len(source) + [0] * (4 - len(source))
        assert row["labels"].tolist() == target + [0] * (6 - len(target))
        shifted = [BOS, *PAIRS[number][1]][: len(target)]
        assert row["tokens"].tolist() == shifted + [PAD] * (6 - len(target))
        assert row["loss_mask"].tolist() == [1.0] * len(target) + [0.0] * (6 - len(target))
        np.testing.assert_array_equal(row["segment_ids"], row["loss_mask"])
        assert row["truncated"] == (len(PAIRS[number][0]) > 4 or len(PAIRS[number][1]) > 5)
        assert all(row[name].dtype == dtype for name, dtype in PairsConfig().leaves().items())
    assert PairsConfig().leaves() == MaskedSpansConfig().leaves()


def test_each_pass_has_its_own_order():
    once = shuffled_passes((5, 12), None, seed=1)
    numbers = shuffled_passes((5, 12), 15, seed=1)
    assert len(numbers) == 21 and (numbers[:7] == once).all() and (numbers[7:14] != once).any()
    assert all(sorted(numbers[start : start + 7]) == list(range(5, 12)) for start in (0, 7, 14))
    assert (shuffled_passes((5, 12), None, seed=2) != once).any()


def test_splits_and_blends(prefix, tmp_path):
    splits = build(prefix, rows=Rows(40, 5, 0), split="80,20,0")
    assert len(splits.train) == 48 and splits.train.passes == 3 and set(splits.train.numbers.tolist()) == set(range(16))
    assert set(splits.valid.numbers.tolist()) == {16, 17, 18, 19} and len(splits.valid) == 8
    config = PairsConfig(paths=("0.5", prefix, "0.5", prefix), split="1", cache_dir=str(tmp_path))
    schema = {name: Leaf("int32", (6,), ("seq",)) for name in ("encoder_tokens", "tokens")}
    blend = config.build(tokenizer=tokenizer(), schema=schema, rows=Rows(30), seed=1).train
    assert len(blend) == 30 and blend[0]["dataset_id"] == 0 and blend[1]["dataset_id"] == 1
    with user_error():
        build(prefix, rows=Rows(10, 5, 0), split="999,1")


def test_files_that_are_not_pairs(prefix, tmp_path):
    write(tmp_path / "x_other_document", [[1]] * 19)
    with user_error():
        build(prefix, keys=("source", "other"))
    write(tmp_path / "x_empty_document", [[1], [], *[[2]] * 18])
    with user_error():
        build(prefix, keys=("source", "empty"))
    with user_error():
        build(prefix, keys=("gone", "target"))
    with user_error():
        data = build(prefix, special_tokenizer=tokenizer(vocabulary_size=30)).train
        [data[row] for row in range(20)]
    with user_error():
        build(prefix, special_tokenizer=tokenizer(specials={"eos": 5}))
