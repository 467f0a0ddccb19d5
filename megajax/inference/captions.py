"""Captions that a model generates for validation images, beside those of the data."""

from pathlib import Path
from typing import Any

import numpy as np

from megajax.display.text import visible
from megajax.inference.sample import TrainedRun
from megajax.tokenizers.base import Tokenizer

ROWS, PRINTED_CAPTIONS, BATCH = 256, 5, 32
"""Maximum number of validation rows, number of printed captions, and rows of a forward pass."""


def sample(run: TrainedRun, folder: Path) -> str | None:
    """Some captions, and the share of rows with every token correct; None without validation rows.

    This is the accuracy of greedy decoding: a row is correct if each token is the likeliest after the true prefix.
    """
    del folder
    valid, tokenizer = run.parts.splits.valid, run.parts.tokenizer
    if valid is None or not len(valid):
        return None
    rows = [valid[number] for number in range(min(ROWS, len(valid)))]
    correct, lines = 0, []
    for first in range(0, len(rows), BATCH):
        part = rows[first : first + BATCH]
        for row, predicted in zip(part, likeliest(run, part, tokenizer.vocabulary_size), strict=True):
            scored = np.asarray(row["loss_mask"]) > 0
            correct += bool((predicted == row["labels"])[scored].all())
            if len(lines) < PRINTED_CAPTIONS:
                predicted_text, true = (_text(tokenizer, ids[scored]) for ids in (predicted, row["labels"]))
                lines.append(f"  {predicted_text}   (data: {true})")
    share = f"captions right: {correct} of {len(rows)} validation rows ({correct / len(rows):.1%})"
    return "\n".join(["captions of validation images:", *lines, share, ""])


def likeliest(run: TrainedRun, rows: list[Any], vocabulary: int) -> np.ndarray:
    """The likeliest next token at each position of these rows, int32 [rows, S]."""
    names = [name for name in ("tokens", "positions", "segment_ids", "images") if name in rows[0]]
    leaves = {name: np.stack([row[name] for row in rows]) for name in names}
    return np.asarray(run.model(**leaves))[..., :vocabulary].argmax(-1)


def _text(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    return visible(tokenizer.decode([int(token) for token in ids if token != tokenizer.eod])).strip()
