"""Inspection of a checkpoints folder: its steps, and the metadata and arrays of a step.

Nothing here changes the folder, takes its lock or needs JAX. The lock file is not opened, because closing it would
release the lock of a run in the same process.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megajax.checkpoint import folder, integrity
from megajax.checkpoint.folder import ARRAYS, META
from megajax.checkpoint.integrity import MANIFEST, Damaged
from megajax.checkpoint.stored_arrays import StoredArray, StoredArrays
from megajax.config.errors import UserError

WHOLE, DAMAGED, WRITING = "whole", "damaged", "being written"
ASIDE = {
    "saving": f"{WRITING}, or left by a run that was killed",
    "deleting": "being deleted",
    "damaged": "damaged, set aside",
    "abandoned": "set aside when the run went back to an earlier step",
}
"""Suffix of a folder's name -> its state."""
NAME = re.compile(rf"(\d{{8,}})(?:\.[0-9a-f]+)?(?:\.({'|'.join(ASIDE)})\d*)?")
COMMITTED_AT = f"{ARRAYS}/_CHECKPOINT_METADATA"
"""The file with Orbax's commit time, which copying preserves, unlike a file's date."""
PROCESS = re.compile(rf"{ARRAYS}/state/ocdbt\.process_(\d+)/")


@dataclass(frozen=True, slots=True)
class Step:
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

    @property
    def whole(self) -> bool:
        """Whether it is committed and has no known fault."""
        return self.state == WHOLE


@dataclass(frozen=True, slots=True)
class Description:
    """The contents of a step."""

    step: int
    counters: Mapping[str, int | float]
    """Scalars of the training state: `step`, `consumed_samples`, ..."""
    consumed_tokens: int | None
    seed: int | None
    versions: Mapping[str, str]
    processes: int
    """Number of processes that wrote it."""
    mesh: Mapping[str, int] | None
    """Size of each mesh axis; None if not saved."""
    parallel: Mapping[str, Any]
    """Settings of `parallel` in the run's config."""
    rows: tuple[int, ...]
    """For each row of stacked arrays, the repeat of the stack in it; -1 for padding."""
    config: Mapping[str, Any]
    """The saved config of the run; empty if not saved."""
    arrays: tuple[StoredArray, ...]
    axes: Mapping[str, tuple[str | None, ...]]
    """Name of an array -> the logical axes of its dimensions, where known."""
    source: StoredArrays


def survey(path: Path, verify: Callable[[int], bool] = lambda step: False) -> list[Step]:
    """All steps of a checkpoints folder, committed and others, sorted by step. Checks file sizes.

    verify: for which steps to compare file contents with the manifest too, which reads all their files.
    Raises UserError if there are no steps.
    """
    steps = []
    for entry in sorted(path.iterdir()):
        match = NAME.fullmatch(entry.name)
        if match is None or not entry.is_dir():
            continue
        step, suffix = int(match[1]), match[2]
        steps.append(_aside(entry, step, ASIDE[suffix]) if suffix else _committed(entry, step, verify(step)))
    if not steps:
        raise UserError(
            f"there are no checkpoints in {path}.\n"
            "Give a run's folder, its checkpoints folder or one step in it. A run writes its first checkpoint after "
            "checkpoint.every steps, and its last one at its end."
        )
    return sorted(steps, key=lambda step: (step.step, step.name))


def choose(path: Path, steps: list[Step], number: int | None) -> Step:
    """The step of that number, or the newest intact one. Raises UserError if it is missing or damaged."""
    whole = [step for step in steps if step.whole]
    if number is None:
        if not whole:
            listed = "\n".join(f"  {step.name}: {_reason(step)}" for step in steps)
            raise UserError(f"none of the checkpoints in {path} is whole:\n{listed}")
        return max(whole, key=lambda step: step.step)
    hint = f"Whole steps: {', '.join(str(step.step) for step in whole) or 'none'}."
    chosen = next((step for step in steps if step.name == folder.step_name(number)), None)
    if chosen is None:
        raise UserError(f"there is no checkpoint of step {number} in {path}.\n{hint}")
    if not chosen.whole:
        listed = "\n".join(f"  {fault}" for fault in chosen.faults)
        raise UserError(f"checkpoint step {number} in {path} is damaged:\n{listed}\n{hint}")
    return chosen


def _reason(step: Step) -> str:
    more = f" (and {len(step.faults) - 3} more)" if len(step.faults) > 3 else ""
    return "; ".join(step.faults[:3]) + more or step.state


def describe(path: Path, step: int) -> Description:
    """The contents of a committed step. Raises UserError if its metadata is damaged."""
    home = path / folder.step_name(step)
    try:
        entries = integrity.read_manifest(home)
        integrity.verify(home, entries, [META])
        document = json.loads((home / META).read_text(encoding="utf-8"))
        source = StoredArrays(home / ARRAYS)
        meta = document["meta"]
        config = yaml.safe_load(meta.get("config", "")) or {}
        if not isinstance(config, dict):
            raise ValueError("its config is no mapping")
        counters = {name: source.value(name) for name, array in source.arrays.items() if _is_counter(array)}
    except (Damaged, OSError) as error:
        raise UserError(f"checkpoint step {step} in {path} is damaged: {error}") from error
    except (ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{META} of checkpoint step {step} in {path} can't be read: {error!r}") from error
    length = config.get("model", {}).get("sequence_length")
    consumed = counters.get("consumed_samples")
    return Description(
        step=step,
        counters=counters,
        consumed_tokens=None if length is None or consumed is None else int(consumed) * length,
        seed=meta.get("seed"),
        versions=meta.get("versions", {}),
        processes=len({match[1] for name in entries if (match := PROCESS.match(name))}),
        mesh=meta.get("mesh"),
        parallel=config.get("parallel", {}),
        rows=tuple(meta.get("rows", ())),
        config=config,
        arrays=tuple(source.arrays.values()),
        axes=_axes(source.arrays, meta.get("axes", {})),
        source=source,
    )


def _aside(path: Path, step: int, state: str) -> Step:
    """A folder that is not committed; its files may disappear in the meantime."""
    sizes, time = [], 0.0
    with suppress(FileNotFoundError):
        time = path.stat().st_mtime
    for root, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                sizes.append((Path(root) / name).stat().st_size)
    return Step(step, path.name, state, time, sum(sizes), len(sizes))


def _committed(path: Path, step: int, verify: bool) -> Step:
    try:
        entries = integrity.read_manifest(path)
    except (Damaged, OSError) as error:
        return replace(_aside(path, step, DAMAGED), verified=verify, faults=(str(error),))
    if META not in entries:
        return Step(step, path.name, DAMAGED, _time(path), 0, len(entries), verify, (f"{META} is not in the manifest",))
    faults = integrity.wrong_sizes(path, entries, sorted(entries))
    if verify:
        bad = {fault.name for fault in faults}
        faults += integrity.wrong_contents(path, entries, [name for name in sorted(entries) if name not in bad])
    size = sum(entry["bytes"] for entry in entries.values())
    state = DAMAGED if faults else WHOLE
    return Step(step, path.name, state, _time(path), size, len(entries), verify, tuple(map(str, faults)))


def _time(path: Path) -> float:
    try:
        return json.loads((path / COMMITTED_AT).read_text(encoding="utf-8"))["commit_timestamp_nsecs"] / 1e9
    except (OSError, ValueError, KeyError, TypeError):
        return (path / MANIFEST).stat().st_mtime


def _is_counter(array: StoredArray) -> bool:
    return array.shape == () and "." not in array.name


def _axes(arrays: Mapping[str, StoredArray], declared: Mapping[str, list]) -> dict[str, tuple[str | None, ...]]:
    """Logical axes of weights, and of optimizer moments with a weight's path and shape.

    declared: path of a weight -> its logical axes.
    """
    axes_by_name = {}
    # Longest path first: "norm.gain" is also a suffix of "blocks.norm.gain".
    for path, axes in sorted(declared.items(), key=lambda item: -len(item[0])):
        weight = arrays.get(f"params.{path}")
        if weight is None or len(weight.shape) != len(axes):
            continue
        for name, array in arrays.items():
            belongs = name == weight.name or (name.startswith("optimizer.") and name.endswith(f".{path}"))
            if belongs and array.shape == weight.shape:
                axes_by_name.setdefault(name, tuple(axes))
    return axes_by_name
