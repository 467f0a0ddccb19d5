"""Rotary positions and windows of a config.json, in older and newer spellings."""

from collections.abc import Callable, Mapping, Sequence
from math import log
from typing import Any

from megajax.interop.huggingface.family import Settings
from megajax.layers.configs import Llama3ScalingConfig, RopeConfig, YarnScalingConfig

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


def rope(settings: Settings, length: int, *, base: float = 10000.0, partial: bool = False) -> RopeConfig:
    """From rope_parameters, or from rope_theta and rope_scaling of older files, which take precedence.

    length: max_position_embeddings; base: default of rope_theta; partial: whether the family can rotate a part of each
    head.
    """
    base, fraction = settings.take("rope_theta", base, float), settings.take("partial_rotary_factor", 1.0)
    parameters, scaling = settings.take("rope_parameters", {}), settings.take("rope_scaling", {})
    inner = settings.part("rope_scaling" if scaling else "rope_parameters", scaling or parameters)
    old_type = inner.take("type", kind=str)
    kind = inner.take("rope_type", old_type or "default")
    plain = RopeConfig(base=inner.take("rope_theta", base), fraction=inner.take("partial_rotary_factor", fraction))
    if plain.fraction != 1 and not partial:
        settings.refuse("partial_rotary_factor", plain.fraction, "this family rotates whole heads")
    # dynamic: frequencies change only for texts longer than max_position_embeddings, which rows never are.
    kinds = {"default": _plain, "dynamic": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
    if kind not in kinds:
        settings.refuse("rope_type", kind, f"only {', '.join(kinds)} are supported")
        return plain
    config = kinds[kind](inner, plain, length)
    inner.close()
    return config


def _plain(settings: Settings, rope: RopeConfig, length: int) -> RopeConfig:
    del length
    settings.take("factor", kind=float)
    return rope


def _linear(settings: Settings, rope: RopeConfig, length: int) -> RopeConfig:
    del length
    return _with(rope, interpolation=settings.need("factor", float))


def _llama3(settings: Settings, rope: RopeConfig, length: int) -> RopeConfig:
    original = settings.count("original_max_position_embeddings", length)
    factors = {field: settings.need(name, float) for name, field in LLAMA3.items() if field != "original"}
    return _with(rope, scaling=Llama3ScalingConfig(**factors, original=original))


def _yarn(settings: Settings, rope: RopeConfig, length: int) -> RopeConfig:
    """An attention_factor is converted to mscale, from which the model computes it."""
    kinds = {"original": int, "rounded": bool}
    present = {name: field for name, field in YARN.items() if name in settings.remaining}
    fields = {field: settings.take(name, kind=kinds.get(field, float)) for name, field in present.items()}
    values: dict[str, Any] = {"original": length}
    values |= {name: value for name, value in fields.items() if value or (name == "rounded" and value is not None)}
    values.setdefault("factor", length / values["original"])
    mscale, total, scale = (
        values.pop("mscale", None),
        values.pop("mscale_all", None),
        settings.take("attention_factor", kind=float),
    )
    plain = YarnScalingConfig(**values)
    if scale is None and not total:
        return _with(rope, scaling=plain)
    if scale is None and mscale:
        return _with(rope, scaling=YarnScalingConfig(**values, mscale=mscale, mscale_all=total))
    magnitude = (scale or plain.mscale_factor(1.0)) * plain.mscale_factor(total or 0.0)
    mscale = round((magnitude - 1) / (0.1 * log(plain.factor)), 12) if plain.factor > 1 else 0.0
    return _with(rope, scaling=YarnScalingConfig(**values, mscale=mscale, mscale_all=total or 0.0))


def _with(rope: RopeConfig, **changes: Any) -> RopeConfig:
    return RopeConfig(base=rope.base, fraction=rope.fraction, **changes)


def rope_settings(rope: RopeConfig | None) -> dict[str, Any]:
    """rope_theta and rope_scaling, which all versions of transformers read."""
    if rope is None:
        return {}
    settings: dict[str, Any] = {"rope_theta": rope.base, "rope_scaling": None}
    if rope.fraction != 1:
        settings["partial_rotary_factor"] = rope.fraction
    scaling = rope.scaling
    if scaling is None:
        linear = {"rope_type": "linear", "factor": rope.interpolation}
        return settings if rope.interpolation == 1 else {**settings, "rope_scaling": linear}
    kind, names = ("llama3", LLAMA3) if isinstance(scaling, Llama3ScalingConfig) else ("yarn", YARN)
    values = {name: getattr(scaling, field) for name, field in names.items()}
    if isinstance(scaling, YarnScalingConfig) and scaling.mscale_all == 0:
        values |= {"attention_factor": scaling.magnitude(), "mscale": None, "mscale_all_dim": None}
    values = {name: value for name, value in values.items() if value is not None}
    return {**settings, "rope_scaling": {"rope_type": kind, **values}}


ROPE = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor"})
"""The settings of `rope_settings`."""


def with_rope(config: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the rotary positions of `described`, in rope_parameters if it has that."""
    settings = {name: described[name] for name in ROPE if name in described}
    others = {name: value for name, value in config.items() if name not in ROPE}
    if "rope_parameters" not in config:
        return others | settings
    scaling = settings.pop("rope_scaling", None) or {"rope_type": "default"}
    return others | {"rope_parameters": {**scaling, **settings}}


def windows(settings: Settings, layers: int, length: int, slides: Callable[[int], bool]) -> list[int | None]:
    """The window of each layer, without the query's own position, which transformers counts.

    slides: number of a layer -> whether it has the window, used if there is no layer_types.
    """
    size, on = settings.take("sliding_window", kind=int), settings.take("use_sliding_window", True)
    kinds = settings.take("layer_types", kind=list)
    window = size - 1 if size and on and size <= length else None
    kinds = kinds or ["sliding_attention" if slides(number) else "full_attention" for number in range(layers)]
    if len(kinds) != layers:
        settings.refuse("layer_types", f"({len(kinds)} layers)", f"num_hidden_layers={layers}")
    for kind in sorted({*map(str, kinds)} - {"sliding_attention", "full_attention"}):
        settings.refuse("layer_types", kind, "only full_attention and sliding_attention are supported")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def window_settings(mixers: Sequence[Any]) -> Mapping[str, Any]:
    """sliding_window, and the layers that have it."""
    windowed = [number for number, mixer in enumerate(mixers) if mixer.window is not None]
    return {
        "sliding_window": max(mixers[number].window for number in windowed) + 1 if windowed else None,
        "use_sliding_window": bool(windowed),
        "max_window_layers": windowed[0] if windowed else len(mixers),
        "layer_types": ["full_attention" if mixer.window is None else "sliding_attention" for mixer in mixers],
    }
