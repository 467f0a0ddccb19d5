"""jax's persistent compilation cache, with a checksum for each entry.

jax reads entries in every process and writes them in process 0, which also limits the total size. It detects most
damaged entries, warns of them at each start and never replaces them, but it would run damaged machine code. So each
entry has a SHA-256 beside it, and entries that don't match are deleted before jax reads them.
"""

import contextlib
import hashlib
import os
import platform
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib

from megajax.mesh.mesh import find_devices
from megajax.metrics.run_folder import write_atomically
from megajax.processes.peers import Peers
from megajax.processes.xla_options import XlaConfig
from megajax.storage.index_cache import user_cache
from megajax.storage.write_errors import write_fault

JAX_CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
"""If a user sets this variable, jax alone manages the cache, in that folder."""
MIN_COMPILE_SECONDS = 0.25
"""Programs that compile faster are not cached: they would be many files."""
DIGEST = ".sha256"
LAST_START = ".writable"
"""File in a cache folder that each start rewrites."""
UNUSED_SECONDS = 30 * 24 * 3600
"""Folders of other versions of jax are deleted when no run has used them for this long."""
SHARED_SECONDS = 3.0
"""A network file system may show a new file late."""
GIB = 2**30


def use_cache(xla: XlaConfig) -> None:
    """Set up jax's cache, after the processes of a run have connected and before the first compilation.

    Several processes use it only if all see the same folder: XLA divides autotuning between processes, and a process
    that read the program from a folder of its own would never send its share. All of them decide alike.
    """
    if not xla.compile_cache:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    peers = Peers("compile cache")
    chosen_by_user = peers.gather(bool(os.environ.get(JAX_CACHE_VARIABLE)))
    if all(chosen_by_user):
        return
    base = Path(xla.compile_cache_dir).expanduser() if xla.compile_cache_dir else user_cache() / "compile"
    folder = base / machine()
    reason = f"{JAX_CACHE_VARIABLE} is set for {chosen_by_user.count(True)} of {peers.count} processes"
    if not any(chosen_by_user):
        reason = unusable(peers, base, folder)
    if reason is not None:
        if peers.first:
            print(f"warning: {reason}; compiled programs are not cached", file=sys.stderr)
        jax.config.update("jax_enable_compilation_cache", False)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if peers.first:
        # Not in other processes: with a limit, jax locks the folder for each read.
        jax.config.update("jax_compilation_cache_max_size", round(xla.compile_cache_gib * GIB))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)


def cache_in_use() -> Path | None:
    """The folder of jax's compilation cache; None if the cache is off."""
    folder = jax.config.jax_compilation_cache_dir
    return Path(folder) if folder and jax.config.jax_enable_compilation_cache else None


def machine() -> str:
    """Name of the folder for programs of this jax version and machine type. Raises the errors of `find_devices`."""
    backend = find_devices()[0].platform
    parts = [f"jax-{jax.__version__}", f"jaxlib-{jaxlib.__version__}", backend]
    if backend == "cpu":
        # Programs for CPUs contain machine code for this exact processor.
        parts.append(hashlib.sha256(_processor().encode()).hexdigest()[:8])
    return "-".join(parts)


def record(folder: Path) -> None:
    """Write the SHA-256 of every entry that has none: the entries that this process just wrote."""
    for path in _entries(folder):
        if not _digest(path).exists():
            with contextlib.suppress(OSError):  # the next start deletes an entry without a SHA-256
                write_atomically(_digest(path), hashlib.sha256(path.read_bytes()).hexdigest())


def delete_damaged(folder: Path) -> list[str]:
    """Delete entries that don't match their SHA-256 or have none. Returns the names of those that don't match.

    A missing SHA-256 is no damage: the process was killed before it wrote one, or is about to write it. Autotuning
    results, which XLA writes into a subfolder even for programs that are not cached, are not returned either.
    """
    damaged = []
    for path in _entries(folder):
        try:
            digest = _digest(path).read_text()
            if digest == hashlib.sha256(path.read_bytes()).hexdigest():
                continue
            damaged += [path.name] * (path.parent == folder)
        except OSError:
            pass
        with contextlib.suppress(OSError):  # another start may do the same
            path.unlink(missing_ok=True)
    for digest_file in folder.rglob(f"*{DIGEST}"):
        if not digest_file.with_suffix("").exists():  # jax evicted the entry
            digest_file.unlink(missing_ok=True)
    return damaged


def delete_unused(base: Path, *, now: float) -> None:
    """Delete the folders in `base` that no run has used for UNUSED_SECONDS: jax limits only its own folder's size."""
    for folder in base.glob("jax-*"):
        last_start = folder / LAST_START
        if last_start.exists() and now - last_start.stat().st_mtime > UNUSED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def unusable(peers: Peers, base: Path, folder: Path) -> str | None:
    """Why the processes can't share this folder in `base`, the same on all of them; None if they can."""
    return peers.agree(_prepare(base, folder) if peers.first else None) or _not_shared(peers, folder)


def _prepare(base: Path, folder: Path) -> str | None:
    """Create and check the folder. Returns why it can't be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_mode & stat.S_IWOTH:  # the programs are machine code
            return f"anyone may write to the compile cache {folder}: run chmod o-w on it, or name another folder"
        (folder / LAST_START).write_text("")
        delete_unused(base, now=time.time())
        if damaged := delete_damaged(folder):
            print(f"compile cache: {len(damaged)} damaged entries deleted in {folder}", file=sys.stderr)
    except OSError as error:
        return f"the compile cache {folder} can't be written: {write_fault(error)}"
    return None


def _not_shared(peers: Peers, folder: Path) -> str | None:
    """An error if some process does not see the folder of process 0; else None. All processes call it."""
    if peers.count == 1:
        return None
    token = folder / f".seen-{peers.broadcast(secrets.token_hex(4))}"
    if peers.first:
        with contextlib.suppress(OSError):
            token.write_text("")
    peers.agree()  # the file is written
    deadline = time.monotonic() + SHARED_SECONDS
    # Not token.exists(), which fails in a folder that this process may not enter, while the others wait.
    while not (exists := os.path.exists(token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    reason = peers.agree(None if exists else f"the compile cache {folder} is not the folder that process 0 sees")
    if peers.first:
        token.unlink(missing_ok=True)
    return reason


def _entries(folder: Path) -> Iterator[Path]:
    """Compiled programs and XLA's autotuning files, without the files in which jax stores access times."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith((DIGEST, "-atime")):
            yield path


def _digest(path: Path) -> Path:
    return path.with_name(path.name + DIGEST)


def _processor(description: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = description.read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    fields = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(fields)))
