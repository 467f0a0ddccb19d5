"""Gradients on two orders of devices: bitwise equal, unless a device computes something else."""

from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest
from small_jobs import run_config
from tiny_runs import QUICK, build_program, llama, place, rows, start, within
from user_errors import user_error

from megajax.faults.config import RecomputeConfig, ResilienceConfig
from megajax.job.integrity.integrity import idle_drills
from megajax.job.integrity.recompute import (
    CheckGradients,
    Recompute,
    RecomputeVerdict,
    devices_of,
    mismatch_message,
    scale_of,
    verdict,
)
from megajax.mesh.config import DATA_AXES, ParallelConfig
from megajax.mesh.mesh import build_mesh, rotated_mesh

ONE = np.float32(1)
LAYOUTS = {
    "zero1": ParallelConfig(data=4, data_sharding="zero1"),
    "fsdp": ParallelConfig(data=4, context=2, data_sharding="fsdp"),
    "pipeline": ParallelConfig(pipeline=2, data=4, data_sharding="zero1", shards=2),
}


@cache
def recompute(layout: str):
    """(scale, tolerance) -> verdict, and the mesh."""
    small = llama("selective" if layout == "fsdp" else "none")
    of = replace(build_program(small, LAYOUTS[layout], microbatches=2), options=QUICK)
    state, batch, recompute = start(of), place(of, rows()), Recompute(of)

    def run(scale, tolerance: float = 0.0) -> RecomputeVerdict | None:
        with within(of):
            result = recompute(state.inputs, batch, scale, tolerance)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)), "the state of the run stays"
        return result

    return run, of.mesh


def faulty(device, runs, mesh, number: int):
    return scale_of(mesh, ONE, device if number in runs else None)


@pytest.mark.parametrize(
    "layout", [name if name == "zero1" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_the_group_with_a_faulty_device_is_named(layout):
    run, mesh = recompute(layout)
    assert run(lambda mesh, number: scale_of(mesh, ONE, None)) is None
    for group in (0, 3):
        device = mesh.devices.reshape(mesh.shape["pipeline"], 4, -1)[:, group].flat[-1]
        always = run(partial(faulty, device, range(4)))
        assert always == RecomputeVerdict((group,), reproducible=True, alike=2)
        assert device in devices_of(mesh, always)
        assert f"{device.id} (process 0)" in mismatch_message(7, always, devices_of(mesh, always))
        for number in range(2):
            once = run(partial(faulty, device, [number]))
            assert once == RecomputeVerdict((group,), reproducible=False, alike=3)
    assert run(partial(faulty, device, range(4)), 0.01) is None, "a thousandth is tolerated"
    assert run(partial(faulty, device, range(4)), 1e-4) is not None


def test_groups_that_results_blame():
    none = np.zeros(4, bool)

    def where(*groups: int) -> np.ndarray:
        return np.isin(np.arange(4), groups)

    # Group 2 is faulty: its own rows in the first order, those of group 1 in the second.
    assert verdict(where(1, 2), none, none) == RecomputeVerdict((2,), True, 2)
    assert verdict(where(3, 0), none, none) == RecomputeVerdict((0,), True, 2)
    assert verdict(where(2), where(2), none) == RecomputeVerdict((2,), False, 3)
    assert verdict(where(2), none, where(2)) == RecomputeVerdict((3,), False, 3)
    assert verdict(where(2), none, none) == RecomputeVerdict((2, 3), True, 3), "one of two, nothing says which"
    two = np.ones(2, bool)
    assert verdict(two, ~two, ~two) == RecomputeVerdict((0, 1), True, 0)


def test_messages():
    devices = jax.devices()[:2]
    passing = mismatch_message(3, RecomputeVerdict((0,), False, 3), devices[:1])
    assert "device 0 (process 0) computed other gradients" in passing and "tolerance" not in passing
    assert "resilience.recompute.tolerance" in mismatch_message(3, RecomputeVerdict((0, 1), False, 0), devices)
    lasting = mismatch_message(3, RecomputeVerdict((0,), True, 2), devices)
    assert "devices 0 (process 0), 1 (process 0) reproducibly" in lasting and "2 other groups agree" in lasting


def test_devices_change_places():
    mesh = build_mesh(ParallelConfig(data=4, tensor=2, shards=2))
    rotated = rotated_mesh(mesh, DATA_AXES)
    assert rotated.axis_names == mesh.axis_names and rotated.axis_types == mesh.axis_types
    assert rotated.device_ids.shape == mesh.device_ids.shape
    assert rotated.device_ids.ravel().tolist() == [2, 3, 4, 5, 6, 7, 0, 1]
    with pytest.raises(ValueError, match="not neighbours"):
        rotated_mesh(mesh, ("replica", "expert"))


def test_a_single_group_is_refused():
    class Alone:
        mesh = build_mesh(ParallelConfig(data=1, tensor=2))
        cfg = run_config()

    with user_error("resilience.recompute"):
        CheckGradients(RecomputeConfig(every=5), Alone(), print, print, ())
    CheckGradients(RecomputeConfig(), Alone(), print, print, ())


def test_a_resume_with_a_single_group_is_not_ended_by_the_check():
    class Left:
        mesh = build_mesh(ParallelConfig(data=1))
        cfg = run_config(parallel=ParallelConfig(data=4, elastic=True))

    said = []
    check = CheckGradients(RecomputeConfig(every=5), Left(), print, said.append, ())
    assert not check.due(5) and "gradients are not recomputed" in said[0]


def test_impossible_drills_are_named():
    asked = ("kill:step=3", "kill:step=9", "frozen:step=3:process=2", "wrong_gradients:step=4:process=0")
    cfg = ResilienceConfig(inject=(*asked, "wrong_gradients:step=5:process=1", "nan:step=6"))
    lines = [*idle_drills(cfg, 6, 2, lambda step: step % 5 == 0)]
    assert [line.partition(" ")[0] for line in lines] == [f"resilience.inject={drill}" for drill in asked[1:]]
    assert "has 6 steps" in lines[0] and "process 1" in lines[1] and "step 4" in lines[2]
