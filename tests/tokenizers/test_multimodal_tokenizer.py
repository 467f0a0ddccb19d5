"""Tokens for images beside any tokenizer."""

import json

import pytest
from user_errors import user_error

from megajax.config.errors import ConfigError
from megajax.tokenizers.config import (
    ByteTokenizerConfig,
    GPT2TokenizerConfig,
    HuggingFaceTokenizerConfig,
    MultimodalTokenizerConfig,
    NullTokenizerConfig,
)
from tests.tokenizers.hard_texts import NOT_UTF8, TEXTS, safe_to_cut


def test_text_of_a_token_becomes_its_id():
    tokenizer = MultimodalTokenizerConfig(base=ByteTokenizerConfig(), added={"image_start": "<img>"}).build()
    assert tokenizer.specials == {"image": 257, "image_start": 258} and tokenizer.vocabulary_size == 259
    assert (tokenizer.eod, tokenizer.pad, tokenizer.token_id("<img>")) == (256, None, 258)
    ids = tokenizer.encode("a<img><image><image>猫")
    assert ids.tolist() == [97, 258, 257, 257, *"猫".encode()]
    assert tokenizer.decode(ids) == "a<img><image><image>猫"
    assert tokenizer.encode("<image").tolist() == list(b"<image")
    assert tokenizer.encode("").tolist() == []


def test_text_without_special_tokens_equals_the_base_tokenizer():
    base, tokenizer = ByteTokenizerConfig().build(), MultimodalTokenizerConfig(base=ByteTokenizerConfig()).build()
    for text in TEXTS:
        if "<image>" not in text:
            assert tokenizer.encode(text).tolist() == base.encode(text).tolist()
    for data in NOT_UTF8:
        assert tokenizer.encode_bytes(data).tolist() == base.encode_bytes(data).tolist()


@pytest.mark.parametrize("added", [{}, {"tile": "<image>x"}, {"tile": "e><", "other": ">a<im"}])
def test_split_point_is_safe(added):
    tokenizer = MultimodalTokenizerConfig(base=ByteTokenizerConfig(), added=added).build()
    data = b"<image>a<image<image>x<<image>><image"
    assert safe_to_cut(tokenizer, data) and tokenizer.split_point(b"a b c d") == 7
    null = MultimodalTokenizerConfig(base=NullTokenizerConfig(vocabulary_size=9), image="<i>").build()
    assert safe_to_cut(null, b"1 2 <i> 3 <i> <i> 4") and null.split_point(b"1 2 <i> ") > 0


def test_a_token_of_the_vocabulary_keeps_its_id(trained, small_bpe, tmp_path):
    pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
    file = tmp_path / "tokenizer.json"
    trained.save(str(file))
    content = json.loads(file.read_text())
    size = trained.get_vocab_size()
    content["added_tokens"].append({**content["added_tokens"][0], "id": size, "content": "<image>"})
    file.write_text(json.dumps(content))
    base = HuggingFaceTokenizerConfig(path=str(file))
    tokenizer = MultimodalTokenizerConfig(base=base).build()
    assert tokenizer.specials["image"] == size == base.build().specials["image"]
    assert tokenizer.vocabulary_size == base.build().vocabulary_size == size + 1
    text = "In the<image> beginning <image>"
    assert tokenizer.encode(text).tolist() == base.build().encode(text).tolist()
    end = MultimodalTokenizerConfig(
        base=GPT2TokenizerConfig(vocabulary=small_bpe[0], merges=small_bpe[1]), added={"end": "<|endoftext|>"}
    ).build()
    assert end.specials["end"] == end.eod and end.specials["image"] == size and end.vocabulary_size == size + 1


def test_names_of_tokens():
    for image, added in (("", {}), ("an image", {}), ("<i>", {"x": "<i>"})):
        with user_error("special_tokens", kind=ConfigError):
            MultimodalTokenizerConfig(base=ByteTokenizerConfig(), image=image, added=added).build()
