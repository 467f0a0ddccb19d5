"""Image files of all formats have the same RGB pixels as in Pillow; damaged or too large ones are errors."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import gradient
from PIL import Image, ImageOps
from user_errors import user_error

from megajax.config import optional_packages as missing
from megajax.config.compose import problems_of
from megajax.data.images.config import AugmentConfig, ClassFoldersConfig, MaskFoldersConfig
from megajax.data.images.decoding import ArrayPicture, StoredPicture, check_bytes, read_bounded
from megajax.data.images.transforms import Crop, change_colours, crop_image, inner_box, random_crop
from megajax.data.rows.shuffled_items import UnreadableItem

WHOLE = (10**6, 10**6)


def stored(image: Image.Image, format: str = "PNG", limit: int = 10**6, **options: Any) -> StoredPicture:
    file = io.BytesIO()
    image.save(file, format, **options)
    return StoredPicture(file.getvalue(), limit)


def pixels(picture: StoredPicture) -> np.ndarray:
    return np.asarray(picture.rgb(WHOLE))


PALETTES = ("L", "P", "1")
STORED_AS = [(mode, "PNG") for mode in (*PALETTES, "RGB", "LA", "RGBA")]
STORED_AS += [(mode, format) for mode in PALETTES for format in ("TIFF", "GIF")]

STORED_AS += [("RGB", format) for format in ("TIFF", "BMP", "PPM")]
TRANSPARENT = {"transparency": bytes(range(256))}


@pytest.mark.parametrize(("mode", "format", "options"), [*((*way, {}) for way in STORED_AS), ("P", "PNG", TRANSPARENT)])
def test_modes(mode: str, format: str, options: dict[str, bytes]) -> None:
    image = gradient(30, 20).convert(mode)
    assert (pixels(stored(image, format, **options)) == np.asarray(image.convert("RGB"))).all()


def test_sixteen_bits_keep_the_upper_eight() -> None:
    values = np.arange(600, dtype=np.uint16).reshape(20, 30) * 109
    for format in ("PNG", "TIFF"):
        result = pixels(stored(Image.fromarray(values), format))
        assert (result == (values >> 8)[..., None]).all() and result.shape == (20, 30, 3)
    with pytest.raises(UnreadableItem, match="floating-point"):
        pixels(stored(Image.fromarray(values.astype(np.float32)), "TIFF"))


def test_cmyk() -> None:
    result = pixels(stored(gradient(64, 64).convert("CMYK"), "JPEG", quality=95))
    assert abs(result.astype(int) - np.asarray(gradient(64, 64))).mean() < 4


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(orientation: int) -> None:
    """It holds where JPEG is decoded at a smaller size too."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    gradient(96, 64).save(file, "JPEG", exif=exif, quality=95)
    with Image.open(file) as image:
        expected = np.asarray(ImageOps.exif_transpose(image)).astype(int)
    picture = StoredPicture(file.getvalue(), 10**6)
    assert picture.size == expected.shape[1::-1]
    assert (np.asarray(picture.rgb(WHOLE)) == expected).all()
    half = np.asarray(StoredPicture(file.getvalue(), 10**6).rgb((30, 30)))
    assert half.shape[:2] == (expected.shape[0] // 2, expected.shape[1] // 2)
    assert abs(half - expected.reshape(*half.shape[:1], 2, half.shape[1], 2, 3).mean((1, 3))).mean() < 3


def png_of_size(width: int, height: int) -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (png_of_size(3000, 1000), "too large"),
        (png_of_size(2**31 - 1, 2**31 - 1), "too large"),
        (png_of_size(30, 1000), "corrupt image"),
        (png_of_size(30, 1000)[:20], "corrupt image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (bytes(100), "not an image"),
    ],
)
def test_damaged_and_giant_files(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableItem) as error:
        StoredPicture(data, 2_000_000).rgb(WHOLE)
    assert error.value.reason == reason


def test_files_are_bounded_before_they_are_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse.jpg").open("wb") as file:
        file.truncate(1 << 40)
    for path, reason in ((tmp_path / "sparse.jpg", "too large"), (tmp_path / "none.jpg", "cannot be read")):
        with pytest.raises(UnreadableItem) as error:
            read_bounded(path, 1000)
        assert error.value.reason == reason
    check_bytes(1000, 1)


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name=name.partition(".")[0])

    monkeypatch.setattr(missing.importlib, "import_module", absent)
    with user_error():
        StoredPicture(b"x", 1)


def test_crop_equals_that_of_pillow() -> None:
    image = gradient(90, 70)
    result = crop_image(ArrayPicture(np.asarray(image)), Crop((10, 20, 60, 55), flip=True), (25, 35))
    expected = image.crop((10, 20, 60, 55)).resize((25, 35), Image.Resampling.BILINEAR)
    expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    assert np.asarray(result).shape == (35, 25, 3)
    assert abs(np.asarray(result).astype(int) - np.asarray(expected)).max() <= 3  # The whole image has more pixels.


def test_crop_of_a_jpeg_that_is_decoded_smaller() -> None:
    picture = stored(gradient(800, 600), "JPEG", quality=95)
    crop = Crop((100, 50, 500, 350))
    result = np.asarray(crop_image(picture, crop, (40, 30))).astype(int)
    expected = np.asarray(crop_image(ArrayPicture(np.asarray(gradient(800, 600))), crop, (40, 30)))
    assert picture.size == (800, 600) and abs(result - expected)[..., :2].max() < 4


def test_centre() -> None:
    assert inner_box((100, 60), 1.0) == (20, 0, 80, 60)
    assert inner_box((60, 100), 1.0, 0.5) == (15, 35, 45, 65)
    assert inner_box((100, 60), 2.0) == (0, 5, 100, 55)
    image = np.asarray(gradient(48, 32))
    result = crop_image(ArrayPicture(image), Crop(inner_box((48, 32), 1.0, 0.5)), (16, 16))
    assert (np.asarray(result) == image[8:24, 16:32]).all()


def test_random_crops_have_the_requested_area_and_ratio() -> None:
    config, generator = AugmentConfig(area=(0.2, 0.6), ratio=(0.5, 2.0), flip=0.25), np.random.default_rng(0)
    crops = [random_crop((400, 300), config, generator) for _ in range(2000)]
    box = np.array([crop.box for crop in crops])
    width, height = box[:, 2] - box[:, 0], box[:, 3] - box[:, 1]
    area, ratio = width * height / 120_000, width / height
    assert area.min() > 0.197 and area.max() < 0.603 and abs(area.mean() - 0.4) < 0.02
    assert ratio.min() > 0.49 and ratio.max() < 2.03 and abs(np.log(ratio).mean()) < 0.1
    assert box.min() >= 0 and box[:, 2].max() == 400 and box[:, 3].max() == 300
    assert abs(np.mean([crop.flip for crop in crops]) - 0.25) < 0.03
    slim = random_crop((1000, 10), AugmentConfig(area=(1.0, 1.0)), generator)
    assert slim.box == pytest.approx((1000 / 2 - 20 / 3, 0, 1000 / 2 + 20 / 3, 10))


def test_colours() -> None:
    """Grey stays grey, whatever its saturation; colours follow the generator."""
    image = Image.fromarray(np.random.default_rng(0).integers(20, 200, (32, 32, 3), dtype=np.uint8))
    results = {np.asarray(change_colours(image, 0.4, np.random.default_rng(seed % 20))).tobytes() for seed in range(40)}
    assert len(results) == 20
    assert (np.asarray(change_colours(image, 0.0, np.random.default_rng(0))) == np.asarray(image)).all()
    grey = np.asarray(change_colours(Image.new("RGB", (4, 4), (90, 90, 90)), 0.4, np.random.default_rng(3)))
    assert (grey == grey[0, 0, 0]).all() and 50 <= grey[0, 0, 0] <= 130


def test_problems_of_the_settings() -> None:
    invalid = [
        (AugmentConfig(area=(0.5, 0.2), ratio=(0.0, 1.0), flip=2, colour=-1), ["flip", "colour", "area", "ratio"]),
        (ClassFoldersConfig(path="x", mixup=-1, centre=0, maximum_pixels=0), ["maximum_pixels", "centre", "mixup"]),
        (ClassFoldersConfig(path="x", split="a"), ["split"]),
        (MaskFoldersConfig(path="x", classes=256, split=""), ["split", "classes"]),
    ]
    for config, places in invalid:
        assert [problem.setting for problem in problems_of(config)] == places
