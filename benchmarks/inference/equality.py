"""Log-probabilities of an engine beside those of its run: by layout, dtype and model, and what equal ones cost."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

import megajax as mj
from megajax.inference.assembly import engine_of_run
from megajax.inference.sampling_settings import Sampling
from megajax.inference.worker import complete
from megajax.mesh.mesh import build_mesh
from megajax.mesh.xla_options import XlaConfig
from megajax.training.check_compiler_options import inference_options
from megajax.training.program import Program
from megajax.training.scoring import Scorer, Window

LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {"data": 1},
    "tensor 2": {"data": 1, "tensor": 2},
    "data 2 x tensor 2": {"data": 2, "tensor": 2, "data_sharding": "replicate"},
    "FSDP 2 x tensor 2": {"data": 2, "tensor": 2, "data_sharding": "fsdp"},
}
ROWS, ANSWER, SCORED = 32, 40, 8
"""Rows of the engine, tokens of an answer, and answers of a batch that is timed."""


def equality(*, layout: str = "", dtype: str = "", model: str = "") -> dict[str, Any]:
    """The share of log-probabilities of answers with the bits of the run's, the largest difference, and times.

    The model of quickstart.py, dense or with experts, with matrices three times their initial ones, in each layout that
    the devices allow (JAX_NUM_CPU_DEVICES=4); --layout, --dtype and --model choose one. `plain` is without
    inference.equal_to_training and kernel=fixed, `equal` with both. Milliseconds: a step of the engine, and the scores
    of 8 answers by the run. wrong: an `equal` one that is not on a CPU. Mixtures are in bfloat16, as the setting needs.
    """
    results: dict[str, Any] = {}
    for name, sizes in LAYOUTS.items():
        if layout not in ("", name) or len(jax.devices()) < sizes["data"] * sizes.get("tensor", 1):
            continue
        for kind in ("dense", "mixture"):
            for compute in ("float32", "bfloat16") if kind == "dense" else ("bfloat16",):
                if model in ("", kind) and dtype in ("", compute):
                    both = {how: compared(kind, compute, sizes, equal=how == "equal") for how in ("plain", "equal")}
                    results[f"{name}, {kind}, {compute}"] = both
    cpu = jax.devices()[0].platform == "cpu"
    wrong = cpu and any(both["equal"]["largest"] > 0 for both in results.values())
    return {**results, "wrong": wrong}


def compared(kind: str, compute: str, sizes: dict[str, Any], *, equal: bool) -> dict[str, float]:
    """Figures of one case."""
    cfg = mj.load("quickstart.py", "checkpoint.every=none", f"precision.compute={compute}")
    block = cfg.model.stack.pattern[0]
    mlp = block.mlp if kind == "dense" else mj.MoEConfig(experts=8, top_k=2, expert=mj.GatedMLPConfig(ffn=128))
    block = replace(block, mlp=mlp, mixer=replace(block.mixer, kernel="fixed" if equal else "auto"))
    cfg = cfg.but(
        model=replace(cfg.model, stack=replace(cfg.model.stack, pattern=(block,))),
        parallel=mj.ParallelConfig(**sizes),
        xla=XlaConfig(options={"xla_allow_excess_precision": False} if equal else {}),
    )
    program = Program.of(cfg, build_mesh(cfg.parallel, jax.devices()[: sizes["data"] * sizes.get("tensor", 1)]))
    with jax.set_mesh(program.mesh):
        inputs = program.fresh_state()().inputs
    weights = {path: w * 3 if w.ndim > 2 else w for path, w in inputs.items()}
    tokenizer = mj.ByteTokenizerConfig().build()
    engine = engine_of_run(
        cfg,
        weights,
        program.mesh,
        inference_options(cfg.xla, program.mesh.devices.flat[0]),
        tokenizer,
        mj.InferenceConfig(rows=ROWS, chunk=96, equal_to_training=equal),
        end_tokens=(),
        length=cfg.model.row_positions(),
        queue=256,
    )
    draw, windows, log_ps = np.random.default_rng(0), list[Window](), list[Any]()
    prompts = [tuple(draw.integers(0, 256, int(count)).tolist()) for count in draw.integers(3, 80, 8)]
    requests = [(prompt, Sampling(max_tokens=ANSWER, n=4, logprobs=0, seed=7)) for prompt in prompts]
    list(complete(engine, requests))
    before, started = engine.statistics().steps_total, time.perf_counter()
    for (prompt, _), answers in zip(requests, complete(engine, requests), strict=True):
        for answer in answers:
            windows.append(Window(np.array([*prompt, *answer.tokens], np.int32), len(answer.tokens)))
            log_ps.append(np.array([score.logprob for score in answer.scores], np.float32))
    step = (time.perf_counter() - started) / (engine.statistics().steps_total - before)
    scorer = Scorer(program, tokenizer, weights)
    difference = np.concatenate(log_ps) - np.concatenate(scorer.log_probabilities(windows))
    return {
        "equal": round(float((difference == 0).mean()), 3),
        "largest": float(f"{abs(difference).max():.2g}"),
        "step_ms": round(1000 * step, 2),
        "score_ms": round(median_ms(lambda: scorer.log_probabilities(windows[:SCORED])), 1),
    }


def median_ms(work: Callable[[], Any], repeats: int = 5) -> float:
    """Milliseconds of a repeated call."""
    times = list[float]()
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - started))
    return float(np.median(times))
