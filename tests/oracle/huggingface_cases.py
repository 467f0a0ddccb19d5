"""Checkpoints of transformers: opened by the package, as our arrays, and written back."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from megatron_cases import FOLDER, unsupported
from safetensors.numpy import load_file

from megajax.config.errors import UserError
from megajax.inference.config import GenerationConfig, InferenceParallelConfig
from megajax.inference.sampling_settings import Sampling
from megajax.inference.worker import complete
from megajax.interop import conversion
from megajax.interop.huggingface.family import layers_of
from megajax.interop.huggingface.registry import families, lost_settings
from megajax.interop.loading import load, start_engine
from megajax.interop.weights.foreign import declared_by, demand_fit
from megajax.interop.weights.formats import open_stored
from megajax.interop.weights.origin import generation_config
from megajax.interop.weights.stored_model import StoredModel
from megajax.layers.position.config import LongRopeScalingConfig, RopeConfig

TOLERANCE = 1e-5

type Arrays = dict[str, np.ndarray]


ENCODERS = {"bert", "megatron-bert", "t5", "mt5", "vit"}
"""Kinds of models that are no decoders."""


def folders(accepted: Callable[[str], bool], root: Path = FOLDER) -> list[str]:
    """Names of the cases whose `model_type` is accepted."""
    types = {path.parent.name: json.loads(path.read_text())["model_type"] for path in root.glob("hf/*/config.json")}
    return [case for case, kind in types.items() if accepted(kind)]


def opened(folder: Path) -> StoredModel:
    """The model of a folder, whose config.json and tensors survive a round trip."""
    try:
        model = open_stored(f"hf:{folder}")
        demand_fit(model.foreign.tensors, model.foreign.table, model.foreign.ignored)
    except UserError as error:
        if "MegaJAX lacks" in str(error) or "is not supported" in str(error):
            unsupported(str(error))
        raise
    assert lost_settings(model.model, families()[model.origin.family]) == []
    weights = whole(model, np.asarray)
    for tensor in model.foreign.table:
        back, there = (
            tensor.from_weights([weights[p.path][p.index] for p in tensor.pieces]),
            model.foreign.tensors.read(tensor.name),
        )
        assert (back.dtype, back.shape, back.tobytes()) == (there.dtype, there.shape, there.tobytes()), tensor.name
    return model


def whole(model: StoredModel, change: Callable[[np.ndarray], np.ndarray]) -> Arrays:
    """Every weight and observation by path."""
    boxes = {path: tuple(slice(0, n) for n in shape) for path, shape in model.weights.shapes.items()}
    return {path: change(model.weights.read(path, box)) for path, box in boxes.items()}


def arrays(model: StoredModel) -> tuple[Arrays, Arrays]:
    """Weights, and what the table has of observations, in float32."""
    declared, every = declared_by(model.model), whole(model, lambda array: array.astype(np.float32))
    observed = {path for path in every if declared[path].updater is not None}
    kept = {path: array for path, array in every.items() if path in observed}
    return {path: array for path, array in every.items() if path not in observed}, kept


def stored(folder: Path) -> dict[str, Any]:
    """Inputs and outputs of a case."""
    with np.load(folder / "io.npz") as file:
        return dict(file)


NEW = 8
"""Tokens of a stored answer."""


def suited(model: Any, length: int) -> Any:
    """The model for rows of this length: longrope has other factors for texts within the original length."""
    ropes = [getattr(block.mixer, "rope", None) for block in layers_of(model)]
    scalings = [rope.scaling for rope in ropes if isinstance(rope, RopeConfig)]
    originals = [scaling.original for scaling in scalings if isinstance(scaling, LongRopeScalingConfig)]
    return replace(model, sequence_length=min(originals)) if originals and length <= min(originals) else model


def check_greedy_tokens(folder: Path) -> None:
    """The engine answers prompts in chunks with the stored tokens."""
    origin, greedy = f"hf:{folder}", stored(folder)["greedy"].tolist()
    config: GenerationConfig = generation_config(origin, GenerationConfig).base
    config = replace(config, model=suited(config.model, len(greedy[0])))
    settings = replace(config.inference, compute="float32", rows=2, chunk=6, block=4, cache_tokens=64)
    try:
        loaded = load(replace(config, inference=settings, parallel=InferenceParallelConfig(data=1)), origin)
    except UserError as error:
        if "cannot generate text" in str(error):
            unsupported(str(error))
        raise
    sampling = Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    engine = start_engine(loaded, queue=len(greedy))
    answers = complete(engine, [(tuple(row[:-NEW]), sampling) for row in greedy])
    assert [list(answer.tokens) for (answer,) in answers] == [row[-NEW:] for row in greedy]


def check_round_trip(folder: Path, temporary: Path) -> None:
    """`megajax.convert` to a run and back keeps every byte and every setting."""
    run, back = temporary / f"{folder.name}_run", temporary / f"{folder.name}_back"
    conversion.write(conversion.open_source(f"hf:{folder}"), str(run), conversion.Options(), lambda elements: None)
    conversion.write(conversion.open_source(str(run)), f"hf:{back}", conversion.Options(), lambda elements: None)
    demand_same_folder(folder, back)


def demand_same_folder(folder: Path, copy: Path) -> None:
    """All tensors and settings of a folder."""
    expected, actual = (load_file(path / "model.safetensors") for path in (folder, copy))
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        other = actual[name]
        assert (tensor.dtype, tensor.shape, tensor.tobytes()) == (other.dtype, other.shape, other.tobytes()), name
    settings, others = (json.loads((path / "config.json").read_text()) for path in (folder, copy))
    assert settings == others


def pixels_last(images: np.ndarray) -> np.ndarray:
    """[B, 3, H, W] -> [B, H, W, 3]."""
    return np.ascontiguousarray(images.transpose(0, 2, 3, 1), np.float32)
