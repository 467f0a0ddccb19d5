"""Going on from a checkpoint: what is stored beside the arrays, and what may not have changed since."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from megajax.checkpoint.reader import CheckpointReader
from megajax.config.dump import flatten, scalar_text
from megajax.config.errors import UserError
from megajax.training.rows import like_stored, reorder
from megajax.training.run_config import RunConfig
from megajax.training.session import Parts
from megajax.training.state import TrainState

FREE = re.compile(
    r"(parallel|logging|profile|checkpoint|resilience|evaluation|schedule)\.|run_dir$|steps$|batch\.micro_size$"
    r"|model\.(recompute\w*|offload.*|loss_chunk|vocabulary_multiple)$|optimizer\.(log_|offload$)|model\..*\.kernel$|data\.(cache_dir|loader\.|surplus)"
)
"""Settings that change no number of the training, or whose effect is compared as a derived fact."""


def facts(parts: Parts) -> dict[str, Any]:
    """What training's numbers depend on, setting by setting, as a checkpoint remembers it."""
    cfg = parts.cfg
    kept = {name: value for name, value in flatten(cfg).items() if _matters(name, cfg)}
    kept["model: rows of the vocabulary, padding included"] = cfg.model.padded_vocabulary()
    kept |= parts.program.schedule.facts()
    kept["data: order of the training rows (more steps may need another epoch)"] = parts.splits.train.order()
    return {
        name: value if isinstance(value, int | float) and not isinstance(value, bool) else scalar_text(value)
        for name, value in kept.items()
    }


def _matters(name: str, cfg: RunConfig) -> bool:
    if name == "batch.micro_size":
        return cfg.batch.loss_average == "microbatches"
    return FREE.match(name) is None


def stored(parts: Parts, config_yaml: str) -> dict[str, Any]:
    """What goes into a checkpoint beside the arrays."""
    packages = {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")}
    return {
        "facts": facts(parts),
        "rows": list(parts.program.partition.order()),
        "config": config_yaml,
        "seed": parts.cfg.seed,
        "versions": packages,
    }


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Facts that differ, as lines `name: old -> new`."""
    names = [*old, *(name for name in new if name not in old)]
    return [
        f"{name}: {old.get(name, '(not there)')} -> {new.get(name, '(not there)')}"
        for name in names
        if old.get(name) != new.get(name)
    ]


@dataclass(frozen=True)
class Resume:
    """Brings the state of a checkpoint onto this run's layout, if nothing that matters has changed."""

    reader: CheckpointReader
    step: int
    own: bool
    """The checkpoint is this run's; another run's may have had other settings."""

    def __call__(self, parts: Parts, like: TrainState) -> TrainState:
        """Raises UserError listing every changed setting, or the arrays that don't fit; nothing is written."""
        if self.own:
            changed = changes(self.reader.meta(self.step)["facts"], facts(parts))
            if changed:
                listed = "\n".join(f"  {line}" for line in changed)
                raise UserError(
                    f"{parts.cfg.run_dir} holds step {self.step} of a run with other settings (stored -> asked for):\n"
                    f"{listed}\nGo on with the old settings; or set another run_dir, for a new run there or, with "
                    f"checkpoint.load={parts.cfg.run_dir}, for one that starts from this one's state."
                )
        program = parts.program
        wanted = program.partition.order()
        stored = tuple(self.reader.meta(self.step).get("rows", wanted))
        if stored == wanted:
            return self.reader.restore(self.step, like)[0]
        state, _ = self.reader.restore(self.step, like_stored(like, program.declared, stored))
        return reorder(state, like, program.declared, stored, wanted)
