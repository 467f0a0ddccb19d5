"""Which requests an engine takes, and the sequences of their answers. Plain Python."""

import os
import random
from collections import abc
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from megajax.batch import Params
from megajax.config.errors import Problem, UserError
from megajax.inference.detokenizer import Detokenizer
from megajax.inference.request import (
    Drafter,
    EngineDevice,
    ImageInput,
    LoadedAdapter,
    RefusedRequest,
    Request,
    Sequence,
)
from megajax.inference.sampling.beams import candidates_of
from megajax.inference.sampling.guide import mask_of
from megajax.inference.sampling_settings import Sampling
from megajax.inference.scheduler import DIGEST
from megajax.inference.speculation.earlier_text import EarlierText
from megajax.tokenizers.base import Tokenizer, end_tokens_of

IDENTITY = 16
"""Bytes of `LoadedAdapter.identity`."""


class AdapterTable:
    """The adapters of an engine by name. `find` may be called from any thread, the others on the engine's."""

    def __init__(self, slots: int = 0, write: Callable[[int, Any], None] = lambda slot, values: None):
        """write: writes the values of an adapter into a slot, before the next step."""
        self.slots, self._write = slots, write
        self._adapters: dict[str, LoadedAdapter] = {}

    def names(self) -> list[str]:
        """Names of the loaded adapters."""
        return list(self._adapters)

    def find(self, name: str | None) -> LoadedAdapter | None:
        """The adapter of a request; None if it names none. Raises RefusedRequest for an unknown name."""
        if name is None:
            return None
        adapter = self._adapters.get(name)
        if adapter is None:
            raise RefusedRequest("invalid", f"adapter {name!r} is not loaded: there are {self.names()}", "adapter")
        return adapter

    def load(self, name: str, values: Params, used: Collection[int]) -> None:
        """Write an adapter into a free slot. used: slots of unfinished rows. Raises UserError if there is none."""
        if name in self._adapters:
            raise UserError(f"an adapter {name!r} is loaded: drop it first, or choose another name")
        occupied = {adapter.slot for adapter in self._adapters.values()} | set(used)
        free = [slot for slot in range(self.slots) if slot not in occupied]
        if not free:
            loaded = len(self._adapters)
            waiting = len(occupied) - loaded
            state = f"{loaded} are loaded, {waiting} dropped ones are still in use by requests"
            raise UserError(f"no slot is free for adapter {name!r}: of {self.slots} (inference.adapters), {state}")
        self._write(free[0], values)
        self._adapters[name] = LoadedAdapter(name, free[0], os.urandom(IDENTITY))

    def drop(self, name: str) -> None:
        """Refuse further requests for an adapter. Its slot is free when no row uses it. Raises UserError."""
        if name not in self._adapters:
            raise UserError(f"adapter {name!r} is not loaded: there are {self.names()}")
        del self._adapters[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerRules:
    """How an engine reads prompts and ends answers."""

    tokenizer: Tokenizer | None = None
    """None for answers without text."""
    end_tokens: Collection[int] | None = None
    """Tokens that end a text; None for the tokenizer's."""
    answer_start: tuple[int, ...] = ()
    """Of a model with an encoder, the tokens before every answer: the encoder reads the prompt of a request without
    `memory`."""
    guide: Callable[[Any], Future[Any]] | None = None
    """Starts to make the state of a constraint from `Sampling.guide`, such as `Guides.start`; it, or the result, raises
    UserError if that is invalid."""
    seed: int | None = None
    """Seed of the random seeds of requests without one; None for different ones each time."""
    drafter: Callable[[int], Drafter] = EarlierText
    """Makes the drafter of a sequence, from the device's maximum number of tokens of a draft."""


class Admission:
    """Checks requests and makes their sequences. `check` and `start_guide` are thread-safe.

    Attributes:
        length: maximum number of tokens of a row, prompt and answer.
    """

    def __init__(self, device: EngineDevice, rules: AnswerRules, adapters: AdapterTable):
        self.tokenizer, self.answer_start = rules.tokenizer, rules.answer_start
        self.length = min(device.length, device.blocks * device.block)
        self.detokenizer = Detokenizer(rules.tokenizer)
        default = end_tokens_of(rules.tokenizer) if rules.tokenizer else frozenset()
        self._end_tokens = default if rules.end_tokens is None else frozenset(rules.end_tokens)
        self._device, self._adapters, self._guide, self._drafter = device, adapters, rules.guide, rules.drafter
        self._draw, self._identity = random.Random(rules.seed), os.urandom(DIGEST)

    def check(self, request: Request, in_use: Collection[str]) -> Request:
        """The request with its prompt where the model reads it, and with the first state of its guide.

        in_use: identifiers of unfinished requests. Raises RefusedRequest for a request that can never run.
        """
        self._adapters.find(request.adapter)
        request, encoded = self._placed(request), request.memory == ()
        sampling, prompt = request.sampling, request.prompt
        problems = sampling.problems() or self._problems(request)
        if not problems and request.guided is None:
            try:
                future = self.start_guide(sampling)
                request = request if future is None else replace(request, guided=future.result())
            except RefusedRequest:
                raise
            except UserError as error:
                problems.append(Problem("guide", str(error)))
        if encoded and request.memory and sampling.prompt_logprobs is not None:
            problems.append(Problem("prompt_logprobs", "is of prompts that a decoder reads; this model has an encoder"))
        if problems:
            raise RefusedRequest("invalid", f"{problems[0].setting} {problems[0].message}", problems[0].setting)
        if request.identifier in in_use:
            raise RefusedRequest("invalid", f"identifier {request.identifier!r} is in use", "identifier")
        if len(prompt) + min(1, sampling.max_tokens) > self.length:
            addition = "with the first token of its answer " if sampling.max_tokens else ""
            message = f"the prompt has {len(prompt):,} tokens; {addition}it may have {self.length:,}: shorten it"
            raise RefusedRequest("too_long", message, "prompt")
        if len(request.memory) > self._device.memory:
            message = (
                f"the text to read has {len(request.memory):,} tokens; it may have {self._device.memory:,}: shorten it"
            )
            raise RefusedRequest("too_long", message, "memory")
        return request

    def start_guide(self, sampling: Sampling) -> Future[Any] | None:
        """The first state of a guide, for `Request.guided`; None without one.

        Raises UserError, or the result does: for an invalid guide, and RefusedRequest if the request has to wait.
        """
        if sampling.guide is None:
            return None
        if self._guide is None:
            raise UserError("is not supported by this engine")
        return self._guide(sampling.guide)

    def sequences(self, request: Request, number: int) -> list[Sequence]:
        """The sequences of the answers of a checked request, the first of a beam search. number: of the request."""
        sampling = request.sampling
        seed = self._draw.getrandbits(63) if sampling.seed is None else sampling.seed
        orders = [(number, choice) for choice in range(sampling.choices() if sampling.beams == 1 else 1)]
        return [self._sequence(request, order, seed_of(seed, order[1])) for order in orders]

    def renew(self) -> None:
        """Share no block that was computed before with sequences that start later."""
        self._identity = os.urandom(DIGEST)

    def origin(self, request: Request, adapter: LoadedAdapter | None) -> bytes:
        """`Sequence.origin` of the sequences of a request."""
        origin = blake2b(self._identity, digest_size=DIGEST)
        for part in (b"" if adapter is None else adapter.identity, request.cache_salt):
            origin.update(len(part).to_bytes(8, "big") + part)
        return origin.digest()

    def _placed(self, request: Request) -> Request:
        """The request with its prompt where the model reads it."""
        if not self.answer_start or request.memory:
            return request
        return replace(request, memory=request.prompt, prompt=self.answer_start)

    def _problems(self, request: Request) -> list[Problem]:
        """Problems beyond the limits of the settings, by name of the field."""
        sampling, problems = request.sampling, list(input_problems(request, self._device))
        if sampling.stop and self.tokenizer is None:
            problems.append(Problem("stop", "needs a tokenizer, and the engine has none"))
        candidates = candidates_of(sampling.beams, self._end_tokens_of(sampling))
        if sampling.beams > 1 and candidates > self._device.top:
            message = f"{sampling.beams} and the tokens that end a text need {candidates} candidates of each beam"
            problems.append(Problem("beams", f"{message}; the device gives {self._device.top}"))
        return problems

    def _end_tokens_of(self, sampling: Sampling) -> frozenset[int]:
        return frozenset(sampling.stop_tokens) | (frozenset() if sampling.ignore_eos else self._end_tokens)

    def _sequence(self, request: Request, order: tuple[int, int], seed: int) -> Sequence:
        sampling, prompt = request.sampling, request.prompt
        # The constraint of a text, and forbidden sequences, depend on each token; and beams are extended together.
        drafted = self._device.drafts > 0 and sampling.guide is None and sampling.beams == 1 and not sampling.bad_tokens
        adapter = self._adapters.find(request.adapter)
        return Sequence(
            order=order,
            priority=request.priority,
            origin=self.origin(request, adapter),
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
            allowed=mask_of(sampling.allowed_tokens, self._device.vocabulary) if sampling.allowed_tokens else None,
            guide=request.guided,
            drafter=self._drafter(self._device.drafts) if drafted else None,
        )


def seed_of(seed: int, choice: int) -> int:
    """The seed of an answer, from the seed of its request."""
    digest = blake2b(seed.to_bytes(8, "big") + choice.to_bytes(8, "big"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def input_problems(request: Request, device: EngineDevice) -> Iterator[Problem]:
    """Problems of the inputs of a request on a device."""
    sampling, vocabulary, has_encoder = request.sampling, device.vocabulary, device.memory > 0
    fields: Mapping[str, abc.Collection[int]] = {
        # A tokenizer of text alone may lack the token of images.
        "prompt": [token for token in request.prompt if device.images is None or token != device.images.token],
        "memory": request.memory,
        **{name: getattr(sampling, name) for name in ("stop_tokens", "logit_bias", "logprob_tokens", "allowed_tokens")},
        "bad_tokens": {token for tokens in sampling.bad_tokens for token in tokens},
    }
    for name, tokens in fields.items():
        if set(map(type, tokens)) - {int}:
            yield Problem(name, "must be token ids, as integers")
        elif tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            invalid_token = min(tokens) if min(tokens) < 0 else max(tokens)
            yield Problem(name, f"has the token {invalid_token}; ids go from 0 to {vocabulary - 1}")
    if request.pooling and (sampling.max_tokens or sampling.choices() > 1 or sampling.beams > 1):
        yield Problem("pooling", "is given: an embedding has max_tokens=0 and n=1")
    if not request.pooling and not device.generates:
        yield Problem("pooling", "must be given: the model gives embeddings, and no text")
    if request.pooling and has_encoder:
        yield Problem("pooling", "is of the states of a decoder or of an encoder alone, and this model has both")
    if type(request.priority) is not int:
        yield Problem("priority", f"must be an integer, got {request.priority!r}")
    if not request.prompt:
        yield Problem("prompt", "has no tokens")
    if bool(request.memory) != has_encoder:
        missing = "is missing: it is the input of the model's encoder"
        yield Problem("memory", missing if has_encoder else "is given, but the model has no encoder")
    yield from _image_problems(request, device.images)


def _image_problems(request: Request, images: ImageInput | None) -> Iterator[Problem]:
    if images is None:
        if request.images:
            yield Problem("images", "are given, but the model reads text alone")
        return
    if len(request.images) > images.most:
        yield Problem("images", f"are {len(request.images)}, and the model reads at most {images.most}")
    places = [place for image in request.images for place in range(image.first, image.first + image.count)]
    if places != [place for place, token in enumerate(request.prompt) if token == images.token]:
        message = f"has {request.prompt.count(images.token)} image tokens ({images.token}) that do not stand for images"
        yield Problem("prompt", message if not request.images else "has image tokens at other places than its images")
