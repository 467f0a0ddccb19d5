"""Names of activation functions: those of transformers, and ours."""

from collections.abc import Mapping

ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
    "silu": "silu",
    "swish": "silu",
}
"""Theirs -> ours."""


def theirs(activation: str) -> str:
    """The first of their names for one of ours."""
    return next(name for name, ours in ACTIVATIONS.items() if ours == activation)
