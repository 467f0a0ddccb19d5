"""Speculative decoding of a trained model: steps and processor time of each kind of draft."""

import time
from dataclasses import replace
from typing import Any

import jax

import megajax as mj
from megajax.inference.assembly import make_engine
from megajax.inference.config import Drafts, InferenceConfig
from megajax.inference.loaded_model import LoadedModel, model_on_mesh
from megajax.inference.sampling_settings import Sampling
from megajax.inference.worker import complete
from megajax.mesh.config import ParallelConfig
from megajax.precision.config import PrecisionConfig
from megajax.tokenizers.config import ByteTokenizerConfig

SPECULATE, ANSWER = 4, 96
PROMPTS = ("import ", "def __init__(self, ", "    for name in ", "class Error(", "# Return the ", "        if not ")


def drafting(*, steps: int = 100) -> dict[str, Any]:
    """Steps and processor seconds for each token of an answer, one request at a time, on one device.

    A byte model of 0.9 million weights (quickstart.py) with a head of multi-token prediction besides trains for some
    steps. The tokens must be equal with and without drafts, with temperature 0 and 1.

    none   no drafts
    text   drafts of 4 tokens from the text of the request
    head   drafts of a token by the head
    again  drafts of 4 tokens by the head, from its own states after the first
    """
    cfg = mj.load("quickstart.py", "evaluation.every=none", "checkpoint.every=none", f"steps={steps}")
    model = trained(cfg.but(model=replace(cfg.model, prediction=mj.PredictionConfig())))
    kinds: dict[str, tuple[int, Drafts]] = {
        "none": (0, "text"),
        "text": (SPECULATE, "text"),
        "head": (1, "mtp"),
        "again": (SPECULATE, "mtp"),
    }
    runs = {name: measured(model, *kind) for name, kind in kinds.items()}
    tokens = [run.pop("tokens") for run in runs.values()]
    return {"training_steps": steps, **runs, "tokens_equal": all(found == tokens[0] for found in tokens)}


def trained(cfg: mj.RunConfig) -> LoadedModel:
    """The model after the steps of a run."""
    run = mj.setup(cfg, devices=jax.devices()[:1])
    for _ in run.steps(cfg.steps):
        pass
    parallel, precision = ParallelConfig(data=1, data_sharding="replicate"), PrecisionConfig(compute="float32")
    return model_on_mesh(cfg.model, run.state.inputs, parallel, run.mesh, precision, {})


def measured(model: LoadedModel, count: int, drafts: Drafts) -> dict[str, Any]:
    """Figures by temperature, and the tokens. All programs that are used are compiled before."""
    config = InferenceConfig(rows=2, compute="float32", speculate=count, drafts=drafts, chunk=32)
    tokenizer, length = ByteTokenizerConfig().build(), model.cfg.row_positions()
    engine = make_engine(model, config, tokenizer, end_tokens=(), length=length, queue=1)
    figures: dict[str, Any] = {"tokens": []}
    for temperature in (0.0, 1.0):
        sampling = Sampling(max_tokens=ANSWER, temperature=temperature, seed=5, ignore_eos=True)
        prompts = [(tuple(tokenizer.encode(prompt).tolist()), sampling) for prompt in PROMPTS]
        for prompt in prompts:
            list(complete(engine, [prompt]))
        before, start = engine.statistics(), time.process_time()
        answers = [answer for prompt in prompts for (answer,) in complete(engine, [prompt])]
        seconds, after = time.process_time() - start, engine.statistics()
        tokens, drafted = (
            getattr(after, name) - getattr(before, name) for name in ("tokens_total", "drafted_tokens_total")
        )
        figures["tokens"] += [answer.tokens for answer in answers]
        figures[f"temperature {temperature:g}"] = {
            "steps_per_token": (after.steps_total - before.steps_total) / tokens,
            "processor_milliseconds_per_token": 1e3 * seconds / tokens,
            "accepted_share": (after.accepted_tokens_total - before.accepted_tokens_total) / max(1, drafted),
        }
    return figures
