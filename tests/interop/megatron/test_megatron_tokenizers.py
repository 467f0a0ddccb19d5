"""--tokenizer-type and its flags."""

import pytest
from flag_lines import TIKTOKEN, config, convert_line, problem

from megajax.tokenizers.config import (
    HuggingFaceTokenizerConfig,
    MultimodalTokenizerConfig,
    NullTokenizerConfig,
    SentencePieceTokenizerConfig,
    TiktokenTokenizerConfig,
    WordPieceTokenizerConfig,
)

MODEL = "--vocab-size 999 --tokenizer-model m --tokenizer-type"


@pytest.mark.parametrize(
    ("flags", "tokenizer", "size"),
    [
        (f"{MODEL} SentencePieceTokenizer", SentencePieceTokenizerConfig(path="m"), 999),
        (f"{MODEL} GPTSentencePieceTokenizer", SentencePieceTokenizerConfig(path="m"), 999),
        (f"{MODEL} Llama2Tokenizer", SentencePieceTokenizerConfig(path="m"), 999),
        (f"{MODEL} SentencePieceTokenizer --tokenizer-sentencepiece-legacy --special-tokens <CLS> <EOD>",
         SentencePieceTokenizerConfig(path="m", special_tokens=("<CLS>", "<EOD>")), 999),
        (f"{MODEL} HuggingFaceTokenizer", HuggingFaceTokenizerConfig(path="m"), 999),
        (f"{MODEL} SFTTokenizer", HuggingFaceTokenizerConfig(path="m"), 999),
        (TIKTOKEN, TiktokenTokenizerConfig(path="t.json", vocabulary_size=5000), 5000),
        ("--without vocab-size --tokenizer-type TikTokenizer --tokenizer-model t.json",
         TiktokenTokenizerConfig(path="t.json", vocabulary_size=1 << 17), 1 << 17),
        (f"{MODEL} MultimodalTokenizer --special-tokens <image> <img>",
         MultimodalTokenizerConfig(base=HuggingFaceTokenizerConfig(path="m"), added={"special_1": "<img>"}), 1001),
        ("--tokenizer-type NullMultimodalTokenizer",
         MultimodalTokenizerConfig(base=NullTokenizerConfig(vocabulary_size=256)), 257),
        ("--tokenizer-type BertWordPieceCase --vocab-file v.txt",
         WordPieceTokenizerConfig(vocabulary="v.txt", lower=False, extra_ids=100), 255),
    ],
)  # fmt: skip
def test_each_type_is_a_config(flags, tokenizer, size):
    cfg = config(flags)
    assert cfg.tokenizer == tokenizer and cfg.model.vocabulary_size == size


def test_the_tokens_of_a_vocabulary_file_are_counted(tmp_path):
    pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
    file = tmp_path / "vocab.txt"
    file.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n")
    flags = f"--without vocab-size --tokenizer-type BertWordPieceLowerCase --vocab-file {file}"
    assert config(flags).model.vocabulary_size == 8
    assert config(f"{flags} --vocab-extra-ids 100").model.vocabulary_size == 108
    assert config(flags.replace("LowerCase", "Case")).model.vocabulary_size == 108


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tokenizer-type Other", "--tokenizer-type: expected one of GPT2BPETokenizer, HuggingFaceTokenizer"),
        ("--tokenizer-type Llama2Tokenizer", "--tokenizer-model: must be given with --tokenizer-type Llama2Tokenizer"),
        (f"{MODEL} GPTSentencePieceTokenizer --without vocab-size", "--vocab-size: must be given: m can't be read"),
        ("--tokenizer-type BertWordPieceCase", "--vocab-file: must be given with --tokenizer-type BertWordPieceCase"),
        (f"{MODEL} Llama2Tokenizer --special-tokens <a>", "needs --tokenizer-sentencepiece-legacy"),
        (f"{TIKTOKEN} --tiktoken-pattern v3", "--tiktoken-pattern: expected v1 or v2, got v3"),
        ("--without vocab-size", "--vocab-size: must be given"),
    ],
)
def test_missing_and_invalid_flags(flags, message):
    assert message in problem(flags)


def test_a_different_image_token_is_reported():
    remarks = dict(convert_line("--tokenizer-type NullMultimodalTokenizer").remarks)
    assert "<image> has the last id" in remarks["--tokenizer-type"]
