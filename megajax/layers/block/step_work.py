"""Multiply-adds that a training step needs: the one count behind the FLOPs of plans, banners, metrics and reports.

A product of n multiply-adds per token, x W with a matrix W, is 2 n FLOPs in the forward pass, and in the backward pass

- 2 n more for the gradient of x, if x depends on a trained weight: of this layer, or of one before it;
- 2 n more for the gradient of W, if W is trained.

So a model that is trained in full needs 6 n, as in PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B: 6 N +
12 L H Q T per token), and one with low-rank adapters about 4 n. Scores and values of attention, and recurrences, have
no weights: their backward pass costs twice the forward pass, if their inputs depend on a trained weight. n counts each
matrix that a token is multiplied by: top_k experts of a mixture, shared experts, routers, latents (not absorbed), heads
of multi-token prediction, logits, adapters. Not counted: looked-up tables, norms, softmax, short convolutions of state
spaces, dropout, the optimizer, and whatever is computed again (recomputation). Layouts change nothing.

Attention has two conventions, which differ only in the pairs of positions: `causal` counts those that the mask leaves
(causal, window, chunk), `full` all of them, as PaLM does. A row counts as one document in both: how many documents are
packed into a row depends on the data, and the count is known before it. `megatron` is the formula of Megatron-LM's
throughput line (num_floating_point_operations, core r0.9 and later): half of the pairs of causal
attention whatever its window, no routers, a gain for each element of latents, and all weights trained.

Importing this imports neither jax nor flax.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from megajax.layers.block.config import BlockConfig
from megajax.layers.facts import Matmul, Weight, prefixed
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.multiply_adds import CountedDifferently, VisibleKeys

PASSES = 3
"""A forward pass, and a backward pass of twice its operations."""
OPERANDS = ("query", "key", "value")
ALL = ("*",)
"""The default of optimizer.trainable: with adapters, it stands for them alone."""
NOT_MULTIPLIED = ("bias", "gain", "kernel", "table", "a_log")
"""Ends of the names of weights that may have two dimensions, but are not factors of a matrix product."""


class Training(NamedTuple):
    """Which weights are trained."""

    patterns: tuple[str, ...] = ALL
    """Of names, as optimizer.trainable."""
    lora: LoRAConfig | None = None
    megatron: bool = False
    """Count by Megatron-LM's formula."""

    @property
    def names(self) -> bool:
        """Whether it depends on the names of weights."""
        return self.patterns not in (ALL, ()) or self.lora is not None

    def trains(self, weight: Weight) -> bool:
        """Whether the weight itself is trained."""
        if self.patterns == ALL:
            return self.lora is None
        return any(fnmatchcase(weight.name, pattern) for pattern in self.patterns)

    def share(self, weights: Sequence[Weight]) -> float:
        """Share of the multiply-adds of these matrices whose matrix is trained."""
        sizes = [(weight.size * weight.active_share, self.trains(weight)) for weight in weights]
        return sum(size for size, trained in sizes if trained) / (sum(size for size, _ in sizes) or 1)

    def adapter(self, weight: Weight) -> tuple[int, int]:
        """Elements of A and of B of the weight's adapter; 0 without one."""
        if self.lora is None or not factors((weight,)):
            return 0, 0
        adapted = any(fnmatchcase(weight.name, target) for target in self.lora.targets)
        return self.lora.products(weight.shape, weight.axes) if adapted else (0, 0)

    def changes(self, weight: Weight) -> bool:
        """Whether the weight or its adapter is trained."""
        return self.trains(weight) or any(self.adapter(weight))

    def adapters(self, weights: Sequence[Weight], reached: bool) -> float:
        """Multiply-adds of the adapters of matrices whose input depends on trained weights or not."""
        sides = ((weight.active_share, *self.adapter(weight)) for weight in weights)
        return sum(share * (a * (2 + reached) + 3 * b) for share, a, b in sides)


class Reached(NamedTuple):
    """What depends on a trained weight, so that its gradient is needed."""

    stream: bool = False
    """The residual stream."""
    memory: bool = False
    """The output of the section before, which cross-attention reads."""


class Count(NamedTuple):
    """Multiply-adds of forward and backward pass."""

    once: float = 0.0
    """Per position, without attention."""
    pairs: tuple[tuple[VisibleKeys, float], ...] = ()
    """Mask -> per pair that it leaves."""

    def plus(self, other: "Count", times: float = 1) -> "Count":
        pairs = dict(self.pairs)
        for visible, number in other.pairs:
            pairs[visible] = pairs.get(visible, 0.0) + times * number
        return Count(self.once + times * other.once, tuple(pairs.items()))


def factors(weights: Sequence[Weight]) -> tuple[Weight, ...]:
    """The weights that matmuls multiply tokens by."""
    matrices = (weight for weight in weights if len(weight.shape) - ("expert" in weight.axes) > 1)
    return tuple(weight for weight in matrices if not weight.name.endswith(NOT_MULTIPLIED))


@lru_cache(maxsize=4096)
def block_work(
    block: BlockConfig, hidden: int, ratio: float, path: str, training: Training, reached: Reached
) -> tuple[Count, Reached]:
    """Multiply-adds of a block, and what depends on trained weights after it.

    ratio: positions of the section before, for each of its own. path: of the block in the model, "" if names do not
    matter.
    """
    total, norms = Count(), block.norms()
    for name, layer in block.layers().items():
        norm = f"{name}_norm" if f"{name}_norm" in norms else "norm"
        if norm in norms and any(map(training.trains, prefixed(f"{path}.{norm}", block.norm_weights(hidden)))):
            reached = reached._replace(stream=True)
        weights, crossing = prefixed(f"{path}.{name}", layer.weights(hidden)), name == "cross"
        matmuls = layer.matmuls_reading(hidden, ratio) if crossing else layer.matmuls(hidden)
        count, inside = _layer(weights, matmuls, training, reached, ratio if crossing else None)
        work = layer.multiply_adds(hidden)
        recurring = 0.0 if crossing else work.per_token - sum(matmul.multiply_adds for matmul in matmuls)
        if training.megatron and isinstance(layer, CountedDifferently):
            recurring += layer.megatron_surplus(hidden)
        query, key, value = (_operand(operand, weights, training, reached, crossing) for operand in OPERANDS)
        # The backward pass of attention: gradients of values, of probabilities, of queries and of keys.
        pairs = work.per_pair * (1 + (value + (query or key) + query + key) / 2) * (ratio if crossing else 1)
        once = count + recurring * (1 + 2 * any((query, key, value)))
        total = total.plus(Count(once, ((work.visible, pairs),) if pairs else ()))
        reached = reached._replace(stream=inside)
    return total, reached


def _stage(weight: Weight) -> int:
    """Place of a weight in its layer: 0 multiplies the residual stream, 2 writes to it, 1 is between them."""
    if weight.axes[-1] == "embed":
        return 2
    return 0 if "embed" in weight.axes else 1


def _operand(operand: str, weights: Sequence[Weight], training: Training, reached: Reached, crossing: bool) -> bool:
    """Whether queries, keys or values depend on trained weights; other states of a mixer: all of them."""
    if reached.memory if crossing and operand != "query" else reached.stream:
        return True
    before = (weight for weight in weights if _stage(weight) < 2 and training.changes(weight))
    return any(operand in weight.name or not any(name in weight.name for name in OPERANDS) for weight in before)


def _layer(
    weights: Sequence[Weight], matmuls: Sequence[Matmul], training: Training, reached: Reached, ratio: float | None
) -> tuple[float, bool]:
    """Multiply-adds of a layer's matrices and adapters, and whether its output depends on trained weights.

    ratio: of cross-attention, as in `block_work`; otherwise None.
    """
    matrices, products = factors(weights), sum(matmul.multiply_adds for matmul in matmuls)
    read = reached.stream or (ratio is not None and reached.memory)
    stages = {_stage(weight) for weight in weights if training.changes(weight)}
    forward = needed = adapters = 0.0
    for weight in matrices:
        of_memory = ratio is not None and weight.name.endswith((".key", ".value"))
        rows = weight.active_share * (ratio if ratio is not None and of_memory else 1.0)
        stream = reached.memory if of_memory else reached.stream if _stage(weight) == 0 else read
        gradient = stream or any(stage < _stage(weight) for stage in stages)
        forward += rows * weight.size
        needed += rows * weight.size * (gradient + training.trains(weight))
        adapters += rows / weight.active_share * training.adapters((weight,), gradient)
    # A user's layer may multiply by other weights than `factors` finds.
    return products * (1 + needed / (forward or 1)) + adapters, read or bool(stages)
