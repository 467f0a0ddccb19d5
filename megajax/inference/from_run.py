"""An engine with the weights of a training run, on the mesh of the run."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from megajax.batch import Params
from megajax.config.errors import UserError
from megajax.inference.assembly import make_engine
from megajax.inference.config import InferenceConfig
from megajax.inference.engine import Engine
from megajax.inference.loading import model_on_mesh
from megajax.mesh.config import ParallelConfig
from megajax.models.protocol import ModelConfig
from megajax.precision.config import PrecisionConfig
from megajax.tokenizers.base import Tokenizer


class RunSettings(Protocol):
    """The settings of a run that an engine depends on."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def precision(self) -> PrecisionConfig: ...


def engine_refusal(model: ModelConfig, mesh: Mesh) -> str | None:
    """Why no engine can use the weights of a model on this mesh; None if one can."""
    if jax.process_count() > 1:
        return f"the run has {jax.process_count()} processes, an engine has one"
    if axes := [f"{name}={mesh.shape[name]}" for name in ("pipeline", "expert", "context") if mesh.shape[name] > 1]:
        return f"the mesh has {' and '.join(axes)}, an engine shards over data and tensor only"
    try:
        model.cache_leaves(mesh.shape["tensor"])
    except UserError as error:
        return str(error)
    return "encoder-decoder models continue no text" if model.memory_length() else None


def engine_of_run(
    cfg: RunSettings,
    arrays: Params,
    mesh: Mesh,
    options: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    rows: int,
    cache_tokens: int | None,
    end_tokens: Collection[int],
    length: int,
    queue: int,
) -> Engine:
    """An engine for a mesh without `engine_refusal`.

    arrays: weights and observations of a training state; options: compiler options; rows, cache_tokens: as in
    `InferenceConfig`; the others: as in `make_engine`.
    """
    parallel = ParallelConfig(tensor=mesh.shape["tensor"], data=mesh.shape["data"], data_sharding="replicate")
    model = model_on_mesh(cfg.model, arrays, parallel, mesh, cfg.precision, options)
    config = InferenceConfig(rows=rows, compute=cfg.precision.compute, cache_tokens=cache_tokens)
    return make_engine(model, config, tokenizer, end_tokens=end_tokens, length=length, queue=queue)
