"""Virtual GPUs: parsing of --devices, and the compiler's description of each."""

import re

import pytest

from megajax.planning.program.devices import GPUS, read_cluster


def test_clusters_are_parsed() -> None:
    cluster, problems = read_cluster("h100:128")
    assert cluster is not None and not problems
    assert (cluster.device.name, cluster.devices, cluster.topology()) == ("h100", 128, "16x1x8")
    names = [read_cluster(text)[0] for text in ("A100:8", "h200", "b200:2")]
    assert [(one.device.name, one.devices, one.topology()) for one in names if one] == [
        ("a100-80gb", 8, "1x1x8"),
        ("h200", 8, "1x1x8"),
        ("b200", 2, "1x1x2"),
    ]
    wide = read_cluster("b200:144", 72)[0]
    assert wide is not None and wide.topology() == "2x1x72"


REFUSED = {
    None: "must be given",
    "": "unknown device ''",
    "cpu:8": "unknown device 'cpu'",
    "h100:": "N from 1 to 999999, got 'h100:'",
    "h100:0": "N from 1 to 999999",
    "h100:x8": "N from 1 to 999999",
    "h100:12": "12 GPUs don't fill nodes of 8",
}


@pytest.mark.parametrize("text", REFUSED)
def test_errors_of_devices(text: str | None) -> None:
    cluster, (problem,) = read_cluster(text)
    assert cluster is None
    assert REFUSED[text] in problem.message
    if "unknown" in problem.message or text is None:
        assert all(name in problem.hint for name in GPUS), "lists those there are"


def test_the_nearest_name_is_suggested() -> None:
    (problem,) = read_cluster("h10:8")[1]
    assert problem.hint.startswith("did you mean h100")


@pytest.mark.parametrize("name", GPUS)
def test_target_config(name: str) -> None:
    gpu, text = GPUS[name], GPUS[name].target_config()
    assert text.count("{") == text.count("}") == 4
    value = dict(re.findall(r"^ *(\w+): (.*)$", text, re.MULTILINE))
    assert value["core_count"] == str(gpu.cores)
    assert value["device_memory_size"] == str(round(gpu.memory_gib * 2**30))
    assert value["device_description_str"] == f'"{gpu.description}"'
    assert value["feature_extension"] == ("NONE" if name.startswith("a100") else "ACCELERATED_FEATURES")
    assert int(value["shared_memory_per_block_optin"]) == (gpu.shared_kib - 1) * 1024


def test_usable_memory_leaves_a_reserve() -> None:
    for gpu in GPUS.values():
        # The share that pools of memory are set to in practice.
        assert 0.88 < gpu.usable_gib / gpu.memory_gib < 0.95
