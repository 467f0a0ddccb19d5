"""Which activations of a layer are saved for the backward pass; the others are recomputed.

Importing this imports neither jax nor flax.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Literal

from megajax.config.bounds import Bounds
from megajax.config.errors import Problem

type Part = Literal[
    "norm", "query_key_value", "latent", "core_attention", "gate", "residual", "mlp", "activation", "input"
]

NAMES: Mapping[Part, tuple[str, ...]] = MappingProxyType(
    {
        "norm": ("norm",),
        "query_key_value": ("query", "key", "value"),
        "latent": ("latent",),
        "core_attention": ("attention", "attention_statistics"),
        "gate": ("gate",),
        "residual": ("residual",),
        "mlp": ("mlp",),
        "activation": ("activation",),
        "input": ("input",),
    }
)
"""`checkpoint_name` names of the tensors of each part. In order: outputs of norms; inputs of the attention kernel; the
latents of latent attention; outputs of the attention kernel; their gate; the residual stream between attention and MLP;
inputs of the MLP's activation; its output; the input of a layer, always saved. No other tensor is."""

PARTS: tuple[Part, ...] = tuple(NAMES)
SELECTIVE: tuple[Part, ...] = ("norm", "latent", "activation")
"""Parts that can be recomputed without a large matmul."""

type Recompute = Literal["none", "selective", "full"] | tuple[Part, ...]
type Layers = Annotated[int, Bounds(at_least=1, hint="none for all layers")]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavePolicy:
    """What a layer saves for the backward pass."""

    parts: tuple[Part, ...] | None
    """Saved parts; None: everything that gradients need (no jax.checkpoint)."""
    offloaded: tuple[Part, ...] = ()
    """Saved parts that are offloaded to host memory."""
    layers_per_checkpoint: int = 1
    """Consecutive layers in one checkpoint: only the input of the first is saved."""

    @property
    def saved(self) -> tuple[str, ...]:
        """Names that stay on the device."""
        return tuple(name for part in self.parts or () if part not in self.offloaded for name in NAMES[part])

    @property
    def moved(self) -> tuple[str, ...]:
        """Names that go to host memory."""
        return tuple(name for part in self.offloaded for name in NAMES[part])


@dataclass(frozen=True, kw_only=True, slots=True)
class Recomputing:
    """The recompute settings of a config."""

    recompute: Recompute = "selective"
    layers: int | None = None
    layers_per_checkpoint: int = 1
    offload: tuple[Part, ...] = ()

    def recomputed_parts(self) -> tuple[Part, ...]:
        """The recomputed parts."""
        if isinstance(self.recompute, tuple):
            return self.recompute
        return {"none": (), "selective": SELECTIVE, "full": tuple(part for part in PARTS if part != "input")}[
            self.recompute
        ]

    def policy(self) -> SavePolicy:
        """The policy of layers that recompute."""
        if self.recompute == "none":
            return SavePolicy(parts=None)
        recomputed = self.recomputed_parts()
        return SavePolicy(
            parts=tuple(part for part in PARTS if part not in recomputed),
            offloaded=tuple(part for part in PARTS if part in self.offload),
            layers_per_checkpoint=self.layers_per_checkpoint,
        )

    def lighter_policy(self) -> SavePolicy:
        """The policy of the layers beyond `layers`: the next cheaper one."""
        lighter = "none" if set(self.recomputed_parts()) <= set(SELECTIVE) else "selective"
        return replace(self, recompute=lighter, layers_per_checkpoint=1, offload=()).policy()

    def keeps_all(self) -> bool:
        """Whether any layer saves everything that gradients need."""
        return self.policy().parts is None or (self.layers is not None and self.lighter_policy().parts is None)

    def problems(self) -> list[Problem]:
        """Problems whose settings are the names of these fields."""
        recomputed, setting = self.recomputed_parts(), format_recompute(self.recompute)
        problems = _named_twice("recompute", recomputed) + _named_twice("offload", self.offload)
        if not recomputed and self.recompute != "none":
            problems.append(Problem("recompute", "names no part", "write none, which saves all that gradients need"))
        if "input" in recomputed:
            problems.append(Problem("recompute", "input is what everything else is computed from", "leave it out"))
        unsaved = [part for part in self.offload if part in recomputed]
        if unsaved:
            saved = ", ".join(part for part in PARTS if part not in recomputed)
            problems.append(
                Problem("offload", f"{', '.join(unsaved)} is recomputed with recompute={setting}", f"saved: {saved}")
            )
        if self.offload and self.recompute == "none":
            problems.append(
                Problem("offload", "needs tensors by name, and recompute=none saves all without names", "use selective")
            )
        if self.layers is not None and self.recompute == "none":
            message = f"cannot be {self.layers} with recompute={setting}"
            problems.append(Problem("layers", message, "for recompute=selective, full or parts; none: all layers"))
        if self.layers_per_checkpoint > 1 and self.recompute != "full":
            message = f"cannot be {self.layers_per_checkpoint} with recompute={setting}"
            problems.append(Problem("layers_per_checkpoint", message, "above 1 only with recompute=full"))
        return problems


def format_recompute(recompute: Recompute) -> str:
    """The setting as a config writes it."""
    return recompute if isinstance(recompute, str) else ",".join(recompute)


def _named_twice(setting: str, parts: tuple[Part, ...]) -> list[Problem]:
    twice = [part for part in dict.fromkeys(parts) if parts.count(part) > 1]
    return [Problem(setting, f"names {', '.join(twice)} twice")] if twice else []
