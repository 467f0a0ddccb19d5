"""`python -m megajax.plan --config`: a plan, a search, a comparison, a sweep, or text generation."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from megajax.command_line.parser import Command
from megajax.config import field_types, load
from megajax.config.class_references import resolve
from megajax.config.compose import assemble, override, read_value
from megajax.config.config_files import ROOT, assembled, read
from megajax.config.dump import flatten
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.hints import did_you_mean, either
from megajax.config.optional_packages import install
from megajax.config.settings_tree import Mark, patch_of, plain_name, setting
from megajax.display.banner import Report
from megajax.metrics.run_folder import write_output_file
from megajax.models.facts import demand_facts, facts_of
from megajax.planning.choice import SEARCHED, Choice, changes, problems, settings
from megajax.planning.compiled import devices as devices
from megajax.planning.cost.estimate import Case, to_dict
from megajax.planning.cost.serving import by_preference, demand_room, servings
from megajax.planning.ranking import CompiledFigures, advice, check_config_path, compile_layout, find_best, write_config
from megajax.planning.search import Task
from megajax.planning.show import DEVICES_AXIS, Point, comparison, draw_sweep, plan_report, serving_report, sweep_report

COMPILED = 3
"""Layouts of a search that are compiled by default, if the compiler is installed."""
MARGIN = 0.03
"""Fraction of usable memory that a change of a compiled plan must leave: its excess over the formula may change."""
MODES = ("search", "compare", "sweep", "serve")
NEEDS = {"context": ("serve",), "compile": ("search",), "out": ("search",), "png": ("sweep",)}
"""Flags that need one of other flags."""
MAX_POINTS = 64
STEP_SETTINGS = ("steps", "schedule.", "profile.", "optimizer.")
"""Problems with these settings do not concern the layout; a larger batch in fewer steps may cause them."""


def count_devices(flags: Mapping[str, Any]) -> tuple[int | None, list[Problem]]:
    """Number of devices that the flags ask for, and problems of the flags. Raises UserError for an unreadable file.

    None if the config's own layout need not match them: a search tries others, a sweep takes other numbers.
    """
    cluster, problems = read_target(flags)
    modes = [mode for mode in MODES if flags[mode] not in (None, False)]
    if len(modes) > 1:
        problems.append(
            Problem(f"--{modes[1]}", f"cannot be combined with --{modes[0]}", "ask for one of them at a time")
        )
    for mode in [*["formula"] * flags["formula"], *modes] * flags["audit"]:
        problems.append(
            Problem("--audit", f"cannot be combined with --{mode}", "it reads the program that is compiled")
        )
    for name, needed in NEEDS.items():
        if flags[name] is not None and not any(flags[mode] for mode in needed):
            problems.append(Problem(f"--{name.replace('_', '-')}", f"needs {either([f'--{mode}' for mode in needed])}"))
    free = cluster is None or {"search", "serve", "sweep"} & {*modes}
    return None if free else cluster.devices, problems


def read_target(flags: Mapping[str, Any]) -> tuple[devices.Cluster | None, list[Problem]]:
    """The cluster of --devices with the constants of other flags; None and problems for wrong values of --devices.

    Raises UserError for a file that can't be read or is of another device.
    """
    described = None if flags["device_file"] is None else devices.read_device(flags["device_file"])
    cluster, problems = devices.read_cluster(flags["devices"], flags["gpus_per_node"], described)
    rates = {name: flags[name] * 1e9 for name in ("nvlink", "network") if flags[name] is not None}
    if cluster is None:
        return None, problems
    device = cluster.device
    if flags["calibration"] is not None:
        device = devices.read_device(flags["calibration"], device)
    return cluster._replace(device=replace(device, **rates)), problems


def take_searched(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """With --search: the words without the settings that a search chooses, and those settings as fields of a Choice.

    They are fixed in the search and need not match the config's own layout. Raises ConfigError for wrong values.
    """
    if not any(plain_name(word) in ("__search", "__search=true") for word in argv):
        return list(argv), {}
    types = {**field_types.hints(Choice), "data": int | None}
    rest, fixed, problems, words = [], {}, [], list(argv)
    while words:
        word = words.pop(0)
        name, value = setting(word)
        if not word.startswith("--") or name not in SEARCHED:
            rest.append(word)
            continue
        if value is Mark.BARE and words and not words[0].startswith("--"):
            _, value = setting(f"--{name}={words.pop(0)}")
        fixed[SEARCHED[name]], errors = read_value(value, types[SEARCHED[name]], name)
        problems += errors
    if problems:
        raise ConfigError(problems, "command line")
    return rest, {name: value for name, value in fixed.items() if name != "data" or value is not None}


def plan(command: Command, fixed: Mapping[str, Any], program: Sequence[str]) -> None:
    """Print what the flags ask for and write the files. fixed: of `take_searched`; program: starts this command again.

    Raises UserError for what the user has to change.
    """
    flags = command.flags
    cluster, _ = read_target(flags)
    assert cluster is not None  # `count_devices` has reported problems
    mode = next((mode for mode in MODES if flags[mode] not in (None, False)), "")
    # Without a compiler the answer is by formula, unless only a compiler can give it.
    compiling = mode in ("", "search") and not flags["formula"] and flags["compile"] is None
    answerable = facts_of(command.config.model) is not None and not flags["audit"]
    known = cluster.device.name in devices.GPUS
    missing = devices.missing_packages() if compiling and answerable and known else []
    mode = mode or ("by_formula" if flags["formula"] or missing else "compiled")
    if mode != "compiled":
        demand_facts(command.config.model)
    if (count := count_devices(flags)[0]) is not None and (errors := problems(command.config, count)):
        raise ConfigError(errors, command.source or "")  # of a layout that parallel.elastic would change
    request = PlanRequest(Case(command.config, cluster), command.source or "", flags, fixed, program)
    report, figures = getattr(request, mode)()
    if missing:
        needed = f"by formula only: compiling needs {' and '.join(missing)}. Install them: {install('aot')}"
        report = replace(report, blocks=[*report.blocks, ("not compiled", [("", needed)])])
    print(report.text())
    if flags["png"] is not None:
        print(f"\npicture {flags['png']}")
    if flags["json"] is not None:
        write_output_file(flags["json"], json.dumps(figures, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A plan as the command line describes it. Each mode returns its report and the figures for --json."""

    case: Case
    source: str
    """The value of --config."""
    flags: Mapping[str, Any]
    fixed: Mapping[str, Any]
    """Fields of a Choice that a search does not change."""
    program: Sequence[str]
    """Words that start this command in another process."""

    def by_formula(self) -> tuple[Report, Any]:
        estimate = self.case.estimate
        report = plan_report(estimate)
        if not estimate.fits:
            report = replace(report, blocks=[*report.blocks, advice(self.case)])
        return report, to_dict(estimate) | {"parameters": estimate.run.model.parameter_count().total}

    def compiled(self) -> tuple[Report, Any]:
        case, gpu = self.case, self.case.cluster.gpu
        devices.prepare()  # before anything imports jax
        try:
            plan = resolve("megajax.planning.train_step:compile_train_step")(case.cfg, case.cluster)
        except resolve("jax.errors:JaxRuntimeError") as error:
            raise UserError(
                f"XLA of jax {resolve('jax:__version__')} did not compile this for {gpu.name}: "
                f"{str(error).strip().splitlines()[0][:200]}\n"
                "Try a newer jax; --formula needs no compiler"
            ) from error
        report, figures = resolve("megajax.planning.train_step:report")(plan, audited=self.flags["audit"])
        if not plan.fits and facts_of(case.cfg.model) is not None:
            excess = plan.memory.peak / devices.GIB - case.estimate.memory.peak_gib
            report = replace(report, blocks=[*report.blocks, advice(case, excess_gib=excess, margin=MARGIN)])
        return report, figures

    def compare(self) -> tuple[Report, Any]:
        target = self.flags["compare"]
        return comparison(
            (self.source, target), (self.case, second_case(self.case, target, self.flags["gpus_per_node"]))
        )

    def sweep(self) -> tuple[Report, Any]:
        text, picture = self.flags["sweep"], self.flags["png"]
        axis, values = read_axis(text, self.case.cfg)
        points = sweep_points(self.case, axis, values)
        if all("refusal" in point for point in points):
            raise UserError(f"--sweep={text}: no point passes the checks; the first: {points[0]['refusal']}")
        if picture is not None:
            save = resolve("megajax.pipeline.drawing:save_as_asked")
            plan = f"{self.source} on {self.case.cluster.device.name}"
            save(partial(draw_sweep, plan, axis, points), picture, inches=(8, 4.5))
        return sweep_report(self.source, axis, points), points

    def serve(self) -> tuple[Report, Any]:
        run, tokens = self.case.described, self.flags["context"]
        context = run.sections[-1].length if tokens is None else tokens
        plans = servings(run, self.case.cluster.devices, context)
        chosen = by_preference(demand_room(plans))[0]
        return serving_report(plans, chosen), [plan.to_dict() for plan in plans]

    def search(self) -> tuple[Report, Any]:
        out, wanted = self.flags["out"], self._layouts_to_compile()
        task = Task(self.case, self.fixed)
        if out is not None:
            check_config_path(out, self.source)
        path = None if out is None else out.with_suffix(".search.json")
        cache = CompiledFigures(path, task.fingerprint())
        result = find_best(task, cache, wanted, partial(compile_layout, self.program))
        # Over the file without the settings of the command line, whether or not it passes its checks.
        file = read(self.source, ROOT)
        base, errors = assembled(file, ROOT, {})
        if base is None:
            raise UserError(f"{file.name} can't be read without settings: {errors[0]}")
        changed = changes(base, task.config(result.best))
        arguments = [f"--config={self.source}", *(f"--{change}" for change in settings(changed))]
        lines = [f"python -m megajax.train {shlex.join(arguments)}"]
        if out is not None:
            device, number, _ = self.case.cluster
            title = f"{Path(self.source).name} on {number} x {device.name}: {result.best.layout}."
            write_config(out, self.source, changed, title)
            lines.append(f"or --config={out}, which has these settings")
        if path is not None:
            lines.append(f"the search's compiled layouts are in {path}")
        return result.report(lines), result.to_dict(settings(changed))

    def _layouts_to_compile(self) -> int:
        name, number = self.case.cluster.device.name, self.flags["compile"]
        unknown = f"a device the compiler knows, which {name} is not"
        missing = devices.missing_packages() if name in devices.GPUS else [unknown]
        if number is None:
            return 0 if missing or self.flags["formula"] else COMPILED
        if number and missing:
            raise UserError(
                f"--compile={number} needs {' and '.join(missing)}.\nInstall the extra aot ({install('aot')}), or give "
                "--compile=0: a search by formulas alone."
            )
        return number


def second_case(case: Case, text: str, per_node: int | None) -> Case:
    """The plan of --compare: at most one config and one device, and settings; the rest is that of `case`.

    Raises UserError for other words, and for none.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--compare={text!r}: {error}") from error
    overrides = [word.removeprefix("--") for word in words if word.startswith("--")]
    names = [word for word in words if not word.startswith("--")]
    gpus = {*devices.GPUS, *devices.OTHER_NAMES}
    targets = [word for word in names if word.partition(":")[0].lower() in gpus or re.fullmatch(r"[\w-]+:\d+", word)]
    configs = [word for word in names if word not in targets]
    if not words or len(targets) > 1 or len(configs) > 1:
        raise UserError(
            f"--compare={text!r} names {'nothing' if not words else 'more than one of a kind'} to compare with.\n"
            "Give another config, another device, or settings: --compare=OTHER.py, --compare=h200:64, "
            '--compare="--parallel.tensor=4", or several in one pair of quotes.'
        )
    cluster = case.cluster
    for word in targets:
        text = word if ":" in word else f"{word}:{cluster.devices}"
        second, errors = devices.read_cluster(text, per_node, cluster.device)
        if second is None:
            raise ConfigError([replace(problem, setting="--compare") for problem in errors], "command line")
        cluster = second
    if configs:
        return Case(load(configs[0], *overrides, devices=cluster.devices), cluster)
    return Case(override(case.cfg, *overrides, devices=cluster.devices, place=f"--compare={text}"), cluster)


def read_axis(text: str, cfg: object) -> tuple[str, list[str]]:
    """ "devices:64,128,...,512" -> ("devices", ["64", "128", "256", "512"]).

    Raises UserError for an unknown axis and for other values.
    """
    axis, _, listed = text.partition(":")
    values = [value.strip() for value in listed.split(",") if value.strip()]
    if not values:
        raise UserError(
            f"--sweep={text!r} must be AXIS:VALUE,VALUE,...\nE.g. devices:64,128,...,16384 or batch.micro_size:1,2,4"
        )
    names = [DEVICES_AXIS, *flatten(cfg)]
    if axis not in names:
        hint = did_you_mean(axis, names) or "devices, or a setting such as batch.micro_size"
        raise UserError(f"--sweep: unknown axis {axis!r}; {hint}")
    if "..." in values:
        values = _continued(text, values)
    for value in values:
        if axis == DEVICES_AXIS and not re.fullmatch(r"[1-9]\d{0,5}", value):
            raise UserError(f"--sweep={text!r}: {value!r} is no number of devices")
    return axis, values


def _continued(text: str, values: list[str]) -> list[str]:
    """The values with "..." filled in, by a constant factor."""
    place = values.index("...")
    before, after = values[:place], values[place + 1 :]
    if len(before) < 2 or len(after) != 1 or not all(value.isdigit() for value in (*before, *after)):
        raise UserError(f"--sweep={text!r}: '...' stands between two or more numbers and the last one: 64,128,...,1024")
    start, second, last = int(before[-2]), int(before[-1]), int(after[0])
    filled = [second]
    while 0 < start < second and filled[-1] < last and len(filled) < MAX_POINTS:
        filled.append(filled[-1] * second // start)
    if filled[-1] != last:
        raise UserError(f"--sweep={text!r}: {start}, {second}, ... does not lead to {last} by a constant factor")
    return [*before[:-1], *map(str, filled)]


def sweep_points(case: Case, axis: str, values: Sequence[str]) -> list[Point]:
    """A plan for each value. Over devices, `data` grows, for weak and for strong scaling."""
    if axis != DEVICES_AXIS:
        return [_point(case, "", value, [f"{axis}={value}"]) for value in values]
    cluster, rows, first, points = case.cluster, case.cfg.batch.global_size, int(values[0]), []
    for mode, value in product(("weak", "strong"), values):
        count, words = int(value), ["parallel.data=none"]
        _, refused = devices.read_cluster(f"{cluster.device.name}:{value}", cluster.per_node, cluster.device)
        if mode == "weak":
            weak_rows, remainder = divmod(rows * count, first)
            if remainder:
                refused = [Problem(f"{rows} rows on {first}", f"are no whole number of rows on {count}")]
            # As many tokens in all.
            words += [f"batch.global_size={weak_rows}", f"steps={case.cfg.steps * first // count}"]
        scaled = replace(case, cluster=cluster._replace(devices=count))
        points.append(_point(scaled, mode, value, words, refused))
    return points


def _point(case: Case, mode: str, value: str, words: list[str], refused: Sequence[Problem] = ()) -> Point:
    """A plan of the case with other settings. refused: problems of its devices."""
    count = case.cluster.devices
    cfg, rules = assemble(type(case.cfg), case.cfg, patch_of(map(setting, words)), count)
    refusals = [*refused, *(rule for rule in rules if not (mode and rule.setting.startswith(STEP_SETTINGS)))]
    rows = (cfg or case.cfg).batch.global_size
    point = {"value": value, "mode": mode, "devices": count, "global_size": rows}
    if refusals:
        return point | {"refusal": f"{refusals[0].setting}: {refusals[0].message}"}
    return point | to_dict(replace(case, cfg=cfg).estimate)
