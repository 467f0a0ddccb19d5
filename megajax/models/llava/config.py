"""The config of LLaVA; importing this imports neither jax nor flax."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from megajax.batch import Leaf, Placeholder
from megajax.config.bounds import Index, Size
from megajax.config.class_references import Builds
from megajax.config.errors import Problem
from megajax.layers.facts import Elements, LayerBuilder, Matmul, Weight, norm_weights, prefixed
from megajax.layers.norm.config import NormConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.facts import SectionFacts
from megajax.models.transformer import TransformerConfig
from megajax.models.vision.config import VisionTowerConfig


@dataclass(frozen=True, kw_only=True)
class ProjectorConfig(Builds):
    """An MLP from the states of patches to inputs of the language model.

    Example: `mj.ProjectorConfig(ffn=4096)`
    """

    target: ClassVar[str] = "megajax.models.llava.module:Projector"
    ffn: Index | None = None
    """Hidden width of the MLP; none: that of the language model, as in LLaVA 1.5; 0: one matrix, as in LLaVA 1.0."""
    pixel_shuffle: Size = 1
    """Squares of patches with this side are joined into one position, with channels concatenated (Chen et al. 2024,
    InternVL 1.5); 1: every patch is a position."""
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "silu"] = "gelu"
    """Activation function of the MLP, as in DenseMLPConfig."""
    gated: bool = False
    """activation(x gate) * (x up), then down, as in GatedMLPConfig; false: activation(x up), then down."""
    bias: bool = True
    """Biases on all matrices."""
    norm: NormConfig | LayerBuilder | None = None
    """Normalisation of the MLP's input, as in InternVL; none: no normalisation."""

    def problems(self) -> list[Problem]:
        problem = Problem("gated", "needs an MLP, but ffn=0 is a single matrix", "set it to false")
        return [problem] if self.ffn == 0 and self.gated else []

    def width(self, hidden: int) -> int:
        """Hidden width of the MLP for a language model of this width; 0 for a single matrix."""
        return hidden if self.ffn is None else self.ffn

    def facts(self, tower: int, hidden: int, share: float) -> tuple[tuple[Weight, ...], tuple[Matmul, ...]]:
        """Weights, and matmuls per position of a row.

        tower, hidden: widths of the tower and the decoder; share: of a row's positions, those of images.
        """
        entry, ffn = tower * self.pixel_shuffle**2, self.width(hidden)
        input_side, output, names = Elements(replicated=entry), Elements(replicated=hidden), self.inner() if ffn else ()
        weights = [Weight(name, (entry, ffn), ("embed", "mlp")) for name in names]
        weights.append(Weight("down", (ffn or entry, hidden), ("mlp", "embed") if ffn else ("embed", None)))
        if self.bias:
            weights += [Weight(f"{name}_bias", (ffn,), ("mlp",)) for name in names]
            weights.append(Weight("down_bias", (hidden,), (None,)))
        weights += norm_weights("norm", self.norm, entry)
        if not ffn:
            return tuple(weights), (Matmul(inputs=input_side, outputs=output, per_token=share),)
        up = Matmul(inputs=input_side, outputs=Elements(sharded=len(names) * ffn), weights=len(names), per_token=share)
        return tuple(weights), (up, Matmul(inputs=Elements(sharded=ffn), outputs=output, per_token=share))

    def inner(self) -> tuple[str, ...]:
        """Names of the matrices that multiply the MLP's input."""
        return ("gate", "up") if self.gated else ("up",)


@dataclass(frozen=True, kw_only=True)
class LlavaConfig(DecoderConfig):
    """LLaVA (Liu et al. 2023): a decoder that reads images within its text.

    A vision tower reads the images of a row, and a projector maps its states to the decoder's width. They replace, in
    order, the embeddings of the row's tokens `image_token`. All settings of decoders are available.

    Example: `mj.llava(mj.llama2("7b", vocabulary_size=32_001), mj.clip("l14-336"), image_token=32_000)`
    """

    target: ClassVar[str] = "megajax.models.llava.module:Llava"
    vision: VisionTowerConfig
    """The vision tower, which reads the images."""
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)
    """Maps the tower's states to inputs of the decoder."""
    image_token: int
    """Token id that marks each image position of a row."""
    slots: Size = 1
    """Maximum number of images in a row, tiles included; rows with fewer leave slots empty."""
    keep_class_tokens: bool = False
    """The decoder reads the tower's class tokens too, before the patches; false: it reads only patches."""

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if not 0 <= self.image_token < self.vocabulary_size:
            message = f"is {self.image_token}, outside the vocabulary of {self.vocabulary_size} ids"
            problems.append(Problem("image_token", message))
        if self.prediction is not None:
            problems.append(Problem("prediction", "is not available for rows with images", "set it to none"))
        rows, columns = self.vision.grid()
        shuffle = self.projector.pixel_shuffle
        if shuffle > 1 and (rows % shuffle or columns % shuffle):
            message = f"{shuffle} does not divide the {rows} x {columns} patches of an image"
            problems.append(Problem("projector.pixel_shuffle", message))
        elif shuffle > 1 and self.kept_class_tokens():
            message = f"is true, but projector.pixel_shuffle={shuffle} joins squares of patches, not class tokens"
            problems.append(Problem("keep_class_tokens", message, "set it to false, or pixel_shuffle to 1"))
        elif self.image_positions() >= self.sequence_length:
            count = self.image_positions()
            message = f"{self.sequence_length} is too short for the {count} positions of an image and text"
            problems.append(Problem("sequence_length", message, "use longer rows or projector.pixel_shuffle"))
        elif self.row_image_positions() > self.sequence_length:
            count = self.row_image_positions() // self.image_positions()
            message = f"{self.sequence_length} is too short for {count} images of {self.image_positions()} positions"
            problems.append(Problem("sequence_length", message, "use longer rows, or room for fewer images"))
        return problems

    def image_positions(self) -> int:
        """Positions of a row per image."""
        return self.kept_class_tokens() + self.vision.patches() // self.projector.pixel_shuffle**2

    def row_image_positions(self) -> int:
        """Positions that the images of a row take at most."""
        return self.slots * self.image_positions()

    def kept_class_tokens(self) -> int:
        """Class tokens of an image that the decoder reads."""
        return self.vision.class_tokens if self.keep_class_tokens else 0

    def schema(self) -> dict[str, Leaf]:
        """Text, and its images."""
        image = self.vision.image_leaf()
        shape, axes = (self.slots, *image.shape), (None, *image.axes)
        stands = Placeholder(self.image_token, self.image_positions())
        images = replace(image, shape=shape, axes=axes, placeholder=stands)
        return {**super().schema(), "images": images}

    def towers(self) -> Mapping[str, TransformerConfig]:
        """The vision tower."""
        return {"vision": self.vision}

    def projectors(self) -> dict[str, ProjectorConfig]:
        """Name in the module -> config."""
        return {"projector": self.projector}

    def projected(self) -> int:
        """Width of what projectors read at a position of the decoder, before their own shuffle."""
        return self.vision.hidden

    def section_facts(self) -> tuple[SectionFacts, ...]:
        """The tower, run for each image of a row, and the decoder with the projectors."""
        *towers, decoder = super().section_facts()
        share = self.row_image_positions() / self.sequence_length
        weights, matmuls = list[Weight](decoder.weights), list[Matmul]()
        for name, projector in self.projectors().items():
            inner, products = projector.facts(self.projected(), self.hidden, share)
            weights, matmuls = [*weights, *prefixed(name, inner)], [*matmuls, *products]
        images = (replace(tower, sequences=self.sequences(tower)) for tower in towers)
        return (*images, replace(decoder, weights=tuple(weights), matmuls=tuple(matmuls)))

    def sequences(self, tower: SectionFacts) -> int:
        """Sequences of the tower per row: one for each slot."""
        del tower
        return self.slots

    def allows_context(self) -> bool:
        """False: images are whole sequences, and positions of the decoder read any of them."""
        return False

    def sampler(self) -> str | None:
        """Samples describe an image."""
        return "captions"
