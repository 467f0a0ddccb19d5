"""Configs of images with labels: a class for each image or for each pixel."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from megajax.config.bounds import Bounds, NotEmpty, Share
from megajax.config.class_references import Builds
from megajax.config.errors import Problem
from megajax.config.paths_and_store_urls import PathText
from megajax.data.rows.config import LoaderConfig, Split, paths_problems

MOST_PIXELS = 178_956_970
"""Limit of Pillow itself."""
PATHS_HINT = "set data.paths, or data.train_paths"

type Mixup = Annotated[float, Bounds(at_least=0, at_most=100)]
type Centre = Annotated[float, Bounds(at_least=0.01, at_most=1)]


def labelled_leaves(mixup: float = 0.0) -> dict[str, str]:
    """The leaves of a row of one image with its class or the classes of its pixels, name -> dtype."""
    leaves = {"images": "uint8", "labels": "int32", "loss_mask": "float32"}
    return leaves | {"other_labels": "int32", "mix": "float32"} if mixup else leaves


def range_problems(setting: str, bounds: tuple[float, float], most: float) -> list[Problem]:
    """A range (low, high) that is not 0 < low <= high <= most."""
    if 0 < bounds[0] <= bounds[1] <= most:
        return []
    return [Problem(setting, f"must be two numbers with 0 < low <= high <= {most:g}, got {bounds[0]:g}, {bounds[1]:g}")]


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Random crops of training images, resized to the model's size (Szegedy et al. 2014), flips and colours.

    Example: `mj.AugmentConfig(area=(0.25, 1.0), colour=0.4)`
    """

    area: tuple[float, float] = (0.08, 1.0)
    """Least and largest share of the image's area."""
    ratio: tuple[float, float] = (0.75, 4 / 3)
    """Least and largest ratio of width to height of the crop, before it is resized."""
    flip: Share = 0.5
    """Probability of mirroring left and right."""
    colour: Share = 0.0
    """Brightness, contrast and saturation are each multiplied by a random factor from 1 - colour to 1 + colour."""

    def problems(self) -> list[Problem]:
        return range_problems("area", self.area, 1) + range_problems("ratio", self.ratio, 100)


@dataclass(frozen=True, kw_only=True)
class ImagesConfig(Builds):
    """The common settings of image data."""

    maximum_pixels: Annotated[int, Bounds(at_least=1, at_most=MOST_PIXELS)] = 50_000_000
    """Images with more pixels are an error, raised before they are decoded."""
    on_error: Literal["stop", "skip"] = "stop"
    """What happens when an image or its label cannot be read: stop, or use the next image and count the row."""
    seed: int | None = None
    """Seed for the order of images and their augmentation; none: the run's seed."""
    # Images are decoded by several threads, each with its own batch: Pillow releases Python's lock.
    loader: LoaderConfig = field(default_factory=lambda: LoaderConfig(threads=8, prefetch=8))
    """How rows are read ahead."""

    def needed_packages(self) -> dict[str, str]:
        """See Builds."""
        return {"": "PIL"}


@dataclass(frozen=True, kw_only=True)
class ClassImagesConfig(ImagesConfig):
    """The common settings of images with one class each."""

    augment: AugmentConfig | None = field(default_factory=AugmentConfig)
    """Changes of training images; none: they are cropped as for evaluation."""
    centre: Centre = 0.875
    """Side of the centre crop for evaluation, as a share of the shorter side of the image."""
    mixup: Mixup = 0.0
    """Parameter α of Beta(α, α), from which the share of the first of two mixed training images is drawn (Zhang et al.
    2017); 0: images are not mixed."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return labelled_leaves(self.mixup)


@dataclass(frozen=True, kw_only=True)
class ClassFoldersConfig(ClassImagesConfig):
    """Images in a folder for each class.

    Example: `mj.ClassFoldersConfig(path="data/imagenet", augment=mj.AugmentConfig(), mixup=0.2)`
    """

    target: ClassVar[str] = "megajax.data.images.class_and_mask_folders:build_classes"

    path: PathText
    """Folder with train/, val/ and optionally test/, each with a folder for each class; or the folder of the classes
    itself, which is then split."""
    split: Split = "90,10,0"
    """Shares of training, validation and test in each class, if `path` has no train/."""


@dataclass(frozen=True, kw_only=True)
class ImageShardsConfig(ClassImagesConfig):
    """Images with classes in tar files, laid out as in webdataset: NAME.jpg and NAME.cls or NAME.json are a sample.

    Example:
    `mj.ImageShardsConfig(train_paths=("data/train-{0000..1023}.tar",), valid_paths=("data/val-{00..63}.tar",))`
    """

    target: ClassVar[str] = "megajax.data.images.shards:build_splits"

    paths: tuple[PathText, ...] = ()
    """Tar files, which are split: paths or patterns such as "data/train-*.tar" and "data/train-{000..127}.tar"."""
    train_paths: tuple[PathText, ...] = ()
    """Tar files of training data only, instead of `paths`."""
    valid_paths: tuple[PathText, ...] = ()
    """Tar files of validation data."""
    test_paths: tuple[PathText, ...] = ()
    """Tar files of test data."""
    split: Split = "90,10,0"
    """Shares of training, validation and test in each class of `paths`."""
    label: str = "label"
    """Key of the class in .json files."""
    cache_dir: PathText | None = None
    """Folder for the index of the tar files; none: the user's cache folder. It need not be shared between hosts."""

    def problems(self) -> list[Problem]:
        return paths_problems(self, "files", PATHS_HINT)


@dataclass(frozen=True, kw_only=True)
class MaskFoldersConfig(ImagesConfig):
    """Images with a class for each pixel: images/NAME.jpg and masks/NAME.png, whose values are classes.

    Example: `mj.MaskFoldersConfig(path="data/scenes", split="90,10")`
    """

    target: ClassVar[str] = "megajax.data.images.class_and_mask_folders:build_masks"

    path: PathText
    """Folder with train/, val/ and optionally test/, each with images/ and masks/; or the folder of images/ and masks/
    itself, which is then split."""
    split: Split = "90,10,0"
    """Shares of training, validation and test, if `path` has no train/."""
    augment: AugmentConfig | None = field(default_factory=AugmentConfig)
    """Changes of training images and their masks; none: they are cropped as for evaluation."""
    centre: Centre = 1.0
    """Side of the centre crop for evaluation, as a share of the shorter side of the image."""
    classes: Annotated[int | None, Bounds(at_least=1, at_most=255)] = None
    """Number of classes: a mask with a larger value, other than 255, is an error; none: not checked."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return labelled_leaves()


@dataclass(frozen=True, kw_only=True)
class MockImagesConfig(Builds):
    """Synthetic noisy stripes; the class of an image is their direction. For tests, and to measure speed.

    Example: `mj.MockImagesConfig()`
    """

    target: ClassVar[str] = "megajax.data.images.mock:build_classes"

    mixup: Mixup = 0.0
    """Mix training images, as in ClassFoldersConfig."""
    seed: int | None = None
    """Seed for the images; none: the run's seed."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How rows are read ahead."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return labelled_leaves(self.mixup)


@dataclass(frozen=True, kw_only=True)
class MockMasksConfig(Builds):
    """Synthetic images of a colored rectangle on grey; the class of a pixel is its color, 0 for the background.

    Example: `mj.MockMasksConfig(classes=3)`
    """

    target: ClassVar[str] = "megajax.data.images.mock:build_masks"

    classes: Annotated[int, Bounds(at_least=2, at_most=255)] = 10
    """Number of classes, including the background."""
    seed: int | None = None
    """Seed for the images; none: the run's seed."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How rows are read ahead."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        return labelled_leaves()


@dataclass(frozen=True, kw_only=True)
class ImageTextRowsConfig(ImagesConfig):
    """The common settings of rows of text with images. The loss is on captions and answers."""

    tiles: Annotated[int, Bounds(at_least=1, at_most=256)] = 1
    """Maximum number of tiles that an image is cut into, in the grid that best fits its shape, each of the size of the
    model's images; several tiles are followed by a small copy of the image (Chen et al. 2024, InternVL 1.5)."""
    fit: Literal["pad", "crop", "stretch"] = "pad"
    """Conversion of an image with another aspect ratio: padded with grey, cropped to the center, or stretched. Tiles
    are always stretched. Not used by models that read images of any size."""
    before: str = ""
    """Text before each image, such as <|vision_start|>."""
    after: str = ""
    """Text after each image, such as <|vision_end|>."""
    prompt: str = ""
    """Text between the images and their caption, without loss."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        text = {"tokens": "int32", "labels": "int32", "loss_mask": "float32", "positions": "int32"}
        return text | {"padding": "bool", "images": "uint8", "grids": "int32"}


@dataclass(frozen=True, kw_only=True)
class ImageTextConfig(ImageTextRowsConfig):
    """JSON lines of images with captions or conversations. Long text is cut at the end of the row.

    {"image": PATH, "caption": TEXT}, or {"image": PATH, "messages": [{"role": "user", "content": "<image> What is
    this?"}, {"role": "assistant", "content": TEXT}]}, likewise "conversations" with "from" and "value". PATH can also
    be a list of paths.

    Example: `mj.ImageTextConfig(paths=("data/captions.jsonl",), split="90,10")`
    """

    target: ClassVar[str] = "megajax.data.images.image_text:build_splits"
    has_messages: ClassVar[bool] = True

    paths: tuple[PathText, ...] = ()
    """Files of JSON lines, which are split."""
    train_paths: tuple[PathText, ...] = ()
    """Files of training data only, instead of `paths`."""
    valid_paths: tuple[PathText, ...] = ()
    """Files of validation data only."""
    test_paths: tuple[PathText, ...] = ()
    """Files of test data only."""
    split: Split = "98,2,0"
    """Shares of training, validation and test, by number of lines of `paths`."""
    image_folder: PathText | None = None
    """Folder of relative image paths; none: the folder of the file with the lines."""
    marker: Annotated[str, NotEmpty("use <image>")] = "<image>"
    """Placeholder of an image in messages; without any, the images precede the first message of the user."""
    template: PathText | None = None
    """Renders conversations as text, as in ChatConfig."""
    cache_dir: PathText | None = None
    """Folder for the index of lines; none: the user's cache folder. It need not be shared between hosts."""

    def problems(self) -> list[Problem]:
        return paths_problems(self, "files", PATHS_HINT)


@dataclass(frozen=True, kw_only=True)
class MockCaptionsConfig(ImageTextRowsConfig):
    """Synthetic images of a colored shape with captions such as "a red disc".

    Example: `mj.MockCaptionsConfig()`
    """

    target: ClassVar[str] = "megajax.data.images.mock:build_captions"

    images: Annotated[int, Bounds(at_least=1, at_most=10)] = 1
    """Maximum number of images in a row: "a red disc and a blue square"."""
