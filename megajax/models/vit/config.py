"""The config of ViT, its poolings and heads; importing this imports neither jax nor flax."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from megajax.batch import Leaf
from megajax.config.bounds import LARGEST, BelowOne, Bounds, Size
from megajax.config.class_references import Builds
from megajax.config.errors import Problem
from megajax.layers.attention.config import CrossAttentionConfig
from megajax.layers.facts import Matmul, Weight, dense, prefixed
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.quantization.config import QuantizationConfig
from megajax.models.facts import HeadFacts
from megajax.models.protocol import ModelConfig
from megajax.models.transformer import AdaptedConfig, settings_of
from megajax.models.vision.config import VisionTowerConfig

IGNORED = 255
"""Class of pixels that are ignored."""


@dataclass(frozen=True, kw_only=True)
class ClassTokenConfig(Builds):
    """The state of the first class token represents the image.

    Example: `mj.ClassifierConfig(classes=1000, pooling=mj.ClassTokenConfig())`
    """

    target: ClassVar[str] = "megajax.models.vit.module:ClassToken"

    def tower_problems(self, tower: VisionTowerConfig) -> Iterator[Problem]:
        """Problems of this pooling on the tower."""
        if not tower.class_tokens:
            yield Problem("pooling", "reads a class token, but class_tokens=0", "use mean or attention pooling")

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """No weights."""
        del hidden
        return ()

    def matmuls(self, tower: VisionTowerConfig) -> tuple[Matmul, ...]:
        """No matmuls."""
        del tower
        return ()

    def pairs(self, tower: VisionTowerConfig) -> int:
        """Multiply-adds of scores and values: 0."""
        del tower
        return 0


@dataclass(frozen=True, kw_only=True)
class MeanPoolingConfig(ClassTokenConfig):
    """The mean of the states of all patches represents the image.

    Example: `mj.ClassifierConfig(classes=1000, pooling=mj.MeanPoolingConfig())`
    """

    target: ClassVar[str] = "megajax.models.vit.module:MeanPooling"

    def tower_problems(self, tower: VisionTowerConfig) -> Iterator[Problem]:
        """No problems."""
        del tower
        yield from ()


@dataclass(frozen=True, kw_only=True)
class AttentionPoolingConfig(Builds):
    """A learned query attends to all positions; then x + mlp(norm(x)) (Zhai et al. 2022; the head of SigLIP).

    Example: `mj.AttentionPoolingConfig(attention=mj.AttentionConfig(heads=12), mlp=mj.DenseMLPConfig(ffn=3072))`
    """

    target: ClassVar[str] = "megajax.models.vit.module:AttentionPooling"
    attention: CrossAttentionConfig
    """Reads the states of the tower."""
    mlp: DenseMLPConfig
    """MLP after the attention."""
    norm: LayerNormConfig = field(default_factory=LayerNormConfig)
    """Normalisation before the MLP."""

    def tower_problems(self, tower: VisionTowerConfig) -> Iterator[Problem]:
        """Problems of the attention on this width and length."""
        for problem in self.attention.shape_problems(hidden=tower.hidden, length=tower.positions()):
            yield replace(problem, setting=f"pooling.attention.{problem.setting}")

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Every weight of the module."""
        layers = {"attention": self.attention, "mlp": self.mlp, "norm": self.norm}
        inner = [weight for name, layer in layers.items() for weight in prefixed(name, layer.weights(hidden))]
        return Weight("query", (hidden,), (None,)), *inner

    def matmuls(self, tower: VisionTowerConfig) -> tuple[Matmul, ...]:
        """Matmuls per image: keys and values of all positions, the rest of one position."""
        hidden, positions = tower.hidden, tower.used_positions()
        return (*self.attention.matmuls_reading(hidden, positions), *self.mlp.matmuls(hidden))

    def pairs(self, tower: VisionTowerConfig) -> int:
        """Multiply-adds per image of scores and values."""
        return tower.used_positions() * self.attention.per_pair(tower.hidden)


type PoolingConfig = ClassTokenConfig | MeanPoolingConfig | AttentionPoolingConfig


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(Builds):
    """One class for each image, from a linear layer over its pooled state.

    Example: `mj.ClassifierConfig(classes=1000, pooling=mj.MeanPoolingConfig())`
    """

    target: ClassVar[str] = "megajax.models.vit.module:Classifier"
    classes: Size
    """Number of classes."""
    pooling: PoolingConfig = field(default_factory=ClassTokenConfig)
    """How the states of an image are reduced to one."""
    label_smoothing: BelowOne = 0.0
    """Probability mass spread evenly over all classes (Szegedy et al. 2016). Not in the reported loss."""

    def tower_problems(self, tower: VisionTowerConfig) -> Iterator[Problem]:
        """Problems of the pooling on this tower."""
        yield from self.pooling.tower_problems(tower)

    def leaves(self, tower: VisionTowerConfig) -> dict[str, Leaf]:
        """Leaves of a row beside the image."""
        del tower
        label = Leaf("int32", below=self.classes)
        return {
            "labels": label,
            # For mixup (Zhang et al. 2018): the class of the second image, and the share of the first.
            "other_labels": replace(label, optional=True),
            "mix": Leaf("float32", optional=True),
            "loss_mask": Leaf("float32", optional=True),  # weight of the row in the loss: 0 or 1
        }

    def facts(self, tower: VisionTowerConfig) -> HeadFacts:
        """The classifier scores one pooled state per image."""
        weights = (
            *prefixed("pooling", self.pooling.weights(tower.hidden)),
            *dense("linear", tower.hidden, self.classes),
        )
        return HeadFacts(
            columns=self.classes,
            positions=1,
            chunk=LARGEST,
            replicated=True,
            weights=prefixed("head", weights),
            matmuls=self.pooling.matmuls(tower),
            pairs=self.pooling.pairs(tower),
        )


@dataclass(frozen=True, kw_only=True)
class SegmenterConfig(Builds):
    """One class for each pixel: a linear layer over the states of patches, upsampled (Strudel et al. 2021).

    Example: `mj.SegmenterConfig(classes=21)`
    """

    target: ClassVar[str] = "megajax.models.vit.module:Segmenter"
    classes: Annotated[int, Bounds(at_least=1, at_most=IGNORED, hint=f"{IGNORED} is the class of ignored pixels")]
    """Number of classes; pixels of class 255 are ignored."""
    label_smoothing: BelowOne = 0.0
    """Probability mass spread evenly over all classes. Not in the reported loss."""

    def tower_problems(self, tower: VisionTowerConfig) -> Iterator[Problem]:
        """No problems."""
        del tower
        yield from ()

    def leaves(self, tower: VisionTowerConfig) -> dict[str, Leaf]:
        """Leaves of a row beside the image."""
        return {
            "labels": Leaf("int32", (tower.height, tower.width), (None, None), below=self.classes, ignored=IGNORED),
            "loss_mask": Leaf("float32", optional=True),
        }

    def facts(self, tower: VisionTowerConfig) -> HeadFacts:
        """The linear layer scores all patches; scores are upsampled to pixels."""
        return HeadFacts(
            columns=self.classes,
            positions=tower.patches(),
            chunk=LARGEST,
            replicated=True,
            upsampled=tower.patch**2,
            weights=dense("head.linear", tower.hidden, self.classes),
        )


type HeadConfig = ClassifierConfig | SegmenterConfig


@dataclass(frozen=True, kw_only=True)
class ViTConfig(AdaptedConfig, VisionTowerConfig, ModelConfig):
    """A vision transformer that classifies images or their pixels (Dosovitskiy et al. 2021).

    Example: `mj.vit("b16", classes=1000)`
    """

    target: ClassVar[str] = "megajax.models.vit.module:ViT"
    head: HeadConfig
    """What is predicted."""
    lora: LoRAConfig | None = None
    """Low-rank adapters: they are trained, and the other weights only where optimizer.trainable names them."""
    quantization: QuantizationConfig | None = None
    """Weights in 8 or 4 bits, as `python -m megajax.convert --quantize` made them; none: float weights."""
    family: str = ""
    """Family of Hugging Face models that an export is written as; "": the plainest that fits."""

    def problems(self) -> list[Problem]:
        return super().problems() or [
            replace(problem, setting=f"head.{problem.setting}") for problem in self.head.tower_problems(self)
        ]

    def has_dropout(self) -> bool:
        """Whether training draws random numbers."""
        return super().has_dropout() or self.drops_inputs()

    def schema(self) -> Mapping[str, Leaf]:
        """Images, and what the head reads."""
        return {"images": self.image_leaf(), **self.head.leaves(self)}

    def head_facts(self) -> HeadFacts:
        """Facts of the head."""
        return self.head.facts(self)


def with_image_head(tower: VisionTowerConfig, head: HeadConfig) -> ViTConfig:
    """A ViT of this tower and head.

    Example: `mj.with_image_head(mj.vit_tower("b16"), mj.SegmenterConfig(classes=21))`
    """
    return ViTConfig(head=head, **settings_of(tower, VisionTowerConfig))
