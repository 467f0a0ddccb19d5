"""Configs of a residual block and of a stack of blocks; imports neither jax nor flax."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import eq
from typing import ClassVar, Protocol, runtime_checkable

from megajax.config.builds import Builds
from megajax.config.errors import Problem, UserError
from megajax.kernels.capability import Request
from megajax.layers.config.attention import MixerConfig
from megajax.layers.config.moe import FeedForwardConfig, MoEConfig
from megajax.layers.config.norm import LARGEST, LayerScaleConfig, NormConfig, RMSNormConfig
from megajax.layers.config.position import RelativeBiasConfig
from megajax.layers.facts import (
    BlockFacts,
    BlockLayers,
    Elements,
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
)
from megajax.layers.remat import Part

KERNEL_TENSORS: tuple[Part, ...] = ("query_key_value", "core_attention")
"""What a kernel between matmuls reads and writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockConfig(Builds):
    """One residual block: x + mixer(norm(x)), then x + mlp(norm(x))."""

    target: ClassVar[str] = "megajax.layers.block:Block"
    mixer: MixerConfig | LayerBuilder
    """What mixes along the sequence."""
    mlp: FeedForwardConfig | LayerBuilder
    """What works on each position."""
    norm: NormConfig | LayerBuilder = field(default_factory=RMSNormConfig)
    """Normalisation before each of the two."""
    dropout: float = 0.0
    """Share of each sub-layer's output zeroed in training."""
    layer_scale: LayerScaleConfig | None = None
    """Learned factors on the channels of each sub-layer's output; none: none."""

    def problems(self) -> list[Problem]:
        if not 0 <= self.dropout < 1:
            return [Problem("dropout", f"must be at least 0 and below 1, got {self.dropout}")]
        return []

    def mixers(self) -> dict[str, MixerConfig | LayerBuilder]:
        """Setting -> config, of each part that mixes along a sequence."""
        return {"mixer": self.mixer}

    def missing_facts(self) -> dict[str, list[str]]:
        """Setting -> what its config lacks of the protocol of such layers, for each that lacks any."""
        layers: dict[str, tuple[object, type]] = {
            "mixer": (self.mixer, Mixer),
            "mlp": (self.mlp, Layer),
            "norm": (self.norm, Norm),
        }
        missing = {name: missing_members(layer, protocol) for name, (layer, protocol) in layers.items()}
        return {name: lacking for name, lacking in missing.items() if lacking}

    def known_layers(self) -> BlockLayers | None:
        """Mixer, MLP and norm; None where one has no facts."""
        mixer, mlp, norm = self.mixer, self.mlp, self.norm
        if isinstance(mixer, Mixer) and isinstance(mlp, Layer) and isinstance(norm, Norm):
            return BlockLayers(mixer, mlp, norm)
        return None

    def layers(self) -> BlockLayers:
        """Mixer, MLP and norm. Raises UserError where one has no facts."""
        if (known := self.known_layers()) is not None:
            return known
        lacking = "; ".join(f"{name} has no {', '.join(names)}" for name, names in self.missing_facts().items())
        raise UserError(f"the layers of a block do not tell their sizes (megajax.layers.facts): {lacking}")

    def summary(self, hidden: int) -> str:
        """Sizes of mixer and MLP, in words."""
        mixer, mlp, _ = self.layers()
        return f"{mixer.summary(hidden)}, {mlp.summary(hidden)}"

    def has_dropout(self) -> bool:
        """Whether training draws random numbers."""
        if isinstance(self.mlp, MoEConfig) and self.mlp.draws_random_numbers():
            return True
        return self.dropout > 0 or getattr(self.mixer, "dropout", 1.0) > 0  # a mixer that does not say may do so

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Every weight of the module."""
        mixer, mlp, norm = (layer.weights(hidden) for layer in self.layers())
        parts = {"mixer_norm": norm, "mlp_norm": norm, "mixer": mixer, "mlp": mlp}
        if self.layer_scale is not None:
            factors = self.layer_scale.weights(hidden)
            parts |= {"mixer_scale": factors, "mlp_scale": factors}
        return tuple(weight for name, weights in parts.items() for weight in prefixed(name, weights))

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        """Those of mixer and MLP."""
        mixer, mlp, _ = self.layers()
        return (*mixer.matmuls(hidden), *mlp.matmuls(hidden))

    def multiply_adds(self, hidden: int, read: float = 0.0) -> MultiplyAdds:
        """Operations of the forward pass. read: tokens of the section before for each token of a row."""
        del read
        mixer, mlp, _ = self.layers()
        return mixer.multiply_adds(hidden).plus(mlp.multiply_adds(hidden))

    def tensors(self, hidden: int) -> Mapping[Part, Elements]:
        """Tensors within mixer and MLP that may be saved."""
        mixer, mlp, _ = self.layers()
        return {**mixer.tensors(hidden), **mlp.tensors(hidden)}

    def megatron_matrices(self, hidden: int) -> int:
        """Parameters that tensor parallelism cuts, by Megatron-LM's memory report."""
        mixer, mlp, norm = self.layers()
        gains = total_size(norm.weights(hidden)) // hidden
        return mixer.megatron_matrices(hidden, gains) + mlp.megatron_matrices(hidden, gains)

    def norm_size(self, hidden: int) -> int:
        """Weights of the two norms."""
        return 2 * total_size(self.layers().norm.weights(hidden))

    def facts(self, *, hidden: int, length: int, dtype: str, read: int = 0) -> BlockFacts:
        """What the block costs on rows of `length` tokens in this compute dtype.

        read: tokens of the section before that each row reads.
        """
        del read  # only blocks with cross-attention read them
        return BlockFacts(
            hidden=hidden,
            weights=total_size(self.weights(hidden)),
            matmuls=self.matmuls(hidden),
            tensors=self.tensors(hidden),
            mixers=(mixer_facts(self.layers().mixer, hidden, length, dtype),),
        )

    def mesh_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """What is wrong with mixer and MLP on a mesh, as far as they tell. sizes: mesh axis -> devices."""
        both = {"mixer": self.mixer, "mlp": self.mlp}
        layers = {name: layer for name, layer in both.items() if isinstance(layer, Layer)}
        problems = [(name, problem) for name, layer in layers.items() for problem in layer.mesh_problems(sizes)]
        if problems:
            legal = set.intersection(*(set(layer.tensor_sizes()) for layer in layers.values()))
            advice = f"parallel.tensor can be {', '.join(map(str, sorted(legal)))}"
            for name, problem in problems:
                hint = f"{problem.hint}; {advice}" if problem.hint else advice
                yield Problem(f"{name}.{problem.where}", problem.what, hint)

    def matmul_sides(self, hidden: int, tensor: int) -> Iterator[Side]:
        """Sides of the matrices on one device, beside the hidden size."""
        mixer, mlp, _ = self.layers()
        for name, layer in (("mixer", mixer), ("mlp", mlp)):
            for side in layer.matmul_sides(hidden, tensor):
                yield side._replace(where=f"{name}.{side.where}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PostNormBlockConfig(BlockConfig):
    """A block that normalises after each sum, as Vaswani et al. 2017: norm(x + mixer(x)), then norm(x + mlp(x))."""

    target: ClassVar[str] = "megajax.layers.block:PostNormBlock"


def mixer_facts(mixer: Mixer, hidden: int, length: int, dtype: str, read: float = 1.0) -> MixerFacts:
    """A mixer on rows of `length` tokens; read: keys for each of them."""
    count, tensors = mixer.multiply_adds(hidden), mixer.tensors(hidden)
    known = Request(dtype=dtype, length=length, key_length=round(read * length))
    choice = mixer.kernel_choice(hidden, known, None)
    return MixerFacts(
        multiply_adds=length * read * (count.per_pair + count.per_full_pair),
        unmasked=length * read * (count.per_pair / 2 + count.per_full_pair),
        heads=mixer.heads,
        scores=length * read * mixer.heads,
        fused=choice.kernel != "reference",
        tensors=tuple(tensors[part] for part in KERNEL_TENSORS if part in tensors),
    )


@runtime_checkable
class RelativelyBiased(Protocol):
    """A mixer that may have a bias of scores by distance."""

    @property
    def heads(self) -> int: ...

    @property
    def relative(self) -> RelativeBiasConfig | None: ...


def shared_bias(block: BlockConfig) -> tuple[int, RelativeBiasConfig] | None:
    """Heads and settings of the table a block shares with others of its stack."""
    mixer = block.mixer
    if isinstance(mixer, RelativelyBiased) and mixer.relative is not None and mixer.relative.shared:
        return mixer.heads, mixer.relative
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class StackConfig(Builds):
    """`pattern` is unrolled in Python and scanned over `repeats`: (dense, moe) x 16 is 32 layers."""

    target: ClassVar[str] = "megajax.layers.stack:Stack"
    pattern: tuple[BlockConfig, ...]
    """Blocks that are repeated together."""
    repeats: int
    """How many times the pattern is applied; layers = len(pattern) * repeats."""

    def problems(self) -> list[Problem]:
        problems = []
        if not self.pattern:
            problems.append(Problem("pattern", "needs at least one block"))
        if not 1 <= self.repeats <= LARGEST:
            problems.append(Problem("repeats", f"must be between 1 and {LARGEST}, got {self.repeats}"))
        return problems + table_problems("pattern", self.pattern)

    def parts(self) -> tuple["StackConfig", ...]:
        """The segments of the stack: itself."""
        return (self,)

    def with_pattern(self, blocks: Sequence[BlockConfig]) -> "StackConfig":
        """The same stack of other blocks."""
        return replace(self, pattern=tuple(blocks))

    @classmethod
    def of(cls, blocks: Sequence[BlockConfig]) -> "StackConfig":
        """A stack of these blocks, with the shortest pattern whose repeats give them."""
        length = period([blocks.index(block) for block in blocks])
        return cls(pattern=tuple(blocks[:length]), repeats=len(blocks) // length)

    def layers(self) -> int:
        """Number of blocks a token passes."""
        return len(self.pattern) * self.repeats

    def repeated_blocks(self) -> tuple[tuple[BlockConfig, int], ...]:
        """Each block that is written in the config, and how often it is applied."""
        return tuple((block, self.repeats) for block in self.pattern)

    def shared_weights(self) -> tuple[Weight, ...]:
        """Weights of the stack itself."""
        return table_weights(self.pattern)


def period(numbers: Sequence[int]) -> int:
    """Length of the shortest sequence whose repeats give this one."""
    count = len(numbers)
    return next(n for n in range(1, count + 1) if count % n == 0 and all(map(eq, numbers, numbers[n:])))


def shared_tables(blocks: Sequence[BlockConfig]) -> set[tuple[int, RelativeBiasConfig]]:
    """Heads and settings of the tables of relative biases that blocks of a stack share."""
    return {shared for block in blocks if (shared := shared_bias(block)) is not None}


def table_problems(where: str, blocks: Sequence[BlockConfig]) -> list[Problem]:
    """What is wrong with the tables that blocks of a stack share."""
    what = "blocks that share a table of relative biases differ in it, or in heads"
    return [Problem(where, what, "make them alike")] if len(shared_tables(blocks)) > 1 else []


def table_weights(blocks: Sequence[BlockConfig]) -> tuple[Weight, ...]:
    """The tables that blocks of a stack share."""
    return tuple(
        Weight("relative.table", (bias.buckets, heads), (None, "heads")) for heads, bias in shared_tables(blocks)
    )
