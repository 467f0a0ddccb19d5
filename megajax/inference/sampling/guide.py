"""Which tokens may follow in a text that has to match a JSON schema or a regular expression.

llguidance (https://github.com/guidance-ai/llguidance) parses the text and computes the masks. It works on the bytes of
tokens, so it does not matter how a tokenizer divides the text.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import numpy as np

from megajax.config.errors import UserError
from megajax.config.missing import require
from megajax.config.nearest import did_you_mean
from megajax.tokenizers.base import Tokenizer

GUIDES = 32
"""Guides whose first state is kept, those used last."""
WHITESPACE = "[ \n]{0,24}"
"""Between the parts of a JSON document: without a limit a model may write whitespace until max_tokens."""
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
"""Keywords of JSON Schema. A schema may hold others without effect, so a misspelled one would go unnoticed."""


class Guided:
    """The state of a text under its guide. Immutable, so that copies of a row share it."""

    def __init__(self, matcher: Any, ends: Collection[int]):
        """matcher: an LLMatcher, not changed any more. Raises UserError if the guide is too large for its limits."""
        self._matcher, self._ends = matcher, ends
        self.mask = np.frombuffer(matcher.compute_bitmask(), "<u4")
        """The tokens that may follow, uint32 [ceil(V / 32)]: bit i % 32 of word i // 32 stands for token i."""
        if matcher.is_error():
            raise UserError(f"the guide is too large: {matcher.get_error()}")

    @property
    def complete(self) -> bool:
        """Whether the text matches as it is."""
        return self._matcher.is_accepting()

    def after(self, token: int) -> Self:
        """The state after one more token; a token that ends texts changes nothing.

        Raises ValueError for a token that the mask excludes, UserError as the constructor.
        """
        if token in self._ends:
            return self
        if not self.mask[token // 32] >> (token % 32) & 1:
            raise ValueError(f"token {token} does not follow the guide")
        matcher = self._matcher.deep_copy()
        matcher.consume_token(token)
        return type(self)(matcher, self._ends)


class Guides:
    """Makes the first states of guided texts: `Engine(guide=Guides(...))`."""

    def __init__(self, pieces: Callable[[], Sequence[bytes | None]], ends: Collection[int]):
        """pieces: returns those of the vocabulary; see `token_pieces`. ends: tokens that end a text."""
        self._pieces, self._ends = pieces, frozenset(ends)
        self._first = lru_cache(GUIDES)(self._new)

    @cached_property
    def _tokenizer(self) -> Any:
        # Tokens that begin with the byte ff stand for no text.
        pieces = [
            piece if piece and token not in self._ends else b"\xff[%d]" % token
            for token, piece in enumerate(self._pieces())
        ]
        vocabulary = SimpleNamespace(
            tokens=pieces,
            special_token_ids=(),
            bos_token_id=None,
            eos_token_id=min(self._ends),
            is_tokenizer_wrapper=True,
        )
        return _library().LLTokenizer(vocabulary, n_vocab=len(pieces), eos_token=sorted(self._ends))

    def __call__(self, guide: Any) -> Guided:
        """The state of an empty text. guide: a JSON schema, or a regular expression as a string.

        Raises UserError for one that is malformed, not supported, or too large.
        """
        try:
            return self._first(json.dumps(guide))
        except RecursionError:
            raise UserError("the guide is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise UserError(f"the guide is neither a JSON schema nor a regular expression: {error}") from None

    def _new(self, guide: str) -> Guided:
        """guide: as JSON, so that equal guides share a state."""
        matching, value = _library().LLMatcher, json.loads(guide)
        if isinstance(value, str):
            if (len(value) - len(value.rstrip("\\"))) % 2:
                raise UserError("the regular expression ends within an escape: a single \\")
            start = json.loads(matching.grammar_from_regex(value))["grammars"][0]["lark_grammar"]
        else:
            for problem in _misspelled(value):
                raise UserError(f"JSON schema: {problem}")
            schema = value if isinstance(value, dict) else {"allOf": [value]}
            options = {"whitespace_pattern": WHITESPACE}
            start = f"start: %json {json.dumps(schema | {'x-guidance': options})}"
        # Without forcing, a mask has every token that may follow, not only the usual one where the text is determined.
        grammar = f'%llguidance {{"no_forcing": true}}\n{start}'
        limits = _library().LLParserLimits(verbose_errors=False)
        matcher = matching(self._tokenizer, grammar, limits=limits, log_level=0)
        if error := matcher.get_error():
            raise UserError(f"{'regular expression' if isinstance(value, str) else 'JSON schema'}: {error}")
        return Guided(matcher, self._ends)


def _library() -> ModuleType:
    return require("llguidance", "a guide")


def _misspelled(schema: Any, place: str = "") -> Iterator[str]:
    """Keywords that JSON Schema does not have, each in a sentence with its place."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        here = f"{place}/{keyword}"
        if keyword not in KEYWORDS:
            near = did_you_mean(keyword, KEYWORDS)
            yield f"{here} is no keyword{f': {near}' if near else ''}"
        elif keyword in IN_ONE:
            yield from _misspelled(value, here)
        elif keyword in IN_LIST and isinstance(value, list):
            for number, part in enumerate(value):
                yield from _misspelled(part, f"{here}/{number}")
        elif keyword in IN_MAPPING and isinstance(value, dict):
            for name, part in value.items():
                yield from _misspelled(part, f"{here}/{name}")


def token_pieces(tokenizer: Tokenizer, vocabulary: int) -> list[bytes | None]:
    """The bytes of each token below `vocabulary`; None for those that stand for no text, or not for whole characters.

    Of a tokenizer without a table of bytes, a token's text is what it adds behind a letter.
    """
    special = {tokenizer.eod, tokenizer.pad, *tokenizer.specials.values(), *tokenizer.sentinels}
    known = range(min(vocabulary, tokenizer.vocabulary_size))
    if tokenizer.table:
        pieces = [None if token in special else tokenizer.table[token] for token in known]
    else:
        before = tokenizer.encode("a").tolist()
        start = tokenizer.decode(before)
        pieces = [None if token in special else _added(tokenizer, before, start, token) for token in known]
    return [*pieces, *[None] * (vocabulary - len(pieces))]


def _added(tokenizer: Tokenizer, before: Sequence[int], start: str, token: int) -> bytes | None:
    try:
        text = tokenizer.decode([*before, token])
    except UserError:
        return None
    added = text[len(start) :] if text.startswith(start) else ""
    return None if not added or "\N{REPLACEMENT CHARACTER}" in added else added.encode()
