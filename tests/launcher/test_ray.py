"""Processes on a Ray cluster: a real one, with three machines that are processes here, and one of them lost."""

import json
import operator
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from gangs import CONFIG, free_port
from run_folder import events
from user_errors import user_error
from waiting import wait_until

from megajax import evaluate, generate, launch
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.data.preprocessing.options import Preprocessing
from megajax.data.preprocessing.preprocessing import preprocess
from megajax.data.text.indexed_dataset import index_path, tokens_path
from megajax.launcher.ray_processes import ProcessHost, RayProcesses, RemoteProcess
from megajax.processes import ray_cluster as ray_pool
from megajax.processes.ray_cluster import LostTooOften, RayPool
from megajax.processes.worker_pools import in_order, parts_of
from megajax.tokenizers.config import ByteTokenizerConfig

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # its name notwithstanding: addresses are those of loopback
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "10",
    "RAY_health_check_initial_delay_ms": "2000",
}
MACHINE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@contextmanager
def cluster():
    """(its address, a function that removes a machine and adds another)."""
    pytest.importorskip("ray")
    # Names of sockets have at most 107 bytes, and Ray's own part takes 66 of them.
    short = tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True)
    with pytest.MonkeyPatch.context() as patch, short as folder:
        for name, value in {**SETTINGS, "RAY_TMPDIR": folder}.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        machines = Cluster(initialize_head=True, head_node_args={**MACHINE, "include_dashboard": False})
        try:
            others = [machines.add_node(**MACHINE) for _ in range(2)]
            machines.wait_for_nodes()

            def replace() -> None:
                machines.remove_node(others[0], allow_graceful=False)
                machines.add_node(**MACHINE)

            yield machines.address, replace
        finally:
            machines.shutdown()


@pytest.mark.slow
def test_training_goes_on_after_a_machine_was_lost(tmp_path):
    run = tmp_path / "run"
    with cluster() as (address, replace), (tmp_path / "log").open("w+") as log:
        launcher = [sys.executable, "-m", "megajax.launch", f"--ray={address}", "--processes=3", "--max-restarts=3"]
        train = ["python", "-m", "megajax.train", f"--config={CONFIG}", f"--run_dir={run}", "--batch.micro_size=1"]
        parallel = ["--parallel.data=3", "--parallel.data_sharding=replicate", "--batch.global_size=6"]
        steps = ["--steps=400", "--checkpoint.every=20"]
        command = [*launcher, f"--beats={tmp_path / 'beats'}", "--", *train, *parallel, *steps]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **SETTINGS})
        saved = lambda: any((run / "checkpoints").glob("*20"))  # noqa: E731
        assert wait_until(lambda: saved() or process.poll() is not None, 300)
        replace()
        code = process.wait(300)
        log.seek(0)
        text = log.read()
    assert code == 0, text
    assert "was lost with its actor" in text and "restart 1 of 3" in text
    names = [event["event"] for event in events(run)]
    assert names.count("start") == 2 and "restart" in names and names.count("end") == 1


@pytest.mark.slow
def test_preprocessing_on_machines_of_which_one_is_lost_has_equal_bytes(tmp_path, monkeypatch):
    source = tmp_path / "text.jsonl"
    source.write_text("".join(f'{{"text": "line {number} {"x" * 500}"}}\n' for number in range(40_000)))
    monkeypatch.chdir(tmp_path)  # relative paths are those of the driver
    settings = {"tokenizer": ByteTokenizerConfig(), "append_eod": True, "chunk_bytes": 1 << 19}
    alone = Preprocessing(inputs=("text.jsonl",), prefix="alone", **settings)
    preprocess(alone)
    lost = []
    with cluster() as (address, replace):
        far = Preprocessing(inputs=("text.jsonl",), prefix="far", workers=3, ray=address, **settings)

        def report(counts, total) -> None:
            if not lost and counts.documents > 5_000:
                lost.append(replace())

        preprocess(far, report)
    assert lost
    for path in (tokens_path, index_path):
        assert path(alone.output("text")).read_bytes() == path(far.output("text")).read_bytes()


@pytest.mark.slow
def test_replicas_of_which_one_is_lost_give_the_answers_and_figures_of_one_machine(tmp_path):
    """One is lost while they answer; the figures come from those that are left and the one that is added."""
    run, prompts, text = tmp_path / "run", tmp_path / "prompts.txt", tmp_path / "text.txt"
    prompts.write_text("".join(f"def f{number}(x):\n" for number in range(100)))
    text.write_text("".join(f"line {number} of a text\n" for number in range(1_000)))
    train = ["megajax.train", "--config=quickstart.py", "--steps=3", "--evaluation.batches=1", f"--run_dir={run}"]
    assert subprocess.run([sys.executable, "-m", *train], env=os.environ | SETTINGS).returncode == 0
    sampling = ["--max-tokens=16", "--temperature=0.9", "--seed=5", "--n=2", "--logprobs=2", "--inference.rows=4"]
    answer = ["megajax.generate", f"--run={run}", f"--prompts={prompts}", *sampling]
    figure = ["megajax.evaluate", f"--run={run}", f"--tasks=text:{text}", "--rows=2"]

    def started(command: list[str], output: str, *more: str) -> subprocess.Popen:
        words = [sys.executable, "-m", *command, f"--output={tmp_path / output}", *more]
        return subprocess.Popen(words, env=os.environ | SETTINGS, stderr=subprocess.PIPE, text=True)

    assert [started(*each).wait(300) for each in ((answer, "alone.jsonl"), (figure, "alone"))] == [0, 0]
    with cluster() as (address, replace):
        far, answers = started(answer, "far.jsonl", f"--ray={address}"), tmp_path / "far.jsonl"
        begun = lambda: answers.exists() and answers.read_bytes().count(b"\n") > 20  # noqa: E731
        assert wait_until(lambda: begun() or far.poll() is not None, 300)
        replace()
        words = far.communicate(timeout=300)[1]
        assert far.returncode == 0 and "which runs again" in words, words
        assert started(figure, "far", f"--ray={address}").wait(300) == 0
    assert (tmp_path / "alone.jsonl").read_bytes() == answers.read_bytes()
    alone, results = (
        json.loads((tmp_path / name / "results.json").read_text())["results"] for name in ("alone", "far")
    )
    assert alone == results


class FakeRay:
    """Machines of a cluster as threads of this process: a call is lost with its machine as often as `losses` says."""

    class exceptions:
        RayError = type("RayError", (Exception,), {})
        RayTaskError = type("RayTaskError", (RayError,), {})

    def __init__(self, losses: int):
        self.losses, self.killed, self.alive = losses, 0, 0

    def nodes(self):
        return [{"Alive": True}] * 3

    def cluster_resources(self):
        return {"CPU": 3.0}

    def remote(self, **resources):
        return lambda kind: SimpleNamespace(remote=lambda: self._actor(kind()))

    def _actor(self, worker):
        self.alive += 1
        methods = {name: SimpleNamespace(remote=partial(partial, getattr(worker, name))) for name in ("ready", "call")}
        return SimpleNamespace(**methods)

    def available_resources(self):
        return {"CPU": 3.0 - min(self.alive, 3)}

    def wait(self, references, timeout):
        """A process begins once those that hold its room were killed: a lost one holds it still."""
        if wait_until(lambda: self.alive <= 3, 2):
            return references, []
        return [], references

    def get(self, reference):
        if reference.args and reference.args[-1] == (7,) and self.losses:
            self.losses -= 1
            raise self.exceptions.RayError("The node of this actor died.")
        try:
            return reference()
        except UserError as error:
            failure = self.exceptions.RayTaskError()
            failure.cause = error
            raise failure from error

    def kill(self, worker):
        self.killed += 1
        self.alive -= 1

    def shutdown(self):
        pass


def test_parts_of_lost_machines_run_again_and_results_are_in_order(monkeypatch, capsys):
    ray = FakeRay(losses=2)
    monkeypatch.setattr(ray_pool, "connect_ray", lambda address: ray)
    parts = parts_of(3, 100, 3, least=2)
    assert parts[0] == (3, 12) and parts[-1] == (93, 100) and len(parts) == 11
    assert parts_of(0, 10, 3, least=8) == [(0, 4), (4, 8), (8, 10)] and parts_of(5, 5, 3, least=8) == []
    with RayPool("auto", None) as pool:
        assert pool.workers == 3
        calls = [(number, (operator.neg, number)) for number in range(20)]
        assert list(in_order(pool, calls, lambda: None)) == [(number, -number) for number in range(20)]
    assert capsys.readouterr().err.count("part 7 of the work, which runs again") == 2 and ray.killed == 5
    ray.losses = 4
    with user_error("--ray", kind=LostTooOften), RayPool("auto", 2) as pool:
        list(in_order(pool, calls, lambda: None))
    with user_error("steps", kind=ConfigError), RayPool("auto", 2) as pool:
        pool.submit(refuse).result()
    error = pickle.loads(pickle.dumps(ConfigError([Problem("steps", "refused")], "command line")))
    assert str(error) == "1 problem in command line:\n  steps: refused"


def test_processes_that_were_all_lost_leave_their_room_to_others(monkeypatch):
    ray = FakeRay(losses=3)
    monkeypatch.setattr(ray_pool, "connect_ray", lambda address: ray)
    with RayPool("auto", 3) as pool:
        assert pool.submit(operator.neg, 7).result(timeout=60) == -7
    assert ray.alive == 0


def refuse():
    raise ConfigError([Problem("steps", "refused")], "command line")


@pytest.mark.parametrize(
    ("verb", "flags"),
    [
        (generate, ["--prompt=a", "--ray=auto"]),
        (generate, ["--prompts=a", "--ray=auto", "--stats"]),
        (generate, ["--prompts=a", "--replicas=2"]),
        (evaluate, ["--tasks=text:a", "--ray=auto", "--replicas=0"]),
        (evaluate, ["--tasks=text:a", "--ray=auto", "--cache=false"]),
        (launch, ["--ray=auto"]),
        (launch, ["--ray=auto", "--processes=0"]),
        (launch, ["--ray=auto", "--processes=2", "--scheduler"]),
        (launch, ["--ray=auto", "--processes=2", "--machines=2"]),
        (launch, ["--ray=auto", "--processes=2", "--min-processes=1"]),
    ],
)
def test_flags_that_do_not_fit_are_refused(verb, flags):
    arguments = [*flags, "--", "python", "-m", "megajax.train"] if verb is launch else ["--run=runs/none", *flags]
    with user_error(kind=ConfigError):
        verb.main(arguments)


def test_replicas_of_a_launched_process_are_refused(monkeypatch):
    monkeypatch.setenv("MEGAJAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("MEGAJAX_PROCESS_ID", "0")
    monkeypatch.setenv("MEGAJAX_COORDINATOR", "127.0.0.1:1")
    with user_error("--ray", kind=ConfigError):
        evaluate.main(["--run=runs/none", "--tasks=text:a", "--ray=auto"])


def test_a_remote_process_gives_its_output_and_ends_by_signals(tmp_path):
    remote = RemoteProcess()
    program = "import os, time; print(os.environ['NUMBER'], os.getcwd(), flush=True); time.sleep(60)"
    assert remote.start([sys.executable, "-c", program], {"NUMBER": "7"}, str(tmp_path)) == ""
    reads = []
    assert wait_until(lambda: (reads and reads[-1][0]) or reads.append(remote.read()))
    assert reads[-1] == ([f"7 {tmp_path}\n".encode()], None)
    remote.signal(signal.SIGTERM)
    assert wait_until(lambda: reads[-1][1] is not None or reads.append(remote.read()))
    assert reads[-1] == ([], -signal.SIGTERM)
    assert "No such file" in RemoteProcess().start([str(tmp_path / "missing")], {}, str(tmp_path))


@pytest.mark.parametrize(("gpus", "cpu_devices"), [((("0",), ("1",), ("0",)), None), (((), (), ()), "3")])
def test_numbers_of_processes_on_machines_with_gpus_and_without(gpus, cpu_devices):
    """Ray shows each process its own GPUs; without GPUs, each has the CPU devices that were asked for."""
    processes = object.__new__(RayProcesses)
    processes._devices = 3
    processes.places = [ProcessHost(node, "10.0.0.1", own) for node, own in zip("aab", gpus, strict=True)]
    numbers = [processes._numbers(index) for index in range(3)]
    names = ("MEGAJAX_PROCESS_ID", "MEGAJAX_LOCAL_RANK", "MEGAJAX_LOCAL_PROCESSES")
    assert [[each[name] for name in names] for each in numbers] == [["0", "0", "2"], ["1", "1", "2"], ["2", "0", "1"]]
    assert {each.get("JAX_NUM_CPU_DEVICES") for each in numbers} == {cpu_devices}


def test_without_a_cluster_the_message_says_how_to_start_one(tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "a.txt").write_text("words")
    address = f"127.0.0.1:{free_port()}"
    job = Preprocessing(
        inputs=(str(tmp_path / "a.txt"),), prefix=str(tmp_path / "out"), tokenizer=ByteTokenizerConfig(), ray=address
    )
    with user_error("--ray"):
        preprocess(job)
    assert [path.name for path in Path(tmp_path).iterdir()] == ["a.txt"]
