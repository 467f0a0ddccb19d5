"""Converts text files to token files, with one or several processes; the result is the same.

Worker processes tokenize chunks of the input into small token files, which are concatenated in the order of the input.
With partitions, each worker reads and tokenizes a part of the input instead. All files are written to a temporary
folder beside the output and renamed at the end.
"""

import functools
import glob
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megajax.config.class_references import USER_FILE
from megajax.config.errors import UserError
from megajax.data.preprocessing.options import TEXT_KEY, Preprocessing
from megajax.data.preprocessing.report import DocumentCounts, PreprocessResult
from megajax.data.preprocessing.text_files import Chunk, TextFile, WholeFile, find_files, find_pairs
from megajax.data.preprocessing.text_formats import TextFormat, format_of, partitions, split_sentences
from megajax.data.text.indexed_dataset import (
    IndexedTokens,
    IndexedWriter,
    check_output,
    index_path,
    token_dtype,
    tokens_path,
)
from megajax.processes.ray_cluster import RayPool
from megajax.processes.worker_pools import LocalPool, deferred_interrupts, in_order
from megajax.storage.atomic_folders import delete_abandoned, hold
from megajax.storage.retried_reads import ReadError, is_transient
from megajax.storage.write_errors import remedy, write_fault
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.config import TokenizerConfig


@dataclass(frozen=True, slots=True)
class _Result:
    """A tokenized chunk or partition, in token files `PREFIX-KEY`; for a piece of a document, its ids in `PREFIX`.

    It contains no ids, because the pool would hang if a worker were killed while sending a long result.

    fault: the first skipped row: its place in the chunk (None: the message names it), and the message.
    """

    counts: DocumentCounts
    prefix: str
    piece: bool = False
    fault: tuple[int | None, str] | None = None


def preprocess_text(
    documents: Iterable[str | bytes],
    prefix: str | Path,
    tokenizer: Tokenizer,
    append_eod: bool = True,
    sentences: Callable[[bytes], Iterable[bytes]] | None = None,
) -> DocumentCounts:
    """Tokenizes documents, in this process, into PREFIX.bin and PREFIX.idx, with one sequence per document.

    A document without tokens adds only a boundary, without an end-of-document token. The files appear at the end.

    Args:
        sentences: splits a document into sentences, each a separate sequence: `split_sentences` or your own rule.

    Raises:
        UserError: PREFIX cannot be written, or the tokenizer rejects a document.

    Example: `mj.preprocess_text(["one document", "another"], "data/small", mj.ByteTokenizerConfig().build())`
    """
    text, tokens = 0, []
    encoder = _DocumentEncoder(tokenizer, append_eod, sentences)
    with IndexedWriter(prefix, encoder.dtype) as writer:
        for document in documents:
            data = document.encode("utf-8", errors="surrogatepass") if isinstance(document, str) else document
            sequences = encoder.sequences(data)
            writer.add_document(sequences)
            text += len(data)
            tokens.append(sum(map(len, sequences)))
    return DocumentCounts(text=text, documents=len(tokens), empty=tokens.count(0), tokens=sum(tokens))


class _DocumentEncoder:
    """Turns documents into sequences."""

    def __init__(self, tokenizer: Tokenizer, append_eod: bool, sentences: Callable[[bytes], Iterable[bytes]] | None):
        self.dtype = token_dtype(tokenizer.vocabulary_size)
        self._encode, self._sentences = tokenizer.encode_bytes, sentences
        self._end = np.array([tokenizer.eod] * append_eod, self.dtype)

    def sequences(self, text: bytes) -> list[np.ndarray]:
        """The nonempty sequences of a document, the last one with the end-of-document token."""
        parts = [text] if self._sentences is None else self._sentences(text)
        sequences = [ids.astype(self.dtype) for ids in map(self._encode, parts) if len(ids)]
        if sequences:
            sequences[-1] = np.concatenate((sequences[-1], self._end))
        return sequences


def preprocess(
    job: Preprocessing, report: Callable[[DocumentCounts, int], None] = lambda counts, total: None
) -> PreprocessResult:
    """Tokenizes the inputs into one dataset per key. The result does not depend on `workers` or `chunk_bytes`.

    Args:
        report: called after every chunk with the counts so far and the bytes on disk of all inputs.

    Raises:
        UserError: input that is missing, damaged or invalid; output that exists, can't be written or does not fit on
            the disk; a tokenizer that can't be built.
        WorkerDied: a worker was killed or ran out of memory.
    """
    started = time.perf_counter()
    _check_keys(job)
    files = find_pairs(job.inputs, job.targets, job.format) if job.targets else find_files(job.inputs, job.format)
    plain = next((file.path for file in files if file.format == "text"), None)
    if plain is not None and job.keys != (TEXT_KEY,):
        raise UserError(f"{plain}: plain text has no keys {', '.join(job.keys)}. Preprocess it separately.")
    if plain is not None and job.split_sentences and isinstance(job.rule, WholeFile):
        message = "sentences are split within documents: say with --document or --document-regex what a document is"
        raise UserError(f"{plain}: {message}. A whole file is read in pieces.")
    # The files behind a config may have changed since an earlier call in this process.
    _build_tokenizer.cache_clear()
    tokenizer = _build_tokenizer(job.tokenizer)
    final = tuple(job.output(key) for key in job.keys)
    for output in final:
        check_output(output, job.overwrite)
    workers = job.workers if job.ray else min(job.workers, _useful_workers(job, files))
    folder, lock = _working_folder(job.prefix)
    try:
        limited = replace(job, workers=workers)
        counts, fault = _write(limited, tokenizer, files, prefix=str(folder / "all"), report=report)
        if counts.tokens == 0:
            skipped = f" {counts.skipped} rows were skipped, the first: {fault}" if fault else ""
            message = f"No tokens in {len(files)} input file(s), first {files[0].path}; nothing was written."
            raise UserError(f"{message}{skipped}")
        for key, prefix in zip(job.keys, final, strict=True):
            # Opened as training does, which checks every field.
            stored = IndexedTokens(folder / f"all-{key}").documents
            if stored != counts.documents:
                raise RuntimeError(f"{prefix}: {counts.documents} documents were tokenized, {stored} were written.")
        for key, prefix in zip(job.keys, final, strict=True):
            tokens_path(folder / f"all-{key}").replace(tokens_path(prefix))
            index_path(folder / f"all-{key}").replace(index_path(prefix))
    except OSError as error:
        kind = ReadError if is_transient(error) or not remedy(error.errno) else UserError
        at = f" ({error.filename})" if error.filename else ""
        raise kind(f"{job.prefix}: nothing was written: {write_fault(error)}{at}.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
    seconds = time.perf_counter() - started
    return PreprocessResult(
        prefixes=final,
        counts=counts,
        fault=fault,
        settings=job.settings(tokenizer.vocabulary_size),
        seconds=seconds,
        files=len(files),
        workers=workers,
    )


def _check_keys(job: Preprocessing) -> None:
    for key in job.keys:
        if not key or os.sep in key:
            raise UserError(f"--json-keys: {key!r} can't be part of a file name, which PREFIX_KEY_document.bin needs.")
    if len(set(job.keys)) < len(job.keys):
        raise UserError(f"--json-keys: {', '.join(job.keys)}: duplicate key. Name each key once.")
    if job.pairs and len(job.keys) != 2:
        raise UserError(f"--json-keys: {', '.join(job.keys)}: a pair has two texts. Name two keys.")
    if job.pairs and job.split_sentences:
        raise UserError("--split-sentences: the sentences of a pair would not correspond. Leave it out.")


def _working_folder(prefix: str) -> tuple[Path, int]:
    """A new folder beside the output, and the descriptor of its lock. Deletes those of killed processes."""
    parent, name = os.path.split(os.path.abspath(prefix))
    if not name or prefix.endswith(os.sep):
        error_text = f"names a folder; add the beginning of a file name, as in {prefix}corpus."
        raise UserError(f"--output-prefix {prefix}: {error_text}")
    try:
        os.makedirs(parent, exist_ok=True)
        delete_abandoned(Path(parent).glob(f".{glob.escape(name)}.partial-*"))
        folder = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=parent))
        return folder, hold(folder)
    except OSError as error:
        error_text = f"can't write there: {write_fault(error)}."
        raise UserError(f"--output-prefix {prefix}: {error_text}") from error


def _useful_workers(job: Preprocessing, files: list[TextFile]) -> int:
    """Maximum useful number of processes: starting one takes as long as one or two chunks.

    Assumes that text is four times the size of a compressed file.
    """
    configs = (job.tokenizer, getattr(job.tokenizer, "base", None))
    if any(type(config).__module__.startswith(USER_FILE) for config in configs):
        return 1  # other processes can't import the class of a user's file
    text = sum(file.size * (4 if file.compressed else 1) for file in files)
    return max(1, math.ceil(text / (2 * job.chunk_bytes)))


def _write(
    job: Preprocessing,
    tokenizer: Tokenizer,
    files: list[TextFile],
    *,
    prefix: str,
    report: Callable[[DocumentCounts, int], None],
) -> tuple[DocumentCounts, str]:
    """Tokenizes all files into PREFIX-KEY.bin and .idx -> (counts, message about the first skipped row)."""
    total, counts, fault = sum(file.size for file in files), DocumentCounts(), ""
    dtype = token_dtype(tokenizer.vocabulary_size)
    with ExitStack() as stack:
        writers = {key: stack.enter_context(IndexedWriter(f"{prefix}-{key}", dtype)) for key in job.keys}
        pieces: list[np.ndarray] = []
        # Closed before the folder is removed, while workers may still write to it.
        results = stack.enter_context(closing(_tokenize_tasks(job, tokenizer, files, prefix)))
        for chunk, result in results:
            if result.piece:
                pieces.append(np.fromfile(result.prefix, dtype))
                Path(result.prefix).unlink()
                if chunk.is_last:
                    counts += _add_pieces(writers[TEXT_KEY], pieces, tokenizer.eod if job.append_eod else None)
                    pieces.clear()
            else:
                for key, writer in writers.items():
                    part = f"{result.prefix}-{key}"
                    writer.append_index(part)
                    tokens_path(part).unlink()
                    index_path(part).unlink()
            if result.fault and not fault:
                place, error_text = result.fault
                fault = error_text if place is None else _located(job, chunk, place, error_text)
            is_first, counts = counts.stored == 0, counts + result.counts
            if is_first:
                _check_space(Path(prefix).parent, counts, total, dtype.itemsize)
            report(counts, total)
    return counts, fault


def _located(job: Preprocessing, chunk: Chunk, place: int, message: str) -> str:
    return f"{chunk.file.path}, {_format(job, chunk.file).location(chunk, place)}: {message}"


def _format(job: Preprocessing, file: TextFile) -> TextFormat:
    return format_of(file.format, job.rule, job.keys)


def _add_pieces(writer: IndexedWriter, pieces: list[np.ndarray], eod: int | None) -> DocumentCounts:
    """Adds a document from its pieces -> counts of the document and its end-of-document token, without the pieces."""
    size = sum(len(piece) for piece in pieces)
    if size and eod is not None:
        pieces.append(np.array([eod], writer.dtype))
    if size >= np.iinfo(np.int32).max:
        raise UserError(f"A document of {size:,} tokens; the format holds 2,147,483,647. Split it with --document.")
    writer.add_document([np.concatenate(pieces)] if size else [])
    return DocumentCounts(documents=1, empty=int(size == 0), tokens=int(size > 0 and eod is not None))


def _check_space(folder: Path, counts: DocumentCounts, total: int, itemsize: int) -> None:
    """Raises UserError if the tokens of all inputs, extrapolated from the first chunk, don't fit on the disk."""
    free = shutil.disk_usage(folder).free
    needed = counts.tokens * itemsize * total // max(counts.stored, 1)
    if needed > free:
        raise UserError(
            f"{folder.parent}: the tokens will take about {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free. "
            "Choose another --output-prefix or free some space."
        )


def _work(
    job: Preprocessing, tokenizer: Tokenizer, files: list[TextFile]
) -> tuple[Callable[[Preprocessing, Any, str], _Result], Iterator[Any]]:
    """The function that processes call, and its tasks: chunks, or with partitions lists of files."""
    if job.partitions > 1:
        return _partition, iter(partitions(files, job.partitions, functools.partial(_format, job)))
    split = tokenizer.split_point
    return tokenize_chunk, (
        chunk for file in files for chunk in _format(job, file).chunks(file, job.chunk_bytes, split)
    )


def _tokenize_tasks(
    job: Preprocessing, tokenizer: Tokenizer, files: list[TextFile], prefix: str
) -> Generator[tuple[Any, _Result]]:
    """Chunks or lists of files with their results, in order."""
    work, tasks = _work(job, tokenizer, files)
    if job.workers == 1 and job.ray is None:
        for number, task in enumerate(tasks):
            yield task, work(job, task, f"{prefix}.{number}")
        return
    open_pool = partial(LocalPool, job.workers) if job.ray is None else partial(RayPool, job.ray, job.workers)
    with deferred_interrupts() as handle_pending, open_pool() as pool:
        calls = ((task, (work, job, task, f"{prefix}.{number}")) for number, task in enumerate(tasks))
        yield from in_order(pool, calls, handle_pending)


@functools.lru_cache(maxsize=1)
def _build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    return config.build()


def _partition(job: Preprocessing, files: list[TextFile], prefix: str) -> _Result:
    """Tokenizes files, in this process, into token files PREFIX-KEY; runs in workers."""
    single = replace(job, workers=1, partitions=1)
    counts, fault = _write(
        single, _build_tokenizer(job.tokenizer), files, prefix=prefix, report=lambda counts, total: None
    )
    return _Result(counts, prefix, fault=(None, fault) if fault else None)


def tokenize_chunk(job: Preprocessing, chunk: Chunk, prefix: str) -> _Result:
    """Tokenizes one chunk into token files PREFIX-KEY, or a piece of a document into ids in PREFIX; runs in workers.

    Raises:
        UserError: an invalid line or document with on_error "stop"; names the file and the line.
    """
    tokenizer = _build_tokenizer(job.tokenizer)
    dtype = token_dtype(tokenizer.vocabulary_size)
    if chunk.piece:
        data = chunk.text(0, chunk.data)
        try:
            piece = tokenizer.encode_bytes(data).astype(dtype)
        except UserError as error:
            raise UserError(f"{chunk.file.path}: {error}") from error
        piece.tofile(prefix)
        return _Result(DocumentCounts(stored=chunk.stored, text=len(data), tokens=len(piece)), prefix, piece=True)
    text, tokens, skipped, fault = 0, [], 0, None
    kind = _format(job, chunk.file)
    encoder = _DocumentEncoder(tokenizer, job.append_eod, split_sentences if job.split_sentences else None)
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(f"{prefix}-{key}", dtype)) for key in job.keys]
        for place, row in kind.rows(chunk):
            try:
                texts = kind.texts(row)
                documents = [encoder.sequences(data) for data in texts]
                if not all(documents):
                    _check_empty(job, documents)
            except UserError as error:
                if job.on_error == "stop":
                    raise UserError(_located(job, chunk, place, str(error))) from error
                skipped, fault = skipped + 1, fault or (place, str(error))
                continue
            total = 0
            for writer, data, sequences in zip(writers, texts, documents, strict=True):
                writer.add_document(sequences)
                total += sum(map(len, sequences))
                text += len(data)
            tokens.append(total)
    amounts = {"documents": len(tokens), "empty": tokens.count(0), "skipped": skipped, "tokens": sum(tokens)}
    return _Result(DocumentCounts(stored=chunk.stored, text=text, **amounts), prefix, fault=fault)


def _check_empty(job: Preprocessing, documents: list[list[np.ndarray]]) -> None:
    """Raises UserError if a text of the row is empty although the job needs all of them."""
    if job.pairs or job.split_sentences:
        key = job.keys[[bool(sequences) for sequences in documents].index(False)]
        error_text = "the document has no sentence" if job.split_sentences else "one side of the pair is empty"
        raise UserError(f"{error_text}: there is no text under {key!r}. Mend it, or give --on-error=skip.")
