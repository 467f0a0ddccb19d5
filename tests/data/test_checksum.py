"""Checksums of data files: changes that a sample detects, full content over processes, and files of row sources."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from token_files import tokenizer, write

from megajax.data import checksum
from megajax.data.chat.config import ChatConfig
from megajax.data.checksum import BLOCK, BLOCKS, FileSum, full_checksums, group_files, sample_checksums
from megajax.data.images.class_and_mask_folders import ClassFolder, MaskFolder
from megajax.data.masked.config import PairsConfig
from megajax.data.rows.blend import BlendedDataset, BlendIndex
from megajax.data.rows.config import CyclicConfig
from megajax.data.rows.row_source import files_of
from megajax.data.rows.shuffled_items import ItemRows, ShuffledOrder
from megajax.data.rows.splits import Rows
from megajax.data.text.config import BlendConfig, MockConfig
from megajax.data.text.indexed_dataset import integer_tokens
from megajax.data.translation_pairs import PairedTokens, TranslationPairs
from megajax.models.decoder.config import text_schema
from megajax.tokenizers.config import ByteTokenizerConfig

TWO_SIDED: Any = SimpleNamespace(vocabulary_size=100, specials={"bos": 1, "eos": 2}, pad=0)


def sums(*paths: Path) -> list[FileSum]:
    return list(sample_checksums(group_files(list(map(str, paths)))).values())


def changed(path: Path, at: int, value: bytes = b"?") -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(value)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A sparse file of a gigabyte."""
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 30)
    return tmp_path / "large"


def test_every_byte_of_a_small_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(bytes(BLOCK * 3 + 5))
    (before,) = sums(path)
    for at in (0, BLOCK + 7, BLOCK * 3 + 4):
        changed(path, at)
        (after,) = sums(path)
        assert after.bytes == before.bytes and "sample of its content" in str(after.difference(before))
        changed(path, at, b"\0")
    assert sums(path) == [before] and before.difference(before) is None


def test_a_sample_of_a_large_file_is_cheap(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (before,), reads, pread = sums(large), list[tuple[int, int]](), os.pread

    def pread_and_count(descriptor: int, size: int, at: int) -> bytes:
        reads.append((at, size))
        return pread(descriptor, size, at)

    monkeypatch.setattr(checksum.os, "pread", pread_and_count)
    for at in (0, -1, (1 << 29) + (1 << 23)):
        changed(large, at)
        (after,) = sums(large)
        noticed = after.sample != before.sample
        # A sample does not cover the bytes between its blocks: only the whole does.
        assert noticed == (at in (0, -1)) and after.bytes == 1 << 30
        changed(large, at, b"\0")
    assert len(reads) == 3 * BLOCKS and {size for _, size in reads} == {BLOCK}


def test_files_among_many_have_small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = group_files(["a"] * 10), group_files(["a"] * 800)
    assert (small[0].blocks, large[0].blocks) == (BLOCKS, 5)
    assert len(group_files(["/x/a/1", "/x/b/2"] * 800)) == 1


def test_very_many_files_are_one_group_with_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "SAMPLED_FILES", 4)
    files = [tmp_path / f"{kind}" / f"{number}.png" for kind in "ab" for number in range(5)]
    for number, file in enumerate(files):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes([number]) * 10)
    (before,) = sums(*files)
    assert (before.path, before.files) == (str(tmp_path), 10)
    files[0].write_bytes(b"X" * 10)
    assert "sample" in str(sums(*files)[0].difference(before))
    files[0].write_bytes(bytes(10))
    files[9].rename(files[9].with_name("other.png"))
    (renamed,) = sums(*files[:9], files[9].with_name("other.png"))
    assert renamed.sample == before.sample and "names of its 10 files" in str(renamed.difference(before))
    (fewer,) = sums(*files[:9])
    assert fewer.difference(before) == "files: 10 -> 9"


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_whole_files_are_divided_over_processes(
    tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksum, "PART", 10)
    paths = [tmp_path / name for name in ("a", "b", "empty")]
    for path, content in zip(paths, (bytes(range(95)), b"b" * 20, b""), strict=True):
        path.write_bytes(content)
    groups, progress = group_files(list(map(str, paths))), list[tuple[int, int]]()
    single = full_checksums(groups, report=lambda *counts: progress.append(counts))
    shares = [full_checksums(groups, process=process, processes=processes) for process in range(processes)]
    assert [sum(share[number] for share in shares) % checksum.MODULUS for number in range(3)] == single
    assert progress[-1][0] == 115 and len(set(single)) == 3
    # Parts that change places, or move to another file, are detected.
    paths[0].write_bytes(bytes([*range(10, 20), *range(10), *range(20, 95)]))
    changed = full_checksums(groups)
    assert changed[0] != single[0] and changed[1:] == single[1:]


def pair(prefix: Path) -> list[str]:
    return [f"{prefix}.bin", f"{prefix}.idx"]


def build(config: Any, rows: int = 4, **more: Any) -> Any:
    arguments = {"tokenizer": tokenizer(), "schema": text_schema(8, 2**31), "rows": Rows(rows), "seed": 1}
    return config.build(**(arguments | more)).train


def test_rows_of_token_files_name_them(tmp_path: Path) -> None:
    first, second = (write(tmp_path / name, [range(1, 30)] * 9) for name in "ab")
    cache = {"split": "1", "cache_dir": str(tmp_path / "cache")}
    single = build(BlendConfig(paths=(str(first),), **cache))
    assert files_of(single) == pair(first)
    cyclic = CyclicConfig().build(source=single, rows=9, shards=1, micro_rows=1)
    assert files_of(cyclic) == pair(first)
    blend = build(BlendConfig(paths=("0.5", str(first), "0.5", str(second)), **cache))
    assert files_of(blend) == [*pair(first), *pair(second)]
    twice = BlendedDataset(
        [single, single], BlendIndex(np.zeros(1, np.int16), np.zeros(1, np.int64), np.array([1, 0])), [1, 1]
    )
    assert files_of(twice) == pair(first)
    assert files_of(build(MockConfig())) == []


def test_rows_of_pairs_conversations_and_images_name_their_files(tmp_path: Path) -> None:
    for name in ("source", "target"):
        write(tmp_path / f"p_{name}_document", [range(1, 30)] * 9)
    tokens = PairedTokens("p", tuple(map(integer_tokens, PairsConfig().token_files(str(tmp_path / "p")))))
    paired = TranslationPairs(tokens, np.arange(9), lengths=(8, 8), tokenizer=TWO_SIDED)
    assert files_of(paired) == [*pair(tmp_path / "p_source_document"), *pair(tmp_path / "p_target_document")]
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 9)
    config = ChatConfig(paths=(str(path),), split="1", cache_dir=str(tmp_path / "cache"))
    assert files_of(build(config, tokenizer=ByteTokenizerConfig().build(), schema=text_schema(64, 257))) == [str(path)]
    for items, names in (
        (ClassFolder(tmp_path, [(0, "1.png"), (1, "2/3.png")], ("cat", "dog"), 100), ["cat/1.png", "dog/2/3.png"]),
        (MaskFolder(tmp_path, [("1.jpg", "1.png")], 100), ["images/1.jpg", "masks/1.png"]),
    ):
        rows: Any = ItemRows(items, ShuffledOrder(None, seed=1, split=0))
        assert files_of(rows) == [f"{tmp_path}/{name}" for name in names]
