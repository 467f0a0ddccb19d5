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
from benchmarks.outcome import ROOT
from megajax.config.dump import to_yaml
from megajax.config.errors import UserError
from megajax.display.banner import plain
from megajax.interop.huggingface.format import chosen_family, write_model

PACKAGES = {"torch": "torch", "transformers": "transformers", "megatron-core": "megatron.core"}
"""Peer of training/torch_peers.py -> the package that it needs."""
TOLERANCE = 1e-4
"""Largest difference of a loss of the first steps."""


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

    The peers are those of training/torch_peers.py: PyTorch, eager and compiled as a whole; of the mixture, the model of
    transformers; and Megatron-Core's GPTModel without Transformer Engine, if that Python has it. All start from the
    same weights and train the same batch; the losses of the first steps must agree. Processes take turns, and processor
    seconds count, so other load on the machine matters little.

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
    if not has(torch_python, "torch"):
        raise UserError(
            f"torch: not installed for {torch_python}. Install torch and numpy there, or give --torch-python=FILE"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Processes inherit the core.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    figures = {name: compared(configs[name](), torch_python, steps, rounds) for name in names}
    print(plain("processor seconds of a step on one core, MegaJAX over torch", [("", rows(figures))]))
    return figures | {"wrong": not all(of_model["equal_work"] for of_model in figures.values())}


def compared(cfg: mj.RunConfig, torch_python: Path, steps: int, rounds: int) -> dict[str, Any]:
    """Seconds of each trainer in each round, and the ratios."""
    seconds: dict[str, list[float]] = {"megajax": []}
    mixture = isinstance(cfg.model.stack.pattern[0].mlp, mj.MoEConfig)
    peers = [peer for peer in PACKAGES if (peer == "transformers") == mixture and has(torch_python, PACKAGES[peer])]
    equal = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec_file, start, out = (folder / name for name in ("spec.json", "start.npz", "peer.json"))
        for turn in range(rounds):
            own = measure_ours(cfg, folder, steps)
            spec = optimizer_of(cfg) | ({} if mixture else shape_of(cfg))
            spec |= {
                "learning_rates": own["learning_rates"],
                "microbatches": own["run"]["microbatches"],
                "timed_steps": steps,
            }
            spec_file.write_text(json.dumps(spec))
            seconds["megajax"].append(own["processor_seconds"])
            began = write_for_transformers(cfg.model, folder / f"transformers_{turn}") if mixture else start
            for peer in peers:
                program = [str(torch_python), "-m", "benchmarks.training.torch_peers", peer]
                run([*program, *map(str, (spec_file, began, out))], peer, OMP_WAIT_POLICY="PASSIVE")
                for way, measured in json.loads(out.read_text()).items():
                    if "error" in measured:
                        print(f"{peer}, {way}: {measured['error']}")
                        continue
                    equal = equal and agree(own["losses"], measured["losses"])
                    seconds.setdefault(f"{peer}, {way}", []).append(measured["processor_seconds"])
    ratios = {
        name: round(statistics.median(own / other for own, other in zip(seconds["megajax"], taken, strict=True)), 3)
        for name, taken in seconds.items()
        if name != "megajax"
    }
    return {"best": max(ratios.values()), "ratios": ratios, "seconds": seconds, "equal_work": equal}


def has(python: Path, package: str) -> bool:
    """Whether that Python has a package. Raises UserError if it can't be started."""
    try:
        return (
            subprocess.run([str(python), "-c", f"import {package}"], check=False, capture_output=True).returncode == 0
        )
    except OSError as error:
        raise UserError(f"--torch-python={python} can't be started: {error.strerror}") from error


def agree(own: list[float], theirs: list[float]) -> bool:
    """Whether the losses of the first steps agree within TOLERANCE."""
    return all(abs(own_loss - peer_loss) <= TOLERANCE for own_loss, peer_loss in zip(own, theirs, strict=True))


def measure_ours(cfg: mj.RunConfig, folder: Path, steps: int) -> dict[str, Any]:
    """Figures of `mfu` in its own process, which leaves start.npz in the folder."""
    config, file = folder / "config.yaml", folder / "ours.json"
    config.write_text(to_yaml(cfg))
    words = [f"--config={config}", f"--json={file}", f"--export={folder / 'start.npz'}", f"--steps={steps}"]
    run([sys.executable, "-m", "benchmarks", "mfu", *words], "MegaJAX")
    return json.loads(file.read_text())["figures"]


def run(program: list[str], name: str, **environment: str) -> None:
    """Run one trainer with its output shown. Raises UserError if it fails or takes too long."""
    print(f"== {name}", flush=True)
    try:
        code = subprocess.run(program, check=False, env=os.environ | environment, timeout=1200, cwd=ROOT).returncode
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{name} was stopped after 1200 s") from error
    if code:
        raise UserError(f"{name} ended with code {code}")


def shape_of(cfg: mj.RunConfig) -> dict[str, Any]:
    """What a peer needs to know of a GPT or Llama, beside its weights."""
    model, block = cfg.model, cfg.model.stack.pattern[0]
    mixer: Any = block.mixer
    norm: Any = model.norm
    return {
        "layers": model.stack.layers(),
        "heads": mixer.heads,
        "kv_heads": mixer.groups(),
        "head_dim": mixer.size(model.hidden),
        "gated": isinstance(block.mlp, mj.GatedMLPConfig),
        "epsilon": norm.epsilon,
        "rope_base": None if mixer.rope is None else mixer.rope.base,
        "length": model.sequence_length,
        "vocabulary": model.vocabulary_size,
    }


def optimizer_of(cfg: mj.RunConfig) -> dict[str, Any]:
    """The settings of AdamW."""
    optimizer: Any = cfg.optimizer
    return {
        "betas": [optimizer.beta1, optimizer.beta2],
        "adam_epsilon": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
        "clip": optimizer.clip,
    }


def write_for_transformers(model: mj.DecoderConfig, target: Path) -> Path:
    """A new Hugging Face folder of the start.npz beside it, with its batch."""
    start = np.load(target.parent / "start.npz")
    target.mkdir()
    weights = Arrays({name: start[name] for name in start.files if not name.startswith("batch.")})
    write_model(target, model, weights, chosen_family(model)[0])
    np.savez(target / "batch.npz", **{name: start[name] for name in start.files if name.startswith("batch.")})
    return target


class Arrays:
    """Weights in memory, as a `megajax.checkpoint.weight_source.WeightSource`."""

    where = "the first step"

    def __init__(self, arrays: dict[str, np.ndarray]):
        self._arrays = arrays
        self.shapes = {name: array.shape for name, array in arrays.items()}

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
