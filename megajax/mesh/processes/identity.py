"""What must be equal in all processes of a run: versions, code, settings and environment, and how two of them differ.

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
from typing import Any, NamedTuple

from megajax.config import field_types
from megajax.config.class_references import USER_FILE, beside
from megajax.config.dump import default_leaves, flatten
from megajax.mesh.processes.installation import jax_packages
from megajax.mesh.xla_options import program_variables

SECTION_BYTES, SETTINGS_BYTES = 1500, 3000
"""Longer values of a section, and of the settings, are left out; the digest remains."""
VALUE_LENGTH = 80
"""Longer values are shortened."""
DIGITS = 8
"""Hexadecimal digits of the digest of a value or file."""
MAX_DIFFERENCES = 4
"""Maximum number of differences that a message names for a section; the rest are counted."""

PACKAGES = ("flax", "optax", "orbax-checkpoint", "numpy", "tensorstore", "grain")
"""Packages that compute, store or order what a run trains on, in addition to those of jax."""
LIBRARIES = tuple(f"nvidia-{name}{suffix}" for name in ("cudnn", "cublas", "nccl") for suffix in ("", "-cu12", "-cu13"))
"""Packages of NVIDIA's libraries, which choose kernels and orders of sums."""


class Section(NamedTuple):
    """One part of an identity."""

    digest: str
    """Of all values that must be equal."""
    values: Mapping[str, str] | None
    """Name -> value, for messages; None if they are too long."""


type Identity = Mapping[str, Section]
"""Section -> its contents."""


class _Kind(NamedTuple):
    absent: str
    """Word for a value that one process does not have."""
    remedy: str


SECTIONS: Mapping[str, _Kind] = {
    "versions": _Kind("not installed", "install the same versions for all processes"),
    "code": _Kind("absent", "start all processes from the same files"),
    "settings": _Kind("default", "give all processes the same config file and command line"),
    "environment": _Kind("not set", "set these variables alike for all processes"),
}
"""Sections in the order in which messages show them."""


def find_identity(config: Any, flags: Mapping[str, Any]) -> dict[str, Section]:
    """The identity of this process, in about 50 ms. config: None for verbs without. flags: those that must be equal."""
    package = Path(__file__).parents[2]
    return {
        "versions": section(_versions()),
        "code": section(code_digests(package) | user_code(config), {"folder": str(package)}),
        "settings": _settings(config, flags),
        "environment": section(program_variables()),
    }


def section(values: Mapping[str, str], notes: Mapping[str, str] | None = None) -> Section:
    """A section of values that must be equal. notes: values that may differ, shown if others differ."""
    texts = _for_messages({**values, **(notes or {})}, SECTION_BYTES)
    return Section(_digest(repr(sorted(values.items())).encode()), texts)


def difference(actual: Identity, root: Identity) -> str | None:
    """How a process differs from process 0, and what to change; None if it does not. root: that of process 0."""
    texts = []
    for name, kind in SECTIONS.items():
        parts = [identity.get(name, Section("unknown", None)) for identity in (actual, root)]
        if parts[0].digest == parts[1].digest:
            continue
        pairs = [("digest", parts[0].digest, parts[1].digest)]
        values, root_values = (part.values for part in parts)
        if values is not None and root_values is not None:
            names = sorted({key for key, _ in values.items() ^ root_values.items()})
            pairs = [(key, values.get(key, kind.absent), root_values.get(key, kind.absent)) for key in names] or pairs
        entries = [f"{key} {value} (process 0: {root_value})" for key, value, root_value in pairs[:MAX_DIFFERENCES]]
        more = f" and {len(pairs) - len(entries)} more" * (len(pairs) > len(entries))
        texts.append(f"{name}: {', '.join(entries)}{more}; {kind.remedy}")
    return ". ".join(texts) or None


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


def user_code(config: Any) -> dict[str, str]:
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


def _settings(config: Any, flags: Mapping[str, Any]) -> Section:
    """All settings and flags but local cache folders. The values to show are those that differ from the defaults."""
    trees = [] if config is None else [config]
    leaves = {name: value for tree in trees for name, value in flatten(tree).items() if not name.endswith("cache_dir")}
    options = {f"--{name.replace('_', '-')}": str(value) for name, value in flags.items() if value not in (None, False)}
    defaults = {name: value for tree in trees for name, value in default_leaves(tree).items()}
    changes = {name: str(value) for name, value in leaves.items() if name not in defaults or defaults[name] != value}
    return Section(_digest(repr((leaves, options)).encode()), _for_messages(changes | options, SETTINGS_BYTES))


def _nodes(value: Any) -> Iterator[Any]:
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


def _values(node: Any) -> list[Any]:
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
