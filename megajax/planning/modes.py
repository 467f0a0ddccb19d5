"""The modes of `python -m megajax.plan --config`: a plan compiled or by formula, a search, a comparison, a sweep."""

import json
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megajax.config.builds import resolve
from megajax.config.errors import Problem, UserError
from megajax.config.files import ROOT, assembled, read
from megajax.planning import show
from megajax.planning.command import MODES
from megajax.planning.cost.costs import Device, calibrated, known_device, read_device
from megajax.planning.cost.description import demand_formulas
from megajax.planning.cost.estimate import to_dict
from megajax.planning.program.devices import GPUS, Cluster, missing_packages, prepare, read_cluster
from megajax.planning.search import compare, ranking
from megajax.planning.search.candidates import Case, Choice, Space, apply, settings
from megajax.planning.search.compile_worker import Compiler, Prediction, compile_best
from megajax.planning.search.ranking import Result
from megajax.planning.search.search import SearchCache, Task, merged, search
from megajax.planning.search.whatif import advice
from megajax.planning.show import Report
from megajax.training.run_config import RunConfig

COMPILED = 3
"""Layouts of a search that are compiled by default, if the compiler is installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A plan, as the command line asks for it. Each mode gives its report and the figures for --json."""

    case: Case
    source: str
    """The value of --config."""
    flags: Mapping[str, Any]
    fixed: Mapping[str, Any]
    """Fields of a Choice that a search keeps."""

    @property
    def name(self) -> str:
        return Path(self.source).name

    def by_formula(self) -> tuple[Report, Any]:
        plan = self.case.estimate
        report = show.plan_report(plan, self.name)
        if not plan.fits:
            report = replace(report, blocks=[*report.blocks, *advice(self.case)])
        return report, to_dict(plan) | {"parameters": plan.run.model.parameter_count().total}

    def compiled(self) -> tuple[Report, Any]:
        cluster = self.case.cluster
        if cluster.name not in GPUS:
            raise UserError(
                f"{cluster.name} is described in --device-file, which the compiler can't use: give --formula"
            )
        prepare()  # before anything imports jax
        try:
            plan = resolve("megajax.planning.program.train_step:compile_train_step")(self.case.cfg, cluster)
        except resolve("jax.errors:JaxRuntimeError") as error:
            raise UserError(
                f"XLA of jax {resolve('jax:__version__')} did not compile this for {cluster.name}: "
                f"{str(error).strip().splitlines()[0][:200]}\n"
                "Try a newer jax; --formula needs no compiler"
            ) from error
        audit = resolve("megajax.planning.program.audit:audit") if self.flags["audit"] else None
        audited = audit(plan.text, plan.unknown_trips) if audit else None
        return resolve("megajax.planning.compiled_plan:report")(plan, self.case.device, self.name, audited)

    def compare(self) -> tuple[Report, Any]:
        asked = self.flags["compare"]
        cases = self.case, compare.other(self.case, asked, self.flags["gpus_per_node"])
        first, second = (case.estimate for case in cases)
        figures = {"first": to_dict(first), "second": to_dict(second), "ratios": compare.ratios(first, second)}
        return compare.comparison_report((self.source, asked), cases), figures

    def sweep(self) -> tuple[Report, Any]:
        sweep = compare.sweep(self.flags["sweep"], self.case)
        if self.flags["png"] is not None:
            compare.save_chart(sweep, self.flags["png"])
        return compare.sweep_report(sweep, self.source), [point.to_dict() for point in sweep.points]

    def search(self) -> tuple[Report, Any]:
        cfg, cluster, device = self.case.cfg, self.case.cluster, self.case.device
        out, resume, wanted = self.flags["out"], self.flags["resume"], self._layouts_to_compile()
        space = Space(cfg=cfg, devices=cluster.devices, per_node=cluster.per_node, fixed=self.fixed)
        task = Task(space=space, device=device)
        if out is not None:
            ranking.check_config_path(out, self.source)
        path = resume or (None if out is None else out.with_suffix(".search.jsonl"))
        cache = SearchCache(path, task, insist=resume is not None)
        try:
            result = self._searched(task, cache, wanted)
        finally:
            cache.close()
        choice = result.best.entry.choice
        changed = settings(_config_of(self.source), self._with(choice))
        lines = [f"python -m megajax.train {shlex.join([f'--config={self.source}', *(f'--{s}' for s in changed)])}"]
        if out is not None:
            title = f"{self.name} on {cluster.devices} x {device.name}: {choice.layout}."
            ranking.write_config(out, self.source, changed, title)
            lines.append(f"or --config={out}, which loads that config with these settings")
        if path is not None:
            lines.append(f"the search's results are in {path}")
        return ranking.search_report(result, lines, self.name), result.to_dict(changed)

    def _with(self, choice: Choice) -> RunConfig:
        """The config with a choice; `data` is left open, unless it was given or is in the config already."""
        cfg = apply(choice, self.case.cfg)
        if "data" in self.fixed or self.case.cfg.parallel.data == choice.data:
            return cfg
        return cfg.but(parallel=replace(cfg.parallel, data=None))

    def _layouts_to_compile(self) -> int:
        wanted, formula = self.flags["compile"], self.flags["formula"]
        if wanted is not None and wanted < 0:
            raise UserError(f"--compile must be 0 or more layouts, got {wanted}")
        name = self.case.cluster.name
        missing = missing_packages() if name in GPUS else [f"a device the compiler knows, which {name} is not"]
        if wanted is None:
            return 0 if missing or formula else COMPILED
        if wanted and missing:
            raise UserError(
                f"--compile={wanted} needs {' and '.join(missing)}.\nInstall the extra aot (uv sync --extra aot), or "
                "give --compile=0: a search by formulas alone."
            )
        if wanted and formula:
            raise UserError(f"--compile={wanted} and --formula, which compiles nothing: give one of them")
        return wanted

    def _searched(self, task: Task, cache: SearchCache, wanted: int) -> Result:
        started = time.monotonic()
        with _progress() as bar:
            layouts = bar.add_task("layouts", total=len(task.space.groups()))
            for group, new in search(task, dict(cache.groups)):
                if new:
                    cache.add_group(group)
                bar.advance(layouts)
            seconds = time.monotonic() - started
            entries, _ = merged(cache.groups)
            if wanted and entries:
                done = bar.add_task("compiled", total=wanted)

                def add(choice: Choice, prediction: Prediction) -> None:
                    cache.add_compiled(choice, prediction)
                    bar.advance(done)

                # Programs for virtual GPU devices have no host memory to offload moments to.
                choices = (entry.choice for entry in entries if not entry.choice.offload)
                compile_best(choices, wanted, Compiler(self.case), cache.compiled, add)
        compile_seconds = time.monotonic() - started - seconds
        compiled = cache.compiled if wanted else {}
        return ranking.result(task, cache.groups, compiled, seconds=seconds, compile_seconds=compile_seconds)


def plan(config: RunConfig, flags: Mapping[str, Any], source: str, fixed: Mapping[str, Any]) -> None:
    """Print what the flags ask for and write the files. source: the value of --config; fixed: of `take_searched`.

    Raises UserError for what the user has to change.
    """
    cluster, _ = read_target(flags)
    assert cluster is not None  # `count_devices` has reported its problems
    if any(flags[name] for name in ("formula", *MODES)):
        demand_formulas(config)
    request = Request(case=Case(config, cluster, device_of(cluster, flags)), source=source, flags=flags, fixed=fixed)
    if flags["search"]:
        report, figures = request.search()
    elif flags["compare"] is not None:
        report, figures = request.compare()
    elif flags["sweep"] is not None:
        report, figures = request.sweep()
    else:
        report, figures = request.by_formula() if flags["formula"] else request.compiled()
    print(report.text())
    if flags["png"] is not None:
        print(f"\npicture {flags['png']}")
    if flags["json"] is not None:
        try:
            flags["json"].write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{flags['json']} can't be written: {error.strerror}") from error
    if flags["html"] is not None:
        report.write_page(flags["html"])
        print(f"\npage: {flags['html']}")


def _config_of(source: str) -> RunConfig:
    """The config of a file without settings, whether or not its checks pass. Raises UserError if there is none."""
    file = read(source, ROOT)
    config, problems = assembled(file, ROOT, {})
    if config is None:
        raise UserError(f"{file.name} can't be read without settings: {problems[0]}")
    return config


def _progress() -> Progress:
    """A progress bar on the terminal, removed when done; none elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(
        *(*columns, TextColumn("left"), TimeRemainingColumn()),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def read_target(flags: Mapping[str, Any]) -> tuple[Cluster | None, list[Problem]]:
    """Cluster that --devices, --gpus-per-node and --device-file ask for; None and problems for wrong values.

    Raises UserError for a --device-file that can't be read.
    """
    file = flags["device_file"]
    own = None if file is None else read_device(file)
    described = {} if own is None else {own.name.lower(): own.per_node}
    return read_cluster(flags["devices"], flags["gpus_per_node"], described)


def device_of(cluster: Cluster, flags: Mapping[str, Any]) -> Device:
    """Constants of the cluster's devices, with those of --calibration, --nvlink and --network in their place.

    Raises UserError for files that can't be read or are of another device.
    """
    own = None if flags["device_file"] is None else read_device(flags["device_file"])
    device = own if own is not None and own.name.lower() == cluster.name else known_device(cluster.name)
    if flags["calibration"] is not None:
        device = calibrated(device, flags["calibration"])
    for name in ("nvlink", "network"):
        rate = flags[name]
        if rate is not None:
            if not 0 < rate < float("inf"):
                raise UserError(f"--{name} must be above 0 GB/s, got {rate:g}")
            device = replace(device, **{name: rate * 1e9})
    return device
