"""The launcher's view of the processes of an attempt: heartbeats and hangs."""

import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from megajax.checkpoint.step_folders import steps_in
from megajax.config.bounds import Bounds
from megajax.config.errors import UserError
from megajax.faults.activity import FINISH, STACKS_FOLDER, START
from megajax.faults.beats import Beat

STOPPED_SECONDS = 10.0
"""A process in state T (stopped by SIGSTOP) whose beat is this old counts as hung."""

START_SECONDS = 900.0
"""Minimum limit of beats in the phase `start`: while a library is loaded, perhaps from a slow file system, no thread of
Python runs. The process has its own limit of a start (resilience.watchdog.start), and the backstop."""

NO_BEATS_DUE = (None, FINISH)
"""Phases in which a process may stop its beats, because it waits for the others to end."""


STATES = {"T": "T", "D": "D", "t": "D"}
"""States in Linux that matter in a start; a process in another one may be waiting for a lock."""

LOOK_SECONDS = 1.0
"""Least time between looks at processes without a heartbeat, for which all processes of the machine are listed."""

type Timeout = Annotated[float, Bounds(above=0, hint="in seconds; none: no limit")]


@dataclass(frozen=True, kw_only=True, slots=True)
class HangLimits:
    """Seconds after which a gang counts as hung; None: never."""

    beat: Timeout | None = 60.0
    """Time without a new heartbeat of a process that has written some; at least START_SECONDS while it starts. Also the
    time without any work of one that has written none yet, if others have."""
    progress: Timeout | None = None
    """Time without a change of step, phase or stage in any heartbeat. This limit is for runs without the watchdog of
    training processes, which knows the usual duration of each phase."""


@dataclass(slots=True)
class Sighting:
    """The last heartbeat of a process."""

    beat: Beat
    changed: float
    """When the beat last changed, by the launcher's monotonic clock, because clocks of machines differ."""
    state: str | None = None
    """State in Linux (R, S, D, T, Z), if the process runs on this machine."""


class GroupActivity(NamedTuple):
    """What a process and those of its process group have done."""

    work: int = 0
    """CPU time in ticks, page faults that read files, and waits. Equal numbers: nothing was done in between."""
    state: str = "S"
    """T if one of them is stopped, D if one waits for a disk or a debugger, otherwise S."""

    @classmethod
    def of(cls, groups: Mapping[int, int]) -> dict[int, "GroupActivity"]:
        """{process: its process group} -> {process: its activity}, of the groups on this machine."""
        processes, activities = {group: process for process, group in groups.items()}, dict[int, GroupActivity]()
        for path in Path("/proc").glob("[0-9]*/stat") if processes else ():
            try:
                state, _, group, *fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
                if (process := processes.get(int(group))) is None:
                    continue
                waits = re.findall(r"ctxt_switches:\s*(\d+)", path.with_name("status").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            before, work = activities.get(process, cls()), sum(map(int, (fields[6], fields[8], fields[9], *waits)))
            activities[process] = cls(before.work + work, max(before.state, STATES.get(state, "S"), key="SDT".index))
        return activities


class GangWatch:
    """Reads the heartbeats in a folder."""

    def __init__(
        self, folder: Path, limits: HangLimits, clock: Callable[[], float] = time.monotonic, host: str | None = None
    ):
        self.folder, self.limits, self._clock = folder, limits, clock
        self._host = socket.gethostname() if host is None else host
        self.sightings: dict[int, Sighting] = {}
        """Process -> its last heartbeat."""
        self.run_dir: Path | None = None
        self.baseline: int | None = None
        """The newest step with a complete checkpoint when the run folder became known; None if it had none."""
        self.starting: dict[int, tuple[GroupActivity, float]] = {}
        """Process of this machine without a heartbeat -> its activity, and when that last changed."""
        self._positions: dict[int, tuple[object, ...]] = {}
        self._moved_at = self._read_at = self._looked_at = clock()

    def pause(self, seconds: float) -> None:
        """Do not count the last `seconds`, in which the launcher, and perhaps the processes, were not running."""
        for sight in self.sightings.values():
            sight.changed += seconds
        self.starting = {process: (last, since + seconds) for process, (last, since) in self.starting.items()}
        self._moved_at += seconds

    def look_at_starts(self, groups: Mapping[int, int]) -> None:
        """Look at the processes without a heartbeat. groups: process -> its process group."""
        if self._read_at < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at = self._read_at
        now, former = self._read_at, self.starting
        activities = GroupActivity.of(
            {process: group for process, group in groups.items() if process not in self.sightings}
        )
        self.starting = {
            process: former[process] if process in former and former[process][0] == activity else (activity, now)
            for process, activity in activities.items()
        }

    def read_beats(self) -> None:
        """Read all beats."""
        # All ages refer to this moment, because reading from a slow file system takes time.
        self._read_at = now = self._clock()
        for path in sorted(self.folder.glob("process_*.json")):
            number = re.fullmatch(r"process_(\d+)\.json", path.name)
            beat = Beat.read(self.folder, int(number[1])) if number else None
            if beat is None:
                continue
            before = self.sightings.get(beat.process)
            changed = now if before is None or before.beat != beat else before.changed
            state = process_state(beat.pid) if beat.host == self._host else None
            self.sightings[beat.process] = Sighting(beat, changed, state)
            if beat.run_dir is not None and self.run_dir is None:
                self.run_dir = Path(beat.run_dir)
                self.baseline = max(committed_steps(self.run_dir), default=None)
            position = (beat.step, beat.committed, beat.phase, beat.phase_step, beat.stage, beat.failure)
            if self._positions.get(beat.process) != position:
                self._positions[beat.process], self._moved_at = position, now

    def silent(self, process: int) -> float:
        """Seconds since the beat of a process changed; 0.0 without beats."""
        sight = self.sightings.get(process)
        return 0.0 if sight is None else self._read_at - sight.changed

    def hang(self, ended: set[int]) -> str | None:
        """Why the gang counts as hung; None if it does not. ended: processes to ignore."""
        alive = {
            index: sight for index, sight in self.sightings.items() if index not in ended and sight.beat.failure is None
        }
        for index, sight in alive.items():
            if (reason := self._silence(index, sight)) is not None:
                return reason
        for index in sorted(self.starting.keys() - ended):
            if (reason := self.start_problem(index)) is not None:
                return f"process {index} {reason}"
        limit, idle = self.limits.progress, self._read_at - self._moved_at
        if alive and limit is not None and idle > limit:
            return f"no process has moved for {idle:.0f} s (--watchdog-timeout={limit:g})"
        return None

    def _silence(self, index: int, sight: Sighting) -> str | None:
        limit, silent = self.limits.beat, self.silent(index)
        if limit is None:
            return None
        if sight.state == "T" and silent > min(STOPPED_SECONDS, limit):
            return f"process {index} is stopped (state T), its last beat is {silent:.0f} s old"
        starts = sight.beat.phase == START and limit < START_SECONDS
        if silent > (START_SECONDS if starts else limit) and sight.beat.phase not in NO_BEATS_DUE:
            setting = f"limit of a start: {START_SECONDS:g} s" if starts else f"--beat-timeout={limit:g}"
            return f"process {index} does not answer, its last beat is {silent:.0f} s old ({setting})"
        return None

    def start_problem(self, process: int) -> str | None:
        """How a process without a heartbeat hangs, as a predicate; None if it does not, as far as is known."""
        if process not in self.starting or self.limits.beat is None:
            return None
        (_, state), since = self.starting[process]
        idle, limit = self._read_at - since, self.limits.beat
        if state == "T" and idle > min(STOPPED_SECONDS, limit):
            return f"is stopped (state T) for {idle:.0f} s, before its first heartbeat"
        # In state D it waits for a file system. A program that writes no heartbeats may wait for anything.
        if state == "S" and idle > limit and self.sightings:
            return f"does not begin: no heartbeat, and nothing done for {idle:.0f} s (--beat-timeout={limit:g})"
        return None

    def committed(self, run_dir: Path | None = None) -> int | None:
        """The newest step with a complete checkpoint, by the beats and the run folder; None if there is none.

        run_dir: the run folder of former attempts, for one that has ended before it named its own.
        """
        steps = [sight.beat.committed for sight in self.sightings.values() if sight.beat.committed is not None]
        folder = self.run_dir or run_dir
        return max([*steps, *(committed_steps(folder) if folder else ())], default=None)

    def stacks_since(self, since: float) -> list[Path]:
        """Files with stacks that were written after `since`, in seconds since 1970."""
        from_beats = [Path(sight.beat.stacks) for sight in self.sightings.values() if sight.beat.stacks]
        folder = [] if self.run_dir is None else sorted((self.run_dir / STACKS_FOLDER).glob("process_*.txt"))
        return sorted({path for path in (*from_beats, *folder) if _modified_time(path) >= since})


def committed_steps(run_dir: Path) -> list[int]:
    """Steps in its checkpoints folder, or in the store that it names."""
    try:
        return steps_in(run_dir / "checkpoints")
    except (OSError, UserError):
        return []


def process_state(pid: int) -> str | None:
    """The state in Linux of a process of this machine; None if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def handles(pid: int, number: int) -> bool:
    """Whether a process of this machine has a handler for a signal, which might end it otherwise."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", text, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _modified_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
