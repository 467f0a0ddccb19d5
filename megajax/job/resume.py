"""Going on from a checkpoint: what is stored beside the arrays, and what may not have changed since."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

from megajax.checkpoint.local.reader import LocalReader
from megajax.checkpoint.reader import CheckpointReader
from megajax.config.dump import flatten, scalar_text
from megajax.config.errors import UserError
from megajax.job.data_files import DataFiles
from megajax.job.layer_order import like_stored, reorder, same_order, stored_chunks
from megajax.models.facts import facts_of
from megajax.models.protocol import ids_below
from megajax.optim.schedule import DECAY
from megajax.pipeline.partition import row_order
from megajax.training.run_config import RunConfig
from megajax.training.session import Parts
from megajax.training.state import TrainState

FREE = re.compile(
    r"(parallel|logging|profile|checkpoint|resilience|evaluation|schedule|xla)\.|run_dir$|steps$|batch\.micro_size$"
    r"|model\.(recompute\w*|offload.*|unroll|loss_chunk|vocabulary_multiple)$|optimizer\.(log_|offload$)|model\..*\.kernel$|data\.(cache_dir|loader\.|surplus)"
)
"""Settings that change no number of the training, or whose effect is compared as a derived fact."""

DATA = re.compile(r"data[.:]")
"""Facts about data, which checkpoint.changed_data=accept lets change."""

RATES = re.compile(r"schedule[.:]|optimizer\.(weight_decay|embedding_lr|embedding_min_lr|groups|groups\..*)$")
"""Facts about learning rates and decay, which schedule.on_resume=config lets change."""


def facts(parts: Parts) -> dict[str, Any]:
    """What training's numbers depend on, setting by setting, as a checkpoint remembers it."""
    cfg = parts.cfg
    kept = {name: value for name, value in flatten(cfg).items() if _matters(name, cfg)}
    if (model := facts_of(cfg.model)) is not None and ids_below(cfg.model) is not None:
        kept["model: rows of the vocabulary, padding included"] = model.head_facts().columns
    if cfg.batch.decrease:
        kept["batch: rows of a step, rounded down to a multiple of the devices"] = ", ".join(
            str(size.rows) for size in parts.program.sizes.sizes()
        )
    kept |= parts.program.schedule.facts()
    if hasattr(parts.splits.train, "order"):
        kept["data: order of the training rows (more steps may need another epoch)"] = parts.splits.train.order()
    return {
        name: value if isinstance(value, int | float) and not isinstance(value, bool) else scalar_text(value)
        for name, value in kept.items()
    }


def _matters(name: str, cfg: RunConfig) -> bool:
    if name == "batch.micro_size":
        return cfg.batch.loss_average == "microbatches"
    return FREE.match(name) is None


def stored(parts: Parts, config_yaml: str, data: DataFiles | None = None) -> dict[str, Any]:
    """What goes into a checkpoint beside the arrays."""
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
    }


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Facts that differ: name -> `old -> new`."""
    names = [*old, *(name for name in new if name not in old)]
    return {
        name: f"{old.get(name, '(not there)')} -> {new.get(name, '(not there)')}"
        for name in names
        if old.get(name) != new.get(name)
    }


@dataclass(frozen=True)
class Resume:
    """Brings the state of a checkpoint onto this run's layout, if nothing that matters has changed."""

    reader: CheckpointReader | LocalReader
    step: int
    own: bool
    """The checkpoint is this run's; another run's may have had other settings."""
    say: Callable[[str], None]
    """Shows a line to people."""
    event: Callable[..., None] = lambda name, **fields: None
    """Takes the event `restored`."""
    data: DataFiles = field(default_factory=DataFiles)
    """The data files of this run."""

    def __call__(self, parts: Parts, like: TrainState) -> TrainState:
        """Raises UserError listing every changed setting, or the arrays that don't fit; nothing is written."""
        if self.own:
            self._compare(parts)
        begun = time.monotonic()
        state = self._restored(parts, like)
        self.event("restored", step=self.step, seconds=round(time.monotonic() - begun, 3))
        return state

    def _restored(self, parts: Parts, like: TrainState) -> TrainState:
        program = parts.program
        wanted, stored = program.partition.order_of, partial(row_order, stored_chunks(self.reader.meta(self.step)))
        if same_order(program.arrays, stored, wanted):
            return self.reader.restore(self.step, like)[0]
        state, _ = self.reader.restore(self.step, like_stored(like, program.arrays, stored))
        return reorder(state, like, program.arrays, stored, wanted)

    def _compare(self, parts: Parts) -> None:
        changed = self._changed(parts)
        rates = {name: text for name, text in changed.items() if RATES.match(name)}
        data = {name: text for name, text in changed.items() if DATA.match(name)}
        free = rates if parts.cfg.schedule.on_resume == "config" else {}
        free = free | (data if parts.cfg.checkpoint.changed_data == "accept" else {})
        if wrong := {name: text for name, text in changed.items() if name not in free}:
            decay = self._decay(parts) if DECAY in wrong else ""
            take_over = "set schedule.on_resume=config to let rates change from here on; " * bool(wrong.keys() & rates)
            take_over += "set checkpoint.changed_data=accept to go on with other data; " * bool(wrong.keys() & data)
            what = "data" if wrong.keys() <= data.keys() else "settings"
            raise UserError(
                f"{parts.cfg.run_dir} holds step {self.step} of a run with other {what} (stored -> asked for):\n"
                f"{_listed(wrong)}\n{decay}Go on with the old {what}; {take_over}or set another run_dir, for a new "
                f"run there or, with checkpoint.load={parts.cfg.run_dir}, for one that starts from this one's state."
            )
        if rates:
            self.say(f"other rates from step {self.step} on (schedule.on_resume=config):\n{_listed(rates)}")
        if data:
            self.say(f"other data from step {self.step} on (checkpoint.changed_data=accept):\n{_listed(data)}")

    def _changed(self, parts: Parts) -> dict[str, str]:
        """Facts and data files that differ; a file of the same content at another place does not."""
        meta, new = self.reader.meta(self.step), facts(parts)
        old, (files, same) = meta["facts"], self.data.compare(parts.splits, meta.get("data_files", {}))
        changed = changes(old, new)
        moved = [name for name in changed if not files and self.data.moved(name, old.get(name), new.get(name), same)]
        for name in moved:
            self.say(f"{name}: {changed.pop(name)}; the content is the same")
        return changed | files

    def _decay(self, parts: Parts) -> str:
        """How a run of another length keeps its learning rates; "" where the length of the decay is set."""
        schedule, sizes = parts.cfg.schedule, parts.program.sizes
        if schedule.decay_steps is not None or schedule.decay_samples is not None:
            return ""
        before = sizes.steps(self.reader.meta(self.step)["facts"][DECAY])
        return (
            f"The learning rate decays until the last step, which was {before} and is {parts.cfg.steps} now: "
            f"--schedule.decay_steps={before} keeps it as it was.\n"
        )


def _listed(changed: Mapping[str, str]) -> str:
    return "\n".join(f"  {name}: {text}" for name, text in changed.items())
