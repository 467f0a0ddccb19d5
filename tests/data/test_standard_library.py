"""The corpus of standard library sources: deterministic, real text, rebuilt if necessary."""

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from token_files import tokenizer

from megajax.config.errors import UserError
from megajax.data.rows.splits import Rows
from megajax.data.text.config import StandardLibraryConfig
from megajax.data.text.indexed_dataset import tokens_path
from megajax.data.text.standard_library import choose, corpus, source_files
from megajax.models.decoder.config import text_schema

BYTES = tokenizer(vocabulary_size=257, eod=256)


def build(folder: Path, seed: int = 1, **options: Any) -> Any:
    config = StandardLibraryConfig(megabytes=0.5, cache_dir=str(folder), **options)
    return config.build(tokenizer=BYTES, schema=text_schema(64, 2**31), rows=Rows(100, 10, 0), seed=seed)


def test_documents_are_source_files(tmp_path: Path) -> None:
    file = corpus(StandardLibraryConfig(megabytes=0.5, cache_dir=str(tmp_path)), seed=1)
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [name for name, _ in choose(source_files(root), 500_000, seed=1)]
    assert file.documents == len(names) > 5 and 250_000 < len(file.read_all()) < 510_000
    for number, name in enumerate(names):
        assert file.sequence(number)[-1] == 256
        assert file.sequence(number)[:-1].astype(np.uint8).tobytes() == (root / name).read_bytes()


def test_the_corpus_is_deterministic(tmp_path: Path) -> None:
    first, second = build(tmp_path / "a"), build(tmp_path / "b")
    assert all((first.train[row]["tokens"] == second.train[row]["tokens"]).all() for row in range(100))
    assert first.test is None and len(first.train) >= 100 and len(first.valid) >= 10
    reseeded = build(tmp_path / "a", seed=2)
    assert any((first.train[row]["tokens"] != reseeded.train[row]["tokens"]).any() for row in range(5))


def test_reused_and_repaired(tmp_path: Path) -> None:
    file = corpus(StandardLibraryConfig(megabytes=0.2, cache_dir=str(tmp_path)), seed=1)
    path = tokens_path(file.prefix)
    before, content = path.stat().st_ino, path.read_bytes()
    config = StandardLibraryConfig(megabytes=0.2, cache_dir=str(tmp_path))
    assert tokens_path(corpus(config, seed=1).prefix).stat().st_ino == before
    path.write_bytes(content[:-10])
    assert corpus(config, seed=1).read_all().tobytes() == content
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = corpus(StandardLibraryConfig(megabytes=0.2, cache_dir=str(tmp_path / "file" / "x")), seed=1)
    assert tmp_path / "cache" in file.prefix.parents


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    config = StandardLibraryConfig(cache_dir=str(tmp_path))
    with pytest.raises(UserError, match="Choose the byte tokenizer"):
        config.build(tokenizer=tokenizer(), schema=text_schema(8, 2**31), rows=Rows(1), seed=1)
