"""Settings of a config.json with invalid kinds or sizes: one message that lists all; and ignored settings."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hugging_face_folders import LLAMA, write_llama
from safetensors.numpy import save_file
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.interop.conversion import open_source
from megajax.interop.huggingface.folder import model_of

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}


def message(folder: Path, settings: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError) as error:
        model_of(folder)
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hidden_size": None}, "hidden_size: must be given"),
        ({"num_attention_heads": "5"}, 'num_attention_heads="5": must be a whole number'),
        ({"num_attention_heads": 0}, "num_attention_heads=0: must be between 1 and"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: must be between 1 and 10000"),
        ({"num_hidden_layers": 2**70}, f"num_hidden_layers={2**70}: must be a whole number up to"),
        ({"num_hidden_layers": 2**30}, f"num_hidden_layers={2**30}: must be between 1 and 10000"),
        *[
            ({"rope_scaling": value}, f"rope_scaling={json.dumps(value)}: must be a mapping")
            for value in ("5", 1.5, [1], True)
        ],
        ({"model_type": "mistral", "sliding_window": "5"}, 'sliding_window="5": must be a whole number'),
        ({"hidden_act": ["silu"]}, 'hidden_act=["silu"]: must be a text'),
        ({"model_type": ["llama"]}, "model_type=['llama'] is not supported"),
        ({"vocab_size": "96"}, 'vocab_size="96": must be a whole number'),
        ({"vocab_size": 96.0}, "vocab_size=96.0: must be a whole number"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"num_key_value_heads": "2"}, 'num_key_value_heads="2": must be a whole number'),
        ({"num_key_value_heads": 0}, "kv_heads"),
        ({"rope_theta": float("nan")}, "rope_theta=NaN: must be a finite number"),
        ({"rms_norm_eps": -1}, "epsilon"),
        ({"rms_norm_eps": "1e-5"}, 'rms_norm_eps="1e-5": must be a finite number'),
        ({"max_position_embeddings": "64"}, 'max_position_embeddings="64": must be a whole number'),
        ({**MIXTRAL, "num_experts_per_tok": "2"}, 'num_experts_per_tok="2": must be a whole number'),
        ({**MIXTRAL, "sliding_window": "5"}, 'sliding_window="5": must be a whole number'),
        ({"attention_bias": "false"}, 'attention_bias="false": must be true or false'),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "num_hidden_layers=3"),
        ({"model_type": "qwen3", "layer_types": "full_attention"}, "layer_types=\"full_attention\": must be a list"),
        *[
            ({"rope_scaling": {n: LLAMA3[n] for n in LLAMA3 if n != name}}, f"{name}: must be given")
            for name in ("low_freq_factor", "high_freq_factor")
        ],
        ({"rope_scaling": {**LLAMA3, "factor": "8"}}, 'factor="8": must be a finite number'),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -2.0}}, "factor"),
        ({"rope_scaling": {"rope_type": ["yarn"], "factor": 2.0}}, "rope_type"),
    ],
)  # fmt: skip
def test_an_invalid_setting_is_named(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    assert what in message(tmp_path, {**LLAMA, **changes})


def test_all_invalid_settings_are_listed(tmp_path: Path) -> None:
    values = {"vocab_size": "96", "attention_bias": 1, "rope_theta": "10000", "hidden_size": None, "new_gate": 3}
    text = message(tmp_path, {**LLAMA, **values})
    assert all(f"  {name}" in text for name in values) and text.count("\n") == len(values) + 1


@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5", "vit", "mamba", "mamba2", "nemotron_h", "clip_vision_model"])
@pytest.mark.parametrize("value", ["5", 1.5, 0, -1, [1], True, 2**70])
def test_no_value_of_a_size_is_a_traceback(tmp_path: Path, kind: str, value: Any) -> None:
    sizes = {
        "gpt2": ("n_embd", "n_head", "n_layer", "n_positions"),
        "t5": ("d_model", "num_heads", "num_layers", "d_ff"),
        "mamba": ("hidden_size", "state_size", "num_hidden_layers", "vocab_size"),
        "mamba2": ("hidden_size", "num_heads", "num_hidden_layers", "n_groups"),
        "nemotron_h": ("hidden_size", "mamba_num_heads", "num_attention_heads"),
    }
    for name in sizes.get(kind, ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")):
        message(tmp_path, {"model_type": kind, name: value})


def test_windows_of_llama_are_ignored(tmp_path: Path) -> None:
    """transformers' class has none, whatever config.json says; Mistral's and Qwen's have."""
    plain, windows = (
        dict(LLAMA),
        {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3, "max_window_layers": 1},
    )
    models = []
    for settings in (plain, {**plain, **windows}, {**plain, "model_type": "mistral", "sliding_window": 8}):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        models.append(model_of(tmp_path))
    assert models[0] == models[1] and models[2].stack.pattern[0].mixer.window == 7


def test_the_file_that_transformers_reads_is_read(tmp_path: Path) -> None:
    tensors = write_llama(tmp_path / "theirs")
    save_file({"other": np.zeros(3, np.float32)}, tmp_path / "theirs/consolidated.safetensors")
    source = f"hf:{tmp_path / 'theirs'}"
    assert {*open_source(source).foreign.tensors.entries} == {*tensors}
    shutil.move(tmp_path / "theirs/model.safetensors", tmp_path / "theirs/another.safetensors")
    with user_error():
        open_source(source)
