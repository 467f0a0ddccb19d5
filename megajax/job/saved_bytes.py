"""Bytes that layers keep of a microbatch for its backward pass, and those they compute again."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megajax.layers.context import Context
from megajax.layers.remat import Kept
from megajax.layers.stack import BLOCKS, Span
from megajax.mesh.observations import reduction_of
from megajax.pipeline.layer_loop import differentiated
from megajax.training.program import Program

STACK = "stack."


class KeptBytes(NamedTuple):
    """Of one layer and microbatch, over all devices of `tensor`; of a stack's pattern the mean."""

    layers: int
    """Layers of a chunk of a stage that do so."""
    device: int
    host: int
    again: int
    """What it would keep beside that if nothing were computed again; a compiler may need less."""


def kept_bytes(program: Program) -> list[KeptBytes]:
    """For each way in which layers keep."""
    stack = program.abstract.stack
    rows = program.partition.rows if program.pipeline is not None else stack.repeats
    found = []
    for span in stack.spans(rows):
        layers = span.together * stack.pattern
        device, host = _saved(program, span)
        whole = sum(_saved(program, Span(1, 1, stack.unit(Kept(parts=None), 1), 1))) * span.together
        sizes = (device, host, max(whole - device - host, 0))
        found.append(KeptBytes(span.units * layers, *(size // layers for size in sizes)))
    return found


def _saved(program: Program, span: Span) -> tuple[int, int]:
    """(on the device, in host memory) of one unit."""

    def kept(*args: Any) -> Any:
        return differentiated(span.unit, *args)[1]

    avals = jax.make_jaxpr(kept)(*_arguments(program, span.together)).out_avals
    on_host = [aval.memory_space == jax.memory.Space.Host for aval in avals]
    sizes = [aval.size * aval.dtype.itemsize for aval in avals]
    host = sum(size for size, away in zip(sizes, on_host, strict=True) if away)
    return sum(sizes) - host, host


def _arguments(program: Program, together: int) -> tuple:
    """A unit's weights, common weights, numbers, x and context, without values."""
    cfg, compute = program.cfg, jnp.dtype(program.cfg.precision.compute)
    stacked, common, several = {}, {}, () if together == 1 else (together,)
    for path, spec in program.arrays.items():
        if path.startswith(STACK + BLOCKS):
            stacked[path.removeprefix(STACK + BLOCKS)] = _like((*several, *spec.shape[1:]), _dtype(path, compute))
        elif path.startswith(STACK):
            common[path.removeprefix(STACK)] = _like(spec.shape, _dtype(path, compute))
    rows, length = cfg.batch.micro_size, cfg.model.sequence_length
    ints = _like((rows, length), jnp.int32)
    ctx = Context(
        positions=ints,
        index=_like((length,), jnp.int32),
        segments=ints if "segment_ids" in cfg.data.leaves() else None,
        row_keys=_like((rows, 2), jnp.uint32) if cfg.model.has_dropout() else None,
    )
    x = _like((rows, length, cfg.model.hidden), jnp.float32 if cfg.model.residual == "float32" else compute)
    return stacked, common, _like(several, jnp.int32), x, ctx


def _dtype(path: str, compute: Any) -> Any:
    return compute if reduction_of(path) is None else jnp.float32


def _like(shape: tuple[int, ...], dtype: Any) -> Any:
    """An array without values, for tracing."""
    return jax.ShapeDtypeStruct(shape, dtype)
