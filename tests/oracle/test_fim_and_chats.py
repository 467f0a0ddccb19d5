"""Fill-in-the-middle rows and chats against Megatron-LM's: every case in the folder."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pytest
from megatron_cases import FOLDER, cases, load_arrays, load_json, unsupported

from megajax.data.chat.config import ChatConfig
from megajax.data.rows.splits import NAMES, Rows
from megajax.data.text.config import FillInMiddleConfig
from megajax.models.decoder.config import text_schema
from megajax.tokenizers.base import Tokenizer

META = load_json("data/masked_fim_sft_meta.json")
CHATS = {key: (case, "data/masked_fim_sft.npz") for key, case in META.items() if key.startswith("sft/")}
"""Cases of chats, and the file of their arrays."""
for path in sorted((FOLDER.parent / "oracle3" / "sft").glob("*.json")):
    CHATS |= {key: (case, str(path.with_suffix(".npz"))) for key, case in json.loads(path.read_text()).items()}
LEAVES = {"tokens": "tokens", "labels": "labels", "loss_mask": "loss_mask", "position_ids": "positions"}


class Letters:
    """The tokenizer behind the FIM samples: id i is the character 256 + i, but four ids have no text."""

    vocabulary_size, eod, pad, identity = 512, 511, 503, "letters"
    special: ClassVar = {"prefix": 500, "middle": 501, "suffix": 502}

    def token_id(self, token: str) -> int:
        return self.special[token] if token in self.special else ord(token) - 256

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(letter) - 256 for letter in text], np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return "".join(chr(256 + int(number)) for number in ids if not 500 <= number <= 503)


def split_token(case: dict[str, Any]) -> str | None:
    """The token at which documents are cut, as text: the case has it as an id or as a character."""
    split = case.get("split_sample")
    return chr(256 + split) if isinstance(split, int) else split


@pytest.mark.parametrize("key", cases(key for key in META if key.startswith("fim/")))
def test_fim(key: str, tmp_path: Path) -> None:
    case, stored = META[key], load_arrays("data/masked_fim_sft.npz")
    if case["order"] != "0..n-1":
        unsupported(f"one generator for rows in the order {case['order']}")
    letter = case["corpus"].removeprefix("corpus")
    config = FillInMiddleConfig(
        paths=(str(min((FOLDER / "data").glob(f"corpus{letter}*.idx")).with_suffix("")),),
        split=case.get("split", "80,15,5"),
        cache_dir=str(tmp_path),
        rate=case["fim_rate"],
        spm_rate=case["fim_spm_rate"],
        fragment_token=split_token(case),
        fragment_rate=case["fragment"] or 0.0,
        unchanged_prefix=case["no_prefix"],
        **{f"{name}_token": name for name in Letters.special},
        sequential_draws=True,
    )
    assert not config.problems()
    sizes = case.get("sizes", [300, 40, 10])
    schema = text_schema(case["seq"], Letters.vocabulary_size)
    splits = config.build(tokenizer=Letters(), schema=schema, rows=Rows(*sizes), seed=case["seed"])
    compared = 0
    for name, dataset in zip(NAMES, splits, strict=True):
        prefix = f"{key}/{name}/"
        names = {full.removeprefix(prefix) for full in stored if full.startswith(prefix)}
        assert names <= set(LEAVES), names
        if not names:
            continue
        rows = [dataset[i] for i in range(len(stored[prefix + "tokens"]))]
        for theirs in names:
            np.testing.assert_array_equal(np.stack([row[LEAVES[theirs]] for row in rows]), stored[prefix + theirs])
            compared += 1
    assert compared


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
        ids = np.array([self._vocabulary[piece[0]] for piece in pieces], np.int32)
        return ids, np.array([piece.span() for piece in pieces], np.int64).reshape(-1, 2)


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"


@pytest.mark.parametrize("key", cases(CHATS))
def test_chats(key: str, tmp_path: Path) -> None:
    """Labels without loss are -100 or the pad token in Megatron-LM; here they are the tokens that follow."""
    case, arrays = CHATS[key]
    stored = load_arrays(arrays)
    default, file = case["prompt_format"] == "default", FOLDER / "data" / "sft.jsonl"
    if case["conversations"]:
        file = tmp_path / "own.jsonl"
        file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in case["conversations"]))
    config = ChatConfig(
        paths=(str(file),),
        split="100,0,0",
        template=PLAIN if default else case["prompt_format"],
        loss="all" if default else "answers",
        end_token="template",
        packing="lines",
        cut_long=True,
        mask_pad=True,
        pad_multiple=2 * case["cp"] if case["cp"] > 1 else 1,
        isolate_padding=False,
        cache_dir=str(tmp_path),
    )
    assert not config.problems()
    tokenizer = Pieces(load_json("data/sft_vocab.json"), case)
    schema, rows = text_schema(case["seq"], tokenizer.vocabulary_size), Rows(case["len_dataset"])
    dataset = config.build(tokenizer=tokenizer, schema=schema, rows=rows, seed=1).train
    assert len(dataset) == case["len_dataset"]
    expected = {name.removeprefix(f"{key}/"): values for name, values in stored.items() if name.startswith(f"{key}/")}
    assert set(expected) == {*LEAVES, "cu_seqlens", "max_seqlen"}
    for number in range(case["n"]):
        row = dataset[number]
        for theirs, ours in LEAVES.items():
            values = expected[theirs][number]
            if theirs == "labels":
                assert not (expected["loss_mask"][number] * (values == -100)).any()
                values = np.where(values == -100, row["labels"], values)
            np.testing.assert_array_equal(row[ours], values, err_msg=f"{theirs} of row {number}")
        borders = [0, *(np.flatnonzero(np.diff(row["segment_ids"])) + 1).tolist(), case["seq"]]
        padded = np.full_like(expected["cu_seqlens"][number], case["seq"])
        padded[: len(borders)] = borders
        np.testing.assert_array_equal(padded, expected["cu_seqlens"][number])
        assert max(np.diff(borders)) == expected["max_seqlen"][number]
