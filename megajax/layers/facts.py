"""Facts of a layer that follow from its config: weights, matmuls, operations, saved tensors, legal mesh sizes.

Parameter counts, FLOPs, plans, memory reports, config checks and the start banner use only these facts. A new mixer or
feed-forward layer is a config class with the methods of `Layer` (and of `Mixer`). This imports neither jax nor flax.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from megajax.config.class_references import Builds
from megajax.config.errors import Problem
from megajax.kernels.attention.capability import KernelChoice
from megajax.kernels.attention.request import KernelDevice, KernelRequest
from megajax.layers.expert_facts import ExpertFacts, ExpertSharding
from megajax.layers.multiply_adds import MultiplyAdds
from megajax.layers.recompute import PARTS, Part, SavePolicy

CUT_AXES = frozenset({"heads", "kv_heads", "mlp"})
"""Logical axes that `tensor` shards."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight, as the module of the layer declares it."""

    name: str
    """Path below the layer: "query", "query_norm.gain"."""
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """Logical axes, one for each dimension."""
    active_share: float = field(default=1.0, compare=False)
    """Share of the weight that each token uses: below 1 for experts."""

    @property
    def size(self) -> int:
        return prod(self.shape)


def total_size(weights: Sequence[Weight]) -> int:
    """Number of elements of all weights."""
    return sum(weight.size for weight in weights)


def idle_size(weights: Sequence[Weight]) -> int:
    """Number of elements that a token does not use."""
    return sum(round(weight.size * (1 - weight.active_share)) for weight in weights)


def unsharded(weights: Sequence[Weight]) -> "Elements":
    """Elements of the weights that ZeRO-1 and FSDP do not shard, by how `tensor` shards them."""
    selected = [weight for weight in weights if "embed" not in weight.axes and "expert" not in weight.axes]
    sharded = sum(weight.size for weight in selected if CUT_AXES.intersection(weight.axes))
    return Elements(replicated=sum(weight.size for weight in selected) - sharded, sharded=sharded)


def prefixed(prefix: str, weights: Sequence[Weight]) -> tuple[Weight, ...]:
    """The weights, with the prefix and a dot before their names."""
    return tuple(replace(weight, name=f"{prefix}.{weight.name}") for weight in weights)


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of a tensor per token, or of one side of a matrix, by how the mesh axis `tensor` shards them."""

    replicated: int = 0
    """On every device."""
    sharded: int = 0
    """Sharded over all devices of `tensor`."""
    grouped: int = 0
    """Sharded over at most `groups` devices of `tensor`; other devices hold copies. Key-value heads, for example."""
    groups: int = 1

    @property
    def total(self) -> int:
        return self.replicated + self.divided

    @property
    def divided(self) -> int:
        """Elements that are not replicated."""
        return self.sharded + self.grouped

    def surplus(self, tensor: int) -> float:
        """Elements on a device beyond an even share, if there are fewer groups than devices."""
        return self.grouped * (1 / min(tensor, self.groups) - 1 / tensor)

    def local(self, tensor: int) -> float:
        """Elements on one device of `tensor`, the number of devices on that axis."""
        return self.replicated + self.divided / tensor + self.surplus(tensor)

    def plus(self, other: "Elements") -> "Elements":
        """The sum of both."""
        return Elements(
            replicated=self.replicated + other.replicated,
            sharded=self.sharded + other.sharded,
            grouped=self.grouped + other.grouped,
            groups=max(self.groups, other.groups),
        )


NO_ELEMENTS = Elements()


@dataclass(frozen=True, kw_only=True, slots=True)
class Matmul:
    """[tokens, inputs] x [inputs, outputs], by one weight or by several that multiply the same tensor."""

    inputs: Elements
    outputs: Elements
    result: Part | None = None
    """The part that the result belongs to if it is saved for the backward pass; None: no gradient needs it. residual:
    the output of a sub-layer, which a block saves if it needs the sum or normalises the output."""
    weights: int = 1
    """Number of weights."""
    joined: bool = False
    """XLA copies the weights into one matrix and multiplies once in the forward pass; false for one weight."""
    experts: int = 1
    """Number of matrices of this shape that tokens are distributed over."""
    per_token: float = 1
    """Experts that multiply each token; for cross-attention, tokens of the preceding section per token of its own."""
    expert_shards: int = 1
    """Devices of the mesh axis `expert` with different matrices; the devices of other sharding axes have the same."""

    @property
    def size(self) -> int:
        """Elements of the weights."""
        return self.experts * self.inputs.total * self.outputs.total

    @property
    def multiply_adds(self) -> float:
        """Per token."""
        return self.size * self.per_token / self.experts

    def local_size(self, tensor: int) -> float:
        """Elements of the weights on one device during a step."""
        return self.experts * self.inputs.local(tensor) * self.outputs.local(tensor)

    def on(self, sharding: ExpertSharding) -> "Matmul":
        """The matmul of one device under a sharding of experts."""
        if self.experts == 1 or sharding.devices == 1:
            return self
        inputs, outputs = self.inputs, self.outputs
        if sharding.whole_experts:
            inputs, outputs = (Elements(replicated=side.total) for side in (inputs, outputs))
        experts, per_token = self.experts // sharding.devices, self.per_token / sharding.tensor_shards
        return replace(
            self, inputs=inputs, outputs=outputs, experts=experts, per_token=per_token, expert_shards=sharding.expert
        )

    def undivided(self, tensor: int) -> int:
        """Elements of weights with too few groups to shard: each device of `tensor` stores them all."""
        return self.inputs.total * self.outputs.grouped * (tensor > self.outputs.groups)

    def copies(self, tensor: int) -> float:
        """The part of `undivided` that a device uses during a step: one group."""
        return self.undivided(tensor) / self.outputs.groups


class Side(NamedTuple):
    """One dimension of the matrices that a device multiplies."""

    setting: str
    """The setting that determines it."""
    text: str
    """Description; the size follows it."""
    size: int


class LayerBuilder(Protocol):
    """A user's own mixer, MLP or norm. Its model has facts if it has the methods of `Mixer`, `Layer` or `Norm`."""

    def build(self, settings: Any) -> Any:
        """The module; settings: `megajax.layers.param.LayerSettings`."""
        ...


@runtime_checkable
class Layer(Protocol):
    """Methods of a config for plans, counts and checks. hidden: width of the residual stream."""

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Every weight of the layer's module."""
        ...

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        """Matrix products with weights, in the order of the forward pass."""
        ...

    def multiply_adds(self, hidden: int) -> MultiplyAdds:
        """Operations of the forward pass."""
        ...

    def tensors(self, hidden: int) -> Mapping[Part, Elements]:
        """Tensors that may be saved for the backward pass, by the names in megajax.layers.recompute.

        A kernel between matmuls reads `query_key_value` and writes `core_attention`.
        """
        ...

    def megatron_matrices(self, hidden: int, gains: int) -> int:
        """Parameters that tensor parallelism shards, in Megatron-LM's memory report. gains: weights of each norm."""
        ...

    def tensor_sizes(self) -> list[int]:
        """Legal sizes of the mesh axis `tensor`."""
        ...

    def mesh_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """Problems of the layer on a mesh. sizes: mesh axis -> number of devices."""
        ...

    def matmul_sides(self, hidden: int, tensor: int) -> Iterator[Side]:
        """Sides of the matrices on one device, without those that `tensor` does not divide (see `mesh_problems`)."""
        ...

    def summary(self, hidden: int) -> str:
        """Sizes, in words, for the start banner."""
        ...


class LayerFacts(Builds):
    """Base class of layer configs: facts that follow from the matmuls by default."""

    def problems(self) -> list[Problem]:
        """Problems of settings with each other."""
        return []

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        """Matrix products with weights, in the order of the forward pass."""
        raise NotImplementedError

    def multiply_adds(self, hidden: int) -> MultiplyAdds:
        """Multiply-adds of the matmuls."""
        return MultiplyAdds(sum(matmul.multiply_adds for matmul in self.matmuls(hidden)))

    def megatron_matrices(self, hidden: int, gains: int) -> int:
        """All matrices."""
        del gains
        return sum(matmul.size for matmul in self.matmuls(hidden))


@runtime_checkable
class HasKernel(Protocol):
    """A layer with a kernel that depends on the device."""

    def kernel_choice(
        self, hidden: int, request: KernelRequest, device: KernelDevice | None, setting: str = "kernel"
    ) -> KernelChoice[str]:
        """The kernel of the layer, and the reasons against faster ones. device: None for any NVIDIA GPU.

        Raises UserError if a kernel chosen by name is not available; `setting` names it.
        """
        ...

    def with_kernel(self, name: Any) -> Any:
        """A copy with this kernel, a name that `kernel_choice` returned."""
        ...


@runtime_checkable
class Mixer(Layer, HasKernel, Protocol):
    """A layer that mixes tokens of a row."""

    @property
    def heads(self) -> int:
        """Heads of scores, or of states, that the kernel has for each token."""
        ...

    def shape_problems(self, *, hidden: int, length: int) -> list[Problem]:
        """Problems on rows of `length` tokens."""
        ...

    def kernel_work(self, hidden: int, keys: float) -> "KernelWork":
        """Work of the kernel per token, without fusion. keys: positions that each token reads."""
        ...


@runtime_checkable
class SupportsContext(Protocol):
    """A mixer that may support context parallelism; other mixers need whole rows on each device."""

    def allows_context(self) -> bool:
        """Whether a device may hold part of a row; if so, the module takes positions from `Context.index`."""
        ...


@runtime_checkable
class DrawsNumbers(Protocol):
    """A layer that may draw random numbers other than for dropout."""

    def draws_numbers(self) -> bool:
        """Whether the layer draws random numbers in training."""
        ...


@runtime_checkable
class ComparesRows(Protocol):
    """A layer whose outputs or loss may depend on the other rows of a microbatch."""

    def compares_rows(self) -> dict[str, Literal["rows", "order"]]:
        """Setting in use -> "rows": depends on which rows share a microbatch; "order": on their order too."""
        ...


@runtime_checkable
class HasExperts(Protocol):
    """A layer with experts; Megatron-LM's memory report counts them separately from `megatron_matrices`."""

    def expert_facts(self, hidden: int) -> ExpertFacts:
        """Rows, buffers and collectives of the experts."""
        ...

    def megatron_experts(self, hidden: int) -> int:
        """Parameters of the matrices of all experts."""
        ...

    def megatron_router(self, hidden: int) -> int:
        """Parameters that are not sharded."""
        ...

    def megatron_ffn(self) -> int:
        """Width of the layer whose activations the report counts, independent of top_k."""
        ...


@runtime_checkable
class Norm(Protocol):
    """A normalisation."""

    def weights(self, size: int, axis: str | None = "embed") -> tuple[Weight, ...]:
        """Weights of a norm over a dimension of this size and logical axis."""


def dense(name: str, inputs: int, outputs: int) -> tuple[Weight, Weight]:
    """A matrix and a bias that are replicated over `tensor`."""
    return Weight(f"{name}.matrix", (inputs, outputs), ("embed", None)), Weight(f"{name}.bias", (outputs,), (None,))


def norm_weights(name: str, norm: object, size: int) -> tuple[Weight, ...]:
    """Weights of a norm with this name; () for no norm and for a norm without facts."""
    return prefixed(name, norm.weights(size)) if isinstance(norm, Norm) else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A device's part of a microbatch."""

    tokens: int
    """Tokens of the microbatch, after sharding over `context`."""
    width: int
    """Bytes per element in the compute dtype."""
    residual_width: int
    """Bytes per element of the residual stream."""
    tensor: int = 1
    sequence: int = 1
    """Sequence shards of the residual stream: the size of `tensor` with sequence parallelism, else 1."""
    operand_width: float | None = None
    """Bytes per element of inputs that matmuls save in another dtype, as in fp8; None: the compute dtype."""


class KernelWork(NamedTuple):
    """Work of a mixer between its matmuls, per query token."""

    multiply_adds: float
    """Including masked scores; `unmasked`: without."""
    unmasked: float
    scores: float
    """Scores of all heads, one per key. For a state space: weights of the other positions of a chunk."""
    moved: float = 0.0
    """Elements that a recurrence moves beside inputs and outputs, both ways; 0: not known."""


class MixerFacts(NamedTuple):
    """Facts of a mixer between its matmuls, per query token."""

    work: KernelWork
    heads: int
    """See `Mixer.heads`."""
    fused: bool
    """Whether the kernel is fused, so that scores are not stored in memory."""
    tensors: tuple[Elements, ...]
    """Inputs and outputs of the kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFacts:
    """Facts of a residual block, independent of the layout."""

    hidden: int
    weights: int
    """Elements of all weights."""
    matmuls: tuple[Matmul, ...]
    tensors: Mapping[Part, Elements]
    mixers: tuple[MixerFacts, ...]
    parts: int = 2
    """Sub-layers, each with a residual addition."""
    saved_sums: int = 1
    """Sums within the block: parts of `residual`."""
    read_norms: int = 2
    """Norms whose outputs are read by sub-layers."""
    normalised_outputs: int = 0
    """Outputs of sub-layers that are normalised: parts of `residual`."""
    normalised_sums: int = 0
    """Sums of the residual stream that are normalised; they have no name."""
    memory_ratio: float = 0.0
    """Tokens of the preceding section that the block reads, per token of its own."""
    experts: tuple[ExpertFacts, ...] = ()
    """Facts of the sub-layers with experts."""
    expert_inputs: float = 0
    """Elements per token of the rows that experts get, which their matmuls save as inputs."""
    unsharded: Elements = NO_ELEMENTS
    """Weights without the logical axis `embed`, such as biases, which ZeRO-1 and FSDP do not shard."""

    def on(self, sharding: ExpertSharding) -> "BlockFacts":
        """The block with the experts of one device and with tensors of the size of their row buffers."""
        if not self.experts:
            return self
        matmuls, tensors = tuple(matmul.on(sharding) for matmul in self.matmuls), dict(self.tensors)
        expert_inputs = 0.0
        for facts in self.experts:
            more = (facts.over_mean(sharding) if facts.chunks == 1 else 0) - 1
            expert_inputs += (more + 1) * facts.top_k * facts.width / sharding.tensor_shards
            for part, elements in facts.tensors.items():
                tensors[part] = tensors[part].plus(Elements(sharded=round(more * facts.top_k * elements)))
        elsewhere = sum(matmul.size for matmul in self.matmuls) - sum(matmul.size for matmul in matmuls)
        weights = self.weights - elsewhere
        return replace(self, matmuls=matmuls, tensors=tensors, weights=weights, expert_inputs=expert_inputs)

    @property
    def sharded_parts(self) -> int:
        """Sub-layers whose matrices `tensor` shards, without those of experts."""
        return self.parts - sum(not facts.shared for facts in self.experts)

    def elements(self, part: Part) -> Elements:
        """Elements of a tensor; `NO_ELEMENTS` if the block has no such tensor."""
        return self.tensors.get(part, NO_ELEMENTS)

    @property
    def vectors(self) -> int:
        """Elements of weights that are not matrices, such as gains and biases."""
        return self.weights - sum(matmul.size for matmul in self.matmuls)

    def local_size(self, tensor: int) -> float:
        """Elements of matrices on one device during a step."""
        return sum(matmul.local_size(tensor) for matmul in self.matmuls)

    def local_expert_size(self, tensor: int) -> float:
        """The part of `local_size` that differs between devices of `expert`."""
        return sum(matmul.local_size(tensor) for matmul in self.matmuls if matmul.expert_shards > 1)

    def tensor_bytes(self, part: Part, share: Share) -> float:
        """Bytes of a tensor of the block, for a microbatch on a device."""
        if part in ("input", "residual"):
            width = share.residual_width
            if part == "residual":
                width = self.saved_sums * width + self.normalised_outputs * share.width
            return width * share.tokens * self.hidden / share.sequence
        if part == "norm":
            # Outputs of norms, saved as matmuls read them: gathered along the sequence.
            return share.tokens * self.read_norms * self.hidden * share.width
        heads = sum(mixer.heads for mixer in self.mixers if mixer.fused) * (part == "core_attention")
        return share.tokens * (self.elements(part).local(share.tensor) * share.width + 4 * heads / share.tensor)

    def saved_bytes(self, policy: SavePolicy, share: Share) -> float:
        """Bytes that the block saves on a device for a microbatch, without tensors offloaded to host memory.

        Without recomputation, norms and activations save only their inputs, as if all tensors were named.
        """
        parts = [part for part in (PARTS if policy.parts is None else policy.parts) if part not in policy.offloaded]
        named = self._bytes(parts, policy, share)
        if policy.parts is not None:
            return named
        operand_width = share.operand_width or share.width
        rows = self.expert_inputs * share.tokens * operand_width
        # With operands in another dtype, each matmul saves its input in that dtype. The output of attention is saved
        # for attention as well; norms have several matmuls, which save about as much as one output.
        ratio = operand_width / share.width
        output = self.elements("core_attention").local(share.tensor) * share.tokens * share.width * (ratio < 1)
        rows += self.normalised_sums * share.tokens * self.hidden * share.residual_width / share.sequence
        return named + rows - (1 - ratio) * self.tensor_bytes("activation", share) + ratio * output

    def host_bytes(self, policy: SavePolicy, share: Share) -> float:
        """Bytes that the block offloads to host memory."""
        return self._bytes(policy.offloaded, policy, share)

    def _bytes(self, parts: Sequence[Part], policy: SavePolicy, share: Share) -> float:
        """Bytes of these parts. Of the layers in one checkpoint, only the first saves its input."""
        shares = {"input": policy.layers_per_checkpoint}
        return sum(self.tensor_bytes(part, share) / shares.get(part, 1) for part in parts)

    def recomputed_bytes(self, policy: SavePolicy, share: Share) -> float:
        """Bytes of the tensors that the backward pass recomputes."""
        everything = sum(self.tensor_bytes(part, share) for part in PARTS)
        return everything - self.saved_bytes(policy, share) - self.host_bytes(policy, share)
