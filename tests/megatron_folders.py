"""Checkpoints in Megatron-LM's formats, made of whole weights by name: a file for each rank, or shards of arrays."""

import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megajax.interop.megatron.checkpoints.archive import STORAGES, write_archive, write_archive_to
from megajax.interop.megatron.checkpoints.pickles import Name, Record

type Arrays = Mapping[str, np.ndarray]

SHARED: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "kv_channels": 4, "ffn_hidden_size": 24,
    "seq_length": 8, "max_position_embeddings": 8, "vocab_size": 29, "padded_vocab_size": 32, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "position_embedding_type": "learned_absolute", "normalization": "LayerNorm",
    "consumed_train_samples": 56, "transformer_impl": "transformer_engine",
}  # fmt: skip
LLAMA: dict[str, Any] = {
    **SHARED, "swiglu": True, "group_query_attention": True, "num_query_groups": 2, "add_bias_linear": False,
    "normalization": "RMSNorm", "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True,
}  # fmt: skip
MIXTRAL = {**LLAMA, "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12, "moe_layer_freq": 1}
T5 = {**SHARED, "encoder_seq_length": 8, "decoder_seq_length": 6, "decoder_num_layers": 2, "num_layers": 2}
LATENT = LLAMA | {
    "multi_latent_attention": True, "kv_lora_rank": 8, "q_lora_rank": 6, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4,
    "v_head_dim": 4, "qk_layernorm": True, "rope_type": "rope",
}  # fmt: skip
GATED = LLAMA | {
    "attention_output_gate": True, "softmax_type": "learnable", "add_qkv_bias": True, "qk_layernorm": True,
    "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0,
}  # fmt: skip
ROUTED = MIXTRAL | {
    "moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True, "moe_layer_freq": [0, 1, 1, 1],
    "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2],
    "moe_router_score_function": "sqrtsoftplus", "moe_router_enable_expert_bias": True, "moe_z_loss_coeff": 0.3,
    "moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_topk_scaling_factor": 2.5, "mtp_num_layers": 1,
}  # fmt: skip
FURTHER = LLAMA | {"mtp_num_layers": 2, "swiglu": False, "squared_relu": True, "apply_layernorm_1p": True}
DECODERS: Mapping[str, dict[str, Any]] = {
    "gpt": {**SHARED, "bias_gelu_fusion": False},
    "llama": LLAMA,
    "mixtral": MIXTRAL,
    "latent": LATENT,
    "latent without query rank": LATENT | {"q_lora_rank": None},
    "gated": GATED,
    "routed": ROUTED,
    "two further tokens": FURTHER,
    "windows": LLAMA | {"window_size": (5, 0), "window_attn_skip_freq": 2, "no_rope_freq": [0, 0, 0, 1]},
}
MODELS: Mapping[str, tuple[dict[str, Any], str]] = {
    **{name: (args, "pretrain_gpt.py") for name, args in DECODERS.items()},
    "bert": (SHARED, "pretrain_bert.py"),
    "t5": (T5, "pretrain_t5.py"),
}
"""Name -> arguments, and the script that trains it."""

ROWS = re.compile(r"linear_(qkv|q|kv|fc1)\.(weight|bias)$|word_embeddings\.weight$|output_layer\.(weight|bias)$")
COLUMNS = re.compile(r"linear_(proj|fc2)\.weight$")
LAYER = re.compile(r"^(\w+\.layers)\.(\d+)\.(.*)$")
EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
FUSED_NORMS = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)
"""Names of norms: of plain layers, and of Transformer Engine's."""


@dataclass(frozen=True)
class Shares:
    """How many ranks share a model."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    gated: bool = True
    """linear_fc1 has a gate."""

    def sizes(self) -> dict[str, int]:
        return {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "expert_model_parallel_size": self.expert,
        }


def fused(name: str) -> str:
    """A name of plain layers -> that of Transformer Engine's."""
    for local, engine in FUSED_NORMS:
        name = name.replace(local, engine)
    return name


def shard_of(name: str, array: np.ndarray, rank: int, shares: Shares) -> np.ndarray:
    """The share of a tensor rank."""
    if COLUMNS.search(name):
        return np.split(array, shares.tensor, axis=1)[rank]
    if not ROWS.search(name):
        return array
    halves = np.split(array, 2) if "linear_fc1" in name and shares.gated else [array]
    return np.concatenate([np.split(half, shares.tensor)[rank] for half in halves])


def layer_counts(names: Iterator[str] | Mapping[str, Any]) -> dict[str, int]:
    """Stack -> how many layers it has."""
    counts: dict[str, int] = {}
    for match in filter(None, map(LAYER.match, names)):
        counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    return counts


def rank_chunk(weights: Arrays, shares: Shares, tensor: int, stage: int, expert: int, chunk: int) -> dict[str, Any]:
    """What a rank has of a model in one of its virtual stages, in the order of `weights`."""
    counts, experts = layer_counts(weights), 1 + max([int(m[1]) for m in map(EXPERT.search, weights) if m], default=0)
    last = (shares.pipeline - 1, shares.virtual - 1)
    tensors: dict[str, Any] = {}
    for name, array in weights.items():
        if match := LAYER.match(name):
            layers_per_chunk = counts[match[1]] // (shares.pipeline * shares.virtual)
            place, local = divmod(int(match[2]), layers_per_chunk)
            if (place % shares.pipeline, place // shares.pipeline) != (stage, chunk):
                continue
            local_name = f"{match[1]}.{local}.{match[3]}"
        else:
            if (stage, chunk) != ((0, 0) if name.startswith("embedding.") else last):
                continue
            local_name = name
        if number := EXPERT.search(name):
            rank, local = divmod(int(number[1]), experts // shares.expert)
            if rank != expert:
                continue
            local_name = EXPERT.sub(f".local_experts.{local}.", local_name)
        tensors[local_name] = np.ascontiguousarray(shard_of(name, array, tensor, shares))
    return tensors


def grouped(chunk: dict[str, Any], kind: str) -> dict[str, Any]:
    """Experts as Transformer Engine's grouped layers ("engine") or as one matrix ("packed") have them."""
    tensors, packs = dict[str, Any](), dict[str, list[np.ndarray]]()
    for name, array in chunk.items():
        match = re.match(r"(.*\.experts)\.local_experts\.(\d+)\.linear_fc([12])\.weight$", name)
        if match and kind == "engine":
            tensors[f"{match[1]}.linear_fc{match[3]}.weight{match[2]}"] = array
        elif match:
            packs.setdefault(f"{match[1]}.weight{match[3]}", []).append(array.T)
        else:
            tensors[name] = array
    for name, arrays in packs.items():
        # A view of (experts, in, out): of the first as (in, experts * out), of the second as (experts * in, out).
        flat = np.stack(arrays)
        shape = (flat.shape[1], -1) if name.endswith("weight1") else (-1, flat.shape[2])
        tensors[name] = np.ascontiguousarray(flat).reshape(shape)
    return tensors


def write_ranks(
    root: Path,
    weights: Arrays,
    args: Mapping[str, Any],
    shares: Shares,
    *,
    engine: bool = False,
    experts: str = "",
    iteration: int = 7,
    moments: Mapping[str, Arrays] | None = None,
) -> Path:
    """The `torch` format. engine: with Transformer Engine's names; experts: see `grouped`."""
    extra = {"decoder.layers.0.self_attention.linear_qkv._extra_state": None}
    for tensor in range(shares.tensor):
        for stage in range(shares.pipeline):
            for expert in range(shares.expert):
                folder = root / f"iter_{iteration:07d}" / f"mp_rank_{tensor:02d}"
                folder = folder.with_name(folder.name + f"_{stage:03d}" * (shares.pipeline > 1))
                folder = folder.with_name(folder.name + f"_{expert:03d}" * (shares.expert > 1))
                folder.mkdir(parents=True)
                place = (shares, tensor, stage, expert)
                chunks = [rank_chunk(weights, *place, chunk) for chunk in range(shares.virtual)]
                content: dict[str, Any] = {
                    "args": Record("argparse.Namespace", (), {**args, **shares.sizes()}),
                    "checkpoint_version": 3.0,
                    "iteration": iteration,
                    "opt_param_scheduler": {"num_steps": 1},
                }
                if moments is not None:
                    states = {
                        kind: [rank_chunk(part, *place, chunk) for chunk in range(shares.virtual)]
                        for kind, part in moments.items()
                    }
                    content["optimizer"] = optimizer_state(chunks, states, iteration)
                for number, chunk in enumerate(chunks):
                    chunk = grouped(chunk, experts) if experts else chunk
                    tensors = {fused(name) if engine else name: array for name, array in chunk.items()}
                    content["model" if shares.virtual == 1 else f"model{number}"] = {**tensors, **extra}
                write_archive(folder / "model_optim_rng.pt", content)
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return root


def optimizer_state(
    chunks: list[dict[str, Any]], states: Mapping[str, list[dict[str, Any]]], step: int
) -> dict[str, Any]:
    """Adam's, of weights that decay and of others."""
    order = [(number, name) for number, chunk in enumerate(chunks) for name in chunk]
    vectors = [(number, name) for number, name in order if chunks[number][name].ndim == 1]
    decayed = [weight for weight in order if weight not in vectors]
    groups, numbered = [], {}
    for members, decay in ((decayed, 1.0), (vectors, 0.0)):
        keys = list(range(len(numbered), len(numbered) + len(members)))
        groups.append({"params": keys, "wd_mult": decay, "lr_mult": 1.0, "is_expert_parallel": False, "step": step})
        numbered |= {
            key: {kind: states[kind][number][name] for kind in states}
            for key, (number, name) in zip(keys, members, strict=True)
        }
    return {"optimizer": {"state": numbered, "param_groups": groups}, "grad_scaler": {}}


def write_sharded(
    root: Path,
    weights: Arrays,
    args: Mapping[str, Any],
    shares: Shares,
    *,
    stacked: bool = True,
    iteration: int = 7,
    moments: Mapping[str, Arrays] | None = None,
    flat: bool = False,
    common: str = "__0_0.distcp",
) -> Path:
    """The `torch_dist` format. stacked: layers and experts in one array each, not an array for each.

    flat: with the buffers of a distributed optimizer; common: the file of what is no array, common.pt as before
    megatron-core 0.19 or one of the shards.
    """
    folder = root / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    files = {rank: io.BytesIO() for rank in range(shares.tensor)}
    described: dict[str, Any] = {}
    places: list[tuple[Record, Record]] = []
    arrays = stacks(weights) if stacked else dict(weights)
    for kind, part in (moments or {}).items():
        arrays |= {
            f"optimizer.state.{kind}.{name}": array for name, array in (stacks(part) if stacked else part).items()
        }
    if flat:
        arrays["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_torch.float32.bucket_idx_0.exp_avg"] = np.zeros(8)
    for name, array in arrays.items():
        boxes = []
        for rank, offsets, part in shards(name, array, shares):
            file, inner = files[rank], io.BytesIO()
            write_archive_to(inner, np.ascontiguousarray(part))
            index = record("torch.distributed.checkpoint.metadata.MetadataIndex", fqn=name, offset=offsets, index=None)
            location = {"relative_path": f"__{rank}_0.distcp", "offset": file.tell(), "length": len(inner.getvalue())}
            places.append((index, record("torch.distributed.checkpoint.filesystem._StorageInfo", **location)))
            file.write(inner.getvalue())
            boxes.append(
                record("torch.distributed.checkpoint.metadata.ChunkStorageMetadata", offsets=offsets, sizes=part.shape)
            )
        dtype = Name(DTYPE_NAMES[array.dtype.name])
        properties = record("torch.distributed.checkpoint.metadata.TensorProperties", dtype=dtype)
        description = {"properties": properties, "size": array.shape, "chunks": boxes}
        described[name] = record("torch.distributed.checkpoint.metadata.TensorStorageMetadata", **description)
    described["rng_state/shard_0_1"] = Record("torch.distributed.checkpoint.metadata.BytesStorageMetadata")
    content = {
        "args": Record("argparse.Namespace", (), {**args, **shares.sizes()}),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "optimizer": {"optimizer": {"state": {"common_step": np.array(iteration, np.float32)}, "param_groups": []}},
    }
    if common == "common.pt":
        write_archive(folder / common, content)
    else:
        name, file, inner = "common_state/shard_0_1", files[0], io.BytesIO()
        write_archive_to(inner, [content])
        described[name] = Record("torch.distributed.checkpoint.metadata.BytesStorageMetadata")
        index = record("torch.distributed.checkpoint.metadata.MetadataIndex", fqn=name, offset=None, index=None)
        location = {"relative_path": common, "offset": file.tell(), "length": len(inner.getvalue())}
        places.append((index, record("torch.distributed.checkpoint.filesystem._StorageInfo", **location)))
        file.write(inner.getvalue())
    for rank, file in files.items():
        (folder / f"__{rank}_0.distcp").write_bytes(file.getvalue())
    description = {"state_dict_metadata": described, "planner_data": None, "storage_data": Pairs(places)}
    metadata = record("torch.distributed.checkpoint.metadata.Metadata", **description)
    (folder / ".metadata").write_bytes(pickled(metadata))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return root


DTYPE_NAMES = {dtype.name: f"torch.{dtype.name}" for dtype in STORAGES}


class Pairs(dict[Any, Any]):
    """A mapping whose keys are records."""

    def __init__(self, pairs: list[tuple[Record, Record]]):
        super().__init__()
        self.update(pairs)


def record(kind: str, **fields: Any) -> Record:
    """An object of a class with attributes."""
    return Record(kind, (), fields)


def pickled(content: Any) -> bytes:
    """Only the pickle of what `write_archive` writes."""
    file = io.BytesIO()
    write_archive_to(file, content)
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")


def stacks(weights: Arrays) -> dict[str, np.ndarray]:
    """Arrays of all layers and all experts, by the names that distributed checkpoints have them under."""
    parts: dict[str, dict[tuple[int, ...], np.ndarray]] = {}
    for name, array in weights.items():
        layer, expert = LAYER.match(name), EXPERT.search(name)
        index = [int(match) for match in (layer and layer[2], expert and expert[1]) if match is not None]
        short = f"{layer[1]}.{layer[3]}" if layer else name
        parts.setdefault(fused(EXPERT.sub(".experts.", short)), {})[tuple(index)] = array
    tensors = {}
    for name, by_index in parts.items():
        leading = tuple(1 + max(numbers) for numbers in zip(*by_index, strict=True))
        first = next(iter(by_index.values()))
        tensors[name] = np.empty((*leading, *first.shape), first.dtype)
        for index, array in by_index.items():
            tensors[name][index] = array
    return tensors


def shards(name: str, array: np.ndarray, shares: Shares) -> Iterator[tuple[int, tuple[int, ...], np.ndarray]]:
    """(tensor rank, offsets, part) of the chunks of an array: one for each layer, expert and rank."""
    trailing = 1 if array.ndim == 1 or name.endswith("bias") or "norm" in name else 2
    leading = array.ndim - trailing
    axis = 0 if ROWS.search(name) else 1 if COLUMNS.search(name) else None
    for index in np.ndindex(*array.shape[:leading]):
        shard, ahead = array[index], (1,) * leading
        if axis is None:
            yield 0, (*index, *[0] * trailing), shard.reshape(*ahead, *shard.shape)
            continue
        halves = 2 if "linear_fc1" in name and shares.gated else 1
        parts = np.split(shard, shares.tensor * halves, axis=axis)
        for number, part in enumerate(parts):
            offsets = [0] * trailing
            offsets[axis] = number * part.shape[axis]
            yield number % shares.tensor, (*index, *offsets), part.reshape(*ahead, *part.shape)
