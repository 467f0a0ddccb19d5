"""Names of activation functions: those of transformers, and ours."""

from collections.abc import Mapping
from typing import Any

from megajax.checkpoint.huggingface.family import Settings
from megajax.layers.config import DenseMLPConfig, GatedMLPConfig, MLPConfig

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


def feed_forward(given: Settings) -> MLPConfig:
    """By `feed_forward_proj`, such as relu or gated-gelu, which is the tanh form."""
    named = given.take("feed_forward_proj", "relu")
    activation: Any = ACTIVATIONS.get("gelu_new" if named == "gated-gelu" else named.removeprefix("gated-"))
    if activation is None:
        given.refuse("feed_forward_proj", named, f"only {', '.join(ACTIVATIONS)} are supported, with gated- or without")
    make = GatedMLPConfig if named.startswith("gated-") else DenseMLPConfig
    return make(ffn=given.take("d_ff", 2048), activation=activation or "relu", bias=False)


def feed_forward_name(mlp: DenseMLPConfig | GatedMLPConfig) -> str:
    """Its `feed_forward_proj`."""
    if isinstance(mlp, DenseMLPConfig):
        return theirs(mlp.activation)
    named = {"gelu_tanh": "gated-gelu", "gelu": "gated-gelu_python"}
    return named.get(mlp.activation, f"gated-{theirs(mlp.activation)}")
