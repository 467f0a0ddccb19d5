"""Cache leaves of mixers for text generation; importing this imports neither jax nor flax."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, Literal

from megajax.config.errors import UserError
from megajax.kernels.paged.capability import PagedRequest


@dataclass(frozen=True, slots=True)
class CacheLeaf:
    """Declaration of an array of the cache."""

    name: str
    """Path below the layer: "key"."""
    shape: tuple[int, ...]
    """Shape for one token, or for one row."""
    axes: tuple[str | None, ...]
    """Logical axes, one for each dimension."""
    per: Literal["token", "row", "memory"] = "token"
    """token: in blocks of the pool; row: constant size, in the slot of a row; memory: per token of the preceding
    section, stored as a row leaf of that section's maximum length."""
    dtype: str | None = None
    """Dtype of the leaf; None: the dtype of the cache."""
    layers: int = 1
    """Layers stacked along a leading dimension."""
    window: int | None = None
    """Of a leaf per token: the leaf is read for the last `window` positions before a query only; None: for all."""

    @property
    def size(self) -> int:
        """Elements of one token, or of one row, in all layers."""
        return self.layers * prod(self.shape)


SCALE = "_scale"
"""Suffix of the name of an 8-bit leaf's scales."""
LATEST = "latest."
"""Prefix of the names of leaves with the latest inputs of a recurrence, see `latest_leaves`."""
POSITION = f"{LATEST}position"
"""The leaf of their positions."""
MEMORY_BLOCK = 16
"""Tokens of the preceding section per block of a paged cache."""
EIGHT_BIT = MappingProxyType({"int8": "int8", "fp8": "float8_e4m3fn"})
"""Dtypes of a cache with scales: setting -> dtype of the numbers."""


def stored_leaves(leaves: Sequence[CacheLeaf], dtype: str) -> tuple[CacheLeaf, ...]:
    """Leaves with their storage dtypes. dtype: of the cache; int8 and fp8 add scales.

    In 8 bits, each token leaf has a float32 scale per token and head, "key_scale"; row leaves stay in float32.
    """
    stored = []
    for leaf in leaves:
        if leaf.dtype is not None or dtype not in EIGHT_BIT:
            stored.append(replace(leaf, dtype=leaf.dtype or dtype))
        elif leaf.per == "row":
            stored.append(replace(leaf, dtype="float32"))
        else:
            scale = replace(leaf, name=leaf.name + SCALE, shape=leaf.shape[:-1], axes=leaf.axes[:-1], dtype="float32")
            stored += [replace(leaf, dtype=EIGHT_BIT[dtype]), scale]
    return tuple(stored)


def cached_heads(groups: int, tensor: int) -> int:
    """Key-value heads in the cache, with copies if there are fewer than devices of `tensor`."""
    return max(groups, tensor)


def stack_leaves(stack: Any, hidden: int, tensor: int, memory: int = 0, drafts: int = 0) -> tuple[CacheLeaf, ...]:
    """The cache leaves of all layers of a stack config, named by block: "0.mixer.key".

    hidden: width of the residual stream; tensor: devices that share the heads; memory: maximum number of tokens of the
    preceding section; drafts: most tokens of a draft. Raises UserError for a mixer without `cache_leaves`, and for
    drafts of a mixer whose state cannot go back.
    """
    leaves: list[CacheLeaf] = []
    for number, (block, layers) in enumerate(stack.stored()):
        for place, mixer in block.mixers().items():
            if not hasattr(mixer, "cache_leaves"):
                raise UserError(
                    f"{type(mixer).__name__} cannot generate text: its config needs a method cache_leaves, and its "
                    "module a method step; see docs/inference.md"
                )
            mixer_leaves = [in_row(leaf, memory) for leaf in mixer.cache_leaves(hidden, tensor)]
            mixer_leaves += latest_leaves(mixer, hidden, tensor, drafts)
            leaves += [replace(leaf, name=f"{number}.{place}.{leaf.name}", layers=len(layers)) for leaf in mixer_leaves]
    return tuple(leaves)


def latest_leaves(mixer: Any, hidden: int, tensor: int, drafts: int) -> list[CacheLeaf]:
    """Leaves with what the recurrence of a mixer read for the latest tokens of a decoding row, up to 1 + `drafts`, and
    their positions: its state is that before these tokens until the next step, whose first position tells how many of
    them are part of the row. None without drafts, and for a mixer whose steps change no state per row.

    Raises UserError for a mixer with a state whose config has no method `step_inputs`.
    """
    if not drafts or all(leaf.per != "row" for leaf in mixer.cache_leaves(hidden, tensor)):
        return []
    if not hasattr(mixer, "step_inputs"):
        raise UserError(
            f"inference.speculate={drafts}: {type(mixer).__name__} has a state per request, from which no token can be "
            "taken back, since its config has no method step_inputs; see docs/inference.md. Set inference.speculate=0"
        )
    position = CacheLeaf(POSITION, (1 + drafts,), (None,), per="row", dtype="int32")
    inputs = [(leaf, (1 + drafts, *leaf.shape), (None, *leaf.axes)) for leaf in mixer.step_inputs(hidden, tensor)]
    latest = [CacheLeaf(LATEST + leaf.name, shape, axes, per="row", dtype="float32") for leaf, shape, axes in inputs]
    return [position, *latest] if latest else []


def row_axes(mixer: Any) -> dict[str, tuple[str | None, ...]]:
    """The logical axes of the row leaves of a mixer, by name, also of those for drafts."""
    return {leaf.name: leaf.axes for leaf in (*mixer.cache_leaves(0, 1), *latest_leaves(mixer, 0, 1, 1))}


def paged_requests(stack: Any, hidden: int, request: PagedRequest) -> tuple[PagedRequest, ...]:
    """The requests of mixers of a stack to a kernel of a paged cache, with their own settings."""
    mixers = [mixer for block, _ in stack.stored() for mixer in block.mixers().values()]
    return tuple(mixer.paged_request(hidden, request) for mixer in mixers if hasattr(mixer, "paged_request"))


def in_row(leaf: CacheLeaf, memory: int) -> CacheLeaf:
    """A memory leaf as a row leaf, [blocks, MEMORY_BLOCK, ...]; any other leaf unchanged."""
    if leaf.per != "memory":
        return leaf
    shape = (-(-memory // MEMORY_BLOCK), MEMORY_BLOCK, *leaf.shape)
    return replace(leaf, shape=shape, axes=(None, None, *leaf.axes), per="row")


def below[V](values: Mapping[str, V], prefix: str) -> dict[str, V]:
    """The values below a dotted prefix, by the rest of their names."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}
