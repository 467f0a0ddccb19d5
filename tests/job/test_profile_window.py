"""A job that traces some of its steps."""

import json

import pytest
from run_folder import events
from small_jobs import model, run_config
from user_errors import user_error

from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.faults.config import ResilienceConfig
from megajax.job.job import train
from megajax.mesh.config import ParallelConfig
from megajax.metrics.config import ProfileConfig
from megajax.metrics.profile import Profile
from megajax.training.config import BatchConfig


@pytest.mark.slow
def test_the_window_is_traced_and_summarized(tmp_path, capsys):
    cfg = run_config(
        tmp_path,
        model=model(repeats=1),
        parallel=ParallelConfig(data=2),
        batch=BatchConfig(global_size=8, micro_size=4),
        profile=ProfileConfig(steps="3:4", top=5),
        resilience=ResilienceConfig(exit_after_steps=5),
    )
    assert train(cfg) == 0
    traces = list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 1 and list((tmp_path / "profile").rglob("*.trace.json.gz"))
    answer = json.loads((tmp_path / "profile" / "summary.json").read_text())
    assert (answer["steps"], answer["devices"]) == (2, 2)
    assert len(answer["kernels"]) == 5
    assert answer["busy"] > 0 and answer["communication"] > 0
    assert answer["exposed"] <= answer["communication"] <= answer["busy"]
    assert sum(kernel["share"] for kernel in answer["kernels"]) <= 1
    assert "profile of 3:4" in (output := capsys.readouterr().out) and "exposed communication" in output
    (compiled,) = events(tmp_path, "compiled")
    assert compiled["arguments"] > 3 * 4 * 1000 and compiled["temporary"] > 0
    assert "memory of the compiled step: " in output
    assert train(cfg.but(resilience=ResilienceConfig())) == 0  # The run continues after the window.
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1


def test_a_window_beyond_the_run_is_refused():
    with user_error("profile.steps", kind=ConfigError):
        check(run_config(profile=ProfileConfig(steps="5:7")))
    check(run_config(profile=ProfileConfig(steps="5:6")))


@pytest.mark.parametrize(
    ("first", "starts", "stops"), [(0, [0], [2]), (1, [1], [2]), (2, [], []), (9, [], [])], ids=str
)
def test_a_resumed_attempt_traces_the_rest_of_the_window(first, starts, stops, tmp_path, monkeypatch):
    calls = {"start": [], "stop": []}
    monkeypatch.setattr("jax.profiler.start_trace", lambda *_, **__: calls["start"].append(step))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls["stop"].append(step))
    step = first
    profile = Profile(ProfileConfig(steps="1:2"), tmp_path, first, lambda summary: None)
    for step in range(first + 1, 12):
        for hook in (profile.stop_hook(), profile.start_hook()):
            if hook.due(step):
                hook(None, step)
    assert (calls["start"], calls["stop"]) == (starts, stops)
    profile.close()
    assert len(calls["stop"]) == len(stops)
