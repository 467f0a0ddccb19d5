"""The XLA options of a run's programs, checked against the installed compiler by compiling an empty program.

The compiler refuses an unknown option or a value of the wrong kind within milliseconds, and its message names the
expected kind. So this module needs no list of options, and a default option that a new jax drops is only a warning.
"""

import mmap
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import Mesh

from megajax.config.dump import flatten
from megajax.config.errors import ConfigError, Problem
from megajax.config.hints import did_you_mean, nearest_names
from megajax.config.parse_scalar import Mismatch, scalar
from megajax.layers.expert_facts import ExpertSharding
from megajax.machine import known_faults
from megajax.machine.run_fault import Conditions, processors
from megajax.precision.fp8 import capability_of
from megajax.processes import xla_options
from megajax.processes.known_fault import version_of
from megajax.processes.xla_options import Defaults, Option, Value, XlaConfig, compiler_options, flag_values
from megajax.training.run_config import RunConfig

UNKNOWN = re.compile(r"No such compile option: '(?P<name>[^']*)'")
WRONG = re.compile(r"While setting option (?P<name>\w+), '.*' is not a valid (?P<kind>\w+) value", re.DOTALL)
KINDS = {"bool": bool, "int32": int, "int64": int, "uint32": int, "uint64": int, "float": float, "double": float}
"""The compiler's name for the kind of an option -> the Python type of its values."""
OF_JAX = ("optimization_level", "memory_fitting_level")
"""Options that jax itself checks before it passes them on."""


class Refusal(NamedTuple):
    """An option that the compiler refuses."""

    name: str
    kind: str | None
    """The expected kind of value; None for an unknown option."""


def default_options(cfg: RunConfig, platform: str) -> list[Option]:
    """The default options of this config on a platform; empty for a platform without defaults."""
    defaults = xla_options.DEFAULTS.get(platform, Defaults())
    options = list(defaults.always)
    if cfg.parallel.data_sharding == "fsdp" and cfg.parallel.pipeline == 1:
        options += defaults.fsdp
    if cfg.batch.side_by_side > 1:
        options += defaults.side_by_side if cfg.parallel.pipeline == 1 else defaults.in_ticks
    options += defaults.fp8 if cfg.precision.matmul is not None else ()
    options += defaults.deterministic if cfg.xla.deterministic else ()
    if (watchdog := cfg.resilience.watchdog) is not None:
        # Other processes may compile while this one is in its first step.
        options += defaults.termination(max(watchdog.compile, watchdog.step) + xla_options.TERMINATION_MARGIN)
    return options


def run_options(cfg: RunConfig, mesh: Mesh) -> dict[str, Value]:
    """The compiler options of every program of a run. Each process checks them for one of its own devices.

    Raises ConfigError for options given by the user that the compiler refuses, and for a known fault that the run would
    meet and that no option avoids.
    """
    devices = list(mesh.devices.flat)
    device = next((candidate for candidate in devices if candidate.process_index == jax.process_index()), devices[0])
    conditions = run_conditions(cfg, devices)
    if problems := known_faults.refusals(conditions):
        raise ConfigError(problems, "known faults")
    options = [*default_options(cfg, device.platform), *known_faults.options(conditions)]
    return accepted_options(compiler_options(*options), cfg.xla.options, device)


def run_conditions(cfg: RunConfig, devices: Sequence[jax.Device]) -> Conditions:
    """What decides which known faults a run on these devices can meet."""
    ways = {value for name, value in flatten(cfg.model).items() if name.endswith("dispatch.way")}
    return conditions_of(cfg.xla, devices, ragged=ExpertSharding.of(cfg.parallel).devices * ("ragged" in ways))


def conditions_of(xla: XlaConfig, devices: Sequence[jax.Device], ragged: int = 0) -> Conditions:
    """What decides which known faults programs on these devices can meet; nothing on CPUs. ragged: as in Conditions.

    Virtual GPUs have no driver and no machine: only the settings count.
    """
    platform = devices[0].platform
    if platform not in ("gpu", "cuda"):
        return Conditions()
    if platform == "cuda":
        return Conditions(versions={"jaxlib": version_of(jaxlib.__version__)}, devices=len(devices), ragged=ragged)
    local = [device for device in devices if device.process_index == jax.process_index()]
    return Conditions(
        versions=known_faults.versions(),
        gpus=len(local),
        devices=len(devices),
        processes=jax.process_count(),
        capability=capability_of(devices[0]) or None,
        names=tuple({device.device_kind for device in local}),
        cpus=processors(),
        environment=os.environ,
        flags=flag_values(os.environ) | {name: str(value) for name, value in xla.options.items()},
        ragged=ragged,
    )


def inference_options(xla: XlaConfig, device: jax.Device) -> dict[str, Value]:
    """The compiler options of the steps of text generation.

    Raises ConfigError for options given by the user that the compiler refuses.
    """
    defaults = xla_options.DEFAULTS.get(device.platform, Defaults())
    options = (*defaults.always, *defaults.inference, *(defaults.deterministic if xla.deterministic else ()))
    options += tuple(known_faults.options(conditions_of(xla, jax.devices())))
    return accepted_options(compiler_options(*options), xla.options, device)


def accepted_options(defaults: Mapping[str, Value], chosen: Mapping[str, Any], device: jax.Device) -> dict[str, Value]:
    """The compiler options for `device`: the accepted defaults, overridden by those that the user has chosen.

    Refused defaults are omitted with a warning. Raises ConfigError for refused options of the user.
    """
    accepted: dict[str, Value] = dict(defaults)
    while accepted and (refused := refusal(accepted, device)) is not None:
        objection = "does not know" if refused.kind is None else f"takes no {accepted[refused.name]!r} for"
        text = f"the XLA of jax {jax.__version__} {objection} the option {refused.name}: compiling without it"
        warnings.warn(text, stacklevel=2)
        del accepted[refused.name]
    typed, problems = {}, []
    for name, value in chosen.items():
        try:
            typed[name] = _typed(name, "" if value is None else value, device)
        except _Refused as error:
            problems.append(Problem(f"--xla={name}", str(error), error.hint))
    if problems:
        raise ConfigError(problems, "options of XLA")
    return accepted | typed


def refusal(options: Mapping[str, Value], device: jax.Device) -> Refusal | None:
    """The first of these options that the compiler refuses; None if it accepts all. Other errors propagate.

    Works inside a surrounding `jax.set_mesh`.
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
        # Raised by jax for a wrong value of one of its own options.
        if options_of_jax := [name for name in OF_JAX if name in options]:
            return Refusal(options_of_jax[0], "effort level (O0 to O3)")
        raise
    return None


def _nothing(x: jax.Array) -> jax.Array:
    # The identity has no kernel: it compiles four times faster than an addition on a CPU, and needs no autotuning.
    return x


class _Refused(Exception):
    def __init__(self, message: str, hint: str):
        super().__init__(message)
        self.hint = hint


def _typed(name: str, value: Value, device: jax.Device) -> Value:
    """The value in the type that the compiler expects. Raises _Refused."""
    refused = refusal({name: value}, device)
    if refused is None:
        return value
    if refused.kind is None:
        raise _Refused(f"the XLA of jax {jax.__version__} has no such option", nearest(name, device))
    kind = KINDS.get(refused.kind)
    try:
        typed = value if kind is None else _parse(value, kind)
    except Mismatch:
        typed = None
    if typed is None or refusal({name: typed}, device) is not None:
        hint = "its values are words in capitals, listed in xla.proto of OpenXLA" if refused.kind == "enum" else ""
        raise _Refused(f"expected a value of kind {refused.kind}, got {str(value)!r}", hint)
    return typed


def _parse(value: Value, kind: type) -> Any:
    # YAML and the command line may give 1 for true, and true for 1.
    if isinstance(value, bool) and kind is not bool:
        return kind(value)
    return scalar(str(value) if kind is bool else value, kind)


def nearest(name: str, device: jax.Device) -> str:
    """A hint with existing options of similar spelling."""
    name = name if name.startswith("xla_") else f"xla_gpu_{name}"
    family = "_".join(name.split("_")[:2])
    among = [candidate for candidate in candidates() if candidate.startswith(family)]
    return did_you_mean(name, [option for option in nearest_names(name, among, at_most=6) if _exists(option, device)])


def _exists(name: str, device: jax.Device) -> bool:
    # Every existing option refuses "?" before anything is compiled, except one whose values are text.
    answer = refusal({name: "?"}, device)
    return answer is None or answer.kind is not None


def candidates() -> set[str]:
    """Words in the compiler's library that may be names of options, for hints; reads the whole library."""
    # `re` finds a pattern that begins with letters much faster than one that begins with \b: 0.3 s instead of 5.
    option = re.compile(rb"xla_(?<!\wxla_)[a-z0-9_]{3,80}\b")
    names = set()
    for library in Path(jaxlib.__file__).parent.glob("libjax_common.*"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            names |= {match.group().decode() for match in option.finditer(text)}
    return names
