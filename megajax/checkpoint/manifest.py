"""The SHA-256 manifest of a checkpoint.

Orbax commits by a rename, which does not verify the content, and array files carry no checksum: a truncated or
corrupted file would load, or fail in the middle of a load. So every file is hashed after it is written, the manifest
is written last. Files of more than BLOCK_BYTES have a hash for each block, which is compared when the block is read for
a restore; the others are verified before.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.checkpoint.step_folders import META
from megajax.config.read_limits import DOCUMENT, parse_json
from megajax.storage import disk
from megajax.storage.folders import Folder, read_into, read_small, size_fault
from megajax.storage.safe_paths import is_below

MANIFEST = "manifest.json"
FORMAT = 2
"""In format 1, each file has one hash."""
BLOCK_BYTES = 2**23
"""Bytes that have one hash. Reading any of them reads all of them."""

type Entries = dict[str, dict[str, Any]]
"""Path in the step's folder -> {"bytes": int, "sha256": hexadecimal}.

A file of several blocks also has "block", their size, and the hashes of the blocks one after another."""


class Damaged(Exception):
    """A step is damaged; the message names the file and the reason."""


def _hash(folder: Folder, name: str, first: int, last: int) -> str:
    """SHA-256 of a range of a file. Raises OSError."""
    digest, buffer = hashlib.sha256(), np.empty(min(last - first, BLOCK_BYTES), np.uint8)
    while first < last and (size := read_into(folder, name, buffer[: last - first], first)):
        digest.update(buffer[:size])
        first += size
    return digest.hexdigest()


def block_count(entry: Mapping[str, Any]) -> int:
    """Number of hashes of a file."""
    return max(1, -(-entry["bytes"] // entry["block"])) if "block" in entry else 1


def block_range(entry: Mapping[str, Any], block: int) -> tuple[int, int]:
    """First byte of a block, and the one after its last."""
    size = entry.get("block", max(1, entry["bytes"]))
    return block * size, min((block + 1) * size, entry["bytes"])


def block_fault(entry: Mapping[str, Any], block: int, actual: str) -> str | None:
    """Why a block with this SHA-256 is not the one of the manifest, or None."""
    expected = entry["sha256"][64 * block : 64 * block + 64]
    part = " of bytes {} to {}".format(*block_range(entry, block)) if "block" in entry else ""
    return None if actual == expected else f"sha256 {actual}{part}, the manifest says {expected}"


def hash_files(folder: Path, names: Iterable[str]) -> Entries:
    """Hashes the named files, and flushes them and their folders to disk."""
    names = list(names)
    in_threads(lambda name: disk.flush_to_disk(folder / name), names)
    entries: Entries = {name: _new_entry((folder / name).stat().st_size) for name in names}
    blocks = [(name, block) for name in names for block in range(block_count(entries[name]))]
    digests = in_threads(lambda block: _hash(folder, block[0], *block_range(entries[block[0]], block[1])), blocks)
    for (name, _), digest in zip(blocks, digests, strict=True):
        entries[name]["sha256"] = entries[name].get("sha256", "") + digest
    for parent in sorted({(folder / name).parent for name in names}):
        disk.flush_to_disk(parent)
    return entries


def _new_entry(size: int) -> dict[str, Any]:
    return {"bytes": size} | ({"block": BLOCK_BYTES} if size > BLOCK_BYTES else {})


def entry_of(content: bytes) -> dict[str, Any]:
    """The entry of a file with this content."""
    entry, view = _new_entry(len(content)), memoryview(content)
    ranges = (block_range(entry, block) for block in range(block_count(entry)))
    return entry | {"sha256": "".join(hashlib.sha256(view[first:last]).hexdigest() for first, last in ranges)}


def in_threads[T, R](work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Applies `work` to each item in threads. hashlib releases the GIL, so hashing does not block the training loop."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(work, items))


def seal(document: Mapping[str, Any]) -> str:
    """The SHA-256 of a JSON document, to be stored in the document itself."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def complete_step(folder: Path, hashed: Entries | None = None) -> int:
    """Hashes the files of a step that are not in `hashed`, and writes its manifest durably -> bytes of all files."""
    entries = dict(hashed or {})
    entries |= hash_files(folder, [name for name in disk.files_below(folder) if name not in entries])
    for root, _, _ in os.walk(folder):
        disk.flush_to_disk(Path(root))
    write_manifest(folder, entries)
    return sum(entry["bytes"] for entry in entries.values())


def write_manifest(folder: Path, entries: Entries) -> None:
    """Writes the manifest, the last file of a step."""
    disk.write_durably(folder / MANIFEST, manifest_text(entries))


def manifest_text(entries: Entries) -> str:
    """The content of a manifest."""
    return json.dumps({"format": FORMAT, "files": entries, "seal": seal(entries)}, indent=1, sort_keys=True)


def read_manifest(folder: Folder) -> Entries:
    """The manifest's entries. Raises Damaged if it is missing, unreadable or altered."""
    try:
        document = parse_json(read_small(folder, MANIFEST, DOCUMENT))
        version, entries, sealed = document["format"], document["files"], document["seal"]
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing, so the step was never committed") from None
    except ConnectionError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{MANIFEST} can't be read ({error})") from None
    if version not in (1, FORMAT):
        raise Damaged(f"{MANIFEST} has format {version}, this version reads 1 and {FORMAT}")
    if isinstance(entries, dict) and not all(is_below(name) for name in entries):
        raise Damaged(f"{MANIFEST} names files outside the step")
    if not isinstance(entries, dict) or not all(map(_is_entry, entries.values())):
        raise Damaged(f"{MANIFEST} does not give a size and a hash for each file")
    if sealed != seal(entries):
        raise Damaged(f"{MANIFEST} was altered: its own sha256 does not match")
    return entries


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not {"bytes", "sha256"} <= entry.keys():
        return False
    sizes = isinstance(entry["bytes"], int) and isinstance(entry.get("block", 1), int) and entry.get("block", 1) > 0
    return sizes and isinstance(entry["sha256"], str) and len(entry["sha256"]) == 64 * block_count(entry)


def read_meta(folder: Folder) -> dict[str, Any]:
    """The metadata given to `save`, verified. Raises Damaged, also for the metadata of another step.

    The number of a step is also the name of its folder, by which runs find it. A folder that was copied or renamed
    would continue the run at another step than that of its arrays.
    """
    entries = read_manifest(folder)
    if META not in entries:
        raise Damaged(f"{META} is not in the manifest")
    verify(folder, entries, [META])
    try:
        document = parse_json(read_small(folder, META, DOCUMENT))
        step, meta = document["step"], document["meta"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{META} can't be read ({error!r})") from None
    if step != int(folder.name.partition(".")[0]):  # of STEP or, in a store, of STEP.TOKEN
        raise Damaged(f"it is step {step} in a folder with the name {folder.name}: the folder was copied or renamed")
    return meta


class Fault(NamedTuple):
    """A file that differs from the manifest."""

    name: str
    """Path in the step's folder."""
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def wrong_sizes(folder: Folder, entries: Entries, names: Iterable[str]) -> list[Fault]:
    """The named files that are missing, have another size, or are not in the manifest. Contents are not read."""

    def fault(name: str) -> Fault | None:
        known = name in entries
        reason = size_fault(folder, name, entries[name]["bytes"]) if known else "not in the manifest"
        return None if reason is None else Fault(name, reason)

    return [fault for fault in in_threads(fault, names) if fault is not None]


def wrong_contents(folder: Folder, entries: Entries, names: Iterable[str]) -> list[Fault]:
    """The named files whose SHA-256 differs from the manifest, or that can't be read."""

    def fault(block: tuple[str, int]) -> Fault | None:
        name, number = block
        try:
            reason = block_fault(entries[name], number, _hash(folder, name, *block_range(entries[name], number)))
        except OSError as error:
            reason = str(error.strerror)
        return None if reason is None else Fault(name, reason)

    blocks = [(name, block) for name in names for block in range(block_count(entries[name]))]
    faults = {fault.name: fault for fault in reversed(in_threads(fault, blocks)) if fault is not None}
    return [*reversed(faults.values())]


def verify(folder: Folder, entries: Entries, names: Iterable[str] | None = None, *, blocks: bool = True) -> None:
    """Compares files with the manifest: sizes first, then contents. Raises Damaged naming the files that differ.

    names: the files to check (default: all), so that processes can divide the work.
    blocks: whether to read files of several blocks, which `VerifiedReads` verifies when it reads them.
    """
    selected = sorted(entries if names is None else names)
    contents = [name for name in selected if blocks or "block" not in entries.get(name, {})]
    faults = wrong_sizes(folder, entries, selected) or wrong_contents(folder, entries, contents)
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise Damaged("; ".join(map(str, faults[:3])) + more)
