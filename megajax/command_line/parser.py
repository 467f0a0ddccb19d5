"""The command line of every verb: `python -m megajax.VERB --config=FILE --dotted.setting=value ...`."""

import contextlib
import faulthandler
import os
import select
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megajax.command_line.arguments_to_settings import read_arguments
from megajax.command_line.device_flags import all_devices, count_processes, device_problems, use_devices, use_processes
from megajax.command_line.foreign_flags import corrected, corrections
from megajax.command_line.help import WIDTH, common_help, entry_text, settings_help
from megajax.config import field_types
from megajax.config.bounds import Count, Positive
from megajax.config.call_with_timeout import OUTPUT_SECONDS, with_time_limit
from megajax.config.compose import read_value
from megajax.config.config_files import (
    ROOT,
    Source,
    advised,
    assembled,
    find,
    functions_of,
    read,
    root_type,
    split_source,
)
from megajax.config.dump import sources_of, to_yaml
from megajax.config.errors import ConfigError, Problem, UserError, first_line
from megajax.config.hints import did_you_mean
from megajax.config.optional_packages import remedy
from megajax.config.paths_and_store_urls import store_url, url_problem
from megajax.config.removed import removed
from megajax.config.settings_tree import Mark, patch_of, plain_name
from megajax.processes.world import (
    LOCAL_COUNT,
    StartError,
    process_index,
)


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of one verb, not a setting of the config, such as --skip-train; with dashes or underscores."""

    name: str
    kind: object = bool
    """An annotation, as of a config field."""
    default: object = None
    """The value if the flag is not given; for bool, None means False."""
    help: str = ""
    required: bool = False


PROCESS_FLAGS = (
    Flag("coordinator", str | None, help="HOST:PORT of process 0 for the other processes, without a launcher"),
    Flag("num-processes", int | None, help="number of processes of the run"),
    Flag("process-id", int | None, help="number of this process, from 0"),
    Flag("init-timeout", Positive, 300.0, help="seconds within which all processes must connect"),
)
"""Flags of verbs that run in several processes."""
REPLICA_FLAGS = (
    Flag("ray", str | None, help="spread the work over a Ray cluster whose machines share files: the address of its "
         "head, or auto"),
    Flag("replicas", Count | None, help="with --ray: copies of the model; default: as many as the cluster has GPUs "
         "for, without GPUs one for each machine"),
    Flag("replica-gpus", Count, 1, help="GPUs of each copy on a cluster with GPUs"),
)  # fmt: skip
"""Flags of verbs that spread their work over replicas of a model on a Ray cluster."""

ALL = "all"
"""The topic of --help=all; no part of a config has this name."""

DEVICES = ("devices=cpu:8", "eight CPU devices instead of jax's default; gpu requires GPUs")
CONFIG_FLAGS = (
    (
        "help[=all|PART]",
        "this text; all: every setting; or one part of the settings: --help=parallel; or a class of it: "
        "--help=PART.CLASS",
    ),
    ("print-config", "print the whole config with the source of each setting, and exit"),
)
"""Flag and text in --help of verbs with a config."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell reports for a program that SIGINT ended."""
OUTPUT_CLOSED = 141
"""Exit code if the reader of the output is gone, as a shell reports for a program that SIGPIPE ended."""


@dataclass(frozen=True, slots=True)
class Command:
    """A parsed command line: the checked config (None for verbs without), devices, the verb's flags, and sources."""

    config: Any
    devices: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)  # by name, with underscores
    sources: Mapping[str, str] = field(default_factory=dict)  # non-default setting -> file or "command line"
    source: str | None = None  # the value of --config


def parse(
    argv: Sequence[str],
    *,
    verb: str,
    flags: Sequence[Flag] = (),
    with_config: bool = True,
    description: str = "",
    root: str | type = ROOT,
    common: Sequence[str] = (),
    count_devices: Callable[[Mapping[str, Any]], tuple[int | None, list[Problem]]] | None = None,
    base: Callable[[Mapping[str, Any]], Source] | None = None,
    hint: Callable[[ConfigError, Any, Sequence[int]], ConfigError] | None = None,
) -> Command:
    """Parse a command line (without the program's name) before jax is imported, and set up --devices for jax.

    --help and --print-config print and exit with code 0. `with_config=False` is for verbs without a config. `common`:
    settings that --help shows; --help=all shows all. `count_devices` is for verbs with their own flag --devices, whose
    devices need not exist: it returns their number and problems from the flags' values, and jax is not set up. `base`
    is for verbs that find their config without --config: it returns the config from the flags' values. `hint` adds
    advice to an error, from the config and the devices of each process. Raises ConfigError with all problems of the
    file and the command line together.
    """
    own_flags = {plain_name(flag.name): flag for flag in flags}
    lists = [name for name, flag in own_flags.items() if field_types.lists(flag.kind)]
    settings, problems, repeated = read_arguments(argv, lists)
    print("".join(repeated * (process_index() == 0)), end="", file=sys.stderr)
    takes_file = with_config and base is None
    source = _pop_flag(settings, "config")
    devices = None if "devices" in own_flags else _pop_flag(settings, "devices")
    requests = {name: settings.pop(name) for name in ("help", *["print_config"] * with_config) if name in settings}
    values = {name: settings.pop(name) for name in own_flags if name in settings}
    if "help" in requests:
        head = _usage(verb, description, with_config=with_config, takes_file=takes_file)
        _show(
            "\n".join(_help(head, flags, root if with_config else None, common, source, requests["help"], takes_file))
        )
    problems = _set_up_devices(devices, problems)
    answers, count, new_problems = _flag_answers(own_flags, values, devices, count_devices)
    problems += new_problems
    if not takes_file:
        problems += _surplus(settings, own_flags, with_config=with_config)
        problems += [Problem("--config", f"{verb} takes no config")] * (source is not None)
        _demand_none(problems)
    if not with_config:
        return Command(None, devices, answers)
    file = _file_of_verb(base, answers, settings, own_flags)
    config, file, new_problems = _configured(source, settings, count, own_flags, root, file)
    if file is None or new_problems or problems:
        places = [*(place.name for place in [file] if place)]
        places += ["command line"] * bool(settings or problems or file is None)
        error = _with_hint(ConfigError([*new_problems, *problems], " + ".join(places)), hint, config, count)
        # A verb with virtual devices does not need a config for this machine's devices.
        raise error if count_devices else advised(error, source, verb)
    sources = sources_of(config, [*file.layers, ("command line", patch_of(settings.items()))])
    if "print_config" in requests:
        _show(to_yaml(config, sources))
    return Command(config, devices, answers, sources, source)


def _set_up_devices(devices: str | None, problems: Sequence[Problem]) -> list[Problem]:
    """The problems with those of --devices; without any, sets up jax's devices."""
    problems = [*problems, *device_problems(devices)]
    if not problems:
        use_devices(devices)
    return problems


def _flag_answers(
    own_flags: Mapping[str, Flag],
    values: Mapping[str, Any],
    devices: str | None,
    count_devices: Callable[[Mapping[str, Any]], tuple[int | None, list[Problem]]] | None,
) -> tuple[dict[str, Any], int | None, list[Problem]]:
    """The values of the verb's flags, the number of devices, and problems of both. Connects the processes."""
    answers, problems = _flag_values(own_flags, values)
    if problems:
        return answers, all_devices(devices), problems
    use_processes(answers)
    return answers, *((all_devices(devices), []) if count_devices is None else count_devices(answers))


def _surplus(settings: Mapping[str, Any], own_flags: Iterable[str], *, with_config: bool) -> list[Problem]:
    """Problems of settings that a verb without a config does not have."""
    if with_config:
        return []
    names = [*own_flags, "devices", "help"]
    foreign = corrections(settings, names, config=False)
    return [*(_unknown_flag(name, names) for name in settings if name not in foreign), *foreign.values()]


def _with_hint(
    error: ConfigError,
    hint: Callable[[ConfigError, Any, Sequence[int]], ConfigError] | None,
    config: Any,
    count: int | None,
) -> ConfigError:
    """The error with the verb's advice, if the config could be built and the number of devices is known."""
    if hint is None or config is None or count is None:
        return error
    processes = count_processes() or 1
    return hint(error, config, [count // processes] * processes)


def _demand_none(problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigError(problems, "command line")


def _file_of_verb(
    base: Callable[[Mapping[str, Any]], Source] | None,
    answers: Mapping[str, Any],
    settings: Mapping[str, Any],
    own_flags: Iterable[str],
) -> Source | None:
    """The config that the verb finds by its flags. Raises UserError with the problems of the settings too."""
    try:
        return None if base is None else base(answers)
    except UserError as error:
        raise _joined(error, corrections(settings, [*own_flags, "devices"]).values()) from None


def replica_problems(flags: Mapping[str, Any]) -> list[Problem]:
    """Problems of `REPLICA_FLAGS`."""
    if flags["ray"] is None:
        is_set = flags["replicas"] is not None or flags["replica_gpus"] != 1
        return [Problem("--replicas", "has no meaning without --ray=ADDRESS")] if is_set else []
    hint = "each replica is one process, which Ray starts: remove the launcher and the flags of several processes"
    return [Problem("--ray", "is given to one of several processes", hint)] if count_processes() != 1 else []


def front_door(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a verb's main(argv) and exit with its return value (None is 0), or with 2 after printing a UserError.

    A crash in compiled code, such as SIGSEGV or SIGBUS, prints the Python stacks.

    Unhandled Ctrl-C prints one line and exits with 130. If the reader of the output is gone (`... | head`), the program
    exits silently with 141, as other programs do. On an error, one of several processes exits at once: see
    `end_at_once`.
    """
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # standard error without a file
        faulthandler.enable()
    warnings.formatwarning = _short_warnings(warnings.formatwarning)  # ty: ignore[invalid-assignment]
    try:
        code = main(sys.argv[1:]) or 0
        sys.stdout.flush()
    except SystemExit:
        raise
    except BaseException as raised:
        if isinstance(raised, BrokenPipeError) and _output_closed():
            end(OUTPUT_CLOSED)
        error = _explained(raised)
        end_at_once(error)
        if not isinstance(error, UserError | KeyboardInterrupt):
            raise
        report(error) if isinstance(error, UserError) else print("interrupted", file=sys.stderr)
        if process_index() != 0 and isinstance(error, ConfigError):
            # Process 0 reports the error. Wait, because a supervisor ends process 0 as soon as this one exits.
            time.sleep(1.0)
        code = _code(error)
    end(code)


def _short_warnings(default: Callable[..., str]) -> Callable[..., str]:
    """A formatter of warnings that omits the line of code for MegaJAX's own warnings."""
    package = str(Path(__file__).parents[1])

    def format_warning(
        message: Warning | str, category: type, filename: str, lineno: int, line: str | None = None
    ) -> str:
        if category is UserWarning and filename.startswith(package):
            return f"warning: {message}\n"
        return default(message, category, filename, lineno, line)

    return format_warning


def end(code: int) -> NoReturn:
    """Exit. One of several processes does not wait for the distributed runtime, because the others exit as well."""
    if _may_have_peers():
        _flush()
        os._exit(code)
    sys.exit(code)


def _explained(error: BaseException) -> BaseException:
    """The error; a missing package becomes a UserError that says how to install it."""
    text = remedy(error, sys.orig_argv) if isinstance(error, ModuleNotFoundError) else None
    return error if text is None else UserError(text)


def end_at_once(error: BaseException) -> None:
    """In one of several processes, print the error and exit without leaving `with` blocks. Nothing in a single process.

    Otherwise it would wait for the others, and they for it: for a checkpoint that never completes, and five minutes for
    the shutdown of the distributed runtime.
    """
    if not _may_have_peers():
        return
    # Standard error may be a pipe that nobody reads.
    say = partial(report, error) if isinstance(error, UserError) else partial(traceback.print_exception, error)
    with_time_limit(say, OUTPUT_SECONDS)
    with_time_limit(_flush, OUTPUT_SECONDS)
    if process_index() == 0 and not isinstance(error, StartError):
        # The exit of process 0 ends the others: let them print their errors first.
        time.sleep(1.0)
    os._exit(_code(error))


def _may_have_peers() -> bool:
    """Whether this process may be connected with others, which requires jax."""
    return "jax" in sys.modules and count_processes() not in (1, None)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return error.code if isinstance(error, UserError) else 1


def report(error: UserError) -> None:
    """Print the error for the user, in full by process 0.

    Other processes print one line, because process 0 may not have it, but none of settings, which the launcher shows.
    """
    name, text = f"process {(rank := process_index())}: ", first_line(error)
    if isinstance(error, StartError) and error.reported:
        return
    if rank == 0:
        print(f"\n{error}\n", file=sys.stderr)
    elif not (isinstance(error, ConfigError) and os.environ.get(LOCAL_COUNT)):
        print(name + text.removeprefix(name), file=sys.stderr)


def _pop_flag(settings: dict[str, Any], name: str) -> str | None:
    value = settings.pop(name, None)
    return "" if value is Mark.BARE else None if value is None else str(value)


def _unknown_flag(name: str, known: Iterable[str]) -> Problem:
    message = removed(name)
    return Problem(f"--{name}", message or "no such flag", "" if message else did_you_mean(name, known))


def _flag_values(flags: Mapping[str, Flag], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    answers, problems = {}, []
    for name, flag in flags.items():
        answers[name] = bool(flag.default) if flag.kind is bool else flag.default
        if name in values:
            answers[name], value_problems = read_value(values[name], flag.kind, flag.name)
            problems += [replace(problem, setting=f"--{problem.setting}") for problem in value_problems]
        elif flag.required:
            problems.append(Problem(f"--{flag.name}", "must be given", field_types.kind_text(flag.kind)))
    return answers, problems


def _configured(
    source: str | None,
    settings: Mapping[str, Any],
    devices: int | None,
    own_flags: Iterable[str],
    root: str | type,
    file: Source | None = None,
) -> tuple[Any, Source | None, list[Problem]]:
    if not source and not file:
        hint = "a file, or a shipped config: --config=quickstart.py"
        misspelt = [name for name in settings if did_you_mean(name, ["config"])]
        others = {name: value for name, value in settings.items() if name not in misspelt}
        foreign = corrections(others, [*own_flags, "devices"])
        misspellings = [Problem(f"--{name}", "no such flag or setting", "did you mean --config?") for name in misspelt]
        return None, None, [*misspellings, *foreign.values(), Problem("--config", "must be given", hint)]
    try:
        file = file or read(str(source), root)
    except ConfigError as error:
        return None, Source(error.place or str(source), None), list(error.problems)
    except UserError as error:
        message, _, hint = str(error).partition("\n")
        return None, None, [Problem("--config", message, hint.strip())]
    config, problems = assembled(file, root, patch_of(settings.items()), devices)
    flags = [*own_flags, "config", "devices", "print_config", "help"]
    return config, file, corrected(problems, settings, flags, file)


def _joined(error: UserError, problems: Iterable[Problem]) -> UserError:
    """The error with further problems of the command line."""
    problems, (setting, _, message) = tuple(problems), str(error).partition(": ")
    causes = error.problems if isinstance(error, ConfigError) else (Problem(setting, message),)
    return ConfigError([*causes, *problems], "command line") if problems else error


def _usage(verb: str, description: str, *, with_config: bool, takes_file: bool) -> list[str]:
    """The first lines of --help."""
    first = "--config=FILE[:function]" if takes_file else "[--flag=value ...]"
    text = f"{first} [--setting=value ...]" if with_config else first
    return [f"python -m megajax.{verb} {text}\n", *[f"{description.strip()}\n"] * bool(description)]


def _help(
    head: Sequence[str],
    own_flags: Sequence[Flag],
    root: str | type | None,
    common: Sequence[str],
    source: str | None,
    request: str | Mark,
    takes_file: bool,
) -> list[str]:
    """The lines of --help: `head`, flags, and settings of `root` with the values of the config at `source`.

    request: a part of the settings, or "all", or the mark of --help alone. takes_file: whether the verb takes --config.
    """
    if root is None:
        return [*head, *_flag_lines(own_flags, [("help", "this text")])]
    cls, config, topic = root_type(root), None, request if isinstance(request, str) else ""
    if source:
        config, _ = assembled(read(source, root), root, {})
    if topic not in ("", ALL):
        return [settings_help(cls, config, topic)]
    files = [("config=FILE", _file_text(source))] * takes_file
    lines = [*head, *_flag_lines(own_flags, CONFIG_FLAGS, files)]
    if topic == ALL or not common:
        return [*lines, "\nsettings\n", settings_help(cls, config)]
    source_text = f"of {source}" if source else "defaults; with --config=FILE, those of the file"
    lines += [f"\nsettings used most (values: {source_text})\n", common_help(cls, config, common)]
    parts = ", ".join(name for name, kind in field_types.hints(cls).items() if field_types.holds_configs(kind))
    return [*lines, "", textwrap.fill(f"--help=all shows every setting, --help=PART one part: {parts}.", WIDTH)]


def _file_text(source: str | None) -> str:
    """The text of --config, with the functions of the present file."""
    text = "a path, or the name of a file in configs/ or of a shipped config: gpt3.py; gpt3.py:NAME calls NAME()"
    names = functions_of(find(split_source(source)[0])) if source else []
    return text + f". This one has {', '.join(names)}" * bool(names)


def _flag_lines(
    own_flags: Sequence[Flag], general: Sequence[tuple[str, str]], files: Sequence[tuple[str, str]] = ()
) -> Iterator[str]:
    """The entries of the flags that all verbs have, with --devices unless the verb has its own, and of its own."""
    own_devices = any(flag.name == "devices" for flag in own_flags)
    for name, text in (*files, *[DEVICES] * (not own_devices), *general):
        yield entry_text(name, "", text)
    for flag in own_flags:
        suffix = " (must be given)" if flag.required else "" if flag.default in (None, False) else f" = {flag.default}"
        yield entry_text(flag.name.replace("_", "-"), field_types.help_text(flag.kind) + suffix, flag.help)


def _show(text: str) -> NoReturn:
    """Print on process 0 and exit."""
    if process_index() == 0:
        try:
            print(text.rstrip("\n"), flush=True)
        except BrokenPipeError:  # `... --help | head`
            _output_closed()
    sys.exit(0)


def _output_closed() -> bool:
    """Whether the reader of standard output is gone; if so, the buffered output is dropped."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    unread = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return unread


def first_word(argv: list[str], expected: str, usage: str, *, stored: bool = False) -> Path:
    """The path that is the first argument. Raises UserError if it is a flag or a URL. stored: accept URLs of stores."""
    if argv[0].startswith("-"):
        raise UserError(f"the first argument must be {expected}, got {argv[0]}\n{usage.splitlines()[0]}")
    if not (stored and store_url(argv[0])) and (problem := url_problem(argv[0])) is not None:
        raise UserError("\n".join(problem))
    return Path(argv[0])
