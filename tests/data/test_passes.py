"""A run that repeats its corpus reports the number of passes."""

from pathlib import Path

import pytest

from megajax.data.configs import BlendConfig, Rows
from megajax.data.preprocessing.preprocessing import preprocess_text
from megajax.models.configs import text_schema
from megajax.tokenizers.config import ByteTokenizerConfig


@pytest.mark.parametrize(("rows", "passes"), [(10, 1), (100, 2), (1000, 20), (None, 1)])
def test_passes_over_a_corpus_of_50_rows(rows: int | None, passes: int, tmp_path: Path) -> None:
    """40 documents of 40 bytes and an end token are 1640 tokens; 1000 rows of 32 and the last label take 32,001."""
    tokenizer = ByteTokenizerConfig().build()
    preprocess_text(["x" * 40] * 40, tmp_path / "corpus", tokenizer)
    config = BlendConfig(paths=(str(tmp_path / "corpus"),), split="1,0,0", cache_dir=str(tmp_path / "cache"))
    splits = config.build(tokenizer=tokenizer, schema=text_schema(32, 2**31), rows=Rows(rows), seed=1)
    assert splits.train.passes == passes
    assert len(splits.train) >= (rows or 49)
