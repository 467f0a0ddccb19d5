"""The largest steps of text generation, compiled for virtual GPU devices: the memory of each device."""

import time
from dataclasses import dataclass, replace
from typing import Any

from megajax.compiled import gpus as devices
from megajax.compiled.gpus import GIB, Cluster
from megajax.config.errors import UserError
from megajax.inference.loaded_model import CacheSize, without_weights
from megajax.inference.programs import Programs
from megajax.inference.step_arrays import Bucket
from megajax.kernels.attention.capability import Request
from megajax.kernels.paged.capability import PagedRequest, choose_paged
from megajax.layers.cache_spec import EIGHT_BIT
from megajax.layers.lora.add_adapters import AdapterSlots
from megajax.layers.quantization.config import QuantizationConfig
from megajax.mesh.context_parallelism import ContextSharding
from megajax.mesh.mesh import build_mesh
from megajax.mesh.rules import Plan
from megajax.models.facts import ChoosesKernels
from megajax.planning.cost.serving import CHUNK, ROWS, WEIGHT_WIDTHS, Serving
from megajax.planning.program.train_step import kernel_device, with_kernels
from megajax.precision.config import PrecisionConfig
from megajax.training.check_compiler_options import inference_options
from megajax.training.run_config import RunConfig

BLOCK, TILE = 16, 32
"""Default of inference.block, and the tokens of a tile of a prompt."""
LARGEST_POOL = 2**30
"""Maximum number of tokens in a replica's pool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """A compiled step; bytes of one device."""

    serving: Serving
    bucket: str
    """The rows and tokens of the step."""
    arguments: int
    """Weights, slots of adapters, cache and input."""
    temporary: int
    outputs: int
    """Outputs that reuse no argument's buffer: the cache does."""
    compile_seconds: float

    @property
    def peak_gib(self) -> float:
        return (self.arguments + self.temporary + self.outputs) / GIB

    @property
    def fits(self) -> bool:
        return self.peak_gib <= self.serving.run.usable_gib

    def to_dict(self) -> dict[str, Any]:
        """The plan as printed by --json."""
        serving = self.serving
        layout = {name: getattr(serving, name) for name in ("tensor", "expert", "weights", "cache")}
        names = ("arguments", "temporary", "outputs")
        sizes = {f"{name}_gib": getattr(self, name) / GIB for name in names} | {"peak_gib": self.peak_gib}
        return layout | {"step": self.bucket} | sizes | {"fits": self.fits, "compile_seconds": self.compile_seconds}


def compile_steps(cfg: RunConfig, cluster: Cluster, serving: Serving) -> list[StepPlan]:
    """Compile a step of decoding rows, and one with prompts as well, with the cache that the formulas have room for.

    Raises UserError for a model that the engine does not run.
    """
    programs, plans = serving_programs(cfg, cluster, serving), []
    for bucket in programs.buckets:
        started = time.monotonic()
        memory: Any = programs.lowered(bucket).compile(dict(programs.loaded.options)).memory_analysis()
        plans.append(
            StepPlan(
                serving=serving,
                bucket=str(bucket),
                arguments=memory.argument_size_in_bytes,
                temporary=memory.temp_size_in_bytes,
                outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
                compile_seconds=time.monotonic() - started,
            )
        )
    return plans


def serving_programs(cfg: RunConfig, cluster: Cluster, serving: Serving) -> Programs:
    """The largest steps of a layout with shapes in place of weights: of decoding rows, and with prompts."""
    model: Any = cfg.model
    parallel, compute, device = serving.run.parallel, serving.run.dtype, kernel_device(cluster.gpu)
    if model.memory_length():
        raise UserError("--compile: steps of encoder-decoder models are planned by formula alone")
    if isinstance(model, ChoosesKernels):
        sharding = ContextSharding.of(parallel, causal=model.ignores_later_positions())
        request = Request(dtype=compute, documents=False, sharding=sharding)
        model = with_kernels(model, model.kernel_choices(request, device))[0]
    if serving.weights in WEIGHT_WIDTHS:
        model = replace(model, quantization=QuantizationConfig(weights=serving.weights))  # ty: ignore[invalid-argument-type]
    mesh = build_mesh(parallel, devices.virtual_devices(cluster))
    slots = AdapterSlots(serving.adapters, serving.adapter_rank) if serving.adapters else None
    precision = PrecisionConfig(compute=compute)  # ty: ignore[invalid-argument-type]
    options = inference_options(cfg.xla, mesh.devices.flat[0])
    loaded = without_weights(model, Plan.of(parallel), mesh, precision, options, slots)
    tokens = ROWS * serving.context if serving.tokens is None else min(serving.tokens, LARGEST_POOL)
    tiled = all(leaf.per == "token" for leaf in model.cache_leaves(parallel.tensor))
    chunk = min(CHUNK, serving.context)
    tile = min(TILE, chunk) if tiled else chunk
    stored = PagedRequest(dtype=compute, stored=EIGHT_BIT.get(serving.cache, serving.cache))
    return Programs(
        loaded,
        CacheSize(blocks=tokens // BLOCK, block=BLOCK, slots=ROWS),
        buckets=[Bucket(ROWS), Bucket(ROWS, -(-chunk // tile), tile)],
        choosers=[],
        length=serving.context,
        dtype=serving.cache,
        kernel=choose_paged("auto", model.paged_requests(stored), device, "inference.kernel").kernel,
    )
