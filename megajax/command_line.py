"""The command line of every verb: `python -m megajax.VERB --config=FILE --dotted.setting=value ...`."""

import contextlib
import faulthandler
import os
import re
import select
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import megajax.config.schema as schema
from megajax.config.coerce import Text
from megajax.config.dump import default_leaves, flatten, to_yaml
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.files import ROOT, Source, assembled, find, functions_of, read, root_type, split_source
from megajax.config.help import WIDTH, common_help, entry_text, settings_help
from megajax.config.missing import remedy
from megajax.config.nearest import did_you_mean
from megajax.config.patch import Additions, Mark, leaves, patch_of, plain_name, setting
from megajax.config.tree import read_value
from megajax.config.twin import advised
from megajax.mesh.world import COORDINATOR, COUNT, INDEX, RANKS, StartError, find_world, process_index


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of one verb beside the config's settings, such as --skip-train; written with dashes or underscores."""

    name: str
    kind: Any = bool
    """An annotation as for a field of a config."""
    default: Any = None
    """The value where the flag is not given; a bool's is False."""
    help: str = ""
    required: bool = False


PROCESS_FLAGS = (
    Flag("coordinator", str | None, help="HOST:PORT at which process 0 awaits the others, where no launcher says it"),
    Flag("num-processes", int | None, help="processes of the run"),
    Flag("process-id", int | None, help="which of them this is, from 0"),
    Flag("init-timeout", float, 300.0, help="seconds in which all processes must be there"),
)
"""Flags of verbs that run in several processes at once."""

XLA, XLA_OPTIONS = "xla", "xla.options"
"""How single options of the compiler are written, and the setting that holds them."""

ALL = "all"
"""What --help=all asks for: no config has a part of that name."""

INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended: what a shell gives for one ended by the signal SIGINT."""
UNREAD = 141
"""Exit code of a program that printed to nobody: what a shell gives for one ended by the signal SIGPIPE."""


@dataclass(frozen=True, slots=True)
class Command:
    """What was asked for: the checked config (None for verbs without), devices, the verb's flags, who set what."""

    config: Any
    devices: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)  # by name, with underscores
    sources: Mapping[str, str] = field(default_factory=dict)  # non-default setting -> file or "command line"
    source: str | None = None  # what --config was given


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
    """Read a command line (without the program's name) before jax is imported, and set up --devices for it.

    --help and --print-config print and end the program with code 0. `with_config=False` is for verbs without a
    config. `common` are the settings that --help shows; --help=all shows all of them. A verb whose own flags have a
    --devices, of devices that need not exist, gives `count_devices`: from its flags' values, how many they are and what
    is wrong with them; nothing is set up for jax then. A verb that has a config without --config gives `base`: from its
    flags' values, what settings are over. `hint` adds advice to an error, from the config and the devices of each
    process. Raises ConfigError that lists everything wrong with the file and the command line together.
    """
    given, problems = _tokens(argv)
    own = {plain_name(flag.name): flag for flag in flags}
    source = _taken(given, "config")
    devices = None if "devices" in own else _taken(given, "devices")
    asked = {name: given.pop(name) for name in ("help", *["print_config"] * with_config) if name in given}
    values = {name: given.pop(name) for name in own if name in given}
    if "help" in asked:
        arguments = f"{'--config=FILE[:function]' if base is None else '[--flag=value ...]'} [--setting=value ...]"
        arguments = arguments if with_config else "[--flag=value ...]"
        head = [f"python -m megajax.{verb} {arguments}\n", *[f"{description.strip()}\n"] * bool(description)]
        topic = asked["help"] if isinstance(asked["help"], str) else ""
        lines = _help(head, flags, root if with_config else None, common, source, topic, with_file=base is None)
        _show("\n".join(lines))
    problems += _device_problems(devices)
    if not problems:
        use_devices(devices)
    answers, wrong = _flag_values(own, values)
    problems += wrong or _use_processes(answers)
    count = _all_devices(devices)
    if count_devices is not None and not wrong:
        count, wrong = count_devices(answers)
        problems += wrong
    if not with_config:
        known = [*own, "devices", "help"]
        problems += [Problem(f"--{name}", "no such flag", did_you_mean(name, known)) for name in given]
        if source is not None:
            problems.append(Problem("--config", f"{verb} takes no config"))
        if problems:
            raise ConfigError(problems, "command line")
        return Command(None, devices, answers)
    file = None if base is None else base(_sound(answers, source, verb, problems))
    config, file, wrong = _configured(source, given, count, own, root, file)
    places = ([file.name] if file else []) + ["command line"] * bool(given or problems or file is None)
    if file is None or wrong or problems:
        error = ConfigError([*wrong, *problems], " + ".join(places))
        if hint is not None and config is not None and count is not None:
            processes = _process_count() or 1
            error = hint(error, config, [count // processes] * processes)
        # A verb that counts virtual devices has no use for a config of this machine's size.
        raise error if count_devices else advised(error, source, verb)
    sources = _sources(config, file, patch_of(given.items()))
    if "print_config" in asked:
        _show(to_yaml(config, sources))
    return Command(config, devices, answers, sources, source)


def _sound(answers: dict[str, Any], source: str | None, verb: str, problems: list[Problem]) -> dict[str, Any]:
    """The values of the flags of a verb that finds its config by them. Raises ConfigError if they are wrong."""
    wrong = [*problems, *[Problem("--config", f"{verb} takes no config")] * (source is not None)]
    if wrong:
        raise ConfigError(wrong, "command line")
    return answers


def front_door(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a verb's main(argv) and end the program with what it returns (None is 0); with 2 on a UserError, shown.

    A crash in compiled code, such as SIGSEGV or SIGBUS, shows the Python stacks.

    Ctrl-C that the verb does not handle itself ends it with one line and 130. A verb whose output nobody reads any more
    (`... | head`) ends without a word and with 141, as other programs do. One of several processes ends at once on an
    error: see `end_at_once`.
    """
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # a standard error without a file
        faulthandler.enable()
    warnings.formatwarning = _worded(warnings.formatwarning)  # ty: ignore[invalid-assignment]
    try:
        code = main(sys.argv[1:]) or 0
        sys.stdout.flush()
    except SystemExit:
        raise
    except BaseException as raised:
        if isinstance(raised, BrokenPipeError) and _unread():
            end(UNREAD)
        error = _explained(raised)
        end_at_once(error)
        if not isinstance(error, UserError | KeyboardInterrupt):
            raise
        report(error) if isinstance(error, UserError) else print("interrupted", file=sys.stderr)
        if process_index() != 0 and isinstance(error, ConfigError):
            # Process 0 says it for all; whoever watches over them ends it as soon as this one is gone.
            time.sleep(1.0)
        code = _code(error)
    end(code)


def _worded(otherwise: Callable[..., str]) -> Callable[..., str]:
    """Formats warnings; those of MegaJAX are for people, who need no line of its code."""
    here = str(Path(__file__).parent)

    def format_warning(message: Warning | str, category: type, filename: str, lineno: int, line: Any = None) -> str:
        if category is UserWarning and filename.startswith(here):
            return f"warning: {message}\n"
        return otherwise(message, category, filename, lineno, line)

    return format_warning


def end(code: int) -> NoReturn:
    """End the program. One of several processes does not wait for the runtime's end: the others have parted as well."""
    if _among_others():
        _flush()
        os._exit(code)
    sys.exit(code)


def _explained(error: BaseException) -> BaseException:
    """A package that is not installed is for the user to install; all else stays what it is."""
    text = remedy(error, sys.orig_argv) if isinstance(error, ModuleNotFoundError) else None
    return error if text is None else UserError(text)


def end_at_once(error: BaseException) -> None:
    """Does nothing in a process on its own. One of several says what happened and is gone, its `with` blocks not left.

    It would wait there for the others, and they for it: for a checkpoint that will never be whole, and for five minutes
    in the runtime's own end.
    """
    if not _among_others():
        return
    if isinstance(error, UserError):
        report(error)
    else:
        traceback.print_exception(error)
    _flush()
    if process_index() == 0 and not isinstance(error, StartError):
        # The others are ended by its disappearance: what they have to say of the same thing comes first.
        time.sleep(1.0)
    os._exit(_code(error))


def _among_others() -> bool:
    """Whether this process may be connected with others: only jax does that."""
    return "jax" in sys.modules and _process_count() not in (1, None)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return error.code if isinstance(error, UserError) else 1


def report(error: UserError) -> None:
    """Print the error for the person at the terminal: once, by process 0.

    Where only another process may have met it (its disk, its data), that process says so in one line.
    """
    rank = process_index()
    if rank == 0:
        print(f"\n{error}\n", file=sys.stderr)
    elif not isinstance(error, ConfigError) and not (isinstance(error, StartError) and error.reported):
        print(f"process {rank}: {str(error).splitlines()[0]}", file=sys.stderr)


def use_devices(devices: str | None) -> None:
    """Set what jax reads at its import: cpu:8 is eight CPU devices, gpu insists on GPUs, None leaves it to jax."""
    if not any(Path("/dev").glob("nvidia*")):
        # The plugin of the extra aot is there without a GPU, and would print pages on missing CUDA libraries.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if devices is None:
        return
    count = _cpu_count(devices)
    os.environ["JAX_PLATFORMS"] = "cuda" if count is None else "cpu"
    if count is not None:
        os.environ["JAX_NUM_CPU_DEVICES"] = str(count)


def _tokens(argv: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Name -> value, the last where one is repeated. A name takes the next word unless that is a name as well."""
    given: dict[str, Any] = {}
    problems = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            word = "--help"
        if not re.match(r"--[A-Za-z]", word):
            hint = f"did you mean -{word}?" if re.match(r"-[A-Za-z]", word) else "settings are written --name=value"
            problems.append(Problem(word or "''", "unexpected word", hint))
            continue
        name, value = setting(word)
        if value is Mark.BARE and words and not words[0].startswith("--"):
            value = Text(words.pop(0))
        if name == XLA:
            problems += _add_options(given, value)
            continue
        if name in given and process_index() == 0:
            print(f"warning: --{name} is given more than once; the last counts ({_word(value)})", file=sys.stderr)
        given.pop(name, None)
        given[name] = value
    return given, problems


def _add_options(given: dict[str, Any], value: Any) -> list[Problem]:
    """Take --xla=name=value,name=value, given again and again, or as it stands in the environment."""
    written = "" if value is Mark.BARE else value.strip()
    pairs = [part.removeprefix("--").partition("=") for part in re.split(r"[,\s]+(?=(?:--)?\w+=)", written)]
    if not all(name and equals for name, equals, _ in pairs):
        what = f"expected name=value, got {_word(value)!r}"
        return [Problem(f"--{XLA}", what, "e.g. --xla=xla_gpu_enable_triton_gemm=false; docs/xla.md")]
    # Text with nothing in it would be read as none.
    options = {name: Text(text) if text else "" for name, _, text in pairs}
    given[XLA_OPTIONS] = Additions({**given.get(XLA_OPTIONS, {}), **options})
    return []


def _word(value: Any) -> str:
    return "true" if value is Mark.BARE else str(value)


def _taken(given: dict[str, Any], name: str) -> str | None:
    value = given.pop(name, None)
    return "" if value is Mark.BARE else None if value is None else str(value)


def _cpu_count(devices: str) -> int | None:
    match = re.fullmatch(r"cpu(?::([1-9]\d{0,3}))?", devices)
    return int(match[1] or 1) if match else None


def _all_devices(devices: str | None) -> int | None:
    """Devices of all processes together, where both counts are known."""
    here, processes = _cpu_count(devices or ""), _process_count()
    return here * processes if here and processes else None


def _process_count() -> int | None:
    """Processes of this run; None where a launcher gives this one a number but not how many there are."""
    try:
        world = find_world()
    except StartError:
        return None
    if world is None:
        launched = any(os.environ.get(name) for name in RANKS) and not _said_to_be_one()
        return None if launched else 1
    return world.count


def _said_to_be_one() -> bool:
    return "1" in (
        os.environ.get(COUNT),
        os.environ.get("SLURM_STEP_NUM_TASKS"),
        os.environ.get("OMPI_COMM_WORLD_SIZE"),
    )


def _use_processes(answers: Mapping[str, Any]) -> list[Problem]:
    """Put the flags into the environment, where whoever asks finds them. Raises StartError."""
    names = {"coordinator": COORDINATOR, "num_processes": COUNT, "process_id": INDEX}
    if not names.keys() <= answers.keys():
        return []
    os.environ.update({name: str(answers[flag]) for flag, name in names.items() if answers[flag] is not None})
    find_world()
    wait = answers["init_timeout"]
    return [] if wait > 0 else [Problem("--init-timeout", f"must be above 0 seconds, got {wait:g}")]


def _device_problems(devices: str | None) -> list[Problem]:
    if devices is None or devices in ("gpu", "cuda"):
        return []
    count = _cpu_count(devices)
    if count is None:
        hint = "without it, jax takes what it finds"
        if re.fullmatch(r"(gpu|cuda):.*", devices):
            hint = "choose among the GPUs with CUDA_VISIBLE_DEVICES, e.g. CUDA_VISIBLE_DEVICES=0,1"
        return [Problem("--devices", f"expected cpu:N (N from 1 to 9999), cpu or gpu, got {devices!r}", hint)]
    jax = sys.modules.get("jax")
    if jax is not None and jax.config.jax_num_cpu_devices != count:
        return [Problem("--devices", "jax is imported already, too late to choose devices", "start a new process")]
    return []


def _flag_values(own: Mapping[str, Flag], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    answers, problems = {}, []
    for name, flag in own.items():
        answers[name] = bool(flag.default) if flag.kind is bool else flag.default
        if name in given:
            answers[name], wrong = read_value(given[name], flag.kind, flag.name)
            problems += [replace(problem, setting=f"--{problem.setting}") for problem in wrong]
        elif flag.required:
            problems.append(Problem(f"--{flag.name}", "must be given", schema.words(flag.kind)))
    return answers, problems


def _configured(
    source: str | None,
    given: Mapping[str, Any],
    devices: int | None,
    own: Iterable[str],
    root: str | type,
    file: Source | None = None,
) -> tuple[Any, Source | None, list[Problem]]:
    if not source and not file:
        hint = "a file, or a shipped config: --config=quickstart.py"
        meant = [name for name in given if did_you_mean(name, ["config"])]
        wrong = [Problem(f"--{name}", "no such flag or setting", "did you mean --config?") for name in meant]
        return None, None, [*wrong, Problem("--config", "must be given", hint)]
    try:
        file = file or read(str(source), root)
    except ConfigError as error:
        return None, Source(error.place or str(source), None), list(error.problems)
    except UserError as error:
        what, _, hint = str(error).partition("\n")
        return None, None, [Problem("--config", what, hint.strip())]
    config, problems = assembled(file, root, patch_of(given.items()), devices)
    flags = [*own, "config", "devices", "print_config", "help"]
    return config, file, [_with_flag_hint(problem, given, flags) for problem in problems]


def _with_flag_hint(problem: Problem, given: Mapping[str, Any], flags: Sequence[str]) -> Problem:
    """A misspelt --skip-trian is near to a flag, not to a setting."""
    unknown = problem.message == "no such setting" and problem.setting in given and "." not in problem.setting
    near = did_you_mean(problem.setting, flags).replace("_", "-") if unknown else ""
    return Problem(f"--{problem.setting.replace('_', '-')}", "no such flag or setting", near) if near else problem


def _sources(config: Any, file: Source, given: Any) -> dict[str, str]:
    """Non-default setting -> who set it last."""
    defaults = default_leaves(config)
    layers = [*file.layers, ("command line", given)]
    named = [(label, None if settings is None else set(leaves(settings))) for label, settings in layers]
    sources = {}
    for name, value in flatten(config).items():
        if name in defaults and defaults[name] == value:
            continue
        parts = name.split(".")
        above = {".".join(parts[: end + 1]) for end in range(len(parts))}
        for label, settings in named:
            if settings is None or settings & above:
                sources[name] = label
    return sources


def _help(
    head: Sequence[str],
    own: Sequence[Flag],
    root: str | type | None,
    common: Sequence[str],
    source: str | None,
    topic: str,
    *,
    with_file: bool = True,
) -> list[str]:
    """Lines on flags below `head`, and on settings of `root` with the values of the config at `source`.

    topic: a part of the settings, or "all". with_file: the verb takes --config.
    """
    cls = None if root is None else root_type(root)
    config = None
    if root and source:
        config, _ = assembled(read(source, root), root, {})
    if cls and topic not in ("", ALL):
        return [settings_help(cls, config, topic)]
    flags = [("devices=cpu:8", "", "eight CPU devices instead of what jax finds; gpu insists on GPUs")]
    flags = [] if any(flag.name == "devices" for flag in own) else flags
    more = "this text; all: every setting; or one part of the settings: --help=parallel" if cls else "this text"
    flags += [("help[=all|PART]" if cls else "help", "", more)]
    if cls:
        text = "a path, or the name of a file in configs/ or of a shipped one: gpt3.py; gpt3.py:NAME calls NAME()"
        if names := functions_of(find(split_source(source)[0])) if source else []:
            text += f". This one has {', '.join(names)}"
        flags = [*[("config=FILE", "", text)] * with_file, *flags]
        flags += [("print-config", "", "print the whole config with the source of each setting, and stop")]
    for flag in own:
        after = " (must be given)" if flag.required else "" if flag.default in (None, False) else f" = {flag.default}"
        flags.append((flag.name.replace("_", "-"), schema.words(flag.kind) + after, flag.help))
    lines = [*head, *(entry_text(*flag) for flag in flags)]
    if cls and (topic == ALL or not common):
        lines += ["\nsettings\n", settings_help(cls, config)]
    elif cls:
        of = f"of {source}" if source else "defaults; with --config=FILE, those of the file"
        lines += [f"\nsettings used most (values: {of})\n", common_help(cls, config, common)]
        parts = ", ".join(name for name, kind in schema.hints(cls).items() if schema.holds_configs(kind))
        lines += ["", textwrap.fill(f"--help=all shows every setting, --help=PART one part: {parts}.", WIDTH)]
    return lines


def _show(text: str) -> NoReturn:
    """Print on process 0 and end the program."""
    if process_index() == 0:
        try:
            print(text.rstrip("\n"), flush=True)
        except BrokenPipeError:  # `... --help | head` has seen enough
            _unread()
    sys.exit(0)


def _unread() -> bool:
    """Whether nobody reads the standard output; if so, what is left of it is dropped."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    unread = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return unread
