"""The config of a vision tower; importing this imports neither jax nor flax."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Annotated, Any, ClassVar, Literal

from megajax.batch import Leaf
from megajax.config.bounds import LARGEST, BelowOne, Bounds, Count, Positive, Share, Size
from megajax.config.class_references import Builds, resolve
from megajax.config.errors import Problem
from megajax.kernels.attention.request import KernelRequest
from megajax.layers.facts import Elements, LayerBuilder, Matmul, Weight, norm_weights
from megajax.layers.norm.config import LayerNormConfig, NormConfig
from megajax.layers.recompute import Layers, Part, Recompute
from megajax.layers.stack.config import SegmentsConfig, StackConfig
from megajax.models.facts import SectionFacts
from megajax.models.transformer import TransformerConfig

CHANNELS = 3
"""Red, green, blue."""
CLIP_MEAN, CLIP_DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of the pixels in CLIP's training data."""


@dataclass(frozen=True, kw_only=True)
class VisionTowerConfig(Builds, TransformerConfig):
    """A vision transformer without a head (Dosovitskiy et al. 2021): patch and position embedding, blocks, norm.

    It is part of a model: of ViT, or of a model for images and text.

    Example: `mj.vit_tower("b16", image=224)`
    """

    target: ClassVar[str] = "megajax.models.vision.module:VisionTower"
    hidden: Size
    """Hidden size: width of the residual stream."""
    stack: StackConfig | SegmentsConfig
    """The blocks."""
    height: Size = 224
    """Height of an image in pixels."""
    width: Size = 224
    """Width of an image in pixels."""
    patch: Size = 16
    """Side of a square patch in pixels; each patch is a position."""
    patch_bias: bool = True
    """The patch embedding has a bias. CLIP has none."""
    class_tokens: Annotated[int, Bounds(at_least=0, at_most=LARGEST)] = 1
    """Learned positions before the patches; 0: none, as in SigLIP."""
    mean: tuple[Share, Share, Share] = (0.5, 0.5, 0.5)
    """Means of red, green and blue, between 0 and 1. Pixels become (pixel / 255 - mean) / deviation on the device."""
    deviation: tuple[Positive, Positive, Positive] = (0.5, 0.5, 0.5)
    """Standard deviations of red, green and blue."""
    positions_multiple: Size = 8
    """Rows are padded to a multiple of this many positions; padding is not attended to. cuDNN's attention needs rows of
    even length, and sequence parallelism needs a length that parallel.tensor divides."""
    entry_norm: NormConfig | LayerBuilder | None = None
    """Normalisation after the embedding, before the first block, as in CLIP; none: no normalisation."""
    norm: NormConfig | LayerBuilder = field(default_factory=LayerNormConfig)
    """Normalisation after the blocks."""
    dropout: BelowOne = 0.0
    """Dropout rate of the embedding's output."""
    residual: Literal["compute", "float32"] = "compute"
    """Dtype of the residual stream: precision.compute or float32."""
    init_std: Positive = 0.02
    """Standard deviation of initial weights. Matrices that write to the residual stream have init_std / sqrt(number of
    sub-layers): sqrt(2 * layers) with two sub-layers in each block."""
    recompute: Recompute = "selective"
    """Tensors that the backward pass recomputes instead of saving: none; a list of names such as norm,activation,mlp;
    selective, which is norm,latent,activation; or full, everything but the inputs of layers."""
    recompute_layers: Layers | None = None
    """Apply recompute to this many layers, the first of each chunk of a pipeline stage; the other layers use the next
    cheaper setting (selective, or none). none: all layers."""
    layers_per_checkpoint: Count = 1
    """With recompute=full, number of consecutive layers recomputed together from the saved input of the first."""
    offload: tuple[Part, ...] = ()
    """Saved tensors to offload to host memory until the backward pass; input is the input of a layer."""
    unroll: Layers | None = 1
    """Layers per iteration of the compiled loop over layers (the unroll of jax.lax.scan); none: all, without a loop."""

    def problems(self) -> list[Problem]:
        problems = [*self._image_problems(), *self.recompute_problems(), *self.shape_problems()]
        return problems + self.hiding_problems("hides later patches")

    def _image_problems(self) -> list[Problem]:
        problems = []
        for name in ("height", "width"):
            size = getattr(self, name)
            if size % self.patch:
                below = size // self.patch * self.patch
                sizes = " or ".join(str(pixels) for pixels in (below, below + self.patch) if pixels)
                problems.append(Problem(name, f"{size} is not divisible by patch={self.patch}", f"use {sizes}"))
        return problems

    def image_leaf(self) -> Leaf:
        """One image: red, green and blue bytes of each pixel."""
        return Leaf("uint8", (self.height, self.width, CHANNELS), (None, None, None))

    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.height // self.patch, self.width // self.patch

    def patches(self) -> int:
        """Number of patches in an image."""
        rows, columns = self.grid()
        return rows * columns

    def used_positions(self) -> int:
        """Number of class tokens and patches: rows of the table of positions."""
        return self.class_tokens + self.patches()

    def positions(self) -> int:
        """Positions in a row, padding included."""
        return -(-self.used_positions() // self.positions_multiple) * self.positions_multiple

    def padding(self) -> int:
        """Number of padding positions at the end of a row."""
        return self.positions() - self.used_positions()

    def pads_rows(self) -> bool:
        """Whether rows have padding."""
        return self.padding() > 0

    def known_rows(self, stack: str, request: KernelRequest) -> KernelRequest:
        """An image is one document."""
        return replace(super().known_rows(stack, request), documents=False)

    def patch_size(self) -> int:
        """Number of values in a patch."""
        return self.patch**2 * CHANNELS

    def section_facts(self) -> tuple[SectionFacts, ...]:
        """The tower as one section."""
        hidden, used = self.hidden, self.used_positions()
        weights = [Weight("patches", (self.patch_size(), hidden), (None, "embed"))]
        weights += [Weight("patch_bias", (hidden,), (None,))] * self.patch_bias
        weights += [Weight("class_tokens", (self.class_tokens, hidden), (None, "embed"))] * (self.class_tokens > 0)
        weights.append(Weight("positions", (used, hidden), (None, "embed")))
        weights += norm_weights("entry_norm", self.entry_norm, hidden)
        section = SectionFacts(
            path="",
            hidden=hidden,
            length=self.positions(),
            padding=self.padding(),
            stack=self.stack,
            norm=self.norm,
            residual=self.residual,
            recomputing=self.recomputing(),
            weights=tuple(weights),
            matmuls=(
                Matmul(
                    inputs=Elements(replicated=self.patch_size()),
                    outputs=Elements(replicated=hidden),
                    per_token=self.patches() / used,
                ),
            ),
            adds_positions=True,
        )
        return (section,)

    def refit(self, path: str, weight: Any, settings: Mapping[str, Any]) -> Any | None:
        """Interpolates position embeddings of another image size bilinearly (Dosovitskiy et al. 2021)."""
        sizes = {
            name: settings.get(f"model.{name}", 0) for name in ("height", "width", "patch", "class_tokens", "hidden")
        }
        tokens, hidden = sizes["class_tokens"], self.hidden
        if path != "positions" or not sizes["patch"] or (tokens, sizes["hidden"]) != (self.class_tokens, hidden):
            return None
        grid = sizes["height"] // sizes["patch"], sizes["width"] // sizes["patch"]
        return resolve("megajax.models.vision.module:resized_positions")(weight, tokens, grid, self.grid())

    def mesh_problems(self, sizes: Mapping[str, int], *, sequence: bool) -> Iterator[Problem]:
        """Problems of the tower on a mesh. sizes: mesh axis -> devices; sequence: sequence parallelism."""
        yield from super().mesh_problems(sizes, sequence=sequence)
        tensor = sizes["tensor"]
        if sequence and self.positions() % tensor:
            message = f"pads rows to {self.positions()} positions, which parallel.tensor={tensor} does not divide"
            multiple = lcm(self.positions_multiple, tensor)
            yield Problem("positions_multiple", message, f"with parallel.sequence=true, use {multiple}")
