"""Masks of allowed next tokens for a text that has to match a JSON schema, a regular expression or a grammar.

llguidance (https://github.com/guidance-ai/llguidance) parses the text and computes the masks. It works on the bytes of
tokens, so the tokenizer's division of the text does not matter.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import numpy as np

from megajax.config.errors import UserError
from megajax.config.hints import did_you_mean
from megajax.config.optional_packages import require
from megajax.inference.sampling_settings import Grammar
from megajax.tokenizers.base import Tokenizer

GUIDES = 32
"""Number of recently used guides whose first state is cached."""
COMPACT, SPACED = "", "[ \n]{0,24}"
"""Whitespace between the parts of a JSON document. Without a limit, a model may write whitespace until max_tokens."""
IN_ONE = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
IN_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
IN_MAPPING = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas, lists of schemas, and schemas by name."""
PLAIN = (
    "$anchor $comment $id $ref $schema const contentEncoding contentMediaType default deprecated dependentRequired "
    "description enum examples exclusiveMaximum exclusiveMinimum format id maxContains maxItems maxLength "
    "maxProperties maximum minContains minItems minLength minProperties minimum multipleOf pattern readOnly required "
    "title type uniqueItems unevaluatedItems unevaluatedProperties writeOnly"
)
KEYWORDS = frozenset((*PLAIN.split(), *IN_ONE, *IN_LIST, *IN_MAPPING))
"""Keywords of JSON Schema. A validator ignores others, so a misspelled keyword would go unnoticed."""


class Guided:
    """The state of a text under its guide. Immutable, so that copies of a row share it."""

    def __init__(self, matcher: Any, end_tokens: Collection[int]):
        """matcher: an LLMatcher, which must not change. Raises UserError if the guide exceeds its limits, or
        if no text matches it."""
        self._matcher, self._end_tokens = matcher, end_tokens
        self.mask = np.frombuffer(matcher.compute_bitmask(), "<u4")
        """The tokens that may follow, uint32 [ceil(V / 32)]: bit i % 32 of word i // 32 stands for token i."""
        if matcher.is_error():
            error = matcher.get_error()
            nothing = "NoExtension" in error
            raise UserError("no text matches the guide" if nothing else f"the guide is too large: {_reason(error)}")

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
        matcher = self._matcher.deep_copy()
        matcher.consume_token(token)
        return type(self)(matcher, self._end_tokens)


class Guides:
    """Makes the first states of guided texts: `Engine(guide=Guides(...))`."""

    def __init__(
        self, pieces: Callable[[], Sequence[bytes | None]], end_tokens: Collection[int], *, whitespace: bool = False
    ):
        """pieces: returns the bytes of all tokens, see `token_pieces`. end_tokens: tokens that end a text.

        whitespace: allow whitespace between the parts of a JSON document.
        """
        self._pieces, self._end_tokens = pieces, frozenset(end_tokens)
        self._options = {"whitespace_pattern": SPACED if whitespace else COMPACT}
        self._first = lru_cache(GUIDES)(self._new)

    @cached_property
    def _tokenizer(self) -> Any:
        # Tokens that start with the byte ff have no text.
        pieces = [
            piece if piece and token not in self._end_tokens else b"\xff[%d]" % token
            for token, piece in enumerate(self._pieces())
        ]
        vocabulary = SimpleNamespace(
            tokens=pieces,
            special_token_ids=(),
            bos_token_id=None,
            eos_token_id=min(self._end_tokens),
            is_tokenizer_wrapper=True,
        )
        return _library().LLTokenizer(vocabulary, n_vocab=len(pieces), eos_token=sorted(self._end_tokens))

    def __call__(self, guide: Any) -> Guided:
        """The state of an empty text. guide: a JSON schema, a regular expression as a string, or a `Grammar`.

        Raises UserError if the guide is malformed, not supported, or too large.
        """
        try:
            return self._first(json.dumps(guide), isinstance(guide, Grammar))
        except RecursionError:
            raise UserError("the guide is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise UserError(f"the guide is neither a JSON schema nor a regular expression: {error}") from None

    def _start(self, value: Any) -> tuple[str, str]:
        """The name, and the grammar, of a regular expression or of a schema. Raises UserError."""
        if isinstance(value, str):
            if (len(value) - len(value.rstrip("\\"))) % 2:
                raise UserError("the regular expression ends within an escape: a single \\")
            grammar = _library().LLMatcher.grammar_from_regex(value)
            return "regular expression", json.loads(grammar)["grammars"][0]["lark_grammar"]
        for problem in _misspelled(value):
            raise UserError(f"JSON schema: {problem}")
        schema = value if isinstance(value, dict) else {"allOf": [value]}
        return "JSON schema", f"start: %json {json.dumps(schema | {'x-guidance': self._options})}"

    def _new(self, guide: str, is_grammar: bool) -> Guided:
        """The state of an empty text. guide: as JSON text, so that equal guides share a state."""
        kind, start = ("grammar", _lark(*json.loads(guide))) if is_grammar else self._start(json.loads(guide))
        # Without forcing, a mask allows every tokenization of determined text, not only the usual one.
        grammar = f'%llguidance {{"no_forcing": true}}\n{start}'
        limits = _library().LLParserLimits(verbose_errors=False)
        matcher = _library().LLMatcher(self._tokenizer, grammar, limits=limits, log_level=0)
        if error := matcher.get_error():
            raise UserError(f"{kind}: {_reason(error)}")
        return Guided(matcher, self._end_tokens)


def _lark(text: str) -> str:
    """A grammar as Lark. Raises UserError."""
    # The options of a grammar are the server's.
    if "%llguidance" in text:
        raise UserError("grammar: has a line of options, which are the server's: leave it out")
    if "::=" not in text:
        return text
    converter = require("llguidance.gbnf_to_lark", "a guide")
    try:
        return converter.gbnf_to_lark(text).replace("%llguidance {}", "", 1)
    except (converter.GbnfToLarkError, RecursionError) as error:
        raise UserError(f"grammar: {error}") from None


def mask_of(tokens: Collection[int], vocabulary: int) -> np.ndarray:
    """The mask of these tokens, uint32 [ceil(V / 32)], as in `Guided`."""
    bits = np.zeros(-(-vocabulary // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


def _reason(error: str) -> str:
    """An error of llguidance without places in the grammar, which the client has not written."""
    return re.split(r"\n +\d+ \| |\n<", re.sub(r"^at \d+\(\d+\): ", "", error))[0].strip()


def _library() -> ModuleType:
    return require("llguidance", "a guide")


def _misspelled(schema: Any, place: str = "") -> Iterator[str]:
    """A sentence for each keyword that JSON Schema does not have, with its location."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        location = f"{place}/{keyword}"
        if keyword not in KEYWORDS:
            suggestion = did_you_mean(keyword, KEYWORDS)
            yield f"{location} is no keyword{f': {suggestion}' if suggestion else ''}"
        elif keyword in IN_ONE:
            yield from _misspelled(value, location)
        elif keyword in IN_LIST and isinstance(value, list):
            for number, part in enumerate(value):
                yield from _misspelled(part, f"{location}/{number}")
        elif keyword in IN_MAPPING and isinstance(value, dict):
            for name, part in value.items():
                yield from _misspelled(part, f"{location}/{name}")


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
