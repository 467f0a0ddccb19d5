"""Local checkpoints in a job: the start, saves between steps, and an emergency save when a process is lost."""

import threading
from collections.abc import Callable
from typing import Any

import jax

from megajax.checkpoint.background_saves import CheckpointError, SaveReport
from megajax.checkpoint.checkpoint_manager import CheckpointManager
from megajax.checkpoint.local.local_checkpoints import LocalCheckpoints
from megajax.checkpoint.local.machine_folder import RunHistory
from megajax.checkpoint.reader import CheckpointReader
from megajax.config.errors import UserError
from megajax.display.text import say
from megajax.faults.activity import BACKGROUND_SAVE, Activity
from megajax.faults.peer_status import runtime_error_of
from megajax.job.saves.save import note_committed
from megajax.training.guarded.phase_timers import SAVE
from megajax.training.resolved import Resolved
from megajax.training.session import Run
from megajax.training.state import TrainState

LOST_SECONDS = 5.0
"""How long to wait for a step's state: it may need a process that is gone."""

type Start = tuple[CheckpointReader | LocalCheckpoints, int]
"""The checkpoints that a run starts from, and the step."""


class LocalSaves:
    """The hook that saves local checkpoints, and their other uses in a job; does nothing if they are off."""

    phase = SAVE

    def __init__(
        self,
        resolved: Resolved,
        manager: CheckpointManager,
        activity: Activity,
        event: Callable[..., None],
        *,
        record: Callable[..., None] | None = None,
        skip_train: bool = False,
    ):
        """record: `event` for any process. skip_train: write nothing. Raises UserError for an unusable folder."""
        self.cfg, self._mesh = resolved.cfg, dict(resolved.mesh.shape)
        self.manager, self.activity, self.event, self._record = manager, activity, event, record or event
        self.local: LocalCheckpoints | None = None
        self.meta: Callable[[], dict[str, Any]] = dict
        """Metadata for a checkpoint; set before the first step."""
        self.saved: int | None = None
        """Step of the last save that was started."""
        if (config := self.cfg.checkpoint.local) is not None and not skip_train:
            self.local = config.build(manager.folder, background=lambda step: activity.phase(BACKGROUND_SAVE, step))

    def start(self) -> Start | None:
        """The newest complete checkpoint of the run, local or shared; else the result of `CheckpointManager.start`."""
        step = None if self.local is None else self._newest_local(self.local)
        if self.local is None or step is None:
            return self.manager.start()
        shared = self.local.peers.broadcast(self.manager.newest())
        if shared is None or step > shared:
            return self._use(self.local, step)
        try:
            start = self.manager.start()
        except UserError as error:
            say(f"{error}\nThe local checkpoint of step {step} is complete and is used.")
            return self._use(self.local, step)
        if start is None or (start[0] is self.manager and start[1] < step):
            return self._use(self.local, step)
        return start

    def _use(self, local: LocalCheckpoints, step: int) -> Start:
        say(f"starting from step {step} in local checkpoints ({local.folder.parent} on each machine)")
        self.activity.committed = step
        self.event("start_source", step=step, kind="local")
        return local, step

    def _newest_local(self, local: LocalCheckpoints) -> int | None:
        """The newest local checkpoint that this run can start from; newer ones that it can't use are reported."""
        if self.cfg.checkpoint.step is not None:
            return None
        step = local.newest_intact()
        if local.skipped:
            self._report_skipped(local, step)
        if step is None:
            return None
        saved = local.meta(step)["mesh"]
        if saved != self._mesh:
            why = f"it is of the mesh {_mesh(saved)}, this run has {_mesh(self._mesh)}"
            self._say_once(f"the local checkpoint of step {step} is not used: {why}; trying the shared folder's")
            self.event("checkpoint_fallback", from_step=step, to_step=self.manager.newest(), kind="local", why=why)
            return None
        return step

    def _report_skipped(self, local: LocalCheckpoints, step: int | None) -> None:
        """Report local checkpoints that are incomplete or damaged. step: the newest complete one."""
        shared = local.peers.broadcast(self.manager.newest())
        used = step is not None and (shared is None or step > shared)
        to = f"the local checkpoint of step {step}" if used else "the shared folder's checkpoints"
        next_one = step if used else shared
        for passed in (entry for entry in local.skipped if shared is None or entry.step > shared):
            self._say_once(f"the local checkpoint of step {passed.step} can't be used: {passed.reason}; trying {to}")
            self.event("checkpoint_fallback", from_step=passed.step, to_step=next_one, kind="local", why=passed.reason)

    def _say_once(self, line: str) -> None:
        if self.local is not None and self.local.peers.first:
            say(line)

    def belongs_to_run(self, start: Start | None) -> bool:
        """Whether a checkpoint was written by this run."""
        return start is not None and start[0] in (self.manager, self.local)

    def begin(self, run: Run, first: int) -> None:
        """Training begins from step `first`. Raises UserError if the folder has no room for local checkpoints."""
        if self.local is not None:
            self.local.begin(first, run.state)
        elif jax.process_index() == 0:
            RunHistory.note_without_local(self.manager.folder, first)

    def due(self, step: int) -> bool:
        return self.local is not None and self.local.due(step) and not self.manager.due(step, self.cfg.steps)

    def __call__(self, run: Run, step: int) -> None:
        if self.local is None:
            return
        self.local.wait()
        if not self.local.stopped:
            self.event("save_begun", step=step, kind="local")
            self.saved = step
            self.local.save(step, run.state, self.meta())

    def before_stop(self, run: Run, step: int) -> None:
        """The run is about to be stopped: save a local checkpoint, which takes less time than a shared one."""
        if self.saved != step:
            self(run, step)

    def committed(self) -> None:
        """Log the saves that have ended since the last call. A failed one does not end the run."""
        if self.local is None:
            return
        for report in self.local.poll():
            if report.failure is not None:
                self._failed(self.local, report)
                continue
            note_committed(report, self.event, self.activity, kind="local")

    def _failed(self, local: LocalCheckpoints, report: SaveReport) -> None:
        following = "no more local checkpoints in this attempt" if local.stopped else "training continues"
        self.event(
            "save_failed", step=report.step, why=report.failure, failures=local.failures, next=following, kind="local"
        )
        self._say_once(
            f"local checkpoint step {report.step} not saved: {report.failure}; {local.failures} in a row: {following}"
        )

    def finished(self) -> None:
        """Training has ended: delete local checkpoints if the shared folder has the same step or a later one."""
        if self.local is None:
            return
        self.local.wait()
        self.committed()
        shared = self.local.peers.broadcast(self.manager.newest())
        newest = max((checkpoint.info.step for checkpoint in self.local.served.values()), default=None)
        if self.local.peers.broadcast(newest is None or (shared is not None and shared >= newest)):
            self.local.clear()

    def rescue(self, run: Run, error: BaseException) -> None:
        """Another process was lost: save this one's state if it is intact and its step is complete.

        A step donates the arrays of the step before, so they are gone if it fails. Then, and if the state can't be
        read, only a message is printed.
        """
        local = self.local
        if local is None or local.peers.count == 1 or runtime_error_of(error) is None:
            return
        before = max((checkpoint.info.step for checkpoint in local.served.values()), default=None)
        newest = f"the newest local checkpoint is of step {before}" if before is not None else "there is none yet"
        step = intact_step(run.state, LOST_SECONDS)
        if step is None or step != self.activity.step:
            say(f"another process was lost during a step, so this state is incomplete and not saved; {newest}")
        elif step == before:
            say(f"another process was lost; {newest}, the last one")
        else:
            say(f"another process was lost; {self._save_alone(local, run, step)}")

    def _save_alone(self, local: LocalCheckpoints, run: Run, step: int) -> str:
        """Save the shards of this process -> a line about it."""
        try:
            parts = local.save_alone(step, run.state, self.meta())
        except CheckpointError as failed:
            return f"step {step} not saved: {failed.reason}"
        except Exception as failed:  # must not replace the error that ends the run
            return f"step {step} not saved: {type(failed).__name__}: {failed}"
        complete, process = len(parts) == local.peers.count, local.members.process
        fields = {"step": step, "kind": "emergency", "process": process, "parts": list(parts), "whole": complete}
        if complete:
            self.activity.committed = step
        self._record("save_committed", **fields)
        shards = "all shards" if complete else f"the shards of {len(parts)} of {local.peers.count} processes"
        return f"process {process} saved step {step} in {local.folder}: {shards}"

    def close(self) -> None:
        if self.local is not None:
            self.local.close()

    def __enter__(self) -> "LocalSaves":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def intact_step(state: TrainState, seconds: float) -> int | None:
    """The step of a state if all of its arrays are available within `seconds`; else None.

    An array is unavailable if a program took it as a donation, or if the program that computes it failed or hangs.
    """
    result: list[int] = []

    def wait_for_arrays() -> None:
        try:
            if not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
                jax.block_until_ready(state)
                result.append(int(state.step))
        except (RuntimeError, ValueError):  # of a failed program; see runtime_error_of
            return

    thread = threading.Thread(target=wait_for_arrays, name="megajax state", daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None


def _mesh(shape: dict[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in shape.items() if size > 1) or "1 device"
