"""Weights of a training state with the layers in order, where a pipeline stores them by stage."""

import jax
import jax.numpy as jnp
import numpy as np

from megajax.batch import Params
from megajax.mesh.named_shardings import unsharded_rows
from megajax.training.program import Program


class OrderedLayers:
    """Gathers the rows of stacked weights in the order of the layers, without padding. Compiled once."""

    def __init__(self, program: Program):
        state, sources = program.state_like(), dict[str, np.ndarray]()
        for path, spec in program.arrays.items():
            rows = sorted((layer, row) for row, layer in enumerate(spec.layers) if layer >= 0)
            source = np.array([row for _, row in rows], np.int32)
            if len(source) and not np.array_equal(source, np.arange(len(spec.layers))):
                sources[path] = source
        likes = {path: {**state.params, **state.observed}[path] for path in sources}
        shapes = {path: (len(sources[path]), *like.shape[1:]) for path, like in likes.items()}
        shardings = {path: unsharded_rows(like.sharding, shapes[path]) for path, like in likes.items()}
        self._paths = [*sources]
        self._gather = jax.jit(
            lambda arrays: {path: x[jnp.asarray(sources[path])] for path, x in arrays.items()}, out_shardings=shardings
        )

    def __call__(self, inputs: Params) -> Params:
        """The weights and observations of a state."""
        if not self._paths:
            return inputs
        return {**inputs, **self._gather({path: inputs[path] for path in self._paths})}
