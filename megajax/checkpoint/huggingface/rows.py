"""Rows that tables of many families have.

A row whose weight the model lacks gives no tensor, so biases are optional.
"""

from collections.abc import Sequence
from typing import Any

from megajax.checkpoint.weights.tensor_table import Row


def linear(theirs: str, ours: str) -> list[Row]:
    """A matrix (out, in) and its bias."""
    return [Row(f"{theirs}.weight", ours, "o i -> i o"), Row(f"{theirs}.bias", f"{ours}_bias")]


def dense(theirs: str, ours: str) -> list[Row]:
    """A matrix (out, in) and its bias, of a module of ours that has nothing else."""
    return [Row(f"{theirs}.weight", f"{ours}.matrix", "o i -> i o"), Row(f"{theirs}.bias", f"{ours}.bias")]


def norm(theirs: str, ours: str) -> list[Row]:
    """Gain and bias."""
    return [Row(f"{theirs}.weight", f"{ours}.gain"), Row(f"{theirs}.bias", f"{ours}.bias")]


def attention(theirs: str, ours: str, names: Sequence[str]) -> list[Row]:
    """names: theirs of query, key, value and output."""
    *inner, output = (f"{theirs}.{name}" for name in names)
    pairs = list(zip(inner, ("query", "key", "value"), strict=True))
    return [
        *[Row(f"{there}.weight", f"{ours}.{here}", "(n h) d -> d n h") for there, here in pairs],
        *[Row(f"{there}.bias", f"{ours}.{here}_bias", "(n h) -> n h") for there, here in pairs],
        Row(f"{output}.weight", f"{ours}.output", "d (n h) -> n h d"),
        Row(f"{output}.bias", f"{ours}.output_bias"),
    ]


def tokens(cfg: Any, table: str, head: str) -> list[Row]:
    """The table of tokens and the head, without the rows that pad our vocabulary."""
    inside = (slice(0, cfg.vocabulary_size),)
    return [Row(table, "tokens", inside=inside), Row(head, "head", inside=inside)]


def patches(theirs: str, ours: str, side: int) -> Row:
    """A convolution whose stride is its size, `side`: (channels out, channels in, rows, columns)."""
    return Row(theirs, ours, "d c y x -> (y x c) d", sizes={"y": side, "x": side})
