"""Configs of gated delta nets; imports neither jax nor flax."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megajax.config.bounds import Positive, Size
from megajax.layers.cache_spec import CacheLeaf, cached_heads
from megajax.layers.checks import HeadGroups, HeadSharded
from megajax.layers.facts import Elements, KernelWork, Matmul, Weight
from megajax.layers.mamba.config import StateSpaceConfig, last_inputs, state_leaf
from megajax.layers.multiply_adds import MultiplyAdds
from megajax.layers.recompute import Part

DIRECT = 16
"""Positions whose products are made channel by channel, where decays are: the kernel's BLOCK."""
STATE_PASSES, PAIR_PASSES, INPUT_PASSES, CHANNEL_PASSES = 72.0, 80.0, 109.0, 380.0
"""Passes of the form by chunks, in elements of the compute dtype, over states of chunks, squares of chunks, keys with
values, and decays by channel."""


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(HeadSharded, StateSpaceConfig):
    """A gated delta net: a state per head that decays and corrects what it returns for a key (Yang et al. 2024).

    Example: `mj.GatedDeltaNetConfig(heads=32, key_heads=16)`
    """

    target: ClassVar[str] = "megajax.layers.delta.module:GatedDeltaNet"
    place: ClassVar[str] = "delta net"
    heads: Size
    """Value heads, each with a state of key_dim x head_dim."""
    key_heads: Size | None = None
    """Query and key heads, each shared by heads / key_heads consecutive value heads; none: as many as heads."""
    head_dim: Size = 128
    """Size of one value head."""
    key_dim: Size = 128
    """Size of one query or key head."""
    conv_kernel: Size = 4
    """Width of the causal convolution, in positions."""
    norm_epsilon: Positive = 1e-6
    """Added to the mean square of the output of a head."""
    dt_min: Positive = 0.001
    """Lower bound of initial steps, which are log-uniform."""
    dt_max: Positive = 0.1
    """Upper bound of initial steps."""
    dt_floor: Positive = 1e-4
    """Initial steps are at least this."""
    decay_min: Positive = 0.01
    """Lower bound of initial decay rates, which are uniform."""
    decay_max: Positive = 16.0
    """Upper bound of initial decay rates."""
    chunk: Size = 64
    """Positions per chunk of the matmul form; results are equal up to rounding."""

    @property
    def groups(self) -> int:
        """Query and key heads."""
        return self.key_heads or self.heads

    @property
    def decays(self) -> tuple[int, ...]:
        """Shape of the decays of a position."""
        return (self.heads,)

    @property
    def inner(self) -> int:
        """Channels of all value heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Channels of all key heads."""
        return self.groups * self.key_dim

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Every weight of the module."""
        head, group = ("heads", "head_dim"), ("kv_heads", "state")
        value, key = (self.heads, self.head_dim), (self.groups, self.key_dim)
        wide = {"q": (key, group), "k": (key, group), "v": (value, head)}
        steps = dict.fromkeys(("a", "b"), ((self.heads,), ("heads",)))
        parts = {**wide, "z": (value, head), **steps}
        convolved = [
            Weight(f"conv_{name}.kernel", (self.conv_kernel, *shape), (None, *axes))
            for name, (shape, axes) in wide.items()
        ]
        return (
            *(Weight(f"in_{name}", (hidden, *shape), ("embed", *axes)) for name, (shape, axes) in parts.items()),
            *convolved,
            *(Weight(name, (self.heads,), ("heads",)) for name in ("dt_bias", "a_log")),
            Weight("norm_gain", (self.head_dim,), ("head_dim",)),
            Weight("output", (*value, hidden), (*head, "embed")),
        )

    def cache_leaves(self, hidden: int, tensor: int) -> tuple[CacheLeaf, ...]:
        """The last inputs of the convolutions, and the state."""
        del hidden
        group = (cached_heads(self.groups, tensor), self.key_dim)
        return (
            *(last_inputs(self.conv_kernel, name, group, ("kv_heads", None)) for name in ("q", "k")),
            last_inputs(self.conv_kernel, "v", (self.heads, self.head_dim), ("heads", None)),
            state_leaf((self.heads, self.key_dim, self.head_dim)),
        )

    def step_inputs(self, hidden: int, tensor: int) -> tuple[CacheLeaf, ...]:
        """What the recurrence reads of a token, see `megajax.layers.cache_spec.latest_leaves`."""
        del hidden
        group = (cached_heads(self.groups, tensor), self.key_dim)
        return (
            *(CacheLeaf(name, group, ("kv_heads", None)) for name in ("q", "k")),
            CacheLeaf("v", (self.heads, self.head_dim), ("heads", None)),
            CacheLeaf("a", self.decays, ("heads", None)[: len(self.decays)]),
            CacheLeaf("b", (self.heads,), ("heads",)),
        )

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        """One matmul for queries, keys, values, gates, steps and corrections, and one for the output."""
        hidden_side = Elements(replicated=hidden)
        outputs = Elements(sharded=2 * self.inner + 2 * self.heads, grouped=2 * self.keys, groups=self.groups)
        return (
            Matmul(inputs=hidden_side, outputs=outputs, result="query_key_value", weights=6, joined=True),
            Matmul(inputs=Elements(sharded=self.inner), outputs=hidden_side, result="residual"),
        )

    def multiply_adds(self, hidden: int) -> MultiplyAdds:
        """The matmuls, the convolutions, and 4 per element of the state, as Megatron-LM counts."""
        convolved = self.conv_kernel * (2 * self.keys + self.inner)
        states = 4 * self.inner * self.key_dim
        return MultiplyAdds(super().multiply_adds(hidden).per_token + convolved + states)

    def kernel_work(self, hidden: int, keys: float) -> KernelWork:
        """Within a chunk, products of keys and queries, their inverse and its products; between chunks, the states."""
        del hidden
        chunk = min(self.chunk, keys)
        pairs = chunk * (2 * self.keys + self.heads * (chunk / 3 + self.key_dim + 2 * self.head_dim))
        states = 3 * self.inner * self.key_dim
        return KernelWork(pairs + states, pairs / 2 + states, 2 * chunk * self.heads, self.moved(chunk))

    def moved(self, chunk: float) -> float:
        """`KernelWork.moved`: states, squares of chunks, and the rest.

        The passes are those of compiled programs, in bfloat16 (docs/models.md#config-of-gated-delta-nets).
        """
        states, pairs, keys = self.inner * self.key_dim / chunk, chunk * self.heads, self.heads * self.key_dim
        channels = keys * (len(self.decays) > 1)
        inputs = INPUT_PASSES * (keys + self.inner)
        return STATE_PASSES * states + PAIR_PASSES * pairs + inputs + CHANNEL_PASSES * channels

    def tensors(self, hidden: int) -> Mapping[Part, Elements]:
        """Inputs and outputs of the kernel, and the gate."""
        del hidden
        return {
            "query_key_value": Elements(sharded=self.inner + 2 * self.heads, grouped=2 * self.keys, groups=self.groups),
            "core_attention": Elements(sharded=self.inner),
            "gate": Elements(sharded=self.inner),
        }

    def head_groups(self, hidden: int = 0) -> HeadGroups:
        """The value heads and the key heads."""
        del hidden
        return HeadGroups(self.heads, self.head_dim, self.groups, self.key_dim, "key_heads")

    def summary(self, hidden: int) -> str:
        """Sizes of heads and states."""
        del hidden
        return (
            f"gated delta net {self.heads} heads, {self.groups} key heads, states of {self.key_dim} x {self.head_dim}"
        )


@dataclass(frozen=True, kw_only=True)
class KimiDeltaConfig(GatedDeltaNetConfig):
    """A gated delta net whose states decay by channel of the key (Kimi Team 2025).

    The matrices that make decays and the gate have low rank; the gate's activation is the sigmoid.
    Example: `mj.KimiDeltaConfig(heads=32)`
    """

    target: ClassVar[str] = "megajax.layers.delta.module:KimiDelta"
    gate_rank: Size | None = None
    """Rank of the matrices of decays and of the gate; none: head_dim."""

    @property
    def rank(self) -> int:
        """Rank of the matrices of decays and of the gate."""
        return self.gate_rank or self.head_dim

    @property
    def decays(self) -> tuple[int, ...]:
        """Shape of the decays of a position."""
        return (self.heads, self.key_dim)

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Every weight of the module."""
        head, replaced = ("heads", "head_dim"), ("in_a", "in_z", "dt_bias")
        sizes = {"a": self.key_dim, "z": self.head_dim}
        return (
            *(weight for weight in super().weights(hidden) if weight.name not in replaced),
            *(Weight(f"{name}_down", (hidden, self.rank), ("embed", None)) for name in sizes),
            *(Weight(f"{name}_up", (self.rank, self.heads, size), (None, *head)) for name, size in sizes.items()),
            Weight("dt_bias", self.decays, head),
        )

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        """Queries, keys, values and corrections; down to the low ranks, and up; the output."""
        hidden_side, low = Elements(replicated=hidden), Elements(replicated=self.rank)
        outputs = Elements(sharded=self.inner + self.heads, grouped=2 * self.keys, groups=self.groups)
        return (
            Matmul(inputs=hidden_side, outputs=outputs, result="query_key_value", weights=4, joined=True),
            Matmul(
                inputs=hidden_side, outputs=Elements(replicated=2 * self.rank), result="latent", weights=2, joined=True
            ),
            Matmul(inputs=low, outputs=Elements(sharded=self.heads * self.key_dim), result="query_key_value"),
            Matmul(inputs=low, outputs=Elements(sharded=self.inner), result="gate"),
            Matmul(inputs=Elements(sharded=self.inner), outputs=hidden_side, result="residual"),
        )

    def kernel_work(self, hidden: int, keys: float) -> KernelWork:
        """As of `GatedDeltaNetConfig`, with products of keys and queries for each head."""
        del hidden
        chunk, channels = min(self.chunk, keys), self.heads * self.key_dim
        pairs = chunk * (2 * channels + self.heads * (chunk / 3 + self.key_dim + 2 * self.head_dim))
        states = 3 * self.inner * self.key_dim
        return KernelWork(
            pairs + states, pairs / 2 + states, 2 * chunk * self.heads + DIRECT * channels, self.moved(chunk)
        )

    def tensors(self, hidden: int) -> Mapping[Part, Elements]:
        """Inputs and outputs of the kernel, the gate, and the results of low rank."""
        del hidden
        sharded = self.inner + self.heads * (1 + self.key_dim)
        return {
            "query_key_value": Elements(sharded=sharded, grouped=2 * self.keys, groups=self.groups),
            "latent": Elements(replicated=2 * self.rank),
            "core_attention": Elements(sharded=self.inner),
            "gate": Elements(sharded=self.inner),
        }

    def summary(self, hidden: int) -> str:
        """Sizes of heads and states."""
        return f"{super().summary(hidden)}, decays by channel of rank {self.rank}"
