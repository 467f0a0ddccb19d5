"""The Python stacks of all threads as text, for processes that hang."""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from megajax.faults.activity import Activity

STACKS_FOLDER = "hangs"
"""Folder in the run folder where processes write their stacks."""


def stacks(activity: Activity) -> str:
    """The stack of each thread, most recent call last, with the phase it is in; the main thread comes first."""
    now, doing = time.monotonic(), {phase.thread: phase for phase in activity.now()}
    names: Mapping[int | None, str] = {thread.ident: thread.name for thread in threading.enumerate()}
    main, lines = threading.main_thread().ident, []
    frames = sys._current_frames()
    for thread in sorted(frames, key=lambda thread: (thread != main, thread not in doing)):
        if thread == threading.get_ident():
            continue
        head = f"thread {names.get(thread, 'without a name')} ({thread})"
        if (phase := doing.get(thread)) is not None:
            head += f", {phase.description()} for {now - phase.since:.1f} s"
        lines += [f"{head}:\n", *traceback.format_stack(frames[thread]), "\n"]
    return "".join(lines)


def write_stacks(run_dir: Path, process: int, why: str, text: str) -> Path | None:
    """Append stacks to RUN_DIR/hangs/process_K.txt -> its path; None if it can't be written."""
    path = run_dir / STACKS_FOLDER / f"process_{process}.txt"
    head = f"{time.strftime('%Y-%m-%d %H:%M:%S')}, process {process}, pid {os.getpid()}: {why}\n\n"
    with contextlib.suppress(OSError):
        # A process that hangs in the start has no run folder yet.
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(head + text)
        return path
    return None
