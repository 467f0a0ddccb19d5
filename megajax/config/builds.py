"""How a config makes its object without importing it first."""

import importlib
from typing import Any, ClassVar


def resolve(reference: str) -> Any:
    """ "package.module:Name" -> the thing itself, importing the module now."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


class Builds:
    """Base of the configs that build something: `target` names the class or function as "package.module:Name".

    The target is imported at the first `build`, so that configs can be written, checked and printed in a fraction
    of a second, before jax is imported. tests/architecture checks that every target exists and lies in the
    config's own package.
    """

    __slots__ = ()
    target: ClassVar[str]

    def build(self, *args: Any, **kwargs: Any) -> Any:
        return resolve(self.target)(self, *args, **kwargs)
