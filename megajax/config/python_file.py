"""Run a Python config file. Errors of the file are reported by file and line, without a traceback."""

import ast
import inspect
import re
import sys
import textwrap
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, FrozenInstanceError
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import megajax
from megajax.config import field_types
from megajax.config.class_references import USER_FILE, run_file, siblings_importable
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.hints import did_you_mean, either
from megajax.config.optional_packages import remedy
from megajax.config.removed import removed

MOST_OF_AN_ERROR = 300
"""Maximum characters of a user's error in messages."""


def display_path(path: Path) -> str:
    """The path for messages: relative if it is below the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def run(path: Path, function: str, root: type) -> Any:
    """The config that a function of the file returns, an instance of `root`. Raises ConfigError."""
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError([Problem(display_path(path), f"cannot be read: {error.strerror}")]) from error
    with siblings_importable(path.parent), _errors_as_problems(path, root):
        config = _function(path, function, run_file(path), root)()
    if not field_types.is_config(config) or not isinstance(config, root):
        message = f"{function}() must return a {root.__name__}, got {field_types.described(config)}"
        raise ConfigError([Problem(display_path(path), message, _return_hint(config, root))])
    return config


def _function(path: Path, function: str, module: ModuleType, root: type) -> Any:
    """The function of a file. Raises ConfigError if the file has no such function."""
    value = getattr(module, function, None)
    if not callable(value):
        functions = [
            name
            for name, member in vars(module).items()
            if callable(member) and not isinstance(member, type) and not name.startswith("_")
            if getattr(member, "__module__", "") == module.__name__
        ]
        listing = f" (it has {', '.join(functions)})" if functions else ""
        hint = (
            did_you_mean(function, functions) or f"write def {function}(): return {field_types.python_name(root)}(...)"
        )
        message = f"has no function {function}{listing}"
        if value is not None:
            message = f"{function} is {field_types.described(value)}, not a function"
        raise ConfigError([Problem(display_path(path), message, hint)])
    return value


def _return_hint(config: object, root: type) -> str:
    if config is None:
        return f"end it with return {field_types.python_name(root)}(...)"
    if config is root:
        return f"write {field_types.python_name(root)}(...)"
    if isinstance(config, tuple) and any(isinstance(item, root) for item in config):
        return "the comma after the closing bracket makes it a tuple: remove the comma"
    return ""


@contextmanager
def _errors_as_problems(path: Path, root: type) -> Generator[None]:
    """Turn an error in a user's file into a ConfigError with the file, line and error."""
    try:
        yield
    except ConfigError:
        raise
    except SyntaxError as error:
        file = display_path(Path(error.filename)) if error.filename else display_path(path)
        line = "" if error.lineno is None else f", line {error.lineno}"
        raise ConfigError([Problem(file + line, error.msg, (error.text or "").strip())]) from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        # Report the innermost line in the user's files.
        user_frames = [frame for frame in frames if Path(frame.filename).parent == path.parent]
        file = Path(user_frames[-1].filename) if user_frames else path
        is_constructor_call = isinstance(error, TypeError) and "__init__() " in str(error)
        if is_constructor_call and (problems := list(wrong_calls(file, display_path(file), root))):
            raise ConfigError(problems, display_path(path)) from error
        place = f"{display_path(file)}, line {user_frames[-1].lineno}" if user_frames else display_path(path)
        hints = [user_frames[-1].line] if user_frames and user_frames[-1].line else []
        hints += [hint] if (hint := _hint(error, sys.modules.get(f"{USER_FILE}{path}"))) else []
        raise ConfigError([Problem(place, _error_text(error), "\n".join(hints))]) from error


def _error_text(error: BaseException) -> str:
    """The error in one or two lines."""
    match error:
        case SystemExit():
            return f"the file ends the program (exit code {error.code}) instead of returning a config"
        case ModuleNotFoundError() if error.name:
            return f"the file failed to import {error.name}: there is no such module"
    text = " ".join(str(error).split())
    text = text if len(text) <= MOST_OF_AN_ERROR else text[:MOST_OF_AN_ERROR] + "..."
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}".rstrip(": ")


def _hint(error: BaseException, module: ModuleType | None) -> str:
    """A suggested correction, or ""; `module` holds the definitions of the file so far."""
    defined = vars(module) if module else {}
    match error:
        case FrozenInstanceError():
            return "configs cannot be changed: dataclasses.replace(config, name=value) makes a changed copy"
        case AttributeError() if field_types.is_config(error.obj):
            return did_you_mean(error.name or "", field_types.hints(type(error.obj)))
        case AttributeError() if error.obj is megajax:
            return _removed(error.name or "") or did_you_mean(error.name or "", dir(megajax))
        case NameError() | ImportError():
            return _hint_of_name(error, module)
    match = re.search(r"(\w+?)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'", str(error))
    callee = defined.get(match[1], getattr(megajax, match[1], None)) if match else None
    with suppress(ValueError, TypeError):
        return did_you_mean(match[2], inspect.signature(callee).parameters) if match and callable(callee) else ""
    return ""


def _hint_of_name(error: NameError | ImportError, module: ModuleType | None) -> str:
    """A suggested module or name; `module`: see `_hint`."""
    if isinstance(error, ModuleNotFoundError):
        beside = (file.stem for file in Path(str(getattr(module, "__file__", ""))).parent.glob("*.py"))
        hint = remedy(error, sys.orig_argv) or did_you_mean(str(error.name), ["megajax", *beside])
        return hint or f"install it for {sys.executable}, or remove the line"
    if isinstance(error, ImportError) and error.name != "megajax":
        return did_you_mean(str(error.name_from), dir(sys.modules.get(str(error.name))))
    name = str(error.name_from if isinstance(error, ImportError) else error.name)
    if message := _removed(name):
        return message
    if name in ("mj", *dir(megajax)):
        return "import megajax as mj" if name == "mj" else f"write mj.{name}, with import megajax as mj"
    return did_you_mean(name, [*dir(megajax), *(vars(module) if module else ())])


def _removed(name: str) -> str:
    message = removed(name)
    return f"{name} {message}" if message else ""


def config_classes(root: type) -> tuple[type, ...]:
    """Every config class that a tree may hold, `root` first, each before the classes of its fields."""
    classes: dict[type, None] = {}
    _collect(root, classes)
    return tuple(classes)


def _collect(cls: type, classes: dict[type, None]) -> None:
    if cls in classes:
        return
    classes[cls] = None
    for annotation in field_types.hints(cls).values():
        inner = [annotation]
        inner += [part for kind in field_types.lists(annotation) for part in get_args(kind) if part is not Ellipsis]
        inner += [args[1] for kind in field_types.mappings(annotation) if (args := get_args(kind))]
        for part in inner:
            for member in field_types.configs(part):
                _collect(member, classes)


def wrong_calls(path: Path, place: str, root: type) -> Iterator[Problem]:
    """Calls of config classes with unknown, missing or positional settings.

    place: the file's name in messages.
    """
    classes = {cls.__name__: cls for cls in config_classes(root)}
    for call in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(call, ast.Call):
            continue
        cls = classes.get(ast.unparse(call.func).rpartition(".")[2])
        if cls is None:
            continue
        line, settings = f"{place}, line {call.lineno}", field_types.hints(cls)
        arguments = [keyword.arg for keyword in call.keywords]
        for key in arguments:
            if key is not None and key not in settings:
                message = removed(key, cls)
                hint = "" if message else _instead(key, cls, root)
                yield Problem(line, f"{key} {message}" if message else f"{cls.__name__} has no setting {key}", hint)
        if call.args:
            message = f"{cls.__name__} takes its settings by name, {len(call.args)} given without"
            names = ", ".join(f"{name}=..." for name in [*settings][: len(call.args)])
            yield Problem(line, message, f"write {field_types.python_name(cls)}({names})")
        needed = [
            field.name for field in field_types.fields(cls) if field.init and field_types.default(field) is MISSING
        ]
        for key in needed:
            if key not in arguments and None not in arguments:  # None: **settings
                yield Problem(line, f"{cls.__name__} needs {key}", field_types.example(key, settings[key]))


def _instead(key: str, cls: type, root: type) -> str:
    """The probably intended setting, of this class or elsewhere in the tree; otherwise all settings of the class."""
    settings = list(field_types.hints(cls))
    if similar := did_you_mean(key, settings):
        return similar
    elsewhere = sorted(
        (name for name in field_types.names(root) if name.endswith(f".{key}")), key=lambda n: n.count(".")
    )
    if elsewhere:
        return f"there is {either(elsewhere[:3])}"
    return "\n".join(textwrap.wrap(f"{cls.__name__} has {', '.join(settings)}", 100))
