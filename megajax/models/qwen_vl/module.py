"""Qwen3-VL (Bai et al. 2025): a tower for images of any size, projectors, and a decoder with DeepStack.

B rows, S positions of the decoder, N images of a row at most, P patches of a row, C hidden of the tower, D hidden,
M patches of a position. The patches of a row's images follow one another, and padding them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.batch import Rows
from megajax.layers.context import Context, dropout
from megajax.layers.norm.config import IdentityNormConfig
from megajax.layers.param import ZEROS, LayerSettings, Normal, param
from megajax.mesh.layout import Layout
from megajax.models.decoder.module import EMBEDDING_PLACE, DecoderLM, batch_of, layer_settings
from megajax.models.llava.module import VISION, Llava, image_keys
from megajax.models.protocol import Section, last_output
from megajax.models.qwen_vl.config import DynamicTowerConfig, QwenVLConfig
from megajax.models.vision.module import RESIDUAL, normalised_pixels, tower_settings


class QwenVL(Llava):
    """Takes text with images; gives the loss or logits of next tokens. The model itself is the decoder section."""

    def __init__(self, cfg: QwenVLConfig, layout: Layout):
        DecoderLM.__init__(self, cfg, layout)
        self.vision: Any = cfg.vision.build(layout)
        size, settings = cfg.projected(), layer_settings(cfg, layout)
        self.projector, *features = (projector.build(size, (1, 1), settings) for projector in cfg.projectors().values())
        self.features = nnx.List(features)

    @property
    def sections(self) -> Mapping[str, Section]:
        return {**self.stage_sections(), "": self}

    def stage_sections(self) -> dict[str, "StageSection"]:
        """The stages of the tower as sections."""
        return {f"vision.stages.{n}": StageSection(self, n) for n in range(len(self.vision.stages))}

    def __call__(
        self,
        tokens: Array,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        images: Array | None = None,
        grids: Array | None = None,
    ) -> Array:
        """tokens int32 [B, S] with images uint8 [B, P, pixels], grids int32 [B, N, 2] -> logits float32 [B, S, V].

        grids: rows and columns of patches of each image, 0 for none. Without images: plain text.
        """
        if images is None or grids is None:
            return DecoderLM.__call__(self, tokens, positions, segment_ids)
        batch = batch_of(tokens=tokens, positions=positions, segment_ids=segment_ids, images=images, grids=grids)
        return self.logits(self.states(batch))

    def image_states(self, images: Array, grids: Array) -> Array:
        """Images uint8 [B, P, pixels] and grids int32 [B, 2] -> states [B, P / M, (1 + features) * D]."""
        sections = self.stage_sections()
        x, ctx = last_output(sections, {"images": images, "grids": grids[:, None]})
        return [*sections.values()][-1].leave(x, ctx)

    def context(self, batch: Rows, key: Array | None = None) -> Context:
        """The context of the decoder, with the index of the image position at each `image_token`, and positions."""
        ctx, of_image = super().context(batch, key), batch["tokens"] == self.cfg.image_token
        number, inside, before = image_places(of_image, batch["grids"] // self.vision.cfg.merge)
        # A document has no images before its first token, whatever the row has.
        first = jnp.maximum(ctx.index[None] - ctx.positions, 0)
        before = before - jnp.take_along_axis(before, first, axis=1)
        columns = jnp.take_along_axis(batch["grids"][..., 1] // self.vision.cfg.merge, number, axis=1)
        across = jnp.where(of_image, inside % jnp.maximum(columns, 1), 0)
        down = jnp.where(of_image, inside // jnp.maximum(columns, 1), 0)
        # The first position of the image, for text its own.
        start = ctx.positions - inside + before
        return ctx._replace(rotary=jnp.stack([start, start + down, start + across], axis=-1))


def image_places(of_image: Array, grids: Array) -> tuple[Array, Array, Array]:
    """For each position: the image it belongs to, its number inside, and what the images before it add to positions.

    of_image: bool [B, S]; grids: int32 [B, N, 2] rows and columns of positions. Each int32 [B, S]; number and inside
    are 0 for text. An image moves what follows it by its longer side in place of its number of positions.
    """
    counts = grids[..., 0] * grids[..., 1]
    ends, tokens_so_far = jnp.cumsum(counts, axis=1), jnp.cumsum(of_image, axis=1)
    # An image ends before the first token that is not its own.
    complete = jnp.where(of_image, tokens_so_far - 1, tokens_so_far)[..., None] >= ends[:, None]
    before = jnp.where(complete, (grids.max(-1) - counts)[:, None], 0).sum(-1)
    number = jnp.where(of_image, jnp.minimum(complete.sum(-1), grids.shape[1] - 1), 0)
    starts = jnp.take_along_axis(ends - counts, number, axis=1)
    return number, jnp.where(of_image, tokens_so_far - 1 - starts, 0), before


class DynamicTower(nnx.Module):
    """Patches of images of any size -> states of each stage."""

    def __init__(self, cfg: DynamicTowerConfig, layout: Layout):
        settings, init = tower_settings(cfg, layout), Normal(cfg.init_std)
        self.cfg, self.layout = cfg, layout
        self.patches = param((cfg.patch_size(), cfg.hidden), (None, "embed"), init=init)
        if cfg.patch_bias:
            self.patch_bias = param((cfg.hidden,), (None,), init=ZEROS, role="bias")
        self.positions = param((cfg.patches(), cfg.hidden), (None, "embed"), init=init)
        stacks = cfg.stages()
        norms = [*[IdentityNormConfig()] * (len(stacks) - 1), cfg.norm]
        self.stages = nnx.List([TowerStage(*pair, cfg, settings) for pair in zip(stacks, norms, strict=True)])

    def embed_images(self, images: Array, grids: Array) -> Array:
        """Images uint8 [B, P, pixels], grids int32 [B, N, 2] -> embedded patches with their positions [B, P, C].

        The corners of the table of positions are those of every image.
        """
        pixels = normalised_pixels(self.cfg, images.reshape(*images.shape[:2], -1, len(self.cfg.mean)))
        pixels = jnp.tile(pixels.reshape(images.shape), (1, 1, self.cfg.frames)).astype(self.patches.dtype)
        x = self.layout.act(jnp.einsum("bsp,pd->bsd", pixels, self.patches[...]), *RESIDUAL)
        places, table, weights = patch_places(grids, images.shape[1], self.cfg.merge), self.positions[...], []
        for axis, side in enumerate(self.cfg.grid()):
            last = jnp.maximum(places.grids[..., axis] - 1, 1)
            place = places.inside[..., axis].astype(jnp.float32) * (side - 1) / last
            low = jnp.clip(jnp.floor(place), 0, side - 1)
            weights.append(((low, 1 - (place - low)), (jnp.minimum(low + 1, side - 1), place - low)))
        start = jnp.zeros(x.shape, jnp.float32)
        for row, down in weights[0]:
            for column, across in weights[1]:
                index = (row * self.cfg.grid()[1] + column).astype(jnp.int32)
                start = start + table[index].astype(jnp.float32) * (down * across)[..., None]
        start = start + self.patch_bias[...].astype(jnp.float32)[None, None] if self.cfg.patch_bias else start
        x = x.astype(jnp.float32) if self.cfg.residual == "float32" else x
        return self.layout.act(x + start.astype(x.dtype), *RESIDUAL)

    def context(self, grids: Array, patches: int, row_keys: Array | None = None) -> Context:
        """The context of rows with images of these rows and columns of patches, int32 [B, N, 2]. patches: P.

        Images are documents, and so are parts of the padding that are not longer than the largest image.
        """
        places, index = patch_places(grids, patches, self.cfg.merge), jnp.arange(patches)
        segments = jnp.where(places.number < grids.shape[1], places.number, grids.shape[1] + index // self.cfg.most)
        positions = jnp.broadcast_to(index[None], segments.shape)
        padding = places.number >= grids.shape[1]
        return Context(positions, index, segments.astype(jnp.int32), row_keys, rotary=places.inside, padding=padding)


class PatchPlaces(NamedTuple):
    """Where the patches of a row are in its images. int32."""

    number: Array
    """[B, P]: of the image; N or more for padding."""
    inside: Array
    """[B, P, 2]: row and column in the image; 0 for padding."""
    grids: Array
    """[B, P, 2]: rows and columns of the image."""


def patch_places(grids: Array, patches: int, merge: int) -> PatchPlaces:
    """The places of P patches, in squares of merge * merge, of images with these grids, int32 [B, N, 2]."""
    counts, index = grids[..., 0] * grids[..., 1], jnp.arange(patches)
    ends = jnp.cumsum(counts, axis=1)
    number = (index[None, :, None] >= ends[:, None]).sum(-1)
    image = jnp.minimum(number, grids.shape[1] - 1)
    sides = jnp.take_along_axis(grids, image[..., None], axis=1)
    place = index[None] - jnp.take_along_axis(ends - counts, image, axis=1)
    square, corner = place // merge**2, place % merge**2
    squares = jnp.maximum(sides[..., 1] // merge, 1)
    rows, columns = square // squares * merge + corner // merge, square % squares * merge + corner % merge
    inside = jnp.where((number == image)[..., None], jnp.stack([rows, columns], axis=-1), 0)
    return PatchPlaces(number, inside, sides)


class TowerStage(nnx.Module):
    """Consecutive blocks of the tower, and a norm."""

    def __init__(self, stack: Any, norm: Any, cfg: DynamicTowerConfig, settings: LayerSettings):
        self.stack = stack.build(settings, recomputing=cfg.recomputing(), unroll=cfg.unroll)
        self.norm = norm.build(settings)


class StageSection:
    """A stage as a section. It outputs its states after those of earlier stages; the last one projects them all."""

    def __init__(self, model: QwenVL, number: int):
        self.model, self.tower, self.number = model, model.vision, number
        self.stage = self.tower.stages[number]
        self.stack = self.stage.stack

    def context(self, batch: Rows, key: Array | None) -> Context:
        """Every patch attends to all patches of its image."""
        keys = image_keys(self.model, batch, key, VISION + self.number, 1)
        return self.tower.context(batch["grids"], batch["images"].shape[1], keys)

    def embed(self, batch: Rows) -> Array:
        """Embedded patches [B, P, C]; later stages read the states of the one before."""
        if self.number == 0:
            return self.tower.embed_images(batch["images"], batch["grids"])
        return jnp.zeros((batch["images"].shape[0], 1, 1), self.tower.patches.dtype)

    def enter(self, x: Array, ctx: Context) -> Array:
        """The first layer's input [B, P, C]."""
        if ctx.memory is None:
            return dropout(x, self.tower.cfg.dropout, ctx, EMBEDDING_PLACE, self.tower.layout)
        return ctx.memory[..., -self.tower.cfg.hidden :]

    def leave(self, x: Array, ctx: Context) -> Array:
        """The states of all stages so far [B, P, stages * C]; of the last one, states for the decoder's positions
        [B, P / M, (1 + features) * D]: of the tower's output, then of its features."""
        states = x if ctx.memory is None else jnp.concatenate([ctx.memory, x], axis=-1)
        if self.number < len(self.tower.stages) - 1:
            return states
        width, square = self.tower.cfg.hidden, self.tower.cfg.merge**2
        merged = (x.shape[0], x.shape[1] // square, width * square)
        outputs = [self.model.projector(self.stage.norm(x).reshape(merged))]
        for number, projector in enumerate(self.model.features):
            outputs.append(projector(states[..., number * width : (number + 1) * width].reshape(merged)))
        return jnp.concatenate(outputs, axis=-1)
