"""Configs of losses of whole answers, and of decoders trained by one; imports neither jax nor flax."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from megajax.batch import Leaf
from megajax.config.bounds import BelowOne, Count, NotNegative, Positive, Share
from megajax.config.class_references import Builds
from megajax.config.errors import Problem
from megajax.layers.block.config import BlockConfig
from megajax.layers.cache_spec import CacheLeaf
from megajax.layers.moe.config import MoEConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.transformer import settings_of

PAIR_KINDS = 2
"""Answers of a pair: the chosen and the rejected one. The leaf `pairs` has 1 + 2 * pair + kind at their tokens."""
JUDGED_KINDS = 3
"""A good answer, a bad one, and an answer to another prompt. The leaf `judged` has 1 + 3 * group + kind."""

EXPERTS = "{}.mlp.experts"
"""Name of the cache leaf with the experts of the layers of a block, by its number."""


def token_leaf(dtype: str, length: int) -> Leaf:
    """A number for each label of a row, that only the loss reads."""
    return Leaf(dtype, (length,), ("seq",), loss_only=True)


class ObjectiveConfig(Protocol):
    """A loss of whole answers."""

    def build(self) -> Any:
        """The loss: a `megajax.models.answers.objectives.AnswerObjective`."""
        ...

    def leaves(self, length: int) -> dict[str, Leaf]:
        """The leaves of a row that the loss reads besides those of text; length: tokens in a row."""
        ...

    def first_loss(self) -> str:
        """The expected loss of the first step, for the banner; "" if it depends on the weights."""
        ...


def pair_leaves(length: int) -> dict[str, Leaf]:
    """The leaves of losses of pairs."""
    return {"pairs": token_leaf("int32", length)}


def reference_leaf(length: int) -> dict[str, Leaf]:
    """The log-probabilities of labels under the reference model."""
    return {"reference": token_leaf("float32", length)}


@dataclass(frozen=True, kw_only=True)
class DPOConfig(Builds):
    """Direct preference optimization (Rafailov et al. 2023) and its variants, relative to a reference model.

    Example: `mj.with_objective(mj.llama3("8b"), mj.DPOConfig(beta=0.1))`
    """

    target: ClassVar[str] = "megajax.models.answers.objectives:DPO"

    loss: Literal["sigmoid", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "apo_zero", "apo_down", "sppo_hard"] = (
        "sigmoid"
    )
    """sigmoid: DPO; with label_smoothing conservative DPO. The others: see docs/tuning.md."""
    beta: Positive = 0.1
    """Factor on the log-ratios of policy and reference: the larger, the closer the policy stays to the reference. With
    ipo, the target of the margin per token is 1 / (2 beta)."""
    label_smoothing: BelowOne = 0.0
    """Share of the pairs whose answers are taken to be swapped; read by sigmoid, robust and exo_pair."""
    divergence: Literal["reverse_kl", "forward_kl", "jensen_shannon"] = "reverse_kl"
    """Divergence from the reference that is penalised (Wang et al. 2023, f-DPO)."""
    length_weight: NotNegative = 1.0
    """Weight of the tokens of the longer answer beyond the length of the shorter one (Liu et al. 2024, LD-DPO); 1: all
    tokens count alike."""
    sft_weight: NotNegative = 0.0
    """Weight of an additional cross-entropy of the chosen answers, as a mean over their tokens."""

    def problems(self) -> list[Problem]:
        problems = []
        if self.label_smoothing >= 0.5 and self.loss == "robust":
            problems.append(
                Problem("label_smoothing", f"must be below 0.5 with loss=robust, got {self.label_smoothing}")
            )
        if not self.label_smoothing and self.loss == "exo_pair":
            problems.append(Problem("label_smoothing", "must be above 0 with loss=exo_pair", "use 1e-3"))
        if self.label_smoothing and self.loss not in ("sigmoid", "robust", "exo_pair"):
            problems.append(Problem("label_smoothing", f"has no effect with loss={self.loss}", "set it to 0"))
        return problems

    def leaves(self, length: int) -> dict[str, Leaf]:
        """The pairs, and the log-probabilities of the reference model."""
        return pair_leaves(length) | reference_leaf(length)

    def first_loss(self) -> str:
        """ln 2 where policy and reference are equal."""
        plain = self.loss == "sigmoid" and self.divergence == "reverse_kl" and not self.sft_weight
        return "ln 2 = 0.693" if plain else ""


@dataclass(frozen=True, kw_only=True)
class ORPOConfig(Builds):
    """Odds ratio preference optimization (Hong et al. 2024): cross-entropy of chosen answers plus an odds ratio term.

    It needs no reference model. Both terms use means over the tokens of an answer.

    Example: `mj.with_objective(mj.llama3("8b"), mj.ORPOConfig(weight=0.1))`
    """

    target: ClassVar[str] = "megajax.models.answers.objectives:ORPO"

    weight: Positive = 0.1
    """Weight of the odds ratio term (lambda in the paper, beta in TRL)."""

    def leaves(self, length: int) -> dict[str, Leaf]:
        """The pairs."""
        return pair_leaves(length)

    def first_loss(self) -> str:
        """It depends on the weights."""
        return ""


@dataclass(frozen=True, kw_only=True)
class SimPOConfig(Builds):
    """Simple preference optimization (Meng et al. 2024), without a reference model.

    Example: `mj.with_objective(mj.llama3("8b"), mj.SimPOConfig(beta=2.0, gamma=1.0))`
    """

    target: ClassVar[str] = "megajax.models.answers.objectives:SimPO"

    beta: Positive = 2.0
    """Factor on the difference of log-probabilities."""
    gamma: NotNegative = 1.0
    """The margin that beta times the difference should exceed."""
    average: Literal["tokens", "none"] = "tokens"
    """tokens: mean log-probabilities per token; none: sums. With none and gamma=0 this is CPO (Xu et al. 2024)."""
    label_smoothing: BelowOne = 0.0
    """Share of the pairs whose answers are taken to be swapped."""
    sft_weight: NotNegative = 0.0
    """Weight of an additional cross-entropy of the chosen answers, as a mean over their tokens."""

    def leaves(self, length: int) -> dict[str, Leaf]:
        """The pairs."""
        return pair_leaves(length)

    def first_loss(self) -> str:
        """It depends on the weights."""
        return ""


@dataclass(frozen=True, kw_only=True)
class KTOConfig(Builds):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024) of single answers that are good or bad.

    Example: `mj.with_objective(mj.llama3("8b"), mj.KTOConfig(beta=0.1))`
    """

    target: ClassVar[str] = "megajax.models.answers.objectives:KTO"

    beta: Positive = 0.1
    """Factor on the log-ratios of policy and reference."""
    desirable_weight: Positive = 1.0
    """Weight of the losses of good answers."""
    undesirable_weight: Positive = 1.0
    """Weight of the losses of bad answers."""

    def leaves(self, length: int) -> dict[str, Leaf]:
        """The judged answers, and the log-probabilities of the reference model."""
        return {"judged": token_leaf("int32", length)} | reference_leaf(length)

    def first_loss(self) -> str:
        """One half where policy and reference are equal."""
        return "0.5" if self.desirable_weight == self.undesirable_weight == 1 else ""


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(Builds):
    """Group relative policy optimization (Shao et al. 2024) of sampled answers, and its variants.

    Dr. GRPO (Liu et al. 2025): average="length", with `RolloutsConfig.scale="none"`. DAPO (Yu et al. 2025):
    average="tokens", clip_high=0.28. GSPO (Zheng et al. 2025): ratio="sequence", with clips of about 3e-4.

    Example: `mj.with_objective(mj.llama3("8b"), mj.GRPOConfig(average="tokens", clip_high=0.28))`
    """

    target: ClassVar[str] = "megajax.models.answers.policy:policy_gradient"

    loss: Literal["clipped", "cispo"] = "clipped"
    """clipped: importance ratios are clipped, and the gradient of a clipped token is 0 (Schulman et al. 2017, PPO).
    cispo: log-probabilities with ratios of at most clip_high as constant weights (MiniMax 2025)."""
    ratio: Literal["token", "sequence"] = "token"
    """Importance ratios of tokens, or the same one for all tokens of an answer: the exponential of the mean difference.
    With sequence, a step costs one more product with the head."""
    clip_low: Share = 0.2
    """Ratios below 1 - clip_low are clipped where the advantage is negative."""
    clip_high: Positive = 0.2
    """Ratios above 1 + clip_high are clipped where the advantage is positive; with cispo the largest ratio itself."""
    average: Literal["answers", "tokens", "length"] = "answers"
    """answers: the mean over answers of means over their tokens. tokens: the mean over all tokens. length: sums over
    the tokens of answers, divided by `length` and averaged over answers."""
    length: Count = 1
    """Tokens by which sums are divided with average=length: the most tokens of an answer."""
    kl_weight: NotNegative = 0.0
    """Weight of the KL divergence from the reference model, the weights that the run starts from; estimated by k3
    (Schulman 2020) and not clipped."""
    temperature: Positive = 1.0
    """Divisor of the logits: answers are sampled from these probabilities, and all log-probabilities are of them."""
    entropy_weight: NotNegative = 0.0
    """Weight of the mean entropy of answer tokens, which is subtracted from the loss: the model goes on exploring."""

    router_replay: Literal["off", "rollout"] = "off"
    """rollout: each token goes to the experts that the engine chose when it read it, in prompts too; the weights of the
    experts are those of the present router, which gets gradients. off: routers choose again."""

    def problems(self) -> list[Problem]:
        problems = []
        if self.entropy_weight and self.ratio == "sequence":
            problems.append(Problem("entropy_weight", "has no effect with ratio=sequence", "set it to 0"))
        if self.length > 1 and self.average != "length":
            problems.append(Problem("length", f"has no effect with average={self.average}", "use average=length"))
        if self.loss == "cispo" and self.ratio == "sequence":
            problems.append(Problem("ratio", "must be token with loss=cispo, got sequence"))
        return problems

    def leaves(self, length: int) -> dict[str, Leaf]:
        """The answers, and for each token its advantage and its log-probability when it was sampled."""
        leaves = {"answers": token_leaf("int32", length)}
        leaves |= {name: token_leaf("float32", length) for name in ("advantage", "old_log_p")}
        return leaves | (reference_leaf(length) if self.kl_weight else {})

    def first_loss(self) -> str:
        """It depends on the rewards."""
        return ""


@dataclass(frozen=True, kw_only=True)
class AnswerDecoderConfig(DecoderConfig):
    """A decoder trained by a loss of whole answers in place of the cross-entropy of tokens. Its weights are the same.

    Example: `mj.with_objective(mj.llama3("8b"), mj.DPOConfig(beta=0.1))`
    """

    target: ClassVar[str] = "megajax.models.answers.module:AnswerDecoder"
    objective: DPOConfig | ORPOConfig | SimPOConfig | KTOConfig | GRPOConfig | ObjectiveConfig
    """The loss of answers."""

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if self.prediction is not None:
            problems.append(Problem("prediction", "has no loss of whole answers", "set it to none"))
        for name in ("label_smoothing", "z_loss"):
            if getattr(self, name):
                message = f"belongs to the cross-entropy of tokens, which {type(self.objective).__name__} replaces"
                problems.append(Problem(name, message, "set it to 0"))
        return problems + self.replay_problems()

    def replay_problems(self) -> list[Problem]:
        """Why experts of rollouts can't be taken again."""
        if not self.replays_experts():
            return []
        layers = mixtures(self.named_blocks())
        if not layers:
            return [Problem("objective.router_replay", "is rollout, and the model has no experts", "set it to off")]
        message = "gives training other experts than the engine has, which objective.router_replay=rollout excludes"
        return [
            Problem(f"{place}.mlp.{name}", message, "leave it at its default")
            for place, mlp in layers.items()
            for name, used in (
                ("router.sinkhorn", mlp.router.sinkhorn),
                ("router.sparse_mixer", mlp.router.sparse_mixer is not None),
                ("router.force_balance", mlp.router.force_balance),
                ("router.capacity", mlp.router.capacity is not None),
                ("dispatch.room", mlp.dispatch.room is not None),
            )
            if used
        ]

    def replays_experts(self) -> bool:
        """Whether batches have the experts of tokens, and a cache keeps them."""
        return getattr(self.objective, "router_replay", "off") == "rollout"

    def expert_leaves(self) -> tuple[CacheLeaf, ...]:
        """Leaves of the cache with the experts of tokens."""
        stored = dict(enumerate(self.stack.stored()))
        return tuple(
            CacheLeaf(EXPERTS.format(number), (mlp.top_k,), (None,), dtype="int16", layers=len(stored[number][1]))
            for number, mlp in mixtures({number: block for number, (block, _) in stored.items()}).items()
        )

    def cache_leaves(self, tensor: int, drafts: int = 0) -> tuple[CacheLeaf, ...]:
        """Those of layers, and the experts of tokens where rollouts give them to training."""
        leaves = super().cache_leaves(tensor, drafts)
        return (*leaves, *self.expert_leaves()) if self.replays_experts() else leaves

    def first_loss(self) -> str:
        """That of the objective."""
        return self.objective.first_loss()

    def schema(self) -> dict[str, Leaf]:
        """The leaves of text, and those of the objective."""
        schema = {**super().schema(), **self.objective.leaves(self.sequence_length)}
        if self.replays_experts():
            most = max((leaf.shape[0] for leaf in self.expert_leaves()), default=0)
            shape = (self.sequence_length, self.stack.layers(), most)
            schema["experts"] = Leaf("int16", shape, ("seq", None, None), optional=True)
        return schema


def mixtures[Key](blocks: Mapping[Key, BlockConfig]) -> dict[Key, MoEConfig]:
    """The mixtures of experts among the feed-forward layers of blocks."""
    return {key: block.mlp for key, block in blocks.items() if isinstance(block.mlp, MoEConfig)}


def with_objective(model: DecoderConfig, objective: ObjectiveConfig) -> AnswerDecoderConfig:
    """The model with this loss of answers.

    Example: `mj.with_objective(mj.llama3("8b"), mj.DPOConfig(beta=0.1))`
    """
    return AnswerDecoderConfig(objective=objective, **settings_of(model))
