"""BERT of transformers as an encoder: embeddings from the states that give its logits, with and without heads."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from huggingface_cases import TOLERANCE, arrays, opened, stored
from megatron_run import OneDevice
from safetensors.numpy import load_file, save_file

from megajax.inference.config import GenerationConfig, InferenceParallelConfig
from megajax.inference.request import Output, Request
from megajax.inference.sampling_settings import Sampling
from megajax.interop.loading import load, start_engine
from megajax.interop.weights.origin import folder_pooling, generation_config
from megajax.layers.param import bind


def without_heads(folder: Path, target: Path) -> Path:
    """Stores the model as sentence-transformers does: of the class BertModel, whose tensors have no prefix."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    kept = {name.removeprefix("bert."): tensor for name, tensor in tensors.items() if name.startswith("bert.")}
    save_file(kept, target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    (target / "1_Pooling").mkdir()
    modes = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (target / "1_Pooling/config.json").write_text(json.dumps(modes))
    return target


@pytest.mark.parametrize("heads", [True, False])
def test_embeddings(heads: bool, oracle_dir: Path, tmp_path: Path) -> None:
    folder = oracle_dir / "hf" / "bert"
    opening, io = opened(folder), stored(folder)
    counts = io["attention_mask"].sum(1)
    texts = [ids[:count].tolist() for ids, count in zip(io["input_ids"], counts, strict=True)]
    rows = {"tokens": io["input_ids"], "segment_ids": io["attention_mask"], "token_types": io["token_type_ids"]}
    model, (params, _) = OneDevice(opening.model), arrays(opening)
    bert = bind(model.abstract, params)

    def states(rows: dict[str, np.ndarray]) -> np.ndarray:
        batch = {name: leaf.astype(np.int32) for name, leaf in rows.items()}
        ctx = bert.context(batch)
        return np.asarray(bert.final_norm(bert.stack(bert.enter(bert.embed(batch), ctx), ctx)))

    # The states are those of transformers: they give its logits.
    logits = np.asarray(bert.logits(bert.masked_states(states(rows))))
    present = io["attention_mask"].astype(bool)
    np.testing.assert_allclose(logits[present], io["prediction_logits"][present], atol=TOLERANCE)

    folder = folder if heads else without_heads(folder, tmp_path / "bert")
    origin = f"hf:{folder}"
    assert folder_pooling(folder) == (None if heads else "first")
    config: GenerationConfig = generation_config(origin, GenerationConfig).base
    settings = replace(config.inference, compute="float32", rows=2)
    engine = start_engine(
        load(replace(config, inference=settings, parallel=InferenceParallelConfig(data=1)), origin), queue=8
    )
    outputs = list[Output]()
    for number, text in enumerate(texts):
        for pooling in ("first", "mean"):
            engine.submit(
                Request(
                    identifier=f"{number} {pooling}",
                    prompt=tuple(text),
                    sampling=Sampling(max_tokens=0),
                    pooling=pooling,
                    deliver=outputs.append,
                )
            )
    while engine.step():
        pass
    plain = states(rows | {"token_types": np.zeros_like(rows["token_types"])})
    for place, output in enumerate(outputs):
        of_text = plain[place // 2, : counts[place // 2]]
        vector = of_text.mean(0) if place % 2 else of_text[0]
        np.testing.assert_allclose(output.embedding, vector / np.linalg.norm(vector), atol=1e-5)
