"""A line for every program that is compiled, or found among the compiled ones: what, for how long, and from where."""

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

import jax

from megajax.job.compile_cache import cache_in_use, record
from megajax.metrics.text import duration

COMPILED = "/jax/core/compile/backend_compile_duration"
HIT = "/jax/compilation_cache/cache_hits"
SAVED = "/jax/compilation_cache/compile_time_saved_sec"
WRITTEN = "/jax/compilation_cache/cache_misses"
"""Events of jax.monitoring; the others are told in the thread that compiles, before the first."""

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "train_step": "the train step",
        "eval_step": "the evaluation step",
        "forward": "the forward pass",
        "blame": "the look for weights whose gradients are not finite",
        "_fresh": "the initial state",
    }
)
ALWAYS = ("train_step", "_fresh")
LEAST_SECONDS = 1.0
"""Other programs than those are told of from so many seconds on."""


class Compile(NamedTuple):
    """One program."""

    name: str
    """Of the function."""
    seconds: float
    """Until it was ready, read or compiled."""
    cached: bool
    """Whether it was read from disk."""
    saved: float | None
    """Seconds that reading it saved, as jax noted when it was compiled; None where it was compiled."""

    def sentence(self) -> str:
        """In words."""
        name = NAMES.get(self.name, self.name)
        if not self.cached:
            return f"compiled {name}: {duration(self.seconds)}"
        saved = f", {duration(self.saved)} saved" if self.saved is not None and self.saved >= 1 else ""
        return f"compiled {name}: cached, read in {duration(self.seconds)}{saved}"


class CompileLog:
    """Within its `with` block tells of each program: `say` a sentence, and what `events` gives its fields."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._event: Callable[..., None] | None = None
        self._ready: dict[str, Callable[[], None]] = {}
        self._early: list[Compile] = []
        self._thread = threading.local()

    def events(self, event: Callable[..., None]) -> None:
        """Have programs written down from now on, and those before."""
        self._event = event
        for program in self._early:
            self._write(program)
        self._early.clear()

    @contextmanager
    def ready(self, name: str, call: Callable[[], None]) -> Generator[None]:
        """Within the block, `call` when the program of function `name` is compiled."""
        self._ready[name] = call
        try:
            yield
        finally:
            del self._ready[name]

    def __enter__(self) -> Self:
        jax.monitoring.register_event_listener(self._happened)
        jax.monitoring.register_event_duration_secs_listener(self._lasted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        jax.monitoring.unregister_event_listener(self._happened)
        jax.monitoring.unregister_event_duration_listener(self._lasted)
        if jax.process_index() == 0 and (folder := cache_in_use()) is not None:
            record(folder)  # what XLA itself wrote there while it compiled programs that are not kept

    def _happened(self, event: str, **_: Any) -> None:
        if event in (HIT, WRITTEN):
            self._noted()[event] = True

    def _lasted(self, event: str, duration_secs: float, **fields: Any) -> None:
        if event == SAVED:
            self._noted()[event] = duration_secs
        if event != COMPILED:
            return
        noted = self._noted()
        name = str(fields.get("fun_name", "?")).removeprefix("jit(").removesuffix(")")
        program = Compile(name, duration_secs, HIT in noted, noted.get(SAVED))
        written = WRITTEN in noted
        noted.clear()
        if written and (folder := cache_in_use()) is not None:
            record(folder)
        if program.name in ALWAYS or duration_secs >= LEAST_SECONDS:
            self._say(program.sentence())
            self._write(program)
        if (call := self._ready.get(program.name)) is not None:
            call()

    def _noted(self) -> dict[str, Any]:
        """What jax has told of the program this thread is compiling."""
        return self._thread.__dict__

    def _write(self, program: Compile) -> None:
        if self._event is None:
            self._early.append(program)
        else:
            self._event("compile", name=program.name, seconds=round(program.seconds, 3), cached=program.cached)
