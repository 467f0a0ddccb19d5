"""Runs the sections of a model in sequence, each on whole rows."""

from collections.abc import Mapping
from typing import Any

from megajax.batch import Array, Rows
from megajax.models.protocol import Section


def last_output(sections: Mapping[str, Any], rows: Rows, key: Array | None = None) -> tuple[Array, Any]:
    """Output of the layers of the last section on a microbatch [B, ...], and their context.

    sections: of a `Model`; key: random key of the run, None for a deterministic forward pass. Not for differentiation:
    training differentiates section by section.
    """
    *earlier, last = sections.values()
    memory = None
    for section in earlier:
        x, ctx = _output(section, rows, key, memory)
        memory = section.leave(x, ctx)
    return _output(last, rows, key, memory)


def with_memory(ctx: Any, memory: Array | None) -> Any:
    """The context with the output of the preceding section."""
    return ctx if memory is None else ctx._replace(memory=memory)


def _output(section: Section, rows: Rows, key: Array | None, memory: Array | None) -> tuple[Array, Any]:
    ctx = with_memory(section.context(rows, key), memory)
    return section.stack(section.enter(section.embed(rows), ctx), ctx), ctx
