"""The config of LLaVA; importing this imports neither jax nor flax."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from megajax.batch import Leaf, Placeholder
from megajax.config.class_references import Builds
from megajax.config.errors import Problem
from megajax.kernels.attention.capability import Choice, Device, Request
from megajax.layers.facts import Elements, LayerBuilder, Matmul, Mixer, Side, Weight, norm_weights, prefixed
from megajax.layers.norm.config import NormConfig
from megajax.layers.stack.config import SegmentsConfig, StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.facts import SectionFacts
from megajax.models.vision.config import VisionTowerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectorConfig(Builds):
    """An MLP from the states of patches to inputs of the language model.

    Example: `mj.ProjectorConfig(ffn=4096)`
    """

    target: ClassVar[str] = "megajax.models.llava.module:Projector"
    ffn: int | None = None
    """Hidden width of the MLP; none: that of the language model, as in LLaVA 1.5; 0: one matrix, as in LLaVA 1.0."""
    pixel_shuffle: int = 1
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
        problems = []
        if self.ffn is not None and self.ffn < 0:
            problems.append(Problem("ffn", f"must be at least 0, got {self.ffn}"))
        if self.ffn == 0 and self.gated:
            problems.append(Problem("gated", "needs an MLP, but ffn=0 is a single matrix", "set it to false"))
        if self.pixel_shuffle < 1:
            problems.append(Problem("pixel_shuffle", f"must be at least 1, got {self.pixel_shuffle}"))
        return problems

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


@dataclass(frozen=True, kw_only=True, slots=True)
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
    slots: int = 1
    """Maximum number of images in a row, tiles included; rows with fewer leave slots empty."""
    keep_class_tokens: bool = False
    """The decoder reads the tower's class tokens too, before the patches; false: it reads only patches."""

    def problems(self) -> list[Problem]:
        problems = DecoderConfig.problems(self)
        if not 0 <= self.image_token < self.vocabulary_size:
            message = f"is {self.image_token}, outside the vocabulary of {self.vocabulary_size} ids"
            problems.append(Problem("image_token", message))
        if self.slots < 1:
            problems.append(Problem("slots", f"must be at least 1, got {self.slots}"))
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
        elif shuffle > 0 and self.image_positions() >= self.sequence_length:
            count = self.image_positions()
            message = f"{self.sequence_length} is too short for the {count} positions of an image and text"
            problems.append(Problem("sequence_length", message, "use longer rows or projector.pixel_shuffle"))
        elif shuffle > 0 and self.row_image_positions() > self.sequence_length:
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
        return {**DecoderConfig.schema(self), "images": images}

    def section_facts(self) -> tuple[SectionFacts, ...]:
        """The tower, run for each image of a row, and the decoder with the projector."""
        (tower,), (decoder,) = self.vision.section_facts(), DecoderConfig.section_facts(self)
        share = self.row_image_positions() / self.sequence_length
        weights, matmuls = self.projector.facts(self.vision.hidden, self.hidden, share)
        return (
            replace(tower, path="vision", sequences=self.slots, weights=prefixed("vision", tower.weights)),
            replace(decoder, weights=(*decoder.weights, *prefixed("projector", weights)), matmuls=matmuls),
        )

    def matmul_sides(self, tensor: int) -> Iterator[Side]:
        """Sides of matrices in the decoder and the tower."""
        yield from DecoderConfig.matmul_sides(self, tensor)
        for side in self.vision.matmul_sides(tensor):
            yield side._replace(setting=f"vision.{side.setting}")

    def stacks(self) -> Mapping[str, StackConfig | SegmentsConfig]:
        """The tower's blocks, and the decoder's."""
        return {"vision": self.vision.stack, "": self.stack}

    def has_dropout(self) -> bool:
        """Whether the decoder or the tower has dropout."""
        return DecoderConfig.has_dropout(self) or self.vision.has_dropout()

    def kernel_choices(self, request: Request, device: Device | None) -> tuple[Choice[str], ...]:
        """Choices of the decoder, then those of the tower."""
        vision = (
            choice._replace(place="vision self-attention") for choice in self.vision.kernel_choices(request, device)
        )
        return (*DecoderConfig.kernel_choices(self, request, device), *vision)

    def attention_name(self, stack: str, part: str) -> str:
        """Name of the decoder's attention; `kernel_choices` names the tower's."""
        del stack, part
        return "decoder self-attention"

    def with_kernels(self, names: Sequence[str]) -> "LlavaConfig":
        """A copy with these kernels, one for each of `kernel_choices`."""
        towers = sum(isinstance(mixer, Mixer) for mixer in self.vision.own_mixers().values())
        decoder = DecoderConfig.with_kernels(self, names[: len(names) - towers])
        return replace(decoder, vision=self.vision.with_kernels(names[len(names) - towers :]))

    def parallel_problems(self, parallel: ParallelConfig, shards: int | None) -> Iterator[Problem]:
        """Problems of the decoder and of the tower on a mesh."""
        yield from DecoderConfig.parallel_problems(self, parallel, shards)
        for problem in self.vision.parallel_problems(parallel, shards):
            yield replace(problem, setting=f"vision.{problem.setting}")

    def refit(self, path: str, weight: Any, settings: Mapping[str, Any]) -> Any | None:
        """Resizes the tower's positions from another LLaVA or from a ViT."""
        prefix = "model.vision."
        tower = {name.replace(prefix, "model."): value for name, value in settings.items() if name.startswith(prefix)}
        inside = path.removeprefix("vision.")
        return None if inside == path else self.vision.refit(inside, weight, tower or settings)

    def allows_context(self) -> bool:
        """False: images are whole sequences, and positions of the decoder read any of them."""
        return False

    def sampler(self) -> str | None:
        """Samples describe an image."""
        return "captions"
