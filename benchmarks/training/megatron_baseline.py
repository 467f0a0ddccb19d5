"""The same training step of Megatron-Core's GPTModel, with the layers it has without Transformer Engine.

`python -m benchmarks processor` runs it: python -m benchmarks.training.megatron_baseline SPEC.json START.npz OUT.json

Needs torch, megatron-core and numpy but not MegaJAX. When it builds a model, Megatron-Core asks for the current CUDA
device, which is answered with the processor, and for a state of CUDA's random numbers, which nothing draws from. SPEC:
see `peers.spec_of`.
"""

import json
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.stopwatch import LEAST, readings


def build(spec: dict[str, Any], start: Any) -> torch.nn.Module:
    """The model with the weights of START."""
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
    hidden = start["tokens"].shape[1]
    ffn = start["stack.blocks.0.mlp.up"].shape[-1]
    config = TransformerConfig(
        num_layers=spec["layers"],
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=spec["heads"],
        num_query_groups=spec["kv_heads"],
        kv_channels=spec["head_dim"],
        normalization="RMSNorm" if spec["gated"] else "LayerNorm",
        layernorm_epsilon=spec["epsilon"],
        gated_linear_unit=spec["gated"],
        activation_func=F.silu if spec["gated"] else lambda x: F.gelu(x, approximate="tanh"),
        add_bias_linear="stack.blocks.0.mlp.up_bias" in start.files,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    rotary = spec["rope_base"] is not None
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=spec["vocabulary"],
        max_sequence_length=spec["length"],
        share_embeddings_and_output_weights="head" not in start.files,
        position_embedding_type="rope" if rotary else "learned_absolute",
        rotary_base=int(spec["rope_base"] or 10000),
    )
    weights = arranged(spec, {name: torch.from_numpy(start[name]) for name in start.files if name[:6] != "batch."})
    named = dict(model.named_parameters())
    if named.keys() != weights.keys():
        raise ValueError(f"parameters differ: {sorted(named.keys() ^ weights.keys())}")
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(weights[name].reshape(parameter.shape))
    return model.train()


def arranged(spec: dict[str, Any], ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by Megatron-Core's names: rows of queries, keys and values alternate by group; no rows past the
    vocabulary, whose logits it would not mask."""
    groups, size = spec["kv_heads"], spec["head_dim"]
    ours |= {name: ours[name][: spec["vocabulary"]] for name in ("tokens", "head") if name in ours}
    weights = {"embedding.word_embeddings.weight": ours["tokens"], "decoder.final_layernorm.weight": ours["norm.gain"]}
    others = {
        "positions": "embedding.position_embeddings.weight",
        "head": "output_layer.weight",
        "norm.bias": "decoder.final_layernorm.bias",
    }
    weights |= {theirs: ours[name] for name, theirs in others.items() if name in ours}

    def by_group(end: str, layer: int) -> Tensor:
        parts = [ours[f"stack.blocks.0.mixer.{name}{end}"][layer] for name in ("query", "key", "value")]
        return torch.cat([part.reshape(*part.shape[:-2], groups, -1, size) for part in parts], dim=-2).flatten(-3)

    for layer in range(spec["layers"]):
        here = {
            name.removeprefix("stack.blocks.0."): array[layer]
            for name, array in ours.items()
            if name.startswith("stack.")
        }
        inner = ["gate", "up"] if spec["gated"] else ["up"]
        at = {
            "input_layernorm.weight": here["mixer_norm.gain"],
            "pre_mlp_layernorm.weight": here["mlp_norm.gain"],
            "self_attention.linear_qkv.weight": by_group("", layer).T,
            "self_attention.linear_proj.weight": here["mixer.output"].flatten(0, 1).T,
            "mlp.linear_fc1.weight": torch.cat([here[f"mlp.{name}"].T for name in inner]),
            "mlp.linear_fc2.weight": here["mlp.down"].T,
        }
        if "mlp.up_bias" in here:
            at["self_attention.linear_qkv.bias"] = by_group("_bias", layer)
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


def measure(spec: dict[str, Any], start: Any) -> dict[str, Any]:
    """Losses of the first steps, and processor seconds of those after them."""
    model = build(spec, start)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == wide], "weight_decay": decay}
        for wide, decay in ((True, spec["weight_decay"]), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, betas=tuple(spec["betas"]), eps=spec["adam_epsilon"], fused=True)
    batches = [
        tuple(torch.from_numpy(np.ascontiguousarray(start[f"batch.{name}"][m])).long() for name in ("tokens", "labels"))
        for m in range(spec["microbatches"])
    ]
    length = spec["length"]
    positions = torch.arange(length)[None].expand(spec["micro_size"], -1)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)

    def step() -> Tensor:
        total = torch.zeros(())
        for tokens, labels in batches:
            loss = model(tokens, positions, mask, labels=labels).mean() / len(batches)
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
    """Measure the model as it is."""
    spec_file, start_file, out = map(Path, sys.argv[1:])
    spec, start = json.loads(spec_file.read_text()), np.load(start_file)
    variant = {"compile": "megatron-core", "loss": "whole"}
    out.write_text(json.dumps({"variants": [{"variant": variant, **measure(spec, start)}]}))


if __name__ == "__main__":
    main()
