"""Runs Megatron-LM on the same shapes, by pretrain_gpt.py of the user's checkout with mock data.

`python -m megajax.tools.megatron_args -- ...` converts these flags back to the original config; a test checks this.
"""

import re
from pathlib import Path
from typing import Any

ITERATION = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")
LOSS = re.compile(r"lm loss: ([\d.E+-]+)")
ALLOCATED = re.compile(r"max allocated: ([\d.]+)")
SCRIPT = "pretrain_gpt.py"


def command(spec: dict[str, Any], checkout: Path, python: Path) -> list[str]:
    """The command line for spec, which is `peers.spec_of`'s with microbatches and timed_steps."""
    launcher = [str(python), "-m", "torch.distributed.run", "--nproc-per-node=1", str(checkout / SCRIPT)]
    return [*launcher, *flags(spec)]


def flags(spec: dict[str, Any]) -> list[str]:
    """What pretrain_gpt.py is told."""
    values = {
        "num-layers": spec["layers"],
        "hidden-size": spec["hidden"],
        "ffn-hidden-size": spec["ffn"],
        "num-attention-heads": spec["heads"],
        "kv-channels": spec["head_dim"],
        "seq-length": spec["length"],
        "max-position-embeddings": spec["length"],
        "position-embedding-type": "learned_absolute" if spec["rope_base"] is None else "rope",
        "normalization": "LayerNorm" if spec["layer_norm"] else "RMSNorm",
        "norm-epsilon": spec["epsilon"],
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "micro-batch-size": spec["micro_size"],
        "global-batch-size": spec["micro_size"] * spec["microbatches"],
        "train-iters": spec["warm_up"] + spec["timed_steps"],
        "lr": 1e-4,
        "lr-decay-style": "constant",
        "adam-beta1": spec["betas"][0],
        "adam-beta2": spec["betas"][1],
        "adam-eps": spec["adam_epsilon"],
        "weight-decay": spec["weight_decay"],
        "clip-grad": spec["clip"] or 0,
        "tokenizer-type": "NullTokenizer",
        # That tokenizer adds a token of its own.
        "vocab-size": spec["vocabulary"] - 1,
        "make-vocab-size-divisible-by": spec["vocabulary_multiple"],
        "log-interval": 1,
        "eval-iters": 0,
        "save-interval": 10**9,
    }
    if spec["rope_base"] is not None:
        values["rotary-base"] = round(spec["rope_base"])
    if spec["kv_heads"] != spec["heads"]:
        values["num-query-groups"] = spec["kv_heads"]
    switches = {
        "mock-data": True,
        "bf16": spec["compute"] == "bfloat16",
        "fp16": spec["compute"] == "float16",
        "swiglu": spec["gated"],
        "group-query-attention": spec["kv_heads"] != spec["heads"],
        "disable-bias-linear": not spec["bias"],
        "untie-embeddings-and-output-weights": not spec["tied"],
        "cross-entropy-loss-fusion": True,
        "log-throughput": True,
    }
    arguments = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [*arguments, *(f"--{name}" for name, on in switches.items() if on)]


def parse_log(log: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of its timed steps, first losses and peak memory in bytes, from what it printed; or {"error"}."""
    seconds = [float(loss) / 1e3 for loss in ITERATION.findall(log)][spec["warm_up"] :]
    if not seconds:
        last = next((line for line in reversed(log.splitlines()) if line.strip()), "it printed nothing")
        return {"error": f"no timed step was logged; its last line: {last.strip()[:300]}"}
    allocated = ALLOCATED.search(log)
    return {
        "seconds": seconds,
        "losses": [float(loss) for loss in LOSS.findall(log)][: spec["warm_up"]],
        "peak_memory": None if allocated is None else round(float(allocated[1]) * 2**20),
    }
