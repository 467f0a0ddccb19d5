"""Which classes a classifier takes for which: a table at the terminal, and a picture in the run's folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.charts import Matrix, save_png
from megajax.inference.sample import Trained

ROWS, BATCH = 2048, 64
"""Most rows that are looked at, and rows of a forward pass."""
SHOWN, PAIRS = 20, 8
"""Most classes in a table, and pairs of classes that are listed of more."""
PICTURE = "confusion.png"


def sample(run: Trained, folder: Path) -> str | None:
    """Of the test rows, or else of the validation rows; None without either."""
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
    return f"{title}\n{table(counts, names) if len(names) <= SHOWN else pairs(counts, names)}\n{picture}"


def confusion(run: Trained, source: Any) -> np.ndarray:
    """int64 [K, K]: how many images, or pixels, of class i were taken for class j."""
    counts, ignored = None, run.cfg.model.schema()["labels"].ignored
    for first in range(0, min(len(source), ROWS), BATCH):
        rows = [source[row] for row in range(first, min(first + BATCH, len(source), ROWS))]
        logits = np.asarray(run.model(images=np.stack([row["images"] for row in rows])))
        if counts is None:
            counts = np.zeros((logits.shape[-1],) * 2, np.int64)
        labels = np.stack([row["labels"] for row in rows])
        counted = np.ones(labels.shape, bool) if ignored is None else labels != ignored
        np.add.at(counts, (labels[counted], logits.argmax(-1)[counted]), 1)
    return np.zeros((0, 0), np.int64) if counts is None else counts


def class_names(source: Any, count: int) -> list[str]:
    """Those that the data knows, else numbers."""
    known: Sequence[str] = getattr(getattr(source, "items", None), "classes", ())
    known = known if isinstance(known, Sequence) else ()
    return [*known[:count], *(str(number) for number in range(len(known[:count]), count))]


def table(counts: np.ndarray, names: Sequence[str]) -> str:
    """A line for each actual class, a column for each predicted one."""
    width = max(4, *(len(str(count)) for count in counts.flat))
    wide = max(map(len, names))
    lines = [" " * wide + "".join(f" {name[:width]:>{width}}" for name in names) + "  right"]
    for name, row, right in zip(names, counts, counts.diagonal(), strict=True):
        cells = "".join(f" {count or '.':>{width}}" for count in row)
        lines.append(f"{name:>{wide}}{cells}  {right / max(row.sum(), 1):.1%}")
    return "\n".join(lines)


def pairs(counts: np.ndarray, names: Sequence[str]) -> str:
    """The pairs of classes that are confused most."""
    wrong = counts - np.diag(counts.diagonal())
    order = np.argsort(wrong, axis=None, kind="stable")[::-1][:PAIRS]
    confused = [(*np.unravel_index(place, wrong.shape), wrong.flat[place]) for place in order if wrong.flat[place]]
    return "\n".join(f"{names[true]} taken for {names[taken]}: {count}" for true, taken, count in confused)
