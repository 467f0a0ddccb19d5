"""Training on a core of a processor beside PyTorch."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import megajax as mj
from benchmarks.stopwatch import WARM_UP
from benchmarks.training.peers import (
    agree,
    demand_torch,
    measure_ours,
    measure_torch,
    optimizer_of,
    spec_of,
    torch_environment,
)  # fmt: skip
from megajax.config.errors import UserError
from megajax.display.banner import plain
from megajax.interop.huggingface.format import family_for, write_model

WAYS = {"none": "eager", "blocks": "compiled blocks", "whole": "compiled whole"}


def processor(
    *, torch_python: Path = Path(sys.executable), models: str = "all", steps: int = 10, rounds: int = 3
) -> dict[str, Any]:
    """Processor seconds of a train step relative to PyTorch, on one core, in float32.

    quickstart   configs/quickstart.py: 4 Llama layers of 128, 16 rows of 128 bytes
    nanogpt      the setting for processors of nanoGPT's readme: 4 GPT layers of 128, 12 rows of 64 characters, and
                 biases
    gpt2_124m    that of llm.c: GPT-2 124M, 4 rows of 64 tokens, 50,257 ids in 50,304 columns; random weights
    llama_30m    8 Llama layers of 512, 4 rows of 256 tokens, 8,192 ids
    mixtral_20m  4 Mixtral layers of 256, 8 experts of which each token takes 2, 4 rows of 128 tokens, 8,192 ids

    PyTorch runs training/torch_baseline.py: eager, with compiled blocks, compiled as a whole, and with a loss in
    chunks; of the mixture, the model of transformers, eager and compiled. If that Python has megatron-core, its
    GPTModel without Transformer Engine trains the others too. All start from the same weights and train the same
    batch; the losses of the first steps must agree. Processes take turns, and processor seconds count, so other load on
    the machine matters little.

    --torch-python: the Python that has torch. --models: names, separated by commas. --steps: counted ones of each
    process. --rounds: processes of each trainer; the median of their ratios counts.

    Raises UserError for an unknown model, and if there is no torch.
    """
    configs = {
        "quickstart": quickstart,
        "nanogpt": nanogpt,
        "gpt2_124m": gpt2_124m,
        "llama_30m": llama_30m,
        "mixtral_20m": mixtral_20m,
    }
    names = list(configs) if models == "all" else models.split(",")
    if unknown := set(names) - set(configs):
        raise UserError(f"--models: there is no {', '.join(sorted(unknown))}; there are {', '.join(configs)}")
    demand_torch(torch_python)
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Processes inherit the core.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    figures = {name: compared(configs[name](), torch_python, steps, rounds) for name in names}
    print(plain("processor seconds of a step on one core, MegaJAX over torch", [("", rows(figures))]))
    return figures | {"wrong": not all(of_model["equal_work"] for of_model in figures.values())}


def compared(cfg: mj.RunConfig, torch_python: Path, steps: int, rounds: int) -> dict[str, Any]:
    """Seconds of each trainer in each round, and the ratios."""
    seconds: dict[str, list[float]] = {"megajax": []}
    equal, megatron = True, has_megatron(torch_python)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mixture = isinstance(cfg.model.stack.pattern[0].mlp, mj.MoEConfig)
        paths = [folder / name for name in ("spec.json", "start.npz")]
        for turn in range(rounds):
            own = measure_ours(cfg, folder, f"--steps={steps}")
            spec = (optimizer_of(cfg) if mixture else spec_of(cfg)) | {
                "learning_rates": own["learning_rates"],
                "microbatches": own["run"]["microbatches"],
                "timed_steps": steps,
                "seconds": 600,
                "warm_up": WARM_UP,
            }
            paths[0].write_text(json.dumps(spec))
            if mixture:
                paths[1] = write_for_transformers(cfg.model, folder / f"transformers_{turn}")
            seconds["megajax"].append(own["processor_seconds"])
            baselines = (
                ["transformers_baseline"] if mixture else ["torch_baseline", "megatron_baseline"][: 1 + megatron]
            )
            measurements = []
            for baseline in baselines:
                out = folder / f"{baseline}_{turn}.json"
                program = [str(torch_python), "-m", f"benchmarks.training.{baseline}", *map(str, paths), str(out)]
                measurements += measure_torch(program, out, torch_environment(), 1200)["variants"]
            for measured in measurements:
                variant = measured["variant"]
                if "error" in measured:
                    print(f"torch, {variant}: {measured['error']}")
                    continue
                equal = equal and agree(own["losses"], measured["losses"], "float32")
                way = WAYS.get(variant["compile"], variant["compile"])
                seconds.setdefault(f"{way}, {variant['loss']} loss", []).append(measured["processor_seconds"])
    ratios = {
        name: round(statistics.median(own / other for own, other in zip(seconds["megajax"], taken, strict=True)), 3)
        for name, taken in seconds.items()
        if name != "megajax"
    }
    eager = ratios["eager, whole loss"]
    return {"eager": eager, "best": max(ratios.values()), "ratios": ratios, "seconds": seconds, "equal_work": equal}


def has_megatron(python: Path) -> bool:
    """Whether that Python has megatron-core."""
    return subprocess.run([str(python), "-c", "import megatron.core"], check=False, capture_output=True).returncode == 0


def write_for_transformers(model: mj.DecoderConfig, target: Path) -> Path:
    """A new Hugging Face folder of the start.npz beside it, with its batch."""
    start = np.load(target.parent / "start.npz")
    target.mkdir()
    weights = Arrays({name: start[name] for name in start.files if not name.startswith("batch.")})
    kind: Any = np.dtype(np.float32)
    write_model(target, model, weights, family_for(model), dtype=kind, dtypes=lambda _: kind, recorded={}, names={})
    np.savez(target / "batch.npz", tokens=start["batch.tokens"], labels=start["batch.labels"])
    return target


class Arrays:
    """Weights in memory, as a `megajax.checkpoint.weights.foreign.WeightSource`."""

    where = "the first step"

    def __init__(self, arrays: dict[str, np.ndarray]):
        self._arrays = arrays

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: array.shape for name, array in self._arrays.items()}

    def read(self, path: str, box: Any) -> np.ndarray:
        return self._arrays[path][box]


def rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """A line for each model."""
    lines = []
    for name, of_model in figures.items():
        ratios = ", ".join(f"{ratio:.2f} x {way}" for way, ratio in of_model["ratios"].items())
        milliseconds = 1e3 * statistics.median(of_model["seconds"]["megajax"])
        work = "" if of_model["equal_work"] else "; NOT EQUAL WORK: the losses differ"
        lines.append((name, f"{milliseconds:.0f} ms; {ratios}{work}"))
    return lines


def quickstart() -> mj.RunConfig:
    return mj.load("quickstart.py")


def nanogpt() -> mj.RunConfig:
    model = mj.gpt2("124m", sequence_length=64, vocabulary_size=65, dropout=0.0)
    (block,) = model.stack.pattern
    block = replace(block, mixer=replace(block.mixer, heads=4), mlp=replace(block.mlp, ffn=512))
    stack = replace(model.stack, pattern=(block,), repeats=4)
    return _run(replace(model, hidden=128, stack=stack), rows=12)


def gpt2_124m() -> mj.RunConfig:
    return _run(mj.gpt2("124m", sequence_length=64, vocabulary_size=50257, dropout=0.0), rows=4)


def llama_30m() -> mj.RunConfig:
    mixer = mj.AttentionConfig(heads=8, kv_heads=4, rope=mj.RopeConfig(base=500000.0))
    block = mj.BlockConfig(mixer=mixer, mlp=mj.GatedMLPConfig(ffn=1408), norm=mj.RMSNormConfig())
    stack = mj.StackConfig(pattern=(block,), repeats=8)
    norm = mj.RMSNormConfig()
    model = mj.DecoderConfig(hidden=512, vocabulary_size=8192, sequence_length=256, stack=stack, norm=norm, tied=True)
    return _run(model, rows=4)


def mixtral_20m() -> mj.RunConfig:
    mixer = mj.AttentionConfig(heads=8, kv_heads=4, rope=mj.RopeConfig(base=1000000.0))
    # Without a balancing loss, which is no part of the loss that is compared.
    experts = mj.MoEConfig(experts=8, top_k=2, expert=mj.GatedMLPConfig(ffn=512), router=mj.RouterConfig(aux_loss=0.0))
    block = mj.BlockConfig(mixer=mixer, mlp=experts, norm=mj.RMSNormConfig())
    stack = mj.StackConfig(pattern=(block,), repeats=4)
    norm = mj.RMSNormConfig()
    model = mj.DecoderConfig(hidden=256, vocabulary_size=8192, sequence_length=128, stack=stack, norm=norm)
    return _run(model, rows=4)


def _run(model: mj.DecoderConfig, *, rows: int) -> mj.RunConfig:
    return mj.RunConfig(
        model=model,
        data=mj.MockConfig(),
        tokenizer=mj.NullTokenizerConfig(vocabulary_size=model.vocabulary_size),
        precision=mj.PrecisionConfig(compute="float32"),
        optimizer=mj.AdamWConfig(beta2=0.95, weight_decay=0.1),
        schedule=mj.ScheduleConfig(lr=1e-4, min_lr=1e-5, warmup_steps=10),
        batch=mj.BatchConfig(global_size=rows, micro_size=rows),
        evaluation=mj.EvaluationConfig(every=None),
        steps=100,
        run_dir="runs/processor",
    )
