"""Limits on the code: sizes, names, global state, docstrings, annotations, and command-line flags."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from source_tree import REPOSITORY, Module, dotted, functions, modules

pytestmark = pytest.mark.smoke

FILE_LINES = 500
FUNCTION_LINES = 100
FUNCTION_CONDITIONS = 10
"""`if` statements and conditional expressions."""
FOLDER_FILES = 20
TOO_MANY_CONDITIONS = {
    "megajax/job/start/model_files.py write",
    "megajax/layers/attention/core.py __call__",
}
"""Functions that still have more; the list may only shrink."""
GRAB_BAGS = {"utils", "util", "common", "helpers", "helper", "misc"}
TRAIN_FLAGS = {
    *("config", "devices", "print-config", "help", "skip-train", "verify-data"),
    *("coordinator", "num-processes", "process-id", "init-timeout"),
}

LAZY_TABLES = {
    "megajax": "an old Python is refused by name, and Ctrl-C while a command is imported prints one line",
    "megajax.training": "its names are imported on first use, as config files import the package before jax",
}
"""`__init__` files that hold code, and why."""


def test_files_fit() -> None:
    long = {module.file: count for module in modules().values() if (count := module.text.count("\n")) > FILE_LINES}
    assert not long


def test_functions_fit_on_a_screen() -> None:
    long, complex_functions = [], set()
    for module in modules().values():
        for function in functions(module):
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines > FUNCTION_LINES:
                long.append(f"{module.file}:{function.lineno} {function.name}: {lines} lines")
            if sum(isinstance(node, ast.If | ast.IfExp) for node in ast.walk(function)) > FUNCTION_CONDITIONS:
                complex_functions.add(f"{module.file} {function.name}")
    assert not long, "\n".join(long)
    assert complex_functions == TOO_MANY_CONDITIONS


def test_folders_have_few_files() -> None:
    folders = Counter(module.path.parent for module in modules().values() if module.path.name != "__init__.py")
    assert not {folder: count for folder, count in folders.items() if count > FOLDER_FILES}


def test_no_grab_bags() -> None:
    assert not [name for name in modules() if GRAB_BAGS.intersection(name.split("."))]


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by their names alone."""
    names = [path.name for path in (REPOSITORY / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(set(names)) == sorted(names)


def test_no_state_in_modules() -> None:
    violations = []
    for module in modules().values():
        violations += [f"{module.file}:{n.lineno}: global" for n in module.nodes(ast.Global)]
        for node in module.tree.body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            empty = isinstance(value, ast.List | ast.Set | ast.Dict) and ast.unparse(value) in ("[]", "{}")
            is_container = isinstance(value, ast.Call) and dotted(value.func) in (
                "dict",
                "list",
                "set",
                "defaultdict",
                "deque",
            )
            if empty or is_container:
                violations.append(f"{module.file}:{node.lineno}: a container that begins empty is there to be filled")
    assert not violations, "\n".join(violations)


def test_packages_hold_no_code() -> None:
    violations = []
    for module in modules().values():
        if module.path.name != "__init__.py" or module.name in LAZY_TABLES:
            continue
        for node in module.tree.body:
            text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            names = isinstance(node, ast.Assign) and dotted(node.targets[0]) in ("__all__", "__version__")
            if not (text or names or isinstance(node, ast.ImportFrom)):
                violations.append(f"{module.file}:{node.lineno}")
    assert not violations


def _public(module: Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node


def test_public_definitions_have_docstrings() -> None:
    silent = [m.file for m in modules().values() if m.text.strip() and not ast.get_docstring(m.tree)]
    for module in modules().values():
        silent += [
            f"{module.file}:{node.lineno} {node.name}" for node in _public(module) if not ast.get_docstring(node)
        ]
    assert not silent, "\n".join(silent)


def test_settings_have_descriptions() -> None:
    """A config's fields each have a text below them: it is what --help shows."""
    silent = []
    for module in (module for name, module in modules().items() if name.endswith((".config", ".run_config"))):
        for cls in (node for node in module.tree.body if isinstance(node, ast.ClassDef)):
            if not any("dataclass" in ast.unparse(decorator) for decorator in cls.decorator_list):
                continue  # A mixin: its fields are those of the subclass, which describes them.
            for node, after in zip(cls.body, [*cls.body[1:], None], strict=True):
                if not isinstance(node, ast.AnnAssign) or "ClassVar" in ast.unparse(node.annotation):
                    continue
                if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                    silent.append(f"{module.file}:{node.lineno} {cls.name}.{dotted(node.target)}")
    assert not silent, "\n".join(silent)


def test_arguments_are_annotated() -> None:
    bare = []
    for module in modules().values():
        for function in functions(module):
            spec = function.args
            every = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
            names = [arg.arg for arg in every if arg.annotation is None and arg.arg not in ("self", "cls")]
            if function.returns is None and function.name != "__init__":
                names.append("the result")
            if names:
                bare.append(f"{module.file}:{function.lineno} {function.name}: {', '.join(names)}")
    assert not bare, "\n".join(bare)


def test_the_command_line_of_training_does_not_grow() -> None:
    """A new knob is a setting of the config that consumes it, never a flag."""
    command = [sys.executable, "-m", "megajax.train", "--help"]
    text = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    flags = text.partition("\nsettings ")[0]
    assert set(re.findall(r"^\s*--([a-z-]+)", flags, re.MULTILINE)) == TRAIN_FLAGS
