"""The same training step of a transformers model, eager and compiled.

`python -m benchmarks processor` runs it: python -m benchmarks.training.transformers_baseline SPEC.json FOLDER OUT.json

Needs torch, transformers and numpy but not MegaJAX. FOLDER has the starting weights in Hugging Face's form, and
batch.npz with tokens and labels int32 [M, B, S]. SPEC: as for torch_baseline.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from benchmarks.stopwatch import LEAST, readings


def measure_variant(spec: dict[str, Any], folder: Path, compiled: bool) -> dict[str, Any]:
    """Losses of the first steps, and processor seconds of those after them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    run = torch.compile(model) if compiled else model
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": spec["weight_decay"]},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=tuple(spec["betas"]), eps=spec["adam_epsilon"], fused=True)
    stored = np.load(folder / "batch.npz")
    batches = [
        tuple(torch.from_numpy(np.ascontiguousarray(stored[name][m])).long() for name in ("tokens", "labels"))
        for m in range(spec["microbatches"])
    ]

    def step() -> torch.Tensor:
        total = torch.zeros(())
        for tokens, labels in batches:
            logits = run(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten()) / len(batches)
            loss.backward()
            total += loss.detach()
        if spec["clip"] is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), spec["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    losses = []
    for rate in spec["learning_rates"]:
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses.append(step().item())
    began = time.process_time()
    readings(step, spec["timed_steps"], lambda out: out, least=LEAST)
    return {"losses": losses, "processor_seconds": (time.process_time() - began) / (spec["timed_steps"] + 1)}


def main() -> None:
    """Measure both variants."""
    spec_file, folder, out = map(Path, sys.argv[1:])
    spec, variants = json.loads(spec_file.read_text()), []
    for way in ("none", "whole"):
        variant = {"compile": way, "loss": "whole"}
        try:
            variants.append({"variant": variant, **measure_variant(spec, folder, way == "whole")})
        except Exception as error:  # compilers raise many types; the other variant counts
            variants.append({"variant": variant, "error": f"{type(error).__name__}: {error}".splitlines()[0]})
        out.write_text(json.dumps({"variants": variants}))


if __name__ == "__main__":
    main()
