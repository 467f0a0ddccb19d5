"""Images in folders: one folder for each class, or images/ and masks/."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Self

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.data.images.class_and_mask_rows import Framing, MaskRows, class_rows, demand_classes
from megajax.data.images.config import ClassFoldersConfig, MaskFoldersConfig
from megajax.data.images.decoding import SUFFIXES, Picture, StoredPicture, read_bounded
from megajax.data.progress_line import FileProgress
from megajax.data.rows.shuffled_items import (
    MakeRows,
    ShuffledOrder,
    items_by_label,
    splits_from_items,
    splits_from_shares,
)
from megajax.data.rows.splits import Rows, Splits

KINDS = ("images", "masks")
SPLIT_FOLDERS = {"train": ("train", "training"), "valid": ("val", "valid", "validation"), "test": ("test",)}


class _ImageFiles[Entry]:
    """Images that are files: what was listed of each, and the largest number of pixels."""

    def __init__(self, folder: Path, files: Sequence[Entry], maximum_pixels: int):
        self._folder, self._files, self._maximum_pixels = folder, files, maximum_pixels

    def __len__(self) -> int:
        return len(self._files)

    def name(self, item: int) -> str:
        """Path of the image."""
        raise NotImplementedError

    def picture(self, item: int) -> Picture:
        """The image. Raises UnreadableItem."""
        return self._read(Path(self.name(item)))

    def subset(self, items: np.ndarray) -> Self:
        """Only these images."""
        some = copy(self)
        some._files = [self._files[item] for item in items.tolist()]
        return some

    def _read(self, path: Path) -> StoredPicture:
        return StoredPicture(read_bounded(path, self._maximum_pixels), self._maximum_pixels)


class ClassFolder(_ImageFiles[tuple[int, str]]):
    """The images of a folder with a folder for each class.

    Args:
        folder: parent of the folders of the classes.
        files: (class, name below its folder) of each image.
        classes: names of the classes, sorted.
    """

    def __init__(self, folder: Path, files: Sequence[tuple[int, str]], classes: tuple[str, ...], maximum_pixels: int):
        super().__init__(folder, files, maximum_pixels)
        self.classes = classes

    def name(self, item: int) -> str:
        label, name = self._files[item]
        return str(self._folder / self.classes[label] / name)

    def label(self, item: int) -> int:
        """Number of its class in the order of their names."""
        return self._files[item][0]

    def files(self) -> list[str]:
        """The files that are read."""
        return [f"{self._folder}/{self.classes[label]}/{name}" for label, name in self._files]

    def groups(self) -> list[np.ndarray]:
        """The images of each class."""
        return items_by_label(np.array([label for label, _ in self._files]))


class MaskFolder(_ImageFiles[tuple[str, str]]):
    """The images of a folder, each with a mask of the same name.

    Args:
        folder: parent of images/ and masks/.
        files: names of each image and its mask in these folders.
    """

    def name(self, item: int) -> str:
        return str(self._folder / "images" / self._files[item][0])

    def classes(self, item: int) -> np.ndarray:
        """Class of each pixel, int32 [H, W]. Raises UnreadableItem."""
        return self._read(self._folder / "masks" / self._files[item][1]).classes()

    def files(self) -> list[str]:
        """The files that are read."""
        return [f"{self._folder}/{kind}/{name}" for pair in self._files for kind, name in zip(KINDS, pair, strict=True)]

    def groups(self) -> list[np.ndarray]:
        """All images as one group."""
        return [np.arange(len(self))]


def split_folders(root: Path) -> Mapping[str, Path]:
    """Split -> its folder; empty without train/. Raises UserError if `root` is not a folder."""
    if not root.is_dir():
        raise UserError(f"data.path: no such folder: {root} (looked for in {Path.cwd()})")
    candidates = {name: [root / choice for choice in names] for name, names in SPLIT_FOLDERS.items()}
    existing = {name: [path for path in paths if path.is_dir()] for name, paths in candidates.items()}
    if not existing["train"]:
        return {}
    return {name: paths[0] for name, paths in existing.items() if paths}


def class_names(folder: Path) -> tuple[str, ...]:
    """Names of the folders in a folder, sorted. Raises UserError if there are none."""
    names = tuple(sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."))
    if not names:
        raise UserError(
            f"{folder}: has no folders. Put the images into a folder for each class: {folder}/CLASS/NAME.jpg"
        )
    return names


def class_files(folder: Path, classes: Mapping[str, int]) -> list[tuple[int, str]]:
    """(class, path below the class's folder) of all images in a folder of classes, sorted.

    Raises UserError for a class that is not in `classes`, or if there are no images.
    """
    files: list[tuple[int, str]] = []
    progress = FileProgress("images", f"listing {folder}")
    for number, name in enumerate(class_names(folder), 1):
        if name not in classes:
            raise UserError(f"{folder / name}: no such class in the training data, which has {', '.join(classes)}")
        files += [(classes[name], path) for path in sorted(_images_below(folder / name))]
        progress(len(files), number / len(classes))
    progress.clear()
    if not files:
        raise UserError(f"{folder}: no images ({', '.join(SUFFIXES)}) in its {len(classes)} folders")
    return files


def _images_below(folder: Path) -> Iterator[str]:
    for place, _, names in os.walk(folder):
        inside = os.path.relpath(place, folder)
        before = "" if inside == os.curdir else f"{inside}/"
        yield from (before + name for name in names if name.lower().endswith(SUFFIXES))


def mask_files(folder: Path) -> list[tuple[str, str]]:
    """(image, mask) names in images/ and masks/, sorted. Raises UserError for an image without a mask."""
    stems: list[dict[str, str]] = []
    for kind in KINDS:
        if not (folder / kind).is_dir():
            raise UserError(f"{folder}: has no folder {kind}/. Segmentation needs images/NAME.jpg and masks/NAME.png")
        names = (entry.name for entry in os.scandir(folder / kind) if entry.is_file())
        stems.append({Path(name).stem: name for name in names if Path(name).suffix.lower() in SUFFIXES})
    images, masks = stems
    if lacking := sorted(images.keys() - masks.keys()):
        more = f", and {len(lacking) - 1} more images have none" if len(lacking) > 1 else ""
        raise UserError(f"{folder / 'images' / images[lacking[0]]}: no mask {lacking[0]} in {folder / 'masks'}{more}")
    if not images:
        raise UserError(f"{folder / 'images'}: no images ({', '.join(SUFFIXES)})")
    return [(images[stem], masks[stem]) for stem in sorted(images)]


def _splits(config: Any, rows: Rows, open_folder: Callable[[Path], Any], make: MakeRows) -> Splits:
    root = Path(config.path).expanduser()
    if folders := split_folders(root):
        return splits_from_items(lambda name: open_folder(folders[name]) if name in folders else None, rows, make)
    return splits_from_shares(open_folder(root), config.split, rows, make, str(root))


def build_classes(config: ClassFoldersConfig, *, tokenizer: object, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of images with a class each, for the splits that a run requests; see `ClassRows`.

    Raises UserError: no such folders or images, more classes than the model has.
    """
    del tokenizer
    root = Path(config.path).expanduser()
    names = class_names(split_folders(root).get("train", root))
    demand_classes(len(names), schema, str(root))
    numbers = {name: number for number, name in enumerate(names)}

    def read(folder: Path) -> ClassFolder:
        return ClassFolder(folder, class_files(folder, numbers), names, config.maximum_pixels)

    return _splits(config, rows, read, class_rows(config, schema, seed))


def build_masks(config: MaskFoldersConfig, *, tokenizer: object, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of images with a class for each pixel, for the splits that a run requests; see `MaskRows`.

    Raises UserError: no such folders or images, an image without a mask.
    """
    del tokenizer

    def read(folder: Path) -> MaskFolder:
        return MaskFolder(folder, mask_files(folder), config.maximum_pixels)

    def make(items: MaskFolder, position: int, row_count: int | None) -> MaskRows:
        order = ShuffledOrder.of(config, row_count, seed, position)
        return MaskRows(items, order, framing=Framing.of(config, schema, position), classes=config.classes)

    return _splits(config, rows, read, make)
