"""Every shipped config: its settings, and the table of its weights with their layouts in each of the plan's tables."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from flax import nnx

from megajax.config import load
from megajax.config.config_files import functions_of
from megajax.config.dump import flatten, scalar_text
from megajax.layers.param import ParamSpec, specs
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.training.run_config import RunConfig

FOLDER = Path(__file__).parent
CONFIGS = FOLDER.parents[1] / "configs"


def _runs() -> list[str]:
    """ "file:function" of every run in configs/, except functions that only return another run of the file."""
    actual = []
    for file in sorted(CONFIGS.glob("*.py")):
        bodies = {node.name: node.body[-1] for node in ast.parse(file.read_text()).body if hasattr(node, "name")}
        names = functions_of(file)
        calls = {f"return {name}()" for name in names}
        actual += [f"{file.name}:{name}" for name in names if ast.unparse(bodies[name]) not in calls]
    return actual


def _name(run: str) -> str:
    return run.replace(".py:", ".")


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _axes(entries: tuple) -> str:
    """The entries of a PartitionSpec, or logical axes: "vocab, embed", "-, data+expert+context"."""
    names = ["-" if entry is None else "+".join(entry) if isinstance(entry, tuple) else entry for entry in entries]
    return ", ".join(names)


def _weight(spec: ParamSpec, plan: Plan) -> tuple[str, ...]:
    tables = (plan.params, plan.rules_in_step(spec.axes), plan.compute, plan.optimizer)
    places = [_axes(tuple(rules.spec(spec.axes))) for rules in tables]
    shape = " x ".join(map(str, spec.shape))
    return (spec.path, shape, _axes(spec.axes), spec.role, str(spec.init), *places)


def _text(run: str, cfg: RunConfig) -> str:
    plan = Plan.of(cfg.parallel)
    declared = specs(nnx.eval_shape(lambda: cfg.model.build(Layout(plan))))
    header = ("weight", "shape", "axes", "role", "init", "at rest", "during the step", "in use", "in the optimizer")
    settings = [f"{name} = {scalar_text(value)}" for name, value in flatten(cfg).items()]
    weights = _table([header, *(_weight(spec, plan) for spec in declared.values())])
    return "\n".join([f"configs/{run}", "", *settings, "", *weights]) + "\n"


@pytest.mark.parametrize("run", _runs())
def test_config_is_unchanged(run: str, golden: Callable[[str, str], None]) -> None:
    golden(_name(run), _text(run, load(str(CONFIGS / run))))


def test_every_golden_file_has_a_config() -> None:
    stored = {file.name.removesuffix(".txt") for file in FOLDER.glob("*.*.txt")}
    assert stored == {_name(run) for run in _runs()}
