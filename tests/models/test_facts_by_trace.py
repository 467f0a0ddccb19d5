"""Facts stated by hand, against a trace of the module: every kind of block of every shipped config.

One jaxpr of a block gives its matmuls with weights and its named tensors. Logical axes start at the weights and the
input and follow each primitive, so the trace knows which dimensions `tensor` shards.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import Literal
from tiny_encoders import normalised_after

from megajax.config import load
from megajax.config.config_files import functions_of
from megajax.layers.block.config import BlockConfig, shared_bias
from megajax.layers.block.step_work import Reached, Training, block_work, factors
from megajax.layers.context import Context
from megajax.layers.delta.config import GatedDeltaNetConfig, KimiDeltaConfig
from megajax.layers.facts import BlockFacts, Elements, Matmul, Share, Weight, unsharded
from megajax.layers.linear.config import LightningAttentionConfig
from megajax.layers.mamba.config import Mamba1Config, Mamba2Config
from megajax.layers.param import LayerSettings, Observation, path_of, specs
from megajax.layers.recompute import NAMES, Part, Recompute, Recomputing
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from tests.models.test_presets_and_formulas import EVERYTHING, MODELS

CONFIGS = Path(__file__).parents[2] / "configs"
LONGEST = 512
"""Tokens of a traced row."""
PARTS: dict[str, Part] = {name: part for part, names in NAMES.items() for name in names}
SHARDED = {"heads", "mlp", "expert_mlp"}
RECOMPUTE: tuple[Recompute, ...] = (
    "none",
    "selective",
    "full",
    ("norm", "activation", "mlp"),
    ("query_key_value", "gate", "latent"),
    ("residual", "core_attention"),
)
INDICES = {"top_k", "sort", "argsort", "gather", "cumsum", "eq", "iota"}
"""Primitives whose results are not the results of the matmuls before them."""
SAME_WEIGHT = {"convert_element_type", "reshape", "transpose", "broadcast_in_dim", "copy", "squeeze"}
"""Primitives that keep a weight recognisable."""

RECURRENT: dict[type, Callable[[Any], float]] = {
    Mamba1Config: lambda mixer: 3.5 * mixer.inner * mixer.state,
    Mamba2Config: lambda mixer: 3.5 * mixer.inner * mixer.state,
    GatedDeltaNetConfig: lambda mixer: (
        4 * mixer.inner * mixer.key_dim + mixer.conv_kernel * (2 * mixer.keys + mixer.inner)
    ),
    KimiDeltaConfig: lambda mixer: 4 * mixer.inner * mixer.key_dim + mixer.conv_kernel * (2 * mixer.keys + mixer.inner),
    LightningAttentionConfig: lambda mixer: 2 * mixer.inner * mixer.head_dim,
}
"""Multiply-adds per token of recurrences, which kernels compute by chunks: as Megatron-LM counts them."""


SPACE = Mamba1Config(inner=24, rank=3, conv_bias=False, bias=True)
OTHERS = MODELS | {
    "normalised after": normalised_after(),
    "state space": replace(EVERYTHING, stack=StackConfig(pattern=(BlockConfig(mixer=SPACE),), repeats=2)),
}
"""Models with layers that no config has."""


class Case(NamedTuple):
    """A block and the rows that it is traced on."""

    block: BlockConfig
    hidden: int
    length: int
    memory_length: int
    dtype: str


def _cases() -> dict[str, Case]:
    """Every kind of block: the name of the first config that has it -> the case."""
    first: dict[Case, str] = {}
    runs = [f"{file.name}:{name}" for file in sorted(CONFIGS.glob("*.py")) for name in functions_of(file)]
    models = {run: (cfg.model, cfg.precision.compute) for run in runs for cfg in [load(str(CONFIGS / run))]}
    models |= {name: (model, "float32") for name, model in OTHERS.items()}
    for run, (model, dtype) in models.items():
        sections = model.section_facts()
        blocks = [(section, block) for section in sections for block, _ in section.stack.repeated_blocks()]
        blocks += [(sections[-1], block) for block in model.head_facts().ahead]
        for number, (section, block) in enumerate(blocks):
            sizes = section.hidden, min(section.length, LONGEST), min(section.memory_length, LONGEST)
            first.setdefault(Case(block, *sizes, dtype), f"{run}-{number}")
    # Placements of norms that few configs have.
    (plain, name), *_ = first.items()
    for placement in ("output", "sandwich"):
        first[plain._replace(block=replace(plain.block, norm_placement=placement))] = f"{name}-{placement}"
    # Of blocks that differ in numbers only, the widest, whose numbers are the least alike: facts are formulas of them.
    alike = defaultdict(list)
    for case in first:
        alike[re.sub(r"\d[\d.e-]*", "", repr(case.block)), case.dtype, case.memory_length > 0].append(case)
    widest = (max(group, key=lambda case: case.hidden) for group in alike.values())
    return {first[case]: case for case in widest}


@dataclass
class Dot:
    """A product with a weight."""

    weight: str
    operand: Any
    """The variable that the weight multiplies."""
    inputs: Elements
    outputs: Elements
    rows: float
    """Rows that the weight multiplies, per token."""
    experts: int
    result: Part | None = None


class Trace:
    """Matmuls and named tensors of a jaxpr, found by following axes, weights and results through its equations."""

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.axes: dict[Any, tuple[str | None, ...]] = {}
        self.weights: dict[Any, str | None] = {}
        self.sources: dict[Any, Any] = {}
        """Variable -> the variable with the same elements that it was made from."""
        self.unnamed: dict[Any, frozenset[int]] = defaultdict(frozenset)
        """Variable -> the dots that it was computed from, back to the last named tensor."""
        self.dots: list[Dot] = []
        self.named: list[tuple[Part, Elements]] = []
        self.pairs = 0.0
        """Multiply-adds per token between activations of two positions."""

    def axes_of(self, variable: Any) -> tuple[str | None, ...]:
        unknown = (None,) * variable.aval.ndim
        return unknown if isinstance(variable, Literal) else self.axes.get(variable, unknown)

    def root(self, variable: Any) -> Any:
        while variable in self.sources:
            variable = self.sources[variable]
        return variable

    def alias(self, variable: Any, source: Any) -> None:
        if not isinstance(source, Literal):
            missing = variable.aval.ndim - source.aval.ndim
            self.axes[variable], self.sources[variable] = (None,) * missing + self.axes_of(source), source
            self.weights[variable], self.unnamed[variable] = self.weights.get(source), self.unnamed[source]

    def jaxpr(self, jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            inner = next((equation.params[key] for key in ("jaxpr", "call_jaxpr") if key in equation.params), None)
            if inner is None:
                self.equation(equation)
                continue
            inner = getattr(inner, "jaxpr", inner)
            for parameter, argument in zip(inner.invars, equation.invars, strict=True):
                if parameter.aval.shape == argument.aval.shape:
                    self.alias(parameter, argument)
            self.jaxpr(inner)
            for result, variable in zip(equation.outvars, inner.outvars, strict=False):
                self.alias(result, variable)

    def equation(self, equation: Any) -> None:
        name, inputs, result = equation.primitive.name, equation.invars, equation.outvars[0]
        variables = [variable for variable in inputs if not isinstance(variable, Literal)]
        unnamed = frozenset() if name in INDICES else frozenset().union(*(self.unnamed[v] for v in variables))
        if name in ("dot_general", "ragged_dot_general", "ragged_dot"):
            self.axes[result], number = self.dot(equation, ragged=name != "dot_general")
            unnamed = frozenset() if number is None else frozenset([number])
        elif name == "name":
            self.alias(result, inputs[0])
            if (part := PARTS.get(equation.params["name"])) is not None:
                self.named.append((part, elements(self.axes_of(result), result.aval.shape, self.tokens)))
                for number in unnamed:
                    self.dots[number].result = self.dots[number].result or part
                unnamed = frozenset()
        else:
            self.axes[result] = self.axes_after(equation)
            if len(variables) == 1 and name in SAME_WEIGHT:
                self.weights[result] = self.weights.get(variables[0])
            if len(variables) == 1 and name in ("convert_element_type", "copy", "reshape"):
                self.sources[result] = variables[0]
        for variable in equation.outvars:
            self.unnamed[variable] = unnamed

    def axes_after(self, equation: Any) -> tuple[str | None, ...]:
        """Axes of the result of a primitive other than a dot."""
        name, inputs, shape = equation.primitive.name, equation.invars, equation.outvars[0].aval.shape
        first, params = self.axes_of(inputs[0]) if inputs else (), equation.params
        if name == "transpose":
            return tuple(first[dimension] for dimension in params["permutation"])
        if name == "broadcast_in_dim":
            places = {place: first[number] for number, place in enumerate(params["broadcast_dimensions"])}
            return tuple(places.get(dimension) for dimension in range(len(shape)))
        if name == "squeeze" or (name.startswith(("reduce_", "argm")) and "axes" in params):
            gone = params["dimensions"] if name == "squeeze" else params["axes"]
            return tuple(axis for dimension, axis in enumerate(first) if dimension not in gone)
        if name == "reshape":
            return reshaped(inputs[0].aval.shape, first, shape)
        if name == "stack":
            return (*first[: params["axis"]], None, *first[params["axis"] :])
        if name == "gather":
            return (*("rows",) * (len(shape) - 1), *first[-1:])
        alike = [self.axes_of(variable) for variable in inputs if variable.aval.ndim == len(shape)]
        return tuple(next(filter(None, each), None) for each in zip(*alike, strict=True)) or (None,) * len(shape)

    def dot(self, equation: Any, *, ragged: bool) -> tuple[tuple[str | None, ...], int | None]:
        """Axes of the product, and the number of the dot if an operand is a weight."""
        sides = equation.invars[:2]
        contracted, batch = (((1,), (1,)), ((), (0,))) if ragged else equation.params["dimension_numbers"]
        axes = [self.axes_of(side) for side in sides]
        axes[0] = ("rows", *axes[0][1:]) if ragged else axes[0]
        free = [
            [d for d in range(side.aval.ndim) if d not in (*contracted[n], *batch[n])] for n, side in enumerate(sides)
        ]
        both = [(axes[0][a], axes[1][b]) for a, b in zip(batch[0], batch[1], strict=False)]
        shared = ["heads" if "heads" in pair else pair[0] or pair[1] for pair in both]
        result = (*shared, *(axes[n][d] for n in (0, 1) for d in free[n]))
        number = next((n for n in (0, 1) if self.weights.get(sides[n])), None)
        if number is None:
            scores = [axes[n][d] for n in (0, 1) for d in free[n]].count("seq") == 2
            if scores or any("seq" in (axes[0][a], axes[1][b]) for a, b in zip(*contracted, strict=True)):
                inner = prod(sides[0].aval.shape[d] for d in contracted[0])
                self.pairs += prod(equation.outvars[0].aval.shape) * inner / self.tokens
            return result, None
        weight, other, own = sides[number], sides[1 - number], axes[number]
        shape = weight.aval.shape
        inputs, outputs = (
            elements([own[d] for d in dims], [shape[d] for d in dims], 1) for dims in (contracted[number], free[number])
        )
        rows = prod(other.aval.shape) / prod(other.aval.shape[d] for d in contracted[1 - number]) / self.tokens
        experts = prod(shape[d] for d in batch[number]) if ragged else 1
        self.dots.append(Dot(self.weights[weight] or "", self.root(other), inputs, outputs, rows, experts))
        return result, len(self.dots) - 1

    def matmuls(self) -> Iterator[Matmul]:
        """One for each dot."""
        for dot in self.dots:
            yield Matmul(
                inputs=dot.inputs, outputs=dot.outputs, result=dot.result, experts=dot.experts, per_token=dot.rows
            )

    def tensors(self) -> dict[Part, Elements]:
        """Named tensors of the sub-layers, added up by part."""
        total: dict[Part, Elements] = {}
        for part, sizes in self.named:
            if part not in ("norm", "residual", "input"):
                total[part] = total.get(part, Elements()).plus(sizes)
        return total


def elements(axes: Sequence[str | None], shape: Sequence[int], tokens: int) -> Elements:
    """Elements per token of a tensor with these axes."""
    size = prod(shape) // tokens
    if SHARDED.intersection(axes):
        return Elements(sharded=size)
    if "kv_heads" in axes:
        return Elements(grouped=size, groups=shape[list(axes).index("kv_heads")])
    return Elements(replicated=size)


def reshaped(old: Sequence[int], axes: Sequence[str | None], new: Sequence[int]) -> tuple[str | None, ...]:
    """Axes after a reshape: a merged dimension takes the first axis in it, a split one gives its axis to all parts."""
    left, out = list(zip(old, axes, strict=True)), []
    for size in new:
        taken, room = None, size
        if size == 1 and left and left[0][0] == 1:
            taken = left.pop(0)[1]
        while room > 1 and left:
            have, axis = left.pop(0)
            taken = taken or axis
            if have > room:
                left.insert(0, (have // room, axis))
            room = max(1, room // max(have, 1))
        out.append(taken)
    return tuple(out)


def ragged_product(x: Any, weight: Any, sizes: Any, kernel: Any) -> Any:
    """The grouped matmul as one primitive; the reference is a loop over tiles."""
    del kernel
    return jax.lax.ragged_dot(x, weight.astype(x.dtype), sizes.astype(jnp.int32))


def traced(case: Case) -> tuple[tuple[Weight, ...], Trace]:
    """Weights that the module declares, and a trace of its forward pass."""
    settings = LayerSettings(layout=Layout(Plan.of(ParallelConfig())), hidden=case.hidden, std=1.0, output_std=1.0)
    module = nnx.eval_shape(lambda: case.block.build(settings))
    declared = {kind: specs(module, kind) for kind in (nnx.Param, Observation)}
    kept = {path for kind in declared.values() for path, spec in kind.items() if spec.keeps_dtype()}
    graph, state = nnx.split(module)
    leaves = []
    for parts, leaf in nnx.to_flat_state(state):
        dtype = leaf.dtype if path_of(parts, leaf) in kept else case.dtype
        leaves.append((parts, type(leaf)(jax.ShapeDtypeStruct(leaf.shape, dtype), **leaf.get_metadata())))
    like, ids = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((1, case.length), jnp.int32)
    ctx, x = Context(positions=ids, index=like((case.length,), jnp.int32), segments=ids), [case.length]
    ctx = ctx._replace(layer=like((), jnp.int32))
    if (shared := shared_bias(case.block)) is not None:
        ctx = ctx._replace(bias=like((shared[1].buckets, shared[0]), jnp.float32))
    if case.memory_length:
        x.append(case.memory_length)
        ctx = ctx._replace(memory_segments=like((1, case.memory_length), jnp.int32))
    streams = [like((1, length, case.hidden), case.dtype) for length in x]

    def forward(state: Any, streams: Any, ctx: Context) -> Any:
        ctx = ctx._replace(memory=streams[1]) if len(streams) > 1 else ctx
        return nnx.merge(graph, state)(streams[0], ctx)

    with mock.patch("megajax.layers.param.grouped_matmul", ragged_product):
        jaxpr = jax.make_jaxpr(forward)(nnx.from_flat_state(leaves), streams, ctx).jaxpr
    trace = Trace(case.length)
    for variable, (parts, leaf) in zip(jaxpr.invars, leaves, strict=False):
        trace.axes[variable], trace.weights[variable] = tuple(leaf.axes), path_of(parts, leaf)
    for variable in jaxpr.invars[len(leaves) : len(leaves) + len(streams)]:
        trace.axes[variable] = ("batch", "seq", "embed")
    trace.jaxpr(jaxpr)
    return tuple(Weight(path, spec.shape, spec.axes) for path, spec in declared[nnx.Param].items()), trace


class Stated(NamedTuple):
    """A block's facts, its weights, and what a trace of its module says."""

    case: Case
    facts: BlockFacts
    declared: tuple[Weight, ...]
    trace: Trace

    def tensor_sizes(self) -> list[int]:
        """Legal sizes of `tensor` up to 8."""
        layers = self.case.block.layers().values()
        return [size for size in (1, 2, 4, 8) if all(size in layer.tensor_sizes() for layer in layers)]


@cache
def blocks() -> dict[str, Stated]:
    """Every case, traced."""
    stated = {}
    for name, case in _cases().items():
        sizes = {"hidden": case.hidden, "length": case.length, "dtype": case.dtype}
        stated[name] = Stated(case, case.block.facts(**sizes, memory_length=case.memory_length), *traced(case))
    return stated


def differences(stated: Callable[[Stated], Any], true: Callable[[Stated], Any]) -> dict[str, tuple[Any, Any]]:
    """Name of a block -> both values, where they differ."""
    pairs = {name: (stated(block), true(block)) for name, block in blocks().items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pytest.approx(pair[1], rel=1e-9)}


def test_weights() -> None:
    """Facts state their names, shapes, axes and number, and those that ZeRO-1 and FSDP leave whole."""
    wrong = {
        name
        for name, block in blocks().items()
        if set(block.case.block.weights(block.case.hidden)) != set(block.declared)
        or block.facts.unsharded != unsharded(block.declared)
    }
    assert not wrong
    assert len(blocks()) > 40


def test_local_sizes_of_matrices_are_shards_of_the_weights() -> None:
    """These are the weights that the trace multiplies by, at each legal size of `tensor`."""
    plan = Plan.of(ParallelConfig())

    def shard(weight: Weight, tensor: int) -> float:
        spec = plan.compute.spec(weight.axes)
        sharded = [size for size, axes in zip(weight.shape, spec, strict=False) if "tensor" in (axes or ())]
        return weight.size / prod(min(tensor, size) for size in sharded)

    def true(block: Stated) -> list[float]:
        multiplied = {dot.weight for dot in block.trace.dots}
        matrices = [weight for weight in block.declared if weight.name in multiplied]
        return [sum(shard(weight, tensor) for weight in matrices) for tensor in block.tensor_sizes()]

    assert not differences(lambda block: [block.facts.local_size(size) for size in block.tensor_sizes()], true)


def test_results_of_matmuls() -> None:
    """Multiply-adds per token to each part, which the backward pass repeats unless the part is saved.

    The gates of Mamba-2 and gated delta nets belong to the matmul of their other inputs.
    """

    def results(matmuls: Iterable[Matmul]) -> dict[Part | None, float]:
        total: dict[Part | None, float] = defaultdict(float)
        for matmul in matmuls:
            part = "query_key_value" if matmul.result == "gate" else matmul.result
            total[part] += matmul.multiply_adds
        return dict(total)

    assert not differences(lambda block: results(block.facts.matmuls), lambda block: results(block.trace.matmuls()))


def test_saved_bytes() -> None:
    """They are equal under each policy and at each legal size of `tensor`, with and without sequence parallelism."""

    def saved(block: Stated, facts: BlockFacts) -> list[float]:
        shares = [
            Share(tokens=block.case.length, width=2, residual_width=2, tensor=tensor, sequence=sequence)
            for tensor in block.tensor_sizes()
            for sequence in {1, tensor}
        ]
        policies = [Recomputing(recompute=recompute).policy() for recompute in RECOMPUTE]
        return [facts.saved_bytes(policy, share) for policy in policies for share in shares]

    def true(block: Stated) -> list[float]:
        names = Counter(part for part, _ in block.trace.named)
        count = {"read_norms": names["norm"], "parts": names["residual"] - block.facts.normalised_outputs + 1}
        return saved(block, replace(block.facts, tensors=block.trace.tensors(), **count))

    assert not differences(lambda block: saved(block, block.facts), true)


def test_operations() -> None:
    """Multiply-adds per token and per pair of tokens are those of a forward pass, if all is trained or nothing."""

    def counted(block: Stated, *trained: str) -> tuple[float, float]:
        case, reached = block.case, Reached(*(bool(trained),) * 2)
        ratio = case.memory_length / case.length
        count, _ = block_work(case.block, case.hidden, ratio, "block", Training(trained), reached)
        passes = 3 if trained else 1
        return count.once / passes, sum(number for _, number in count.pairs) / passes

    def true(block: Stated) -> tuple[float, float]:
        products = sum(matmul.multiply_adds for matmul in block.trace.matmuls())
        mixers = {name: mixer for name, mixer in block.case.block.mixers().items() if type(mixer) in RECURRENT}
        trace = block.trace
        if "beside" in mixers:
            _, trace = traced(block.case._replace(block=replace(block.case.block, beside=None)))
        recurrent = sum(RECURRENT[type(mixer)](mixer) for mixer in mixers.values())
        return products + recurrent, 0 if "mixer" in mixers else trace.pairs / block.case.length

    assert not differences(lambda block: counted(block, "*"), true)
    assert not differences(counted, true)


def test_weights_of_products_are_those_of_the_trace() -> None:
    """They agree by name and shape, from which the trained share of a layer follows."""

    def stated(block: Stated) -> float:
        memory = block.case.memory_length / block.case.length
        read = ("cross.key", "cross.value")
        weights = factors(block.case.block.weights(block.case.hidden))
        return sum(weight.size * weight.active_share * (memory if weight.name in read else 1) for weight in weights)

    assert not differences(stated, lambda block: sum(matmul.multiply_adds for matmul in block.trace.matmuls()))
