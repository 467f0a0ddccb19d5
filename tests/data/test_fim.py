"""Fill-in-the-middle rows."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from token_files import EOD, write, write_random
from user_errors import user_error

from megajax.config.compose import problems_of
from megajax.data.rows.splits import Rows
from megajax.data.text.config import BlendConfig, FillInMiddleConfig
from megajax.models.decoder.config import text_schema

PREFIX, MIDDLE, SUFFIX = 100, 101, 102


class Letters:
    """Id i is the character 200 + i."""

    vocabulary_size, eod, pad, identity = 103, EOD, None, "letters"

    def token_id(self, token: str) -> int | None:
        return ord(token) - 200 if len(token) == 1 else None

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(letter) - 200 for letter in text], np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return "".join(chr(200 + int(number)) for number in ids)


def text(*ids: int) -> str:
    return Letters().decode(ids)


def fill(prefix: Path, **options: Any) -> FillInMiddleConfig:
    tokens = {"prefix_token": text(PREFIX), "middle_token": text(MIDDLE), "suffix_token": text(SUFFIX)}
    return FillInMiddleConfig(paths=(str(prefix),), cache_dir=f"{prefix}-cache", split="1", **tokens | options)


def build(config: BlendConfig, length: int = 32, rows: int | None = 400) -> Any:
    assert not problems_of(config)
    return config.build(tokenizer=Letters(), schema=text_schema(length, 103), rows=Rows(rows), seed=3).train


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write_random(tmp_path / "text", documents=200)


def reading_order(document: list[int]) -> list[int]:
    """A document before the reordering."""
    if PREFIX not in document:
        return document
    middle = document.index(MIDDLE)
    if document[1] == SUFFIX:
        # The border of prefix and middle is not marked: together they are one text.
        return document[middle + 1 :] + document[2:middle]
    suffix = document.index(SUFFIX)
    return document[1:suffix] + document[middle + 1 :] + document[suffix + 1 : middle]


def test_documents_hold_the_same_text_in_another_order(tmp_path: Path) -> None:
    documents = [[*range(n, n + 6), EOD] for n in range(0, 90, 6)]
    # The marks of one document are as many tokens as 15 rows of 7 lack.
    dataset = build(fill(write(tmp_path / "c", documents), spm_rate=0.5), 7 * 15 - 1, None)
    plain = build(BlendConfig(paths=(str(tmp_path / "c"),), split="1", cache_dir=str(tmp_path / "k")), 7 * 15 - 1, None)

    def split(values: np.ndarray) -> list[list[int]]:
        borders = [-1, *np.flatnonzero(values == EOD).tolist()]
        return [values[first + 1 : last].tolist() for first, last in pairwise(borders)]

    changed, before = (split(np.append(row["tokens"], row["labels"][-1])) for row in (dataset[0], plain[0]))
    orders = {tuple(set(document) & {PREFIX, MIDDLE, SUFFIX}) for document in changed}
    assert len(orders) == 2, "some are reordered, some are not"
    assert [reading_order(document) for document in changed] == before[: len(changed)]


def test_rows_are_a_pure_function_of_their_number(prefix: Path) -> None:
    dataset, repeated = build(fill(prefix)), build(fill(prefix))
    for row in (7, 399, 0, 7):
        for name, values in dataset[row].items():
            np.testing.assert_array_equal(values, repeated[row][name])
    reseeded = build(fill(prefix, seed=4))
    assert any((reseeded[row]["tokens"] != dataset[row]["tokens"]).any() for row in range(3))


def test_one_generator_for_all_rows_gives_the_same_rows_in_any_order(prefix: Path) -> None:
    config = fill(prefix, sequential_draws=True, rate=0.9)
    in_order = [row["tokens"] for row in map(build(config).__getitem__, range(400))]
    dataset = build(config)
    for row in (300, 5, 255, 256, 399, 299, 0):
        np.testing.assert_array_equal(dataset[row]["tokens"], in_order[row])
    apart = build(fill(prefix, rate=0.9))
    assert any((apart[row]["tokens"] != in_order[row]).any() for row in range(3))


def test_rates_of_zero_and_one(prefix: Path) -> None:
    plain = build(BlendConfig(paths=(str(prefix),), split="1", cache_dir=f"{prefix}-cache"))
    never, always = build(fill(prefix, rate=0.0)), build(fill(prefix, rate=1.0, spm_rate=1.0))
    text = np.append(plain[3]["tokens"], plain[3]["labels"][-1])
    remaining = [token for place, token in enumerate(text) if token != EOD or (place and text[place - 1] != EOD)]
    assert never[3]["tokens"].tolist()[: len(remaining) - 1] == remaining[: len(never[3]["tokens"])]
    for row in range(20):
        tokens = always[row]["tokens"]
        starts = np.flatnonzero(tokens == PREFIX)
        assert len(starts) and (tokens[starts[starts < 31] + 1] == SUFFIX).all()


def test_padding_has_no_loss(tmp_path: Path) -> None:
    """Empty documents and their end tokens are dropped, which leaves room at the end of the row."""
    row = build(fill(write(tmp_path / "c", [[1, 2, EOD, EOD, EOD, 3, 4]]), rate=0.0), 6, None)[0]
    assert row["tokens"].tolist() == [1, 2, EOD, 3, 4, 0]
    assert row["loss_mask"].tolist() == [1, 1, 1, 1, 0, 0]


def test_fragments_are_reordered_separately(tmp_path: Path) -> None:
    border = 50
    files = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    document = [token for file in files for token in (*file, border)][:-1]
    config = fill(
        write(tmp_path / "c", [document]), fragment_token=text(border), fragment_rate=1.0, rate=1.0,
        unchanged_prefix=text(5),
    )  # fmt: skip
    row = build(config, len(document) - 1, None)[0]
    tokens = [*row["tokens"].tolist(), int(row["labels"][-1])]
    second = tokens.index(border)
    assert tokens[0] == PREFIX and reading_order(tokens[:second]) == files[0]
    assert tokens[second + 1 : second + 5] == files[1], "it begins with the text of what is not reordered"


@pytest.mark.parametrize(
    ("options", "setting"), [({"rate": 1.5}, "rate"), ({"spm_rate": -1.0}, "spm_rate"),
                           ({"isolate_documents": True}, "isolate_documents")],
)  # fmt: skip
def test_invalid_settings(options: dict[str, Any], setting: str) -> None:
    assert [problem.setting for problem in problems_of(FillInMiddleConfig(paths=("a",), **options))] == [setting]


def test_a_token_that_the_tokenizer_lacks(prefix: Path) -> None:
    with user_error("data.middle_token"):
        build(fill(prefix, middle_token="<m>"))
