"""Files from elsewhere run no code: nothing is unpickled, and YAML builds plain values only."""

import ast
import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gangs import REPOSITORY

from megajax.data.cache import load_or_build

PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
READERS = {("np", "load"), ("numpy", "load"), ("torch", "load"), ("pandas", "read_pickle")}
STRICT = "megajax/config/markup.py"
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
            assert (owner, function.attr) not in READERS, f"{where}, line {call.lineno}"
            unsafe = owner == "yaml" and function.attr in ("load", "unsafe_load", "full_load", "load_all")
            assert not unsafe or where == STRICT, f"{where}, line {call.lineno}"


class Payload:
    """Creates a file where it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def test_a_pickle_in_place_of_an_index_is_built_again(tmp_path: Path) -> None:
    def build() -> dict[str, np.ndarray]:
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
