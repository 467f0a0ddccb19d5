"""LLaVA (Liu et al. 2023): a vision tower, a projector and a decoder.

B rows, S positions of the decoder, N images of a row, P positions of an image, D hidden, C hidden of the tower.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.batch import SAMPLE, Rows
from megajax.layers.context import Context, keys_of_rows, spliced
from megajax.layers.mlp.module import ACTIVATIONS
from megajax.layers.param import ZEROS, LayerSettings, Normal, param
from megajax.mesh.layout import Layout
from megajax.models.decoder.module import DecoderLM, batch_of, layer_settings
from megajax.models.llava.config import LlavaConfig, ProjectorConfig
from megajax.models.protocol import Section

VISION = 2
"""Folded into the random key of the tower, so it differs from that of the decoder."""


class Llava(DecoderLM):
    """Takes text with images; gives the loss or logits of next tokens. The model itself is the decoder section."""

    def __init__(self, cfg: LlavaConfig, layout: Layout):
        super().__init__(cfg, layout)
        self.cfg: LlavaConfig = cfg
        self.vision: Any = cfg.vision.build(layout)
        self.projector = cfg.projector.build(cfg.vision.hidden, cfg.vision.grid(), layer_settings(cfg, layout))

    @property
    def sections(self) -> Mapping[str, Section]:
        return {"vision": VisionSection(self), "": self}

    def __call__(
        self,
        tokens: Array,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        images: Array | None = None,
    ) -> Array:
        """tokens int32 [B, S] with images uint8 [B, N, height, width, 3] -> logits float32 [B, S, vocabulary_size].

        Tokens `image_token` are replaced by the positions of images, in order. Without images: plain text.
        """
        if images is None:
            return super().__call__(tokens, positions, segment_ids)
        batch = batch_of(tokens=tokens, positions=positions, segment_ids=segment_ids, images=images)
        return self.logits(self.states(batch))

    def image_states(self, images: Array, grids: Array) -> Array:
        """images uint8 [B, height, width, 3] -> their positions of the decoder [B, P, D]. grids: not used."""
        del grids
        section, ctx = VisionSection(self), self.vision.image_context(images.shape[0])
        x = section.enter(self.vision.embed_images(images), ctx)
        return section.positions(section.stack(x, ctx), ctx)

    def context(self, batch: Rows, key: Array | None = None) -> Context:
        """The context of the decoder, with the index of the image position at each `image_token`."""
        of_image = batch["tokens"] == self.cfg.image_token
        place = jnp.cumsum(of_image, axis=1) - 1
        return super().context(batch, key)._replace(splice=jnp.where(of_image, place, -1).astype(jnp.int32))

    def enter(self, x: Array, ctx: Context) -> Array:
        """Token embeddings [B, S, D] with projected images inserted, then as in a decoder."""
        if ctx.splice is not None and (states := spliced(ctx, 0, x.shape[-1])) is not None:
            states = self.layout.act(states.astype(x.dtype), "batch", "seq_residual", "embed")
            x = jnp.where(ctx.splice[..., None] >= 0, states, x)
        return super().enter(x, ctx)


def image_keys(model: Llava, batch: Rows, key: Array | None, fold: int, slots: int) -> Array | None:
    """Random keys of the tower's rows [B * slots, 2], from the run's key folded with a number; None without dropout."""
    if key is None or not (model.cfg.vision.has_dropout() or model.cfg.drops_inputs()):
        return None
    numbers = batch[SAMPLE][:, None] * slots + jnp.arange(slots, dtype=jnp.uint32)[None]
    return keys_of_rows(jax.random.fold_in(key, fold), numbers.reshape(-1))


class VisionSection:
    """The vision tower as a section: reads the images of all rows and outputs their projected states."""

    def __init__(self, model: Llava):
        self.model, self.tower, self.stack = model, model.vision, model.vision.stack

    def context(self, batch: Rows, key: Array | None) -> Context:
        """Every patch attends to all patches of its image."""
        rows, slots = batch["images"].shape[:2]
        return self.tower.image_context(rows * slots, image_keys(self.model, batch, key, VISION, slots))

    def embed(self, batch: Rows) -> Array:
        """Embedded patches [B * N, P, C]."""
        images = batch["images"]
        return self.tower.embed_images(images.reshape(-1, *images.shape[2:]))

    def enter(self, x: Array, ctx: Context) -> Array:
        """Class tokens and positions [B * N, P, C]."""
        return self.tower.enter(x, ctx)

    def leave(self, x: Array, ctx: Context) -> Array:
        """Output of the blocks [B * N, P, C] -> states for positions of the decoder [B, N * P', D]."""
        cfg = self.model.cfg
        return self.positions(x, ctx).reshape(-1, cfg.slots * cfg.image_positions(), cfg.hidden)

    def positions(self, x: Array, ctx: Context) -> Array:
        """Output of the blocks [B * N, P, C] -> states of each image [B * N, P', D]."""
        cfg = self.model.cfg
        first = cfg.vision.class_tokens - cfg.kept_class_tokens()
        return self.model.projector(self.tower.leave(x, ctx)[:, first : cfg.vision.used_positions()])


class Projector(nnx.Module):
    """States of positions [B, P, C] -> [B, P / pixel_shuffle^2, D]."""

    def __init__(self, cfg: ProjectorConfig, size: int, grid: tuple[int, int], settings: LayerSettings):
        """size: C; grid: rows and columns of positions."""
        self.cfg, self.layout, self.grid = cfg, settings.layout, grid
        hidden, ffn = settings.hidden, cfg.width(settings.hidden)
        entry, init = size * cfg.pixel_shuffle**2, Normal(settings.std)
        self.norm = None if cfg.norm is None else cfg.norm.build(replace(settings, hidden=entry))
        for name in cfg.inner() if ffn else ():
            setattr(self, name, param((entry, ffn), ("embed", "mlp"), init=init))
            if cfg.bias:
                setattr(self, f"{name}_bias", param((ffn,), ("mlp",), init=ZEROS, role="bias"))
        axes = ("mlp", "embed") if ffn else ("embed", None)
        self.down = param((ffn or entry, hidden), axes, init=init)
        if cfg.bias:
            self.down_bias = param((hidden,), (None,), init=ZEROS, role="bias")

    def __call__(self, x: Array) -> Array:
        x = self.layout.act(self.shuffled(x), "batch", None, "embed")
        x = x if self.norm is None else self.norm(x)
        if self.cfg.width(self.down.shape[1]):
            up = self._times(x, "up", "mlp")
            x = ACTIVATIONS[self.cfg.activation](self._times(x, "gate", "mlp") if self.cfg.gated else up)
            x = x * up if self.cfg.gated else x
        return self._times(x, "down", "embed")

    def _times(self, x: Array, name: str, axis: str) -> Array:
        """x [B, P, C] by the matrix of this name, with its bias."""
        y = self.layout.act(jnp.einsum("bpc,cf->bpf", x, getattr(self, name)[...]), "batch", None, axis)
        return y + getattr(self, f"{name}_bias")[...][None, None] if self.cfg.bias else y

    def shuffled(self, x: Array) -> Array:
        """Merge squares of patches [B, P, C] into positions [B, P / side^2, side^2 * C]."""
        side, (rows, columns) = self.cfg.pixel_shuffle, self.grid
        if side == 1:
            return x
        x = x.reshape(-1, rows // side, side, columns // side, side, x.shape[-1]).swapaxes(2, 3)
        return x.reshape(x.shape[0], rows * columns // side**2, -1)
