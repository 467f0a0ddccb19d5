"""Config of a residual block; imports neither jax nor flax."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from megajax.config.bounds import BelowOne
from megajax.config.class_references import Builds
from megajax.config.errors import Problem
from megajax.kernels.attention.capability import FUSED
from megajax.kernels.attention.request import KernelRequest
from megajax.layers.attention.config import AttentionConfig, CrossAttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.checks import missing_members
from megajax.layers.delta.config import GatedDeltaNetConfig, KimiDeltaConfig
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
    Norm,
    Side,
    Weight,
    prefixed,
    total_size,
    unsharded,
)
from megajax.layers.linear.config import LightningAttentionConfig, ShortConvConfig
from megajax.layers.mamba.config import Mamba1Config, Mamba2Config
from megajax.layers.moe.config import FeedForwardConfig
from megajax.layers.norm.config import FixedScaleConfig, LayerScaleConfig, NormConfig, RMSNormConfig, SumWeightsConfig
from megajax.layers.position.config import AlibiConfig, RelativeBiasConfig
from megajax.layers.recompute import Part

type MixerConfig = (
    AttentionConfig
    | LatentAttentionConfig
    | Mamba2Config
    | Mamba1Config
    | GatedDeltaNetConfig
    | KimiDeltaConfig
    | ShortConvConfig
    | LightningAttentionConfig
)
"""Layers that mix tokens of a row."""
type NormPlacement = Literal["pre", "post", "output", "sandwich", "parallel", "parallel_norms", "input"]

KERNEL_TENSORS: tuple[Part, ...] = ("query_key_value", "core_attention")
"""Inputs and outputs of a kernel between matmuls."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig(Builds):
    """Residual block: x + mixer(norm(x)), x + cross(norm(x)), x + mlp(norm(x)), without those that are none.

    Example: `mj.BlockConfig(mixer=mj.AttentionConfig(heads=8), mlp=mj.GatedMLPConfig(ffn=1408))`
    """

    target: ClassVar[str] = "megajax.layers.block.module:Block"
    mixer: MixerConfig | LayerBuilder | None = None
    """Layer that mixes tokens along the sequence; none: the block has only an MLP, as in hybrids."""
    beside: MixerConfig | LayerBuilder | None = None
    """Second mixer, which reads the mixer's normalised input; both outputs are added at once, as in Falcon-H1."""
    cross: CrossAttentionConfig | None = None
    """Cross-attention to the output of the preceding section, between mixer and MLP; none: no such sub-layer."""
    mlp: FeedForwardConfig | LayerBuilder | None = None
    """Layer that transforms each token separately; none: the block has only a mixer."""
    norm: NormConfig | LayerBuilder = field(default_factory=RMSNormConfig)
    """Normalisation of each sub-layer."""
    norm_placement: NormPlacement = "pre"
    """pre: x + f(norm(x)); post: norm(x + f(x)), as Vaswani et al. 2017; output: x + norm(f(x)), as OLMo 2;
    sandwich: x + output_norm(f(norm(x))), as Gemma 2; parallel: x + mixer(norm(x)) + mlp(norm(x)) with one norm, as
    Cohere's models; parallel_norms: the same with a norm for each, as GPT-NeoX; input: norm(x) + f(norm(x)), as
    MiniMax."""
    dropout: BelowOne = 0.0
    """Dropout rate of the output of each sub-layer."""
    layer_scale: LayerScaleConfig | FixedScaleConfig | None = None
    """Factors on each sub-layer's output, learned for each channel or fixed; none: no scaling."""
    sum_weights: SumWeightsConfig | None = None
    """Fixed factors of the terms of each sum, with norm_placement=input (MiniMax) or pre (Falcon-H1); none: 1."""
    deepstack: bool = False
    """Adds the layer's own states of images to the output, at their positions (DeepStack, Meng et al. 2024)."""

    def problems(self) -> list[Problem]:
        problems = []
        if self.mixer is None and self.mlp is None:
            problems.append(Problem("mixer", "is none, and mlp is none", "a block needs one of them"))
        if self.sum_weights is not None and self.norm_placement not in ("input", "pre"):
            message = f"needs norm_placement=input or pre, which is {self.norm_placement}"
            problems.append(Problem("sum_weights", message, "use layer_scale for factors on outputs"))
        if self.beside is not None and (self.mixer is None or self.norm_placement != "pre"):
            message = f"needs a mixer and norm_placement=pre, which is {self.norm_placement}"
            problems.append(Problem("beside", message, "use a block for each mixer"))
        return problems

    def parts(self) -> dict[str, Any]:
        """Setting -> config of each sub-layer that reads only the block's own section."""
        return self.own_mixers() | ({} if self.mlp is None else {"mlp": self.mlp})

    def mixers(self) -> dict[str, Any]:
        """Setting -> config of each layer that mixes along a sequence."""
        return self.own_mixers() | ({} if self.cross is None else {"cross": self.cross})

    def own_mixers(self) -> dict[str, Any]:
        """The `mixers` that read the sequence of the block itself."""
        return {name: part for name, part in (("mixer", self.mixer), ("beside", self.beside)) if part is not None}

    def layers(self) -> dict[str, Any]:
        """Setting -> config of each sub-layer, in the order of the forward pass."""
        return {**self.mixers(), **self.parts()}

    def sums(self) -> tuple[str, ...]:
        """The sub-layers that are added to the residual stream one after the other; `beside` is part of the mixer's."""
        return tuple(name for name in self.layers() if name != "beside")

    def norms(self) -> tuple[str, ...]:
        """Names of the norms of the sub-layers, or of the one that all of them read."""
        if self.norm_placement == "parallel":
            return ("norm",)
        sandwiched = [f"{name}_output_norm" for name in self.sums()] * (self.norm_placement == "sandwich")
        return (*(f"{name}_norm" for name in self.sums()), *sandwiched)

    def with_kernels(self) -> dict[str, HasKernel]:
        """Setting -> config of each layer with a kernel that depends on the device."""
        return {name: layer for name, layer in self.layers().items() if isinstance(layer, HasKernel)}

    def missing_facts(self) -> dict[str, list[str]]:
        """Setting -> missing members of the protocol, for each layer that lacks any."""
        protocols = {**{name: Layer if name == "mlp" else Mixer for name in self.parts()}, "norm": Norm}
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
        weights = [weight for name in self.norms() for weight in prefixed(name, self.norm_weights(hidden))]
        for name, layer in self.layers().items():
            weights += prefixed(name, layer.weights(hidden))
            if self.layer_scale is not None:
                weights += prefixed(f"{name}_scale", self.layer_scale.weights(hidden))
        return tuple(weights)

    def norm_weights(self, hidden: int) -> tuple[Weight, ...]:
        """Weights of one norm."""
        norm: Any = self.norm
        return norm.weights(hidden)

    def matmuls(self, hidden: int, memory_ratio: float = 0.0) -> tuple[Matmul, ...]:
        """The matmuls of the sub-layers. memory_ratio: tokens of the preceding section for each token of a row."""
        matmuls: list[Matmul] = []
        for name, layer in self.layers().items():
            added = layer.matmuls_reading(hidden, memory_ratio) if name == "cross" else layer.matmuls(hidden)
            of_sum = "mixer" if name == "beside" else name
            if of_sum not in self.saved_sums() and not self.normalises_outputs():
                added = (replace(matmul, result=None) if matmul.result == "residual" else matmul for matmul in added)
            matmuls += added
        return tuple(matmuls)

    def saved_sums(self) -> tuple[str, ...]:
        """The sub-layers after which the residual stream may be saved: all but the last, none if they are parallel."""
        return () if self.norm_placement.startswith("parallel") else self.sums()[:-1]

    def saved_norms(self) -> int:
        """Norms whose outputs are read by sub-layers."""
        every = len(self.sums())
        counts = {"pre": every, "sandwich": every, "input": every, "parallel": 1, "parallel_norms": every}
        return counts.get(self.norm_placement, 0)

    def normalises_outputs(self) -> bool:
        """Whether outputs of sub-layers are normalised before they are added to the residual stream."""
        return self.norm_placement in ("output", "sandwich")

    def tensors(self, hidden: int, memory_ratio: float = 0.0) -> Mapping[Part, Elements]:
        """Tensors of the sub-layers that may be saved, added up by name. memory_ratio: as in `matmuls`."""
        total: dict[Part, Elements] = {}
        for name, layer in self.layers().items():
            tensors = layer.tensors_reading(hidden, memory_ratio) if name == "cross" else layer.tensors(hidden)
            for part, elements in tensors.items():
                total[part] = total.get(part, NO_ELEMENTS).plus(elements)
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
        norms = len(self.norms()) * total_size(self.norm_weights(hidden))
        return norms + sum(part.megatron_router(hidden) for part in self.with_experts())

    def facts(self, *, hidden: int, length: int, dtype: str, memory_length: int = 0) -> BlockFacts:
        """What the block costs on rows of `length` tokens in this compute dtype.

        memory_length: tokens of the preceding section that each row reads. The tensors of two attention layers are
        added up.
        """
        ratio, layers = memory_length / length if self.cross else 0.0, self.layers()
        mixers = [
            mixer_facts(part, part.tensors(hidden), hidden, length, dtype)
            for part in self.parts().values()
            if isinstance(part, Mixer)
        ]
        if self.cross is not None:
            read = self.cross.tensors_reading(hidden, ratio)
            mixers.append(mixer_facts(self.cross, read, hidden, length, dtype, ratio))
        return BlockFacts(
            hidden=hidden,
            weights=total_size(self.weights(hidden)),
            matmuls=self.matmuls(hidden, ratio),
            tensors=self.tensors(hidden, ratio),
            mixers=tuple(mixers),
            parts=len(layers),
            saved_sums=len(self.saved_sums()),
            read_norms=self.saved_norms(),
            normalised_outputs=len(layers) * self.normalises_outputs(),
            normalised_sums=len(layers) * (self.norm_placement == "post"),
            memory_ratio=ratio,
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


def mixer_facts(
    mixer: Mixer, tensors: Mapping[Part, Elements], hidden: int, length: int, dtype: str, memory_ratio: float = 1.0
) -> MixerFacts:
    """A mixer with these tensors on rows of `length` tokens; memory_ratio: keys for each of them."""
    request = KernelRequest(dtype=dtype, length=length, key_length=round(memory_ratio * length))
    choice = mixer.kernel_choice(hidden, request, None)
    return MixerFacts(
        work=mixer.kernel_work(hidden, length * memory_ratio),
        heads=mixer.heads,
        fused=choice.kernel in FUSED,
        tensors=tuple(tensors[part] for part in KERNEL_TENSORS if part in tensors),
    )


@runtime_checkable
class RelativelyBiased(Protocol):
    """A mixer that may have a bias of scores by distance."""

    @property
    def heads(self) -> int: ...

    @property
    def relative(self) -> RelativeBiasConfig | AlibiConfig | None: ...


def shared_bias(block: BlockConfig) -> tuple[int, RelativeBiasConfig] | None:
    """Heads and settings of the table that a block shares with others of its stack."""
    for mixer in block.own_mixers().values():
        if isinstance(mixer, RelativelyBiased) and isinstance(mixer.relative, RelativeBiasConfig):
            return (mixer.heads, mixer.relative) if mixer.relative.shared else None
    return None
