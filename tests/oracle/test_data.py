"""Rows, indices, blends, files and sample order against Megatron-LM's: every case found in the folder."""

import json
import re
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron_cases
import numpy as np
import pytest
from megatron_cases import FOLDER as ORACLE
from megatron_cases import cases

from megajax.batch import Leaf
from megajax.data.masked.config import MaskedSentencesConfig, MaskedSpansConfig
from megajax.data.rows.blend import BlendedDataset
from megajax.data.rows.config import CyclicConfig
from megajax.data.rows.cyclic import CyclicRows
from megajax.data.rows.loader import LocalRows
from megajax.data.rows.splits import NAMES, Rows, parse_split, split_bounds
from megajax.data.text.config import BlendConfig, MockConfig
from megajax.data.text.indexed_dataset import (
    IndexedTokens,
    IndexedWriter,
    has_modes,
    index_path,
    token_dtype,
    tokens_path,
)
from megajax.models.decoder.config import text_schema

FOLDER = ORACLE / "data"
ARRAYS = {"document_index": "documents", "sample_index": "samples", "shuffle_index": "shuffle"}
LEAVES = {"tokens": "tokens", "labels": "labels", "loss_mask": "loss_mask", "position_ids": "positions"}
FLAGS = ("reset_positions", "reset_attention_mask", "eod_mask_loss")


def load_json(name: str) -> dict[str, Any]:
    return megatron_cases.load_json(f"data/{name}")


def load_arrays(name: str) -> dict[str, np.ndarray]:
    """Arrays of a file; none if it is missing."""
    return megatron_cases.load_arrays(f"data/{name}") if (FOLDER / name).is_file() else {}


META = load_json("gpt_meta.json")
INDICES, SAMPLES, BLENDS = (load_arrays(f"gpt_{kind}.npz") for kind in ("indices", "samples", "blends"))


def corpus(letter: str) -> Path:
    """Prefix of corpus A, B, …, whatever follows the letter in its name."""
    return min(FOLDER.glob(f"corpus{letter}*.idx")).with_suffix("")


def tokenizer() -> SimpleNamespace:
    text = META.get("description_example", {}).get("text", "{}")
    described = json.loads(text).get("tokenizer", {})
    size, pad = int(described.get("vocab_size", 512)), int(described.get("pad_id", -1))
    return SimpleNamespace(vocabulary_size=size, eod=size - 1, pad=None if pad < 0 else pad, identity=f"null:{size}")


def build(case: dict[str, Any], cache: Path, length: int, sizes: list[int | None], **options: Any) -> Any:
    options.setdefault("drop_last", case.get("drop_last_partial_validation_sequence", True))
    options.setdefault("extra_token", case.get("add_extra_token_to_sequence", True))
    if case.get("split"):
        options.setdefault("split", case["split"])
    config = BlendConfig(cache_dir=str(cache), **options)
    assert not config.problems()
    return config.build(tokenizer=tokenizer(), schema=text_schema(length, 2**31), rows=Rows(*sizes), seed=case["seed"])


def asked(case: dict[str, Any], sizes: list[int | None]) -> list[int | None]:
    """Rows per split; none for splits that the original did not build."""
    return [
        0 if case["splits"].get(name) is None else size for name, size in zip_longest(NAMES, sizes[:3], fillvalue=0)
    ]


def build_mock(case: dict[str, Any], key: str) -> Any:
    """Synthetic documents. Where no size is described, a split has as many rows as were stored."""
    stored = {name: SAMPLES.get(f"{key}/{name}/tokens") for name in NAMES}
    sizes = described(case, "requested_samples", "sizes") or [
        0 if rows is None else len(rows) for rows in stored.values()
    ]
    length = described(case, "seq_length", "seq") or next(rows for rows in stored.values() if rows is not None).shape[1]
    given = {"tokenizer": tokenizer(), "schema": text_schema(length, 2**31)}
    return MockConfig().build(**given, rows=Rows(*sizes), seed=case.get("seed", 1234))


def described(case: dict[str, Any], *names: str) -> Any:
    """The value of the first of these names that a case has."""
    return next((case[name] for name in names if case.get(name) is not None), None)


def build_case(key: str, cache: Path, **options: Any) -> Any:
    """The splits of a case of one corpus, or of the mock documents, which need no description."""
    case = META.get("index", {}).get(key) or META.get(key) or {}
    if key.startswith("mock"):
        if any(options.values()):
            pytest.skip("unsupported: flags of mock documents")
        return build_mock(case, key)
    sizes = asked(case, case["requested_samples"])
    return build(case, cache, case["seq_length"], sizes, paths=(str(corpus(case["corpus"])),), **options)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("indices")


@pytest.mark.parametrize("key", cases(META.get("index", {})))
def test_index(key: str, cache: Path) -> None:
    splits, compared = build_case(key, cache), 0
    for name, dataset in zip(NAMES, splits, strict=True):
        if dataset is None:
            continue
        expected = META["index"][key]["splits"][name]
        assert len(dataset) == expected["len"]
        for place, (theirs, ours) in enumerate(ARRAYS.items()):
            actual = getattr(dataset.index, ours)
            assert "dtypes" not in expected or actual.dtype.name == expected["dtypes"][place]
            array = INDICES.get(f"{key}/{name}/{theirs}")
            if array is not None:
                # Some sample indices are stored without their last rows.
                np.testing.assert_array_equal(actual[-len(array) :], array)
                compared += 1
    assert compared


def split_of(key: str) -> tuple[str, str, dict[str, bool]]:
    """The case, the split and the flags of stored rows: `A/s32/train/flagsT`; or `mock/train`, where all are off."""
    case, _, flags = key.rpartition("/") if "/flags" in key else (key, "", "flagsF")
    letters = flags.removeprefix("flags")
    if set(letters) - set("TF") or len(letters) not in (1, 3):
        pytest.skip(f"unsupported: flags named {flags}")
    case, _, split = case.rpartition("/")
    return case, split, dict(zip(FLAGS, (letter == "T" for letter in letters * (3 // len(letters))), strict=True))


def blocked(segment_ids: np.ndarray) -> np.ndarray:
    """[S] -> [S, S], True where a row may not attend to a column."""
    causal = np.tri(len(segment_ids), dtype=bool)
    return ~(causal & (segment_ids[:, None] == segment_ids[None, :]))


def check_rows(stored: dict[str, np.ndarray], prefix: str, dataset: Any) -> None:
    """All arrays under the prefix; loss masks also as Megatron-LM's shared mask object has them (zeros pile up)."""
    names = [key.removeprefix(prefix) for key in stored if key.startswith(prefix)]
    compared = set(names) & set(LEAVES)
    assert compared, f"nothing was compared for {prefix}"
    rows = [dataset[i] for i in range(len(stored[prefix + min(compared)]))]
    for name in compared:
        ours, theirs = np.stack([row[LEAVES[name]] for row in rows]), stored[prefix + name]
        if name == "loss_mask" and (ours != theirs).any():
            ours = np.minimum.accumulate(ours)
        np.testing.assert_array_equal(ours, theirs, err_msg=prefix + name)
    if "attention_mask_packbits_first5" in names:
        packed = stored[prefix + "attention_mask_packbits_first5"]
        for row, bits in zip(rows, packed, strict=False):
            mask = blocked(row["segment_ids"])
            np.testing.assert_array_equal(np.packbits(mask, axis=-1), bits, err_msg=prefix + "attention_mask")


@pytest.mark.parametrize("key", cases({key.rsplit("/", 1)[0] for key in SAMPLES}))
def test_rows(key: str, cache: Path) -> None:
    case, split, options = split_of(key)
    check_rows(SAMPLES, f"{key}/", getattr(build_case(case, cache, **options), split))


def blend_paths(case: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """The settings that name the files of a case: one blend that is split, or a blend for each split, some of which
    may be absent; weights are optional."""
    lists = case.get("blend_per_split") or {"": case["blend"]}
    settings = {}
    for name, blend in (dict(zip(NAMES, lists, strict=False)) if isinstance(lists, list) else lists).items():
        if blend is None:
            continue
        prefixes, weights = blend if len(blend) == 2 and isinstance(blend[0], list) else (blend, None)
        files = [str(FOLDER / prefix) for prefix in prefixes]
        if weights is not None:
            files = [item for pair in zip(map(str, weights), files, strict=True) for item in pair]
        settings[f"{name}_paths" if name else "paths"] = tuple(files)
    return settings


@pytest.mark.parametrize("key", cases(META.get("blend", {})))
def test_blend(key: str, cache: Path) -> None:
    """The dataset of each row, its number there, and the rows themselves are compared."""
    case = META["blend"][key]
    length, sizes = described(case, "seq", "seq_length"), described(case, "sizes", "requested_samples")
    splits = build(case, cache, length, asked(case, sizes), **blend_paths(case))
    for name, dataset in zip(NAMES, splits, strict=True):
        expected, prefix = case["splits"].get(name), f"{key}/{name}/"
        if dataset is None or expected is None:
            continue
        assert len(dataset) == expected["len"]
        check_rows(BLENDS, prefix, dataset)
        if isinstance(dataset, BlendedDataset):
            assert [len(member) for member in dataset.datasets] == expected.get(
                "mid_len", [*map(len, dataset.datasets)]
            )
            for theirs, ours in (("dataset_index", "datasets"), ("dataset_sample_index", "samples")):
                actual, array = getattr(dataset.index, ours), BLENDS[prefix + theirs]
                assert actual.dtype == array.dtype
                np.testing.assert_array_equal(actual, array)
            ids = BLENDS.get(prefix + "dataset_id", np.zeros(0))
            np.testing.assert_array_equal([dataset[i]["dataset_id"] for i in range(len(ids))], ids)


@pytest.mark.parametrize("text", cases(META.get("split_parse", {})))
def test_split(text: str) -> None:
    expected, shares = META["split_parse"][text], parse_split(text)
    for share, theirs in zip(shares, expected["matrix"], strict=True):
        assert theirs is None if share is None else list(share) == theirs
    for count, ranges in expected["doc_ranges_for_n"].items():
        for share, bounds in zip(shares, ranges, strict=True):
            if share is not None:
                assert list(split_bounds(share, int(count))) == bounds


@pytest.mark.parametrize("name", cases(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.idx")))
def test_file(name: str, tmp_path: Path) -> None:
    """Read, compared with what the original reader counted, and written again byte for byte."""
    prefix, copy = (FOLDER / name).with_suffix(""), tmp_path / "copy"
    if not tokens_path(prefix).is_file():
        letters = re.fullmatch(r"merged([A-Z]+)", prefix.name)
        if letters is None:
            pytest.skip(f"unsupported: index without tokens {name}")
        with IndexedWriter(copy, IndexedTokens(corpus(letters[1][0])).dtype) as writer:
            for letter in letters[1]:
                writer.append_index(corpus(letter))
        assert index_path(copy).read_bytes() == index_path(prefix).read_bytes()
        return
    file = IndexedTokens(prefix, multimodal=has_modes(prefix))
    with IndexedWriter(copy, file.dtype) as writer:
        for first, last in zip(file.document_table[:-1].tolist(), file.document_table[1:].tolist(), strict=True):
            sequences = [file.sequence(number) for number in range(first, last)]
            writer.add_document(sequences, None if file.modes is None else file.modes[first:last].tolist())
    assert index_path(copy).read_bytes() == index_path(prefix).read_bytes()
    assert tokens_path(copy).read_bytes() == tokens_path(prefix).read_bytes()
    expected = load_json("corpora_meta.json").get(name.removesuffix(".idx"))
    if expected:
        assert (len(file), len(file.document_table)) == (expected["n_seq"], expected["n_doc_idx"])
        assert (file.dtype.name, len(file.read_all())) == (expected["dtype"], expected["tokens"])
        assert file.lengths[: len(expected["seq_len_head"])].tolist() == expected["seq_len_head"]
        if "modes" in expected:
            assert file.modes is not None and file.modes.tolist() == expected["modes"]


@pytest.mark.parametrize("key", cases(load_arrays("corpora_reference.npz")))
def test_corpus(key: str) -> None:
    letter, kind = key.split("/")
    file, expected = IndexedTokens(corpus(letter)), load_arrays("corpora_reference.npz")[key]
    per_document = np.diff(file.document_table)
    token_ends = np.concatenate([[0], np.cumsum(file.lengths)])
    actual = {
        "tokens": file.read_all(),
        "tokens_head": file.read_all()[: len(expected)],
        "sentence_lengths": file.lengths,
        "sentences_per_doc": per_document,
        "doc_lengths": np.diff(token_ends[file.document_table]),
    }
    if kind not in actual:
        pytest.skip(f"unsupported: {key}")
    np.testing.assert_array_equal(actual[kind], expected)


@pytest.mark.parametrize("size", cases(load_json("corpora_meta.json").get("optimal_dtype", {})))
def test_dtype_for_vocabulary(size: str) -> None:
    expected = load_json("corpora_meta.json")["optimal_dtype"][size]
    assert token_dtype(None if size == "None" else int(size)).name == expected


def check_random_order(expected: list[list[int]], sizes: list[int], sharded: str) -> None:
    """The microbatches of a shard to the end of a pass.

    Without buckets one shard may have an extra microbatch at the end of a pass.
    """
    total, consumed, micro, shards, shard = sizes
    group = micro * shards
    config = CyclicConfig(buckets=sharded in ("True", "1"))
    rows = CyclicRows(config, source=range(total), rows=consumed + total, shards=shards, micro_rows=group)
    active = total - total % group
    whole = (active - consumed % active) // group
    starts = range(consumed + shard * micro, consumed + whole * group, group)
    assert [[rows.number(first + place) for place in range(micro)] for first in starts] == expected[:whole]
    assert whole <= len(expected) <= whole + 1


@pytest.mark.parametrize("key", cases(load_json("samplers.json")))
def test_sample_order(key: str) -> None:
    """A data shard's rows, microbatch by microbatch; the batch axis of a [M, B] batch is cut into consecutive runs."""
    sizes = r"total(\d+)_consumed(\d+)_mbs(\d+)_dp(\d+)_rank(\d+)"
    if (match := re.fullmatch(rf"(?:random|cyclic)/{sizes}_[a-z_]*(True|False|0|1)", key)) is not None:
        check_random_order(load_json("samplers.json")[key], [int(text) for text in match.groups()[:5]], match[6])
        return
    match = re.fullmatch(rf"sequential/{sizes}_drop(True|False)", key)
    if match is None:
        pytest.skip(f"unsupported: {key.split('/')[0]} sampler")
    total, consumed, micro, shards, shard = map(int, match.groups()[:5])
    whole = (total - consumed) // (micro * shards)
    index = (slice(None), slice(shard * micro, (shard + 1) * micro))
    expected = load_json("samplers.json")[key]
    for microbatches in {1, whole} - {0}:
        rows: list[list[int]] = []
        layout = LocalRows([index], microbatches, micro * shards)
        for first in range(consumed, consumed + whole * micro * shards, microbatches * micro * shards):
            rows += layout.block(first + layout.offsets, index).tolist()
        assert rows == expected[:whole]
    # A last incomplete group (drop False) is not formed: a source with too few rows is an error.
    assert len(expected) - whole == (0 if match[6] == "True" or (total - consumed) % (micro * shards) == 0 else 1)


MASKED_META, MASKED = load_json("masked_fim_sft_meta.json"), load_arrays("masked_fim_sft.npz")


def word_pieces(size: int = 256) -> SimpleNamespace:
    """The tokenizer behind the masked samples: every third of the ordinary ids continues a word."""
    ids = np.arange(size)
    return SimpleNamespace(
        vocabulary_size=size,
        continues=(ids % 3 == 0) & (ids > 5),
        sentinels=tuple(range(206, size)),
        identity="pieces",
        pad=0,
        specials={"cls": 1, "sep": 2, "mask": 3, "bos": 4, "eos": 5},
    )


def build_masked(case: dict[str, Any], cache: Path, kind: type, **options: Any) -> Any:
    """Splits of the case, with the settings that all masked data has."""
    config = kind(
        paths=(str(corpus(case.get("corpus", "corpusC").removeprefix("corpus"))),),
        split=case["split"],
        cache_dir=str(cache),
        mask_probability=case["masking_probability"],
        short_probability=case["short_sequence_probability"],
        largest_ngram=case["masking_max_ngram"],
        full_words=case["masking_do_full_word"],
        geometric=case["masking_use_geometric_distribution"],
        # Without effect on geometric lengths, which is a warning in Megatron-LM.
        longer_ngrams=case["masking_use_longer_ngrams"] and not case["masking_use_geometric_distribution"],
        **options,
    )
    assert not config.problems()
    schema = text_schema(case.get("sequence_length_decoder", case["seq"]), 256)
    schema = {**schema, "encoder_tokens": Leaf("int32", (case["seq"],), ("seq",))}
    return config.build(tokenizer=word_pieces(), schema=schema, rows=Rows(*case["sizes"]), seed=case["seed"])


def check_masked(key: str, name: str, dataset: Any, leaves: dict[str, str]) -> None:
    """The sample map and all samples of a split. Labels without loss are -1 in Megatron-LM, 0 here."""
    prefix = f"{key}/{name}/"
    assert len(dataset) == MASKED_META[key][f"{name}_len"]
    np.testing.assert_array_equal(dataset.index, MASKED[prefix + "sample_index"])
    assert dataset.index.dtype == MASKED[prefix + "sample_index"].dtype
    assert {key.removeprefix(prefix) for key in MASKED if key.startswith(prefix)} == {"sample_index", *leaves}
    rows = [dataset[i] for i in range(len(MASKED[prefix + "labels"]))]
    for theirs, ours in leaves.items():
        expected = MASKED[prefix + theirs]
        actual = np.stack([row[ours] for row in rows])
        if theirs == "labels":
            actual = np.where(MASKED[prefix + "loss_mask"], actual, -1)
        np.testing.assert_array_equal(actual, expected, err_msg=prefix + theirs)


BERT_LEAVES = {"text": "tokens", "types": "token_types", "padding_mask": "segment_ids"} | {
    name: name for name in ("labels", "is_random", "loss_mask", "truncated")
}
T5_LEAVES = {"text_enc": "encoder_tokens", "text_dec": "tokens"} | {
    **{"enc_mask": "encoder_segment_ids", "dec_mask": "segment_ids"},
    **{name: name for name in ("labels", "loss_mask", "truncated")},
}


@pytest.mark.parametrize("key", cases(key for key in MASKED_META if not key.startswith(("fim/", "sft/"))))
def test_masked(key: str, cache: Path) -> None:
    case, kind = MASKED_META[key], key.split("/")[0]
    if kind not in ("bert", "t5"):
        pytest.skip(f"unsupported: {kind} datasets")
    if case["masking_do_permutation"]:
        pytest.skip("unsupported: permutation, which Megatron-LM draws from an unseeded generator")
    if kind == "bert":
        splits = build_masked(case, cache, MaskedSentencesConfig, next_sentence=case["classification_head"])
    else:
        splits = build_masked(case, cache, MaskedSpansConfig)
    for name, dataset in zip(NAMES, splits, strict=True):
        if dataset is not None and case.get(f"{name}_len"):
            check_masked(key, name, dataset, BERT_LEAVES if kind == "bert" else T5_LEAVES)
