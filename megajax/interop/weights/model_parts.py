"""Parts that some models have, such as adapters; imports neither jax nor flax."""

from dataclasses import replace
from typing import Any


def adapters_of(model: Any) -> Any:
    """The config of the low-rank adapters of a model; None without any."""
    return getattr(model, "lora", None)


def quantization_of(model: Any) -> Any:
    """The config of the quantized matrices of a model; None without any."""
    return getattr(model, "quantization", None)


def without_quantization(model: Any) -> Any:
    """The config of a model whose matrices are not quantized."""
    return model if quantization_of(model) is None else replace(model, quantization=None)


def without_adapters(model: Any) -> Any:
    """The config of a model whose adapters are merged into its weights, which are dequantized for that."""
    return model if adapters_of(model) is None else replace(model, lora=None, quantization=None)


def without_teacher(model: Any) -> Any:
    """The config of the student of a model that was trained beside its teacher; other models as they are."""
    student = getattr(model, "student", None)
    return model if student is None else student()


def served(model: Any) -> Any:
    """The config of what a model is after training: the student, with adapters merged."""
    return without_teacher(without_adapters(model))
