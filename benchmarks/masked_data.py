"""Rows for BERT and T5 per second and core, and the cost of a BERT step relative to a decoder's.

Run:  python benchmarks/masked_data.py [--rows=2000] [--hidden=256] [--layers=2] [--steps=10]

Rows of 128 and 512 tokens are made from a file of random sentences, and timed by the processor time of one thread. The
train step of BERT, with both losses, is timed in one run with that of a decoder of the same sizes on the same devices.
BERT-large has --hidden=1024 --layers=24 --length=512. Prints JSON and writes it to benchmarks/results/masked_data.json.
"""

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import outcome
from train_speed import Bench

from megajax.config import load
from megajax.data.configs import MaskedSentencesConfig, MaskedSpansConfig, Rows
from megajax.data.text.indexed_dataset import IndexedWriter
from megajax.mesh.mesh import build_mesh, find_devices
from megajax.models.presets.bert import bert
from megajax.models.presets.gpt import gpt3
from megajax.models.presets.t5 import t5
from megajax.training.program import Program

VOCABULARY, SENTINELS, PIECES = 30_624, 100, 6000
REPEATS = 3


def tokenizer() -> Any:
    """A vocabulary of the usual size, a fifth of it pieces that continue words."""
    continues = np.zeros(VOCABULARY, bool)
    continues[20_000 : 20_000 + PIECES] = True
    specials = {"cls": 101, "sep": 102, "mask": 103, "bos": VOCABULARY - 102, "eos": VOCABULARY - 101}
    sentinels = range(VOCABULARY - SENTINELS, VOCABULARY)
    return SimpleNamespace(
        vocabulary_size=VOCABULARY, continues=continues, specials=specials, sentinels=sentinels, pad=0, identity="rows"
    )


def write_corpus(prefix: Path, documents: int = 5000) -> None:
    """Documents of 5 to 60 sentences of 8 to 50 tokens."""
    random = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(documents):
            lengths = random.integers(8, 50, random.integers(5, 60))
            writer.add_document([random.integers(1000, VOCABULARY - 102, size).astype(np.uint16) for size in lengths])


def rows_per_second(prefix: Path, rows: int) -> dict[str, float]:
    """Best of a few readings of each kind of row."""
    speeds, paths = {}, (str(prefix),)
    for length in (128, 512):
        kinds = {
            "bert": (MaskedSentencesConfig(paths=paths, split="1"), bert("base", sequence_length=length)),
            "t5": (MaskedSpansConfig(paths=paths, split="1"), t5("base", encoder_length=length)),
        }
        for name, (data, model) in kinds.items():
            request = Rows(REPEATS * rows)
            source = data.build(tokenizer=tokenizer(), schema=model.schema(), rows=request, seed=1).train
            best = float("inf")
            for start in range(0, REPEATS * rows, rows):
                before = time.thread_time()
                for row in range(start, start + rows):
                    source[row]
                best = min(best, time.thread_time() - before)
            speeds[f"{name}_{length}_rows_per_second_and_core"] = rows / best
    return speeds


def program(source: str, model: Any, arguments: argparse.Namespace) -> Program:
    """The train step of a model in the sizes that were asked for, on one device."""
    block = model.stack.pattern[0]
    mixer, mlp = (
        replace(block.mixer, heads=max(arguments.hidden // 64, 1)),
        replace(block.mlp, ffn=4 * arguments.hidden),
    )
    stack = replace(model.stack, pattern=(replace(block, mixer=mixer, mlp=mlp),), repeats=arguments.layers)
    cfg = load(source)
    batch = replace(cfg.batch, global_size=arguments.batch, micro_size=arguments.batch)
    cfg = cfg.but(model=replace(model, hidden=arguments.hidden, stack=stack), batch=batch)
    return Program.of(cfg, build_mesh(cfg.parallel, find_devices()[:1]))


def batch_of(program: Program) -> dict[str, Any]:
    """Random leaves of the step's batch, each below what the model reads; no padding."""
    draw, schema, values = np.random.default_rng(0), program.cfg.model.schema(), {}
    for name, leaf in program.batch_like().items():
        limit = schema[name].below if name in schema else None
        value = np.ones(leaf.shape, leaf.dtype) if limit is None else draw.integers(0, limit, leaf.shape)
        if name == "loss_mask" and "token_types" in schema:
            value = draw.random(leaf.shape) < 0.15
        values[name] = jax.device_put(value.astype(leaf.dtype), leaf.sharding)
    return values


def step_seconds(arguments: argparse.Namespace) -> dict[str, float]:
    """Medians of the train steps of both models, taken in turns."""
    sizes: dict[str, Any] = {"sequence_length": arguments.length, "vocabulary_size": VOCABULARY, "dropout": 0.0}
    benches, times = {}, {}
    models = {"bert": ("bert.py:debug", bert("debug", **sizes)), "decoder": ("gpt3.py:debug", gpt3("debug", **sizes))}
    for name, (source, model) in models.items():
        step_program = program(source, model, arguments)
        with jax.set_mesh(step_program.mesh):
            step: Any = step_program.train_step
            compiled = step.lower(step_program.state_like(), step_program.batch_like()).compile()
            benches[name], times[name] = (
                Bench(step_program, compiled, step_program.fresh_state()(), batch_of(step_program)),
                [],
            )
    for _ in range(arguments.steps + 1):
        for name, bench in benches.items():
            start = time.perf_counter()
            jax.block_until_ready(bench.step())
            times[name].append(time.perf_counter() - start)
    seconds = {name: float(np.median(samples[1:])) for name, samples in times.items()}
    return {
        **{f"{name}_step_seconds": value for name, value in seconds.items()},
        "bert_over_decoder": seconds["bert"] / seconds["decoder"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"rows": 2000, "hidden": 256, "layers": 2, "length": 128, "batch": 8, "steps": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        write_corpus(Path(folder) / "corpus")
        results = rows_per_second(Path(folder) / "corpus", arguments.rows)
        results |= step_seconds(arguments)
    outcome.write("masked_data", vars(arguments) | {name: float(f"{value:.4g}") for name, value in results.items()})


if __name__ == "__main__":
    main()
