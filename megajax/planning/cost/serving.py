"""Text generation by formulas: weights on a device, the tokens of cache beside them, and a bound of the speed.

`expert` devices share the experts of a mixture, each times `tensor` devices; all other weights have a copy on each of
them, which has rows of its own. All replicas step together.

The bound is what the memory bandwidth of the data sheet allows at most. A step reads each weight once, whatever the
number of rows; of experts, those that the rows choose in the mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import floor
from typing import Any

from megajax.config.errors import UserError
from megajax.inference.config import InferenceParallelConfig
from megajax.layers.cache_spec import stored_leaves
from megajax.layers.facts import CUT_AXES, Matmul, Norm, total_size
from megajax.planning.compiled.devices import GIB, MOST_DEVICES
from megajax.planning.cost.description import BYTES, Description

CACHE_SHARE = 0.9
"""Share of the memory left by weights, the default of inference.memory_share; steps and fragments use the rest."""
CHUNK, ROWS = 512, 32
"""Defaults of inference.chunk and inference.rows: the tokens of the largest step of a replica."""
WIDTHS = BYTES | {"int8": 1, "float8_e4m3fn": 1, "int32": 4}
"""Bytes of an element of the cache."""
WEIGHT_WIDTHS = {"int8": 1.0, "fp8": 1.0, "fp8_blocks": 1 + 4 / 128**2, "mxfp8": 1 + 1 / 32, "int4": 0.5 + 4 / 128,
                 "nvfp4": 0.5 + 1 / 16}  # fmt: skip
"""Bytes of a weight of the layers' matrices with its scales, as model.quantization stores them; scales of outputs are
less than a thousandth."""


@dataclass(frozen=True)
class Serving:
    """Devices that generate text together, `tensor` of them a replica; figures are of one device unless said."""

    run: Description
    """A layout with only `data`, `expert` and `tensor`."""
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
    def expert(self) -> int:
        return self.run.parallel.expert

    @property
    def dtypes(self) -> tuple[str, str]:
        """Of weights and cache."""
        return self.weights, self.cache

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
                shards = (self.tensor if sharded else 1) * (self.expert if "expert" in weight.axes else 1)
                total += layers * element * weight.size / shards
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

    @cached_property
    def buffer_bytes(self) -> float:
        """Bytes of temporaries of the largest step by default: buffers of experts, which have room for all tokens of
        all replicas along `expert`, and logits. Of an expert's tensors, programs hold the largest and one of its width;
        of quantized matrices of experts, one in the compute dtype."""
        most = 0.0
        for facts in (facts for tower in self.run.towers for block in tower.blocks for facts in block.experts):
            rows = facts.most_rows(CHUNK + ROWS, self.run.spread) / facts.chunks
            most = max(most, rows * (facts.width + max(facts.tensors.values()) / self.tensor))
        if self.weights in WEIGHT_WIDTHS:
            experts = (matmul for matmul, _ in self.matmuls if matmul.per_token < matmul.experts * matmul.expert_shards)
            most += max((matmul.local_size(self.tensor) / matmul.weights for matmul in experts), default=0.0)
        return most * self.run.width + 2 * ROWS * self.run.columns * 4

    @property
    def memory_share(self) -> float:
        """The value of inference.memory_share: CACHE_SHARE, or less where the temporaries of a step need more than the
        rest."""
        left = self.run.usable_gib * GIB - self.weight_bytes
        return 0.0 if left <= 0 else max(0.0, min(CACHE_SHARE, floor(100 * (1 - self.buffer_bytes / left)) / 100))

    @property
    def room(self) -> float:
        """Bytes for the cache."""
        return max(0.0, self.memory_share * (self.run.usable_gib * GIB - self.weight_bytes))

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
            experts, tokens = matmul.experts * matmul.expert_shards, rows * matmul.expert_shards
            chosen = 1 - (1 - min(1.0, matmul.per_token / experts)) ** tokens
            total += layers * matmul.local_size(self.tensor) * chosen * self.weight_width
        for mixer, layers in self.mixers:
            window = getattr(mixer, "window", None)
            keys = self.context if window is None else min(self.context, window + 1)
            total += rows * layers * (keys * self.cached(mixer, "token") + self.cached(mixer, "row"))
        return total

    @property
    def tokens_per_second(self) -> float:
        """Bound of all replicas, with as many rows in each as fit."""
        return self.run.replicas * self.rows * self.run.device.bandwidth / self.step_bytes(self.rows)

    @property
    def flags(self) -> list[str]:
        """The settings of `serve` with which it has this layout, these dtypes and this length."""
        settings: dict[str, Any] = {"parallel.tensor": self.tensor, "inference.compute": self.run.dtype}
        settings |= {"parallel.expert": self.expert} if self.expert > 1 else {}
        settings |= {"inference.cache_dtype": self.cache} if self.cache != self.run.dtype else {}
        settings |= {"model.quantization": f"{{weights: {self.weights}}}"} if self.weights in WEIGHT_WIDTHS else {}
        settings |= {"inference.length": self.context} if self.context != self.run.sections[-1].length else {}
        settings |= {"inference.memory_share": f"{self.memory_share:g}"} if self.memory_share < CACHE_SHARE else {}
        return [f"--{name}={value}" for name, value in settings.items()]

    def to_dict(self) -> dict[str, Any]:
        """The estimate as printed by --json."""
        names = (
            *("tensor", "expert", "weights", "cache", "context", "weight_bytes", "buffer_bytes", "memory_share"),
            *("token_bytes", "row_bytes", "tokens", "rows", "tokens_per_second", "flags"),
        )
        return {name: getattr(self, name) for name in names} | {"replicas": self.run.replicas}


def dtypes_of(run: Description) -> list[tuple[str, str]]:
    """The dtypes of weights and cache, from the widest on."""
    return [(run.dtype, run.dtype), (run.dtype, "int8"), ("int8", "int8"), ("int4", "int8")]


def demand_room(plans: Sequence[Serving]) -> list[Serving]:
    """The plans with room for a row. Raises UserError if there is none."""
    if fitting := [plan for plan in plans if plan.rows]:
        return fitting
    plan = min(plans, key=lambda plan: plan.weight_bytes)
    run, more = plan.run, 2 * plan.run.devices
    while more < MOST_DEVICES and not any(layout.rows for layout in servings(run, more, plan.context)):
        more *= 2
    row = (plan.context * plan.token_bytes + plan.row_bytes) / GIB
    smallest = f"tensor {plan.tensor} x expert {plan.expert} with {plan.weights} weights"
    needs = f"{plan.weight_bytes / GIB:.1f} GiB of weights"
    raise UserError(
        f"no layout on {run.devices} x {run.device.name} has room for a row of {plan.context:,} tokens, which takes "
        f"{row:.2f} GiB\nThe smallest, {smallest}, has {needs} on each device, of which {run.usable_gib:.1f} GiB are "
        f"usable\nUse {more} devices, GPUs with more memory, or a shorter --context"
    )


def by_preference(fitting: Sequence[Serving]) -> list[Serving]:
    """These plans, those with the widest dtypes of weights and cache first, and of equal ones the fastest."""
    dtypes = dtypes_of(fitting[0].run)
    return sorted(fitting, key=lambda plan: (dtypes.index(plan.dtypes), -plan.tokens_per_second))


def servings(run: Description, devices: int, context: int) -> list[Serving]:
    """Every layout that divides the model, with every dtype of weights and cache, also those that do not fit.

    run: of any layout. Raises UserError for a model that does not generate text, and where no layout divides it.
    """
    run.model.cache_leaves(1)
    plans, blocks, hidden = [], run.sections[-1].stack.pattern, run.sections[-1].hidden
    mixture = any(block.with_experts() for block in blocks)
    shards = [2**n for n in range(devices.bit_length())] if mixture else [1]
    for tensor, expert in product((2**n for n in range(run.per_node.bit_length())), shards):
        sizes = {"pipeline": 1, "data": 1, "expert": expert, "context": 1, "tensor": tensor}
        unfit = any(True for block in blocks for _ in block.mesh_problems(sizes))
        if devices % (tensor * expert) or unfit or hidden % tensor:
            continue
        shares = {"tensor": tensor, "expert": expert, "data": devices // (tensor * expert)}
        layout = replace(run, parallel=InferenceParallelConfig(**shares).layout())
        plans += [Serving(layout, *dtypes, context) for dtypes in dtypes_of(run)]
    if not plans:
        raise UserError(f"the model's heads can't be divided over {devices} devices in nodes of {run.per_node}")
    return plans
