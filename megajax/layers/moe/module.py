"""Mixtures of experts (Shazeer et al. 2017). B rows, S positions, D hidden, E experts, k chosen by each token.

Experts compute on rows sorted by expert: R rows, the first sum(sizes) of them in use; L experts of a device, F ffn of
a device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from megajax.kernels.grouped.capability import GroupedKernel
from megajax.layers.context import Context, fold_rows
from megajax.layers.decoding import Cache, write
from megajax.layers.mlp.config import MLPConfig
from megajax.layers.mlp.module import activated
from megajax.layers.moe.config import MoEConfig, SharedExpertConfig
from megajax.layers.moe.dispatch import Dispatch, dispatched
from megajax.layers.moe.router import (
    REPORTED,
    Routing,
    TokenAxes,
    add_gradient,
    balance,
    choose,
    counts,
    load_measures,
    losses_of,
    only,
    replay,
    replay_measures,
    report_measures,
    setting_of_room,
    within_capacity,
)
from megajax.layers.param import ROUNDED, ZEROS, LayerSettings, Matrix, Normal, matrix, observation, operand_axes, param
from megajax.mesh.layer_metrics import Measure
from megajax.mesh.layer_observations import Latest, Observed, observe
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import devices_along, manual_axes


class Experts(nnx.Module):
    """An `MLP` for each expert."""

    def __init__(self, cfg: MLPConfig, settings: LayerSettings, *, number: int, width: int):
        self.cfg = cfg
        # The width of latent tokens is not `embed`: ZeRO and FSDP do not shard it.
        embed = "embed" if width == settings.hidden else None
        for name in cfg.inner:
            axes = ("expert", embed, "expert_mlp")
            setattr(self, name, matrix(settings, (number, width, cfg.ffn), axes))
        axes = ("expert", "expert_mlp", embed)
        self.down = matrix(settings, (number, cfg.ffn, width), axes, init=Normal(settings.output_std))
        if cfg.bias:
            for name in cfg.inner:
                shape, axes = (number, cfg.ffn), ("expert", "expert_mlp")
                setattr(self, f"{name}_bias", param(shape, axes, init=ZEROS, role="bias"))
            self.down_bias = param((number, width), ("expert", embed), init=ZEROS, role="bias")

    def leaves(self) -> dict[str, nnx.Variable]:
        """Weights and observations by name; those of an adapter as "up.lora_a"."""
        names = (*self.cfg.inner, "down")
        leaves = {name + end: leaf for name in names for end, leaf in getattr(self, name).leaves().items()}
        return leaves | {f"{name}_bias": getattr(self, f"{name}_bias") for name in names if self.cfg.bias}

    def weights(self) -> dict[str, Any]:
        """Arrays by name, and the operands that the step has made of them."""
        return {name: leaf[...] for name, leaf in self.leaves().items()} | self._rounded()

    def _rounded(self) -> dict[str, Any]:
        rounded = {name + ROUNDED: getattr(self, name).rounded for name in (*self.cfg.inner, "down")}
        return {name: operands for name, operands in rounded.items() if operands is not None}

    def axes(self) -> dict[str, Any]:
        """Logical axes of the `weights` of one layer, by name."""
        axes = {name: leaf.axes[len(leaf.axes) - leaf[...].ndim :] for name, leaf in self.leaves().items()}
        rounded = {name: operand_axes(of, axes[name.removesuffix(ROUNDED)]) for name, of in self._rounded().items()}
        return axes | rounded

    def apply(
        self,
        kernel: GroupedKernel,
        weights: Mapping[str, Array],
        rows: Array,
        sizes: Array,
        scale: Array,
        shards: int,
    ) -> Array:
        """Rows [R, D] -> outputs [R, D] times scale float32 [R, 1]. shards: number of shards of the ffn.

        The factor is applied to the inner activation, so its gradient does not need the output.
        """
        products = ((name, self.product(kernel, weights, name, rows, sizes)) for name in self.cfg.inner)
        inputs = [checkpoint_name(self.biased(x, weights, name, sizes), "mlp") for name, x in products]
        inner = checkpoint_name(activated(self.cfg, inputs, scale), "activation")
        y = self.product(kernel, weights, "down", inner, sizes)
        if not self.cfg.bias:
            return y
        bias = weights["down_bias"][_experts(sizes, rows.shape[0])].astype(jnp.float32) * scale / shards
        return y + bias.astype(y.dtype)

    def product(
        self, kernel: GroupedKernel, weights: Mapping[str, Array], name: str, rows: Array, sizes: Array
    ) -> Array:
        """Product of rows and the matrix of this name, plus the output of its adapter.

        If the ffn is sharded, it is a partial sum or a shard of the columns.
        """
        multiplied: Matrix = getattr(self, name)
        ends = (*multiplied.leaves(), *[ROUNDED] * (multiplied.rounded is not None))
        return multiplied.grouped(rows, sizes, kernel, {end: weights[name + end] for end in ends})

    def biased(self, x: Array, weights: Mapping[str, Array], name: str, sizes: Array) -> Array:
        if not self.cfg.bias:
            return x
        return x + weights[f"{name}_bias"][_experts(sizes, x.shape[0])].astype(x.dtype)


def _experts(sizes: Array, rows: int) -> Array:
    """Expert of each row, int32 [R]; the last expert for unused rows."""
    return jnp.minimum(jnp.sum(jnp.arange(rows)[:, None] >= jnp.cumsum(sizes)[None], axis=1), sizes.size - 1)


JITTER_PLACE, CHOICE_PLACE = 5, 6
TOKENS = ("batch", "seq_residual", "embed")
"""Layout of the input: each device routes its own tokens."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Updater: the bias that balances experts, and the tokens of each expert in the last step."""

    rate: float | None
    """Change of a bias per step; None: biases stay 0."""
    follows: ClassVar[str] = "router"

    def at_rest(self) -> "ExpertLoad":
        """The updater of a router that is not trained: its biases stay as they are."""
        return replace(self, rate=None if self.rate is None else 0.0)

    def shape(self, observed: tuple[int, ...]) -> tuple[int, ...]:
        """[..., 2, E]: biases, tokens."""
        return observed

    def used(self, state: Array, scale: Array) -> Array:
        del scale
        return state

    def updated(self, state: Array, observed: Array, scale: Array) -> Array:
        """observed [..., 2, E]: zeros, and the tokens of a step."""
        del scale
        tokens = observed[..., 1, :]
        if self.rate is None:
            return observed
        bias = state[..., 0, :] + self.rate * jnp.sign(tokens.mean(-1, keepdims=True) - tokens)
        return jnp.stack([bias, tokens], axis=-2)

    def measures(self) -> tuple[Measure, ...]:
        return load_measures()


@dataclass(frozen=True, slots=True)
class RouterReport:
    """Updater: the report of a router for the last step. Layers read from it the factor on gradients of its losses, the
    loss scale times the weight of a position."""

    losses: tuple[str, ...] = ()
    """The losses of the router, a subset of LOSSES."""
    setting: str = ""
    """The setting to change for fewer dropped tokens; "" if no token is ever dropped."""

    def over_positions(self) -> bool:
        """Whether the router has a loss, a sum over positions."""
        return bool(self.losses)

    def shape(self, observed: tuple[int, ...]) -> tuple[int, ...]:
        """[..., len(REPORTED)]."""
        return observed

    def used(self, state: Array, scale: Array) -> Array:
        return jnp.broadcast_to(scale, state.shape)

    def updated(self, state: Array, observed: Array, scale: Array) -> Array:
        del state, scale
        return observed

    def measures(self) -> tuple[Measure, ...]:
        return report_measures(self.losses, self.setting)


@dataclass(frozen=True, slots=True)
class ReplayReport(Latest):
    """Updater: the numbers of given choices of experts, and of those that the router would not make."""

    def measures(self) -> tuple[Measure, ...]:
        return replay_measures()


class MixtureOfExperts(nnx.Module):
    """The weighted sum of the experts that a router chooses for each token, [B, S, D] -> [B, S, D]."""

    own_positions = True
    """Takes the residual stream sharded along the sequence."""

    def __init__(self, cfg: MoEConfig, settings: LayerSettings):
        self.cfg, self.layout, self.on_every_stage = cfg, settings.layout, settings.on_every_stage
        self.router = param((settings.hidden, cfg.experts), ("embed", None), init=Normal(settings.std))
        if cfg.router.bias:
            self.router_bias = param((cfg.experts,), (None,), init=ZEROS, role="bias")
        self.experts = Experts(cfg.expert, settings, number=cfg.experts, width=cfg.width(settings.hidden))
        if cfg.latent is not None:
            self.latent_down = matrix(settings, (settings.hidden, cfg.latent), ("embed", None))
            self.latent_up = matrix(
                settings, (cfg.latent, settings.hidden), (None, "embed"), init=Normal(settings.output_std)
            )
        if cfg.shared is not None:
            self.shared = cfg.shared.mlp.build(settings)
        if cfg.shared is not None and cfg.shared.gate:
            self.shared_gate = param((settings.hidden, 1), ("embed", None), init=Normal(settings.std))
        load = Observed(
            shape=(2, cfg.experts), axes=(None, None), reduction="sum", updater=ExpertLoad(cfg.router.balance_rate)
        )
        self.load = observation(load)
        updater = RouterReport(losses_of(cfg), setting_of_room(cfg))
        report = Observed(shape=(len(REPORTED),), axes=(None,), reduction="sum", updater=updater)
        self.report = observation(report)
        if settings.replays_experts:
            self.replayed = observation(Observed(shape=(2,), axes=(None,), reduction="sum", updater=ReplayReport()))

    def __call__(self, x: Array, ctx: Context) -> Array:
        return self.step(x, {}, ctx)[0]

    def step(self, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """The output, and the cache: its leaf `experts`, if there is one, has the experts of each token."""
        y, cache = self.routed(x, cache, ctx)
        return (y if self.cfg.shared is None else y + self.shared_output(self.cfg.shared, x, ctx)), cache

    def shared_output(self, cfg: SharedExpertConfig, x: Array, ctx: Context) -> Array:
        """Output of the shared expert."""
        y = self.shared(self.layout.act(x, "batch", "seq", "embed"), ctx)
        if cfg.gate:
            gate = jnp.einsum("bsd,dg->bsg", x.astype(jnp.float32), self.shared_gate[...].astype(jnp.float32))
            y = y * self.layout.act(jax.nn.sigmoid(gate).astype(y.dtype), "batch", "seq_residual", None)
        return y

    def routed(self, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """Output of the chosen experts, and the cache with them."""
        cfg, layout = self.cfg if ctx.rows is None else self.cfg.decoding(), self.layout
        tokens, router_input = x, self.jittered(x, ctx)
        if cfg.latent is not None:
            tokens = layout.dot("bsd,dl->bsl", x, self.latent_down, "batch", "seq_residual", None)
        weights = {"router": self.router[...], "load": self.load[...], "report": self.report[...]}
        if cfg.router.bias:
            weights["router_bias"] = self.router_bias[...]
        replays = ctx.experts is not None and ctx.layer is not None
        if replays:
            weights["replayed"] = self.replayed[...]
        axes = {name: (None,) * w.ndim for name, w in weights.items()}
        if cfg.router.sparse_mixer is not None and ctx.row_keys is not None:
            weights["keys"], axes["keys"] = fold_rows(ctx.row_keys, CHOICE_PLACE), ("batch", None)
        tokens_axes = ("batch", "seq_residual", None)
        step: dict[str, Any] = {"rows": ctx.rows, "cache": cache, "padding": ctx.padding}
        pools = dict.fromkeys(cache, (None, "batch", None, None))
        step_axes = {"rows": None if ctx.rows is None else ctx.rows.axes(), "cache": pools}
        step_axes["padding"] = None if ctx.padding is None else tokens_axes[:2]
        if replays:
            of_layer = lax.dynamic_index_in_dim(ctx.experts, ctx.layer, 2, keepdims=False)
            step["experts"], step_axes["experts"] = of_layer[..., : cfg.top_k], tokens_axes
        ins = tokens_axes, tokens_axes, ("seq_residual",), axes, self.experts.axes(), step_axes
        island = layout.island(self.on_device(cfg, training=ctx.row_keys is not None), ins, (tokens_axes, pools))
        y, cache = island(tokens, router_input, ctx.index, weights, self.experts.weights(), step)
        if cfg.latent is None:
            return layout.act(y, *TOKENS), cache
        return layout.dot("bsl,ld->bsd", y, self.latent_up, *TOKENS), cache

    def on_device(self, cfg: MoEConfig, *, training: bool) -> Callable[..., tuple[Array, Cache]]:
        """(tokens, input of the router, positions, arrays of the router, expert weights, inputs of a step) -> outputs
        on a device, and the cache of a decoding step.

        Inputs of a step: its `rows` or None, its `cache`, `padding` bool [B, S] or None, and `experts` [B, S, k] as in
        `Context.experts`."""
        axes, sharding = token_axes(self.layout), expert_axes(self.layout)
        stages = manual_axes().get("pipeline", 1) if self.on_every_stage else 1
        copies, facts = sharding.copies(axes) * stages, cfg.expert_facts(self.router.shape[0])

        def local(
            x: Array,
            router_input: Array,
            index: Array,
            arrays: Mapping[str, Array],
            experts: Mapping[str, Array],
            inputs: Mapping[str, Any],
        ) -> tuple[Array, Cache]:
            rows, flat = x.shape[0], x.reshape(-1, x.shape[-1])
            replayed, step, padding = inputs.get("experts"), inputs["rows"], inputs["padding"]
            real = None if padding is None else ~padding.reshape(-1)
            real = real if step is None else step.real()
            routing, routed = self.route(
                cfg, router_input, index, arrays, axes, copies, replayed, real, training=training
            )
            cache = {name: write(leaf, routing.experts + 1, step) for name, leaf in inputs["cache"].items()}

            def apply(rows: Array, sizes: Array, scale: Array) -> Array:
                if cfg.weigh == "inputs":
                    rows, scale = (rows * scale).astype(rows.dtype), jnp.ones_like(scale)
                return self.experts.apply(cfg.kernel, experts, rows, sizes, scale, sharding.ffn_shards())

            dispatch = Dispatch(
                experts=cfg.experts,
                top_k=cfg.top_k,
                axes=sharding.experts,
                token_axes=sharding.ffn if sharding.tokens_sharded else (),
                partial_axes=() if sharding.tokens_sharded else sharding.ffn,
                room=cfg.dispatch.room,
                chunks=cfg.dispatch.chunks,
            )
            y, dropped = dispatched(facts.way_on(sharding.devices()), flat, routing, apply, dispatch)
            report = routed | {"dropped": routed["dropped"] + dropped / (sharding.ffn_shards() * stages)}
            observed = jnp.stack([jnp.asarray(report.get(name, 0), jnp.float32) for name in REPORTED])
            y = observe(y, arrays["report"], observed)
            return y.reshape(rows, -1, y.shape[-1]), cache

        return local

    def route(
        self,
        cfg: MoEConfig,
        x: Array,
        index: Array,
        arrays: Mapping[str, Array],
        axes: TokenAxes,
        copies: int,
        replayed: Array | None,
        real: Array | None,
        *,
        training: bool,
    ) -> tuple[Routing, dict[str, Array]]:
        """Routing of the tokens of this device, and its report: parts of sums over all devices.

        Padding goes to no expert: all of it would go to the same few, on the same devices. index: int32 [S], positions
        in the row; copies: number of devices that route the same tokens; replayed: [B, S, k] as in `Context.experts`,
        or None; real: bool [T], the tokens that are not padding; None: all.
        """
        rows, flat = x.shape[0], x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        logits = jnp.matmul(flat, arrays["router"].astype(jnp.float32), precision=lax.Precision.HIGHEST)
        if "router_bias" in arrays:
            logits = logits + arrays["router_bias"].astype(jnp.float32)[None]
        load, scale = lax.stop_gradient(arrays["load"]), lax.stop_gradient(arrays["report"][0])
        balanced = balance(cfg.router, logits, rows, cfg.top_k, load[1], axes, real)
        routed = len(flat) if real is None else jnp.sum(real, dtype=jnp.float32)
        report = {"routed": jnp.float32(routed / copies), "dropped": jnp.zeros(())}
        report["chosen"] = report["routed"] * cfg.top_k
        report["not_finite"] = jnp.sum(~jnp.isfinite(logits)) / copies
        if balanced is not None:
            logits = add_gradient(logits, balanced.gradient * (scale / copies))
            report |= {name: value * (balanced.tokens / copies) for name, value in balanced.values.items()}
        draws = None
        if "keys" in arrays:
            draws = drawn(arrays["keys"], index, (cfg.top_k, cfg.experts + 1), 0, 1)
            draws = draws.reshape(-1, *draws.shape[2:])
        inputs = {"training": training, "index": index, "draws": draws, "real": real}
        routing = choose(cfg.router, logits, cfg.top_k, load[0], axes, **inputs)
        if replayed is not None:
            flat_experts = replayed.reshape(-1, cfg.top_k)
            routing, numbers = replay(cfg.router, logits, flat_experts, routing.experts)
            routing = routing._replace(weights=observe(routing.weights, arrays["replayed"], numbers / copies))
        routing = routing._replace(experts=only(real, routing.experts, cfg.experts))
        tokens = counts(routing.experts, cfg.experts)
        if cfg.router.capacity is not None:
            routing = within_capacity(cfg.router.capacity, routing, rows, cfg.experts, axes, real)
            report["dropped"] = report["chosen"] - jnp.sum(routing.experts < cfg.experts) / copies
        observed = jnp.stack([jnp.zeros_like(tokens), tokens / copies])
        return routing._replace(weights=observe(routing.weights, arrays["load"], observed)), report

    def jittered(self, x: Array, ctx: Context) -> Array:
        """x times random factors, for the router only."""
        jitter = self.cfg.router.jitter
        if jitter == 0 or ctx.row_keys is None:
            return x

        noise = drawn(fold_rows(ctx.row_keys, JITTER_PLACE), ctx.index, x.shape[-1:], 1 - jitter, 1 + jitter)
        return (x * self.layout.act(noise, *TOKENS)).astype(x.dtype)


def drawn(row_keys: Array, index: Array, shape: tuple[int, ...], low: float, high: float) -> Array:
    """Uniform numbers of each token, [B, S, *shape], from keys of rows uint32 [B, 2] and positions int32 [S]."""

    def of_token(row: Array, index: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(row), index)
        return jax.random.uniform(key, shape, minval=low, maxval=high)

    return jax.vmap(jax.vmap(of_token, (None, 0)), (0, None))(row_keys, index)


class ExpertAxes(NamedTuple):
    """Mesh axes with several devices that shard experts."""

    experts: tuple[str, ...]
    """Axes that shard the list of experts."""
    ffn: tuple[str, ...]
    """Axes that shard the matrices of an expert."""
    tokens_sharded: bool
    """Whether the `ffn` axes also shard the tokens (sequence parallelism)."""

    def devices(self) -> int:
        """Shards of the list of experts."""
        return devices_along(self.experts)

    def ffn_shards(self) -> int:
        """Shards of the ffn of an expert."""
        return devices_along(self.ffn)

    def copies(self, tokens: TokenAxes) -> int:
        """Number of devices that route the same tokens."""
        return devices_along(tuple(axis for axis in self.ffn + self.experts if axis not in tokens.every))


def token_axes(layout: Layout) -> TokenAxes:
    """Axes that shard the tokens of the residual stream."""
    return TokenAxes(layout.sharded_axes("batch"), layout.sharded_axes("seq_residual"), layout.sequence_sharding())


def expert_axes(layout: Layout) -> ExpertAxes:
    """Axes that shard experts."""
    ffn = layout.sharded_axes("expert_mlp")
    return ExpertAxes(layout.sharded_axes("expert"), ffn, set(ffn) <= set(layout.sharded_axes("seq_residual")))
