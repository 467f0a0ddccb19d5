"""Show the contents of checkpoints: `python -m megajax.tools.inspect RUN`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from megajax.command_line.parser import Flag, first_word, front_door, parse
from megajax.config.class_references import resolve
from megajax.config.errors import UserError
from megajax.config.hints import did_you_mean
from megajax.display.text import aligned, byte_size, count, moment
from megajax.tools.json_output import JSON, show

USAGE = """python -m megajax.tools.inspect RUN [--step=N] [--verify] [--array=NAME] [--json[=FILE]]

Shows the checkpoints of a run: its steps, and of the newest intact one (or step N) the position in training, versions,
layout, config and arrays. RUN is a run's folder, its checkpoints folder, or one step in it. Changes no file and needs
no devices; the run may be writing at the same time. RUN may be in an object store: s3://BUCKET/PREFIX or gs://BUCKET/PREFIX.

  --step=N         show this step instead of the newest intact one
  --verify         compare each file's size and SHA-256 with the manifest, for all steps or for step N;
                   exit code 2 if a file differs. Without --verify, only sizes are compared
  --array=NAME     show statistics of one array instead, such as params.tokens
  --json[=FILE]    print JSON instead of text, or also write it to a file
"""
FLAGS = (Flag("step", int | None), Flag("verify"), Flag("array", str | None), JSON)
SETTINGS = (
    *("model.hidden", "model.stack.repeats", "model.vocabulary_size", "model.sequence_length", "data.type"),
    *("tokenizer.type", "optimizer.type", "precision.compute", "schedule.lr", "batch.global_size", "steps", "run_dir"),
    *("parallel.data_sharding", "parallel.schedule"),
)
"""The settings shown."""


def main(argv: list[str]) -> int:
    """Print the steps and one step's content; 2 if --verify found a file that differs.

    Raises:
        UserError: no checkpoints, an unknown or damaged step, an unknown array, or a wrong command line.
    """
    if not argv or {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    run = first_word(argv, "a run's folder", USAGE, stored=True)
    flags = parse(argv[1:], verb="tools.inspect", flags=FLAGS, with_config=False).flags
    verify, name = flags["verify"], flags["array"]
    if name is not None and verify:
        raise UserError("--verify checks files, --array shows one array: give one of them")
    folder, step = resolve("megajax.checkpoint.committed_steps:locate")(run)
    step = step if flags["step"] is None else flags["step"]
    # By name, so that the front door can report a package that is not installed.
    survey, choose, describe = (
        resolve(f"megajax.checkpoint.inspection:{function}") for function in ("survey", "choose", "describe")
    )
    try:
        steps = survey(folder, lambda number: verify and step in (None, number))
    except OSError as error:
        raise UserError(f"{error.filename or folder} can't be read: {error.strerror}") from error
    content, arrays = describe(folder, choose(folder, steps, step).step)
    if name is not None:
        content = {"step": content["step"], "array": _array(content, arrays, name)}
    place = resolve("megajax.checkpoint.committed_steps:open_place")(folder)
    content = {"folder": str(place), "steps": [asdict(report) for report in steps]} | content
    lines = _array_lines(content) if name is not None else (*_steps_lines(content), *_content_lines(content))
    show("\n".join(lines), json.dumps(_finite(content), indent=1, allow_nan=False, default=str), flags["json"])
    return 2 if verify and any(report.faults for report in steps) else 0


def _finite(value: object) -> Any:
    """The value with NaN and infinities as text, because JSON has no such numbers."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _array(content: Mapping[str, Any], arrays: Any, name: str) -> dict[str, Any]:
    """An array with its statistics."""
    described = {array["name"]: array for array in content["arrays"]}
    if name not in described:
        hint = did_you_mean(name, described) or f"without --array, all {len(described)} are listed"
        raise UserError(f"--array: step {content['step']} has no array {name}\n    {hint}")
    try:
        return described[name] | arrays.statistics(name)
    except resolve("megajax.checkpoint.manifest:Damaged") as error:
        raise UserError(f"checkpoint step {content['step']}: {error}\n--verify says which file is damaged.") from error


def _steps_lines(content: Mapping[str, Any]) -> Iterator[str]:
    rows = [("step", "committed", "size", "files", "state")]
    for step in content["steps"]:
        state = step["state"] + (", every file verified" if step["verified"] and not step["faults"] else "")
        rows.append((step["name"], moment(step["time"]), byte_size(step["bytes"]), str(step["files"]), state))
        rows += [("", "", "", "", fault) for fault in step["faults"]]
    yield content["folder"]
    yield from _indented(rows)


def _content_lines(content: Mapping[str, Any]) -> Iterator[str]:
    yield f"\nstep {content['step']}"
    yield from _indented([fact for fact in _facts(content) if fact[1]])
    yield "\narrays"
    with_axes = any(array["axes"] for array in content["arrays"])
    rows = [("name", "shape", "dtype", *["axes"] * with_axes, "pieces", "size")]
    for array in content["arrays"]:
        axes, pieces = ([_axes(array)] if with_axes else []), _pieces(array)
        rows.append((array["name"], _times(array["shape"]), array["dtype"], *axes, pieces, byte_size(array["bytes"])))
    yield from _indented(rows)
    yield "\ntotals"
    sums = {key: sum(group[key] for group in content["groups"].values()) for key in ("arrays", "elements", "bytes")}
    rows = [("group", "arrays", "elements", "size")]
    for name, total in (content["groups"] | {"all": sums}).items():
        rows.append((name, str(total["arrays"]), count(total["elements"]), byte_size(total["bytes"])))
    yield from _indented(rows)


def _facts(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values; "" if the step does not record it."""
    tokens = content["consumed_tokens"]
    yield "counters", ", ".join(f"{name} {value:,}" for name, value in content["counters"].items())
    yield "tokens", f"{tokens:,} consumed" if tokens else ""
    yield "seed", "" if content["seed"] is None else str(content["seed"])
    yield "versions", ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    yield "processes", str(content["processes"] or "")
    yield "mesh", ", ".join(f"{axis} {size}" for axis, size in (content["mesh"] or {}).items())
    yield (
        "layers",
        " | ".join(str(first) if end - first == 1 else f"{first}-{end - 1}" for first, end in content["rows"]),
    )
    values = ((path, _at(content["config"], path)) for path in SETTINGS)
    yield "settings", ", ".join(f"{path}={value}" for path, value in values if value is not None)


def _at(config: object, path: str) -> Any:
    for part in path.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def _array_lines(content: Mapping[str, Any]) -> Iterator[str]:
    array = content["array"]
    rows = [
        ("shape", _times(array["shape"])),
        ("dtype", array["dtype"]),
        ("axes", _axes(array)),
        ("pieces", _pieces(array)),
        ("size", byte_size(array["bytes"])),
        ("elements", f"{array['count']:,}"),
        ("not finite", f"{array['nonfinite']:,}"),
        *(
            (name, "no finite element" if array[name] is None else f"{array[name]:.6g}")
            for name in ("min", "max", "mean", "rms")
        ),
    ]
    yield f"{array['name']}, step {content['step']}"
    yield from _indented([row for row in rows if row[1]])


def _axes(array: Mapping[str, Any]) -> str:
    return ", ".join(axis or "-" for axis in array["axes"] or ())


def _pieces(array: Mapping[str, Any]) -> str:
    return "" if max(array["pieces"], default=1) == 1 else _times(array["pieces"])


def _times(numbers: Sequence[int]) -> str:
    return " x ".join(map(str, numbers)) or "scalar"


def _indented(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    return (f"  {line}" for line in aligned(rows))


if __name__ == "__main__":
    front_door(main)
