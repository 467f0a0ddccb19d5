"""Elementwise functions that the compiler fuses into one kernel, and their backward pass."""

from collections.abc import Callable

import jax


def keeping_inputs[**P, R](f: Callable[P, R]) -> Callable[P, R]:
    """f, saving only its arguments for the backward pass and recomputing the rest, whatever the layer's policy.

    For functions that the compiler fuses: the backward kernel reads the arguments again, where it would otherwise read
    each intermediate result, written in float32 if f computes in it.
    """
    return jax.checkpoint(f, prevent_cse=False)
