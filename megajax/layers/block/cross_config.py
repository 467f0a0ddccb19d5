"""Configs of attention to another section, and of the block that has it; imports neither jax nor flax."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from megajax.config.errors import Problem
from megajax.kernels.attention.capability import Request
from megajax.layers.attention.config import AttentionConfig, gathering_problems
from megajax.layers.block.config import BlockConfig
from megajax.layers.block.residual import KERNEL_TENSORS, MixerConfig, mixer_facts
from megajax.layers.cache_facts import CacheLeaf
from megajax.layers.facts import (
    NO_ELEMENTS,
    BlockFacts,
    Elements,
    LayerBuilder,
    Matmul,
    MultiplyAdds,
)
from megajax.layers.recompute import Part


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossAttentionConfig(AttentionConfig):
    """Attention with keys and values from the output of the preceding section.

    Example: `mj.CrossAttentionConfig(heads=12)`
    """

    target: ClassVar[str] = "megajax.layers.attention.module:CrossAttention"
    causal: bool = False
    """Positions of two sequences have no order."""

    def problems(self) -> list[Problem]:
        problems = AttentionConfig.problems(self)
        for name in ("rope", "relative", "window", "causal"):
            if getattr(self, name):
                problems.append(Problem(name, "is about distances within one sequence", "leave it out"))
        return problems

    def context_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """Problems with context parallelism: keys and queries differ in length."""
        yield from AttentionConfig.context_problems(self, sizes)
        yield from gathering_problems("kernel", "cross-attention needs the keys of whole rows", sizes)

    def cache_leaves(self, hidden: int, tensor: int) -> tuple[CacheLeaf, ...]:
        """Keys and values of the preceding section, and its length."""
        keyed = AttentionConfig.cache_leaves(self, hidden, tensor)
        length = CacheLeaf("length", (), (), per="row", dtype="int32")
        return (*(replace(leaf, per="memory") for leaf in keyed), length)

    def request(self, request: Request) -> Request:
        """The request to an attention backend."""
        return replace(AttentionConfig.request(self, request), key_length=request.key_length, cross=True)

    def matmuls_reading(self, hidden: int, memory_ratio: float) -> tuple[Matmul, ...]:
        """Queries, keys and values, the output. memory_ratio: keys for each query."""
        joined, output = AttentionConfig.matmuls(self, hidden)
        queries, keys = replace(joined.outputs, grouped=0), replace(joined.outputs, sharded=0)
        weights = joined.weights - 2
        return (
            replace(joined, outputs=queries, weights=weights, joined=weights > 1),
            replace(joined, outputs=keys, weights=2, per_token=memory_ratio),
            output,
        )

    def tensors_reading(self, hidden: int, memory_ratio: float) -> Mapping[Part, Elements]:
        """Inputs and outputs of the kernel per query."""
        tensors = AttentionConfig.tensors(self, hidden)
        kernel = tensors["query_key_value"]
        return {**tensors, "query_key_value": replace(kernel, grouped=round(memory_ratio * kernel.grouped))}


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossBlockConfig(BlockConfig):
    """A block with cross-attention between mixer and MLP: x + cross(norm(x)).

    Example: `mj.t5("base").stack.pattern[0]`
    """

    target: ClassVar[str] = "megajax.layers.block.module:CrossBlock"
    cross: CrossAttentionConfig
    """Cross-attention to the output of the preceding section."""

    def problems(self) -> list[Problem]:
        problems = BlockConfig.problems(self)
        if self.layer_scale is not None:
            problems.append(Problem("layer_scale", "is of blocks with two sub-layers", "set it to none"))
        return problems

    def mixers(self) -> dict[str, MixerConfig | LayerBuilder]:
        """Cross-attention too."""
        return {**self.own_mixers(), "cross": self.cross}

    def multiply_adds(self, hidden: int, memory_ratio: float = 0.0) -> MultiplyAdds:
        """Operations of the forward pass. memory_ratio: tokens of the preceding section for each token of a row."""
        matmuls = self.cross.matmuls_reading(hidden, memory_ratio)
        per_token = sum(matmul.size * matmul.per_token for matmul in matmuls)
        crossing = MultiplyAdds(per_token, 0, memory_ratio * self.cross.per_pair(hidden))
        return BlockConfig.multiply_adds(self, hidden).plus(crossing)

    def facts(self, *, hidden: int, length: int, dtype: str, memory_length: int = 0) -> BlockFacts:
        """What the block costs on rows of `length` tokens that read `memory_length` tokens of the preceding section.

        The tensors of both attention layers are added up.
        """
        block, ratio = BlockConfig.facts(self, hidden=hidden, length=length, dtype=dtype), memory_length / length
        tensors = self.cross.tensors_reading(hidden, ratio)
        names = {**block.tensors, **tensors}
        combined = {name: block.elements(name).plus(tensors.get(name, NO_ELEMENTS)) for name in names}
        cross = mixer_facts(self.cross, hidden, length, dtype, ratio)
        kernel = tuple(tensors[part] for part in KERNEL_TENSORS)
        return replace(
            block,
            matmuls=(*block.matmuls, *self.cross.matmuls_reading(hidden, ratio)),
            tensors=combined,
            mixers=(*block.mixers, cross._replace(tensors=kernel)),
            parts=3,
            memory_ratio=ratio,
        )
