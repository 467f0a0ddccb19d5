"""Checks of `data.loader.balance`, which balances the work of data groups."""

from collections.abc import Iterator
from typing import Any, Literal

from megajax.config.errors import Problem
from megajax.layers.facts import ComparesRows
from megajax.models.protocol import ModelConfig
from megajax.training.config import BatchConfig

SETTING = "data.loader.balance"


def balance_problems(data: Any, batch: BatchConfig, model: ModelConfig) -> Iterator[Problem]:
    """Problems of balancing rows: they have equal work, or the loss depends on which rows share a microbatch."""
    balance = data.loader.balance
    if balance == "none":
        return
    if not model.ignores_later_positions():
        message = f"{type(model).__name__} reads later positions too, and rows are balanced by causal attention's work"
        yield Problem(SETTING, message, "set it to none")
        return
    if "segment_ids" not in data.leaves() or "segment_ids" not in model.schema():
        message = f"is {balance}, but each row is one document, so all rows have the same work"
        yield Problem(SETTING, message, "set it to none, or data.isolate_documents=true")
    if batch.loss_average == "microbatches" and batch.micro_size > 1:
        message = (
            f"{balance} puts other rows into the microbatch of a device, whose mean loss then changes: "
            f"batch.loss_average=microbatches with batch.micro_size={batch.micro_size}"
        )
        yield Problem(SETTING, message, "set it to none, batch.loss_average=tokens, or batch.micro_size=1")
    if batch.loss_average == "tokens" and batch.micro_size > 1 and weighs_by_microbatch(model):
        message = (
            f"{balance} puts other rows into the microbatch of a device, by which "
            f"model.prediction.reweighted=microbatches weighs tokens: batch.micro_size={batch.micro_size}"
        )
        yield Problem(SETTING, message, "set it to none, model.prediction.reweighted=rows, or batch.micro_size=1")
    changed = [(place, kind) for place, kind in settings_comparing_rows(model) if balance == "step" or kind == "order"]
    for place, kind in changed[:1]:
        message = f"{balance} changes the losses of {place}, which compares the rows of a microbatch"
        yield Problem(SETTING, message, f"set it to {'microbatch or none' if kind == 'rows' else 'none'}")


def weighs_by_microbatch(model: ModelConfig) -> bool:
    """Whether the weights of predicted tokens depend on the other rows of a device's microbatch."""
    return getattr(getattr(model, "prediction", None), "reweighted", "rows") == "microbatches"


def settings_comparing_rows(model: ModelConfig) -> list[tuple[str, Literal["rows", "order"]]]:
    """(setting, kind) of layers whose losses depend on the rows of a microbatch, or also on their order."""
    return [
        (f"{place}.{name}.{setting}", kind)
        for place, block in written_blocks(model)
        for name, part in block.parts().items()
        for setting, kind in (part.compares_rows() if isinstance(part, ComparesRows) else {}).items()
    ]


def written_blocks(model: ModelConfig) -> Iterator[tuple[str, Any]]:
    """(setting, block) of each that is written in the config, those of heads that predict further ahead too."""
    for path, stack in model.stacks().items():
        for place, block in stack.named_blocks().items():
            yield ".".join(("model", path or "stack", place)), block
    if (ahead := getattr(getattr(model, "prediction", None), "block", None)) is not None:
        yield "model.prediction.block", ahead
