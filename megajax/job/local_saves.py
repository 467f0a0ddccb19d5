"""Local checkpoints in a job: which checkpoint it starts from, saves between steps, and one when a process is lost."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from megajax.checkpoint.failures import CheckpointError
from megajax.checkpoint.local.history import RunHistory
from megajax.checkpoint.local.manager import LocalCheckpoints
from megajax.checkpoint.local.reader import LocalReader, NotWhole
from megajax.checkpoint.manager import CheckpointManager, SaveReport
from megajax.checkpoint.reader import CheckpointReader, say
from megajax.config.errors import ConfigError, UserError
from megajax.job.save import note_committed
from megajax.mesh.mesh import build_mesh, devices_per_process
from megajax.metrics.event_log import append_event
from megajax.resilience.activity import BACKGROUND_SAVE, Activity
from megajax.training.replan import replanned
from megajax.training.run_config import RunConfig
from megajax.training.session import Run
from megajax.training.timing import SAVE

LOST_SECONDS = 5.0
"""How long to wait for a state that another process may never finish."""

type Start = tuple[CheckpointReader | LocalReader, int]
"""What a run starts from, and the step."""


class LocalSaves:
    """The hook that saves, and all else a job has to do with local checkpoints; without any it does nothing."""

    phase = SAVE

    def __init__(
        self,
        cfg: RunConfig,
        manager: CheckpointManager,
        activity: Activity,
        event: Callable[..., None],
        *,
        skip_train: bool = False,
    ):
        """skip_train: nothing is to be written. Raises UserError for a folder that can't be used."""
        self.cfg, self.manager, self.activity, self.event = cfg, manager, activity, event
        self.local: LocalCheckpoints | None = None
        self.reader: LocalReader | None = None
        self.meta: Callable[[], dict[str, Any]] = dict
        """What goes into a checkpoint beside the arrays; set before the first step."""
        self.saved: int | None = None
        """Last step handed over."""
        if cfg.checkpoint.local is not None and not skip_train:
            self.local = cfg.checkpoint.local.build(
                manager.folder, during=lambda step: activity.phase(BACKGROUND_SAVE, step)
            )
            self.reader = LocalReader(self.local)

    def start(self) -> Start | None:
        """The newest whole checkpoint of the run, local or shared; else what `CheckpointManager.start` gives."""
        local = self._newest_local()
        if local is None or self.reader is None or self.local is None:
            return self.manager.start()
        shared = self.local.peers.share(self.manager.newest())
        if shared is None or local > shared:
            return self._taken(local)
        try:
            start = self.manager.start()
        except UserError as error:
            say(f"{error}\nThe local checkpoint of step {local} is whole and is used.")
            return self._taken(local)
        if start is None or (start[0] is self.manager and start[1] < local):
            return self._taken(local)
        return start

    def _taken(self, step: int) -> Start:
        if self.reader is None:
            raise ValueError("there are no local checkpoints")
        say(f"starting from step {step} in local checkpoints ({self.reader.folder.parent} on each machine)")
        self.event("start_source", step=step, kind="local")
        return self.reader, step

    def _newest_local(self) -> int | None:
        """The newest local checkpoint that this run can start from; people hear of newer ones that it can't."""
        if self.reader is None or self.cfg.checkpoint.step is not None:
            return None
        step = self.reader.newest_whole()
        if self.reader.passed_over:
            self._told_passed_over(self.reader.passed_over, step)
        if step is None:
            return None
        saved, here = self.reader.meta(step)["mesh"], mesh_here(self.cfg)
        if saved != here:
            why = f"it is of the mesh {_mesh(saved)}, this run has {'another' if here is None else _mesh(here)}"
            self._told(f"the local checkpoint of step {step} is not used: {why}; the shared folder's are")
            self.event("checkpoint_fallback", from_step=step, to_step=self.manager.newest(), kind="local", why=why)
            return None
        return step

    def _told_passed_over(self, passed_over: Sequence[NotWhole], step: int | None) -> None:
        """Tell of local checkpoints that are not whole. step: the newest that is."""
        peers = None if self.local is None else self.local.peers
        shared = self.manager.newest() if peers is None else peers.share(self.manager.newest())
        used = step is not None and (shared is None or step > shared)
        to = f"the local checkpoint of step {step}" if used else "the shared folder's checkpoints"
        next_one = step if used else shared
        for passed in (each for each in passed_over if shared is None or each.step > shared):
            self._told(f"the local checkpoint of step {passed.step} is not whole: {passed.why}; next are {to}")
            self.event("checkpoint_fallback", from_step=passed.step, to_step=next_one, kind="local", why=passed.why)

    def _told(self, line: str) -> None:
        if self.local is not None and self.local.peers.first:
            say(line)

    def own(self, start: Start | None) -> bool:
        """Whether a checkpoint is of this run and no other."""
        return start is not None and start[0] in (self.manager, self.reader)

    def begin(self, run: Run, first: int) -> None:
        """Training begins from step `first`. Raises UserError if the folder has no room for local checkpoints."""
        if self.local is not None:
            self.local.begin(first, run.state)
        elif jax.process_index() == 0:
            RunHistory.note_without_local(self.manager.folder, first)

    def due(self, step: int) -> bool:
        return self.local is not None and self.local.due(step) and not self.manager.due(step, self.cfg.steps)

    def __call__(self, run: Run, step: int) -> None:
        if self.local is not None:
            self.event("save_begun", step=step, kind="local")
            self.saved = step
            self.local.save(step, run.state, self.meta())

    def before_stop(self, run: Run, step: int) -> None:
        """The run is about to be stopped from outside: the local checkpoint is done sooner than the shared one."""
        if self.local is not None and not self.local.stopped and self.saved != step:
            self(run, step)

    def committed(self) -> None:
        """Note the saves that have ended since. A failed one does not end the run."""
        for report in () if self.local is None else self.local.poll():
            if report.failure is not None:
                self._failed(report)
                continue
            note_committed(report, self.event, self.activity, kind="local")

    def _failed(self, report: SaveReport) -> None:
        local = self.local
        if local is None:
            return
        following = "no more local checkpoints in this attempt" if local.stopped else "training continues"
        self.event(
            "save_failed", step=report.step, why=report.failure, failures=local.failures, next=following, kind="local"
        )
        self._told(
            f"local checkpoint step {report.step} not saved: {report.failure}; {local.failures} in a row: {following}"
        )

    def finished(self) -> None:
        """Training is over: local checkpoints go where the shared folder has the same step or a later one."""
        if self.local is None:
            return
        self.local.wait()
        self.committed()
        shared = self.local.peers.share(self.manager.newest())
        newest = max((each.index.info.step for each in self.local.served.values()), default=None)
        if self.local.peers.share(newest is None or (shared is not None and shared >= newest)):
            self.local.clear()

    def rescue(self, run: Run, error: BaseException) -> None:
        """Another process was lost: save the state of this one, if the step it belongs to is over and it is intact.

        The arrays of the last step are given to the next one when that begins; if it fails, they are gone. Then, and
        if the state can't be read, only a message says so.
        """
        local = self.local
        if local is None or local.peers.count == 1 or not isinstance(error, jax.errors.JaxRuntimeError):
            return
        before = max((each.index.info.step for each in local.served.values()), default=None)
        kept = f"the newest local checkpoint is of step {before}" if before is not None else "there is none before"
        step = intact_step(run.state, LOST_SECONDS)
        if step is None or step != self.activity.step:
            say(f"another process was lost during a step, whose state is not whole: nothing is saved; {kept}")
        elif step == before:
            say(f"another process was lost; {kept}, the last one")
        else:
            say(f"another process was lost; {self._save_alone(local, run, step)}")

    def _save_alone(self, local: LocalCheckpoints, run: Run, step: int) -> str:
        """Save what this process has -> what to say of it."""
        try:
            parts = local.save_alone(step, run.state, self.meta())
        except CheckpointError as failed:
            return f"step {step} not saved: {failed.reason}"
        except Exception as failed:  # the error that ends the run is the one to be raised
            return f"step {step} not saved: {type(failed).__name__}: {failed}"
        whole, process = len(parts) == local.peers.count, local.members.process
        told = {"step": step, "kind": "emergency", "process": process, "parts": list(parts), "whole": whole}
        append_event(Path(self.cfg.run_dir).expanduser() / "events.jsonl", "save_committed", **told)
        shards = "all shards" if whole else f"the shards of {len(parts)} of {local.peers.count} processes"
        return f"process {process} saved step {step} in {local.folder.own}: {shards}"

    def close(self) -> None:
        if self.local is not None:
            self.local.close()

    def __enter__(self) -> "LocalSaves":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def mesh_here(cfg: RunConfig) -> dict[str, int] | None:
    """Sizes of the mesh of a run; None if its layout does not fit the devices, which is explained when it is set up."""
    try:
        devices = jax.devices()
        parallel = replanned(cfg, devices_per_process(devices)).cfg.parallel if cfg.parallel.elastic else cfg.parallel
        return dict(build_mesh(parallel, devices).shape)
    except ConfigError:
        return None


def intact_step(state: Any, seconds: float) -> int | None:
    """The step of a state whose arrays are all there, within so many seconds; None if some are not.

    An array is not there if it was given to a program, or if the program that was to make it failed or never ends.
    """
    result: list[int] = []

    def read() -> None:
        try:
            if not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
                jax.block_until_ready(state)
                result.append(int(state.step))
        except RuntimeError:  # of a program that failed, JaxRuntimeError among them
            return

    thread = threading.Thread(target=read, name="megajax state", daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None


def _mesh(shape: dict[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in shape.items() if size > 1) or "1 device"
