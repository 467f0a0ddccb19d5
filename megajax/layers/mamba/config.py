"""Configs of state-space layers; imports neither jax nor flax."""

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass
from math import inf
from typing import Any, ClassVar, Self

from megajax.config.bounds import Positive, Size
from megajax.config.errors import Problem
from megajax.kernels.attention.capability import KernelChoice
from megajax.kernels.attention.request import KernelDevice, KernelRequest
from megajax.layers.cache_spec import CacheLeaf, cached_heads
from megajax.layers.checks import ChannelSharded, HeadGroups, HeadSharded
from megajax.layers.facts import Elements, KernelWork, LayerFacts, Matmul, Side, Weight, prefixed
from megajax.layers.multiply_adds import MultiplyAdds
from megajax.layers.norm.config import NormConfig
from megajax.layers.recompute import Part


class RecurrentConfig(LayerFacts):
    """Base of the configs of mixers that take rows of any length and parts of rows, by one kernel in plain JAX."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    """Fields of the subclass, which is always a dataclass."""
    dropout: ClassVar[float] = 0.0
    place: ClassVar[str] = "state space"
    """The kind of layer, in the banner."""

    def shape_problems(self, *, hidden: int, length: int) -> list[Problem]:
        """No problems: rows may have any length."""
        del hidden, length
        return []

    def allows_context(self) -> bool:
        """Supports context parallelism."""
        return True

    def kernel_choice(
        self, hidden: int, request: KernelRequest, device: KernelDevice | None, setting: str = "kernel"
    ) -> KernelChoice[str]:
        """Matmuls or scans over chunks, on every device."""
        del hidden, request, device, setting
        return KernelChoice("chunks", place=self.place)

    def with_kernel(self, name: Any) -> Self:
        """The layer itself: there is one kernel."""
        del name
        return self


class StateSpaceConfig(RecurrentConfig):
    """Base of the configs of Mamba 1 and 2 and gated delta nets: a short convolution, steps, decaying states."""

    conv_kernel: int
    chunk: int
    dt_min: float
    dt_max: float
    dt_floor: float

    def problems(self) -> list[Problem]:
        """Lower bounds must not be above upper ones."""
        ends = {name: [getattr(self, f"{name}_{end}", 0.0) for end in ("min", "max")] for name in ("dt", "decay")}
        wrong = {name: (low, high) for name, (low, high) in ends.items() if low > high}
        order = [Problem(f"{name}_min", f"{low} is above {name}_max={high}") for name, (low, high) in wrong.items()]
        return super().problems() + order


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(HeadSharded, StateSpaceConfig):
    """A state-space layer with one rate of decay a head (Dao and Gu 2024).

    Example: `mj.Mamba2Config(heads=24, head_dim=64, state=128)`
    """

    target: ClassVar[str] = "megajax.layers.mamba.mamba2:Mamba2"
    heads: Size
    """Heads, each with a state of head_dim x state. Mamba-2 and Megatron-LM: 2 x hidden / head_dim."""
    head_dim: Size = 64
    """Size of one head."""
    state: Size = 128
    """Size of the state of each channel of a head."""
    groups: Size = 1
    """Groups of heads that share the input (b) and output (c) projections of the state and one normalisation."""
    conv_kernel: Size = 4
    """Width of the causal convolution, in positions."""
    conv_bias: bool = True
    """Bias of the convolution."""
    bias: bool = False
    """Biases of the projections."""
    normalised: bool = True
    """Normalise the output; false: it is only multiplied by the gate."""
    norm_before_gate: bool = False
    """Normalise the output and then multiply by the gate; false: the gated output is normalised."""
    norm_epsilon: Positive = 1e-5
    """Added to the mean square."""
    dt_min: Positive = 0.001
    """Lower bound of initial steps, which are log-uniform."""
    dt_max: Positive = 0.1
    """Upper bound of initial steps."""
    dt_floor: Positive = 1e-4
    """Initial steps are at least this."""
    dt_limit: tuple[float, float] = (0.0, inf)
    """Steps are clipped to this interval."""
    input_factors: tuple[float, float, float, float, float] | None = None
    """Fixed factors on the projections of the gate, x, b, c and the steps, as in Falcon-H1; none: 1."""
    decay_min: Positive = 1.0
    """Lower bound of initial decay rates, which are uniform."""
    decay_max: Positive = 16.0
    """Upper bound of initial decay rates."""
    chunk: Size = 128
    """Positions per chunk of the matmul form; results are equal up to rounding."""

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if not 0 <= self.dt_limit[0] < self.dt_limit[1]:
            problems.append(Problem("dt_limit", f"must be two numbers, the first lower, got {self.dt_limit}"))
        return problems

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Every weight of the module."""
        per_head, per_group = ("heads", "head_dim"), ("kv_heads", "state")
        head, group = (self.heads, self.head_dim), (self.groups, self.state)
        wide = {"z": (head, per_head), "x": (head, per_head), "b": (group, per_group), "c": (group, per_group)}
        parts = {**wide, "dt": ((self.heads,), ("heads",))}
        weights = [Weight(f"in_{name}", (hidden, *shape), ("embed", *axes)) for name, (shape, axes) in parts.items()]
        if self.bias:
            weights += [Weight(f"in_{name}_bias", shape, axes) for name, (shape, axes) in parts.items()]
            weights.append(Weight("output_bias", (hidden,), ("embed",)))
        for name in ("x", "b", "c"):
            shape, axes = wide[name]
            weights.append(Weight(f"conv_{name}.kernel", (self.conv_kernel, *shape), (None, *axes)))
            weights += [Weight(f"conv_{name}.bias", shape, axes)] * self.conv_bias
        weights += [Weight(name, (self.heads,), ("heads",)) for name in ("dt_bias", "a_log", "skip")]
        return (
            *weights,
            *[Weight("norm_gain", head, per_head)] * self.normalised,
            Weight("output", (*head, hidden), (*per_head, "embed")),
        )

    def cache_leaves(self, hidden: int, tensor: int) -> tuple[CacheLeaf, ...]:
        """The last inputs of the convolutions, and the state."""
        del hidden
        group = (cached_heads(self.groups, tensor), self.state)
        return (
            last_inputs(self.conv_kernel, "x", (self.heads, self.head_dim), ("heads", None)),
            *(last_inputs(self.conv_kernel, name, group, ("kv_heads", None)) for name in ("b", "c")),
            state_leaf((self.heads, self.head_dim, self.state)),
        )

    def step_inputs(self, hidden: int, tensor: int) -> tuple[CacheLeaf, ...]:
        """What the recurrence reads of a token, see `megajax.layers.cache_spec.latest_leaves`."""
        del hidden
        group = (cached_heads(self.groups, tensor), self.state)
        return (
            CacheLeaf("x", (self.heads, self.head_dim), ("heads", None)),
            *(CacheLeaf(name, group, ("kv_heads", None)) for name in ("b", "c")),
            CacheLeaf("dt", (self.heads,), ("heads",)),
        )

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        """One matmul for the gate, convolution inputs and steps, and one for the output."""
        hidden_side = Elements(replicated=hidden)
        shared = 2 * self.groups * self.state
        outputs = Elements(sharded=2 * self.inner + self.heads, grouped=shared, groups=self.groups)
        return (
            Matmul(inputs=hidden_side, outputs=outputs, result="query_key_value", weights=5, joined=True),
            Matmul(inputs=Elements(sharded=self.inner), outputs=hidden_side, result="residual"),
        )

    def multiply_adds(self, hidden: int) -> MultiplyAdds:
        """The matmuls, and 3.5 per element of the state, as Megatron-LM counts."""
        return MultiplyAdds(super().multiply_adds(hidden).per_token + 3.5 * self.inner * self.state)

    def kernel_work(self, hidden: int, keys: float) -> KernelWork:
        """Within a chunk, as attention; between chunks, the states."""
        del hidden
        chunk = min(self.chunk, keys)
        pairs = chunk * (self.groups * self.state + self.inner)
        states = 2 * self.inner * self.state
        return KernelWork(pairs + states, pairs / 2 + states, chunk * self.heads)

    def tensors(self, hidden: int) -> Mapping[Part, Elements]:
        """Inputs and outputs of the kernel, and the gate."""
        del hidden
        shared = 2 * self.groups * self.state
        return {
            "query_key_value": Elements(sharded=self.inner + self.heads, grouped=shared, groups=self.groups),
            "core_attention": Elements(sharded=self.inner),
            "gate": Elements(sharded=self.inner),
        }

    def head_groups(self, hidden: int = 0) -> HeadGroups:
        """The heads, and the groups that share projections of the state."""
        del hidden
        return HeadGroups(self.heads, self.head_dim, self.groups, self.state, "groups")

    def summary(self, hidden: int) -> str:
        """Sizes of heads and states."""
        del hidden
        return f"Mamba-2 {self.heads} heads of {self.head_dim}, states of {self.state}, {self.groups} groups"


@dataclass(frozen=True, kw_only=True)
class Mamba1Config(ChannelSharded, StateSpaceConfig):
    """A state-space layer with rates of decay for each channel (Gu and Dao 2023); for checkpoints that have it.

    Example: `mj.Mamba1Config(inner=1536, rank=48)`
    """

    target: ClassVar[str] = "megajax.layers.mamba.mamba1:Mamba1"
    inner: Size
    """Channels, each with a state. Mamba: 2 x hidden."""
    rank: Size
    """Rank of the projection to steps. Mamba: hidden / 16, rounded up."""
    state: Size = 16
    """Size of the state of a channel."""
    conv_kernel: Size = 4
    """Width of the causal convolution, in positions."""
    conv_bias: bool = True
    """Bias of the convolution."""
    bias: bool = False
    """Biases of the first and the last projection."""
    inner_norm: NormConfig | None = None
    """Normalisation of b, c and the input of the projection to steps, as in Jamba; none: no normalisation."""
    dt_min: Positive = 0.001
    """Lower bound of initial steps, which are log-uniform."""
    dt_max: Positive = 0.1
    """Upper bound of initial steps."""
    dt_floor: Positive = 1e-4
    """Initial steps are at least this."""
    chunk: Size = 64
    """Positions whose states exist at once; results are equal up to rounding."""

    @property
    def heads(self) -> int:
        """Each channel counts as a head."""
        return self.inner

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Every weight of the module."""
        channels = (self.inner,), ("heads",)
        weights = [Weight(name, (hidden, self.inner), ("embed", "heads")) for name in ("in_z", "in_x")]
        if self.bias:
            weights += [Weight(f"{name}_bias", *channels) for name in ("in_z", "in_x")]
            weights.append(Weight("output_bias", (hidden,), ("embed",)))
        weights.append(Weight("conv_x.kernel", (self.conv_kernel, self.inner), (None, "heads")))
        weights += [Weight("conv_x.bias", *channels)] * self.conv_bias
        return (
            *weights,
            *(weight for name, norm in self.inner_norms().items() for weight in prefixed(name, norm)),
            Weight("down_dt", (self.inner, self.rank), ("heads", None)),
            Weight("down_b", (self.inner, self.state), ("heads", "state")),
            Weight("down_c", (self.inner, self.state), ("heads", "state")),
            Weight("up_dt", (self.rank, self.inner), (None, "heads")),
            Weight("dt_bias", *channels),
            Weight("a_log", (self.inner, self.state), ("heads", "state")),
            Weight("skip", *channels),
            Weight("output", (self.inner, hidden), ("heads", "embed")),
        )

    def inner_norms(self) -> dict[str, tuple[Weight, ...]]:
        """Name of each inner norm -> its weights."""
        sizes = {"dt_norm": self.rank, "b_norm": self.state, "c_norm": self.state}
        return {} if self.inner_norm is None else {name: self.inner_norm.weights(n, None) for name, n in sizes.items()}

    def cache_leaves(self, hidden: int, tensor: int) -> tuple[CacheLeaf, ...]:
        """The last inputs of the convolution, and the state."""
        del hidden, tensor
        return last_inputs(self.conv_kernel, "x", (self.inner,), ("heads",)), state_leaf((self.inner, self.state))

    def step_inputs(self, hidden: int, tensor: int) -> tuple[CacheLeaf, ...]:
        """What convolution and recurrence read of a token, see `megajax.layers.cache_spec.latest_leaves`."""
        del hidden, tensor
        channels = (CacheLeaf(name, (self.inner,), ("heads",)) for name in ("input", "x", "dt"))
        return (*channels, *(CacheLeaf(name, (self.state,), (None,)) for name in ("b", "c")))

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        """Matmuls of gate and input; of steps, b and c; of the output."""
        hidden_side, channels = Elements(replicated=hidden), Elements(sharded=self.inner)
        gated, narrow = Elements(sharded=2 * self.inner), Elements(replicated=self.rank + 2 * self.state)
        return (
            Matmul(inputs=hidden_side, outputs=gated, result="query_key_value", weights=2, joined=True),
            Matmul(inputs=channels, outputs=narrow, result="latent", weights=3, joined=True),
            Matmul(inputs=Elements(replicated=self.rank), outputs=channels, result="query_key_value"),
            Matmul(inputs=channels, outputs=hidden_side, result="residual"),
        )

    def multiply_adds(self, hidden: int) -> MultiplyAdds:
        """The matmuls, and 3.5 per element of the state, as Megatron-LM counts for Mamba-2."""
        return MultiplyAdds(super().multiply_adds(hidden).per_token + 3.5 * self.inner * self.state)

    def kernel_work(self, hidden: int, keys: float) -> KernelWork:
        """Elements of states, each with a decay, an input and an output."""
        del hidden, keys
        return KernelWork(3.0 * self.inner * self.state, 3.0 * self.inner * self.state, self.inner * self.state)

    def tensors(self, hidden: int) -> Mapping[Part, Elements]:
        """Convolution input and steps; the narrow projections; the output of the kernel; the gate."""
        del hidden
        channels, narrow = Elements(sharded=self.inner), Elements(replicated=self.rank + 2 * self.state)
        kernel_inputs = Elements(sharded=2 * self.inner)
        return {"query_key_value": kernel_inputs, "latent": narrow, "core_attention": channels, "gate": channels}

    def sharded_channels(self) -> tuple[str, int]:
        """The channels."""
        return "inner", self.inner

    def matmul_sides(self, hidden: int, tensor: int) -> Iterator[Side]:
        """The channels of a device, and the narrow projections."""
        yield from super().matmul_sides(hidden, tensor)
        yield Side("rank", "is", self.rank)
        yield Side("state", "is", self.state)

    def summary(self, hidden: int) -> str:
        """Channels and states."""
        del hidden
        return f"Mamba {self.inner} channels, states of {self.state}"


def last_inputs(width: int, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> CacheLeaf:
    """Cache leaf of the last inputs of a convolution of this width, in float32: small compared with the state."""
    return CacheLeaf(name, (width - 1, *shape), (None, *axes), per="row", dtype="float32")


def state_leaf(shape: tuple[int, ...]) -> CacheLeaf:
    """Cache leaf of the state of heads or channels."""
    return CacheLeaf("state", shape, ("heads", *[None] * (len(shape) - 1)), per="row", dtype="float32")
