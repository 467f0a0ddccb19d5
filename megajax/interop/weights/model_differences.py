"""Differences between the computations of two model configs, setting by setting and layer by layer."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, NamedTuple

from megajax.config.dump import flatten
from megajax.config.errors import UserError

TRAINING_ONLY = (
    "recompute", "recompute_layers", "layers_per_checkpoint", "offload", "unroll", "loss_chunk", "init_std",
    "embedding_std", "vocabulary_multiple", "dropout", "kernel", "label_smoothing", "z_loss", "residual",
    "dt_min", "dt_max", "dt_floor", "decay_min", "decay_max", "chunk", "positions_multiple", "initial",
    "aux_loss", "row_loss", "global_loss", "force_balance", "jitter", "way", "room", "chunks", "reweighted", "weight",
    "family",
)  # fmt: skip
"""Last parts of names of settings that change how a model is trained, run or exported, but not what it computes."""
ELSEWHERE = ("stack.", "objective.", "teacher.", "distillation.")
"""Beginnings of names: of settings that are compared by layers, and of those that only training reads."""
ABSENT = "absent"


class Difference(NamedTuple):
    """A setting with different values in two models."""

    name: str
    """Settings of a block begin with layers.N."""
    first: object
    second: object


def differences(first: object, second: object) -> list[Difference]:
    """All differences. Layers are compared one by one, whatever the patterns and segments of the stacks."""
    settings, other_settings = _settings(first), _settings(second)
    pairs = [
        Difference(name, settings.get(name, ABSENT), other_settings.get(name, ABSENT))
        for name in {**settings, **other_settings}
    ]
    return [pair for pair in pairs if pair.first != pair.second]


def demand_same_model(
    first: Any, second: Any, message: str, *, advice: str = "", allowed: Sequence[str] = ("sequence_length",)
) -> None:
    """Raises UserError if two models do not compute the same function: the message, and a line for each difference.

    allowed: patterns of settings that may differ.
    """
    pairs = differences(first, second)
    pairs = [pair for pair in pairs if not any(fnmatchcase(pair.name, pattern) for pattern in allowed)]
    if pairs:
        raise UserError("\n".join([message, *(f"  {line}" for line in describe_differences(pairs))]) + advice)


def describe_differences(pairs: list[Difference]) -> list[str]:
    """A line for each difference. Neighbouring layers with the same difference share a line."""

    def without_layer(pair: Difference) -> tuple[str, Any, Any]:
        return pair.name.split(".", 2)[-1] if pair.name.startswith("layers.") else pair.name, pair.first, pair.second

    def line(difference: tuple[str, Any, Any], numbers: list[int]) -> str:
        layers = f"layers {numbers[0]} to {numbers[-1]}: " if numbers else ""
        return f"{layers}{difference[0]}: {difference[1]} here, {difference[2]} there"

    ordered = sorted(pairs, key=lambda pair: (repr(without_layer(pair)), _layer(pair.name)))
    return [
        line(difference, [_layer(pair.name) for pair in group if pair.name.startswith("layers.")])
        for difference, group in groupby(ordered, without_layer)
    ]


def _layer(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("layers.") else -1


def _settings(model: Any) -> dict[str, Any]:
    settings = dict(_given_settings(model))
    hidden = settings.get("hidden")
    for name, value in list(settings.items()):
        before, _, last = name.rpartition(".")
        heads = settings.get(f"{before}.heads")
        # Defaults that follow from other settings.
        if value is None and last == "kv_heads":
            settings[name] = heads
        if value is None and last == "head_dim" and heads and hidden:
            settings[name] = hidden // heads
    return settings


def _given_settings(model: Any) -> Iterator[tuple[str, Any]]:
    for name, value in flatten(model).items():
        if not name.startswith(ELSEWHERE) and name.rpartition(".")[2] not in TRAINING_ONLY:
            yield name, value
    for block, numbers in model.stack.stored():
        for name, value in flatten(block).items():
            if name.rpartition(".")[2] not in TRAINING_ONLY:
                yield from ((f"layers.{number}.{name}", value) for number in numbers)
