"""Writes the likeliest tokens of a teacher to files beside token files, for distillation without the teacher."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from megajax.config.errors import UserError
from megajax.data.text.indexed_dataset import IndexedTokens, integer_tokens
from megajax.data.text.teacher_files import UNKNOWN, TeacherOrigin, TeacherWriter, teacher_path
from megajax.mesh.processes.peers import Peers
from megajax.models.protocol import ids_below
from megajax.storage.index_cache import index_folder
from megajax.storage.reading import with_retries
from megajax.tasks.config import TeacherTaskConfig
from megajax.tasks.loglikelihood import demand_ids
from megajax.tasks.perplexity import windows
from megajax.training.reference import weights_checksum
from megajax.training.scoring import Figure, Figures, Scorer

BATCHES = 16
"""Records are written after this many full batches of the scorer."""


class StoredTeacher:
    """Writes the files, and goes on where an earlier attempt stopped."""

    def __init__(self, config: TeacherTaskConfig, scorer: Scorer):
        """Raises UserError for token files that can't be read, or with ids that the model does not have."""
        self._config, self._scorer = config, scorer
        self._files = [(path, integer_tokens(path)) for path in config.paths]
        self._vocabulary = ids_below(scorer.program.cfg.model) or 0
        if config.k > self._vocabulary:
            raise UserError(f"k={config.k} is more than the {self._vocabulary} token ids of the model: lower it")
        if (stride := config.stride or scorer.length) > scorer.length:
            raise UserError(
                f"stride={stride} is above the {scorer.length} tokens of a row: use {scorer.length} or less"
            )
        self._stride = stride

    def __call__(self) -> Figures:
        """`tokens` of all files, `written` now, and `share`, the mean probability of the K likeliest of those."""
        checksum, written, shares = weights_checksum(self._scorer.weights, self._scorer.program.declared), 0, 0.0
        for path, tokens in self._files:
            for log_p in self._write(path, tokens, checksum):
                written, shares = written + len(log_p), shares + float(-np.expm1(log_p[:, -1].astype(np.float64)).sum())
        total = sum(tokens.total for _, tokens in self._files)
        share = {"share": Figure(shares / written, count=written)} if written else {}
        return {"tokens": Figure(total, count=total), "written": Figure(written), **share}

    def _write(self, path: str, tokens: IndexedTokens, checksum: str) -> Iterator[np.ndarray]:
        """Write the records of a file that are missing -> the log-probabilities of each part [n, K + 1]."""
        config, scorer, peers = self._config, self._scorer, Peers()
        origin = TeacherOrigin(
            data=tokens.identity(index_folder(None)),
            tokenizer=scorer.tokenizer.identity,
            vocabulary=self._vocabulary,
            teacher=checksum,
            k=config.k,
            temperature=config.temperature,
            length=scorer.length,
            stride=self._stride,
            compute=scorer.program.cfg.precision.compute,
        )
        writer = TeacherWriter(teacher_path(path, config.folder), origin)
        peers.check(writer.open if peers.first else lambda: None)
        writer.records = peers.broadcast(writer.records)
        most = BATCHES * scorer.rows_at_once(scorer.length) * scorer.length
        ends = np.cumsum(tokens.lengths.astype(np.int64))
        while writer.records < tokens.total:
            first = int(np.searchsorted(ends, writer.records, side="right"))
            last = max(int(np.searchsorted(ends, writer.records + most, side="right")), first + 1)
            ids, log_p = self._records(path, tokens, first, last)
            peers.check((lambda part=(ids, log_p): writer.add(*part)) if peers.first else lambda: None)
            writer.records = int(ends[last - 1])
            scorer.progress(writer.records, tokens.total)
            yield log_p[ids[:, 0] != UNKNOWN]

    def _records(self, path: str, tokens: IndexedTokens, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """The records of sequences [first, last): int32 [n, K], float32 [n, K + 1]."""
        config, scorer = self._config, self._scorer
        text = with_retries(lambda: tokens.read(first, last), path).astype(np.int32)
        demand_ids(text, scorer, path)
        starts = np.cumsum([0, *tokens.lengths[first:last]])
        ids = np.full((len(text), config.k), UNKNOWN, np.int32)
        log_p = np.zeros((len(text), config.k + 1), np.float32)
        documents = [text[start:end] for start, end in pairwise(starts.tolist())]
        parts = [[*windows(document, scorer.length, self._stride)] for document in documents]
        scores = iter(scorer.likeliest([window for part in parts for window in part], config.k, config.temperature))
        for start, part in zip(starts.tolist(), parts, strict=False):
            place = start + 1
            for window in part:
                of_window = slice(place, place + window.counted)
                ids[of_window], log_p[of_window] = next(scores)
                place += window.counted
        return ids, log_p
