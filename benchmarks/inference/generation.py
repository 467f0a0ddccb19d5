"""Text generation: speed relative to the bandwidth bound and to transformers, and under mixed loads."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from benchmarks.inference.serving_load import load
from benchmarks.processes import memory
from megajax.config.errors import UserError
from megajax.inference.device import ModelDevice
from megajax.inference.engine import Engine
from megajax.inference.loading import load_weights
from megajax.inference.programs import CacheSize, LoadedModel, Programs
from megajax.inference.request import Output, Request
from megajax.inference.sampling.chooser import choosers
from megajax.inference.sampling_settings import Sampling
from megajax.inference.step_arrays import Bucket
from megajax.interop.huggingface.folder import open_model
from megajax.layers.cache_spec import stored_leaves
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.precision.config import PrecisionConfig

SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
         "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 512}  # fmt: skip
"""The model in the names of transformers: 82 million weights, 327 MB, many times the caches of a processor."""
BATCH, PROMPT, ANSWER, LENGTH, BLOCK, CHUNK = 8, 64, 64, 512, 16, 64
PARTS = ("bound", "transformers", "batching", "overhead", "latency", "server")
PEER = """
import json, sys, time
import torch
from transformers import LlamaForCausalLM
torch.set_num_threads(int(sys.argv[2]))
prompts, answer = torch.tensor(json.loads(sys.argv[3])), int(sys.argv[4])
model = LlamaForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
args = dict(do_sample=False, min_new_tokens=answer, max_new_tokens=answer, attention_mask=torch.ones_like(prompts))
taken = []
with torch.inference_mode():
    for _ in range(4):
        start = time.perf_counter()
        out = model.generate(prompts, **args)
        taken.append(time.perf_counter() - start)
print(json.dumps({"seconds": taken[1:], "tokens": out[:, prompts.shape[1]:].tolist()}))
"""


def inference(
    *,
    torch_python: Path | None = None,
    parts: tuple[str, ...] = PARTS,
    seconds: float = 60.0,
    clients: int = 64,
) -> dict[str, Any]:
    """Text generation on this machine: speed relative to the bandwidth bound and to transformers, and under load.

    The model is a Llama with random weights in float32 and the tiled kernel. Ratios compare runs on the same cores.

    bound         tokens/s of 8 rows relative to the bound by memory bandwidth, which is measured in the same run. A
                  step reads all weights and the cache of its rows.
    transformers  speed relative to `generate` of transformers with the same weights, greedy, 8 rows of equal length.
                  The tokens must be equal. Needs --torch-python, a Python with torch and transformers.
    batching      requests with answers of many lengths: submitted all at once, and in groups that wait for their
                  longest.
    overhead      host time relative to device time, per step of 64 rows.
    latency       time to the first token and between tokens; requests arrive at 60 % of the rate of `batching`.
    server        requests/s, latency and memory of `python -m megajax.serve` with --clients that ask continuously.

    --seconds: duration of `latency` and `server`.
    """
    if unknown := set(parts) - set(PARTS):
        raise UserError(f"--parts: there is no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    figures: dict[str, Any] = {"model": SIZES, "batch": BATCH, "prompt": PROMPT, "answer": ANSWER}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        model = model_of(folder)
        eight = engine_of(model, BATCH)
        if "bound" in parts:
            figures["bound"] = bound(model, eight)
        if "transformers" in parts and torch_python is not None:
            figures["transformers"] = transformers(eight, torch_python, folder)
        if {"batching", "latency"} & set(parts):
            figures["batching"] = batching(eight, BATCH)
        if "latency" in parts:
            figures["latency"] = latency(eight, 0.6 * figures["batching"]["requests_per_second"], seconds)
        if "overhead" in parts:
            figures["overhead"] = overhead(engine_of(model, 64), 64)
        if "server" in parts:
            figures["server"] = server(folder, clients, seconds)
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
    opened, parallel = open_model(folder), ParallelConfig(data=1, data_sharding="replicate")
    mesh = build_mesh(parallel, jax.devices()[:1])
    return load_weights(opened.model, opened.weights, parallel, mesh, PrecisionConfig(compute="float32"), {})


def stream_bandwidth() -> float:
    """Bytes/s that all cores read: the best of several sums over 512 MiB."""
    x = jnp.ones(2**27, jnp.float32)
    total, best = jax.jit(lambda x: x.reshape(64, -1).sum(axis=1)), 0.0
    for _ in range(8):
        start = time.perf_counter()
        total(x).block_until_ready()
        best = max(best, x.nbytes / (time.perf_counter() - start))
    return best


class Listener:
    """Tokens of a request, and the times at which they arrived."""

    def __init__(self) -> None:
        self.tokens, self.times, self.start = list[int](), list[float](), time.perf_counter()
        self.finish: str | None = None

    def __call__(self, piece: Output) -> None:
        self.tokens += piece.tokens
        self.times += [time.perf_counter()] * bool(piece.tokens)
        self.finish = piece.finish or self.finish


def engine_of(model: LoadedModel, rows: int) -> Engine:
    """An engine with all of its greedy steps compiled."""
    steps = Programs(
        model,
        CacheSize(blocks=rows * LENGTH // BLOCK, block=BLOCK, slots=rows),
        buckets=[Bucket(count, chunk) for count in {min(rows, 8), rows} for chunk in (0, CHUNK)],
        choosers=choosers(SIZES["vocab_size"])[:1],
        length=LENGTH,
        dtype="float32",
        kernel="tiled",
    )
    for _ in steps.compile():
        pass
    return Engine(ModelDevice(steps, SIZES["vocab_size"]), end_tokens=(), queue=10_000)


def submit(engine: Engine, name: object, prompt: Sequence[int], answer: int) -> Listener:
    listener = Listener()
    sampling = Sampling(max_tokens=answer, temperature=0, ignore_eos=True)
    engine.submit(Request(identifier=str(name), prompt=tuple(prompt), sampling=sampling, deliver=listener))
    return listener


def finish(engine: Engine) -> None:
    while engine.step():
        pass


def prompts_of(count: int, draw: np.random.Generator, lengths: Sequence[int]) -> list[list[int]]:
    """Different random prompts, so that they share no blocks of the cache."""
    return [draw.integers(0, SIZES["vocab_size"], lengths[n % len(lengths)]).tolist() for n in range(count)]


def decode_seconds(engine: Engine, prompts: list[list[int]], answer: int) -> tuple[float, list[list[int]]]:
    """Seconds, including the prompts, and the tokens."""
    start = time.perf_counter()
    listeners = [submit(engine, n, prompt, answer) for n, prompt in enumerate(prompts)]
    finish(engine)
    return time.perf_counter() - start, [listener.tokens for listener in listeners]


def bound(model: LoadedModel, engine: Engine) -> dict[str, Any]:
    """Speed of steps in which all rows decode, relative to the bound by memory bandwidth."""
    draw, rates = np.random.default_rng(1), []
    for _ in range(3):
        listeners = [submit(engine, n, prompt, ANSWER) for n, prompt in enumerate(prompts_of(BATCH, draw, [PROMPT]))]
        while not all(listener.tokens for listener in listeners):
            engine.step()
        before, start = sum(len(listener.tokens) for listener in listeners), time.perf_counter()
        finish(engine)
        rates.append((sum(len(listener.tokens) for listener in listeners) - before) / (time.perf_counter() - start))
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


def transformers(engine: Engine, python: Path, folder: Path) -> dict[str, Any]:
    """Speed relative to `generate` of transformers, one after the other; prompts included."""
    prompts = prompts_of(BATCH, np.random.default_rng(2), [PROMPT])
    command = [str(python), "-c", PEER, str(folder), str(os.cpu_count()), json.dumps(prompts), str(ANSWER)]
    peer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    tokens = decode_seconds(engine, prompts, ANSWER)[1]
    # New prompts, which are not in the cache.
    prompt_lists = [prompts_of(BATCH, np.random.default_rng(seed), [PROMPT]) for seed in (3, 4, 5)]
    fresh = [decode_seconds(engine, prompt_list, ANSWER)[0] for prompt_list in prompt_lists]
    equal_tokens = int((np.array(tokens) == np.array(peer["tokens"])).sum())
    own_seconds, peer_seconds = statistics.median(fresh), statistics.median(peer["seconds"])
    return {
        "tokens_equal": f"{equal_tokens} of {BATCH * ANSWER}",
        "tokens_per_second": BATCH * ANSWER / own_seconds,
        "transformers_tokens_per_second": BATCH * ANSWER / peer_seconds,
        "ratio": peer_seconds / own_seconds,
    }


def batching(engine: Engine, rows: int) -> dict[str, Any]:
    """Requests with prompts of 16 to 128 tokens and answers of 8 to 192."""
    draw = np.random.default_rng(6)
    answers = np.clip(np.round(np.exp(draw.normal(3.6, 0.9, 6 * rows))), 8, 192).astype(int).tolist()
    lengths = draw.integers(16, 129, len(answers)).tolist()

    def all_at_once() -> None:
        for n, (prompt, answer) in enumerate(zip(prompts_of(len(answers), draw, lengths), answers, strict=True)):
            submit(engine, n, prompt, answer)
        finish(engine)

    def in_groups() -> None:
        requests = list(zip(prompts_of(len(answers), draw, lengths), answers, strict=True))
        for first in range(0, len(requests), rows):
            for n, (prompt, answer) in enumerate(requests[first : first + rows]):
                submit(engine, n, prompt, answer)
            finish(engine)

    seconds_by_way: dict[Callable[[], None], list[float]] = {all_at_once: [], in_groups: []}
    for _ in range(2):
        for way, seconds in seconds_by_way.items():
            start = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - start)
    continuous, static = (min(seconds) for seconds in seconds_by_way.values())
    return {
        "requests": len(answers),
        "answer_tokens": sum(answers),
        "continuous_tokens_per_second": sum(answers) / continuous,
        "static_tokens_per_second": sum(answers) / static,
        "ratio": static / continuous,
        "requests_per_second": len(answers) / continuous,
    }


def overhead(engine: Engine, rows: int) -> dict[str, Any]:
    """Host and device time of steps in which all rows decode."""
    for n, prompt in enumerate(prompts_of(rows, np.random.default_rng(7), [32])):
        submit(engine, n, prompt, 40)
    while engine.statistics().tokens_total < 2 * rows:
        engine.step()
    before = engine.statistics()
    finish(engine)
    after = engine.statistics()
    host = after.scheduler_seconds_total - before.scheduler_seconds_total
    device = after.device_seconds_total - before.device_seconds_total
    steps = after.steps_total - before.steps_total
    figures = {"host_ms": 1e3 * host / steps, "device_ms": 1e3 * device / steps, "share": host / (host + device)}
    return {"rows": rows} | figures


def latency(engine: Engine, rate: float, seconds: float) -> dict[str, Any]:
    """Latency of requests that arrive at random times, `rate` per second on average."""
    draw, listeners, start = np.random.default_rng(8), list[Listener](), time.perf_counter()
    coming = start
    while time.perf_counter() < start + seconds or engine.requests:
        while coming <= time.perf_counter() < start + seconds:
            prompt = draw.integers(0, SIZES["vocab_size"], int(draw.integers(16, 129))).tolist()
            answer = int(np.clip(np.exp(draw.normal(3.6, 0.9)), 8, 192))
            listeners.append(submit(engine, len(listeners), prompt, answer))
            listeners[-1].start = coming
            coming += draw.exponential(1 / rate)
        if not engine.step():
            time.sleep(0.001)
    first = [1e3 * (listener.times[0] - listener.start) for listener in listeners]
    between = [1e3 * gap for listener in listeners for gap in np.diff(listener.times)]
    figures = {"rate": rate, "requests": len(listeners)}
    for name, values in (("first_token_ms", first), ("between_tokens_ms", between)):
        figures |= {f"{name}_p{part}": float(np.percentile(values, part)) for part in (50, 99)}
    return figures


def server(folder: Path, clients: int, seconds: float) -> dict[str, Any]:
    """Requests per second, latency and memory of `python -m megajax.serve`, whose clients ask continuously."""
    command = [sys.executable, "-m", "megajax.serve", f"--hf={folder}", "--port=0"]
    command += ["--tokenizer.type=ByteTokenizerConfig", "--inference.compute=float32"]
    command += ["--inference.rows=64", "--inference.chunk=64", "--inference.length=256"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            lines = list[str]()
            for line in process.stdout or ():
                lines.append(line)
                if "http://" in line:
                    break
            else:
                raise SystemExit("".join(lines))
            threading.Thread(target=process.stdout.read, daemon=True).start()
            url = "http://" + lines[-1].partition("http://")[2].split()[0].rstrip("/.,")
            # The first load allocates what is allocated once for each client.
            load(url, clients=clients, seconds=seconds / 4, max_tokens=16)
            before = memory(process.pid)["VmRSS"]
            figures = load(url, clients=clients, seconds=seconds, max_tokens=16).figures()
            after = memory(process.pid)["VmRSS"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    return {"clients": clients, **figures, "memory_mib_before": before / 2**20, "memory_mib_after": after / 2**20}
