"""Write a config file from a Megatron-LM command line: `python -m megajax.tools.megatron_args -- --num-layers 24 …`."""

import shlex
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from megajax.command_line.parser import front_door
from megajax.config import field_types
from megajax.config.class_references import resolve
from megajax.config.errors import ConfigError, UserError
from megajax.config.hints import did_you_mean
from megajax.config.overrides import join
from megajax.config.read_limits import read_file
from megajax.interop.megatron.flags.reading import UNKNOWN, Word, spellings
from megajax.interop.megatron.flags.translate import FLAGS, SCRIPTS, Converted, convert
from megajax.interop.megatron.shell.interpreter import read_script
from megajax.interop.megatron.shell.state import Command
from megajax.layers.block.config import BlockConfig
from megajax.storage.write_errors import write_fault
from megajax.tools.json_output import first_word
from megajax.training.run_config import RunConfig

USAGE = """python -m megajax.tools.megatron_args [options] -- --num-layers 24 …       the flags themselves
python -m megajax.tools.megatron_args [options] SCRIPT.sh [ARGUMENTS] [-- --num-layers 24 …]
                                                                           a shell script, read and not run, and
                                                                           flags to add to those of its command
python -m megajax.tools.megatron_args [options] FILE.yaml                  a file of flags and values (or .json)

Writes a config file from a Megatron-LM command line, with Megatron-LM's defaults for flags that are not given. Reports
the result for each flag on standard error. Unsupported flags are refused: nothing is written, and the exit code is 2.

  --output=FILE.py      write the config to this file; default: standard output
  --force               overwrite an existing file
  --partial             write the config even if flags are refused, without their effect
  --define=NAME=VALUE   a variable that the script takes from its environment; may be repeated
  --assume=LINE=ANSWER  true or false, for a condition of the script that is not known; may be repeated
  --command=NUMBER      which one to convert if the script trains several times
"""


FOREIGN = {
    "pretrain_mimo.py": "models of several encoders (MIMO) are not part of this version",
    "mimo/train.py": "models of several encoders (MIMO) are not part of this version",
    "multimodal/train.py": "its images, prompts and models are its own; pretrain_vlm.py is the nearest",
    "train_rl.py": "reinforcement learning has configs of its own here, see docs/tuning.md",
    "modelopt/finetune.py": "quantization-aware and distilled fine-tuning of modelopt are not part of this version",
    "detxoify_lm/finetune_gpt.py": "it is a training script of its own",
    "tasks/main.py": "it evaluates a task: use megajax.evaluate",
}
"""Other training scripts of Megatron-LM (the ends of their paths), and why they are refused."""


@dataclass
class Options:
    """The tool's own options."""

    output: Path | None = None
    force: bool = False
    partial: bool = False
    defined: dict[str, str] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    """Line of a script -> what to assume of the condition there."""
    command: int | None = None


@dataclass(frozen=True, slots=True)
class Training:
    """The training command of a script, and the number of devices that its launcher starts."""

    script: str
    words: tuple[Word, ...]
    devices: int | None = None
    """Processes, one for each GPU; None: torchrun's flags do not give the count."""
    notes: tuple[str, ...] = ()
    """What was assumed to read the script."""


def main(argv: list[str]) -> int:
    """Convert, report, write.

    Raises:
        UserError: for anything the user has to change, including refused flags.
    """
    if not argv or {"-h", "--help"} & set(argv[: argv.index("--")] if "--" in argv else argv):
        print(USAGE)
        return 0
    options, rest = _options(argv)
    training, source = _training(rest, options)
    name = Path(training.script).name
    if training.notes:
        print("script:", *(f"  {note}" for note in training.notes), sep="\n", file=sys.stderr)
    if reason := _foreign(training.script):
        raise UserError(f"{source}: {training.script} is not supported: {reason}. This tool reads {', '.join(SCRIPTS)}")
    converted = convert(training.words, script=name, devices=training.devices)
    print("\n".join(_report(converted)), file=sys.stderr)
    if converted.problems or converted.config is None:
        raise ConfigError(converted.problems, source)
    if converted.refused and not options.partial:
        count = f"{len(converted.refused)} flag{'s' * (len(converted.refused) > 1)}"
        raise UserError(f"{source}: {count} refused, see above. --partial writes the config without their effect.")
    text = python_source(converted.config, _title(training, source, converted), converted.flag_settings)
    if options.output is None:
        print(text, end="")
        return 0
    if options.output.exists() and not options.force:
        raise UserError(f"{options.output} already exists: give --force to overwrite it, or another --output")
    try:
        options.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output={options.output} cannot be written: {write_fault(error)}") from error
    print(f"wrote {options.output}: check it with python -m megajax.train --config={options.output} --print-config",
          file=sys.stderr)  # fmt: skip
    return 0


def _options(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """The tool's own options, and the arguments after them."""
    options, rest = Options(), list(argv)
    while rest and rest[0].startswith("--") and rest[0] != "--":
        name, equals, value = rest.pop(0)[2:].partition("=")
        if name in ("output", "define", "assume", "command") and not equals:
            if not rest:
                raise UserError(f"--{name} needs a value: --{name}=…")
            value = rest.pop(0)
        match name:
            case "output":
                options.output = Path(value)
            case "define":
                key, _, text = value.partition("=")
                options.defined[key] = text
            case "assume":
                key, _, text = value.partition("=")
                options.answers[key] = text
            case "command":
                if not value.isdigit():
                    raise UserError(f"--command={value}: expected a whole number")
                options.command = int(value)
            case "force" | "partial":
                if equals:
                    raise UserError(f"--{name} takes no value, got {value}")
                setattr(options, name, True)
            case _:
                hint = did_you_mean(name, ("output", "define", "assume", "command", "force", "partial"))
                raise UserError(
                    f"--{name} is not a flag of this tool{hint and f': {hint}'}\nGive Megatron-LM's flags after --"
                )
    return options, rest


def _training(rest: Sequence[str], options: Options) -> tuple[Training, str]:
    """The training command, and its source for messages."""
    if not rest:
        raise UserError(f"nothing to convert.\n{USAGE}")
    if rest[0] == "--":
        argv = tuple(Word(text) for text in rest[1:])
        return as_training(argv) or Training("", argv), "the command line"
    path = first_word([*rest], "a script, a file of flags, or --", USAGE)
    try:
        text = read_file(path, pipes=True).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if path.suffix in (".yaml", ".yml", ".json"):
        return Training("", tuple(_file_words(path))), str(path)
    arguments, flags = list(rest[1:]), []
    if "--" in arguments:
        place = arguments.index("--")
        arguments, flags = arguments[:place], arguments[place + 1 :]
    try:
        script = read_script(text, path=str(path), arguments=rest[1:], defined=options.defined, answers=options.answers)
    except UserError as error:
        raise UserError(f"{path}, {error}") from error
    try:
        training = find_training(script.commands, str(path), options.command)
    except UserError as error:
        raise UserError("\n".join([str(error), *(f"  {note}" for note in script.notes)])) from error
    words = (*training.words, *map(Word, flags))
    return replace(training, words=words, notes=script.notes), str(path)


def find_training(commands: Sequence[Command], place: str, number: int | None = None) -> Training:
    """The command that runs a Python file with flags, pretrain_*.py before others.

    number: which one of several, from 1.

    Raises:
        UserError: no such command, or several without a number.
    """
    for command in commands:
        if command.words[0].text.startswith("--"):
            message = f"{command.place}: {command.words[0].text} belongs to no command"
            raise UserError(f"{place}, {message}: the line before it has a comment, or does not end in \\")
    runs = [training for command in commands if (training := as_training(command.words)) is not None]
    runs = [run for run in runs if any(word.text.startswith("--") for word in run.words)] or runs
    runs = [run for run in runs if run.script.rpartition("/")[2].startswith("pretrain")] or runs
    if not runs:
        raise UserError(f"{place}: no command runs a Python file, such as torchrun … pretrain_gpt.py --num-layers …")
    if number is not None and number in range(1, len(runs) + 1):
        return runs[number - 1]
    if len(runs) > 1 or number is not None:
        scripts = ", ".join(
            f"{count}: {run.script} ({run.words[0].place if run.words else 'without flags'})"
            for count, run in enumerate(runs, 1)
        )
        raise UserError(f"{place}: the commands that train are {scripts}. Choose one with --command=NUMBER.")
    return runs[0]


def _foreign(script: str) -> str:
    """Why a Python file is not one that this tool reads; '' if it is, or if it is not known."""
    path = Path(script)
    if path.name.startswith("pretrain_") and path.name not in SCRIPTS:
        return FOREIGN.get(path.name, "its model is not part of this version")
    return next((reason for end, reason in FOREIGN.items() if f"/{script}".endswith(f"/{end}")), "")


def as_training(argv: Sequence[Word]) -> Training | None:
    """`[launcher …] FILE.py [flags …]`, or None for another command."""
    place = next((number for number, word in enumerate(argv) if word.text.endswith(".py")), None)
    if place is None:
        return None
    counts = {}
    texts = [text for word in argv[:place] for text in word.text.split("=")]
    for name, value in pairwise(texts):
        if name.startswith("-") and value.isdigit():
            counts[name.strip("-").replace("-", "_")] = int(value)
    per_node, nodes = counts.get("nproc_per_node"), counts.get("nnodes", 1)
    return Training(argv[place].text, tuple(argv[place + 1 :]), per_node and per_node * nodes)


def _file_words(path: Path) -> Iterator[Word]:
    """{"--num-layers": 24, "--swiglu": true} as words. If the file has a key MODEL_ARGS, only the flags under it."""
    content = resolve("megajax.config.yaml_and_json:parse")(path, str(path))  # by name: yaml may not be installed
    flags = content.get("MODEL_ARGS", content)
    if not isinstance(flags, Mapping):
        raise UserError(f"{path}: expected flags and values, such as num-layers: 24")
    rows = spellings(FLAGS.values())
    for name, value in flags.items():
        if value is None or value is False:
            continue
        plain = str(name).lstrip("-")
        row = rows.get(plain.replace("_", "-"))
        yield Word(f"--{plain}")
        if value is not True:
            for item in value if isinstance(value, list) else [value]:
                text = _written(item)
                # A string may hold several values, as on a command line.
                yield from map(Word, shlex.split(text) if row is not None and row.kind is list else [text])


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        raise UserError(f"expected one value or a list, got {value}")
    return str(value)


def _report(converted: Converted) -> Iterator[str]:
    """The result for each flag, a paragraph for each kind."""
    parts = (
        ("mapped", [f"{flag} -> {settings}" for flag, settings in converted.mapped if settings]),
        ("notes", [f"{flag}: {text}" for flag, text in converted.remarks]),
        ("without effect given the other flags", list(converted.idle)),
        ("unnecessary", [f"{flag}: {reason}" for flag, reason in converted.unnecessary]),
        ("refused", [f"{flag}: {reason}" for flag, reason in converted.refused]),
    )
    for title, lines in parts:
        # Without a config, the result for most flags is unknown.
        if lines and (converted.config is not None or title == "refused"):
            yield from (f"{title}:", *(f"  {line}" for line in lines))


def _title(training: Training, source: str, converted: Converted) -> str:
    """The docstring of the file: its source, and the command with its variables replaced."""
    texts = [shlex.quote(word.text) for word in training.words if UNKNOWN not in word.text]
    flags: list[list[str]] = []
    for text in texts:
        if text.startswith("--") or not flags:
            flags.append([])
        flags[-1].append(text)
    # Keep a flag and its values on one line.
    joined = [" ".join(group).replace(" ", "\N{NO-BREAK SPACE}") for group in flags]
    lines = textwrap.wrap(" ".join(joined), 110, break_long_words=False, break_on_hyphens=False)
    command = "\n".join(f"    {line}" for line in lines).replace("\N{NO-BREAK SPACE}", " ")
    script = f" of {training.script}" if training.script else ""
    notes = "".join(f"\nLeft out: {flag}: {reason}" for flag, reason in converted.refused)
    return f"A Megatron-LM run, from {source}.\n\nThe flags{script}:\n{command}\n{notes}{chr(10) * bool(notes)}"


WIDTH = 120
STEP = "    "


def python_source(config: RunConfig, title: str, always_written: Collection[str] = ()) -> str:
    """A config file whose config() returns an equal config.

    title: the text at its top; always_written: dotted settings that are written even if they equal their defaults.
    """
    writer = _Writer(always_written)
    body = writer.expression(config, "", len(STEP + "return "), STEP)
    head = title.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    blocks = "".join(f"{STEP}{name} = {text}\n" for name, text in writer.blocks.values())
    imports = "from pathlib import Path\n\n" * writer.names_path + "import megajax as mj"
    return f'"""{head}"""\n\n{imports}\n\n\ndef config() -> mj.RunConfig:\n{blocks}{STEP}return {body}\n'


class _Writer:
    def __init__(self, always_written: Collection[str]):
        self.always_written = always_written
        self.names_path = False
        self.blocks: dict[BlockConfig, tuple[str, str]] = {}
        """Each distinct block is a variable before the config: (name, expression)."""

    def expression(self, value: Any, setting: str, column: int, indent: str) -> str:
        """The value as Python, from `column` of the current line; further lines begin with `indent`."""
        if isinstance(value, BlockConfig):
            if value not in self.blocks:
                name = f"block_{len(self.blocks) + 1}" if self.blocks else "block"
                self.blocks[value] = name, ""
                self.blocks[value] = name, self._config(value, setting, len(f"{STEP}{name} = "), STEP)
            return self.blocks[value][0]
        if field_types.is_config(value):
            return self._config(value, setting, column, indent)
        if isinstance(value, tuple):
            parts = {str(place): ("", item) for place, item in enumerate(value)}
            return self._wrapped("(", parts, ")", setting, column, indent)
        if isinstance(value, Mapping):
            parts = {key: (f"{_text(key)}: ", item) for key, item in value.items()}
            return self._wrapped("{", parts, "}", setting, column, indent)
        if isinstance(value, Path):
            self.names_path = True
            return f"Path({_text(str(value))})"
        if isinstance(value, str):
            return _text(value)
        return f"{value:_}" if type(value) is int and abs(value) >= 10_000 else repr(value)

    def _config(self, value: Any, setting: str, column: int, indent: str) -> str:
        parts = {}
        for entry in fields(value):
            field_value, default, field_setting = (
                getattr(value, entry.name),
                field_types.default(entry),
                join(setting, entry.name),
            )
            is_written = any(f"{name}.".startswith(f"{field_setting}.") for name in self.always_written)
            if default is MISSING or field_value != default or is_written:
                parts[entry.name] = (f"{entry.name}=", field_value)
        return self._wrapped(f"mj.{type(value).__name__}(", parts, ")", setting, column, indent)

    def _wrapped(
        self, start: str, parts: Mapping[str, tuple[str, Any]], end: str, setting: str, column: int, indent: str
    ) -> str:
        """parts: name of a setting -> text before its value, and the value."""
        inner = indent + STEP
        items = [
            label + self.expression(value, join(setting, name), len(inner + label), inner)
            for name, (label, value) in parts.items()
        ]
        trailing_comma = "," if start == "(" and len(items) == 1 else ""
        line = f"{start}{', '.join(items)}{trailing_comma}{end}"
        return line if "\n" not in line and column + len(line) < WIDTH else _over_lines(start, items, end, indent)


def _over_lines(start: str, items: Collection[str], end: str, indent: str) -> str:
    return f"{start}\n" + "".join(f"{indent}{STEP}{item},\n" for item in items) + indent + end


def _text(value: str) -> str:
    """A string literal in double quotes, as the formatter writes it."""
    text = repr(value)
    return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in value else text


if __name__ == "__main__":
    front_door(main)
