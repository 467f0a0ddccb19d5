"""Adam moments from the files of ranks, whose optimizer state identifies weights only by number."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from megajax.interop.megatron.checkpoints.pickles import TensorPlace
from megajax.interop.megatron.checkpoints.ranks import RankFile

MOMENTS: Mapping[str, str] = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment"}
"""Name in Megatron-LM -> name in MegaJAX."""
MASTER = "fp32_param"
"""Name of the float32 copies of weights in a run in 16 bits."""
BUFFERS = ("expert_bias", "inv_freq", "local_tokens_per_expert", "global_tokens_per_expert", "ga_steps", "_extra_state")
"""Last parts of names of tensors that no optimizer updates."""
EXPERT = ".mlp.experts."


class UnmappedError(Exception):
    """The state of an optimizer can't be assigned to weights; the message is the reason."""


def rank_moments(file: RankFile) -> dict[str, list[dict[str, TensorPlace]]]:
    """Kind of moment -> chunk -> name within the file -> place, from the optimizer state of a file.

    Weights are numbered group by group, and within a group in the order of the model. One group has weight decay
    (wd_mult 1), the other has biases and vectors without it (wd_mult 0); with expert parallelism, experts have two
    groups of their own. Raises UnmappedError for another kind of state, and for mismatches of counts or shapes.
    """
    chunks = [
        {name: place for name, place in chunk.items() if isinstance(place, TensorPlace) and not name.endswith(BUFFERS)}
        for chunk in file.chunks()
    ]
    rest = [(number, name, place) for number, chunk in enumerate(chunks) for name, place in chunk.items()]
    result: dict[str, list[dict[str, TensorPlace]]] = {}
    optimizers = list(_optimizers(file.archive.content.get("optimizer")))
    has_expert_groups = any(
        group.get("is_expert_parallel") for optimizer in optimizers for group in optimizer["param_groups"]
    )
    for optimizer in optimizers:
        states, masters = optimizer["state"], optimizer.get("masters")
        for place, group in enumerate(optimizer["param_groups"]):
            members = [weight for weight in rest if _belongs(weight, group, has_expert_groups)]
            rest = [weight for weight in rest if not _belongs(weight, group, has_expert_groups)]
            if len(members) != len(group["params"]):
                raise UnmappedError(f"a group has {len(group['params'])} weights where {len(members)} were expected")
            if masters is not None and len(masters[place]) != len(members):
                raise UnmappedError("only some of its weights have a copy in float32")
            for index, ((number, name, weight), key) in enumerate(zip(members, group["params"], strict=True)):
                values = {kind: states.get(key, {}).get(kind) for kind in MOMENTS}
                if masters is not None:
                    values[MASTER] = masters[place][index]
                for kind, value in values.items():
                    if not isinstance(value, TensorPlace) or value.shape != weight.shape:
                        shape = getattr(value, "shape", None)
                        raise UnmappedError(f"{kind} of {name} has the shape {shape}, the weight {weight.shape}")
                    result.setdefault(kind, [{} for _ in chunks])[number][name] = value
    if rest:
        raise UnmappedError(f"it has no state of {rest[0][1]}")
    return result


def _optimizers(content: Any) -> Iterator[dict[str, Any]]:
    """The optimizers of a state: several where experts have their own."""
    if content is None:
        raise UnmappedError("the checkpoint has none")
    for optimizer in content if isinstance(content, list) else [content]:
        if not isinstance(optimizer, dict):
            raise UnmappedError("it is of an unknown kind")
        inner = optimizer.get("optimizer", optimizer)
        if not isinstance(inner, dict) or not inner.get("state") or "param_groups" not in inner:
            raise UnmappedError("it is of a distributed optimizer, whose buffers span all weights")
        fields = {"state": inner["state"], "param_groups": inner["param_groups"]}
        masters = optimizer.get("fp32_from_fp16_params")
        yield fields | ({"masters": masters} if masters else {})


def _belongs(weight: tuple[int, str, TensorPlace], group: Mapping[str, Any], has_expert_groups: bool) -> bool:
    """Whether Megatron-LM puts a weight into a group. has_expert_groups: whether experts have groups of their own."""
    _, name, place = weight
    decays = not (name.endswith(".bias") or len(place.shape) == 1)
    if group.get("is_decoupled_lr"):
        raise UnmappedError("the embedding has its own learning rate")
    right_group = not has_expert_groups or bool(group.get("is_expert_parallel")) == (EXPERT in name)
    return right_group and decays == bool(group.get("wd_mult", 1.0))


def updates(content: Any, view: Callable[[TensorPlace], np.ndarray]) -> int | None:
    """Number of updates in the state of an optimizer, of its groups or its weights; None if it has none.

    view: reads a tensor of the state.
    """
    for optimizer in content if isinstance(content, list) else [content]:
        inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else {}
        states, groups = (inner.get("state"), inner.get("param_groups")) if isinstance(inner, dict) else (None, None)
        steps = [group.get("step") for group in groups or () if isinstance(group, dict)]
        if isinstance(states, dict):
            steps += [
                states.get("common_step"),
                *(state.get("step") for state in states.values() if isinstance(state, dict)),
            ]
        steps = [view(step) if isinstance(step, TensorPlace) else step for step in steps]
        counts = [int(step) for step in steps if isinstance(step, int | float) or getattr(step, "size", 0) == 1]
        if counts:
            return max(counts)
    return None
