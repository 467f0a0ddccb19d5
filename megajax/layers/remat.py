"""What the backward pass of a layer finds, and what it computes again; importing this imports neither jax nor flax."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

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
"""What layers call the tensors of each part: outputs of norms; what attention's kernel reads; the latents it is made
of; what the kernel writes; the gate on it; the residual stream between attention and MLP; inputs of the MLP's
activation, and its output; the residual stream at the start of a layer, which is always kept. All else never is."""

PARTS: tuple[Part, ...] = tuple(NAMES)
SELECTIVE: tuple[Part, ...] = ("norm", "latent", "activation")
"""What costs no large matmul to compute again."""

type Recompute = Literal["none", "selective", "full"] | tuple[Part, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What a layer function keeps."""

    parts: tuple[Part, ...] | None
    """None: all that its gradient needs, whatever it is."""
    offloaded: tuple[Part, ...] = ()
    """Of these, what waits in host memory."""
    together: int = 1
    """Layers that keep the input of the first of them only."""

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
    """The choice as a config has it; `settings` are the names of its fields there, for messages."""

    recompute: Recompute = "selective"
    layers: int | None = None
    together: int = 1
    offload: tuple[Part, ...] = ()

    def again(self) -> tuple[Part, ...]:
        """Parts computed again; () where nothing is."""
        if isinstance(self.recompute, tuple):
            return self.recompute
        return {"none": (), "selective": SELECTIVE, "full": tuple(part for part in PARTS if part != "input")}[
            self.recompute
        ]

    def kept(self) -> Kept:
        """By layers that recompute."""
        if self.recompute == "none":
            return Kept(parts=None)
        again = self.again()
        return Kept(
            parts=tuple(part for part in PARTS if part not in again),
            offloaded=tuple(part for part in PARTS if part in self.offload),
            together=self.together,
        )

    def others(self) -> Kept:
        """By the layers beyond `layers`: one step lighter."""
        lighter = "none" if set(self.again()) <= set(SELECTIVE) else "selective"
        return replace(self, recompute=lighter, together=1, offload=()).kept()

    def keeps_all(self) -> bool:
        """Whether some layer keeps whatever its gradient needs."""
        return self.kept().parts is None or (self.layers is not None and self.others().parts is None)

    def problems(self) -> list[Problem]:
        """`where`: names of this class's fields."""
        again, written = self.again(), words(self.recompute)
        found = _named_twice("recompute", again) + _named_twice("offload", self.offload)
        if not again and self.recompute != "none":
            found.append(Problem("recompute", "names nothing", "write none, which keeps all that gradients need"))
        if "input" in again:
            found.append(Problem("recompute", "input is what all else is computed from", "leave it out"))
        lost = [part for part in self.offload if part in again]
        if lost:
            left = ", ".join(part for part in PARTS if part not in again)
            found.append(
                Problem("offload", f"{', '.join(lost)} is computed again by recompute={written}", f"kept: {left}")
            )
        if self.offload and self.recompute == "none":
            found.append(
                Problem("offload", "needs tensors by name, and recompute=none keeps all without", "use selective")
            )
        if self.layers is not None and (self.layers < 1 or self.recompute == "none"):
            what = f"{self.layers} with recompute={written}"
            found.append(Problem("layers", what, "at least 1, of recompute=selective, full or parts; none: all layers"))
        if self.together < 1 or (self.together > 1 and self.recompute != "full"):
            what = f"{self.together} with recompute={written}"
            found.append(
                Problem("together", what, "at least 1; above 1 only with recompute=full, which keeps inputs only")
            )
        return found


def words(recompute: Recompute) -> str:
    """As it is written in a config."""
    return recompute if isinstance(recompute, str) else ",".join(recompute)


def _named_twice(where: str, parts: tuple[Part, ...]) -> list[Problem]:
    twice = [part for part in dict.fromkeys(parts) if parts.count(part) > 1]
    return [Problem(where, f"names {', '.join(twice)} twice")] if twice else []
