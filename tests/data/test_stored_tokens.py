"""Token files in object stores: rows byte for byte as from disk, blocks on the disk, faults."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_stores import faulty, serving
from token_files import write
from user_errors import user_error

from megajax.config.compose import problems_of
from megajax.data.masked.config import PairsConfig
from megajax.data.rows.splits import Rows
from megajax.data.text.config import BlendConfig
from megajax.data.text.indexed_dataset import IndexedTokens, integer_tokens
from megajax.data.translation_pairs import PairsBuilder
from megajax.models.decoder.config import text_schema
from megajax.storage import ranged_files, stores
from megajax.storage.disk import write_whole
from megajax.storage.ranged_files import BlockCache
from megajax.storage.retried_reads import ChangedFile
from megajax.tokenizers.config import NullTokenizerConfig

DOCUMENTS = [
    np.arange(start, start + length, dtype=np.uint16) for start, length in ((7, 900), (40, 1), (3, 5000), (9, 3000))
]


def written(prefix: Path, documents: list[np.ndarray] = DOCUMENTS) -> IndexedTokens:
    return IndexedTokens(write(prefix, documents))


def uploaded(prefix: Path, url: str) -> None:
    store = stores.open_store(url.rpartition("/")[0])
    for suffix in (".bin", ".idx"):
        store.write(url.rpartition("/")[2] + suffix, Path(f"{prefix}{suffix}").read_bytes())


@pytest.fixture(scope="module", params=["s3", pytest.param("gs", marks=pytest.mark.slow)])
def bucket(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, serving(request.param, tmp_path_factory.mktemp("cache")) as url:
        patch.setattr(ranged_files, "BLOCK", 1024)
        yield url


def pieces() -> list[tuple[int, int, int | None]]:
    return [(2, 100, 3000), (0, 0, None), (3, 2999, None), (1, 0, 1), (2, 4999, 5000)]


def test_rows_are_those_of_the_disk_and_blocks_are_kept(bucket: str, tmp_path: Path) -> None:
    local, url = written(tmp_path / "text"), f"{bucket}/folder/text"
    uploaded(tmp_path / "text", url)
    blocks = BlockCache(tmp_path / "blocks")
    stored = IndexedTokens(url, blocks=blocks)
    assert str(stored.prefix) == url and len(stored) == len(local) and stored.total == local.total
    np.testing.assert_array_equal(stored.read_all(), local.read_all())
    (tokens, starts), (expected, begins) = stored.gather(pieces()), local.gather(pieces())
    np.testing.assert_array_equal(tokens, expected)
    assert starts == begins
    assert stored.identity(tmp_path / "indices") == local.identity(tmp_path / "indices")
    # A second run finds the blocks: only the sizes and generations are asked for.
    (kept,) = {path.parent for path in blocks.folder.glob("*/0000????")}
    assert len(list(kept.iterdir())) == -(-local.total * 2 // 1024)
    stores.open_store(url.rpartition("/")[0]).delete("text.bin")
    uploaded(tmp_path / "text", url)
    reader = IndexedTokens(url, blocks=BlockCache(tmp_path / "blocks"))
    np.testing.assert_array_equal(reader.document(2), DOCUMENTS[2])


def test_rows_of_a_blend_are_those_of_files(bucket: str, tmp_path: Path) -> None:
    written(tmp_path / "text")
    written(tmp_path / "other", [document[::-1] for document in DOCUMENTS])
    uploaded(tmp_path / "text", f"{bucket}/blend/text")

    def rows(path: str, cache: str) -> list[np.ndarray]:
        data = BlendConfig(
            paths=("0.7", path, "0.3", str(tmp_path / "other")), split="1,0,0", cache_dir=str(tmp_path / cache)
        )
        assert problems_of(data) == []
        tokenizer = NullTokenizerConfig(vocabulary_size=70000).build()
        splits = data.build(tokenizer=tokenizer, schema=text_schema(32, 2**31), rows=Rows(100), seed=1)
        assert splits.train is not None
        return [splits.train[row]["tokens"] for row in range(100)]

    np.testing.assert_array_equal(rows(f"{bucket}/blend/text", "stored"), rows(str(tmp_path / "text"), "local"))
    assert list((tmp_path / "stored/blocks").glob("*/00000000"))


def test_files_are_read_whole_before_the_start_where_they_fit(bucket: str, tmp_path: Path, monkeypatch) -> None:
    written(tmp_path / "text")
    uploaded(tmp_path / "text", f"{bucket}/whole/text")
    blocks = BlockCache(tmp_path / "blocks")
    tokens = integer_tokens(f"{bucket}/whole/text", blocks, prefetch=True)
    assert len(list(blocks.folder.glob("*/0000????"))) == 18
    stores.open_store(f"{bucket}/whole").delete("text.bin")
    np.testing.assert_array_equal(tokens.document(2), DOCUMENTS[2])
    uploaded(tmp_path / "text", f"{bucket}/whole/text")
    with user_error("data.prefetch"):
        integer_tokens(f"{bucket}/whole/text", BlockCache(tmp_path / "small", gib=1e-5), prefetch=True)
    refusing = BlockCache(tmp_path / "refusing")

    def refused(path: Path, content: bytes) -> None:
        if path.suffix != ".idx":
            raise OSError(28, "No space left on device")
        write_whole(path, content)

    monkeypatch.setattr(ranged_files, "write_whole", refused)
    with user_error("data.prefetch"):
        integer_tokens(f"{bucket}/whole/text", refusing, prefetch=True)


def test_both_sides_of_pairs_are_read_into_the_cache(bucket: str, tmp_path: Path) -> None:
    data = PairsConfig(paths=(f"{bucket}/pairs/text",), cache_dir=str(tmp_path / "cache"), prefetch=True)
    for side in data.token_files(f"{bucket}/pairs/text"):
        written(tmp_path / "side")
        uploaded(tmp_path / "side", side)
    none: Any = None
    tokens = PairsBuilder(data, lengths=(64, 64), tokenizer=none, seed=1).read(data.paths[0], prefetch=True)
    assert str(tokens.prefix) == data.paths[0]
    np.testing.assert_array_equal(tokens.pair(2)[1], DOCUMENTS[2])
    assert len(list((tmp_path / "cache/blocks").glob("*/00000000"))) == 2


def test_a_damaged_block_is_read_again_and_old_blocks_are_deleted(bucket: str, tmp_path: Path) -> None:
    written(tmp_path / "text")
    uploaded(tmp_path / "text", f"{bucket}/text")
    blocks = BlockCache(tmp_path / "blocks")
    np.testing.assert_array_equal(IndexedTokens(f"{bucket}/text", blocks=blocks).document(2), DOCUMENTS[2])
    block = next(path for path in sorted(blocks.folder.glob("*/00000003")))
    block.write_bytes(b"x" + block.read_bytes()[1:])
    fresh = IndexedTokens(f"{bucket}/text", blocks=BlockCache(tmp_path / "blocks"))
    np.testing.assert_array_equal(fresh.document(2), DOCUMENTS[2])
    small = BlockCache(tmp_path / "small", gib=4 * 1100 / 2**30)
    tokens = IndexedTokens(f"{bucket}/text", blocks=small)
    for number, document in enumerate(DOCUMENTS):
        np.testing.assert_array_equal(tokens.document(number), document)
    sizes = [path.stat().st_size for path in small.folder.glob("*/0000????")]
    assert 0 < sum(sizes) <= 4 * 1100


def test_files_that_are_missing_replaced_or_of_another_index(bucket: str, tmp_path: Path) -> None:
    with user_error():
        IndexedTokens(f"{bucket}/nothing/text", blocks=BlockCache(tmp_path / "blocks"))
    written(tmp_path / "text")
    written(tmp_path / "other", DOCUMENTS[:2])
    url = f"{bucket}/changing/text"
    uploaded(tmp_path / "text", url)
    tokens = IndexedTokens(url, blocks=BlockCache(tmp_path / "blocks"))
    tokens.document(0)
    stores.open_store(f"{bucket}/changing").write("text.bin", bytes(17802))
    tokens.document(0)
    with user_error(kind=ChangedFile):
        tokens.document(3)
    stores.open_store(f"{bucket}/changing").write("text.bin", (tmp_path / "other.bin").read_bytes())
    with user_error(kind=ChangedFile):
        tokens.document(3)
    with user_error():
        IndexedTokens(url, blocks=BlockCache(tmp_path / "blocks"))


@pytest.mark.slow
def test_a_failing_store_is_retried_then_refused_in_one_line(bucket: str, tmp_path: Path) -> None:
    written(tmp_path / "text")
    uploaded(tmp_path / "text", f"{bucket}/faults/text")
    with faulty(bucket, 3) as proxy:
        tokens = IndexedTokens(f"{bucket}/faults/text", blocks=BlockCache(tmp_path / "blocks"))
        for number, (fault, count) in enumerate((("503", 3), ("500", 2), ("cut", 1))):
            proxy.inject(fault, count)
            np.testing.assert_array_equal(tokens.document(number), DOCUMENTS[number])
        tokens = IndexedTokens(f"{bucket}/faults/text", blocks=BlockCache(tmp_path / "others"))
        proxy.inject("503", 1000)
        with user_error() as raised:
            tokens.document(3)
        assert "\n" not in str(raised.value) and "AKIATESTKEY" not in str(raised.value)
        proxy.inject("503", 0)
        np.testing.assert_array_equal(tokens.document(3), DOCUMENTS[3])
