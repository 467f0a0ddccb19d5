"""Hugging Face folders and tokenizers in an object store."""

from pathlib import Path

import numpy as np
import pytest
from hugging_face_folders import write_llama
from object_stores import SERVERS
from safetensors.numpy import load_file
from user_errors import user_error

from megajax import convert
from megajax.config.errors import ConfigError
from megajax.interop.weights.formats import split_name
from megajax.interop.weights.origin import origin_of
from megajax.storage import stores
from megajax.tokenizers.config import HuggingFaceTokenizerConfig
from megajax.tokenizers.tokenizer_files import vocabulary_files

pytestmark = pytest.mark.slow


@pytest.fixture
def url(tmp_path: Path, monkeypatch):
    pytest.importorskip("moto")
    tokenizers = pytest.importorskip("tokenizers")
    with SERVERS["s3"]() as variables:
        for name, value in (variables | {"XDG_CACHE_HOME": str(tmp_path / "cache")}).items():
            monkeypatch.setenv(name, value)
        stores._objects.cache_clear()
        write_llama(tmp_path / "llama")
        words = {f"w{number}": number for number in range(39)} | {"<|endoftext|>": 39}
        tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(
            str(tmp_path / "llama/tokenizer.json")
        )
        for file in (tmp_path / "llama").iterdir():
            stores.open_store("s3://bucket/llama").write(file.name, file.read_bytes())
        yield "s3://bucket/llama"
    stores._objects.cache_clear()


def test_a_folder_in_a_store_is_converted_and_read(url: str, tmp_path: Path, capsys) -> None:
    assert convert.main([f"--from=hf:{url}", f"--to={tmp_path}/run"]) == 0, capsys.readouterr().err
    assert convert.main([f"--from={tmp_path}/run", f"--to=hf:{tmp_path}/back"]) == 0, capsys.readouterr().err
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "llama"))
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_array_equal(ours[name], values)
    config = HuggingFaceTokenizerConfig(path=url)
    assert config.build().vocabulary_size == 40
    assert vocabulary_files(config)["tokenizer.json"].read_bytes() == (tmp_path / "llama/tokenizer.json").read_bytes()
    flags = {"run": None, "hf": Path(url), "adapter": None, "trust_code": False, "ignore": ()}
    assert (split_name(origin_of(flags)[0])[1] / "config.json").is_file()
    with user_error("--from", kind=ConfigError):
        convert.main([f"--from=megatron:{url}", f"--to={tmp_path}/other"])
