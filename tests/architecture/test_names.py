"""Names of the package are nouns and verbs that say what is bound; see docs/architecture.md."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest
from source_tree import modules

VAGUE = frozenset({
    "again", "alone", "asked", "begun", "both", "done", "each", "found", "further", "given", "gone", "got",
    "held", "here", "kept", "made", "mine", "one", "ours", "own", "said", "same", "seen", "shown",
    "taken", "that", "them", "there", "they", "thing", "things", "this", "those", "told", "whatever",
})  # fmt: skip
"""Participles, adverbs and pronouns: they say how something came to be, and not what it is."""


BINDING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.arg, ast.Name, ast.Attribute)


def bound_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of each definition, argument, variable and attribute that a module binds."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name


def vague_names(nodes: Iterable[ast.AST]) -> list[tuple[int, str]]:
    """Line and name of each vague name that is bound by the nodes of a module."""
    return [(line, name) for line, name in bound_names(nodes) if name.strip("_").lower() in VAGUE]


def test_names_say_what_they_bind() -> None:
    problems = [
        f"{module.file}:{line}: {name}"
        for module in modules().values()
        for line, name in vague_names(module.nodes(*BINDING))
    ]
    assert modules() and not problems, "name what it is:\n" + "\n".join(problems)


@pytest.mark.parametrize(
    "source",
    [
        "def told(): ...",
        "def f(given): ...",
        "for each in rows: ...",
        "self._seen = 1",
        "class Whatever: ...",
        "a, one = b",
    ],
)
def test_each_kind_of_binding_is_checked(source: str) -> None:
    assert len(vague_names(ast.walk(ast.parse(source)))) == 1


ALIKE = {
    "CodeProducts": "the protocol that precision asks for, and the kernels that fulfil it",
    "Run": "that of notebooks also generates text",
}
"""Names of two classes, and why they are alike."""


def test_a_name_means_one_class() -> None:
    files = defaultdict[str, list[str]](list)
    for module in modules().values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                files[node.name].append(module.file)
    twice = {name: places for name, places in files.items() if len(places) > 1 and name not in ALIKE}
    assert not twice, "say in the name of one what it is"
