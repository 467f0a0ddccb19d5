"""Decoding of image files to RGB pixels with Pillow, with a limit on their size (extra `images`)."""

import io
import math
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megajax.config.optional_packages import require
from megajax.data.rows.shuffled_items import UnreadableItem
from megajax.storage.retried_reads import is_transient

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Supported formats. Pillow's other formats start external programs or are not used for training."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
BYTES_PER_PIXEL = 8
HEADER_BYTES = 1 << 20
"""A file may have up to 8 bytes per allowed pixel, plus this many."""
ORIENTATION = 0x0112
"""EXIF tag of the orientation; TURNS: its value -> the operation that turns the image upright."""
TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


class Picture(Protocol):
    """An image, which may have to be decoded."""

    size: tuple[int, int]
    """Width and height."""

    def rgb(self, least: tuple[float, float]) -> Any:
        """The image in Pillow's mode RGB: of `size`, or scaled down to no less than `least` (width, height).

        Raises UnreadableItem.
        """
        ...


class ArrayPicture:
    """An image from an array. pixels: uint8 [H, W, 3]."""

    def __init__(self, pixels: np.ndarray):
        self._image = require("PIL.Image", "Reading images").fromarray(pixels)
        self.size: tuple[int, int] = self._image.size

    def rgb(self, least: tuple[float, float]) -> Any:
        """The image itself."""
        del least
        return self._image


class StoredPicture:
    """An image file, decoded on demand; only its header is read before.

    Applies the EXIF orientation. Drops transparency, keeps the upper 8 of 16 bits, and uses the first image of an
    animation.

    Args:
        data: content of the file.
        maximum_pixels: limit of width times height.

    Raises:
        UnreadableItem: not an image, too large, or damaged.
    """

    def __init__(self, data: bytes, maximum_pixels: int):
        library = require("PIL.Image", "Reading images")
        try:
            self._image = library.open(io.BytesIO(data), formats=FORMATS)
            # For a PNG without a tag, getexif would decode the image.
            tagged = "exif" in self._image.info or self._image.format == "TIFF"
            self._turn = TURNS.get(self._image.getexif().get(ORIENTATION)) if tagged else None
        except library.DecompressionBombError as error:
            raise UnreadableItem("too large", str(error)) from error
        except library.UnidentifiedImageError as error:
            detail = f"{len(data):,} bytes, in none of the formats {', '.join(FORMATS)}"
            raise UnreadableItem("not an image", detail) from error
        except Exception as error:  # a damaged file makes Pillow's readers fail in any way
            raise _corrupt(error) from error
        width, height = self._image.size
        if width * height > maximum_pixels:
            limit = f"{width} x {height} = {width * height:,} pixels, data.maximum_pixels is {maximum_pixels:,}"
            raise UnreadableItem("too large", limit)
        self._across = self._turn in ("TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
        self.size = (height, width) if self._across else (width, height)

    def rgb(self, least: tuple[float, float]) -> Any:
        """Decodes JPEG at 1/2, 1/4 or 1/8 of its size if that suffices, in a fraction of the time."""
        try:
            width, height = least[::-1] if self._across else least
            self._image.draft("RGB", (math.ceil(width), math.ceil(height)))  # nothing for formats other than JPEG
            image = _rgb(self._image)
            methods = require("PIL.Image", "Reading images").Transpose
            return image.transpose(methods[self._turn]) if self._turn else image
        except UnreadableItem:
            raise
        except Exception as error:
            raise _corrupt(error) from error

    def classes(self) -> Any:
        """The image as pixel classes, int32 [H, W]: the values of a grey image, or the indices of a palette."""
        if self._image.mode not in ("1", "L", "P", "I;16", "I;16B", "I"):
            detail = f"the image is {self._image.mode}; the classes of pixels must be grey values or a palette"
            raise UnreadableItem("not a mask", detail)
        try:
            return np.asarray(self._image).astype(np.int32)
        except Exception as error:
            raise _corrupt(error) from error


def read_bounded(path: Path, maximum_pixels: int) -> bytes:
    """The file's content.

    Raises UnreadableItem for a file that is missing or larger than any allowed image; OSError if the disk or file
    server fails.
    """
    try:
        with path.open("rb") as file:
            check_bytes(os.fstat(file.fileno()).st_size, maximum_pixels)
            return file.read()
    except OSError as error:
        raise _unreadable(error) from error
    except ValueError as error:  # a path with a zero byte
        raise UnreadableItem("cannot be read", str(error)) from error


def read_at(path: Path, offset: int, size: int) -> bytes:
    """Bytes of a file, which is opened for each read, since there may be more files than a process can keep open.

    Raises UnreadableItem; OSError if the disk or file server fails.
    """
    try:
        with path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), size, offset)
    except OSError as error:
        raise _unreadable(error) from error
    if len(data) < size:
        raise UnreadableItem("cannot be read", f"{path} ends at byte {offset + len(data)}: it is truncated")
    return data


def _unreadable(error: OSError) -> Exception:
    """An UnreadableItem, unless the error is transient: then the error itself, so that the row is read again."""
    return error if is_transient(error) else UnreadableItem("cannot be read", error.strerror or str(error))


def is_compressed(path: Path) -> bool:
    """Whether the file begins with the magic bytes of gzip, zstd, bzip2 or xz."""
    try:
        with path.open("rb") as file:
            return file.read(4).startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7z"))
    except OSError:
        return False


def check_bytes(size: int, maximum_pixels: int) -> None:
    """Raises UnreadableItem for an empty file, or one larger than any image of `maximum_pixels`."""
    if not size:
        raise UnreadableItem("empty file", "")
    if size > maximum_pixels * BYTES_PER_PIXEL + HEADER_BYTES:
        raise UnreadableItem("too large", f"{size:,} bytes, too many for data.maximum_pixels={maximum_pixels:,}")


def _rgb(image: Any) -> Any:
    if image.mode == "F":
        raise UnreadableItem("unknown pixels", "floating-point values have no known range")
    if image.mode.startswith("I"):  # Pillow's own conversion cuts values off at 255
        values = np.asarray(image) >> 8
        image = require("PIL.Image", "Reading images").fromarray(np.clip(values, 0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode != "RGB":
        return image.convert("RGB")
    image.load()
    return image


def _corrupt(error: Exception) -> UnreadableItem:
    return UnreadableItem("corrupt image", f"{type(error).__name__}: {error}")
