"""Imports follow the ranks, and other libraries, layouts and collectives are used only in their own packages."""

import ast
import importlib
import json
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter

from source_tree import REPOSITORY, dotted, first_party, imports, modules

RANKS = {
    name: rank
    for rank, names in enumerate(
        (
            ("config", "batch", "display"),
            ("processes", "storage"),
            ("mesh",),
            ("kernels", "precision"),
            ("layers", "command_line"),
            ("models", "pipeline"),
            ("tokenizers",),
            ("checkpoint", "faults", "optim", "data", "metrics", "machine"),
            ("training", "inference"),
            ("interop", "tuning", "planning"),
            ("job", "tasks", "launcher", "server"),
            ("reporting", "tools"),
        )
    )
    for name in names
}
FRONT_DOOR = 12

UPWARD = {
    ("megajax.config.config_files", "megajax.training.run_config"): (
        "the root of a config file unless another is given: `load(file)` needs no more than the file"
    ),
    (
        "megajax.config.config_files",
        "megajax.command_line.foreign_flags",
    ): "`load` answers other trainers' names as the commands do",
}
"""Reviewed names of a higher rank; there are none by statement."""

BORDERS = {
    "optax": ("megajax.optim",),
    "orbax": ("megajax.checkpoint",),
    "grain": ("megajax.data.rows.loader",),
    "flax": tuple(
        f"megajax.{name}" for name in ("mesh", "layers", "models", "training", "inference", "checkpoint", "interop")
    ),
}

HEAVY = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax", "grain", "tensorstore")

COLLECTIVES = {
    "megajax.mesh.collectives": ({"all_gather", "psum_scatter", "psum", "pmax", "ppermute"}, "the place for them"),
    "megajax.kernels.context.collectives": (
        {"all_gather", "all_to_all", "ppermute", "psum_scatter"},
        "keys, values and heads between devices that hold parts of rows, in an island",
    ),
    "megajax.kernels.cross_entropy": ({"psum", "pmax"}, "softmax of a cut vocabulary, over the axes it is given"),
    "megajax.inference.device": ({"psum"}, "the experts of a row, which one replica has, in an island"),
    "megajax.layers.embedding": ({"psum", "psum_scatter", "all_gather"}, "islands of the cut vocabulary"),
    "megajax.layers.moe.dispatch": (
        {"all_gather", "all_to_all", "psum", "psum_scatter", "ragged_all_to_all"},
        "tokens to the devices of their experts and back, in an island",
    ),
    "megajax.layers.moe.router": (
        {"all_gather", "psum"},
        "counts and weights of all tokens of a microbatch, in an island",
    ),
    "megajax.pipeline.executor": ({"psum", "ppermute"}, "between stages"),
    "megajax.training.gradients.grads": ({"psum"}, "scalar sums of a step over the replicas"),
    "megajax.models.answers.answers": ({"psum", "pmin"}, "sums over answers in rows that are cut over `context`"),
    "megajax.models.answers.objectives": ({"psum"}, "two scalars: the KL baseline of a microbatch on all devices"),
    "megajax.models.decoder.multi_token_prediction": ({"psum"}, "two scalars of a row that is cut over `context`"),
    "megajax.inference.sampling.choose": ({"all_gather"}, "the best tokens of each part of a cut vocabulary"),
    "megajax.models.reduction": ({"psum"}, "one scalar: tokens counted in a row that is cut over `context`"),
}
"""Module -> collectives it may use, and why. kernels/ring comes here too."""

COMMUNICATES = {
    *("psum", "pmean", "pmax", "pmin", "psum_scatter", "all_gather", "all_gather_invariant", "all_to_all"),
    *("ragged_all_to_all", "ppermute", "pshuffle", "pswapaxes", "pbroadcast", "psend", "precv"),
}


def rank(package: str) -> int:
    """Of a package, or of a module at the top: a front door unless it has a rank of its own."""
    if not package:
        return FRONT_DOOR  # megajax/__init__.py, by name only: the names for notebooks.
    if package in RANKS:
        return RANKS[package]
    folder = REPOSITORY / "megajax" / package
    assert not folder.is_dir(), f"megajax/{package} has no rank: give it one in DESIGN's order, in this file"
    return FRONT_DOOR


def is_front_door(name: str) -> bool:
    return name.count(".") == 1 and package(name) not in RANKS and not (REPOSITORY / "megajax" / package(name)).is_dir()


def package(name: str) -> str:
    return (*name.split("."), "")[1]


@cache
def defined(name: str) -> frozenset[str]:
    """Functions, classes and values that are written at the top of a module."""
    names = set()
    for node in modules()[name].tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names.update(map(dotted, node.targets if isinstance(node, ast.Assign) else [node.target]))
    return frozenset(names)


def test_every_first_party_import_is_of_something_that_exists() -> None:
    missing = [actual for actual in first_party() if actual.target not in modules()]
    assert not missing, [str(actual) for actual in missing]
    absent = []
    for actual in first_party():
        for name in actual.names if actual.by_name else ():
            # A name that is not written at the top of its file may be made on first use.
            if name not in defined(actual.target) and not hasattr(importlib.import_module(actual.target), name):
                absent.append(f"{actual}:{name}")
    assert not absent


def test_imports_point_down() -> None:
    violations = []
    for actual in first_party():
        source, target = package(actual.source), package(actual.target)
        if source == target or not target or (actual.by_name and (actual.source, actual.target) in UPWARD):
            continue
        if rank(source) <= rank(target):
            violations.append(f"{actual}: rank {rank(source)} imports rank {rank(target)}")
    assert not violations, "\n".join(violations)
    by_name = {(actual.source, actual.target) for actual in first_party() if actual.by_name}
    assert set(UPWARD) <= by_name, "an exception nobody needs any more"


def test_presets_import_models_and_not_the_reverse() -> None:
    inside = "megajax.models.presets"
    violations = [f for f in first_party() if f.target.startswith(inside) and not f.source.startswith(inside)]
    below_front_doors = [actual for actual in violations if rank(package(actual.source)) < RANKS["interop"]]
    assert not below_front_doors, [str(actual) for actual in below_front_doors]


def test_no_cycles() -> None:
    graph = {name: set() for name in modules()}
    for actual in first_party():
        if not actual.by_name and actual.target != actual.source:
            graph[actual.source].add(actual.target)
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(" -> ".join(reversed(error.args[1]))) from None


def test_no_cycles_between_the_subfolders_and_files_of_a_folder() -> None:
    graph: dict[str, set[str]] = {}
    for actual in first_party():
        source, target = (".".join(name.split(".")[:3]) for name in (actual.source, actual.target))
        if not actual.by_name and source != target:
            graph.setdefault(source, set()).add(target)
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(" -> ".join(reversed(error.args[1]))) from None


def test_imports_of_this_library_stand_at_the_top() -> None:
    local = [str(actual) for actual in first_party() if actual.local and not actual.by_name]
    assert not local
    dodging = [module.file for module in modules().values() if "TYPE_CHECKING" in module.text]
    assert not dodging, "TYPE_CHECKING hides an import that goes the wrong way"


def test_other_libraries_stay_inside_their_borders() -> None:
    outside = []
    for actual in imports():
        allowed = BORDERS.get(actual.target.split(".")[0])
        if allowed and not any(actual.source == place or actual.source.startswith(f"{place}.") for place in allowed):
            outside.append(str(actual))
    assert not outside


def test_configs_build_things_of_their_own_package() -> None:
    targets = []
    for module in modules().values():
        for cls in module.nodes(ast.ClassDef):
            for node in (node for node in cls.body if isinstance(node, ast.AnnAssign)):
                if dotted(node.target) == "target" and node.value is not None:
                    targets.append((module, ast.literal_eval(node.value)))
    assert len(targets) > 10, "no targets found: has the way to write them changed?"
    strange = [f"{m.name}: {target}" for m, target in targets if package(target.partition(":")[0]) != m.package]
    assert not strange
    # That each exists is tested with the imports: targets are references by name.
    assert all(target.startswith("megajax.") and ":" in target for _, target in targets)


def test_configs_and_front_doors_load_without_jax_and_numpy() -> None:
    light = [name for name in modules() if package(name) in ("config", "batch") or name.endswith(".config")]
    light += [name for name in modules() if name.startswith("megajax.models.presets")]
    light += ["megajax.training.run_config", *(name for name in modules() if is_front_door(name))]
    program = f"""
import importlib, json, sys
heavy = {{}}
for name in {light!r}:
    importlib.import_module(name)
    new = [x for x in {HEAVY!r} if x in sys.modules and x not in sum(heavy.values(), [])]
    if new:
        heavy[name] = new
print(json.dumps(heavy))
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == {}


def test_partition_specs_are_made_in_mesh() -> None:
    actual: dict[str, str] = {}
    for module in modules().values():
        for node in module.nodes(ast.ImportFrom, ast.Call):
            if isinstance(node, ast.ImportFrom) and node.module == "jax.sharding":
                renamed = [alias.name for alias in node.names if alias.name == "PartitionSpec" and alias.asname]
                assert not renamed, f"{module.file}: PartitionSpec goes by its own name"
            if not isinstance(node, ast.Call) or dotted(node.func).split(".")[-1] != "PartitionSpec":
                continue
            if module.package in ("mesh", "processes"):
                continue
            if module.package != "training" or node.args:
                actual[module.name] = ast.unparse(node)
    assert not actual


def test_collectives_are_where_they_were_reviewed() -> None:
    actual: dict[str, set[str]] = {}
    for module in modules().values():
        for node in module.nodes(ast.Attribute, ast.ImportFrom):
            names = []
            if isinstance(node, ast.Attribute) and dotted(node.value) in ("lax", "jax.lax"):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and node.module == "jax.lax":
                names = [alias.name for alias in node.names]
            for name in COMMUNICATES.intersection(names):
                actual.setdefault(module.name, set()).add(name)
    assert actual == {name: allowed for name, (allowed, _) in COLLECTIVES.items()}
