"""Reads published training speeds with all settings of each run, from a folder beside the repository."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.planning.systems import MAXTEXT, MEGATRON, MEGATRON_2021, PYTORCH_FSDP, SAVE_QKV, XLA, Published
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mamba.config import Mamba2Config
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.moe.config import DispatchConfig, MoEConfig, SharedExpertConfig
from megajax.layers.norm.config import LayerNormConfig, RMSNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.layers.recompute import PARTS, Recompute
from megajax.layers.stack.config import StackConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.presets.deepseek import deepseek
from megajax.models.presets.hybrids.hybrid import hybrid_stack
from megajax.models.presets.hybrids.mamba_models import nemotron_h
from megajax.models.presets.windowed import gpt_oss
from megajax.planning.compiled.devices import GPUS, Device
from megajax.planning.cost.description import System

FILE = Path(
    os.environ.get("MEGAJAX_PUBLISHED_RUNS", Path(__file__).parents[2] / "../shared/published_runs")
) / "published_runs.jsonl"  # fmt: skip
"""A JSON object a line; its README.md says what the keys are."""

SYSTEMS: Mapping[str, System] = {
    "NeMo (Megatron-Core)": MEGATRON,
    "Megatron-Bridge": MEGATRON,
    "Megatron-Core MoE": MEGATRON,
    "Megatron-LM": MEGATRON_2021,
    "MaxText (XLA)": MAXTEXT,
    "Pax (XLA)": XLA,
    "AXLearn (XLA)": XLA,
    "llm-foundry (PyTorch FSDP)": PYTORCH_FSDP,
    "KempnerForge (PyTorch FSDP2)": PYTORCH_FSDP,
    "torchtitan": PYTORCH_FSDP,
}
"""How programs of this name run, unless a run says otherwise."""

RECOMPUTED: Mapping[str, Recompute] = {
    "none": "none",
    "full": "full",
    "selective": "selective",
    "unspecified": "selective",
    "save_qkv_proj": SAVE_QKV,
    "save_qkvo": tuple(part for part in PARTS if part not in ("query_key_value", "core_attention", "input")),
    "dots": ("norm", "core_attention", "activation"),  # outputs of matmuls are saved, the attention kernel's is not
    "norm,act": ("norm", "activation"),
    "norm,moe": ("norm", "mlp", "activation"),
    "op-SAC (SDPA and every other matmul saved)": ("norm", "mlp", "activation"),
}
SENT = DispatchConfig(way="ragged", room=1.0)
"""Megatron-LM's dispatchers: each token goes to its experts, buffers have the size of what arrives."""
NORM = RMSNormConfig()


def read(path: Path = FILE) -> list[dict[str, Any]]:
    """The records of runs that the cost model can describe; none if there is no such file."""
    if not path.exists():
        return []
    records = (json.loads(line) for line in path.read_text().splitlines())
    return [record for record in records if record["expressible"] and not record.get("superseded")]


def model(record: Mapping[str, Any]) -> DecoderConfig:
    """The model of a record. Raises KeyError for a kind without a rule."""
    facts, length = record["model"], record["seq"]
    if facts["kind"] == "nemotron_h":
        return nemotron_h(facts["preset"].split(":")[1], sequence_length=length, vocabulary_size=facts["vocab"])
    if facts["kind"] == "deepseek":
        return _deepseek(facts, length)
    if facts.get("preset", "").startswith("gpt_oss"):
        return _with_dispatch(gpt_oss(facts["preset"].split(":")[1], sequence_length=length))
    stack = {
        "llama": _gated, "gpt": _gpt, "moe": _mixture, "hybrid_moe": _hybrid,
    }[facts["kind"]](facts)  # fmt: skip
    return DecoderConfig(
        hidden=facts["hidden"],
        vocabulary_size=facts["vocab"],
        sequence_length=length,
        stack=stack,
        tied=facts.get("tied", False),
        norm=stack.pattern[0].norm,
    )


def _attention(facts: Mapping[str, Any], **more: Any) -> AttentionConfig:
    rope = RopeConfig() if facts["kind"] != "gpt" else None
    head_dim = facts.get("head_dim") or facts["hidden"] // facts["heads"]
    return AttentionConfig(heads=facts["heads"], kv_heads=facts["kv_heads"], head_dim=head_dim, rope=rope, **more)


def _gated(facts: Mapping[str, Any]) -> StackConfig:
    block = BlockConfig(mixer=_attention(facts), mlp=GatedMLPConfig(ffn=facts["ffn"]), norm=NORM)
    return StackConfig(pattern=(block,), repeats=facts["layers"])


def _gpt(facts: Mapping[str, Any]) -> StackConfig:
    mlp = DenseMLPConfig(ffn=facts["ffn"], activation=facts["activation"], bias=facts["bias"])
    block = BlockConfig(mixer=_attention(facts), mlp=mlp, norm=LayerNormConfig())
    return StackConfig(pattern=(block,), repeats=facts["layers"])


def _experts(facts: Mapping[str, Any]) -> MoEConfig:
    expert = GatedMLPConfig(ffn=facts["expert_ffn"])
    return MoEConfig(experts=facts["experts"], top_k=facts["top_k"], expert=expert, dispatch=SENT)


def _mixture(facts: Mapping[str, Any]) -> StackConfig:
    block = BlockConfig(mixer=_attention(facts), mlp=_experts(facts), norm=NORM)
    return StackConfig(pattern=(block,), repeats=facts["layers"])


def _hybrid(facts: Mapping[str, Any]) -> Any:
    plain = {"activation": "squared_relu", "bias": False}
    mamba = Mamba2Config(
        heads=facts["mamba_heads"], head_dim=facts["mamba_head_dim"], state=facts["state"], groups=facts["groups"]
    )
    experts = replace(
        _experts(facts),
        expert=DenseMLPConfig(ffn=facts["expert_ffn"], **plain),
        shared=SharedExpertConfig(mlp=DenseMLPConfig(ffn=facts["shared_ffn"], **plain)),
    )
    blocks = {
        "M": BlockConfig(mixer=mamba, norm=NORM),
        "*": BlockConfig(mixer=replace(_attention(facts), rope=None), norm=NORM),
        "E": BlockConfig(mlp=experts, norm=NORM),
    }
    return hybrid_stack(facts["pattern"], blocks)


def _deepseek(facts: Mapping[str, Any], length: int) -> DecoderConfig:
    base = deepseek("v3", sequence_length=length, vocabulary_size=facts["vocab"], dispatch=SENT)
    dense, rest = base.stack.segments
    first, block = dense.pattern[0], rest.pattern[0]
    mixer = replace(block.mixer, heads=facts["heads"])
    experts = replace(block.mlp, experts=facts["experts"], top_k=facts["top_k"])
    dense = replace(dense, pattern=(replace(first, mixer=mixer),), repeats=facts["dense_layers"])
    rest = replace(
        rest, pattern=(replace(block, mixer=mixer, mlp=experts),), repeats=facts["layers"] - facts["dense_layers"]
    )
    stack = replace(base.stack, segments=(dense, rest))
    return replace(base, stack=stack, prediction=base.prediction if facts["mtp"] else None)


def _with_dispatch(base: DecoderConfig) -> DecoderConfig:
    pattern = tuple(replace(block, mlp=replace(block.mlp, dispatch=SENT)) for block in base.stack.pattern)
    return replace(base, stack=replace(base.stack, pattern=pattern))


def device(record: Mapping[str, Any]) -> Device:
    """The GPU of a record, with the memory, the power limit and the network of its cluster."""
    gpu = GPUS[record["gpu"]]
    network = (record.get("network_GBps_per_gpu") or gpu.network / 1e9) * 1e9
    variant = record.get("gpu_variant") or {}
    return replace(
        gpu,
        network=network,
        bandwidth=variant.get("bandwidth", gpu.bandwidth),
        memory_gib=variant.get("memory_gib", gpu.memory_gib),
        power=variant.get("power_w", gpu.watts) / gpu.watts,
    )


def system(record: Mapping[str, Any]) -> System:
    """How the program of a record runs."""
    base = SYSTEMS[record["software"]]
    overlap = {"none": 0.0, "async": MEGATRON.tensor_hidden}.get(record.get("tp_overlap") or "")
    return base if overlap is None else replace(base, tensor_hidden=overlap)


def published(record: Mapping[str, Any]) -> Published:
    """The run of a record in the form that the cost model describes."""
    described = replace(model(record), recompute=RECOMPUTED[record["recompute"]])
    if record["software"] == "Megatron-LM":  # before fused attention
        block = described.stack.pattern[0]
        block = replace(block, mixer=replace(block.mixer, kernel="reference"))
        described = replace(described, stack=replace(described.stack, pattern=(block,)))
    # Whole experts over devices that are cut over `tensor` elsewhere: Megatron-LM's expert groups include them.
    whole = record.get("etp") == 1 and record["tp"] > 1
    expert = min(max(1, record["ep"] // record["tp"]) if whole else record["ep"], record["dp"])
    return Published(
        name=record["id"],
        source=record["source"],
        device=device(record),
        tokens=record["tokens_per_s_per_gpu"],
        model=described,
        devices=record["gpus"],
        rows=record["gbs"],
        system=system(record),
        micro_size=record["mbs"],
        tensor=record["tp"],
        pipeline=record["pp"],
        context=record["cp"],
        strategy=record.get("cp_strategy") or "ring",
        virtual_stages=record["vp"],
        expert=expert,
        whole_experts=whole,
        fsdp=record["sharding"] in ("fsdp", "hsdp"),
        shards=record.get("fsdp_size") if record["sharding"] == "hsdp" else None,
        replicated=record["sharding"] == "replicate",
        compute={"bf16": "bfloat16", "fp16": "float16"}.get(record["precision"], record["precision"]),
        reduce=record.get("reduce_dtype"),
        per_node=record.get("gpus_per_node"),
    )
