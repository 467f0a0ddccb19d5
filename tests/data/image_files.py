"""Small image files and schemas for the tests of images."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from megajax.batch import Leaf

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def schema(size: int = 16, classes: int | None = 3) -> dict[str, Leaf]:
    return {"images": Leaf("uint8", (size, size, 3), (None,) * 3), "labels": Leaf("int32", below=classes)}


def mask_schema(size: int = 16) -> dict[str, Leaf]:
    return schema(size) | {"labels": Leaf("int32", (size, size), (None, None), below=256)}


def plain(colour: tuple[int, int, int], width: int = 20, height: int = 24) -> Image.Image:
    return Image.new("RGB", (width, height), colour)


def gradient(width: int, height: int) -> Image.Image:
    """Red increases to the right, green downwards."""
    down, across = np.meshgrid(np.linspace(0, 255, height), np.linspace(0, 255, width), indexing="ij")
    return Image.fromarray(np.stack([across, down, np.zeros_like(down)], -1).astype(np.uint8))


def saved(path: Path, image: Image.Image, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def class_folders(root: Path, per_class: int = 10) -> Path:
    for name, colour in COLOURS.items():
        for number in range(per_class):
            saved(root / name / f"{number}.png", plain(colour))
    return root
