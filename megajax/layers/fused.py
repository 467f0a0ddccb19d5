"""What kernels of several elementwise operations are to the backward pass."""

from collections.abc import Callable

import jax


def keeping_inputs[**P, R](f: Callable[P, R]) -> Callable[P, R]:
    """f, of which the backward pass finds the arguments and nothing between, whatever layers keep.

    For what the compiler makes one kernel of: it reads the same arguments again, where differentiation would have it
    write each intermediate result, in float32 where f computes in that.
    """
    return jax.checkpoint(f, prevent_cse=False)
