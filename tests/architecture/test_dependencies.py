"""Requirements of pyproject.toml are used, imports are required, and private names of JAX exist."""

import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_tree import Module, imports, modules

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IMPORTED_AS = {"absl-py": "absl", "nvidia-ml-py": "pynvml", "orbax-checkpoint": "orbax", "pyyaml": "yaml"} | {
    "pillow": "PIL",
    **dict.fromkeys(
        ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-exporter-prometheus"),
        "opentelemetry",
    ),
}
FOR_JAX = ("cuda12", "cuda13", "aot")
"""Extras that JAX loads by itself."""
BY_JAX = {"filelock"}
"""Packages that JAX imports if they are there, and that are required for that."""
WITH_JAX = {"jaxlib"}
"""Packages that JAX brings along in a version of its own."""
PRIVATE = {
    "megajax/processes/peers.py": ("jax._src.distributed", "global_state"),
    "megajax/faults/peer_status.py": ("jax._src.distributed", "global_state"),
    "megajax/kernels/attention/attention.py": ("jax._src.lib", "cuda_versions"),
}
"""Why jax has an upper bound: file -> the module and the name in it."""


def requirements() -> dict[str, str]:
    """Import name -> requirement, of the dependencies and of the extras that MegaJAX imports."""
    extras = (lines for extra, lines in PROJECT["optional-dependencies"].items() if extra not in FOR_JAX)
    names = [re.split(r"[\[<>=~!; ]", line)[0] for lines in (PROJECT["dependencies"], *extras) for line in lines]
    return {IMPORTED_AS.get(name, name.replace("-", "_")): name for name in names}


def modules_in_messages(module: Module) -> Iterator[str]:
    """Modules that may be imported by a name in a string, as "matplotlib.figure" is."""
    for node in module.nodes(ast.Constant):
        if isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            yield node.value


def test_every_requirement_is_imported_somewhere() -> None:
    # Names in strings count where a package is imported late, but not in the table of what extras install.
    late = (
        name
        for module in modules().values()
        if module.path.name != "missing.py"
        for name in modules_in_messages(module)
    )
    used = {name.partition(".")[0] for name in (*(actual.target for actual in imports()), *late)}
    assert set(requirements()) - used == BY_JAX


def test_every_import_is_required() -> None:
    allowed = {"megajax", *requirements(), *WITH_JAX, *sys.stdlib_module_names}
    assert [str(actual) for actual in imports() if actual.target.split(".")[0] not in allowed] == []


def test_private_names_of_jax_are_these() -> None:
    actual = {modules()[actual.source].file for actual in imports() if actual.target.startswith("jax._src")}
    assert actual == PRIVATE.keys()


@pytest.mark.parametrize(("module", "name"), PRIVATE.values())
def test_private_names_of_jax_exist(module: str, name: str) -> None:
    """If this fails with a new version of JAX, correct the file first, then raise the upper bound in pyproject.toml."""
    assert hasattr(importlib.import_module(module), name)


def test_the_key_value_store_has_the_methods_that_are_used() -> None:
    client = pytest.importorskip("jaxlib._jax", reason="jaxlib has moved its private module").DistributedRuntimeClient
    files = ("megajax/processes/peers.py", "megajax/faults/peer_status.py")
    text = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    methods = set(re.findall(r"self\._client\.(\w+)\(", text))
    assert methods
    assert [name for name in sorted(methods) if not hasattr(client, name)] == []
