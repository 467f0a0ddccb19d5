"""Sends tokens to the devices of their experts and back, within an island: every mesh axis is manual here.

Three ways with the same result. `Gather`: all tokens go to all devices, each computes its experts, and a reduce-scatter
adds up the outputs. `Ragged`: each token goes to the devices of its experts, in a ragged all-to-all. `Capacity`: the
same in parts of equal size. A row is a token for one expert; the rows of a device are sorted by expert.

Rows beyond the room of a device are dropped, from the experts with most rows, so offsets never leave a buffer.

T tokens of a device, D width, k experts of each token; E experts of all, L of a device, n devices; R rows of room.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.layers.expert_facts import buffer_rows

ROW_MULTIPLE = 8
"""Kernels need a multiple of this number of rows."""


class RoutedTokens(NamedTuple):
    """Tokens of a device with the experts that the router chose for them."""

    values: Array
    """[T, D]."""
    weights: Array
    """[T, k]."""
    experts: Array
    """int32 [T, k]; E for no expert."""

    def gathered(self, axes: tuple[str, ...]) -> "RoutedTokens":
        """The tokens of all devices along these mesh axes."""
        return RoutedTokens(*(lax.all_gather(a, axes, tiled=True) for a in self)) if axes else self


class ExchangedTokens(NamedTuple):
    """The rows of a device's experts."""

    rows: Array
    """[R, D], sorted by expert."""
    sizes: Array
    """int32 [L]: rows of each expert."""
    weights: Array
    """float32 [R, 1]."""
    back: Callable[[Array], Array]
    """Weighted outputs of the rows [R, D] -> their sum for each token of this device [T, D]."""
    dropped: Array
    """float32 []: rows that this device dropped."""


class CombinedTokens(NamedTuple):
    """The weighted sum of the experts of each token."""

    values: Array
    """[T, D]."""
    dropped: Array
    """float32 []: rows that this device dropped."""


type Mixture = Callable[[RoutedTokens], CombinedTokens]
"""Dispatch, experts and combination, of all tokens of a device or of a part of them."""


class SortedSlots(NamedTuple):
    """The slots of tokens in rows sorted by group."""

    source: Array
    """int32 [R]: token * k + slot; T * k for an unused row."""
    place: Array
    """int32 [T, k]: the row of a token; R for no row."""
    sizes: Array
    """int32 [G]: rows of each group."""
    dropped: Array
    """float32 []: number of dropped (token, group) pairs."""


class ExchangeOffsets(NamedTuple):
    """Offsets of a ragged exchange with each device, int32 [n]."""

    start: Array
    """First row to send."""
    count: Array
    """Number of rows to send."""
    target: Array
    """First row in the buffer of the receiver."""
    received: Array
    """Number of rows to receive."""


def water_level(sizes: Array, room: Array | int) -> Array:
    """The largest number to which all sizes int32 [..., G] can be clipped so that they add up to at most `room`."""
    ascending = jnp.sort(sizes, axis=-1)
    before = jnp.cumsum(ascending, -1) - ascending
    remaining = jnp.broadcast_to(sizes.shape[-1] - jnp.arange(sizes.shape[-1]), sizes.shape)
    return jnp.max((room - before) // remaining, axis=-1)


def placed(groups: Array, number: int, room: int, limits: Array | None = None) -> SortedSlots:
    """Sort the slots of tokens, int32 [T, k], by group; slots of group `number` and above get no row.

    limits: int32 [G], maximum rows of each group; None: equal limits so that all rows fit into `room`.
    """
    flat = groups.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    requested = jnp.sum(jax.nn.one_hot(flat, number, dtype=bool), axis=0, dtype=jnp.int32)
    limits = water_level(requested, room) if limits is None else limits
    sizes = jnp.minimum(requested, limits)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(flat.size, dtype=jnp.int32), unique_indices=True)
    group = jnp.minimum(flat, number - 1)
    within = rank - (jnp.cumsum(requested) - requested)[group]
    has_row = (flat < number) & (within < sizes[group])
    place = jnp.where(has_row, (jnp.cumsum(sizes) - sizes)[group] + within, room)
    source = jnp.full(room, flat.size, jnp.int32).at[place].set(jnp.arange(flat.size, dtype=jnp.int32), mode="drop")
    return SortedSlots(source, place.reshape(groups.shape), sizes, jnp.sum(requested - sizes).astype(jnp.float32))


@jax.custom_vjp
def permute(x: Array, source: Array, place: Array) -> Array:
    """Rows [R, D] of tokens x [T, D]; zeros for unused rows."""
    return jnp.take(x, source // place.shape[1], axis=0, mode="fill", fill_value=0)


def _permute_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, None, None]:
    # Also a gather; autodiff would use a scatter-add.
    return unpermute(dy, *saved), None, None


permute.defvjp(lambda x, source, place: (permute(x, source, place), (source, place)), _permute_backward)


@jax.custom_vjp
def unpermute(rows: Array, source: Array, place: Array) -> Array:
    """The transpose of `permute`: the sum of each token's rows, in float32, [R, D] -> [T, D]."""
    del source
    token_rows = jnp.take(rows, place, axis=0, mode="fill", fill_value=0)
    return token_rows.astype(jnp.float32).sum(1).astype(rows.dtype)


def _unpermute_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, None, None]:
    return permute(dy, *saved), None, None


unpermute.defvjp(lambda rows, source, place: (unpermute(rows, source, place), (source, place)), _unpermute_backward)


def of_rows(weights: Array, rows: SortedSlots) -> Array:
    """weights [T, k] -> weights of rows [R, 1]; zeros for unused rows."""
    return permute(weights.reshape(-1, 1), rows.source, rows.place.reshape(-1, 1))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def exchange(x: Array, offsets: ExchangeOffsets, back: ExchangeOffsets, room: int, axes: tuple[str, ...]) -> Array:
    """Send rows of x [R, D] by `offsets` -> received rows [room, D], then zeros. back: offsets of the reverse way."""
    del back
    return EXCHANGES[_platform()](x, offsets, room, axes)


def _exchange_forward(
    x: Array, offsets: ExchangeOffsets, back: ExchangeOffsets, room: int, axes: tuple[str, ...]
) -> tuple[Array, tuple]:
    # The shape of an array carries the number of rows: saved integers would become traced.
    return exchange(x, offsets, back, room, axes), (offsets, back, jnp.zeros((x.shape[0], 0), bool))


def _exchange_backward(room: int, axes: tuple[str, ...], saved: tuple, dy: Array) -> tuple[Array, None, None]:
    del room
    offsets, back, like = saved
    return exchange(dy, back, offsets, like.shape[0], axes), None, None


exchange.defvjp(_exchange_forward, _exchange_backward)


def _platform() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "gpu" if device is not None and device.platform != "cpu" else "cpu"


def _ragged_exchange(x: Array, offsets: ExchangeOffsets, room: int, axes: tuple[str, ...]) -> Array:
    out = jnp.zeros((room, x.shape[1]), x.dtype)
    start, count, target, received = (array.astype(jnp.int32) for array in offsets)
    return lax.ragged_all_to_all(x, out, start, count, target, received, axis_name=axes)


def _gathered_exchange(x: Array, offsets: ExchangeOffsets, room: int, axes: tuple[str, ...]) -> Array:
    """For CPUs, where XLA has no ragged all-to-all: all-gather, and each device picks its rows."""
    start, count, target, _ = (lax.all_gather(array, axes) for array in offsets)
    me, everything, out = lax.axis_index(axes), lax.all_gather(x, axes), jnp.zeros((room, x.shape[1]), x.dtype)
    for device in range(everything.shape[0]):
        row = jnp.arange(room) - target[device, me]
        is_local = (row >= 0) & (row < count[device, me])
        rows = jnp.take(everything[device], jnp.where(is_local, row + start[device, me], 0), axis=0)
        out = jnp.where(is_local[:, None], rows, out)
    return out


EXCHANGES: Mapping[str, Callable[..., Array]] = {"gpu": _ragged_exchange, "cpu": _gathered_exchange}


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """How a mixture of experts is sharded over the mesh; each subclass is a way to send tokens to their experts."""

    experts: int
    top_k: int
    axes: tuple[str, ...] = ()
    """Mesh axes that shard the list of experts."""
    token_axes: tuple[str, ...] = ()
    """Mesh axes that shard the matrices of an expert and the tokens (sequence parallelism)."""
    partial_axes: tuple[str, ...] = ()
    """Mesh axes that shard the matrices of an expert but not the tokens: outputs are summed over these."""
    room: float | None = None
    """Rows of a buffer over the mean; None: room for the worst case."""
    chunks: int = 1
    """Parts of the tokens that are processed in sequence."""

    def send(self, tokens: RoutedTokens) -> ExchangedTokens:
        """The rows of this device's experts, from the tokens of all devices."""
        raise NotImplementedError

    def combine(self, sent: ExchangedTokens, outputs: Array) -> CombinedTokens:
        """The weighted outputs [R, D] of the rows, back at their tokens."""
        return CombinedTokens(sent.back(outputs), sent.dropped)

    def run(self, mixture: Mixture, tokens: RoutedTokens) -> CombinedTokens:
        """The mixture of all tokens of this device, in parts."""
        y, dropped = self._in_chunks(mixture, tokens)
        return CombinedTokens(lax.psum(y, self.partial_axes) if self.partial_axes else y, dropped)

    def _in_chunks(self, mixture: Mixture, tokens: RoutedTokens) -> CombinedTokens:
        if self.chunks == 1:
            return mixture(tokens)
        count = tokens.values.shape[0]
        # Padding of the last part goes to no expert.
        parts = [
            jnp.pad(a, ((0, -count % self.chunks), (0, 0)), constant_values=value).reshape(self.chunks, -1, a.shape[1])
            for a, value in zip(tokens, (0, 0, self.experts), strict=True)
        ]

        def part(dropped: Array, part: list[Array]) -> tuple[Array, Array]:
            # Recomputed in its own backward pass; otherwise the rows of all parts would be stored at once.
            y, more = jax.checkpoint(lambda *part: mixture(RoutedTokens(*part)), prevent_cse=False)(*part)
            return dropped + more, y

        dropped, y = lax.scan(part, jnp.zeros(()), parts)
        return CombinedTokens(y.reshape(-1, tokens.values.shape[1])[:count], dropped)

    def devices(self) -> int:
        return lax.axis_size(self.axes) if self.axes else 1

    def requested(self, experts: Array) -> Array:
        """int32 [n, L]: the rows of each expert for these choices int32 [T, k]."""
        counts = jnp.sum(jax.nn.one_hot(experts, self.experts, dtype=bool), axis=(0, 1), dtype=jnp.int32)
        return counts.reshape(self.devices(), -1)

    def rows(self, mean: float, most: int) -> int:
        """Rows of a buffer."""
        return ceil(buffer_rows(mean, most, self.room) / ROW_MULTIPLE) * ROW_MULTIPLE


class Gather(Dispatch):
    """All tokens to all devices."""

    def send(self, tokens: RoutedTokens) -> ExchangedTokens:
        everywhere = self.axes + self.token_axes
        x, weights, experts = tokens.gathered(everywhere)
        (count, k), devices = experts.shape, self.devices()
        local_experts = self.experts // devices
        groups = experts - (lax.axis_index(self.axes) * local_experts if self.axes else 0)
        groups = jnp.where((groups >= 0) & (groups < local_experts), groups, local_experts)
        rows = placed(groups, local_experts, self.rows(count * k / devices, count * min(k, local_experts)))

        def back(y: Array) -> Array:
            y = unpermute(y, rows.source, rows.place)
            return lax.psum_scatter(y, everywhere, tiled=True) if everywhere else y

        x = permute(x, rows.source, rows.place)
        return ExchangedTokens(x, rows.sizes, of_rows(weights, rows), back, rows.dropped)


class Exchange(Dispatch):
    """Sends each token to the devices of its experts; devices that share their matrices first gather their tokens."""

    def run(self, mixture: Mixture, tokens: RoutedTokens) -> CombinedTokens:
        combined = super().run(mixture, tokens.gathered(self.token_axes))
        if not self.token_axes:
            return combined
        return combined._replace(values=lax.psum_scatter(combined.values, self.token_axes, tiled=True))


class Ragged(Exchange):
    """In a ragged all-to-all."""

    def send(self, tokens: RoutedTokens) -> ExchangedTokens:
        (count, k), devices, axes = tokens.experts.shape, self.devices(), self.axes
        local_experts, me = self.experts // devices, lax.axis_index(axes)
        room = self.rows(count * k, count * min(k, local_experts) * devices)
        requested = lax.all_gather(self.requested(tokens.experts), axes)  # [from, to, L]
        # Every device knows all counts, so all agree on the dropped rows: the last ones of the fullest experts.
        limit = water_level(requested.sum(0), room)[None, :, None]
        accepted = jnp.clip(limit - (jnp.cumsum(requested, 0) - requested), 0, requested)
        leaving = -(-count * k // ROW_MULTIPLE) * ROW_MULTIPLE
        rows = placed(tokens.experts, self.experts, leaving, accepted[me].reshape(-1))
        moved = accepted.sum(-1)
        sent_at, got_at = jnp.cumsum(moved, 1) - moved, jnp.cumsum(moved, 0) - moved
        forward = ExchangeOffsets(sent_at[me], moved[me], got_at[me], moved[:, me])
        back = ExchangeOffsets(got_at[:, me], moved[:, me], sent_at[:, me], moved[me])
        received = exchange(permute(tokens.values, rows.source, rows.place), forward, back, room, axes)
        weights = exchange(of_rows(tokens.weights, rows), forward, back, room, axes)

        def returned(y: Array) -> Array:
            return unpermute(exchange(y, back, forward, leaving, axes), rows.source, rows.place)

        return _sorted(received, weights, _senders(accepted[:, me], room), local_experts, returned, rows.dropped)


class Capacity(Exchange):
    """In an all-to-all, with a buffer of fixed size for each pair of devices."""

    def send(self, tokens: RoutedTokens) -> ExchangedTokens:
        (count, k), devices, axes = tokens.experts.shape, self.devices(), self.axes
        local_experts = self.experts // devices
        part = self.rows(count * k / devices, count * min(k, local_experts))
        accepted = self.requested(tokens.experts)
        accepted = jnp.minimum(accepted, water_level(accepted, part)[:, None])
        packed = placed(tokens.experts, self.experts, devices * part, accepted.reshape(-1))
        # From one part after another to parts that begin at multiples of their size.
        sizes = accepted.sum(1)
        begin = jnp.cumsum(sizes) - sizes
        device = jnp.minimum(tokens.experts // local_experts, devices - 1)
        shifted = packed.place - begin[device] + device * part
        place = jnp.where(packed.place < devices * part, shifted, devices * part)
        slots = jnp.arange(place.size, dtype=jnp.int32)
        source = jnp.full(devices * part, place.size, jnp.int32).at[place.reshape(-1)].set(slots, mode="drop")
        rows = packed._replace(source=source, place=place)
        received = lax.all_to_all(permute(tokens.values, rows.source, rows.place), axes, 0, 0, tiled=True)
        weights = lax.all_to_all(of_rows(tokens.weights, rows), axes, 0, 0, tiled=True)
        arrived = lax.all_to_all(accepted, axes, 0, 0, tiled=True)
        boundaries = jnp.cumsum(arrived, axis=1)
        number = jnp.sum(jnp.arange(part)[None, :, None] >= boundaries[:, None], axis=-1)

        def returned(y: Array) -> Array:
            return unpermute(lax.all_to_all(y, axes, 0, 0, tiled=True), rows.source, rows.place)

        return _sorted(received, weights, number.reshape(-1), local_experts, returned, rows.dropped)


WAYS: Mapping[str, type[Dispatch]] = {"gather": Gather, "ragged": Ragged, "capacity": Capacity}


def _sorted(
    received: Array,
    weights: Array,
    experts: Array,
    local_experts: int,
    back: Callable[[Array], Array],
    dropped: Array,
) -> ExchangedTokens:
    """Received rows, sorted by expert. experts: int32 [R], `local_experts` for an unused row; back: as in
    `ExchangedTokens`, for rows in the order in which they were received."""
    rows = placed(experts[:, None], local_experts, received.shape[0])

    def unsorted(y: Array) -> Array:
        return back(permute(y, rows.place[:, 0], rows.source[:, None]))

    x = permute(received, rows.source, rows.place)
    return ExchangedTokens(x, rows.sizes, of_rows(weights, rows), unsorted, dropped)


def _senders(arrived: Array, room: int) -> Array:
    """Experts int32 [R] of rows received in the order of devices, from counts [n, L]; L for an unused row."""
    boundaries = jnp.cumsum(arrived.reshape(-1))
    number = jnp.sum(jnp.arange(room)[:, None] >= boundaries[None], axis=1)
    return jnp.where(number < arrived.size, number % arrived.shape[1], arrived.shape[1])
