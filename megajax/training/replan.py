"""Another layout for a config on more or fewer devices than it was written for, with the same rows in each step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

from megajax.config.errors import ConfigError, Problem
from megajax.layers.facts import ComparesRows
from megajax.mesh.config import MESH_AXES
from megajax.training.candidates import MODEL_AXES, Candidate, candidates, fixed_micro_size, has_experts
from megajax.training.row_balance import written_blocks
from megajax.training.run_config import RunConfig

SETTING = "parallel.elastic"
REASONS = 2
"""Why an axis cannot have all devices: at most so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replan:
    """A config for the devices that are present."""

    cfg: RunConfig
    wanted: int | None
    """Devices of the layout that was asked for; None: as many as there are."""
    present: int
    used: int
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Setting, or fact of the layout, -> before (None: not known), after; empty where the config fits as it is."""
    notes: tuple[str, ...] = ()
    """What else differs from the layout that was asked for: numbers, and what a device holds."""

    def text(self) -> str:
        """8 devices wanted, 6 present: data 8 -> 6, micro_size 2 -> 1, microbatches 2 -> 4."""
        wanted = "" if self.wanted is None else f"{self.wanted} device{'s' * (self.wanted != 1)} wanted, "
        idle = f", {self.present - self.used} idle" if self.used < self.present else ""
        return f"{wanted}{self.present} present{idle}: {self.described()}"

    def described(self) -> str:
        """data 8 -> 6, micro_size 2 -> 1."""
        return ", ".join(
            f"{name.rpartition('.')[2]} {shown(after) if before is None else f'{shown(before)} -> {shown(after)}'}"
            for name, (before, after) in self.changes.items()
        )

    def event(self) -> dict[str, Any]:
        """Fields of the event in events.jsonl."""
        changes = {name: list(pair) for name, pair in self.changes.items()}
        sizes = {"wanted": self.wanted, "devices": self.present, "used": self.used}
        return {**sizes, "changes": changes, "notes": list(self.notes), "text": self.text()}


def shown(value: Any) -> str:
    """A value of a setting as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def replanned(cfg: RunConfig, per_process: Sequence[int]) -> Replan:
    """The config with a layout that fits these devices, one number for each process; see `candidates` for which.

    A layout that fits and uses all devices stays as it is. Raises ConfigError for a config that is wrong on any number
    of devices, and where no layout has the same rows per step, with a reason for each axis.
    """
    devices, asked = sum(per_process), cfg
    wanted = None if cfg.parallel.data is None else cfg.parallel.without_data() * cfg.parallel.data
    cfg = _with_elastic(cfg, value=False)
    if problems := cfg.problems():
        raise ConfigError(problems)
    if wanted in (None, devices) and not cfg.problems(devices):
        return Replan(cfg=asked, wanted=wanted, present=devices, used=devices)
    for candidate in candidates(cfg, per_process):
        if not candidate.problems():
            return Replan(
                cfg=_with_elastic(candidate.cfg, value=asked.parallel.elastic),
                wanted=wanted,
                present=devices,
                used=candidate.used,
                changes=_changes(cfg, candidate),
                notes=tuple(_notes(cfg, candidate)),
            )
    raise ConfigError(_refusal(cfg, per_process, wanted))


def _with_elastic(cfg: RunConfig, *, value: bool) -> RunConfig:
    """With it, a config passes all checks of the number of devices."""
    return cfg.but(parallel=replace(cfg.parallel, elastic=value))


def elastic_hint(error: ConfigError, cfg: RunConfig, per_process: Sequence[int]) -> ConfigError:
    """The error; one about the number of devices says what parallel.elastic would do, where it helps."""
    if (
        cfg.parallel.elastic
        or cfg.parallel.problems()
        or cfg.problems()
        or not (about := [problem for problem in error.problems if _of_layout(problem)])
    ):
        return error
    try:
        plan = replanned(cfg, per_process)
    except ConfigError:
        return error
    if not plan.changes:
        return error
    line = f"--{SETTING} trains on {plan.used} of {plan.present} with the same rows per step: {plan.described()}"
    first = replace(about[0], hint="\n".join(filter(None, [about[0].hint, line])))
    problems = [first if problem is about[0] else problem for problem in error.problems]
    return ConfigError(problems, error.place)


def _of_layout(problem: Problem) -> bool:
    return problem.setting.partition(".")[0] == "parallel" or problem.setting in ("batch.global_size", "model.hidden")


def _changes(cfg: RunConfig, candidate: Candidate) -> dict[str, tuple[Any, Any]]:
    """What differs, and the number of microbatches that follows."""
    old, new = cfg.parallel, candidate.cfg.parallel
    data = candidate.used // new.without_data()
    pairs = {f"parallel.{each.name}": (getattr(old, each.name), getattr(new, each.name)) for each in fields(new)}
    # Without a size in the config, `data` was what the other axes left of a number of devices that is not known.
    pairs["parallel.data"] = (old.data, data)
    pairs["batch.micro_size"] = (cfg.batch.micro_size, candidate.cfg.batch.micro_size)
    before = None
    if old.data is not None:
        before = max(1, cfg.batch.global_size // (cfg.batch.micro_size * old.data * old.expert))
    pairs["microbatches"] = (before, candidate.microbatches)
    axes = {name: pair for name, pair in pairs.items() if name.rpartition(".")[2] in MESH_AXES}
    return {name: (before, after) for name, (before, after) in (axes | pairs).items() if before != after}


def _notes(cfg: RunConfig, candidate: Candidate) -> list[str]:
    """What the new layout changes beside the order of sums."""
    old, new = cfg.parallel, candidate.cfg.parallel
    notes = []
    for what, axes in (("the layers' weights", ("pipeline", "tensor")), ("the experts", ("expert", "tensor"))):
        if what == "the experts" and not has_experts(cfg):
            continue
        before, after = (_product(parallel, axes) for parallel in (old, new))
        if after < before:
            notes.append(f"each device holds 1/{after} of {what}, before 1/{before}")
    if new.data_sharding != old.data_sharding:
        notes.append(f"data_sharding={new.data_sharding} needs more memory than {old.data_sharding}")
    rows = None if old.data is None else cfg.batch.micro_size * old.data * old.expert
    now = candidate.cfg.batch.micro_size * (candidate.used // new.without_data()) * new.expert
    for setting, kind in _comparing(cfg):
        if kind == "order" or rows != now:
            before = "" if rows is None else f", before {rows}"
            notes.append(f"{setting} depends on the rows of a microbatch, which has {now}{before}: other losses")
    if cfg.precision.fp8 is not None:
        notes.append("8-bit scales are of other parts of a batch: losses differ by rounding to 8 bits")
    return notes


def _product(parallel: Any, axes: tuple[str, ...]) -> int:
    first, second = (getattr(parallel, axis) for axis in axes)
    return first * second


def _comparing(cfg: RunConfig) -> list[tuple[str, str]]:
    """Settings of layers whose losses depend on what is in a microbatch: by which rows, or by their order too."""
    return [
        (f"{where}.{name}.{setting}", kind)
        for where, block in written_blocks(cfg.model)
        for name, part in block.parts().items()
        for setting, kind in (part.compares_rows() if isinstance(part, ComparesRows) else {}).items()
    ]


def _refusal(cfg: RunConfig, per_process: Sequence[int], wanted: int | None) -> list[Problem]:
    """Why no axis takes the devices: the size that would use all of them, alone and in place of `data`."""
    devices, least, rows = sum(per_process), len(per_process), cfg.batch.global_size
    several = f" in {least} processes" if least > 1 else ""
    asked = "" if wanted is None else f", and the layout of the config takes {wanted}"
    what = f"there are {devices} devices{several}{asked}; no layout has steps of {rows} rows on them"
    hint = "give another number of devices, or another batch.global_size for a new run"
    if least > 1:
        what += f", with at least one device of each process: {least} to {devices} devices"
        hint = f"start fewer processes, {hint.removeprefix('give ')}"
    problems = [Problem(SETTING, what, hint)]
    if fixed := fixed_micro_size(cfg):
        what = f"stays {cfg.batch.micro_size}, because losses depend on it ({fixed})"
        problems.append(Problem("batch.micro_size", what))
    for axis in ("data", *MODEL_AXES[::-1]):
        if axis == "expert" and not has_experts(cfg):
            continue
        problems += _refused_axis(cfg, axis, devices)
    return problems


def _refused_axis(cfg: RunConfig, axis: str, devices: int) -> list[Problem]:
    """Why the axis cannot have all devices."""
    alone: dict[str, Any] = dict.fromkeys(MESH_AXES, 1) | {axis: devices}
    parallel = replace(
        cfg.parallel,
        **alone,
        virtual_stages=1,
        schedule="1f1b",
        layers=None,
        context_rounds=1,
        context_heads=1,
        sequence=cfg.parallel.sequence and axis == "tensor",
    )
    micro_size = cfg.batch.micro_size if fixed_micro_size(cfg) else 1
    batch = replace(cfg.batch, micro_size=micro_size)
    problems = Candidate(cfg.but(parallel=parallel, batch=batch), devices, 1).problems()
    return [
        Problem(f"parallel.{axis}={devices}", f"{each.setting}: {each.message}") for each in islice(problems, REASONS)
    ]
