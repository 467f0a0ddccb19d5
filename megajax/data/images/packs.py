"""Rows of several texts with images."""

import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megajax.config.errors import UserError
from megajax.data.progress_line import Progress
from megajax.data.rows.packing import Packing, best_fit
from megajax.data.rows.row_source import files_of, index_files_of
from megajax.data.rows.shuffled_items import Items, UnreadableItem
from megajax.storage.index_cache import Arrays, load_or_build

THREADS = 8


class SizedTexts(Items, Protocol):
    """Texts with images that can be measured."""

    identity: str
    """Digest of the texts."""

    def samples(self, item: int, generator: np.random.Generator) -> list[Any]:
        """The text. Raises UnreadableItem."""
        ...


class Measure(Protocol):
    """Measures texts for rows of some shape."""

    def identity(self) -> list[str]:
        """Of all that the results depend on."""
        ...

    def __call__(self, sample: Any) -> tuple[int, float]:
        """Tokens of a text in a row, and the share that its images fill of those of a row. Raises UnreadableItem."""
        ...


class Packs:
    """Texts of a row, by number.

    Attributes:
        packing: fill of the rows.
        skipped: reason -> number of unusable texts.
    """

    def __init__(self, items: SizedTexts, packs: Sequence[Sequence[int]], packing: Packing, skipped: Counter[str]):
        self._items, self._packs, self.packing, self.skipped = items, packs, packing, skipped
        self.index_files: tuple[Path, ...] = index_files_of(items)

    def __len__(self) -> int:
        return len(self._packs)

    def name(self, item: int) -> str:
        """Of the first text."""
        first, *rest = self._packs[item]
        return self._items.name(first) + (f" and {len(rest)} more" if rest else "")

    def files(self) -> list[str]:
        """The files of the texts."""
        return files_of(self._items)

    def samples(self, item: int, generator: np.random.Generator) -> list[Any]:
        """The texts of a row. Raises UnreadableItem."""
        return [sample for member in self._packs[item] for sample in self._items.samples(member, generator)]


def packed(items: SizedTexts, length: int, measure: Measure, *, stops: bool, folder: Path) -> Packs:
    """Rows of `length` tokens, each with as many texts as its tokens and images have room for, by best fit.

    Sizes are kept in `folder`. stops: an unusable text is an error; otherwise it is left out.

    Raises:
        UserError: an unusable text, or none that is usable.
    """
    description = {"kind": "room of texts with images", "items": items.identity, "measure": measure.identity()}
    arrays = load_or_build(folder, description | {"stops": stops}, lambda _: _sizes(items, measure, stops=stops))
    usable = np.flatnonzero(arrays["tokens"])
    skipped = Counter(json.loads(arrays["skipped"].tobytes()))
    if not len(usable):
        raise UserError(f"{items.name(0)} and the {len(items) - 1} texts after it: none can be used: {dict(skipped)}")
    tokens = arrays["tokens"][usable]
    # A text needs the larger share of a row that its tokens or its images fill; then neither overflows.
    rooms = best_fit(np.maximum(tokens, np.ceil(arrays["shares"][usable] * length).astype(np.int64)), length)
    packs = Packs(items, [usable[room].tolist() for room in rooms], Packing.of(tokens, rooms, length), skipped)
    packs.index_files += arrays.files
    return packs


def _sizes(items: SizedTexts, measure: Measure, *, stops: bool) -> Arrays:
    """tokens int64 [n], 0 for unusable texts; shares float64 [n]; skipped, uint8: reason -> number as JSON."""
    generator = np.random.default_rng(0)

    def size(item: int) -> tuple[int, float] | UnreadableItem:
        try:
            (sample,) = items.samples(item, generator)
            return measure(sample)
        except UnreadableItem as error:
            return error

    tokens, shares, skipped = np.zeros(len(items), np.int64), np.zeros(len(items)), Counter[str]()
    progress = Progress("texts", "measuring texts with images")
    with ThreadPoolExecutor(THREADS) as threads:
        for item, result in enumerate(threads.map(size, range(len(items)))):
            progress(item + 1, (item + 1) / len(items))
            if not isinstance(result, UnreadableItem):
                tokens[item], shares[item] = result
            elif stops:
                hint = "Repair or remove it, or set data.on_error=skip"
                raise UserError(f"{items.name(item)}: {result}. {hint}") from result
            else:
                skipped[result.reason] += 1
    progress.clear()
    return {"tokens": tokens, "shares": shares, "skipped": np.frombuffer(json.dumps(skipped).encode(), np.uint8)}
