"""Two processes with every optional feature on, and events that only one of them knows: neither waits for ever."""

import json
import sys
from pathlib import Path

import gangs
import pytest
from run_folder import events, saved

PROGRAM = Path(__file__).with_name("train_as_processes_that_differ.py")
CONFIG = """
from small_jobs import run_config
from megajax.tasks.config import ChoicesConfig
from megajax.training.config import EvaluationConfig

def config():
    tasks = (ChoicesConfig(path={path!r}),)
    return run_config("unused", evaluation=EvaluationConfig(every=2, batches=1, tasks=tasks, tasks_every=2), steps=8)
"""
EVERYTHING = (
    *("--batch.micro_size=2", "--parallel.data=2", "--model.dropout=0.1", "--checkpoint.every=4"),
    *("--profile.steps=3:4", "--logging.sample=true", "--logging.plot=true", "--logging.layers_every=2"),
    *("--resilience.health.before_run=true", "--resilience.replicas.every=2", "--resilience.recompute.every=3"),
    *("--checkpoint.local.every=2", "--checkpoint.local.replicas=1", "--checkpoint.local.failures=1"),
    *("--logging.every=2", "--xla.compile_cache_dir=/proc/nowhere"),
)


@pytest.fixture
def gang(tmp_path):
    """gang(*settings, difference): two processes with everything on, started with additional settings."""
    questions = [{"context": "1 2 3", "choices": ["4 5", "6"], "answer": number % 2} for number in range(4)]
    (tmp_path / "questions.jsonl").write_text("".join(f"{json.dumps(question)}\n" for question in questions))
    (tmp_path / "config.py").write_text(CONFIG.format(path=str(tmp_path / "questions.jsonl")))
    with gangs.started(tmp_path) as start:

        def run(*settings: str, difference: str = "", name: str = "output") -> gangs.Started:
            more = (f"--run_dir={tmp_path / 'run'}", f"--checkpoint.local.folder={tmp_path / 'node'}", *settings)
            command = (sys.executable, PROGRAM, f"--config={tmp_path / 'config.py'}", "--devices=cpu:1", *EVERYTHING)
            path = f"{gangs.REPOSITORY}:{gangs.REPOSITORY / 'tests'}"
            environment = {"DIFFERENCE": difference, "PYTHONPATH": path, "JAX_COMPILATION_CACHE_DIR": ""}
            return start(*gangs.launcher(), *command, *more, name=name, **environment)

        yield run


@pytest.mark.slow
def test_every_optional_feature_at_once(gang, tmp_path):
    run = gang()
    assert run.wait() == 0, run.text
    assert "compiled programs are not cached" in run.text and "health before the run" in run.text
    assert len(list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))) == 1
    assert saved(tmp_path / "run") == [4, 8] and list(gangs.losses(tmp_path / "run")) == [*range(1, 9)]
    assert {event["split"] for event in events(tmp_path / "run", "evaluate")} >= {"validation", "choices", "test"}
    commits = events(tmp_path / "run", "save_committed")
    assert {event["step"] for event in commits if event.get("kind") == "local"} == {2, 6}


@pytest.mark.slow
def test_a_process_that_compiles_for_longer_than_gloo_waits(gang, tmp_path):
    """It alone traces. When all steps are done, both find nothing left to do, though one can't read the metrics."""
    settings = ("--resilience.recompute.every=none", "--profile.processes=1")
    run = gang(*settings, difference="slow compiler")
    assert run.wait() == 0, run.text
    assert list(gangs.losses(tmp_path / "run")) == [*range(1, 9)]
    assert len(list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))) == 1
    again = gang(*settings, difference="unreadable metrics", name="again")
    assert again.wait() == 0, again.text
    assert "nothing to train" in again.text
