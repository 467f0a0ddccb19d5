"""Virtual GPUs: parsing of --devices, and the compiler's description of each."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megajax.config import load
from megajax.mesh.xla import XlaConfig, set_process
from megajax.planning.cost.estimate import Case
from megajax.planning.virtual_devices import GPUS, Cluster, read_cluster

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        *((text, "did you mean h100:8?") for text in ("h100x8", "8xh100", "H100-8", "8 x H100", "h100*8", "8h100")),
        ("a100-40gb-16", "did you mean a100-40gb:16?"),
        ("h100-sxm", "did you mean h100"),
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
    """Of the memory that CUDA reports, the share of `xla.memory_fraction`; an H100 reports 79.1 to 79.2 GiB of 80."""
    environment: dict[str, str] = {}
    set_process(XlaConfig(), environment)
    share = float(environment["XLA_CLIENT_MEM_FRACTION"])
    assert GPUS["h100"].usable_gib(share) == pytest.approx(79.15 * share, rel=2e-3)
    assert GPUS["h200"].usable_gib(share) == pytest.approx(139.8 * share, rel=2e-3)
    cfg: Any = load(f"{ROOT}/configs/llama3.py")
    parts = (share, 0.3)
    cases = [
        Case(replace(cfg, xla=replace(cfg.xla, memory_fraction=part)), Cluster(GPUS["h100"], 8, 8)) for part in parts
    ]
    assert [case.estimate.fits for case in cases] == [True, False]
    for part, case in zip(parts, cases, strict=True):
        assert case.estimate.run.usable_gib == case.usable_gib == GPUS["h100"].usable_gib(part)
