"""What devices can serve by formulas: the tokens of cache beside the weights, and bounds of the speed.

A bound is what the data sheet's memory bandwidth, or its peak of matmuls, allows at most. Weights are read once a step
whatever the number of rows; of experts, those that the rows choose in the mean.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megajax.config.errors import UserError
from megajax.layers.cache_facts import stored_leaves
from megajax.layers.facts import CUT_AXES, Matmul, Norm, Weight, total_size
from megajax.planning.cost.description import BYTES, Description
from megajax.planning.cost.traffic import Span, seconds
from megajax.planning.program.devices import GIB

CACHE_SHARE = 0.9
"""Of the memory that weights leave, as inference.memory_share has it by default; steps and fragments have the rest."""
WIDTHS = BYTES | {"int8": 1, "float8_e4m3fn": 1, "int32": 4}
"""Bytes of an element of the cache."""
WEIGHT_WIDTHS = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 128}
"""Bytes of a weight of the layers' matrices with its scales, as model.quantization stores them; scales of outputs are
less than a thousandth."""


@dataclass(frozen=True)
class Serving:
    """Devices that generate text together, `tensor` of them a replica; figures are of one device unless said."""

    run: Description
    """Of a layout with `data` and `tensor` alone."""
    weights: str
    """Dtype of the layers' matrices: that of computing, or a key of WEIGHT_WIDTHS."""
    cache: str
    """Dtype of the cache, or int8 or fp8."""
    context: int
    """Tokens of a row."""

    @property
    def tensor(self) -> int:
        return self.run.parallel.tensor

    @property
    def weight_width(self) -> float:
        return WEIGHT_WIDTHS.get(self.weights, self.run.width)

    @cached_property
    def weight_bytes(self) -> float:
        """Of all weights."""
        total, head, hidden = self.run.held_tables() * self.run.width, self.run.head, self.run.sections[-1].hidden
        blocks = [(hidden, block, 1) for block in head.ahead]
        for section in self.run.sections:
            blocks += [(section.hidden, block, len(layers)) for block, layers in section.stack.stored()]
            total += self.run.width * (
                total_size(section.norm.weights(hidden)) if isinstance(section.norm, Norm) else 0
            )
        for width, block, layers in blocks:
            for weight in block.weights(width):
                each = self.weight_width if is_matrix(weight) else self.run.width
                total += layers * each * on_one_device(weight, self.tensor)
        # What leads into a block that predicts further ahead: a matrix of two parts and three norms.
        return total + len(head.ahead) * (2 * hidden**2 / self.tensor + 3 * hidden) * self.run.width

    @cached_property
    def mixers(self) -> list[tuple[Any, int]]:
        """Mixers of the stack, with the number of layers that have them."""
        stack = self.run.sections[-1].stack
        return [(mixer, len(layers)) for block, layers in stack.stored() for mixer in block.mixers().values()]

    def cached(self, mixer: Any, per: str) -> float:
        """Bytes that a mixer keeps for each token or row."""
        leaves = stored_leaves(mixer.cache_leaves(self.run.towers[-1].hidden, self.tensor), self.cache)
        each = ((leaf.size * WIDTHS[str(leaf.dtype)], leaf.axes) for leaf in leaves if leaf.per == per)
        return sum(size / (self.tensor if CUT_AXES.intersection(axes) else 1) for size, axes in each)

    @cached_property
    def token_bytes(self) -> float:
        """Of a token in the cache."""
        return sum(layers * self.cached(mixer, "token") for mixer, layers in self.mixers)

    @cached_property
    def row_bytes(self) -> float:
        """Of a row in the cache beside those of its tokens."""
        return sum(layers * self.cached(mixer, "row") for mixer, layers in self.mixers)

    @property
    def room(self) -> float:
        """Bytes for the cache."""
        return max(0.0, CACHE_SHARE * (self.run.device.usable_gib * GIB - self.weight_bytes))

    @property
    def tokens(self) -> int | None:
        """Of the cache of a replica; None: the cache has no tokens, only rows."""
        return int(self.room // self.token_bytes) if self.token_bytes else None

    @property
    def rows(self) -> int:
        """Of `context` tokens that fit into a replica."""
        return int(self.room // (self.context * self.token_bytes + self.row_bytes))

    def _products(self) -> Iterator[tuple[Matmul, float]]:
        """Of the layers, with the number of layers that have each."""
        for tower in self.run.towers:
            for block in tower.blocks:
                yield from ((matmul, tower.repeats) for matmul in block.matmuls)

    def step_bytes(self, rows: int) -> float:
        """That a step reads in which each row makes one token."""
        read = 0.0
        for one, layers in self._products():
            chosen = 1 - (1 - min(1.0, one.per_token / one.experts)) ** rows
            read += layers * one.local_size(self.tensor) * chosen * self.weight_width
        read += self.run.columns * self.run.towers[-1].hidden * self.run.width
        for mixer, layers in self.mixers:
            window = getattr(mixer, "window", None)
            keys = self.context if window is None else min(self.context, window + 1)
            read += rows * layers * (keys * self.cached(mixer, "token") + self.cached(mixer, "row"))
        return read

    def token_flops(self, keys: float) -> float:
        """Operations on a token that attends to as many keys, without its scores over the vocabulary."""
        products = sum(
            layers * one.local_size(self.tensor) * one.per_token / one.experts for one, layers in self._products()
        )
        hidden = self.run.towers[-1].hidden
        work = sum(layers * mixer.kernel_work(hidden, keys).multiply_adds for mixer, layers in self.mixers)
        return 2 * (products + work / self.tensor)

    def step_seconds(self, rows: int) -> tuple[float, float, float]:
        """Of a step: by bandwidth, by compute, and in collectives."""
        device, hidden = self.run.device, self.run.towers[-1].hidden
        compute = rows * (self.token_flops(self.context) + 2 * self.run.columns * hidden)
        layers = sum(tower.repeats * block.parts for tower in self.run.towers for block in tower.blocks)
        span = Span.along(["tensor"], self.run.sizes, self.run.per_node)
        sums = (layers + 1) * seconds("all-reduce", rows * hidden * self.run.width, span, device)
        return self.step_bytes(rows) / device.bandwidth, compute / device.peak_of(self.run.dtype), sums

    def tokens_per_second(self, rows: int) -> float:
        """Bound of all replicas, with as many rows each."""
        memory, compute, sums = self.step_seconds(rows)
        return self.run.replicas * rows / (max(memory, compute) + sums)

    @property
    def first_token_seconds(self) -> float:
        """Bound of a prompt of `context` tokens."""
        compute = self.context * self.token_flops(self.context / 2) / self.run.device.peak_of(self.run.dtype)
        return max(compute, self.step_bytes(1) / self.run.device.bandwidth)

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        names = ("tensor", "weights", "cache", "context", "weight_bytes", "token_bytes", "row_bytes", "tokens", "rows")
        return {name: getattr(self, name) for name in (*names, "first_token_seconds")} | {
            "replicas": self.run.replicas,
            "tokens_per_second": {rows: self.tokens_per_second(rows) for rows in batches(self.rows)},
        }


def is_matrix(weight: Weight) -> bool:
    """Whether model.quantization is about it: no gain, bias or filter."""
    return len(weight.shape) > 2 or (len(weight.shape) == 2 and "embed" in weight.axes)


def on_one_device(weight: Weight, tensor: int) -> float:
    """Elements on one of that many devices. Heads that they do not divide are whole on each."""
    cut = [size for size, axis in zip(weight.shape, weight.axes, strict=True) if axis in CUT_AXES | {"expert_mlp"}]
    return weight.size / (tensor if any(size % tensor == 0 for size in cut) else 1)


def batches(most: int) -> list[int]:
    """Powers of 4 up to `most` rows, and `most`."""
    return sorted({1, *(4**n for n in range(1, 6) if 4**n < most), min(most, 4**6)} - {0}) if most else []


def servings(run: Description, devices: int, context: int) -> list[Serving]:
    """Every number of devices of a replica that the model can be divided over, with every dtype of weights and cache.

    run: of any layout. Raises UserError for a model that does not generate text, and where no number of devices
    divides it.
    """
    run.model.cache_leaves(1)
    plans = []
    for tensor in (2**n for n in range(run.per_node.bit_length())):
        sizes = {"pipeline": 1, "data": 1, "expert": 1, "context": 1, "tensor": tensor}
        blocks, hidden = run.sections[-1].stack.pattern, run.sections[-1].hidden
        if devices % tensor or any(True for block in blocks for _ in block.mesh_problems(sizes)) or hidden % tensor:
            continue
        parallel = replace(
            run.parallel, **(sizes | {"data": devices // tensor}), data_sharding="replicate", virtual_stages=1
        )
        own = replace(run, parallel=parallel)
        dtypes = [(run.dtype, run.dtype), (run.dtype, "int8"), ("int8", "int8"), ("int4", "int8")]
        plans += [Serving(own, weights, cache, context) for weights, cache in dtypes]
    if not plans:
        raise UserError(f"the model's heads can't be divided over {devices} devices in nodes of {run.per_node}")
    return plans
