"""Functions whose intermediate results are recomputed in the backward pass."""

from collections.abc import Callable

import jax

from megajax.layers.recompute import SavePolicy


def checkpointed(layer: Callable, policy: SavePolicy) -> Callable:
    """The layer under `jax.checkpoint` with this policy."""
    policies = jax.checkpoint_policies
    if policy.parts is None:
        return layer
    if policy.moved:
        saveable = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(policy.saved),
            names_which_can_be_offloaded=list(policy.moved),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        saveable = policies.save_only_these_names(*policy.saved)
    return jax.checkpoint(layer, policy=saveable, prevent_cse=False)


def save_only_inputs[**P, R](f: Callable[P, R]) -> Callable[P, R]:
    """Save only the arguments of f for the backward pass; recompute the rest under any policy of the layer.

    For functions that the compiler fuses: the backward kernel reads the arguments again instead of every intermediate
    result, which would be stored in float32 if f computes in float32.
    """
    return jax.checkpoint(f, prevent_cse=False)
