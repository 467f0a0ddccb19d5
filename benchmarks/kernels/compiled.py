"""Kernels and temporary memory of single layers, compiled for virtual GPUs; nothing is run."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.virtual_gpus import compile_for, kernels, temporary_mib
from megajax.kernels.grouped.capability import GroupedKernel, GroupedSizes
from megajax.kernels.grouped.matmul import capable, code_products, grouped_matmul
from megajax.kernels.ssm.gated_delta import DeltaRule, gated_delta
from megajax.layers.delta.config import GatedDeltaNetConfig, KimiDeltaConfig
from megajax.mesh.layout import exact
from megajax.planning.compiled import devices as devices
from megajax.planning.compiled import hlo
from megajax.planning.compiled.audit import audit
from megajax.planning.compiled.devices import GPUS, Cluster
from megajax.planning.compiled.instruction_times import InstructionTimes
from megajax.planning.compiled.timeline import timeline
from megajax.precision.config import MatmulConfig
from megajax.precision.fp8 import capability_of
from megajax.precision.matmul import Recipe, RoundedMatmul
from megajax.precision.recipes import FIRST_WITH_BLOCKS, RECIPES, recipe_of
from megajax.processes.xla_options import FP8, GPU

DELTA_LAYER = {"length": 8192, "heads": 32, "groups": 16, "keys": 128, "size": 128}
"""Qwen3-Next's gated delta net."""
MATMULS = ((4096, 14336), (14336, 4096), (4096, 6144), (4096, 4096))
"""In and out of the weights of an 8B model, for recipes of precision.matmul."""
EXPERTS = GroupedSizes(65536, 16, 2048, 768)
"""Qwen3-30B-A3B, 65,536 tokens on 8 devices."""


def compiled_kernels(
    *, parts: tuple[str, ...] = ("delta_rule", "recipes"), quick: bool = False
) -> Iterator[dict[str, Any]]:
    """Kernels and temporary memory of layers, compiled for virtual GPUs. Needs the extra aot; minutes, no GPU.

    delta_rule: memory of a layer of Qwen3-Next and of Kimi Linear, bytes and times, operations by formula. recipes: a
    matmul of a layer and its gradients by each recipe and in bfloat16, and one of Qwen3's experts. --quick: the first
    size of each only.
    """
    figures: dict[str, Any] = {}
    for part in parts:
        figures[part] = []
        for row in ROWS_OF[part](quick):
            print(row, flush=True)
            figures[part].append(row)
            yield figures


def delta_shapes(length: int, heads: int, groups: int, keys: int, size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the inputs of one row of a gated delta net."""
    key, head = (1, length, groups, keys), (1, length, heads)
    return {"q": key, "k": key, "v": (*head, size), "g": head, "beta": head}


def delta_gradients(method: Callable[[DeltaRule], tuple[jax.Array, jax.Array]]) -> Callable:
    """Gradients of the sum of squares of the outputs with respect to the inputs."""
    return jax.grad(lambda inputs: jnp.sum(jnp.square(method(DeltaRule(**inputs))[0].astype(jnp.float32))))


def delta_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """One for each kind of decays and chunk size, with bytes moved and seconds by the cost model's constants.

    A compiler counts the loop over chunks once: operations are those of the formula.
    """
    for by_channel, chunk in ((False, 64), (True, 64), (False, 32), (False, 128))[: 1 if quick else None]:
        heads, groups, keys = (DELTA_LAYER[name] for name in ("heads", "groups", "keys"))
        shapes = delta_shapes(**DELTA_LAYER | {"groups": heads if by_channel else groups})
        shapes |= {"g": (*shapes["g"], keys)} if by_channel else {}
        like = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32 if name in ("g", "beta") else jnp.bfloat16)
            for name, shape in shapes.items()
        }
        mixer = KimiDeltaConfig(heads=heads) if by_channel else GatedDeltaNetConfig(heads=heads, key_heads=groups)
        step = delta_gradients(partial(gated_delta, chunk=chunk))
        program = compile_for("h100", step, like, options=GPU)
        contents = hlo.CompiledProgram.read(program.as_text())
        audited, costs = audit(program.as_text()), InstructionTimes(contents, {}, GPUS["h100"], 1)
        yield {
            "decays": "by channel" if by_channel else "by head",
            "chunk": chunk,
            "temporary_mib": temporary_mib(program),
            "moved_gib": round((audited.by_class()["total"] - audited.workspace()) / 2**30, 2),
            "milliseconds": round(1e3 * timeline(costs).seconds, 2),
            "teraoperations_by_formula": round(
                3 * 2 * DELTA_LAYER["length"] * replace(mixer, chunk=chunk).kernel_work(0, chunk).multiply_adds / 1e12,
                3,
            ),
        }


def recipe_rows(quick: bool, tokens: int = 8192) -> Iterator[dict[str, Any]]:
    """One for each GPU, shape of weights and recipe: forward, and both gradients from a gradient of the result.

    Then those of the experts of a device. Mosaic compiles all kernels of a process for the architecture of the first
    one, so each GPU has a process.
    """
    for gpu in ("h100", "b200")[: 1 if quick else None]:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            yield from pool.submit(_recipe_rows, gpu, quick, tokens).result()


def _recipe_rows(gpu: str, quick: bool, tokens: int) -> list[dict[str, Any]]:
    devices.prepare()
    rows = []
    device = devices.virtual_devices(Cluster(GPUS[gpu], 1, 1))[0]
    for inner, outer in MATMULS[: 1 if quick else 2]:
        like = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((tokens, inner), (inner, outer), (tokens, outer))]
        for cfg in (None, *(recipe() for recipe in RECIPES)):
            multiply = exact if cfg is None else RoundedMatmul(_recipe(cfg, device))

            def step(x: Any, w: Any, dy: Any, multiply: Any = multiply) -> Any:
                y, pull = jax.vjp(partial(multiply, "bd,df->bf"), x, w)
                return y, *pull(dy)

            rows.append({"gpu": gpu, "in": inner, "out": outer} | _rounding(gpu, cfg, step, like))
    shapes = (EXPERTS.rows, EXPERTS.inner), EXPERTS[1:], (EXPERTS.rows, EXPERTS.outer)
    like = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    like.append(jax.ShapeDtypeStruct((EXPERTS.groups,), jnp.int32))
    for cfg in (None, *(recipe() for recipe in RECIPES)):
        rows.append({"gpu": gpu, "experts": EXPERTS._asdict()} | _rounding(gpu, cfg, _of_experts(cfg, device), like))
    return rows


def _recipe(cfg: MatmulConfig, device: jax.Device) -> Recipe:
    return recipe_of(cfg, device, 1.0, code_products(capability_of(device)))


def _of_experts(cfg: MatmulConfig | None, device: jax.Device) -> Callable:
    """The products of the experts' first matrix by a recipe, by the kernel of the device."""
    kernel: GroupedKernel = "mosaic" if capability_of(device) < FIRST_WITH_BLOCKS else "reference"
    kernels = partial(capable, kernel, EXPERTS)

    def step(x: Any, w: Any, dy: Any, sizes: Any) -> Any:
        def multiply(x: Any, w: Any) -> Any:
            if cfg is None:
                return grouped_matmul(x, w, sizes, kernel)
            matmul = RoundedMatmul(_recipe(cfg, device))
            expected = jnp.ones((EXPERTS.groups, 3)) if matmul.recipe.beside() else None
            return matmul.grouped(x, w, sizes, kernels, expected)

        y, pull = jax.vjp(multiply, x, w)
        return y, *pull(dy)

    return step


def _rounding(gpu: str, cfg: MatmulConfig | None, step: Callable, like: list[Any]) -> dict[str, Any]:
    """Kernels of a compiled program, and what rounding reads and writes."""
    program = compile_for(gpu, step, *like, options=(*GPU, *FP8))
    casts = _casts(program.as_text())
    return {
        "recipe": "bfloat16" if cfg is None else type(cfg).__name__.removesuffix("Config"),
        "kernels": kernels(program),
        "casts": len(casts),
        "cast_mib": round(sum(casts) / 2**20, 1),
        "temporary_mib": temporary_mib(program),
    }


def _casts(text: str) -> list[int]:
    """Bytes read and written by each kernel that is no matmul."""
    program = hlo.CompiledProgram.read(text)
    entry = program.computations[program.entry]
    fused = (op for op in entry.values() if op.opcode in ("fusion", "copy", "transpose", "convert", "reduce"))
    found = []
    for op in fused:
        if not program.matmuls(op):
            found.append(hlo.size(op.shape) + sum(hlo.size(entry[name].shape) for name in op.operands if name in entry))
    return found


ROWS_OF: dict[str, Callable[[bool], Iterator[dict[str, Any]]]] = {"delta_rule": delta_rows, "recipes": recipe_rows}
