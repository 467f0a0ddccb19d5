"""Small Hugging Face folders, written with the safetensors library, and weights and tensors in memory."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from megajax.checkpoint.boxes import Box
from megajax.checkpoint.weight_source import Entry, WeightSource
from megajax.interop.huggingface.folder import model_of
from megajax.interop.huggingface.format import chosen_family
from megajax.interop.peft.folder import TENSORS, adapter_files
from megajax.interop.peft.settings import CONFIG
from megajax.interop.weights.foreign import declared_by
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.param import ParamSpec

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 40,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "eos_token_id": 7, "torch_dtype": "float16",
}  # fmt: skip
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 2,
}  # fmt: skip


def mixtral_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes as transformers has them."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    shapes = {name: shape for name, shape in llama_shapes(config).items() if ".mlp." not in name}
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}.block_sparse_moe"
        shapes[f"{block}.gate.weight"] = config["num_local_experts"], hidden
        for number in range(config["num_local_experts"]):
            shapes |= {f"{block}.experts.{number}.{name}.weight": (ffn, hidden) for name in ("w1", "w3")}
            shapes[f"{block}.experts.{number}.w2.weight"] = hidden, ffn
    return shapes


def llama_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes as transformers has them."""
    hidden, ffn, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        rows = {"q": queries, "k": keys, "v": keys}
        shapes |= {f"{block}.self_attn.{name}_proj.weight": (rows[name], hidden) for name in rows}
        shapes |= {f"{block}.self_attn.o_proj.weight": (hidden, queries)}
        shapes |= {f"{block}.mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
        shapes |= {f"{block}.mlp.down_proj.weight": (hidden, ffn)}
        shapes |= {f"{block}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}


def write_llama(
    folder: Path, dtype: type = np.float16, seed: int = 0, calm: bool = False, **changes: object
) -> dict[str, np.ndarray]:
    """Writes the folder; returns its tensors. The norms are float32 whatever the dtype."""
    config = {**LLAMA, **changes}
    return write(folder, config, llama_shapes(config), dtype, seed, calm)


def write(
    folder: Path, config: dict, shapes: Mapping[str, tuple[int, ...]], dtype: type, seed: int = 0, calm: bool = False
) -> dict[str, np.ndarray]:
    """Writes a folder with random tensors of these shapes; returns them.

    calm: as at the start of training, so that a rounding of a weight changes outputs little.
    """
    draw, tensors = np.random.default_rng(seed), {}
    for name, shape in shapes.items():
        values = draw.normal(size=shape)
        if calm:
            values = 1 + 0.1 * values if "norm" in name else values / shape[-1] ** 0.5
        tensors[name] = values.astype(np.float32 if "norm" in name else dtype)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return tensors


class Arrays:
    """Tensors in memory."""

    where = "memory"

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self.arrays = dict(arrays)

    @property
    def entries(self) -> dict[str, Entry]:
        return {name: Entry(array.shape, array.dtype) for name, array in self.arrays.items()}

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name]


def read_weight(source: WeightSource, path: str) -> np.ndarray:
    """A whole weight."""
    return source.read(path, tuple(slice(0, size) for size in source.shapes[path]))


def read_all(source: WeightSource) -> dict[str, np.ndarray]:
    """Every weight by path."""
    return {path: read_weight(source, path) for path in source.shapes}


@dataclass(frozen=True)
class ArraySource:
    """Weights in memory."""

    weights: Mapping[str, np.ndarray]
    where: str = "given"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {path: w.shape for path, w in self.weights.items()}

    def read(self, path: str, box: Box) -> np.ndarray:
        return self.weights[path][box]


def random_weights(declared: Mapping[str, ParamSpec], scale: float = 1.0, seed: int = 0) -> ArraySource:
    """Random weights, including rows past the vocabulary, as in training."""
    draw = np.random.default_rng(seed)
    return ArraySource(
        {path: (scale * draw.normal(size=spec.shape)).astype(np.float32) for path, spec in declared.items()}
    )


def write_adapter(folder: Path, base: Path, lora: LoRAConfig, seed: int = 0, scale: float = 1.0) -> None:
    """Writes an adapter of PEFT with random weights for the model of a folder."""
    model = model_of(base)
    adapted = replace(model, lora=lora)
    specs = {path: spec for path, spec in declared_by(adapted).items() if ".lora_" in path}
    config, tensors = adapter_files(adapted, chosen_family(model)[0], random_weights(specs, scale, seed), str(base))
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / TENSORS)
