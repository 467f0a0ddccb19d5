"""Plans of models of several sections, of other heads, and of frozen weights."""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import pytest
from flax import nnx
from tiny_encoders import bert, t5
from tiny_runs import ONE, TheseRows, build_program, gpt, llama
from user_errors import user_error

from megajax.layers.param import specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.distilled.config import with_teacher
from megajax.models.facts import count_flops
from megajax.planning.compiled.devices import read_cluster
from megajax.planning.cost.estimate import Case, Estimate, to_dict
from megajax.planning.ranking import CompiledFigures, find_best
from megajax.planning.search import Task
from tests.models.test_section_facts import IMAGES

MODELS = {"t5": t5(), "bert": bert(), **IMAGES}


def case(model: Any, parallel: ParallelConfig = ONE, devices: int = 1, trainable: tuple[str, ...] = ("*",)) -> Case:
    cluster, _ = read_cluster(f"h100:{devices}")
    assert cluster is not None
    cfg = build_program(llama(), ONE, microbatches=1).cfg
    leaves = tuple((name, leaf.dtype) for name, leaf in model.schema().items())
    optimizer: Any = replace(cfg.optimizer, trainable=trainable)
    cfg = cfg.but(model=model, data=TheseRows(leaves), parallel=parallel, optimizer=optimizer)
    return Case(cfg, cluster)


def planned(model: Any, trainable: tuple[str, ...] = ("*",)) -> Estimate:
    return case(model, trainable=trainable).estimate


def matrices(model: Any) -> dict[str, int]:
    """Sizes by path of all weights outside of stacks, except norms and biases."""
    declared = specs(nnx.eval_shape(lambda: model.build(Layout(Plan.of(ParallelConfig())))))
    return {path: prod(spec.shape) for path, spec in declared.items() if len(spec.shape) > 1}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_model_has_a_plan_by_formula(model: Any) -> None:
    """Weights and moments are those of the module; all figures are present."""
    step = planned(model)
    assert step.memory.parameters == 4 * sum(matrices(model).values())
    assert step.memory.optimizer == 2 * step.memory.parameters
    figures: Mapping[str, Any] = to_dict(step)
    assert min(figures[name] for name in ("step_seconds", "mfu_causal", "activations_gib", "gradients_gib")) > 0


@pytest.mark.parametrize("patterns", [("stack.*",), ("encoder.*", "tokens"), ("*.cross.*",)])
def test_frozen_weights_have_neither_gradients_nor_moments(patterns: tuple[str, ...]) -> None:
    every, partial, held = planned(t5()), planned(t5(), patterns), matrices(t5())
    trained = {path: n for path, n in held.items() if any(fnmatchcase(path, pattern) for pattern in patterns)}
    share = sum(trained.values()) / sum(held.values())
    assert 0.1 < share < 0.9
    assert partial.memory.parameters == every.memory.parameters
    for name in ("optimizer", "gradients"):
        assert getattr(partial.memory, name) == pytest.approx(share * getattr(every.memory, name))
    assert partial.optimizer_seconds < every.optimizer_seconds


def test_a_frozen_section_computes_no_gradients_of_weights() -> None:
    parallel = ParallelConfig(data=8, data_sharding="fsdp")
    partial, every = (case(t5(), parallel, 8, trainable).estimate for trainable in (("stack.*",), ("*",)))
    assert partial.matmul_seconds < every.matmul_seconds
    scatters = [row.what for row in partial.traffic if row.kind == "reduce-scatter"]
    assert "a layer's gradients" in scatters and "encoder: a layer's gradients" not in scatters


def test_the_backward_pass_stops_at_the_first_trained_weight() -> None:
    """A frozen first section saves nothing, as in compiled programs; a frozen last one saves for the first."""
    every, last, first = (planned(t5(), patterns) for patterns in (("*",), ("stack.*",), ("encoder.*",)))
    assert last.memory.activations < first.memory.activations == every.memory.activations
    (encoder, decoder), runs = last.run.towers, (last.run, first.run, planned(t5(), ("tokens",)).run)
    assert [tower.differentiated for run in runs for tower in run.towers] == [False, True, True, True, True, True]
    saved = sum(block.saved_bytes(decoder.section.recomputing.policy(), decoder.share) for block in decoder.blocks)
    assert last.memory.activations == decoder.repeats * saved and encoder.tokens > 0
    assert not [row for row in last.traffic if row.what.startswith("encoder") and "backward" in row.what]


def test_a_teacher_has_a_forward_pass_alone() -> None:
    """Operations of a step: those of the student, and a third of what the teacher's would be."""
    student, teacher = llama(repeats=1), replace(gpt(), sequence_length=llama().sequence_length)
    distilled = with_teacher(student, teacher)
    whole, alone, third = count_flops(distilled), count_flops(student), count_flops(teacher)
    assert whole.causal == pytest.approx(alone.causal + third.causal / 3)
    assert whole.full == pytest.approx(alone.full + third.full / 3)
    step, of_student = planned(distilled), planned(student)
    assert [tower.differentiated for tower in step.run.towers] == [False, True]
    assert step.memory.parameters == 4 * sum(matrices(distilled).values())
    for name in ("optimizer", "gradients"):
        assert getattr(step.memory, name) == getattr(of_student.memory, name)
    assert step.memory.activations < planned(student).memory.activations + planned(teacher).memory.activations


def test_a_search_proposes_no_pipeline_of_several_sections() -> None:
    task = Task(case(t5(), ParallelConfig(), 8))
    assert {pipeline for _, pipeline in task.groups()} == {1}
    assert find_best(task, CompiledFigures(), 0, lambda case: {}).best.pipeline == 1
    with user_error():
        find_best(replace(task, fixed={"pipeline": 2}), CompiledFigures(), 0, lambda case: {})


def test_rows_of_every_section_are_sharded_along_the_sequence() -> None:
    sizes = {"pipeline": 1, "expert": 1, "context": 1, "tensor": 4}
    odd = replace(t5(), encoder_length=10)
    assert [problem.setting for problem in odd.mesh_problems(sizes, sequence=True)] == ["encoder_length"]
    assert not [*odd.mesh_problems(sizes, sequence=False)]
