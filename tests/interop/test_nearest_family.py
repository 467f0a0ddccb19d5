"""Models of unknown types: the nearest family, and what differs from it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hugging_face_folders import MIXTRAL, mixtral_shapes, write, write_llama
from safetensors.numpy import load_file, save_file

from megajax.config.errors import UserError
from megajax.interop.conversion import open_source
from megajax.interop.huggingface.folder import model_of
from megajax.interop.huggingface.nearest import MOST_LAYERS


def changed(folder: Path, settings: dict[str, Any], weights: dict[str, tuple[int, ...]]) -> Path:
    """A Llama with further settings, and with further weights in layer 1."""
    write_llama(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "made_up"} | settings))
    tensors = load_file(folder / "model.safetensors")
    more = {f"model.layers.1.{name}.weight": np.zeros(shape, np.float16) for name, shape in weights.items()}
    save_file(tensors | more, folder / "model.safetensors")
    return folder


def message(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        open_source(f"hf:{folder}")
    return str(error.value)


def test_settings_and_weights_that_the_nearest_family_lacks_are_listed(tmp_path: Path) -> None:
    settings = {"hidden_act": "xielu", "attention_sparsity": 0.25, "qk_clip": None}
    norms = {"self_attn.q_norm": (4,), "self_attn.k_norm": (4,)}
    text = message(changed(tmp_path / "m", settings, {**norms, "self_attn.g_proj": (16, 16)}))
    assert "model_type=made_up is not supported; supported: " in text
    assert "\nqwen3 knows 13 of 14 settings and 14 of 15 kinds of weights. The differences:\n" in text
    assert "  hidden_act=xielu: only gelu, " in text
    assert "  attention_sparsity=0.25: qwen3 has no such setting\n" in text
    assert text.endswith("  model.layers.*.self_attn.g_proj.weight [16, 16]: qwen3 has no such weight")


def test_weights_decide_between_families_with_the_same_settings(tmp_path: Path) -> None:
    assert "\nllama knows 12 of 12 settings and 12 of 12" in message(changed(tmp_path / "m", {}, {}))


def test_settings_and_weights_that_are_absent_are_listed(tmp_path: Path) -> None:
    """Experts without a router, of an unknown activation function."""
    config = MIXTRAL | {"model_type": "made_up", "hidden_act": "xielu"}
    write(tmp_path / "m", config, mixtral_shapes(config), np.float16)
    tensors = load_file(tmp_path / "m/model.safetensors")
    save_file({name: x for name, x in tensors.items() if "gate" not in name}, tmp_path / "m/model.safetensors")
    text = message(tmp_path / "m")
    assert "\nmixtral knows " in text and "The differences:\n  hidden_act=xielu: only " in text
    assert text.endswith("\n  model.layers.*.block_sparse_moe.gate.weight: absent, mixtral has [4, 16]")


def test_of_a_known_type_only_its_kin_are_compared(tmp_path: Path) -> None:
    """Also without weights."""
    folder = changed(tmp_path / "m", {"model_type": "minicpm", "scale_emb": 12.0}, {})
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError) as error:
        model_of(folder)
    text = str(error.value)
    assert "settings of its own; nearest of the supported: llama\nllama knows 12 of 13 settings" in text
    assert "\n  scale_emb=12.0: llama has no such setting" in text


@pytest.mark.parametrize("settings", [{"num_hidden_layers": MOST_LAYERS + 1}, {f"other_{n}": 1 for n in range(30)}])
def test_nothing_is_said_without_a_near_family(tmp_path: Path, settings: dict[str, int]) -> None:
    assert "differences" not in message(changed(tmp_path / "m", settings, {}))
