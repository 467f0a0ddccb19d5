"""Synthetic token files without disk access, for tests and to measure speed."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megajax.batch import Schema
from megajax.data.rows.splits import Rows, Splits, parse_split
from megajax.data.text.config import BlendConfig, MockConfig
from megajax.data.text.gpt import DatasetBuilder, Tokenizer
from megajax.data.text.indexed_dataset import SequencePart

DOCUMENTS = 100_000
MAX_DOCUMENT_LENGTH = 4096
SPLIT = "1,1,1"


class MockTokens:
    """100,000 documents of 1 to 4095 tokens; one of length L reads 1, 2, …, L-1 (modulo the vocabulary), end.

    The lengths come from NumPy's `default_rng(0)`, as in Megatron-LM's mock dataset.
    """

    def __init__(self, *, vocabulary_size: int, eod: int):
        self.prefix = Path("mock")
        self.dtype = np.dtype(np.int32)
        self.lengths = np.random.default_rng(0).integers(1, MAX_DOCUMENT_LENGTH, size=DOCUMENTS, dtype=np.int32)
        self._eod = eod
        self._vocabulary_size = vocabulary_size
        self._counting = (np.arange(1, MAX_DOCUMENT_LENGTH + 1) % vocabulary_size).astype(np.int32)

    def sequence(self, number: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens [start, stop) of a document (to its end when stop is None), int32."""
        length = int(self.lengths[number])
        if stop is not None and stop < length:
            return self._counting[start:stop]
        tokens = self._counting[start:length].copy()
        tokens[-1:] = self._eod
        return tokens

    def gather(self, pieces: Sequence[SequencePart]) -> tuple[np.ndarray, list[int]]:
        """Concatenated tokens of parts of documents, and the start of each part in them."""
        parts = [self.sequence(*piece) for piece in pieces]
        sizes = [len(part) for part in parts]
        return np.concatenate(parts), [0, *np.cumsum(sizes[:-1]).tolist()]

    def document_of(self, sequence: int) -> int:
        """The sequence itself: each is a document."""
        return sequence

    def identity(self, folder: Path) -> str:
        """Hash of the parameters of the tokens."""
        del folder
        return hashlib.sha256(f"mock {self._vocabulary_size} {self._eod}".encode()).hexdigest()


def build_splits(config: MockConfig, *, tokenizer: Tokenizer, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Synthetic rows for the splits that a run requests; each split has a third of the documents."""
    blend = BlendConfig(seed=config.seed, isolate_documents=config.isolate_documents)
    builder = DatasetBuilder(blend, tokenizer=tokenizer, sequence_length=schema["tokens"].positions(), seed=seed)
    tokens = MockTokens(vocabulary_size=tokenizer.vocabulary_size, eod=tokenizer.eod)
    return builder.splits([tokens], None, parse_split(SPLIT), rows)
