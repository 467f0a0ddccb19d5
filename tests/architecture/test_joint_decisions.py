"""docs/platforms.md lists every condition before which processes wait for each other, with its reason.

A process that skips a joint call makes the others wait forever, so each such condition needs the reason why it is the
same on all processes.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from source_tree import REPOSITORY, modules

TABLE = REPOSITORY / "docs/platforms.md"
JOINT = "## What processes decide together"
"""Where the table begins."""
EXCHANGES = frozenset({"agree", "gather", "broadcast", "check", "on_all", "barrier"})
"""Of `Peers` and `StepBoundary`."""
COLLECTIVES = frozenset({
    "process_allgather", "broadcast_one_to_all", "sync_global_devices", "wait_at_barrier", "blocking_key_value_get",
    "open_stored",
})  # fmt: skip
"""Also a function that looks up by name what it calls: the reader of runs asks process 0 which step it is."""
SINGLE = ("megajax.tools.", "megajax.interop.conversion")
"""Programs with a single process."""


class Function(NamedTuple):
    place: str
    """`file: qualified name`."""
    node: ast.FunctionDef

    @property
    def name(self) -> str:
        """The name by which it is called: for an initializer, the name of its class."""
        names = self.place.partition(": ")[2].split(".")
        return names[-2] if names[-1] == "__init__" and len(names) > 1 else names[-1]


def functions(tree: ast.AST, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], ast.FunctionDef]]:
    """(qualified name, function), including nested ones."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            if isinstance(child, ast.FunctionDef):
                yield (*names, child.name), child
            yield from functions(child, (*names, child.name))
        else:
            yield from functions(child, names)


@cache
def library() -> tuple[Function, ...]:
    return tuple(
        Function(f"{module.file.removeprefix('megajax/')}: {'.'.join(names)}", node)
        for module in modules().values()
        if not module.name.startswith(SINGLE)
        for names, node in functions(module.tree)
    )


def nodes(root: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """The nodes below a node, without nested functions, and whether a condition decides that each is reached."""
    branches = (ast.If, ast.IfExp, ast.While, ast.For, ast.ExceptHandler)
    parents = [(root, False)]
    for node, guarded in parents:
        guarded = guarded or isinstance(node, (ast.comprehension, ast.Lambda))
        for field, value in ast.iter_fields(node):
            for place, child in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(child, ast.AST) or isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                    continue
                decided = (
                    guarded
                    or (isinstance(node, branches) and field in ("body", "orelse"))
                    or (isinstance(node, ast.BoolOp) and field == "values" and place > 0)
                    or (isinstance(node, ast.Try) and field == "orelse")
                )
                parents.append((child, decided))
                yield child, decided


def leaves(statement: ast.stmt) -> bool:
    """Whether a statement may leave its function or loop before the next one."""
    exits = ast.Return | ast.Raise | ast.Continue | ast.Break
    below = (statement, *(node for node, _ in nodes(statement)))
    return any(isinstance(node, exits) for node in below)


class Call(NamedTuple):
    name: str
    owner: str
    """What an exchange is a method of, as written; "" for a function."""
    guarded: bool
    """Whether a condition decides that it is reached."""


def calls(function: ast.FunctionDef) -> list[Call]:
    actual, after_exit = [], False
    for statement in function.body:
        for node, guarded in nodes(ast.Module([statement], [])):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                method = isinstance(node.func, ast.Attribute)
                name = node.func.attr if method else node.func.id
                owner = ast.unparse(node.func.value) if method and name in EXCHANGES else ""
                actual.append(Call(name, owner, guarded or after_exit))
        is_last = isinstance(statement, ast.Return | ast.Raise | ast.FunctionDef)
        after_exit = after_exit or (not is_last and leaves(statement))
    return actual


def is_exchange(call: Call) -> bool:
    """Whether the call itself waits for other processes."""
    peers = call.owner.startswith("Peers(") or call.owner.endswith(("peers", "_boundary"))
    return call.name in COLLECTIVES or (peers and call.name in EXCHANGES) or (call.name, call.owner) == ("agree", "")


def waiting_names(functions_with_calls: Mapping[Function, Sequence[Call]]) -> frozenset[str]:
    """Names of functions and classes whose calls wait: those of which every function of that name does."""
    places_of = defaultdict[str, set[str]](set)
    for function in functions_with_calls:
        places_of[function.name].add(function.place)
    names = frozenset[str]()
    while True:
        waiting = {
            function.place
            for function, made in functions_with_calls.items()
            if any(is_exchange(call) or call.name in names for call in made)
        }
        more = frozenset(name for name, where in places_of.items() if where <= waiting)
        if more == names:
            return names
        names = more


@cache
def places() -> frozenset[str]:
    """The functions in which a condition decides whether a process waits for the others."""
    made = {function: calls(function.node) for function in library()}
    names = waiting_names(made)
    return frozenset(
        function.place
        for function, in_it in made.items()
        if any(call.guarded and (is_exchange(call) or call.name in names) for call in in_it)
    )


@cache
def rows() -> dict[str, str]:
    """Place -> why the condition is the same on all processes."""
    actual = {}
    for line in TABLE.read_text().partition(f"\n{JOINT}\n")[2].splitlines():
        if line.startswith("| `"):
            place, reason = line.strip("| ").split(" | ")
            file, *names = re.findall(r"`([^`]+)`", place)
            actual |= {f"{file}: {name}": reason for name in names}
    return actual


def test_every_condition_before_a_joint_call_is_explained() -> None:
    missing = sorted(places() - rows().keys())
    assert not missing, f"say in {TABLE.name} why no process decides these alone: {missing}"


def test_no_other_condition_is_explained() -> None:
    assert not (removed := sorted(rows().keys() - places())), f"take out of {TABLE.name}: {removed}"


def test_the_reader_finds_conditions() -> None:
    text = """
def always(peers): return peers.agree()
def early(peers, x):
    if x: return
    peers.agree()
def either(peers, x): return x or peers.gather(x)
def error(peers):
    try: pass
    except OSError: peers.agree()
def inside(peers, x):
    if x:
        agree(x)
    return x
def other(x): return x and x.gather(1)
"""
    functions_in_text = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    found = {f.name: [call.guarded for call in calls(f) if is_exchange(call)] for f in functions_in_text}
    expected = {"always": [False], "early": [True], "either": [True], "error": [True], "inside": [True], "other": []}
    assert found == expected
