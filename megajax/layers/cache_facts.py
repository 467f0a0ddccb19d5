"""What mixers keep of earlier tokens while text is generated; importing this imports neither jax nor flax."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, Literal

from megajax.config.errors import UserError
from megajax.kernels.paged_capability import PagedRequest


@dataclass(frozen=True, slots=True)
class CacheLeaf:
    """An array of the cache, as a layer declares it."""

    name: str
    """Path below the layer: "key"."""
    shape: tuple[int, ...]
    """Of one token, or of one row."""
    axes: tuple[str | None, ...]
    """Logical axes, one for each dimension."""
    per: Literal["token", "row", "memory"] = "token"
    """A leaf for each token is in blocks of the pool; one for each row is of constant size, in a slot of the row; one
    for each token of the section before is made one for a row, as long as that section may be."""
    dtype: str | None = None
    """None: that of the cache."""
    layers: int = 1
    """Layers that are stacked along a leading dimension."""

    @property
    def size(self) -> int:
        """Elements of one token, or of one row, in all layers."""
        return self.layers * prod(self.shape)


SCALE = "_scale"
"""What the name of the scales of an 8-bit leaf has beyond that of the leaf."""
MEMORY_BLOCK = 16
"""Tokens of the section before in a block, as kernels of a paged cache read them."""
EIGHT_BIT = MappingProxyType({"int8": "int8", "fp8": "float8_e4m3fn"})
"""Dtypes of a cache with scales: setting -> dtype of the numbers."""


def stored_leaves(leaves: Sequence[CacheLeaf], dtype: str) -> tuple[CacheLeaf, ...]:
    """Leaves with the dtypes that they are stored in. dtype: of the cache, or int8 or fp8.

    In 8 bits, each leaf of tokens has a float32 scale for each token and head beside it, "key_scale"; what is kept for
    a row stays in float32.
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
    """Key-value heads in the cache: copied to the devices of `tensor` where they are fewer."""
    return max(groups, tensor)


def stack_leaves(stack: Any, hidden: int, tensor: int, memory: int = 0) -> tuple[CacheLeaf, ...]:
    """Those of all layers of a stack config; names are below the stack's blocks: "0.mixer.key".

    hidden: size of the residual stream; tensor: devices that share the heads; memory: most tokens of the section
    before. Raises UserError for a mixer that only trains.
    """
    leaves: list[CacheLeaf] = []
    for number, (block, layers) in enumerate(stack.stored()):
        for place, mixer in block.mixers().items():
            if not hasattr(mixer, "cache_leaves"):
                raise UserError(
                    f"{type(mixer).__name__} cannot generate text: it has no cache_leaves, which say what it keeps of "
                    "earlier tokens, and its module no step; see docs/inference.md"
                )
            mixer_leaves: Sequence[CacheLeaf] = [in_row(leaf, memory) for leaf in mixer.cache_leaves(hidden, tensor)]
            leaves += [replace(leaf, name=f"{number}.{place}.{leaf.name}", layers=len(layers)) for leaf in mixer_leaves]
    return tuple(leaves)


def paged_requests(stack: Any, hidden: int, request: PagedRequest) -> tuple[PagedRequest, ...]:
    """The requests of a stack's mixers to a kernel of a paged cache, with their own settings."""
    mixers = [mixer for block, _ in stack.stored() for mixer in block.mixers().values()]
    return tuple(mixer.paged_request(hidden, request) for mixer in mixers if hasattr(mixer, "paged_request"))


def in_row(leaf: CacheLeaf, memory: int) -> CacheLeaf:
    """A leaf of the section before as one of the row, [blocks, MEMORY_BLOCK, ...]; any other unchanged."""
    if leaf.per != "memory":
        return leaf
    shape = (-(-memory // MEMORY_BLOCK), MEMORY_BLOCK, *leaf.shape)
    return replace(leaf, shape=shape, axes=(None, None, *leaf.axes), per="row")


def below[V](values: Mapping[str, V], prefix: str) -> dict[str, V]:
    """Those whose names begin with the prefix and a dot, by the rest of their names."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}
