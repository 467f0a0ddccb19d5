"""The memory of text generation by formulas: weights on a device, and the tokens of cache beside them."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megajax.config.errors import UserError
from megajax.layers.cache_facts import stored_leaves
from megajax.layers.facts import CUT_AXES, Norm, total_size
from megajax.planning.cost.description import BYTES, Description
from megajax.planning.program.devices import GIB

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
                element = WEIGHT_WIDTHS.get(self.weights, run.width) if matrix else run.width
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
        return max(0.0, CACHE_SHARE * (self.run.device.usable_gib * GIB - self.weight_bytes))

    @property
    def tokens(self) -> int | None:
        """Tokens of cache of a replica; None: the cache has only rows."""
        return int(self.room // self.token_bytes) if self.token_bytes else None

    @property
    def rows(self) -> int:
        """Rows of `context` tokens that fit into a replica."""
        return int(self.room // (self.context * self.token_bytes + self.row_bytes))

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        names = ("tensor", "weights", "cache", "context", "weight_bytes", "token_bytes", "row_bytes", "tokens", "rows")
        return {name: getattr(self, name) for name in names} | {"replicas": self.run.replicas}


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
