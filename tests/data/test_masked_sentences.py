"""Masked sentences compared with the definition in plain loops, and with repeated reads."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from user_errors import user_error

from megajax.config.compose import problems_of
from megajax.data.masked.config import MaskedSentencesConfig
from megajax.data.masked.sample_map import MaskedRequest, build_masked_index, mersenne_twister_64, shuffled_indices
from megajax.data.masked.samples import Masking, NgramMasking
from megajax.data.masked.sentences import truncate
from megajax.data.rows.splits import Rows
from megajax.data.text.config import BlendConfig
from megajax.data.text.indexed_dataset import IndexedWriter
from megajax.models.decoder.config import text_schema

VOCABULARY = 100
CONTINUES = np.arange(VOCABULARY) % 3 == 0


def tokenizer(**changes):
    special = {"pad": 7, "specials": {"cls": 1, "sep": 2, "mask": 4}}
    attributes = {"vocabulary_size": VOCABULARY, "continues": CONTINUES, "identity": "pieces", "eod": 5}
    return SimpleNamespace(**attributes | special | changes)


def write(prefix, documents):
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for sentences in documents:
            writer.add_document([np.array(ids) for ids in sentences])
    return str(prefix)


def corpus(draw, documents=40):
    """Documents of 0 to 8 sentences of 1 to 20 tokens from 10 on."""
    lengths = [draw.integers(1, 21, draw.integers(0, 9)) for _ in range(documents)]
    return [[draw.integers(10, VOCABULARY, length) for length in sentences] for sentences in lengths]


def build(prefix, cache, length=48, rows=100, seed=3, pieces=None, **options):
    config = MaskedSentencesConfig(paths=(prefix,), split="1", cache_dir=str(cache), **options)
    assert not problems_of(config)
    schema = text_schema(length, VOCABULARY)
    return config.build(tokenizer=pieces or tokenizer(), schema=schema, rows=Rows(rows), seed=seed).train


def test_numbers_of_the_64_bit_twister():
    """The 10,000th number of the default seed is in the C++ standard, [rand.predef]."""
    assert np.concatenate(list(mersenne_twister_64(5489, 10000)))[-1] == 9981545732273789042
    assert [len(block) for block in mersenne_twister_64(1, 313)] == [312, 1]


@pytest.mark.parametrize("count", [0, 1, 2, 700])
def test_shuffled_is_a_permutation(count):
    assert sorted(shuffled_indices(count, 1)) == list(range(count))


def plain_map(lengths, documents, request, draws):
    """The sample map before the shuffle, sentence by sentence."""
    ratio = int(1 / request.short_probability + 0.5) if request.short_probability else 0

    def draw():
        number = next(draws) if ratio else 1
        return 2 + number % (request.target - 1) if ratio and number % ratio == 0 else request.target

    samples = []
    while len(samples) < request.rows:
        for start, end in itertools.pairwise(documents):
            sizes = lengths[start:end]
            if len(sizes) < request.sentences or not len(sizes) or (len(sizes) > 1 and max(sizes) > 512):
                continue
            target, total, first = draw(), 0, start
            for position in range(start, end):
                total += lengths[position]
                remaining = end - position - 1
                if remaining == 0 or (total >= target and remaining > 1 and position + 1 - first >= request.sentences):
                    samples.append((first, position + 1, target))
                    target, total, first = draw(), 0, position + 1
    return samples


@pytest.mark.parametrize("sentences", [1, 2])
@pytest.mark.parametrize("short", [0.0, 0.1, 0.4, 1.0])
def test_sample_map(sentences, short):
    draw = np.random.default_rng(0)
    counts = draw.integers(0, 12, 80)
    documents, lengths = np.concatenate([[0], np.cumsum(counts)]), draw.integers(0, 30, counts.sum()).astype(np.int32)
    lengths[[5, 200]] = 513, 512
    request = MaskedRequest(
        first=0, last=80, rows=900, target=40, sentences=sentences, short_probability=short, seed=17
    )
    draws = iter(np.random.RandomState(17).randint(0, 1 << 32, 100_000, dtype=np.uint32).tolist())
    samples, passes = build_masked_index(lengths, documents, request, "map")
    expected = plain_map(lengths.tolist(), documents.tolist(), request, draws)
    assert passes > 1 and samples.dtype == np.uint32
    assert samples.tolist() == [list(expected[number]) for number in shuffled_indices(len(expected), 18)]


@pytest.mark.parametrize(
    ("first", "second", "target"), [(10, 3, 9), (3, 10, 9), (7, 7, 3), (0, 9, 2), (9, 0, 8), (4, 4, 8)]
)
def test_truncation(first, second, target):
    parts = [list(range(first)), list(range(100, 100 + second))]
    draws, expected = np.random.RandomState(5), [list(part) for part in parts]
    while len(expected[0]) + len(expected[1]) > target:
        part = expected[0] if len(expected[0]) > len(expected[1]) else expected[1]
        del part[0 if draws.random_sample() < 0.5 else -1]
    result, truncated = truncate([np.array(part) for part in parts], target, np.random.RandomState(5))
    assert [part.tolist() for part in result] == expected and truncated == (first + second > target)


def plain_spans(tokens, masking, target, draws):
    """Spans by the definition, candidate by candidate."""
    word_groups = []
    for place, token in enumerate(tokens):
        if token not in (1, 2):
            if masking.full_words and CONTINUES[token] and word_groups:
                word_groups[-1].append(place)
            else:
                word_groups.append([place])
    limit = min(masking.probability * target, max(1, round(masking.probability * len(tokens))))
    shares = 1.0 / np.arange(1, masking.largest + 1)
    shares = (shares / shares.sum())[:: -1 if masking.longer else 1]
    order = list(range(len(word_groups)))
    draws.shuffle(order)
    masked, spans = set(), []
    for word in order:
        if len(masked) >= limit:
            break
        if masking.geometric:
            number = min(draws.geometric(0.2), masking.largest)
        else:
            number = draws.choice(np.arange(1, masking.largest + 1), p=shares / shares.sum())
        for size in range(number, 0, -1):
            span = [place for word_positions in word_groups[word : word + size] for place in word_positions]
            if len(masked) + len(span) <= limit:
                if not masked & set(span):
                    masked |= set(span)
                    spans.append((span, draws.random_sample()))
                break
    return spans


@pytest.mark.parametrize(
    "masking",
    [
        Masking(probability=0.15, largest=3, full_words=True),
        Masking(probability=0.3, largest=5, full_words=False, longer=True),
        Masking(probability=0.15, largest=10, full_words=True, geometric=True),
        Masking(probability=0.9, largest=1, full_words=True),
    ],
    ids=["usual", "longer", "geometric", "single"],
)
def test_spans(masking):
    draw = np.random.default_rng(1)
    ngrams = NgramMasking(masking, CONTINUES, (1, 2))
    for seed in range(30):
        tokens = draw.integers(1, VOCABULARY, draw.integers(1, 80))
        target = int(draw.integers(2, 90))
        state, theirs = np.random.RandomState(seed), np.random.RandomState(seed)
        spans = [(span, state.random_sample()) for span in ngrams.spans(tokens, target, state)]
        assert spans == plain_spans(tokens.tolist(), masking, target, theirs)


def test_rows_match_their_arrays(tmp_path):
    data = build(write(tmp_path / "text", corpus(np.random.default_rng(2))), tmp_path)
    flat, outcomes = data.tokens.read_all(), set()
    for number in range(len(data)):
        row = data[number]
        length = int(row["segment_ids"].sum())
        text = np.where(row["loss_mask"] == 1, row["labels"], row["tokens"])
        assert text[0] == 1 and text[length - 1] == 2 and (text[length:] == 7).all()
        separators = np.flatnonzero(text[:length] == 2)
        sizes = separators[0] + 1, length - separators[0] - 1, 48 - length
        assert len(separators) == 2 and row["token_types"].tolist() == np.repeat([0, 1, 0], sizes).tolist()
        first, last, target = data.index[number].tolist()
        begin, stop = (int(data.tokens.lengths[:edge].sum()) for edge in (first, last))
        assert row["truncated"] == (stop - begin > target) and length == min(stop - begin, target) + 3
        if not row["truncated"]:
            parts = [text[1 : separators[0]], text[separators[0] + 1 : length - 1]]
            np.testing.assert_array_equal(np.concatenate(parts[::-1] if row["is_random"] else parts), flat[begin:stop])
        assert row["loss_mask"].sum() <= max(1, round(0.15 * length))
        assert not row["loss_mask"][length:].any() and not row["labels"][row["loss_mask"] == 0].any()
        outcomes |= {(int(row["is_random"]), int(row["truncated"]))}
    assert len(outcomes) == 4


def test_replacements_are_80_10_10(tmp_path):
    data = build(write(tmp_path / "text", corpus(np.random.default_rng(3))), tmp_path, rows=2000)
    rows = [data[number] for number in range(1500)]
    was, now = (np.concatenate([row[name][row["loss_mask"] == 1] for row in rows]) for name in ("labels", "tokens"))
    shares = [np.mean(now == 4), np.mean(now == was), np.mean((now != 4) & (now != was))]
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=0.015)


def test_one_part_without_next_sentence(tmp_path):
    data = build(write(tmp_path / "text", [[[20, 21, 22]], []]), tmp_path, next_sentence=False, rows=3)
    row = data[0]
    assert row["segment_ids"].sum() == 5 and not row["token_types"].any()
    assert "is_random" not in MaskedSentencesConfig(next_sentence=False).leaves()


def test_rows_depend_on_number_and_seed_only_and_the_index_is_cached(tmp_path):
    prefix = write(tmp_path / "text", corpus(np.random.default_rng(4)))
    first, repeated, reseeded = (build(prefix, tmp_path / "cache", seed=seed) for seed in (3, 3, 4))
    assert len(list((tmp_path / "cache").iterdir())) == 3  # an index for each seed, and the checksum of the file
    for name, values in first[9].items():
        np.testing.assert_array_equal(values, repeated[9][name])
    assert first.order() == repeated.order() != reseeded.order() and first.passes == repeated.passes
    assert not np.array_equal(first[9]["tokens"], reseeded[9]["tokens"])


def test_bad_data(tmp_path):
    prefix = write(tmp_path / "text", [[], [[20] * 3], [[20] * 600, [20]]])
    with user_error():
        build(prefix, tmp_path)
    with user_error():
        build(prefix, tmp_path, pieces=tokenizer(specials={"cls": 1, "sep": 2}))
    with user_error():
        build(prefix, tmp_path, pieces=tokenizer(continues=None))
    prefix = write(tmp_path / "other", [[[20, 21], [200]]])
    with user_error():
        build(prefix, tmp_path)[0]
    with user_error():
        build(prefix, tmp_path, length=4)


def test_settings_are_checked():
    config = MaskedSentencesConfig(
        paths=("a",), mask_probability=1, short_probability=2, largest_ngram=0, geometric=True, longer_ngrams=True
    )
    fields = ["mask_probability", "short_probability", "largest_ngram", "longer_ngrams"]
    assert [problem.setting for problem in problems_of(config)] == fields
    assert not problems_of(BlendConfig(paths=("a",)))
