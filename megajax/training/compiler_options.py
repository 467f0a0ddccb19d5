"""Options of XLA that the installed compiler takes: asked of the compiler itself, by compiling next to nothing.

An option it does not know, or a value of the wrong kind, it refuses within milliseconds and names what it wants. So no
list of options is kept here, and a new jax that drops one costs a warning and not the run.
"""

import mmap
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import Mesh

from megajax.config.coerce import Mismatch, scalar
from megajax.config.errors import ConfigError, Problem
from megajax.config.nearest import did_you_mean, nearest_names
from megajax.mesh.xla import DEFAULTS, TERMINATION_MARGIN, Defaults, Option, Value, XlaConfig, compiler_options
from megajax.training.run_config import RunConfig

UNKNOWN = re.compile(r"No such compile option: '(?P<name>[^']*)'")
WRONG = re.compile(r"While setting option (?P<name>\w+), '.*' is not a valid (?P<kind>\w+) value", re.DOTALL)
KINDS = {"bool": bool, "int32": int, "int64": int, "uint32": int, "uint64": int, "float": float, "double": float}
"""What the compiler calls the kind of an option -> how a value of it is read."""
OF_JAX = ("optimization_level", "memory_fitting_level")
"""Options that jax takes under their own names and hands on."""


class Refusal(NamedTuple):
    """What the compiler has against an option."""

    name: str
    kind: str | None
    """Of value that it wants; None where it does not know the option."""


def default_options(cfg: RunConfig, platform: str) -> list[Option]:
    """The default options of this config on a platform; none where the platform has no table."""
    defaults = DEFAULTS.get(platform, Defaults())
    options = list(defaults.always)
    if cfg.parallel.data_sharding == "fsdp" and cfg.parallel.pipeline == 1:
        options += defaults.fsdp
    options += defaults.fp8 if cfg.precision.fp8 is not None else ()
    options += defaults.deterministic if cfg.xla.deterministic else ()
    if (watchdog := cfg.resilience.watchdog) is not None:
        # Other processes may compile while this one is in its first step.
        options += defaults.termination(max(watchdog.compile, watchdog.step) + TERMINATION_MARGIN)
    return options


def run_options(cfg: RunConfig, mesh: Mesh) -> dict[str, Value]:
    """The options that every program of a run is compiled with, by each process asked of the compiler for one of its
    own devices.

    Raises ConfigError for options given by the user that the compiler refuses.
    """
    devices = list(mesh.devices.flat)
    device = next((here for here in devices if here.process_index == jax.process_index()), devices[0])
    return accepted_options(compiler_options(*default_options(cfg, device.platform)), cfg.xla.options, device)


def inference_options(xla: XlaConfig, device: jax.Device) -> dict[str, Value]:
    """The options that the steps of text generation are compiled with.

    Raises ConfigError for options given by the user that the compiler refuses.
    """
    defaults = DEFAULTS.get(device.platform, Defaults())
    options = (*defaults.always, *defaults.inference, *(defaults.deterministic if xla.deterministic else ()))
    return accepted_options(compiler_options(*options), xla.options, device)


def accepted_options(defaults: Mapping[str, Value], given: Mapping[str, Any], device: jax.Device) -> dict[str, Value]:
    """The options to compile with for `device`: the defaults it takes, and those given by a user over them.

    Defaults it refuses are left out with a warning. Raises ConfigError for what it refuses of the given ones.
    """
    known: dict[str, Value] = dict(defaults)
    while known and (refused := refusal(known, device)) is not None:
        what = "does not know" if refused.kind is None else f"takes no {known[refused.name]!r} for"
        warnings.warn(
            f"the XLA of jax {jax.__version__} {what} the option {refused.name}: compiling without it", stacklevel=2
        )
        del known[refused.name]
    typed, problems = {}, []
    for name, value in given.items():
        try:
            typed[name] = _typed(name, "" if value is None else value, device)
        except _Refused as error:
            problems.append(Problem(f"--xla={name}", str(error), error.hint))
    if problems:
        raise ConfigError(problems, "options of XLA")
    return known | typed


def refusal(options: Mapping[str, Value], device: jax.Device) -> Refusal | None:
    """What the compiler refuses first of these options, None where it takes them all; errors of another kind rise.

    A surrounding `jax.set_mesh` makes no difference.
    """
    sharding = jax.sharding.SingleDeviceSharding(device)
    # The devices of an argument must be those of the mesh that surrounds the lowering.
    with jax.set_mesh(Mesh(np.array([device]), ("device",))):
        lowered = jax.jit(_nothing).lower(jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding))
    try:
        lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        if match := UNKNOWN.search(str(error)):
            return Refusal(match["name"], None)
        if match := WRONG.search(str(error)):
            return Refusal(match["name"], match["kind"])
        raise
    except ValueError:
        # Those of jax's own are enumerations of its own.
        if wrong := [name for name in OF_JAX if name in options]:
            return Refusal(wrong[0], "effort level (O0 to O3)")
        raise
    return None


def _nothing(x: jax.Array) -> jax.Array:
    # No kernel: four times faster to compile than one addition on a CPU, and nothing to autotune on a GPU.
    return x


class _Refused(Exception):
    def __init__(self, what: str, hint: str):
        super().__init__(what)
        self.hint = hint


def _typed(name: str, value: Value, device: jax.Device) -> Value:
    """The value as the compiler wants it. Raises _Refused."""
    refused = refusal({name: value}, device)
    if refused is None:
        return value
    if refused.kind is None:
        raise _Refused(f"the XLA of jax {jax.__version__} has no such option", nearest(name, device))
    kind = KINDS.get(refused.kind)
    try:
        typed = value if kind is None else _read(value, kind)
    except Mismatch:
        typed = None
    if typed is None or refusal({name: typed}, device) is not None:
        hint = "its values are words in capitals, listed in xla.proto of OpenXLA" if refused.kind == "enum" else ""
        raise _Refused(f"expected a value of kind {refused.kind}, got {str(value)!r}", hint)
    return typed


def _read(value: Value, kind: type) -> Any:
    # What was written 1 may be meant as true, and the other way round.
    if isinstance(value, bool) and kind is not bool:
        return kind(value)
    return scalar(str(value) if kind is bool else value, kind)


def nearest(name: str, device: jax.Device) -> str:
    """A hint with the options that are spelt most like it and that the compiler takes."""
    name = name if name.startswith("xla_") else f"xla_gpu_{name}"
    family = "_".join(name.split("_")[:2])
    among = [candidate for candidate in candidates() if candidate.startswith(family)]
    return did_you_mean(name, [near for near in nearest_names(name, among, at_most=6) if _known(near, device)])


def _known(name: str, device: jax.Device) -> bool:
    # No option has this value: it is refused before anything is compiled, unless it is text.
    answer = refusal({name: "?"}, device)
    return answer is None or answer.kind is not None


def candidates() -> set[str]:
    """Words in the compiler's library that may be names of options; for hints, so reading all of it is no matter."""
    # Begins with letters, which `re` looks for much faster than for the border of a word: 0.3 s instead of 5.
    option = re.compile(rb"xla_(?<!\wxla_)[a-z0-9_]{3,80}\b")
    names = set()
    for library in Path(jaxlib.__file__).parent.glob("libjax_common.*"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            names |= {match.group().decode() for match in option.finditer(text)}
    return names
