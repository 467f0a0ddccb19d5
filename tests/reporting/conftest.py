"""Fake run folders, written by the writers of real runs."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megajax.faults.attempt_end import record_failure
from megajax.metrics.event_log import Clock
from megajax.metrics.line_file import FileDeleted
from megajax.metrics.record import EvaluationRecord, StepRecord
from megajax.metrics.run_folder import RunFolder
from megajax.metrics.throughput import StepRate
from megajax.metrics.writers import EventsWriter, JsonlWriter
from megajax.reporting.attempts import attempts
from megajax.reporting.history import read_history
from megajax.reporting.run_summary import RunSummary, summarize
from megajax.reporting.wall_time import time_by_cause


@dataclass
class FakeRun:
    """A run with a manual clock: a step takes 0.5 s, the first step of an attempt 10 s more."""

    folder: RunFolder
    now: float = 1_800_000_000.0
    devices: int = 2
    processes: int = 1
    setup: float = 0.0
    """Seconds before `start`."""
    skew: float = 0.0
    """Error of the wall clock, in seconds."""
    number: int = 0
    """Number of the last attempt."""
    boot: str = "b0071d00"
    """ID of the machine's boot; "" for lines without a monotonic clock."""
    restarted: bool = False
    """Whether the launcher has begun the next attempt."""
    writers: list = field(default_factory=list)

    def attempt(
        self, first: int, last: int, *, losses: dict[int, float] | None = None, save: int | None = None
    ) -> None:
        """Run steps first+1 .. last; save and evaluate every `save` steps."""
        number = self.number = self.number + (not self.restarted)
        self.restarted = False
        events = EventsWriter(self.folder.events, attempt=number, clock=self.clock())
        metrics = JsonlWriter(self.folder.metrics, start_step=first, attempt=number, clock=self.clock())
        self.writers += [events, metrics]
        if metrics.superseded:
            events.event("metrics_superseded", start_step=first, lines=metrics.superseded)
        self.now += self.setup
        events.event("start", step=first, devices=self.devices, processes=self.processes, setup_seconds=self.setup)
        rate = StepRate(devices=self.devices, flops_per_token_causal=1e9, flops_per_token_full=1.1e9, peak_flops=1e13)
        for step in range(first + 1, last + 1):
            seconds = 0.5 + 10.0 * (step == first + 1)
            self.now += seconds
            loss = (losses or {}).get(step, 2.0 + 3.0 / step)
            record = StepRecord(
                **{"step": step, "consumed_samples": 4 * step, "consumed_tokens": 400 * step, "global_batch_size": 4},
                **{"loss": loss, "grad_norm": 0.5 if math.isfinite(loss) else math.nan, "lr": 1e-3, "loss_scale": 1.0},
                **{
                    "skipped": not math.isfinite(loss),
                    "rates": rate.rates(seconds, 400),
                    "metrics": {"num_zeros": 3.0},
                },
                phases={"data_wait": 0.01},
                memory={"device": 2**34, "device_peak": 2**35, "host": 2**30},
            )
            metrics.log(record)
            if step == first + 1:
                events.event("first_step", step=step, seconds=seconds)
                events.event("compiled", arguments=2**30, outputs=0, temporary=2**31, program=0)
            if save and step % save == 0:
                self.now += 2.0
                metrics.log(EvaluationRecord(step=step, split="validation", loss=2.5 + 1 / step))
                events.event("evaluate", step=step, split="validation", seconds=2.0)
                events.event("save_begun", step=step)
                self.now += 1.0
                events.event("save_committed", step=step, blocking_seconds=1.0, seconds=1.5, bytes=2**20)

    def clock(self, boot: str | None = None, *, skew: float | None = None, since: float = 0.0) -> Clock:
        """The clock of a machine that booted `since` seconds earlier than this one."""

        def wall() -> float:
            return self.now + (self.skew if skew is None else skew)

        return Clock(wall, lambda: self.now - 1_799_990_000.0 + since, self.boot if boot is None else boot)

    def by_other(self, name: str, /, *, clock: Clock | None = None, **fields: object) -> None:
        """Write an event of another process or the launcher."""
        if name == "restart":
            self.number, self.restarted = self.number + 1, True
            fields["attempt"] = self.number
        with EventsWriter(self.folder.events, attempt=self.number, clock=clock or self.clock()) as writer:
            writer.event(name, **fields)

    def fails(self, name: str, /, *, clock: Clock | None = None, **fields: object) -> None:
        """Write the event of a process that fails, and the end of the attempt by it."""
        record_failure(partial(self.by_other, clock=clock), name, several=self.processes > 1, **fields)

    def ended(self, code: int, cause: str, text: str, **fields: object) -> None:
        """Record the end of the last attempt."""
        unknown = {"process": None, "step": None, "by": "process"}
        self.by_other("attempt_end", code=code, cause=cause, text=text, **(unknown | fields))

    def event(self, name: str, /, **fields: object) -> None:
        """Write an event of the last attempt."""
        self.writers[-2].event(name, **fields)

    def summary(self) -> RunSummary:
        return summarize(read_history(self.folder.path), routine=12)

    def seconds(self) -> dict[str, Any]:
        """Cause -> seconds, approximately. Asserts that they are all of the run's time."""
        history = read_history(self.folder.path)
        parts = time_by_cause(history, runs := attempts(history))
        assert all(share.seconds >= 0 for share in parts)
        assert sum(share.part for share in parts) == pytest.approx(1.0)
        assert sum(share.seconds for share in parts) == pytest.approx(runs[-1].end - runs[0].begin)
        return {share.cause: pytest.approx(share.seconds) for share in parts}

    def config(self, steps: int) -> None:
        """Write config.yaml and config.diff."""
        self.folder.write_config(
            f"steps: {steps}\nseed: 1\n", f"steps: 1000 -> {steps}\ndata.type: (required) -> <Mock>\n"
        )


@pytest.fixture
def fake_run(tmp_path: Path) -> Iterator[Callable[..., FakeRun]]:
    """fake_run(name) -> a FakeRun in a new folder."""
    runs = []

    def make(name: str = "run") -> FakeRun:
        runs.append(FakeRun(RunFolder.create(tmp_path / name)))
        return runs[-1]

    yield make
    for run in runs:
        for writer in run.writers:
            # Tests replace files of runs, and later attempts those of earlier ones, which have ended then.
            with suppress(FileDeleted):
                writer.close()
