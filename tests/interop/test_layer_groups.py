"""The same layers in other groups: a preset stacks them by place in a pattern, a folder's model by equal blocks."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hugging_face_folders import ArraySource, random_weights, read_all, read_weight
from safetensors.numpy import save_file
from user_errors import user_error

from megajax.convert import main
from megajax.interop.huggingface.format import chosen_family, write_model
from megajax.interop.peft.folder import TENSORS, adapter_files, read_adapter
from megajax.interop.peft.format import base_model
from megajax.interop.peft.settings import CONFIG
from megajax.interop.weights.fit import source_of
from megajax.interop.weights.foreign import declared_by
from megajax.interop.weights.formats import open_stored
from megajax.interop.weights.regrouped import groups_of, regrouped, same_groups
from megajax.interop.weights.stored_model import Options
from megajax.layers.lora.config import LoRAConfig
from megajax.models.presets.deepseek import deepseek
from megajax.models.presets.windowed import gemma3

PRESET = gemma3("debug", sequence_length=32, vocabulary_size=128)
DECLARED = declared_by(PRESET)
WEIGHTS = random_weights(DECLARED, scale=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    write_model(folder, PRESET, WEIGHTS, chosen_family(PRESET)[0])
    return folder


def test_layers_are_found_by_their_numbers(folder: Path, tmp_path: Path) -> None:
    """Five layers with windows and one without: six groups in the preset, two in the folder's model and its runs."""
    stored, groups = open_stored(f"hf:{folder}"), groups_of(DECLARED)
    assert len({path.split(".")[2] for path in groups}) == 6
    assert len({path.split(".")[2] for path in groups_of(stored.declared)}) == 2
    main([f"--from=hf:{folder}", f"--to={tmp_path / 'run'}"])
    run = open_stored(tmp_path / "run")
    sources = [
        stored.fitted(DECLARED),
        run.fitted(DECLARED),
        source_of(tmp_path / "run", DECLARED, set(DECLARED), (), None).use(lambda weights: weights),
    ]
    for source in sources:
        assert source.shapes == {path: spec.shape for path, spec in DECLARED.items()}
        for path, values in WEIGHTS.weights.items():
            np.testing.assert_array_equal(read_weight(source, path), values, path)
    assert not same_groups({"stack.blocks.0.a": [0, 2]}, {"stack.blocks.0.a": [0, 1]})
    cut = regrouped(sources[0], groups, {"stack.blocks.0.mlp.gate": [0, 6]})
    assert "stack.blocks.0.mlp.gate" not in cut.shapes, "there is no seventh layer"


def test_adapters_of_a_preset_have_the_folder_as_their_base(folder: Path) -> None:
    adapted = replace(PRESET, lora=LoRAConfig(rank=2))
    adapters = random_weights({path: spec for path, spec in declared_by(adapted).items() if path not in DECLARED})
    weights = ArraySource({**WEIGHTS.weights, **adapters.weights})
    run = open_stored(f"hf:{folder}").derived(adapted, weights)
    assert base_model(run, Options()) == (str(folder), [f"base model: {folder}"])
    moved = {**weights.weights, "stack.blocks.4.mlp.gate": weights.weights["stack.blocks.4.mlp.gate"] + 1}
    assert "blocks.4.mlp.gate differ" in base_model(replace(run, weights=ArraySource(moved)), Options())[1][0]


def test_adapters_of_a_model_with_prediction_blocks(tmp_path: Path) -> None:
    """eh_proj is one matrix there, and two with inputs of their own here: it has no adapter."""
    base = deepseek("debug", sequence_length=32, vocabulary_size=64)
    family, model = chosen_family(base)[0], replace(base, lora=LoRAConfig(rank=2, targets=("*.mixer.*",)))
    weights = random_weights(declared_by(model))
    config, tensors = adapter_files(model, family, weights, None)
    assert "base_model.model.model.layers.3.self_attn.o_proj.lora_A.weight" in tensors
    (tmp_path / CONFIG).write_text(json.dumps(config))
    save_file(tensors, tmp_path / TENSORS)
    for path, values in read_all(read_adapter(tmp_path, base, family.rows(base))).items():
        expected = weights.weights[path]
        if values.shape == expected.shape:
            np.testing.assert_array_equal(values, expected)
        else:  # Fused matrices have the ranks of both.
            assert values.shape[:-1] == expected.shape[:-1] or values.shape[-1] == expected.shape[-1]
    every = replace(base, lora=LoRAConfig(rank=2, targets=("*",)))
    with user_error():
        adapter_files(every, family, random_weights(declared_by(every)), None)
