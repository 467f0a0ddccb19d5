"""Write a config file from a Megatron-LM command line: `python -m megajax.interop.megatron.args -- --num-layers 24`."""

import shlex
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from megajax.command_line.parser import first_word, front_door
from megajax.config import field_types
from megajax.config.class_references import resolve
from megajax.config.errors import ConfigError, UserError
from megajax.config.hints import did_you_mean
from megajax.config.read_limits import read_file
from megajax.config.removed import removed
from megajax.config.settings_tree import join
from megajax.interop.megatron.expanded_commands import read_commands
from megajax.interop.megatron.flags.reading import spellings
from megajax.interop.megatron.flags.translate import FLAGS, SCRIPTS, Converted, convert
from megajax.interop.megatron.run_script import run_script
from megajax.interop.megatron.toy import toy_words
from megajax.layers.block.config import BlockConfig
from megajax.storage.write_errors import write_fault
from megajax.training.run_config import RunConfig

USAGE = """python -m megajax.interop.megatron.args [options] -- --num-layers 24 …     the flags themselves
python -m megajax.interop.megatron.args [options] COMMAND.txt [-- FLAGS]   a file with the expanded command, torchrun
                                                                           … pretrain_gpt.py --num-layers 24 …; - for
                                                                           standard input; flags to add
python -m megajax.interop.megatron.args [options] FILE.yaml                a file of flags and values (or .json)
python -m megajax.interop.megatron.args [options] --run-script SCRIPT.sh [ARGUMENTS] [-- FLAGS]
                                                                           a script of your own, which bash runs
                                                                           without starting its programs

Writes a config file from a Megatron-LM command line, with Megatron-LM's defaults for flags that are not given. Reports
the result for each flag on standard error. Unsupported flags are refused: nothing is written, and the exit code is 2.

  --output=FILE.py      write the config to this file; default: standard output
  --force               overwrite an existing file
  --partial             write the config even if flags are refused, without their effect
  --toy                 a twin for a laptop: small sizes, one device, 20 steps, generated data; the same kinds of layers
  --define=NAME=VALUE   a variable that the script takes from its environment; may be repeated
  --command=NUMBER      which one to convert if there are several that train
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
class ToolOptions:
    """The tool's own options."""

    output: Path | None = None
    force: bool = False
    partial: bool = False
    toy: bool = False
    defined: dict[str, str] = field(default_factory=dict)
    script: str | None = None
    command: int | None = None


@dataclass(frozen=True, slots=True)
class TrainingCommand:
    """A training command, and the number of devices that its launcher starts."""

    script: str
    words: tuple[str, ...]
    devices: int | None = None
    """Processes, one for each GPU; None: torchrun's flags do not give the count."""


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
    if reason := _foreign(training.script):
        raise UserError(f"{source}: {training.script} is not supported: {reason}. This tool reads {', '.join(SCRIPTS)}")
    if options.toy and name in ("pretrain_bert.py", "pretrain_t5.py"):
        raise UserError(
            f"{source}: {name} has no twin: its data is text. configs/bert.py and configs/t5.py have debug twins"
        )
    if options.toy:
        training = replace(training, words=toy_words(training.words), devices=1)
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


def _options(argv: Sequence[str]) -> tuple[ToolOptions, list[str]]:
    """The tool's own options, and the arguments after them."""
    options, rest = ToolOptions(), list(argv)
    while rest and rest[0].startswith("--") and rest[0] != "--":
        name, equals, value = rest.pop(0)[2:].partition("=")
        if name in ("output", "define", "command", "run-script") and not equals:
            if not rest:
                raise UserError(f"--{name} needs a value: --{name}=…")
            value = rest.pop(0)
        match name:
            case "output":
                options.output = Path(value)
            case "define":
                key, _, text = value.partition("=")
                if not (key.isidentifier() and key.isascii()):
                    raise UserError(f"--define={value}: expected NAME=VALUE")
                options.defined[key] = text
            case "run-script":
                options.script = value
                return options, rest
            case "command":
                if not value.isdigit():
                    raise UserError(f"--command={value}: expected a whole number")
                options.command = int(value)
            case "force" | "partial" | "toy":
                if equals:
                    raise UserError(f"--{name} takes no value, got {value}")
                setattr(options, name, True)
            case _:
                if sentence := removed(name):
                    raise UserError(f"--{name} {sentence}")
                hint = did_you_mean(name, ("output", "define", "command", "force", "partial", "run-script", "toy"))
                hint = hint and f": {hint}"
                raise UserError(f"--{name} is not a flag of this tool{hint}\nGive Megatron-LM's flags after --")
    return options, rest


def _training(rest: Sequence[str], options: ToolOptions) -> tuple[TrainingCommand, str]:
    """The training command, and its source for messages."""
    if rest[:1] == ["--"] and options.script is None:
        argv = tuple(rest[1:])
        return as_training(argv) or TrainingCommand("", argv), "the command line"
    words, flags = list(rest), []
    if "--" in words:
        place = words.index("--")
        words, flags = words[:place], words[place + 1 :]
    if options.script is not None:
        commands, source = _script_commands(Path(options.script), words, options.defined), options.script
    elif not words:
        raise UserError(f"nothing to convert.\n{USAGE}")
    elif len(words) > 1:
        files = shlex.join(words)
        raise UserError(f"expected one file, got {files}. A script is given by --run-script SCRIPT ARGUMENTS")
    else:
        path = Path("/dev/stdin") if words == ["-"] else first_word(words, "a file of commands or flags, or --", USAGE)
        source = "standard input" if words == ["-"] else str(path)
        if path.suffix in (".yaml", ".yml", ".json"):
            return TrainingCommand("", (*_file_words(path), *flags)), source
        try:
            commands = read_commands(_read(path, source).decode("utf-8"), source)
        except UnicodeError as error:
            raise UserError(f"{source} cannot be read: {error}") from error
    training = find_training(commands, source, options.command)
    return replace(training, words=(*training.words, *flags)), source


def _read(path: Path, source: str) -> bytes:
    try:
        return read_file(path, pipes=True)
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror}") from error


def _script_commands(script: Path, arguments: Sequence[str], defined: Mapping[str, str]) -> Sequence[Sequence[str]]:
    """The commands of a script that bash runs, with what it does and its messages on standard error."""
    text = _read(script, str(script))
    if b"\r\n" in text:
        raise UserError(f"{script} has line ends of Windows (CRLF): write it by dos2unix")
    print(f"running {script} by bash. Its builtins run: they can read your files and write in a temporary folder. "
          "Programs are not started.", file=sys.stderr)  # fmt: skip
    run = run_script(script, text, arguments, defined)
    if run.notes:
        print("messages of bash and the script:", *(f"  {note}" for note in run.notes), sep="\n", file=sys.stderr)
    return run.commands


def find_training(commands: Sequence[Sequence[str]], source: str, number: int | None = None) -> TrainingCommand:
    """The command that runs a Python file with flags, pretrain_*.py before others.

    number: which one of several, from 1.

    Raises:
        UserError: no such command, or several without a number.
    """
    if first := next((first for first, *_ in commands if first.startswith("--")), ""):
        message = "belongs to no command: the line before it has a comment, or does not end in \\"
        raise UserError(f"{source}: {first} {message}")
    runs = list(dict.fromkeys(training for command in commands if (training := as_training(command)) is not None))
    runs = [run for run in runs if any(word.startswith("--") for word in run.words)] or runs
    runs = [run for run in runs if run.script.rpartition("/")[2].startswith("pretrain")] or runs
    if not runs:
        raise UserError(f"{source}: no command runs a Python file, such as torchrun … pretrain_gpt.py --num-layers …")
    if number is not None and number in range(1, len(runs) + 1):
        return runs[number - 1]
    if len(runs) > 1 or number is not None:
        common = set(runs[0].words).intersection(*(run.words for run in runs[1:]))
        scripts = "".join(
            f"\n  {count}: {shlex.join([run.script, *(word for word in run.words if word not in common)])}"
            + (f" on {run.devices} devices" if len({run.devices for run in runs}) > 1 else "")
            for count, run in enumerate(runs, 1)
        )
        raise UserError(f"{source}: several train: choose one by --command=NUMBER. Where they differ:{scripts}")
    return runs[0]


def _foreign(script: str) -> str:
    """Why a Python file is not one that this tool reads; '' if it is, or if it is not known."""
    path = Path(script)
    if path.name.startswith("pretrain_") and path.name not in SCRIPTS:
        return FOREIGN.get(path.name, "its model is not part of this version")
    return next((reason for end, reason in FOREIGN.items() if f"/{script}".endswith(f"/{end}")), "")


def as_training(argv: Sequence[str]) -> TrainingCommand | None:
    """`[launcher …] FILE.py [flags …]`, or None for another command."""
    place = next((number for number, word in enumerate(argv) if word.endswith(".py")), None)
    if place is None:
        return None
    counts = {}
    texts = [text for word in argv[:place] for text in word.split("=")]
    for name, value in pairwise(texts):
        if name.startswith("-") and value.isdigit():
            counts[name.strip("-").replace("-", "_")] = int(value)
    per_node, nodes = counts.get("nproc_per_node"), counts.get("nnodes", 1)
    return TrainingCommand(argv[place], tuple(argv[place + 1 :]), per_node and per_node * nodes)


def _file_words(path: Path) -> Iterator[str]:
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
        yield f"--{plain}"
        if value is not True:
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, Mapping):
                    raise UserError(f"expected one value or a list, got {item}")
                text = str(item)
                # A string may hold several values, as on a command line.
                yield from shlex.split(text) if row is not None and row.kind is list else [text]


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


def _title(training: TrainingCommand, source: str, converted: Converted) -> str:
    """The docstring of the file: its source, and the command."""
    texts = [shlex.quote(word) for word in training.words]
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
