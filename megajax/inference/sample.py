"""Sample output of a trained model at the end of its run.

A model's config names a function (`ModelConfig.sampler`) of the run and its folder. It returns a text to print, and may
write a picture into the folder.
"""

from pathlib import Path
from typing import Any, Protocol

from megajax.config.builds import resolve

SAMPLERS = {
    "blanks": "megajax.inference.blanks:sample_blanks",
    "captions": "megajax.inference.captions:sample",
    "confusion": "megajax.inference.confusion:sample",
    "continuation": "megajax.inference.continuation:sample",
    "spans": "megajax.inference.blanks:sample_spans",
}
"""Name -> sampler of this package."""


class TrainedRun(Protocol):
    """A run, for example `megajax.training.session.Run`.

    Attributes:
        cfg: the config of the run.
        parts: its `tokenizer`, and in `splits.valid` the rows of the validation split, or None.
    """

    cfg: Any
    parts: Any

    def model(self, *arrays: Any, **leaves: Any) -> Any:
        """Leaves of rows -> output of the model with the present weights."""
        ...


def sample(run: TrainedRun, folder: Path) -> str | None:
    """The text of the model's sampler; None without a sampler, or without a prompt and validation rows."""
    sampler = run.cfg.model.sampler()
    return None if sampler is None else resolve(SAMPLERS.get(sampler, sampler))(run, folder)
