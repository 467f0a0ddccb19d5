"""The same training step in optimized PyTorch: torch.compile, fused attention, fused AdamW.

`python -m benchmarks peers` runs it: python -m benchmarks.training.torch_baseline SPEC.json START.npz OUT.json

Needs torch and numpy but not MegaJAX, and runs in a separate process, so that the GPU's memory is free. Weights,
gradients and moments are float32. Weights are cast to the compute dtype where they are used, inside the compiled graph,
as in mixed precision. Queries, keys and values are one matmul, and so are gate and up. Each variant starts from the
weights of START and trains the same batch. Variants differ in attention (cuDNN or flash), compilation (single blocks or
the whole model; on processors also none) and loss (whole logits or chunks). A variant that runs out of memory is
repeated with recomputation of blocks. SPEC: see `peers.spec_of`.
"""

import gc
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.stopwatch import LEAST, readings

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
CHUNK = 8192
"""Tokens of a chunk of the chunked loss."""


class Norm(nn.Module):
    """LayerNorm with a bias, RMSNorm without; computed in float32."""

    def __init__(self, spec: dict[str, Any], gain: Tensor, bias: Tensor | None):
        super().__init__()
        self.epsilon, self.gain = spec["epsilon"], nn.Parameter(gain)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        full = x.float()
        if self.bias is not None:
            return F.layer_norm(full, full.shape[-1:], self.gain, self.bias, self.epsilon).to(x.dtype)
        return (full * torch.rsqrt(full.square().mean(-1, keepdim=True) + self.epsilon) * self.gain).to(x.dtype)


class Linear(nn.Module):
    """x W^T + b with float32 weights cast to x's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Block(nn.Module):
    """Pre-normalised attention and MLP, [B, S, D] -> [B, S, D]."""

    def __init__(self, spec: dict[str, Any], weights: dict[str, Tensor]):
        super().__init__()
        get = weights.get
        self.spec = spec
        self.mixer_norm = Norm(spec, weights["mixer_norm.gain"], get("mixer_norm.bias"))
        self.mlp_norm = Norm(spec, weights["mlp_norm.gain"], get("mlp_norm.bias"))
        names = ("query", "key", "value")
        biases = [weights[f"mixer.{name}_bias"].flatten() for name in names if f"mixer.{name}_bias" in weights]
        self.qkv = Linear(
            torch.cat([weights[f"mixer.{name}"].flatten(1).T for name in names]).contiguous(),
            torch.cat(biases) if biases else None,
        )
        self.output = Linear(weights["mixer.output"].flatten(0, 1).T.contiguous(), get("mixer.output_bias"))
        inner = ("gate", "up") if spec["gated"] else ("up",)
        self.up = Linear(torch.cat([weights[f"mlp.{name}"].T for name in inner]).contiguous(), get("mlp.up_bias"))
        self.down = Linear(weights["mlp.down"].T.contiguous(), get("mlp.down_bias"))

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        x = x + self.output(self.attend(self.qkv(self.mixer_norm(x)), cos, sin))
        inner = self.up(self.mlp_norm(x))
        if self.spec["gated"]:
            gate, up = inner.chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * up)
        return x + self.down(F.gelu(inner, approximate="tanh"))

    def attend(self, qkv: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        rows, length, _ = qkv.shape
        heads, groups, size = self.spec["heads"], self.spec["kv_heads"], self.spec["head_dim"]
        q, k, v = qkv.split([heads * size, groups * size, groups * size], dim=-1)
        q, k, v = (x.view(rows, length, -1, size).transpose(1, 2) for x in (q, k, v))
        if cos is not None:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != groups)
        return mixed.transpose(1, 2).reshape(rows, length, heads * size)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in float32: pair i of a head is (x[i], x[i + H/2]); cos and sin [S, H/2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Model(nn.Module):
    """(tokens, labels) -> the sum of the losses."""

    def __init__(self, spec: dict[str, Any], weights: dict[str, Tensor]):
        super().__init__()
        self.spec = spec
        self.tokens = nn.Parameter(weights["tokens"])
        self.positions = nn.Parameter(weights["positions"]) if "positions" in weights else None
        self.head = nn.Parameter(weights["head"]) if "head" in weights else None
        stacked = {name: w for name, w in weights.items() if name.startswith("stack.blocks.0.")}
        self.blocks = nn.ModuleList(
            Block(spec, {name.removeprefix("stack.blocks.0."): w[layer] for name, w in stacked.items()})
            for layer in range(spec["layers"])
        )
        self.norm = Norm(spec, weights["norm.gain"], weights.get("norm.bias"))
        self.recompute = False
        self.chunk: int | None = None
        self.angles: tuple[Tensor | None, Tensor | None] = (None, None)
        if spec["rope_base"] is not None:
            half = torch.arange(0, spec["head_dim"], 2, dtype=torch.float32) / spec["head_dim"]
            angles = torch.outer(torch.arange(spec["length"], dtype=torch.float32), spec["rope_base"] ** -half)
            self.angles = (angles.cos().to(self.tokens.device), angles.sin().to(self.tokens.device))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = F.embedding(tokens, self.tokens).to(getattr(torch, self.spec["compute"]))
        if self.positions is not None:
            x = x + self.positions[: tokens.shape[1]].to(x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, *self.angles, use_reentrant=False) if self.recompute else block(x, *self.angles)
        x, labels = self.norm(x).flatten(0, 1), labels.flatten()
        if self.chunk is None:
            return self.loss(x, labels)
        pieces = zip(x.split(self.chunk), labels.split(self.chunk), strict=True)
        return sum(checkpoint(self.loss, *piece, use_reentrant=False) for piece in pieces)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """x [T, D], labels [T] -> [] float32; rows of the table beyond the vocabulary are masked."""
        table = self.tokens if self.head is None else self.head
        logits = F.linear(x, table.to(x.dtype)).float()
        if table.shape[0] > self.spec["vocabulary"]:
            padding = torch.arange(table.shape[0], device=x.device) >= self.spec["vocabulary"]
            logits = logits.masked_fill(padding, float("-inf"))
        return F.cross_entropy(logits, labels, reduction="sum")


class Trainer:
    """One variant: a compiled model, its optimizer, and the step."""

    def __init__(self, spec: dict[str, Any], start: Any, variant: dict[str, Any], device: str):
        self.spec, self.device = spec, device
        weights = {
            name: torch.from_numpy(start[name]).to(device) for name in start.files if not name.startswith("batch.")
        }
        self.model = Model(spec, weights)
        self.model.recompute = variant["recompute"]
        self.model.chunk = CHUNK if variant["loss"] == "chunked" else None
        self.run = self.model
        if variant["compile"] == "whole":
            self.run = torch.compile(self.model)
        elif variant["compile"] == "blocks":
            for block in self.model.blocks:
                block.compile()
            self.model.loss = torch.compile(self.model.loss)
        self.optimizer = torch.optim.AdamW(
            self.groups(), betas=tuple(spec["betas"]), eps=spec["adam_epsilon"], fused=True
        )
        self.batches = [
            tuple(torch.from_numpy(np.ascontiguousarray(start[f"batch.{name}"][m])).long().to(device) for name in
                  ("tokens", "labels"))
            for m in range(spec["microbatches"])
        ]  # fmt: skip
        backend = BACKENDS.get(variant["attention"])
        self.kernels = (lambda: nullcontext()) if backend is None else (lambda: sdpa_kernel(backend))
        self.tokens = spec["microbatches"] * spec["micro_size"] * spec["length"]

    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups: weight decay applies to matrices only."""
        parameters = list(self.model.parameters())
        decay = self.spec["weight_decay"]
        return [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]

    def step(self) -> Tensor:
        """Forward, backward and update. Returns the mean loss without waiting for it."""
        total = torch.zeros((), device=self.device)
        with self.kernels():
            for tokens, labels in self.batches:
                loss = self.run(tokens, labels) / self.tokens
                loss.backward()
                total += loss.detach()
        if self.spec["clip"] is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.spec["clip"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate


def wait(out: Any) -> None:
    """Wait until the GPU is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_variant(spec: dict[str, Any], start: Any, variant: dict[str, Any]) -> dict[str, Any]:
    """Losses of the first steps and speed of those after them."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(spec, start, variant, "cuda" if on_gpu else "cpu")
    began, losses = time.perf_counter(), []
    for rate in spec["learning_rates"]:
        trainer.set_rate(rate)
        losses.append(trainer.step().item())
    warm = time.perf_counter() - began
    began_processor = time.process_time()
    statistics = readings(trainer.step, spec["timed_steps"], wait, least=LEAST)
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return {
        "losses": losses,
        "step_seconds": statistics.to_dict(),
        "processor_seconds": (time.process_time() - began_processor) / (spec["timed_steps"] + 1),
        "tokens_per_second": statistics.into(trainer.tokens).to_dict(),
        "peak_memory": peak,
        "warm_up_seconds": warm,
    }


def variants(on_gpu: bool) -> list[dict[str, Any]]:
    """The variants, those most likely to be fast first."""
    kernels = ("cudnn", "flash") if on_gpu else ("any",)
    plain = {"loss": "whole", "recompute": False}
    variants = [{"attention": kernel, "compile": "blocks", **plain} for kernel in kernels]
    variants += [{"attention": kernels[0], "compile": "whole", **plain}]
    variants += [{**variants[0], "loss": "chunked"}]
    return variants if on_gpu else [{**variants[0], "compile": "none"}, *variants]


def tried(spec: dict[str, Any], start: Any, variant: dict[str, Any]) -> dict[str, Any]:
    """A variant with its figures or its error. If it runs out of memory, it is repeated with recomputation."""
    for recompute in (False, True):
        now = {**variant, "recompute": recompute}
        try:
            record = measure_variant(spec, start, now)
        except torch.OutOfMemoryError:
            record = {"error": "out of memory"}
        except Exception as error:  # compilers, kernels and the device raise many types; the other variants go on
            record = {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"}
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if record.get("error") != "out of memory":
            break
    return {"variant": now, **record}


def main() -> None:
    """Measure one variant after another until the time is up; the figures are written after each."""
    spec_file, start_file, out = map(Path, sys.argv[1:])
    spec, start = json.loads(spec_file.read_text()), np.load(start_file)
    began, results = time.perf_counter(), []
    torch.set_float32_matmul_precision("highest" if spec["compute"] == "float32" else "high")
    on_gpu = torch.cuda.is_available()
    versions = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    head = {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "versions": versions}
    out.write_text(json.dumps({**head, "variants": results}))
    for number, variant in enumerate(variants(on_gpu)):
        if number and time.perf_counter() - began > spec["seconds"]:
            results.append({"variant": variant, "error": f"not tried: {spec['seconds']:g} s were over"})
            continue
        results.append(tried(spec, start, variant))
        out.write_text(json.dumps({**head, "variants": results}, indent=1))
        print(json.dumps(results[-1]), flush=True)


if __name__ == "__main__":
    main()
