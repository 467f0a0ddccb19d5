"""Our tokenizers as tokenizer.json: the tokenizers library, which transformers uses, gives the same ids and texts."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from user_errors import user_error

from megajax.config.read_limits import OverBudget
from megajax.tokenizers.config import (
    ByteTokenizerConfig,
    GPT2TokenizerConfig,
    HuggingFaceTokenizerConfig,
    MultimodalTokenizerConfig,
    NullTokenizerConfig,
    SentencePieceTokenizerConfig,
    WordPieceTokenizerConfig,
)
from megajax.tokenizers.sentencepiece import engine_of
from megajax.tokenizers.tokenizer_files import copy_files, files_of, original_files, tokenizer_config
from tests.tokenizers.hard_texts import TEXTS, WORDS, train_sentencepiece

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
pytest.importorskip("tiktoken", reason="needs the extra `tokenizers`")

PIECES = "the quick<s></s><unk><pad><0x41> @@x<mask> \u2581 \t\n\u00a0brown'don't12!é猫🙂"


def texts() -> list[str]:
    draw = random.Random(0)
    mixed = ["".join(draw.choices([*PIECES, *WORDS, "<s>", "<0x41>", "@@", "<mask>", "  "], k=12)) for _ in range(200)]
    return [*TEXTS[:-1], *mixed]


@pytest.fixture(scope="module")
def unigram(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model."""
    path, draw = tmp_path_factory.mktemp("models") / "unigram.model", random.Random(0)
    text = [" ".join(draw.choices(WORDS, k=8)) for _ in range(200)]
    train_sentencepiece(path, text, model_type="unigram", vocab_size=90, pad_id=3, character_coverage=1.0)
    return path


def demand_same(config: Any, folder: Path) -> None:
    """The library has the ids of our tokenizer, and so has ours when it reads the files."""
    tokenizer, folder = config.build(), folder / "files"
    folder.mkdir(exist_ok=True)
    for name, content in files_of(config, tokenizer).items():
        (folder / name).write_bytes(content)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    engine = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    engine.encode_special_tokens = settings["split_special_tokens"]
    again = tokenizer_config([path.name for path in folder.iterdir()], folder, None, folder).build()
    first = tokenizer.encode("").tolist()
    for text in texts():
        ids = tokenizer.encode(text).tolist()
        assert first + engine.encode(text, add_special_tokens=False).ids == ids, text
        assert first + again.encode(text).tolist() == ids, text
        assert (again.vocabulary_size, again.eod) == (tokenizer.vocabulary_size, tokenizer.eod)
    assert engine.token_to_id(settings["eos_token"]) == tokenizer.eod
    assert engine.encode("the fox").ids[: len(first)] == first


def test_files_of_no_class_are_read_as_their_own_formats(unigram, small_bpe, tmp_path) -> None:
    (tmp_path / "spiece.model").write_bytes(unigram.read_bytes())

    def of(*present: str, **settings: Any) -> Any:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return tokenizer_config(present, tmp_path, None, tmp_path)

    assert of("spiece.model") == SentencePieceTokenizerConfig(path=f"{tmp_path}/spiece.model")
    files = {"vocabulary": f"{tmp_path}/vocab.json", "merges": f"{tmp_path}/merges.txt"}
    assert of("vocab.json", "merges.txt") == GPT2TokenizerConfig(**files)
    assert of("vocab.json") == NullTokenizerConfig(vocabulary_size=1)
    for count in (10**15, -1, "many"):
        with user_error():
            of("spiece.model", tokenizer_class="T5Tokenizer", extra_ids=count).build()
    (tmp_path / "spiece.model").write_bytes(unigram.read_bytes()[:-3])
    with user_error():
        of("spiece.model", tokenizer_class="T5Tokenizer").build()
    hostile = {"0": {"content": "<unk>"}, "9" * 5000: {"content": "<a>"}, "x": None}
    (tmp_path / "spiece.model").write_bytes(unigram.read_bytes())
    assert of("spiece.model", tokenizer_class="T5Tokenizer", added_tokens_decoder=hostile).build().vocabulary_size


def test_a_file_too_large_for_every_reader_is_not_copied(tmp_path) -> None:
    (tmp_path / "to").mkdir()
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**29 + 1)
    with pytest.raises(OverBudget, match=r"tokenizer\.json"):
        copy_files(tmp_path, tmp_path / "to")


def test_byte_pairs_and_bytes(small_bpe, tmp_path) -> None:
    vocabulary, merges = small_bpe
    demand_same(GPT2TokenizerConfig(vocabulary=vocabulary, merges=merges), tmp_path)
    demand_same(ByteTokenizerConfig(), tmp_path)
    demand_same(MultimodalTokenizerConfig(base=ByteTokenizerConfig(), added={"image_start": "<img>"}), tmp_path)


def test_a_tokenizer_of_the_library_keeps_its_files(trained, tmp_path) -> None:
    (tmp_path / "theirs").mkdir()
    path = tmp_path / "theirs/tokenizer.json"
    trained.save(str(path))
    (tmp_path / "theirs/chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "theirs/generation_config.json").write_text("{}")  # of a model
    config = HuggingFaceTokenizerConfig(path=str(path))
    files = files_of(config, config.build())
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert files["tokenizer.json"] == path.read_bytes()
    demand_same(config, tmp_path)
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "!", "model_max_length": 9}
    (tmp_path / "theirs/tokenizer_config.json").write_text(json.dumps(settings))
    assert files_of(config, config.build())["tokenizer_config.json"] == json.dumps(settings).encode()
    config = HuggingFaceTokenizerConfig(path=str(path), eod="<|endoftext|>", special_tokens_in_text=False)
    expected = settings | {"eos_token": "<|endoftext|>", "split_special_tokens": True}
    assert json.loads(files_of(config, config.build())["tokenizer_config.json"]) == expected


def test_other_tokenizers_are_refused_and_keep_their_files(unigram, tmp_path) -> None:
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "The"]))
    pieces = SentencePieceTokenizerConfig(path=str(unigram))
    words = WordPieceTokenizerConfig(vocabulary=str(vocabulary), lower=False)
    for config in (pieces, words, NullTokenizerConfig(vocabulary_size=9), MultimodalTokenizerConfig(base=pieces)):
        with user_error():
            files_of(config, config.build())
    assert original_files(pieces) == {"tokenizer.model": unigram.read_bytes()}
    (tmp_path / "copies").mkdir()
    for name, content in original_files(words).items():
        (tmp_path / "copies" / name).write_bytes(content)
    again = tokenizer_config(["vocab.txt"], tmp_path, None, tmp_path / "copies")
    assert again == words
    with user_error("a.model"):
        engine_of("a.model", unigram.read_bytes()[:99])
