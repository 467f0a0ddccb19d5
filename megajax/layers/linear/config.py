"""Configs of mixers that are linear in their values: short convolutions, and attention without a softmax.

Imports neither jax nor flax.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from megajax.config.bounds import Size
from megajax.layers.cache_spec import CacheLeaf
from megajax.layers.checks import ChannelSharded, HeadGroups, HeadSharded
from megajax.layers.facts import Elements, KernelWork, Matmul, Weight, prefixed
from megajax.layers.mamba.config import RecurrentConfig, last_inputs, state_leaf
from megajax.layers.multiply_adds import MultiplyAdds
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.recompute import Part

PER_HEAD = ("heads", "head_dim")
PROJECTIONS = ("in_query", "in_key", "in_value", "in_gate")
"""Matrices of lightning attention that multiply its input; hybrids have attention with other names beside it."""


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig(ChannelSharded, RecurrentConfig):
    """A gated short convolution: output(c * conv(b * x)) of three projections of the input (Liquid AI 2025, LFM2).

    Example: `mj.ShortConvConfig(channels=1024)`
    """

    target: ClassVar[str] = "megajax.layers.linear.short_conv:ShortConv"
    place: ClassVar[str] = "short convolution"
    channels: Size
    """Channels, each with its own filter; LFM2: the hidden size."""
    conv_kernel: Size = 3
    """Width of the causal convolution, in positions."""
    conv_bias: bool = False
    """Bias of the convolution."""
    bias: bool = False
    """Biases of the projections."""

    @property
    def heads(self) -> int:
        """Each channel counts as a head."""
        return self.channels

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Every weight of the module."""
        channels, names = ((self.channels,), ("heads",)), ("in_b", "in_c", "in_x")
        weights = [Weight(name, (hidden, self.channels), ("embed", "heads")) for name in names]
        if self.bias:
            weights += [Weight(f"{name}_bias", *channels) for name in names]
            weights.append(Weight("output_bias", (hidden,), ("embed",)))
        weights.append(Weight("conv.kernel", (self.conv_kernel, self.channels), (None, "heads")))
        weights += [Weight("conv.bias", *channels)] * self.conv_bias
        return (*weights, Weight("output", (self.channels, hidden), ("heads", "embed")))

    def cache_leaves(self, hidden: int, tensor: int) -> tuple[CacheLeaf, ...]:
        """The last inputs of the convolution."""
        del hidden, tensor
        return (last_inputs(self.conv_kernel, "x", (self.channels,), ("heads",)),)

    def step_inputs(self, hidden: int, tensor: int) -> tuple[CacheLeaf, ...]:
        """The input of the convolution, see `megajax.layers.cache_spec.latest_leaves`."""
        del hidden, tensor
        return (CacheLeaf("x", (self.channels,), ("heads",)),)

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        """One matmul for the three projections, and one for the output."""
        hidden_side, outputs = Elements(replicated=hidden), Elements(sharded=3 * self.channels)
        return (
            Matmul(inputs=hidden_side, outputs=outputs, result="query_key_value", weights=3, joined=True),
            Matmul(inputs=Elements(sharded=self.channels), outputs=hidden_side, result="residual"),
        )

    def kernel_work(self, hidden: int, keys: float) -> KernelWork:
        """The convolution."""
        del hidden, keys
        work = float(self.conv_kernel * self.channels)
        return KernelWork(work, work, 0)

    def tensors(self, hidden: int) -> Mapping[Part, Elements]:
        """The two factors of the convolution's input, its output, and the factor on that."""
        del hidden
        channels = Elements(sharded=self.channels)
        inputs = Elements(sharded=2 * self.channels)
        return {"query_key_value": inputs, "core_attention": channels, "gate": channels}

    def sharded_channels(self) -> tuple[str, int]:
        """The channels."""
        return "channels", self.channels

    def summary(self, hidden: int) -> str:
        """Channels and width."""
        del hidden
        return f"convolution over {self.conv_kernel} positions of {self.channels} channels"


@dataclass(frozen=True, kw_only=True)
class LightningAttentionConfig(HeadSharded, RecurrentConfig):
    """Attention without a softmax, in which each head forgets at a fixed rate (Qin et al. 2024; MiniMax 2025).

    Head h of H in layer l of L multiplies a key's weight by exp(-2^(-8 h / H) (1 - l / (L - 1))) at each position.

    Example: `mj.LightningAttentionConfig(heads=64, head_dim=128, layers=80)`
    """

    target: ClassVar[str] = "megajax.layers.linear.lightning:LightningAttention"
    place: ClassVar[str] = "linear attention"
    heads: Size
    """Heads of queries, keys and values."""
    head_dim: Size
    """Size of one head."""
    layers: Size
    """Layers of the model: later layers forget more slowly."""
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "silu"] = "silu"
    """Function of queries, keys and values."""
    norm: RMSNormConfig = field(default_factory=lambda: RMSNormConfig(epsilon=1e-6))
    """Normalisation of the output over all heads, before the gate."""
    chunk: Size = 256
    """Positions per chunk of the matmul form; results are equal up to rounding."""

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    def rate(self) -> float:
        """Rate of the first layer's head h, to the power h."""
        return 2 ** (-8 / self.heads)

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Every weight of the module."""
        head = (self.heads, self.head_dim)
        inputs = [Weight(name, (hidden, *head), ("embed", *PER_HEAD)) for name in PROJECTIONS]
        norm = prefixed("norm", self.norm.weights(self.inner, "heads"))
        return (*inputs, *norm, Weight("out", (*head, hidden), (*PER_HEAD, "embed")))

    def cache_leaves(self, hidden: int, tensor: int) -> tuple[CacheLeaf, ...]:
        """The state."""
        del hidden, tensor
        return (state_leaf((self.heads, self.head_dim, self.head_dim)),)

    def step_inputs(self, hidden: int, tensor: int) -> tuple[CacheLeaf, ...]:
        """Queries, keys and values, see `megajax.layers.cache_spec.latest_leaves`."""
        del hidden, tensor
        head = (self.heads, self.head_dim)
        return tuple(CacheLeaf(name, head, ("heads", None)) for name in ("query", "key", "value"))

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        """One matmul for queries, keys, values and the gate, and one for the output."""
        hidden_side, outputs = Elements(replicated=hidden), Elements(sharded=4 * self.inner)
        return (
            Matmul(inputs=hidden_side, outputs=outputs, result="query_key_value", weights=4, joined=True),
            Matmul(inputs=Elements(sharded=self.inner), outputs=hidden_side, result="residual"),
        )

    def multiply_adds(self, hidden: int) -> MultiplyAdds:
        """The matmuls, and the update and the product of the state."""
        return MultiplyAdds(super().multiply_adds(hidden).per_token + 2 * self.inner * self.head_dim)

    def kernel_work(self, hidden: int, keys: float) -> KernelWork:
        """Within a chunk, as attention; between chunks, the states."""
        del hidden
        chunk = min(self.chunk, keys)
        pairs, states = 2 * chunk * self.inner, 2 * self.inner * self.head_dim
        return KernelWork(pairs + states, pairs / 2 + states, chunk * self.heads)

    def tensors(self, hidden: int) -> Mapping[Part, Elements]:
        """Inputs and outputs of the kernel, and the gate."""
        del hidden
        inner = Elements(sharded=self.inner)
        return {"query_key_value": Elements(sharded=3 * self.inner), "core_attention": inner, "gate": inner}

    def head_groups(self, hidden: int = 0) -> HeadGroups:
        """The heads, each a group of its own."""
        del hidden
        return HeadGroups(self.heads, self.head_dim, self.heads, self.head_dim)

    def summary(self, hidden: int) -> str:
        """Numbers and size of heads."""
        del hidden
        return f"lightning attention, {self.heads} heads of {self.head_dim}"
