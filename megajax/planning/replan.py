"""Finds another layout for a config on more or fewer devices, with the same rows in each step."""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import Any

from megajax.config.compose import problems_of
from megajax.config.errors import ConfigError, Problem
from megajax.mesh.config import SIZED_AXES, ParallelConfig
from megajax.planning.elastic import MODEL_AXES, Candidate, candidates, fixed_micro_size, has_experts
from megajax.training.check_row_balance import settings_comparing_rows
from megajax.training.replan import Replan
from megajax.training.run_config import RunConfig

SETTING = "parallel.elastic"
REASONS = 2
"""Limit of the reasons per axis in an error."""


def replanned(cfg: RunConfig, per_process: Sequence[int]) -> Replan:
    """The config with the best of the `candidates` that fit these devices.

    per_process: devices of each process. A layout that fits and uses all devices does not change. Raises ConfigError
    for a config that is wrong on any number of devices, and if no layout keeps the rows per step.
    """
    devices, original = sum(per_process), cfg
    requested = None if cfg.parallel.data is None else cfg.parallel.without_data() * cfg.parallel.data
    # True would skip the checks against the number of devices.
    cfg = cfg.but(parallel=replace(cfg.parallel, elastic=False))
    if problems := cfg.problems():
        raise ConfigError(problems)
    if requested in (None, devices) and not cfg.problems(devices):
        return Replan(cfg=original, requested=requested, present=devices, used=devices)
    for candidate in candidates(cfg, per_process):
        if not candidate.problems():
            parallel = replace(candidate.cfg.parallel, elastic=original.parallel.elastic)
            return Replan(
                cfg=candidate.cfg.but(parallel=parallel),
                requested=requested,
                present=devices,
                used=candidate.used,
                changes=_changes(cfg, candidate),
                notes=tuple(_notes(cfg, candidate)),
            )
    raise ConfigError(_refusal(cfg, per_process, requested))


def elastic_hint(error: ConfigError, cfg: RunConfig, per_process: Sequence[int]) -> ConfigError:
    """The error; an error about the number of devices gets a hint to parallel.elastic if it would help."""
    about = [problem for problem in error.problems if _of_layout(problem)]
    if cfg.parallel.elastic or not about or problems_of(cfg):
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
    """The settings that differ, and the number of microbatches."""
    before_parallel, new = cfg.parallel, candidate.cfg.parallel
    data = candidate.used // new.without_data()
    pairs = {
        f"parallel.{setting.name}": (getattr(before_parallel, setting.name), getattr(new, setting.name))
        for setting in fields(new)
    }
    # Without a size in the config, the size of `data` before is unknown.
    pairs["parallel.data"] = (before_parallel.data, data)
    pairs["batch.micro_size"] = (cfg.batch.micro_size, candidate.cfg.batch.micro_size)
    before = None
    if before_parallel.data is not None:
        before = max(1, cfg.batch.global_size // (cfg.batch.micro_size * before_parallel.data * before_parallel.expert))
    pairs["microbatches"] = (before, candidate.microbatches)
    axes = {name: pair for name, pair in pairs.items() if name.rpartition(".")[2] in SIZED_AXES}
    return {name: (before, after) for name, (before, after) in (axes | pairs).items() if before != after}


def _notes(cfg: RunConfig, candidate: Candidate) -> list[str]:
    """Effects of the new layout besides the order of sums."""
    before_parallel, new = cfg.parallel, candidate.cfg.parallel
    notes = []
    for part, axes in (("the layers' weights", ("pipeline", "tensor")), ("the experts", ("expert", "tensor"))):
        if part == "the experts" and not has_experts(cfg.model):
            continue
        before, after = (_product(parallel, axes) for parallel in (before_parallel, new))
        if after < before:
            notes.append(f"each device holds 1/{after} of {part}, before 1/{before}")
    if new.data_sharding != before_parallel.data_sharding:
        notes.append(f"data_sharding={new.data_sharding} needs more memory than {before_parallel.data_sharding}")
    rows = (
        None if before_parallel.data is None else cfg.batch.micro_size * before_parallel.data * before_parallel.expert
    )
    now = candidate.cfg.batch.micro_size * (candidate.used // new.without_data()) * new.expert
    for setting, kind in settings_comparing_rows(cfg.model):
        if kind == "order" or rows != now:
            before = "" if rows is None else f", before {rows}"
            notes.append(f"{setting} depends on the rows of a microbatch, which has {now}{before}: other losses")
    if cfg.precision.matmul is not None:
        notes.append("8-bit scales are computed from other parts of a batch: losses differ by rounding to 8 bits")
    return notes


def _product(parallel: ParallelConfig, axes: tuple[str, ...]) -> int:
    first, second = (getattr(parallel, axis) for axis in axes)
    return first * second


def _refusal(cfg: RunConfig, per_process: Sequence[int], requested: int | None) -> list[Problem]:
    """Why no layout fits: for each axis, the problems of using it alone for all devices."""
    devices, least, rows = sum(per_process), len(per_process), cfg.batch.global_size
    several = f" in {least} processes" if least > 1 else ""
    request = "" if requested is None else f", and the layout of the config takes {requested}"
    message = f"there are {devices} devices{several}{request}; no layout has steps of {rows} rows on them"
    hint = "use another number of devices, or another batch.global_size for a new run"
    if least > 1:
        message += f", with at least one device of each process: {least} to {devices} devices"
        hint = f"start fewer processes, {hint.removeprefix('use ')}"
    problems = [Problem(SETTING, message, hint)]
    if fixed := fixed_micro_size(cfg):
        message = f"stays {cfg.batch.micro_size}, because losses depend on it ({fixed})"
        problems.append(Problem("batch.micro_size", message))
    for axis in ("data", *MODEL_AXES[::-1]):
        if axis == "expert" and not has_experts(cfg.model):
            continue
        problems += _refused_axis(cfg, axis, devices)
    return problems


def _refused_axis(cfg: RunConfig, axis: str, devices: int) -> list[Problem]:
    """Why one axis can't use all devices."""
    sizes: dict[str, Any] = dict.fromkeys(SIZED_AXES, 1) | {axis: devices}
    parallel = replace(
        cfg.parallel,
        **sizes,
        shards=None,
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
        Problem(f"parallel.{axis}={devices}", f"{problem.setting}: {problem.message}")
        for problem in islice(problems, REASONS)
    ]
