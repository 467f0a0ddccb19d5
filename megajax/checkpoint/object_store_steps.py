"""Steps of a run in an object store.

PREFIX/checkpoints/00000100.5f0c9a1e0002/     meta.json, manifest.json and arrays, as of a step in a folder
PREFIX/checkpoints/committed/00000100         the name of the folder of a committed step; created last
PREFIX/checkpoints/committed/00000150.damaged of a step that was set aside, with the suffixes of step folders
PREFIX/checkpoints/lease                      the run that writes here
PREFIX/config.yaml, metrics.jsonl, ...        copies of the run folder's files

A store cannot rename. The commit is `committed/STEP`, which one writer can create; each save has a folder of its own,
so nothing that a killed attempt sends late can change a committed step. Objects are flushed when a write returns.
"""

import os
import re
import secrets
import socket
import threading
import time
from pathlib import Path

from megajax.checkpoint.step_folders import STEP, name_aside, step_name
from megajax.config.errors import UserError
from megajax.storage.stores import Store, StoreError

CHECKPOINTS, COMMITTED = "checkpoints", "committed"
FOLDER = re.compile(r"\d{8,}\.[0-9a-f]+")
LEASE = "lease"
LEASE_SECONDS = 30.0
"""A lease that was not renewed for so long is abandoned. It is renewed three times as often."""


class StoredSteps:
    """Steps in a store."""

    def __init__(self, store: Store):
        """store: of PREFIX/checkpoints."""
        self.store = store
        self.known: set[int] = set()
        """The steps that were committed when they were last listed, and changes by this object since then."""

    def __str__(self) -> str:
        return self.store.url

    def steps(self) -> list[int]:
        steps = [int(name) for name in self.commits() if STEP.fullmatch(name)]
        self.known = {*steps}
        return steps

    def damaged(self) -> list[str]:
        return [name for name in self.commits() if ".damaged" in name]

    def commits(self) -> list[str]:
        """STEP of each committed step, and STEP.SUFFIX of those set aside."""
        return self.store.below(COMMITTED).names()

    def folder(self, name: str) -> Store:
        """The files of a step by the name of its commit. Raises FileNotFoundError."""
        folder = self.store.read(f"{COMMITTED}/{name}").decode(errors="replace")
        if not FOLDER.fullmatch(folder):  # it must not lead out of the prefix
            raise FileNotFoundError(2, f"it names {folder!r:.80}, which is no folder of a step", f"{COMMITTED}/{name}")
        return self.store.below(folder)

    def files(self, step: int) -> Store:
        return self.folder(step_name(step))

    def commit(self, step: int, folder: str) -> None:
        """Makes a step count. Raises StoreError if another writer has committed it."""
        if not self.store.create(f"{COMMITTED}/{step_name(step)}", folder):
            raise StoreError(f"{self.store} has a step {step} of another run, which was committed in the meantime")
        self.known.add(step)

    def set_aside(self, step: int, suffix: str) -> str:
        name, target = step_name(step), name_aside(step, suffix, self.commits())
        self.store.write(f"{COMMITTED}/{target}", self.store.read(f"{COMMITTED}/{name}"))
        self._uncommit(step)
        return f"{self.store}/{COMMITTED}/{target}"

    def delete(self, step: int) -> None:
        folder = self.files(step)
        self._uncommit(step)
        self.store.delete(f"{folder.name}/")

    def _uncommit(self, step: int) -> None:
        name = step_name(step)
        self.known.discard(step)
        self.store.replace(f"{COMMITTED}/{name}", None, self.store.generation(f"{COMMITTED}/{name}")[1])

    def unfinished(self) -> list[str]:
        """Folders of steps without a commit: of saves in progress, and of those that were killed."""
        # Folders first: a step that is committed in between is not one of them.
        folders = {name.partition("/")[0] for name in self.store.names()}
        used = {self.store.read(f"{COMMITTED}/{name}").decode(errors="replace") for name in self.commits()}
        return sorted(name for name in folders - used if FOLDER.fullmatch(name))

    def remove_unfinished(self) -> list[str]:
        """Deletes unfinished folders. The caller holds the lease, so nobody is writing them."""
        unfinished = self.unfinished()
        for name in unfinished:
            self.store.delete(f"{name}/")
        return unfinished


class WriterLease:
    """Exclusive write access to the checkpoints of a run in a store, renewed in the background.

    A store has no locks that end with a process. Another run that finds the lease waits until it is given back, is of a
    process of this machine that is gone, or was not renewed for LEASE_SECONDS by this machine's clock. Whoever takes it
    over changes its generation, so the run that lost it can't commit: see `demand`.
    """

    def __init__(self, store: Store):
        """Raises UserError if another run holds the lease."""
        self._store, self._token = store, secrets.token_hex(8)
        self._text = f"{socket.gethostname()} pid {os.getpid()} {_started(os.getpid())} {self._token}"
        self._generation = self._acquire()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._renew, name="megajax lease", daemon=True)
        self._thread.start()

    def _acquire(self) -> object:
        last, since, began = None, time.monotonic(), time.monotonic()
        while True:
            holder, generation = self._store.generation(LEASE)
            if last != (holder, generation):
                last, since = (holder, generation), time.monotonic()
            text = holder.decode(errors="replace")
            if not holder or self._is_dead(text) or time.monotonic() - since > LEASE_SECONDS:
                if (replaced := self._replace(generation)) is not None:
                    return replaced
            elif time.monotonic() - began > 2 * LEASE_SECONDS:
                raise UserError(
                    f"{self._store} is being written by {' '.join(text.split()[:3])}.\n"
                    "Wait for that run to end, or give this one a checkpoint.store of its own."
                )
            time.sleep(0.5)

    def _replace(self, generation: object) -> object | None:
        """Writes the lease if it has this generation -> its new one, which differs from all before it."""
        return self._store.replace(LEASE, f"{self._text} {secrets.token_hex(4)}", generation)

    def _is_dead(self, holder: str) -> bool:
        """Whether the holder is a process of this machine that has ended, or this process."""
        match = re.match(r"(\S+) pid (\d+) (\S+) ", holder)
        return (
            match is not None
            and match[1] == socket.gethostname()
            and (int(match[2]) == os.getpid() or _started(int(match[2])) != match[3])
        )

    def _renew(self) -> None:
        while not self._ended.wait(LEASE_SECONDS / 3):
            try:
                self.demand()
            except StoreError:
                continue  # the next save reports it
            except UserError:
                return

    def demand(self) -> None:
        """Renews the lease. Raises UserError if another run has taken it over, StoreError."""
        with self._lock:
            replaced = self._replace(self._generation)
            if replaced is None:  # perhaps the answer to the last renewal was lost
                holder, generation = self._store.generation(LEASE)
                if self._token not in holder.decode(errors="replace"):
                    raise UserError(f"another run has taken over {self._store}: this one no longer writes there")
                replaced = generation
            self._generation = replaced

    def release(self) -> None:
        self._ended.set()
        self._thread.join(timeout=LEASE_SECONDS)
        try:
            self._store.replace(LEASE, None, self._generation)
        except StoreError:
            return  # it expires


def _started(pid: int) -> str:
    """When a process of this machine began: the machine's start, and ticks since then; "0" if there is none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return boot + Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "0"
