"""The SHA-256 manifest that makes a folder of files a checkpoint, and the writing that survives a power cut.

Orbax commits by a rename that says nothing of the content, and the bytes of arrays carry no checksum; a truncated or
flipped file would load, or fail in the middle of a load. So every file is hashed after it was written, the manifest is
written last, and it is verified before anything is loaded.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST = "manifest.json"
FORMAT = 1

type Entries = dict[str, dict[str, Any]]
"""path inside the step, with "/" -> {"bytes": int, "sha256": hexadecimal}."""


class Damaged(Exception):
    """A step is not whole; the message says which file and why."""


def flush_to_disk(path: Path) -> None:
    """fsync of a file or a folder (a folder's fsync makes the names in it durable)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Writes a small file so that after a crash it is there in full or not at all."""
    temporary = path.with_name(path.name + ".writing")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    flush_to_disk(path.parent)


def files_below(folder: Path) -> list[str]:
    """Paths of all files below a folder, relative to it, sorted."""
    return sorted(
        (Path(root) / name).relative_to(folder).as_posix() for root, _, names in os.walk(folder) for name in names
    )


def _hash(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def hash_files(folder: Path, names: Iterable[str], durably: bool = False) -> Entries:
    """Hashes the named files; with `durably` also forces them and their folders to the disk.

    hashlib lets go of the interpreter while it works, so several files are hashed at once and a training loop in
    the main thread goes on.
    """
    names = list(names)

    def one(name: str) -> dict[str, Any]:
        if durably:
            flush_to_disk(folder / name)
        return _hash(folder / name)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        entries = dict(zip(names, pool.map(one, names), strict=True))
    if durably:
        for parent in sorted({(folder / name).parent for name in names}):
            flush_to_disk(parent)
    return entries


def _seal(entries: Entries) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, entries: Entries) -> None:
    """Writes the manifest, as the last file of a step."""
    document = {"format": FORMAT, "files": entries, "seal": _seal(entries)}
    write_durably(folder / MANIFEST, json.dumps(document, indent=1, sort_keys=True))


def read_manifest(folder: Path) -> Entries:
    """The manifest's entries. Raises Damaged if it is missing, unreadable or altered."""
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        form, entries, seal = document["format"], document["files"], document["seal"]
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing, so the step was never committed") from None
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{MANIFEST} can't be read ({error})") from None
    if form != FORMAT:
        raise Damaged(f"{MANIFEST} has format {form}, this version reads {FORMAT}")
    if seal != _seal(entries):
        raise Damaged(f"{MANIFEST} was altered: its own sha256 does not match")
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in entries):
        raise Damaged(f"{MANIFEST} names files outside the step")
    return entries


class Fault(NamedTuple):
    """One file that is not as the manifest has it."""

    name: str
    """Path inside the step, with "/"."""
    what: str
    """What was compared: "bytes" or "sha256"; "error" where the file can't be read."""
    found: str
    wanted: str
    """What the manifest says; "" if the file is not in it or can't be read."""

    def __str__(self) -> str:
        if not self.wanted:
            return f"{self.name}: {self.found}"
        found = f"{self.found} bytes" if self.what == "bytes" else f"sha256 {self.found}"
        return f"{self.name}: {found}, the manifest says {self.wanted}"


def wrong_sizes(folder: Path, entries: Entries, names: Iterable[str]) -> list[Fault]:
    """The named files that are missing, not in the manifest or of another size. Contents are not read."""
    faults = []
    for name in names:
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            faults.append(Fault(name, "error", str(error.strerror), ""))
            continue
        if name not in entries:
            faults.append(Fault(name, "error", "not in the manifest", ""))
        elif size != entries[name]["bytes"]:
            faults.append(Fault(name, "bytes", str(size), str(entries[name]["bytes"])))
    return faults


def wrong_contents(folder: Path, entries: Entries, names: Iterable[str]) -> list[Fault]:
    """The named files whose SHA-256 is another than in the manifest, or that can't be read."""
    names = list(names)

    def one(name: str) -> Fault | None:
        try:
            found = _hash(folder / name)["sha256"]
        except OSError as error:
            return Fault(name, "error", str(error.strerror), "")
        wanted = entries[name]["sha256"]
        return None if found == wanted else Fault(name, "sha256", found, wanted)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return [fault for fault in pool.map(one, names) if fault is not None]


def verify(folder: Path, entries: Entries, names: Iterable[str] | None = None) -> None:
    """Compares files with the manifest: sizes first, then contents. Raises Damaged naming the files that differ.

    names: which of them (default: all), so that several processes can share the work.
    """
    chosen = sorted(entries if names is None else names)
    faults = wrong_sizes(folder, entries, chosen) or wrong_contents(folder, entries, chosen)
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise Damaged("; ".join(map(str, faults[:3])) + more)
