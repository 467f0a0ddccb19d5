"""The loop with stand-in steps: what is dispatched, reported, saved and stopped, and in which order."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.faults.config import ResilienceConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.precision.config import PrecisionConfig
from megajax.training.guarded.guard import Guard
from megajax.training.guarded.loop import run_guarded_steps
from megajax.training.limits.step import StepControl
from megajax.training.loop import run_steps
from megajax.training.step_report import GuardLimits


class Rows(str):
    """A batch with a name."""

    def __getitem__(self, leaf: str) -> np.ndarray:
        assert leaf == "sample"
        return np.zeros((2, 4))


class Events:
    """A run that records what happens to it; its state is the number of the step."""

    def __init__(self, step: int = 0):
        self.seen, self.steps_done, self.state = [], step, step
        cfg = SimpleNamespace(precision=PrecisionConfig(compute="float32"))
        self.mesh = build_mesh(ParallelConfig(data=1))
        self.program = SimpleNamespace(observed={}, cfg=cfg, mesh=self.mesh, train_step=self.train_step)
        self.batches = ((Rows("rows"), 8 * n) for n in itertools.count(step + 1))

    def train_step(self, state: int, batch: str, control: StepControl | None = None):
        self.seen.append(f"dispatch {state + 1}")
        assert jax.config.jax_default_matmul_precision == "highest"
        metrics = {name: jnp.float32(state + 1) for name in ("loss", "grad_norm", "lr", "loss_scale", "other")}
        return state + 1, metrics | {"skipped": jnp.asarray(state == 2)}

    def iterate(self, last: int, **options):
        for info in run_guarded_steps(self, last, **options) if options else run_steps(self, last):
            self.seen.append(f"info {info.step}")
            yield info


class Every:
    phase = "save"

    def __init__(self, steps: int, name: str):
        self.steps, self.name = steps, name

    def due(self, step: int) -> bool:
        return step % self.steps == 0

    def __call__(self, run: Events, step: int) -> None:
        assert run.state == step
        run.seen.append(f"{self.name} {step}")


def test_results_arrive_one_step_late_and_completely():
    run = Events()
    infos = list(run.iterate(3))
    assert run.seen == ["dispatch 1", "dispatch 2", "info 1", "dispatch 3", "info 2", "info 3"]
    assert [info.step for info in infos] == [1, 2, 3]
    assert [info.consumed_samples for info in infos] == [8, 16, 24]
    assert [info.rows for info in infos] == [8, 8, 8]
    assert [info.skipped for info in infos] == [False, False, True]
    assert infos[1].loss == infos[1].grad_norm == infos[1].lr == 2.0
    assert infos[1].metrics == {"other": 2.0}
    assert type(infos[1].loss) is float
    assert type(infos[2].skipped) is bool
    assert all(info.seconds >= 0 for info in infos)


def test_everything_up_to_a_hook_s_step_is_reported_before_the_hook():
    run = Events()
    list(run.iterate(4, hooks=(Every(2, "evaluate"), Every(4, "save"))))
    assert run.seen == [
        *("dispatch 1", "dispatch 2", "info 1", "info 2", "evaluate 2"),
        *("dispatch 3", "dispatch 4", "info 3", "info 4", "evaluate 4", "save 4"),
    ]


def test_a_stop_ends_after_the_step_and_its_hooks():
    run = Events()
    list(run.iterate(10, hooks=(Every(2, "save"),), stopping=lambda: run.state == 2))
    assert run.seen == ["dispatch 1", "dispatch 2", "info 1", "info 2", "save 2"]


def test_an_error_in_a_late_result_comes_before_the_hook_of_the_next_step():
    """This way, the result of a failed step is never saved."""
    run = Events()
    with pytest.raises(ArithmeticError):
        for info in run.iterate(4, hooks=(Every(2, "save"),)):
            if info.step == 1:
                raise ArithmeticError
    assert "save 2" not in run.seen


def test_a_finished_run_has_no_steps():
    run = Events(step=5)
    assert list(run.iterate(5)) == []
    assert run.seen == []
    assert [info.step for info in run.iterate(6)] == [6]


class Watched(Events):
    """A run whose step 3 changes nothing the first time; nor does the step dispatched after it."""

    def __init__(self):
        super().__init__()
        self.batches = ((Rows(f"rows {n}"), 8 * n) for n in itertools.count(1))
        self.guard = Guard(ResilienceConfig(skip_steps=(9,)), None, self.mesh)

    def train_step(self, state: int, batch: str, control: StepControl):
        final, rerun = (
            GuardLimits(*control.limits.tolist()).final,
            bool(control.rerun) or (state == 2 and not control.limits[2]),
        )
        self.seen.append(f"{batch}{' again' * (final == 1)}{' unchanged' * rerun}")
        metrics = {name: jnp.float32(state + 1) for name in ("loss", "grad_norm", "lr", "loss_scale")}
        return state + (not rerun), metrics | {"skipped": jnp.asarray(rerun), "rerun": jnp.asarray(rerun)}


@pytest.mark.parametrize("pause", [None, 3, 4])
def test_a_suspicious_step_and_the_one_after_it_are_repeated_in_order(pause):
    run = Watched()
    hooks = () if pause is None else (Every(pause, "save"),)
    infos = list(run.iterate(5, guard=run.guard, hooks=hooks))
    behind = [] if pause == 3 else ["rows 4 unchanged"]
    assert [line for line in run.seen if line.startswith("rows")] == [
        *("rows 1", "rows 2", "rows 3 unchanged", *behind, "rows 3 again", "rows 4", "rows 5")
    ]
    assert [info.step for info in infos] == [1, 2, 3, 4, 5]
    assert [info.consumed_samples for info in infos] == [8, 16, 24, 32, 40]
    assert [info.guarded.first_try is not None for info in infos] == [False, False, True, False, False]
    if pause:
        assert run.seen.index(f"save {pause}") > run.seen.index(f"info {pause}")
