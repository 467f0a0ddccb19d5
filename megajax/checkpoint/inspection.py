"""Inspection of a checkpoints folder: its steps, and the metadata and arrays of a step.

Nothing here changes the folder, takes its lock or needs JAX. The lock file is not opened, because closing it would
release the lock of a run in the same process.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megajax.checkpoint import manifest, step_folders
from megajax.checkpoint.committed_steps import open_place
from megajax.checkpoint.manifest import MANIFEST, Damaged
from megajax.checkpoint.object_store_steps import StoredSteps
from megajax.checkpoint.step_folders import ARRAYS, COMMITTED_AT, META
from megajax.checkpoint.zarr_reader import StoredArray, StoredArrays
from megajax.config.errors import UserError
from megajax.config.hints import below
from megajax.config.read_limits import DOCUMENT, parse_json
from megajax.config.yaml_and_json import read_yaml
from megajax.storage.folders import read_small
from megajax.storage.stores import Store

WHOLE, DAMAGED = "whole", "damaged"
ASIDE = {
    "saving": "being written, or left by a run that was killed",
    "deleting": "being deleted",
    "damaged": "damaged, set aside",
    "abandoned": "set aside when the run went back to an earlier step",
}
"""Suffix of a folder's name -> its state."""
NAME = re.compile(rf"(\d{{8,}})(?:\.[0-9a-f]+)?(?:\.({'|'.join(ASIDE)})\d*)?")
PROCESS = re.compile(rf"{ARRAYS}/(?:state/ocdbt\.)?process_(\d+)/")
COUNTERS = "counters"
"""The group of arrays without a dot in their names: scalars of the training state such as `consumed_samples`."""


@dataclass(frozen=True, slots=True)
class StepFolder:
    """A step in a checkpoints folder, committed or not."""

    step: int
    name: str
    state: str
    """WHOLE, DAMAGED or a value of ASIDE."""
    time: float
    """Time of the commit, or else of the last change, in seconds since 1970."""
    bytes: int
    files: int
    verified: bool = False
    """Whether file contents were compared with the manifest; False: only sizes."""
    faults: tuple[str, ...] = ()


def survey(path: Path, verify: Callable[[int], bool] = lambda step: False) -> list[StepFolder]:
    """All steps of a checkpoints folder, committed and others, sorted by step. Checks file sizes.

    verify: whether to compare the file contents of a step with the manifest too, which reads all its files.
    Raises UserError if there are no steps.
    """
    steps, place = [], open_place(path)
    for name, files in _stored(place) if isinstance(place, StoredSteps) else _folders(path):
        if (match := NAME.fullmatch(name)) is not None:
            step, suffix = int(match[1]), match[2]
            steps.append(
                _aside(name, files, step, ASIDE[suffix]) if suffix else _committed(name, files, step, verify(step))
            )
    if not steps:
        raise UserError(
            f"there are no checkpoints in {place}.\n"
            "Give a run's folder, its checkpoints folder or one step in it. A run writes its first checkpoint after "
            "checkpoint.every steps, and its last one at its end."
        )
    return sorted(steps, key=lambda step: (step.step, step.name))


def choose(path: Path, steps: list[StepFolder], number: int | None) -> StepFolder:
    """The step of that number, or the newest intact one. Raises UserError if it is missing or damaged."""
    intact = [step for step in steps if step.state == WHOLE]
    if number is None:
        if not intact:
            lines = [f"{step.name}: {'; '.join(step.faults[:3]) or step.state}" for step in steps]
            raise UserError(below(f"none of the checkpoints in {path} is intact:", lines))
        return intact[-1]
    hint = f"Intact steps: {', '.join(str(step.step) for step in intact) or 'none'}."
    committed = next((step for step in steps if step.name == step_folders.step_name(number)), None)
    if committed is None:
        raise UserError(f"there is no checkpoint of step {number} in {path}.\n{hint}")
    if committed.state != WHOLE:
        raise UserError(below(f"checkpoint step {number} in {path} is damaged:", committed.faults) + f"\n{hint}")
    return committed


def describe(path: Path, step: int) -> tuple[dict[str, Any], StoredArrays]:
    """The contents of a committed step as JSON values, null where unknown; and its arrays.

    Raises UserError if its metadata is damaged.
    """
    try:
        home = open_place(path).files(step)
        entries = manifest.read_manifest(home)
        meta = manifest.read_meta(home)
        source = StoredArrays(home)
        config = read_yaml(str(meta.get("config", ""))) or {}
        if not isinstance(config, dict):
            raise ValueError("its config is not a mapping")
        scalars = [name for name, array in source.arrays.items() if array.shape == () and "." not in name]
        counters = {name: source.value(name) for name in scalars}
    except (Damaged, OSError) as error:
        raise UserError(f"checkpoint step {step} in {path} is damaged: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{META} of checkpoint step {step} in {path} can't be read: {error!r}") from error
    length, consumed = config.get("model", {}).get("sequence_length"), counters.get("consumed_samples")
    axes = _axes(source.arrays, meta.get("axes", {}))
    content = {
        "step": step,
        COUNTERS: counters,
        "consumed_tokens": None if length is None or consumed is None else int(consumed) * length,
        "seed": meta.get("seed"),
        "versions": meta.get("versions", {}),
        "processes": len({match[1] for name in entries if (match := PROCESS.match(name))}),
        "mesh": meta.get("mesh"),
        "rows": meta.get("rows", []),
        "config": config,
        "arrays": [asdict(array) | {"axes": axes.get(name)} for name, array in source.arrays.items()],
        "groups": _groups(source.arrays),
    }
    return content, source


def _groups(arrays: Mapping[str, StoredArray]) -> dict[str, dict[str, int]]:
    """First part of the arrays' names -> number of arrays, elements and bytes."""
    groups: dict[str, dict[str, int]] = {}
    for name, array in arrays.items():
        head, dot, _ = name.partition(".")
        group = groups.setdefault(head if dot else COUNTERS, {"arrays": 0, "elements": 0, "bytes": 0})
        group["arrays"] += 1
        group["elements"] += array.elements
        group["bytes"] += array.bytes
    return groups


def _folders(path: Path) -> Iterator[tuple[str, Path | Store]]:
    return ((entry.name, entry) for entry in path.iterdir() if entry.is_dir())


def _stored(place: StoredSteps) -> Iterator[tuple[str, Path | Store]]:
    """The commits in a store, and folders without one, as of a save."""
    folders = {name: place.folder(name) for name in place.commits()}
    yield from folders.items()
    for name in place.unfinished():
        yield f"{name}.saving", place.store.below(name)


def _aside(name: str, path: Path | Store, step: int, state: str) -> StepFolder:
    """A folder that is not committed; its files may disappear while they are counted."""
    if isinstance(path, Store):
        return StepFolder(step, name, state, 0.0, 0, len(path.names()))
    sizes, time = [], 0.0
    with suppress(FileNotFoundError):
        time = path.stat().st_mtime
    for root, _, names in os.walk(path):
        for file in names:
            with suppress(OSError):
                sizes.append((Path(root) / file).stat().st_size)
    return StepFolder(step, name, state, time, sum(sizes), len(sizes))


def _committed(name: str, path: Path | Store, step: int, verify: bool) -> StepFolder:
    try:
        entries = manifest.read_manifest(path)
        if META not in entries:
            raise Damaged(f"{META} is not in the manifest")
    except Damaged as error:
        return replace(_aside(name, path, step, DAMAGED), verified=verify, faults=(str(error),))
    faults = manifest.wrong_sizes(path, entries, sorted(entries))
    if verify:
        wrong_names = {fault.name for fault in faults}
        faults += manifest.wrong_contents(path, entries, [name for name in sorted(entries) if name not in wrong_names])
    try:
        time = parse_json(read_small(path, COMMITTED_AT, DOCUMENT))["commit_timestamp_nsecs"] / 1e9
    except (OSError, ValueError, KeyError, TypeError):
        time = (path / MANIFEST).stat().st_mtime if isinstance(path, Path) else 0.0
    size = sum(entry["bytes"] for entry in entries.values())
    reasons = [*map(str, faults)]
    if verify and not reasons:
        try:
            manifest.read_meta(path)
        except Damaged as error:
            reasons = [str(error)]
    state = DAMAGED if reasons else WHOLE
    return StepFolder(step, name, state, time, size, len(entries), verify, tuple(reasons))


def _axes(arrays: Mapping[str, StoredArray], declared: Mapping[str, list]) -> dict[str, list[str | None]]:
    """Logical axes of weights, and of optimizer moments with a weight's path and shape.

    declared: path of a weight -> its logical axes.
    """
    axes_by_name: dict[str, list[str | None]] = {}
    # Longest path first: "norm.gain" is also a suffix of "blocks.norm.gain".
    for path, axes in sorted(declared.items(), key=lambda item: -len(item[0])):
        weight = arrays.get(f"params.{path}")
        if weight is None or len(weight.shape) != len(axes):
            continue
        for name, array in arrays.items():
            belongs = name == weight.name or (name.startswith("optimizer.") and name.endswith(f".{path}"))
            if belongs and array.shape == weight.shape:
                axes_by_name.setdefault(name, axes)
    return axes_by_name
