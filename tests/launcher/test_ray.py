"""Processes on a Ray cluster: a real one, with three machines that are processes here, and one of them lost."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from gangs import CONFIG, free_port
from run_folder import events
from waiting import wait_until

from megajax.config.errors import ConfigError, UserError
from megajax.data.preprocessing.options import Preprocessing
from megajax.data.preprocessing.preprocessing import preprocess
from megajax.data.text.indexed_dataset import index_path, tokens_path
from megajax.launch import main
from megajax.launcher.ray_processes import Place, RayProcesses, RemoteProcess
from megajax.tokenizers.config import ByteTokenizerConfig

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # its name notwithstanding: addresses are those of loopback
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "2000",
}
MACHINE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@contextmanager
def cluster():
    """(its address, a function that removes a machine and adds another)."""
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
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
    processes.places = [Place(node, "10.0.0.1", own) for node, own in zip("aab", gpus, strict=True)]
    numbers = [processes._numbers(index) for index in range(3)]
    names = ("MEGAJAX_PROCESS_ID", "MEGAJAX_LOCAL_RANK", "MEGAJAX_LOCAL_PROCESSES")
    assert [[each[name] for name in names] for each in numbers] == [["0", "0", "2"], ["1", "1", "2"], ["2", "0", "1"]]
    assert {each.get("JAX_NUM_CPU_DEVICES") for each in numbers} == {cpu_devices}


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--ray=auto"], "--processes: must be given with --ray"),
        (["--ray=auto", "--processes=0"], "must be at least 1, got 0"),
        (["--ray=auto", "--processes=2", "--scheduler"], "--scheduler: has no meaning with --ray"),
        (["--ray=auto", "--processes=2", "--machines=2"], "--machines"),
        (["--ray=auto", "--processes=2", "--min-processes=1"], "--min-processes"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, word):
    with pytest.raises(ConfigError, match=word):
        main([*flags, "--", "python", "-m", "megajax.train"])


def test_without_a_cluster_the_message_says_how_to_start_one(tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "a.txt").write_text("words")
    address = f"127.0.0.1:{free_port()}"
    job = Preprocessing(
        inputs=(str(tmp_path / "a.txt"),), prefix=str(tmp_path / "out"), tokenizer=ByteTokenizerConfig(), ray=address
    )
    with pytest.raises(UserError, match="ray start --head"):
        preprocess(job)
    assert [path.name for path in Path(tmp_path).iterdir()] == ["a.txt"]
