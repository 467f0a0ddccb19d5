"""What a model says of the images of validation rows, beside the answers in the data."""

from pathlib import Path
from typing import Any

import numpy as np

from megajax.inference.sample import Trained
from megajax.text import visible
from megajax.tokenizers.base import Tokenizer

ROWS, SHOWN, BATCH = 256, 5, 32
"""Validation rows that are answered, those that are printed, and those of one forward pass."""


def sample(run: Trained, folder: Path) -> str | None:
    """Some captions, and the share of rows in which every token of the answer is right; None without validation rows.

    The share is that of greedy decoding: a row counts if each token is the likeliest after the right ones before it.
    """
    del folder
    valid, tokenizer = run.parts.splits.valid, run.parts.tokenizer
    if valid is None or not len(valid):
        return None
    rows = [valid[number] for number in range(min(ROWS, len(valid)))]
    right, lines = 0, []
    for first in range(0, len(rows), BATCH):
        part = rows[first : first + BATCH]
        for row, predicted in zip(part, likeliest(run, part, tokenizer.vocabulary_size), strict=True):
            counted = np.asarray(row["loss_mask"]) > 0
            right += bool((predicted == row["labels"])[counted].all())
            if len(lines) < SHOWN:
                said, true = (_text(tokenizer, ids[counted]) for ids in (predicted, row["labels"]))
                lines.append(f"  {said}   (data: {true})")
    share = f"captions right: {right} of {len(rows)} validation rows ({right / len(rows):.1%})"
    return "\n".join(["captions of validation images:", *lines, share, ""])


def likeliest(run: Trained, rows: list[Any], vocabulary: int) -> np.ndarray:
    """The likeliest next token at each position of these rows, int32 [rows, S]."""
    read = [name for name in ("tokens", "positions", "segment_ids", "images") if name in rows[0]]
    given = {name: np.stack([row[name] for row in rows]) for name in read}
    return np.asarray(run.model(**given))[..., :vocabulary].argmax(-1)


def _text(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    return visible(tokenizer.decode([int(token) for token in ids if token != tokenizer.eod])).strip()
