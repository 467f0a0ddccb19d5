"""What is in a checkpoints folder, for people: its steps, what a step says of its run, its arrays.

Nothing here changes the folder, takes its lock or needs JAX. The lock file is not even opened: closing it would release
the lock of a run in the same process.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
"""By the last word of a folder's name: what it is."""
NAME = re.compile(rf"(\d{{8,}})(?:\.[0-9a-f]+)?(?:\.({'|'.join(ASIDE)})\d*)?")
COMMITTED_AT = f"{ARRAYS}/_CHECKPOINT_METADATA"
"""The file in which Orbax writes when it committed: unlike a file's date it survives copying."""
PROCESS = re.compile(rf"{ARRAYS}/state/ocdbt\.process_(\d+)/")


@dataclass(frozen=True, slots=True)
class Step:
    """A folder of a checkpoints folder."""

    step: int
    name: str
    state: str
    """WHOLE, DAMAGED or a value of ASIDE."""
    time: float
    """When it was committed, or else last changed, in seconds since 1970."""
    bytes: int
    files: int
    verified: bool = False
    """Whether the contents of its files were compared with the manifest, and not their sizes alone."""
    faults: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it is committed and nothing wrong with it is known."""
        return self.state == WHOLE


@dataclass(frozen=True, slots=True)
class Description:
    """What a step holds."""

    step: int
    counters: Mapping[str, int | float]
    """Scalars of the training state: `step`, `consumed_samples`, ..."""
    consumed_tokens: int | None
    seed: int | None
    versions: Mapping[str, str]
    processes: int
    """Processes that wrote it."""
    mesh: Mapping[str, int] | None
    """Size of each mesh axis; None where the step does not say."""
    parallel: Mapping[str, Any]
    """Settings of `parallel` in the run's config."""
    rows: tuple[int, ...]
    """For each row of stacked arrays the repeat of the stack in it, -1: none."""
    config: Mapping[str, Any]
    """The run's config as it was saved; empty if none was."""
    arrays: tuple[StoredArray, ...]
    axes: Mapping[str, tuple[str | None, ...]]
    """Name of an array -> the logical axes of its dimensions, where the step says."""
    source: StoredArrays


def survey(path: Path, verify: Callable[[int], bool] = lambda step: False) -> list[Step]:
    """All steps of a checkpoints folder and what lies beside them, by step; whole ones have the right file sizes.

    verify: for which steps contents are compared with the manifest too, which reads all their files.
    Raises UserError if there is nothing.
    """
    found = []
    for entry in sorted(path.iterdir()):
        match = NAME.fullmatch(entry.name)
        if match is None or not entry.is_dir():
            continue
        step, word = int(match[1]), match[2]
        found.append(_aside(entry, step, ASIDE[word]) if word else _committed(entry, step, verify(step)))
    if not found:
        raise UserError(
            f"there are no checkpoints in {path}.\n"
            "Give a run's folder, its checkpoints folder or one step in it. A run writes its first checkpoint after "
            "checkpoint.every steps, and its last one at its end."
        )
    return sorted(found, key=lambda each: (each.step, each.name))


def choose(path: Path, steps: list[Step], wanted: int | None) -> Step:
    """The step asked for, or else the newest whole one. Raises UserError if it is missing or damaged."""
    whole = ", ".join(str(each.step) for each in steps if each.whole) or "none"
    committed = {each.step: each for each in steps if each.name == folder.step_name(each.step)}
    if wanted is None:
        chosen = max((each for each in steps if each.whole), key=lambda each: each.step, default=None)
        if chosen is None:
            listed = "\n".join(f"  {each.name}: {_why(each)}" for each in steps)
            raise UserError(f"none of the checkpoints in {path} is whole:\n{listed}")
        return chosen
    if wanted not in committed:
        raise UserError(f"there is no checkpoint of step {wanted} in {path}.\nWhole steps: {whole}.")
    chosen = committed[wanted]
    if not chosen.whole:
        listed = "\n".join(f"  {fault}" for fault in chosen.faults)
        raise UserError(f"checkpoint step {wanted} in {path} is damaged:\n{listed}\nWhole steps: {whole}.")
    return chosen


def _why(step: Step) -> str:
    more = f" (and {len(step.faults) - 3} more)" if len(step.faults) > 3 else ""
    return "; ".join(step.faults[:3]) + more or step.state


def describe(path: Path, step: int) -> Description:
    """What a committed step holds. Raises UserError if its meta.json or the description of its arrays is damaged."""
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
    """A folder that is no committed step; its files may disappear while it is looked at."""
    sizes = [
        size for root, _, names in os.walk(path) for name in names if (size := _size(Path(root) / name)) is not None
    ]
    try:
        time = path.stat().st_mtime
    except FileNotFoundError:
        time = 0.0
    return Step(step, path.name, state, time, sum(sizes), len(sizes))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _committed(path: Path, step: int, verify: bool) -> Step:
    try:
        entries = integrity.read_manifest(path)
    except (Damaged, OSError) as error:
        seen = _aside(path, step, DAMAGED)
        return Step(step, path.name, DAMAGED, seen.time, seen.bytes, seen.files, verify, (str(error),))
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
    """The axes of weights, and of moments that have a weight's path and shape.

    declared: path of a weight -> its logical axes.
    """
    found = {}
    # Longest first: "norm.gain" is also the end of "blocks.norm.gain".
    for path, axes in sorted(declared.items(), key=lambda item: -len(item[0])):
        weight = arrays.get(f"params.{path}")
        if weight is None or len(weight.shape) != len(axes):
            continue
        for name, array in arrays.items():
            alike = name == weight.name or (name.startswith("optimizer.") and name.endswith(f".{path}"))
            if alike and array.shape == weight.shape:
                found.setdefault(name, tuple(axes))
    return found
