"""Vision towers. B images, S positions (class tokens, patches, padding), D hidden."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from megajax.layers.context import Context, dropout
from megajax.layers.param import ZEROS, LayerSettings, Normal, param
from megajax.mesh.layout import Layout
from megajax.models.decoder.module import EMBEDDING_PLACE
from megajax.models.vision.config import VisionTowerConfig

RESIDUAL = ("batch", "seq_residual", "embed")


class VisionTower(nnx.Module):
    """Takes images; gives states of patches. A model uses it as a section, or is a tower itself.

    As a section: `embed_images` and `enter` are the input layers, `image_context` the context, `leave` the output.
    """

    def __init__(self, cfg: VisionTowerConfig, layout: Layout):
        settings, init = tower_settings(cfg, layout), Normal(cfg.init_std)
        self.cfg, self.layout = cfg, layout
        self.patches = param((cfg.patch_size(), cfg.hidden), (None, "embed"), init=init)
        if cfg.patch_bias:
            self.patch_bias = param((cfg.hidden,), (None,), init=ZEROS, role="bias")
        if cfg.class_tokens:
            self.class_tokens = param((cfg.class_tokens, cfg.hidden), (None, "embed"), init=init)
        self.positions = param((cfg.used_positions(), cfg.hidden), (None, "embed"), init=init)
        self.entry_norm = None if cfg.entry_norm is None else cfg.entry_norm.build(settings)
        self.stack = cfg.stack.build(settings, recomputing=cfg.recomputing(), unroll=cfg.unroll)
        self.norm = cfg.norm.build(settings)

    def states(self, images: Array) -> Array:
        """images [B, height, width, 3] -> normalised output of the blocks [B, S, D], without padding."""
        ctx = self.image_context(images.shape[0])
        x = self.leave(self.stack(self.enter(self.embed_images(images), ctx), ctx), ctx)
        return x[:, : self.cfg.used_positions()]

    def image_context(self, images: int, row_keys: Array | None = None) -> Context:
        """The context for `images` images. row_keys: see `Context`."""
        index = jnp.arange(self.cfg.positions())
        positions = jnp.broadcast_to(index[None], (images, index.size))
        segments = (positions < self.cfg.used_positions()).astype(jnp.int32) if self.cfg.padding() else None
        padding = None if segments is None else segments == 0
        return Context(positions, index, segments, row_keys, padding=padding)

    def embed_images(self, images: Array) -> Array:
        """uint8 or normalised float [B, height, width, 3] -> embeddings of patches [B, S, D], zeros elsewhere."""
        cfg, pixels = self.cfg, normalised_pixels(self.cfg, images)
        rows, columns = cfg.grid()
        pixels = pixels.reshape(-1, rows, cfg.patch, columns, cfg.patch, pixels.shape[-1]).swapaxes(2, 3)
        pixels = pixels.reshape(-1, cfg.patches(), cfg.patch_size()).astype(self.patches.dtype)
        pixels = jnp.pad(pixels, ((0, 0), (cfg.class_tokens, cfg.padding()), (0, 0)))
        return self.layout.act(jnp.einsum("bsp,pd->bsd", pixels, self.patches[...]), *RESIDUAL)

    def enter(self, x: Array, ctx: Context) -> Array:
        """Class tokens, positions, norm and dropout, [B, S, D] -> [B, S, D]."""
        x = x.astype(jnp.float32) if self.cfg.residual == "float32" else x
        first, table = self.cfg.class_tokens, self.positions[...]
        tokens = [table[:first] + self.class_tokens[...]] if first else []
        patches = table[first:] + self.patch_bias[...][None] if self.cfg.patch_bias else table[first:]
        start = jnp.pad(jnp.concatenate([*tokens, patches]), ((0, self.cfg.padding()), (0, 0)))
        x = x + self.layout.act(start.astype(x.dtype), "seq_residual", "embed")[None]
        x = x if self.entry_norm is None else self.layout.act(self.entry_norm(x).astype(x.dtype), *RESIDUAL)
        return dropout(x, self.cfg.dropout, ctx, EMBEDDING_PLACE, self.layout)

    def leave(self, x: Array, ctx: Context) -> Array:
        """Output of the blocks [B, S, D] -> normalised."""
        del ctx
        return self.layout.act(self.norm(x), *RESIDUAL)


def normalised_pixels(cfg: VisionTowerConfig, pixels: Array) -> Array:
    """Pixels of four dimensions, the last one red, green and blue: bytes become float32, others stay as they are."""
    if pixels.dtype != jnp.uint8:
        return pixels
    mean, deviation = (jnp.asarray(values, jnp.float32) for values in (cfg.mean, cfg.deviation))
    return (pixels.astype(jnp.float32) / 255 - mean.reshape(1, 1, 1, -1)) / deviation.reshape(1, 1, 1, -1)


def tower_settings(cfg: VisionTowerConfig, layout: Layout) -> LayerSettings:
    """Settings that the layers of the tower share."""
    output_std = cfg.init_std / cfg.stack.sub_layers() ** 0.5
    return LayerSettings(
        layout=layout, hidden=cfg.hidden, std=cfg.init_std, output_std=output_std, padded=cfg.pads_rows()
    )


def resized_positions(
    table: np.ndarray, class_tokens: int, old_grid: tuple[int, int], new_grid: tuple[int, int]
) -> np.ndarray:
    """A table of positions [class tokens + patches, D] for another grid of patches, interpolated bilinearly."""
    patches = table[class_tokens:].reshape(*old_grid, table.shape[1])
    down, across = (interpolation_matrix(*sizes) for sizes in zip(new_grid, old_grid, strict=True))
    resized = np.einsum("io,jp,opd->ijd", down, across, patches).reshape(-1, table.shape[1])
    return np.concatenate([table[:class_tokens], resized]).astype(table.dtype)


def interpolation_matrix(new_size: int, old_size: int) -> np.ndarray:
    """Matrix [new, old] of linear interpolation between the centres of `old` cells at those of `new` ones."""
    places = np.clip((np.arange(new_size) + 0.5) * old_size / new_size - 0.5, 0, old_size - 1)
    return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(old_size)))
