"""What two model configs compute differently, setting by setting and layer by layer."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

from megajax.config.dump import flatten

TRAINING_ONLY = (
    "recompute", "recompute_layers", "layers_per_checkpoint", "offload", "unroll", "loss_chunk", "init_std",
    "embedding_std", "vocabulary_multiple", "dropout", "kernel", "label_smoothing", "z_loss", "residual",
    "dt_min", "dt_max", "dt_floor", "decay_min", "decay_max", "chunk", "positions_multiple", "initial",
    "aux_loss", "row_loss", "global_loss", "force_balance", "jitter", "way", "room", "chunks", "reweighted", "weight",
)  # fmt: skip
"""Last names of settings that change how a model is trained or run, not what it computes."""
ABSENT = "absent"


class Difference(NamedTuple):
    """A setting that two models have otherwise."""

    name: str
    """With layers.N. before a setting of a block."""
    here: Any
    there: Any


def differences(here: Any, there: Any) -> list[Difference]:
    """All of them. Layers are compared one by one, however they are written as patterns and segments."""
    one, other = _leaves(here), _leaves(there)
    both = {**one, **other}
    pairs = [Difference(name, one.get(name, ABSENT), other.get(name, ABSENT)) for name in both]
    return [pair for pair in pairs if pair.here != pair.there]


def in_words(pairs: list[Difference]) -> list[str]:
    """A line for each; neighbouring layers that differ alike have one line together."""

    def inside(pair: Difference) -> tuple[str, Any, Any]:
        return pair.name.split(".", 2)[-1] if pair.name.startswith("layers.") else pair.name, pair.here, pair.there

    def text(one: tuple[str, Any, Any], numbers: list[int]) -> str:
        where = f"layers {numbers[0]} to {numbers[-1]}: " if numbers else ""
        return f"{where}{one[0]}: {one[1]} here, {one[2]} there"

    ordered = sorted(pairs, key=lambda pair: (repr(inside(pair)), _layer(pair.name)))
    return [
        text(one, [_layer(pair.name) for pair in group if pair.name.startswith("layers.")])
        for one, group in groupby(ordered, inside)
    ]


def _layer(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("layers.") else -1


def _leaves(model: Any) -> dict[str, Any]:
    leaves = dict(_own(model))
    hidden = leaves.get("hidden")
    for name, value in list(leaves.items()):
        before, _, last = name.rpartition(".")
        heads = leaves.get(f"{before}.heads")
        # What follows from other settings where it is none.
        if value is None and last == "kv_heads":
            leaves[name] = heads
        if value is None and last == "head_dim" and heads and hidden:
            leaves[name] = hidden // heads
    return leaves


def _own(model: Any) -> Iterator[tuple[str, Any]]:
    for name, value in flatten(model).items():
        if not name.startswith("stack.") and name.rpartition(".")[2] not in TRAINING_ONLY:
            yield name, value
    for block, numbers in model.stack.stored():
        for name, value in flatten(block).items():
            if name.rpartition(".")[2] not in TRAINING_ONLY:
                yield from ((f"layers.{number}.{name}", value) for number in numbers)
