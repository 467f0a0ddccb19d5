"""Random walks over allowed tokens give documents that parse and are valid, by a check of our own."""

import json
import math
import re
from threading import Thread
from typing import Any

import numpy as np
import pytest

from megajax.config.errors import UserError
from megajax.inference.sampling.grammar import Automaton, Repeat, choice, joined, literal, one_of, optional
from megajax.inference.sampling.guide import Guide, Guided, Guides, TokenTrie, token_pieces
from megajax.inference.sampling.json_grammar import any_object
from megajax.inference.sampling.json_schema import schema_grammar
from megajax.inference.sampling.regular_expression import regular_expression, text
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.config import ByteTokenizerConfig

END = 256
WORDS = (
    "true",
    "null",
    '{"',
    '"}',
    '":',
    '", "',
    "},",
    "[]",
    "]}",
    "12",
    "0.",
    "e+",
    "-1",
    " \n",
    "name",
    "ab",
    "é",
    "\\u00",
    "€x",
    '\\"',
)
PIECES = [*(bytes((value,)) for value in range(END)), b"", *(word.encode() for word in WORDS), b"12", None]
TRIE = TokenTrie(PIECES)

SCHEMAS: dict[str, Any] = {
    "types": {"type": ["string", "integer", "null"]},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "number": {"type": "number"},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "empty": {"type": "array", "maxItems": 0},
    "enum": {"enum": ["a", "ab", 1.5, None, True, {"k": [1]}, 'é"\n']},
    "typed enum": {"type": "integer", "enum": [1, "1", 2.5, True, -30]},
    "const": {"const": {"b": [], "a": {"x": 1}}},
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"const": 0}}]},
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"const": ""}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "none required": {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}},
    "more": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "ab": {"type": "integer"}},
        "required": ["ab", "z"],
        "additionalProperties": {"type": "boolean"},
    },
    "references": {
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
        "type": "array",
        "items": {"$ref": "#/$defs/point"},
        "minItems": 1,
        "title": "points",
    },
    "integers": {"type": "integer", "minimum": -12, "exclusiveMaximum": 1050},
    "pattern": {"type": "string", "pattern": '^[a-z"\\\\é\\n]{1,3}(-\\d\\d)?$'},
    "search": {"type": "string", "pattern": "x+"},
    "anything": {},
    "any object": {"type": "object"},
}


def types(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int() | float():
            return {"number", "integer"} if float(value).is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is not true."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def valid(value: Any, schema: Any, root: Any) -> bool:
    """A check of the keywords one by one, as the specification states them."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    wanted = schema.get("type", [])
    checks = [
        not wanted or bool(types(value) & set([wanted] if isinstance(wanted, str) else wanted)),
        "enum" not in schema or any(same(value, each) for each in schema["enum"]),
        "const" not in schema or same(value, schema["const"]),
        "anyOf" not in schema or any(valid(value, each, root) for each in schema["anyOf"]),
    ]
    if isinstance(value, str):
        checks.append(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf))
        checks.append(bool(re.search(schema.get("pattern", ""), value, re.ASCII)))
    if "number" in types(value):
        checks.append(schema.get("minimum", -math.inf) <= value < schema.get("exclusiveMaximum", math.inf))
    if isinstance(value, list):
        checks.append(schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf))
        checks.append(all(valid(item, schema.get("items", True), root) for item in value))
    if isinstance(value, dict):
        checks.append(set(schema.get("required", [])) <= set(value))
        named = schema.get("properties", {})
        checks += [
            valid(item, named.get(key, schema.get("additionalProperties", True)), root) for key, item in value.items()
        ]
    return all(checks)


def allowed(state: Guided) -> list[int]:
    return np.flatnonzero(np.unpackbits(state.mask.view(np.uint8), bitorder="little")).tolist()


def walk(guide: Guide, generator: np.random.Generator, most: int = 400) -> bytes | None:
    """A document of random tokens, which at every step is complete exactly where the end is allowed."""
    state, text = guide.at(0), b""
    closing = frozenset(b'"}]')
    for step in range(most):
        tokens = allowed(state)
        assert tokens, text
        assert (END in tokens) == state.complete
        if END in tokens and (len(tokens) == 1 or generator.random() < 0.5):
            return text
        tokens = [token for token in tokens if token != END]
        # Late in a text, what closes something is preferred.
        ends = [token for token in tokens if PIECES[token] and closing & {PIECES[token][0]}]
        chosen = ends if ends and generator.random() < step / 100 else tokens
        token = int(generator.choice(chosen))
        text += PIECES[token] or b""
        state = state.after(token)
    return None


@pytest.mark.parametrize("name", SCHEMAS)
def test_documents_are_valid(name: str) -> None:
    schema, generator = SCHEMAS[name], np.random.default_rng(0)
    guide = Guide(schema_grammar(schema), TRIE, [END])
    documents = [walk(guide, generator) for _ in range(6)]
    finished = [json.loads(document.decode()) for document in documents if document is not None]
    assert len(finished) >= 2
    assert all(valid(document, schema, schema) for document in finished), finished


def test_json_objects_parse() -> None:
    guide, generator = Guide(any_object(), TRIE, [END]), np.random.default_rng(1)
    documents = [walk(guide, generator) for _ in range(6)]
    assert all(isinstance(json.loads(document), dict) for document in documents if document is not None)


def test_a_mask_holds_exactly_the_tokens_that_the_automaton_reads() -> None:
    """Against reading every token alone, in all states of a walk; tokens of equal bytes are all allowed."""
    guide = Guide(schema_grammar(SCHEMAS["more"]), TRIE, [END])
    state = guide.at(0)
    for token in b'{"ab":1,"z":true,"q':
        automaton = guide.automaton
        one_by_one = [
            number
            for number, piece in enumerate(PIECES)
            if (automaton.accepts(state.state) if number == END else piece and automaton.read(state.state, piece) >= 0)
        ]
        assert allowed(state) == one_by_one
        state = state.after(token)


@pytest.mark.parametrize(
    ("schema", "text", "read"),
    [
        ({"type": "integer"}, "-0", True),
        ({"type": "integer"}, "01", False),
        ({"type": "integer"}, "1.0", False),
        ({"type": "number"}, "1.", False),
        ({"type": "number"}, "-1.5e+07", True),
        ({"type": "string", "maxLength": 1}, '"\U0001f600"', True),
        ({"type": "string", "maxLength": 1}, '"ab"', False),
        ({"type": "string", "maxLength": 1}, '"\\u20aC"', True),
        ({"type": "string"}, '"\\ud800"', False),
        ({"type": "string"}, '"\n"', False),
        ({"type": "string"}, '"\\x"', False),
        ({"const": '\n"'}, '"\\n\\""', True),
        (SCHEMAS["optional"], '{"b":true,"c":""}', True),
        (SCHEMAS["optional"], '{"c":"","b":true}', False),
        (SCHEMAS["optional"], '{"a":1}', False),
        (SCHEMAS["optional"], '{,"b":true}', False),
        (SCHEMAS["none required"], "{ }", True),
        (SCHEMAS["none required"], '{"b" :\n null}', True),
        (SCHEMAS["more"], '{"ab":1,"z":true,"abc":false}', True),
        (SCHEMAS["more"], '{"ab":1,"z":true,"ab":false}', False),
        (SCHEMAS["more"], '{"ab":1,"z":true,"a":false}', False),
        ({}, "[" * 16 + "]" * 16, True),
        ({}, "[" * 17 + "]" * 17, False),
    ],
)
def test_texts(schema: Any, text: str, *, read: bool) -> None:
    automaton = Automaton(schema_grammar(schema))
    state = automaton.read(0, text.encode())
    assert (state >= 0 and automaton.accepts(state)) == read


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "format": "date"}, "/format is not supported"),
        ({"type": "object", "properties": {"a": {"multipleOf": 1}}}, "/properties/a/multipleOf is not supported"),
        ({"type": "number", "minimum": 1}, "/minimum is supported for integers only"),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 3}, "leaves no integer"),
        ({"type": "integer", "minimum": "3"}, "/minimum must be a number"),
        ({"type": "string", "pattern": "a", "minLength": 1}, "/minLength is not supported beside pattern"),
        ({"type": "string", "pattern": "\\b"}, "\\b is not supported"),
        ({"anyOf": [{}], "minLength": 1}, "/minLength is not supported beside anyOf"),
        ({"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}, "is recursive: #/$defs/a"),
        ({"$ref": "#/$defs/a"}, "is missing"),
        ({"$ref": "https://example.org"}, "must begin with #/"),
        ({"type": "text"}, "/type must be one of string"),
        ({"type": [["string"]]}, "/type must be one of string"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "/maxItems is 2, below minItems, 3"),
        ({"type": "string", "maxLength": -1}, "/maxLength must be an integer between 0"),
        ({"type": "string", "maxLength": True}, "/maxLength must be an integer between 0"),
        ({"type": "boolean", "enum": [1]}, "/enum has no value of the type boolean"),
        ({"required": ["a"], "additionalProperties": False}, "names a, which additionalProperties forbids"),
        (False, "the schema allows no value"),
        ([], "must be an object, got list"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(schema: Any, words: str) -> None:
    with pytest.raises(UserError) as error:
        schema_grammar(schema)
    assert words in str(error.value)


def test_a_token_off_the_grammar_is_refused() -> None:
    guide = Guide(schema_grammar({"type": "boolean"}), TRIE, [END])
    with pytest.raises(ValueError, match="token 65 does not follow the grammar"):
        guide.at(0).after(65)


def test_automata_of_each_construction() -> None:
    digits = one_of(b"01")
    for grammar, texts in (
        (joined(literal(b"a"), optional(digits)), {"a", "a0", "a1"}),
        (choice(literal(b"ab"), literal(b"abc"), literal(b"")), {"", "ab", "abc"}),
        (Repeat(optional(digits), 0, 2), {"", "0", "1", "00", "01", "10", "11"}),
        (Repeat(joined(), 2), {""}),
    ):
        automaton = Automaton(grammar)
        every = {""} | {a + b + c for a in "ab01" for b in ["", *"ab01"] for c in ["", *"bc01"]}
        states = {text: automaton.read(0, text.encode()) for text in every}
        assert {text for text, state in states.items() if state >= 0 and automaton.accepts(state)} == texts


def test_integers_between_bounds() -> None:
    """All numbers of up to four digits, and some more, against their bounds."""
    draw = np.random.default_rng(0)
    for _ in range(30):
        least, most = sorted(draw.integers(-1200, 1200, 2).tolist())
        automaton = Automaton(schema_grammar({"type": "integer", "minimum": least, "maximum": most}))
        for number in {
            *range(least - 3, least + 4),
            *range(most - 3, most + 4),
            *draw.integers(-2000, 2000, 40).tolist(),
        }:
            state = automaton.read(0, str(number).encode())
            assert (state >= 0 and automaton.accepts(state)) == (least <= number <= most), (least, most, number)


@pytest.mark.parametrize("least", [0, 1, -5])
def test_integers_with_one_bound_are_read_at_once(least: int) -> None:
    """Ranges of all numbers of n digits are one part, not 2 ** n."""
    grammar, counted, left = schema_grammar({"type": "integer", "minimum": least}), 0, list[Any]()
    left.append(grammar)
    while left and counted < 10_000:
        counted, part = counted + 1, left.pop()
        left += [*getattr(part, "parts", ()), *getattr(part, "options", ())]
    assert counted < 1000
    automaton = Automaton(grammar)
    for number in (least - 1, least, least + 1, 10, 10**12 + 345, 10**19 - 1):
        state = automaton.read(0, str(number).encode())
        assert (state >= 0 and automaton.accepts(state)) == (least <= number), number


def test_definitions_are_read_once() -> None:
    """Each of 30 definitions uses the next one twice."""
    twice = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)}
    automaton = Automaton(schema_grammar({"$defs": {**twice, "d30": {"type": "null"}}, "$ref": "#/$defs/d0"}))
    assert automaton.accepts(automaton.read(0, b"null"))


def test_regular_expressions_match_as_those_of_python() -> None:
    """Random texts of a small alphabet; as a whole, and as a search."""
    draw = np.random.default_rng(0)
    texts = ["".join(draw.choice([*"abcdx1.é@] -\nA_"], draw.integers(0, 7)).tolist()) for _ in range(400)]
    for pattern in (
        "a|bc*", "(ab|a)(c|bcd)?", "[a-c]{2,3}x?", "[^a]b", "\\d+(\\.\\d{1,2})?", "(a*)*b", "(?:x|é)+", "[a\\-c]",
        "\\u00e9\\x41", ".*", "a{0}", "a{,2}b", "[\\s\\d]", "", "(|a)b", "\\S\\D\\W", "x+?1", "[\\]a-]",
    ):  # fmt: skip
        whole, somewhere = (Automaton(regular_expression(pattern, search=search)) for search in (False, True))
        expected = re.compile(pattern, re.ASCII)
        for each in texts:
            for automaton, match in ((whole, expected.fullmatch), (somewhere, expected.search)):
                state = automaton.read(0, each.encode())
                assert (state >= 0 and automaton.accepts(state)) == bool(match(each)), (pattern, each)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(a", "a ( without its )"), ("a)", "a ) without its ("), ("[a", "a [ without its ]"), ("[]", "an empty class"),
        ("a**", "a repetition of a repetition"), ("a{2,1}", "a count"), ("a{1001}", "above 1000"), ("a{x}", "no count"),
        ("(?=a)", "(?"), ("\\b", "\\b is not supported"), ("\\1", "\\1 is not supported"), ("a$b", "$ inside"),
        ("^a|b", "beside alternatives"), ("*a", "nothing before *"), ("[z-a]", "not ascending"), ("a\\", "too early"),
        ("\\x4", "hexadecimal"), ("(" * 60, "more than 50 groups"),
    ],
)  # fmt: skip
def test_regular_expressions_that_are_refused(pattern: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        regular_expression(pattern)
    assert words in str(error.value)


def test_characters_of_every_length_in_utf8() -> None:
    for lower, upper in (
        (0, 0x10FFFF),
        (0x80, 0x900),
        (100, 70000),
        (0xFFFF, 0x10001),
        (0x41, 0x41),
        (0x1234, 0x12345),
    ):
        automaton = Automaton(text(((lower, upper),)))
        points = {
            *range(0, 0x3000, 61),
            *range(0, 0x110000, 4099),
            lower,
            upper,
            max(lower - 1, 0),
            min(upper + 1, 0x10FFFF),
        }
        for point in sorted(points - {*range(0xD800, 0xE000)}):
            state = automaton.read(0, chr(point).encode())
            assert (state >= 0 and automaton.accepts(state)) == (lower <= point <= upper)


def test_grammars_that_are_too_large_are_refused() -> None:
    """Counts within counts of what may be empty."""
    guides, deep = Guides(lambda: PIECES, [END]), []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UserError, match="more than 4,096 ways to read on"):
        guides("((a?){1000}){1000}")
    with pytest.raises(UserError, match="nested too deeply"):
        guides({"const": deep})
    with pytest.raises(UserError, match="neither a JSON schema nor a regular expression"):
        guides({"const": b""})
    with pytest.raises(UserError, match="half of a surrogate pair"):
        guides({"const": "\ud800"})


def test_guides_are_kept_by_what_they_say() -> None:
    guides = Guides(lambda: PIECES, [END])
    schema, other = {"type": "boolean"}, {"type": "null"}
    assert guides(schema).guide is guides(dict(schema)).guide
    assert guides(other).guide is not guides(schema).guide
    assert allowed(guides("[ab]|1")) == [*b"1ab", END + 1 + WORDS.index("ab")][:3]


def test_pieces_of_tokenizers() -> None:
    """With a table of bytes, and by what a token adds to a text."""
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
    guide, documents = Guide(schema_grammar(SCHEMAS["optional"]), TRIE, [END]), []

    def run(seed: int) -> None:
        for _ in range(3):
            documents.append(walk(guide, np.random.default_rng(seed)))

    threads = [Thread(target=run, args=(seed % 2,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(documents) == 12 and len(set(documents)) <= 2
