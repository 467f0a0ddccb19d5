"""Continuous batching: requests join and leave the steps of a device at any time.

A step runs on the caller's thread: the scheduler selects rows, the device computes, and results become outputs.
`megajax.inference.worker` runs the steps on a separate thread.
"""

import logging
import os
import random
import time
from collections import abc
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import count
from threading import Lock
from typing import Any

from megajax.config.errors import Problem, UserError
from megajax.inference.adapters import AdapterTable
from megajax.inference.answers import ActiveRequest, Answers, BeamAnswers, BestAnswers, Embedding, seed_of
from megajax.inference.detokenizer import Detokenizer
from megajax.inference.request import (
    Device,
    Drafter,
    Finish,
    LoadedAdapter,
    Refused,
    Request,
    Running,
    Sampled,
    Sequence,
    StartedStep,
    Step,
    Weights,
    input_problems,
)
from megajax.inference.sampling.beams import candidates_of
from megajax.inference.sampling.guide import mask_of
from megajax.inference.sampling_settings import Sampling
from megajax.inference.scheduler import DIGEST, KEY, Pool, Scheduler, replica_for
from megajax.inference.speculation.earlier_text import EarlierText
from megajax.inference.statistics import Statistics
from megajax.tokenizers.base import Tokenizer, end_tokens_of

LOG = logging.getLogger(__name__)


class Engine:
    """Runs requests and delivers outputs. Not thread-safe, except `check`."""

    def __init__(
        self,
        device: Device,
        *,
        tokenizer: Tokenizer | None = None,
        end_tokens: Collection[int] | None = None,
        queue: int = 128,
        seed: int | None = None,
        guide: Callable[[Any], Any] | None = None,
        adapters: AdapterTable | None = None,
        look_ahead: bool = True,
        weights: Weights | None = None,
        answer_start: tuple[int, ...] = (),
        drafter: Callable[[int], Drafter] = EarlierText,
    ):
        """tokenizer: None for answers without text. end_tokens: tokens that end a text; None for the tokenizer's.

        queue: maximum number of unfinished requests beyond one for each row of the device. seed: seed of the random
        seeds of requests without one; None for different ones each time. guide: makes the state of a constraint from
        `Sampling.guide`; raises UserError if that is invalid. adapters: of the device; None: it has no slots for any.
        look_ahead: start a step before the results of the previous one are received, unless the device has drafts,
        which begin with these results. weights: of the device; None: they cannot be replaced or moved. answer_start: of
        a model with an encoder, the tokens before every answer: the encoder reads the prompt of a request without
        `memory`. drafter: makes that of a sequence, from the device's maximum number of tokens of a draft.
        """
        self.adapters = adapters or AdapterTable()
        self.device, self.tokenizer, self.answer_start = device, tokenizer, answer_start
        self.capacity = device.rows * device.replicas + queue
        """Maximum number of unfinished requests."""
        self.length = min(device.length, device.blocks * device.block)
        """Maximum number of tokens of a row, prompt and answer."""
        # One key, so that a prompt has the same hashes on all replicas.
        pools = [Pool(device.blocks, device.block, key) for key in [os.urandom(KEY)] for _ in range(device.replicas)]
        self.schedulers = [
            Scheduler(
                *(pool, device.rows, device.chunk, device.tile, device.prefix_sharing),
                window=device.window,
                snapshots=device.snapshots,
            )
            for pool in pools
        ]
        default = end_tokens_of(tokenizer) if tokenizer else frozenset()
        self.end_tokens = default if end_tokens is None else frozenset(end_tokens)
        self.finite = True
        """Whether any unfinished row of the last step had finite logits."""
        self.failed = False
        """Whether the device raised an exception; a new engine is needed then."""
        self.paused = False
        """Whether no step runs until `resume`; requests wait."""
        self.asleep = False
        """Whether the device has no cache, and no weights unless `refit` gave it some; no step runs until `wake`."""
        self._weights, self._identity = weights, os.urandom(DIGEST)
        self._detokenizer, self._draw, self._guide = Detokenizer(tokenizer), random.Random(seed), guide
        self._drafter = drafter
        self._numbers, self._guiding = count(), Lock()
        self._open: dict[str, int] = {}
        self._active: dict[int, ActiveRequest] = {}
        self._look_ahead = look_ahead and not device.drafts
        self._started: tuple[abc.Sequence[Step | None], StartedStep] | None = None
        """A step whose results are awaited."""
        self._steps = self._tokens = self._errors = self._drafts = self._drafted = 0
        self._accepted = [0] * device.drafts
        """Tokens by their position in the draft."""
        self._host_seconds = self._device_seconds = self._last_seconds = 0.0

    @property
    def requests(self) -> int:
        """Number of unfinished requests."""
        return len(self._open)

    def check(self, request: Request) -> None:
        """Raises Refused for a request that can never run."""
        if self.failed:
            raise Refused("draining", "the device failed; a new engine is needed")
        self.adapters.find(request.adapter)
        request, encoded = self._placed(request), request.memory == ()
        sampling, prompt = request.sampling, request.prompt
        problems = sampling.problems() or list(self._problems(request))
        if encoded and request.memory and sampling.prompt_logprobs is not None:
            problems.append(Problem("prompt_logprobs", "is of prompts that a decoder reads; this model has an encoder"))
        if problems:
            raise Refused("invalid", f"{problems[0].setting} {problems[0].message}", problems[0].setting)
        if request.identifier in self._open:
            raise Refused("invalid", f"identifier {request.identifier!r} is in use", "identifier")
        if len(prompt) + min(1, sampling.max_tokens) > self.length:
            addition = "with the first token of its answer " if sampling.max_tokens else ""
            message = f"the prompt has {len(prompt):,} tokens; {addition}it may have {self.length:,}: shorten it"
            raise Refused("too_long", message, "prompt")
        if len(request.memory) > self.device.memory:
            message = (
                f"the text to read has {len(request.memory):,} tokens; it may have {self.device.memory:,}: shorten it"
            )
            raise Refused("too_long", message, "memory")

    def submit(self, request: Request) -> None:
        """Queue a request, which runs in the following steps. Raises Refused."""
        self.check(request)
        request = self._placed(request)
        if len(self._open) >= self.capacity:
            raise Refused("queue_full", f"{len(self._open)} requests are not finished; {self.capacity} may be")
        number, sampling = next(self._numbers), request.sampling
        seed = self._draw.getrandbits(63) if sampling.seed is None else sampling.seed
        orders = [(number, choice) for choice in range(sampling.choices() if sampling.beams == 1 else 1)]
        sequences = [self._sequence(request, order, seed_of(seed, order[1])) for order in orders]
        kind = Answers if sampling.best_of is None else BestAnswers
        kind = Embedding if request.pooling else BeamAnswers if sampling.beams > 1 else kind
        scheduler = replica_for(sequences[0], self.schedulers)
        # Equal prompts have equal hashes.
        for sequence in sequences[1:]:
            sequence.digests = list(sequences[0].digests)
        active = self._active[number] = kind(request, sequences, self._detokenizer, scheduler)
        if request.experts and self.device.experts is not None:
            active.experts = partial(self.device.experts, self.schedulers.index(scheduler))
        self._open[request.identifier] = number

    def load_adapter(self, name: str, values: Any) -> None:
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
        begin, waited = time.perf_counter(), self._device_seconds
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
        self._steps += following is not None
        self._last_seconds = time.perf_counter() - begin
        self._host_seconds += self._last_seconds - (self._device_seconds - waited)
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

    def refit(self, weights: Any, running: Running = "finish", *, shared: bool = False) -> None:
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

    def movable_weights(self) -> Weights:
        """The device's weights. Raises UserError if they cannot be replaced or moved."""
        if self._weights is None:
            raise UserError("the weights of this engine cannot be replaced or moved")
        return self._weights

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
        self._identity = os.urandom(DIGEST)
        for active in self._active.values():
            for row in active.sequences:
                if row.slot < 0:
                    row.origin, row.digests = self._origin(active.request, row.adapter), []

    def _origin(self, request: Request, adapter: LoadedAdapter | None) -> bytes:
        """`Sequence.origin` of the sequences of a request."""
        origin = blake2b(self._identity, digest_size=DIGEST)
        for part in (b"" if adapter is None else adapter.identity, request.cache_salt):
            origin.update(len(part).to_bytes(8, "big") + part)
        return origin.digest()

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
        schedulers = self.schedulers
        return Statistics(
            running=sum(len(scheduler.running) for scheduler in schedulers),
            waiting=sum(len(scheduler.waiting) for scheduler in schedulers),
            requests=len(self._open),
            blocks_used=sum(scheduler.pool.used for scheduler in schedulers),
            blocks=sum(scheduler.pool.blocks for scheduler in schedulers),
            steps_total=self._steps,
            tokens_total=self._tokens,
            prompt_tokens_total=sum(scheduler.prompt_tokens for scheduler in schedulers),
            shared_tokens_total=sum(scheduler.shared_tokens for scheduler in schedulers),
            drafted_tokens_total=self._drafted,
            accepted_tokens_total=sum(self._accepted),
            drafts_total=self._drafts,
            accepted_at_total=tuple(self._accepted),
            preemptions_total=sum(scheduler.preemptions for scheduler in schedulers),
            errors_total=self._errors,
            scheduler_seconds_total=self._host_seconds,
            device_seconds_total=self._device_seconds,
            last_step_seconds=self._last_seconds,
        )

    def _placed(self, request: Request) -> Request:
        """The request with its prompt where the model reads it."""
        if not self.answer_start or request.memory:
            return request
        return replace(request, memory=request.prompt, prompt=self.answer_start)

    def _problems(self, request: Request) -> list[Problem]:
        """Problems beyond the limits of the settings, by name of the field."""
        sampling, problems = request.sampling, list(input_problems(request, self.device))
        if sampling.stop and self.tokenizer is None:
            problems.append(Problem("stop", "needs a tokenizer, and the engine has none"))
        candidates = candidates_of(sampling.beams, self._end_tokens_of(sampling))
        if sampling.beams > 1 and candidates > self.device.top:
            message = f"{sampling.beams} and the tokens that end a text need {candidates} candidates of each beam"
            problems.append(Problem("beams", f"{message}; the device gives {self.device.top}"))
        try:
            self._start_of(sampling)
        except UserError as error:
            problems.append(Problem("guide", str(error)))
        return problems

    def _end_tokens_of(self, sampling: Sampling) -> frozenset[int]:
        return frozenset(sampling.stop_tokens) | (frozenset() if sampling.ignore_eos else self.end_tokens)

    def _start_of(self, sampling: Sampling) -> Any:
        """The constraint at the start of a text. Raises UserError if the guide is invalid."""
        if sampling.guide is None:
            return None
        if self._guide is None:
            raise UserError("is not supported by this engine")
        with self._guiding:
            return self._guide(sampling.guide)

    def _sequence(self, request: Request, order: tuple[int, int], seed: int) -> Sequence:
        sampling, prompt = request.sampling, request.prompt
        # The constraint of a text, and forbidden sequences, depend on each token; and beams are extended together.
        drafted = self.device.drafts > 0 and sampling.guide is None and sampling.beams == 1 and not sampling.bad_tokens
        adapter = self.adapters.find(request.adapter)
        return Sequence(
            order=order,
            priority=request.priority,
            origin=self._origin(request, adapter),
            tokens=list(prompt),
            limit=min(self.length, len(prompt) + sampling.max_tokens),
            sampling=sampling,
            seed=seed,
            end_tokens=self._end_tokens_of(sampling),
            memory=request.memory,
            images=request.images,
            adapter=adapter,
            unscored=sampling.prompt_logprobs is not None and order[1] == 0,
            pooling=request.pooling,
            top=sampling.logprobs,
            allowed=mask_of(sampling.allowed_tokens, self.device.vocabulary) if sampling.allowed_tokens else None,
            guide=self._start_of(sampling),
            drafter=self._drafter(self.device.drafts) if drafted else None,
        )

    def _receive(self, work: abc.Sequence[Step | None], started: StartedStep) -> None:
        """Wait for the results of a step, and give them to the sequences."""
        begin, finite = time.perf_counter(), list[bool]()
        results = started.results()
        self._device_seconds += time.perf_counter() - begin
        for step, replica in zip(work, results, strict=True):
            for (sequence, computed), result in zip(step.parts() if step else [], replica, strict=True):
                active = self._active.get(sequence.order[0])
                # It may have ended since the step started, or by a fault of its request.
                if active is not None and sequence in active.sequences:
                    finite.append(result.finite)
                    sequence.awaited -= computed == len(sequence.tokens)
                    self._extend(active, sequence, computed, result)
        self.finite = any(finite) if finite else self.finite

    def _extend(self, active: ActiveRequest, sequence: Sequence, computed: int, result: Sampled) -> None:
        """Give a sequence its result, and those after its draft as long as the draft has the tokens that were chosen:
        it gets the tokens of steps without drafts, one by one, and ends where it would end with these."""
        draft = sequence.draft
        self._drafts += bool(draft)
        self._drafted += len(draft)
        self._guarded(active, ActiveRequest.receive, sequence, computed, result)
        for ahead, (token, following) in enumerate(zip(draft, result.following, strict=True)):
            if sequence not in active.sequences or sequence.tokens[computed + ahead] != token:
                break
            self._accepted[ahead] += 1
            sequence.computed += 1
            self._guarded(active, ActiveRequest.receive, sequence, sequence.computed, following)

    def _guarded(self, active: ActiveRequest, method: Callable[..., None], *arguments: Any) -> None:
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
        self._tokens += active.tokens - tokens
        self._errors += active.faults - faults
        if failed or not active.sequences:
            del self._active[self._open.pop(active.request.identifier)]
