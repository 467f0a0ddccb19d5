"""Small vocabularies made by the tests, and GPT-2's real one where it is available."""

import os
from pathlib import Path

import pytest

TEXT = (
    """In the beginning the Universe was created. This has made a lot of people very angry, it's said; they'll
say   we've had 1234567 of them.\n\n  Grün ist die Farbe - 猫が好き, 猫 - of \t tabs and don't.\n"""
    * 3
)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    folder = Path(os.environ.get("MEGAJAX_DATA_DIR", Path(__file__).parents[2] / "../shared/data"))
    if not (folder / "gpt2_bpe").is_dir():
        pytest.skip(f"no GPT-2 vocabulary in {folder}: set MEGAJAX_DATA_DIR to the folder with gpt2_bpe/")
    return folder


@pytest.fixture(scope="session")
def trained():
    """A byte-level BPE of 400 tokens by Hugging Face's trainer: the independent implementation."""
    tokenizers = pytest.importorskip("tokenizers")
    trainer = tokenizers.ByteLevelBPETokenizer()
    # The special token comes first, so ids and merge ranks differ, unlike in GPT-2's own files.
    trainer.train_from_iterator([TEXT], vocab_size=400, min_frequency=1, special_tokens=["<|endoftext|>"])
    return trainer


@pytest.fixture(scope="session")
def small_bpe(trained, tmp_path_factory) -> tuple[str, str]:
    """Paths of its vocab.json and merges.txt."""
    folder = tmp_path_factory.mktemp("bpe")
    trained.save_model(str(folder))
    return str(folder / "vocab.json"), str(folder / "merges.txt")
