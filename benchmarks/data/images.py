"""Speed of decoding and augmenting images."""

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.outcome import rounded
from megajax.batch import Leaf
from megajax.data.images.config import AugmentConfig, ClassFoldersConfig
from megajax.data.images.decoding import StoredPicture
from megajax.data.images.transforms import tile_image
from megajax.data.rows.splits import Rows

WIDTH, HEIGHT, QUALITY = 500, 375, 90
RAND_AUGMENT = AugmentConfig(operations=2, magnitude=9)
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "evaluation": (False, {}),
    "random_crop": (True, {}),
    "rand_augment": (True, {"augment": RAND_AUGMENT}),
    "rand_augment_mixup": (True, {"augment": RAND_AUGMENT, "mixup": 0.2}),
}
"""Name -> whether they are training rows, and settings."""
ROWS = 1 << 20


def photograph(seed: int) -> Image.Image:
    """Noise whose power falls with frequency, as in photographs."""
    draw, pixels = np.random.default_rng(seed), np.zeros((HEIGHT, WIDTH, 3), np.float32)
    for octave in range(1, 8):
        side = 2**octave
        noise = Image.fromarray(draw.integers(0, 256, (side, side, 3), dtype=np.uint8))
        layer = noise.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        pixels += (np.asarray(layer, np.float32) - 128) / octave
    return Image.fromarray(np.clip(128 + pixels, 0, 255).astype(np.uint8))


def write_images(folder: Path, count: int) -> int:
    """Write two classes of images. Returns their mean size in bytes."""
    for number in range(count):
        path = folder / f"class_{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        photograph(number).save(path, quality=QUALITY)
    return sum(path.stat().st_size for path in folder.glob("*/*.jpg")) // count


def build(folder: Path, size: int, training: bool, options: dict[str, Any]) -> Any:
    config = ClassFoldersConfig(path=str(folder), split="1" if training else "0,1", **options)
    schema = {"images": Leaf("uint8", (size, size, 3), (None,) * 3), "labels": Leaf("int32", below=2)}
    rows = Rows(ROWS) if training else Rows(0, ROWS)
    splits = config.build(tokenizer=None, schema=schema, rows=rows, seed=1)
    return splits.train if training else splits.valid


def per_core(work: Callable[[int], Any], seconds: float) -> float:
    """Calls per second of processor time, in this thread."""
    work(0)
    start, count = time.process_time(), 0
    while time.process_time() - start < seconds:
        work(count)
        count += 1
    return count / (time.process_time() - start)


def read_many(source: Any, first: int, count: int) -> int:
    """Read rows and drop them; the work of a pool."""
    for row in range(first, first + count):
        source[row]
    return count


def by_the_clock(pool: Executor, workers: int, source: Any, seconds: float, count: int = 32) -> float:
    """Rows per second of workers that each read `count` rows at a time."""
    list(pool.map(read_many, [source] * workers, range(workers), [2] * workers))
    start, read_count, first = time.perf_counter(), 0, 0
    while time.perf_counter() - start < seconds:
        firsts = range(first, first + workers * count, count)
        read_count += sum(pool.map(read_many, [source] * workers, firsts, [count] * workers))
        first += workers * count
    return read_count / (time.perf_counter() - start)


def images(
    *, images: int = 64, size: int = 224, threads: tuple[int, ...] = (1, 2, 4, 8), seconds: float = 4.0
) -> dict[str, Any]:
    """Speed of decoding and augmenting images, in rows per second and core, and its scaling with threads.

    Writes photograph-like JPEG files of 500 x 375 pixels into a temporary folder and reads rows of --size from them:
    whole decoded images, the centre crop of evaluation, random crops, with RandAugment, with mixup, and tiles for text
    with images. Rows per second and core are by processor time, so other programs do not matter; figures of threads are
    by wall-clock time.
    """
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(images, size, threads, seconds, Path(folder))
    return {"size": size, "image": f"{WIDTH} x {HEIGHT} JPEG"} | rounded(figures)


def measure(count: int, size: int, threads: Sequence[int], seconds: float, folder: Path) -> dict[str, Any]:
    """All speeds."""
    images = folder / "images"
    images.mkdir()
    figures: dict[str, Any] = {"bytes_per_image": write_images(images, count)}
    files = [path.read_bytes() for path in sorted(images.glob("*/*.jpg"))]

    def stored(row: int) -> StoredPicture:
        return StoredPicture(files[row % len(files)], 10**8)

    figures["decode_whole_images_per_second_per_core"] = per_core(lambda row: stored(row).rgb((10**6,) * 2), seconds)
    tiles = per_core(lambda row: tile_image(stored(row), (size, size), 6), seconds)
    figures["tiles_images_per_second_per_core"] = tiles
    sources = {name: build(images, size, *case) for name, case in CASES.items()}
    for name, source in sources.items():
        figures[f"{name}_rows_per_second_per_core"] = per_core(source.__getitem__, seconds)
    path = folder / "tiny" / "class" / "tiny.jpg"
    path.parent.mkdir(parents=True)
    photograph(0).resize((8, 8)).save(path)
    # A row of few pixels spends all its time in Python.
    lock = per_core(build(path.parents[1], 8, True, {}).__getitem__, seconds)
    figures["random_crop_share_outside_the_lock"] = 1 - figures["random_crop_rows_per_second_per_core"] / lock
    for workers in threads:
        with ThreadPoolExecutor(workers) as pool:
            speed = by_the_clock(pool, workers, sources["random_crop"], seconds)
        figures[f"random_crop_{workers}_threads_rows_per_second"] = speed
    return figures
