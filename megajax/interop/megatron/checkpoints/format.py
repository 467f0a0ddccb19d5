"""Checkpoints of Megatron-LM as a format of stored models."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp

from megajax.interop.formats import Reading, split_name
from megajax.interop.megatron.checkpoints.checkpoint import MegatronModel
from megajax.interop.megatron.checkpoints.conversion import continued_config, open_model, state, write_model
from megajax.interop.runs.writer import Advance, StateArray
from megajax.interop.stored_model import Options, StoredModel, stored_foreign
from megajax.layers.param import ParamSpec
from megajax.storage.new_folder import new_folder
from megajax.training.run_config import RunConfig


@dataclass(frozen=True)
class MegatronTraining:
    """The optimizer's state of a checkpoint, as a `stored_model.TrainingState`."""

    opened: MegatronModel

    @property
    def iteration(self) -> int:
        return self.opened.iteration

    def config(self, base: RunConfig, run: Path) -> tuple[RunConfig, list[str]]:
        return continued_config(self.opened, base, run)

    def arrays(self, declared: Mapping[str, ParamSpec]) -> dict[str, StateArray]:
        return state(self.opened, declared)


def read(name: str, reading: Reading) -> StoredModel:
    """The model of megatron:DIR, with the optimizer's state if it can be split by weights."""
    opened = open_model(split_name(name)[1].absolute(), vocabulary=reading.vocabulary)
    stored = stored_foreign(name, opened.foreign)
    training = MegatronTraining(opened) if opened.moments else None
    return replace(stored, left_out=[*stored.left_out, *opened.dropped], training=training)


def write(stored: StoredModel, target: Path, options: Options, advance: Advance) -> list[str]:
    """Writes a checkpoint in the `torch` format for one rank."""
    dtype = options.dtype or jnp.dtype(stored.origin.dtype or "float32")
    with new_folder(target, stored.elements() * dtype.itemsize) as folder:
        table = write_model(
            folder,
            stored.model,
            stored.weights,
            engine=options.family != "local",
            dtype=dtype,
            advance=advance,
        )
    return [
        f"{target}: {len(table)} tensors in {dtype.name} for one rank, layers of "
        + ("plain torch" if options.family == "local" else "Transformer Engine (--family=local: of plain torch)"),
        "without the tokenizer; Megatron-LM reads it with --load, --ckpt-format torch, --use-checkpoint-args",
    ]
