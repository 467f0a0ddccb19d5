"""Streamed text against whole decoding, for random tokens of every tokenizer; stop strings across token borders."""

import base64
import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from megajax.inference.detokenizer import ByteDecoding, Detokenizer, TextStream
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.config import (
    ByteTokenizerConfig,
    HuggingFaceTokenizerConfig,
    MultimodalTokenizerConfig,
    NullTokenizerConfig,
    SentencePieceTokenizerConfig,
    TiktokenTokenizerConfig,
    WordPieceTokenizerConfig,
)
from tests.tokenizers.hard_texts import train_sentencepiece

TEXT = "the quick brown fox jumps over the lazy dog, 猫 and é and 🦊🦊 again "
BYTES = [f"<0x{value:02X}>" for value in range(256)]


def byte(folder: Path) -> Tokenizer:
    return ByteTokenizerConfig().build()


def null(folder: Path) -> Tokenizer:
    return NullTokenizerConfig(vocabulary_size=30).build()


def tiktoken(folder: Path) -> Tokenizer:
    pytest.importorskip("tiktoken")
    tokens = [*(bytes((value,)) for value in range(256)), b"th", b" the", "猫".encode(), "🦊".encode()[:3]]
    entries = [{"rank": n, "token_bytes": base64.b64encode(token).decode()} for n, token in enumerate(tokens)]
    (folder / "ranks.json").write_text(json.dumps(entries))
    return TiktokenTokenizerConfig(path=str(folder / "ranks.json"), special_ids=10).build()


def byte_level(folder: Path) -> Tokenizer:
    library = pytest.importorskip("tokenizers").ByteLevelBPETokenizer()
    library.train_from_iterator([TEXT], vocab_size=300, min_frequency=1, special_tokens=["<|endoftext|>"])
    library.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizerConfig(path=str(folder)).build()


def byte_fallback(folder: Path) -> Tokenizer:
    """The decoder of Llama 2's files: an invalid byte spoils all bytes of its run."""
    library = pytest.importorskip("tokenizers")
    words = ["<unk>", "<s>", "</s>", *BYTES, "▁", "▁the", "▁▁", "fox", ",", "猫", "\n", "\N{REPLACEMENT CHARACTER}"]
    vocabulary = {word: number for number, word in enumerate(words)}
    fast_tokenizer = library.Tokenizer(library.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    decoders = library.decoders
    fast_tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast_tokenizer.add_special_tokens(["<s>", "</s>"])
    fast_tokenizer.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizerConfig(path=str(folder)).build()


def suffixes(folder: Path) -> Tokenizer:
    """Words end in </w>, which becomes a space before the next word."""
    library = pytest.importorskip("tokenizers")
    vocabulary = {word: n for n, word in enumerate(["<unk>", "</s>", "the</w>", "fo", "x</w>", ",</w>", "s"])}
    fast_tokenizer = library.Tokenizer(library.models.BPE(vocabulary, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    fast_tokenizer.decoder = library.decoders.BPEDecoder()
    fast_tokenizer.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizerConfig(path=str(folder)).build()


def wordpiece(folder: Path) -> Tokenizer:
    pytest.importorskip("tokenizers")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "the", "café", ",", "##s"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    return WordPieceTokenizerConfig(vocabulary=str(folder / "vocab.txt")).build()


def _sentencepiece(folder: Path, extra_ids: int = 0, **options: object) -> Tokenizer:
    path = train_sentencepiece(folder / "own.model", [TEXT] * 20, **options)
    return SentencePieceTokenizerConfig(path=path, extra_ids=extra_ids).build()


def unigram(folder: Path) -> Tokenizer:
    return _sentencepiece(folder, model_type="unigram", vocab_size=60)


def pieces_and_bytes(folder: Path) -> Tokenizer:
    more = {"byte_fallback": True, "remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    return _sentencepiece(folder, model_type="bpe", vocab_size=330, **more)


def added_tokens(folder: Path) -> Tokenizer:
    return _sentencepiece(folder, extra_ids=3, model_type="bpe", vocab_size=60)


def multimodal(folder: Path) -> Tokenizer:
    return MultimodalTokenizerConfig(base=ByteTokenizerConfig(), added={"image_start": "<img>"}).build()


BUILDERS = [byte, null, tiktoken, byte_level, byte_fallback, suffixes, wordpiece, unigram, pieces_and_bytes]
BUILDERS += [added_tokens, multimodal]


@pytest.fixture(scope="module", params=BUILDERS, ids=lambda build: build.__name__)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    build: Callable[[Path], Tokenizer] = request.param
    return build(tmp_path_factory.mktemp(build.__name__))


def random_tokens(draw: random.Random, tokenizer: Tokenizer) -> list[int]:
    """Runs of one part of the vocabulary, so that bytes are adjacent, and some real text."""
    tokens: list[int] = []
    for _ in range(draw.randint(1, 8)):
        first = draw.randrange(tokenizer.vocabulary_size)
        ids = range(first, min(first + 30, tokenizer.vocabulary_size))
        tokens += draw.choices(ids, k=draw.randint(1, 12))
        if draw.random() < 0.4 and "null" not in tokenizer.identity:
            start = draw.randrange(len(TEXT) - 8)
            tokens += tokenizer.encode(TEXT[start : start + draw.randint(1, 8)]).tolist()
    return tokens


def test_streamed_text_equals_the_whole_text(tokenizer: Tokenizer) -> None:
    draw, detokenizer = random.Random(1), Detokenizer(tokenizer)
    for _ in range(30):
        tokens = random_tokens(draw, tokenizer)
        stream = detokenizer.stream([])
        assert "".join(map(stream.add, tokens)) + stream.end() == tokenizer.decode(tokens), tokens


def test_an_answer_is_the_text_added_to_its_prompt(tokenizer: Tokenizer) -> None:
    """Mainly SentencePiece's spaces: the first word of an answer keeps the one before it."""
    draw, detokenizer = random.Random(2), Detokenizer(tokenizer)
    for _ in range(30):
        prompt, tokens = random_tokens(draw, tokenizer), random_tokens(draw, tokenizer)
        before = tokenizer.decode(prompt)
        # Characters that begin in the prompt and end in the answer belong to the answer.
        byte_tokens = {tokenizer.token_id(name) for name in BYTES}
        if before.endswith("\N{REPLACEMENT CHARACTER}") or prompt[-1] in byte_tokens or not before.strip():
            continue
        stream = detokenizer.stream(prompt)
        text = "".join(map(stream.add, tokens)) + stream.end()
        assert (before + text).split() == tokenizer.decode([*prompt, *tokens]).split(), (prompt, tokens)


@pytest.mark.parametrize("build", [byte, tiktoken, byte_level, byte_fallback, pieces_and_bytes])
def test_no_part_of_a_character_is_sent(build: Callable[[Path], Tokenizer], tmp_path: Path) -> None:
    tokenizer = build(tmp_path)
    tokens = tokenizer.encode("a é 🦊🦊猫x").tolist()
    stream = Detokenizer(tokenizer).stream([])
    parts = [*map(stream.add, tokens), stream.end()]
    assert "".join(parts) == tokenizer.decode(tokens) and "\N{REPLACEMENT CHARACTER}" not in "".join(parts)
    assert len([part for part in parts if part]) > 1


def test_a_character_begun_by_the_prompt_is_completed() -> None:
    stream = Detokenizer(ByteTokenizerConfig().build()).stream([97, *"猫".encode()[:2]])
    assert [stream.add(token) for token in [*"猫".encode()[2:], 98]] == ["猫", "b"]


def streamed(text: str, stops: tuple[str, ...], cuts: list[int]) -> tuple[str, list[str], bool]:
    """The text in pieces of a few bytes: the whole, the parts, and whether a stop string ended it."""

    table = [part.encode() for part in cut(text, cuts)]
    stream, parts = TextStream(ByteDecoding(table, [])), []
    stream.watch(stops)
    for token in range(len(table)):
        parts.append(stream.add(token))
        if stream.stopped:
            return "".join(parts), parts, True
    parts.append(stream.end())
    return "".join(parts), parts, stream.stopped


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cuts), len(text)]
    return [text[first:last] for first, last in pairwise(edges) if first < last]


def until_stop(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The text until a stop string, found by reading one character after another."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def test_stop_strings_end_the_text_for_any_pieces() -> None:
    draw = random.Random(3)
    for _ in range(1000):
        text = "".join(draw.choices("abé", k=draw.randint(0, 14)))
        stops = tuple("".join(draw.choices("abé", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3)))
        cuts = [draw.randint(0, len(text)) for _ in range(draw.randint(0, 14))]
        text_sent, _, stopped = streamed(text, stops, cuts)
        assert (text_sent, stopped) == until_stop(text, stops), (text, stops, cuts)


def test_only_possible_beginnings_of_a_stop_string_are_held_back() -> None:
    assert streamed("one END two", ("END",), list(range(11)))[1] == ["o", "n", "e", " ", "", "", ""]
    assert streamed("one E two", ("END",), list(range(9)))[1] == ["o", "n", "e", " ", "", "E ", "t", "w", "o", ""]
    assert streamed("one E", ("END",), list(range(5)))[1] == ["o", "n", "e", " ", "", "E"]


def test_nothing_follows_a_stop_string() -> None:
    stream = Detokenizer(ByteTokenizerConfig().build()).stream([])
    stream.watch(("b",))
    assert [stream.add(token) for token in b"abab"] == ["a", "", "", ""] and stream.end() == ""


def test_without_a_tokenizer_tokens_have_no_text() -> None:
    stream = Detokenizer(None).stream([1, 2])
    stream.watch(("a",))
    assert (stream.add(3), stream.end(), stream.stopped) == ("", "", False)
