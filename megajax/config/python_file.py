"""Run a Python config file. Errors of the file are reported by file and line, without a traceback."""

import inspect
import re
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import ModuleType
from typing import Any

import megajax.config.schema as schema
from megajax.config.builds import USER_FILE, run_file, siblings_importable
from megajax.config.constructors import config_classes, wrong_calls
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.nearest import did_you_mean

MOST_OF_AN_ERROR = 300
"""Characters of an error of the user's code that are shown."""


def shown(path: Path) -> str:
    """The path as people want to read it: relative where it lies below the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def run(path: Path, function: str, root: type) -> Any:
    """Call a function of the file that returns a `root` -> what it returned. Raises ConfigError."""
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError([Problem(shown(path), f"cannot be read: {error.strerror}")]) from error
    with siblings_importable(path.parent), _faults_named(path, root):
        config = _function(path, function, run_file(path), root)()
    if not schema.is_config(config) or not isinstance(config, root):
        what = f"{function}() must return a {root.__name__}, and returns {schema.described(config)}"
        raise ConfigError([Problem(shown(path), what, _return_hint(config, root))])
    return config


def _function(path: Path, function: str, module: ModuleType, root: type) -> Any:
    """Raises ConfigError unless the file has such a function."""
    made = getattr(module, function, None)
    if not callable(made):
        functions = [
            name
            for name, thing in vars(module).items()
            if callable(thing) and not isinstance(thing, type) and not name.startswith("_")
            if getattr(thing, "__module__", "") == module.__name__
        ]
        there = f" (it has {', '.join(functions)})" if functions else ""
        hint = did_you_mean(function, functions) or f"write def {function}(): return {root.__name__}(...)"
        what = f"has no function {function}{there}"
        if made is not None:
            what = f"{function} is {schema.described(made)}, not a function"
        raise ConfigError([Problem(shown(path), what, hint)])
    return made


def _return_hint(config: Any, root: type) -> str:
    if config is None:
        return f"end it with return {root.__name__}(...)"
    if config is root:
        return f"write {root.__name__}(...)"
    if isinstance(config, tuple) and any(isinstance(item, root) for item in config):
        return "a comma behind the closing bracket makes a tuple: take it away"
    return ""


@contextmanager
def _faults_named(path: Path, root: type) -> Generator[None]:
    """An error in a user's file becomes a ConfigError with the file, the line and the fault."""
    try:
        yield
    except ConfigError:
        raise
    except SyntaxError as error:
        file = shown(Path(error.filename)) if error.filename else shown(path)
        line = "" if error.lineno is None else f", line {error.lineno}"
        raise ConfigError([Problem(file + line, error.msg, (error.text or "").strip())]) from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        # The innermost line of the user's own files is the one to look at.
        own = [frame for frame in frames if Path(frame.filename).parent == path.parent]
        file = Path(own[-1].filename) if own else path
        called = isinstance(error, TypeError) and "__init__() " in str(error)
        if called and (problems := list(wrong_calls(file, shown(file), root))):
            raise ConfigError(problems, shown(path)) from error
        where = f"{shown(file)}, line {own[-1].lineno}" if own else shown(path)
        hints = [own[-1].line] if own and own[-1].line else []
        hints += [hint] if (hint := _hint(error, sys.modules.get(f"{USER_FILE}{path}"), root)) else []
        raise ConfigError([Problem(where, _told(error), "\n".join(hints))]) from error


def _told(error: BaseException) -> str:
    """The error in one or two lines."""
    if isinstance(error, SystemExit):
        return f"the file ends the program (exit code {error.code}) instead of returning a config"
    text = " ".join(str(error).split())
    text = text if len(text) <= MOST_OF_AN_ERROR else text[:MOST_OF_AN_ERROR] + "..."
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}".rstrip(": ")


def _hint(error: BaseException, module: ModuleType | None, root: type) -> str:
    """What to write instead, where that can be told; `module` is what the file has defined so far."""
    defined = vars(module) if module else {}
    if isinstance(error, FrozenInstanceError):
        return "configs cannot be changed: dataclasses.replace(config, name=value) makes a changed copy"
    if isinstance(error, AttributeError) and schema.is_config(error.obj):
        return did_you_mean(error.name or "", schema.hints(type(error.obj)))
    if isinstance(error, NameError | ImportError):
        name = str(getattr(error, "name_from", None) or error.name)
        places = {cls.__name__: cls.__module__ for cls in config_classes(root)}
        if name in places:
            return f"write from {places[name]} import {name}"
        return did_you_mean(name, [*places, *defined])
    match = re.search(r"(\w+?)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'", str(error))
    called = defined.get(match[1]) if match else None
    with suppress(ValueError, TypeError):
        return did_you_mean(match[2], inspect.signature(called).parameters) if match and callable(called) else ""
    return ""
