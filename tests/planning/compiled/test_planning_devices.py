"""Devices and links of plans: --devices, the compiler's description of GPUs, rates, and files of constants."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from user_errors import user_error

from megajax.config import load
from megajax.config.errors import UserError
from megajax.planning.compiled.devices import GPUS, Cluster, read_cluster, read_device
from megajax.planning.compiled.links import AxisSpan, ring_rate, seconds
from megajax.planning.cost.estimate import Case
from megajax.processes.xla_options import XlaConfig, set_process

ROOT = Path(__file__).resolve().parents[3]


def test_clusters_are_parsed() -> None:
    cluster, problems = read_cluster("h100:128")
    assert cluster is not None and not problems
    assert (cluster.device.name, cluster.devices, cluster.topology()) == ("h100", 128, "16x1x8")
    expected = {"A100:8": ("a100-80gb", 8, "1x1x8"), "h200": ("h200", 8, "1x1x8"), "b200:2": ("b200", 2, "1x1x2")}
    clusters = {text: read_cluster(text)[0] for text in expected}
    assert {text: (one.device.name, one.devices, one.topology()) for text, one in clusters.items() if one} == expected
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


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        *((text, "did you mean h100:8?") for text in ("h100x8", "8xh100", "H100-8", "8 x H100", "h100*8", "8h100")),
        ("a100-40gb-16", "did you mean a100-40gb:16?"),
        ("h100-sxm", "did you mean h100"),
        ("h10:8", "did you mean h100"),
        ("16", "which GPUs? For example h100:16"),
        ("gpu", "which GPUs? For example h100:8"),
        ("gpu:4", "which GPUs? For example h100:4"),
    ],
)
def test_other_spellings_of_GPUs(text: str, hint: str) -> None:
    (problem,) = read_cluster(text)[1]
    assert problem.hint.startswith(hint)


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


def test_usable_memory_is_what_a_run_reserves() -> None:
    """The limit is the share `xla.memory_fraction` of what CUDA reports; an H100 reports 79.1 to 79.2 GiB of 80."""
    environment: dict[str, str] = {}
    set_process(XlaConfig(), environment)
    share = float(environment["XLA_CLIENT_MEM_FRACTION"])
    assert GPUS["h100"].usable_gib(share) == pytest.approx(79.15 * share, rel=2e-3)
    assert GPUS["h200"].usable_gib(share) == pytest.approx(139.8 * share, rel=2e-3)
    cfg: Any = load(f"{ROOT}/configs/llama3.py")
    for part, fits in ((share, True), (0.3, False)):
        case = Case(replace(cfg, xla=replace(cfg.xla, memory_fraction=part)), Cluster(GPUS["h100"], 8, 8))
        assert case.estimate.fits == fits
        assert case.estimate.run.usable_gib == case.usable_gib == GPUS["h100"].usable_gib(part)


LINKS = {"nvlink": 100e9, "nvlink_latency": 1e-6, "network": 10e9, "network_latency": 10e-6}
PLAIN = replace(GPUS["h100"], **LINKS, nvlink_share=1.0, network_share=1.0, launch=0.0)
GIGABYTE = 1e9


def test_groups_in_a_node_and_across_nodes() -> None:
    assert AxisSpan.of(8, 1, 8) == AxisSpan(8, 8)
    assert AxisSpan.of(16, 8, 8) == AxisSpan(16, 1), "one of each node, as data beside tensor 8"
    assert AxisSpan.of(16, 2, 8) == AxisSpan(16, 4) and AxisSpan.of(16, 2, 8).nodes == 4
    mesh = {"pipeline": 4, "data": 2, "expert": 1, "context": 1, "tensor": 4}
    assert AxisSpan.along(["pipeline", "tensor"], mesh, 8) == AxisSpan(16, 4)


def test_a_ring_in_a_node_sends_all_but_its_own_part() -> None:
    inside = AxisSpan(4, 4)
    assert seconds("all-gather", GIGABYTE, inside, PLAIN) == pytest.approx(0.75 * 0.01, rel=1e-2)
    twice = seconds("all-reduce", GIGABYTE, inside, PLAIN)
    assert twice == pytest.approx(2 * seconds("reduce-scatter", GIGABYTE, inside, PLAIN), rel=1e-2)
    assert seconds("all-gather", GIGABYTE, AxisSpan(1, 1), PLAIN) == 0


def test_the_members_in_a_node_share_the_link_between_nodes() -> None:
    assert ring_rate(PLAIN, AxisSpan(8, 1)) == 10e9
    assert ring_rate(PLAIN, AxisSpan(8, 4)) == 40e9, "four network links"
    assert ring_rate(PLAIN, AxisSpan(160, 80)) == 100e9, "never faster than NVLink"
    assert seconds("collective-permute", GIGABYTE, AxisSpan(4, 1), PLAIN) == pytest.approx(0.1, rel=1e-3)


def test_small_sums_over_many_nodes_use_trees() -> None:
    assert seconds("all-reduce", 8, AxisSpan(1024, 1), PLAIN) == pytest.approx(2 * 10 * 10e-6, rel=1e-2)


def test_small_matmuls_have_a_lower_rate() -> None:
    device = replace(PLAIN, matmul_half=64.0)
    assert device.matmul_share(64) == 0.5
    assert device.matmul_share(64, 64, 64) == 0.125
    assert device.matmul_share(8192, 8192, 8192) > 0.97


def described(folder: Path, text: str) -> Path:
    file = folder / "device.yaml"
    file.write_text(text)
    return file


MINE = "name: mine\nmemory_gib: 96\nbandwidth: 3e12\npeak: 5e14\nnvlink: 200e9\nnetwork: 25e9\n"


def test_a_described_device(tmp_path: Path) -> None:
    mine = read_device(described(tmp_path, MINE + "peak_fp8: 1e15\nper_node: 4\n"))
    assert (mine.name, mine.peak, mine.nvlink, mine.per_node) == ("mine", 5e14, 200e9, 4)
    assert mine.peak_of("fp8") == 1e15 and 85 < mine.usable_gib(0.92) < 92


WRONG = {
    "nothing": ("", "memory_gib: has no default and is not given"),
    "a part": ("name: mine\npeak: 1e15\n", "memory_gib: has no default and is not given"),
    "no number": (MINE.replace("3e12", "fast"), "bandwidth: expected a number, got 'fast'"),
    "below nothing": (MINE.replace("3e12", "-1"), "bandwidth: must be above 0, got -1"),
    "another name": (MINE + "nvlnk: 1\n", "did you mean nvlink"),
    "no YAML": ("a: [", "device.yaml, line 1: "),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_device_descriptions(case: str, tmp_path: Path) -> None:
    text, message = WRONG[case]
    with pytest.raises(UserError) as caught:
        read_device(described(tmp_path, text))
    assert message in str(caught.value)


def test_measured_constants_replace_known_ones(tmp_path: Path) -> None:
    constants = '{"constants": {"name": "h100", "matmul": 0.5}, "readings": {}}'
    file = described(tmp_path, f'{{"date": "x", "figures": {constants}}}')
    assert read_device(file, GPUS["h100"]) == replace(GPUS["h100"], matmul=0.5)
    with user_error():
        read_device(file, GPUS["h200"])
