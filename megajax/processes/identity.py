"""What a process tells process 0 of itself, which `must_be_equal` compares: versions, code, settings, environment.

Each process sends its identity to process 0 before jax connects them, so it is short: each section has a digest of all
its values, and the values themselves if they fit. Values are looked at only where digests differ.
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import megajax
from megajax.config import field_types
from megajax.config.class_references import USER_FILE, beside
from megajax.config.dump import default_leaves, flatten
from megajax.processes.installation import jax_packages
from megajax.processes.must_be_equal import IdentitySection
from megajax.processes.xla_options import program_variables

SECTION_BYTES, SETTINGS_BYTES = 1500, 3000
"""Longer values of a section, and of the settings, are left out; the digest remains."""
VALUE_LENGTH = 80
"""Longer values are shortened."""
DIGITS = 8
"""Hexadecimal digits of the digest of a value or file."""

PACKAGES = ("flax", "optax", "orbax-checkpoint", "numpy", "tensorstore", "grain")
"""Packages that compute, store or order what a run trains on, in addition to those of jax."""
LIBRARIES = tuple(f"nvidia-{name}{suffix}" for name in ("cudnn", "cublas", "nccl") for suffix in ("", "-cu12", "-cu13"))
"""Packages of NVIDIA's libraries, which choose kernels and orders of sums."""


def find_identity(config: object, flags: Mapping[str, Any]) -> dict[str, IdentitySection]:
    """The identity of this process, in about 50 ms. config: None for verbs without. flags: those that must be equal."""
    package = Path(megajax.__file__).parent
    return {
        "versions": section(_versions()),
        "code": section(code_digests(package) | user_code(config), {"folder": str(package)}),
        "settings": _settings(config, flags),
        "environment": section(program_variables()),
    }


def section(values: Mapping[str, str], notes: Mapping[str, str] | None = None) -> IdentitySection:
    """A section of values that must be equal. notes: values that may differ, shown if others differ."""
    texts = _for_messages({**values, **(notes or {})}, SECTION_BYTES)
    return IdentitySection(_digest(repr(sorted(values.items())).encode()), texts)


def code_digests(package: Path) -> dict[str, str]:
    """Part of the package -> digest of the names and contents of its Python files."""
    digests: dict[str, Any] = {}
    for folder, folders, files in os.walk(package, followlinks=True):
        folders.sort()
        path = os.path.relpath(folder, package)
        part = path.partition(os.sep)[0] if path != "." else "*.py"
        # An installed package holds the shipped configs, which are compared as settings.
        for file in sorted(file for file in files if file.endswith(".py") and part != "configs"):
            content = hashlib.sha256(Path(folder, file).read_bytes()).digest()
            digests.setdefault(part, hashlib.sha256()).update(f"{path}/{file}".encode() + content)
    return {part: digest.hexdigest()[:DIGITS] for part, digest in digests.items()}


def user_code(config: object) -> dict[str, str]:
    """File name -> digest, of the user's Python files: loaded ones, and those that settings and config classes name.

    Loaded are config files, the files they import, and modules of the packages of config classes.
    """
    nodes = list(_nodes(config))
    roots = {type(node).__module__.partition(".")[0] for node in nodes} - {"megajax"}
    files = {
        getattr(module, "__file__", None)
        for name, module in list(sys.modules.items())
        if name.startswith(USER_FILE) or name.partition(".")[0] in roots
    }
    references = [value for node in nodes for value in _values(node) if isinstance(value, str)]
    references += [beside(type(node), node.target) for node in nodes if isinstance(getattr(node, "target", None), str)]
    files |= {reference.rpartition(":")[0] for reference in references if ".py:" in reference}
    contents: dict[str, list[bytes]] = {}
    for path in {Path(file).expanduser().resolve() for file in files if file}:
        if path.is_file():
            contents.setdefault(path.name, []).append(path.read_bytes())
    return {name: _digest(b"".join(sorted(texts)))[:DIGITS] for name, texts in contents.items()}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()} | jax_packages()
    for name in ("megajax", *PACKAGES, *LIBRARIES):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _settings(config: object, flags: Mapping[str, Any]) -> IdentitySection:
    """All settings and flags but local cache folders. The values to show are those that differ from the defaults."""
    trees = [] if config is None else [config]
    leaves = {name: value for tree in trees for name, value in flatten(tree).items() if not name.endswith("cache_dir")}
    options = {f"--{name.replace('_', '-')}": str(value) for name, value in flags.items() if value not in (None, False)}
    defaults = {name: value for tree in trees for name, value in default_leaves(tree).items()}
    changes = {name: str(value) for name, value in leaves.items() if name not in defaults or defaults[name] != value}
    return IdentitySection(_digest(repr((leaves, options)).encode()), _for_messages(changes | options, SETTINGS_BYTES))


def _nodes(value: object) -> Iterator[Any]:
    """The configs of a tree."""
    if field_types.is_config(value):
        yield value
        for entry in _values(value):
            yield from _nodes(entry)
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _nodes(entry)
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _nodes(entry)


def _values(node: object) -> list[Any]:
    """The values of the settings of a config."""
    return [getattr(node, name) for name in field_types.hints(type(node))]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _for_messages(values: Mapping[str, str], most: int) -> dict[str, str] | None:
    """The values for messages; None if they need more than `most` bytes."""
    texts = {_shortened(name): _shortened(value) for name, value in values.items()}
    return texts if len(json.dumps(texts)) <= most else None


def _shortened(value: str) -> str:
    """The value if it is short and can be printed, else its start and a digest."""
    if len(value) <= VALUE_LENGTH and value.isprintable():
        return value
    start = "".join(character for character in value[:VALUE_LENGTH] if character.isprintable())
    return f"{start}... [{_digest(value.encode(errors='replace'))[:DIGITS]}]"
