"""A batch for a training loop of one's own, from arrays on the host."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.typing import ArrayLike

from megajax.batch import Batch
from megajax.config.errors import UserError
from megajax.data.rows.loader import read_rows
from megajax.training.program import Program


def own_batch(program: Program, consumed: int, tokens: ArrayLike | None, leaves: Mapping[str, ArrayLike]) -> Batch:
    """The batch [M, B, ...] of a step, on the devices. consumed: rows before it. See `Run.batch`.

    Raises UserError for another number of rows, and for arrays that do not match the schema.
    """
    arrays = {name: np.asarray(values) for name, values in leaves.items()}
    if unknown := [name for name in arrays if name not in program.schema]:
        raise UserError(f"the model reads no {unknown[0]}; it reads {', '.join(program.schema)}")
    if tokens is not None:
        arrays = _from_tokens(program, np.asarray(tokens)) | arrays
    size = program.sizes.at(consumed)
    counts = {name: len(values) if values.ndim else 0 for name, values in arrays.items()}
    if wrong := [(name, count) for name, count in counts.items() if count != size.rows]:
        name, count = wrong[0]
        raise UserError(f"a step has {size.rows} rows (batch.global_size), and there are {count} rows of {name}")
    rows = {consumed + row: {name: arrays[name][row] for name in arrays} for row in range(size.rows)}
    block = read_rows(rows, program.schema, consumed, np.arange(size.rows), program.layout.rows)
    shape = size.microbatches, size.rows // size.microbatches
    values = {name: block[name].reshape(*shape, *block[name].shape[1:]) for name in program.schema}
    return {
        name: jax.make_array_from_callback(array.shape, program.batch_shardings[name], array.__getitem__)
        for name, array in values.items()
    }


def demand_batch(program: Program, batch: object) -> None:
    """Raises UserError for anything but a batch, such as the tokens themselves."""
    if not isinstance(batch, Mapping) or not program.schema.keys() <= batch.keys():
        raise UserError(
            f"a batch is made by run.batch(tokens), with {', '.join(program.schema)}; this is {type(batch)}"
        )


def _from_tokens(program: Program, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """The leaves that follow from the tokens of whole documents, one a row: each position predicts the next token."""
    schema, causal = program.schema, program.cfg.model.ignores_later_positions()
    if "tokens" not in schema or len(schema["tokens"].shape) != 1:
        raise UserError(f"the model reads no rows of tokens: give {', '.join(schema)} by name")
    (length,) = schema["tokens"].shape
    if tokens.ndim != 2 or not 2 <= tokens.shape[1] <= length + 1:
        raise UserError(
            f"tokens have the shape {tokens.shape}: expected rows of 2 to {length + 1}, the model's {length} positions "
            "and the token after them"
        )
    count = tokens.shape[1]
    text = np.pad(tokens, ((0, 0), (0, length + 1 - count)))
    numbers = np.broadcast_to(np.arange(length, dtype=np.int32), (len(tokens), length))
    derived = {
        "tokens": text[:, :-1],
        "positions": numbers,
        "segment_ids": np.zeros_like(numbers),
        "padding": numbers >= count,
    }
    if causal:  # other models predict what their data hides
        derived |= {"labels": text[:, 1:], "loss_mask": (numbers < count - 1).astype(np.float32)}
    return {name: values for name, values in derived.items() if name in schema}
