"""Settings of the optimizers and of the schedule that drives them, without importing jax."""

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Protocol

from megajax.config.bounds import BelowOne, Bounds, Count, Index, NotEmpty, NotNegative, Positive, Share
from megajax.config.class_references import Builds
from megajax.config.errors import Problem

type Dtype = Literal["float32", "bfloat16"]
type MomentDtype = Literal["float32", "bfloat16", "float16"]
type Epsilon = Annotated[float, Bounds(above=0, hint="a weight without gradient divides by it")]
type Samples = Callable[[int], int]
"""Number of first steps -> rows that they read; not proportional if the batch size is ramped."""

SMALLEST_CHANGES = (("bfloat16", 2**-8), ("float16", 2**-10))
"""Smallest relative change of a stored average that survives rounding; float16 stores roots."""


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Different learning rates or weight decay for some weights; none: no difference.

    Example: `mj.AdamWConfig(groups=(mj.GroupConfig(match="*.mixer.*", lr_multiplier=0.5),))`
    """

    match: Annotated[str, NotEmpty("name weights by their path, * stands for any text")]
    """Paths of the weights, with * for any text: stack.blocks.*.mlp.* or *bias. No match is an error."""
    lr: NotNegative | None = None
    """Highest learning rate of these weights, in place of schedule.lr."""
    min_lr: NotNegative | None = None
    """Lowest learning rate, in place of schedule.min_lr."""
    lr_multiplier: NotNegative | None = None
    """Factor on the learning rate; 0 freezes the weights."""
    decay: NotNegative | None = None
    """Factor on the weight decay; 0 turns it off."""

    def problems(self) -> list[Problem]:
        if self.lr is None or (self.min_lr or 0) <= self.lr:
            return []
        return [Problem("min_lr", f"min_lr={self.min_lr} is above lr={self.lr}")]


@dataclass(frozen=True, kw_only=True)
class UpdateConfig(Builds):
    """Settings of all optimizers."""

    weight_decay: NotNegative = 0.01
    """Weight decay per step, multiplied by the learning rate; biases, gains and vectors are not decayed."""
    decay_embeddings: bool = True
    """Apply weight decay to the token embedding, the head and learned positions."""
    decay_qk_norms: bool = False
    """Apply weight decay to the gains and biases of query and key norms and of the norm of latent queries."""
    embedding_lr: NotNegative | None = None
    """Highest learning rate of the token embedding and the head; none: schedule.lr."""
    embedding_min_lr: NotNegative | None = None
    """Lowest learning rate of the token embedding and the head; none: schedule.min_lr."""
    trainable: Annotated[tuple[str, ...], NotEmpty("the default, *, trains all", "names no weight")] = ("*",)
    """Weights by path, with * for any text, that are trained. The others are frozen: they have no gradients and no
    optimizer state."""
    groups: tuple[GroupConfig, ...] = ()
    """Different rates or decay for weights by path. Where two groups set the same value, the last one counts."""
    clip: Annotated[float, Bounds(above=0, hint="clip=none turns clipping off")] | None = 1.0
    """Clip gradients to this global norm; none: no clipping."""
    moments: MomentDtype = "float32"
    """Dtype of the moments between steps; they are computed in float32. float16 stores a scale per weight, and the root
    of the second moment."""
    offload: Share = 0.0
    """Share of the moments kept in host memory between updates, largest first; 1: all. They are copied to the device
    weight by weight during the update."""
    log_zeros: bool = False
    """Report the number of gradient elements that are exactly 0 as num_zeros, every step."""
    log_parameter_norm: bool = False
    """Report the norm of all weights as parameter_norm, every step."""

    def name(self) -> str:
        """Name in messages."""
        return type(self).__name__.removesuffix("Config")

    def rate_problems(self, schedule: "ScheduleConfig") -> list[Problem]:
        """Conflicts with the schedule. Schedule.rates checks rates that a weight gets from several rules."""
        problems = _rate_problem("embedding_min_lr", self.embedding_lr, self.embedding_min_lr, schedule)
        rules = (*self.groups, GroupConfig(match="*", lr=self.embedding_lr, min_lr=self.embedding_min_lr))
        for place, rule in enumerate(self.groups):
            other_rules = rules[:place] + rules[place + 1 :]
            is_set = any((other.min_lr if rule.min_lr is None else other.lr) is not None for other in other_rules)
            if not is_set:
                problems += _rate_problem(f"groups.{place}.min_lr", rule.lr, rule.min_lr, schedule)
        return problems

    def shared_problems(self, **averages: float) -> list[Problem]:
        """Problems of the settings above. averages: name -> decay of the optimizer's running averages."""
        problems = []
        for name, beta in averages.items():
            if not 0 <= beta < 1:
                problems.append(Problem(name, f"must be at least 0 and below 1, got {beta}"))
            elif 1 - beta < (least := dict(SMALLEST_CHANGES).get(self.moments, 0.0)):
                change = f"a change by {1 - beta:.2g} of a value, which {name}={beta} makes"
                message = f"{self.moments} cannot hold {change}: the average would never fall"
                hint = f"use moments=float32, or {name} of at most {1 - least:.3f}"
                problems.append(Problem("moments", message, hint))
        if self.embedding_lr is not None and (self.embedding_min_lr or 0) > self.embedding_lr:
            message = f"{self.embedding_min_lr} is above embedding_lr={self.embedding_lr}"
            problems.append(Problem("embedding_min_lr", message))
        return problems


def _rate_problem(setting: str, lr: float | None, min_lr: float | None, schedule: "ScheduleConfig") -> list[Problem]:
    """Conflicts of the rates of some weights with the schedule, whose rates replace None."""
    if lr is not None and min_lr is None and lr < schedule.min_lr:
        message = f"must be set: these weights have lr={lr:g} of their own and would rise to {schedule.min_lr:g}"
        return [Problem(setting, message, "otherwise schedule.min_lr applies to them")]
    if lr is None and min_lr is not None and min_lr > schedule.lr:
        return [
            Problem(setting, f"{min_lr:g} is above schedule.lr={schedule.lr:g}", "give these weights an lr as well")
        ]
    return []


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(UpdateConfig):
    """Adam (Kingma and Ba 2015) with decoupled weight decay (Loshchilov and Hutter 2019).

    Example: `mj.AdamWConfig(beta2=0.95, weight_decay=0.1)`
    """

    target: ClassVar[str] = "megajax.optim.optimizer:adamw"
    beta1: BelowOne = 0.9
    """Decay of the first moment."""
    beta2: BelowOne = 0.999
    """Decay of the second moment."""
    epsilon: Epsilon = 1e-8
    """Added to the root of the second moment."""
    decoupled: bool = True
    """Decoupled weight decay (AdamW); false adds weight_decay * weight to the gradient (Adam with L2)."""

    def problems(self) -> list[Problem]:
        return self.shared_problems(beta1=self.beta1, beta2=self.beta2)


@dataclass(frozen=True, kw_only=True)
class SGDConfig(UpdateConfig):
    """Gradient descent with momentum. Weight decay is added to the gradient.

    Example: `mj.SGDConfig(momentum=0.9)`
    """

    target: ClassVar[str] = "megajax.optim.optimizer:sgd"
    momentum: BelowOne = 0.9
    """Momentum: direction = momentum * direction + gradient."""

    def problems(self) -> list[Problem]:
        return self.shared_problems(momentum=self.momentum)


@dataclass(frozen=True, kw_only=True)
class LionConfig(UpdateConfig):
    """Lion (Chen et al. 2023): the sign of an average of gradients, with decoupled weight decay. It needs a learning
    rate 3 to 10 times smaller than Adam's, and a weight decay larger by the same factor.

    Example: `mj.LionConfig(weight_decay=0.3)`
    """

    target: ClassVar[str] = "megajax.optim.optimizer:lion"
    beta1: BelowOne = 0.95
    """Weight of the average, against the current gradient, in the update."""
    beta2: BelowOne = 0.98
    """Decay of the average."""

    def problems(self) -> list[Problem]:
        return self.shared_problems(beta1=self.beta1, beta2=self.beta2)


@dataclass(frozen=True, kw_only=True)
class MuonConfig(UpdateConfig):
    """Orthogonalised momentum (Jordan et al. 2024) for the matrices of the stack; AdamW for everything else.

    Example: `mj.MuonConfig(momentum=0.95)`
    """

    target: ClassVar[str] = "megajax.optim.muon:muon"
    momentum: BelowOne = 0.95
    """Decay of the average of gradients that is orthogonalised."""
    nesterov: bool = True
    """Orthogonalise momentum * average + (1 - momentum) * gradient, not the average."""
    iterations: Count = 5
    """Newton-Schulz iterations."""
    coefficients: Literal["quintic", "simple", "polar_express"] = "quintic"
    """Polynomials of the iterations: quintic has 5 different ones (iterations must be a multiple of 5), simple one for
    all (Jordan), polar_express 8 and more (Amsel et al. 2025)."""
    scale: Literal["spectral", "shape_scaling", "unit_rms_norm"] = "spectral"
    """Factor on an orthogonalised [in, out] matrix: sqrt(max(in, out)), sqrt(max(1, out / in)) or sqrt(out / in)."""
    extra_scale: Positive = 1.0
    """Additional factor. With scale=spectral, 0.2 gives updates about as large as AdamW's (Liu et al. 2025)."""
    dtype: Dtype = "float32"
    """Dtype of the iterations; bfloat16 is faster and leaves errors of about 1 % in the singular values."""
    qk_clip: Positive | None = None
    """QK-clip: after each update, query and key matrices of heads whose scores may exceed this are scaled down (Kimi
    team 2025: 100); none: no bound."""
    beta1: BelowOne = 0.9
    """Decay of AdamW's first moment."""
    beta2: BelowOne = 0.999
    """Decay of AdamW's second moment."""
    epsilon: Epsilon = 1e-8
    """Added to the root of AdamW's second moment."""

    def problems(self) -> list[Problem]:
        problems = self.shared_problems(momentum=self.momentum, beta1=self.beta1, beta2=self.beta2)
        count = self.iterations
        if self.coefficients == "quintic" and count % 5:
            multiples = ", ".join(str(n) for n in (count // 5 * 5, count // 5 * 5 + 5) if n)
            message = f"{count} is not a multiple of quintic's 5 polynomials"
            problems.append(Problem("iterations", message, f"nearest: {multiples}"))
        elif self.coefficients == "polar_express" and count < 8:
            message = f"polar_express has 8 polynomials, iterations={count} leaves some out"
            problems.append(Problem("iterations", message))
        return problems


@dataclass(frozen=True, kw_only=True)
class OptaxConfig(UpdateConfig):
    """Any optax.GradientTransformation, with the learning rate of the schedule.

    Example: `mj.OptaxConfig(make="optax:adamw", settings={"b2": 0.95})`
    """

    target: ClassVar[str] = "megajax.optim.optax_adapter:OptaxOptimizer"
    make: str
    """Function that returns the transformation, as module:function or file.py:function, such as optax:adafactor. Every
    update calls make(learning_rate=..., **settings) with the learning rate of that step."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the function, by name."""
    per_layer: bool = True
    """The transformation sees each layer's own weights. false: it sees weights of all layers as one array, for
    transformations that combine weights and treat all elements of a weight alike."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay in addition to the transformation's own, for the same weights as other optimizers."""

    def name(self) -> str:
        return self.make

    def code(self) -> dict[str, str]:
        """The setting that names code, unless it is a function of optax itself."""
        return {} if re.fullmatch(r"optax:[a-z]\w*", self.make) else {"make": self.make}

    def problems(self) -> list[Problem]:
        problems = self.shared_problems()
        module, _, name = self.make.rpartition(":")
        if not module or not name:
            hint = "module:function or file.py:function, as in optax:adafactor"
            problems.append(Problem("make", f"names no function, got {self.make}", hint))
        if "learning_rate" in self.settings:
            message = "the schedule gives the learning rate"
            problems.append(Problem("settings.learning_rate", message, "set schedule.lr"))
        if self.moments != "float32":
            message = f"{self.moments} cannot be chosen here: the transformation decides how its state is kept"
            problems.append(Problem("moments", message, "leave it out; many take a dtype: settings.mu_dtype=bfloat16"))
        hint = "use optimizer.trainable to freeze weights, and optax.partition within the function for other rates"
        for name in ("embedding_lr", "embedding_min_lr"):
            if getattr(self, name) is not None:
                problems.append(Problem(name, "a transformation has one learning rate, the schedule's", hint))
        for place, group in enumerate(self.groups):
            if any(rate is not None for rate in (group.lr, group.min_lr, group.lr_multiplier)):
                message = (
                    "changes a learning rate; a transformation has one, the schedule's. Groups can change the decay"
                )
                problems.append(Problem(f"groups.{place}", message, hint))
        return problems


class OptimizerBuilder(Protocol):
    """Settings of your own optimizer, derived from UpdateConfig."""

    weight_decay: float
    """Weight decay per step, passed to the update by group."""
    trainable: tuple[str, ...]
    """Weights by path, with * for any text, that are trained."""
    clip: float | None
    """Clip gradients to this global norm."""
    offload: float
    """Share of the state kept in host memory between updates."""

    def name(self) -> str:
        """Name in messages."""
        ...

    def rate_problems(self, schedule: "ScheduleConfig") -> list[Problem]:
        """Conflicts with the schedule."""
        ...

    def build(self, declared: Any, plan: Any = None, width: float = 1.0) -> Any:
        """A `megajax.optim.optimizer.Optimizer` for weights by path."""
        ...


def score_limit(optimizer: object) -> float | None:
    """The bound of attention scores in an optimizer's settings; None without one."""
    return optimizer.qk_clip if isinstance(optimizer, MuonConfig) else None


OptimizerConfig = AdamWConfig | SGDConfig | LionConfig | MuonConfig | OptaxConfig
"""Every optimizer that comes with the library."""


def _keep_one(names: list[str]) -> str:
    """Advice on how to keep one of several exclusive settings, which a config file may set."""
    if len(names) > 2:
        return "set one of them, and the others to none"
    first, second = names
    return f"--schedule.{second}=none keeps {first}, --schedule.{first}=none keeps {second}"


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Builds):
    """Learning rate over the run. Everything is counted in samples (rows); steps are converted by the batch size.

    The first update uses the rate at 0 samples: with a warm-up, warmup_start.

    Example: `mj.ScheduleConfig(lr=6e-4, min_lr=6e-5, warmup_steps=2000)`
    """

    target: ClassVar[str] = "megajax.optim.schedule:RateSchedule"
    lr: NotNegative = 3e-4
    """Highest learning rate."""
    min_lr: NotNegative = 0.0
    """Rate at the end of the decay, and after it."""
    style: Literal["constant", "linear", "cosine", "inverse_square_root", "wsd"] = "cosine"
    """Shape of the decay from lr to min_lr; constant never decays; inverse_square_root is proportional to
    1 / sqrt(samples), at least min_lr; wsd stays at lr until the anneal (warm-up, stable, decay; Hu et al. 2024)."""
    warmup_steps: Index | None = None
    """Steps from warmup_start to lr; set at most one of the three warm-ups."""
    warmup_samples: Index | None = None
    """Samples from warmup_start to lr."""
    warmup_fraction: Share | None = None
    """Warm-up from warmup_start to lr, as a share of the decay."""
    warmup_start: NotNegative = 0.0
    """Learning rate of the first update, when there is a warm-up."""
    decay_steps: int | None = None
    """Steps until min_lr, warm-up included; none: the whole run."""
    decay_samples: int | None = None
    """Samples until min_lr, warm-up included."""
    anneal_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of wsd's decay: 2 * 0.5^r - 1, 1 - r, (1 + cos(pi r)) / 2 or 1 - sqrt(r), with r from 0 to 1."""
    anneal_steps: Count | None = None
    """Length of wsd's decay, the last steps before the end of decay_steps."""
    anneal_samples: Count | None = None
    """Length of wsd's decay in samples."""
    weight_decay_start: NotNegative | None = None
    """Weight decay of the first update, which changes to optimizer.weight_decay; none: constant."""
    weight_decay_style: Literal["linear", "cosine"] = "linear"
    """Shape of that change."""
    weight_decay_steps: Index | None = None
    """Steps of that change; none: the whole run."""
    weight_decay_samples: Index | None = None
    """Samples of that change."""
    on_resume: Literal["same", "config"] = "same"
    """What happens if a run resumes with a different schedule, weight decay or groups. same: an error; config: follow
    this config from the samples consumed so far."""

    def problems(self) -> list[Problem]:
        problems = []
        for names in (
            ("warmup_steps", "warmup_samples", "warmup_fraction"),
            ("decay_steps", "decay_samples"),
            ("anneal_steps", "anneal_samples"),
            ("weight_decay_steps", "weight_decay_samples"),
        ):
            settings = [name for name in names if getattr(self, name) is not None]
            if len(settings) > 1:
                problems.append(Problem(settings[1], f"{' and '.join(settings)} are both set", _keep_one(settings)))
        if self.min_lr > self.lr:
            problems.append(Problem("min_lr", f"min_lr={self.min_lr} is above lr={self.lr}"))
        if self.lr < self.warmup_start:
            problems.append(Problem("warmup_start", f"warmup_start={self.warmup_start} is above lr={self.lr}"))
        return problems + self._anneal_problems()

    def _anneal_problems(self) -> list[Problem]:
        settings = [name for name in ("anneal_steps", "anneal_samples") if getattr(self, name) is not None]
        if self.style != "wsd":
            return [
                Problem(name, f"has no meaning with style={self.style}", "set style=wsd, or leave it out")
                for name in settings
            ]
        hint = "set the number of last steps that decay"
        return [] if settings else [Problem("anneal_steps", "is needed with style=wsd", hint)]

    def decay(self, *, steps: int, global_size: int, samples: Samples | None = None) -> int:
        """Samples until min_lr. samples: rows of the first steps; none: global_size each."""
        if self.decay_samples is not None:
            return self.decay_samples
        return _rows_of(steps if self.decay_steps is None else self.decay_steps, global_size, samples)

    def warmup(self, *, steps: int, global_size: int, samples: Samples | None = None) -> float:
        """Samples of warm-up."""
        if self.warmup_fraction is not None:
            return self.warmup_fraction * self.decay(steps=steps, global_size=global_size, samples=samples)
        if self.warmup_samples is not None:
            return self.warmup_samples
        return _rows_of(self.warmup_steps or 0, global_size, samples)

    def anneal(self, *, steps: int, global_size: int, samples: Samples | None = None) -> int:
        """Samples of wsd's decay, which ends with `decay`; its steps have the full batch size."""
        if self.anneal_samples is not None:
            return self.anneal_samples
        return (self.anneal_steps or 0) * global_size

    def weight_decay(self, *, steps: int, global_size: int, samples: Samples | None = None) -> int:
        """Samples over which the weight decay changes."""
        if self.weight_decay_samples is not None:
            return self.weight_decay_samples
        return _rows_of(steps if self.weight_decay_steps is None else self.weight_decay_steps, global_size, samples)

    def run_problems(self, *, steps: int, global_size: int, samples: Samples | None = None) -> list[Problem]:
        """Problems of a warm-up or an anneal that is longer than the decay, for a run of that length."""
        decay = self.decay(steps=steps, global_size=global_size, samples=samples)
        warmup = self.warmup(steps=steps, global_size=global_size, samples=samples)
        anneal = self.anneal(steps=steps, global_size=global_size, samples=samples)
        problems = []
        if self.style != "constant" and warmup >= decay >= 0 and warmup > 0:
            most = bisect_left(range(decay + 1), decay, key=lambda n: _rows_of(n, global_size, samples)) - 1
            names = {"warmup_fraction": 0.99, "warmup_samples": decay - 1, "warmup_steps": most}
            problems.append(self._too_long("warm-up", warmup, decay, names, steps))
        if self.style == "wsd" and anneal > decay > 0:
            names = {"anneal_samples": decay, "anneal_steps": decay // global_size}
            problems.append(self._too_long("anneal", anneal, decay, names, steps))
        return problems

    def _too_long(self, part: str, samples: float, decay: int, most: Mapping[str, float], steps: int) -> Problem:
        """A part of `samples` samples that is too long. most: settings of its length -> largest value that fits."""
        name = next((name for name in most if getattr(self, name) is not None), "warmup_steps")
        end = next((end for end in ("decay_samples", "decay_steps") if getattr(self, end) is not None), "")
        until = (
            f"the decay ends after {decay} (schedule.{end}={getattr(self, end)})"
            if end
            else (f"the whole run has {decay} (steps={steps})")
        )
        message = f"the {part} takes {samples:g} samples ({name}={getattr(self, name)}), {until}"
        fits = f"--schedule.{name}={most[name]} or less, or " if most[name] >= 0 else ""
        return Problem(name, message, f"use {fits}a larger --{f'schedule.{end}' if end else 'steps'}")


def _rows_of(steps: int, global_size: int, samples: Samples | None) -> int:
    """Rows that the first steps read."""
    return steps * global_size if samples is None else samples(steps)
