"""The supported family that is nearest to a model of an unknown type, and what differs from it.

Each family reads the config.json as if it were its own. The distance is the number of settings that it does not know
and of values that it refuses, then of its own settings that are absent. The weights decide between the nearest ones:
the number of those that only one side has is added.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megajax.checkpoint.weights.foreign import declared_by
from megajax.checkpoint.weights.name_mapping import tensors_of
from megajax.config.errors import UserError
from megajax.interop.huggingface.family import Family, Settings, is_unused
from megajax.interop.huggingface.registry import families, kin_of
from megajax.interop.huggingface.rotary import ROPE
from megajax.interop.huggingface.safetensors import SafetensorsFolder

type Kinds = Mapping[str, tuple[int, ...]]
"""Names of tensors, with * for the numbers of layers and experts -> shape of the first one."""

LISTED = 8
"""Differences of each sort in a message."""
COMPARED = 32
"""Nearest families by settings whose weights are compared."""
PLAIN = "llama"
"""The family that is named if several are as near."""
MOST_LAYERS = 512
"""Models with more layers are not compared: every family would build them."""


class Comparison(NamedTuple):
    """A config.json read as that of a family."""

    family: Family
    model: Any
    problems: list[str]
    """Values that the family refuses, a line each."""
    unread: dict[str, Any]
    """Settings that the family does not know."""
    absent: dict[str, Any]
    """Settings of the family that config.json lacks, with the values that it assumes."""

    def distance(self) -> tuple[int, int]:
        """See above."""
        return len(self.problems) + len(self.unread), len(self.absent)

    def lines(self) -> Iterator[str]:
        """A line for each difference."""
        name = self.family.name
        yield from _listed(self.problems)
        yield from _listed([f"{setting}={value}: {name} has no such setting" for setting, value in self.unread.items()])
        yield from _listed([f"{setting}: absent, {name} has {value}" for setting, value in self.absent.items()])


class Weights(NamedTuple):
    """The weights of a folder beside those of a family's model."""

    unread: Kinds
    """Those that the model lacks."""
    absent: Kinds
    """Those that the folder lacks."""

    @classmethod
    def of(cls, comparison: Comparison, kinds: Kinds) -> "Weights":
        """kinds: of the folder; {} compares nothing."""
        family, model = comparison.family, comparison.model
        table = tensors_of(family.rows(model), declared_by(model)) if kinds else []
        expected = {_kind(tensor.name): tensor.shape() for tensor in reversed(table)}
        stored = {_kind(family.name_in_table(name)): shape for name, shape in kinds.items()}
        known = {*expected, *family.heads, *family.copies}
        return cls(
            {name: shape for name, shape in stored.items() if name not in known},
            {name: shape for name, shape in expected.items() if name not in stored},
        )

    def lines(self, name: str) -> Iterator[str]:
        """A line for each difference. name: of the family."""
        yield from _listed([f"{kind} {[*shape]}: {name} has no such weight" for kind, shape in self.unread.items()])
        yield from _listed([f"{kind}: absent, {name} has {[*shape]}" for kind, shape in self.absent.items()])


def differences(folder: Path, config: Mapping[str, Any]) -> str:
    """Lines on the nearest family and on what differs from it; "" if no family knows half of the settings or weights.

    config: config.json of the folder. Weights are compared if the folder has any.
    """
    kin, layers = kin_of(str(config.get("model_type"))), config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        return ""
    names = dict.fromkeys((PLAIN, *families())) if kin is None else kin.nearest
    compared = filter(None, (_compared(families()[name], config) for name in names))
    first, kinds = sorted(compared, key=Comparison.distance)[:COMPARED], _kinds_of(folder)
    pairs = [(comparison, Weights.of(comparison, kinds)) for comparison in first]
    if not pairs:
        return ""
    nearest, weights = min(pairs, key=lambda pair: _distance(*pair))
    settings = [setting for setting in config if not is_unused(setting, nearest.family.unused)]
    known = {"settings": (len(nearest.unread), len(settings)), "kinds of weights": (len(weights.unread), len(kinds))}
    if any(2 * unread > count for unread, count in known.values()):
        return ""
    shares = " and ".join(f"{count - unread} of {count} {what}" for what, (unread, count) in known.items() if count)
    lines = [*nearest.lines(), *weights.lines(nearest.family.name)] or ["none"]
    listing = "".join(f"\n  {line}" for line in lines)
    return f"\n{nearest.family.name} knows {shares}. The differences:{listing}"


def _distance(comparison: Comparison, weights: Weights) -> tuple[int, int]:
    settings, absent = comparison.distance()
    return settings + len(weights.unread) + len(weights.absent), absent


def _compared(family: Family, config: Mapping[str, Any]) -> Comparison | None:
    """None if the family can't read such a config at all."""
    settings = Settings(config)
    try:
        model = family.read(settings)
        written = family.config_json(model)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, UserError):
        return None
    settings.close(family.unused)
    spelled = ROPE if "rope_parameters" in config else frozenset[str]()
    absent = {
        name: value
        for name, value in written.items()
        if name not in config and name not in spelled and value not in (None, False, [], {})
        if not is_unused(name, family.unused)
    }
    return Comparison(family, model, settings.findings.problems, settings.findings.unknown, absent)


def _listed(lines: Sequence[str]) -> Iterable[str]:
    return [*lines[:LISTED], f"and {len(lines) - LISTED} more"] if len(lines) > LISTED else lines


def _kinds_of(folder: Path) -> Kinds:
    """Those of the files of a folder; {} if it has none that can be read."""
    kinds: dict[str, tuple[int, ...]] = {}
    with suppress(UserError, OSError):
        for name, entry in SafetensorsFolder(folder).entries().items():
            kinds.setdefault(_kind(name), entry.shape)
    return kinds


def _kind(name: str) -> str:
    """The name with * for numbers between dots."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
