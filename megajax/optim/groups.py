"""Groups of weights with the same learning rate and weight decay, and the choice of trained weights."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from jax import Array

from megajax.config.hints import matching
from megajax.layers.param import ParamSpec
from megajax.optim.config import OptimizerBuilder, UpdateConfig


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Weights with the same rates."""

    lr: float | None = None
    """Highest learning rate; None: the schedule's."""
    min_lr: float | None = None
    """Lowest learning rate; None: the schedule's."""
    lr_multiplier: float = 1.0
    """Factor on the learning rate."""
    decay: float = 1.0
    """Factor on the weight decay."""
    width: float = 1.0
    """Factor on the schedule's highest and lowest rate, for a model wider than the one its settings were tuned on."""

    def __str__(self) -> str:
        wide = "" if self.width == 1 else f" x {self.width:g} for the width"
        rate = f"schedule's lr{wide}" if self.lr is None else f"lr {self.lr:g}"
        floor = "" if self.min_lr is None else f" to {self.min_lr:g}"
        factor = "" if self.lr_multiplier == 1 else f" x {self.lr_multiplier:g}"
        decay = {0.0: "no decay", 1.0: "decay"}.get(self.decay, f"decay x {self.decay:g}")
        return f"{rate}{floor}{factor}, {decay}"


ALL = ("*",)
"""The default of optimizer.trainable."""
HEAD = "head"
"""Path of the head if it is a separate weight."""

type Rates = Callable[[ParameterGroup], tuple[Array, Array]]
"""Group -> (learning rate, weight decay) of this update, each float32 []."""


def is_vocabulary(spec: ParamSpec) -> bool:
    """Whether a weight is the token embedding or the head."""
    return "vocab" in spec.axes


def is_embedding(spec: ParamSpec) -> bool:
    """Whether a weight is the token embedding, the head or the learned positions."""
    return spec.role == "weight" and not spec.layers and spec.axes in (("vocab", "embed"), (None, "embed"))


def scales_with_width(spec: ParamSpec) -> bool:
    """Whether a weight's input grows with the model's width: matrices within blocks, and a separate head.

    Not embedding tables, a head that shares such a table, filters or vectors.
    """
    return spec.role == "weight" and has_decay(spec) and (spec.path == HEAD or not is_embedding(spec))


def has_decay(spec: ParamSpec) -> bool:
    """Whether a weight decays: matrices, including embeddings and head, and filters; not biases, gains or vectors."""
    return spec.role in ("weight", "filter") and len(spec.shape) - bool(spec.layers) > 1


def groups(
    cfg: UpdateConfig, declared: Mapping[str, ParamSpec], widths: Mapping[str, float] | None = None
) -> dict[str, ParameterGroup]:
    """Path -> group, in the order of the weights. widths: path -> Group.width; none: 1 for all.

    Raises UserError for a pattern that matches no weight, naming the nearest paths.
    """
    by_path = {path: replace(_plain(cfg, spec), width=(widths or {}).get(path, 1.0)) for path, spec in declared.items()}
    for place, rule in enumerate(cfg.groups):
        rates = {name: getattr(rule, name) for name in ("lr", "min_lr", "lr_multiplier", "decay")}
        rates = {name: value for name, value in rates.items() if value is not None}
        for path in matching(f"optimizer.groups.{place}.match", rule.match, declared):
            by_path[path] = replace(by_path[path], **rates)
    return by_path


def trainable(
    cfg: UpdateConfig | OptimizerBuilder,
    declared: Mapping[str, ParamSpec],
    adapters: Collection[str] = (),
    never: Collection[str] = (),
) -> dict[str, ParamSpec]:
    """The weights that are trained, in their order. Raises UserError for a pattern that matches no weight.

    adapters: paths of low-rank adapters. With adapters, the default pattern * matches no other weight.
    never: patterns of weights that no pattern matches.
    """
    patterns = () if adapters and cfg.trainable == ALL else cfg.trainable
    floating = {
        path: spec
        for path, spec in declared.items()
        if spec.role != "quantized" and not any(fnmatchcase(path, pattern) for pattern in never)
    }
    paths = {path for pattern in patterns for path in matching("optimizer.trainable", pattern, floating)}
    return {path: spec for path, spec in declared.items() if path in paths or path in adapters}


def _plain(cfg: UpdateConfig, spec: ParamSpec) -> ParameterGroup:
    decay = has_decay(spec) and (cfg.decay_embeddings or not is_embedding(spec))
    decay = decay or (cfg.decay_qk_norms and any(norm in spec.path for norm in (".query_norm.", ".key_norm.")))
    if not is_vocabulary(spec):
        return ParameterGroup(decay=float(decay))
    return ParameterGroup(lr=cfg.embedding_lr, min_lr=cfg.embedding_min_lr, decay=float(decay))
