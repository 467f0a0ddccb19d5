"""Fill-in-the-middle rows and chats against Megatron-LM's: every case in the folder."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pytest
from megatron_cases import FOLDER, FURTHER, cases, load_arrays, load_json, unsupported

from megajax.data.chat.config import ChatConfig
from megajax.data.rows.splits import NAMES, Rows
from megajax.data.text.config import FillInMiddleConfig
from megajax.models.decoder.config import text_schema
from megajax.tokenizers.base import Tokenizer

META = load_json("data/masked_fim_sft_meta.json")
CHATS = {key: (case, "data/masked_fim_sft.npz") for key, case in META.items() if key.startswith("sft/")}
"""Cases of chats, and the file of their arrays."""
for path in sorted((FURTHER / "sft").glob("*.json")):
    CHATS |= {key: (case, str(path.with_suffix(".npz"))) for key, case in json.loads(path.read_text()).items()}
LEAVES = {"tokens": "tokens", "labels": "labels", "loss_mask": "loss_mask", "position_ids": "positions"}


class Letters:
    """The tokenizer behind the FIM samples: id i is the character 256 + i, but four ids have no text."""

    vocabulary_size, eod, pad, identity = 512, 511, 503, "letters"
    special: ClassVar = {"prefix": 500, "middle": 501, "suffix": 502}

    def __init__(self, **more: int):
        self.ids = {**self.special, **more}

    def token_id(self, token: str) -> int:
        return self.ids[token] if token in self.ids else ord(token) - 256

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(letter) - 256 for letter in text], np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return "".join(chr(256 + int(number)) for number in ids if not 500 <= number <= 503)


def split_token(case: dict[str, Any]) -> int | None:
    """The token at which documents are cut: a case has its id, its character, or its name with the id beside it."""
    split = case.get("split_sample", case.get("fim_split_sample"))
    if split is None or isinstance(split, int):
        return split
    if len(split) == 1 or split in Letters.special:
        return Letters().token_id(split)
    names = [name for name in case if "split" in name and "id" in name.split("_")]
    return case[names[0]] if names else unsupported(f"a split token {split} without an id")


@pytest.mark.parametrize("key", cases(key for key in META if key.startswith("fim/")))
def test_fim(key: str, tmp_path: Path) -> None:
    case, stored = META[key], load_arrays("data/masked_fim_sft.npz")
    if case.get("order", "0..n-1") != "0..n-1":
        unsupported(f"one generator for rows in the order {case['order']}")
    letter, cut = case.get("corpus", "corpusB").removeprefix("corpus"), split_token(case)
    config = FillInMiddleConfig(
        paths=(str(min((FOLDER / "data").glob(f"corpus{letter}*.idx")).with_suffix("")),),
        split=case.get("split", "80,15,5"),
        cache_dir=str(tmp_path),
        rate=case["fim_rate"],
        spm_rate=case["fim_spm_rate"],
        fragment_token=None if cut is None else "split",
        fragment_rate=case.get("fragment", case.get("fragment_rate")) or 0.0,
        unchanged_prefix=case.get("no_prefix"),
        **{f"{name}_token": name for name in Letters.special},
        sequential_draws=True,
    )
    assert not config.problems()
    sizes = case.get("sizes", [300, 40, 10])
    schema = text_schema(case["seq"], Letters.vocabulary_size)
    letters = Letters() if cut is None else Letters(split=cut)
    splits = config.build(tokenizer=letters, schema=schema, rows=Rows(*sizes), seed=case["seed"])
    compared = 0
    for name, dataset in zip(NAMES, splits, strict=True):
        prefix = f"{key}/{name}/"
        names = {full.removeprefix(prefix) for full in stored if full.startswith(prefix)}
        rows = [dataset[i] for i in range(len(stored[prefix + "tokens"]))] if names else []
        for theirs in names & set(LEAVES):
            np.testing.assert_array_equal(np.stack([row[LEAVES[theirs]] for row in rows]), stored[prefix + theirs])
            compared += 1
    assert compared


UNREAD = 0xE000
"""A character of Unicode's private area from which on each stands for the token of its number."""


class Pieces(Tokenizer):
    """The tokenizer behind the chats: a token for each character, and one for each of the longer entries."""

    identity, specials = "pieces", MappingProxyType({})

    def __init__(self, vocabulary: dict[str, int], case: dict[str, Any]):
        self.vocabulary_size, self.eod, self.pad = len(vocabulary), case["eod"], case["pad"]
        longer = sorted((re.escape(piece) for piece in vocabulary if len(piece) > 1), key=len, reverse=True)
        self._vocabulary, self._pattern = vocabulary, re.compile("|".join([*longer, "."]), re.DOTALL)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_spans(text)[0]

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        pieces = list(self._pattern.finditer(text))
        ids = np.array([self._id(piece[0]) for piece in pieces], np.int32)
        return ids, np.array([piece.span() for piece in pieces], np.int64).reshape(-1, 2)

    def _id(self, piece: str) -> int:
        return self._vocabulary[piece] if piece in self._vocabulary else ord(piece) - UNREAD


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"


def messages_of(conversation: Any) -> list[dict[str, str]]:
    """The messages of a line: as they are, or one whose content stands for token ids."""
    if all(isinstance(part, dict) for part in conversation):
        return [{**part, "content": content_of(part["content"])} for part in conversation]
    return [{"role": "assistant", "content": content_of(conversation)}]


def content_of(content: str | list[int]) -> str:
    return content if isinstance(content, str) else "".join(chr(UNREAD + number) for number in content)


@pytest.mark.parametrize("key", cases(CHATS))
def test_chats(key: str, tmp_path: Path) -> None:
    """Labels without loss are -100 or the pad token in Megatron-LM; here they are the tokens that follow."""
    case, arrays = CHATS[key]
    stored, file = load_arrays(arrays), FOLDER / "data" / "sft.jsonl"
    own = case.get("conversations") or []
    if own:
        file = tmp_path / "own.jsonl"
        file.write_text("".join(json.dumps({"messages": messages_of(talk)}) + "\n" for talk in own))
    default = case.get("prompt_format", "default") == "default"
    plain = "{{ messages[0].content }}" if own and not any(isinstance(part, dict) for part in own[0]) else PLAIN
    config = ChatConfig(
        paths=(str(file),),
        split="100,0,0",
        template=plain if default else case["prompt_format"],
        loss="all" if default else "answers",
        end_token="template",
        packing="lines",
        cut_long=True,
        mask_pad=True,
        pad_multiple=2 * case["cp"] if case.get("cp", 1) > 1 else 1,
        isolate_padding=False,
        cache_dir=str(tmp_path),
    )
    assert not config.problems()
    tokenizer = Pieces(load_json("data/sft_vocab.json"), case)
    schema, rows = text_schema(case["seq"], tokenizer.vocabulary_size), Rows(case["len_dataset"])
    dataset = config.build(tokenizer=tokenizer, schema=schema, rows=rows, seed=1).train
    assert len(dataset) == case["len_dataset"]
    expected = {name.removeprefix(f"{key}/"): values for name, values in stored.items() if name.startswith(f"{key}/")}
    assert expected.keys() & LEAVES.keys()
    for number in range(case["n"]):
        row = dataset[number]
        for theirs, ours in ((theirs, ours) for theirs, ours in LEAVES.items() if theirs in expected):
            values = expected[theirs][number]
            if theirs == "labels":
                assert not (expected["loss_mask"][number] * (values == -100)).any()
                values = np.where(values == -100, row["labels"], values)
            np.testing.assert_array_equal(row[ours], values, err_msg=f"{theirs} of row {number}")
        borders = [0, *(np.flatnonzero(np.diff(row["segment_ids"])) + 1).tolist(), case["seq"]]
        if "cu_seqlens" in expected:
            padded = np.full_like(expected["cu_seqlens"][number], case["seq"])
            padded[: len(borders)] = borders
            np.testing.assert_array_equal(padded, expected["cu_seqlens"][number])
        assert max(np.diff(borders)) == expected.get("max_seqlen", {number: max(np.diff(borders))})[number]
