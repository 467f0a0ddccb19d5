"""The SHA-256 manifest of a checkpoint.

Orbax commits by a rename, which does not verify the content, and array files carry no checksum: a truncated or
corrupted file would load, or fail in the middle of a load. So every file is hashed after it is written, the manifest
is written last, and it is verified before anything is loaded.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from megajax.checkpoint import disk
from megajax.checkpoint.folder import META
from megajax.checkpoint.named_files import is_below
from megajax.config.budget import DOCUMENT, read_json

MANIFEST = "manifest.json"
FORMAT = 1

type Entries = dict[str, dict[str, Any]]
"""Path in the step's folder -> {"bytes": int, "sha256": hexadecimal}."""


class Damaged(Exception):
    """A step is damaged; the message names the file and the reason."""


def _hash(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def hash_files(folder: Path, names: Iterable[str]) -> Entries:
    """Hashes the named files, and flushes them and their folders to disk."""
    names = list(names)

    def entry(name: str) -> dict[str, Any]:
        disk.flush_to_disk(folder / name)
        return _hash(folder / name)

    entries = dict(zip(names, in_threads(entry, names), strict=True))
    for parent in sorted({(folder / name).parent for name in names}):
        disk.flush_to_disk(parent)
    return entries


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
    document = {"format": FORMAT, "files": entries, "seal": seal(entries)}
    disk.write_durably(folder / MANIFEST, json.dumps(document, indent=1, sort_keys=True))


def read_manifest(folder: Path) -> Entries:
    """The manifest's entries. Raises Damaged if it is missing, unreadable or altered."""
    path = folder / MANIFEST
    try:
        document = read_json(path, DOCUMENT)
        version, entries, sealed = document["format"], document["files"], document["seal"]
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing, so the step was never committed") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{MANIFEST} can't be read ({error})") from None
    if not isinstance(entries, dict) or not all(
        isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys() for entry in entries.values()
    ):
        raise Damaged(f"{MANIFEST} does not give a size and a hash for each file")
    if version != FORMAT:
        raise Damaged(f"{MANIFEST} has format {version}, this version reads {FORMAT}")
    if sealed != seal(entries):
        raise Damaged(f"{MANIFEST} was altered: its own sha256 does not match")
    if not all(is_below(name) for name in entries):
        raise Damaged(f"{MANIFEST} names files outside the step")
    return entries


def read_meta(folder: Path) -> dict[str, Any]:
    """The metadata given to `save`, verified. Raises Damaged, also for the metadata of another step.

    The number of a step is also the name of its folder, by which runs find it. A folder that was copied or renamed
    would continue the run at another step than that of its arrays.
    """
    entries = read_manifest(folder)
    if META not in entries:
        raise Damaged(f"{META} is not in the manifest")
    verify(folder, entries, [META])
    try:
        document = read_json(folder / META, DOCUMENT)
        step, meta = document["step"], document["meta"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{META} can't be read ({error!r})") from None
    if step != int(folder.name):
        raise Damaged(f"it is step {step} in a folder with the name {folder.name}: the folder was copied or renamed")
    return meta


class Fault(NamedTuple):
    """A file that differs from the manifest."""

    name: str
    """Path in the step's folder."""
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def wrong_sizes(folder: Path, entries: Entries, names: Iterable[str]) -> list[Fault]:
    """The named files that are missing, have another size, or are not in the manifest. Contents are not read."""
    faults = []
    for name in names:
        try:
            status = (folder / name).stat()
        except OSError as error:
            faults.append(Fault(name, str(error.strerror)))
            continue
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for, a device read without end
            faults.append(Fault(name, "not a file"))
            continue
        if name not in entries:
            faults.append(Fault(name, "not in the manifest"))
        elif status.st_size != entries[name]["bytes"]:
            faults.append(Fault(name, f"{status.st_size} bytes, the manifest says {entries[name]['bytes']}"))
    return faults


def wrong_contents(folder: Path, entries: Entries, names: Iterable[str]) -> list[Fault]:
    """The named files whose SHA-256 differs from the manifest, or that can't be read."""

    def fault(name: str) -> Fault | None:
        try:
            actual = _hash(folder / name)["sha256"]
        except OSError as error:
            return Fault(name, str(error.strerror))
        expected = entries[name]["sha256"]
        return None if actual == expected else Fault(name, f"sha256 {actual}, the manifest says {expected}")

    return [fault for fault in in_threads(fault, names) if fault is not None]


def verify(folder: Path, entries: Entries, names: Iterable[str] | None = None) -> None:
    """Compares files with the manifest: sizes first, then contents. Raises Damaged naming the files that differ.

    names: the files to check (default: all), so that processes can divide the work.
    """
    selected = sorted(entries if names is None else names)
    faults = wrong_sizes(folder, entries, selected) or wrong_contents(folder, entries, selected)
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise Damaged("; ".join(map(str, faults[:3])) + more)
