"""Files from elsewhere run no code: nothing is unpickled, and YAML builds plain values only."""

import ast
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gangs import REPOSITORY

from megajax.checkpoint.local.shard_set import LocalSet
from megajax.checkpoint.manifest import Damaged, read_manifest
from megajax.config.errors import UserError
from megajax.config.yaml_and_json import parse
from megajax.interop.huggingface.folder import model_of
from megajax.interop.peft.settings import read_settings
from megajax.interop.weights.safetensors import SafetensorsFolder
from megajax.storage.index_cache import load_or_build
from megajax.tokenizers.chat_template import ChatTemplate
from megajax.tokenizers.config import HuggingFaceTokenizerConfig
from megajax.tokenizers.folder import FolderTokens

PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
READERS = {("np", "load"), ("numpy", "load"), ("torch", "load"), ("pandas", "read_pickle")}
STRICT = "megajax/config/yaml_and_json.py"
"""The place where YAML is read by a loader of our own, a subclass of the safe one."""


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]


@pytest.mark.parametrize("package", sorted(path.name for path in (REPOSITORY / "megajax").iterdir() if path.is_dir()))
def test_nothing_reads_pickles_or_unsafe_yaml(package: str) -> None:
    for path in sorted((REPOSITORY / "megajax" / package).rglob("*.py")):
        where, tree = str(path.relative_to(REPOSITORY)), ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not PICKLES & {name.partition(".")[0] for name in names}, where
        for call in calls(tree):
            function: Any = call.func
            owner = function.value.id if isinstance(function.value, ast.Name) else ""
            without = any(word.arg == "allow_pickle" and ast.unparse(word.value) == "False" for word in call.keywords)
            assert (owner, function.attr) not in READERS or without, f"{where}, line {call.lineno}"
            unsafe = owner == "yaml" and function.attr in ("load", "unsafe_load", "full_load", "load_all")
            assert not unsafe or where == STRICT, f"{where}, line {call.lineno}"


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def test_a_pickle_in_place_of_an_index_is_rebuilt(tmp_path: Path) -> None:
    def build(_: object) -> dict[str, np.ndarray]:
        return {"a": np.arange(3)}

    load_or_build(tmp_path / "cache", {}, build)
    (path,) = (tmp_path / "cache").iterdir()
    array = io.BytesIO()
    np.save(array, np.array([Payload(tmp_path / "canary")], object), allow_pickle=True)
    for content in (pickle.dumps(Payload(tmp_path / "canary")), array.getvalue()):
        path.write_bytes(content)
        with pytest.warns(UserWarning, match="built again"):
            assert load_or_build(tmp_path / "cache", {}, build)["a"].tolist() == [0, 1, 2]
    assert not (tmp_path / "canary").exists()


def tokenizer_of(folder: Path) -> Any:
    return HuggingFaceTokenizerConfig(path=str(folder / "tokenizer.json")).build()


READERS_OF_JSON: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a model's config": ("config.json", model_of),
    "an index of safetensors": ("model.safetensors.index.json", SafetensorsFolder),
    "an adapter's settings": ("adapter_config.json", lambda folder: read_settings(folder / "adapter_config.json")),
    "a manifest": ("manifest.json", read_manifest),
    "a set of a local checkpoint": ("manifest.json", LocalSet.open),
    "a tokenizer": (
        "tokenizer.json",
        lambda folder: HuggingFaceTokenizerConfig(path=str(folder / "tokenizer.json")).build(),
    ),
    "a chat template": ("tokenizer_config.json", lambda folder: ChatTemplate(str(folder / "tokenizer_config.json"))),
    "settings": ("run.json", lambda folder: parse(folder / "run.json", "run.json")),
    "settings in YAML": ("run.yaml", lambda folder: parse(folder / "run.yaml", "run.yaml")),
}
HOSTILE = {
    "lists in lists": b"[" * 100_000,
    "mappings in mappings": b'{"a":' * 100_000,
    "a number of many digits": b'{"a": ' + b"9" * 5000 + b"}",
    "no text": b"\xff\xfe\x00",
    "half a text": b'{"a": "',
    "a list": b"[1]",
}


@pytest.mark.parametrize("content", HOSTILE)
@pytest.mark.parametrize("kind", READERS_OF_JSON)
def test_readers_of_json_refuse_with_their_own_message(kind: str, content: str, tmp_path: Path) -> None:
    name, read = READERS_OF_JSON[kind]
    (tmp_path / name).write_bytes(HOSTILE[content])
    with pytest.raises((UserError, Damaged)):
        read(tmp_path)


@pytest.mark.parametrize("kind", READERS_OF_JSON)
def test_readers_of_json_do_not_wait_for_a_pipe(kind: str, tmp_path: Path) -> None:
    name, read = READERS_OF_JSON[kind]
    os.mkfifo(tmp_path / name)
    with pytest.raises((UserError, Damaged)):
        read(tmp_path)


def test_unreadable_optional_settings_count_as_absent(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_bytes(HOSTILE["lists in lists"])
    assert FolderTokens(tmp_path).ends == frozenset()
