"""Configs of mixtures of experts; imports neither jax nor flax."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from megajax.config.builds import Builds, resolve
from megajax.config.errors import Problem
from megajax.config.nearest import divisors_of
from megajax.kernels.capability import Choice, Device, Request
from megajax.kernels.grouped_capability import GroupedKernel, GroupedSizes, choose_grouped
from megajax.layers.config.checks import above_zero, below_one
from megajax.layers.config.mlp import MLPConfig
from megajax.layers.expert_facts import ExpertFacts, Way
from megajax.layers.facts import Elements, Matmul, MultiplyAdds, Side, Weight, prefixed
from megajax.layers.remat import Part


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityConfig:
    """A limit on the tokens of each expert, counted over the rows of a microbatch on all devices."""

    factor: float = 1.0
    """Capacity over the mean number of tokens of an expert."""
    drop: Literal["probability", "position"] = "probability"
    """Which tokens an expert keeps: those that weigh it most, or the first."""

    def problems(self) -> list[Problem]:
        return above_zero(factor=self.factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """Chooses the experts of each token, and what they weigh. Computes in float32."""

    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    """Scores of the experts from the router's logits."""
    normalise: Literal["chosen", "all"] = "chosen"
    """chosen: the weights of a token's experts add up to 1 (softmax over the chosen logits; sigmoid: divided by the
    sum); all: they are the scores among all experts, as they are."""
    scale: float = 1.0
    """Factor on the weights."""
    groups: int | None = None
    """Experts are in this many groups, of which a token chooses `chosen_groups` first; none: no groups."""
    chosen_groups: int | None = None
    """Groups a token's experts are from: those with the largest sums of their best scores."""
    group_scores: int | None = None
    """How many best scores of a group are summed; none: top_k / chosen_groups."""
    bias: bool = False
    """A trained bias on the logits."""
    balance_rate: float | None = None
    """Balances without a loss: scores have a bias for the choice alone, which after each step goes up by this for
    experts with fewer tokens than the mean, and down for the others (Wang et al. 2024); none: no such bias."""
    aux_loss: float = 0.0
    """Coefficient of the load-balancing loss over the tokens of a microbatch (Fedus et al. 2021, equation 4)."""
    row_loss: float = 0.0
    """Coefficient of the same loss over each row, averaged over rows."""
    global_loss: float = 0.0
    """Coefficient of the same loss with the tokens of the last step's batch counted too (Qiu et al. 2025)."""
    z_loss: float = 0.0
    """Coefficient of the mean squared logarithm of the partition function of the logits (Zoph et al. 2022)."""
    sinkhorn: bool = False
    """In training, experts are chosen by logits that Sinkhorn's algorithm balances (Clark et al. 2022)."""
    jitter: float = 0.0
    """In training, the router's input is multiplied by random numbers from 1 - jitter to 1 + jitter."""
    force_balance: bool = False
    """Tokens go to experts by turns, whatever the scores: for benchmarks."""
    capacity: CapacityConfig | None = None
    """A limit on the tokens of each expert; none: no token is dropped."""

    def problems(self) -> list[Problem]:
        problems = above_zero(scale=self.scale, balance_rate=self.balance_rate)
        if self.group_scores is not None and self.groups is None:
            problems.append(Problem("group_scores", "compares groups, and groups=none", "set groups, or this to none"))
        for name in ("aux_loss", "row_loss", "global_loss", "z_loss"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                problems.append(Problem(name, f"must be a number of at least 0, got {value}"))
        problems += below_one(jitter=self.jitter)
        if (self.groups is None) != (self.chosen_groups is None):
            problems.append(Problem("groups", "and chosen_groups go together", "set both, or neither"))
        if self.balance_rate is not None and self.score == "softmax" and self.normalise == "chosen":
            message = "biases scores, and a softmax over the chosen logits has none before the choice"
            problems.append(Problem("balance_rate", message, "use score=sigmoid, or normalise=all"))
        balancing = self.aux_loss or self.row_loss or self.global_loss or self.balance_rate is not None
        if self.sinkhorn and (balancing or self.groups is not None):
            message = "balances by itself, beside losses, groups or balance_rate"
            problems.append(Problem("sinkhorn", message, "set these losses to 0, the others to none"))
        return problems

    def expert_problems(self, experts: int, top_k: int) -> Iterator[Problem]:
        """What is wrong with it for this many experts, top_k of which a token chooses."""
        groups, chosen_groups = self.groups, self.chosen_groups
        if groups is None or chosen_groups is None:
            return
        legal = ", ".join(map(str, divisors_of(experts)))
        if groups < 1 or experts % groups:
            yield Problem("groups", f"{groups} groups do not divide {experts} experts", f"groups can be {legal}")
        elif not 1 <= chosen_groups <= groups:
            yield Problem("chosen_groups", f"{chosen_groups} of groups={groups}", f"use 1 to {groups}")
        elif self.group_scores is None and top_k % chosen_groups:
            message = f"{chosen_groups} does not divide top_k={top_k}"
            yield Problem("chosen_groups", message, "use one of its divisors, or set group_scores")
        elif self.group_scores is not None and not 1 <= self.group_scores <= experts // groups:
            message = f"{self.group_scores} scores of groups of {experts // groups} experts"
            yield Problem("group_scores", message, f"use 1 to {experts // groups}")
        elif top_k > experts // groups * chosen_groups:
            message = f"{chosen_groups} groups of {experts // groups} experts have fewer than top_k={top_k}"
            yield Problem("chosen_groups", message, f"use at least {-(-top_k * groups // experts)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExpertConfig:
    """A feed-forward layer that all tokens pass, beside those they choose."""

    mlp: MLPConfig
    """The layer."""
    gate: bool = False
    """Its output is multiplied by the sigmoid of a projection of the input to one number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchConfig:
    """How tokens get to experts on other devices; see docs/moe.md."""

    way: Way = "auto"
    """gather: all tokens to all devices of `expert`; ragged: each token to the devices of its experts; capacity: the
    same in parts of equal size; auto: whichever sends fewer bytes."""
    room: float | None = None
    """Rows that a device has room for, over the mean; further tokens are dropped, from the experts with most, and are
    counted in the metrics. none: room for all, whatever the router does."""
    chunks: int = 1
    """Parts of a device's tokens that are sent and computed one after another, each recomputed in the backward pass:
    memory for one part at a time."""

    def problems(self) -> list[Problem]:
        problems = [] if self.chunks >= 1 else [Problem("chunks", f"must be at least 1, got {self.chunks}")]
        if self.room is not None and not 1 <= self.room < float("inf"):
            problems.append(Problem("room", f"must be at least 1, got {self.room}", "1.5 is usual, none drops nothing"))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig(Builds):
    """A mixture of experts: each token passes the top_k feed-forward layers that a router chooses for it."""

    target: ClassVar[str] = "megajax.layers.moe:MixtureOfExperts"
    experts: int
    """Number of experts."""
    top_k: int = 2
    """Experts of a token."""
    expert: MLPConfig
    """The layer of each expert."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """How experts are chosen."""
    shared: SharedExpertConfig | None = None
    """A layer for all tokens beside them; none: no such layer."""
    latent: int | None = None
    """Width that tokens are projected to for the experts, and back from; none: experts have the hidden size."""
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    """How tokens get to experts on other devices."""
    kernel: GroupedKernel = "auto"
    """Grouped matmul of the experts: the fastest available, or that one or an error."""

    def problems(self) -> list[Problem]:
        problems = above_zero(experts=self.experts, top_k=self.top_k, latent=self.latent)
        if problems:
            return problems
        if self.top_k > self.experts:
            message = f"{self.top_k} experts a token, of experts={self.experts}"
            problems.append(Problem("top_k", message, f"use at most {self.experts}"))
        return problems + [
            replace(problem, setting=f"router.{problem.setting}")
            for problem in self.router.expert_problems(self.experts, self.top_k)
        ]

    def draws_numbers(self) -> bool:
        """Whether training does."""
        return self.router.jitter > 0 or self.router.sinkhorn

    def compares_rows(self) -> dict[str, Literal["rows", "order"]]:
        """Settings by which tokens depend on other rows of their microbatch, or on the order of these."""
        router = self.router
        by_rows = {"router.aux_loss": router.aux_loss, "router.global_loss": router.global_loss}
        by_order = {"router.sinkhorn": router.sinkhorn, "router.capacity": router.capacity is not None}
        # Which tokens are dropped depends on which rows share a device.
        by_order["dispatch.room"] = self.dispatch.room is not None
        return {name: "rows" for name, used in by_rows.items() if used} | {
            name: "order" for name, used in by_order.items() if used
        }

    def kernel_choice(
        self, hidden: int, request: Request, device: Device | None, setting: str = "kernel"
    ) -> Choice[GroupedKernel]:
        """The grouped matmul's kernel, and why not a faster one. device: None for any NVIDIA GPU.

        Raises UserError if a kernel chosen by name is not available; `setting` names it.
        """
        # The number of rows is the layout's; here it only has to be one that kernels take.
        sizes = GroupedSizes(4096, self.experts, self.width(hidden), self.expert.ffn)
        choice = choose_grouped(self.kernel, request.dtype, device, setting, sizes)
        return Choice(choice.kernel, choice.reasons, "experts")

    def decoding(self) -> Self:
        """Without what makes a token depend on the others of its batch: capacities, and forced balance."""
        router = replace(self.router, capacity=None, force_balance=False)
        return replace(self, router=router, dispatch=replace(self.dispatch, room=None))

    def with_kernel(self, name: GroupedKernel) -> Self:
        """The same layer with this kernel."""
        return replace(self, kernel=name)

    def width(self, hidden: int) -> int:
        """Width of the experts' inputs and outputs."""
        return self.latent or hidden

    def inner_weights(self, hidden: int) -> tuple[Weight, ...]:
        """Those of the experts, stacked."""
        names = {"mlp": "expert_mlp", "embed": "embed" if self.latent is None else None}
        return tuple(
            Weight(
                f"experts.{weight.name}",
                (self.experts, *weight.shape),
                ("expert", *(names.get(axis or "", axis) for axis in weight.axes)),
                active_share=self.top_k / self.experts,
            )
            for weight in self.expert.weights(self.width(hidden))
        )

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Every weight of the module."""
        weights = [Weight("router", (hidden, self.experts), ("embed", None))]
        if self.router.bias:
            weights.append(Weight("router_bias", (self.experts,), (None,)))
        weights += self.inner_weights(hidden)
        if self.latent is not None:
            weights.append(Weight("latent_down", (hidden, self.latent), ("embed", None)))
            weights.append(Weight("latent_up", (self.latent, hidden), (None, "embed")))
        if self.shared is not None:
            weights += prefixed("shared", self.shared.mlp.weights(hidden))
            if self.shared.gate:
                weights.append(Weight("shared_gate", (hidden, 1), ("embed", None)))
        return tuple(weights)

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        """Of the router, of the experts on their tokens, of what all tokens pass."""
        hidden_side = Elements(replicated=hidden)
        every = [Matmul(inputs=hidden_side, outputs=Elements(replicated=self.experts))]
        if self.latent is not None:
            every.append(Matmul(inputs=hidden_side, outputs=Elements(replicated=self.latent)))
        for matmul in self.expert.matmuls(self.width(hidden)):
            every.append(replace(matmul, experts=self.experts, per_token=self.top_k))
        if self.latent is not None:
            every.append(Matmul(inputs=Elements(replicated=self.latent), outputs=hidden_side))
        if self.shared is not None:
            every += self.shared.mlp.matmuls(hidden)
            if self.shared.gate:
                every.append(Matmul(inputs=hidden_side, outputs=Elements(replicated=1)))
        return tuple(every)

    def multiply_adds(self, hidden: int) -> MultiplyAdds:
        """Of the experts a token passes, as Megatron-LM counts: neither the router nor gates."""
        experts = self.top_k * self.expert.multiply_adds(self.width(hidden)).per_token
        shared = 0 if self.shared is None else self.shared.mlp.multiply_adds(hidden).per_token
        return MultiplyAdds(experts + shared + 2 * hidden * (self.latent or 0))

    def tensors(self, hidden: int) -> Mapping[Part, Elements]:
        """Those of top_k experts and of the shared one."""
        inner, total = self.expert.tensors(self.width(hidden)), {}
        shared = {} if self.shared is None else self.shared.mlp.tensors(hidden)
        for part, elements in inner.items():
            more = shared[part].sharded if part in shared else 0
            total[part] = Elements(sharded=self.top_k * elements.sharded + more)
        return total

    def expert_facts(self, hidden: int) -> ExpertFacts:
        """How the experts are reached."""
        width, dispatch = self.width(hidden), self.dispatch
        return ExpertFacts(
            experts=self.experts,
            top_k=self.top_k,
            width=width,
            tensors={part: elements.sharded for part, elements in self.expert.tensors(width).items()},
            way=dispatch.way,
            room=dispatch.room,
            chunks=dispatch.chunks,
            has_shared=self.shared is not None,
        )

    def megatron_matrices(self, hidden: int, gains: int) -> int:
        """Of the layer that all tokens pass."""
        return 0 if self.shared is None else self.shared.mlp.megatron_matrices(hidden, gains)

    def megatron_experts(self, hidden: int) -> int:
        """Their matrices."""
        return self.experts * self.expert.megatron_matrices(self.width(hidden), gains=1)

    def megatron_router(self, hidden: int) -> int:
        """The router, and the gate of the shared layer."""
        gate = self.shared is not None and self.shared.gate
        return hidden * self.experts + self.experts * self.router.bias + hidden * gate

    def megatron_ffn(self) -> int:
        """That of an expert."""
        return self.expert.ffn

    def tensor_sizes(self) -> list[int]:
        """Numbers of devices of `tensor` that every ffn can be divided over."""
        sizes = set(self.expert.tensor_sizes())
        return sorted(sizes if self.shared is None else sizes & set(self.shared.mlp.tensor_sizes()))

    def mesh_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """The devices that experts are spread over have to divide them, and `tensor` every ffn that it cuts."""
        expert_devices, ffn_devices = sizes.get("experts", sizes["expert"]), sizes.get("expert_mlp", sizes["tensor"])
        if self.experts % expert_devices:
            over = "" if expert_devices == sizes["expert"] else f" x parallel.tensor={sizes['tensor']}"
            legal = ", ".join(map(str, divisors_of(self.experts)))
            message = f"experts={self.experts} is not divisible by parallel.expert={sizes['expert']}{over}"
            yield Problem("experts", message, f"they can be spread over {legal} devices")
        layers = {"expert": (self.expert, ffn_devices)}
        if self.shared is not None:
            layers["shared.mlp"] = self.shared.mlp, sizes["tensor"]
        for name, (layer, tensor) in layers.items():
            for problem in layer.mesh_problems({**sizes, "tensor": tensor}):
                yield replace(problem, setting=f"{name}.{problem.setting}")

    def matmul_sides(self, hidden: int, tensor: int) -> Iterator[Side]:
        """Of what all tokens pass. Grouped matmuls of experts have no recipe: their sides may be any."""
        if self.latent is not None:
            yield Side("latent", "is", self.latent)
        if self.shared is not None:
            for side in self.shared.mlp.matmul_sides(hidden, tensor):
                yield side._replace(setting=f"shared.mlp.{side.setting}")

    def derived(self, name: str, stored: Mapping[str, tuple[int, ...]]) -> Any:
        """How a weight is made from those of a dense layer; see megajax.layers.upcycling."""
        return resolve("megajax.layers.upcycling:derived")(self, name, stored)

    def summary(self, hidden: int) -> str:
        """Numbers of experts, and their width."""
        shared = "" if self.shared is None else f", shared {self.shared.mlp.summary(hidden)}"
        return f"{self.top_k} of {self.experts} experts of {self.expert.summary(self.width(hidden))}{shared}"


type FeedForwardConfig = MLPConfig | MoEConfig
