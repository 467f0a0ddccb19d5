"""Rates of devices and links: rings, trees, and files that describe or calibrate a device."""

from dataclasses import replace
from pathlib import Path

import pytest

from megajax.config.errors import UserError
from megajax.planning.cost.traffic import Span, ring_rate, seconds
from megajax.planning.virtual_devices import GPUS, REQUIRED, read_device

PLAIN = replace(
    GPUS["h100"],
    nvlink=100e9,
    nvlink_share=1.0,
    network=10e9,
    network_share=1.0,
    nvlink_latency=1e-6,
    network_latency=10e-6,
    launch=0.0,
)
GIGABYTE = 1e9


def test_groups_in_a_node_and_across_nodes() -> None:
    assert Span.of(8, 1, 8) == Span(8, 8)
    assert Span.of(16, 8, 8) == Span(16, 1), "one of each node, as data beside tensor 8"
    assert Span.of(16, 2, 8) == Span(16, 4) and Span.of(16, 2, 8).nodes == 4
    mesh = {"pipeline": 4, "data": 2, "expert": 1, "context": 1, "tensor": 4}
    assert Span.along(["pipeline", "tensor"], mesh, 8) == Span(16, 4)


def test_a_ring_in_a_node_sends_all_but_its_own_part() -> None:
    inside = Span(4, 4)
    assert seconds("all-gather", GIGABYTE, inside, PLAIN) == pytest.approx(0.75 * 0.01, rel=1e-2)
    twice = seconds("all-reduce", GIGABYTE, inside, PLAIN)
    assert twice == pytest.approx(2 * seconds("reduce-scatter", GIGABYTE, inside, PLAIN), rel=1e-2)
    assert seconds("all-gather", GIGABYTE, Span(1, 1), PLAIN) == 0


def test_the_members_in_a_node_share_the_link_between_nodes() -> None:
    assert ring_rate(PLAIN, Span(8, 1)) == 10e9
    assert ring_rate(PLAIN, Span(8, 4)) == 40e9, "four network links"
    assert ring_rate(PLAIN, Span(160, 80)) == 100e9, "never faster than NVLink"
    assert seconds("collective-permute", GIGABYTE, Span(4, 1), PLAIN) == pytest.approx(0.1, rel=1e-3)


def test_small_sums_over_many_nodes_use_trees() -> None:
    assert seconds("all-reduce", 8, Span(1024, 1), PLAIN) == pytest.approx(2 * 10 * 10e-6, rel=1e-2)


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
    "below nothing": (MINE.replace("3e12", "-1"), "bandwidth: must be a number above 0, got -1"),
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
    file = described(
        tmp_path, '{"date": "x", "figures": {"constants": {"name": "h100", "matmul": 0.5}, "readings": {}}}'
    )
    assert read_device(file, GPUS["h100"]) == replace(GPUS["h100"], matmul=0.5)
    with pytest.raises(UserError, match=r"measured on h100, the plan is for h200"):
        read_device(file, GPUS["h200"])


def test_constants_without_a_default_are_required() -> None:
    assert all(hasattr(GPUS["h100"], name) for name in REQUIRED)
