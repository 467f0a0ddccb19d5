"""The row index, compared with a token-by-token walk through the stream of documents."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.data.text import gpt_index as index_module
from megajax.data.text.gpt_index import IndexRequest, build_index
from megajax.storage.index_cache import load_or_build


def walk(lengths: list[int], sequence_length: int, extra: int, rows: int) -> list[tuple[int, int]]:
    """Row starts, by taking tokens document by document: the definition, without any arithmetic over the stream."""
    starts, document, offset = [(0, 0)], 0, 0
    for _ in range(rows):
        need = sequence_length + extra
        while True:
            remaining = lengths[document] - offset
            need -= remaining
            if need <= 0:
                offset += need + remaining - extra
                break
            if document == len(lengths) - 1:
                offset = lengths[document] - extra
                break
            document, offset = document + 1, 0
        starts.append((document, offset))
    return starts


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    sequence_length=st.integers(1, 9),
    rows=st.none() | st.integers(0, 60),
    extra=st.integers(0, 1),
    drop_last=st.booleans(),
    chunk=st.sampled_from([1, 2, 5]),
)
@example(lengths=[5, 5], sequence_length=4, rows=None, extra=1, drop_last=True, chunk=2)
def test_equals_a_walk_in_chunks_of_any_size(
    lengths: list[int], sequence_length: int, rows: int | None, extra: int, drop_last: bool, chunk: int
) -> None:
    """Borders of chunks are at empty documents, at ends of rows and inside of documents."""
    options = {"sequence_length": sequence_length, "extra": extra, "drop_last": drop_last}
    request = IndexRequest(first=1, last=len(lengths) + 1, rows=rows, seed=7, **options)
    sizes, total = np.array([3, *lengths, 4], np.int32), sum(lengths)
    if not total:
        with pytest.raises(UserError, match="with 0 tokens"):
            build_index(sizes, request, "x")
        return
    index = build_index(sizes, request, "x")
    if rows is None and total < extra + (sequence_length if drop_last else 1):
        rows = 1  # Repeated until a row is full.
    stream = len(index.documents) // len(lengths) * total - extra
    expected = stream // sequence_length if drop_last else -(-stream // sequence_length)
    assert len(index.shuffle) == expected >= (rows or 0)
    assert sorted(index.shuffle.tolist()) == list(range(expected))
    order = sizes[index.documents].tolist()
    assert list(map(tuple, index.samples.tolist())) == walk(order, sequence_length, extra, expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "CHUNK", chunk)
        for part, whole in zip(build_index(sizes, request, "x"), index, strict=True):
            np.testing.assert_array_equal(part, whole)
            assert part.dtype == whole.dtype


def test_memory_does_not_grow_with_the_number_of_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays, 10 MB, are in the file."""
    monkeypatch.setattr(index_module, "CHUNK", 1 << 14)
    lengths = np.full(1_000_000, 3, np.int32)
    wanted = IndexRequest(first=0, last=len(lengths), rows=None, sequence_length=6, seed=1)
    tracemalloc.start()
    arrays = load_or_build(tmp_path, {}, lambda new: build_index(lengths, wanted, "x", new)._asdict())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000 and sum(values.nbytes for values in arrays.values()) > 9_000_000


def request(rows: int | None, **changes: int) -> IndexRequest:
    return IndexRequest(first=0, last=10, rows=rows, sequence_length=10, seed=1, **changes)


def test_errors_name_split_and_numbers(tmp_path: Path) -> None:
    empty = IndexRequest(first=5, last=5, rows=40, sequence_length=8, seed=0)
    with user_error():
        build_index(np.full(10, 4, np.int32), empty, "corpus, split test")
    request = IndexRequest(first=0, last=1, rows=1_000_000, sequence_length=8192, seed=0)
    with user_error("x"):
        build_index(np.array([1], np.int32), request, "x")


def megatron_index(lengths: list[int], rows: int, length: int, seed: int, extra: int) -> list[list[int]]:
    """Tokens of each row in the order read, numbered through the file: Megatron-LM's GPTDataset, step by step."""
    epochs, tokens = 1, sum(lengths)
    while epochs * tokens < rows * length + extra:
        epochs += 1
    separate, before = False, 0
    if epochs > 1:
        before = ((epochs - 1) * tokens - extra) // length
        per_epoch = (tokens - extra) // length
        assert 0 <= rows - before <= per_epoch + 1
        separate = rows - before < int(0.80 * per_epoch)
    generator, sequences = np.random.RandomState(seed), np.arange(len(lengths))
    order = np.concatenate([sequences] * epochs)
    if separate:
        order, last = np.concatenate([sequences] * (epochs - 1)), sequences.copy()
        generator.shuffle(order)
        generator.shuffle(last)
        order = np.concatenate([order, last])
    else:
        generator.shuffle(order)
    first = np.cumsum([0, *lengths])
    stream = [token for number in order for token in range(first[number], first[number + 1])]
    count = (epochs * tokens - extra) // length
    shuffle = np.arange(count)
    parts = (shuffle[:before], shuffle[before:]) if separate else (shuffle,)
    for part in parts:
        generator.shuffle(part)
    return [stream[row * length : row * length + length + extra] for row in shuffle.tolist()]


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 33), min_size=1, max_size=6).filter(any),
    rows=st.integers(1, 40),
    extra=st.integers(0, 1),
    length=st.integers(1, 33),
    seed=st.integers(0, 99),
)
@example(lengths=[10] * 10, rows=10, extra=1, length=10, seed=1)
def test_rows_are_those_of_megatron(lengths: list[int], rows: int, extra: int, length: int, seed: int) -> None:
    """A split may be smaller than a row, and is then repeated; a last epoch may stay last."""
    request = IndexRequest(first=0, last=len(lengths), rows=rows, sequence_length=length, seed=seed, extra=extra)
    index = build_index(np.array(lengths, np.int32), request, "x")
    first, tokens = np.cumsum([0, *lengths]), []
    for row in index.shuffle.tolist():
        (begin, offset), (end, stop) = index.samples[row : row + 2].tolist()
        pieces = [range(first[n], first[n + 1]) for n in index.documents[begin : end + 1].tolist()]
        pieces[-1] = pieces[-1][: stop + extra]
        pieces[0] = pieces[0][offset:]
        tokens.append([token for piece in pieces for token in piece])
    assert tokens == megatron_index(lengths, rows, length, seed, extra)
