"""Rows that the tables of many families share.

A row without a weight in the model gives no tensor, so biases are optional.
"""

from collections.abc import Sequence
from typing import Any

from megajax.checkpoint.weights.tensor_table import Row


def linear(tensor: str, path: str) -> list[Row]:
    """A matrix (out, in) and its bias."""
    return [Row(f"{tensor}.weight", path, "o i -> i o"), Row(f"{tensor}.bias", f"{path}_bias")]


def dense(tensor: str, path: str) -> list[Row]:
    """A matrix (out, in) and its bias, in a module of their own."""
    return [Row(f"{tensor}.weight", f"{path}.matrix", "o i -> i o"), Row(f"{tensor}.bias", f"{path}.bias")]


def norm(tensor: str, path: str) -> list[Row]:
    """Gain and bias."""
    return [Row(f"{tensor}.weight", f"{path}.gain"), Row(f"{tensor}.bias", f"{path}.bias")]


def attention(tensor: str, path: str, names: Sequence[str]) -> list[Row]:
    """names: of query, key, value and output in the other library."""
    *inputs, output = (f"{tensor}.{name}" for name in names)
    pairs = list(zip(inputs, ("query", "key", "value"), strict=True))
    return [
        *[Row(f"{name}.weight", f"{path}.{part}", "(n h) d -> d n h") for name, part in pairs],
        *[Row(f"{name}.bias", f"{path}.{part}_bias", "(n h) -> n h") for name, part in pairs],
        Row(f"{output}.weight", f"{path}.output", "d (n h) -> n h d"),
        Row(f"{output}.bias", f"{path}.output_bias"),
    ]


def tokens(cfg: Any, table: str, head: str) -> list[Row]:
    """The embedding table and the head, without the rows that pad the vocabulary."""
    index = (slice(0, cfg.vocabulary_size),)
    return [Row(table, "tokens", index=index), Row(head, "head", index=index)]


def patches(tensor: str, path: str, side: int) -> Row:
    """A convolution whose stride is its size, `side`: (channels out, channels in, rows, columns)."""
    return Row(tensor, path, "d c y x -> (y x c) d", sizes={"y": side, "x": side})
