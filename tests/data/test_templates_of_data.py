"""The chat template that data uses: that of its settings, else the tokenizer's own, else plain."""

import json
from pathlib import Path

import pytest

from megajax.config import UserError
from megajax.data.chat.choose_template import described, template_of, with_template
from megajax.data.chat.config import ChatConfig, MockPreferencesConfig, PreferencesConfig
from megajax.data.images.config import ImageTextConfig
from megajax.tokenizers.config import (
    ByteTokenizerConfig,
    GPT2TokenizerConfig,
    HuggingFaceTokenizerConfig,
    MultimodalTokenizerConfig,
)
from megajax.tuning.config import DigitSumsConfig, RolloutsConfig

OWN = "{{ messages[0].content }}!"
KINDS = (ChatConfig, PreferencesConfig, RolloutsConfig, ImageTextConfig)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Folders of a template in a file, in the settings, of both, and without one."""
    for name, file, setting in (
        ("file", OWN, None),
        ("setting", None, OWN),
        ("both", OWN, "old"),
        ("none", None, None),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps({"chat_template": setting}))
        if file is not None:
            (tmp_path / name / "chat_template.jinja").write_text(file)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_is_the_tokenizers_own_template(folders: Path, kind: type) -> None:
    for name in ("file", "setting", "both"):
        path = str(folders / name)
        for tokenizer in (
            HuggingFaceTokenizerConfig(path=path),
            HuggingFaceTokenizerConfig(path=f"{path}/tokenizer.json"),
            MultimodalTokenizerConfig(base=GPT2TokenizerConfig(vocabulary=f"{path}/vocab.json", merges="merges.txt")),
        ):
            data = with_template(kind(paths=("a",)), tokenizer)
            assert template_of(data).text == OWN and data.template.startswith(path)
            assert described(data, tokenizer) == (f"the tokenizer's own, {data.template}", "")
            assert with_template(data, tokenizer) == data
    for tokenizer in (HuggingFaceTokenizerConfig(path=str(folders / "none")), ByteTokenizerConfig()):
        data = with_template(kind(paths=("a",)), tokenizer)
        assert data.template == "plain" and described(data, tokenizer)[0] == "plain; the tokenizer's folder has none"


def test_another_template_warns(folders: Path) -> None:
    tokenizer = HuggingFaceTokenizerConfig(path=str(folders / "file"))
    data = ChatConfig(paths=("a",), template="chatml")
    assert with_template(data, tokenizer) == data
    name, warning = described(data, tokenizer)
    assert name.startswith("chatml, not the tokenizer's own, ") and "data.template=none uses the tokenizer's" in warning
    assert not described(ChatConfig(paths=("a",), template=OWN), tokenizer)[1], "the same text"


def test_a_template_may_be_a_folder(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders)
    for source in ("setting", "hf:setting", str(folders / "setting")):
        assert template_of(with_template(ChatConfig(template=source), ByteTokenizerConfig())).text == OWN
    for source, message in (
        ("none", "this folder has no chat template"),
        ("Qwen/Qwen3-8B", "hf download Qwen/Qwen3-8B"),
    ):
        with pytest.raises(UserError, match=message):
            with_template(ChatConfig(template=source), ByteTokenizerConfig())


def test_data_without_messages_has_no_template(folders: Path) -> None:
    tokenizer = HuggingFaceTokenizerConfig(path=str(folders / "file"))
    for data in (DigitSumsConfig(), MockPreferencesConfig()):
        assert with_template(data, tokenizer) == data and described(data, tokenizer) == ("", "")
