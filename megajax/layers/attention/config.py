"""Configs of attention layers; imports neither jax nor flax."""

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from megajax.config.bounds import BelowOne, Bounds, Positive, Size
from megajax.config.errors import Problem
from megajax.config.hints import divisors_of, either
from megajax.kernels.attention.capability import BACKENDS, KernelChoice, choose, exchange_sizes
from megajax.kernels.attention.request import Kernel, KernelDevice, KernelRequest
from megajax.kernels.paged.capability import PagedRequest
from megajax.layers.cache_spec import CacheLeaf, cached_heads
from megajax.layers.checks import HeadGroups, HeadSharded
from megajax.layers.facts import Elements, KernelWork, Matmul, Weight, prefixed
from megajax.layers.multiply_adds import MultiplyAdds, VisibleKeys
from megajax.layers.norm.config import NormConfig
from megajax.layers.position.config import (
    AlibiConfig,
    AxialRopeConfig,
    InterleavedRopeConfig,
    RelativeBiasConfig,
    RopeConfig,
    TemperatureConfig,
)
from megajax.layers.recompute import Part

PER_HEAD = ("heads", "head_dim")
PER_GROUP = ("kv_heads", "head_dim")

type Window = Annotated[int, Bounds(at_least=0, hint="none attends to all previous tokens")]


class MultiHeadConfig(HeadSharded):
    """Base of attention configs: heads that `tensor` shards, and a kernel."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    """Fields of the subclass, which is always a dataclass."""
    heads: int
    window: int | None
    sink: Literal["none", "zero", "learned"]
    dropout: float
    kernel: Kernel

    def groups(self) -> int:
        """Number of key-value heads."""
        raise NotImplementedError

    def size(self, hidden: int) -> int:
        """Size of a query or key head."""
        raise NotImplementedError

    def value_size(self, hidden: int) -> int:
        """Size of a value head."""
        return self.size(hidden)

    def request(self, request: KernelRequest) -> KernelRequest:
        """The request to an attention backend, with the settings of this layer."""
        raise NotImplementedError

    def allows_context(self) -> bool:
        """Supports context parallelism."""
        return True

    def problems(self) -> list[Problem]:
        """The groups must divide the heads, and a kernel chosen by name must be able."""
        problems, request = super().problems(), self.request(KernelRequest())
        refusal = None if self.kernel == "auto" else BACKENDS[self.kernel].refusal(request)
        if self.kernel != "auto" and refusal is not None:
            able = choose("auto", request, None).kernel
            problems.append(Problem("kernel", f"{BACKENDS[self.kernel].label} {refusal}", f"set kernel={able} or auto"))
        return problems

    def window_problems(self, length: int) -> list[Problem]:
        """Problems of the window on rows of `length` tokens."""
        if self.window is None or self.window < length:
            return []
        message = f"{self.window} reaches beyond sequence_length={length}"
        return [Problem("window", message, f"use at most {length - 1}, or none")]

    def kernel_choice(
        self, hidden: int, request: KernelRequest, device: KernelDevice | None, setting: str = "kernel"
    ) -> KernelChoice[Kernel]:
        """The attention backend, and why not a faster one. device: None for any NVIDIA GPU.

        Raises UserError if a backend chosen by name is not available; `setting` names it.
        """
        return choose(self.kernel, self.request(replace(request, key_dim=self.size(hidden))), device, setting)

    def with_kernel(self, name: str) -> Self:
        """A copy with this kernel, a `Kernel`."""
        return replace(self, kernel=name)

    def kernel_work(self, hidden: int, keys: float) -> KernelWork:
        """Work of scores and values. keys: positions that each query reads."""
        count = self.multiply_adds(hidden)
        return KernelWork(keys * count.per_pair, count.visible.pairs(keys) / keys * count.per_pair, keys * self.heads)

    def kernel_weights(self) -> tuple[Weight, ...]:
        """Weights of the kernel itself."""
        return (Weight("core.sink", (self.heads,), ("heads",)),) if self.sink == "learned" else ()

    def per_pair(self, hidden: int) -> int:
        """Multiply-adds per pair of tokens: a score and a value of each head."""
        return self.heads * (self.size(hidden) + self.value_size(hidden))

    def tensors(self, hidden: int) -> Mapping[Part, Elements]:
        """Inputs and outputs of the kernel."""
        size, values = self.size(hidden), self.value_size(hidden)
        keys = Elements(sharded=self.heads * size, grouped=self.groups() * (size + values), groups=self.groups())
        return {"query_key_value": keys, "core_attention": Elements(sharded=self.heads * values)}

    def head_groups(self, hidden: int = 0) -> HeadGroups:
        """The query heads and the key-value heads."""
        size = self.size(hidden) if hidden else 0
        return HeadGroups(self.heads, size, self.groups(), size, "kv_heads")

    def mesh_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """`tensor` must divide heads, and must divide key-value heads or be a multiple of them."""
        problems = list(super().mesh_problems(sizes))
        if not problems and sizes.get("context", 1) > 1:
            problems += self.context_problems(sizes)
        yield from problems

    def context_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """Problems with context parallelism: the devices that exchange heads must divide the heads of a device.

        They must also divide its key-value heads or be a multiple of them. sizes: as in `mesh_problems`.
        """
        tensor, exchanging = sizes["tensor"], sizes.get("exchanging", 1)
        heads, groups = max(1, self.heads // tensor), max(1, self.groups() // tensor)
        legal = exchange_sizes(heads, groups)
        if exchanging in legal:
            return
        share = f" over parallel.tensor={tensor}, {heads} and {groups} on a device," if tensor > 1 else ""
        message = (
            f"heads={self.heads} and {self.groups()} key-value heads{share} cannot be exchanged over "
            f"{exchanging} devices"
        )
        hint = "use parallel.context_strategy=all_gather or ring"
        if larger := legal[1:]:
            hint += (
                f", or exchange heads over {either(map(str, larger))} devices: parallel.context_heads with "
                "ring+all_to_all, parallel.context with all_to_all"
            )
        yield Problem("heads", f"{message} (parallel.context_strategy)", hint)

    def summary(self, hidden: int) -> str:
        """Numbers and size of heads."""
        groups = f", {self.groups()} key-value heads" if self.groups() != self.heads else ""
        return f"{self.heads} heads{groups} of {self.size(hidden)}"


def gathering_problems(setting: str, reason: str, sizes: Mapping[str, int]) -> Iterator[Problem]:
    """Problems of a setting that needs the keys of whole rows on each device. reason: what needs them."""
    if sizes.get("ring", 1) > 1 or sizes.get("exchanging", 1) > 1:
        message = f"{reason} on each device, and parallel.context={sizes['context']} does not gather them"
        yield Problem(setting, message, "set parallel.context_strategy=all_gather")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(MultiHeadConfig):
    """Grouped-query self-attention.

    Example: `mj.AttentionConfig(heads=32, kv_heads=8, rope=mj.RopeConfig())`
    """

    target: ClassVar[str] = "megajax.layers.attention.module:Attention"
    heads: Size
    """Query heads."""
    kv_heads: Size | None = None
    """Key and value heads, each shared by heads / kv_heads query heads; none: as many as heads."""
    head_dim: Size | None = None
    """Size of one head; none: hidden size / heads."""
    bias: bool = False
    """Biases on query, key, value and output."""
    qkv_bias: bool | None = None
    """Biases on query, key and value; none: as bias says."""
    qk_norm: NormConfig | None = None
    """Normalisation of query and key heads, before rotary positions (Henry et al. 2020); none: no normalisation."""
    qk_norm_over: Literal["head", "heads"] = "head"
    """Dimensions of the mean in qk_norm: one head, or all heads of a position, as in InternViT and OLMo 2."""
    qk_norm_after_rope: bool = False
    """Normalise queries and keys after their rotation, as in HunYuan."""
    qkv_clip: Positive | None = None
    """Queries, keys and values are clipped to [-qkv_clip, qkv_clip] before their rotation, as in OLMo; none: no
    clipping."""
    rope: RopeConfig | InterleavedRopeConfig | AxialRopeConfig | None = None
    """Rotary positions; none: no rotation."""
    relative: RelativeBiasConfig | AlibiConfig | None = None
    """Bias on scores by distance, learned or fixed; none: no bias."""
    causal: bool = True
    """Causal mask: queries do not attend to later tokens; false in encoders."""
    window: Window | None = None
    """Number of previous tokens that a query attends to, besides its own; none: all."""
    chunk: Size | None = None
    """Positions per chunk: a query attends to keys of its own chunk only (Llama 4); none: no chunks."""
    temperature: TemperatureConfig | None = None
    """Factor on queries by their position, after rotary positions; none: no factor."""
    sink: Literal["none", "zero", "learned"] = "none"
    """Extra score in the softmax without a value: 0 (softmax off by one), or learned per head."""
    gate: bool = False
    """Multiply the output of the kernel by the sigmoid of a projection of the input, before the output matrix."""
    scale: Positive | None = None
    """Factor on scores; none: 1 / sqrt(head size). The softmax is always in float32."""
    score_cap: Positive | None = None
    """Soft cap: scores become cap * tanh(score / cap), before the mask (Gemma 2); none: no cap."""
    dropout: BelowOne = 0.0
    """Dropout rate of attention weights."""
    kernel: Kernel = "auto"
    """auto: the fastest available (docs/attention.md); cudnn, pallas, cudnn_mask or reference: that one or an error.
    fixed: tiles of keys in one order, which engines with inference.equal_to_training have as well."""

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if self.qk_norm_after_rope and self.qk_norm is None:
            hint = "set qk_norm, or this to false"
            problems.append(Problem("qk_norm_after_rope", "needs qk_norm, which is none", hint))
        for name in ("window", "chunk"):
            if not self.causal and getattr(self, name) is not None:
                problems.append(Problem(name, "needs causal attention, but causal=false", "set it to none"))
        if self.chunk is not None and self.window is not None:
            problems.append(
                Problem("chunk", f"needs layers without a window, and window={self.window}", "set one of them to none")
            )
        if not self.causal and self.relative is not None and not self.relative.both_ways:
            problems.append(Problem("relative.both_ways", "is needed where tokens see later ones", "set it to true"))
        return problems

    def shape_problems(self, *, hidden: int, length: int) -> list[Problem]:
        """Problems on rows of `length` tokens and width `hidden`."""
        problems = self.window_problems(length)
        if self.head_dim is None and hidden % self.heads:
            divisors = sorted(divisors_of(hidden), key=lambda n: abs(n - self.heads))
            problems.append(
                Problem(
                    "heads",
                    f"hidden={hidden} is not divisible by heads={self.heads}",
                    f"divisors near {self.heads}: {', '.join(map(str, sorted(divisors[:3])))}",
                )
            )
        elif self.rope is not None:
            problems += self.rope.head_problems(self.size(hidden))
        return problems

    def context_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """Problems with context parallelism."""
        yield from super().context_problems(sizes)
        if self.relative is not None:
            yield from gathering_problems("relative", "biases need the keys of whole rows", sizes)

    def groups(self) -> int:
        """Number of key-value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def size(self, hidden: int) -> int:
        """Size of one head."""
        return self.head_dim or hidden // self.heads

    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    def qk_norm_sides(self, hidden: int) -> tuple[tuple[int, str], tuple[int, str]]:
        """Size and logical axis of the norm of queries, and of that of keys."""
        size = self.size(hidden)
        if self.qk_norm_over == "head":
            return (size, "head_dim"), (size, "head_dim")
        grouped = self.groups() != self.heads
        return (self.heads * size, "heads"), (self.groups() * size, "kv_heads" if grouped else "heads")

    def tensor_sizes(self) -> list[int]:
        """Legal sizes of `tensor`: with a norm over all key heads, no device holds a copy of one."""
        sizes = super().tensor_sizes()
        whole = self.qk_norm is not None and self.qk_norm_over == "heads"
        return [size for size in sizes if size <= self.groups()] if whole else sizes

    def mesh_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """Those of the heads; a norm over all key heads needs as many of them as devices."""
        yield from super().mesh_problems(sizes)
        tensor = sizes["tensor"]
        if tensor in super().tensor_sizes() and tensor not in self.tensor_sizes():
            message = f"heads: parallel.tensor={tensor} is more than kv_heads={self.groups()}, which would be copied"
            yield Problem("qk_norm_over", message)

    def request(self, request: KernelRequest) -> KernelRequest:
        """The request to an attention backend, with the settings of this layer."""
        size = self.head_dim if request.key_dim is None else request.key_dim
        return replace(
            request,
            key_dim=size,
            value_dim=size,
            key_length=None,
            causal=self.causal,
            window=self.window,
            documents=request.documents or self.chunk is not None,
            padded=request.padded and self.chunk is None,
            sink=self.sink != "none",
            bias=self.relative is not None,
            cap=self.score_cap is not None,
            dropout=self.dropout,
        )

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Every weight of the module; a shared table of relative biases belongs to the stack."""
        size, heads, groups = self.size(hidden), self.heads, self.groups()
        gated = [("gate", heads, PER_HEAD)] if self.gate else []
        inner = [("query", heads, PER_HEAD), ("key", groups, PER_GROUP), ("value", groups, PER_GROUP), *gated]
        weights = [Weight(name, (hidden, count, size), ("embed", *axes)) for name, count, axes in inner]
        weights.append(Weight("output", (heads, size, hidden), (*PER_HEAD, "embed")))
        if self.has_qkv_bias():
            weights += [Weight(f"{name}_bias", (count, size), axes) for name, count, axes in inner]
        if self.bias:
            weights.append(Weight("output_bias", (hidden,), ("embed",)))
        if self.qk_norm is not None:
            for name, side in zip(("query_norm", "key_norm"), self.qk_norm_sides(hidden), strict=True):
                weights += prefixed(name, self.qk_norm.weights(*side))
        if self.relative is not None and not self.relative.shared:
            weights += prefixed("core.relative", self.relative.weights(heads))
        return (*weights, *self.kernel_weights())

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        """One matmul for queries, keys, values and gates, and one for the output."""
        hidden_side, queries = Elements(replicated=hidden), self.heads * self.size(hidden)
        keys = 2 * self.groups() * self.size(hidden)
        outputs = Elements(sharded=queries * (1 + self.gate), grouped=keys, groups=self.groups())
        return (
            Matmul(inputs=hidden_side, outputs=outputs, result="query_key_value", weights=3, joined=True),
            Matmul(inputs=Elements(sharded=queries), outputs=hidden_side, result="residual"),
        )

    def cache_leaves(self, hidden: int, tensor: int) -> tuple[CacheLeaf, ...]:
        """Keys and values of earlier tokens."""
        shape = (cached_heads(self.groups(), tensor), self.size(hidden))
        window = self.window if self.chunk is None else self.chunk - 1
        return tuple(CacheLeaf(name, shape, ("kv_heads", None), window=window) for name in ("key", "value"))

    def paged_request(self, hidden: int, request: PagedRequest) -> PagedRequest:
        """The request to a kernel of a paged cache, with the settings of this layer."""
        size = self.size(hidden)
        return replace(request, key_dim=size, value_dim=size, bias=self.relative is not None)

    def multiply_adds(self, hidden: int) -> MultiplyAdds:
        """Multiply-adds of the matmuls, and of scores and values."""
        visible = VisibleKeys(self.causal, self.window, self.chunk)
        return super().multiply_adds(hidden)._replace(per_pair=self.per_pair(hidden), visible=visible)

    def megatron_matrices(self, hidden: int, gains: int) -> int:
        """Queries, keys, values and the output; the report ignores gates."""
        del gains
        return 2 * hidden * self.size(hidden) * (self.heads + self.groups())

    def tensors(self, hidden: int) -> Mapping[Part, Elements]:
        """Inputs and outputs of the kernel, and the gate."""
        kernel = super().tensors(hidden)
        return {**kernel, "gate": Elements(sharded=self.heads * self.size(hidden))} if self.gate else kernel


@dataclass(frozen=True, kw_only=True)
class CrossAttentionConfig(AttentionConfig):
    """Attention with keys and values from the output of the preceding section.

    Example: `mj.CrossAttentionConfig(heads=12)`
    """

    target: ClassVar[str] = "megajax.layers.attention.module:CrossAttention"
    causal: bool = False
    """Positions of two sequences have no order."""

    def problems(self) -> list[Problem]:
        problems = super().problems()
        for name in ("rope", "relative", "window", "chunk", "temperature", "causal"):
            if getattr(self, name):
                problems.append(Problem(name, "applies to distances within one sequence", "leave it out"))
        return problems

    def context_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """Problems with context parallelism: keys and queries differ in length."""
        yield from super().context_problems(sizes)
        yield from gathering_problems("kernel", "cross-attention needs the keys of whole rows", sizes)

    def cache_leaves(self, hidden: int, tensor: int) -> tuple[CacheLeaf, ...]:
        """Keys and values of the preceding section, and its length."""
        keyed = super().cache_leaves(hidden, tensor)
        length = CacheLeaf("length", (), (), per="row", dtype="int32")
        return (*(replace(leaf, per="memory") for leaf in keyed), length)

    def step_inputs(self, hidden: int, tensor: int) -> tuple[CacheLeaf, ...]:
        """None: steps change nothing in these leaves, see `megajax.layers.cache_spec.latest_leaves`."""
        del hidden, tensor
        return ()

    def request(self, request: KernelRequest) -> KernelRequest:
        """The request to an attention backend."""
        return replace(super().request(request), key_length=request.key_length, cross=True)

    def matmuls_reading(self, hidden: int, memory_ratio: float) -> tuple[Matmul, ...]:
        """Queries, keys and values, the output. memory_ratio: keys for each query."""
        joined, output = super().matmuls(hidden)
        queries, keys = replace(joined.outputs, grouped=0), replace(joined.outputs, sharded=0)
        weights = joined.weights - 2
        return (
            replace(joined, outputs=queries, weights=weights, joined=weights > 1),
            replace(joined, outputs=keys, weights=2, per_token=memory_ratio),
            output,
        )

    def tensors_reading(self, hidden: int, memory_ratio: float) -> Mapping[Part, Elements]:
        """Inputs and outputs of the kernel per query."""
        tensors = super().tensors(hidden)
        kernel = tensors["query_key_value"]
        return {**tensors, "query_key_value": replace(kernel, grouped=round(memory_ratio * kernel.grouped))}
