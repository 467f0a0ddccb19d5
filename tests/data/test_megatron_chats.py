"""Rows of conversations beside those of Megatron-LM's SFTDataset, which make_megatron_chats.py recorded."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from megajax.data.chat.config import ChatConfig
from megajax.data.rows.splits import Rows
from megajax.interop.megatron.flags.data import FORMATS
from megajax.models.decoder.config import text_schema
from megajax.tokenizers.chat_template import named_tokens
from megajax.tokenizers.config import HuggingFaceTokenizerConfig

FOLDER = Path(__file__).parent / "megatron_chats"
RECORD = json.loads((FOLDER / "cases.json").read_text())
LEAVES = {"tokens": "tokens", "labels": "labels", "loss_mask": "loss_mask", "position_ids": "positions"}


def test_the_recorded_rows_are_those_of_the_script() -> None:
    assert hashlib.sha256((FOLDER / "rows.npz").read_bytes()).hexdigest() == RECORD["rows_sha256"]


@pytest.mark.parametrize("number", range(len(RECORD["cases"])))
def test_rows_equal_those_of_megatron(number: int, tmp_path: Path) -> None:
    case = RECORD["cases"][number]
    with np.load(FOLDER / "rows.npz") as stored:
        expected = {name.partition("/")[2]: stored[name] for name in stored if name.startswith(f"{number}/")}
    assert set(expected) == {*LEAVES, "cu_seqlens", "max_seqlen"}
    folder = FOLDER / case.get("tokenizer", "plain")
    megatron = case["format"]
    config = ChatConfig(
        paths=(str(FOLDER / "chats.jsonl"),),
        split="100,0,0",
        template=str(folder / "tokenizer_config.json") if megatron == "default" else megatron,
        # Megatron-LM 0.19.2 has a loss on the questions of `identity`; the version of the flags has none.
        loss="all" if megatron in ("default", "identity") else "answers",
        end_token="template",
        pad_token=FORMATS.get(megatron, named_tokens(folder / "tokenizer_config.json").get("pad_token", "</s>")),
        packing="lines",
        cut_long=True,
        mask_pad=True,
        pad_multiple=2 * case["context"] if case["context"] > 1 else 1,
        isolate_padding=False,
        cache_dir=str(tmp_path),
    )
    tokenizer, length = HuggingFaceTokenizerConfig(path=str(folder)).build(), case["length"]
    schema = text_schema(length, tokenizer.vocabulary_size)
    dataset = config.build(tokenizer=tokenizer, schema=schema, rows=Rows(len(expected["tokens"])), seed=1).train
    for place in range(len(dataset)):
        row = dataset[place]
        for theirs, ours in LEAVES.items():
            values = expected[theirs][place]
            if theirs == "labels":
                values = np.where(values == -100, row["labels"], values)
            np.testing.assert_array_equal(row[ours], values, err_msg=f"{theirs} of row {place}")
        borders = [0, *(np.flatnonzero(np.diff(row["segment_ids"])) + 1).tolist(), length]
        padded = np.full_like(expected["cu_seqlens"][place], length)
        padded[: len(borders)] = borders
        np.testing.assert_array_equal(padded, expected["cu_seqlens"][place])
        assert max(np.diff(borders)) == expected["max_seqlen"][place]
