"""Moments of Adam out of the files of ranks, whose optimizer state names its weights by number alone."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from megajax.checkpoint.megatron.pickles import TensorPlace
from megajax.checkpoint.megatron.ranks import RankFile

MOMENTS: Mapping[str, str] = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment"}
"""Their names -> ours."""
MASTER = "fp32_param"
"""Name of weights in float32 beside those that a run in 16 bits computes with."""
BUFFERS = ("expert_bias", "inv_freq", "local_tokens_per_expert", "global_tokens_per_expert", "ga_steps", "_extra_state")
"""Last parts of names of what no optimizer updates."""
EXPERT = ".mlp.experts."


class UnmappedError(Exception):
    """Why the state of an optimizer can't be told apart by weights."""


def rank_moments(file: RankFile) -> dict[str, list[dict[str, TensorPlace]]]:
    """Kind of moment -> chunk -> name within the file -> place, from the optimizer state of a file.

    Its weights are numbered group by group, and in a group in the order of the model: those that decay (wd_mult 1), and
    biases and vectors, which do not (wd_mult 0); where experts are on ranks of their own, each of these twice.
    Raises UnmappedError for a state of another kind, and where counts or shapes do not fit.
    """
    chunks = [
        {name: place for name, place in chunk.items() if isinstance(place, TensorPlace) and not name.endswith(BUFFERS)}
        for chunk in file.chunks()
    ]
    rest = [(number, name, place) for number, chunk in enumerate(chunks) for name, place in chunk.items()]
    result: dict[str, list[dict[str, TensorPlace]]] = {}
    optimizers = list(_optimizers(file.archive.content.get("optimizer")))
    apart = any(group.get("is_expert_parallel") for one in optimizers for group in one["param_groups"])
    for optimizer in optimizers:
        states, masters = optimizer["state"], optimizer.get("masters")
        for place, group in enumerate(optimizer["param_groups"]):
            members = [weight for weight in rest if _belongs(weight, group, apart)]
            rest = [weight for weight in rest if not _belongs(weight, group, apart)]
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
    for one in content if isinstance(content, list) else [content]:
        if not isinstance(one, dict):
            raise UnmappedError("it is of an unknown kind")
        inner = one.get("optimizer", one)
        if not isinstance(inner, dict) or not inner.get("state") or "param_groups" not in inner:
            raise UnmappedError("it is that of a distributed optimizer, in buffers over all weights")
        made = {"state": inner["state"], "param_groups": inner["param_groups"]}
        yield made | ({"masters": one["fp32_from_fp16_params"]} if one.get("fp32_from_fp16_params") else {})


def _belongs(weight: tuple[int, str, TensorPlace], group: Mapping[str, Any], apart: bool) -> bool:
    """Whether a weight is in a group, as Megatron-LM makes them. apart: experts have groups of their own."""
    _, name, place = weight
    decays = not (name.endswith(".bias") or len(place.shape) == 1)
    if group.get("is_decoupled_lr"):
        raise UnmappedError("the embedding has a learning rate of its own")
    own = not apart or bool(group.get("is_expert_parallel")) == (EXPERT in name)
    return own and decays == bool(group.get("wd_mult", 1.0))


def updates(content: Any, view: Callable[[TensorPlace], np.ndarray]) -> int | None:
    """Number of updates that an optimizer state says, of its groups or of its weights; None where it does not.

    view: reads a tensor of the state.
    """
    for one in content if isinstance(content, list) else [content]:
        inner = one.get("optimizer", one) if isinstance(one, dict) else {}
        states, groups = (inner.get("state"), inner.get("param_groups")) if isinstance(inner, dict) else (None, None)
        given = [group.get("step") for group in groups or () if isinstance(group, dict)]
        if isinstance(states, dict):
            given += [
                states.get("common_step"),
                *(each.get("step") for each in states.values() if isinstance(each, dict)),
            ]
        given = [view(step) if isinstance(step, TensorPlace) else step for step in given]
        counts = [int(step) for step in given if isinstance(step, int | float) or getattr(step, "size", 0) == 1]
        if counts:
            return max(counts)
    return None
