"""docs/platforms.md lists every place where a platform decides, with the tests that walk both sides on CPUs."""

import ast
import re
from collections.abc import Iterator
from functools import cache

from source_tree import REPOSITORY, modules

TABLE = REPOSITORY / "docs/platforms.md"
JOINT = "## What processes decide together"
"""The rest of the page: tests/architecture/test_joint_decisions.py."""

NAMES = frozenset(
    (
        *("platform", "platforms", "platform_version", "jax_platforms", "platform_dependent", "default_backend"),
        *("device_kind", "compute_capability", "capability", "memory_stats", "live_executables", "cuda_versions"),
        *("memory_kind", "with_memory_kind", "local_device", "local_devices", "local_device_ids"),
        *("device_count", "local_device_count", "addressable_devices", "addressable_shards", "is_fully_addressable"),
        *("installed_gpus", "visible_gpus"),
        *("process_count", "process_index", "process_id", "is_initialized", "pallas_call", "interpret"),
    )
)
"""Names and attributes by which a program learns its platform."""
MODULES = ("platform", "sys")
"""Of the standard library: their attributes are about the host."""
WORDS = re.compile(
    r"(gpu|cuda|cpu|rocm|pinned_host|nvidia\S*|JAX_PLATFORMS|CUDA_VISIBLE_DEVICES|JAX_SKIP_CUDA_CONSTRAINTS_CHECK)"
    r"|live_executables|compute_capability|/proc/driver\S*|\S*__cudnn\S*|/device:\(\S*"
)
"""Strings that are no text for people."""


def functions(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(qualified name of the function or class it is in, node), docstrings left out."""
    parents = [("", tree)]
    for place, parent in parents:
        for child in ast.iter_child_nodes(parent):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            is_definition = isinstance(child, ast.FunctionDef | ast.ClassDef)
            parents.append((f"{place}.{child.name}".lstrip(".") if is_definition else place, child))
            yield place, child


def learns(node: ast.AST) -> bool:
    """Whether this names something by which a program learns its platform."""
    if isinstance(node, ast.Attribute):
        of = node.value.id if isinstance(node.value, ast.Name) else ""
        return (node.attr in NAMES and of not in MODULES) or (of, node.attr) == ("jax", "memory")
    if isinstance(node, ast.Name):
        return node.id in NAMES - {"platform"}
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and WORDS.fullmatch(node.value) is not None


@cache
def places_in_code() -> set[str]:
    """`file: function`, below megajax; the module itself has no function."""
    places = set()
    for module in modules().values():
        name = module.file.removeprefix("megajax/")
        places |= {f"{name}: {place or 'module'}" for place, node in functions(module.tree) if learns(node)}
    return places


@cache
def rows() -> list[list[str]]:
    """Cells of the rows of the tables: place, what decides, tests."""
    text = TABLE.read_text().partition(f"\n{JOINT}\n")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def listed() -> set[str]:
    places = set()
    for cells in rows():
        file, *names = re.findall(r"`([^`]+)`", cells[0])
        places |= {f"{file}: {name}" for name in names}
    return places


def test_every_place_that_depends_on_the_platform_is_in_the_table() -> None:
    missing = sorted(places_in_code() - listed())
    assert not missing, f"put into {TABLE.name}, with tests of both sides: {missing}"


def test_the_table_lists_nothing_else() -> None:
    assert not (removed := sorted(listed() - places_in_code())), f"take out of {TABLE.name}: {removed}"


def test_every_row_names_tests() -> None:
    for cells in rows():
        assert len(cells) == 3 and re.search(r"`test_\w+::test_\w+`", cells[2]), cells


def test_the_tests_named_exist() -> None:
    tests = {path.stem: path for path in (REPOSITORY / "tests").rglob("test_*.py")}
    named_tests = set(re.findall(r"`(test_\w+)::(\w+)`", TABLE.read_text()))
    assert named_tests
    missing = [f"{file}::{test}" for file, test in named_tests if f"def {test}(" not in tests[file].read_text()]
    assert not missing


def test_the_reader_finds_such_places() -> None:
    text = (
        '"""cuda"""\nimport platform\nplatform.machine()\n\ndef f(d):\n    return d.platform == "gpu"\n\nX = "a gpu"\n'
    )
    found_places = [(place, type(node).__name__) for place, node in functions(ast.parse(text)) if learns(node)]
    assert found_places == [("f", "Attribute"), ("f", "Constant")]
