"""Runs one part: `python -m benchmarks NAME [--option=value ...]`. Without a name: the list of parts."""

import inspect
import json
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import outcome
from benchmarks.parts import PARTS, Part
from megajax.command_line.device_flags import count_processes, use_devices
from megajax.command_line.parser import PROCESS_FLAGS, Flag, front_door, parse
from megajax.config.class_references import resolve
from megajax.config.errors import UserError
from megajax.config.hints import did_you_mean
from megajax.faults.unfailing_output import drop_lines
from megajax.processes.world import process_index
from megajax.processes.xla_options import set_process

JSON = Flag("json", None | bool | Path)


def main(argv: list[str]) -> int:
    """Run a part. Returns 1 if its figures have something under "wrong".

    Raises:
        UserError: an unknown part, option or config, or one that does not fit this machine.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, *words = argv
    if name not in PARTS:
        hint = did_you_mean(name, list(PARTS)) or "python -m benchmarks lists them"
        raise UserError(f"there is no benchmark {name!r}: {hint}")
    # Before the import of the part, which may import jax.
    use_devices(value_of("devices", words))
    part, measure = PARTS[name], resolve(f"benchmarks.{PARTS[name].target}")
    parameters = inspect.signature(measure).parameters
    if {"-h", "--help"} & set(words):
        print(help_text(name, measure, parameters))
        return 0
    flags = [Flag(p.name, p.annotation, p.default) for p in parameters.values() if p.default is not p.empty]
    flags += [*([] if part.own_file else [JSON]), *(PROCESS_FLAGS if part.processes else ())]
    command = parse(words, verb=name, flags=flags, with_config="cfg" in parameters)
    options = {flag: command.flags[flag] for flag in parameters if flag in command.flags}
    if command.config is not None:
        options["cfg"] = command.config
        set_process(command.config.xla)
    if part.processes:
        if (count_processes() or 1) > 1:
            drop_lines(b"[Gloo] ")  # it reports each group of processes that it connects
        resolve("megajax.processes.start:start")(patience=command.flags["init_timeout"])
    figures = save(name, part, measure(**options), command.flags.get("json"), command.source)
    if part.processes:
        resolve("megajax.processes.start:finish")()
    return int(bool(figures.get("wrong")))


def save(name: str, part: Part, result: Any, place: bool | Path | None, source: str | None) -> dict[str, Any]:
    """Write the figures if --json asks for it, after each state that a generator yields. Returns the last state."""
    path = outcome.file_for(name, place, source) if place and process_index() == 0 else None
    figures: dict[str, Any] = {}
    for figures in [result] if isinstance(result, Mapping) else result:
        if path is not None:
            outcome.write(path, figures)
    if process_index() == 0 and not part.prints:
        print(json.dumps(figures, indent=1))
    if path is not None:
        print(f"written: {path}", flush=True)
    return figures


def value_of(name: str, words: list[str]) -> str | None:
    """The value of a flag among the words of a command line."""
    for word, following in zip(words, [*words[1:], None], strict=False):
        flag, given, value = word.partition("=")
        if flag == f"--{name}":
            return value if given else following
    return None


def listing() -> str:
    """All parts by group, one line each."""
    lines = [(__doc__ or "").strip(), ""]
    group = None
    for name, part in PARTS.items():
        if part.group != group:
            group = part.group
            lines.append(f"{group}:")
        lines.append(f"  {name:22} {part.line}")
    lines += ["", "--help after a name explains its options; --json[=FILE] writes its figures to a file."]
    return "\n".join(lines)


def help_text(name: str, measure: Callable, parameters: Mapping[str, inspect.Parameter]) -> str:
    """The options of a part with their defaults, and what it measures."""
    config = " --config=FILE[:function] [--setting=value ...]" if "cfg" in parameters else ""
    options = [f"[--{p.name.replace('_', '-')}={p.default}]" for p in parameters.values() if p.default is not p.empty]
    usage = f"python -m benchmarks {name}{config} {' '.join([*options, '[--json[=FILE]] [--devices=cpu:N]'])}"
    return "\n".join([*textwrap.wrap(usage, 120, subsequent_indent="    "), "", inspect.getdoc(measure) or ""])


if __name__ == "__main__":
    front_door(main)
