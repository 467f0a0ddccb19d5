"""Classifiers of texts of transformers (ForSequenceClassification): read, scored as there, and written again."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from hugging_face_folders import LLAMA, llama_shapes, read_all, write
from user_errors import user_error

from megajax.config import load
from megajax.interop.huggingface.format import chosen_family
from megajax.interop.weights.formats import open_stored
from megajax.layers.param import bind
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.classifier.config import ClassHeadConfig, RegressionHeadConfig, scoring

TOKENS = np.array([[3, 1, 4, 15, 9, 2, 6], [5, 35, 8, 9, 7, 0, 0]], np.int32)
LENGTHS = (7, 5)
SCORES: dict[str, list[list[float]]] = {
    "Llama": [[2.4049835], [-0.1818035]],
    "Qwen2": [[5.1293588], [0.0332686]],
    "Qwen3": [[-2.7651358], [-6.0806184]],
    "Mistral": [[2.4049835, 0.9321638, 1.2389684], [-0.1818035, 0.4518958, 1.8057307]],
}
"""Those of transformers 5.24 for the folders of `make`, each text alone."""


def make(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The folder of a class of transformers; returns its tensors."""
    outputs = 3 if name == "Mistral" else 1
    names = {str(number): f"LABEL_{number}" for number in range(outputs)}
    config: dict[str, Any] = {
        **LLAMA,
        **{"architectures": [f"{name}ForSequenceClassification"], "model_type": name.lower(), "pad_token_id": 0},
        **{"id2label": names, "torch_dtype": "float32", "sliding_window": None},
    }
    shapes = llama_shapes(config)
    del shapes["lm_head.weight"]
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}.self_attn"
        if name == "Qwen2":
            shapes |= {f"{block}.{part}_proj.bias": shapes[f"{block}.{part}_proj.weight"][:1] for part in "qkv"}
        if name == "Qwen3":
            shapes |= {f"{block}.{part}_norm.weight": (config["head_dim"],) for part in "qk"}
    return write(folder, config, shapes | {"score.weight": (outputs, config["hidden_size"])}, np.float32)


def scores(folder: Path) -> np.ndarray:
    """[texts, outputs], by the program of one device."""
    stored = open_stored(f"hf:{folder}")
    stored.demand_fit()
    abstract = nnx.eval_shape(lambda: stored.model.build(Layout(Plan.of(ParallelConfig()))))
    segments = (np.arange(TOKENS.shape[1]) < np.array(LENGTHS)[:, None]).astype(np.int32)
    run = jax.jit(lambda weights: bind(abstract, weights)(TOKENS, segment_ids=segments))
    return np.asarray(run(read_all(stored.weights))).reshape(len(TOKENS), -1)


@pytest.mark.parametrize(
    "name", ["Llama", *(pytest.param(other, marks=pytest.mark.slow) for other in ("Qwen2", "Qwen3", "Mistral"))]
)
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    make(tmp_path / "hf", name)
    head = open_stored(f"hf:{tmp_path / 'hf'}").model.head
    assert isinstance(head, ClassHeadConfig if name == "Mistral" else RegressionHeadConfig) and not head.bias
    np.testing.assert_allclose(scores(tmp_path / "hf"), SCORES[name], rtol=1e-5, atol=1e-5)


def test_reward_models_are_classifiers_of_transformers() -> None:
    """The choice between two answers becomes the score of one. A bias has no place there."""
    model = load("dpo.py:reward_llama3_8b_debug", devices=1).model
    family = chosen_family(scoring(model))[0]
    config = family.config_json(scoring(model))
    assert (family.name, config["architectures"]) == ("llama", ["LlamaForSequenceClassification"])
    assert config["id2label"] == {"0": "LABEL_0"}
    biased = load("dpo.py:reward_llama3_8b_debug", "model.head.bias=true", devices=1).model
    with user_error():
        chosen_family(scoring(biased))
