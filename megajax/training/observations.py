"""Observations in the training state: what is kept of them from step to step, see megajax.mesh.observations."""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array

from megajax.batch import Params
from megajax.layers.param import ParamSpec


def initial(declared: Mapping[str, ParamSpec]) -> dict[str, Array]:
    """Zeros, float32 by path."""
    return {path: jnp.zeros(spec.observed().shape(spec.shape), jnp.float32) for path, spec in declared.items()}


def updated(declared: Mapping[str, ParamSpec], state: Params, seen: Params, scale: Array) -> dict[str, Array]:
    """The state's part after a step. scale: what its loss was multiplied by, float32 []."""
    return {path: spec.observed().updated(state[path], seen[path], scale) for path, spec in declared.items()}
