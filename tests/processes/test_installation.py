"""Faults of a GPU installation: what was found, what is needed, and the remedy."""

from dataclasses import replace

import pytest

from megajax.processes.installation import LIBRARIES, Installation, find_installation

VERSION = "0.12.0.1"
NAMES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt")
WHOLE = Installation(8, (550, 54, 15), dict.fromkeys(NAMES, VERSION), frozenset(LIBRARIES))


def plain(version: str = VERSION) -> dict[str, str]:
    return {"jax": version, "jaxlib": version}


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"packages": plain()}, ["8 NVIDIA GPUs found, but no CUDA plugin", "--extra cuda12"]),
        ({"packages": plain(), "driver": (580, 65)}, ["--extra cuda13"]),
        (
            {"packages": dict(WHOLE.packages) | {"jax-cuda12-plugin": "0.11.2"}},
            ["jaxlib 0.12.0.1", "jax-cuda12-plugin 0.11.2", "different versions"],
        ),
        ({"packages": dict(WHOLE.packages) | {"jax-cuda13-plugin": VERSION}}, ["two CUDA plugins", "pip uninstall"]),
        ({"driver": (470, 82)}, ["driver is 470.82", "needs 525 or newer"]),
        ({"driver": None}, ["no NVIDIA driver", "525"]),
        ({"libraries": frozenset({"cublas", "nccl"})}, ["not found: cuDNN", "--extra cuda12"]),
    ],
)
def test_each_fault_names_its_remedy(changes, texts):
    (fault,) = replace(WHOLE, **changes).faults()
    assert all(text in fault for text in texts), fault


def test_a_complete_installation_has_no_fault():
    assert WHOLE.faults() == []
    assert Installation(0, None, plain(), frozenset()).faults() == [], "a machine without GPUs needs nothing"


def test_a_driver_too_old_for_one_cuda_may_support_another():
    packages = {name.replace("12", "13"): VERSION for name in NAMES}
    (fault,) = replace(WHOLE, packages=packages).faults()
    assert "needs 580" in fault and "extra cuda12" in fault


def test_old_gpus_are_named():
    packages = {name.replace("12", "13"): VERSION for name in NAMES}
    new = replace(WHOLE, packages=packages)
    assert "Tesla V100 has compute capability 7.0; jax for CUDA 13 needs 7.5" in new.capability_fault(
        "Tesla V100", (7, 0)
    )
    assert new.capability_fault("Tesla T4", (7, 5)) == "" == WHOLE.capability_fault("Tesla V100", (7, 0))


def test_the_driver_version_is_read(tmp_path):
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.06  Wed Jun 26 06:46:07 UTC 2024\n")
    for name in ("nvidia0", "nvidia1", "nvidiactl", "null"):
        (tmp_path / name).touch()
    actual = find_installation(tmp_path, driver)
    assert (actual.gpus, actual.driver) == (2, (535, 183, 6))
    assert actual.packages["jax"] == actual.packages["jaxlib"]
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    assert find_installation(tmp_path, driver).driver == (580, 65, 6)
