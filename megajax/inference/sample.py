"""What a trained model shows at the end of its run.

A model's config names a function (`ModelConfig.sampler`) of the run and its folder, which gives a text to print; it may
leave a picture in the folder.
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
"""Ours by their names."""


class Trained(Protocol):
    """A run, as `megajax.training.session.Run` is one.

    Attributes:
        cfg: the config of the run.
        parts: its `tokenizer`, and in `splits.valid` the rows of the validation split, or None.
    """

    cfg: Any
    parts: Any

    def model(self, *arrays: Any, **named: Any) -> Any:
        """Rows of leaves -> what the model gives for them, with the present weights."""
        ...


def sample(run: Trained, folder: Path) -> str | None:
    """What the model's own sampler says; None where it has none, or nothing to start from."""
    sampler = run.cfg.model.sampler()
    return None if sampler is None else resolve(SAMPLERS.get(sampler, sampler))(run, folder)
