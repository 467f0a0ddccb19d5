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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megajax.command_line.corrections import corrected, corrections
from megajax.command_line.devices import all_devices, count_processes, device_problems, use_devices, use_processes
from megajax.command_line.help import WIDTH, common_help, entry_text, settings_help
from megajax.command_line.read_arguments import read_arguments
from megajax.config import field_types
from megajax.config.call_with_timeout import OUTPUT_SECONDS, with_time_limit
from megajax.config.compose import read_value
from megajax.config.dump import default_leaves, flatten, to_yaml
from megajax.config.errors import ConfigError, Problem, UserError, first_line
from megajax.config.files import ROOT, Source, advised, assembled, find, functions_of, read, root_type, split_source
from megajax.config.hints import did_you_mean
from megajax.config.optional_packages import remedy
from megajax.config.overrides import Mark, leaves, patch_of, plain_name
from megajax.config.removed import removed
from megajax.mesh.processes.world import (
    LOCAL_COUNT,
    StartError,
    process_index,
)


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of one verb, not a setting of the config, such as --skip-train; with dashes or underscores."""

    name: str
    kind: Any = bool
    """An annotation, as of a config field."""
    default: Any = None
    """The value if the flag is not given; for bool, None means False."""
    help: str = ""
    required: bool = False


PROCESS_FLAGS = (
    Flag("coordinator", str | None, help="HOST:PORT of process 0 for the other processes, without a launcher"),
    Flag("num-processes", int | None, help="number of processes of the run"),
    Flag("process-id", int | None, help="number of this process, from 0"),
    Flag("init-timeout", float, 300.0, help="seconds within which all processes must connect"),
)
"""Flags of verbs that run in several processes."""
REPLICA_FLAGS = (
    Flag("ray", str | None, help="spread the work over a Ray cluster whose machines share files: the address of its "
         "head, or auto"),
    Flag("replicas", int | None, help="with --ray: copies of the model; default: as many as the cluster has GPUs for, "
         "without GPUs one for each machine"),
    Flag("replica-gpus", int, 1, help="GPUs of each copy on a cluster with GPUs"),
)  # fmt: skip
"""Flags of verbs that spread their work over replicas of a model on a Ray cluster."""

ALL = "all"
"""The topic of --help=all; no part of a config has this name."""

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
    lists = [plain_name(flag.name) for flag in flags if field_types.lists(flag.kind)]
    settings, problems, repeated = read_arguments(argv, lists)
    print("".join(repeated if process_index() == 0 else ()), end="", file=sys.stderr)
    own_flags = {plain_name(flag.name): flag for flag in flags}
    source = _pop_flag(settings, "config")
    devices = None if "devices" in own_flags else _pop_flag(settings, "devices")
    requests = {name: settings.pop(name) for name in ("help", *["print_config"] * with_config) if name in settings}
    values = {name: settings.pop(name) for name in own_flags if name in settings}
    if "help" in requests:
        arguments = f"{'--config=FILE[:function]' if base is None else '[--flag=value ...]'} [--setting=value ...]"
        arguments = arguments if with_config else "[--flag=value ...]"
        head = [f"python -m megajax.{verb} {arguments}\n", *[f"{description.strip()}\n"] * bool(description)]
        topic = requests["help"] if isinstance(requests["help"], str) else ""
        lines = _help(head, flags, root if with_config else None, common, source, topic, with_file=base is None)
        _show("\n".join(lines))
    problems += device_problems(devices)
    if not problems:
        use_devices(devices)
    answers, new_problems = _flag_values(own_flags, values)
    problems += new_problems or use_processes(answers)
    count = all_devices(devices)
    if count_devices is not None and not new_problems:
        count, new_problems = count_devices(answers)
        problems += new_problems
    if not with_config:
        names = [*own_flags, "devices", "help"]
        foreign = corrections(settings, names, config=False)
        unknown = [name for name in settings if name not in foreign]
        problems += [_unknown_flag(name, names) for name in unknown]
        problems += foreign.values()
    takes_file = with_config and base is None
    if source is not None and not takes_file:
        problems.append(Problem("--config", f"{verb} takes no config"))
    if problems and not takes_file:
        raise ConfigError(problems, "command line")
    if not with_config:
        return Command(None, devices, answers)
    try:
        file = None if base is None else base(answers)
    except UserError as error:
        raise _joined(error, corrections(settings, [*own_flags, "devices"]).values()) from None
    config, file, new_problems = _configured(source, settings, count, own_flags, root, file)
    places = ([file.name] if file else []) + ["command line"] * bool(settings or problems or file is None)
    if file is None or new_problems or problems:
        error = ConfigError([*new_problems, *problems], " + ".join(places))
        if hint is not None and config is not None and count is not None:
            processes = count_processes() or 1
            error = hint(error, config, [count // processes] * processes)
        # A verb with virtual devices does not need a config for this machine's devices.
        raise error if count_devices else advised(error, source, verb)
    sources = _sources(config, file, patch_of(settings.items()))
    if "print_config" in requests:
        _show(to_yaml(config, sources))
    return Command(config, devices, answers, sources, source)


def replica_problems(flags: Mapping[str, Any]) -> list[Problem]:
    """Problems of `REPLICA_FLAGS`."""
    if flags["ray"] is None:
        is_set = flags["replicas"] is not None or flags["replica_gpus"] != 1
        return [Problem("--replicas", "has no meaning without --ray=ADDRESS")] if is_set else []
    problems = [
        Problem(f"--{name.replace('_', '-')}", f"must be at least 1, got {flags[name]}")
        for name in ("replicas", "replica_gpus")
        if flags[name] is not None and flags[name] < 1
    ]
    if count_processes() != 1:
        hint = "each replica is one process, which Ray starts: remove the launcher and the flags of several processes"
        problems.append(Problem("--ray", "is given to one of several processes", hint))
    return problems


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

    def format_warning(message: Warning | str, category: type, filename: str, lineno: int, line: Any = None) -> str:
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


def _sources(config: Any, file: Source, command_settings: Any) -> dict[str, str]:
    """Non-default setting -> the source that set it last."""
    defaults = default_leaves(config)
    layers = [*file.layers, ("command line", command_settings)]
    layer_names = [
        (label, None if layer_settings is None else set(leaves(layer_settings))) for label, layer_settings in layers
    ]
    sources = {}
    for name, value in flatten(config).items():
        if name in defaults and defaults[name] == value:
            continue
        parts = name.split(".")
        prefixes = {".".join(parts[: end + 1]) for end in range(len(parts))}
        for label, layer_settings in layer_names:
            if layer_settings is None or layer_settings & prefixes:
                sources[name] = label
    return sources


def _help(
    head: Sequence[str],
    own_flags: Sequence[Flag],
    root: str | type | None,
    common: Sequence[str],
    source: str | None,
    topic: str,
    *,
    with_file: bool = True,
) -> list[str]:
    """The lines of --help: `head`, flags, and settings of `root` with the values of the config at `source`.

    topic: a part of the settings, or "all". with_file: whether the verb takes --config.
    """
    cls = None if root is None else root_type(root)
    config = None
    if root and source:
        config, _ = assembled(read(source, root), root, {})
    if cls and topic not in ("", ALL):
        return [settings_help(cls, config, topic)]
    flags = [("devices=cpu:8", "", "eight CPU devices instead of jax's default; gpu requires GPUs")]
    flags = [] if any(flag.name == "devices" for flag in own_flags) else flags
    help_text = "this text; all: every setting; or one part of the settings: --help=parallel" if cls else "this text"
    flags += [("help[=all|PART]" if cls else "help", "", help_text)]
    if cls:
        text = "a path, or the name of a file in configs/ or of a shipped config: gpt3.py; gpt3.py:NAME calls NAME()"
        if names := functions_of(find(split_source(source)[0])) if source else []:
            text += f". This one has {', '.join(names)}"
        flags = [*[("config=FILE", "", text)] * with_file, *flags]
        flags += [("print-config", "", "print the whole config with the source of each setting, and exit")]
    for flag in own_flags:
        suffix = " (must be given)" if flag.required else "" if flag.default in (None, False) else f" = {flag.default}"
        flags.append((flag.name.replace("_", "-"), field_types.kind_text(flag.kind) + suffix, flag.help))
    lines = [*head, *(entry_text(*flag) for flag in flags)]
    if cls and (topic == ALL or not common):
        lines += ["\nsettings\n", settings_help(cls, config)]
    elif cls:
        source_text = f"of {source}" if source else "defaults; with --config=FILE, those of the file"
        lines += [f"\nsettings used most (values: {source_text})\n", common_help(cls, config, common)]
        parts = ", ".join(name for name, kind in field_types.hints(cls).items() if field_types.holds_configs(kind))
        lines += ["", textwrap.fill(f"--help=all shows every setting, --help=PART one part: {parts}.", WIDTH)]
    return lines


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
