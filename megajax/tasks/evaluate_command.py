"""The work of `python -m megajax.evaluate`: load a model, run tasks, print a table, write results.json."""

import re
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from megajax.batch import Params
from megajax.checkpoint.committed_steps import locate, open_place
from megajax.checkpoint.manifest import MANIFEST
from megajax.config.compose import assemble
from megajax.config.dump import flatten
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.hints import either, nearest_names
from megajax.config.read_limits import DOCUMENT
from megajax.config.removed import removed
from megajax.config.settings_tree import patch_of, setting
from megajax.data.progress_line import QUIET_SECONDS, ProgressLine
from megajax.display.text import duration
from megajax.interop.weights.formats import split_name
from megajax.metrics.record import to_json
from megajax.metrics.run_folder import RunFolder, write_atomically
from megajax.models.protocol import ids_below
from megajax.planning.resolve import resolve
from megajax.storage.folders import read_small
from megajax.tasks.cache import RequestCache
from megajax.tasks.config import KINDS, HarnessConfig
from megajax.tasks.statistics import Figures
from megajax.training.config import BatchConfig
from megajax.training.program import Program
from megajax.training.run_config import RunConfig
from megajax.training.scorer import Elsewhere, Scorer
from megajax.training.session import build_tokenizer


class TaskProgress:
    """A line on standard error, as of `megajax.data.progress_line`. visible: False prints nothing."""

    def __init__(self, *, visible: bool = True):
        self._visible = visible
        self.start("")

    def start(self, name: str) -> None:
        """Begin a task."""
        self._name, self._line, self._before = name, ProgressLine(sys.stderr, quiet=QUIET_SECONDS), None

    def __call__(self, count: int, total: int) -> None:
        """Show `count` of `total`. The remaining time is estimated from the first call on, after compilation."""
        now = time.monotonic()
        if self._before is None or count < self._before[1]:
            self._before = now, count
        if self._visible and self._line.seconds() is not None:
            since, first = self._before
            remaining = f", {duration((now - since) / (count - first) * (total - count))} left" if count > first else ""
            self._line.show(f"{self._name}: {count:,} of {total:,}{remaining}")

    def clear(self) -> None:
        """Remove an updated line."""
        self._line.clear()


type Load = Callable[[Path, Program], tuple[Params, str]]
"""(path, program) -> weights and their origin. The front door passes `megajax.interop.weights.fit.all_weights`."""


class Evaluation(NamedTuple):
    """The model, the tasks, and the folder of the results."""

    source: Path
    """The run, a step of it, or FORMAT:DIR."""
    tasks: Sequence[Any]
    """Configs of tasks."""
    output: Path
    """The folder of results.json."""
    cache: bool = True
    """Whether answers are cached on disk."""
    rows: int | None = None
    """Full rows per device at a time; None: batch.micro_size of the run."""


def parse_tasks(text: str, include_path: Path | None = None) -> list[Any]:
    """NAME:VALUE[:setting=value...], separated by commas -> configs of tasks.

    VALUE is the task's main setting, such as a path. Raises one ConfigError with all problems.
    """
    tasks, problems, names = list[Any](), list[Problem](), list[str]()
    for task_text in filter(None, (part.strip() for part in text.split(","))):
        kind, *settings = task_text.split(":")
        if kind not in KINDS:
            harness = [] if settings else [f"lm-eval:{kind}, of lm-evaluation-harness on local data"]
            names = [*nearest_names(kind, KINDS), *harness]
            hint = f"did you mean {either(names)}?" if names else f"use {either(KINDS)}"
            message = removed(kind)
            problems.append(Problem("--tasks", f"{kind} {message or 'is not a task'}", "" if message else hint))
            continue
        cls, first = KINDS[kind]
        named_settings = [setting(item) for item in settings if re.match(r"\w+=", item)]
        value = ":".join(item for item in settings if not re.match(r"\w+=", item))
        patch = patch_of([*[setting(f"{first}={value}")] * bool(value), *named_settings])
        config, task_problems = assemble(cls, None, patch)
        problems += [replace(problem, setting=f"--tasks={kind}: {problem.setting}") for problem in task_problems]
        if config is None or task_problems:
            continue
        if isinstance(config, HarnessConfig) and include_path is not None and config.include_path is None:
            config = replace(config, include_path=str(include_path))
        names.append(config.name)
        number = names.count(config.name)
        tasks.append(config if number == 1 else replace(config, name=f"{config.name}_{number}"))
    if not tasks and not problems:
        problems.append(Problem("--tasks", "must be given", f"NAME:VALUE, with a name of {either(KINDS)}"))
    if problems:
        raise ConfigError(problems, "command line")
    return tasks


class Evaluator:
    """A model on the present devices, and the tasks for it."""

    def __init__(self, cfg: RunConfig, evaluation: Evaluation, load: Load, progress: TaskProgress):
        """Raises UserError."""
        program, tokenizer = prepare(cfg, evaluation.rows)
        with jax.set_mesh(program.mesh):
            weights, self.origin = load(evaluation.source, program)
        self._cfg, self._evaluation, self._progress = cfg, evaluation, progress
        self._scorer = Scorer(program, tokenizer, weights, progress=progress, folder=evaluation.output)
        self._tasks = {task.name: task.build(self._scorer) for task in evaluation.tasks}
        key = lambda: cache_key(flatten(cfg), evaluation.source, self.origin, tokenizer.identity)  # noqa: E731
        self._key = key() if evaluation.cache else None

    def figures(self, names: Sequence[str] = (), part: str = "") -> dict[str, Figures]:
        """The figures of all tasks, or of some, by name. part: of the work, in the cache."""
        results = dict[str, Figures]()
        with open_cache(self._evaluation.output / "evaluation_cache", self._key, part) as self._scorer.cache:
            for name in names or self._tasks:
                self._progress.start(name)
                results[name] = self._tasks[name]()
                self._progress.clear()
        return results

    def score(self, number: int, parts: int) -> None:
        """Put a part of the answers into the cache. number: of the part, from 0."""
        self._scorer.share = number, parts
        for name in self._tasks:
            with suppress(Elsewhere):
                self.figures([name], f"{number}-of-{parts}")
        self._scorer.share = None

    def description(self) -> dict[str, Any]:
        """The content of results.json except the results."""
        return description(flatten(self._cfg), self._evaluation, self.origin, self._scorer.program)


def evaluate(cfg: RunConfig, evaluation: Evaluation, load: Load) -> int:
    """Run the tasks, print a table, write results.json; returns the exit code. Raises UserError."""
    started, primary = time.monotonic(), jax.process_index() == 0
    evaluator = Evaluator(cfg, evaluation, load, TaskProgress(visible=primary))
    results = evaluator.figures()
    if primary:
        content = evaluator.description()
        report(results, content, f"{content['devices']} devices, {duration(time.monotonic() - started)}", evaluation)
    return 0


def report(results: Mapping[str, Figures], content: dict[str, Any], how: str, evaluation: Evaluation) -> None:
    """Print a table of the results and write results.json. content: the rest of it; how: where and how long."""
    show(results, f"{content['weights']}, {how}")
    path = RunFolder.create(evaluation.output).path / "results.json"
    content["results"] = {name: as_json(figures) for name, figures in results.items()}
    write_atomically(path, to_json(content))
    print(f"results: {path}")


@contextmanager
def open_cache(folder: Path, key: str | None, part: str = "") -> Generator[RequestCache | None]:
    """The cache with answers of earlier attempts; None without a key. part: as in `RequestCache`."""
    if key is None:
        yield None
        return
    with RequestCache(folder, key, part) as cache:
        if cache.loaded and not part and jax.process_index() == 0:
            print(f"{cache.loaded:,} answers of an earlier attempt in {cache.path}", file=sys.stderr)
        yield cache


def prepare(cfg: RunConfig, rows: int | None = None) -> tuple[Program, Any]:
    """The program and tokenizer of a config on the present devices, without data or weights.

    rows: full rows per device at a time; None: batch.micro_size.
    """
    resolved, vocabulary = resolve(cfg, may_replan=False), ids_below(cfg.model)
    try:
        remedy = "give the tokenizer that the weights were trained with"
        tokenizer = build_tokenizer(cfg.tokenizer, vocabulary, remedy)
    except UserError as error:
        null = f"--tokenizer.type=NullTokenizerConfig --tokenizer.vocabulary_size={vocabulary}"
        raise UserError(f"{error}\nperplexity:PREFIX reads tokens and needs no tokenizer: {null}") from error
    # The training batch may not fit these devices, so choose one that does.
    micro_size = rows or cfg.batch.micro_size
    batch = BatchConfig(
        global_size=resolved.replicas * resolved.mesh.shape["pipeline"] * micro_size, micro_size=micro_size
    )
    return Program.of(cfg.but(batch=batch), resolved.mesh, resolved.options), tokenizer


def cache_key(settings: Mapping[str, Any], source: Path, origin: str, tokenizer: str) -> str:
    """A text of everything that answers depend on: the weights, the model, the dtypes and the tokenizer."""
    format_name, folder = split_name(source)
    if format_name:
        files = sorted(folder.iterdir())
        content = repr([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files])
    else:
        folder, step = locate(source)
        place = open_place(folder)
        step = max(place.steps(), default=0) if step is None else step
        content = read_small(place.files(step), MANIFEST, DOCUMENT).decode()
    numbers = {name: value for name, value in settings.items() if name.startswith(("model.", "precision."))}
    return repr((origin, content, numbers, tokenizer))


def show(results: Mapping[str, Figures], title: str) -> None:
    """Print a table of all figures."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("task", "figure", "value", "standard error", "count"):
        table.add_column(heading, justify="left" if heading in ("task", "figure") else "right")
    for task, figures in results.items():
        for place, (name, figure) in enumerate(figures.items()):
            error = "" if figure.error is None else f"{figure.error:.4g}"
            count = "" if figure.count is None else f"{figure.count:,}"
            table.add_row(task * (place == 0), name, f"{figure.value:,.6g}", error, count)
    Console().print(table)


def description(settings: Mapping[str, Any], evaluation: Evaluation, origin: str, program: Program) -> dict[str, Any]:
    """The content of results.json except the results."""
    packages = ("jax", "jaxlib", "numpy", *["lm-eval"] * any(isinstance(t, HarnessConfig) for t in evaluation.tasks))
    return {
        "weights": origin,
        "tasks": {task.name: {"type": type(task).__name__, **flatten(task)} for task in evaluation.tasks},
        "config": settings,
        "mesh": dict(program.mesh.shape),
        "devices": program.mesh.size,
        "versions": {name: version(name) for name in packages},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def as_json(figures: Figures) -> dict[str, dict[str, float | int | None]]:
    """Figures by name, for results.json."""
    return {
        name: {"value": figure.value, "standard_error": figure.error, "count": figure.count}
        for name, figure in figures.items()
    }
