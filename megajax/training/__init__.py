"""Putting a run together and stepping it. Notebooks use `megajax.setup`, whose runs also generate text."""

from typing import Any

from megajax.config.references import resolve

_ENTRIES = {
    "setup": "megajax.training.session:setup",
    "visualize": "megajax.training.placement:visualize",
    "RunConfig": "megajax.training.run_config:RunConfig",
}


def __getattr__(name: str) -> Any:
    # Looked up on first use: a config file imports this package before jax may be imported.
    if name in _ENTRIES:
        return resolve(_ENTRIES[name])
    raise AttributeError(name)
