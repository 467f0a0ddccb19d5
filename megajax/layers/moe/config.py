"""Configs of mixtures of experts; imports neither jax nor flax."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from megajax.config.bounds import BelowOne, Bounds, Count, NotNegative, Positive, Size
from megajax.config.class_references import resolve
from megajax.config.errors import Problem
from megajax.config.hints import divisors_of
from megajax.kernels.attention.capability import KernelChoice
from megajax.kernels.attention.request import KernelDevice, KernelRequest
from megajax.kernels.grouped.capability import GroupedKernel, GroupedSizes, choose_grouped
from megajax.layers.expert_facts import ExpertFacts, Way
from megajax.layers.facts import Elements, LayerFacts, Matmul, Side, Weight, prefixed
from megajax.layers.mlp.config import MLPConfig, XieluMLPConfig
from megajax.layers.recompute import Part


@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """A limit on the tokens of each expert, counted over the rows of a microbatch on all devices.

    Example: `mj.CapacityConfig(factor=1.25)`
    """

    factor: Positive = 1.0
    """Capacity over the mean number of tokens of an expert."""
    drop: Literal["probability", "position"] = "probability"
    """Tokens that an expert keeps: those with the largest weights, or the first ones."""


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Chooses the experts of each token and their weights. Computes in float32.

    Example: `mj.RouterConfig(score="sigmoid", scale=2.5, balance_rate=1e-3)`
    """

    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    """Scores of the experts from the router's logits."""
    normalise: Literal["chosen", "all"] = "chosen"
    """chosen: the weights of a token's experts add up to 1 (softmax over the chosen logits; sigmoid: divided by the
    sum); all: the weights are the scores among all experts."""
    scale: Positive = 1.0
    """Factor on the weights."""
    groups: int | None = None
    """Number of groups of experts; a token first chooses `chosen_groups` of them; none: no groups."""
    chosen_groups: int | None = None
    """Groups that a token chooses: those with the largest sums of their best scores."""
    group_scores: int | None = None
    """Number of best scores of a group that are summed; none: top_k / chosen_groups."""
    bias: bool = False
    """A trained bias on the logits."""
    balance_rate: Positive | None = None
    """Balancing without a loss: a bias on scores, used only for the choice of experts. Each step raises it by this
    value for experts with fewer tokens than the mean and lowers it for others (Wang et al. 2024); none: no bias."""
    aux_loss: NotNegative = 0.0
    """Coefficient of the load-balancing loss over the tokens of a microbatch (Fedus et al. 2021, equation 4)."""
    row_loss: NotNegative = 0.0
    """Coefficient of the same loss over each row, averaged over rows."""
    global_loss: NotNegative = 0.0
    """Coefficient of the same loss with token counts that include the batch of the last step (Qiu et al. 2025)."""
    z_loss: NotNegative = 0.0
    """Coefficient of the mean squared logarithm of the partition function of the logits (Zoph et al. 2022)."""
    sinkhorn: bool = False
    """In training, experts are chosen by logits that Sinkhorn's algorithm balances (Clark et al. 2022)."""
    sparse_mixer: Positive | None = None
    """Experts are chosen one after another (SparseMixer, Liu et al. 2024, as in Phi-3.5-MoE), each among those whose
    logits differ from the best by at most twice this, relative to the larger of the two. Its weight is its share among
    them; in training it is drawn by these shares, and gradients are Heun's estimate. none: top_k at once."""
    jitter: BelowOne = 0.0
    """In training, the input of the router is multiplied by random factors from 1 - jitter to 1 + jitter."""
    force_balance: bool = False
    """Assign tokens to experts round-robin, ignoring scores: for benchmarks."""
    capacity: CapacityConfig | None = None
    """A limit on the tokens of each expert; none: no token is dropped."""

    def problems(self) -> list[Problem]:
        problems = []
        if self.group_scores is not None and self.groups is None:
            problems.append(
                Problem("group_scores", "needs groups of experts, but groups=none", "set groups, or set this to none")
            )
        if (self.groups is None) != (self.chosen_groups is None):
            problems.append(Problem("groups", "must be given together with chosen_groups", "set both, or neither"))
        balancing = self.aux_loss or self.row_loss or self.global_loss or self.balance_rate is not None
        if self.sinkhorn and (balancing or self.groups is not None):
            message = "balances experts itself and excludes losses, groups and balance_rate"
            problems.append(Problem("sinkhorn", message, "set these losses to 0, the others to none"))
        others = self.sinkhorn or self.groups is not None or self.balance_rate is not None
        if self.sparse_mixer is not None and (others or self.score != "softmax"):
            message = "needs scores by softmax, and no sinkhorn, groups or balance_rate"
            problems.append(Problem("sparse_mixer", message, "set it to none"))
        return problems

    def coefficients(self) -> dict[str, float]:
        """Coefficients of the losses, by name."""
        return {"aux": self.aux_loss, "row": self.row_loss, "global": self.global_loss, "z": self.z_loss}

    def expert_problems(self, experts: int, top_k: int) -> Iterator[Problem]:
        """Problems of the router with this number of experts and top_k."""
        groups, chosen_groups = self.groups, self.chosen_groups
        if groups is None or chosen_groups is None:
            return
        legal = ", ".join(map(str, divisors_of(experts)))
        if groups < 1 or experts % groups:
            yield Problem("groups", f"{groups} groups do not divide {experts} experts", f"groups can be {legal}")
        elif not 1 <= chosen_groups <= groups:
            yield Problem("chosen_groups", f"must be between 1 and groups={groups}, got {chosen_groups}")
        elif self.group_scores is None and top_k % chosen_groups:
            message = f"{chosen_groups} does not divide top_k={top_k}"
            yield Problem("chosen_groups", message, "use one of its divisors, or set group_scores")
        elif self.group_scores is not None and not 1 <= self.group_scores <= experts // groups:
            message = f"is {self.group_scores}, but a group has {experts // groups} experts"
            yield Problem("group_scores", message, f"use 1 to {experts // groups}")
        elif top_k > experts // groups * chosen_groups:
            message = f"{chosen_groups} groups of {experts // groups} experts have fewer than top_k={top_k}"
            yield Problem("chosen_groups", message, f"use at least {-(-top_k * groups // experts)}")


@dataclass(frozen=True, kw_only=True)
class SharedExpertConfig:
    """A feed-forward layer for all tokens, in addition to the chosen experts.

    Example: `mj.SharedExpertConfig(mlp=mj.GatedMLPConfig(ffn=2816))`
    """

    mlp: MLPConfig
    """The layer."""
    gate: bool = False
    """Multiply its output by the sigmoid of a projection of the input to one number."""


@dataclass(frozen=True, kw_only=True)
class DispatchConfig:
    """How tokens are sent to experts on other devices; see docs/moe.md.

    Example: `mj.DispatchConfig(room=1.5)`
    """

    way: Way = "auto"
    """gather: all tokens to all devices of `expert`; ragged: each token to the devices of its experts; capacity: the
    same in parts of equal size; auto: gather, see docs/moe.md."""
    room: Annotated[float, Bounds(at_least=1, hint="1.5 is usual, none drops nothing")] | None = None
    """Buffer rows of a device over the mean. Tokens beyond that are dropped, from the experts with most tokens, and
    counted in the metrics. none: room for the worst case; no token is dropped."""
    chunks: Count = 1
    """Parts of the tokens of a device that are sent and computed in sequence, each recomputed in the backward pass, so
    that only one part is in memory."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig(LayerFacts):
    """A mixture of experts: a router chooses top_k feed-forward layers for each token.

    Example: `mj.MoEConfig(experts=8, top_k=2, expert=mj.GatedMLPConfig(ffn=14336))`
    """

    target: ClassVar[str] = "megajax.layers.moe.module:MixtureOfExperts"
    experts: Size
    """Number of experts."""
    top_k: Size = 2
    """Number of experts per token."""
    expert: MLPConfig
    """The layer of each expert."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """How experts are chosen."""
    shared: SharedExpertConfig | None = None
    """Shared expert for all tokens; none: no such layer."""
    weigh: Literal["outputs", "inputs"] = "outputs"
    """What the weight of a chosen expert multiplies: its output, or its input, as in Llama 4."""
    latent: Size | None = None
    """Width that tokens are projected to for the experts; none: experts have the hidden size."""
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    """How tokens are sent to experts on other devices."""
    kernel: GroupedKernel = "auto"
    """Kernel of the grouped matmul. auto: the fastest available; otherwise this one or an error. With precision.matmul,
    a device's kernel of codes comes first, except with reference."""

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if self.top_k > self.experts:
            message = f"is {self.top_k}, but there are experts={self.experts}"
            problems.append(Problem("top_k", message, f"use at most {self.experts}"))
        return problems + [
            replace(problem, setting=f"router.{problem.setting}")
            for problem in self.router.expert_problems(self.experts, self.top_k)
        ]

    def draws_numbers(self) -> bool:
        """Whether training draws random numbers."""
        router = self.router
        return router.jitter > 0 or router.sinkhorn or router.sparse_mixer is not None

    def compares_rows(self) -> dict[str, Literal["rows", "order"]]:
        """Settings that make tokens depend on the other rows of a microbatch, or on their order."""
        router = self.router
        by_rows = {"router.aux_loss": router.aux_loss, "router.global_loss": router.global_loss}
        by_order = {"router.sinkhorn": router.sinkhorn, "router.capacity": router.capacity is not None}
        # Which tokens are dropped depends on which rows share a device.
        by_order["dispatch.room"] = self.dispatch.room is not None
        return {name: "rows" for name, used in by_rows.items() if used} | {
            name: "order" for name, used in by_order.items() if used
        }

    def kernel_choice(
        self, hidden: int, request: KernelRequest, device: KernelDevice | None, setting: str = "kernel"
    ) -> KernelChoice[GroupedKernel]:
        """The grouped matmul's kernel, and why not a faster one. device: None for any NVIDIA GPU.

        Raises UserError if a kernel chosen by name is not available; `setting` names it.
        """
        # The number of rows depends on the layout; any legal number does here.
        sizes = GroupedSizes(4096, self.experts, self.width(hidden), self.expert.ffn)
        choice = choose_grouped(self.kernel, request.dtype, device, setting, sizes)
        return KernelChoice(choice.kernel, choice.reasons, "experts")

    def decoding(self) -> Self:
        """The layer without settings that make a token depend on others: capacity, room and forced balance."""
        router = replace(self.router, capacity=None, force_balance=False)
        return replace(self, router=router, dispatch=replace(self.dispatch, room=None))

    def with_kernel(self, name: GroupedKernel) -> Self:
        """A copy with this kernel."""
        return replace(self, kernel=name)

    def width(self, hidden: int) -> int:
        """Width of the experts' inputs and outputs."""
        return self.latent or hidden

    def inner_weights(self, hidden: int) -> tuple[Weight, ...]:
        """The stacked weights of the experts."""
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
        """Matmuls of the router, the experts and the shared expert."""
        hidden_side = Elements(replicated=hidden)
        every = [Matmul(inputs=hidden_side, outputs=Elements(replicated=self.experts))]
        if self.latent is not None:
            every.append(Matmul(inputs=hidden_side, outputs=Elements(replicated=self.latent)))
        up, down = self.expert.matmuls(self.width(hidden))
        down = down if self.latent is None else replace(down, result=None)
        every += [replace(matmul, experts=self.experts, per_token=self.top_k) for matmul in (up, down)]
        if self.latent is not None:
            every.append(Matmul(inputs=Elements(replicated=self.latent), outputs=hidden_side, result="residual"))
        if self.shared is not None:
            every += self.shared.mlp.matmuls(hidden)
            if self.shared.gate:
                every.append(Matmul(inputs=hidden_side, outputs=Elements(replicated=1)))
        return tuple(every)

    def megatron_surplus(self, hidden: int) -> int:
        """Router and gates are left out."""
        return -hidden * (self.experts + (self.shared is not None and self.shared.gate))

    def tensors(self, hidden: int) -> Mapping[Part, Elements]:
        """Tensors of top_k experts and of the shared expert."""
        inner, total = self.expert.tensors(self.width(hidden)), {}
        shared = {} if self.shared is None else self.shared.mlp.tensors(hidden)
        for part, elements in inner.items():
            more = shared[part].sharded if part in shared else 0
            total[part] = Elements(sharded=self.top_k * elements.sharded + more)
        return total

    def expert_facts(self, hidden: int) -> ExpertFacts:
        """Rows, buffers and collectives of the experts."""
        width, dispatch = self.width(hidden), self.dispatch
        return ExpertFacts(
            experts=self.experts,
            top_k=self.top_k,
            width=width,
            tensors={part: elements.sharded for part, elements in self.expert.tensors(width).items()},
            way=dispatch.way,
            room=dispatch.room,
            chunks=dispatch.chunks,
            shared=0 if self.shared is None else round(self.shared.mlp.multiply_adds(hidden).per_token),
        )

    def megatron_matrices(self, hidden: int, gains: int) -> int:
        """Parameters of the shared expert."""
        return 0 if self.shared is None else self.shared.mlp.megatron_matrices(hidden, gains)

    def megatron_experts(self, hidden: int) -> int:
        """Parameters of the matrices of experts."""
        return self.experts * self.expert.megatron_matrices(self.width(hidden), gains=1)

    def megatron_router(self, hidden: int) -> int:
        """Parameters of the router and of the gate of the shared expert."""
        gate = self.shared is not None and self.shared.gate
        return hidden * self.experts + self.experts * self.router.bias + hidden * gate

    def megatron_ffn(self) -> int:
        """The ffn of an expert."""
        return self.expert.ffn

    def tensor_sizes(self) -> list[int]:
        """Legal sizes of `tensor`: divisors of every ffn."""
        sizes = set(self.expert.tensor_sizes())
        return sorted(sizes if self.shared is None else sizes & set(self.shared.mlp.tensor_sizes()))

    def mesh_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """The devices of experts must divide their number, and `tensor` must divide every ffn that it shards."""
        expert_devices, ffn_devices = sizes.get("experts", sizes["expert"]), sizes.get("expert_mlp", sizes["tensor"])
        if self.experts % expert_devices:
            over = "" if expert_devices == sizes["expert"] else f" x parallel.tensor={sizes['tensor']}"
            legal = ", ".join(map(str, divisors_of(self.experts)))
            message = f"experts={self.experts} is not divisible by parallel.expert={sizes['expert']}{over}"
            yield Problem("experts", message, f"they can be distributed over {legal} devices")
        layers = {"expert": (self.expert, ffn_devices)}
        if self.shared is not None:
            layers["shared.mlp"] = self.shared.mlp, sizes["tensor"]
        for name, (layer, tensor) in layers.items():
            for problem in layer.mesh_problems({**sizes, "tensor": tensor}):
                yield replace(problem, setting=f"{name}.{problem.setting}")

    def matmul_sides(self, hidden: int, tensor: int) -> Iterator[Side]:
        """Sides of whole experts, the shared expert and latents. Parts of experts are checked when traced."""
        for side in self.expert.matmul_sides(hidden, 1):
            yield side._replace(setting=f"expert.{side.setting}")
        if self.latent is not None:
            yield Side("latent", "is", self.latent)
        if self.shared is not None:
            for side in self.shared.mlp.matmul_sides(hidden, tensor):
                yield side._replace(setting=f"shared.mlp.{side.setting}")

    def derived(self, name: str, stored: Mapping[str, tuple[int, ...]]) -> Any:
        """How a weight is made from those of a dense layer; see megajax.layers.moe.upcycling."""
        return resolve("megajax.layers.moe.upcycling:derived")(self, name, stored)

    def summary(self, hidden: int) -> str:
        """Numbers of experts, and their width."""
        shared = "" if self.shared is None else f", shared {self.shared.mlp.summary(hidden)}"
        return f"{self.top_k} of {self.experts} experts of {self.expert.summary(self.width(hidden))}{shared}"


type FeedForwardConfig = MLPConfig | XieluMLPConfig | MoEConfig
