"""Our tokenizers as tokenizer.json: the tokenizers library, which transformers uses, gives the same ids and texts."""

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest

from megajax.config.errors import UserError
from megajax.config.read_limits import OverBudget
from megajax.interop import tokenizer_json as module
from megajax.interop.tokenizer_files import copy_files, files_of, tokenizer_config
from megajax.interop.tokenizer_json import parsed
from megajax.tokenizers.config import (
    ByteTokenizerConfig,
    GPT2TokenizerConfig,
    HuggingFaceTokenizerConfig,
    MultimodalTokenizerConfig,
    NullTokenizerConfig,
    SentencePieceTokenizerConfig,
    TiktokenTokenizerConfig,
    WordPieceTokenizerConfig,
)
from tests.tokenizers.hard_texts import TEXTS, WORDS

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
sentencepiece = pytest.importorskip("sentencepiece", reason="needs the extra `tokenizers`")
pytest.importorskip("tiktoken", reason="needs the extra `tokenizers`")

IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
MODELS: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram", "vocab_size": 90, "pad_id": 3},
    "bpe": {"model_type": "bpe", "vocab_size": 90},
    "like llama": {"model_type": "bpe", "vocab_size": 340, "byte_fallback": True, **IDENTITY},
    "like gemma": {"model_type": "bpe", "vocab_size": 340, "byte_fallback": True, **IDENTITY, "add_dummy_prefix": False,
                   "user_defined_symbols": ["@@", "<mask>"]},
    "unigram with bytes": {"model_type": "unigram", "vocab_size": 345, "byte_fallback": True,
                           "user_defined_symbols": ["@@", "<mask>"]},
}  # fmt: skip
PIECES = "the quick<s></s><unk><pad><0x41> @@x<mask> \u2581 \t\n\u00a0brown'don't12!é猫🙂"


def texts() -> list[str]:
    draw = random.Random(0)
    mixed = ["".join(draw.choices([*PIECES, *WORDS, "<s>", "<0x41>", "@@", "<mask>", "  "], k=12)) for _ in range(200)]
    return [*TEXTS[:-1], *mixed, *module.SAMPLES, module.NAMES]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name -> path of a SentencePiece model."""
    folder, draw = tmp_path_factory.mktemp("models"), random.Random(0)
    text = [" ".join(draw.choices(WORDS, k=8)) for _ in range(200)]
    shared = {"hard_vocab_limit": False, "character_coverage": 1.0, "minloglevel": 3}
    for name, options in MODELS.items():
        with (folder / f"{name}.model").open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(text), model_writer=file, **shared, **options
            )
    return {name: str(folder / f"{name}.model") for name in MODELS}


def demand_same(config: Any, folder: Path, *, others: bool = False) -> None:
    """The library has the ids of our tokenizer, and so has ours when it reads the files.

    others: names of special tokens in a text that only transformers reads as special tokens.
    """
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
        if others and "<" in text:
            continue
        ids = tokenizer.encode(text).tolist()
        assert first + engine.encode(text, add_special_tokens=False).ids == ids, text
        assert first + again.encode(text).tolist() == ids, text
        assert (again.vocabulary_size, again.eod) == (tokenizer.vocabulary_size, tokenizer.eod)
    assert engine.token_to_id(settings["eos_token"]) == tokenizer.eod
    assert engine.encode("the fox").ids[: len(first)] == first


@pytest.mark.parametrize("name", MODELS)
def test_models_of_sentencepiece(models, tmp_path, name) -> None:
    demand_same(SentencePieceTokenizerConfig(path=models[name]), tmp_path)


def test_sentencepiece_with_more_tokens(models, tmp_path) -> None:
    demand_same(SentencePieceTokenizerConfig(path=models["like llama"], prepend_bos=True), tmp_path)
    added = SentencePieceTokenizerConfig(
        path=models["unigram"], special_tokens=("<CLS>", "<EOD>"), extra_ids=3, eod="<EOD>"
    )
    demand_same(added, tmp_path, others=True)
    engine = tokenizers.Tokenizer.from_file(str(tmp_path / "files/tokenizer.json"))
    text = "the<CLS>fox <extra_id_2> dogs<EOD>"
    assert engine.encode(text).ids == added.build().encode(text).tolist()


def test_tokens_added_beside_a_model_of_sentencepiece(models, tmp_path) -> None:
    model, count = models["unigram"], len(parsed(Path(models["unigram"]).read_bytes()).pieces)
    (tmp_path / "tokenizer.model").write_bytes(Path(model).read_bytes())

    def config(added: Any, **settings: Any) -> SentencePieceTokenizerConfig:
        (tmp_path / "added_tokens.json").write_text(json.dumps(added))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return tokenizer_config([path.name for path in tmp_path.iterdir()], tmp_path, None, tmp_path)

    decoder = {"0": {"content": "<unk>"}, str(count): {"content": "<|im_start|>"}}
    tokenizer = config({"<|im_end|>": count + 1}, added_tokens_decoder=decoder, eos_token="<|im_end|>").build()
    assert tokenizer.vocabulary_size == count + 2 and tokenizer.eod == count + 1
    assert tokenizer.encode("<|im_start|>the<|im_end|>").tolist()[0] == count
    assert tokenizer.encode("the<|im_end|>").tolist()[-1] == count + 1
    assert config({"<extra_id_0>": count + 1, "<extra_id_1>": count}, extra_ids=2).special_tokens == ()
    hostile = {"<a>": count, "<b>": "9" * 5000, "<c>": None}
    assert config(hostile, added_tokens_decoder=[]).special_tokens == ("<a>",)
    with pytest.raises(UserError, match=r"extra_ids=1000000000000000, at most 10,000"):
        config({}, extra_ids=10**15)
    assert config({"<a>": count}, extra_ids="many").extra_ids == 0
    for wrong in ({"<a>": count + 1}, {"<extra_id_0>": count, "<a>": count + 1}):
        with pytest.raises(UserError, match=rf"tokens added to its {count} pieces"):
            config(wrong, extra_ids=1)


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
    words = [b" the", b" quick", b"th", b"he", b" t", b"qu", "猫".encode(), b"aa", b"aaa", b"\n\n", b"the"]
    ranks = [*(bytes((value,)) for value in range(256)), *words]
    lines = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))
    (tmp_path / "ranks").write_text(lines)
    for pattern, in_text in (("v1", True), ("v2", False), (r"\w+|\W", True)):
        config = TiktokenTokenizerConfig(
            path=str(tmp_path / "ranks"), pattern=pattern, special_ids=9, special_tokens_in_text=in_text
        )
        demand_same(config, tmp_path)


def test_word_pieces(tmp_path) -> None:
    letters = sorted({letter for word in WORDS for letter in word.lower()})
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##own", *letters, *(f"##{one}" for one in letters)]
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    config = WordPieceTokenizerConfig(vocabulary=str(tmp_path / "vocab.txt"), extra_ids=2)
    demand_same(config, tmp_path)
    engine = tokenizers.Tokenizer.from_file(str(tmp_path / "files/tokenizer.json"))
    assert engine.encode("the", "own").tokens[:4] == ["[CLS]", "the", "[SEP]", "o"]


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


def test_tokenizers_without_a_tokenizer_json_form_are_refused(models, tmp_path, monkeypatch) -> None:
    config = NullTokenizerConfig(vocabulary_size=9)
    with pytest.raises(UserError, match="a NullTokenizerConfig has no equivalent in transformers"):
        files_of(config, config.build())
    config = SentencePieceTokenizerConfig(path=models["bpe"])
    monkeypatch.setattr(module, "_merges", lambda tokens, ids: [])
    with pytest.raises(UserError, match="the tokenizers library would encode '"):
        files_of(config, config.build())
    data = Path(models["bpe"]).read_bytes()
    for size in (1, len(data) // 3, len(data) - 1):
        with pytest.raises(UserError, match="not a SentencePiece model"):
            parsed(data[:size])
    with pytest.raises(UserError, match="not a SentencePiece model"):
        parsed(b"\xff" * 40)
