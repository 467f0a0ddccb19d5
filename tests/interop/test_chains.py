"""Commands one after the other, as users run them: each takes what the one before has written."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gangs import CONFIG, TRAIN, Started
from test_several_processes import Gang, ask

pytestmark = pytest.mark.slow
ONE = "--devices=cpu:1"
SMALL = (f"--config={CONFIG}", ONE, "--model.dropout=0", "--steps=3", "--evaluation.at_end=false")
ENGINE = ("--port=0", "--inference.rows=2", "--inference.chunk=8", "--inference.warm_up=false")
GREEDY = {"prompt": [[1, 2, 3], [9, 8, 7, 6, 5]], "max_tokens": 8, "temperature": 0, "logprobs": 0}


def run(start: Callable[..., Started], *command: object) -> Started:
    """A command that ends well."""
    process = start(*command)
    assert process.wait() == 0, process.text
    return process


def train(start: Callable[..., Started], folder: Path, *more: str) -> Path:
    run(start, *TRAIN, *SMALL, f"--run_dir={folder}", *more)
    return folder


def scores(url: str, **more: Any) -> list[float]:
    """Log-probabilities of greedy answers, which tell the weights."""
    choices = ask(url, "completions", **GREEDY, **more)["choices"]
    return [score for choice in choices for score in choice["logprobs"]["token_logprobs"]]


def demand_same(found: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_an_exported_run_is_served_with_drafts_and_gets_the_weights_of_another_run(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    first, second = train(start, tmp_path / "first"), train(start, tmp_path / "second", "--schedule.lr=0.1")
    run(start, sys.executable, "-m", "megajax.convert", f"--from={first}", f"--to=hf:{first}_hf")
    drafting = ("--inference.speculate=2", "--inference.compute=float32")
    url = Gang(start, "serve", f"--hf={first}_hf", *drafting, "--server.control=true", ONE, *ENGINE, processes=1).url()
    expected = {}
    for folder in (first, second):
        expected[folder] = scores(Gang(start, "serve", f"--run={folder}", ONE, *ENGINE, processes=1).url())
    assert np.abs(np.subtract(*expected.values())).max() > 0.01
    demand_same(scores(url), expected[first])
    for folder, weights in ((second, second), (first, Path(f"{first}_hf"))):
        ask(url.removesuffix("/v1"), "../update_weights_from_disk", model_path=str(weights))
        demand_same(scores(url), expected[folder])


def test_a_layout_of_a_plan_is_served_by_several_processes(start: Callable[..., Started], tmp_path: Path) -> None:
    config, plan, folder = "--config=qwen3_moe.py:debug", tmp_path / "plan.json", tmp_path / "run"
    words = ("--devices=h100:4", "--serve", "--context=32", f"--json={plan}")
    run(start, sys.executable, "-m", "megajax.plan", config, *words)
    layouts = [each for each in json.loads(plan.read_text()) if (each["tensor"], each["expert"]) == (2, 2)]
    flags = next(each["flags"] for each in layouts if each["weights"] == "int8")
    small = ("--steps=1", "--data.megabytes=1", "--batch.global_size=2", "--batch.micro_size=2")
    quiet = ("--evaluation.every=none", "--evaluation.at_end=false", "--logging.prompt=none", "--logging.plot=false")
    run(start, *TRAIN, config, ONE, "--parallel.expert=1", *small, *quiet, f"--run_dir={folder}")
    one = [flag for flag in flags if not flag.startswith("--parallel.")]
    expected = scores(Gang(start, "serve", f"--run={folder}", ONE, *one, *ENGINE, processes=1).url())
    two = Gang(start, "serve", f"--run={folder}", "--devices=cpu:2", *flags, *ENGINE)
    demand_same(scores(two.url()), expected)
    assert "4 cpu: expert 2, tensor 2" in two.first.text


def test_a_trained_adapter_is_served_and_dropped(start: Callable[..., Started], tmp_path: Path) -> None:
    base = train(start, tmp_path / "base")
    adapter = train(
        start,
        tmp_path / "adapter",
        "--model.lora={rank: 2}",
        "--schedule.lr=0.1",
        f"--checkpoint.load={base}",
        "--checkpoint.parts=weights",
    )
    merged = scores(Gang(start, "serve", f"--adapter={adapter}", ONE, *ENGINE, processes=1).url())
    slots = (f"--adapters=law={adapter}", "--inference.adapter_rank=2", "--server.load_adapters=true")
    url = Gang(start, "serve", f"--run={base}", *slots, ONE, *ENGINE, processes=1).url()
    plain = scores(url)
    demand_same(scores(url, model="law"), merged)
    assert np.abs(np.subtract(plain, merged)).max() > 0.01
    assert ask(url, "unload_lora_adapter", lora_name="law")["deleted"]
    with pytest.raises(AssertionError, match="no model 'law'"):
        scores(url, model="law")
    demand_same(scores(url), plain)
    ask(url, "load_lora_adapter", lora_name="again", lora_path=str(adapter))
    demand_same(scores(url, model="again"), merged)
