"""Reports every program that is compiled or read from the cache: its name and its compile time."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import jax

from megajax.display.text import duration
from megajax.job.start.compile_cache import cache_in_use, record
from megajax.machine.known_faults import RUN_FAULTS
from megajax.metrics.event_log import EventLog

COMPILED = "/jax/core/compile/backend_compile_duration"
HIT = "/jax/compilation_cache/cache_hits"
SAVED = "/jax/compilation_cache/compile_time_saved_sec"
CACHE_WRITE = "/jax/compilation_cache/cache_misses"
"""Events of jax.monitoring. The other three come from the compiling thread, before COMPILED."""

NAMES = {
    "train_step": "the train step",
    "eval_step": "the evaluation step",
    "forward": "the forward pass",
    "nonfinite_gradients": "the search for weights whose gradients are not finite",
    "_fresh": "the initial state",
}
ALWAYS = ("train_step", "_fresh")
AUTOTUNED_SECONDS = 100.0
"""From here on, a compilation on a GPU has the cure of the known fault of its autotuner."""
MIN_SECONDS, LONG_SECONDS = 1.0, 15.0
"""Other programs are reported if they took at least this long. Of those without a name for users, such as a slice, only
long ones have a line; the time of the others is said with the next line."""


class Compile(NamedTuple):
    """A compiled program."""

    name: str
    """Name of the function."""
    seconds: float
    """Seconds to compile the program or to read it from the cache."""
    cached: bool
    """Whether it was read from the cache."""
    saved: float | None
    """Compile seconds that the cache saved, as jax recorded them; None if the program was compiled."""

    def description(self) -> str:
        """One line of text."""
        name = NAMES.get(self.name, self.name)
        if not self.cached:
            return f"compiled {name}: {duration(self.seconds)}"
        saved = f", {duration(self.saved)} saved" if self.saved is not None and self.saved >= 1 else ""
        return f"compiled {name}: cached, read in {duration(self.seconds)}{saved}"

    def advice(self) -> str:
        """What may make a long compilation on a GPU shorter, as the end of a line."""
        long = not self.cached and self.seconds >= AUTOTUNED_SECONDS and jax.default_backend() == "gpu"
        return f"; {next(fault.cure for fault in RUN_FAULTS if fault.name == 'fusion_autotuner')}" if long else ""


class CompileLog:
    """Within its `with` block, reports each program: a line to `say`, and an event to `event`."""

    def __init__(self, say: Callable[[str], None], event: Callable[..., None] | None = None):
        self._say, self._event = say, event or EventLog().event
        self._ready: dict[str, Callable[[], None]] = {}
        self._unsaid: list[float] = []
        self._thread = threading.local()

    @contextmanager
    def ready(self, name: str, call: Callable[[], None]) -> Generator[None]:
        """Within the block, call `call` once the program of function `name` is compiled."""
        self._ready[name] = call
        try:
            yield
        finally:
            del self._ready[name]

    def __enter__(self) -> Self:
        jax.monitoring.register_event_listener(self._on_event)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        return self

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_listener(self._on_event)
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        if jax.process_index() == 0 and (folder := cache_in_use()) is not None:
            record(folder)  # autotuning results, which exist even for programs that are not cached

    def _on_event(self, event: str, **_: object) -> None:
        if event in (HIT, CACHE_WRITE):
            self._noted[event] = True

    def _on_duration(self, event: str, duration_secs: float, **fields: object) -> None:
        noted = self._noted
        if event == SAVED:
            noted[event] = duration_secs
        if event != COMPILED:
            return
        name = str(fields.get("fun_name", "?")).removeprefix("jit(").removesuffix(")")
        program = Compile(name, duration_secs, HIT in noted, noted.get(SAVED))
        new_entry = CACHE_WRITE in noted
        noted.clear()
        if new_entry and (folder := cache_in_use()) is not None:
            record(folder)
        if program.name in ALWAYS or duration_secs >= MIN_SECONDS:
            self._unsaid.append(duration_secs)
            if program.name in NAMES or duration_secs >= LONG_SECONDS:
                *others, _ = self._unsaid
                programs = f"{len(others)} small program{'s' * (len(others) > 1)}"
                small = f"; {programs} before it: {duration(sum(others))}" if others else ""
                self._say(program.description() + small + program.advice())
                self._unsaid.clear()
            self._event("compile", name=program.name, seconds=round(program.seconds, 3), cached=program.cached)
        if (call := self._ready.get(program.name)) is not None:
            call()

    @property
    def _noted(self) -> dict[str, Any]:
        """Events of jax.monitoring about the program that this thread is compiling."""
        return self._thread.__dict__
