"""Resuming from a checkpoint: its metadata, and the settings that may not have changed since."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

from megajax.checkpoint.local.local_checkpoints import LocalCheckpoints
from megajax.checkpoint.reader import CheckpointReader, DamagedStep
from megajax.config.errors import UserError
from megajax.interop.weights.provenance import META, Ancestor, Provenance
from megajax.interop.weights.weights_config import recorded
from megajax.job.start.equal_inputs import DataFiles
from megajax.job.start.layer_order import like_stored, reorder, same_order, stored_chunks
from megajax.optim.schedule import DECAY
from megajax.pipeline.partition import row_order
from megajax.processes.must_be_equal import MUST_BE_EQUAL, differences
from megajax.training.reference import UNRECORDED
from megajax.training.session import Parts
from megajax.training.state import TrainState

FREE = re.compile(
    r"(parallel|logging|profile|checkpoint|resilience|evaluation|schedule|xla)\.|run_dir$|steps$|batch\.micro_size$"
    r"|model\.(recompute\w*|offload.*|unroll|loss_chunk|vocabulary_multiple)$|optimizer\.(log_|offload$)|model\..*\.kernel$|data\.(cache_dir|reference_dir|loader\.|surplus|workers|reward_seconds)"
)
"""Settings that don't affect the numbers of training, or only through a fact that is compared."""

DATA = re.compile(r"data[.:]")
"""Facts about data, which may change with checkpoint.changed_data=accept."""

RATES = re.compile(r"schedule[.:]|optimizer\.(weight_decay|embedding_lr|embedding_min_lr|groups|groups\..*)$")
"""Facts about learning rates and decay, which may change with schedule.on_resume=config."""


def facts(parts: Parts) -> dict[str, Any]:
    """The settings and derived facts that the numbers of training depend on, as stored in a checkpoint."""
    cfg = parts.cfg
    values = {name: value for name, value in parts.resolved.settings.items() if _matters(name, cfg.batch.loss_average)}
    if (columns := parts.program.summary.columns) is not None:
        values["model: rows of the vocabulary, padding included"] = columns
    if cfg.batch.decrease:
        values["batch: rows of a step, rounded down to a multiple of the devices"] = ", ".join(
            str(size.rows) for size in parts.program.sizes.sizes()
        )
    values |= parts.program.schedule.facts()
    if hasattr(parts.splits.train, "order"):
        values["data: order of the training rows (more steps may need another epoch)"] = parts.splits.train.order()
    return recorded(values)


def _matters(name: str, loss_average: str) -> bool:
    if name == "batch.micro_size":
        return loss_average == "microbatches"
    return FREE.match(name) is None


def checkpoint_meta(
    parts: Parts, config_yaml: str, data: DataFiles | None = None, provenance: Provenance | None = None
) -> dict[str, Any]:
    """The metadata of a checkpoint. provenance: of its weights."""
    packages = {name: version(name) for name in ("jax", "jaxlib", "flax", "orbax-checkpoint", "numpy")}
    return {
        "facts": facts(parts),
        "data_files": {} if data is None else data.plain(),
        "rows": [[chunk.start, chunk.stop] for chunk in parts.program.partition.stored()],
        "mesh": dict(parts.program.mesh.shape),
        "axes": {path: list(spec.axes) for path, spec in parts.program.declared.items()},
        "layers": {path: list(spec.layers) for path, spec in parts.program.declared.items() if spec.layers},
        "config": config_yaml,
        "seed": parts.cfg.seed,
        "versions": packages,
        META: (provenance or Provenance()).record(),
    }


def changes(stored_facts: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Facts that differ: name -> `old -> new`."""
    unequal = differences(new, stored_facts, MUST_BE_EQUAL["facts"].absent)
    return {fact.name: f"{fact.expected} -> {fact.actual}" for fact in unequal}


@dataclass
class Resume:
    """Restores the state of a checkpoint in this run's layout, if no fact of the training has changed.

    `reader` and `step` are those of another checkpoint afterwards if the restore found this one damaged.
    """

    reader: CheckpointReader | LocalCheckpoints
    step: int
    same_run: bool
    """Whether this run wrote the checkpoint; another run may have other settings."""
    say: Callable[[str], None]
    """Prints a line."""
    event: Callable[..., None] = lambda name, **fields: None
    """Logs the event `restored`."""
    data: DataFiles = field(default_factory=DataFiles)
    """The data files of this run."""
    following: Callable[[], tuple[CheckpointReader | LocalCheckpoints, int, bool]] | None = None
    """Reader, step and `same_run` of the next checkpoint to try; None: a damaged one is an error."""

    @property
    def reference(self) -> str | None:
        """Checksum of the weights of the run's reference model; None: a new run, whose weights are the reference."""
        return (self.reader.meta(self.step).get("reference") or UNRECORDED) if self.same_run else None

    @property
    def ancestor(self) -> Ancestor:
        """The checkpoint."""
        return Ancestor.of(self.reader.meta(self.step), self.reader.folder)

    def __call__(self, parts: Parts, like: TrainState) -> TrainState:
        """Raises UserError with all changed settings, or with the arrays that don't fit; nothing is written."""
        started = time.monotonic()
        while True:
            if self.same_run:
                self._compare(parts)
            try:
                state = self._restored(parts, like)
            except DamagedStep:
                if self.following is None:
                    raise
                self.reader, self.step, self.same_run = self.following()
                continue
            self.event("restored", step=self.step, seconds=round(time.monotonic() - started, 3))
            return state

    def _restored(self, parts: Parts, like: TrainState) -> TrainState:
        program = parts.program
        order, stored = program.partition.order_of, partial(row_order, stored_chunks(self.reader.meta(self.step)))
        if same_order(program.arrays, stored, order):
            return self.reader.restore(self.step, like)[0]
        state, _ = self.reader.restore(self.step, like_stored(like, program.arrays, stored))
        return reorder(state, like, program.arrays, stored, order)

    def _compare(self, parts: Parts) -> None:
        changed = self._changed(parts)
        rates = {name: text for name, text in changed.items() if RATES.match(name)}
        data = {name: text for name, text in changed.items() if DATA.match(name)}
        free = rates if parts.cfg.schedule.on_resume == "config" else {}
        free = free | (data if parts.cfg.checkpoint.changed_data == "accept" else {})
        if conflicts := {name: text for name, text in changed.items() if name not in free}:
            decay = self._decay(parts) if DECAY in conflicts else ""
            accept = "set schedule.on_resume=config to change the rates from here on; " * bool(conflicts.keys() & rates)
            accept += "set checkpoint.changed_data=accept to continue with the new data; " * bool(
                conflicts.keys() & data
            )
            subject = "data" if conflicts.keys() <= data.keys() else "settings"
            message = MUST_BE_EQUAL["facts"].message
            raise UserError(
                message.format(
                    run=parts.cfg.run_dir,
                    step=self.step,
                    subject=subject,
                    differences=_listed(conflicts),
                    decay=decay,
                    accept=accept,
                )
            )
        if rates:
            self.say(f"changed rates from step {self.step} on (schedule.on_resume=config):\n{_listed(rates)}")
        if data:
            self.say(f"changed data from step {self.step} on (checkpoint.changed_data=accept):\n{_listed(data)}")

    def _changed(self, parts: Parts) -> dict[str, str]:
        """Facts and data files that differ, without data files that only moved."""
        meta, new = self.reader.meta(self.step), facts(parts)
        old, changed = meta["facts"], changes(meta["facts"], new)
        files, unchanged = self.data.compare(parts.splits, meta.get("data_files", {}))
        for name in list(changed):
            if not files and self.data.moved(name, old.get(name), new.get(name), unchanged):
                self.say(f"{name}: {changed.pop(name)}; the content is the same")
        return changed | files

    def _decay(self, parts: Parts) -> str:
        """Advice on how a run of another length keeps its learning rates; "" if the length of the decay is set."""
        schedule, sizes = parts.cfg.schedule, parts.program.sizes
        if schedule.decay_steps is not None or schedule.decay_samples is not None:
            return ""
        before = sizes.steps(self.reader.meta(self.step)["facts"][DECAY])
        return (
            f"The learning rate decays until the last step, which was {before} and is {parts.cfg.steps} now: "
            f"--schedule.decay_steps={before} keeps it unchanged.\n"
        )


def _listed(changed: Mapping[str, str]) -> str:
    return "\n".join(f"  {name}: {text}" for name, text in changed.items())
