"""The files in launch/ and the table of exit codes in docs/launch.md agree with the code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from gangs import REPOSITORY, launch_on
from waiting import wait_until

from megajax.faults.exit_codes import EXIT_CODES, NO_PROGRESS, REQUEUE, worth_a_restart
from megajax.processes.gpus import GpuClaim, assign, visible_gpus
from megajax.processes.world import find_world

SLURM, LOCAL, JOBSET, SKYPILOT = (
    REPOSITORY / "launch" / name for name in ("slurm.sbatch", "local.sh", "kubernetes_jobset.yaml", "skypilot.yaml")
)


def test_the_exit_codes_of_the_docs():
    """One table: docs/launch.md#exit-codes has the rows of the code, in the same words."""
    text = (REPOSITORY / "docs/launch.md").read_text().partition("### Exit codes")[2]
    rows = re.findall(r"^\| (\d+) \| (.*) \| (yes|no) \|$", text, re.MULTILINE)
    assert rows == [(str(row.code), row.meaning, "yes" if row.restart else "no") for row in EXIT_CODES.values()]


@pytest.mark.parametrize("page", ["reliability.md", "getting_started.md"])
def test_other_tables_have_codes_that_exist(page):
    text = (REPOSITORY / "docs" / page).read_text()
    table = re.search(r"^\| (?:exit )?code \| meaning \|\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None
    assert {int(code) for code in re.findall(r"^\| (\d+)", table[1], re.MULTILINE)} <= EXIT_CODES.keys()


@pytest.mark.parametrize("path", [SLURM, LOCAL], ids=lambda path: path.name)
def test_scripts_are_complete(path):
    subprocess.run(["bash", "-n", path], check=True)


def jobset() -> dict:
    return yaml.safe_load(JOBSET.read_text())["spec"]


def test_jobset_restarts_after_transient_codes():
    spec = jobset()
    policy, job = spec["failurePolicy"], spec["replicatedJobs"][0]["template"]["spec"]
    assert policy["maxRestarts"] > 0
    assert [(rule["action"], rule["onJobFailureReasons"]) for rule in policy["rules"]] == [
        ("FailJobSet", ["PodFailurePolicy"])
    ]
    (rule,) = job["podFailurePolicy"]["rules"]
    codes = rule["onExitCodes"]
    assert (rule["action"], codes["operator"]) == ("FailJob", "In")
    # 0 is no failure, 75 asks to continue, and the codes of signals are those of deleted pods.
    expected = {code for code in EXIT_CODES if not worth_a_restart(code)} - {0, REQUEUE, 130, 143}
    assert set(codes["values"]) == expected == {2, 17, NO_PROGRESS}
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and job["backoffLimit"] == 0
    assert codes["containerName"] in {container["name"] for container in pod["containers"]}
    assert f"--resilience.exit_code_on_signal={REQUEUE}" in pod["containers"][0]["args"]


def test_jobset_counts_machines_consistently():
    job = jobset()["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert f"--machines={job['parallelism']}" in container["args"] and job["parallelism"] == job["completions"]


def test_a_pod_of_the_jobset_starts_a_process_for_each_gpu(start, tmp_path):
    """The launcher with the arguments of the file, in the second pod, and a shell instead of training."""
    (container,) = jobset()["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "megajax.launch"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    flags = container["args"][: container["args"].index("--")]
    assert container["args"][len(flags) :][:4] == ["--", "python", "-m", "megajax.train"]
    show = "echo at $MEGAJAX_COORDINATOR $MEGAJAX_PROCESS_ID of $MEGAJAX_NUM_PROCESSES, $MEGAJAX_LOCAL_RANK here"
    pod = launch_on(start, tmp_path, gpus, *flags, "--", "sh", "-c", show, JOB_COMPLETION_INDEX="1")
    assert pod.wait() == 0, pod.text
    for index in range(gpus):
        place = f"{gpus + index} of {2 * gpus}, {index} here"
        assert f"[{gpus + index}] at megajax-workers-0-0.megajax:61440 {place}" in pod.text


def test_a_machine_of_skypilot_starts_its_processes(start, tmp_path):
    """The script of the file on the second of two machines, with a shell instead of training."""
    task = yaml.safe_load(SKYPILOT.read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [REQUEUE]
    gpus = int(task["resources"]["accelerators"].partition(":")[2])
    launcher, _, training = task["run"].replace("\\\n", "").partition(" -- ")
    assert training.split()[:3] == ["python", "-m", "megajax.train"]
    assert f"--resilience.exit_code_on_signal={REQUEUE}" in training
    words = re.search(r"python -m megajax\.launch (.*)", launcher)
    assert words is not None
    script = f'coordinator=$(head --lines=1 <<< "$SKYPILOT_NODE_IPS"); printf "%s\\n" {words[1]}'
    places = {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NODE_RANK": "1"}
    places |= {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"}
    flags = subprocess.run(["bash", "-c", script], env=os.environ | places, capture_output=True, text=True, check=True)
    show = "echo at $MEGAJAX_COORDINATOR $MEGAJAX_PROCESS_ID of $MEGAJAX_NUM_PROCESSES"
    machine = launch_on(start, tmp_path, gpus, *flags.stdout.split(), "--", "sh", "-c", show)
    assert machine.wait() == 0, machine.text
    for index in range(gpus):
        assert f"[{gpus + index}] at 10.0.0.4:61440 {gpus + index} of {2 * gpus}" in machine.text


def directives() -> dict[str, str]:
    """Options of the batch script."""
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", SLURM.read_text(), re.MULTILINE)
    return dict(lines)


def test_a_task_of_slurm_for_each_gpu():
    """Every task sees all GPUs of its node and uses one of them."""
    options = directives()
    nodes, tasks, gpus = (int(options[name]) for name in ("nodes", "ntasks-per-node", "gpus-per-node"))
    assert tasks == gpus and "gpus-per-task" not in options and options["mem"] == "0"
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": f"node[1-{nodes}]"}
    job |= {"SLURM_STEP_NUM_TASKS": str(nodes * tasks), "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})"}
    claims = {}
    for task in range(nodes * tasks):
        place = {"SLURM_PROCID": str(task), "SLURM_NODEID": str(task // tasks), "SLURM_LOCALID": str(task % tasks)}
        environment = job | place | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
        world = find_world(environment)
        assert world is not None and world.local_count == tasks
        claim = GpuClaim.of(world, visible_gpus(environment, list(map(str, range(gpus)))), environment)
        claims[task] = claim._replace(machine=f"node{task // tasks}")
    assert assign(claims) == {task: [task % tasks] for task in range(nodes * tasks)}


@pytest.mark.parametrize(
    ("path", "words", "expected"),
    [
        (
            SLURM,
            ["--", "python", "-m", "benchmarks", "mfu", "a b"],
            "srun --kill-on-bad-exit=1 --label --cpus-per-task=4",
        ),
        (
            LOCAL,
            ["--", "python", "-m", "benchmarks", "mfu", "a b"],
            "python -m megajax.launch --processes=2 --max-restarts=3 --",
        ),
        (
            SLURM,
            ["gpt2.py"],
            "--cpus-per-task=4 python -m megajax.train --config=gpt2.py --resilience.exit_code_on_signal=75",
        ),
        (LOCAL, ["gpt2.py", "a b"], "--max-restarts=3 -- python -m megajax.train --config=gpt2.py a b"),
    ],
)
def test_scripts_start_training_or_the_command_after_two_dashes(tmp_path, path, words, expected):
    for program in ("python", "srun"):
        (tmp_path / program).write_text(f'#!/usr/bin/env bash\necho "{program} $*"\nprintf "<%s>" "$@"\n')
        (tmp_path / program).chmod(0o755)
    places = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "4"}
    places |= {"PROCESSES": "2"}
    output = subprocess.run(["bash", path, *words], env=places, capture_output=True, text=True, check=True).stdout
    assert expected in output
    if words[0] == "--":
        assert "<python><-m><benchmarks><mfu><a b>" in output and "megajax.train" not in output


@pytest.mark.parametrize(("given", "expected"), [({}, "3"), ({"PROCESSES": "5"}, "5")])
def test_the_local_script_counts_visible_GPUs_where_all_are_used(tmp_path, given, expected):
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\n[[ "$*" == "-m megajax.processes.gpus" ]] && echo 3 || echo "ran $*"\n')
    python.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | given
    output = subprocess.run(["bash", LOCAL, "gpt2.py"], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.startswith(f"ran -m megajax.launch --processes={expected} --max-restarts=3 -- python -m")


def test_the_number_that_the_local_script_requires():
    command = [sys.executable, "-m", "megajax.processes.gpus"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"}
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "1\n"


def sbatch(folder: Path, code: int, **environment: str) -> tuple[int, list[str]]:
    """Run the script with stand-ins for what it calls -> its exit code, and their command lines."""
    log, state = folder / "log", environment.pop("STATE", "RUNNING")
    for name, body in {"python": f"exit {code}", "scontrol": "true", "squeue": f"echo {state}"}.items():
        path = folder / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> {log}\n{body}\n')
        path.chmod(0o755)
    slurm = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "42"}
    process = subprocess.run(["bash", SLURM, "gpt2.py", "--seed=1 2"], env=slurm | environment, cwd=folder, check=False)
    return process.returncode, log.read_text().splitlines()


def test_slurm_passes_on_CPUs_and_settings(tmp_path):
    code, (line,) = sbatch(tmp_path, 0, SLURM_CPUS_PER_TASK="64")
    assert code == 0
    launcher, _, command = line.partition(" -- ")
    assert launcher == f"python -m megajax.launch --scheduler --max-restarts=5 --beats={tmp_path}/beats/42"
    assert command.startswith("srun --kill-on-bad-exit=1 --label --cpus-per-task=64 python -m megajax.train ")
    assert command.endswith(f"--config=gpt2.py --resilience.exit_code_on_signal={REQUEUE} --seed=1 2")


def test_slurm_without_cpus_per_task_leaves_it_to_srun(tmp_path):
    assert "--cpus-per-task" not in sbatch(tmp_path, 0)[1][0]


@pytest.mark.parametrize(
    ("code", "environment"),
    [
        (REQUEUE, {}),
        (REQUEUE, {"SLURM_RESTART_COUNT": "100"}),
        (REQUEUE, {"SLURM_RESTART_COUNT": "3", "MAX_REQUEUES": "3"}),
        (REQUEUE, {"STATE": "COMPLETING"}),  # scancel
        (17, {}),
        (93, {}),
        (1, {}),
    ],
)
def test_slurm_requeues_runs_that_were_saved_in_time_and_ends_with_every_other_code(tmp_path, code, environment):
    requeued = code == REQUEUE and not environment
    ended, calls = sbatch(tmp_path, code, **environment)
    assert ended == (0 if requeued else code)
    assert [call for call in calls if call.startswith("scontrol")] == ["scontrol requeue 42"] * requeued


@pytest.mark.parametrize(("code", "state", "ended"), [(143, "RUNNING", 0), (1, "RUNNING", 0), (17, "RUNNING", 17),
                                                      (0, "RUNNING", 0), (75, "COMPLETING", 75)])  # fmt: skip
def test_slurm_passes_its_signal_on_to_the_launcher_and_requeues_whatever_was_interrupted(tmp_path, code, state, ended):
    """The time is up during set-up, or between two attempts; the run has failed for good, or is done; scancel."""
    waiting = f"trap 'sleep 0.5; exit {code}' TERM; touch up; while true; do sleep 0.1; done"
    bins = {"python": waiting, "squeue": f"echo {state}", "scontrol": "echo $* >> requeued"}
    for name, body in bins.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "42"}
    with subprocess.Popen(["bash", SLURM, "gpt2.py"], env=environment, cwd=tmp_path) as process:
        assert wait_until((tmp_path / "up").exists)
        process.terminate()
        assert process.wait(100) == ended
    assert (tmp_path / "requeued").exists() == (code in (1, 143))
