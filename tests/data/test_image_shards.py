"""Images in tar files: the index, its cache, reads by offset, and samples and files that are damaged."""

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import gradient, schema
from user_errors import user_error

from megajax.config.compose import problems_of
from megajax.config.errors import UserError
from megajax.data.images import shards as image_shards
from megajax.data.images.config import ImageShardsConfig
from megajax.data.rows.splits import Rows

type Files = Iterable[tuple[str, bytes]]


def picture(width: int, format: str = "PNG") -> bytes:
    file = io.BytesIO()
    gradient(width, 20).save(file, format)
    return file.getvalue()


def write(path: Path, files: Files) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def samples(first: int, count: int) -> Files:
    """Image n is 20 + n pixels wide and has class n % 3, in turn as .cls and as .json."""
    for n in range(first, first + count):
        yield f"a.b/{n:06}.png", picture(20 + n)
        label = [(".cls", b"%d\n" % (n % 3)), (".json", json.dumps({"label": n % 3, "x": "é"}).encode())][n % 2]
        yield f"a.b/{n:06}{label[0]}", label[1]
        yield f"a.b/{n:06}.txt", b"not read"


def shards(folder: Path, counts: tuple[int, ...] = (4, 5, 6)) -> str:
    for number, count in enumerate(counts):
        write(folder / f"train-{number:03}.tar", samples(sum(counts[:number]), count))
    return str(folder / f"train-{{000..{len(counts) - 1:03}}}.tar")


def build(folder: Path, rows: Rows = Rows(None, 0, 0), classes: int = 3, **options: Any) -> Any:  # noqa: B008
    config = ImageShardsConfig(cache_dir=str(folder / "cache"), **options)
    assert not problems_of(config)
    return config.build(tokenizer=None, schema=schema(classes=classes), rows=rows, seed=1)


NAMES = ["a.jpg", "b/c.cls", "d" * 96 + ".jpg", "e/" * 60 + "f.png", "g" * 150 + "/" + "h" * 120 + ".cls", "ü/ß.jpg"]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("seconds", [0, 1.5])
def test_members_are_those_of_tarfile(tmp_path: Path, format: int, seconds: float) -> None:
    """The archive has folders, links, long names, and the extra headers of webdataset's fractions of seconds."""
    with tarfile.open(tmp_path / "a.tar", "w", format=format) as archive:
        for number, name in enumerate(NAMES):
            if format == tarfile.USTAR_FORMAT and len(name) > 100 and number != 3:
                continue
            member = tarfile.TarInfo(name)
            member.size, member.mtime = number * 200, seconds
            archive.addfile(member, io.BytesIO(bytes([number]) * member.size))
            for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE):
                extra = tarfile.TarInfo(f"other{number}")
                extra.type, extra.linkname = kind, "a.jpg"
                archive.addfile(extra)
    content = (tmp_path / "a.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as archive:
        expected = [(m.name, m.offset_data, m.size) for m in archive if m.isfile()]
    members = [*image_shards.tar_members(lambda start, size: content[start : start + size], len(content))]
    assert members == expected and len(expected) >= 4


def header(name: str, size: bytes, kind: bytes = b"0", content: bytes = b"") -> bytes:
    """A header with any size, and content padded to blocks."""
    head = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
    head[124:136], head[156:157] = size.ljust(12, b"\0"), kind
    head[148:156] = b"%06o\0 " % (sum(head) - sum(head[148:156]) + 8 * ord(" "))
    return bytes(head) + content + bytes(-len(content) % 512)


@pytest.mark.parametrize(
    "members",
    [
        header("a.png", b"-2000"),
        header("a.png", b"0") + header("b.png", b"-1000"),
        header("a.png", b"+10"),
        header("a.png", b"1_0"),
        header("x", b"%o" % 15, b"x", b"14 size=-1024\n") + header("a.png", b"0"),
        header("x", b"%o" % 200, b"x", b"99 size=%b\n" % (b"9" * 150)) + header("a.png", b"0"),
        header("x", b"%o" % 2**17, b"x", bytes(2**17)),
        header("x", b"%o" % 2**17, b"L", bytes(2**17)),
        header("a.png", b"\xff" * 12),
        header("a.png", b"77777777777"),
        header("a.png", b"0", b"S"),
        header("x", b"%o" % 22, b"x", b"22 GNU.sparse.major=1\n"),
    ],
)
def test_false_sizes_are_refused(tmp_path: Path, members: bytes) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(members + bytes(1024))
    with user_error():
        image_shards.scan(path, "label")


def test_a_sample_of_many_files_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(b"".join(header(f"a.{number}", b"0") for number in range(1200)) + bytes(1024))
    rows, unusable = image_shards.scan(path, "label")
    assert not len(rows) and [reason for reason, _ in unusable] == ["too many files"]


def test_a_pattern_of_too_many_files_is_refused() -> None:
    with user_error("data"):
        image_shards.find_shards(["{0..999999999}.tar"])


def test_large_sizes() -> None:
    for size in (10, 2**40):
        member = tarfile.TarInfo("x")
        member.size = size
        assert image_shards._number(member.tobuf(tarfile.GNU_FORMAT)[124:136]) == size


def test_every_image_is_read_once_with_its_class(tmp_path: Path) -> None:
    rows = build(tmp_path, paths=(shards(tmp_path),), split="1").train
    widths = [rows.items.picture(rows.item(row)).size[0] for row in range(15)]
    assert sorted(widths) == list(range(20, 35))
    for row, width in enumerate(widths):
        assert rows[row]["labels"] == (width - 20) % 3 and rows[row]["images"].shape == (16, 16, 3)
        number = width - 20
        place = f"train-{0 if number < 4 else 1 if number < 9 else 2:03}.tar: a.b/{number:06}.png"
        assert rows.items.name(rows.item(row)).endswith(place)


def test_the_index_is_kept_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, scanned = shards(tmp_path), []
    scan = image_shards.scan
    monkeypatch.setattr(image_shards, "scan", lambda path, label: scanned.append(path.name) or scan(path, label))
    orders = [[build(tmp_path, paths=(pattern,)).train.item(row) for row in range(9)] for _ in range(2)]
    assert orders[0] == orders[1] and len(scanned) == 3
    write(tmp_path / "train-001.tar", samples(0, 7))
    assert len(build(tmp_path, paths=(pattern,), split="1").train) == 17 and len(scanned) == 6


def test_splits(tmp_path: Path) -> None:
    shares = build(tmp_path, Rows(None, None, None), paths=(shards(tmp_path),), split="60,20,20")
    assert [len(part) for part in shares] == [9, 3, 3]
    with user_error():
        build(tmp_path, classes=2, paths=(shards(tmp_path),))
    first, second = (str(tmp_path / f"train-00{number}.tar") for number in range(2))
    splits = build(tmp_path, Rows(10, None, 5), train_paths=(first,), valid_paths=(second,))
    assert len(splits.train) == 10 and splits.train.passes == 3 and len(splits.valid) == 5 and splits.test is None


def test_patterns(tmp_path: Path) -> None:
    shards(tmp_path, (1,) * 12)
    stars = image_shards.find_shards([str(tmp_path / "*-01?.tar")])
    assert [path.name for path in stars] == ["train-010.tar", "train-011.tar"]
    braces = image_shards.find_shards([str(tmp_path / "train-{002..004}.tar"), str(tmp_path / "train-000.tar")])
    assert [path.stem[-3:] for path in braces] == ["002", "003", "004", "000"]
    with user_error("data"):
        image_shards.find_shards([str(tmp_path / "none-*.tar")])


LABELS = {"x2.cls": b"1", "x3.cls": b"cat", "x4.json": b'{"class": 1}', "x5.cls": b"-1"}
BAD = sorted(({f"x{n}.png": picture(20) for n in (1, 3, 4, 5)} | LABELS).items())
"""The first has no label, the second no image, and the others labels that are no classes."""


def test_samples_without_image_or_class(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [*samples(0, 3), *BAD])
    with user_error():
        build(tmp_path, paths=(str(tmp_path / "a.tar"),))
    rows = build(tmp_path, paths=(str(tmp_path / "a.tar"),), split="1", on_error="skip").train
    assert len(rows) == 3 and rows.skipped == {"no class": 4, "no image": 1}
    write(tmp_path / "a.tar", BAD)
    with user_error():
        build(tmp_path, paths=(str(tmp_path / "a.tar"),), on_error="skip")


def test_tar_files_that_cannot_be_read(tmp_path: Path) -> None:
    data = write(tmp_path / "whole.tar", samples(0, 3)).read_bytes()
    with tarfile.open(tmp_path / "packed.tar", "w:gz") as archive:
        archive.add(tmp_path / "whole.tar", "x.png")
    (tmp_path / "cut.tar").write_bytes(data[: data.index(b"a.b/000002.png") + 600])
    (tmp_path / "text.tar").write_text("hello" * 1000)
    for name, message in [("packed", "must not be compressed"), ("cut", "cannot be read"), ("text", "cannot be read")]:
        with pytest.raises(UserError, match=rf"{name}\.tar: .*{message}"):
            build(tmp_path, paths=(str(tmp_path / f"{name}.tar"),))
    path = write(tmp_path / "empty.tar", [])
    with user_error():
        build(tmp_path, paths=(str(path),))


def test_a_tar_file_that_is_truncated_after_it_was_indexed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", samples(0, 3))
    rows = build(tmp_path, paths=(str(path),), split="1").train
    path.write_bytes(path.read_bytes()[:600])
    with user_error():
        [rows[row] for row in range(3)]


def test_incompatible_settings() -> None:
    assert [p.setting for p in problems_of(ImageShardsConfig())] == ["paths"]
    config = ImageShardsConfig(paths=("a",), valid_paths=("b",))
    assert "valid_paths" in problems_of(config)[0].message
    assert np.all([not problems_of(ImageShardsConfig(**{name: ("a",)})) for name in ("paths", "train_paths")])
