"""Convert weights from and to other libraries' formats: `python -m megajax.convert --from=hf:DIR --to=RUN`."""

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax.command_line import Flag, front_door, parse, use_devices
from megajax.config.builds import resolve
from megajax.config.errors import ConfigError, Problem
from megajax.tools.conversion_progress import Progress

DESCRIPTION = """Convert weights between formats, a part at a time: memory need not hold them.

  python -m megajax.convert --from=hf:DIR --to=runs/llama           a Hugging Face folder to a run
  python -m megajax.convert --from=runs/llama --to=hf:DIR           and back, from its newest checkpoint
  python -m megajax.convert --from=runs/llama/checkpoints/00000100 --to=hf:DIR --dtype=bfloat16
  python -m megajax.convert --from=runs/lora --to=peft:DIR          adapters alone; --merge adds them to the weights
  python -m megajax.convert --from=peft:DIR --base=hf:DIR --to=runs/lora
  python -m megajax.convert --from=megatron:DIR --to=runs/gpt       a checkpoint of Megatron-LM, also the other way
  python -m megajax.convert --average=runs/llama/100,runs/llama/200 --to=runs/mean

A folder is written under a temporary name and renamed when it is complete. Nothing is fetched."""
FORMATS = ("hf", "megatron", "peft")
LARGEST_SHARD = 1e6
"""GB."""
DTYPES = ("float32", "bfloat16", "float16")
FLAGS = (
    Flag("from", str | None, help="hf:DIR, megatron:DIR, peft:DIR, a run's folder or one of its steps"),
    Flag("to", str, required=True, help="a new folder: of a run, or hf:DIR, megatron:DIR, peft:DIR"),
    Flag("dtype", str | None, help="of the weights: float32, bfloat16, float16; none: float32 in runs, else as before"),
    Flag("verify", help="read the result back and compare all of it"),
    Flag("base", str | None, help="model of --from=peft:DIR: hf:DIR or a run; none: the folder that the adapter names"),
    Flag("merge", help="add low-rank adapters to the weights"),
    Flag("average", tuple[str, ...], (), help="steps of runs, the mean of whose weights is taken, in place of --from"),
    Flag("average-last", int | None, help="take the mean of that many of the newest steps of --from"),
    Flag(
        "family", str | None, help="table of names to write with: llama, …; of megatron:, local; none: a lossless one"
    ),
    Flag("shard-size", float, 5.0, help="GB of a safetensors file, at most"),
    Flag("vocabulary", int | None, help="tokens of a Megatron-LM checkpoint whose arguments have the padded number"),
)


def main(argv: list[str]) -> int:
    """Exit codes: 0 done, 2 something to change, 130 and 143 interrupted, 1 crash. All but 0 leave no output.

    Raises:
        UserError: for what the user has to change.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    flags = parse(argv, verb="convert", flags=FLAGS, with_config=False, description=DESCRIPTION).flags
    if problems := _problems(flags):
        raise ConfigError(problems, "command line")
    use_devices("cpu:1")
    # By name, so that jax is imported now, and the front door can report a package that is not installed.
    open_source, write, verified = (
        resolve(f"megajax.tools.adapter_conversion:{name}") for name in ("open_source", "write", "verified")
    )
    options, elements = (resolve(f"megajax.tools.conversion:{name}") for name in ("options", "elements"))
    given = (flags["average"], flags["average_last"], flags["base"])
    stored = open_source(flags["from"], *given, merge=flags["merge"], vocabulary=flags["vocabulary"])
    settings = options(flags["dtype"], flags["family"] or "", flags["shard_size"])
    with Progress(sys.stderr, elements(stored), "converting") as progress:
        lines = write(stored, flags["to"], settings, progress)
    print(*lines, progress.total(), sep="\n")
    if flags["verify"]:
        with Progress(sys.stderr, elements(stored), "verifying") as progress:
            line = verified(stored, flags["to"], settings, progress)
        print(line, progress.total(), sep="\n")
    return 0


def _problems(flags: Mapping[str, Any]) -> list[Problem]:
    """Of flags that do not fit together."""
    problems, averaged, last = [], flags["average"], flags["average_last"]
    if not averaged and flags["from"] is None:
        problems.append(Problem("--from", "must be given", "hf:DIR or a run's folder; or --average=STEP,STEP"))
    if averaged and (flags["from"] is not None or last is not None):
        problems.append(Problem("--average", "names what to read", "leave out --from and --average-last"))
    problems += [
        problem
        for flag, names in (
            ("from", [flags["from"]]),
            ("to", [flags["to"]]),
            ("base", [flags["base"]]),
            ("average", averaged),
        )
        for name in names
        if name is not None and (problem := _name_problem(f"--{flag}", name)) is not None
    ]
    if len(averaged) == 1 or (last is not None and last < 2):
        problems.append(Problem("--average", "needs two steps or more"))
    if flags["dtype"] not in (None, *DTYPES):
        problems.append(Problem("--dtype", f"is {flags['dtype']}", f"use {', '.join(DTYPES)}"))
    if not 0 < flags["shard_size"] < LARGEST_SHARD:
        problems.append(Problem("--shard-size", f"is {flags['shard_size']:g}", "give GB, such as 5"))
    return problems


def _name_problem(flag: str, name: str) -> Problem | None:
    """Of a name that is neither a run nor FORMAT:DIR."""
    before, colon, folder = name.partition(":")
    form = before if colon else ""
    if not name or (form in FORMATS and not folder):
        return Problem(flag, f"is {name!r}, which names no folder", "give a run's folder or hf:DIR")
    if form in FORMATS:
        return Problem(flag, f"{name} has no steps", "give steps of runs") if flag == "--average" else None
    if form and form.isalnum() and not Path(name).exists():
        forms = ", ".join(f"{each}:DIR" for each in FORMATS)
        hint = f"did you mean {form.lower()}:{folder}?" if form.lower() in FORMATS else f"did you mean hf:{folder}?"
        return Problem(flag, f"is {name}, and there is no format {form}", f"{hint} Formats: {forms}")
    if flag != "--to" and ((Path(name) / "config.json").is_file() or any(Path(name).glob("*.safetensors"))):
        return Problem(flag, f"{name} is a Hugging Face folder, not a run", f"did you mean hf:{name}?")
    return None


if __name__ == "__main__":
    front_door(main)
