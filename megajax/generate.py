"""Generate text: `python -m megajax.generate --run=RUN --prompt=TEXT`."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from megajax.command_line.parser import PROCESS_FLAGS, REPLICA_FLAGS, Flag, front_door, parse, replica_problems
from megajax.config.class_references import resolve
from megajax.config.config_files import Source
from megajax.config.errors import ConfigError, Problem
from megajax.inference.config import GenerationConfig
from megajax.inference.sampling_settings import Sampling, sampling_flags, sampling_of
from megajax.interop.weights.origin import MODEL_FLAGS, generation_config, origin_of
from megajax.processes.identity import find_identity
from megajax.processes.ray_cluster import RayPool
from megajax.processes.worker_pools import deferred_interrupts, in_order, parts_of
from megajax.processes.xla_options import set_process

DESCRIPTION = """Generate text with the model of a run or of a Hugging Face folder, with a key-value cache.

  python -m megajax.generate --run=runs/a --prompt='Once upon a time' --max-tokens=100
  python -m megajax.generate --hf=DIR --adapter=DIR --chat --temperature=0.7
  python -m megajax.generate --run=runs/a --prompts=FILE --output=answers.jsonl --temperature=0
  python -m megajax.generate --run=runs/a --prompts=FILE --output=answers.jsonl --ray=auto --replicas=16

The flags after --stats control sampling and the end of an answer. docs/generate.md describes the file formats."""

FLAGS = (
    *MODEL_FLAGS,
    Flag("prompt", str | None, help="a text to continue"),
    Flag("image", tuple[Path, ...], (), help="with --prompt: PNG or JPEG files, first or at each <image> in it"),
    Flag("prompts", Path | None, help="a file with one prompt per line, or .jsonl with prompt or messages"),
    Flag("output", Path | None, help="with --prompts: a .jsonl file of answers; resumes where it stopped. Default: the "
         "terminal"),
    Flag("chat", help="chat with the model, using its chat template"),
    Flag("stats", help="print counts and speed at the end"),
    *sampling_flags(),
    *REPLICA_FLAGS,
    *PROCESS_FLAGS,
)  # fmt: skip


class GenerateCommand(NamedTuple):
    """What a command line asks for."""

    flags: Mapping[str, Any]
    config: GenerationConfig
    sampling: Sampling
    prompts: Sequence[Any] | None


def main(argv: list[str]) -> int:
    """Parse the command line, then import jax, load the model and generate."""
    inputs = read(argv)
    flags, config = inputs.flags, inputs.config
    if flags["ray"] is not None:
        answer_on_ray(argv, inputs)
        return 0
    set_process(config.xla)
    start, finish = (resolve(f"megajax.processes.start:{name}") for name in ("start", "finish"))
    equal = {name: flags[name] for name in ("run", "hf", "adapter", "ignore", "prompts", "chat")}
    start(patience=flags["init_timeout"], identity=partial(find_identity, config, equal))
    # Compiled programs that the log does not record are deleted at the next start.
    with (
        resolve("megajax.inference.processes.group:Processes")() as processes,
        resolve("megajax.job.compile_log:CompileLog")(lambda message: None),
    ):
        loaded, engine = open_engine(inputs)
        if processes.first:
            processes.lead(engine.device)
            answer(session_of(inputs, loaded, engine), flags, inputs.prompts, config.inference.image_fit)
        else:
            processes.follow(engine.device)
    processes.close()
    finish()
    return 0


def read(argv: list[str]) -> GenerateCommand:
    """The settings and prompts of a command line."""
    command = parse(argv, verb="generate", flags=FLAGS, description=DESCRIPTION, root=GenerationConfig, base=base)
    flags, config = command.flags, command.config
    sampling = sampling_of(flags)
    prompts = (
        resolve("megajax.inference.prompt_and_answer_files:read_prompts")(flags["prompts"])
        if flags["prompts"]
        else None
    )
    # Do not compile for more rows than requests.
    rows = min(config.inference.rows, len(prompts or [1]) * max(sampling.choices(), sampling.beams))
    config = replace(config, inference=replace(config.inference, rows=rows))
    return GenerateCommand(flags, config, sampling, prompts)


def open_engine(inputs: GenerateCommand) -> tuple[Any, Any]:
    """The loaded model and its engine, in each process."""
    resolve("megajax.job.start.compile_cache:use_cache")(inputs.config.xla)
    loaded = resolve("megajax.interop.loading:load")(inputs.config, *origin_of(inputs.flags))
    return loaded, resolve("megajax.interop.loading:start_engine")(loaded, queue=inputs.config.inference.rows)


def session_of(inputs: GenerateCommand, loaded: Any, engine: Any) -> Any:
    """What answers prompts with a loaded model."""
    session = resolve("megajax.inference.terminal:Session")
    return session(engine, loaded.tokenizer, loaded.conversation, inputs.sampling, loaded.where)


def answer_on_ray(argv: list[str], inputs: GenerateCommand) -> None:
    """Let replicas on a Ray cluster answer parts of the prompts."""
    flags, words = inputs.flags, tuple(argv)
    # As a script, this module has a name that means another one to the replicas.
    find_keys, find_answers = (resolve(f"megajax.generate:{name}") for name in ("keys_of_prompts", "answers_of_part"))
    progress = resolve("megajax.tasks.evaluate_command:TaskProgress")(visible=flags["output"] is not None)
    progress.start("prompts")
    pool = RayPool(flags["ray"], flags["replicas"], flags["replica_gpus"])
    with deferred_interrupts() as handle_pending, pool:
        ((_, keys),) = in_order(pool, [(None, (find_keys, words))], handle_pending)

        def answers(first: int) -> Iterator[Any]:
            parts = parts_of(first, len(keys), pool.workers, inputs.config.inference.rows)
            for _, part in in_order(pool, [(None, (find_answers, words, *part)) for part in parts], handle_pending):
                yield from part

        show = resolve("megajax.inference.terminal:Screen")().write
        write = resolve("megajax.inference.prompt_and_answer_files:write_answers")
        write(flags["output"], inputs.sampling.n, keys, answers, show, progress)
    progress.clear()


@cache
def replica(argv: tuple[str, ...]) -> tuple[Any, Any]:
    """In a process of the cluster: the session of a command line and its requests."""
    inputs = read(list(argv))
    set_process(inputs.config.xla)
    resolve("megajax.job.compile_log:CompileLog")(lambda message: None).__enter__()  # as long as the process lives
    session = session_of(inputs, *open_engine(inputs))
    return session, session.requests(inputs.prompts)


def keys_of_prompts(argv: tuple[str, ...]) -> list[str]:
    """In a replica: as in `AnswerFile`. Raises UserError for a prompt that cannot be answered."""
    session, requests = replica(argv)
    return session.keys(requests)


def answers_of_part(argv: tuple[str, ...], first: int, last: int) -> list[Any]:
    """In a replica: the answers to the prompts from `first` to `last` - 1."""
    session, requests = replica(argv)
    return list(session.complete(requests[first:last]))


def answer(session: Any, flags: Mapping[str, Any], prompts: Sequence[Any] | None, image_fit: str) -> None:
    """Answer what the flags ask for. image_fit: as in `InferenceConfig`."""
    if flags["chat"]:
        session.chat(input, live=sys.stdin.isatty())
    elif prompts is not None:
        progress = resolve("megajax.tasks.evaluate_command:TaskProgress")(visible=flags["output"] is not None)
        progress.start("prompts")
        session.answer_all(prompts, flags["output"], progress)
        progress.clear()
    else:
        session.answer(flags["prompt"], flags["image"], image_fit)
    if flags["stats"]:
        print(session.statistics(), file=sys.stderr)


def base(flags: Mapping[str, Any]) -> Source:
    """The settings of the model. Raises ConfigError for missing or contradictory flags."""
    actions = [name for name in ("prompt", "prompts", "chat") if flags[name] not in (None, False)]
    problems = []
    if len(actions) != 1:
        message = f"--{' and --'.join(actions)} are given" if actions else "there is nothing to generate"
        problems.append(Problem("--prompt", message, "give one of --prompt=TEXT, --prompts=FILE and --chat"))
    if flags["image"] and flags["prompt"] is None:
        problems.append(Problem("--image", "needs --prompt=TEXT"))
    if flags["output"] is not None and flags["prompts"] is None:
        problems.append(Problem("--output", "needs --prompts=FILE"))
    sampling = sampling_of(flags)
    for name, value in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if value is not None and flags["output"] is None:
            problems.append(Problem(f"--{name.replace('_', '-')}", "is only written to files", "set --output as well"))
    problems += replica_problems(flags)
    if flags["ray"] is not None and flags["prompts"] is None:
        problems.append(Problem("--ray", "needs the prompts of a file", "set --prompts=FILE, or remove --ray"))
    if flags["ray"] is not None and flags["stats"]:
        problems.append(Problem("--stats", "counts the steps of one engine, but --ray starts several"))
    if flags["chat"] and sampling.choices() > 1:
        problems.append(Problem("--chat", f"a turn has one answer, but {sampling.choices()} are requested"))
    if problems:
        raise ConfigError(problems, "command line")
    name, reading = origin_of(flags)
    return generation_config(name, GenerationConfig, reading)


if __name__ == "__main__":
    front_door(main)
