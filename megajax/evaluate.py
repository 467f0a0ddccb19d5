"""Evaluate a model on tasks: `python -m megajax.evaluate --run=RUN --tasks=NAME:FILE,...`."""

import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from megajax.command_line.parser import PROCESS_FLAGS, REPLICA_FLAGS, Flag, front_door, parse, replica_problems
from megajax.config.class_references import resolve
from megajax.config.errors import ConfigError, Problem
from megajax.config.files import Source
from megajax.data.text.config import MockConfig
from megajax.display.text import duration
from megajax.interop.origin import IGNORE_FLAG, MODEL_FLAGS, TRUST_FLAG, demand_folder, run_config, run_folder
from megajax.mesh.processes.identity import find_identity
from megajax.mesh.processes.ray_pool import RayPool
from megajax.mesh.processes.worker_pools import deferred_interrupts, in_order
from megajax.mesh.xla_options import set_process
from megajax.models.protocol import demand_causal
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
    Flag("rows", int | None, help="full rows per device at a time; default: the run's batch.micro_size"),
    *REPLICA_FLAGS,
    *PROCESS_FLAGS,
)
PARTS = 4
"""Parts of the work for each replica: a lost one costs the less."""


class Inputs(NamedTuple):
    """What a command line asks for."""

    flags: Mapping[str, Any]
    config: Any
    evaluation: Any


def main(argv: list[str]) -> int:
    """Parse the command line, then import jax, connect the processes, and evaluate."""
    inputs = read(argv)
    flags, config, evaluation = inputs
    if flags["ray"] is not None:
        return evaluate_on_ray(argv, inputs)
    start, finish = (resolve(f"megajax.mesh.processes.agreement:{name}") for name in ("start", "finish"))
    equal = {name: flags[name] for name in ("run", "hf", "tasks", "include_path", "cache", "rows", "ignore")}
    start(patience=flags["init_timeout"], identity=partial(find_identity, config, equal))
    resolve("megajax.job.start.compile_cache:use_cache")(config.xla)
    # Compiled programs that the log does not record are deleted at the next start.
    with resolve("megajax.job.compile_log:CompileLog")(lambda message: None):
        code = resolve("megajax.tasks.command:evaluate")(config, evaluation, weights(flags))
    finish()
    return code


def read(argv: list[str]) -> Inputs:
    """The settings and tasks of a command line."""
    command = parse(argv, verb="evaluate", flags=FLAGS, description=DESCRIPTION, root=EvaluatedConfig, base=base)
    flags, config = command.flags, command.config
    set_process(config.xla)
    tasks = config.evaluation.tasks
    if flags["tasks"] is not None or not tasks:
        tasks = resolve("megajax.tasks.command:parse_tasks")(flags["tasks"] or "", flags["include_path"])
    source = flags["run"] or Path(f"hf:{flags['hf']}")
    output = flags["output"] or (run_folder(flags["run"]) if flags["run"] else Path())
    evaluation = resolve("megajax.tasks.command:Evaluation")(source, tasks, output, flags["cache"], flags["rows"])
    return Inputs(flags, config, evaluation)


def weights(flags: Mapping[str, Any]) -> Any:
    """What loads the weights."""
    return partial(resolve("megajax.job.start.stored_weights:all_weights"), ignore=flags["ignore"])


def evaluate_on_ray(argv: list[str], inputs: Inputs) -> int:
    """Let replicas on a Ray cluster score parts of all tasks, then each task, with the answers of all parts."""
    flags, evaluation, started = inputs.flags, inputs.evaluation, time.monotonic()
    names = [task.name for task in evaluation.tasks]
    # As a script, this module has a name that means another one to the replicas.
    score, figures = (resolve(f"megajax.evaluate:{name}") for name in ("score_part", "figures_of"))
    progress, count = resolve("megajax.tasks.command:Progress")(), 0
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
    resolve("megajax.tasks.command:report")(results, content, how, evaluation)
    return 0


@cache
def evaluator(argv: tuple[str, ...]) -> Any:
    """In a replica: the model and the tasks of a command line."""
    flags, config, evaluation = read(list(argv))
    resolve("megajax.job.start.compile_cache:use_cache")(config.xla)
    resolve("megajax.job.compile_log:CompileLog")(lambda message: None).__enter__()  # as long as the process lives
    progress = resolve("megajax.tasks.command:Progress")(visible=False)
    return resolve("megajax.tasks.command:Evaluator")(config, evaluation, weights(flags), progress)


def score_part(argv: tuple[str, ...], part: int, parts: int) -> None:
    """In a replica: put a part of the answers into the cache."""
    evaluator(argv).score(part, parts)


def figures_of(argv: tuple[str, ...], name: str) -> tuple[Any, dict[str, Any]]:
    """In a replica: the figures of a task, and the content of results.json without results."""
    return evaluator(argv).figures([name], name)[name], evaluator(argv).description()


def base(flags: Mapping[str, Any]) -> Source:
    """The config of the run or folder. Raises UserError if there is none."""
    run, folder = flags["run"], flags["hf"]
    if (run is None) == (folder is None):
        message = "must be given, or --hf=DIR" if run is None else f"is given, and --hf={folder} as well"
        raise ConfigError([Problem("--run", message, "name one model")], "command line")
    problems = replica_problems(flags)
    if flags["ray"] is not None and not flags["cache"]:
        problems.append(Problem("--cache", "is false, but replicas exchange their answers by it", "remove one of them"))
    if problems:
        raise ConfigError(problems, "command line")
    if flags["include_path"] is not None and "lm-eval:" not in (flags["tasks"] or ""):
        raise ConfigError(
            [Problem("--include-path", "needs a task lm-eval:NAME, but --tasks has none")], "command line"
        )
    demand_folder(flags["ignore"], folder)
    if folder is not None:
        return Source(f"hf:{folder}", folder_config(folder, flags["ignore"]))
    return run_config(run, EvaluatedConfig, trusted=flags["trust_code"])


def folder_config(folder: Path, ignore: Sequence[str] = ()) -> EvaluatedConfig:
    """The model of a Hugging Face folder and its tokenizer. Only the task split reads the synthetic data.

    Raises UserError for a folder without a model, unsupported settings, or a model that is not a causal language model.
    """
    model = resolve("megajax.interop.huggingface.folder:read_model")(folder, ignore).model
    demand_causal(model, f"--hf={folder}: ")
    read_config = resolve("megajax.interop.tokenizer_files:tokenizer_config")
    tokenizer = read_config([path.name for path in folder.iterdir()], folder, None, folder)
    if isinstance(tokenizer, NullTokenizerConfig):
        tokenizer = HuggingFaceTokenizerConfig(path=str(folder))  # its error says which file is missing
    return EvaluatedConfig(model=model, data=MockConfig(), tokenizer=tokenizer)


if __name__ == "__main__":
    front_door(main)
