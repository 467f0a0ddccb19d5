"""One residual block."""

from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.config import BlockConfig
from megajax.layers.context import Context, dropout
from megajax.layers.param import LayerSettings

MIXER_PLACE, MLP_PLACE = 2, 3


class Block(nnx.Module):
    """Pre-normalised residual block, [B, S, D] -> [B, S, D], laid out (batch, seq_residual, embed)."""

    def __init__(self, cfg: BlockConfig, settings: LayerSettings):
        self.rate, self.layout = cfg.dropout, settings.layout
        self.mixer_norm = cfg.norm.build(settings)
        self.mixer = cfg.mixer.build(settings)
        self.mlp_norm = cfg.norm.build(settings)
        self.mlp = cfg.mlp.build(settings)

    def __call__(self, x: Array, ctx: Context) -> Array:
        x = checkpoint_name(
            x + self.drop(self.mixer(self.whole(self.mixer_norm(x)), ctx), ctx, MIXER_PLACE), "residual"
        )
        return x + self.drop(self.mlp(self.whole(self.mlp_norm(x))), ctx, MLP_PLACE)

    def whole(self, normed: Array) -> Array:
        """A norm's output, of which every device of `tensor` gets the whole sequence."""
        return self.layout.act(checkpoint_name(normed, "norm"), "batch", "seq", "embed")

    def drop(self, x: Array, ctx: Context, place: int) -> Array:
        """Dropout of a sub-layer's output."""
        return dropout(x, self.rate, ctx, place, self.layout)
