"""Mixtures of experts (Shazeer et al. 2017). B rows, S positions, D hidden, E experts, k chosen by each token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from megajax.kernels.grouped.capability import GroupedKernel
from megajax.layers.context import Context, fold_rows
from megajax.layers.decoding import Cache
from megajax.layers.moe.config import MoEConfig, SharedExpertConfig
from megajax.layers.moe.dispatch import WAYS, CombinedTokens, Dispatch, ExchangedTokens, RoutedTokens
from megajax.layers.moe.experts import ExpertMLPs
from megajax.layers.moe.observations import REPORTED, ExpertLoad, ReplayReport, RouterReport
from megajax.layers.moe.router import TOKENS, Router, RouterArrays, TokenAxes, TokensOfStep, drawn
from megajax.layers.param import ZEROS, LayerSettings, Normal, matrix, observation, param
from megajax.mesh.layer_observations import Observed, observe
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import devices_along, manual_axes

JITTER_PLACE, CHOICE_PLACE = 5, 6
RESIDUAL = ("batch", "seq_residual", "embed")
"""Layout of the input: each device routes its own tokens."""


class MixtureOfExperts(nnx.Module):
    """The weighted sum of the experts that a router chooses for each token, [B, S, D] -> [B, S, D]."""

    own_positions = True
    """Takes the residual stream sharded along the sequence."""

    def __init__(self, cfg: MoEConfig, settings: LayerSettings):
        self.cfg, self.layout, self.on_every_stage = cfg, settings.layout, settings.on_every_stage
        self.router = param((settings.hidden, cfg.experts), ("embed", None), init=Normal(settings.std))
        if cfg.router.bias:
            self.router_bias = param((cfg.experts,), (None,), init=ZEROS, role="bias")
        self.experts = ExpertMLPs(cfg.expert, settings, number=cfg.experts, width=cfg.width(settings.hidden))
        if cfg.latent is not None:
            self.latent_down = matrix(settings, (settings.hidden, cfg.latent), ("embed", None))
            self.latent_up = matrix(
                settings, (cfg.latent, settings.hidden), (None, "embed"), init=Normal(settings.output_std)
            )
        if cfg.shared is not None:
            self.shared = cfg.shared.mlp.build(settings)
        if cfg.shared is not None and cfg.shared.gate:
            self.shared_gate = param((settings.hidden, 1), ("embed", None), init=Normal(settings.std))
        updater = ExpertLoad(cfg.router.balance_rate)
        self.load = observation(Observed(shape=(2, cfg.experts), axes=(None, None), reduction="sum", updater=updater))
        report = RouterReport.of(cfg)
        self.report = observation(Observed(shape=(len(REPORTED),), axes=(None,), reduction="sum", updater=report))
        if settings.replays_experts:
            self.replayed = observation(Observed(shape=(2,), axes=(None,), reduction="sum", updater=ReplayReport()))

    def __call__(self, x: Array, ctx: Context) -> Array:
        return self.step(x, {}, ctx)[0]

    def step(self, x: Array, cache: Cache, ctx: Context) -> tuple[Array, Cache]:
        """The output, and the cache: its leaf `experts`, if there is one, has the experts of each token."""
        router_input, narrow = self.jittered(x, ctx), self.narrowed(x)
        router, known = self.router_arrays(ctx), self.known(cache, ctx)
        ins = TOKENS, TOKENS, ("seq_residual",), router.axes(), self.experts.axes(), known.axes()
        mixture = self.layout.island(self.on_device(ctx), ins, (TOKENS, known.axes().cache))
        y, cache = mixture(narrow, router_input, ctx.index, router, self.experts.weights(), known)
        y = self.widened(y)
        return (y if self.cfg.shared is None else y + self.shared_output(self.cfg.shared, x, ctx)), cache

    def on_device(self, ctx: Context) -> "DeviceMixture":
        """The part of a device, within an island."""
        cfg, layout = self.cfg if ctx.rows is None else self.cfg.decoding(), self.layout
        axes, sharding = token_axes(layout), expert_axes(layout)
        stages = manual_axes().get("pipeline", 1) if self.on_every_stage else 1
        way = WAYS[cfg.expert_facts(self.router.shape[0]).way_on(sharding.devices())]
        return DeviceMixture(
            router=Router(cfg, axes, sharding.copies(axes) * stages, training=ctx.row_keys is not None),
            dispatch=way(
                experts=cfg.experts,
                top_k=cfg.top_k,
                axes=sharding.experts,
                token_axes=sharding.ffn if sharding.tokens_sharded else (),
                partial_axes=() if sharding.tokens_sharded else sharding.ffn,
                room=cfg.dispatch.room,
                chunks=cfg.dispatch.chunks,
            ),
            experts=self.experts,
            weigh_inputs=cfg.weigh == "inputs",
            kernel=cfg.kernel,
            ffn_shards=sharding.ffn_shards(),
            copies_of_rows=sharding.ffn_shards() * stages,
        )

    def router_arrays(self, ctx: Context) -> RouterArrays:
        """The weights and observations of the router, and the keys of this layer's random numbers."""
        router, replays = self.cfg.router, ctx.experts is not None and ctx.layer is not None
        draws = router.sparse_mixer is not None and ctx.row_keys is not None
        return RouterArrays(
            keys=fold_rows(ctx.row_keys, CHOICE_PLACE) if draws else None,
            load=self.load[...],
            replayed=self.replayed[...] if replays else None,
            report=self.report[...],
            matrix=self.router[...],
            bias=self.router_bias[...] if router.bias else None,
        )

    def known(self, cache: Cache, ctx: Context) -> TokensOfStep:
        """What the context says of the tokens of this layer."""
        experts = None
        if ctx.experts is not None and ctx.layer is not None:
            experts = lax.dynamic_index_in_dim(ctx.experts, ctx.layer, 2, keepdims=False)[..., : self.cfg.top_k]
        return TokensOfStep(cache, experts, ctx.padding, ctx.rows)

    def narrowed(self, x: Array) -> Array:
        """The tokens that experts compute: x, or its projection to the latent width."""
        if self.cfg.latent is None:
            return x
        return self.layout.dot("bsd,dl->bsl", x, self.latent_down, "batch", "seq_residual", None)

    def widened(self, y: Array) -> Array:
        """The output of experts in the residual stream."""
        if self.cfg.latent is None:
            return self.layout.act(y, *RESIDUAL)
        return self.layout.dot("bsl,ld->bsd", y, self.latent_up, *RESIDUAL)

    def shared_output(self, cfg: SharedExpertConfig, x: Array, ctx: Context) -> Array:
        """Output of the shared expert."""
        y = self.shared(self.layout.act(x, "batch", "seq", "embed"), ctx)
        if cfg.gate:
            gate = jnp.einsum("bsd,dg->bsg", x.astype(jnp.float32), self.shared_gate[...].astype(jnp.float32))
            y = y * self.layout.act(jax.nn.sigmoid(gate).astype(y.dtype), "batch", "seq_residual", None)
        return y

    def jittered(self, x: Array, ctx: Context) -> Array:
        """x times random factors, for the router only."""
        jitter = self.cfg.router.jitter
        if jitter == 0 or ctx.row_keys is None:
            return x

        noise = drawn(fold_rows(ctx.row_keys, JITTER_PLACE), ctx.index, x.shape[-1:], 1 - jitter, 1 + jitter)
        return (x * self.layout.act(noise, *RESIDUAL)).astype(x.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMixture:
    """The mixture of experts of the tokens of a device, [B, S, D] -> [B, S, D]; within an island."""

    router: Router
    dispatch: Dispatch
    experts: ExpertMLPs
    weigh_inputs: bool
    """Weights multiply the inputs of experts instead of their outputs."""
    kernel: GroupedKernel
    ffn_shards: int
    """Shards of the ffn of an expert."""
    copies_of_rows: int
    """Number of devices that compute parts of the same rows."""

    def __call__(
        self,
        x: Array,
        router_input: Array,
        index: Array,
        arrays: RouterArrays,
        weights: Mapping[str, Array],
        known: TokensOfStep,
    ) -> tuple[Array, Cache]:
        """The output, and the cache. router_input: what the router reads; index: int32 [S]; weights: of the experts."""
        routed = self.router(x, router_input, index, arrays, known)
        cache = known.written(routed.tokens.experts)

        def mixture(tokens: RoutedTokens) -> CombinedTokens:
            sent = self.dispatch.send(tokens)
            outputs = self.experts(self.weighed(sent), weights, self.kernel, self.ffn_shards)
            return self.dispatch.combine(sent, outputs)

        y, dropped = self.dispatch.run(mixture, routed.tokens)
        y = observe(y, arrays.report, routed.reported(dropped / self.copies_of_rows))
        return y.reshape(*x.shape[:2], y.shape[-1]), cache

    def weighed(self, sent: ExchangedTokens) -> ExchangedTokens:
        """The rows as experts take them."""
        if not self.weigh_inputs:
            return sent
        return sent._replace(
            rows=(sent.rows * sent.weights).astype(sent.rows.dtype), weights=jnp.ones_like(sent.weights)
        )


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
