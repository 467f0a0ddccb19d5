"""Token files joined to one."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from user_errors import user_error

from megajax.data.text.indexed_dataset import IndexedTokens, IndexedWriter, merge
from megajax.tools.merge import main

pytestmark = pytest.mark.smoke

ORACLE = Path(os.environ.get("MEGAJAX_ORACLE_DIR", Path(__file__).parents[2] / "../shared/oracle")) / "data"
needs_oracle = pytest.mark.skipif(not ORACLE.is_dir(), reason=f"no data of Megatron-LM in {ORACLE}")


def write(prefix, documents, dtype="<u2", modes=None):
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            sequences = [np.array(ids) for ids in document]
            writer.add_document(sequences, None if modes is None else [modes] * len(sequences))
    return prefix


def read(tokens: IndexedTokens) -> list[list[list[int]]]:
    table = tokens.document_table.tolist()
    return [[tokens.sequence(n).tolist() for n in range(*pair)] for pair in itertools.pairwise(table)]


A, B = [[[1, 2], [3]], [], [[4]]], [[[5]], [[], [6, 7]]]


def test_documents_of_all_inputs_in_order(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "z.1", A)
    write(tmp_path / "in" / "b", B)
    (tmp_path / "in" / "notes.md").touch()
    single = write(tmp_path / "c", [[[9]]])
    assert read(merge([tmp_path / "in", single, single], tmp_path / "out" / "all")) == [*B, *A, [[9]], [[9]]]
    assert main(["--input", f"{tmp_path}/c", f"{tmp_path}/in/b", "--output-prefix", f"{tmp_path}/x"]) == 0
    assert read(IndexedTokens(tmp_path / "x")) == [[[9]], *B]
    assert f"3 documents, 4 sequences, 4 tokens of uint16, 8 bytes: {tmp_path}/x" in capsys.readouterr().out


def test_a_merged_file_is_not_read_to_count_its_tokens(tmp_path, monkeypatch):
    """It may be larger than the memory of the machine."""
    prefix = write(tmp_path / "a", A)
    monkeypatch.setattr(IndexedTokens, "read", None)
    assert main(["--input", str(prefix), str(prefix), "--output-prefix", f"{tmp_path}/x"]) == 0


def test_modes_are_kept(tmp_path):
    prefixes = [write(tmp_path / str(mode), A, modes=mode) for mode in (0, 1)]
    merged = merge(prefixes, tmp_path / "out")
    assert merged.modes.tolist() == [0, 0, 0, 1, 1, 1] and read(merged) == [*A, *A]
    with user_error():
        merge([prefixes[0], write(tmp_path / "plain", B)], tmp_path / "other")


def test_what_cannot_be_joined(tmp_path):
    a, wide = write(tmp_path / "a", A), write(tmp_path / "b", B, "<i4")
    with user_error():
        merge([a, wide], tmp_path / "out")
    with user_error():
        merge([a, tmp_path / "gone"], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with user_error("--input"):
        merge([tmp_path / "empty"], tmp_path / "out")
    (tmp_path / "empty" / "half.bin").touch()
    with user_error():
        merge([tmp_path / "empty"], tmp_path / "out")
    with user_error():
        merge([wide], a)
    with user_error():
        merge([a], a, overwrite=True)
    assert not list(tmp_path.glob("out*")) and read(IndexedTokens(a)) == A
    assert read(merge([wide], a, overwrite=True)) == B


@needs_oracle
def test_the_same_index_as_megatron_lm_writes(tmp_path):
    corpus = ORACLE / "corpusC_sentence"
    merge([corpus, corpus], tmp_path / "out")
    assert Path(f"{tmp_path}/out.idx").read_bytes() == (ORACLE / "dtypes" / "mergedCC.idx").read_bytes()
    assert Path(f"{tmp_path}/out.bin").read_bytes() == Path(f"{corpus}.bin").read_bytes() * 2
    for code in range(1, 9):
        prefix = ORACLE / "dtypes" / f"code{code}"
        assert merge([prefix, prefix], tmp_path / str(code)).dtype == IndexedTokens(prefix).dtype
