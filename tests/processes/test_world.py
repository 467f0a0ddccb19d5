"""The index and number of processes: flags and the variables of launchers."""

import pytest
from user_errors import user_error

from megajax.command_line.parser import PROCESS_FLAGS, parse
from megajax.config.errors import ConfigError
from megajax.processes.world import StartError, World, find_world, process_index, split_address

STEP = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "20", "SLURM_PROCID": "9", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "20", "SLURM_STEP_NODELIST": "node[001-002],big7",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
}  # fmt: skip
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-a-9@1",
}  # fmt: skip
OURS = {"MEGAJAX_COORDINATOR": "a:1", "MEGAJAX_NUM_PROCESSES": "3", "MEGAJAX_PROCESS_ID": "2"}

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
POD = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}

ALONE = {
    "a laptop": {},
    "told to be one": OURS | {"MEGAJAX_NUM_PROCESSES": "1", "MEGAJAX_PROCESS_ID": "0"},
    "a shell in an allocation of many": {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "20", "SLURM_JOB_NODELIST": "node[1-2]"},
    "a batch script": {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "20", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "an interactive step": STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "node001"},
    "mpirun of one": MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    "an indexed job of single runs": {"JOB_COMPLETION_INDEX": "5", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    "half of jax's variables": {"JAX_COORDINATOR_ADDRESS": "a:1"},
    "torchrun of one": TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"},
    "a rank left in a shell": {"RANK": "3", "WORLD_SIZE": "4"},
    "torchrun, and told to be one": TORCHRUN | {"MEGAJAX_NUM_PROCESSES": "1"},
}


@pytest.mark.parametrize("case", ALONE)
def test_alone(case):
    assert find_world(ALONE[case]) is None


def test_our_own_launcher():
    local = {"MEGAJAX_LOCAL_RANK": "2", "MEGAJAX_LOCAL_PROCESSES": "3"}
    assert find_world(OURS | local) == World(3, 2, "a:1", 2, 3)
    assert find_world(OURS) == World(3, 2, "a:1")
    assert find_world(STEP | MPI | OURS) == World(3, 2, "a:1", 1, 2)


def test_slurm():
    world = find_world(STEP)
    assert world is not None
    assert (world.count, world.index, world.local_index, world.local_count) == (20, 9, 1, 8)
    host, port = split_address(world.coordinator)
    assert host == "node001" and 61440 <= port < 65536
    assert find_world(STEP | {"SLURM_PROCID": "19", "SLURM_NODEID": "2", "SLURM_LOCALID": "3"}) == World(
        20, 19, world.coordinator, 3, 4
    )
    assert find_world(STEP | {"SLURM_STEP_ID": "1"}).coordinator != world.coordinator
    for nodes, first in (("a", "a"), ("a,b", "a"), ("r[1-2]n[07,09]x,z", "r1n07x"), ("n[3],m", "n3")):
        assert find_world(STEP | {"SLURM_STEP_NODELIST": nodes}).coordinator.partition(":")[0] == first
    moved = find_world(STEP | {"MEGAJAX_COORDINATOR": "10.0.0.1:5000"})
    assert moved == World(20, 9, "10.0.0.1:5000", 1, 8)


def test_open_mpi():
    with user_error(kind=StartError):
        find_world(MPI)
    single_machine = find_world(MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert (
        single_machine is not None and single_machine.coordinator.startswith("127.0.0.1:") and single_machine.index == 3
    )
    other_job = find_world(MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-a-10@1"})
    assert other_job.coordinator != single_machine.coordinator
    open_mpi_4 = find_world(MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"})
    assert open_mpi_4.coordinator.startswith("10.96.0.1:")
    assert find_world(STEP | MPI | {"MEGAJAX_COORDINATOR": "a:1"}) == World(4, 3, "a:1", 1, 2)


@pytest.mark.parametrize("variables", [TORCHRUN, POD, STEP | TORCHRUN], ids=["torchrun", "pod", "torchrun in srun"])
def test_torchrun_is_refused_with_the_command_to_use_instead(variables):
    with pytest.raises(StartError) as error:
        find_world(variables)
    assert error.value.code == 2
    for text in (
        "process 3 of 4 of torchrun",
        "python -m megajax.launch --processes=N",
        "--coordinator=10.0.0.7:61440 --num-processes=4 --process-id=3",
        "MEGAJAX_NUM_PROCESSES=1",
    ):
        assert text in str(error.value)
    # One process of a machine prints the message.
    assert error.value.reported == ("LOCAL_RANK" in variables)
    with pytest.raises(StartError) as error:
        find_world(variables | {"LOCAL_RANK": "0"})
    assert not error.value.reported


def test_mpich_is_refused_with_the_command_to_use_instead():
    mpich = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
    with user_error(kind=StartError) as error:
        find_world(mpich)
    assert (error.value.code, error.value.reported) == (2, True)
    assert "megajax.launch" in str(error.value) and "--num-processes=4 --process-id=1" in str(error.value)
    assert find_world(mpich | {"PMI_SIZE": "1", "PMI_RANK": "0"}) is None
    assert find_world(STEP | mpich) == find_world(STEP)  # srun --mpi=pmi2
    assert find_world(mpich | OURS) == World(3, 2, "a:1")


def test_PyTorch_s_variables_beside_those_of_a_launcher():
    same_step = STEP | POD | {"RANK": "9", "WORLD_SIZE": "20"}
    assert find_world(same_step) == find_world(STEP)
    assert find_world(TORCHRUN | OURS) == World(3, 2, "a:1")


def test_the_token_of_a_run():
    token = find_world(STEP).token
    assert token and token == find_world(STEP | {"SLURM_PROCID": "10"}).token
    assert find_world(STEP | {"SLURM_STEP_ID": "1"}).token not in ("", token)
    assert find_world(MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).token == "prterun-a-9"
    assert find_world(OURS).token == ""
    # Processes started by hand in several steps of a job are one run.
    assert find_world(STEP | OURS).token == ""
    assert find_world(STEP | {"MEGAJAX_COORDINATOR": "b:1"}).token == token
    assert find_world(OURS | {"MEGAJAX_RUN_TOKEN": "a5"}).token == "a5"


def test_kubernetes_and_jax_s_own_variables():
    pod = {"MEGAJAX_COORDINATOR": "job-workers-0-0.job:1", "MEGAJAX_NUM_PROCESSES": "4", "JOB_COMPLETION_INDEX": "3"}
    assert find_world(pod) == World(4, 3, "job-workers-0-0.job:1")
    assert process_index(pod) == 3
    assert process_index({"JOB_COMPLETION_INDEX": "3"}) == 0
    jax = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert find_world(jax) == World(2, 1, "a:1")


WRONG = {
    "only a count": (
        {"MEGAJAX_PROCESS_ID": "", "MEGAJAX_COORDINATOR": ""},
        "or python -m megajax.launch --processes=N -- COMMAND starts all processes of a machine",
    ),
    "no number": ({"MEGAJAX_PROCESS_ID": ""}, "which process this is is not known: give --process-id"),
    "no count": ({"MEGAJAX_NUM_PROCESSES": ""}, "how many processes there are is not known"),
    "no coordinator": ({"MEGAJAX_COORDINATOR": ""}, "where process 0 is is not known"),
    "no port": ({"MEGAJAX_COORDINATOR": "host"}, "must be HOST:PORT, it is 'host'"),
    "one too many": ({"MEGAJAX_PROCESS_ID": "3"}, "--process-id=3 is not one of 3 processes: they are 0 to 2"),
    "no whole number": (
        {"MEGAJAX_NUM_PROCESSES": "many"},
        "MEGAJAX_NUM_PROCESSES must be a whole number, it is 'many'",
    ),
    "none": ({"MEGAJAX_NUM_PROCESSES": "0"}, "--num-processes must be at least 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mismatched_processes(case):
    changes, message = WRONG[case]
    with pytest.raises(StartError) as error:
        find_world(OURS | changes)
    assert message in str(error.value) and error.value.code == 2 and "\n" not in str(error.value)


def test_addresses():
    assert split_address("[::1]:80") == ("::1", 80)
    assert split_address("a.b:65535") == ("a.b", 65535)
    for address in ("a", "a:", ":1", "a:0", "a:65536", "::1:80", "a b:1", "a:1:2"):
        assert split_address(address) is None, address


@pytest.fixture
def environment(monkeypatch):
    for name in (*OURS, *STEP, *MPI, "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "MEGAJAX_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # So that variables set meanwhile are reset.
    return monkeypatch


def test_flags_and_the_devices_of_all_processes(environment):
    base = ["--config=gpt2.py:debug", "--devices=cpu:8"]
    flags = ["--coordinator=a:1", "--num-processes=3", "--process-id=2"]
    command = parse([*base, *flags, "--parallel.data=2"], verb="train", flags=PROCESS_FLAGS)
    with user_error("parallel.tensor", kind=ConfigError):
        parse([*base, *flags, "--parallel.tensor=5"], verb="train", flags=PROCESS_FLAGS)
    assert find_world() == World(3, 2, "a:1")
    assert command.flags["init_timeout"] == 300
    environment.setenv("MEGAJAX_NUM_PROCESSES", "")
    with user_error(kind=StartError):
        parse([*base, flags[0], flags[2]], verb="train", flags=PROCESS_FLAGS)
