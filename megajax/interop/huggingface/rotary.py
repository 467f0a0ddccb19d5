"""Settings of rotary positions in config.json, which have older and newer spellings."""

from collections.abc import Mapping
from math import log
from typing import Any

from megajax.interop.huggingface.family import Settings, layers_of
from megajax.layers.position.config import Llama3ScalingConfig, LongRopeScalingConfig, RopeConfig, YarnScalingConfig
from megajax.models.decoder.config import DecoderConfig

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""Kinds of layers in `layer_types` and `rope_parameters`."""
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
    return _rotation(inner, RopeConfig(base=base, fraction=fraction), length, partial)


def layered_rope(settings: Settings, length: int, *, base: float, local_base: float) -> tuple[RopeConfig, RopeConfig]:
    """Rotary positions of full layers, and of layers with sliding windows.

    From rope_parameters, which has a mapping for each, or from rope_theta, rope_scaling of full layers only, and
    rope_local_base_freq. length: max_position_embeddings; base and local_base: defaults.
    """
    parameters, scaling = settings.take("rope_parameters", {}), settings.take("rope_scaling", {})
    outer = settings.part("rope_parameters", parameters)
    full, local = outer.part(FULL), outer.part(SLIDING)
    outer.close()
    if parameters and not parameters.keys() & {FULL, SLIDING}:
        settings.refuse("rope_parameters", "{...}", f"transformers reads only the settings of its {FULL} and {SLIDING}")
    # transformers adds rope_scaling to the parameters.
    full = settings.part("rope_scaling", {**full.remaining, **scaling}) if scaling else full
    plain = RopeConfig(base=settings.take("rope_theta", base, float))
    local_plain = RopeConfig(base=settings.take("rope_local_base_freq", local_base, float))
    return _rotation(full, plain, length, False), _rotation(local, local_plain, length, False)


def _rotation(inner: Settings, plain: RopeConfig, length: int, partial: bool) -> RopeConfig:
    """The rotary positions of a nested mapping. plain: its defaults; length, partial: see `rope`."""
    old_type = inner.take("type", kind=str)
    kind = inner.take("rope_type", old_type or "default")
    base, fraction = inner.take("rope_theta", plain.base), inner.take("partial_rotary_factor", plain.fraction)
    plain = RopeConfig(base=base, fraction=fraction)
    if plain.fraction != 1 and not partial:
        inner.refuse("partial_rotary_factor", plain.fraction, "this family rotates whole heads")
    # dynamic: frequencies change only for texts longer than max_position_embeddings, which rows never are.
    kinds = {"default": _plain, "dynamic": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
    kinds |= {"longrope": _longrope, "su": _longrope}
    if kind not in kinds:
        inner.refuse("rope_type", kind, f"only {', '.join(kinds)} are supported")
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


def _longrope(settings: Settings, rope: RopeConfig, length: int) -> RopeConfig:
    original = settings.count("original_max_position_embeddings", length)
    lists = {name: settings.need(name, list) for name in ("short_factor", "long_factor")}
    for name, values in lists.items():
        if not all(isinstance(value, int | float) for value in values):
            settings.refuse(name, "[...]", "must be a list of numbers")
            lists[name] = []
    scaling = LongRopeScalingConfig(
        short=tuple(lists["short_factor"]),
        long=tuple(lists["long_factor"]),
        original=original,
        factor=settings.take("factor", length / original, float),
        attention=settings.take("attention_factor", kind=float),
    )
    return _with(rope, scaling=scaling)


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
    if isinstance(scaling, LongRopeScalingConfig):
        return {**settings, "rope_scaling": _longrope_settings(scaling)}
    kind, names = ("llama3", LLAMA3) if isinstance(scaling, Llama3ScalingConfig) else ("yarn", YARN)
    values = {name: getattr(scaling, field) for name, field in names.items()}
    if isinstance(scaling, YarnScalingConfig) and scaling.mscale_all == 0:
        values |= {"attention_factor": scaling.magnitude(), "mscale": None, "mscale_all_dim": None}
    values = {name: value for name, value in values.items() if value is not None}
    return {**settings, "rope_scaling": {"rope_type": kind, **values}}


def _longrope_settings(scaling: LongRopeScalingConfig) -> dict[str, Any]:
    settings = {
        "rope_type": "longrope",
        "short_factor": list(scaling.short),
        "long_factor": list(scaling.long),
        "original_max_position_embeddings": scaling.original,
        "factor": scaling.factor,
    }
    return settings if scaling.attention is None else {**settings, "attention_factor": scaling.attention}


def ropes_of[R: RopeConfig | None](cfg: DecoderConfig, *, full: R, local: R) -> tuple[R, R]:
    """Rotary positions of full layers, and of layers with sliding windows. full, local: if there are no such layers."""
    mixers = [block.mixer for block in layers_of(cfg)]
    return (
        next((mixer.rope for mixer in mixers if mixer.window is None), full),
        next((mixer.rope for mixer in mixers if mixer.window is not None), local),
    )


def layered_rope_settings(full: RopeConfig, local: RopeConfig, implied: RopeConfig) -> dict[str, Any]:
    """Those of `layered_rope`, without rope_local_base_freq: flat if `local` is what flat settings imply."""
    if local == implied:
        return rope_settings(full)
    return {"rope_parameters": {FULL: _parameters(rope_settings(full)), SLIDING: _parameters(rope_settings(local))}}


def _parameters(flat: Mapping[str, Any]) -> dict[str, Any]:
    """rope_parameters of the settings of `rope_settings`."""
    others = {name: value for name, value in flat.items() if name != "rope_scaling"}
    return {**(flat.get("rope_scaling") or {"rope_type": "default"}), **others}


ROPE = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq"})
"""The settings of `rope_settings`, and of `layered_rope`."""


def with_rope(config: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the rotary positions of `described`, in rope_parameters if it has one for all layers."""
    settings = {name: described[name] for name in ROPE if name in described}
    others = {name: value for name, value in config.items() if name not in ROPE}
    parameters = others.pop("rope_parameters", None)
    if parameters is None or parameters.keys() & {FULL, SLIDING}:
        return others | settings
    return others | {"rope_parameters": _parameters(settings)}
