"""Masks of allowed next tokens for a text that has to match a JSON schema, a regular expression or a grammar.

llguidance (https://github.com/guidance-ai/llguidance) parses the text and computes the masks. It works on the bytes of
tokens, so the tokenizer's division of the text does not matter.
"""

import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from hashlib import blake2b
from queue import SimpleQueue
from threading import Lock, RLock
from types import ModuleType
from typing import Any, Self

import numpy as np

from megajax.config.errors import UserError
from megajax.config.optional_packages import require
from megajax.inference.request import RefusedRequest
from megajax.inference.sampling.guide_trials import Trials, memory, new_matcher, new_tokenizer
from megajax.inference.sampling.json_schema import schema_problems
from megajax.inference.sampling_settings import Grammar, GuideLimits
from megajax.tokenizers.base import Tokenizer

WORKERS, CACHE, REFUSED = 2, 2**29, 1024
"""Number of guides that are compiled at the same time; bytes of recently used guides that are kept, unless limits say
otherwise; number of guides whose refusal is remembered."""
LEAST, GROWTH, GROWTH_OF_A_SECOND = 2**18, 24 * 2**20, 2**26
"""Estimated bytes of the smallest guide; what steps add at most (`LIMITS` of trials), and in a second of time."""
START = 20
"""Tokens whose time a text may take before its first one: first steps are the slowest."""
ESCAPES = '"\\\\bfnrt'
NAMING = ("properties", "patternProperties", "required")
"""Escapes of documents whose schemas have such keywords. With \\u, a known name could pass for an additional one."""
SHORT = 2000
"""Characters of a remembered refusal."""
type Key = bytes
"""The digest of a guide, whose text may have megabytes."""
COMPACT, SPACED = "", "[ \n]{0,24}"
"""Whitespace between the parts of a JSON document. Without a limit, a model may write whitespace until max_tokens."""


class GuideMemory:
    """The memory of a guide, which ends with its last state."""

    def __init__(self, size: int, count: Callable[[int], None]):
        """count: called with changes of the bytes."""
        self._size, self._most, self._count = size, size + GROWTH, count
        count(size)

    def grow(self, seconds: float) -> None:
        """Count what a step may have added. seconds: its processor time."""
        size = min(self._most, self._size + int(seconds * GROWTH_OF_A_SECOND))
        change, self._size = size - self._size, size
        if change:
            self._count(change)

    def __del__(self) -> None:
        self._count(-self._size)


class Guided:
    """The state of a text under its guide. Immutable, so that copies of a row share it."""

    def __init__(
        self,
        matcher: Any,
        end_tokens: Collection[int],
        guide_memory: GuideMemory,
        pace: float | None = None,
        tokens: int = 0,
        seconds: float = 0.0,
    ):
        """matcher: an LLMatcher, which must not change. pace: maximum of `seconds` for each of the tokens, and of
        `START` more. tokens, seconds: those of the text so far, and their processor time.

        Raises UserError if the guide exceeds its limits, or if no text matches it.
        """
        self._matcher, self._end_tokens, self._memory, self._pace = matcher, end_tokens, guide_memory, pace
        began = time.thread_time()
        self.mask = np.frombuffer(matcher.compute_bitmask(), "<u4")
        """The tokens that may follow, uint32 [ceil(V / 32)]: bit i % 32 of word i // 32 stands for token i."""
        spent = time.thread_time() - began
        guide_memory.grow(spent)
        self._tokens, self._seconds = tokens, seconds + spent
        if matcher.is_error():
            error = matcher.get_error()
            nothing = "NoExtension" in error
            raise UserError("no text matches the guide" if nothing else f"the guide is too large: {_reason(error)}")
        if pace is not None and self._seconds > pace * (START + tokens):
            limit = f"more than {pace:g} s a token (server.guide_step_seconds)"
            raise UserError(f"the guide is too slow: {tokens} tokens took {self._seconds:.2g} s, {limit}: simplify it")

    @property
    def complete(self) -> bool:
        """Whether the text matches now."""
        return self._matcher.is_accepting()

    def after(self, token: int) -> Self:
        """The state after another token; end tokens do not change it.

        Raises ValueError for a token that the mask excludes, UserError like the constructor.
        """
        if token in self._end_tokens:
            return self
        if not self.mask[token // 32] >> (token % 32) & 1:
            raise ValueError(f"token {token} does not follow the guide")
        began, matcher = time.thread_time(), self._matcher.deep_copy()
        matcher.consume_token(token)
        seconds = self._seconds + time.thread_time() - began
        return type(self)(matcher, self._end_tokens, self._memory, self._pace, self._tokens + 1, seconds)


class Guides:
    """Makes the first states of guided texts: `AnswerRules(guide=guides.start)`. Thread-safe."""

    def __init__(
        self,
        pieces: Callable[[], Sequence[bytes | None]],
        end_tokens: Collection[int],
        *,
        whitespace: bool = False,
        limits: GuideLimits | None = None,
    ):
        """pieces: returns the bytes of all tokens, see `token_pieces`. end_tokens: tokens that end a text.

        whitespace: allow whitespace between the parts of a JSON document. limits: None for guides of trusted programs,
        which take the time that they need: processes that give an engine the same requests must agree.
        """
        self._pieces, self._end_tokens, self._limits = pieces, frozenset(end_tokens), limits
        self._options = {"whitespace_pattern": SPACED if whitespace else COMPACT}
        self._most = CACHE if limits is None else limits.cache_bytes
        self._lock, self._building, self._bytes = RLock(), Lock(), 0
        self._first, self._refused = OrderedDict[Key, Guided](), OrderedDict[Key, str]()
        self._pending: dict[Key, Future[Guided]] = {}
        self._waiting: dict[Key, set[Future[Guided]]] = {}
        self._pool = ThreadPoolExecutor(WORKERS, "guide")
        self._trials = SimpleQueue[Trials | None]()
        for _ in range(WORKERS):
            self._trials.put(None)

    def __call__(self, guide: object) -> Guided:
        """The state of an empty text. guide: a JSON schema, a regular expression as a string, or a `Grammar`.

        Raises UserError if the guide is malformed, not supported, or exceeds a limit; RefusedRequest, to try later, if
        too many wait or too much memory is in use.
        """
        return self.start(guide).result()

    def start(self, guide: object) -> Future[Guided]:
        """The state of an empty text, which another thread makes if no equal guide was used recently. Raises, and the
        result raises, what a call raises."""
        try:
            text, is_grammar = json.dumps(guide), isinstance(guide, Grammar)
        except (RecursionError, TypeError, ValueError) as error:
            raise UserError(_problem(error)) from None
        key = blake2b(f"{is_grammar} {text}".encode()).digest()
        with self._lock:
            if key in self._refused:
                raise UserError(self._refused[key])
            if key in self._first:
                self._first.move_to_end(key)
                future = Future[Guided]()
                future.set_result(self._first[key])
                return future
            if key in self._pending:
                return self._wait_for(key)
            if self._limits is not None and len(self._pending) >= WORKERS + self._limits.waiting:
                waiting = f"{len(self._pending)} guides wait to be compiled"
                raise RefusedRequest(
                    "queue_full", f"{waiting}, at most {self._limits.waiting} may (server.guide_queue)"
                )
            self._waiting[key] = set()
            self._pending[key] = self._pool.submit(self._make, key, text, is_grammar)
            return self._wait_for(key)

    def _wait_for(self, key: Key) -> Future[Guided]:
        """A future of one caller. A guide for which nobody waits any more is not compiled, unless that has begun."""
        future, waiters = Future[Guided](), self._waiting[key]
        waiters.add(future)

        def leave(future: Future[Guided]) -> None:
            with self._lock:
                waiters.discard(future)
                if not waiters and self._waiting.get(key) is waiters and self._pending[key].cancel():
                    del self._pending[key], self._waiting[key]

        def deliver(compiled: Future[Guided]) -> None:
            if compiled.cancelled() or not future.set_running_or_notify_cancel():
                return
            if (error := compiled.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(compiled.result())

        future.add_done_callback(leave)
        self._pending[key].add_done_callback(deliver)
        return future

    @property
    def size(self) -> int:
        """Estimated bytes of all guides."""
        return self._bytes

    def _make(self, key: Key, text: str, is_grammar: bool) -> Guided:
        """The state of a guide that is not cached, on a thread of the pool."""
        try:
            state = self._new(text, is_grammar)
            with self._lock:
                self._first[key] = state
            return state
        except RefusedRequest:
            raise
        except (RecursionError, TypeError, ValueError, UserError) as error:
            with self._lock:
                self._refused[key] = _problem(error)[:SHORT]
                while len(self._refused) > REFUSED:
                    self._refused.popitem(last=False)
            raise UserError(self._refused[key]) from None
        finally:
            with self._lock:
                del self._pending[key], self._waiting[key]

    def _count(self, change: int) -> None:
        """Count bytes of guides; beyond the limit, forget those that were used least recently."""
        with self._lock:
            self._bytes += change
            while change > 0 and self._bytes > self._most and self._first:
                self._first.popitem(last=False)

    @cached_property
    def _texts(self) -> list[bytes]:
        # Tokens that start with the byte ff have no text.
        return [
            piece if piece and token not in self._end_tokens else b"\xff[%d]" % token
            for token, piece in enumerate(self._pieces())
        ]

    @cached_property
    def _tokenizer(self) -> Any:
        return new_tokenizer(_library(), self._texts, sorted(self._end_tokens))

    def _start(self, value: object) -> tuple[str, str]:
        """The name, and the grammar, of a regular expression or of a schema. Raises UserError."""
        if isinstance(value, str):
            if (len(value) - len(value.rstrip("\\"))) % 2:
                raise UserError("the regular expression ends within an escape: a single \\")
            grammar = _library().LLMatcher.grammar_from_regex(value)
            return "regular expression", json.loads(grammar)["grammars"][0]["lark_grammar"]
        for problem in schema_problems(value):
            raise UserError(f"JSON schema: {problem}")
        schema = value if isinstance(value, dict) else {"allOf": [value]}
        names = any(f'"{keyword}"' in json.dumps(schema) for keyword in NAMING)
        options = self._options | ({"json_allowed_escapes": ESCAPES} if names else {})
        return "JSON schema", f"start: %json {json.dumps(schema | {'x-guidance': options})}"

    def _new(self, guide: str, is_grammar: bool) -> Guided:
        """The state of an empty text. guide: as JSON."""
        kind, grammar = ("grammar", *json.loads(guide)) if is_grammar else self._start(json.loads(guide))
        if is_grammar and "%llguidance" in grammar:
            raise UserError("grammar: has a line of options, which are the server's: leave it out")
        gbnf = is_grammar and "::=" in grammar
        with self._building:
            tokenizer = self._tokenizer
        size = 0 if self._limits is None else self._try(kind, grammar, gbnf, self._limits)
        before, _ = memory()
        try:
            matcher = new_matcher(_library(), tokenizer, grammar, gbnf=gbnf)
        except Exception as error:
            raise UserError(f"{kind}: {error}") from None
        if error := matcher.get_error():
            raise UserError(f"{kind}: {_reason(error)}")
        guide_memory = GuideMemory(max(LEAST + 8 * len(grammar), size or memory()[0] - before), self._count)
        if self._limits is not None and self._bytes > self._most:
            used, limit = f"{self._bytes >> 20:,} MiB", f"at most {self._most >> 20:,} MiB (server.guide_cache_bytes)"
            raise RefusedRequest("queue_full", f"the guides of running requests have {used} of memory, {limit}")
        return Guided(
            matcher, self._end_tokens, guide_memory, None if self._limits is None else self._limits.step_seconds
        )

    def _try(self, kind: str, grammar: str, gbnf: bool, limits: GuideLimits) -> int:
        """The bytes of a guide. Raises UserError if it exceeds a limit."""
        trials = self._trials.get() or Trials(self._texts, sorted(self._end_tokens), limits.seconds, limits.size)
        try:
            trial = trials(grammar, gbnf=gbnf)
        finally:
            self._trials.put(trials)
        if trial.exceeds == "seconds":
            raise UserError(f"{kind}: compiles for more than {limits.seconds:g} s (server.guide_seconds): simplify it")
        if trial.exceeds == "stack":
            raise UserError(f"{kind}: is nested too deeply, or has numbers that are too large")
        if trial.exceeds or trial.size > limits.size:
            raise UserError(f"{kind}: needs more than {limits.size:,} bytes (server.guide_bytes): simplify it")
        return trial.size


def mask_of(tokens: Collection[int], vocabulary: int) -> np.ndarray:
    """The mask of these tokens, uint32 [ceil(V / 32)], as in `Guided`."""
    bits = np.zeros(-(-vocabulary // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


def _problem(error: Exception) -> str:
    """What is wrong with a guide that cannot be read."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, RecursionError):
        return "the guide is nested too deeply"
    return f"the guide is neither a JSON schema nor a regular expression: {error}"


def _reason(error: str) -> str:
    """An error of llguidance without places in the grammar, which the client has not written."""
    return re.split(r"\n +\d+ \| |\n<", re.sub(r"^at \d+\(\d+\): ", "", error))[0].strip()


def _library() -> ModuleType:
    return require("llguidance", "a guide")


def token_pieces(tokenizer: Tokenizer, vocabulary: int) -> list[bytes | None]:
    """The bytes of each token below `vocabulary`; None for tokens without text, or with incomplete characters.

    For a tokenizer without a table of bytes, a token's text is the text that it adds after a letter.
    """
    special = {tokenizer.eod, tokenizer.pad, *tokenizer.specials.values(), *tokenizer.sentinels}
    ids = range(min(vocabulary, tokenizer.vocabulary_size))
    if tokenizer.table:
        pieces = [None if token in special else tokenizer.table[token] for token in ids]
    else:
        before = tokenizer.encode("a").tolist()
        start = tokenizer.decode(before)
        pieces = [None if token in special else _added(tokenizer, before, start, token) for token in ids]
    return [*pieces, *[None] * (vocabulary - len(pieces))]


def _added(tokenizer: Tokenizer, before: Sequence[int], start: str, token: int) -> bytes | None:
    try:
        text = tokenizer.decode([*before, token])
    except UserError:
        return None
    added = text[len(start) :] if text.startswith(start) else ""
    return None if not added or "\N{REPLACEMENT CHARACTER}" in added else added.encode()
