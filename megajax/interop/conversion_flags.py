"""The command line of `python -m megajax.convert`: checks before any file is read, and the progress line."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from megajax.config.errors import Problem, UserError
from megajax.config.paths_and_store_urls import store_url
from megajax.data.progress_line import ProgressLine
from megajax.display.text import duration
from megajax.interop.weights.formats import FORMATS, Reading, format_of, named, split_name
from megajax.layers.quantization.config import GROUPS

LARGEST_SHARD = 1e6
"""GB."""
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZED = ("int8", "fp8", "fp8_blocks", "mxfp8", "int4", "nf4", "nvfp4")
ONLY_QUANTIZED = ("double", "group", "exclude", "activations", "calibration", "compare")
"""Flags that go with --quantize."""


def flag_problems(flags: Mapping[str, Any]) -> list[Problem]:
    """Invalid flags, and flags that exclude each other."""
    problems, averaged, last = [], flags["average"], flags["average_last"]
    if not averaged and flags["from"] is None:
        problems.append(Problem("--from", "must be given", "give hf:DIR, a run's folder, or --average=STEP,STEP"))
    if flags["to"] is None:
        example = "python -m megajax.convert --from=hf:models/NAME --to=runs/NAME"
        return [*problems, Problem("--to", "must be given, a new folder", f"give a run's folder or hf:DIR: {example}")]
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
        problems.append(Problem("--dtype", f"must be one of {', '.join(DTYPES)}, got {flags['dtype']}"))
    if not 0 < flags["shard_size"] < LARGEST_SHARD:
        problems.append(
            Problem("--shard-size", f"must be above 0 GB, got {flags['shard_size']:g}", "give GB, such as 5")
        )
    sources = [name for name in (flags["from"], flags["base"]) if name]
    if flags["ignore"] and not any(format_of(name).unknown_settings for name in sources):
        problems.append(Problem("--ignore", "names settings of config.json, but hf:DIR is not read", "leave it out"))
    return [*problems, *_quantization_problems(flags)]


def reading_of(flags: Mapping[str, Any]) -> Reading:
    """How the source is read. Raises UserError for --base of a source without adapters.

    If only adapters are written, from a model that has them, --base is a name to record.
    """
    adapters_read, adapters_written = (
        name is not None and format_of(name).adapters == "only" for name in (flags["from"], flags["to"])
    )
    if flags["base"] is not None and not adapters_read and not adapters_written:
        apart = next(prefix for prefix, form in FORMATS.items() if form.adapters == "only")
        problem = f"only an adapter has a base model, and --from={flags['from']} is not {apart}:DIR"
        raise UserError(f"--base={flags['base']}: {problem}")
    base = flags["base"] if adapters_read else None
    return Reading(base=base, vocabulary=flags["vocabulary"], trusted=flags["trust_code"], ignore=flags["ignore"])


def _quantization_problems(flags: Mapping[str, Any]) -> Iterator[Problem]:
    if flags["quantize"] is None:
        for name in ONLY_QUANTIZED:
            if flags[name]:
                yield Problem(f"--{name}", "applies to quantized weights", f"add --quantize={' or '.join(QUANTIZED)}")
        return
    if flags["quantize"] not in QUANTIZED:
        yield Problem("--quantize", f"must be one of {', '.join(QUANTIZED)}, got {flags['quantize']}")
    if not format_of(flags["to"]).quantized:
        message = f"writes a run, and --to={flags['to']} is not one"
        yield Problem("--quantize", message, "give a new run's folder, such as --to=runs/quantized")
    if flags["group"] is not None and flags["quantize"] not in GROUPS:
        yield Problem("--group", f"applies to {' and '.join(GROUPS)}, not to {flags['quantize']}", "leave it out")
    if flags["activations"] not in (None, "none", "fp8"):
        yield Problem("--activations", f"must be none or fp8, got {flags['activations']}")
    for name in ("calibration", "compare"):
        if flags[name] is not None and not Path(flags[name]).expanduser().is_file():
            yield Problem(f"--{name}", f"{flags[name]} does not exist or is not a file", "give a text file")


def _name_problem(flag: str, name: str) -> Problem | None:
    """A problem if the name is neither a run nor FORMAT:DIR."""
    prefix, colon, folder = name.partition(":")
    known = bool(colon) and prefix in FORMATS
    if store_url(name) is not None:
        return None
    if not name or (known and not folder):
        return Problem(flag, f"is {name!r}, which names no folder", "give a run's folder or hf:DIR")
    if known:
        refused = flag == "--average" and not FORMATS[prefix].steps
        return Problem(flag, f"{name} has no steps to average", "give steps of runs") if refused else None
    if colon and prefix.isalnum() and not Path(name).exists():
        nearest = prefix.lower() if prefix.lower() in FORMATS else next(filter(None, FORMATS))
        forms = ", ".join(f"{format_name}:DIR" for format_name in filter(None, FORMATS))
        hint = f"did you mean {nearest}:{folder}? Formats: {forms}"
        return Problem(flag, f"is {name}, but {prefix} is not a known format", hint)
    if flag == "--to" or not split_name(actual := named(Path(name)))[0]:
        return None
    return Problem(flag, f"{name} is {format_of(actual).title}, not a run", f"did you mean {actual}?")


class Progress(ProgressLine):
    """Share, speed and remaining time of a conversion or a verification."""

    def __init__(self, stream: TextIO, elements: int, title: str):
        super().__init__(stream)
        self._elements, self._title, self._count = max(1, elements), title, 0

    def __call__(self, elements: int) -> None:
        """Advance by this many elements."""
        self._count += elements
        if seconds := self.seconds():
            remaining = duration(seconds * (self._elements - self._count) / max(1, self._count))
            share = 100 * self._count / self._elements
            self.show(f"{self._title}: {share:.0f} %  {self._speed(seconds)}  {remaining} left")

    def total(self) -> str:
        """The total time and mean speed."""
        seconds = time.monotonic() - self._started
        return f"{self._title} took {duration(seconds)}, {self._speed(seconds)}"

    def _speed(self, seconds: float) -> str:
        return f"{4 * self._count / max(seconds, 1e-3) / 1e6:.0f} MB/s of float32"

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *raised: object) -> None:
        self.clear()
