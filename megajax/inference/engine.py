"""Continuous batching: requests join and leave the steps of a device at any time.

A step runs on the caller's thread: the scheduler selects rows, the device computes, and results become outputs.
`megajax.inference.worker` runs the steps on a separate thread.
"""

import logging
import time
from collections import abc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

from megajax.batch import Params
from megajax.config.errors import UserError
from megajax.inference.admission import AdapterTable, Admission, AnswerRules
from megajax.inference.answers import ActiveRequest, answers_of
from megajax.inference.request import (
    EngineDevice,
    Finish,
    MovableWeights,
    OtherWeights,
    RefusedRequest,
    Request,
    Running,
    StartedStep,
    Step,
)
from megajax.inference.scheduler import replica_for, schedulers_of
from megajax.inference.statistics import EngineCounts, Statistics

LOG = logging.getLogger(__name__)


class Engine:
    """Runs requests and delivers outputs. Not thread-safe, except `check`."""

    def __init__(
        self,
        device: EngineDevice,
        rules: AnswerRules | None = None,
        *,
        queue: int = 128,
        adapters: AdapterTable | None = None,
        weights: MovableWeights | None = None,
        look_ahead: bool = True,
    ):
        """rules: None for answers without text.

        queue: maximum number of unfinished requests beyond one for each row of the device. adapters: of the device;
        None: it has no slots for any. weights: of the device; None: they cannot be replaced or moved. look_ahead: start
        a step before the results of the previous one are received, unless the device has drafts, which begin with these
        results.
        """
        self.device, self.adapters, self.weights = device, adapters or AdapterTable(), weights
        self.admission = Admission(device, rules or AnswerRules(), self.adapters)
        self.capacity = device.rows * device.replicas + queue
        """Maximum number of unfinished requests."""
        self.schedulers = schedulers_of(device)
        self.counts = EngineCounts(device.drafts)
        self.finite = True
        """Whether any unfinished row of the last step had finite logits."""
        self.failed = False
        """Whether the device raised an exception; a new engine is needed then."""
        self.paused = False
        """Whether no step runs until `resume`; requests wait."""
        self.asleep = False
        """Whether the device has no cache, and no weights unless `refit` gave it some; no step runs until `wake`."""
        self._numbers = count()
        self._open: dict[str, int] = {}
        self._active: dict[int, ActiveRequest] = {}
        self._look_ahead = look_ahead and not device.drafts
        self._started: tuple[abc.Sequence[Step | None], StartedStep] | None = None
        """A step whose results are awaited."""

    @property
    def requests(self) -> int:
        """Number of unfinished requests."""
        return len(self._open)

    def check(self, request: Request) -> Request:
        """The request as `submit` runs it. Raises RefusedRequest for a request that can never run."""
        if self.failed:
            raise RefusedRequest("draining", "the device failed; a new engine is needed")
        return self.admission.check(request, self._open)

    def submit(self, request: Request) -> None:
        """Queue a request, which runs in the following steps. Raises RefusedRequest."""
        request = self.check(request)
        if len(self._open) >= self.capacity:
            message = f"{len(self._open)} requests are not finished; {self.capacity} may be"
            raise RefusedRequest("queue_full", message)
        number = next(self._numbers)
        sequences = self.admission.sequences(request, number)
        scheduler = replica_for(sequences[0], self.schedulers)
        # Equal prompts have equal hashes.
        for sequence in sequences[1:]:
            sequence.digests = list(sequences[0].digests)
        active = self._active[number] = answers_of(request, sequences, self.admission.detokenizer, scheduler)
        if request.experts and self.device.experts is not None:
            active.experts = partial(self.device.experts, self.schedulers.index(scheduler))
        self._open[request.identifier] = number

    def load_adapter(self, name: str, values: Params) -> None:
        """Load an adapter for the following requests that name it.

        values: its arrays in a slot by path. Raises UserError for a name in use, and if no slot is free.
        """
        rows = [row for active in self._active.values() for row in active.sequences]
        self.adapters.load(name, values, {row.adapter.slot for row in rows if row.adapter is not None})

    def drop_adapter(self, name: str) -> None:
        """Refuse further requests for an adapter; unfinished ones go on. Raises UserError for an unknown name."""
        self.adapters.drop(name)

    def cancel(self, identifier: str) -> None:
        """End a request and free its blocks. Does nothing if the request has ended."""
        number = self._open.get(identifier)
        if number is not None:
            self._guarded(self._active[number], ActiveRequest.end_all, "cancelled")

    def step(self) -> bool:
        """Start a step of the device, and receive the results of the previous one meanwhile -> False if there is
        nothing to do, or if the engine is paused or asleep."""
        if self.paused or self.asleep:
            return False
        counts, begin = self.counts, time.perf_counter()
        waited = counts.device_seconds
        work = [scheduler.next() for scheduler in self.schedulers]
        before, self._started = self._started, None
        if before is None and not any(work):
            return False
        try:
            following = (work, self.device.start(work)) if any(work) else None
            if before is not None:
                self._receive(*before)
            if following is not None:
                following[1].choose()
                if self._look_ahead:
                    self._started = following
                else:
                    self._receive(*following)
        except BaseException:
            self.fail()
            raise
        counts.steps += following is not None
        counts.last_seconds = time.perf_counter() - begin
        counts.host_seconds += counts.last_seconds - (counts.device_seconds - waited)
        return True

    def pause(self, running: Running = "keep") -> None:
        """Run no step until `resume`. New requests are queued. "recompute" forgets the cache.

        Raises UserError for "finish" if it is paused already and has requests.
        """
        self._leave(running)
        if running == "recompute":
            self._renew()
        self.paused = True

    def resume(self) -> None:
        """Run steps again."""
        self.paused = False

    def abort_all(self) -> None:
        """End all requests with what they have."""
        self._leave("abort")

    def sleep(self, level: int = 1, running: Running = "recompute") -> None:
        """Release the devices' memory of the cache and the weights until `wake`. New requests are queued.

        level: 1: the weights go to the host's memory; 2: they are dropped, and `refit` has to give new ones. Adapters
        are kept. running: not "keep", since the cache is dropped. Raises UserError.
        """
        weights = self.movable_weights()
        if level not in (1, 2):
            raise UserError(f"the level of sleep is 1 or 2, got {level}")
        if running == "keep":
            raise UserError("sleep drops the cache, so no request can keep its keys: recompute, finish or abort them")
        self._leave(running)
        self._renew()
        weights.sleep(keep=level == 1)
        self.asleep = True

    def wake(self) -> None:
        """Run steps again after `sleep`, with an empty cache. Raises UserError after level 2 without `refit`."""
        if self.asleep:
            self.movable_weights().wake()
            self.asleep = False

    def refit(self, weights: OtherWeights, running: Running = "finish", *, shared: bool = False) -> None:
        """Replace the weights, without compiling steps again.

        weights: the arrays of a training state on the engine's devices, by path, in any layout, which are copied; or a
        function that loads weights as steps read them. shared: arrays that are as steps read them are not copied: no
        step of training may run before the engine sleeps at level 2 or gets other weights. Blocks of the old weights
        are not shared with later requests. Adapters stay.
        running: "keep" lets requests that run go on with the old keys, and choose tokens by the new weights.

        Raises UserError for arrays of other names, shapes or dtypes, before anything changes. If the function raises,
        the engine sleeps without weights until another `refit` and `wake`.
        """
        of_device, asleep = self.movable_weights(), self.asleep
        make = of_device.prepare(weights, shared=shared)
        self._leave(running)
        self._renew()
        self.asleep = True
        of_device.replace(make)
        self.asleep = asleep

    def movable_weights(self) -> MovableWeights:
        """The device's weights. Raises UserError if they cannot be replaced or moved."""
        if self.weights is None:
            raise UserError("the weights of this engine cannot be replaced or moved")
        return self.weights

    def _leave(self, running: Running) -> None:
        """Bring unfinished requests into the state in which weights or cache may change."""
        if running != "finish":
            self._settle()
        if running == "abort":
            self.end_all("abort")
        # No request runs while the engine sleeps.
        while running == "finish" and self.requests and not self.asleep:
            if not self.step():
                raise UserError(
                    f"the engine is paused, and its {self.requests} requests do not end: abort or recompute"
                )
        self._settle()
        for scheduler in self.schedulers if running == "recompute" else ():
            scheduler.retract()

    def _settle(self) -> None:
        """Receive the results that are awaited."""
        before, self._started = self._started, None
        if before is not None:
            try:
                self._receive(*before)
            except BaseException:
                self.fail()
                raise

    def _renew(self) -> None:
        """Share no block that was computed before with sequences that start later."""
        self.admission.renew()
        for active in self._active.values():
            for row in active.sequences:
                if row.slot < 0:
                    row.origin, row.digests = self.admission.origin(active.request, row.adapter), []

    def fail(self) -> None:
        """End all requests with an error, and reject new ones: the device's cache no longer agrees with the pools."""
        self.failed = True
        self.end_all("error")

    def end_all(self, finish: Finish) -> None:
        """End all requests."""
        for active in list(self._active.values()):
            self._guarded(active, ActiveRequest.end_all, finish)

    def statistics(self) -> Statistics:
        """The present counts."""
        return self.counts.present(self.schedulers, requests=len(self._open))

    def _receive(self, work: abc.Sequence[Step | None], started: StartedStep) -> None:
        """Wait for the results of a step, and give them to the sequences."""
        begin, finite = time.perf_counter(), list[bool]()
        results = started.results()
        self.counts.device_seconds += time.perf_counter() - begin
        for step, replica in zip(work, results, strict=True):
            for (sequence, computed), result in zip(step.parts() if step else [], replica, strict=True):
                active = self._active.get(sequence.order[0])
                # It may have ended since the step started, or by a fault of its request.
                if active is not None and sequence in active.sequences:
                    finite.append(result.finite)
                    sequence.awaited -= computed == len(sequence.tokens)
                    self._guarded(active, ActiveRequest.receive, sequence, computed, result, self.counts)
        self.finite = any(finite) if finite else self.finite

    def _guarded(self, active: ActiveRequest, method: Callable[..., None], *arguments: object) -> None:
        """Call a method of a request. If it raises, only this request ends."""
        tokens, faults, failed = active.tokens, active.faults, False
        try:
            method(active, *arguments)
        except UserError as error:  # A guide that grows too large within the text.
            failed = True
            active.fail(f"guide {error}")
        except Exception:
            LOG.exception("request %s ends with an error", active.request.identifier)
            failed = True
            with suppress(Exception):
                active.fail()
        self.counts.tokens += active.tokens - tokens
        self.counts.errors += active.faults - faults
        if failed or not active.sequences:
            del self._active[self._open.pop(active.request.identifier)]
