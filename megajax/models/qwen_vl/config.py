"""The config of Qwen3-VL; importing this imports neither jax nor flax."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from megajax.batch import Leaf, Patches, Placeholder
from megajax.config.bounds import Index, Size
from megajax.config.errors import Problem
from megajax.kernels.attention.request import KernelRequest
from megajax.layers.facts import Elements, Matmul
from megajax.layers.norm.config import IdentityNormConfig, LayerNormConfig
from megajax.layers.stack.config import SegmentsConfig, StackConfig, blocks_of, stack_of
from megajax.models.decoder.config import DecoderConfig
from megajax.models.facts import SectionFacts
from megajax.models.llava.config import LlavaConfig, ProjectorConfig
from megajax.models.transformer import TransformerConfig, settings_of
from megajax.models.vision.config import VisionTowerConfig


@dataclass(frozen=True, kw_only=True)
class DynamicTowerConfig(VisionTowerConfig):
    """A vision tower for images of any size (Qwen3-VL, Bai et al. 2025).

    The table of learned positions has the grid of an image of `height` x `width`; it is interpolated for other grids.
    Blocks rotate by rows and columns. All blocks are alike.

    Example: `mj.qwen3_vl("4b").vision`
    """

    target: ClassVar[str] = "megajax.models.qwen_vl.module:DynamicTower"
    merge: Size = 2
    """Squares of patches with this side are one position of the decoder."""
    frames: Size = 2
    """Frames of a patch. An image is repeated, as a video that stands still."""
    features: tuple[int, ...] = ()
    """Numbers of the blocks, ascending, whose outputs DeepStack adds to the first layers of the decoder."""
    least: Index = 256
    """Smaller images are enlarged to this many patches."""
    most: Size = 2304
    """Maximum number of patches of an image: larger images are reduced."""
    budget: Size | None = None
    """Room for all images of a row of training, in patches; none: `most`, for one image of the largest size or several
    smaller ones. Images fill it one after the other, and every row takes the time and memory of this many patches."""

    def problems(self) -> list[Problem]:
        problems = super().problems()
        square = self.merge**2
        if self.most % square or self.most % self.positions_multiple:
            message = f"{self.most} is not a multiple of merge^2={square} and of {self.positions_multiple}"
            problems.append(Problem("most", message, "it is the length of the tower's rows"))
        elif self.row_patches() % self.most:
            message = f"{self.budget} is not a multiple of most={self.most}, the patches of the largest image"
            problems.append(Problem("budget", message))
        elif self.least > self.most:
            problems.append(Problem("least", f"must be between 0 and most={self.most}, got {self.least}"))
        if self.class_tokens:
            problems.append(Problem("class_tokens", f"must be 0 for images of any size, got {self.class_tokens}"))
        if not isinstance(self.stack, StackConfig) or len(self.stack.pattern) != 1:
            problems.append(Problem("stack", "must repeat a single block, as features are taken between blocks"))
        elif list(self.features) != sorted({*self.features} & {*range(self.stack.layers())}):
            message = f"must be ascending numbers below the {self.stack.layers()} blocks, got {self.features}"
            problems.append(Problem("features", message))
        return problems

    def stages(self) -> tuple[StackConfig | SegmentsConfig, ...]:
        """The blocks up to each of `features`, and the rest."""
        layers = self.stack.layers()
        ends = sorted({*(number + 1 for number in self.features), layers})
        starts = [0, *ends[:-1]]
        block = self.stack.pattern[0]
        return tuple(
            StackConfig(pattern=(block,), repeats=end - start) for start, end in zip(starts, ends, strict=True)
        )

    def stacks(self) -> Mapping[str, StackConfig | SegmentsConfig]:
        """The stages: the first layers of the decoder read the outputs of the ones before the last."""
        return {f"stages.{number}": stack for number, stack in enumerate(self.stages())}

    def image_leaf(self) -> Leaf:
        """The patches of a row's images, squares of `merge` x `merge` one after another; rows of pixels in each."""
        return Leaf("uint8", (self.row_patches(), self.patch_size() // self.frames), (None, None))

    def row_patches(self) -> int:
        """Patches of a row."""
        return self.most if self.budget is None else self.budget

    def patch_size(self) -> int:
        """Number of values in a patch, all frames included."""
        return super().patch_size() * self.frames

    def positions(self) -> int:
        """Patches of a row."""
        return self.row_patches()

    def padding(self) -> int:
        """0: images may fill their rows."""
        return 0

    def known_rows(self, stack: str, request: KernelRequest) -> KernelRequest:
        """The images of a row are documents."""
        return replace(TransformerConfig.known_rows(self, stack, request), documents=True)

    def refit(self, path: str, weight: Any, settings: Mapping[str, Any]) -> Any | None:
        """None: the table of positions fits images of all sizes."""
        del path, weight, settings
        return None

    def section_facts(self) -> tuple[SectionFacts, ...]:
        """A section for each stage; the first one has the input layers. Rows are full of images of the largest size."""
        (tower,) = super().section_facts()
        matmul = Matmul(inputs=Elements(replicated=self.patch_size()), outputs=Elements(replicated=self.hidden))
        sections = [
            replace(tower, path=f"stages.{number}", stack=stack, norm=IdentityNormConfig(), weights=(), matmuls=())
            for number, stack in enumerate(self.stages())
        ]
        sections = [
            replace(section, length=self.most, sequences=self.row_patches() // self.most, adds_positions=False)
            for section in sections
        ]
        sections[0] = replace(sections[0], weights=tower.weights, matmuls=(matmul,), adds_positions=True)
        sections[-1] = replace(sections[-1], norm=self.norm)
        return tuple(sections)


@dataclass(frozen=True, kw_only=True)
class QwenVLConfig(LlavaConfig):
    """Qwen3-VL (Bai et al. 2025): LLaVA with images of any size, DeepStack and positions along three axes.

    The outputs of `vision.features` are added after the first layers of the decoder, whose blocks have `deepstack`.
    Rotary positions are `InterleavedRopeConfig`: an image takes as many positions as its longer side.

    Example: `mj.qwen3_vl("4b")`
    """

    target: ClassVar[str] = "megajax.models.qwen_vl.module:QwenVL"
    vision: DynamicTowerConfig
    """The vision tower, which reads the images."""
    feature_norm: LayerNormConfig = field(default_factory=lambda: LayerNormConfig(epsilon=1e-6))
    """Normalisation of merged patches before the projectors of DeepStack."""

    def problems(self) -> list[Problem]:
        problems = super().problems()
        stacked = [block.deepstack for block in blocks_of(self.stack)]
        count = len(self.vision.features)
        if stacked != [layer < count for layer in range(len(stacked))]:
            layers = [layer for layer, deep in enumerate(stacked) if deep]
            message = f"has deepstack=true in the layers {layers}, for {count} features of the tower"
            problems.append(Problem("stack", message, "set it in the first layers, one for each of vision.features"))
        if self.projector.pixel_shuffle != 1:
            message = f"is {self.projector.pixel_shuffle}, and vision.merge joins patches"
            problems.append(Problem("projector.pixel_shuffle", message, "set it to 1"))
        if self.keep_class_tokens:
            problems.append(Problem("keep_class_tokens", "is true, and the tower has none", "set it to false"))
        return problems

    def image_positions(self) -> int:
        """Positions of a row that the largest image takes."""
        return self.vision.most // self.vision.merge**2

    def row_image_positions(self) -> int:
        """Positions that the images of a row take at most."""
        return self.vision.row_patches() // self.vision.merge**2

    def projected(self) -> int:
        """Width of merged patches."""
        return self.vision.hidden * self.vision.merge**2

    def schema(self) -> dict[str, Leaf]:
        """Text, the patches of its images, and rows and columns of patches of each; 0 for empty slots."""
        tower = self.vision
        patches = Patches(tower.patch, tower.merge, tower.least, tower.most)
        stands = Placeholder(self.image_token, self.image_positions(), 1 + len(tower.features), patches)
        grids = Leaf("int32", (self.slots, 2), (None, None))
        images = replace(tower.image_leaf(), placeholder=stands)
        return {**DecoderConfig.schema(self), "images": images, "grids": grids}

    def projectors(self) -> dict[str, ProjectorConfig]:
        """Those of the tower's output and of each of its features."""
        features = replace(self.projector, norm=self.feature_norm)
        return {"projector": self.projector} | {f"features.{n}": features for n in range(len(self.vision.features))}

    def sequences(self, tower: SectionFacts) -> int:
        """Largest images of a row."""
        return tower.sequences


def qwen_vl(language: DecoderConfig, vision: DynamicTowerConfig, *, image_token: int, **more: Any) -> QwenVLConfig:
    """Qwen3-VL with the decoder `language`, whose first layers get DeepStack's features, and the tower `vision`.

    more: other settings of QwenVLConfig.

    Example: `mj.qwen_vl(mj.qwen3("4b"), mj.qwen3_vl("4b").vision, image_token=151_655)`
    """
    settings = settings_of(language, DecoderConfig)
    blocks = blocks_of(language.stack)
    count = len(vision.features)
    settings["stack"] = stack_of([replace(block, deepstack=n < count) for n, block in enumerate(blocks)])
    settings["projector"] = ProjectorConfig(ffn=vision.hidden * vision.merge**2)
    return QwenVLConfig(**settings | more, vision=vision, image_token=image_token)
