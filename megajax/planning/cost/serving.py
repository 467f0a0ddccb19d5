"""Text generation by formulas: weights on a device, the tokens of cache beside them, and bounds of the speed.

A bound is what the memory bandwidth or the matmul peak of the data sheet allows at most. A step reads each weight once,
whatever the number of rows; of experts, those that the rows choose in the mean.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megajax.config.errors import UserError
from megajax.layers.cache_spec import stored_leaves
from megajax.layers.facts import CUT_AXES, Matmul, Norm, total_size
from megajax.planning.cost.description import BYTES, Description
from megajax.planning.cost.traffic import Span, seconds
from megajax.planning.gpus import GIB

CACHE_SHARE = 0.9
"""Share of the memory left by weights, the default of inference.memory_share; steps and fragments use the rest."""
WIDTHS = BYTES | {"int8": 1, "float8_e4m3fn": 1, "int32": 4}
"""Bytes of an element of the cache."""
WEIGHT_WIDTHS = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 128}
"""Bytes of a weight of the layers' matrices with its scales, as model.quantization stores them; scales of outputs are
less than a thousandth."""


@dataclass(frozen=True)
class Serving:
    """Devices that generate text together, `tensor` of them a replica; figures are of one device unless said."""

    run: Description
    """A layout with only `data` and `tensor`."""
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
        """Bytes of an element of the layers' matrices."""
        return WEIGHT_WIDTHS.get(self.weights, self.run.width)

    @cached_property
    def weight_bytes(self) -> float:
        run, ahead, hidden = self.run, self.run.head.ahead, self.run.sections[-1].hidden
        total, blocks = run.held_tables() * run.width, [(hidden, block, 1) for block in ahead]
        for section in run.sections:
            blocks += [(section.hidden, block, len(layers)) for block, layers in section.stack.stored()]
            if isinstance(section.norm, Norm):
                total += run.width * total_size(section.norm.weights(hidden))
        for width, block, layers in blocks:
            for weight in block.weights(width):
                sizes = zip(weight.shape, weight.axes, strict=True)
                # Heads that `tensor` does not divide are whole on each device.
                sharded = any(size % self.tensor == 0 for size, axis in sizes if axis in CUT_AXES | {"expert_mlp"})
                # model.quantization leaves gains, biases and filters as they are.
                matrix = len(weight.shape) > 2 or (len(weight.shape) == 2 and "embed" in weight.axes)
                element = self.weight_width if matrix else run.width
                total += layers * element * (weight.size / (self.tensor if sharded else 1))
        # Before a block that predicts further ahead: a matrix of two parts and three norms.
        return total + len(ahead) * (2 * hidden**2 / self.tensor + 3 * hidden) * run.width

    @cached_property
    def mixers(self) -> list[tuple[Any, int]]:
        """Mixers of the stack, with the number of layers that have them."""
        stack = self.run.sections[-1].stack
        return [(mixer, len(layers)) for block, layers in stack.stored() for mixer in block.mixers().values()]

    def cached(self, mixer: Any, per: str) -> float:
        """Bytes that a mixer keeps for each token or row."""
        leaves = stored_leaves(mixer.cache_leaves(self.run.towers[-1].hidden, self.tensor), self.cache)
        sizes = ((leaf.size * WIDTHS[str(leaf.dtype)], leaf.axes) for leaf in leaves if leaf.per == per)
        return sum(size / (self.tensor if CUT_AXES.intersection(axes) else 1) for size, axes in sizes)

    @cached_property
    def token_bytes(self) -> float:
        return sum(layers * self.cached(mixer, "token") for mixer, layers in self.mixers)

    @cached_property
    def row_bytes(self) -> float:
        """Bytes of a row in the cache beside those of its tokens."""
        return sum(layers * self.cached(mixer, "row") for mixer, layers in self.mixers)

    @property
    def room(self) -> float:
        """Bytes for the cache."""
        return max(0.0, CACHE_SHARE * (self.run.usable_gib * GIB - self.weight_bytes))

    @property
    def tokens(self) -> int | None:
        """Tokens of cache of a replica; None: the cache has only rows."""
        return int(self.room // self.token_bytes) if self.token_bytes else None

    @property
    def rows(self) -> int:
        """Rows of `context` tokens that fit into a replica."""
        return int(self.room // (self.context * self.token_bytes + self.row_bytes))

    @cached_property
    def matmuls(self) -> list[tuple[Matmul, float]]:
        """Matmuls of the layers, with the number of layers that have them."""
        blocks = ((block, tower.repeats) for tower in self.run.towers for block in tower.blocks)
        return [(matmul, layers) for block, layers in blocks for matmul in block.matmuls]

    def step_bytes(self, rows: int) -> float:
        """Bytes that a step reads in which each row generates one token."""
        total = self.run.columns * self.run.towers[-1].hidden * self.run.width
        for matmul, layers in self.matmuls:
            chosen = 1 - (1 - min(1.0, matmul.per_token / matmul.experts)) ** rows
            total += layers * matmul.local_size(self.tensor) * chosen * self.weight_width
        for mixer, layers in self.mixers:
            window = getattr(mixer, "window", None)
            keys = self.context if window is None else min(self.context, window + 1)
            total += rows * layers * (keys * self.cached(mixer, "token") + self.cached(mixer, "row"))
        return total

    def token_flops(self, keys: float) -> float:
        """Operations of the layers on a token that attends to so many keys."""
        hidden, total = self.run.towers[-1].hidden, 0.0
        for matmul, layers in self.matmuls:
            total += layers * matmul.local_size(self.tensor) * matmul.per_token / matmul.experts
        for mixer, layers in self.mixers:
            total += layers * mixer.kernel_work(hidden, keys).multiply_adds / self.tensor
        return 2 * total

    def step_seconds(self, rows: int) -> tuple[float, float, float]:
        """Seconds of a step: by bandwidth, by compute, and in collectives."""
        run, device, hidden = self.run, self.run.device, self.run.towers[-1].hidden
        compute = rows * (self.token_flops(self.context) + 2 * run.columns * hidden)
        parts = sum(tower.repeats * block.parts for tower in run.towers for block in tower.blocks)
        span = Span.along(["tensor"], run.sizes, run.per_node)
        collectives = (parts + 1) * seconds("all-reduce", rows * hidden * run.width, span, device)
        return self.step_bytes(rows) / device.bandwidth, compute / device.peak_of(run.dtype), collectives

    def tokens_per_second(self, rows: int) -> float:
        """Bound of all replicas, with so many rows in each."""
        bandwidth, compute, collectives = self.step_seconds(rows)
        return self.run.replicas * rows / (max(bandwidth, compute) + collectives)

    @property
    def first_token_seconds(self) -> float:
        """Bound of a prompt of `context` tokens."""
        compute = self.context * self.token_flops(self.context / 2) / self.run.device.peak_of(self.run.dtype)
        return max(compute, self.step_bytes(1) / self.run.device.bandwidth)

    def to_dict(self) -> dict[str, Any]:
        """The estimate as printed by --json."""
        names = ("tensor", "weights", "cache", "context", "weight_bytes", "token_bytes", "row_bytes", "tokens", "rows")
        speeds = {rows: self.tokens_per_second(rows) for rows in row_counts(self.rows)}
        figures = {name: getattr(self, name) for name in (*names, "first_token_seconds")}
        return figures | {"replicas": self.run.replicas, "tokens_per_second": speeds}


def row_counts(most: int) -> list[int]:
    """Powers of 4 below `most`, and `most`; at most 4096."""
    return sorted({*(4**n for n in range(6) if 4**n < most), min(most, 4**6)} - {0})


def servings(run: Description, devices: int, context: int) -> list[Serving]:
    """Every number of devices of a replica that divides the model, with every dtype of weights and cache.

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
        sizes["data"] = devices // tensor
        layout = replace(run, parallel=replace(run.parallel, **sizes, data_sharding="replicate", virtual_stages=1))
        dtypes = [(run.dtype, run.dtype), (run.dtype, "int8"), ("int8", "int8"), ("int4", "int8")]
        plans += [Serving(layout, weights, cache, context) for weights, cache in dtypes]
    if not plans:
        raise UserError(f"the model's heads can't be divided over {devices} devices in nodes of {run.per_node}")
    return plans
