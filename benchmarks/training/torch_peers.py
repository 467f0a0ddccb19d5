"""The same training step by other trainers, in PyTorch on a processor: a table of peers.

`python -m benchmarks processor` runs it: python -m benchmarks.training.torch_peers PEER SPEC.json START OUT.json

Needs torch and numpy, and what the peer imports, but not MegaJAX. START has the starting weights, and the batch with
tokens and labels int32 [M, B, S]: start.npz, or for transformers a folder in Hugging Face's form with batch.npz. SPEC:
see `processor.compared`. All numbers are float32.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.stopwatch import LEAST, readings


class Peer(NamedTuple):
    """A trainer."""

    build: Callable[[dict[str, Any], Path], nn.Module]
    """(spec, START) -> a model: (tokens, labels) -> mean loss."""
    ways: tuple[str, ...] = ("eager", "compiled")


class Norm(nn.Module):
    """LayerNorm with a bias, RMSNorm without."""

    def __init__(self, spec: dict[str, Any], gain: Tensor, bias: Tensor | None):
        super().__init__()
        self.epsilon, self.gain = spec["epsilon"], nn.Parameter(gain)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return F.layer_norm(x, x.shape[-1:], self.gain, self.bias, self.epsilon)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * self.gain


class Linear(nn.Module):
    """x W^T + b."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Block(nn.Module):
    """Pre-normalised attention and MLP, [B, S, D] -> [B, S, D]; queries, keys and values are one matmul."""

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

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.output(self.attend(self.qkv(self.mixer_norm(x)), angles))
        inner = self.up(self.mlp_norm(x))
        if self.spec["gated"]:
            gate, up = inner.chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * up)
        return x + self.down(F.gelu(inner, approximate="tanh"))

    def attend(self, qkv: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        rows, length, _ = qkv.shape
        heads, groups, size = self.spec["heads"], self.spec["kv_heads"], self.spec["head_dim"]
        q, k, v = qkv.split([heads * size, groups * size, groups * size], dim=-1)
        q, k, v = (x.view(rows, length, -1, size).transpose(1, 2) for x in (q, k, v))
        if angles is not None:
            q, k = rotated(q, *angles), rotated(k, *angles)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != groups)
        return mixed.transpose(1, 2).reshape(rows, length, heads * size)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding: pair i of a head is (x[i], x[i + H/2]); cos and sin [S, H/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Model(nn.Module):
    """GPT or Llama."""

    def __init__(self, spec: dict[str, Any], path: Path):
        super().__init__()
        weights = weights_of(path)
        self.vocabulary = spec["vocabulary"]
        self.tokens = nn.Parameter(weights["tokens"])
        self.positions = nn.Parameter(weights["positions"]) if "positions" in weights else None
        self.head = nn.Parameter(weights["head"]) if "head" in weights else None
        self.blocks = nn.ModuleList(Block(spec, of_layer(weights, layer)) for layer in range(spec["layers"]))
        self.norm = Norm(spec, weights["norm.gain"], weights.get("norm.bias"))
        self.angles: tuple[Tensor, Tensor] | None = None
        if spec["rope_base"] is not None:
            half = torch.arange(0, spec["head_dim"], 2, dtype=torch.float32) / spec["head_dim"]
            angles = torch.outer(torch.arange(spec["length"], dtype=torch.float32), spec["rope_base"] ** -half)
            self.angles = angles.cos(), angles.sin()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = F.embedding(tokens, self.tokens)
        if self.positions is not None:
            x = x + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.angles)
        table = self.tokens if self.head is None else self.head
        # Rows of the table beyond the vocabulary are padding.
        logits = F.linear(self.norm(x).flatten(0, 1), table)[:, : self.vocabulary]
        return F.cross_entropy(logits, labels.flatten())


def weights_of(path: Path) -> dict[str, Tensor]:
    """The weights of start.npz."""
    start = np.load(path)
    return {name: torch.from_numpy(start[name]) for name in start.files if not name.startswith("batch.")}


def of_layer(weights: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """Weights of one layer of the stack."""
    stack = "stack.blocks.0."
    return {name.removeprefix(stack): array[layer] for name, array in weights.items() if name.startswith(stack)}


class Transformers(nn.Module):
    """A model of transformers."""

    def __init__(self, spec: dict[str, Any], folder: Path):
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Megatron(nn.Module):
    """Megatron-Core's GPTModel, with the layers it has without Transformer Engine.

    When it is built, it asks for the current CUDA device, which is answered with the processor, and for a state of
    CUDA's random numbers, which nothing draws from.
    """

    def __init__(self, spec: dict[str, Any], path: Path):
        super().__init__()
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
        from megatron.core.transformer.transformer_config import TransformerConfig

        torch.cuda.current_device = lambda: torch.device("cpu")
        CudaRNGStatesTracker.fork = lambda *_: nullcontext()
        store = f"file://{tempfile.mkdtemp()}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        ours = weights_of(path)
        config = TransformerConfig(
            num_layers=spec["layers"],
            hidden_size=ours["tokens"].shape[1],
            ffn_hidden_size=ours["stack.blocks.0.mlp.up"].shape[-1],
            num_attention_heads=spec["heads"],
            num_query_groups=spec["kv_heads"],
            kv_channels=spec["head_dim"],
            normalization="RMSNorm" if spec["gated"] else "LayerNorm",
            layernorm_epsilon=spec["epsilon"],
            gated_linear_unit=spec["gated"],
            activation_func=F.silu if spec["gated"] else lambda x: F.gelu(x, approximate="tanh"),
            add_bias_linear="stack.blocks.0.mlp.up_bias" in ours,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            perform_initialization=False,
        )
        rotary, length = spec["rope_base"] is not None, spec["length"]
        self.model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization=config.normalization),
            vocab_size=spec["vocabulary"],
            max_sequence_length=length,
            share_embeddings_and_output_weights="head" not in ours,
            position_embedding_type="rope" if rotary else "learned_absolute",
            rotary_base=int(spec["rope_base"] or 10000),
        )
        weights = arranged(spec, ours)
        named = dict(self.model.named_parameters())
        if named.keys() != weights.keys():
            raise ValueError(f"parameters differ: {sorted(named.keys() ^ weights.keys())}")
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(weights[name].reshape(parameter.shape))
        self.mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1])[None].expand(len(tokens), -1)
        return self.model(tokens, positions, self.mask, labels=labels).mean()


def arranged(spec: dict[str, Any], ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by Megatron-Core's names: rows of queries, keys and values alternate by group; no rows past the
    vocabulary, whose logits it would not mask."""
    groups, size = spec["kv_heads"], spec["head_dim"]
    ours |= {name: ours[name][: spec["vocabulary"]] for name in ("tokens", "head") if name in ours}
    others = {
        "tokens": "embedding.word_embeddings.weight",
        "norm.gain": "decoder.final_layernorm.weight",
        "positions": "embedding.position_embeddings.weight",
        "head": "output_layer.weight",
        "norm.bias": "decoder.final_layernorm.bias",
    }
    weights = {theirs: ours[name] for name, theirs in others.items() if name in ours}
    for layer in range(spec["layers"]):
        here = of_layer(ours, layer)

        def by_group(end: str, here: dict[str, Tensor] = here) -> Tensor:
            parts = [here[f"mixer.{name}{end}"] for name in ("query", "key", "value")]
            return torch.cat([part.reshape(*part.shape[:-2], groups, -1, size) for part in parts], dim=-2).flatten(-3)

        inner = ["gate", "up"] if spec["gated"] else ["up"]
        at = {
            "input_layernorm.weight": here["mixer_norm.gain"],
            "pre_mlp_layernorm.weight": here["mlp_norm.gain"],
            "self_attention.linear_qkv.weight": by_group("").T,
            "self_attention.linear_proj.weight": here["mixer.output"].flatten(0, 1).T,
            "mlp.linear_fc1.weight": torch.cat([here[f"mlp.{name}"].T for name in inner]),
            "mlp.linear_fc2.weight": here["mlp.down"].T,
        }
        if "mlp.up_bias" in here:
            at["self_attention.linear_qkv.bias"] = by_group("_bias")
        names = {
            "mixer_norm.bias": "input_layernorm.bias",
            "mlp_norm.bias": "pre_mlp_layernorm.bias",
            "mixer.output_bias": "self_attention.linear_proj.bias",
            "mlp.up_bias": "mlp.linear_fc1.bias",
            "mlp.down_bias": "mlp.linear_fc2.bias",
        }
        at |= {theirs: here[name] for name, theirs in names.items() if name in here}
        weights |= {f"decoder.layers.{layer}.{name}": array for name, array in at.items()}
    return weights


def measure(spec: dict[str, Any], start: Path, peer: Peer, *, compiled: bool) -> dict[str, Any]:
    """Losses of the first steps, and processor seconds of those after them."""
    model = peer.build(spec, start).train()
    run = torch.compile(model) if compiled else model
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == wide], "weight_decay": decay}
        for wide, decay in ((True, spec["weight_decay"]), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, betas=tuple(spec["betas"]), eps=spec["adam_epsilon"], fused=True)
    stored = np.load(start / "batch.npz" if start.is_dir() else start)
    batches = [
        tuple(
            torch.from_numpy(np.ascontiguousarray(stored[f"batch.{name}"][m])).long() for name in ("tokens", "labels")
        )
        for m in range(spec["microbatches"])
    ]

    def step() -> Tensor:
        total = torch.zeros(())
        for tokens, labels in batches:
            loss = run(tokens, labels) / len(batches)
            loss.backward()
            total += loss.detach()
        if spec["clip"] is not None:
            nn.utils.clip_grad_norm_(model.parameters(), spec["clip"])
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


PEERS = {"torch": Peer(Model), "transformers": Peer(Transformers), "megatron-core": Peer(Megatron, ("eager",))}


def main() -> None:
    """Measure a peer in each of its ways."""
    name, *words = sys.argv[1:]
    spec_file, start, out = map(Path, words)
    spec, ways = json.loads(spec_file.read_text()), {}
    torch.set_float32_matmul_precision("highest")
    for way in PEERS[name].ways:
        try:
            ways[way] = measure(spec, start, PEERS[name], compiled=way == "compiled")
        except Exception as error:  # compilers raise many types; the other ways count
            ways[way] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        out.write_text(json.dumps(ways))


if __name__ == "__main__":
    main()
