"""Tensors that a model does not read, such as the last layers of LLaVA's tower, are kept in an export."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.interop import conversion
from megajax.interop.huggingface.families.llava import TOWER
from megajax.interop.huggingface.folder import model_of, read_model
from megajax.interop.weights.fit import source_of
from megajax.interop.weights.foreign import declared_by
from megajax.interop.weights.name_mapping import resolved
from megajax.interop.weights.stored_model import EXTRA, Options, StoredModel
from megajax.job.start.model_files import ModelFiles
from megajax.tokenizers.byte import NullTokenizer
from megajax.tokenizers.config import NullTokenizerConfig

SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
CONFIG: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 39,
    "text_config": {"model_type": "llama", **SIZES, "num_hidden_layers": 1, "vocab_size": 40}, "torch_dtype": "float16",
    "vision_config": {
        "model_type": "clip_vision_model", **SIZES, "num_hidden_layers": 4, "image_size": 8, "patch_size": 4,
    },
    "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
}  # fmt: skip
NORM = [f"post_layernorm.{name}" for name in ("weight", "bias")]
POST = [f"vision_tower.{name}" for name in NORM]


def written(source: StoredModel, target: str, dtype: str | None = None) -> str:
    lines = conversion.write(source, target, conversion.options(dtype), lambda elements: None)
    conversion.verify(source, target, Options(), lambda elements: None)
    return "\n".join(lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA whose tower has four layers and a last norm; the model reads three layers."""
    folder, draw = tmp_path_factory.mktemp("theirs"), np.random.default_rng(0)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vision_feature_layer": -1}))
    save_file({}, folder / "model.safetensors")
    with pytest.raises(UserError, match="missing"):
        conversion.open_source(f"hf:{folder}")
    foreign = read_model(folder)
    table = resolved(foreign.rows, declared_by(foreign.model))
    shapes = {tensor.name: tensor.shape() for tensor in table} | dict.fromkeys(
        [f"{TOWER}.{name}" for name in NORM], (8,)
    )
    tensors = {name: draw.normal(size=shape).astype(np.float16) for name, shape in shapes.items()}
    # The names of transformers 5.
    save_file(
        {name.replace(TOWER, "vision_tower"): tensor for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    return folder


def assert_equal_folders(first: Path, second: Path) -> None:
    assert (first / "config.json").read_bytes() == (second / "config.json").read_bytes()
    theirs, ours = (load_file(path / "model.safetensors") for path in (first, second))
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert (tensor.dtype, tensor.tobytes()) == (ours[name].dtype, ours[name].tobytes()), name


def test_unread_layers_are_kept(folder: Path, tmp_path: Path) -> None:
    source = conversion.open_source(f"hf:{folder}")
    text = written(source, str(tmp_path / "run"))
    assert "for exports only: vision_tower.encoder.layers.3." in text and "left out" not in text
    run = conversion.open_source(str(tmp_path / "run"))
    assert not any("layers.3" in path or "post" in path for path in run.weights.shapes)
    written(run, f"hf:{tmp_path / 'back'}")
    assert_equal_folders(folder, tmp_path / "back")
    written(source, f"hf:{tmp_path / 'again'}")
    assert_equal_folders(folder, tmp_path / "again")
    written(run, f"hf:{tmp_path / 'wide'}", "float32")
    wide = load_file(tmp_path / "wide/model.safetensors")
    assert {tensor.dtype.name for tensor in wide.values()} == {"float32"} and POST[0] in wide


def test_damaged_extra_tensors_fail_the_verification(folder: Path, tmp_path: Path) -> None:
    source = conversion.open_source(f"hf:{folder}")
    written(source, f"hf:{tmp_path / 'back'}")
    path = tmp_path / "back/model.safetensors"
    tensors = load_file(path)
    tensors[POST[0]][0] += 1
    save_file(tensors, path)
    with user_error():
        conversion.verify(source, f"hf:{tmp_path / 'back'}", Options(), lambda elements: None)


def test_another_tower_has_no_extra_tensors(folder: Path, tmp_path: Path) -> None:
    """Positions of larger images: config.json describes exactly the layers that are written."""
    written(conversion.open_source(f"hf:{folder}"), str(tmp_path / "run"))
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    settings = {**CONFIG, "vision_config": CONFIG["vision_config"] | {"layer_norm_eps": 1e-3}}
    (changed / "config.json").write_text(json.dumps(settings))
    run, other = (conversion.open_source(name) for name in (str(tmp_path / "run"), f"hf:{changed}"))
    text = written(run.derived(other.model, run.weights), f"hf:{tmp_path / 'back'}")
    assert "vision_config" in text
    assert not [name for name in load_file(tmp_path / "back/model.safetensors") if name in POST]
    assert model_of(tmp_path / "back").vision == other.model.vision


def test_runs_pass_on_extra_tensors(folder: Path, tmp_path: Path) -> None:
    """A run that starts from the folder, and one that starts from a run: each writes its files at its start."""
    source = conversion.open_source(f"hf:{folder}")
    written(source, str(tmp_path / "run"))
    name, model = Path(f"hf:{folder}"), source.model
    of_folder = source_of(name, declared_by(model), set(), (), None).ancestor()
    of_run = source_of(tmp_path / "run", {}, set(), (), None).ancestor()
    for number, ancestor in enumerate((of_folder, of_run)):
        files = ModelFiles(
            source.config(tmp_path, []), NullTokenizer(NullTokenizerConfig(vocabulary_size=40)), ancestor
        )
        files.write(tmp_path / str(number))
        files.write(tmp_path / str(number))
        extra = load_file(tmp_path / f"{number}/tokenizer" / EXTRA / "model.safetensors")
        theirs = load_file(folder / "model.safetensors")
        assert len(extra) == 18 and all(theirs[name].tobytes() == tensor.tobytes() for name, tensor in extra.items())
