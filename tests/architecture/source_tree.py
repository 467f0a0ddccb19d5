"""The library's modules, their imports, and the names in their strings, for the architecture tests."""

import ast
import gc
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARY = REPOSITORY / "megajax"
REFERENCE = re.compile(r"megajax(\.\w+)+:\w+")


@dataclass(frozen=True)
class Import:
    """One module importing another (or a name of it), by a statement or by a string that is resolved later."""

    source: str
    target: str
    line: int
    names: tuple[str, ...] = ()
    local: bool = False
    """Inside a function."""
    by_name: bool = False
    """A "package.module:Name" string: imported on first use."""

    def __str__(self) -> str:
        return f"{self.source}:{self.line} -> {self.target}"


@dataclass(frozen=True)
class Module:
    """One file of the library."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """First name below megajax: the package, or the module where it lies at the top."""
        return (*self.name.split("."), "")[1]

    @property
    def file(self) -> str:
        return str(self.path.relative_to(REPOSITORY))

    @cached_property
    def _by_kind(self) -> dict[type[ast.AST], list[ast.AST]]:
        kinds: dict[type[ast.AST], list[ast.AST]] = {}
        for node in ast.walk(self.tree):
            kinds.setdefault(type(node), []).append(node)
        return kinds

    def nodes[Node: ast.AST](self, *kinds: type[Node]) -> Iterator[Node]:
        """Its nodes of such kinds: the tree is walked once for all tests of a process."""
        return (node for kind in kinds for node in self._by_kind.get(kind, ()))


@cache
def modules() -> dict[str, Module]:
    """Every module of the library by its dotted name."""
    actual = {}
    gc.disable()  # A million nodes that stay: the collector would look at them again and again.
    for path in sorted(LIBRARY.rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        actual[name] = Module(name, path, text, ast.parse(text, str(path)))
    gc.freeze()
    gc.enable()
    return actual


@cache
def imports() -> tuple[Import, ...]:
    """Every import of every module, of this library and of others, by statement and by name."""
    return tuple(actual for module in modules().values() for actual in _imports(module))


def first_party() -> Iterator[Import]:
    """Those of this library."""
    return (actual for actual in imports() if actual.target.split(".")[0] == "megajax")


def _imports(module: Module) -> Iterator[Import]:
    for node in module.nodes(ast.Import, ast.ImportFrom, ast.Constant):
        local = not isinstance(node, ast.Constant) and any(
            function.lineno <= node.lineno <= (function.end_lineno or 0) for function in functions(module)
        )
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module.name, alias.name, node.lineno, local=local)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.file}:{node.lineno}: a relative import"
            for alias in node.names:
                qualified_name = f"{node.module}.{alias.name}"
                target, names = (
                    (qualified_name, ()) if qualified_name in modules() else (str(node.module), (alias.name,))
                )
                yield Import(module.name, target, node.lineno, names, local)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if REFERENCE.fullmatch(node.value):
                target, _, name = node.value.partition(":")
                yield Import(module.name, target, node.lineno, (name,), by_name=True)
            elif node.value in modules() and node.value != "megajax":
                yield Import(module.name, node.value, node.lineno, by_name=True)


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method, nested ones too."""
    return module.nodes(ast.FunctionDef, ast.AsyncFunctionDef)


def dotted(node: ast.AST) -> str:
    """`jax.lax.psum` for such an expression, "" for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        below = dotted(node.value)
        return f"{below}.{node.attr}" if below else ""
    return ""
