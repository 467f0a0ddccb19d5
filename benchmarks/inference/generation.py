"""Text generation: speed relative to the bandwidth bound, and with drafts."""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from megajax.inference.admission import AnswerRules
from megajax.inference.assembly import TILE, for_steps
from megajax.inference.device import ModelDevice
from megajax.inference.engine import Engine
from megajax.inference.loaded_model import CacheSize, LoadedModel, load_weights
from megajax.inference.programs import Programs
from megajax.inference.request import Output, Request
from megajax.inference.sampling.chooser import choosers
from megajax.inference.sampling_settings import Sampling
from megajax.inference.step_arrays import Bucket
from megajax.interop.conversion import open_source
from megajax.layers.cache_spec import stored_leaves
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan
from megajax.precision.config import PrecisionConfig

SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
         "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 512}  # fmt: skip
"""The model in the names of transformers: 82 million weights, 327 MB, many times the caches of a processor."""
BATCH, PROMPT, ANSWER, LENGTH, BLOCK, CHUNK, SPECULATE = 8, 64, 64, 512, 16, 64, 4


def inference() -> dict[str, Any]:
    """Text generation on this machine: speed relative to the bandwidth bound, and with drafts.

    The model is a Llama with random weights in float32 and the tiled kernel. Ratios compare runs on the same cores.

    bound        tokens/s of 8 rows relative to the bound by memory bandwidth, which is measured in the same run. A
                 step reads all weights and the cache of its rows.
    speculation  tokens/s and steps of one request, with drafts of SPECULATE tokens and without. Text of 8 different
                 tokens, which repeats itself. The tokens must be equal.

    `serving_load` measures a server under load.
    """
    figures: dict[str, Any] = {"model": SIZES, "batch": BATCH, "prompt": PROMPT, "answer": ANSWER}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        model = model_of(folder)
        eight = engine_of(model)
        figures["bound"] = bound(model, eight)
        figures["speculation"] = speculation(model)
    return figures


def write_model(folder: Path) -> None:
    """A Hugging Face folder of a Llama with random weights."""
    draw = np.random.default_rng(0)
    hidden, inner, columns = (SIZES[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    keyed = hidden * SIZES["num_key_value_heads"] // SIZES["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.norm": (hidden,)}
    shapes |= dict.fromkeys(("model.embed_tokens", "lm_head"), (columns, hidden))
    for layer in range(SIZES["num_hidden_layers"]):
        out_features = {"q_proj": hidden, "k_proj": keyed, "v_proj": keyed, "o_proj": hidden}
        below: dict[str, tuple[int, ...]] = {
            f"self_attn.{name}": (outputs, hidden) for name, outputs in out_features.items()
        }
        below |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        below |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in below.items()}
    tensors = {
        f"{name}.weight": np.ones(shape, "float32")
        if len(shape) == 1
        else draw.normal(0, 0.05, shape).astype("float32")
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
    config |= {"rope_theta": 1e4, "tie_word_embeddings": False, "torch_dtype": "float32", **SIZES}
    (folder / "config.json").write_text(json.dumps(config))


def model_of(folder: Path) -> LoadedModel:
    """The model of the folder on the first device."""
    opened, parallel = open_source(f"hf:{folder}"), ParallelConfig(data=1, data_sharding="replicate")
    mesh = build_mesh(parallel, jax.devices()[:1])
    return load_weights(opened.model, opened.weights, Plan.of(parallel), mesh, PrecisionConfig(compute="float32"), {})


def stream_bandwidth() -> float:
    """Bytes/s that all cores read: the best of several sums over 512 MiB."""
    x = jnp.ones(2**27, jnp.float32)
    total, best = jax.jit(lambda x: x.reshape(64, -1).sum(axis=1)), 0.0
    for _ in range(8):
        start = time.perf_counter()
        total(x).block_until_ready()
        best = max(best, x.nbytes / (time.perf_counter() - start))
    return best


def engine_of(
    model: LoadedModel, *, rows: int = BATCH, drafts: int = 0, chunk: int = CHUNK, vocabulary: int = SIZES["vocab_size"]
) -> Engine:
    """An engine with all of its greedy steps compiled, as a server makes it on this machine. vocabulary: number of ids
    that may be chosen."""
    steps = Programs(
        for_steps(model),
        CacheSize(blocks=rows * LENGTH // BLOCK, block=BLOCK, slots=rows),
        buckets=[
            *(Bucket(rows, drafts=most) for most in dict.fromkeys((0, drafts))),
            Bucket(rows, chunk // TILE, TILE, drafts),
        ],
        choosers=choosers(vocabulary)[:1],
        length=LENGTH,
        dtype="float32",
        kernel="tiled",
    )
    for _ in steps.compile():
        pass
    return Engine(ModelDevice(steps, vocabulary), AnswerRules(end_tokens=()), queue=10_000)


def submit(engine: Engine, prompts: list[list[int]], answer: int = ANSWER) -> list[list[int]]:
    """Greedy requests for `answer` tokens each. Returns the lists that their tokens arrive in."""
    answers: list[list[int]] = [[] for _ in prompts]
    sampling = Sampling(max_tokens=answer, temperature=0, ignore_eos=True)
    for number, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):

        def deliver(piece: Output, tokens: list[int] = tokens) -> None:
            tokens.extend(piece.tokens)

        engine.submit(Request(identifier=str(number), prompt=tuple(prompt), sampling=sampling, deliver=deliver))
    return answers


def finish(engine: Engine) -> None:
    while engine.step():
        pass


def prompts_of(seed: int, rows: int = BATCH, length: int = PROMPT) -> list[list[int]]:
    """Different random prompts, so that they share no blocks of the cache."""
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], (rows, length)).tolist()


def decode_seconds(
    engine: Engine, prompts: list[list[int]], answer: int = ANSWER
) -> tuple[tuple[float, float], list[list[int]]]:
    """Seconds by the clock and of the processor, including the prompts, and the tokens."""
    start = time.perf_counter(), time.process_time()
    answers = submit(engine, prompts, answer)
    finish(engine)
    return (time.perf_counter() - start[0], time.process_time() - start[1]), answers


def bound(model: LoadedModel, engine: Engine) -> dict[str, Any]:
    """Speed of steps in which all rows decode, relative to the bound by memory bandwidth."""
    rates = []
    for seed in range(10, 13):
        answers = submit(engine, prompts_of(seed))
        while not all(answers):
            engine.step()
        before, start = sum(map(len, answers)), time.perf_counter()
        finish(engine)
        rates.append((sum(map(len, answers)) - before) / (time.perf_counter() - start))
    weights = sum(w.nbytes for path, w in model.weights.items() if path != "tokens")
    token = sum(4 * leaf.size for leaf in stored_leaves(model.cfg.cache_leaves(1), "float32") if leaf.per == "token")
    cache = BATCH * (PROMPT + ANSWER / 2) * token
    bandwidth, speed = stream_bandwidth(), statistics.median(rates)
    most = BATCH * bandwidth / (weights + cache)
    return {
        "bandwidth_gb_per_second": bandwidth / 1e9,
        "weights_bytes": weights,
        "cache_bytes": cache,
        "tokens_per_second": speed,
        "bound_tokens_per_second": most,
        "share_of_bound": speed / most,
    }


def speculation(model: LoadedModel) -> dict[str, Any]:
    """Speed of one request at a time with drafts relative to that without, prompts included."""
    ids, found, tokens = 8, {}, []
    prompts = np.random.default_rng(4).integers(0, ids, (4, 1, PROMPT)).tolist()
    for name, drafts in (("without", 0), ("with", SPECULATE)):
        engine = engine_of(model, rows=2, drafts=drafts, vocabulary=ids)
        runs = [decode_seconds(engine, prompt) for prompt in prompts]
        tokens.append([answers for _, answers in runs])
        counts = engine.statistics()
        rate = counts.tokens_total / sum(seconds[0] for seconds, _ in runs)
        found[name] = {"tokens_per_second": rate, "steps": counts.steps_total}
    accepted = {"drafted": counts.drafted_tokens_total, "accepted": counts.accepted_tokens_total}
    ratio = found["with"]["tokens_per_second"] / found["without"]["tokens_per_second"]
    return {**found, **accepted, "tokens_equal": tokens[0] == tokens[1], "ratio": ratio}
