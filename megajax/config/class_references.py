"""References to classes and functions, "package.module:Name" or "folder/file.py:Name", and configs that use one."""

import dataclasses
import importlib
import re
import sys
import traceback
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from megajax.config.errors import UserError
from megajax.config.optional_packages import EXTRAS, install
from megajax.config.settings_tree import short_type

USER_FILE = "megajax_config_file "
"""Modules run from a path have this and the path as their name."""


def resolve(reference: str) -> Any:
    """ "package.module:Name" or "folder/file.py:Name" -> the object; imports the module or runs the file.

    A file that ran before and has not changed is not run again.
    """
    module, _, name = reference.rpartition(":")
    owner = _loaded(Path(module).expanduser().resolve()) if module.endswith(".py") else importlib.import_module(module)
    return reduce(getattr, name.split("."), owner)


def own_class(reference: str) -> Any | None:
    """The class of MegaJAX that a reference names; None for one of another package or a file, which is not imported."""
    if not re.fullmatch(r"megajax(\.[a-z]\w*)+:[A-Z]\w*", reference):
        return None
    try:
        cls = resolve(reference)
    except (ImportError, AttributeError):
        return None
    return cls if isinstance(cls, type) and cls.__module__.startswith("megajax.") else None


def public_class(name: str) -> type | None:
    """The class of `import megajax` with this name, in the spellings of `type`; None if there is none."""
    package, short = importlib.import_module(__name__.partition(".")[0]), short_type(name)
    for public in (name, *dir(package)):
        if public == name or short_type(public) == short:
            value = getattr(package, public, None)
            if isinstance(value, type):
                return value
    return None


def reference(cls: type) -> str:
    """The reference of a class for `resolve`, with the absolute path of a file."""
    return f"{cls.__module__.removeprefix(USER_FILE)}:{cls.__qualname__}"


def run_file(path: Path) -> ModuleType:
    """Run a Python file as a module; it may import files of its folder. Raises OSError, and errors of the file.

    The module stays in sys.modules, where dataclasses look up their annotations.
    """
    name = f"{USER_FILE}{path}"
    module = ModuleType(name)
    module.__file__ = str(path)
    module.__dict__["__text__"] = path.read_bytes()
    sys.modules[name] = module
    # Not through the import system: its bytecode cache compares times in seconds, too coarse for quick edits.
    exec(compile(module.__dict__["__text__"], str(path), "exec"), module.__dict__)
    return module


def _loaded(path: Path) -> ModuleType:
    module = sys.modules.get(f"{USER_FILE}{path}")
    if module is not None and module.__dict__["__text__"] == path.read_bytes():
        return module
    with siblings_importable(path.parent):
        return run_file(path)


@contextmanager
def siblings_importable(folder: Path) -> Generator[None]:
    """Inside the context, files of the folder can be imported by name.

    Afterwards sys.modules has them by path, because files of other folders may have the same names.
    """
    before = set(sys.modules)
    sys.path.append(str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).parent == folder and not name.startswith("megajax"):
                _rename(name, f"{USER_FILE}{file}")


def _rename(name: str, new: str) -> None:
    module = sys.modules[new] = sys.modules.pop(name)
    module.__dict__["__text__"] = Path(str(module.__file__)).read_bytes()
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == name:
            value.__module__ = new


class Builds:
    """Base of configs with a `build` method: `target` names the class or function as "package.module:Name".

    The target is imported at the first `build`, so that configs can be written, checked and printed in a fraction
    of a second, without jax. tests/architecture checks that every target exists in the package of its config.

    Example: `class NormConfig(mj.Builds): target = "my_norm.py:Norm"`
    """

    target: ClassVar[str]

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target with this config. Raises UserError for a user's target that cannot be loaded."""
        return demand_target(type(self))(self, *args, **kwargs)

    def needed_packages(self) -> Mapping[str, str]:
        """Setting, "" for the whole config -> import name of the package of an extra that a run imports for it."""
        return {}


def demand_packages(config: object) -> None:
    """Raises UserError, before anything is built, that names all packages which are missing for settings of a tree."""
    needed = {
        f"{where}.{setting}".strip("."): package
        for where, node in _configs_below(config, "")
        for setting, package in node.needed_packages().items()
    }
    missing = {setting: package for setting, package in needed.items() if find_spec(package) is None}
    if missing:
        features = ", ".join(f"{setting} needs the package {package}" for setting, package in missing.items())
        extras = dict.fromkeys(EXTRAS[package] for package in missing.values())
        raise UserError(f"{features}: not installed. Install: {install(*extras)}; or leave these settings out.")


def _configs_below(value: object, where: str) -> Iterator[tuple[str, "Builds"]]:
    """The configs of a tree with their dotted names."""
    if isinstance(value, Builds):
        yield where, value
    children: Iterable[tuple[Any, Any]] = ()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif isinstance(value, tuple | list):
        children = enumerate(value)
    for name, child in children:
        yield from _configs_below(child, f"{where}.{name}".removeprefix("."))


def demand_target(cls: type[Builds]) -> Any:
    """The object that `target` names. Raises UserError for a user's target that cannot be loaded."""
    target = getattr(cls, "target", None)
    if not isinstance(target, str):
        raise UserError(f'{cls.__name__} has no target: write target: ClassVar[str] = "file.py:Class" in it')
    if target.startswith("megajax."):
        return resolve(target)
    try:
        return resolve(beside(cls, target))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{cls.__name__} has target {target!r}, which cannot be loaded\n{error_text(error)}") from error


def error_text(error: Exception) -> str:
    """An error of a user's file in one line, and the innermost line of the user's files in its traceback."""
    message = f"{type(error).__name__}: {error}".replace(USER_FILE, "")
    user_files = [module.__file__ for name, module in list(sys.modules.items()) if name.startswith(USER_FILE)]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in user_files]
    return message + (f"\n{frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}" if frames else "")


def beside(cls: type, reference: str) -> str:
    """The reference; a file's path in it is relative to the folder of the file that defines `cls`."""
    module, _, name = reference.rpartition(":")
    if not module.endswith(".py"):
        return reference
    return f"{Path(str(sys.modules[cls.__module__].__file__)).parent / module}:{name}"
