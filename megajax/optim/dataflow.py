"""Which inputs of a traced function its outputs depend on."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal

type Names = frozenset[str]

NONE: Names = frozenset()


def dependencies(jaxpr: Jaxpr, inputs: Sequence[Names]) -> list[Names]:
    """For each output the names of the inputs that it may depend on. inputs: the names of each input.

    Calls and branches are followed for each output. Every output of any other operation, loops included, is assumed to
    depend on all inputs of the operation.
    """
    known: dict[Any, Names] = dict(zip(jaxpr.invars, inputs, strict=True))

    def names(variable: Any) -> Names:
        return NONE if isinstance(variable, Literal) else known.get(variable, NONE)

    for equation in jaxpr.eqns:
        given = [names(variable) for variable in equation.invars]
        match equation.primitive.name:
            case "jit" | "pjit":
                made = dependencies(equation.params["jaxpr"].jaxpr, given)
            case "cond":
                branches = [dependencies(branch.jaxpr, given[1:]) for branch in equation.params["branches"]]
                made = [given[0].union(*each) for each in zip(*branches, strict=True)]
            case _:
                made = [NONE.union(*given)] * len(equation.outvars)
        known.update(zip(equation.outvars, made, strict=True))
    return [names(variable) for variable in jaxpr.outvars]
