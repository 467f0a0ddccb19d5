"""Confusion matrix of a classifier: a table for the terminal, and a picture in the run's folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.display.charts import Matrix, save_png
from megajax.inference.sample import TrainedRun

ROWS, BATCH = 2048, 64
"""Maximum number of rows, and rows of a forward pass."""
MAX_TABLE_CLASSES, PAIRS = 20, 8
"""Maximum number of classes in a table; number of pairs in the list for more classes."""
PICTURE = "confusion.png"


def sample(run: TrainedRun, folder: Path) -> str | None:
    """The confusion matrix of the test rows, or else of the validation rows; None without either."""
    splits = run.parts.splits
    split, source = ("test", splits.test) if splits.test is not None else ("validation", splits.valid)
    if source is None:
        return None
    counts = confusion(run, source)
    names = class_names(source, len(counts))
    title = f"{split}: {np.trace(counts) / max(counts.sum(), 1):.2%} of {counts.sum():,} right"
    chart = Matrix(title=title, x_label="predicted", y_label="actual", names=names, counts=counts.tolist())
    try:
        inches = min(4 + 0.4 * len(names), 16)
        save_png(chart.plot, folder / PICTURE, inches=(inches, inches), dpi=110)
        picture = f"confusion of classes: {folder / PICTURE}"
    except ModuleNotFoundError as error:
        picture = f"{PICTURE} not drawn: {error}"
    return f"{title}\n{table(counts, names) if len(names) <= MAX_TABLE_CLASSES else pairs(counts, names)}\n{picture}"


def confusion(run: TrainedRun, source: Any) -> np.ndarray:
    """int64 [K, K]: number of images, or pixels, of class i that were classified as j."""
    counts, ignored = None, run.cfg.model.schema()["labels"].ignored
    for first in range(0, min(len(source), ROWS), BATCH):
        rows = [source[row] for row in range(first, min(first + BATCH, len(source), ROWS))]
        logits = np.asarray(run.model(images=np.stack([row["images"] for row in rows])))
        if counts is None:
            counts = np.zeros((logits.shape[-1],) * 2, np.int64)
        labels = np.stack([row["labels"] for row in rows])
        labelled = np.ones(labels.shape, bool) if ignored is None else labels != ignored
        np.add.at(counts, (labels[labelled], logits.argmax(-1)[labelled]), 1)
    return np.zeros((0, 0), np.int64) if counts is None else counts


def class_names(source: Any, count: int) -> list[str]:
    """Names of the classes if the data has them, else numbers."""
    class_list: Sequence[str] = getattr(getattr(source, "items", None), "classes", ())
    class_list = class_list if isinstance(class_list, Sequence) else ()
    return [*class_list[:count], *(str(number) for number in range(len(class_list[:count]), count))]


def table(counts: np.ndarray, names: Sequence[str]) -> str:
    """A line for each actual class, a column for each predicted one."""
    width = max(4, *(len(str(count)) for count in counts.flat))
    wide = max(map(len, names))
    lines = [" " * wide + "".join(f" {name[:width]:>{width}}" for name in names) + "  right"]
    for name, row, correct in zip(names, counts, counts.diagonal(), strict=True):
        cells = "".join(f" {count or '.':>{width}}" for count in row)
        lines.append(f"{name:>{wide}}{cells}  {correct / max(row.sum(), 1):.1%}")
    return "\n".join(lines)


def pairs(counts: np.ndarray, names: Sequence[str]) -> str:
    """The pairs of classes that are confused most often."""
    errors = counts - np.diag(counts.diagonal())
    order = np.argsort(errors, axis=None, kind="stable")[::-1][:PAIRS]
    confused = [(*np.unravel_index(place, errors.shape), errors.flat[place]) for place in order if errors.flat[place]]
    return "\n".join(f"{names[true]} taken for {names[predicted]}: {count}" for true, predicted, count in confused)
