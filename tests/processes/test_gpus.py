"""The GPUs that a process sees, and those it uses: functions of an environment and a folder of device files."""

import json
from pathlib import Path

import pytest

from megajax.processes.gpus import GpuClaim, assign, bound_gpus, installed_gpus, visible_gpus
from megajax.processes.world import World

EIGHT = tuple("01234567")
MIG = "MIG-3d2f5f0a-1111-5222-8333-444444444444"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, EIGHT),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2,3", ("2", "3")),
        (" 3 , 1", ("3", "1")),
        ("0,2,-1,1", ("0", "2")),
        ("0,8,1", ("0",)),
        ("0,0,1", ("0",)),
        ("1,", ("1",)),
        ("GPU-8932f937,GPU-1a2b", ("GPU-8932f937", "GPU-1a2b")),
        ("0,GPU-8932f937", ("0", "GPU-8932f937")),
        (f"{MIG},{MIG}", (MIG,)),
        ("MIG-GPU-8932f937/1/0", ("MIG-GPU-8932f937/1/0",)),
    ],
)
def test_CUDA_variables_restrict_GPUs(visible, expected):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpus(environment | {"NVIDIA_VISIBLE_DEVICES": "0"}, EIGHT) == expected
    assert visible_gpus(environment, ()) == (), "no device file, no GPU"


def test_a_container_has_only_its_device_files(tmp_path: Path):
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia-caps", "nvidia-modeset", "null"):
        (tmp_path / name).touch()
    assert installed_gpus(tmp_path) == ("2", "10")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, installed_gpus(tmp_path)) == ("10",)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"SLURM_GPUS_PER_TASK": "2"}, 2),
        ({"SLURM_GPUS_PER_TASK": "a100:1"}, 1),
        ({"SLURM_TRES_PER_TASK": "cpu:8,gres/gpu:1"}, 1),
        ({"SLURM_TRES_PER_TASK": "gres/gpu:h100=4"}, 4),
        ({"SLURM_TRES_PER_TASK": "cpu=8"}, None),
        ({"SLURM_GPU_BIND": "single:1"}, 1),
        ({"SLURM_GPU_BIND": "verbose,per_task:2"}, 2),
        ({"SLURM_GPU_BIND": "closest"}, None),
        ({"SLURM_GPU_BIND": "none", "SLURM_GPUS_PER_TASK": "1"}, None),
    ],
)
def test_slurm_binds_gpus_to_tasks(variables, expected):
    assert bound_gpus(variables) == expected


def claims(count: int, *environments: dict[str, str], gpus: int = 8, place: bool = True) -> dict[int, GpuClaim]:
    """The claims of `count` processes of one machine; one environment for all, or one for each."""
    worlds = [World(count, index, "node:1", *((index, count) if place else (None, None))) for index in range(count)]
    environments = environments * (count if len(environments) == 1 else 1) or ({},) * count
    return {
        world.index: GpuClaim.of(world, visible_gpus(environment, EIGHT[:gpus]), environment)
        for world, environment in zip(worlds, environments, strict=True)
    }


def cuda(visible: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": visible}


def chosen(ids: str) -> dict[str, str]:
    return {"JAX_LOCAL_DEVICE_IDS": ids}


WRAPPED = [cuda(str(index)) for index in range(8)]
CGROUP = {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_PER_TASK": "1"}
ASSIGNED = {
    "alone on its machine": (claims(1), [None]),
    "one for each": (claims(8), [[index] for index in range(8)]),
    "several for each": (claims(2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "among those all see": (claims(2, cuda("4,5")), [[0], [1]]),
    "each sees one of its own": (claims(8, *WRAPPED), [None] * 8),
    "each sees as many of its own as there are processes": (claims(2, cuda("0,1"), cuda("2,3")), [None, None]),
    "each sees more of its own": (claims(2, cuda("0,1"), cuda("2,3,4,5")), [None, None]),
    "in Slurm's cgroups all are called 0": (claims(8, CGROUP), [None] * 8),
    "two of two in cgroups": (claims(2, {**cuda("0,1"), "SLURM_GPUS_PER_TASK": "2"}), [None, None]),
    "Slurm asked for them but did not bind": (claims(8, {"SLURM_GPUS_PER_TASK": "1"}), [[i] for i in range(8)]),
    "chosen": (claims(2, chosen("0,1"), chosen("2,3")), [None, None]),
    "nobody says which process is where": (claims(4, place=False), [[0, 1], [2, 3], [4, 5], [6, 7]]),
    "no GPUs": (claims(2, gpus=0), [None, None]),
    "none visible": (claims(2, cuda("-1")), [None, None]),
}


@pytest.mark.parametrize("case", ASSIGNED)
def test_the_gpus_of_the_processes_of_a_machine(case):
    told, expected = ASSIGNED[case]
    assert assign(told) == dict(enumerate(expected))


REFUSED = {
    "fewer GPUs than processes": (claims(8, cuda("0,1,2,3")), ["8 processes and 4 visible GPUs", "1 or 2 or 4"]),
    "GPUs left over": (claims(3), ["3 processes and 8 visible GPUs", "2 would be idle", "1 or 2 or 4 or 8"]),
    "one GPU": (claims(2, gpus=1), ["2 processes and 1 visible GPU, but", "start 1 there"]),
    "other lists with the same GPU": (claims(2, cuda("0,1"), cuda("1,2")), ["processes 0 and 1", "both use GPU 1"]),
    "the same choice": (claims(2, chosen("0")), ["processes 0 and 1", "both use GPU 0"]),
    "a choice that is not there": (claims(2, chosen("0"), chosen("8")), ["process 1", "GPU 8", "it sees 8"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_assignments_are_refused(case):
    told, words = REFUSED[case]
    answer = assign(told)
    assert isinstance(answer, str) and all(word in answer for word in words), answer


def test_machines_are_judged_separately():
    one, other = (claims(2, cuda("0,1")) for _ in range(2))
    told = one | {2 + process: claim._replace(machine="other") for process, claim in other.items()}
    assert assign(told) == {0: [0], 1: [1], 2: [0], 3: [1]}


def test_the_GPUs_of_a_process_without_a_share_stay_free():
    told = claims(4)
    del told[2]
    assert assign(told) == {0: [0, 1], 1: [2, 3], 3: [6, 7]}


def test_processes_declared_alone_are_not_compared():
    """Schedulers that bind GPUs in their own way set MEGAJAX_LOCAL_PROCESSES=1."""
    told = {index: claim._replace(local_index=0, local_count=1) for index, claim in claims(2, cuda("0")).items()}
    assert assign(told) == {0: None, 1: None}


def test_the_message_of_a_process():
    claim = claims(1, chosen("0,3"))[0]
    assert GpuClaim.read(json.loads(json.dumps(claim))) == claim
    for noise in (None, {}, [], ["a"], ["a", "bc", None, False, None, None], ["a", [1], None, False, None, None]):
        assert GpuClaim.read(noise) is None
    assert GpuClaim.read(["a\n", ["0"], None, False, None, None]) is None
    assert GpuClaim.read(["a", ["0"], [-1], False, None, None]) is None
