"""Facts of a model that follow from its config: parameter counts, FLOPs, and the input of plans by formula.

All facts are sums over the sections of a model, so plans need no code per model. Facts are optional. Without them,
FLOPs are unknown (null in metrics, omitted in the banner), and plans use only the compiler, without step times.
Importing this imports neither jax nor flax.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from megajax.config.errors import UserError
from megajax.config.hints import below
from megajax.kernels.attention.capability import KernelChoice
from megajax.kernels.attention.request import KernelDevice, KernelRequest
from megajax.layers.block.config import BlockConfig
from megajax.layers.block.step_work import ALL, PASSES, Count, Reached, Training, block_work, factors
from megajax.layers.checks import missing_members
from megajax.layers.facts import (
    BlockFacts,
    LayerBuilder,
    Matmul,
    Norm,
    Side,
    Weight,
    idle_size,
    norm_weights,
    prefixed,
    total_size,
)
from megajax.layers.multiply_adds import VisibleKeys
from megajax.layers.recompute import Recomputing
from megajax.layers.stack.config import SegmentsConfig, StackConfig
from megajax.models.protocol import ModelConfig, ids_below, position_unit


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of one training step per position of a row; the conventions are in megajax.layers.block.step_work."""

    causal: float
    """Of attention, the pairs of positions that the mask leaves: the necessary operations."""
    full: float
    """All pairs, as without a mask."""
    megatron: float | None = None
    """By Megatron-LM's formula; None: not known, of a model that counts by itself."""

    @property
    def megatron_ratio(self) -> float | None:
        """megatron / causal."""
        return None if self.megatron is None else self.megatron / self.causal

    def text(self, *, megatron: bool = True) -> str:
        """All of them, in words; megatron: with Megatron-LM's."""
        theirs = f"; {self.megatron:.4g} by Megatron-LM's formula" if megatron and self.megatron is not None else ""
        return f"{self.causal:.4g} causal, {self.full:.4g} full (no mask){theirs}"


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Number of weights of a model, without the padding of vocabulary tables."""

    layers: int
    """Weights in blocks, final norms, and heads of multi-token prediction."""
    embedding: int
    """Token and position tables."""
    head: int
    """0 when tied."""
    idle: int = 0
    """The part of `layers` in experts that a token does not use."""

    @property
    def total(self) -> int:
        return self.layers + self.embedding + self.head

    @property
    def active(self) -> int:
        """Weights that a token uses; tables count in full."""
        return self.total - self.idle


def matrices(weights: Sequence[Weight]) -> tuple[Weight, ...]:
    """The weights that are not gains or biases."""
    return tuple(weight for weight in weights if len(weight.shape) > 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionFacts:
    """A section: its rows, its layers and its input layers. Weights are named as in the module."""

    path: str
    """Path in the model, as in `ModelConfig.stacks`."""
    hidden: int
    """Width of the residual stream."""
    length: int
    """Positions of a sequence: of a text, of an image."""
    padding: int = 0
    """Padding positions at the end of a sequence."""
    sequences: int = 1
    """Sequences per row, such as the images of a row of text."""
    memory_length: int = 0
    """Positions of the preceding section that cross-attention reads."""
    stack: StackConfig | SegmentsConfig
    norm: Norm | LayerBuilder
    """Normalisation after the layers."""
    residual: str = "compute"
    """Dtype of the residual stream: compute or float32."""
    recomputing: Recomputing
    """The recompute settings of the layers."""
    weights: tuple[Weight, ...] = ()
    """Weights of the input layers. Tables with the axis "vocab" are sharded over pipeline and tensor."""
    matmuls: tuple[Matmul, ...] = ()
    """Matmuls of the input layers per position: of patches, of a projector."""
    adds_positions: bool = False
    """Whether learned positions are added to each position."""
    frozen: bool = False
    """Whether it never has gradients, as a teacher: a step computes only its forward pass."""

    @property
    def positions(self) -> int:
        """Positions of a row."""
        return self.sequences * self.length

    @property
    def tables(self) -> tuple[Weight, ...]:
        """Matrices and tables of the input layers."""
        return matrices(self.weights)

    def stack_weights(self, place: int) -> tuple[Weight, ...]:
        """Weights of a block of the pattern, by their names in the module."""
        number = next(number for number, (_, layers) in enumerate(self.stack.stored()) if place in layers)
        inside = f"{self.path}.stack.blocks.{number}" if self.path else f"stack.blocks.{number}"
        return prefixed(inside, self.stack.pattern[place].weights(self.hidden))


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadFacts:
    """The head: computes the loss from the output of the last section."""

    columns: int
    """Scores per position: the padded vocabulary, or the classes."""
    replicated: bool = False
    """Every device computes all scores; false: they are sharded over pipeline and tensor."""
    upsampled: int = 1
    """Upsampling factor of scores: pixels per patch."""
    positions: int
    """Scored positions per row."""
    chunk: int
    """Positions whose float32 scores exist at once."""
    weights: tuple[Weight, ...] = ()
    """Weights of the head, without those of the input layers and of `ahead`."""
    matmuls: tuple[Matmul, ...] = ()
    """Matmuls per scored position before the scores."""
    pairs: int = 0
    """Multiply-adds of attention per scored position."""
    ahead: tuple[BlockConfig, ...] = ()
    """Blocks of multi-token prediction, each with a matrix of 2 x hidden x hidden, three norms, and scores."""

    @property
    def tables(self) -> tuple[Weight, ...]:
        """Matrices and tables among the weights."""
        return matrices(self.weights)


@runtime_checkable
class ChoosesKernels(Protocol):
    """A model whose kernels are known before it is built: those of layers with `HasKernel`."""

    def kernel_choices(self, request: KernelRequest, device: KernelDevice | None) -> tuple[KernelChoice[str], ...]:
        """The kernel of each such layer of the pattern.

        Raises UserError for a kernel chosen by name that is not available.
        """
        ...

    def with_kernels(self, names: Sequence[str]) -> "ModelConfig":
        """A copy with these kernels, in the order of `kernel_choices`."""
        ...


@runtime_checkable
class Facts(ModelConfig, ChoosesKernels, Protocol):
    """A model whose sections and head have facts."""

    def section_facts(self) -> tuple[SectionFacts, ...]:
        """The sections, in the order in which they run."""
        ...

    def head_facts(self) -> HeadFacts:
        """The head after the last section."""
        ...

    def parameter_count(self) -> ParameterCount:
        """Number of weights."""
        ...

    def recomputing(self) -> Recomputing:
        """The recompute settings of the layers."""
        ...

    def with_kernels(self, names: Sequence[str]) -> "Facts":
        """A copy with these kernels, in the order of `kernel_choices`."""
        ...

    def with_recomputing(self, recomputing: Recomputing) -> "Facts":
        """A copy with these recompute settings."""
        ...

    def matmul_sides(self, tensor: int) -> Iterator[Side]:
        """Sides of the matrices on one device."""
        ...


def missing_facts(model: ModelConfig) -> dict[str, str]:
    """Setting -> missing members, for each part of a model config without facts."""
    lacking: dict[str, tuple[Any, list[str]]] = {"model": (model, missing_members(model, Facts))}
    if hasattr(model, "norm"):
        lacking["model.norm"] = (model.norm, missing_members(model.norm, Norm))
    for path, stack in (model.stacks() if hasattr(model, "stacks") else {}).items():
        for place, block in (stack.named_blocks() if isinstance(stack, StackConfig | SegmentsConfig) else {}).items():
            for name, members in block.missing_facts().items():
                lacking[f"model.{path or 'stack'}.{place}.{name}"] = (getattr(block, name), members)
    first_settings: dict[str, str] = {}
    for setting, (part, names) in lacking.items():
        if names:  # report the first of equal layers
            first_settings.setdefault(f"{type(part).__name__} has no {', '.join(names)}", setting)
    return {setting: message for message, setting in first_settings.items()}


def facts_of(model: ModelConfig) -> Facts | None:
    """The config itself if it and all its layers have facts, else None."""
    if not isinstance(model, Facts):
        return None
    sections = model.section_facts()
    blocks = [block for section in sections for block in section.stack.pattern] + [*model.head_facts().ahead]
    norms_have_facts = all(isinstance(section.norm, Norm) for section in sections)
    return model if norms_have_facts and not any(block.missing_facts() for block in blocks) else None


def demand_facts(model: ModelConfig) -> Facts:
    """The config itself. Raises UserError, with the missing members, if it has no facts."""
    facts = facts_of(model)
    if facts is None:
        title = "Missing members of megajax.models.facts.Facts and megajax.layers.facts.Layer:"
        lines = below(title, (f"{setting}: {message}" for setting, message in missing_facts(model).items()))
        raise UserError(
            f"{type(model).__name__} has no facts, which formulas, searches, comparisons and sweeps need.\n{lines}\n"
            "The compiler does not need them: plan without --formula, --search, --compare and --sweep."
        )
    return facts


def flops_of(model: ModelConfig, trainable: tuple[str, ...] = ALL) -> Flops | None:
    """Operations per position; None if unknown. A model without facts may have `flops()`.

    trainable: patterns of the names of trained weights, as optimizer.trainable.
    """
    if isinstance(model, Facts):
        return None if facts_of(model) is None else count_flops(model, trainable)
    count = getattr(model, "flops", None)
    return None if count is None else count()


def count_parameters(model: Any) -> ParameterCount:
    """Number of weights. Raises UserError if the config has no facts."""
    facts = demand_facts(model)
    sections, head, ids = facts.section_facts(), facts.head_facts(), ids_below(model)
    layers = idle = 0
    for section, block, times in _blocks(sections, head):
        weights = block.weights(section.hidden)
        layers, idle = layers + times * total_size(weights), idle + times * idle_size(weights)
    norms = [total_size(norm_weights("", section.norm, section.hidden)) for section in sections]
    merging = len(head.ahead) * (3 * norms[-1] + 2 * sections[-1].hidden ** 2)
    layers += sum(norms) + merging + sum(total_size(section.stack.shared_weights()) for section in sections)
    embedding = sum(_used_size(weight, ids) for section in sections for weight in section.weights)
    return ParameterCount(layers, embedding, sum(_used_size(weight, ids) for weight in head.weights), idle)


def _blocks(sections: Sequence[SectionFacts], head: HeadFacts) -> list[tuple[SectionFacts, BlockConfig, int]]:
    """Every block of the sections and the head, and how often it is applied."""
    blocks = [(section, block, times) for section in sections for block, times in section.stack.repeated_blocks()]
    return blocks + [(sections[-1], block, 1) for block in head.ahead]


def _used_size(weight: Weight, ids: int | None) -> int:
    """Number of elements, without the padding of a vocabulary of `ids`."""
    if ids is None or "vocab" not in weight.axes:
        return weight.size
    return weight.size // weight.shape[weight.axes.index("vocab")] * ids


def count_flops(model: Facts, trainable: tuple[str, ...] = ALL) -> Flops:
    """Operations of a training step per position of `row_positions()`. trainable: as in `flops_of`."""
    needed = row_counts(model, Training(trainable, model.lora))
    theirs = row_counts(model, Training(megatron=True))
    causal = _total(needed, lambda visible, length: visible.pairs(length))
    full = _total(needed, lambda visible, length: length**2)
    megatron = _total(theirs, lambda visible, length: length**2 / (1 + visible.causal))
    return Flops(*(2 * total / model.row_positions() for total in (causal, full, megatron)))


class RowCount(NamedTuple):
    """Sequences of a row."""

    sequences: float
    length: int
    """Positions of each, without padding."""
    count: Count


def _total(rows: Sequence[RowCount], pairs: Callable[[VisibleKeys, int], float]) -> float:
    """Multiply-adds of a row. pairs: those of a mask and a length."""
    return sum(
        row.sequences
        * (row.length * row.count.once + sum(n * pairs(visible, row.length) for visible, n in row.count.pairs))
        for row in rows
    )


def row_counts(model: Facts, training: Training) -> list[RowCount]:
    """Every section of a row, and its head."""
    sections, head = model.section_facts(), model.head_facts()
    rows, reached, entry = list[RowCount](), Reached(), False
    for section in sections:
        trained_here = training._replace(patterns=(), lora=None) if section.frozen else training
        # A section with memory has inputs of its own, by the tables of the one before; others read its output.
        reached = Reached(entry, reached.stream) if section.memory_length else Reached(reached.stream)
        reached = Reached((training.megatron and not section.frozen) or reached.stream, reached.memory)
        inputs = [weight for weight in section.tables if "vocab" not in weight.axes]
        count = _products(section.matmuls, reached.stream, trained_here.share(inputs))
        reached = reached._replace(stream=reached.stream or any(map(trained_here.trains, section.weights)))
        entry = reached.stream
        layers, reached = _stack(section, trained_here, reached)
        normed = any(
            map(trained_here.trains, norm_weights(f"{section.path}.norm".lstrip("."), section.norm, section.hidden))
        )
        reached = Reached(not section.frozen and (reached.stream or normed))
        rows.append(RowCount(section.sequences, section.length - section.padding, count.plus(layers)))
    last = replace(sections[-1], length=sections[-1].length - sections[-1].padding)
    tables = [weight for section in sections if not section.frozen for weight in section.tables]
    scored, ahead = _head(last, head, tables, training, reached)
    rows.append(RowCount(head.positions, 1, scored))
    rows.append(RowCount(head.positions / last.length, last.length, ahead))
    return rows


def _products(matmuls: Sequence[Matmul], reached: bool, share: float) -> Count:
    """Matmuls whose input depends on a trained weight or not, with this share of trained matrices."""
    return Count((1 + reached + share) * sum(matmul.size * matmul.per_token for matmul in matmuls))


def _head(
    section: SectionFacts, head: HeadFacts, tables: Sequence[Weight], training: Training, reached: Reached
) -> tuple[Count, Count]:
    """Multiply-adds per scored position, and of blocks of multi-token prediction. tables: of the sections."""
    heads = [weight for weight in head.tables if "vocab" in weight.axes or head.replicated]
    scores = training.share(heads or [weight for weight in tables if "vocab" in weight.axes])
    before = factors(head.weights) if head.replicated else [weight for weight in head.tables if weight not in heads]
    count = _products(head.matmuls, reached.stream, training.share(before))
    reached = Reached(reached.stream or (bool(head.matmuls) and any(map(training.trains, before))))
    logits, ahead = section.hidden * head.columns, Count()
    count = count.plus(Count(head.pairs * (1 + 2 * reached.stream) + logits * (1 + reached.stream + scores)))
    for number, block in enumerate(head.ahead):
        path, side = f"predictions.{number}", (section.hidden, section.hidden)
        merging = [Weight(f"{path}.{name}", side, ("embed", "mlp")) for name in ("from_embedding", "from_state")]
        once = 2 * section.hidden**2 * (1 + reached.stream + training.share(merging))
        once += training.adapters(merging, reached.stream)
        once += training.megatron * PASSES * 3 * section.hidden  # three gains
        ahead = ahead.plus(Count(once))
        reached = Reached(reached.stream or any(map(training.changes, merging)))
        inside, reached = block_work(block, section.hidden, 0.0, f"{path}.block", training, reached)
        ahead = ahead.plus(inside).plus(Count(logits * (1 + reached.stream + scores)))
    return count, ahead


def _stack(section: SectionFacts, training: Training, reached: Reached) -> tuple[Count, Reached]:
    """Multiply-adds of the blocks of a section, and what depends on trained weights after them."""
    count, before = Count(), 0
    ratio = section.memory_length / (section.length - section.padding)
    path = f"{section.path}.stack.blocks." if section.path else "stack.blocks."
    numbers = {layer: number for number, (_, layers) in enumerate(section.stack.stored()) for layer in layers}
    for part in section.stack.parts():
        # After the first repeat, whatever can depend on trained weights does.
        for times in (1, part.repeats - 1):
            for place, block in enumerate(part.pattern):
                name = f"{path}{numbers[before + place]}" * training.names
                inside, reached = block_work(block, section.hidden, ratio, name, training, reached)
                count = count.plus(inside, times)
        before += part.layers()
    return count, reached


def block_facts(section: SectionFacts, blocks: Sequence[BlockConfig], dtype: str) -> tuple[BlockFacts, ...]:
    """Facts of blocks in a section, in a model with this compute dtype."""
    shape = section.hidden, section.length, dtype, section.memory_length
    return tuple(_block_facts(block, *shape) for block in blocks)


@lru_cache(maxsize=4096)
def _block_facts(block: BlockConfig, hidden: int, length: int, dtype: str, memory_length: int) -> BlockFacts:
    return block.facts(hidden=hidden, length=length, dtype=dtype, memory_length=memory_length)


@lru_cache(maxsize=4096)
def trained_share(weights: tuple[Weight, ...], training: Training, *, adapters: bool) -> float:
    """Trained elements of these weights, over their elements. adapters: theirs count as trained elements."""
    trained = sum(weight.size for weight in weights if training.trains(weight))
    if adapters and training.lora is not None:
        adapted = [weight for weight in weights if any(training.adapter(weight))]
        trained += sum(training.lora.size(weight.shape, weight.axes) for weight in adapted)
    return trained / max(1, total_size(weights))


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """What banners, logs and representations say of a model, computed once from its config."""

    facts: Facts | None
    """None: the config, or one of its layers, has none."""
    flops: Flops | None
    """Operations of a training step per position; None: unknown."""
    vocabulary: int | None
    """Number of ids that the model reads; None: it reads no tokens."""
    unit: Literal["tokens", "positions", "rows"]
    """What `row_positions` counts."""
    trainable: tuple[str, ...]
    """Patterns of the names of trained weights, as optimizer.trainable."""

    @property
    def columns(self) -> int | None:
        """Scores per position of a model that reads tokens, padding included; None: no tokens, or no facts."""
        return None if self.facts is None or self.vocabulary is None else self.facts.head_facts().columns


def summarize(model: ModelConfig, trainable: tuple[str, ...] = ALL) -> ModelSummary:
    """The summary of a model config. trainable: as optimizer.trainable."""
    return ModelSummary(facts_of(model), flops_of(model, trainable), ids_below(model), position_unit(model), trainable)
