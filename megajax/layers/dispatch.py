"""Brings tokens to the devices of their experts and back, within an island: every mesh axis is manual here.

Three ways, one result. `gather`: all tokens go to all devices, each computes its experts, and partial sums go back in a
reduce-scatter. `ragged`: each token goes to the devices of its experts, in as many rows as there are. `capacity`: the
same in parts of equal size. A row is a token for one expert; rows of a device are sorted by expert.

Rows beyond the room of a device are dropped, from the experts with most rows: offsets never leave a buffer.

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
from megajax.layers.router import Routing

type Apply = Callable[[Array, Array, Array], Array]
"""(rows [R, D] sorted by expert, sizes int32 [L], weights float32 [R, 1]) -> weighted outputs [R, D] of the experts."""

ROW_MULTIPLE = 8
"""Kernels take numbers of rows that are multiples of this."""


class Rows(NamedTuple):
    """Which token each row is."""

    source: Array
    """int32 [R]: token * k + slot; T * k where there is no row."""
    place: Array
    """int32 [T, k]: the row; R for none."""
    sizes: Array
    """int32 [G]: rows of each group."""
    dropped: Array
    """float32 []: tokens of a group that have no row, each time."""


class Sent(NamedTuple):
    """Offsets of a ragged exchange, int32 [n] each, for each device."""

    start: Array
    """First row to send."""
    count: Array
    """Number of rows to send."""
    target: Array
    """Where they go in the receiver's buffer."""
    received: Array
    """Number of rows that come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """How a mixture of experts is spread over the mesh."""

    experts: int
    top_k: int
    axes: tuple[str, ...] = ()
    """Mesh axes over which experts are spread."""
    cut: tuple[str, ...] = ()
    """Mesh axes over which matrices of an expert are cut, and so are the tokens: with sequence parallelism."""
    partial: tuple[str, ...] = ()
    """Mesh axes over which matrices of an expert are cut, and tokens are not: outputs are added up over these."""
    room: float | None = None
    """Rows there is room for, over the mean; None: for all."""
    chunks: int = 1
    """Parts of the tokens that go one after another."""

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
    """Sorts slots int32 [T, k] of tokens by group; those of group `number` and above get no row.

    limits: int32 [G], the most rows of each group; None: such that all of them fit into `room`.
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
def spread(x: Array, source: Array, place: Array) -> Array:
    """Rows [R, D] of tokens x [T, D]; zeros where there is no row."""
    return jnp.take(x, source // place.shape[1], axis=0, mode="fill", fill_value=0)


def _spread_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, None, None]:
    # A gather as well: autodiff makes a scatter-add of it.
    return collect(dy, *saved), None, None


spread.defvjp(lambda x, source, place: (spread(x, source, place), (source, place)), _spread_backward)


@jax.custom_vjp
def collect(rows: Array, source: Array, place: Array) -> Array:
    """The transpose of `spread`: the sum of each token's rows, added up in float32, [R, D] -> [T, D]."""
    del source
    token_rows = jnp.take(rows, place, axis=0, mode="fill", fill_value=0)
    return token_rows.astype(jnp.float32).sum(1).astype(rows.dtype)


def _collect_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, None, None]:
    return spread(dy, *saved), None, None


collect.defvjp(lambda rows, source, place: (collect(rows, source, place), (source, place)), _collect_backward)


def of_rows(weights: Array, rows: Rows) -> Array:
    """weights [T, k] of rows, [R, 1]; zeros where there is no row."""
    return spread(weights.reshape(-1, 1), rows.source, rows.place.reshape(-1, 1))


def gather(x: Array, routing: Routing, apply: Apply, dispatch: Dispatch) -> tuple[Array, Array]:
    """All tokens to all devices: (the experts' outputs [T, D], tokens dropped by this device's experts)."""
    everywhere = dispatch.axes + dispatch.cut
    if everywhere:
        x, weights, experts = (lax.all_gather(a, everywhere, tiled=True) for a in (x, *routing))
        routing = Routing(weights, experts)
    (tokens, k), devices = routing.experts.shape, dispatch.devices()
    local_experts = dispatch.experts // devices
    groups = routing.experts - (lax.axis_index(dispatch.axes) * local_experts if dispatch.axes else 0)
    groups = jnp.where((groups >= 0) & (groups < local_experts), groups, local_experts)
    rows = placed(groups, local_experts, dispatch.rows(tokens * k / devices, tokens * min(k, local_experts)))
    y = apply(spread(x, rows.source, rows.place), rows.sizes, of_rows(routing.weights, rows))
    y = collect(y, rows.source, rows.place)
    return lax.psum_scatter(y, everywhere, tiled=True) if everywhere else y, rows.dropped


def ragged(x: Array, routing: Routing, apply: Apply, dispatch: Dispatch) -> tuple[Array, Array]:
    """Each token to the devices of its experts: (outputs [T, D], tokens of this device that were dropped)."""
    (tokens, k), devices, axes = routing.experts.shape, dispatch.devices(), dispatch.axes
    local_experts, me = dispatch.experts // devices, lax.axis_index(axes)
    room = dispatch.rows(tokens * k, tokens * min(k, local_experts) * devices)
    counts = jnp.sum(jax.nn.one_hot(routing.experts, dispatch.experts, dtype=bool), axis=(0, 1), dtype=jnp.int32)
    requested = lax.all_gather(counts.reshape(devices, local_experts), axes)  # [from, to, L]
    # Every device knows what all send, so that all agree on what is dropped: the last rows of the fullest experts.
    limit = water_level(requested.sum(0), room)[None, :, None]
    accepted = jnp.clip(limit - (jnp.cumsum(requested, 0) - requested), 0, requested)
    leaving = -(-tokens * k // ROW_MULTIPLE) * ROW_MULTIPLE
    rows = placed(routing.experts, dispatch.experts, leaving, accepted[me].reshape(-1))
    moved = accepted.sum(-1)
    sent_at, got_at = jnp.cumsum(moved, 1) - moved, jnp.cumsum(moved, 0) - moved
    forward = Sent(sent_at[me], moved[me], got_at[me], moved[:, me])
    back = Sent(got_at[:, me], moved[:, me], sent_at[:, me], moved[me])
    received = exchange(spread(x, rows.source, rows.place), forward, back, room, axes)
    weights = exchange(of_rows(routing.weights, rows), forward, back, room, axes)
    y = _computed(received, weights, _senders(accepted[:, me], room), local_experts, apply)
    y = exchange(y, back, forward, leaving, axes)
    return collect(y, rows.source, rows.place), rows.dropped


def capacity(x: Array, routing: Routing, apply: Apply, dispatch: Dispatch) -> tuple[Array, Array]:
    """As `ragged`, in parts of equal size for each pair of devices, each with room of its own."""
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
    received = lax.all_to_all(spread(x, rows.source, rows.place), axes, 0, 0, tiled=True)
    weights = lax.all_to_all(of_rows(routing.weights, rows), axes, 0, 0, tiled=True)
    arrived = lax.all_to_all(accepted, axes, 0, 0, tiled=True)
    boundaries = jnp.cumsum(arrived, axis=1)
    number = jnp.sum(jnp.arange(part)[None, :, None] >= boundaries[:, None], axis=-1)
    y = _computed(received, weights, number.reshape(-1), local_experts, apply)
    y = lax.all_to_all(y, axes, 0, 0, tiled=True)
    return collect(y, rows.source, rows.place), rows.dropped


def _computed(rows_in: Array, weights: Array, experts: Array, local_experts: int, apply: Apply) -> Array:
    """Outputs of rows that came from other devices, in that order. experts: int32 [R] of each, `own` for none."""
    rows = placed(experts[:, None], local_experts, rows_in.shape[0])
    y = apply(spread(rows_in, rows.source, rows.place), rows.sizes, of_rows(weights, rows))
    return spread(y, rows.place[:, 0], rows.source[:, None])


def _senders(arrived: Array, room: int) -> Array:
    """Experts int32 [R] of rows that came one device's after another, from counts [n, L]; L where there is no row."""
    boundaries = jnp.cumsum(arrived.reshape(-1))
    number = jnp.sum(jnp.arange(room)[:, None] >= boundaries[None], axis=1)
    return jnp.where(number < arrived.size, number % arrived.shape[1], arrived.shape[1])


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def exchange(x: Array, offsets: Sent, back: Sent, room: int, axes: tuple[str, ...]) -> Array:
    """Rows of x [R, D] to the devices that `sent` names, [room, D]; zeros where none came. back: the way back."""
    del back
    return EXCHANGES[_platform()](x, offsets, room, axes)


def _exchange_forward(x: Array, offsets: Sent, back: Sent, room: int, axes: tuple[str, ...]) -> tuple[Array, tuple]:
    # An array says how many rows there were: integers among what is saved would become traced.
    return exchange(x, offsets, back, room, axes), (offsets, back, jnp.zeros((x.shape[0], 0), bool))


def _exchange_backward(room: int, axes: tuple[str, ...], saved: tuple, dy: Array) -> tuple[Array, None, None]:
    del room
    offsets, back, like = saved
    return exchange(dy, back, offsets, like.shape[0], axes), None, None


exchange.defvjp(_exchange_forward, _exchange_backward)


def _platform() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "gpu" if device is not None and device.platform != "cpu" else "cpu"


def _ragged_exchange(x: Array, offsets: Sent, room: int, axes: tuple[str, ...]) -> Array:
    out = jnp.zeros((room, x.shape[1]), x.dtype)
    start, count, target, received = (array.astype(jnp.int32) for array in offsets)
    return lax.ragged_all_to_all(x, out, start, count, target, received, axis_name=axes)


def _gathered_exchange(x: Array, offsets: Sent, room: int, axes: tuple[str, ...]) -> Array:
    """The same where XLA has no ragged all-to-all (CPU): everything goes everywhere, each device picks its rows."""
    start, count, target, _ = (lax.all_gather(array, axes) for array in offsets)
    me, everything, out = lax.axis_index(axes), lax.all_gather(x, axes), jnp.zeros((room, x.shape[1]), x.dtype)
    for device in range(everything.shape[0]):
        row = jnp.arange(room) - target[device, me]
        is_local = (row >= 0) & (row < count[device, me])
        picked = jnp.take(everything[device], jnp.where(is_local, row + start[device, me], 0), axis=0)
        out = jnp.where(is_local[:, None], picked, out)
    return out


EXCHANGES: Mapping[str, Callable[..., Array]] = {"gpu": _ragged_exchange, "cpu": _gathered_exchange}

WAYS: Mapping[str, Callable[..., tuple[Array, Array]]] = {"gather": gather, "ragged": ragged, "capacity": capacity}


def dispatched(way: str, x: Array, routing: Routing, apply: Apply, dispatch: Dispatch) -> tuple[Array, Array]:
    """The sum of each token's weighted experts [T, D], and how many times this device dropped a token, float32 []."""
    send = WAYS[way]
    if dispatch.cut and way != "gather":
        x, weights, experts = (lax.all_gather(a, dispatch.cut, tiled=True) for a in (x, *routing))
        y, dropped = _chunked(send, x, Routing(weights, experts), apply, dispatch)
        return lax.psum_scatter(y, dispatch.cut, tiled=True), dropped
    y, dropped = _chunked(send, x, routing, apply, dispatch)
    return lax.psum(y, dispatch.partial) if dispatch.partial else y, dropped


def _chunked(send: Callable, x: Array, routing: Routing, apply: Apply, dispatch: Dispatch) -> tuple[Array, Array]:
    if dispatch.chunks == 1:
        return send(x, routing, apply, dispatch)
    short = -x.shape[0] % dispatch.chunks
    # Tokens that fill the last part go to no expert.
    filled = zip((x, *routing), (0, 0, dispatch.experts), strict=True)
    parts = [
        jnp.pad(a, ((0, short), (0, 0)), constant_values=value).reshape(dispatch.chunks, -1, a.shape[1])
        for a, value in filled
    ]

    def part(dropped: Array, part: list[Array]) -> tuple[Array, Array]:
        # Recomputed in its own backward pass: otherwise the rows of all parts are held until the last has gone.
        y, more = jax.checkpoint(lambda x, w, e: send(x, Routing(w, e), apply, dispatch), prevent_cse=False)(*part)
        return dropped + more, y

    dropped, y = lax.scan(part, jnp.zeros(()), parts)
    return y.reshape(-1, x.shape[1])[: x.shape[0]], dropped
