"""What the config of a layer tells about the layer: weights, matmuls, operations, saved tensors, limits of the mesh.

Parameter counts, FLOPs, plans, memory reports, checks of a config and the start banner are made of these facts and of
nothing else: no other module asks what type a layer has. A new mixer or feed-forward is a config class with the methods
of `Layer` (and of `Mixer`); planning and training need no change. Importing this imports neither jax nor flax.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from megajax.config.builds import Builds
from megajax.config.errors import Problem
from megajax.kernels.capability import Choice, Device, Request
from megajax.layers.expert_facts import ExpertFacts, ExpertSharding
from megajax.layers.remat import PARTS, Part, SavePolicy

CUT_AXES = frozenset({"heads", "kv_heads", "mlp"})
"""Logical axes that `tensor` shards."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight as the layer's module declares it; a test compares the two."""

    name: str
    """Path below the layer: "query", "query_norm.gain"."""
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """Logical axes, one for each dimension."""
    active_share: float = field(default=1.0, compare=False)
    """Share of it that each token passes: less than 1 of experts, which tokens choose."""

    @property
    def size(self) -> int:
        return prod(self.shape)


def total_size(weights: Sequence[Weight]) -> int:
    """Elements of all of them."""
    return sum(weight.size for weight in weights)


def idle_size(weights: Sequence[Weight]) -> int:
    """Those of them that a token does not pass."""
    return sum(round(weight.size * (1 - weight.active_share)) for weight in weights)


def unsharded(weights: Sequence[Weight]) -> "Elements":
    """Those of them that are not spread at rest, but over `tensor` and `expert`."""
    selected = [weight for weight in weights if "embed" not in weight.axes and "expert" not in weight.axes]
    sharded = sum(weight.size for weight in selected if CUT_AXES.intersection(weight.axes))
    return Elements(replicated=sum(weight.size for weight in selected) - sharded, sharded=sharded)


def prefixed(prefix: str, weights: Sequence[Weight]) -> tuple[Weight, ...]:
    """The weights of a part of a layer, with the part's name before theirs."""
    return tuple(replace(weight, name=f"{prefix}.{weight.name}") for weight in weights)


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of a tensor for each token, or of one side of a matrix, by how the mesh axis `tensor` divides them."""

    replicated: int = 0
    """Not divided: every device has all of them."""
    sharded: int = 0
    """Divided over all devices of `tensor`."""
    grouped: int = 0
    """Divided over at most `groups` devices of `tensor`: key-value heads, of which further devices hold copies."""
    groups: int = 1

    @property
    def total(self) -> int:
        return self.replicated + self.divided

    @property
    def divided(self) -> int:
        """Elements that are not replicated."""
        return self.sharded + self.grouped

    def surplus(self, tensor: int) -> float:
        """Elements of a device beyond its even share, because groups are fewer than devices."""
        return self.grouped * (1 / min(tensor, self.groups) - 1 / tensor)

    def local(self, tensor: int) -> float:
        """Elements on one of that many devices of `tensor`."""
        return self.replicated + self.divided / tensor + self.surplus(tensor)

    def plus(self, other: "Elements") -> "Elements":
        """Of both together."""
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
    """Name by which the result is saved for the backward pass; None: no gradient needs it."""
    weights: int = 1
    """Weights it is made of."""
    joined: bool = False
    """XLA concatenates the weights, by copies, and multiplies once in the forward pass; never with one weight."""
    experts: int = 1
    """Matrices of this shape, over which tokens are distributed."""
    per_token: float = 1
    """Experts that multiply each token; of what reads the section before, its positions for each own one."""
    expert_shards: int = 1
    """Devices of the mesh axis `expert` that have other matrices; all others of `SHARDS` have the same."""

    @property
    def size(self) -> int:
        """Elements of its weights."""
        return self.experts * self.inputs.total * self.outputs.total

    def local_size(self, tensor: int) -> float:
        """Elements of its weights on one device during the step."""
        return self.experts * self.inputs.local(tensor) * self.outputs.local(tensor)

    def on(self, sharding: ExpertSharding) -> "Matmul":
        """Of one device of `expert`, and of one of `tensor` where that has other experts."""
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
        """Elements of its weights that each device of `tensor` has all of at rest: those of groups too few to cut."""
        return self.inputs.total * self.outputs.grouped * (tensor > self.outputs.groups)

    def copies(self, tensor: int) -> float:
        """Those of them that a device uses during the step: one group."""
        return self.undivided(tensor) / self.outputs.groups


class MultiplyAdds(NamedTuple):
    """Multiply-adds of a forward pass, as Megatron-LM's throughput counts them: matmuls, no norms, no softmax."""

    per_token: float
    per_pair: float = 0
    """For each pair of tokens of a row, half of which a causal mask hides; windows make no difference."""
    per_full_pair: float = 0
    """For each pair of tokens of a row, where no mask hides later tokens."""

    def plus(self, other: "MultiplyAdds") -> "MultiplyAdds":
        return MultiplyAdds(*(a + b for a, b in zip(self, other, strict=True)))


class Side(NamedTuple):
    """A side of the matrices that one device multiplies."""

    setting: str
    """Setting that decides it."""
    text: str
    """What it is, to be followed by the size."""
    size: int


class LayerBuilder(Protocol):
    """A mixer, MLP or norm of your own. Its model has facts if it has the methods of `Mixer`, `Layer` or `Norm`."""

    def build(self, settings: Any) -> Any:
        """The module; settings: `megajax.layers.param.LayerSettings`."""
        ...


@runtime_checkable
class Layer(Protocol):
    """Methods of a config that plans, counts and checks call. hidden: width of the residual stream."""

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Every weight of the layer's module."""
        ...

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        """Products with weights, in the order of the forward pass."""
        ...

    def multiply_adds(self, hidden: int) -> MultiplyAdds:
        """Operations of the forward pass."""
        ...

    def tensors(self, hidden: int) -> Mapping[Part, Elements]:
        """Tensors that may be saved for the backward pass, by the names in megajax.layers.remat.

        A kernel between matmuls reads `query_key_value` and writes `core_attention`.
        """
        ...

    def megatron_matrices(self, hidden: int, gains: int) -> int:
        """Parameters that tensor parallelism cuts, by Megatron-LM's memory report. gains: weights of a norm, each."""
        ...

    def tensor_sizes(self) -> list[int]:
        """Numbers of devices of `tensor` that the layer can be divided over."""
        ...

    def mesh_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """What is wrong with the layer on a mesh. sizes: mesh axis -> devices."""
        ...

    def matmul_sides(self, hidden: int, tensor: int) -> Iterator[Side]:
        """Sides of the matrices on one device; those that `tensor` does not divide are left to `mesh_problems`."""
        ...

    def summary(self, hidden: int) -> str:
        """Sizes, in words, for the start banner."""
        ...


class LayerFacts(Builds):
    """Base of configs of layers: what follows from the matmuls, unless they say otherwise."""

    __slots__ = ()

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        """Products with weights, in the order of the forward pass."""
        raise NotImplementedError

    def multiply_adds(self, hidden: int) -> MultiplyAdds:
        """Those of the matmuls."""
        return MultiplyAdds(sum(matmul.size for matmul in self.matmuls(hidden)))

    def megatron_matrices(self, hidden: int, gains: int) -> int:
        """All matrices."""
        del gains
        return sum(matmul.size for matmul in self.matmuls(hidden))


@runtime_checkable
class HasKernel(Protocol):
    """A layer with a kernel that depends on the device."""

    def kernel_choice(
        self, hidden: int, request: Request, device: Device | None, setting: str = "kernel"
    ) -> Choice[str]:
        """The kernel that computes it and why not a faster one; device: None for any NVIDIA GPU.

        Raises UserError if a kernel chosen by name is not available; `setting` names it.
        """
        ...

    def with_kernel(self, name: Any) -> Any:
        """The same layer with this kernel, a name that `kernel_choice` returned."""
        ...


@runtime_checkable
class Mixer(Layer, HasKernel, Protocol):
    """A layer that mixes tokens of a row."""

    @property
    def heads(self) -> int:
        """Rows of scores, or of states, that its kernel has for each token."""
        ...

    def shape_problems(self, *, hidden: int, length: int) -> list[Problem]:
        """What is wrong with it on rows of `length` tokens."""
        ...

    def kernel_work(self, hidden: int, keys: float) -> "KernelWork":
        """What the kernel computes for each token, without a fused kernel. keys: positions of the rows it reads."""
        ...


@runtime_checkable
class SupportsContext(Protocol):
    """A mixer that says whether devices may hold parts of the rows that it mixes; of others they may not."""

    def allows_context(self) -> bool:
        """Whether everything in its module that looks along a row reads `Context.index` (`parallel.context`)."""
        ...


@runtime_checkable
class DrawsNumbers(Protocol):
    """A layer that may draw random numbers beside those of dropout."""

    def draws_numbers(self) -> bool:
        """Whether it does so in training."""
        ...


@runtime_checkable
class ComparesRows(Protocol):
    """A layer in which what a token gets, or its loss, may depend on other rows of its microbatch."""

    def compares_rows(self) -> dict[str, Literal["rows", "order"]]:
        """Settings in use that do so: by which rows they are alone, or by their order and their devices too."""
        ...


@runtime_checkable
class HasExperts(Protocol):
    """A layer with experts, which Megatron-LM's memory report counts apart from `megatron_matrices`."""

    def expert_facts(self, hidden: int) -> ExpertFacts:
        """Rows, buffers and what is sent."""
        ...

    def megatron_experts(self, hidden: int) -> int:
        """Parameters of the matrices of all experts."""
        ...

    def megatron_router(self, hidden: int) -> int:
        """Parameters that no device cuts."""
        ...

    def megatron_ffn(self) -> int:
        """Width of the layer that the report counts activations of, whatever a token passes."""
        ...


@runtime_checkable
class Norm(Protocol):
    """A normalisation."""

    def weights(self, size: int, axis: str | None = "embed") -> tuple[Weight, ...]:
        """Weights of a norm over a dimension of this size and logical axis."""
        ...


def dense(name: str, inputs: int, outputs: int) -> tuple[Weight, Weight]:
    """A matrix and a bias that every device of `tensor` has all of."""
    return Weight(f"{name}.matrix", (inputs, outputs), ("embed", None)), Weight(f"{name}.bias", (outputs,), (None,))


def norm_weights(name: str, norm: Any, size: int) -> tuple[Weight, ...]:
    """Weights of a norm of this name; () without a norm, and for one without facts."""
    return prefixed(name, norm.weights(size)) if isinstance(norm, Norm) else ()


def missing_members(config: object, protocol: type) -> list[str]:
    """Names of the protocol that the config does not have."""
    protocols = [cls for cls in protocol.__mro__ if cls.__module__ not in ("typing", "builtins")]
    names = {name: None for cls in protocols for name in (*vars(cls), *cls.__annotations__) if not name.startswith("_")}
    return [name for name in names if not hasattr(config, name)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A device's part of a microbatch."""

    tokens: int
    """Of the microbatch, after the sequence is cut over `context`."""
    width: int
    """Bytes of an element in compute dtype."""
    residual_width: int
    """The same of the residual stream."""
    tensor: int = 1
    sequence: int = 1
    """Devices that cut the residual stream along the sequence: those of `tensor` with sequence parallelism, else 1."""


class KernelWork(NamedTuple):
    """What a mixer computes between its matmuls, for each token of its queries."""

    multiply_adds: float
    """Those on scores that a mask hides included."""
    unmasked: float
    """Without them."""
    scores: float
    """Scores of all heads: one for each key. Of a state space, the weights of the other positions of a chunk."""


class MixerFacts(NamedTuple):
    """A mixer between its matmuls, for each token of its queries."""

    work: KernelWork
    heads: int
    """See `Mixer`."""
    fused: bool
    """Whether a fused kernel computes it, so that scores stay out of memory."""
    tensors: tuple[Elements, ...]
    """What it reads and writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFacts:
    """The facts of a residual block's parts together, whatever the layout."""

    hidden: int
    weights: int
    """Elements of all weights."""
    matmuls: tuple[Matmul, ...]
    tensors: Mapping[Part, Elements]
    mixers: tuple[MixerFacts, ...]
    parts: int = 2
    """Sub-layers with a norm each, whose outputs are added to the residual stream."""
    memory_ratio: float = 0.0
    """Tokens of the section before that the block reads for each token of its own."""
    experts: tuple[ExpertFacts, ...] = ()
    """Of the parts that have experts."""
    unsharded: Elements = NO_ELEMENTS
    """Weights that ZeRO-1 and FSDP leave whole: those without the logical axis `embed`, such as biases and what leads
    out of latents."""

    def on(self, sharding: ExpertSharding) -> "BlockFacts":
        """The same with the experts of one device, and tensors as large as the buffers of their rows."""
        if not self.experts:
            return self
        matmuls, tensors = tuple(matmul.on(sharding) for matmul in self.matmuls), dict(self.tensors)
        for facts in self.experts:
            more = (facts.over_mean(sharding) if facts.chunks == 1 else 0) - 1
            for part, elements in facts.tensors.items():
                tensors[part] = tensors[part].plus(Elements(sharded=round(more * facts.top_k * elements)))
        elsewhere = sum(matmul.size for matmul in self.matmuls) - sum(matmul.size for matmul in matmuls)
        return replace(self, matmuls=matmuls, tensors=tensors, weights=self.weights - elsewhere)

    @property
    def sharded_parts(self) -> int:
        """Parts whose matrices `tensor` shards, apart from experts."""
        return self.parts - sum(not facts.has_shared for facts in self.experts)

    def elements(self, part: Part) -> Elements:
        """Of a tensor; none where the block has no such tensor."""
        return self.tensors.get(part, NO_ELEMENTS)

    @property
    def vectors(self) -> int:
        """Elements of weights that are no matrices: gains, biases and the like."""
        return self.weights - sum(matmul.size for matmul in self.matmuls)

    def local_size(self, tensor: int) -> float:
        """Elements of matrices on one device during the step."""
        return sum(matmul.local_size(tensor) for matmul in self.matmuls)

    def local_expert_size(self, tensor: int) -> float:
        """Of them, those of matrices that the devices of `expert` do not share."""
        return sum(matmul.local_size(tensor) for matmul in self.matmuls if matmul.expert_shards > 1)

    def tensor_bytes(self, part: Part, share: Share) -> float:
        """Bytes of the block's tensors of that name, of a microbatch on a device."""
        if part in ("input", "residual"):
            times = 1 if part == "input" else self.parts - 1
            return times * share.tokens * self.hidden * share.residual_width / share.sequence
        if part == "norm":
            # Outputs of norms, saved as matmuls read them: gathered along the sequence.
            return share.tokens * self.parts * self.hidden * share.width
        heads = sum(mixer.heads for mixer in self.mixers if mixer.fused) * (part == "core_attention")
        return share.tokens * (self.elements(part).local(share.tensor) * share.width + 4 * heads / share.tensor)

    def saved_bytes(self, policy: SavePolicy, share: Share) -> float:
        """Bytes on a device that the block saves of a microbatch; what waits in host memory does not count.

        Where nothing is recomputed, norms and activations save their inputs alone: as if all tensors were named.
        """
        parts = [part for part in (PARTS if policy.parts is None else policy.parts) if part not in policy.offloaded]
        return self._bytes(parts, policy, share)

    def host_bytes(self, policy: SavePolicy, share: Share) -> float:
        """Bytes that the block saves in host memory."""
        return self._bytes(policy.offloaded, policy, share)

    def _bytes(self, parts: Sequence[Part], policy: SavePolicy, share: Share) -> float:
        """Of several layers that are recomputed together, only the first saves its input."""
        shares = {"input": policy.layers_per_checkpoint}
        return sum(self.tensor_bytes(part, share) / shares.get(part, 1) for part in parts)

    def recomputed_bytes(self, policy: SavePolicy, share: Share) -> float:
        """Bytes of tensors that the backward pass computes again."""
        everything = sum(self.tensor_bytes(part, share) for part in PARTS)
        return everything - self.saved_bytes(policy, share) - self.host_bytes(policy, share)
