"""A profiler trace of a few steps, and its summary."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import jax

from megajax.config.errors import UserError
from megajax.metrics.config import ProfileConfig
from megajax.metrics.record import to_json
from megajax.metrics.run_folder import write_atomically
from megajax.metrics.trace_summary import TraceSummary, find_trace, read_trace, summarize


class Profile:
    """Traces a window of steps into `folder`. first: number of steps completed before this attempt.

    A window that starts before this attempt is clipped to its steps. The hooks are due on every process, because a hook
    is followed by a collective; processes that are not in `profile.processes` do nothing in them.
    """

    def __init__(self, cfg: ProfileConfig, folder: Path, first: int, show: Callable[[TraceSummary], None]):
        process, window = jax.process_index(), cfg.window()
        self.cfg, self._show = cfg, show
        # Processes of one machine would write to the same files.
        self.folder = folder / f"process_{process}" if len(cfg.processes) > 1 else folder
        self._is_traced = process in cfg.processes
        self.window = None if window is None or window[1] <= first else (max(window[0], first + 1), window[1])
        self.started_at: int | None = None
        """Step before the first traced one, while tracing."""
        if self.window is not None and self.window[0] == first + 1:
            self.start(first)

    def start(self, step: int) -> None:
        """Start the trace after `step`."""
        if not self._is_traced:
            return
        options = jax.profiler.ProfileOptions()
        # Python's calls would fill the trace.
        options.python_tracer_level = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(str(self.folder), profiler_options=options)
        self.started_at = step

    def stop(self, step: int) -> None:
        """Stop the trace after `step`, which must have finished; show and write the summary."""
        if self.started_at is None:
            return
        steps, self.started_at = step - self.started_at, None
        jax.profiler.stop_trace()
        with suppress(UserError):  # A missing trace does not end a run.
            if steps and (devices := read_trace(find_trace(self.folder)).devices):
                result = summarize(devices, steps=steps, top=self.cfg.top)
                write_atomically(self.folder / "summary.json", to_json(result.values()))
                self._show(result)

    def close(self) -> None:
        """Stop a trace that is still open after a fault."""
        if self.started_at is not None:
            self.started_at = None
            jax.profiler.stop_trace()

    def start_hook(self) -> "StepHook":
        """Starts the trace."""
        return StepHook(None if self.window is None else self.window[0] - 1, self.start)

    def stop_hook(self) -> "StepHook":
        """Stops the trace."""
        return StepHook(None if self.window is None else self.window[1], self.stop)


class StepHook:
    """A hook that runs after a single step."""

    phase = "profile"

    def __init__(self, step: int | None, act: Callable[[int], None]):
        self._step, self._act = step, act

    def due(self, step: int) -> bool:
        return step == self._step

    def __call__(self, run: object, step: int) -> None:
        self._act(step)
