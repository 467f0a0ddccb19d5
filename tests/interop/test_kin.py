"""Hints for unsupported models: of the same kind, not of the nearest spelling."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hugging_face_folders import write_llama
from safetensors.numpy import load_file, save_file
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.interop.conversion import open_source
from megajax.interop.huggingface.family import Settings
from megajax.interop.huggingface.folder import model_of
from megajax.interop.huggingface.format import chosen_family
from megajax.interop.huggingface.registry import KINDS, families, family_of
from megajax.models.presets.llama import llama3

SUPPORTED = {name for family in families().values() for name in family.model_types}


def refusal(kind: str) -> str:
    with pytest.raises(UserError) as error:
        family_of(Settings({"model_type": kind}))
    return str(error.value)


def test_unsupported_types_name_the_nearest_architecture() -> None:
    assert refusal("jetmoe").endswith("it is a decoder with experts; nearest of the supported: mixtral")
    assert refusal("bart").endswith("nearest of the supported: t5")
    assert refusal("umt5").endswith("nearest of the supported: t5 or mt5")
    with user_error("--family"):
        chosen_family(llama3("debug"), "jetmoe")


def differences(parent: Path, **changes: Any) -> str:
    """The lines on the nearest family of a Llama with other settings."""
    folder = parent / "_".join(["llama", *changes][:2])
    write_llama(folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "made_up"} | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        model_of(folder)
    return str(error.value).partition("\n")[2]


def test_settings_that_the_nearest_family_lacks_are_listed(tmp_path: Path) -> None:
    head = "Differences of its settings from llama:\n  "
    assert differences(tmp_path) == f"{head}none"
    text = differences(tmp_path, hidden_act="xielu", attention_sparsity=0.25, qk_clip=None)
    assert text.startswith(f"{head}hidden_act=xielu: only gelu, ")
    assert text.endswith("\n  attention_sparsity=0.25: llama has no such setting")
    assert differences(tmp_path, model_type="minicpm", scale_emb=12.0) == (
        f"{head}scale_emb=12.0: llama has no such setting"
    )
    assert differences(tmp_path, **{f"other_{number}": 1 for number in range(30)}) == ""


@pytest.mark.parametrize("kind", ["vits", "clap", "swin", "lama", "whisper", "flava", "sam", "t6", "git"])
def test_no_type_is_suggested_for_its_spelling(kind: str) -> None:
    assert f"model_type={kind} is not supported; supported: afmoe, apertus, arcee, " in refusal(kind)


@pytest.mark.parametrize(
    ("kind", "meant"), [("GPT-OSS", "gpt_oss"), ("Qwen-2", "qwen2"), ("megatron_bert", "megatron-bert")]
)
def test_other_punctuation_is_recognised(kind: str, meant: str) -> None:
    assert refusal(kind).endswith(f"did you mean {meant}?")


def test_the_table_names_each_type_once_and_only_supported_families() -> None:
    types = [name for kin in KINDS for name in kin.types.split()]
    assert [name for name, count in Counter(types).items() if count > 1] == []
    assert SUPPORTED.isdisjoint(types)
    assert {name for kin in KINDS for name in kin.nearest} <= {*families()}


def test_missing_tensors_are_not_mistaken_for_others(tmp_path: Path) -> None:
    """The same layer and the same shape, or no suggestion."""
    write_llama(tmp_path / "llama")
    path = tmp_path / "llama/model.safetensors"
    tensors = load_file(path)
    block = "model.layers.{}.self_attn.{}_proj.weight"
    moved = {block.format(0, "q"): "model.layers.0.self_attn.wq.weight", block.format(1, "k"): block.format(7, "k")}
    tensors = {moved.get(name, name): values for name, values in tensors.items()}
    tensors["model.layers.2.self_attn.v_prj.weight"] = np.zeros((3, 3), np.float16)
    del tensors[block.format(2, "v")]
    save_file(tensors, path)
    with pytest.raises(UserError) as error:
        open_source(f"hf:{tmp_path / 'llama'}")
    text = str(error.value)
    assert f"{block.format(0, 'q')}: missing; did you mean model.layers.0.self_attn.wq.weight?" in text
    assert f"{block.format(1, 'k')}: missing\n" in text and f"{block.format(2, 'v')}: missing\n" in text
