"""Compiled programs kept on disk between starts: jax's persistent cache, in a folder that is checked and bounded.

jax reads an entry in every process and writes it in process 0. A damaged one it notices in most cases, warns of at each
start, and never replaces; one whose machine code was hit it would run. So each entry has a SHA-256 beside it, and what
does not match is thrown away before jax looks.
"""

import contextlib
import hashlib
import os
import platform
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib
from jax.experimental import multihost_utils

from megajax.data.cache import user_cache
from megajax.mesh.mesh import find_devices
from megajax.mesh.xla import XlaConfig
from megajax.resilience.signals import agree

OWN = "JAX_COMPILATION_CACHE_DIR"
"""Set by a user, the cache is that folder, as jax alone would have it."""
LEAST_SECONDS = 0.25
"""Programs that compile faster are not kept: they would be many files."""
DIGEST = ".sha256"
GIB = 2**30


def use_cache(xla: XlaConfig) -> None:
    """Have jax keep programs as the settings say: after the processes of a run have met, before the first compile.

    Several processes use it only where all see one folder: a process that compiles waits for the others' share of the
    timing of kernels, which never comes from one that found the program in a folder of its own.
    """
    if not xla.compile_cache:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if os.environ.get(OWN):
        return
    base = Path(xla.compile_cache_dir).expanduser() if xla.compile_cache_dir else user_cache() / "compile"
    folder = base / machine()
    reason = _prepare(base, folder, round(xla.compile_cache_gib * GIB))
    if agree(reason is not None):
        if reason is not None:
            print(f"warning: {reason}; programs are not kept", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)


def cache_in_use() -> Path | None:
    """The folder in which jax keeps programs; None where it keeps none."""
    folder = jax.config.jax_compilation_cache_dir
    return Path(folder) if folder and jax.config.jax_enable_compilation_cache else None


def machine() -> str:
    """Name of the folder for programs that run with this jax and on this kind of machine. Raises as `find_devices`."""
    backend = find_devices()[0].platform
    parts = [f"jax-{jax.__version__}", f"jaxlib-{jaxlib.__version__}", backend]
    if backend == "cpu":
        # Its programs hold machine code for this very processor.
        parts.append(hashlib.sha256(_processor().encode()).hexdigest()[:8])
    return "-".join(parts)


def record(folder: Path) -> None:
    """Write down the SHA-256 of every entry that has none: of those this process has just made."""
    for path in _entries(folder):
        beside = _digest_of(path)
        if not beside.exists():
            try:
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
                temporary.write_text(digest)
                os.replace(temporary, beside)
            except OSError:
                continue  # the next start throws the entry away


def sweep(base: Path, folder: Path, limit: int) -> list[str]:
    """Throw away damaged entries of `folder`, then the least used ones below `base` until `limit` bytes are left.

    Returns the names of the damaged ones. XLA writes results of autotuning into a folder of its own below, also for
    programs that are not kept. Those without a checksum are removed too, but not reported: they are measured again.
    """
    damaged = []
    for path in _entries(folder):
        try:
            sound = _digest_of(path).read_text() == hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            sound = False
        if not sound:
            if path.parent == folder:
                damaged.append(path.name)
            _remove(path)
    entries = []
    for path in _entries(base):
        try:
            found = path.stat()
        except OSError:
            continue
        entries.append((max(found.st_atime, found.st_mtime), found.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= limit:
            break
        _remove(path)
        total -= size
    return damaged


def _prepare(base: Path, folder: Path, limit: int) -> str | None:
    """Make and sweep the folder, in process 0, and see whether all have the same. Returns why it can't be used."""
    first = jax.process_index() == 0
    reason = None
    if first:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            damaged = sweep(base, folder, limit)
            if damaged:
                print(f"compile cache: {len(damaged)} damaged entries thrown away in {folder}", file=sys.stderr)
            (folder / ".writable").write_text("")
        except OSError as error:
            reason = f"the compile cache {folder} cannot be written: {error.strerror or error}"
    if jax.process_count() == 1:
        return reason
    return reason or _not_shared(folder, first)


def _not_shared(folder: Path, first: bool) -> str | None:
    """Why the folder is not the one process 0 sees; a collective."""
    number = int(multihost_utils.broadcast_one_to_all(secrets.randbits(31)))
    token = folder / f".seen-{number}"
    if first:
        with contextlib.suppress(OSError):
            token.write_text("")
    multihost_utils.sync_global_devices("compile cache")
    deadline = time.monotonic() + 3.0  # a network file system may show a new file late
    while not (there := token.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    multihost_utils.sync_global_devices("compile cache seen")
    if first:
        token.unlink(missing_ok=True)
    return None if there else f"the compile cache {folder} is not the same folder for all processes"


def _entries(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(".") and path.suffix != DIGEST:
            yield path


def _digest_of(path: Path) -> Path:
    return path.with_name(path.name + DIGEST)


def _remove(path: Path) -> None:
    for file in (path, _digest_of(path)):
        try:
            file.unlink(missing_ok=True)
        except OSError:
            continue  # another start may be at it


def _processor(description: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = description.read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
