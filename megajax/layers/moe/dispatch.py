"""Sends tokens to the devices of their experts and back, within an island: every mesh axis is manual here.

Three ways with the same result. `gather`: all tokens go to all devices, each computes its experts, and a reduce-scatter
adds up the outputs. `ragged`: each token goes to the devices of its experts, in a ragged all-to-all. `capacity`: the
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
from megajax.layers.moe.router import Routing

type Apply = Callable[[Array, Array, Array], Array]
"""(rows [R, D] sorted by expert, sizes int32 [L], weights float32 [R, 1]) -> weighted outputs [R, D] of the experts."""

ROW_MULTIPLE = 8
"""Kernels need a multiple of this number of rows."""


class Rows(NamedTuple):
    """The tokens of rows, sorted by group."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """How a mixture of experts is sharded over the mesh."""

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

    def devices(self) -> int:
        return lax.axis_size(self.axes) if self.axes else 1

    def rows(self, mean: float, most: int) -> int:
        """Rows of a buffer."""
        return ceil(buffer_rows(mean, most, self.room) / ROW_MULTIPLE) * ROW_MULTIPLE


def water_level(sizes: Array, room: Array | int) -> Array:
    """The largest number to which all sizes int32 [..., G] can be clipped so that they add up to at most `room`."""
    ascending = jnp.sort(sizes, axis=-1)
    before = jnp.cumsum(ascending, -1) - ascending
    remaining = jnp.broadcast_to(sizes.shape[-1] - jnp.arange(sizes.shape[-1]), sizes.shape)
    return jnp.max((room - before) // remaining, axis=-1)


def placed(groups: Array, number: int, room: int, limits: Array | None = None) -> Rows:
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
    return Rows(source, place.reshape(groups.shape), sizes, jnp.sum(requested - sizes).astype(jnp.float32))


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


def of_rows(weights: Array, rows: Rows) -> Array:
    """weights [T, k] -> weights of rows [R, 1]; zeros for unused rows."""
    return permute(weights.reshape(-1, 1), rows.source, rows.place.reshape(-1, 1))


def gather(x: Array, routing: Routing, apply: Apply, dispatch: Dispatch) -> tuple[Array, Array]:
    """All tokens to all devices: (the experts' outputs [T, D], tokens dropped by this device's experts)."""
    everywhere = dispatch.axes + dispatch.token_axes
    if everywhere:
        x, weights, experts = (lax.all_gather(a, everywhere, tiled=True) for a in (x, *routing))
        routing = Routing(weights, experts)
    (tokens, k), devices = routing.experts.shape, dispatch.devices()
    local_experts = dispatch.experts // devices
    groups = routing.experts - (lax.axis_index(dispatch.axes) * local_experts if dispatch.axes else 0)
    groups = jnp.where((groups >= 0) & (groups < local_experts), groups, local_experts)
    rows = placed(groups, local_experts, dispatch.rows(tokens * k / devices, tokens * min(k, local_experts)))
    y = apply(permute(x, rows.source, rows.place), rows.sizes, of_rows(routing.weights, rows))
    y = unpermute(y, rows.source, rows.place)
    return lax.psum_scatter(y, everywhere, tiled=True) if everywhere else y, rows.dropped


def ragged(x: Array, routing: Routing, apply: Apply, dispatch: Dispatch) -> tuple[Array, Array]:
    """Each token to the devices of its experts: (outputs [T, D], tokens of this device that were dropped)."""
    (tokens, k), devices, axes = routing.experts.shape, dispatch.devices(), dispatch.axes
    local_experts, me = dispatch.experts // devices, lax.axis_index(axes)
    room = dispatch.rows(tokens * k, tokens * min(k, local_experts) * devices)
    counts = jnp.sum(jax.nn.one_hot(routing.experts, dispatch.experts, dtype=bool), axis=(0, 1), dtype=jnp.int32)
    requested = lax.all_gather(counts.reshape(devices, local_experts), axes)  # [from, to, L]
    # Every device knows all counts, so all agree on the dropped rows: the last ones of the fullest experts.
    limit = water_level(requested.sum(0), room)[None, :, None]
    accepted = jnp.clip(limit - (jnp.cumsum(requested, 0) - requested), 0, requested)
    leaving = -(-tokens * k // ROW_MULTIPLE) * ROW_MULTIPLE
    rows = placed(routing.experts, dispatch.experts, leaving, accepted[me].reshape(-1))
    moved = accepted.sum(-1)
    sent_at, got_at = jnp.cumsum(moved, 1) - moved, jnp.cumsum(moved, 0) - moved
    forward = ExchangeOffsets(sent_at[me], moved[me], got_at[me], moved[:, me])
    back = ExchangeOffsets(got_at[:, me], moved[:, me], sent_at[:, me], moved[me])
    received = exchange(permute(x, rows.source, rows.place), forward, back, room, axes)
    weights = exchange(of_rows(routing.weights, rows), forward, back, room, axes)
    y = _computed(received, weights, _senders(accepted[:, me], room), local_experts, apply)
    y = exchange(y, back, forward, leaving, axes)
    return unpermute(y, rows.source, rows.place), rows.dropped


def capacity(x: Array, routing: Routing, apply: Apply, dispatch: Dispatch) -> tuple[Array, Array]:
    """Exchange like `ragged`, but with a buffer of fixed size for each pair of devices."""
    (tokens, k), devices, axes = routing.experts.shape, dispatch.devices(), dispatch.axes
    local_experts = dispatch.experts // devices
    part = dispatch.rows(tokens * k / devices, tokens * min(k, local_experts))
    counts = jnp.sum(jax.nn.one_hot(routing.experts, dispatch.experts, dtype=bool), axis=(0, 1), dtype=jnp.int32)
    accepted = counts.reshape(devices, local_experts)
    accepted = jnp.minimum(accepted, water_level(accepted, part)[:, None])
    packed = placed(routing.experts, dispatch.experts, devices * part, accepted.reshape(-1))
    # From one part after another to parts that begin at multiples of their size.
    sizes = accepted.sum(1)
    begin = jnp.cumsum(sizes) - sizes
    device = jnp.minimum(routing.experts // local_experts, devices - 1)
    shifted = packed.place - begin[device] + device * part
    place = jnp.where(packed.place < devices * part, shifted, devices * part)
    slots = jnp.arange(place.size, dtype=jnp.int32)
    source = jnp.full(devices * part, place.size, jnp.int32).at[place.reshape(-1)].set(slots, mode="drop")
    rows = packed._replace(source=source, place=place)
    received = lax.all_to_all(permute(x, rows.source, rows.place), axes, 0, 0, tiled=True)
    weights = lax.all_to_all(of_rows(routing.weights, rows), axes, 0, 0, tiled=True)
    arrived = lax.all_to_all(accepted, axes, 0, 0, tiled=True)
    boundaries = jnp.cumsum(arrived, axis=1)
    number = jnp.sum(jnp.arange(part)[None, :, None] >= boundaries[:, None], axis=-1)
    y = _computed(received, weights, number.reshape(-1), local_experts, apply)
    y = lax.all_to_all(y, axes, 0, 0, tiled=True)
    return unpermute(y, rows.source, rows.place), rows.dropped


def _computed(rows_in: Array, weights: Array, experts: Array, local_experts: int, apply: Apply) -> Array:
    """Outputs of received rows, in the same order. experts: int32 [R], `local_experts` for an unused row."""
    rows = placed(experts[:, None], local_experts, rows_in.shape[0])
    y = apply(permute(rows_in, rows.source, rows.place), rows.sizes, of_rows(weights, rows))
    return permute(y, rows.place[:, 0], rows.source[:, None])


def _senders(arrived: Array, room: int) -> Array:
    """Experts int32 [R] of rows received in the order of devices, from counts [n, L]; L for an unused row."""
    boundaries = jnp.cumsum(arrived.reshape(-1))
    number = jnp.sum(jnp.arange(room)[:, None] >= boundaries[None], axis=1)
    return jnp.where(number < arrived.size, number % arrived.shape[1], arrived.shape[1])


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

WAYS: Mapping[str, Callable[..., tuple[Array, Array]]] = {"gather": gather, "ragged": ragged, "capacity": capacity}


def dispatched(way: str, x: Array, routing: Routing, apply: Apply, dispatch: Dispatch) -> tuple[Array, Array]:
    """Weighted sum of the experts of each token [T, D], and the number of rows this device dropped, float32 []."""
    send = WAYS[way]
    if dispatch.token_axes and way != "gather":
        x, weights, experts = (lax.all_gather(a, dispatch.token_axes, tiled=True) for a in (x, *routing))
        y, dropped = _chunked(send, x, Routing(weights, experts), apply, dispatch)
        return lax.psum_scatter(y, dispatch.token_axes, tiled=True), dropped
    y, dropped = _chunked(send, x, routing, apply, dispatch)
    return lax.psum(y, dispatch.partial_axes) if dispatch.partial_axes else y, dropped


def _chunked(send: Callable, x: Array, routing: Routing, apply: Apply, dispatch: Dispatch) -> tuple[Array, Array]:
    if dispatch.chunks == 1:
        return send(x, routing, apply, dispatch)
    short = -x.shape[0] % dispatch.chunks
    # Padding of the last part goes to no expert.
    filled = zip((x, *routing), (0, 0, dispatch.experts), strict=True)
    parts = [
        jnp.pad(a, ((0, short), (0, 0)), constant_values=value).reshape(dispatch.chunks, -1, a.shape[1])
        for a, value in filled
    ]

    def part(dropped: Array, part: list[Array]) -> tuple[Array, Array]:
        # Recomputed in its own backward pass; otherwise the rows of all parts would be stored at once.
        y, more = jax.checkpoint(lambda x, w, e: send(x, Routing(w, e), apply, dispatch), prevent_cse=False)(*part)
        return dropped + more, y

    dropped, y = lax.scan(part, jnp.zeros(()), parts)
    return y.reshape(-1, x.shape[1])[: x.shape[0]], dropped
