"""Small token files and tokenizers for the tests of data."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from megajax.data.text.indexed_dataset import IndexedWriter

EOD = 99


def tokenizer(vocabulary_size: int = 100, eod: int = EOD, pad: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(vocabulary_size=vocabulary_size, eod=eod, pad=pad, identity=f"test:{vocabulary_size}:{pad}")


def write(prefix: Path, documents: Iterable[Iterable[int]], dtype: type = np.uint16) -> Path:
    """One sequence a document."""
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document([np.array(list(document), dtype=np.int64)])
    return prefix


def write_random(prefix: Path, *, documents: int, longest: int = 40, seed: int = 0) -> Path:
    """Documents of random length, each ended by EOD."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest, documents)
    return write(prefix, ([*random.integers(0, EOD, n - 1).tolist(), EOD] for n in lengths))
