"""Properties of the executor besides its numbers, which tests/layouts compares with one device's."""

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import jax
import numpy as np
import pytest
from tiny_decoders import hybrid
from tiny_runs import (
    LENGTH,
    ONE,
    QUICK,
    ROWS,
    build_program,
    gpt,
    in_order,
    llama,
    pair,
    place,
    rows,
    start,
    with_block,
    within,
)

from megajax.batch import Grads
from megajax.layers.stack.spans import Span
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.pipeline import executor
from megajax.pipeline.executor import tick_loops
from megajax.pipeline.layer_forward_backward import LayerLoop
from megajax.pipeline.schedule import build
from megajax.planning.compiled.hlo import read
from megajax.training.program import Program


def stages(count: int, *, data: int = 1, tensor: int = 1, **settings: Any) -> ParallelConfig:
    return ParallelConfig(pipeline=count, data=data, tensor=tensor, **settings)


INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}

CASES: dict[str, tuple[DecoderConfig, ParallelConfig, int]] = {
    "interleaved padded": (llama(repeats=5), stages(2, **INTERLEAVED), 4),
    "interleaved no wait, padded, dropout": (
        gpt("selective", repeats=5),
        stages(2, data=2, loss_wait=0, layers=(1, 2, 1, 1), **INTERLEAVED),
        6,
    ),
    "gpipe circular, two blocks": (
        pair("selective", 8, tied=True, learned_positions=False, dropout=0.1),
        stages(2, data=2, data_sharding="fsdp", schedule="gpipe", virtual_stages=3),
        4,
    ),
    # Rings of stages with fewer layers of a kind have places that are never written.
    "stages of different layers": (hybrid("M-*"), stages(2), 2),
}


def grads_of(program: Program, *runs: tuple[float, float]) -> list[Grads]:
    """Gradients by (fill, loss scale), of one compiled program."""
    with within(program):
        inputs = start(program).params, place(program, rows())

        def grads(fill: Any, scale: Any, *inputs: Any) -> Grads:
            return program.grad_fn(fill=fill)(*inputs, scale)

        numbers = [tuple(map(np.float32, run)) for run in runs]
        compiled = jax.jit(grads).lower(*numbers[0], *inputs).compile(compiler_options=dict(QUICK))
        return [jax.device_get(compiled(*run, *inputs)) for run in numbers]


@pytest.mark.parametrize(
    "case", [name if n == 0 else pytest.param(name, marks=pytest.mark.slow) for n, name in enumerate(CASES)]
)
def test_results_do_not_depend_on_initial_buffers(case: str) -> None:
    """NaN in every buffer: idle stages compute on it, and nothing of that is ever added, not even times zero."""
    model, parallel, microbatches = CASES[case]
    program = build_program(model, parallel, microbatches=microbatches)
    clean, filled, scaled = grads_of(program, (0, 1), (np.nan, 1), (np.nan, 8))
    jax.tree.map(np.testing.assert_array_equal, filled, clean)
    assert all(np.isfinite(g).all() for g in filled.grads.values())
    _, padding = in_order(program, filled.grads)
    assert padding == 0
    # A power of two scales exactly what is differentiated, and nothing that is reported.
    assert scaled.metrics == clean.metrics
    for path, g in clean.grads.items():
        np.testing.assert_allclose(scaled.grads[path], 8 * g, rtol=1e-6, atol=1e-6 * np.abs(g).max(), err_msg=path)


@pytest.mark.slow
def test_many_chunks_share_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are the same from rows that are data rather than static."""
    model, parallel, microbatches = CASES["interleaved padded"]
    program = build_program(model, parallel, microbatches=microbatches)
    (apart,) = grads_of(program, (0, 1))
    monkeypatch.setattr(executor, "MOST_LOOPS", 1)
    (shared,) = grads_of(build_program(model, parallel, microbatches=microbatches), (np.nan, 1))
    for path, g in apart.grads.items():
        np.testing.assert_allclose(shared.grads[path], g, rtol=1e-5, atol=1e-6 * np.abs(g).max(), err_msg=path)


def test_work_in_some_ticks_is_named_after_their_number() -> None:
    """Plans read these names: see planning.hlo."""
    schedule = build("interleaved", stages=2, microbatches=4, chunks=2, loss_wait=1)
    actual = tick_loops(schedule)
    for chunk in range(2):
        matches = [re.fullmatch(r"runs_(\d+)_of_(\d+)", loop.runs(schedule.backward, chunk)) for loop in actual]
        ticks = [loop.stop - loop.start for loop in actual]
        shares = [int(match[1]) / int(match[2]) for match in matches if match]
        assert sum(share * count for share, count in zip(shares, ticks, strict=True)) == pytest.approx(4)
    one_chunk = tick_loops(build("1f1b", stages=4, microbatches=8, loss_wait=1))
    assert {which for loop in one_chunk for which in (loop.ready, loop.embed, loop.leave)} == {"none", "all"}


def test_loops_say_how_many_layers_a_stage_has_on_average() -> None:
    """Their names say so, which plans of compiled programs read, because the number itself is data."""
    program = build_program(hybrid("--*"), stages(2, layers=(2, 1)), microbatches=2)
    with within(program):
        lowered = jax.jit(program.grad_fn()).lower(program.state_like().inputs, program.batch_like(), np.float32(1))
    names = set(re.findall(r"runs_(\d+)_of_2", lowered.as_text(debug_info=True)))
    assert names == {"1", "2"}


@cache
def compiled(parallel: ParallelConfig, microbatches: int) -> tuple[Program, str]:
    """The gradients of `distinct`: their program, and its text."""
    program = build_program(distinct(), parallel, microbatches=microbatches)
    with within(program):
        lowered = jax.jit(program.grad_fn()).lower(program.state_like().inputs, program.batch_like(), np.float32(1))
        return program, lowered.compile(compiler_options=dict(QUICK)).as_text()


def distinct() -> DecoderConfig:
    """A model without a matrix of the shape of an activation: 40 hidden, heads of 6, 48 in between."""
    return replace(with_block(llama(repeats=5), mixer={"head_dim": 6}), hidden=40)


UNDIVIDED = stages(4, data=2, data_sharding="replicate")


@pytest.mark.parametrize(
    ("parallel", "microbatches"),
    [
        (UNDIVIDED, 3),
        pytest.param(
            stages(2, data=2, tensor=2, sequence=True, data_sharding="replicate", **INTERLEAVED),
            4,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["1f1b-replicate", "interleaved-sequence-replicate"],
)
def test_communication_between_stages(parallel: ParallelConfig, microbatches: int) -> None:
    """Between stages only single activations travel, between replicas nothing before the last microbatch is done."""
    program, text = compiled(parallel, microbatches)
    actual = read(text, program.mesh.shape).collectives
    between = [collective for collective in actual if "pipeline" in collective.groups.axes]
    activation = ROWS // (microbatches * parallel.data) * LENGTH * program.cfg.model.hidden * 4
    assert {collective.kind for collective in between} == {"collective-permute", "all-reduce"}
    assert max(collective.bytes // collective.arrays for collective in between) <= activation
    # A steady tick sends one activation forward and one backward.
    permutes = Counter()
    for collective in between:
        if collective.kind == "collective-permute" and collective.place.path:
            permutes[collective.place.path] += collective.arrays
    assert max(permutes.values()) == 2
    between_replicas = [collective for collective in actual if "data" in collective.groups.axes]
    assert between_replicas
    assert not [collective for collective in between_replicas if collective.place.path]


def test_gradients_are_never_stacked_over_stages_or_microbatches() -> None:
    """They would be if the compiler or autodiff went through the loop over ticks."""
    program, text = compiled(UNDIVIDED, 3)
    rows = len(program.partition.order()) // 4
    assert stacks(text, program, more_than=rows) == []
    assert stacks(text, program, more_than=rows - 1), "the search finds what a stage has"


def stacks(text: str, program: Program, *, more_than: int) -> list[str]:
    """Shapes of arrays in a compiled program that hold a layer's matrix, in any layout, for so many rows or more."""
    matrices = {
        tuple(sorted(spec.shape[1:])) for spec in program.declared.values() if spec.layers and len(spec.shape) > 2
    }
    actual = []
    for shape in sorted(set(re.findall(r"\w\[([\d,]+)\]", text))):
        sizes = tuple(map(int, shape.split(",")))
        for matrix in matrices:
            behind = len(sizes) - len(matrix)
            if behind > 0 and tuple(sorted(sizes[behind:])) == matrix and prod(sizes[:behind]) > more_than:
                actual.append(shape)
    return actual


@pytest.mark.parametrize(
    ("model", "compute", "parallel"),
    [
        (llama("none", 4), "bfloat16", stages(2)),
        (llama("full", 4), "float32", stages(2)),
        (gpt("selective", 4), "float32", ONE),
        (llama("selective", 4), "bfloat16", ONE),
    ],
)
def test_saved_activations_hold_no_weights(
    model: DecoderConfig, compute: str, parallel: ParallelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither weights nor copies of them in the compute dtype are in the ring."""
    program = build_program(model, parallel, microbatches=8, compute=compute)
    saved = look_at(program, monkeypatch)
    weights = {spec.shape[1:] for spec in program.declared.values() if spec.layers}
    assert (3, 16, 32) in saved
    assert not weights.intersection(saved), "a weight is in the ring"
    assert not weights.intersection(shape[1:] for shape in saved if shape[0] in (1, 2, 4)), "stacked weights are"
    if model.recompute == "full":
        assert {shape for shape in saved if shape[0] == 3} == {(3, 16, 32)}, "only a layer's input is kept"


def look_at(program: Program, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what a layer saves, B = 3 rows, as a program of two stages allocates it."""
    saved_shapes = []
    original = LayerLoop._residuals

    def saved(self: LayerLoop, span: Span, x: jax.Array, ctx: Any) -> Any:
        out = original(self, span, x, ctx)
        saved_shapes.append([leaf.shape for leaf in jax.tree.leaves(out)])
        return out

    monkeypatch.setattr(LayerLoop, "_residuals", saved)
    state = program.state_like()
    with within(program):
        jax.eval_shape(program.grad_fn(), state.params, program.batch_like(), state.loss_scale)
    assert all(shapes == saved_shapes[0] for shapes in saved_shapes)
    return saved_shapes[0]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("wait", [0, 1])
def test_segments_cover_the_ticks_and_have_the_losses_of_the_table(name: str, wait: int) -> None:
    schedule = build(name, stages=4, microbatches=8, chunks=2 if name == "interleaved" else 1, loss_wait=wait)
    actual = tick_loops(schedule)
    assert [loop.start for loop in actual] == [0, *(loop.stop for loop in actual[:-1])]
    assert actual[-1].stop == schedule.ticks
    for loop in actual:
        losses = schedule.head[loop.start : loop.stop] >= 0
        assert loop.head == ("all" if losses.all() else "some" if losses.any() else "none")
        assert loop.forward == (schedule.forward.microbatch[loop.start : loop.stop] >= 0).any()
        assert loop.backward == (schedule.backward.microbatch[loop.start : loop.stop] >= 0).any()
