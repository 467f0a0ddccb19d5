"""Steps with wrong numbers: repeated, skipped or the end of the run, and the training that follows."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from small_jobs import model, run_config

from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.faults.config import ResilienceConfig
from megajax.job.notebook import prepare
from megajax.job.suspicious_steps import Watch
from megajax.layers.param import ONES, ParamSpec
from megajax.mesh.layer_metrics import Measure, Measured
from megajax.training.guarded.guard import Guard, NumericFault, SpikeRule, UnrepeatedFault
from megajax.training.guarded.loop import run_guarded_steps
from megajax.training.limits.nonfinite_gradients import nonfinite_message
from megajax.training.program import Program
from megajax.training.session import Parts, Run
from megajax.training.step_report import StepInfo

STEPS = 7


class Log:
    def __init__(self):
        self.events = []

    def event(self, name: str, /, **fields) -> None:
        self.events.append((name, fields))


class Pause:
    """A hook that is due at one step, where the loop waits for everything before it."""

    phase = "save"

    def __init__(self, step: int):
        self.step = step

    def due(self, step: int) -> bool:
        return step == self.step

    def __call__(self, run: Run, step: int) -> None:
        assert run.steps_done == step


@pytest.fixture(scope="module")
def parts() -> Parts:
    """Parts whose train step takes the factors of drills; the guard of each test decides which steps have one."""
    with_process_faults = ResilienceConfig(inject=("nan:step=1",))
    return prepare(run_config(steps=STEPS, model=model(repeats=1), resilience=with_process_faults))


FRESH: dict[int, object] = {}
"""id of parts -> their fresh state, compiled once."""


def fresh_run(parts: Parts) -> Run:
    return Run(parts, FRESH.setdefault(id(parts), parts.program.fresh_state())(), parts.loader(parts.splits.train, 0))


def finished(parts: Parts, hooks=(), **settings) -> tuple[list[StepInfo], list]:
    """A run from fresh weights, all with one compiled step; its steps and its events."""
    run = fresh_run(parts)
    guard, log = Guard(ResilienceConfig(**settings), parts.cfg.precision.floor(), run.mesh), Log()
    watch = Watch(guard, parts.cfg.precision.floor(), log, lambda line: None)
    infos = []
    for info in run_guarded_steps(run, STEPS, hooks, guard=guard):
        infos.append(info)
        watch(info)
    assert run.steps_done == STEPS
    assert int(run.state.consumed_samples) == 8 * STEPS
    assert int(run.state.skipped) == sum(info.skipped for info in infos)
    run.close()
    assert run.train_step._cache_size() == 1
    return infos, log.events


def numbers(infos: list[StepInfo]) -> list[tuple]:
    return [(i.step, i.loss, i.grad_norm, i.lr, i.consumed_samples, i.skipped) for i in infos]


@pytest.fixture(scope="module")
def undisturbed(parts) -> list[StepInfo]:
    infos, events = finished(parts)
    assert events == []
    return infos


@pytest.mark.parametrize("pause", [None, 3, 4])
@pytest.mark.parametrize(
    "inject", [("nan:step=3",), ("nan:step=3", "inf:step=4"), ("nan_gradients:step=3",), ("nan:step=1", "inf:step=7")]
)
def test_a_transient_fault_leaves_no_trace(parts, undisturbed, inject, pause):
    infos, events = finished(parts, inject=inject, hooks=() if pause is None else (Pause(pause),))
    assert numbers(infos) == numbers(undisturbed)
    assert [name for name, _ in events] == ["transient_fault"] * len(inject)
    assert events[0][1]["step"] == int(inject[0][-1])
    if "gradients" in inject[0]:
        assert events[0][1]["why"] == "gradient norm (nan) is not finite"
    else:
        assert events[0][1]["why"] == "loss (nan) and gradient norm (nan) are not finite"


def test_the_optimizer_state_is_restored_too(parts, undisturbed):
    """Weights after the last step, not only its loss."""
    runs = []
    for settings in ({}, {"inject": ("nan:step=2", "spike:step=5"), "spike_factor": 3.0, "spike_window": 2}):
        run = fresh_run(parts)
        list(run_guarded_steps(run, STEPS, guard=Guard(ResilienceConfig(**settings), None, run.mesh)))
        runs.append({path: np.asarray(w).tobytes() for path, w in run.state.params.items()})
        run.close()
    assert runs[0] == runs[1]


def test_a_persistent_fault_ends_the_run(parts):
    with pytest.raises(NumericFault) as raised:
        finished(parts, inject=("nan_gradients:step=4:always",))
    assert raised.value.code == 17
    text = str(raised.value)
    assert "step 4: gradient norm (nan) is not finite; loss 3." in text
    assert "; the gradients of all weights are not finite; identical when" in text
    assert "identical when the step was run again" in text


@pytest.mark.slow
def test_weights_with_nonfinite_gradients_are_named(monkeypatch):
    """Nothing is compiled or computed for it unless a step was nonfinite twice."""
    path, original = "stack.blocks.0.mlp.up", Program.grad_fn

    def poisoned(program: Program, **options):
        grad_fn = original(program, **options)

        def grads(params, batch, scale):
            out = grad_fn(params, batch, scale)
            poison = jnp.where((batch["sample"] == 8 * 3).any(), jnp.nan, 0.0)  # a row of step 4
            return out._replace(grads={**out.grads, path: out.grads[path].at[1, 2, 3].add(poison)})

        return grads

    monkeypatch.setattr(Program, "grad_fn", poisoned)
    fresh_parts = prepare(run_config(steps=STEPS, model=model(repeats=2)))
    infos, events = finished(fresh_parts, stop_on_nonfinite=False)
    assert [info.guarded.nonfinite is not None for info in infos] == [step == 4 for step in range(1, STEPS + 1)]
    expected = rf"gradients not finite: {re.escape(path)} of layer 1, of \d+ weights"
    assert re.fullmatch(expected, dict(events)["persistent_fault"]["blame"])
    with pytest.raises(NumericFault, match=rf"nan; {expected}; identical when the step"):
        finished(fresh_parts)
    assert fresh_parts.program.nonfinite_gradients._cache_size() == 1


def test_the_message_about_nonfinite_gradients():
    declared = {
        f"w{n}": ParamSpec(f"w{n}", (4, 2), ("layer", "embed"), ONES, "weight", "w", (0, 2, 4, -1)) for n in range(9)
    }
    declared["tokens"] = ParamSpec("tokens", (7, 2), ("vocab", "embed"), ONES, "weight", "tokens", ())
    none = {path: np.zeros(spec.shape[0], bool) for path, spec in declared.items()}
    three = none | {"w1": np.array([1, 1, 0, 0], bool), "w3": np.array([1, 1, 1, 0], bool), "tokens": np.ones(7, bool)}
    assert nonfinite_message(three, declared) == "gradients not finite: w1 of layers 0, 2, w3, tokens, of 10 weights"
    assert nonfinite_message(none, declared) == "the gradients are finite when computed without an update"
    most = none | {path: np.array([1, 1, 1, 0], bool) for path in declared if path != "tokens"}
    assert nonfinite_message(most, declared).endswith("w4, w5 and 3 more, of 10 weights")


def test_the_first_faulty_layer_is_named():
    """Later layers receive its output."""
    measure = Measure(name="wrong", of=lambda state: state, fault="logits of the router")
    of_layers = Measured.of_layers(measure, {1: np.array(0.0), 3: np.array(2.0), 4: np.array(9.0)})
    other = Measured.of_layers(Measure(name="other", of=lambda state: state), {1: np.array(1.0)})
    message = nonfinite_message({"w": np.zeros(1, bool)}, {}, [other, of_layers])
    assert message.startswith("logits of the router not finite, first in layer 3 (of 2); the gradients are finite")


def test_numbers_that_differ_between_repetitions_point_at_the_hardware(parts):
    """Exit code 16: a restart may help, above all on other machines."""
    expected = r"gave other numbers .loss nan.*suspect the hardware"
    with pytest.raises(UnrepeatedFault, match=expected) as raised:
        finished(parts, inject=("nan:step=4", "nan_gradients:step=4:always"))
    assert raised.value.code == 16


def test_three_ways_to_skip_an_update_are_equal(parts, undisturbed):
    """skip_steps, a fault that stays and is gone on from, and a spike that is skipped; rows are read in all of them."""
    skipped, events = finished(parts, skip_steps=(5,))
    assert [info.skipped for info in skipped] == [step == 5 for step in range(1, STEPS + 1)]
    assert events[0][0] == "update_skipped"
    assert numbers(skipped)[:4] == numbers(undisturbed)[:4]
    assert skipped[5].lr == undisturbed[4].lr  # The schedule counts rows of updates.
    assert skipped[5].loss != undisturbed[5].loss
    gone_on, _ = finished(parts, inject=("nan:step=5:always",), stop_on_nonfinite=False)
    spike, events = finished(
        parts, inject=("spike:step=5:always",), spike_factor=3.0, spike_window=2, spike_action="skip"
    )
    assert events[0][0] == "persistent_fault" and events[0][1]["same_again"] and not events[0][1]["made"]
    norm, _ = finished(parts, inject=("spike:step=5:always",), largest_norm=100.0)
    for other_run in (gone_on, spike, norm):
        assert numbers(other_run)[5:] == numbers(skipped)[5:]


def test_a_transient_spike_and_a_persistent_one(parts, undisturbed):
    rule = {"spike_factor": 3.0, "spike_window": 2}
    for reference in ("largest", "median"):
        infos, events = finished(parts, inject=("spike:step=5",), spike_reference=reference, **rule)
        assert numbers(infos) == numbers(undisturbed)
        assert [name for name, _ in events] == ["transient_fault"]
        assert f"is above 3 x the {reference}" in events[0][1]["why"]
    accepted, events = finished(parts, inject=("spike:step=5:always",), **rule)
    assert events[0][0] == "persistent_fault" and events[0][1]["made"]
    assert accepted[4].loss > 3000 and not accepted[4].skipped
    with pytest.raises(NumericFault, match=r"step 5: loss .* is above 3 x the median of the last 2 losses"):
        finished(parts, inject=("spike:step=5:always",), spike_action="stop", spike_reference="median", **rule)


def test_faults_without_repetition(parts, undisturbed):
    with pytest.raises(NumericFault):
        finished(parts, inject=("nan:step=4",), rerun=False)
    infos, _ = finished(parts, inject=("nan:step=4",), rerun=False, stop_on_nonfinite=False)
    assert infos[3].skipped


@pytest.mark.parametrize("reference", ["largest", "median"])
def test_a_pause_or_a_resume_changes_no_limit(reference):
    def limits(pauses: tuple[int, ...]) -> list[float]:
        rule, actual = SpikeRule(2.0, reference, 4), []
        for step in range(1, 20):
            actual.append(rule.limit(step))
            rule.note(step, 5.0 + (7 * step) % 5)
            if step in pauses:
                state = json.loads(json.dumps(rule.state()))
                rule = SpikeRule(2.0, reference, 4)
                rule.restore(state)
        return actual

    assert limits(()) == limits((3, 4, 9, 15))
    assert limits(())[:5] == [float("inf")] * 5 and max(limits(())[5:]) < 20


@pytest.mark.parametrize(
    ("settings", "listed"),
    [
        ({"inject": ("nan",)}, "KIND:step=N"),
        ({"inject": ("fire:step=3",)}, "nan, inf, spike, nan_gradients"),
        ({"inject": ("nan:step=0",)}, "steps count from 1"),
        ({"spike_factor": 1.0}, "spike_factor: must be above 1"),
        ({"spike_window": 0}, "spike_window: must be at least 1"),
        ({"spike_factor": 2.0, "rerun": False}, "spike_action: accept with rerun=false"),
        ({"largest_norm": 0.0}, "largest_norm: must be above 0"),
        ({"skip_steps": (0,)}, "skip_steps.0: must be at least 1, got 0\n      steps count from 1"),
        ({"exit_after_steps": 0}, "exit_after_steps: must be above 0"),
        ({"exit_after_minutes": -1.0}, "exit_after_minutes: must be above 0"),
    ],
    ids=str,
)
def test_invalid_settings_are_named(settings, listed):
    with pytest.raises(ConfigError) as raised:
        check(run_config(resilience=ResilienceConfig(**settings)))
    assert listed in str(raised.value)
