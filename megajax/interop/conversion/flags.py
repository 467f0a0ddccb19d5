"""Checks of the command line of `python -m megajax.convert`, before any file is read."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megajax.config.errors import Problem

FORMATS = ("hf", "megatron", "peft")
LARGEST_SHARD = 1e6
"""GB."""
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZED = ("int8", "fp8", "int4")
ONLY_QUANTIZED = ("group", "exclude", "activations", "calibration", "compare")
"""Flags that go with --quantize."""


def flag_problems(flags: Mapping[str, Any]) -> list[Problem]:
    """Invalid flags, and flags that exclude each other."""
    problems, averaged, last = [], flags["average"], flags["average_last"]
    if not averaged and flags["from"] is None:
        problems.append(Problem("--from", "must be given", "give hf:DIR, a run's folder, or --average=STEP,STEP"))
    if averaged and (flags["from"] is not None or last is not None):
        problems.append(Problem("--average", "replaces --from and --average-last", "leave them out"))
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
    names = [name or "" for name in (flags["from"], flags["base"])]
    if flags["ignore"] and not any(name.startswith(("hf:", "peft:")) for name in names):
        problems.append(Problem("--ignore", "names settings of config.json, but hf:DIR is not read", "leave it out"))
    return [*problems, *_quantization_problems(flags)]


def _quantization_problems(flags: Mapping[str, Any]) -> Iterator[Problem]:
    if flags["quantize"] is None:
        for name in ONLY_QUANTIZED:
            if flags[name]:
                yield Problem(f"--{name}", "applies to quantized weights", f"add --quantize={' or '.join(QUANTIZED)}")
        return
    if flags["quantize"] not in QUANTIZED:
        yield Problem("--quantize", f"is {flags['quantize']}", f"use {', '.join(QUANTIZED)}")
    if flags["to"].partition(":")[0] in FORMATS and ":" in flags["to"]:
        message = f"writes a run, and --to={flags['to']} is not one"
        yield Problem("--quantize", message, "give a new run's folder, such as --to=runs/quantized")
    if flags["group"] is not None and flags["quantize"] != "int4":
        yield Problem("--group", f"applies to int4, not to {flags['quantize']}", "leave it out")
    if flags["activations"] not in (None, "none", "fp8"):
        yield Problem("--activations", f"is {flags['activations']}", "use none or fp8")
    for name in ("calibration", "compare"):
        if flags[name] is not None and not Path(flags[name]).expanduser().is_file():
            yield Problem(f"--{name}", f"{flags[name]} does not exist or is not a file", "give a text file")


def _name_problem(flag: str, name: str) -> Problem | None:
    """A problem if the name is neither a run nor FORMAT:DIR."""
    prefix, colon, folder = name.partition(":")
    prefix_format = prefix if colon else ""
    if not name or (prefix_format in FORMATS and not folder):
        return Problem(flag, f"is {name!r}, which names no folder", "give a run's folder or hf:DIR")
    if prefix_format in FORMATS:
        return Problem(flag, f"{name} has no steps to average", "give steps of runs") if flag == "--average" else None
    if prefix_format and prefix_format.isalnum() and not Path(name).exists():
        forms = ", ".join(f"{format_name}:DIR" for format_name in FORMATS)
        hint = (
            f"did you mean {prefix_format.lower()}:{folder}?"
            if prefix_format.lower() in FORMATS
            else f"did you mean hf:{folder}?"
        )
        return Problem(flag, f"is {name}, but {prefix_format} is not a known format", f"{hint} Formats: {forms}")
    if flag != "--to" and ((Path(name) / "config.json").is_file() or any(Path(name).glob("*.safetensors"))):
        return Problem(flag, f"{name} is a Hugging Face folder, not a run", f"did you mean hf:{name}?")
    return None
