"""Text with masked spans: the rows of T5's encoder and decoder."""

from types import SimpleNamespace

import numpy as np
import pytest
from user_errors import user_error

from megajax.batch import Leaf
from megajax.config.compose import problems_of
from megajax.data.masked.config import MaskedSpansConfig
from megajax.data.masked.spans import with_sentinels
from megajax.data.rows.splits import Rows
from megajax.data.text.indexed_dataset import IndexedWriter

VOCABULARY = 100
PAD, BOS, EOS = 7, 4, 5
SENTINELS = [99, 98, 97, 96, 95, 94, 93]


def tokenizer(**changes):
    attributes = {"vocabulary_size": VOCABULARY, "continues": np.arange(VOCABULARY) % 3 == 0, "identity": "pieces"}
    special = {"pad": PAD, "specials": {"bos": BOS, "eos": EOS}, "sentinels": SENTINELS}
    return SimpleNamespace(**attributes | special | changes)


@pytest.fixture
def prefix(tmp_path):
    draw = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "text", np.dtype("<u2")) as writer:
        for _ in range(30):
            writer.add_document([draw.integers(10, 90, draw.integers(1, 20)) for _ in range(draw.integers(0, 9))])
    return str(tmp_path / "text")


def build(prefix, encoder=48, decoder=30, pieces=None, **options):
    config = MaskedSpansConfig(paths=(prefix,), split="1", cache_dir=f"{prefix}-cache", **options)
    assert not problems_of(config)
    leaves = {"encoder_tokens": encoder, "tokens": decoder}
    schema = {name: Leaf("int32", (length,), ("seq",)) for name, length in leaves.items()}
    return config.build(tokenizer=pieces or tokenizer(), schema=schema, rows=Rows(100), seed=3).train


def test_sentinels_replace_spans():
    text = list(range(10, 20))
    assert with_sentinels(text, [[1, 2], [3], [9]], [99, 98, 97]) == (
        [10, 99, 98, 14, 15, 16, 17, 18, 97],
        [99, 11, 12, 98, 13, 97, 19],
    )
    assert with_sentinels(text, [[0], [2]], [99]) == ([99, *text[1:]], [99, 10])
    assert with_sentinels(text, [], [99]) == (text, [])


def test_rows_fill_their_own_blanks(prefix):
    data = build(prefix)
    longest = 0
    for number in range(len(data)):
        row = data[number]
        first, last, target = data.index[number].tolist()
        begin, stop = (int(data.tokens.lengths[:edge].sum()) for edge in (first, last))
        labels, input_length = row["labels"][row["loss_mask"] == 1].tolist(), int(row["encoder_segment_ids"].sum())
        assert labels[-1] == EOS and row["tokens"][: len(labels)].tolist() == [BOS, *labels[:-1]]
        assert (row["tokens"][len(labels) :] == PAD).all() and (row["encoder_tokens"][input_length:] == PAD).all()
        np.testing.assert_array_equal(row["segment_ids"], row["loss_mask"])
        spans, filled = {}, []
        for token in labels[:-1]:
            if token in SENTINELS:
                spans[token] = last_span = []
            else:
                last_span.append(token)
        assert list(spans) == SENTINELS[: len(spans)]
        for token in row["encoder_tokens"][:input_length].tolist():
            filled += spans.get(token, [token])
        assert filled == data.tokens.read_all()[begin : min(stop, begin + target)].tolist()
        assert row["truncated"] == (stop - begin > target)
        assert all(row[name].dtype == dtype for name, dtype in MaskedSpansConfig().leaves().items())
        longest = max(longest, max(map(len, spans.values()), default=0))
    assert longest > 3


def test_text_beyond_the_row_is_truncated(prefix):
    data = build(prefix, decoder=4, pieces=tokenizer(sentinels=(99,)), mask_probability=0.5)
    rows = [data[number] for number in range(60)]
    assert max(row["loss_mask"].sum() for row in rows) == 4
    assert all(np.isin(row["encoder_tokens"], 99).sum() <= 1 for row in rows)


def test_unsuitable_tokenizers(prefix):
    with user_error():
        build(prefix, pieces=tokenizer(specials={"eos": EOS}))
    with user_error():
        build(prefix, pieces=tokenizer(sentinels=()))
