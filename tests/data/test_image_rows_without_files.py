"""Synthetic images: rows are deterministic and can be learned."""

from typing import Any

import numpy as np
from image_files import mask_schema, schema
from user_errors import user_error

from megajax.data.images.config import MockImagesConfig, MockMasksConfig
from megajax.data.rows.loader import read_rows
from megajax.data.rows.splits import Rows


def build(config: Any, rows: Rows, size: int = 16, reads: Any = None) -> Any:
    return config.build(tokenizer=None, schema=reads or schema(size, 10), rows=rows, seed=1)


def arrays(rows: Any, reads: Any) -> tuple[np.ndarray, np.ndarray]:
    block = read_rows(rows, reads, 0, np.arange(len(rows)))
    return block["images"].astype(np.float32).reshape(len(rows), -1), block["labels"]


def test_stripes_show_their_class() -> None:
    splits = build(MockImagesConfig(), Rows(400, 100))
    assert (build(MockImagesConfig(), Rows(400)).train[7]["images"] == splits.train[7]["images"]).all()
    (train, classes), (valid, wanted) = (arrays(part, schema(16, 10)) for part in (splits.train, splits.valid))
    nearest = [((train - image) ** 2).sum(1).argmin() for image in valid]
    assert (classes[nearest] == wanted).mean() > 0.8
    row = build(MockImagesConfig(mixup=0.2), Rows(10)).train[0]
    assert row.keys() == MockImagesConfig(mixup=0.2).leaves().keys()


def test_rectangles_are_where_their_classes_are() -> None:
    reads = mask_schema()
    rows = build(MockMasksConfig(), Rows(50), reads=reads).train
    block = read_rows(rows, reads, 0, np.arange(50))
    assert set(np.unique(block["labels"])) == {0, *range(1, 10), 255}
    green = block["images"][..., 1].astype(int)
    assert green[block["labels"] == 0].min() > 80 and green[block["labels"] > 0].max() < 110


def test_a_seed_that_no_generator_takes_is_refused() -> None:
    with user_error("data.seed"):
        build(MockImagesConfig(seed=-1), Rows(5))
