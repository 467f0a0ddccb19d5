"""Evaluate a model on tasks: `python -m megajax.evaluate --run=RUN --tasks=NAME:FILE,...`."""

import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from megajax.command_line.parser import PROCESS_FLAGS, REPLICA_FLAGS, Flag, front_door, parse, replica_problems
from megajax.config.bounds import Count
from megajax.config.class_references import resolve
from megajax.config.config_files import Source
from megajax.config.errors import ConfigError, Problem
from megajax.data.text.config import MockConfig
from megajax.display.text import duration
from megajax.interop.weights.formats import split_name
from megajax.interop.weights.origin import (
    IGNORE_FLAG,
    MODEL_FLAGS,
    TRUST_FLAG,
    folder_model,
    origin_of,
    run_config,
    run_folder,
)
from megajax.models.protocol import demand_causal
from megajax.processes.identity import find_identity
from megajax.processes.ray_cluster import RayPool
from megajax.processes.worker_pools import deferred_interrupts, in_order
from megajax.processes.xla_options import set_process
from megajax.tasks.config import EvaluatedConfig
from megajax.tokenizers.config import HuggingFaceTokenizerConfig, NullTokenizerConfig

DESCRIPTION = """Evaluate a model on tasks over local files, on any mesh, with the settings of its run or folder.

  python -m megajax.evaluate --run=runs/a --tasks=text:FILE,lambada:FILE:strict=true
  python -m megajax.evaluate --run=runs/a/checkpoints/00000100 --tasks=split:validation --devices=cpu:8
  python -m megajax.evaluate --run=runs/a --tasks=text:FILE --ray=auto --replicas=16
  python -m megajax.evaluate --hf=DIR --tasks=lm-eval:my_task --include-path=FOLDER

Tasks are NAME:VALUE[:setting=value], separated by commas: perplexity:PREFIX of token files, text:FILE,
wikitext:FILE[:stride=32], lambada:FILE[:strict=true], choices:FILE, split:validation or split:test of the run's data,
lm-eval:NAME; for runs fine-tuned on these benchmarks, glue:SPLIT, race:SPLIT, squad:validation. Nothing is downloaded.
docs/evaluation.md and docs/tuning.md describe the file formats."""
FLAGS = (
    *MODEL_FLAGS[:2],
    IGNORE_FLAG,
    TRUST_FLAG,
    Flag("tasks", str | None, help="tasks; default: the run's evaluation.tasks"),
    Flag("include-path", Path | None, help="a folder with YAML files of lm-eval's tasks"),
    Flag("output", Path | None, help="folder of results.json and cached answers; default: the run's folder"),
    Flag("cache", bool, True, help="cache answers, so that an interrupted evaluation can resume"),
    Flag("rows", Count | None, help="full rows per device at a time; default: the run's batch.micro_size"),
    *REPLICA_FLAGS,
    *PROCESS_FLAGS,
)
PARTS = 4
"""Parts of the work for each replica: a lost one costs the less."""


class EvaluateCommand(NamedTuple):
    """What a command line asks for."""

    flags: Mapping[str, Any]
    config: EvaluatedConfig
    evaluation: Any


def main(argv: list[str]) -> int:
    """Parse the command line, then import jax, connect the processes, and evaluate."""
    inputs = read(argv)
    flags, config, evaluation = inputs
    if flags["ray"] is not None:
        return evaluate_on_ray(argv, inputs)
    start, finish = (resolve(f"megajax.processes.start:{name}") for name in ("start", "finish"))
    equal = {name: flags[name] for name in ("run", "hf", "tasks", "include_path", "cache", "rows", "ignore")}
    start(patience=flags["init_timeout"], identity=partial(find_identity, config, equal))
    resolve("megajax.job.start.compile_cache:use_cache")(config.xla)
    # Compiled programs that the log does not record are deleted at the next start.
    with resolve("megajax.job.compile_log:CompileLog")(lambda message: None):
        code = resolve("megajax.tasks.evaluate_command:evaluate")(config, evaluation, weights(flags))
    finish()
    return code


def read(argv: list[str]) -> EvaluateCommand:
    """The settings and tasks of a command line."""
    command = parse(argv, verb="evaluate", flags=FLAGS, description=DESCRIPTION, root=EvaluatedConfig, base=base)
    flags, config = command.flags, command.config
    set_process(config.xla)
    tasks = config.evaluation.tasks
    if flags["tasks"] is not None or not tasks:
        tasks = resolve("megajax.tasks.evaluate_command:parse_tasks")(flags["tasks"] or "", flags["include_path"])
    source = Path(origin_of(flags)[0])
    output = flags["output"] or (run_folder(flags["run"]) if flags["run"] else Path())
    evaluation = resolve("megajax.tasks.evaluate_command:Evaluation")(
        source, tasks, output, flags["cache"], flags["rows"]
    )
    return EvaluateCommand(flags, config, evaluation)


def weights(flags: Mapping[str, Any]) -> Any:
    """What loads the weights."""
    return partial(resolve("megajax.interop.weights.fit:all_weights"), ignore=flags["ignore"])


def evaluate_on_ray(argv: list[str], inputs: EvaluateCommand) -> int:
    """Let replicas on a Ray cluster score parts of all tasks, then each task, with the answers of all parts."""
    flags, evaluation, started = inputs.flags, inputs.evaluation, time.monotonic()
    names = [task.name for task in evaluation.tasks]
    # As a script, this module has a name that means another one to the replicas.
    score, figures = (resolve(f"megajax.evaluate:{name}") for name in ("score_part", "figures_of"))
    progress, count = resolve("megajax.tasks.evaluate_command:TaskProgress")(), 0
    progress.start("parts of the tasks")
    results, content = {}, {}
    pool = RayPool(flags["ray"], flags["replicas"], flags["replica_gpus"])
    with deferred_interrupts() as handle_pending, pool:
        parts = PARTS * pool.workers
        scores = [(None, (score, tuple(argv), part, parts)) for part in range(parts)]
        for count, _ in enumerate(in_order(pool, scores, handle_pending), start=1):
            progress(count, parts + len(names))
        calls = [(name, (figures, tuple(argv), name)) for name in names]
        for name, answer in in_order(pool, calls, handle_pending):
            results[name], content = answer
            progress(count + len(results), parts + len(names))
    progress.clear()
    how = f"{pool.workers} replicas of {content['devices']} devices, {duration(time.monotonic() - started)}"
    resolve("megajax.tasks.evaluate_command:report")(results, content, how, evaluation)
    return 0


@cache
def evaluator(argv: tuple[str, ...]) -> Any:
    """In a replica: the model and the tasks of a command line."""
    flags, config, evaluation = read(list(argv))
    resolve("megajax.job.start.compile_cache:use_cache")(config.xla)
    resolve("megajax.job.compile_log:CompileLog")(lambda message: None).__enter__()  # as long as the process lives
    progress = resolve("megajax.tasks.evaluate_command:TaskProgress")(visible=False)
    return resolve("megajax.tasks.evaluate_command:Evaluator")(config, evaluation, weights(flags), progress)


def score_part(argv: tuple[str, ...], part: int, parts: int) -> None:
    """In a replica: put a part of the answers into the cache."""
    evaluator(argv).score(part, parts)


def figures_of(argv: tuple[str, ...], name: str) -> tuple[Any, dict[str, Any]]:
    """In a replica: the figures of a task, and the content of results.json without results."""
    return evaluator(argv).figures([name], name)[name], evaluator(argv).description()


def base(flags: Mapping[str, Any]) -> Source:
    """The config of the run or folder. Raises UserError if there is none."""
    name, reading = origin_of(flags)
    problems = replica_problems(flags)
    if flags["ray"] is not None and not flags["cache"]:
        problems.append(Problem("--cache", "is false, but replicas exchange their answers by it", "remove one of them"))
    if problems:
        raise ConfigError(problems, "command line")
    if flags["include_path"] is not None and "lm-eval:" not in (flags["tasks"] or ""):
        raise ConfigError(
            [Problem("--include-path", "needs a task lm-eval:NAME, but --tasks has none")], "command line"
        )
    library, folder = split_name(name)
    if library:
        return Source(name, folder_config(folder, reading.ignore))
    return run_config(folder, EvaluatedConfig, trusted=reading.trusted)


def folder_config(folder: Path, ignore: Sequence[str] = ()) -> EvaluatedConfig:
    """The model of a Hugging Face folder and its tokenizer. Only the task split reads the synthetic data.

    Raises UserError for a folder without a model, unsupported settings, or a model that is not a causal language model.
    """
    model, tokenizer = folder_model(folder, ignore)
    demand_causal(model, f"--hf={folder}: ")
    if isinstance(tokenizer, NullTokenizerConfig):
        tokenizer = HuggingFaceTokenizerConfig(path=str(folder))  # its error says which file is missing
    return EvaluatedConfig(model=model, data=MockConfig(), tokenizer=tokenizer)


if __name__ == "__main__":
    front_door(main)
