"""Missing token files: the error names them and the command that writes them."""

import shlex
from pathlib import Path

import pytest

from megajax.config import UserError, load
from megajax.data.masked.config import MaskedSentencesConfig, PairsConfig
from megajax.data.preprocessing.missing_token_files import demand_files
from megajax.data.preprocessing.options import parse, tokenizer_options
from megajax.data.text.config import BlendConfig, MockConfig
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

GPT2 = GPT2TokenizerConfig(vocabulary="data/vocab.json", merges="data/merges.txt")


def refusal(data, tokenizer) -> str:
    with pytest.raises(UserError) as refused:
        demand_files(data, tokenizer)
    return str(refused.value)


def test_the_suggested_command_writes_the_missing_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = refusal(BlendConfig(paths=("data/corpus_text_document",)), GPT2)
    assert "data/corpus_text_document.bin, data/corpus_text_document.idx" in text and str(tmp_path) in text
    assert "tokenizer: no such file: data/vocab.json, data/merges.txt" in text
    line = next(line for line in text.splitlines() if "megajax.preprocess" in line)
    job, _ = parse(shlex.split(line)[3:])
    assert job.prefix == "data/corpus" and job.append_eod and job.tokenizer == GPT2


@pytest.mark.parametrize(
    ("name", "content", "data", "flags", "prefix", "stream"),
    [
        ("c.txt", "a", BlendConfig, "--append-eod", "data/c_text_document", ""),
        (
            "c.jsonl",
            '{"n": 1, "body": "a"}',
            BlendConfig,
            "--json-keys=body --append-eod",
            "data/c_body_document",
            "body",
        ),
        ("c.jsonl", '{"text": "a"}', MaskedSentencesConfig, "--split-sentences", "data/c_text_sentence", ""),
        ("c.parquet", "PAR1", BlendConfig, "--append-eod", "data/c_text_document", "text"),
        ("folder", None, BlendConfig, "--append-eod", "data/folder_text_document", ""),
        ("gone.txt", None, BlendConfig, "--append-eod", "data/gone_text_document", ""),
    ],
)
def test_text_is_to_be_preprocessed(tmp_path, monkeypatch, name, content, data, flags, prefix, stream):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    if content is not None:
        Path(name).write_text(content)
    text = refusal(data(paths=(name,)), ByteTokenizerConfig())
    stem = name.partition(".")[0]
    command = f"python -m megajax.preprocess --input {name} --output-prefix data/{stem} --tokenizer=byte {flags}"
    assert f"data.paths={name} is text" in text and command in text and f"--data.paths={prefix}" in text
    parse(shlex.split(command)[3:])
    assert ("StreamConfig" in text, "--data.text=body" in text) == (stream != "", stream == "body")


def test_conversations_are_no_text_to_preprocess(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"messages": []}')
    assert "--data.type=ChatConfig" in refusal(BlendConfig(paths=(f"{tmp_path}/c.jsonl",)), ByteTokenizerConfig())


def test_a_missing_model_says_the_command_that_gets_it(tmp_path, monkeypatch):
    """The command is that in the first lines of the config, or has a placeholder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    cfg = load("sft.py")
    command = "hf download meta-llama/Llama-3.1-8B-Instruct --local-dir models/Llama-3.1-8B-Instruct"
    assert command in refusal(cfg.data, cfg.tokenizer)
    for path, files in (("models/New", "New --local-dir models/New"), ("data/a.json", "NAME a.json --local-dir data")):
        text = refusal(MockConfig(), HuggingFaceTokenizerConfig(path=path))
        assert f"hf download ORGANIZATION/{files}" in text


def test_only_missing_files_are_named(tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"a_text_document{suffix}").touch()
    existing, absent = f"{tmp_path}/a_text_document", f"{tmp_path}/b_title_document"
    demand_files(BlendConfig(paths=(existing,)), GPT2)
    demand_files(MockConfig(), GPT2)
    text = refusal(BlendConfig(paths=("0.3", existing, "0.7", absent)), ByteTokenizerConfig())
    assert f"{existing}.bin" not in text and f"{absent}.bin" in text and "tokenizer:" not in text
    assert f"--output-prefix {tmp_path}/b --tokenizer=byte --json-keys=title --append-eod" in text
    assert "PREFIX.bin and PREFIX.idx" in refusal(BlendConfig(train_paths=(f"{tmp_path}/c",)), ByteTokenizerConfig())


def test_tokenizer_options_round_trip(tmp_path):
    (tmp_path / "tokenizer.json").touch()
    for config in (
        GPT2,
        ByteTokenizerConfig(),
        NullTokenizerConfig(vocabulary_size=9),
        GPT2TokenizerConfig(vocabulary="v", merges="m", eod="</s>"),
        HuggingFaceTokenizerConfig(path=str(tmp_path / "tokenizer.json"), eod="</s>"),
        WordPieceTokenizerConfig(vocabulary="v"),
        WordPieceTokenizerConfig(vocabulary="v", lower=False, extra_ids=9),
        SentencePieceTokenizerConfig(path="m.model", special_tokens=("<a>", "<b>"), prepend_bos=True, eod="<a>"),
        TiktokenTokenizerConfig(path="r.json", pattern="v1", vocabulary_size=5000, special_tokens_in_text=False),
    ):
        arguments = ["--input=x", "--output-prefix=y", *tokenizer_options(config)]
        assert parse(arguments)[0].tokenizer == config


def test_both_files_of_pairs(tmp_path):
    text = refusal(PairsConfig(paths=(f"{tmp_path}/a",), keys=("de", "en")), ByteTokenizerConfig())
    assert f"{tmp_path}/a_de_document.bin" in text and f"{tmp_path}/a_en_document.idx" in text
    assert f"--output-prefix {tmp_path}/a --tokenizer=byte --json-keys de en --pairs" in text


def test_the_tokenizer_below_image_tokens(tmp_path):
    tokenizer = MultimodalTokenizerConfig(base=SentencePieceTokenizerConfig(path=f"{tmp_path}/a.model"))
    text = refusal(BlendConfig(paths=(f"{tmp_path}/b_text_document",)), tokenizer)
    assert f"--tokenizer=sentencepiece --vocab-file={tmp_path}/a.model" in text
    assert f"tokenizer: no such file: {tmp_path}/a.model" in text
