"""Rows with their middle at the end, and of chats, against what Megatron-LM computed: every case in the folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from megatron_cases import FOLDER, cases, load_arrays, load_json

from megajax.data.config import FillInMiddleConfig, Rows
from megajax.data.splits import NAMES
from megajax.models.config import text_schema

META = load_json("data/masked_fim_sft_meta.json")
LEAVES = {"tokens": "tokens", "labels": "labels", "loss_mask": "loss_mask", "position_ids": "positions"}


class Letters:
    """The tokenizer behind the FIM samples: id i is the character 256 + i, but four ids have no text."""

    vocabulary_size, eod, pad, identity = 512, 511, 503, "letters"
    special: ClassVar = {"prefix": 500, "middle": 501, "suffix": 502}

    def encode(self, text: str) -> np.ndarray:
        ids = [self.special[text]] if text in self.special else [ord(letter) - 256 for letter in text]
        return np.array(ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return "".join(chr(256 + int(number)) for number in ids if not 500 <= number <= 503)


def split_token(case: dict[str, Any]) -> str | None:
    """The token at which documents are cut, as text: the case has it as an id or as a character."""
    split = case.get("split_sample")
    return chr(256 + split) if isinstance(split, int) else split


@pytest.mark.parametrize("key", cases(key for key in META if key.startswith("fim/")))
def test_fim(key: str, tmp_path: Path) -> None:
    case, stored = META[key], load_arrays("data/masked_fim_sft.npz")
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
