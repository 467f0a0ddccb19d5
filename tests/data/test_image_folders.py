"""Images in folders: classes, masks, splits, order of the rows, files that cannot be read."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import COLOURS, class_folders, gradient, mask_schema, plain, saved, schema
from PIL import Image
from user_errors import user_error

from megajax.config.compose import problems_of
from megajax.config.errors import UserError
from megajax.data.images.config import AugmentConfig, ClassFoldersConfig, MaskFoldersConfig
from megajax.data.rows.loader import read_rows
from megajax.data.rows.splits import Rows

ONE_PASS = Rows(None)


def classes(path: Path, rows: Rows = ONE_PASS, seed: int = 1, reads: Any = None, **options: Any) -> Any:
    config = ClassFoldersConfig(path=str(path), **options)
    assert not problems_of(config)
    return config.build(tokenizer=None, schema=reads or schema(), rows=rows, seed=seed)


def test_classes_are_folders_in_order(tmp_path: Path) -> None:
    rows = classes(class_folders(tmp_path), split="1").train
    assert rows.items.classes == ("blue", "green", "red") and len(rows) == 30
    for number in range(30):
        row = rows[number]
        assert row["images"].shape == (16, 16, 3) and row["labels"].dtype == np.int32
        assert (row["images"] == list(COLOURS.values())[row["labels"]]).all()
    block = read_rows(rows, schema(), 0, np.arange(30))
    assert block["images"].dtype == np.uint8 and np.bincount(block["labels"]).tolist() == [10, 10, 10]


def test_splits_are_shares_of_each_class_and_disjoint(tmp_path: Path) -> None:
    class_folders(tmp_path)
    splits = classes(tmp_path, Rows(None, None, None), split="80,10,10")
    names = [[part.items.name(item) for item in range(len(part.items))] for part in splits]
    assert [len(part) for part in names] == [24, 3, 3] and len({*names[0], *names[1], *names[2]}) == 30
    assert sorted(Path(name).parent.name for name in names[1]) == ["blue", "green", "red"]
    reseeded = classes(tmp_path, Rows(None, None, None), split="80,10,10", seed=2)
    assert [reseeded.test.items.name(item) for item in range(3)] == names[2]


def test_folders_of_splits(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", 2)
    saved(tmp_path / "val" / "red" / "deep" / "x.jpg", plain(COLOURS["red"]))
    splits = classes(tmp_path, Rows(None, 4, 1))
    assert len(splits.train) == 6 and splits.test is None
    assert [int(splits.valid[row]["labels"]) for row in range(4)] == [2] * 4
    saved(tmp_path / "val" / "pink" / "x.png", plain((9, 9, 9)))
    with user_error():
        classes(tmp_path, Rows(1, 1))


def test_a_pass_reads_every_image_once_and_the_next_one_in_another_order(tmp_path: Path) -> None:
    rows = classes(class_folders(tmp_path), Rows(75), split="1").train
    passes = [[rows.item(row) for row in range(start, min(start + 30, 75))] for start in (0, 30, 60)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(30)) and len(set(passes[2])) == 15
    assert passes[0] != passes[1] and rows.passes == 3 and len(rows) == 75
    assert rows.order() == classes(tmp_path, Rows(7), split="1").train.order() != ""
    assert rows.order() != classes(tmp_path, Rows(75), split="1", seed=2).train.order()


def test_rows_are_pure_functions_of_seed_and_row(tmp_path: Path) -> None:
    for number in range(6):
        saved(tmp_path / "a" / f"{number}.png", gradient(30 + number, 40))
    options = {"split": "1", "mixup": 0.4, "augment": AugmentConfig(colour=0.3)}
    reads = schema(classes=1)
    rows = classes(tmp_path, Rows(18), reads=reads, **options).train
    ahead = {row: rows[row] for row in reversed(range(18))}
    repeated = classes(tmp_path, Rows(18), reads=reads, **options).train
    for row in range(18):
        assert all((repeated[row][name] == ahead[row][name]).all() for name in ahead[row])
    assert len({values["images"].tobytes() for values in ahead.values()}) == 18
    reseeded = classes(tmp_path, Rows(18), reads=reads, seed=2, **options).train
    assert (reseeded[0]["images"] != ahead[0]["images"]).any()


def test_mixed_images(tmp_path: Path) -> None:
    class_folders(tmp_path, 4)
    splits = classes(tmp_path, Rows(40, 3), mixup=0.5, split="75,25")
    pairs = set()
    for number in range(40):
        row = splits.train[number]
        assert row["mix"].dtype == np.float32 and row["other_labels"].dtype == np.int32
        first, second = (np.array(list(COLOURS.values())[row[name]]) for name in ("labels", "other_labels"))
        expected = float(row["mix"]) * first + (1 - float(row["mix"])) * second
        assert abs(row["images"] - expected).max() <= 0.51
        pairs.add((int(row["labels"]), int(row["other_labels"])))
    assert len(pairs) == 9
    row = splits.valid[0]
    assert row["mix"] == 1 and row["labels"] == row["other_labels"]
    assert ClassFoldersConfig(path="x").leaves() == {"images": "uint8", "labels": "int32", "loss_mask": "float32"}
    assert ClassFoldersConfig(path="x", mixup=0.2).leaves().keys() == row.keys()


def broken(folder: Path) -> Path:
    class_folders(folder, 3)
    data = saved(folder / "red" / "whole.jpg", gradient(60, 60)).read_bytes()
    (folder / "red" / "whole.jpg").unlink()
    (folder / "red" / "cut.jpg").write_bytes(data[: len(data) // 2])
    (folder / "green" / "text.png").write_text("no image")
    (folder / "blue" / "empty.png").write_bytes(b"")
    saved(folder / "blue" / "giant.png", Image.new("1", (3000, 2000)))
    return folder


def test_an_unreadable_image_stops_with_its_name_and_row(tmp_path: Path) -> None:
    rows = classes(broken(tmp_path), split="1", maximum_pixels=1_000_000).train
    messages = {}
    for number in range(len(rows)):
        try:
            rows[number]
        except UserError as error:
            messages[Path(rows.items.name(rows.item(number))).name] = str(error)
            assert f"row {number}:" in str(error) and "data.on_error=skip" in str(error)
    assert messages.keys() == {"cut.jpg", "text.png", "empty.png", "giant.png"}
    assert "truncated" in messages["cut.jpg"].lower() and "in none of the formats" in messages["text.png"]
    assert "3000 x 2000 = 6,000,000 pixels, data.maximum_pixels is 1,000,000" in messages["giant.png"]


def test_threads_read_the_same_rows(tmp_path: Path) -> None:
    """They do over many passes, whose orders are made while others are read."""
    options = {"split": "1", "on_error": "skip", "maximum_pixels": 1_000_000, "augment": AugmentConfig(colour=0.3)}
    sequential, shared = (classes(broken(tmp_path), Rows(130), **options).train for _ in range(2))
    with ThreadPoolExecutor(8) as pool:
        concurrent = list(pool.map(shared.__getitem__, range(130)))
    assert all((sequential[row]["images"] == concurrent[row]["images"]).all() for row in range(130))
    reasons = {"corrupt image", "not an image", "empty file", "too large"}
    assert shared.skipped == sequential.skipped and shared.skipped.keys() == reasons
    assert shared.skipped["too large"] == 10


def test_no_item_can_be_read(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / f"{number}.png").write_text("no image")
    with user_error():
        classes(tmp_path, split="1", on_error="skip").train[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda root: None,
        lambda root: (root / "a").mkdir(),
        lambda root: [(root / name).mkdir() for name in "abcd"],
    ],
)
def test_folders_that_do_not_fit(tmp_path: Path, make: Any) -> None:
    make(tmp_path)
    with user_error():
        classes(tmp_path)


def test_a_path_that_is_not_a_folder(tmp_path: Path) -> None:
    with user_error("data.path"):
        classes(tmp_path / "absent")


def masks(path: Path, rows: Rows = ONE_PASS, **options: Any) -> Any:
    config = MaskFoldersConfig(path=str(path), **options)
    assert not problems_of(config)
    return config.build(tokenizer=None, schema=mask_schema(), rows=rows, seed=1)


def test_image_and_mask_are_cropped_and_flipped_together(tmp_path: Path) -> None:
    """Each pixel's class is its position from left to right, which its red value states too."""
    picture = gradient(60, 40)
    saved(tmp_path / "images" / "a.png", picture)
    places = np.broadcast_to(np.arange(60, dtype=np.uint8), (40, 60))
    saved(tmp_path / "masks" / "a.png", Image.fromarray(places))
    rows = masks(tmp_path, Rows(20), split="1", augment=AugmentConfig(area=(0.2, 1))).train
    rising = set()
    for number in range(20):
        row = rows[number]
        assert row["labels"].dtype == np.int32 and row["labels"].shape == (16, 16)
        middle = (slice(2, -2), slice(2, -2))
        assert abs(row["images"][..., 0][middle] * (59 / 255) - row["labels"][middle]).max() < 2
        rising.add(bool(row["labels"][0, 0] < row["labels"][0, -1]))
    assert rising == {True, False}


def test_masks_that_do_not_fit(tmp_path: Path) -> None:
    saved(tmp_path / "images" / "a.png", plain((1, 2, 3)))
    with user_error():
        masks(tmp_path)
    (tmp_path / "masks").mkdir()
    with user_error():
        masks(tmp_path)
    for mask, message in [
        (Image.new("L", (20, 23)), "the image has 20 x 24 pixels, the mask 20 x 23"),
        (Image.new("RGB", (20, 24)), "image is RGB"),
        (Image.new("L", (20, 24), 7), "the mask has class 7; data.classes=5"),
    ]:
        saved(tmp_path / "masks" / "a.png", mask)
        with pytest.raises(UserError, match=message):
            masks(tmp_path, split="1", classes=5).train[0]
    saved(tmp_path / "masks" / "a.png", Image.new("L", (20, 24), 255))
    assert (masks(tmp_path, split="1", classes=5).train[0]["labels"] == 255).all()
