"""Show what checkpoints hold: `python -m megajax.tools.inspect RUN`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import isfinite, prod
from pathlib import Path
from typing import Any

from megajax.command_line import Flag, front_door, parse
from megajax.config.builds import resolve
from megajax.config.errors import UserError
from megajax.config.nearest import did_you_mean
from megajax.metrics.text import byte_size, count, moment
from megajax.tools.json_output import JSON, first_word, show

USAGE = """python -m megajax.tools.inspect RUN [--step=N] [--verify] [--array=NAME] [--json[=FILE]]

Shows the checkpoints of a run: its steps, and of the newest whole one (or step N) the position in training, versions,
layout, config and arrays. RUN is a run's folder, its checkpoints folder, or one step in it. Changes nothing there and
needs no devices; a run may be writing meanwhile.

  --step=N         another step than the newest whole one
  --verify         compare each file's size and SHA-256 with the manifest: of all steps, or of step N;
                   exit code 2 if a file differs. Without it, sizes alone are compared
  --array=NAME     statistics of one array instead, such as params.tokens
  --json[=FILE]    print JSON instead, or write it to a file as well
"""
FLAGS = (Flag("step", int | None), Flag("verify"), Flag("array", str | None), JSON)
COUNTERS = "counters"
"""The group of arrays without a dot in their names."""


def main(argv: list[str]) -> int:
    """Print the steps and one step's content; 2 if --verify found a file that differs.

    Raises:
        UserError: no checkpoints there, an unknown or damaged step, an unknown array, or a wrong command line.
    """
    if not argv or {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    run = first_word(argv, "a run's folder", USAGE)
    flags = parse(argv[1:], verb="tools.inspect", flags=FLAGS, with_config=False).flags
    if flags["array"] is not None and flags["verify"]:
        raise UserError("--verify checks files, --array shows one array: give one of them")
    folder, step = resolve("megajax.checkpoint.folder:locate")(run)
    step = step if flags["step"] is None else flags["step"]
    steps = _survey(folder, step, flags["verify"])
    content: dict[str, Any] = {"folder": str(folder), "steps": [asdict(each) for each in steps]}
    damaged = flags["verify"] and any(each.faults for each in steps)
    chosen = resolve("megajax.checkpoint.inspection:choose")(folder, steps, step)
    described = resolve("megajax.checkpoint.inspection:describe")(folder, chosen.step)
    content |= _values(described) if flags["array"] is None else _array_values(described, flags["array"])
    text = json.dumps(_finite(content), indent=1, allow_nan=False, default=str)
    lines = (_steps_text(content), *_description_text(content)) if flags["array"] is None else [_array_text(content)]
    show("\n".join(lines), text, flags["json"])
    return 2 * damaged


def _survey(folder: Path, step: int | None, verify: bool) -> list[Any]:
    try:
        return resolve("megajax.checkpoint.inspection:survey")(folder, lambda each: verify and step in (None, each))
    except OSError as error:
        raise UserError(f"{error.filename or folder} can't be read: {error.strerror}") from error


def _values(described: Any) -> dict[str, Any]:
    """A description as JSON can say it."""
    names = (
        "step",
        "counters",
        "consumed_tokens",
        "seed",
        "versions",
        "processes",
        "mesh",
        "parallel",
        "rows",
        "config",
    )
    arrays = [asdict(array) | {"axes": described.axes.get(array.name)} for array in described.arrays]
    groups: dict[str, dict[str, int]] = {}
    for array in described.arrays:
        head, dot, _ = array.name.partition(".")
        group = groups.setdefault(head if dot else COUNTERS, {"arrays": 0, "elements": 0, "bytes": 0})
        group["arrays"] += 1
        group["elements"] += array.elements
        group["bytes"] += array.bytes
    return {name: getattr(described, name) for name in names} | {"arrays": arrays, "groups": groups}


def _finite(value: Any) -> Any:
    """The same with NaN and infinities as text, which JSON has no numbers for."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _array_values(described: Any, name: str) -> dict[str, Any]:
    arrays = {array.name: array for array in described.arrays}
    if name not in arrays:
        near = did_you_mean(name, arrays) or f"without --array, all {len(arrays)} are listed"
        raise UserError(f"--array: step {described.step} has no array {name}\n    {near}")
    try:
        statistics = described.source.statistics(name)
    except resolve("megajax.checkpoint.integrity:Damaged") as error:
        raise UserError(f"checkpoint step {described.step}: {error}\n--verify says which file is damaged.") from error
    axes = {"axes": described.axes.get(name)}
    return {"step": described.step, "array": asdict(arrays[name]) | axes | asdict(statistics)}


def _steps_text(content: Mapping[str, Any]) -> str:
    rows = [("step", "committed", "size", "files", "state")]
    for each in content["steps"]:
        state = each["state"] + (", every file verified" if each["verified"] and not each["faults"] else "")
        size = byte_size(each["bytes"])
        rows.append((each["name"], moment(each["time"]), size, str(each["files"]), state))
        rows += [("", "", "", "", fault) for fault in each["faults"]]
    return "\n".join((content["folder"], *_table(rows)))


def _description_text(content: Mapping[str, Any]) -> Iterator[str]:
    yield f"\nstep {content['step']}"
    facts = [fact for fact in _facts(content) if fact[1]]
    yield from _table(facts)
    with_axes = any(array["axes"] for array in content["arrays"])
    yield "\narrays"
    rows = [("name", "shape", "dtype", *["axes"] * with_axes, "pieces", "size")]
    for array in content["arrays"]:
        axes = ", ".join(axis or "-" for axis in array["axes"] or ())
        pieces = "" if max(array["pieces"], default=1) == 1 else _times(array["pieces"])
        described = (array["name"], _times(array["shape"]), array["dtype"], *[axes] * with_axes)
        rows.append((*described, pieces, byte_size(array["bytes"])))
    yield from _table(rows)
    yield "\ntotals"
    sums = {key: sum(group[key] for group in content["groups"].values()) for key in ("arrays", "elements", "bytes")}
    totals = [*content["groups"].items(), ("all", sums)]
    rows = [("group", "arrays", "elements", "size")]
    rows += [(name, str(of["arrays"]), count(of["elements"]), byte_size(of["bytes"])) for name, of in totals]
    yield from _table(rows)


def _facts(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values; "" where the step does not say."""
    config, counters, tokens = content["config"], content["counters"], content["consumed_tokens"]
    samples = counters.get("consumed_samples")
    yield "consumed", "" if samples is None else f"{samples:,} samples" + (f", {tokens:,} tokens" if tokens else "")
    yield COUNTERS, ", ".join(f"{name} {value:,}" for name, value in counters.items() if name != "consumed_samples")
    yield "seed", "" if content["seed"] is None else str(content["seed"])
    yield "versions", ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    yield "written by", "; ".join(_layout(content))
    yield "layer order", _order(content["rows"])
    for name, paths in SUMMARY.items():
        values = [(path, _at(config, path)) for path in paths]
        yield name, ", ".join(_setting(path, value) for path, value in values if value is not None)


SUMMARY = {
    "model": ("model.hidden", "model.stack.repeats", "model.vocabulary_size", "model.sequence_length"),
    "layers": ("model.stack.pattern",),
    "data": ("data.type", "tokenizer.type"),
    "training": ("optimizer.type", "precision.compute", "schedule.lr", "batch.global_size", "steps"),
    "run folder": ("run_dir",),
}
"""Line -> settings of the config that it shows."""


def _setting(path: str, value: Any) -> str:
    last = path.rpartition(".")[2]
    if last == "pattern":
        blocks = [[block.get(part, {}).get("type", "?") for part in ("mixer", "mlp")] for block in value]
        return "; ".join(" and ".join(kinds) for kinds in blocks).replace("Config", "")
    if last in ("type", "run_dir"):
        return str(value).removesuffix("Config")
    return f"{last.replace('_', ' ')} {f'{value:,}' if type(value) is int else value}"


def _at(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def _layout(content: Mapping[str, Any]) -> Iterator[str]:
    """Processes, mesh and the settings of `parallel` that say more than sizes."""
    if content["processes"]:
        yield f"{content['processes']} process{'es' * (content['processes'] > 1)}"
    parallel, mesh = content["parallel"], content["mesh"]
    if mesh is not None:
        devices = prod(mesh.values())
        cuts = ", ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)
        yield f"{devices} device{'s' * (devices > 1)}{': ' * bool(cuts)}{cuts}"
    else:
        cuts = [f"{axis} {size}" for axis, size in parallel.items() if type(size) is int and size > 1]
        yield from [", ".join(cuts)] if cuts else []
    if parallel.get("data_sharding"):
        yield f"weights and optimizer {parallel['data_sharding']}"
    if (parallel.get("pipeline") or 1) > 1:
        yield f"schedule {parallel.get('schedule')}"


def _order(rows: Sequence[int]) -> str:
    if list(rows) == list(range(len(rows))):
        return f"0 to {len(rows) - 1}, as they follow each other" if rows else ""
    return " ".join("-" if row < 0 else str(row) for row in rows) + " (by row of the stacked arrays)"


def _array_text(content: Mapping[str, Any]) -> str:
    array = content["array"]
    rows = [
        ("shape", _times(array["shape"])),
        ("dtype", array["dtype"]),
        ("axes", ", ".join(axis or "-" for axis in array["axes"] or ())),
        ("pieces", "" if max(array["pieces"], default=1) == 1 else _times(array["pieces"])),
        ("size", byte_size(array["bytes"])),
        ("elements", f"{array['count']:,}"),
        ("not finite", f"{array['nonfinite']:,}"),
        *((name, "none is finite" if array[name] is None else f"{array[name]:.6g}") for name in STATISTICS),
    ]
    return "\n".join((f"{array['name']}, step {content['step']}", *_table([row for row in rows if row[1]])))


STATISTICS = ("min", "max", "mean", "rms")
"""Of the finite elements."""


def _times(numbers: Sequence[int]) -> str:
    return " x ".join(map(str, numbers)) or "scalar"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


if __name__ == "__main__":
    front_door(main)
