"""The tool that trains a vocabulary: its output, and its errors for unusable input."""

import json
from pathlib import Path

import pytest
from user_errors import user_error

from megajax.tokenizers.config import WordPieceTokenizerConfig
from megajax.tools.train_vocabulary import main

TEXT = "The tower was built of stone. The builder built a tower.\n" * 20


def test_text_and_json_lines_give_the_same_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    lines = [json.dumps({"body": line}) for line in TEXT.splitlines()]
    (tmp_path / "b.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
    for name, more in (("a.txt", []), ("b.jsonl", ["--json-key=body"])):
        assert main([f"--input={tmp_path / name}", f"--output={tmp_path / name}.vocab", "--size=40", *more]) == 0
    summary = capsys.readouterr().out.splitlines()[0]
    first = tmp_path / "a.txt.vocab"
    assert summary == f"{first}: 40 tokens, for megajax.preprocess --tokenizer=wordpiece --vocab-file={first}"
    assert first.read_bytes() == (tmp_path / "b.jsonl.vocab").read_bytes()
    assert WordPieceTokenizerConfig(vocabulary=str(first)).build().vocabulary_size == 42


def test_unusable_input_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"body": "two"}\n', encoding="utf-8")
    output = tmp_path / "vocab.txt"
    with user_error():
        main([f"--input={tmp_path / 'b.jsonl'}", f"--output={output}"])
    with user_error("--input"):
        main([f"--input={tmp_path / 'c.txt'}", f"--output={output}"])
    with user_error():
        main([f"--input={tmp_path / 'a.txt'}", f"--output={output}", "--size=10"])
    assert not output.exists()
    output.write_text("mine", encoding="utf-8")
    with user_error():
        main([f"--input={tmp_path / 'a.txt'}", f"--output={output}"])
