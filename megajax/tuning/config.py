"""The config of rollouts; imports neither jax nor flax."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from megajax.config.bounds import Bounds, Count, Index, Positive, Share
from megajax.config.class_references import Builds
from megajax.config.errors import Problem
from megajax.config.paths_and_store_urls import PathText, StoredText
from megajax.data.rows.config import LoaderConfig
from megajax.data.text.config import text_leaves
from megajax.inference.config import InferenceConfig, InferenceParallelConfig


@dataclass(frozen=True, kw_only=True)
class RolloutsConfig(Builds):
    """Answers of the model itself to prompts, and rewards for them, as the rows of `GRPOConfig`.

    Files of JSON lines, each {"prompt": …} with a text, token ids or a list of messages, and any other fields. A
    rollout has `answers` answers to each of `prompts` prompts, sampled by an engine on the weights of the run at the
    temperature of `GRPOConfig`. Its rows are the batches of the following steps.

    Example: `mj.RolloutsConfig(paths=("data/prompts.jsonl",), rewards=("rewards.py:is_right",), max_tokens=256)`
    """

    target: ClassVar[str] = "megajax.tuning.prompts:build_splits"
    has_messages: ClassVar[bool] = True

    paths: tuple[StoredText, ...] = ()
    """Files of JSON lines with prompts."""
    rewards: tuple[str, ...] = ()
    """Reward functions, FILE.py:NAME or MODULE:NAME. Each is called as function(prompt, answer, row), with the prompt
    of the line, the text of the answer and the whole line, and returns a number."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each reward; empty: 1."""
    reward_model: PathText | None = None
    """A run of a classifier with one score for each sequence, of prompt and answer: a reward beside those of functions,
    or the only one."""
    reward_model_weight: float = 1.0
    """Weight of its score."""
    prompts: Count = 8
    """Prompts of a rollout."""
    answers: Annotated[int, Bounds(at_least=2)] = 8
    """Answers to each prompt, which are compared with each other."""
    passes: Count = 1
    """Number of times that each answer is trained on."""
    prompt_tokens: Count = 128
    """Maximum number of tokens of a prompt. A row holds sequence_length / (prompt_tokens + max_tokens) answers."""
    max_tokens: Count = 128
    """Maximum number of tokens of an answer."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, in addition to the end-of-document token."""
    top_k: Index = 0
    """Tokens are drawn from the k likeliest ones; 0: from all. Old log-probabilities are those of the distribution that
    tokens are drawn from; the loss has those among all tokens."""
    top_p: Annotated[float, Bounds(at_least=1e-6, at_most=1)] = 1.0
    """Tokens are drawn from the likeliest ones whose probabilities add up to this; 1: from all."""
    min_p: Share = 0.0
    """Tokens are drawn from those with at least this share of the largest probability; 0: from all."""
    template: PathText | None = None
    """Renders prompts that are messages, as in ChatConfig."""
    scale: Literal["group", "batch", "none"] = "group"
    """Advantages are rewards minus the mean of their group, divided by the standard deviation of the group or of the
    rollout, or not at all (Dr. GRPO)."""
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Several rewards are added before or after each is normalised within the group (GDPO)."""
    ahead: Literal[0, 1] = 0
    """1: the next rollout is sampled before the updates of the present one, and its rewards are computed while these
    run, so answers are one rollout older than the weights. With old_log_p=trainer and truncation, that is corrected."""
    more_rollouts: Index = 0
    """Dynamic sampling (DAPO): up to this many further rollouts until `prompts` groups have unequal rewards. The groups
    with equal rewards are left out. 0: none; equal rewards give advantages of 0."""
    cut_answers: Literal["keep", "mask"] = "keep"
    """mask: answers without an end within max_tokens do not count in the loss (DAPO's overlong filtering)."""
    soft_tokens: Index = 0
    """The reward falls linearly by 1 over the last soft_tokens of max_tokens (DAPO's soft overlong punishment)."""
    old_log_p: Literal["engine", "trainer"] = "engine"
    """The log-probabilities that importance ratios start from: the engine's, or the trainer's of the same weights."""
    truncation: Positive | None = None
    """With old_log_p=trainer, the advantage of a token is multiplied by the ratio of its probabilities in trainer and
    engine, at most this number (truncated importance sampling); none: by 1."""
    compare: bool = True
    """The trainer scores each rollout before its first update, at the cost of a forward pass: metrics mismatch_*."""
    mismatch_limit: Positive | None = None
    """Largest difference of a token's log-probabilities in engine and trainer; none: any."""
    on_mismatch: Literal["mask", "stop"] = "mask"
    """Beyond mismatch_limit: the token does not count in the loss, or the run stops."""
    workers: Count = 2
    """Processes that compute rewards, beside each process of the run."""
    reward_seconds: Positive = 10.0
    """Limit of a reward function's time. A function that takes longer, raises an error, ends its process or returns no
    number is a reward of 0, which is counted; reward_failures.jsonl in the run folder has the first ones."""
    inference: InferenceConfig = field(default_factory=lambda: InferenceConfig(rows=64))
    """The engine; its dtype is precision.compute, and its length that of a prompt and its answer."""
    parallel: InferenceParallelConfig | None = None
    """Layout of the engine on the devices of the run; none: the run's tensor and expert, and a replica for each other
    device."""
    seed: int | None = None
    """Seed for the order of prompts and for sampling; none: the run's seed."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """Must be the default: rows are made as they are needed."""

    def leaves(self) -> dict[str, str]:
        """The leaves of a row, name -> dtype."""
        numbers = dict.fromkeys(("advantage", "old_log_p", "reference"), "float32")
        return {**text_leaves(isolated=True), "answers": "int32", "experts": "int16", **numbers}

    def problems(self) -> list[Problem]:
        problems = [] if self.paths else [Problem("paths", "names no file", "set data.paths=FILE.jsonl")]
        if not self.rewards and self.reward_model is None:
            remedy = "set data.rewards=FILE.py:NAME, or data.reward_model=RUN"
            problems.append(Problem("rewards", "names no function", remedy))
        if self.reward_weights and len(self.reward_weights) != len(self.rewards):
            message = f"has {len(self.reward_weights)} numbers for {len(self.rewards)} rewards"
            problems.append(Problem("reward_weights", message))
        if self.loader != LoaderConfig():
            problems.append(Problem("loader", "has no effect on rows that are made during the run", "leave it out"))
        if self.ahead and self.more_rollouts:
            message = f"is {self.more_rollouts}, which waits for rewards before it samples more"
            problems.append(Problem("more_rollouts", message, "set it to 0, or ahead=0"))
        if self.soft_tokens > self.max_tokens:
            message = f"{self.soft_tokens} is more than max_tokens={self.max_tokens}"
            problems.append(Problem("soft_tokens", message))
        if self.truncation is not None and self.old_log_p == "engine":
            problems.append(Problem("truncation", "needs the log-probabilities of the trainer", "old_log_p=trainer"))
        if not self.compare and (self.old_log_p == "trainer" or self.mismatch_limit is not None):
            name = "old_log_p" if self.old_log_p == "trainer" else "mismatch_limit"
            problems.append(Problem(name, "needs the scores of the trainer", "set compare=true"))
        return problems


@dataclass(frozen=True, kw_only=True)
class DigitSumsConfig(RolloutsConfig):
    """Rollouts on the 25 sums of two digits up to 4, for a first run without files.

    Example: `mj.DigitSumsConfig(prompts=8, answers=16)`
    """

    target: ClassVar[str] = "megajax.tuning.prompts:build_digit_sums"
    has_messages: ClassVar[bool] = False

    rewards: tuple[str, ...] = ("megajax.tuning.digit_sums:close", "megajax.tuning.digit_sums:right")
    """Reward functions, as in RolloutsConfig: 1 for the sum and less for other digits, and whether it is the sum."""
    reward_weights: tuple[float, ...] = (1.0, 0.0)
    """Weight of each reward."""
    prompt_tokens: Count = 4
    """Maximum number of tokens of a prompt."""
    max_tokens: Count = 1
    """Maximum number of tokens of an answer."""

    def problems(self) -> list[Problem]:
        if self.paths:
            return [Problem("paths", "has no effect on digit sums", "use RolloutsConfig for prompts of files")]
        return [problem for problem in super().problems() if problem.setting != "paths"]
