"""Configs of text with images: captions, and questions and answers about images."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from megajax.config.errors import Problem
from megajax.config.paths import PathText
from megajax.data.config import LoaderConfig, between, paths_problems, split_problems
from megajax.data.images.config import PATHS_HINT, CropConfig, ImagesConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageTextRowsConfig(ImagesConfig):
    """The common settings of rows of text with images. The loss is on captions and answers."""

    tiles: int = 1
    """Maximum number of tiles that an image is cut into, in the grid that best fits its shape, each of the size of the
    model's images; several tiles are followed by a small copy of the image (Chen et al. 2024, InternVL 1.5)."""
    fit: Literal["pad", "crop", "stretch"] = "pad"
    """Conversion of an image with another aspect ratio: padded with grey, cropped to the center, or stretched. Tiles
    are always stretched."""
    prompt: str = ""
    """Text between the images and their caption, without loss."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        text = {"tokens": "int32", "labels": "int32", "loss_mask": "float32", "positions": "int32"}
        return text | {"images": "uint8"}

    def problems(self) -> list[Problem]:
        return ImagesConfig.problems(self) + between("tiles", self.tiles, 1, 256)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageTextConfig(ImageTextRowsConfig):
    """JSON lines of images with captions or conversations. Long text is cut at the end of the row.

    {"image": PATH, "caption": TEXT}, or {"image": PATH, "messages": [{"role": "user", "content": "<image> What is
    this?"}, {"role": "assistant", "content": TEXT}]}, likewise "conversations" with "from" and "value". PATH can also
    be the image in base64, or a list of images.

    Example: `mj.ImageTextConfig(paths=("data/captions.jsonl",), split="90,10")`
    """

    target: ClassVar[str] = "megajax.data.images.image_text_files:build_splits"

    paths: tuple[PathText, ...] = ()
    """Files of JSON lines, which are split."""
    train_paths: tuple[PathText, ...] = ()
    """Files of training data only, instead of `paths`."""
    valid_paths: tuple[PathText, ...] = ()
    """Files of validation data only."""
    test_paths: tuple[PathText, ...] = ()
    """Files of test data only."""
    split: str = "98,2,0"
    """Shares of training, validation and test, by number of lines of `paths`."""
    image_folder: PathText | None = None
    """Folder of relative image paths; none: the folder of the file with the lines."""
    marker: str = "<image>"
    """Placeholder of an image in messages; without any, the images precede the first message of the user."""
    template: PathText = "plain"
    """Renders conversations as text, as in ChatConfig."""
    cache_dir: PathText | None = None
    """Folder for the index of lines; none: the user's cache folder. It need not be shared between hosts."""

    def problems(self) -> list[Problem]:
        problems = (
            ImageTextRowsConfig.problems(self) + split_problems(self.split) + paths_problems(self, "files", PATHS_HINT)
        )
        return problems + ([] if self.marker else [Problem("marker", "is empty", "use <image>")])


def digit_crops() -> CropConfig:
    """Crops after which an 8x8 digit is still the same digit."""
    return CropConfig(area=(0.7, 1.0), ratio=(0.85, 1.18), flip=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitCaptionsConfig(ImageTextRowsConfig):
    """The handwritten digits of scikit-learn with captions such as "the digit seven". Needs no download.

    Training, validation and test have the same digits as in DigitsConfig.

    Example: `mj.DigitCaptionsConfig(phrasings=1)`
    """

    target: ClassVar[str] = "megajax.data.images.digits:build_captions"

    digits: int = 1
    """Maximum number of digits in a row, each an image: "the digits one and seven"."""
    phrasings: int = 4
    """Number of phrasings of captions, drawn at random; 1: always "the digit seven"."""
    augment: CropConfig | None = field(default_factory=digit_crops)
    """Changes of training images; none: they are used as they are."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How rows are read ahead."""

    def problems(self) -> list[Problem]:
        return (
            ImageTextRowsConfig.problems(self)
            + between("digits", self.digits, 1, 10)
            + between("phrasings", self.phrasings, 1, 4)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MockCaptionsConfig(ImageTextRowsConfig):
    """Synthetic images of a colored shape with captions such as "a red disc".

    Example: `mj.MockCaptionsConfig()`
    """

    target: ClassVar[str] = "megajax.data.images.mock:build_captions"
