"""Windows, detokenizers, last words and pairs as in Megatron-LM and lm-eval; damaged files."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from user_errors import user_error

from megajax.config.class_references import resolve
from megajax.config.errors import ConfigError
from megajax.data.text.indexed_dataset import IndexedWriter
from megajax.tasks.config import ChoicesConfig, LambadaConfig, PerplexityConfig, TextConfig, WikitextConfig
from megajax.tasks.evaluate_command import parse_tasks
from megajax.tasks.loglikelihood import Choices, Lambada, cloze, encode_pair, with_prefix
from megajax.tasks.perplexity import TextPerplexity, TokenFiles, Wikitext, detokenize, windows
from megajax.tasks.statistics import exponential, mean, ratio
from megajax.tokenizers.config import ByteTokenizerConfig
from megajax.training.scorer import Window, WindowScore

LENGTH = 16


class Made:
    """A scorer whose log-probabilities are a function of the tokens; it records its windows."""

    def __init__(self, vocabulary: int = 257):
        self.tokenizer, self.length, self.windows = ByteTokenizerConfig().build(), LENGTH, list[Window]()
        leaf = SimpleNamespace(below=vocabulary)
        model = SimpleNamespace(schema=lambda: {"tokens": leaf})
        self.program = SimpleNamespace(cfg=SimpleNamespace(model=model))

    def answers(self, windows: list[Window]) -> list[WindowScore]:
        self.windows += windows
        return [WindowScore(-sum(loss(int(token)) for token in w.tokens[-w.counted :]), 0) for w in windows]


def loss(token: int) -> float:
    return 0.5 + token % 7


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def brute_force(tokens: list[int], length: int, stride: int) -> list[tuple[list[int], list[int]]]:
    """Megatron-LM's windows with its `pad_mask`: (tokens, positions in the stream that count)."""
    targets = len(tokens) - 1
    count = max(math.ceil(max(targets - stride, 0) / stride) + 1, 1)
    result = []
    for number in range(count):
        start = number * stride
        window = tokens[start : start + length + 1]
        mask = [1] * (len(window) - 1) + [0] * (length + 1 - len(window))
        if stride != length and number:
            mask = [0] * (length - stride) + mask[length - stride :]
        result.append((window, [start + 1 + place for place, counts in enumerate(mask) if counts]))
    return result


@pytest.mark.parametrize("size", [2, 3, 16, 17, 18, 40, 49, 50])
@pytest.mark.parametrize("stride", [1, 4, 15, 16])
def test_windows_are_megatrons(size, stride):
    tokens = np.arange(100, 100 + size)
    expected = [(window, positions) for window, positions in brute_force(tokens.tolist(), LENGTH, stride) if positions]
    actual = list(windows(tokens, LENGTH, stride))
    assert [window.tokens[-window.counted :].tolist() for window in actual] == [
        [int(tokens[place]) for place in positions] for _, positions in expected
    ]
    # The context of each is the same: the window up to its last counted token.
    assert [window.tokens.tolist() for window in actual] == [
        [int(token) for token in window if token <= tokens[positions[-1]]] for window, positions in expected
    ]
    assert sum(window.counted for window in actual) == size - 1


def test_a_stride_above_a_row_is_refused():
    with user_error():
        list(windows(np.arange(9), LENGTH, 17))


def test_wikitext_figures_are_megatrons(tmp_path):
    text = ' \n = Title = \n\n The cat \'s 1 @,@ 000 " small " hats ( red ) , and N more . \n'
    path = tmp_path / "wiki.tokens"
    path.write_text(text)
    figures = Wikitext(WikitextConfig(path=str(path), stride=4), Made())()
    tokens = detokenize(text, "wikitext").encode()
    total = sum(loss(token) for token in tokens[1:])
    word_count = len(text.strip().split(" "))
    average = total / (len(tokens) - 1)
    assert figures["loss"].value == pytest.approx(average, rel=1e-12)
    assert figures["loss"].count == len(tokens) - 1
    assert figures["perplexity"].value == pytest.approx(math.exp(min(20, average)))
    assert figures["token_ratio"].value == (len(tokens) - 1) / (word_count - 1)
    expected = math.exp(min(20, average * (len(tokens) - 1) / (word_count - 1)))
    assert figures["adjusted_perplexity"].value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("wikitext", "the dogs ' 3 @-@ 4 ( a b ) [ c ] { d }", "the dogs' 3-4 (a b) [c] {d}"),
        ("wikitext", 'he said , " no : 1 @.@ 5 " ; so ! then ? it \'s', 'he said, "no: 1.5"; so! then? it\'s'),
        ("wikitext", " = = Head = = \n N of \N{DEGREE SIGN} C", "== Head ==\nN of\N{DEGREE SIGN}C"),
        ("ptb", "it 's $ 1 \n do n't N times # 1", "it's $1\ndon't1 times #1"),
        ("none", " = = a = = ", " = = a = = "),
    ],
)
def test_detokenizers(kind, text, expected):
    assert detokenize(text, kind).strip(" ") == expected.strip(" ")


def test_text_is_counted_by_tokens_words_and_bytes(tmp_path):
    documents = ["two words\n", "three more wörds here, and enough for windows"]
    path = write(tmp_path / "a.jsonl", *({"body": text} for text in documents))
    scorer = Made()
    figures = TextPerplexity(TextConfig(path=path, key="body"), scorer)()
    data = [text.encode() for text in documents]
    total = sum(loss(token) for document in data for token in document)
    bytes_, word_count = sum(map(len, data)), sum(len(text.split()) for text in documents)
    # With the byte tokenizer, every byte is a token, and each document follows an end-of-document token.
    assert figures["loss"].value == pytest.approx(total / bytes_)
    assert [int(window.tokens[0]) for window in scorer.windows[:2]] == [256, 256]
    assert figures["word_perplexity"].value == pytest.approx(math.exp(total / word_count))
    assert figures["byte_perplexity"].value == pytest.approx(math.exp(total / bytes_))
    assert figures["bits_per_byte"].value == pytest.approx(total / bytes_ / math.log(2))


def test_token_files_are_one_stream(tmp_path):
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, 200, size).astype(np.uint16) for size in (5, 30, 12)]
    with IndexedWriter(tmp_path / "a", np.dtype("<u2")) as writer:
        for document in documents:
            writer.add_document([document])
    figures = TokenFiles(PerplexityConfig(paths=(str(tmp_path / "a"),)), Made())()
    stream = np.concatenate(documents)
    assert figures["loss"].value == pytest.approx(np.mean([loss(int(token)) for token in stream[1:]]))
    with user_error():
        TokenFiles(PerplexityConfig(paths=(str(tmp_path / "a"),)), Made(vocabulary=100))
    with IndexedWriter(tmp_path / "b", np.dtype("<i4")) as writer:
        writer.add_document([np.array([5, -3, 7], np.int32)])
    with user_error():
        TokenFiles(PerplexityConfig(paths=(str(tmp_path / "b"),)), Made())


def test_lambada_splits_texts_like_megatron():
    tokenizer = ByteTokenizerConfig().build()
    context, end = cloze(tokenizer, "A cat sat on the mat", strict=True)
    assert (tokenizer.decode(context), tokenizer.decode(end)) == ("A cat sat on the", " mat")
    context, end = cloze(tokenizer, "A cat sat on the mat", strict=False)
    assert (tokenizer.decode(context), tokenizer.decode(end)) == ("A cat sat on the ma", "t")


@pytest.mark.parametrize(
    ("context", "continuation", "expected"),
    [("a b", " c", ("a b", " c")), ("a b ", "c", ("a b", " c")), ("", "c", (None, "c"))],
)
def test_pairs_are_split_like_lm_eval(context, continuation, expected):
    tokenizer = ByteTokenizerConfig().build()
    request = encode_pair(tokenizer, context, continuation)
    before = None if request.context.tolist() == [tokenizer.eod] else tokenizer.decode(request.context)
    assert (before, tokenizer.decode(request.continuation)) == expected


def with_bos(prefix: tuple[int, ...] = (1,)) -> Made:
    scorer = Made()
    scorer.tokenizer.prefix, scorer.tokenizer.specials = prefix, {"bos": 1}
    return scorer


def test_the_tokenizers_prefix_comes_first(tmp_path):
    tokenizer = with_bos().tokenizer
    assert with_prefix(tokenizer, "ab").tolist() == with_prefix(tokenizer, "\x01ab").tolist() == [1, 97, 98]
    assert [part.tolist() for part in encode_pair(tokenizer, "a", " b")] == [[1, 97], [32, 98]]
    assert [part.tolist() for part in encode_pair(tokenizer, "", " b")] == [[1], [32, 98]]
    # Without a prefix, only a text without a context starts with the token.
    other = with_bos(()).tokenizer
    assert [part.tolist() for part in encode_pair(other, "a", " b")] == [[97], [32, 98]]
    assert [part.tolist() for part in encode_pair(other, "", " b")] == [[1], [32, 98]]
    scorer, path = with_bos(), write(tmp_path / "a.jsonl", {"text": "a text"})
    TextPerplexity(TextConfig(path=path), scorer)()
    assert scorer.windows[0].tokens.tolist() == [1, *b"a text"] and scorer.windows[0].counted == 6
    # Megatron-LM's tasks have no prefix.
    Lambada(LambadaConfig(path=path, strict=True), scorer)()
    Wikitext(WikitextConfig(path=path, stride=None), scorer)()
    assert scorer.windows[1].tokens.tolist() == list(b"a text") and scorer.windows[2].tokens[0] == ord("{")


def test_lm_eval_gets_the_tokens_of_its_models():
    """HFLM with add_bos_token=None: the tokenizer's default for texts, BOS, else EOS, before empty contexts."""
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    model = resolve("megajax.tasks.harness_model:HarnessModel")

    def request(*texts: str) -> SimpleNamespace:
        return SimpleNamespace(args=texts)

    scorer = with_bos()
    actual = model(scorer, 4)
    assert (actual.tok_encode("ab"), actual.tok_encode("ab", add_special_tokens=False)) == ([1, 97, 98], [97, 98])
    actual.loglikelihood([request("a", " b"), request("", "b")])
    actual.loglikelihood_rolling([request("ab")])
    windows = [(window.tokens.tolist(), window.counted) for window in scorer.windows]
    # A rolling text is scored after BOS, even if the tokenizer adds one too.
    assert windows == [([1, 97, 32, 98], 2), ([1, 98], 1), ([1, 1, 97, 98], 3)]
    long = "a" * 2 * LENGTH
    actual.loglikelihood([request(long, " b"), request(long, " c"), request("a", " b")])
    assert actual.truncated == 1
    empty = request("a", "")
    empty.task_name, empty.doc_id, empty.idx = "cloze", 2, 1
    with user_error():
        actual.loglikelihood([request("a", " b"), empty])
    assert model(with_bos(()), 4).prefix_token_id == 1
    assert model(Made(), 4).prefix_token_id == 256


def test_choices_are_counted_by_hand(tmp_path):
    lines = [
        {"context": "q", "choices": ["aaaa", "b"], "answer": 0},
        {"context": "q", "choices": ["c", "dd"], "answer": 1},
        {"context": "longer than a row can be", "choices": ["e", "f", "é"], "answer": 2},
    ]
    figures = Choices(ChoicesConfig(path=write(tmp_path / "a.jsonl", *lines)), Made())()

    def score(choice: str) -> float:
        return -sum(loss(byte) for byte in f" {choice}".encode())

    best = [max(range(len(line["choices"])), key=lambda n, line=line: score(line["choices"][n])) for line in lines]
    norm = [
        max(
            range(len(line["choices"])),
            key=lambda n, line=line: score(line["choices"][n]) / len(line["choices"][n].encode()),
        )
        for line in lines
    ]
    answers = [line["answer"] for line in lines]
    assert figures["accuracy"].value == np.mean([a == b for a, b in zip(best, answers, strict=True)])
    assert figures["accuracy_norm"].value == np.mean([a == b for a, b in zip(norm, answers, strict=True)])
    assert figures["accuracy"].count == 3
    assert figures["truncated_contexts"].value == 1, "of three choices"
    assert best != norm, "the case shows no difference"


def test_standard_errors():
    values = [1.0, 0.0, 0.0, 1.0, 1.0]
    assert mean(values).error == pytest.approx(np.std(values, ddof=1) / 5**0.5)
    assert mean([1.0]).error is None
    assert math.isnan(ratio([], []).value)
    equal = ratio([4.0, 8.0, 12.0], [2, 4, 6])
    assert (equal.value, equal.error, equal.count) == (2.0, 0.0, 12)
    assert exponential(mean([1.0, 3.0])).error == pytest.approx(math.exp(2) * 1.0)
    assert exponential(ratio([1e6], [1])).value == math.inf


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[" * 100_000 + "]" * 100_000,
        '{"answer": ' + "9" * 5000 + "}",
        [1],
        {"contxt": "q", "choices": [], "answer": 0},
        {"context": 3, "choices": [], "answer": 0},
        {"context": "q", "choices": ["a"], "answer": 0},
        {"context": "q", "choices": ["a", "b"], "answer": True},
        {"context": "q", "choices": ["a", "b"], "answer": 2},
        {"context": "q", "choices": ["a", "b" * 40], "answer": 0},
    ],
)
def test_bad_lines_are_named(tmp_path, line):
    valid = {"context": "q", "choices": ["a", "b"], "answer": 1}
    with user_error():
        Choices(ChoicesConfig(path=write(tmp_path / "a.jsonl", valid, line)), Made())


def test_a_choice_without_tokens_is_named(tmp_path):
    scorer = Made()
    scorer.tokenizer = SimpleNamespace(prefix=(), encode=lambda text: np.array([*text.rstrip().encode()], np.int32))
    path = write(tmp_path / "a.jsonl", {"context": "q", "choices": ["a", "\t"], "answer": 0})
    with user_error():
        Choices(ChoicesConfig(path=path), scorer)


def test_texts_of_one_word_are_refused(tmp_path):
    with user_error():
        Lambada(LambadaConfig(path=write(tmp_path / "a.jsonl", {"text": "alone"})), Made())
    with user_error():
        Lambada(LambadaConfig(path=write(tmp_path / "a.jsonl", "")), Made())


def test_tasks_are_parsed_from_the_command_line(tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "two words"})
    tasks = parse_tasks(f"lambada:{path}:strict=true, lambada:{path},perplexity:a/b,wikitext:{path}:stride=none")
    assert [task.name for task in tasks] == ["lambada", "lambada_2", "perplexity", "wikitext"]
    assert (tasks[0].strict, tasks[1].strict, tasks[2].paths, tasks[3].stride) == (True, False, ("a/b",), None)
    (harness,) = parse_tasks("lm-eval:arc:fewshot=2", tmp_path)
    assert (harness.tasks, harness.fewshot, harness.include_path) == (("arc",), 2, str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lambda:x",
        "hellaswag",
        "lambada_openai",
        "squad_v3:x",
        "lambada",
        "lambada:/no/file",
        "perplexity:a:strid=3",
        "perplexity:a:stride=0",
        "text:a.txt:key=body",
    ],
)
def test_wrong_tasks_are_named(text):
    with user_error(kind=ConfigError):
        parse_tasks(text)
