"""Write a config file from a Megatron-LM command line: `python -m megajax.tools.megatron_args -- --num-layers 24 …`."""

import json
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from megajax.command_line import front_door
from megajax.config.errors import ConfigError, UserError
from megajax.config.nearest import did_you_mean
from megajax.tools.config_source import python_source
from megajax.tools.flags import UNKNOWN, Word, spellings
from megajax.tools.megatron_flags import FLAGS, SCRIPTS, Converted, convert
from megajax.tools.shell import Command, read_script

USAGE = """python -m megajax.tools.megatron_args [options] -- --num-layers 24 …       the flags themselves
python -m megajax.tools.megatron_args [options] SCRIPT.sh [ARGUMENTS]      a shell script, read and not run
python -m megajax.tools.megatron_args [options] FILE.yaml                  a file of flags and values (or .json)

Writes a config file from a Megatron-LM command line, with Megatron-LM's defaults where a flag is not given. What became
of each flag is told on the error output; what cannot be had is refused, and ends the tool with code 2.

  --output=FILE.py      write it there; without it, to the standard output
  --force               write over a file that is there
  --partial             write it although flags are refused, without what they ask for
  --define=NAME=VALUE   a variable of the script that comes from outside; may be repeated
"""


@dataclass
class Options:
    """What the tool itself was told."""

    output: Path | None = None
    force: bool = False
    partial: bool = False
    defined: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Training:
    """The command of a script that trains, and what its launcher says."""

    script: str
    words: tuple[Word, ...]
    devices: int | None = None
    """Processes, one for each GPU, where torchrun is told both counts."""


def main(argv: list[str]) -> int:
    """Convert, report, write.

    Raises:
        UserError: for what the user has to change, flags that are refused among it.
    """
    if not argv or {"-h", "--help"} & set(argv[: argv.index("--")] if "--" in argv else argv):
        print(USAGE)
        return 0
    options, rest = _options(argv)
    training, source = _training(rest, options)
    name = Path(training.script).name
    if name.startswith("pretrain_") and name not in SCRIPTS:
        raise UserError(f"{source}: {name} trains another kind of model. This version reads {', '.join(SCRIPTS)}")
    made = convert(training.words, script=name, devices=training.devices)
    print("\n".join(_report(made)), file=sys.stderr)
    if made.problems or made.config is None:
        raise ConfigError(made.problems, source)
    if made.refused and not options.partial:
        count = f"{len(made.refused)} flag{'s' * (len(made.refused) > 1)}"
        raise UserError(f"{source}: {count} refused, see above. --partial writes the config without what they ask for.")
    text = python_source(made.config, _title(training, source, made), made.written)
    if options.output is None:
        print(text, end="")
        return 0
    if options.output.exists() and not options.force:
        raise UserError(f"{options.output} is there already: give --force to write over it, or another --output")
    try:
        options.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output={options.output} cannot be written: {error.strerror}") from error
    print(f"wrote {options.output}: look at it by python -m megajax.train --config={options.output} --print-config",
          file=sys.stderr)  # fmt: skip
    return 0


def _options(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """The tool's own flags, and what follows them."""
    options, rest = Options(), list(argv)
    while rest and rest[0].startswith("--") and rest[0] != "--":
        name, equals, value = rest.pop(0)[2:].partition("=")
        if name in ("output", "define") and not equals:
            if not rest:
                raise UserError(f"--{name} needs a value: --{name}=…")
            value = rest.pop(0)
        match name:
            case "output":
                options.output = Path(value)
            case "define":
                key, _, text = value.partition("=")
                options.defined[key] = text
            case "force" | "partial":
                if equals:
                    raise UserError(f"--{name} takes no value, got {value}")
                setattr(options, name, True)
            case _:
                hint = did_you_mean(name, ("output", "define", "force", "partial"))
                raise UserError(
                    f"--{name} is no flag of this tool{hint and f': {hint}'}\nMegatron-LM's own flags follow --"
                )
    return options, rest


def _training(rest: Sequence[str], options: Options) -> tuple[Training, str]:
    """The command that trains, and where it was read."""
    if not rest:
        raise UserError(f"nothing to convert.\n{USAGE}")
    if rest[0] == "--":
        words = tuple(Word(text) for text in rest[1:])
        return as_training(words) or Training("", words), "the command line"
    path = Path(rest[0])
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if path.suffix in (".yaml", ".yml", ".json"):
        return Training("", tuple(_file_words(path, text))), str(path)
    try:
        commands = read_script(text, arguments=rest[1:], defined=options.defined)
    except UserError as error:
        raise UserError(f"{path}, {error}") from error
    return find_training(commands, str(path)), str(path)


def find_training(commands: Sequence[Command], place: str) -> Training:
    """The command that runs a Python file with flags, pretrain_*.py before others.

    Raises:
        UserError: none, or several.
    """
    for command in commands:
        if command.words[0].text.startswith("--"):
            what = f"line {command.line}: {command.words[0].text} belongs to no command"
            raise UserError(f"{place}, {what}: the line before has a comment, or no \\ at its very end")
    trainings = [training for command in commands if (training := as_training(command.words)) is not None]
    trainings = [one for one in trainings if any(word.text.startswith("--") for word in one.words)] or trainings
    named = [one for one in trainings if one.script.rpartition("/")[2].startswith("pretrain")] or trainings
    if not named:
        raise UserError(f"{place}: no command runs a Python file, such as torchrun … pretrain_gpt.py --num-layers …")
    if len(named) > 1:
        scripts = ", ".join(f"{one.script} ({one.words[0].place if one.words else 'without flags'})" for one in named)
        raise UserError(f"{place}: several commands train: {scripts}. Leave one of them in the script.")
    return named[0]


def as_training(words: Sequence[Word]) -> Training | None:
    """`[launcher …] FILE.py [flags …]`, or None for another command."""
    place = next((number for number, word in enumerate(words) if word.text.endswith(".py")), None)
    if place is None:
        return None
    counts = {}
    texts = [text for word in words[:place] for text in word.text.split("=")]
    for name, value in pairwise(texts):
        if name.startswith("-") and value.isdigit():
            counts[name.strip("-").replace("-", "_")] = int(value)
    each, nodes = counts.get("nproc_per_node"), counts.get("nnodes", 1)
    return Training(words[place].text, tuple(words[place + 1 :]), each and each * nodes)


def _file_words(path: Path, text: str) -> Iterator[Word]:
    """{"--num-layers": 24, "--swiglu": true} as words; what lies under MODEL_ARGS where there is such a key."""
    import yaml

    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {error}") from error
    flags = content.get("MODEL_ARGS", content) if isinstance(content, Mapping) else None
    if not isinstance(flags, Mapping):
        raise UserError(f"{path}: expected flags and values, such as num-layers: 24")
    known = spellings(FLAGS.values())
    for name, value in flags.items():
        if value is None or value is False:
            continue
        plain = str(name).lstrip("-")
        row = known.get(plain.replace("_", "-"))
        yield Word(f"--{plain}")
        if value is not True:
            for item in value if isinstance(value, list) else [value]:
                text = _written(item)
                # Several values may stand in one text, as on a command line.
                yield from map(Word, shlex.split(text) if row is not None and row.kind is list else [text])


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        raise UserError(f"expected one value or a list, got {value}")
    return str(value)


def _report(made: Converted) -> Iterator[str]:
    """What became of each flag, a paragraph for each kind."""
    parts = (
        ("mapped", [f"{flag} -> {settings}" for flag, settings in made.mapped if settings]),
        ("to know", [f"{flag}: {text}" for flag, text in made.remarks]),
        ("without effect beside the other flags", list(made.idle)),
        ("unnecessary", [f"{flag}: {reason}" for flag, reason in made.unnecessary]),
        ("refused", [f"{flag}: {reason}" for flag, reason in made.refused]),
    )
    for title, lines in parts:
        # Before there is a config, what became of most flags is not known.
        if lines and (made.config is not None or title == "refused"):
            yield from (f"{title}:", *(f"  {line}" for line in lines))


def _title(training: Training, source: str, made: Converted) -> str:
    """The text at the top of the file: where it comes from, and the command with its variables replaced."""
    words = [shlex.quote(word.text) for word in training.words if UNKNOWN not in word.text]
    flags: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not flags:
            flags.append([])
        flags[-1].append(word)
    # A flag and its values are not torn apart.
    joined = [" ".join(group).replace(" ", "\N{NO-BREAK SPACE}") for group in flags]
    lines = textwrap.wrap(" ".join(joined), 110, break_long_words=False, break_on_hyphens=False)
    command = "\n".join(f"    {line}" for line in lines).replace("\N{NO-BREAK SPACE}", " ")
    script = f" of {training.script}" if training.script else ""
    left = "".join(f"\nLeft out: {flag}: {reason}" for flag, reason in made.refused)
    return f"A run of Megatron-LM's, from {source}.\n\nThe flags{script}:\n{command}\n{left}{chr(10) * bool(left)}"


if __name__ == "__main__":
    front_door(main)
