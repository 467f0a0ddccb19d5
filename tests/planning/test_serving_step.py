"""Compiled steps of a server: their shapes are those of loaded weights, and their memory that of the formulas."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from megajax.checkpoint.weights.foreign import declared_by
from megajax.compiled.gpus import GIB, GPUS, Cluster
from megajax.config import load
from megajax.config.errors import UserError
from megajax.inference.loaded_model import load_weights, without_weights
from megajax.layers.lora.add_adapters import AdapterSlots
from megajax.layers.quantization.config import QuantizationConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.mesh.rules import Plan
from megajax.planning.cost.description import describe
from megajax.planning.cost.serving import servings
from megajax.planning.program.serving_step import compile_steps
from megajax.precision.config import PrecisionConfig


class Zeros:
    """Weights of a model."""

    where = "zeros"

    def __init__(self, model: Any):
        self._shapes = {path: spec.shape for path, spec in declared_by(model).items() if spec.updater is None}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read(self, path: str, box: Any) -> np.ndarray:
        return np.zeros([side.stop - side.start for side in box], np.float32)


@pytest.mark.parametrize(
    ("config", "sizes", "quantized"),
    [
        ("llama3.py:debug", {"tensor": 4}, False),
        ("mixtral.py:mixtral_8x7b_debug", {"expert": 4, "tensor": 2}, False),
        ("mixtral.py:mixtral_8x7b_debug", {"expert": 4}, True),
        ("deepseek.py:deepseek_v3_debug", {"expert": 2, "tensor": 2}, False),
    ],
    ids=str,
)
def test_shapes_are_those_of_loaded_weights(config: str, sizes: dict[str, int], quantized: bool) -> None:
    """With copied heads, slots of adapters, and quantized matrices."""
    model: Any = load(config).model
    if quantized:
        model = replace(model, quantization=QuantizationConfig(weights="int8"))
    parallel = ParallelConfig(**{"data": 1, "data_sharding": "replicate", **sizes})
    mesh = build_mesh(parallel, jax.devices()[: int(np.prod([*sizes.values()]))])
    precision, slots = PrecisionConfig(compute="bfloat16"), AdapterSlots(2, 4)
    loaded = load_weights(model, Zeros(model), Plan.of(parallel), mesh, precision, {}, slots)
    shapes = without_weights(model, Plan.of(parallel), mesh, precision, {}, slots).weights
    assert shapes.keys() == loaded.weights.keys()
    for path, weight in loaded.weights.items():
        like = shapes[path]
        assert (like.shape, like.dtype) == (weight.shape, weight.dtype), path
        assert like.sharding.is_equivalent_to(weight.sharding, weight.ndim), path


@pytest.mark.slow
@pytest.mark.aot
def test_compiled_steps_have_the_memory_of_the_formulas() -> None:
    """Of Mixtral on 16 virtual H100s: arguments within 1 %, and temporaries at least the buffers of experts."""
    cfg, cluster = load("mixtral.py:mixtral_8x7b"), Cluster(GPUS["h100"], 16, 8)
    plans = servings(describe(cfg, GPUS["h100"], 16), 16, 4096, adapters=2)
    plan = next(one for one in plans if (one.tensor, one.expert, *one.dtypes) == (2, 8, "bfloat16", "bfloat16"))
    decoding, prompts = compile_steps(cfg, cluster, plan)
    assert plan.tokens is not None
    held = plan.held_bytes + plan.tokens * plan.token_bytes
    for step in (decoding, prompts):
        assert step.fits and step.arguments == pytest.approx(held, rel=0.01)
    assert decoding.temporary < prompts.temporary
    assert prompts.temporary == pytest.approx(plan.buffer_bytes, rel=0.3)
    assert prompts.peak_gib * GIB == prompts.arguments + prompts.temporary + prompts.outputs


def test_encoders_are_planned_by_formula_alone() -> None:
    cfg = load("t5.py:debug")
    plan = servings(describe(cfg, GPUS["h100"], 1), 1, 64)[0]
    with pytest.raises(UserError, match="planned by formula alone"):
        compile_steps(cfg, Cluster(GPUS["h100"], 1, 8), plan)
