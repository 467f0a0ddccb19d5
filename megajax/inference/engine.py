"""Continuous batching: requests join and leave the steps of a device at any time.

A step runs on the caller's thread: which rows run is decided, the device computes, results become pieces of text.
`megajax.inference.worker` runs the steps on a thread of their own.
"""

import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Any

from megajax.config.errors import Problem, UserError
from megajax.inference.answers import ActiveRequest, Answers, BeamAnswers, BestAnswers, seed_of
from megajax.inference.detokenizer import Detokenizer
from megajax.inference.device import Device, Sampled
from megajax.inference.pool import Pool
from megajax.inference.request import Finish, Refused, Request, Sampling
from megajax.inference.sampling.beams import candidates_of
from megajax.inference.scheduler import Row, Scheduler, Step
from megajax.tokenizers.base import Tokenizer

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Counts of all replicas. Those that end in `_total` only grow."""

    running: int
    """Rows that run."""
    waiting: int
    """Rows that wait for a place or for blocks."""
    requests: int
    """Requests that are not finished."""
    blocks_used: int
    """Blocks of the cache in use."""
    blocks: int
    """Blocks of the cache."""
    steps_total: int
    """Steps of the device."""
    tokens_total: int
    """Tokens of answers."""
    prompt_tokens_total: int
    """Tokens of prompts that were computed, those of preempted rows each time."""
    shared_tokens_total: int
    """Tokens of prompts that were in the cache already."""
    preemptions_total: int
    """Rows that gave up their blocks and were computed again."""
    errors_total: int
    """Faults that ended an answer or a request, and no other."""
    scheduler_seconds_total: float
    """Time of the host: scheduling, text and delivery."""
    device_seconds_total: float
    """Time of the device."""
    last_step_seconds: float
    """Time of the last step, of host and device."""


class Engine:
    """Requests in, pieces of text out. Not safe for threads; `check` alone may be called from any."""

    def __init__(
        self,
        device: Device,
        *,
        tokenizer: Tokenizer | None = None,
        ends: Collection[int] | None = None,
        queue: int = 128,
        seed: int | None = None,
        guide: Callable[[Any], Any] | None = None,
    ):
        """tokenizer: None: answers have no text. ends: tokens that end a text; None: the tokenizer's.

        queue: most requests that are not finished, beside one for each row of the device. seed: of the seeds of
        requests without one; None: other ones each time. guide: makes the state of a constraint from `Sampling.guide`;
        raises UserError for one that is not valid.
        """
        self.device, self.tokenizer = device, tokenizer
        self.capacity = device.rows * device.replicas + queue
        """Most requests that are not finished."""
        self.length = min(device.length, device.blocks * device.block)
        """Most tokens of a row, prompt and answer."""
        self.schedulers = [
            Scheduler(
                Pool(device.blocks, device.block),
                rows=device.rows,
                chunk=device.chunk,
                prefix_sharing=device.prefix_sharing,
            )
            for _ in range(device.replicas)
        ]
        self.ends = (ends_of(tokenizer) if tokenizer else frozenset()) if ends is None else frozenset(ends)
        self.finite = True
        """Whether a row of the last step had finite logits."""
        self.failed = False
        """The device raised an exception: a new engine is needed."""
        self._detokenizer, self._draw, self._guide = Detokenizer(tokenizer), random.Random(seed), guide
        self._numbers, self._guiding = count(), Lock()
        self._open: dict[str, int] = {}
        self._active: dict[int, ActiveRequest] = {}
        self._steps = self._tokens = self._errors = 0
        self._host_seconds = self._device_seconds = self._last_seconds = 0.0

    @property
    def requests(self) -> int:
        """Those that are not finished."""
        return len(self._open)

    def check(self, request: Request) -> None:
        """Raises Refused for a request that can never run."""
        if self.failed:
            raise Refused("draining", "the device failed; a new engine is needed")
        sampling, prompt = request.sampling, request.prompt
        problems = sampling.problems() or list(self._problems(request))
        if problems:
            raise Refused("invalid", f"{problems[0].setting} {problems[0].message}", problems[0].setting)
        if request.identifier in self._open:
            raise Refused("invalid", f"identifier {request.identifier!r} is in use", "identifier")
        if len(prompt) + min(1, sampling.max_tokens) > self.length:
            left = "with the first token of its answer " if sampling.max_tokens else ""
            message = f"the prompt has {len(prompt):,} tokens; {left}it may have {self.length:,}: shorten it"
            raise Refused("too_long", message, "prompt")
        if len(request.memory) > self.device.memory:
            message = f"the text to read has {len(request.memory):,} tokens; it may have {self.device.memory:,}"
            raise Refused("too_long", message, "memory")

    def submit(self, request: Request) -> None:
        """The request waits, and runs in the following steps. Raises Refused."""
        self.check(request)
        if len(self._open) >= self.capacity:
            raise Refused("queue_full", f"{len(self._open)} requests are not finished; {self.capacity} may be")
        number, sampling = next(self._numbers), request.sampling
        seed = self._draw.getrandbits(63) if sampling.seed is None else sampling.seed
        scheduler = min(self.schedulers, key=lambda each: len(each.running) + len(each.waiting))
        rows = [self._row(request, (number, choice), seed_of(seed, choice)) for choice in range(sampling.choices())]
        streams = [self._detokenizer.stream(request.prompt) for _ in range(max(sampling.n, len(rows)))]
        if sampling.beams > 1:
            self._active[number] = BeamAnswers(request, rows[0], streams[: sampling.n], scheduler)
        else:
            kind = Answers if sampling.best_of is None else BestAnswers
            self._active[number] = kind(request, rows, streams, scheduler)
        self._open[request.identifier] = number

    def cancel(self, identifier: str) -> None:
        """Ends a request, whose blocks are free from now on. Nothing happens if it has ended."""
        number = self._open.get(identifier)
        if number is not None:
            self._guarded(self._active[number], ActiveRequest.end_all, "cancelled")

    def step(self) -> bool:
        """One step of the device. False: no row can run."""
        start = time.perf_counter()
        work = [scheduler.next() for scheduler in self.schedulers]
        if not any(work):
            return False
        scheduled = time.perf_counter()
        try:
            results = self.device.run(work)
        except BaseException:
            self.fail()
            raise
        computed = time.perf_counter()
        self._take(work, results)
        ended = time.perf_counter()
        self._steps += 1
        self._device_seconds += computed - scheduled
        self._host_seconds += scheduled - start + ended - computed
        self._last_seconds = ended - start
        return True

    def fail(self) -> None:
        """Ends every request with an error, and takes no more: the device's cache is not what the pools say."""
        self.failed = True
        self.end_all("error")

    def end_all(self, finish: Finish) -> None:
        """Ends every request."""
        for active in list(self._active.values()):
            self._guarded(active, ActiveRequest.end_all, finish)

    def statistics(self) -> Statistics:
        """Counts up to now."""
        schedulers = self.schedulers
        return Statistics(
            running=sum(len(each.running) for each in schedulers),
            waiting=sum(len(each.waiting) for each in schedulers),
            requests=len(self._open),
            blocks_used=sum(each.pool.used for each in schedulers),
            blocks=sum(each.pool.blocks for each in schedulers),
            steps_total=self._steps,
            tokens_total=self._tokens,
            prompt_tokens_total=sum(each.prompt_tokens for each in schedulers),
            shared_tokens_total=sum(each.shared_tokens for each in schedulers),
            preemptions_total=sum(each.preemptions for each in schedulers),
            errors_total=self._errors,
            scheduler_seconds_total=self._host_seconds,
            device_seconds_total=self._device_seconds,
            last_step_seconds=self._last_seconds,
        )

    def _problems(self, request: Request) -> list[Problem]:
        """What is wrong beside the settings' own limits, by the names of the fields."""
        sampling, vocabulary, problems = request.sampling, self.device.vocabulary, []
        named: dict[str, Collection[int]] = {"prompt": request.prompt, "memory": request.memory}
        named |= {"stop_tokens": sampling.stop_tokens, "logit_bias": sampling.logit_bias}
        for name, tokens in named.items():
            if set(map(type, tokens)) - {int}:
                problems.append(Problem(name, "must be token ids, as integers"))
            elif tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
                wrong = min(tokens) if min(tokens) < 0 else max(tokens)
                problems.append(Problem(name, f"has the token {wrong}; ids go from 0 to {vocabulary - 1}"))
        if not request.prompt:
            problems.append(Problem("prompt", "has no tokens"))
        if bool(request.memory) != bool(self.device.memory):
            missing = "is missing: the encoder of the model reads it"
            problems.append(
                Problem("memory", missing if self.device.memory else "is given, and the model has no encoder")
            )
        if sampling.stop and self.tokenizer is None:
            problems.append(Problem("stop", "needs a tokenizer, and the engine has none"))
        if sampling.beams > 1 and (wanted := candidates_of(sampling.beams, self._ends_of(sampling))) > self.device.top:
            what = f"{sampling.beams} and the tokens that end a text need {wanted} candidates of each beam"
            problems.append(Problem("beams", f"{what}; the device gives {self.device.top}"))
        try:
            self._start_of(sampling)
        except UserError as error:
            problems.append(Problem("guide", str(error)))
        return problems

    def _ends_of(self, sampling: Sampling) -> frozenset[int]:
        return frozenset(sampling.stop_tokens) | (frozenset() if sampling.ignore_eos else self.ends)

    def _start_of(self, sampling: Sampling) -> Any:
        """The constraint of an empty text. Raises UserError for one that is not valid."""
        if sampling.guide is None:
            return None
        if self._guide is None:
            raise UserError("is not supported by this engine")
        with self._guiding:
            return self._guide(sampling.guide)

    def _row(self, request: Request, order: tuple[int, int], seed: int) -> Row:
        sampling, prompt = request.sampling, request.prompt
        return Row(
            order=order,
            tokens=list(prompt),
            limit=min(self.length, len(prompt) + sampling.max_tokens),
            sampling=sampling,
            seed=seed,
            ends=self._ends_of(sampling),
            memory=request.memory,
            unscored=sampling.prompt_logprobs is not None and order[1] == 0,
            top=sampling.logprobs,
            guide=self._start_of(sampling),
        )

    def _take(self, work: Sequence[Step | None], results: Sequence[Sequence[Sampled]]) -> None:
        finite = False
        for step, replica in zip(work, results, strict=True):
            for (row, computed), result in zip(step.parts() if step else [], replica, strict=True):
                finite = finite or result.finite
                active = self._active.get(row.order[0])
                # A fault of one row may have ended its request.
                if active is not None and row in active.rows():
                    self._guarded(active, ActiveRequest.take, row, computed, result)
        self.finite = finite

    def _guarded(self, active: ActiveRequest, method: Callable[..., None], *arguments: Any) -> None:
        """Calls a method of one request. Whatever it raises, the others go on."""
        tokens, faults, failed = active.tokens, active.faults, False
        try:
            method(active, *arguments)
        except Exception:
            LOG.exception("request %s ends with an error", active.request.identifier)
            failed = True
            with suppress(Exception):
                active.fail()
        self._tokens += active.tokens - tokens
        self._errors += active.faults - faults
        if failed or not active.rows():
            del self._active[self._open.pop(active.request.identifier)]


def ends_of(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens by which a tokenizer's texts end."""
    return frozenset({tokenizer.eod, tokenizer.specials.get("eos", tokenizer.eod)})
