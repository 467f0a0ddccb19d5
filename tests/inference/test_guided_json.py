"""Random walks over allowed tokens give documents that parse and are valid, by the package jsonschema."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import jsonschema
import numpy as np
import pytest
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.inference.request import RefusedRequest
from megajax.inference.sampling.guide import Guided, Guides, token_pieces
from megajax.inference.sampling_settings import Grammar, GuideLimits
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.config import ByteTokenizerConfig

END = 256
WORDS = ("true", "null", '{"', '"}', '":', '", "', "},", "[]", "]}", "12", "0.", "e+", "-1", " \n", "name", "ab", "é",
         "\\u00", "€x", '\\"')  # fmt: skip
PIECES = [*(bytes((value,)) for value in range(END)), b"", *(word.encode() for word in WORDS), b"12", None]
GUIDES = Guides(lambda: PIECES, [END], whitespace=True)

SCHEMAS: dict[str, Any] = {
    "number": {"type": "number", "minimum": -2.5, "maximum": 1000},
    "enum": {"enum": ["a", "ab", 1.5, None, True, {"k": [1]}, 'é"\n']},
    "const": {"const": {"b": [], "a": {"x": 1}}},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40, "multipleOf": 7}]},
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"const": ""}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "more": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "ab": {"type": "integer"}},
        "required": ["ab", "z"],
        "additionalProperties": {"type": "boolean"},
    },
    "references": {
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"]}},
        "type": "array",
        "items": {"$ref": "#/$defs/point"},
        "minItems": 1,
        "title": "points",
    },
    "recursive": {
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
        "$ref": "#/$defs/tree",
    },
    "pattern": {"type": "string", "pattern": '^[a-z"\\\\é\\n]{1,3}(-\\d\\d)?$'},
    "search": {"type": "string", "pattern": "x+"},
    "date": {"type": "string", "format": "date"},
    "anything": {},
}  # fmt: skip


def allowed(state: Guided) -> list[int]:
    return np.flatnonzero(np.unpackbits(state.mask.view(np.uint8), bitorder="little")).tolist()


def walk(state: Guided, generator: np.random.Generator, most: int = 400) -> bytes | None:
    """A document of random tokens; at every step it is complete exactly where the end is allowed."""
    text, closing = b"", frozenset(b'"}]')
    for step in range(most):
        tokens = allowed(state)
        assert tokens, text
        assert (END in tokens) == state.complete
        if END in tokens and (len(tokens) == 1 or generator.random() < 0.5):
            return text
        tokens = [token for token in tokens if token != END]
        # Late in a text, closing tokens are preferred.
        closing_tokens = [token for token in tokens if PIECES[token] and closing & {PIECES[token][0]}]
        token = int(generator.choice(closing_tokens if closing_tokens and generator.random() < step / 100 else tokens))
        text += PIECES[token] or b""
        state = state.after(token)
    return None


def matches(guide: Any, text: str, guides: Guides = GUIDES) -> bool:
    """Whether a text matches a guide, byte by byte."""
    state = guides(guide)
    for token in text.encode():
        try:
            state = state.after(token)
        except ValueError:
            return False
    return state.complete


def test_documents_are_compact_unless_whitespace_is_allowed() -> None:
    guide = {"type": "object", "properties": {"a": {"type": "array", "items": {"const": {"x": 1}}}}, "required": ["a"]}
    for document, compact in (
        ('{"a":[{"x":1},{"x":1}]}', True),
        ('{"a": [{"x":1}]}', False),
        ('{"a":[{"x":1}, {"x":1}]}', False),
        ('{ "a":[]}', False),
    ):
        assert matches(guide, document)
        assert matches(guide, document, Guides(lambda: PIECES, [END])) is compact


@pytest.mark.parametrize("name", SCHEMAS)
def test_documents_are_valid(name: str) -> None:
    schema, generator = SCHEMAS[name], np.random.default_rng(0)
    documents = [walk(GUIDES(schema), generator) for _ in range(6)]
    finished = [json.loads(document.decode()) for document in documents if document is not None]
    assert len(finished) >= 2
    for document in finished:
        jsonschema.validate(document, schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize(
    ("guide", "text", "valid"),
    [
        ({"type": "integer"}, "-0", True),
        ({"type": "integer"}, "01", False),
        ({"type": "number"}, "-1.5e+07", True),
        ({"type": "string", "maxLength": 1}, '"\U0001f600"', True),
        ({"type": "string", "maxLength": 1}, '"ab"', False),
        ({"type": "string"}, '"\\ud800"', False),
        ({"const": '\n"'}, '"\\n\\""', True),
        (SCHEMAS["optional"], '{"b":true,"c":""}', True),
        (SCHEMAS["optional"], '{"c":"","b":true}', False),
        (SCHEMAS["optional"], '{,"b":true}', False),
        (SCHEMAS["more"], '{"ab":1,"z":true,"abc":false}', True),
        (SCHEMAS["more"], '{"ab":1,"z":true,"a":false}', False),
        (SCHEMAS["recursive"], "[[],[],[]]", False),
        ({"type": "null"}, "null" + " " * 24, False),
        ({"type": "array"}, "[" + " " * 24 + "]", True),
        ({"type": "array"}, "[" + " " * 25 + "]", False),
        ({}, "[" * 17 + "]" * 17, True),
        (Grammar('root ::= "(" root ")" | [a-c]'), "((b))", True),
        (Grammar('root ::= "(" root ")" | [a-c]'), "((d))", False),
    ],
)
def test_texts(guide: Any, text: str, *, valid: bool) -> None:
    assert matches(guide, text) == valid


@pytest.mark.parametrize(
    ("guide", "words"),
    [
        ({"type": "string", "format": "colour"}, "Unknown format: colour"),
        ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ({"type": "string", "maxLenght": 3}, "/maxLenght is no keyword: did you mean maxLength?"),
        ({"properties": {"a": {"anyOf": [{"itens": {}}]}}}, "/properties/a/anyOf/0/itens is no keyword"),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 3}, "minimum (3) is equal to exclusiveMaximum (3)"),
        ({"type": "string", "pattern": "\\b"}, "not supported"),
        ({"$ref": "#/$defs/a"}, "'/$defs/a' does not exist"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "'a' is unsatisfiable"),
        (False, "schema is false"),
        ("(a", "regular expression"),
        ("(?=a)b", "regular expression"),
        ("a\\", "ends within an escape"),
        ({"const": b""}, "neither a JSON schema nor a regular expression"),
        ({"const": "\ud800"}, "unexpected end of hex escape"),
        ("\ud800", "neither a JSON schema nor a regular expression"),
        (Grammar("start: a"), "grammar: "),
        (Grammar('%llguidance {"no_forcing": false}\nstart: "a"'), "grammar: has a line of options"),
        (Grammar('root ::= "\\'), "grammar: "),
        (Grammar("root ::= a"), "grammar: Rule 'a' not found"),
        (Grammar('a ::= "b"'), "grammar: No 'root' rule found"),
    ],
)
def test_rejected_guides(guide: Any, words: str) -> None:
    with pytest.raises(UserError) as error:
        GUIDES(guide)
    assert words in str(error.value)
    assert "llguidance" not in str(error.value) and "at 2(" not in str(error.value)


@pytest.mark.parametrize("guide", [{"$ref": "#"}, "[^\\x00-\\U0010ffff]"])
def test_guides_that_nothing_matches_are_refused(guide: Any) -> None:
    with user_error():
        GUIDES(guide)


def test_a_guide_that_grows_too_large_within_the_text() -> None:
    state = GUIDES("a*" * 3000)
    with user_error():
        for _ in range(5):
            state = state.after(ord("a"))


def test_guides_that_are_too_large_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with user_error():
        GUIDES({"const": deep})
    with user_error():
        GUIDES({"const": json.loads("[" * 900 + "]" * 900)})


def test_equal_guides_share_a_state() -> None:
    schema, second_schema = {"type": "boolean"}, {"type": "null"}
    assert GUIDES(schema) is GUIDES(dict(schema))
    assert GUIDES(second_schema) is not GUIDES(schema)
    assert allowed(GUIDES("[ab]|1")) == [*b"1ab", END + 1 + WORDS.index("ab")][:3]


def test_an_end_is_never_text() -> None:
    """A request may declare a token of text as one that ends texts."""
    guides = Guides(lambda: PIECES, [END, ord("a")])
    assert allowed(guides("a|b")) == [ord("b")]
    assert allowed(guides("a|b").after(ord("b"))) == [ord("a"), END]


def test_pieces_of_tokenizers() -> None:
    """Pieces come from a table of bytes, or are the text that a token adds."""
    byte = ByteTokenizerConfig().build()
    assert token_pieces(byte, 259) == [*(bytes((value,)) for value in range(256)), None, None, None]

    class Marked(Tokenizer):
        vocabulary_size, eod, pad, specials, identity, table = 5, 4, None, {}, "", ()
        names = ("a", "\u2581b", "c", "\ufffd", "</s>")

        def encode(self, text: str) -> np.ndarray:
            return np.asarray([0])

        def decode(self, ids: Any) -> str:
            return "".join(self.names[number] for number in ids).replace("\u2581", " ").removeprefix(" ")

    assert token_pieces(Marked(), 6) == [b"a", b" b", b"c", None, None, None]


def test_guides_of_several_threads() -> None:
    """A server checks requests while the engine follows the same guide."""
    documents: list[bytes | None] = []

    def run(seed: int) -> None:
        for _ in range(3):
            documents.append(walk(GUIDES(SCHEMAS["optional"]), np.random.default_rng(seed)))

    threads = [Thread(target=run, args=(seed % 2,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(documents) == 12 and len(set(documents)) <= 2


def limited(
    seconds: float = 1.0, size: int = 2**22, every: int = 2**26, waiting: int = 8, step_seconds: float = 0.01
) -> Guides:
    return Guides(lambda: PIECES, [END], limits=GuideLimits(seconds, size, every, waiting, step_seconds))


HARD = {"type": "integer", "multipleOf": 99_989}
"""Takes 0.5 s and 37 MiB to compile; alternatives of such ones would take hours and all memory."""
HARDER = {"anyOf": [{"type": "integer", "multipleOf": number} for number in (99_991, 99_989, 99_971)]}
AMBIGUOUS = Grammar('start: e\ne: e e | "a" | e e e | "b"')


@pytest.mark.parametrize(
    ("guide", "limits"),
    [
        (HARD, {"seconds": 10}),
        (HARDER, {"seconds": 10}),
        (HARDER, {"size": 2**32, "seconds": 0.2}),
        ({"$defs": {"a": HARD}, "properties": {"x": {"$ref": "#/$defs/a"}}}, {"seconds": 10}),
        (Grammar('root ::= "a"\n' + "#\n" * 500_000), {"seconds": 0.2}),
    ],
)
def test_a_guide_beyond_a_limit_is_refused_and_stops(guide: Any, limits: dict[str, Any]) -> None:
    guides, began = limited(**limits), time.monotonic()
    for _ in range(2):
        with user_error():
            guides(guide)
    assert time.monotonic() - began < 60 and guides.size == 0
    assert matches({"const": 5}, "5", guides)


def test_a_trial_has_less_stack_than_threads() -> None:
    """After `ulimit -s unlimited` the stack of the first thread has no limit, and that of others 2 MiB."""
    program = (
        "import resource, test_guided_json as tests\n"
        "resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY,) * 2)\n"
        "references = {f'{number}': {'$ref': f'#/$defs/{number + 1}'} for number in range(3000)}\n"
        "try: tests.limited()({'$ref': '#/$defs/0', '$defs': references | {'3000': {}}})\n"
        "except tests.UserError as error: print(error)"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if hard != resource.RLIM_INFINITY:
        pytest.skip("the system limits stacks")
    here = Path(__file__).parent
    places = {"PYTHONPATH": os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=here, env=os.environ | places, capture_output=True, text=True)
    assert (done.returncode, done.stdout[:35]) == (0, "JSON schema: is nested too deeply, "), done.stderr


def test_a_guide_whose_steps_are_slow_ends_its_own_text() -> None:
    state = limited(step_seconds=1e-4)(AMBIGUOUS)
    with pytest.raises(UserError, match=r"the guide is too slow: \d+ tokens took .*server.guide_step_seconds"):
        for _ in range(400):
            state = state.after(ord("a"))


def test_guides_that_wait_are_limited_in_number_and_equal_ones_count_once() -> None:
    guides = limited(waiting=1)
    futures = [guides.start({**HARD, "multipleOf": 99_989 - 2 * number}) for number in (0, 1, 2, 2, 2)]
    with user_error(kind=RefusedRequest) as refusal:
        guides.start({"const": 1})
    assert refusal.value.reason == "queue_full"
    for future in futures:
        with user_error():
            future.result(100)
    assert matches({"const": 1}, "1", guides)


def test_guides_that_nobody_waits_for_any_more_are_not_compiled() -> None:
    guides = limited(waiting=8)
    futures = [guides.start({**HARD, "multipleOf": 99_989 - 2 * number}) for number in (*range(8), 7)]
    assert all(future.cancel() for future in futures[2:8])
    assert len(guides._pending) == 3
    with user_error():
        futures[8].result(100)
    for future in futures[2:7]:
        assert future.cancelled()


def test_memory_of_guides_is_limited() -> None:
    guides = limited(every=2**23)
    for number in range(60):
        guides({"const": number})
        assert 0 < guides.size <= 2**23
    held = []
    with user_error(kind=RefusedRequest):
        held += [guides({"const": f"{number}"}) for number in range(60)]
        held.append(guides({"const": 0}))
    del held
    assert matches({"const": 0}, "0", guides)


BIG = 2**53 + 1


ROUNDED: list[dict[str, Any]] = [
    {"const": BIG}, {"enum": ["a", [BIG]]}, {"minimum": BIG}, {"exclusiveMaximum": BIG - 1},
    {"items": {"maximum": 2**64 - 1}}, {"const": 2**63}, {"const": -(2**63)}, {"minimum": -(2.0**63)},
]  # fmt: skip


@pytest.mark.parametrize("schema", ROUNDED)
def test_integers_that_a_guide_would_round_are_refused(schema: dict[str, Any]) -> None:
    with user_error():
        GUIDES(schema)


@pytest.mark.parametrize(
    ("schema", "text", "other"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, f"{2**63 - 1}", f"{2**63}"),
        ({"const": 2**53 + 2}, f"{2**53 + 2}", f"{2**53}"),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a":1,"b":"x"}', '{"a":1,"\\u0061":"x"}'),
        ({"type": "object", "patternProperties": {"^a": {"const": 1}}}, '{"b":2}', '{"\\u0061":2}'),
        ({"examples": [{"$ref": "#/x", "minimum": BIG}], "const": {"$ref": "#/x"}}, '{"$ref":"#/x"}', "1"),
    ],
)
def test_numbers_names_and_data_are_exact(schema: Any, text: str, other: str) -> None:
    assert matches(schema, text) and not matches(schema, other)
