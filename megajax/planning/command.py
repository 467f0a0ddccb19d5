"""What `python -m megajax.plan` prints: a plan, a search, a comparison, a sweep, or a pipeline's schedule."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import megajax.config.schema as schema
from megajax.command_line import Command
from megajax.config.builds import resolve
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.files import ROOT, assembled, read
from megajax.config.patch import Mark, plain_name, setting
from megajax.config.tree import read_value
from megajax.metrics.banner import Report
from megajax.metrics.runfolder import write_asked
from megajax.models.facts import demand_facts, facts_of
from megajax.planning.cost.estimate import Case, to_dict
from megajax.planning.cost.serving import servings
from megajax.planning.program import devices
from megajax.planning.program.audit import audit, largest_arrays
from megajax.planning.search.compare import advice, comparison, other, sweep
from megajax.planning.search.ranking import Cache, check_config_path, compile_layout, find_best, write_config
from megajax.planning.search.search import SEARCHED, Choice, Task, changes, problems, settings
from megajax.planning.show import plan_report, serving_report
from megajax.training.run_config import RunConfig

COMPILED = 3
"""Layouts of a search that are compiled by default, if the compiler is installed."""
MARGIN = 0.03
"""Fraction of usable memory that a change of a compiled plan must leave: its excess over the formula may change."""
NEEDS = {"context": "serve", "compile": "search", "out": "search", "resume": "search", "png": "sweep"}
"""Flags that need another flag."""


def count_devices(flags: Mapping[str, Any]) -> tuple[int | None, list[Problem]]:
    """Number of devices that the flags ask for, and problems of the flags. Raises UserError for an unreadable file.

    None if the config's own layout need not match them: a search tries others, a sweep takes other numbers.
    """
    cluster, _, problems = read_target(flags)
    modes = _modes(flags)
    if len(modes) > 1:
        problems.append(Problem(f"--{modes[1]}", f"goes with no --{modes[0]}", "ask for one of them at a time"))
    for mode in [*["formula"] * flags["formula"], *modes] * flags["audit"]:
        problems.append(Problem("--audit", f"goes with no --{mode}", "it reads the program that is compiled"))
    for name, mode in NEEDS.items():
        if flags[name] is not None and not flags[mode]:
            problems.append(Problem(f"--{name}", f"goes with --{mode}, which is not given"))
    free = cluster is None or flags["search"] or flags["serve"] or flags["sweep"] is not None
    return None if free else cluster.devices, problems


def _modes(flags: Mapping[str, Any]) -> list[str]:
    return [name for name in ("search", "compare", "sweep", "serve") if flags[name] not in (None, False)]


def take_searched(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """With --search: the words without the settings that a search chooses, and those settings as fields of a Choice.

    They are fixed in the search and need not match the config's own layout. Raises ConfigError for wrong values.
    """
    if not any(plain_name(word) in ("__search", "__search=true") for word in argv):
        return list(argv), {}
    types = {**schema.hints(Choice), "data": int | None}
    rest, fixed, problems, words = [], {}, [], list(argv)
    while words:
        word = words.pop(0)
        name, value = setting(word)
        if not word.startswith("--") or name not in SEARCHED:
            rest.append(word)
            continue
        if value is Mark.BARE and words and not words[0].startswith("--"):
            _, value = setting(f"--{name}={words.pop(0)}")
        fixed[SEARCHED[name]], wrong = read_value(value, types[SEARCHED[name]], name)
        problems += wrong
    if problems:
        raise ConfigError(problems, "command line")
    return rest, {name: value for name, value in fixed.items() if name != "data" or value is not None}


@dataclass(frozen=True, slots=True)
class Request:
    """A plan, as the command line asks for it. Each mode gives its report and the figures for --json."""

    case: Case
    source: str
    """The value of --config."""
    flags: Mapping[str, Any]
    fixed: Mapping[str, Any]
    """Fields of a Choice that a search keeps."""
    program: Sequence[str]
    """Words that start this command in another process."""

    def by_formula(self) -> tuple[Report, Any]:
        estimate = self.case.estimate
        report = plan_report(estimate)
        if not estimate.fits:
            report = replace(report, blocks=[*report.blocks, *advice(self.case)])
        return report, to_dict(estimate) | {"parameters": estimate.run.model.parameter_count().total}

    def compiled(self) -> tuple[Report, Any]:
        case = self.case
        if case.cluster.name not in devices.GPUS:
            raise UserError(
                f"{case.cluster.name} is described in --device-file, which the compiler can't use: give --formula"
            )
        devices.prepare()  # before anything imports jax
        try:
            plan = resolve("megajax.planning.program.train_step:compile_train_step")(case.cfg, case.cluster)
        except resolve("jax.errors:JaxRuntimeError") as error:
            raise UserError(
                f"XLA of jax {resolve('jax:__version__')} did not compile this for {case.cluster.name}: "
                f"{str(error).strip().splitlines()[0][:200]}\n"
                "Try a newer jax; --formula needs no compiler"
            ) from error
        audited = audit(plan.text, plan.unknown_trips) if self.flags["audit"] else None
        report, figures = resolve("megajax.planning.program.train_step:report")(plan, case.device, audited)
        tables = [] if plan.fits else [largest_arrays(plan.text)]
        if not plan.fits and facts_of(case.cfg.model) is not None:
            excess = plan.memory.peak / devices.GIB - case.estimate.memory.peak_gib
            tables += advice(case, excess_gib=excess, margin=MARGIN)
        return replace(report, blocks=[*report.blocks, *tables]), figures

    def compare(self) -> tuple[Report, Any]:
        asked = self.flags["compare"]
        return comparison((self.source, asked), (self.case, other(self.case, asked, self.flags["gpus_per_node"])))

    def sweep(self) -> tuple[Report, Any]:
        return sweep(self.flags["sweep"], self.case, self.source, self.flags["png"])

    def serve(self) -> tuple[Report, Any]:
        run, asked = self.case.described, self.flags["context"]
        context = run.sections[-1].length if asked is None else asked
        if context < 1:
            raise UserError(f"--context must be at least 1 token, got {context}")
        plans = servings(run, self.case.cluster.devices, context)
        return serving_report(plans), [plan.to_dict() for plan in plans]

    def search(self) -> tuple[Report, Any]:
        out, resume, wanted = self.flags["out"], self.flags["resume"], self._layouts_to_compile()
        task = Task(self.case, self.fixed)
        if out is not None:
            check_config_path(out, self.source)
        path = resume or (None if out is None else out.with_suffix(".search.json"))
        cache = Cache(path, task.fingerprint(), insist=resume is not None)
        result = find_best(task, cache, wanted, partial(compile_layout, self.program))
        changed = changes(_config_of(self.source), task.config(result.best))
        words = [f"--config={self.source}", *(f"--{one}" for one in settings(changed))]
        lines = [f"python -m megajax.train {shlex.join(words)}"]
        if out is not None:
            name, cluster = Path(self.source).name, self.case.cluster
            title = f"{name} on {cluster.devices} x {self.case.device.name}: {result.best.layout}."
            write_config(out, self.source, changed, title)
            lines.append(f"or --config={out}, which has these settings")
        if path is not None:
            lines.append(f"the search's compiled layouts are in {path}")
        return result.report(lines), result.to_dict(settings(changed))

    def _layouts_to_compile(self) -> int:
        name, wanted = self.case.cluster.name, self.flags["compile"]
        unknown = f"a device the compiler knows, which {name} is not"
        missing = devices.missing_packages() if name in devices.GPUS else [unknown]
        if wanted is None:
            return 0 if missing or self.flags["formula"] else COMPILED
        if wanted < 0:
            raise UserError(f"--compile must be 0 or more layouts, got {wanted}")
        if wanted and missing:
            raise UserError(
                f"--compile={wanted} needs {' and '.join(missing)}.\nInstall the extra aot (uv sync --extra aot), or "
                "give --compile=0: a search by formulas alone."
            )
        return wanted


def plan(command: Command, fixed: Mapping[str, Any], program: Sequence[str]) -> None:
    """Print what the flags ask for and write the files. fixed: of `take_searched`; program: starts this command again.

    Raises UserError for what the user has to change.
    """
    flags = command.flags
    cluster, device, _ = read_target(flags)
    assert cluster is not None and device is not None  # `count_devices` has reported problems
    mode = next(iter(_modes(flags)), "by_formula" if flags["formula"] else "compiled")
    if mode != "compiled":
        demand_facts(command.config.model)
    if (count := count_devices(flags)[0]) is not None and (wrong := problems(command.config, count)):
        raise ConfigError(wrong, command.source or "")  # of a layout that parallel.elastic would change
    request = Request(Case(command.config, cluster, device), command.source or "", flags, fixed, program)
    report, figures = getattr(request, mode)()
    print(report.text())
    if flags["png"] is not None:
        print(f"\npicture {flags['png']}")
    if flags["json"] is not None:
        write_asked(flags["json"], json.dumps(figures, indent=1) + "\n")


def _config_of(source: str) -> RunConfig:
    """The config of a file without settings, whether or not its checks pass. Raises UserError if there is none."""
    file = read(source, ROOT)
    config, problems = assembled(file, ROOT, {})
    if config is None:
        raise UserError(f"{file.name} can't be read without settings: {problems[0]}")
    return config


def read_target(flags: Mapping[str, Any]) -> tuple[devices.Cluster | None, devices.Device | None, list[Problem]]:
    """Cluster that --devices asks for, and the constants of its devices with those of other flags in their place.

    None and problems for wrong values of --devices. Raises UserError for a file that can't be read or is of another
    device.
    """
    described = {}
    if flags["device_file"] is not None:
        own = devices.read_device(flags["device_file"])
        described = {own.name.lower(): own}
    nodes = {name: own.per_node for name, own in described.items()}
    cluster, problems = devices.read_cluster(flags["devices"], flags["gpus_per_node"], nodes)
    if cluster is None:
        return None, None, problems
    device = described.get(cluster.name) or devices.GPUS[cluster.name]
    if flags["calibration"] is not None:
        device = devices.calibrated(device, flags["calibration"])
    rates = {name: flags[name] * 1e9 for name in ("nvlink", "network") if flags[name] is not None}
    for name, rate in rates.items():
        if not 0 < rate < float("inf"):
            problems.append(Problem(f"--{name}", f"must be above 0 GB/s, got {flags[name]:g}"))
    return cluster, replace(device, **rates), problems
