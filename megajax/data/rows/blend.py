"""Blends of datasets: the dataset of each row, and the number of rows of each dataset; files in stores are shared."""

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from megajax.config.errors import UserError
from megajax.config.paths_and_store_urls import store_url
from megajax.data.rows.balancing import lengths_of_row
from megajax.data.rows.config import TokenFilesConfig
from megajax.data.rows.row_source import check_row, damaged_index, data_seed, files_of
from megajax.data.rows.splits import Range, Rows, Splits, config_paths, parse_paths, parse_split, split_bounds
from megajax.processes.reading_once import copy_from_first, read_by_first
from megajax.storage.index_cache import Arrays, NewArray, index_folder, load_or_build
from megajax.storage.local_copies import copy_path
from megajax.storage.ranged_files import INDEX, BlockCache
from megajax.storage.stores import in_parallel


def share_indices(paths: Iterable[str], open_file: Callable[[str], object], blocks: BlockCache) -> None:
    """Reads the indices of paths in stores into `blocks`, so that each process can open them without a request.

    A collective if there are any; paths are equal on all processes. open_file: opens the token files of a path with
    `blocks`. Raises UserError on all processes for missing or damaged files.
    """
    stored = [path for path in paths if store_url(path) is not None]
    if not stored:
        return

    def look() -> dict[str, str]:
        in_parallel(open_file, stored)
        return {url: generation.hex() for url, generation in blocks.generations.items()}

    generations = read_by_first(look)
    blocks.generations |= {url: bytes.fromhex(text) for url, text in generations.items()}
    copy_from_first([copy_path(url, blocks) for url in generations if url.endswith(INDEX)])


MAXIMUM_DATASETS = 32766
"""Dataset numbers are int16."""
CHUNK = 1 << 20
"""Rows that are numbered at a time, to limit memory."""
LONG_BLOCK = 4096
"""Rows whose target counts are computed at a time for few datasets."""
BLOCK, MANY = 128, 150
"""Rows that are computed at a time for more than `MANY` datasets, of which few may get one of them."""


class Dataset(Protocol):
    """Rows of one token file by number: `len` and `[i]` -> dict of arrays."""

    tokens: Any
    """The token file."""
    sequence_length: int
    passes: int
    """Number of epochs over the split."""
    index_files: tuple[Path, ...]
    """The cache files of the index."""

    def order(self) -> str: ...
    def __len__(self) -> int: ...
    def __getitem__(self, row: int) -> dict[str, np.ndarray]: ...


class BlendIndex(NamedTuple):
    """Row i of a blend is row `samples[i]` of dataset `datasets[i]`."""

    datasets: np.ndarray
    """int16 [n]."""
    samples: np.ndarray
    """int64 [n]."""
    counts: np.ndarray
    """int64 [D], number of rows of each dataset."""


def normalize_weights(weights: Sequence[float]) -> np.ndarray:
    """Weights scaled to a sum of 1, float64."""
    values = np.array(weights, np.float64)
    return values / np.sum(values)


def rows_by_weight(rows: int, weights: np.ndarray, surplus: float = 0.0) -> list[int]:
    """Rows of each dataset in a blend of `rows`: rows · weight rounded up, then the surplus, rounded up again."""
    return [math.ceil(math.ceil(rows * weight) * (1 + surplus)) for weight in weights.tolist()]


def _greedy(weights: np.ndarray, sequence: np.ndarray, limits: np.ndarray | None = None) -> None:
    """Writes, for each row, the dataset with the largest shortfall (the first among equals), int16 [rows].

    The shortfall w_d · max(i, 1) - count_d is computed in float64 in this order, because rounding decides near-ties.
    A row takes 1 to 1.5 us for 2 to 5,000 datasets. limits: maximum number of rows of each dataset.
    """
    rows, counts = len(sequence), np.zeros(len(weights))
    if limits is not None:
        counts[limits == 0] = np.inf
    block = BLOCK if len(weights) > MANY else LONG_BLOCK
    for start in range(0, rows, block):
        positions = np.maximum(np.arange(start, min(start + block, rows), dtype=np.float64), 1)
        candidates: np.ndarray | slice = slice(None)
        if len(weights) > MANY:
            candidates = _candidates(weights, positions, counts)
        part, datasets = counts[candidates], []
        shortfall = np.empty(len(part))
        largest, subtract = shortfall.argmax, np.subtract
        ends = None if limits is None else limits[candidates]
        for targets in np.multiply.outer(positions, weights[candidates]):
            subtract(targets, part, shortfall)
            dataset = largest()
            part[dataset] += 1
            datasets.append(dataset)
            if ends is not None and part[dataset] == ends[dataset]:
                part[dataset] = np.inf
        counts[candidates] = part
        sequence[start : start + len(datasets)] = np.arange(len(weights))[candidates][datasets]


def _candidates(weights: np.ndarray, positions: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The datasets that may get one of n rows, ascending.

    Shortfalls only grow until a dataset gets a row, also when rounded. So at each row, at least one of the n datasets
    with the largest shortfalls at the first row has none of the rows yet, and no less than the n-th largest.
    """
    first = weights * positions[0] - counts
    least = np.partition(first, len(first) - len(positions))[len(first) - len(positions)]
    return np.flatnonzero(weights * positions[-1] - counts >= least)


def _numbered(datasets: np.ndarray, count: int, new: NewArray) -> BlendIndex:
    """Uses the rows of each of `count` datasets in the order 0, 1, 2, …"""
    samples, counts = new(len(datasets), np.int64), np.zeros(count, np.int64)
    for start in range(0, len(datasets), CHUNK):
        part = datasets[start : start + CHUNK]
        by_dataset, sizes = np.argsort(part, kind="stable"), np.bincount(part, minlength=count)
        first = np.repeat(counts - (np.cumsum(sizes) - sizes), sizes)
        samples[start + by_dataset] = first + np.arange(len(part))
        counts += sizes
    return BlendIndex(datasets, samples, counts)


def weighted_index(weights: Sequence[float], rows: int, new: NewArray = np.zeros) -> BlendIndex:
    """Blend index of `rows` rows in proportion to the weights. new: allocates the arrays."""
    datasets = new(rows, np.int16)
    _greedy(normalize_weights(weights), datasets)
    return _numbered(datasets, len(weights), new)


def exhaustive_index(lengths: Sequence[int], new: NewArray = np.zeros) -> BlendIndex:
    """Blend index that uses every row of every dataset once, in proportion to their lengths. new: see above."""
    limits = np.array(lengths, np.float64)
    datasets = new(int(limits.sum()), np.int16)
    _greedy(limits / limits.sum(), datasets, limits)
    return _numbered(datasets, len(lengths), new)


class BlendedDataset:
    """Rows of several datasets in the order of a blend index, with an additional array `dataset_id` (int16).

    Raises:
        UserError: the index needs more rows of a dataset than it has.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        index: BlendIndex,
        weights: Sequence[float],
        index_files: tuple[Path, ...] = (),
    ):
        self.datasets, self.index, self.weights = tuple(datasets), index, tuple(weights)
        for dataset, count in zip(self.datasets, index.counts.tolist(), strict=True):
            if count > len(dataset):
                raise UserError(
                    f"{dataset.tokens.prefix}: the blend draws {count} rows, but only {len(dataset)} were built. "
                    "Raise data.surplus, two- or tenfold."
                )
        self.sequence_length, self._own_files = self.datasets[0].sequence_length, index_files
        self.index_files = (*index_files, *(file for dataset in self.datasets for file in dataset.index_files))
        self.passes = max(dataset.passes for dataset in self.datasets)

    def order(self) -> str:
        """Identifier of the order of the rows; unchanged if rows are appended."""
        weights = f"{zlib.crc32(repr(self.weights).encode()):08x}"
        return "-".join([weights, *(dataset.order() for dataset in self.datasets)])

    def files(self) -> list[str]:
        """The files that are read."""
        return [file for dataset in self.datasets for file in files_of(dataset)]

    def __len__(self) -> int:
        return len(self.index.datasets)

    def document_lengths(self, row: int) -> np.ndarray:
        """Tokens of each document of a row, int64 [D]."""
        dataset, sample = self._place(row)
        return lengths_of_row(self.datasets[dataset], sample)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        check_row(self, row)
        dataset, sample = self._place(row)
        return {"dataset_id": dataset, **self.datasets[dataset][sample]}

    def _place(self, row: int) -> tuple[Any, int]:
        """The dataset of a row, and its row there. Raises UserError if a damaged index has no such row."""
        dataset, sample = self.index.datasets[row], int(self.index.samples[row])
        if not (0 <= dataset < len(self.datasets) and 0 <= sample < len(self.datasets[dataset])):
            raise damaged_index(f"a blend of {len(self.datasets)} datasets", row, self._own_files)
        return dataset, sample


class BlendBuilder[Data: Dataset]:
    """Splits token files and blends them; subclasses make the rows of a file.

    Each index is built once and cached by content.
    """

    def __init__(self, config: TokenFilesConfig, *, seed: int):
        self.config, self.seed = config, data_seed(config.seed, seed)
        self.folder = index_folder(config.cache_dir)
        self.blocks = BlockCache(None if config.cache_dir is None else self.folder / "blocks", config.cache_gib)

    def units(self, tokens: Any) -> int:
        """Number of sequences or documents that the splits share; here documents."""
        return tokens.documents

    def dataset(self, tokens: Any, identity: str, split: str, bounds: tuple[int, int], rows: int | None) -> Data:
        """At least `rows` rows, or one epoch (None), of the units [first, last) of a token file."""
        raise NotImplementedError

    def read(self, path: str, *, prefetch: bool) -> Any:
        """The token file of a path. prefetch: read all of one in an object store first."""
        raise NotImplementedError

    def build(self, rows: Rows) -> Splits:
        """Row sources of the config's files for the splits that a run requests; None for the others.

        One prefix without a weight gives the requested number of rows. A blend with weights has Σ ceil(rows · weight)
        rows. A blend without weights, or for one pass (rows None), reads one epoch of each dataset, in proportion to
        their lengths.

        Raises:
            UserError: missing or damaged files, an empty split with requested rows, or too few tokens.
        """
        config = self.config
        requested = [name for name, count in zip(Rows._fields, rows, strict=True) if count is None or count > 0]
        lists = [config.paths] if config.paths else [getattr(config, f"{name}_paths") for name in requested]
        paths = [path for items in lists if items for path in parse_paths(items)[0]]
        share_indices(paths, lambda path: self.read(path, prefetch=False), self.blocks)
        if config.paths:
            prefixes, weights = parse_paths(config.paths)
            files = [self.read(prefix, prefetch=config.prefetch) for prefix in prefixes]
            return self.splits(
                files, None if weights is None else normalize_weights(weights), parse_split(config.split), rows
            )

        def separate_files(position: int, name: str, count: int | None) -> Data | BlendedDataset | None:
            paths = config_paths(config, name)
            if not paths:
                return None
            prefixes, weights = parse_paths(paths)
            # A single prefix is not a blend, even with a weight: Megatron-LM's rule for lists per split.
            scaled = None if weights is None or len(prefixes) == 1 else normalize_weights(weights)
            return self.source(
                [self.read(prefix, prefetch=config.prefetch) for prefix in prefixes], scaled, (0.0, 1.0), name, count
            )

        return Splits.build(rows, separate_files)

    def splits(
        self, files: Sequence[Any], weights: np.ndarray | None, shares: Sequence[Range | None], rows: Rows
    ) -> Splits:
        """The splits that `rows` requests, each a share of every file; None for validation or test without a share."""

        def shared_files(position: int, name: str, count: int | None) -> Data | BlendedDataset | None:
            share = shares[position]
            return self.source(files, weights, share, name, count) if share is not None or name == "train" else None

        return Splits.build(rows, shared_files)

    def source(
        self, files: Sequence[Any], weights: np.ndarray | None, share: Range | None, split: str, rows: int | None
    ) -> Data | BlendedDataset:
        """The rows of a split, from one token file or a blend of several. Raises UserError for an empty share."""
        if len(files) > MAXIMUM_DATASETS:
            raise UserError(f"a blend of {len(files)} datasets: at most {MAXIMUM_DATASETS} are possible. Merge some.")
        single = len(files) == 1 and weights is None
        counts: Sequence[int | None] = [rows if single else None] * len(files)
        if weights is not None and rows is not None:
            counts = rows_by_weight(rows, weights, self.config.surplus)
        identities = [tokens.identity(self.folder) for tokens in files]
        datasets = []
        for tokens, identity, count in zip(files, identities, counts, strict=True):
            bounds = split_bounds(share, self.units(tokens))
            datasets.append(self.dataset(tokens, identity, split, bounds, count))
        return datasets[0] if single else self._blend(datasets, weights, rows, identities)

    def _blend(
        self, datasets: list[Data], weights: np.ndarray | None, rows: int | None, identities: list[str]
    ) -> BlendedDataset:
        lengths = [len(dataset) for dataset in datasets]
        description = {"kind": "blend", "data": identities, "lengths": lengths, "rows": rows}
        description["weights"] = None if weights is None else weights.tolist()

        def build(new: NewArray) -> Arrays:
            if rows is None:
                index = exhaustive_index(lengths, new)
            elif weights is None:
                index = weighted_index(lengths, min(rows, sum(lengths)), new)
            else:
                index = weighted_index(weights.tolist(), sum(rows_by_weight(rows, weights)), new)
            return index._asdict()

        arrays = load_or_build(self.folder, description, build)
        scaled = lengths if weights is None else weights.tolist()
        return BlendedDataset(datasets, BlendIndex(**arrays), scaled, arrays.files)
