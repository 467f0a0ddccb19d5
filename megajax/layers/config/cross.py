"""Configs of attention to another section, and of the block that has it; imports neither jax nor flax."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from megajax.config.errors import Problem
from megajax.kernels.capability import Request
from megajax.layers.config.attention import AttentionConfig, MixerConfig
from megajax.layers.config.block import BlockConfig
from megajax.layers.facts import Elements, LayerBuilder, Matmul, MultiplyAdds, Weight, prefixed, total_size
from megajax.layers.remat import Part


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossAttentionConfig(AttentionConfig):
    """Attention whose keys and values are made of the output of the section before."""

    target: ClassVar[str] = "megajax.layers.cross_attention:CrossAttention"
    causal: bool = False
    """Positions of two sequences have no order."""

    def problems(self) -> list[Problem]:
        problems = AttentionConfig.problems(self)
        for name in ("rope", "relative", "window", "causal"):
            if getattr(self, name):
                problems.append(Problem(name, "is about distances, and two sequences have none", "leave it out"))
        return problems

    def request(self, known: Request) -> Request:
        """What an attention backend is asked for."""
        return replace(AttentionConfig.request(self, known), key_length=known.key_length, cross=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossBlockConfig(BlockConfig):
    """A block with a third part between mixer and MLP: x + cross(norm(x))."""

    target: ClassVar[str] = "megajax.layers.block:CrossBlock"
    cross: CrossAttentionConfig
    """What reads the output of the section before."""

    def problems(self) -> list[Problem]:
        problems = BlockConfig.problems(self)
        if self.layer_scale is not None:
            problems.append(Problem("layer_scale", "is of blocks with two sub-layers", "set it to none"))
        return problems

    def mixers(self) -> dict[str, MixerConfig | LayerBuilder]:
        """Cross-attention too."""
        return {**BlockConfig.mixers(self), "cross": self.cross}

    def mesh_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """What is wrong with mixer, cross-attention and MLP on a mesh. sizes: mesh axis -> devices."""
        yield from BlockConfig.mesh_problems(self, sizes)
        for problem in self.cross.mesh_problems(sizes):
            yield replace(problem, where=f"cross.{problem.where}")

    def has_dropout(self) -> bool:
        """Whether training draws random numbers."""
        return BlockConfig.has_dropout(self) or self.cross.dropout > 0

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Every weight of the module."""
        own = {"cross_norm": self.layers().norm.weights(hidden), "cross": self.cross.weights(hidden)}
        added = tuple(weight for name, weights in own.items() for weight in prefixed(name, weights))
        return (*BlockConfig.weights(self, hidden), *added)

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        """Those of mixer, cross-attention and MLP."""
        return (*BlockConfig.matmuls(self, hidden), *self.cross.matmuls(hidden))

    def multiply_adds(self, hidden: int) -> MultiplyAdds:
        """Operations of the forward pass, as if both sequences were as long as this one."""
        return BlockConfig.multiply_adds(self, hidden).plus(self.cross.multiply_adds(hidden))

    def tensors(self, hidden: int) -> Mapping[Part, Elements]:
        """Tensors that may be saved: those of the two attentions count as one."""
        both = (BlockConfig.tensors(self, hidden), self.cross.tensors(hidden))
        names = dict.fromkeys(name for tensors in both for name in tensors)
        return {name: _added([tensors[name] for tensors in both if name in tensors]) for name in names}

    def norm_size(self, hidden: int) -> int:
        """Weights of the three norms."""
        return 3 * total_size(self.layers().norm.weights(hidden))


def _added(parts: list[Elements]) -> Elements:
    return Elements(
        whole=sum(part.whole for part in parts),
        cut=sum(part.cut for part in parts),
        grouped=sum(part.grouped for part in parts),
        groups=max(part.groups for part in parts),
    )
