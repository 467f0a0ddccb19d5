"""Hugging Face models in our decoder: logits, loss and greedy tokens of every checkpoint in the folder, in float32."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_cases import FOLDER, Comparison, Settings, cases, unsupported
from megatron_run import OneDevice
from megatron_weights import layer_places

from megajax.layers.config import (
    AttentionConfig,
    BlockConfig,
    DenseMLPConfig,
    GatedMLPConfig,
    LayerNormConfig,
    Llama3ScalingConfig,
    Mamba2Config,
    MixerBlockConfig,
    RMSNormConfig,
    RopeConfig,
    StackConfig,
)
from megajax.models.config import DecoderConfig

TOLERANCE = 1e-5
DTYPES = {"F16": np.float16, "F32": np.float32, "F64": np.float64, "I64": np.int64, "I32": np.int32}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
UNUSED = {
    # About generation, initial values, dropout, caches, or other heads.
    "architectures", "attention_dropout", "attn_pdrop", "bos_token_id", "dtype", "embd_pdrop", "eos_token_id",
    "initializer_range", "model_type", "pad_token_id", "pretraining_tp", "reorder_and_upcast_attn", "resid_pdrop",
    "residual_in_fp32", "rescale_prenorm_residual",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "time_step_floor", "time_step_max", "time_step_min", "time_step_rank", "torch_dtype", "transformers_version",
    "use_cache",
}  # fmt: skip

GATED = ("gate_proj", "up_proj", "down_proj")
"""Names of the matrices of a gated feed-forward layer."""

type Tensors = dict[str, np.ndarray]


def read_safetensors(path: Path) -> Tensors:
    """Every array of a file: 8 bytes of header length, a JSON header with dtypes, shapes and offsets, the bytes."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    return {
        name: np.frombuffer(body[slice(*entry["data_offsets"])], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


class Checkpoint:
    """A model's arrays by name in float32; every one must be used."""

    def __init__(self, tensors: Tensors, layers: int):
        self.tensors, self.layers, self.used = tensors, layers, set[str]()

    def one(self, name: str, change: Callable[[np.ndarray], np.ndarray] = np.asarray) -> np.ndarray:
        self.used.add(name)
        return change(self.tensors[name].astype(np.float32))

    def each(self, name: str, change: Callable[[np.ndarray], np.ndarray] = np.asarray) -> np.ndarray:
        """Of all layers, stacked; `{}` in the name is the layer's number."""
        return np.stack([self.one(name.format(layer), change) for layer in range(self.layers)])

    def norm(self, path: str, name: str) -> Tensors:
        """Gain and, where there is one, bias."""
        read = self.each if "{}" in name else self.one
        actual = {f"{path}.gain": read(f"{name}.weight")}
        if f"{name}.bias".format(0) in self.tensors:
            actual[f"{path}.bias"] = read(f"{name}.bias")
        return actual


def gpt2_config(given: Settings) -> DecoderConfig:
    hidden, heads, epsilon = given.take("n_embd"), given.take("n_head"), given.take("layer_norm_epsilon", 1e-5)
    given.only("scale_attn_weights", True)
    given.only("scale_attn_by_inverse_layer_idx", False)
    named = given.take("activation_function", "gelu_new")
    activation = ACTIVATIONS.get(named)
    if activation not in ("gelu", "gelu_tanh", "relu"):
        unsupported(f"activation_function={named}")
    mlp = DenseMLPConfig(ffn=given.take("n_inner", 4 * hidden), activation=activation)
    block = BlockConfig(mixer=AttentionConfig(heads=heads, bias=True), mlp=mlp, norm=LayerNormConfig(epsilon=epsilon))
    return DecoderConfig(
        hidden=hidden,
        vocabulary_size=given.take("vocab_size"),
        sequence_length=given.take("n_positions"),
        stack=StackConfig(pattern=(block,), repeats=given.take("n_layer")),
        learned_positions=True,
        norm=block.norm,
        tied=given.take("tie_word_embeddings", True),
    )


def gpt2_weights(cfg: DecoderConfig, held: Checkpoint) -> Tensors:
    """Matrices are (in, out); query, key and value stand side by side."""
    mixer = cfg.stack.pattern[0].mixer
    heads, h, b = (mixer.heads, mixer.size(cfg.hidden)), "transformer.h.{}", "stack.blocks.0"
    qkv = held.each(f"{h}.attn.c_attn.weight", lambda w: w.reshape(cfg.hidden, 3, *heads).swapaxes(0, 1))
    biases = held.each(f"{h}.attn.c_attn.bias", lambda w: w.reshape(3, *heads))
    actual = {f"{b}.mixer.{name}": qkv[:, i] for i, name in enumerate(("query", "key", "value"))}
    actual |= {f"{b}.mixer.{name}_bias": biases[:, i] for i, name in enumerate(("query", "key", "value"))}
    actual |= {
        "tokens": held.one("transformer.wte.weight"),
        "positions": held.one("transformer.wpe.weight"),
        f"{b}.mixer.output": held.each(f"{h}.attn.c_proj.weight", lambda w: w.reshape(*heads, cfg.hidden)),
        f"{b}.mixer.output_bias": held.each(f"{h}.attn.c_proj.bias"),
        f"{b}.mlp.up": held.each(f"{h}.mlp.c_fc.weight"),
        f"{b}.mlp.up_bias": held.each(f"{h}.mlp.c_fc.bias"),
        f"{b}.mlp.down": held.each(f"{h}.mlp.c_proj.weight"),
        f"{b}.mlp.down_bias": held.each(f"{h}.mlp.c_proj.bias"),
    }
    actual |= held.norm(f"{b}.mixer_norm", f"{h}.ln_1") | held.norm(f"{b}.mlp_norm", f"{h}.ln_2")
    return actual | held.norm("norm", "transformer.ln_f") | ({} if cfg.tied else {"head": held.one("lm_head.weight")})


def llama_rope(given: Settings) -> RopeConfig:
    """From rope_parameters, or from rope_theta and rope_scaling as older files have it."""
    parameters = {"rope_theta": given.take("rope_theta", 10000.0)} | given.take("rope_scaling", {})
    rope = Settings(parameters | given.take("rope_parameters", {}))
    base, kind, old = rope.take("rope_theta"), rope.take("rope_type"), rope.take("type")
    kind = kind or old or "default"
    if kind == "default":
        return RopeConfig(base=base)
    if kind != "llama3":
        unsupported(f"rope_type={kind}")
    scaling = Llama3ScalingConfig(
        factor=rope.take("factor"),
        low=rope.take("low_freq_factor"),
        high=rope.take("high_freq_factor"),
        original=rope.take("original_max_position_embeddings"),
    )
    return RopeConfig(base=base, scaling=scaling)


def windows(given: Settings, layers: int, length: int) -> list[int | None]:
    """The window of each layer; theirs counts the query itself."""
    size, kinds, on = given.take("sliding_window"), given.take("layer_types"), given.take("use_sliding_window", True)
    given.take("max_window_layers")
    window = size - 1 if size and on and size <= length else None
    return [window if kinds is None or kind == "sliding_attention" else None for kind in kinds or [None] * layers]


def llama_config(given: Settings) -> DecoderConfig:
    family, layers = given.left["model_type"], given.take("num_hidden_layers")
    length = given.take("max_position_embeddings")
    named = given.take("hidden_act", "silu")
    activation = ACTIVATIONS.get(named)
    if activation not in ("silu", "gelu", "gelu_tanh"):
        unsupported(f"hidden_act={named}")
    mixer = AttentionConfig(
        heads=given.take("num_attention_heads"),
        kv_heads=given.take("num_key_value_heads"),
        head_dim=given.take("head_dim"),
        bias=given.take("attention_bias", False),
        qkv_bias=family.startswith("qwen2") or None,
        qk_norm=RMSNormConfig(epsilon=given.left["rms_norm_eps"]) if family.startswith("qwen3") else None,
        rope=llama_rope(given),
    )
    mlp = GatedMLPConfig(ffn=given.take("intermediate_size"), activation=activation, bias=given.take("mlp_bias", False))
    block = BlockConfig(mixer=mixer, mlp=mlp, norm=RMSNormConfig(epsilon=given.take("rms_norm_eps")))
    blocks = [replace(block, mixer=replace(mixer, window=window)) for window in windows(given, layers, length)]
    return DecoderConfig(
        hidden=given.take("hidden_size"),
        vocabulary_size=given.take("vocab_size"),
        sequence_length=length,
        stack=StackConfig.of(blocks),
        norm=block.norm,
        tied=given.take("tie_word_embeddings", False),
    )


def llama_weights(cfg: DecoderConfig, held: Checkpoint) -> Tensors:
    """Matrices are (out, in)."""
    actual = {"tokens": held.one("model.embed_tokens.weight")}
    actual |= stacked_layers(cfg, lambda layer, block: llama_layer(cfg, block, held, layer))
    return actual | held.norm("norm", "model.norm") | ({} if cfg.tied else {"head": held.one("lm_head.weight")})


def stacked_layers(cfg: DecoderConfig, read: Callable[[str, BlockConfig], Tensors]) -> Tensors:
    """Arrays of all layers by path, stacked as ours are. read: (name of a layer, its config) -> by paths in a block."""
    rows: dict[str, list[np.ndarray]] = {}
    for number, (path, _, block) in enumerate(layer_places(cfg)):
        for name, array in read(f"model.layers.{number}", block).items():
            rows.setdefault(f"{path}.{name}", []).append(array)
    return {path: np.stack(arrays) for path, arrays in rows.items()}


def llama_layer(cfg: DecoderConfig, block: BlockConfig, held: Checkpoint, layer: str) -> Tensors:
    """Of one layer, by paths in a block."""
    return llama_attention(cfg, block, held, layer) | gated(held, f"{layer}.mlp", "mlp", bias=block.mlp.bias)


def gated(held: Checkpoint, theirs: str, ours: str, names: tuple[str, ...] = GATED, *, bias: bool = False) -> Tensors:
    """A gated feed-forward layer. names: theirs of gate, up and down."""
    actual = {}
    for name, their_name in zip(("gate", "up", "down"), names, strict=True):
        actual[f"{ours}.{name}"] = held.one(f"{theirs}.{their_name}.weight", np.transpose)
        if bias:
            actual[f"{ours}.{name}_bias"] = held.one(f"{theirs}.{their_name}.bias")
    return actual


def llama_attention(cfg: DecoderConfig, block: BlockConfig, held: Checkpoint, layer: str) -> Tensors:
    """Attention and the norms of both parts."""
    actual = {}
    mixer, size = block.mixer, block.mixer.size(cfg.hidden)
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        name = f"{layer}.self_attn.{theirs}"
        actual[f"mixer.{ours}"] = held.one(f"{name}.weight", lambda w: w.T.reshape(cfg.hidden, -1, size))
        if mixer.has_qkv_bias():
            actual[f"mixer.{ours}_bias"] = held.one(f"{name}.bias", lambda w: w.reshape(-1, size))
    if mixer.qk_norm is not None:
        actual |= held.norm("mixer.query_norm", f"{layer}.self_attn.q_norm")
        actual |= held.norm("mixer.key_norm", f"{layer}.self_attn.k_norm")
    actual["mixer.output"] = held.one(f"{layer}.self_attn.o_proj.weight", lambda w: w.T.reshape(-1, size, cfg.hidden))
    if mixer.bias:
        actual["mixer.output_bias"] = held.one(f"{layer}.self_attn.o_proj.bias")
    actual |= held.norm("mixer_norm", f"{layer}.input_layernorm")
    return actual | held.norm("mlp_norm", f"{layer}.post_attention_layernorm")


def mamba2_config(given: Settings) -> DecoderConfig:
    layers, width, epsilon = (
        given.take("num_hidden_layers"),
        given.take("hidden_size"),
        given.take("layer_norm_epsilon"),
    )
    heads, size = given.take("num_heads"), given.take("head_dim")
    given.only("hidden_act", "silu")
    assert heads * size == given.take("expand", 2) * width
    limits = tuple(float(one["__float__"] if isinstance(one, dict) else one) for one in given.take("time_step_limit"))
    mixer = Mamba2Config(
        heads=heads,
        head_dim=size,
        state=given.take("state_size"),
        groups=given.take("n_groups"),
        conv_kernel=given.take("conv_kernel"),
        conv_bias=given.take("use_conv_bias", True),
        bias=given.take("use_bias", False),
        norm_epsilon=epsilon,
        dt_limit=limits,
        chunk=given.take("chunk_size"),
    )
    return DecoderConfig(
        hidden=width,
        vocabulary_size=given.take("vocab_size"),
        sequence_length=64,
        stack=StackConfig(
            pattern=(MixerBlockConfig(mixer=mixer, norm=RMSNormConfig(epsilon=epsilon)),), repeats=layers
        ),
        norm=RMSNormConfig(epsilon=epsilon),
        tied=given.take("tie_word_embeddings", False),
    )


def mamba2_weights(cfg: DecoderConfig, held: Checkpoint) -> Tensors:
    """in_proj makes z, x, b, c and dt, one after another; the convolution is over x, b and c together."""
    mixer, h, b = cfg.stack.pattern[0].mixer, "backbone.layers.{}", "stack.blocks.0.mixer"
    head, group = (mixer.heads, mixer.head_dim), (mixer.groups, mixer.state)
    shapes = {"z": head, "x": head, "b": group, "c": group, "dt": (mixer.heads,)}
    filters = {name: shapes[name] for name in ("x", "b", "c")}
    actual = {f"{b}.in_{name}": w for name, w in pieces(held.each(f"{h}.mixer.in_proj.weight", np.transpose), shapes)}
    conv = held.each(f"{h}.mixer.conv1d.weight", lambda w: w[:, 0].T)
    actual |= {f"{b}.conv_{name}.kernel": w for name, w in pieces(conv, filters)}
    if mixer.conv_bias:
        bias = held.each(f"{h}.mixer.conv1d.bias")
        actual |= {f"{b}.conv_{name}.bias": w for name, w in pieces(bias, filters)}
    ours = {"A_log": "a_log", "D": "skip", "dt_bias": "dt_bias"}
    actual |= {f"{b}.{name}": held.each(f"{h}.mixer.{theirs}") for theirs, name in ours.items()}
    if mixer.bias:
        biases = dict(pieces(held.each(f"{h}.mixer.in_proj.bias"), shapes))
        actual[f"{b}.dt_bias"] = actual[f"{b}.dt_bias"] + biases.pop("dt")
        actual |= {f"{b}.in_{name}_bias": w for name, w in biases.items()}
        actual[f"{b}.output_bias"] = held.each(f"{h}.mixer.out_proj.bias")
    actual[f"{b}.norm_gain"] = held.each(f"{h}.mixer.norm.weight", lambda w: w.reshape(head))
    actual[f"{b}.output"] = held.each(f"{h}.mixer.out_proj.weight", lambda w: w.T.reshape(*head, cfg.hidden))
    actual |= {"tokens": held.one("backbone.embeddings.weight")} | held.norm("stack.blocks.0.mixer_norm", f"{h}.norm")
    return actual | held.norm("norm", "backbone.norm_f") | ({} if cfg.tied else {"head": held.one("lm_head.weight")})


def pieces(whole: np.ndarray, shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, np.ndarray]]:
    """Parts of the last dimension one after another, each in its shape."""
    ends = np.cumsum([np.prod(shape) for shape in shapes.values()])
    assert ends[-1] == whole.shape[-1]
    parts = np.split(whole, ends[:-1], axis=-1)
    return [(name, w.reshape(*w.shape[:-1], *shapes[name])) for name, w in zip(shapes, parts, strict=True)]


ELSEWHERE = {"bert", "t5", "mt5", "vit", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"}
"""Families with tests of their own."""
FAMILIES = {
    "gpt2": (gpt2_config, gpt2_weights),
    "llama": (llama_config, llama_weights),
    "mistral": (llama_config, llama_weights),
    "qwen2": (llama_config, llama_weights),
    "qwen3": (llama_config, llama_weights),
    "mamba2": (mamba2_config, mamba2_weights),
}


def load_case(folder: Path, families: Mapping[str, Any]) -> tuple[DecoderConfig, Tensors]:
    given = Settings(json.loads((folder / "config.json").read_text()))
    family = given.left["model_type"]
    if family not in families:
        unsupported(f"{family} models")
    translate, weights = families[family]
    cfg = translate(given)
    given.finish(UNUSED)
    held = Checkpoint(read_safetensors(folder / "model.safetensors"), cfg.stack.layers())
    params = weights(cfg, held)
    assert held.used == set(held.tensors)
    padding = ((0, cfg.padded_vocabulary() - cfg.vocabulary_size), (0, 0))
    return cfg, {path: np.pad(w, padding) if path in ("tokens", "head") else w for path, w in params.items()}


def kinds() -> dict[str, str]:
    """Case -> `model_type`."""
    return {path.parent.name: json.loads(path.read_text())["model_type"] for path in FOLDER.glob("hf/*/config.json")}


@pytest.mark.parametrize("case", cases(case for case, kind in kinds().items() if kind not in ELSEWHERE))
def test_checkpoint(case: str, oracle_dir: Path) -> None:
    folder = oracle_dir / "hf" / case
    check_case(case, folder, *load_case(folder, FAMILIES))


def check_case(
    case: str, folder: Path, cfg: DecoderConfig, params: Tensors, kept: Tensors | None = None, extra: float = 0.0
) -> None:
    """kept: state of observations by path; extra: what the stored loss has beside cross-entropy, times its weight."""
    with np.load(folder / "io.npz") as stored:
        io: dict[str, Any] = dict(stored)
    ids, greedy, compare = io["input_ids"].astype(np.int32), io["greedy"].astype(np.int32), Comparison(case)
    assert ids.shape == greedy.shape
    rows = np.concatenate([ids, greedy])
    actual = OneDevice(cfg).forward(params, rows, np.roll(rows, -1, axis=1), kept)
    compare.check("logits", actual["logits"][: len(ids)], io["logits"], TOLERANCE)
    compare.check("loss", actual["per_token_loss"][: len(ids), :-1].mean(), io["loss"] - extra, TOLERANCE)
    # Each next token is the likeliest after those before it, hence the whole text is what greedy decoding gives.
    prompt = greedy.shape[1] - 8
    np.testing.assert_array_equal(greedy[:, :prompt], ids[:, :prompt])
    np.testing.assert_array_equal(actual["logits"][len(ids) :, prompt - 1 : -1].argmax(-1), greedy[:, prompt:])
    compare.finish()
