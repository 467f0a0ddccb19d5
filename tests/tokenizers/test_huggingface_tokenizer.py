"""tokenizer.json files."""

import json
from pathlib import Path

import pytest
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.tokenizers.config import HuggingFaceTokenizerConfig
from tests.tokenizers.hard_texts import NOT_UTF8, TEXTS, encoded, safe_to_cut

pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")


@pytest.fixture
def path(trained, tmp_path):
    """The small BPE as tokenizer.json, with truncation and padding turned on in the file."""
    file = tmp_path / "tokenizer.json"
    trained.save(str(file))
    content = json.loads(file.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    file.write_text(json.dumps(content))
    return str(file)


def test_hard_texts_equal_the_library(path, trained):
    tokenizer = HuggingFaceTokenizerConfig(path=path).build()
    for data in (*map(encoded, TEXTS), *NOT_UTF8):
        text = data.decode("utf-8", errors="replace")
        ids = tokenizer.encode_bytes(data).tolist()
        assert ids == trained.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == trained.decode(ids, skip_special_tokens=False)
    assert safe_to_cut(tokenizer, b"the quick  brown\n fox")
    assert (tokenizer.vocabulary_size, tokenizer.eod) == (
        trained.get_vocab_size(),
        trained.token_to_id("<|endoftext|>"),
    )


def test_special_tokens_by_role(path):
    content = json.loads(Path(path).read_text())
    first = content["added_tokens"][0]
    names = ["<s>", "[MASK]", "<pad>", "<image>", "<extra_id_0>", "<extra_id_1>", "<extra_id_3>"]
    size = len(content["model"]["vocab"])
    content["added_tokens"] += [{**first, "id": size + place, "content": name} for place, name in enumerate(names)]
    Path(path).write_text(json.dumps(content))
    tokenizer = HuggingFaceTokenizerConfig(path=path).build()
    assert tokenizer.specials == {"bos": size, "eos": tokenizer.eod, "mask": size + 1, "image": size + 3}
    assert tokenizer.pad == size + 2 and tokenizer.sentinels == (size + 4, size + 5)
    assert tokenizer.continues is None and tokenizer.token_id("<extra_id_3>") == size + 6


def test_words_of_a_wordpiece(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "un": 3, "##able": 4, "##s": 5, "[EOS]": 6}
    library = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizerConfig(path=str(tmp_path)).build()
    assert tokenizer.continues.nonzero()[0].tolist() == [4, 5]
    assert tokenizer.specials == {"cls": 1, "sep": 2, "eos": 6}


def test_usual_names(path, tmp_path):
    content = json.loads(Path(path).read_text().replace("<|endoftext|>", "</s>"))
    file = tmp_path / "other.json"
    file.write_text(json.dumps(content))
    assert HuggingFaceTokenizerConfig(path=str(file)).build().eod == content["model"]["vocab"]["</s>"]
    with_eod = HuggingFaceTokenizerConfig(path=str(file), eod="a").build()
    assert with_eod.eod == content["model"]["vocab"]["a"]
    file.write_text(json.dumps(content).replace("</s>", "<other>"))
    with user_error():
        HuggingFaceTokenizerConfig(path=str(file)).build()
    with user_error():
        HuggingFaceTokenizerConfig(path=str(file), eod="<gone>").build()


def test_bad_files(tmp_path):
    with user_error():
        HuggingFaceTokenizerConfig(path=str(tmp_path / "gone.json")).build()
    (tmp_path / "bad.json").write_text('{"model": 1}')
    with user_error():
        HuggingFaceTokenizerConfig(path=str(tmp_path / "bad.json")).build()


@pytest.mark.parametrize("kind", ["vocabulary", "added", "both added", "repeated"])
def test_two_tokens_with_one_id_are_named(path, tmp_path, kind):
    content = json.loads(Path(path).read_text())
    vocabulary, added = content["model"]["vocab"], content["added_tokens"]
    expected = "the tokens 'a' and 'b' both have the id 7"
    if kind == "vocabulary":
        vocabulary |= {token: 100_000 + n for n, (token, number) in enumerate(vocabulary.items()) if number == 7}
        vocabulary |= {"a": 7, "b": 7}
    elif kind == "added":
        duplicate = next(token for token, number in vocabulary.items() if number == 9)
        added.append({**added[0], "content": "<x>", "id": 9})
        expected = f"the tokens {duplicate!r} and '<x>' both have the id 9"
    elif kind == "both added":
        added += [{**added[0], "content": text, "id": 90_000} for text in ("<x>", "<y>")]
        expected = "the tokens '<x>' and '<y>' both have the id 90000"
    text = json.dumps(content)
    if kind == "repeated":
        text, expected = text.replace('"vocab": {', '"vocab": {"a": 3, ', 1), "a is given twice"
    Path(path).write_text(text)
    with pytest.raises(UserError) as error:
        HuggingFaceTokenizerConfig(path=path).build()
    assert str(error.value).startswith(f"{path}: {expected}. ")
