"""Config of multi-head latent attention; imports neither jax nor flax."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from megajax.config.bounds import BelowOne, Positive, Size
from megajax.config.errors import Problem
from megajax.kernels.attention.request import Kernel, KernelRequest
from megajax.kernels.paged.capability import PagedRequest
from megajax.layers.attention.config import PER_HEAD, AttentionConfig, MultiHeadConfig, Window
from megajax.layers.cache_spec import CacheLeaf
from megajax.layers.facts import Elements, Matmul, Weight, prefixed
from megajax.layers.multiply_adds import MultiplyAdds, VisibleKeys
from megajax.layers.norm.config import NormConfig, RMSNormConfig
from megajax.layers.position.config import RelativeBiasConfig, RopeConfig
from megajax.layers.recompute import Part


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(MultiHeadConfig):
    """Multi-head latent attention: queries, keys and values from narrow latents (DeepSeek-AI 2024, section 2.1).

    Example: `mj.deepseek("v2-lite").stack`
    """

    target: ClassVar[str] = "megajax.layers.attention.latent:LatentAttention"
    relative: ClassVar[RelativeBiasConfig | None] = None
    heads: Size
    """Heads of queries, keys and values."""
    query_rank: Size | None = None
    """Width of the latent of queries; none: queries are projected from the input."""
    key_value_rank: Size = 512
    """Width of the latent of keys and values."""
    content_dim: Size = 128
    """Size of the part of a query or key head without positions."""
    position_dim: Size = 64
    """Size of the part with rotary positions; keys share one for all heads."""
    value_dim: Size = 128
    """Size of a value head."""
    bias: bool = False
    """Bias on the output."""
    latent_bias: bool = False
    """Biases on the latents and on the position part of keys."""
    norm: NormConfig | None = field(default_factory=RMSNormConfig)
    """Normalisation of the latents; none: no normalisation."""
    rope: RopeConfig | None = field(default_factory=lambda: RopeConfig(interleaved=True))
    """Rotation of the position parts; none: they are not rotated, and keys share them all the same."""
    window: Window | None = None
    """Number of previous tokens that a query attends to, besides its own; none: all."""
    sink: Literal["none", "zero", "learned"] = "none"
    """Extra score in the softmax without a value: 0 (softmax off by one), or learned per head."""
    scale: Positive | None = None
    """Factor on scores; none: 1 / sqrt(head size), times YaRN's mscale_all squared."""
    dropout: BelowOne = 0.0
    """Dropout rate of attention weights."""
    kernel: Kernel = "auto"
    """auto: the fastest available (docs/attention.md); cudnn, pallas, cudnn_mask, fixed or reference: that one or an
    error."""

    def shape_problems(self, *, hidden: int, length: int) -> list[Problem]:
        """Problems on rows of `length` tokens and width `hidden`."""
        del hidden
        problems = self.window_problems(length)
        return problems if self.rope is None else problems + self.rope.head_problems(self.position_dim)

    def groups(self) -> int:
        """Number of key-value heads: one per query head."""
        return self.heads

    def size(self, hidden: int) -> int:
        """Size of a query or key head."""
        del hidden
        return self.content_dim + self.position_dim

    def request(self, request: KernelRequest) -> KernelRequest:
        """The request to an attention backend, with the settings of this layer."""
        return replace(
            request,
            key_dim=self.content_dim + self.position_dim,
            value_dim=self.value_dim,
            key_length=None,
            window=self.window,
            sink=self.sink != "none",
            dropout=self.dropout,
        )

    def value_size(self, hidden: int) -> int:
        """Size of a value head."""
        del hidden
        return self.value_dim

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Every weight of the module."""
        heads, size, query, keys = self.heads, self.size(hidden), self.query_rank, self.key_value_rank
        weights = [
            Weight("query", (query or hidden, heads, size), ("embed" if query is None else None, *PER_HEAD)),
            Weight("down", (hidden, keys), ("embed", None)),
            Weight("position_key", (hidden, self.position_dim), ("embed", None)),
            Weight("key", (keys, heads, self.content_dim), (None, *PER_HEAD)),
            Weight("value", (keys, heads, self.value_dim), (None, *PER_HEAD)),
            Weight("output", (heads, self.value_dim, hidden), (*PER_HEAD, "embed")),
        ]
        if query is not None:
            weights.append(Weight("query_down", (hidden, query), ("embed", None)))
        if self.latent_bias:
            widths = {"query_down": query, "down": keys, "position_key": self.position_dim}
            weights += [Weight(f"{name}_bias", (width,), (None,)) for name, width in widths.items() if width]
        if self.bias:
            weights.append(Weight("output_bias", (hidden,), ("embed",)))
        if self.norm is not None:
            weights += prefixed("norm", self.norm.weights(keys, None))
        if self.norm is not None and query is not None:
            weights += prefixed("query_norm", self.norm.weights(query, None))
        return (*weights, *self.kernel_weights())

    def cache_leaves(self, hidden: int, tensor: int) -> tuple[CacheLeaf, ...]:
        """Latents of earlier tokens and the rotary part of their keys, replicated on all devices."""
        del hidden, tensor
        shape = (1, self.key_value_rank + self.position_dim)
        return (CacheLeaf("key", shape, (None, None), window=self.window),)

    def paged_request(self, hidden: int, request: PagedRequest) -> PagedRequest:
        """The request for the latent; its first part is the values."""
        del hidden
        return replace(request, key_dim=self.key_value_rank + self.position_dim, value_dim=self.key_value_rank)

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        """Down to the latents and the position part of keys, which `tensor` replicates; up to the heads; the output."""
        hidden_side, rank = Elements(replicated=hidden), self.query_rank
        latents, places = (rank or 0) + self.key_value_rank, Elements(replicated=self.position_dim)
        several = rank is not None
        queries = Elements(sharded=self.heads * self.size(hidden))
        keys = Elements(sharded=self.heads * (self.content_dim + self.value_dim))
        return (
            Matmul(
                inputs=hidden_side,
                outputs=Elements(replicated=latents),
                result="latent",
                weights=1 + several,
                joined=several,
            ),
            Matmul(inputs=hidden_side, outputs=places, result="query_key_value"),
            Matmul(inputs=Elements(replicated=rank or hidden), outputs=queries, result="query_key_value"),
            Matmul(
                inputs=Elements(replicated=self.key_value_rank),
                outputs=keys,
                result="query_key_value",
                weights=2,
                joined=True,
            ),
            Matmul(inputs=Elements(sharded=self.heads * self.value_dim), outputs=hidden_side, result="residual"),
        )

    def multiply_adds(self, hidden: int) -> MultiplyAdds:
        """Matrices, scores and values. Training does not absorb the matrices of keys and values into the others."""
        visible = VisibleKeys(causal=True, window=self.window)
        return super().multiply_adds(hidden)._replace(per_pair=self.per_pair(hidden), visible=visible)

    def megatron_surplus(self, hidden: int) -> int:
        """One gain per element of latents."""
        del hidden
        return self.key_value_rank + (self.query_rank or 0)

    def megatron_matrices(self, hidden: int, gains: int) -> int:
        """Matrices, and the weights of the norms of latents even if there are no norms."""
        query, heads, size = self.query_rank, self.heads, self.size(hidden)
        queries = hidden * heads * size if query is None else query * (hidden + heads * size + gains)
        latents = self.key_value_rank * (hidden + heads * (self.content_dim + self.value_dim) + gains)
        return queries + latents + hidden * self.position_dim + heads * self.value_dim * hidden

    def tensors(self, hidden: int) -> Mapping[Part, Elements]:
        """Inputs and outputs of the kernel, and the latents."""
        latents = self.key_value_rank + (self.query_rank or 0)
        return {**super().tensors(hidden), "latent": Elements(replicated=latents)}


type SelfAttentionConfig = AttentionConfig | LatentAttentionConfig
