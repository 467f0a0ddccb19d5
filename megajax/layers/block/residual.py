"""Facts of residual blocks, from those of their sub-layers; imports neither jax nor flax."""

from collections.abc import Iterator, Mapping
from dataclasses import Field
from typing import Any, ClassVar

from megajax.config.builds import Builds
from megajax.config.errors import Problem
from megajax.kernels.attention.capability import FUSED, Request
from megajax.layers.attention.config import AttentionConfig, LatentAttentionConfig
from megajax.layers.checks import below_one
from megajax.layers.facts import (
    NO_ELEMENTS,
    BlockFacts,
    DrawsNumbers,
    Elements,
    HasExperts,
    HasKernel,
    Layer,
    LayerBuilder,
    Matmul,
    Mixer,
    MixerFacts,
    MultiplyAdds,
    Norm,
    Side,
    Weight,
    missing_members,
    prefixed,
    total_size,
    unsharded,
)
from megajax.layers.mamba.config import Mamba1Config, Mamba2Config
from megajax.layers.norm.config import NormConfig
from megajax.layers.recompute import Part

type MixerConfig = AttentionConfig | LatentAttentionConfig | Mamba2Config | Mamba1Config
"""Layers that mix tokens of a row."""

KERNEL_TENSORS: tuple[Part, ...] = ("query_key_value", "core_attention")
"""Inputs and outputs of a kernel between matmuls."""


class ResidualBlock(Builds):
    """Base of block configs: consecutive sub-layers that each add to the residual stream.

    Stacks, plans, counts and checks use only these methods. Every subclass is a frozen dataclass with a field for each
    name in `sub_layers`, `norm` and `dropout`.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    sub_layers: ClassVar[Mapping[str, type]]
    """Field -> protocol of its layer: `Mixer` for layers that mix along the sequence, else `Layer`. The norm of a
    sub-layer is named after the field, with the suffix `_norm`."""
    norm: NormConfig | LayerBuilder
    dropout: float

    def problems(self) -> list[Problem]:
        return below_one(dropout=self.dropout)

    def parts(self) -> dict[str, Any]:
        """Setting -> config of each sub-layer."""
        return {name: getattr(self, name) for name in self.sub_layers}

    def layers(self) -> dict[str, Any]:
        """Setting -> config of each sub-layer, including cross-attention, which is not in `sub_layers`."""
        return {**self.mixers(), **self.parts()}

    def mixers(self) -> dict[str, MixerConfig | LayerBuilder]:
        """Setting -> config of each layer that mixes along a sequence."""
        return self.own_mixers()

    def with_kernels(self) -> dict[str, HasKernel]:
        """Setting -> config of each layer with a kernel that depends on the device."""
        return {name: layer for name, layer in self.layers().items() if isinstance(layer, HasKernel)}

    def own_mixers(self) -> dict[str, MixerConfig | LayerBuilder]:
        """The `mixers` that read the sequence of the block itself."""
        return {name: part for name, part in self.parts().items() if self.sub_layers[name] is Mixer}

    def missing_facts(self) -> dict[str, list[str]]:
        """Setting -> missing members of the protocol, for each layer that lacks any."""
        protocols = {**self.sub_layers, "norm": Norm}
        missing = {name: missing_members(getattr(self, name), protocol) for name, protocol in protocols.items()}
        return {name: lacking for name, lacking in missing.items() if lacking}

    def summary(self, hidden: int) -> str:
        """Text of the sizes of the sub-layers."""
        return ", ".join(part.summary(hidden) for part in self.parts().values())

    def has_dropout(self) -> bool:
        """Whether training draws random numbers."""
        # A mixer without `dropout` may use it.
        dropping = any(getattr(mixer, "dropout", 1.0) > 0 for mixer in self.mixers().values())
        drawing = any(isinstance(part, DrawsNumbers) and part.draws_numbers() for part in self.parts().values())
        return self.dropout > 0 or dropping or drawing

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Every weight of the module."""
        weights: list[Weight] = []
        for name, layer in self.layers().items():
            weights += prefixed(f"{name}_norm", self.norm_weights(hidden)) + prefixed(name, layer.weights(hidden))
        return tuple(weights)

    def norm_weights(self, hidden: int) -> tuple[Weight, ...]:
        """Weights of the norm of each sub-layer."""
        norm: Any = self.norm
        return norm.weights(hidden)

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        """The matmuls of the sub-layers."""
        return tuple(matmul for part in self.parts().values() for matmul in part.matmuls(hidden))

    def multiply_adds(self, hidden: int, memory_ratio: float = 0.0) -> MultiplyAdds:
        """Operations of the forward pass. memory_ratio: tokens of the preceding section for each token of a row."""
        del memory_ratio
        total = MultiplyAdds(0)
        for part in self.parts().values():
            total = total.plus(part.multiply_adds(hidden))
        return total

    def tensors(self, hidden: int) -> Mapping[Part, Elements]:
        """Tensors of the sub-layers that may be saved, added up by name."""
        total: dict[Part, Elements] = {}
        for part in self.parts().values():
            for name, elements in part.tensors(hidden).items():
                total[name] = total.get(name, NO_ELEMENTS).plus(elements)
        return total

    def megatron_matrices(self, hidden: int) -> int:
        """Parameters that tensor parallelism shards, in Megatron-LM's memory report."""
        gains = total_size(self.norm_weights(hidden)) // hidden
        return sum(part.megatron_matrices(hidden, gains) for part in self.parts().values())

    def with_experts(self) -> list[HasExperts]:
        """The sub-layers with experts."""
        return [part for part in self.parts().values() if isinstance(part, HasExperts)]

    def megatron_experts(self, hidden: int) -> int:
        """Parameters of experts, in the same report."""
        return sum(part.megatron_experts(hidden) for part in self.with_experts())

    def megatron_ffn(self, hidden: int) -> int:
        """Width between the matrices of the feed-forward layer, in the same report."""
        for part in self.with_experts():
            return part.megatron_ffn()
        return self.tensors(hidden).get("activation", NO_ELEMENTS).total

    def megatron_replicated(self, hidden: int) -> int:
        """Parameters that the report replicates on all devices: norms and routers."""
        norms = len(self.layers()) * total_size(self.norm_weights(hidden))
        return norms + sum(part.megatron_router(hidden) for part in self.with_experts())

    def facts(self, *, hidden: int, length: int, dtype: str, memory_length: int = 0) -> BlockFacts:
        """What the block costs on rows of `length` tokens in this compute dtype.

        memory_length: tokens of the preceding section that each row reads.
        """
        del memory_length  # only blocks with cross-attention read them
        mixers = [part for part in self.parts().values() if isinstance(part, Mixer)]
        return BlockFacts(
            hidden=hidden,
            weights=total_size(self.weights(hidden)),
            matmuls=self.matmuls(hidden),
            tensors=self.tensors(hidden),
            mixers=tuple(mixer_facts(mixer, hidden, length, dtype) for mixer in mixers),
            parts=len(self.sub_layers),
            unsharded=unsharded(self.weights(hidden)),
            experts=tuple(part.expert_facts(hidden) for part in self.with_experts()),
        )

    def mesh_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """Problems of the sub-layers on a mesh, as far as known. sizes: mesh axis -> number of devices."""
        layers = {name: layer for name, layer in self.layers().items() if isinstance(layer, Layer)}
        problems = [(name, problem) for name, layer in layers.items() for problem in layer.mesh_problems(sizes)]
        if problems:
            legal = set.intersection(*(set(layer.tensor_sizes()) for layer in layers.values()))
            advice = f"parallel.tensor can be {', '.join(map(str, sorted(legal)))}"
            for name, problem in problems:
                hints = [problem.hint] * bool(problem.hint) + [advice] * (sizes["tensor"] not in legal)
                yield Problem(f"{name}.{problem.setting}", problem.message, "; ".join(hints))

    def matmul_sides(self, hidden: int, tensor: int) -> Iterator[Side]:
        """Sides of the matrices on one device, except the hidden size."""
        for name, layer in self.layers().items():
            for side in layer.matmul_sides(hidden, tensor):
                yield side._replace(setting=f"{name}.{side.setting}")


def mixer_facts(mixer: Mixer, hidden: int, length: int, dtype: str, memory_ratio: float = 1.0) -> MixerFacts:
    """A mixer on rows of `length` tokens; memory_ratio: keys for each of them."""
    tensors = mixer.tensors(hidden)
    request = Request(dtype=dtype, length=length, key_length=round(memory_ratio * length))
    choice = mixer.kernel_choice(hidden, request, None)
    return MixerFacts(
        work=mixer.kernel_work(hidden, length * memory_ratio),
        heads=mixer.heads,
        fused=choice.kernel in FUSED,
        tensors=tuple(tensors[part] for part in KERNEL_TENSORS if part in tensors),
    )
