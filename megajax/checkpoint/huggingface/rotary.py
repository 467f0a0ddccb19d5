"""Rotary positions and windows of a config.json, in the older and the newer spelling."""

from collections.abc import Mapping, Sequence
from typing import Any

from megajax.checkpoint.huggingface.family import Settings
from megajax.layers.config import Llama3ScalingConfig, RopeConfig, YarnScalingConfig

LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "original_max_position_embeddings": "original",
}
YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original",
    "beta_fast": "fast",
    "beta_slow": "slow",
    "truncate": "rounded",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all",
}


def rope(given: Settings) -> RopeConfig:
    """From rope_parameters, or from rope_theta and rope_scaling as older files have it."""
    old = {"rope_theta": given.take("rope_theta", 10000.0), **given.take("rope_scaling", {})}
    parameters = Settings({**old, **given.take("rope_parameters", {})}, f"{given.where}: rope_parameters")
    parameters.problems = given.problems
    older = parameters.take("type")
    kind = parameters.take("rope_type") or older or "default"
    base = parameters.take("rope_theta")
    scalings = {"llama3": (Llama3ScalingConfig, LLAMA3), "yarn": (YarnScalingConfig, YARN)}
    if kind == "default":
        return RopeConfig(base=base)
    if kind not in scalings:
        given.refuse("rope_type", kind, f"only default, {', '.join(scalings)} can be had")
        return RopeConfig(base=base)
    make, names = scalings[kind]
    values = {ours: parameters.take(theirs) for theirs, ours in names.items()}
    for name, value in parameters.left.items():
        if value not in (None, False):
            given.refuse(f"rope_parameters.{name}", value, "this setting is not supported")
    return RopeConfig(base=base, scaling=make(**{name: value for name, value in values.items() if value is not None}))


def rope_settings(rope: RopeConfig | None) -> dict[str, Any]:
    """rope_theta and rope_scaling, which old and new versions of transformers read."""
    if rope is None:
        return {}
    if rope.scaling is None:
        return {"rope_theta": rope.base}
    kind, names = ("llama3", LLAMA3) if isinstance(rope.scaling, Llama3ScalingConfig) else ("yarn", YARN)
    values = {theirs: getattr(rope.scaling, ours) for theirs, ours in names.items()}
    values = {name: value for name, value in values.items() if value is not None}
    return {"rope_theta": rope.base, "rope_scaling": {"rope_type": kind, **values}}


def windows(given: Settings, layers: int, length: int) -> list[int | None]:
    """The window of each layer: the tokens before its own. Theirs counts the query itself."""
    size, kinds = given.take("sliding_window"), given.take("layer_types")
    on, first = given.take("use_sliding_window", True), given.take("max_window_layers", 0)
    window = size - 1 if size and on and size <= length else None
    if kinds is None:
        kinds = ["sliding_attention" if number >= first else "full_attention" for number in range(layers)]
    return [window if kind == "sliding_attention" else None for kind in kinds]


def window_settings(mixers: Sequence[Any]) -> Mapping[str, Any]:
    """sliding_window, and which layers have it where not all do."""
    sizes = {mixer.window for mixer in mixers if mixer.window is not None}
    if not sizes:
        return {"sliding_window": None}
    kinds = ["full_attention" if mixer.window is None else "sliding_attention" for mixer in mixers]
    return {"sliding_window": max(sizes) + 1, "layer_types": kinds, "use_sliding_window": True}
