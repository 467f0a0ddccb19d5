"""Kernels and temporary memory of single layers, compiled for virtual GPUs; nothing is run."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.kernels.cases import layer_settings, uneven
from benchmarks.virtual_gpus import compile_for, kernels, temporary_mib
from megajax.compiled import gpus as devices
from megajax.compiled import hlo
from megajax.compiled.audit import audit
from megajax.compiled.costs import Costs
from megajax.compiled.gpus import GPUS, Cluster
from megajax.compiled.timeline import timeline
from megajax.kernels.attention.capability import Kernel
from megajax.kernels.grouped import mosaic as grouped_mosaic
from megajax.kernels.grouped.capability import GroupedKernel, GroupedSizes
from megajax.kernels.grouped.matmul import capable, code_products, grouped_matmul
from megajax.kernels.grouped.tiles import tiles
from megajax.kernels.ssm.gated_delta import DeltaRule, gated_delta
from megajax.kernels.ssm.ssd import Scan, ssd
from megajax.layers.attention.config import AttentionConfig, CrossAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.context import Context
from megajax.layers.delta.config import GatedDeltaNetConfig, KimiDeltaConfig
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.param import bind, specs
from megajax.mesh.layout import exact
from megajax.mesh.xla_options import FP8, GPU
from megajax.precision.config import MatmulConfig
from megajax.precision.fp8 import capability_of
from megajax.precision.matmul import Recipe, RoundedMatmul
from megajax.precision.recipes import FIRST_WITH_BLOCKS, RECIPES, recipe_of

ROWS, HIDDEN, HEADS = 4, 1024, 16
"""Of the layers of BERT-large and T5."""
LAYER = {"length": 8192, "heads": 80, "size": 64, "groups": 1, "states": 128}
"""Mamba-2 2.7B's layer."""
DELTA_LAYER = {"length": 8192, "heads": 32, "groups": 16, "keys": 128, "size": 128}
"""Qwen3-Next's gated delta net."""
MATMULS = ((4096, 14336), (14336, 4096), (4096, 6144), (4096, 4096))
"""In and out of the weights of an 8B model, for recipes of precision.matmul."""


def compiled_kernels(
    *, parts: tuple[str, ...] = ("attention", "experts", "state_space", "delta_rule", "recipes"), quick: bool = False
) -> Iterator[dict[str, Any]]:
    """Kernels and temporary memory of layers, compiled for virtual GPUs. Needs the extra aot; five minutes, no GPU.

    attention: the gradient of one BERT-large layer, and of one T5 decoder block of the same width with cross-attention
    to equally many tokens, 4 padded rows in bfloat16; by cuDNN, by Pallas, and by the reference, whose scores take
    4 * 16 * S * T float32 numbers per attention. experts: grouped matmuls of Qwen3-30B-A3B, DeepSeek-V3 and Mixtral
    8x7B, forward and both gradients; operations are relative to the model's, because kernels compute whole blocks. Rows
    of experts are drawn with equal probability, and with the last expert three times as likely as the first.
    state_space: a layer of Mamba-2 2.7B with several chunk sizes; operations relative to the minimum. delta_rule:
    memory of a layer of Qwen3-Next, bytes and times, operations by formula. recipes: a matmul of a
    layer and its gradients by each recipe and in bfloat16, and one of Qwen3's experts. --quick: the first size of each
    only.
    """
    figures: dict[str, Any] = {}
    for part in parts:
        figures[part] = []
        for row in ROWS_OF[part](quick):
            print(row, flush=True)
            figures[part].append(row)
            yield figures


def layers(kernel: Kernel) -> dict[str, BlockConfig]:
    """Name -> block."""
    common: dict[str, Any] = {"mlp": DenseMLPConfig(ffn=4 * HIDDEN), "norm": LayerNormConfig()}
    mixer = AttentionConfig(heads=HEADS, bias=True, kernel=kernel)
    cross = CrossAttentionConfig(heads=HEADS, bias=True, kernel=kernel)
    return {
        "bert": BlockConfig(mixer=replace(mixer, causal=False), **common),
        "t5": BlockConfig(mixer=mixer, cross=cross, **common),
    }


def attention_program(block: BlockConfig, length: int) -> Any:
    """The compiled gradient of a block."""
    module = nnx.eval_shape(lambda: block.build(layer_settings(HIDDEN, padded=True)))
    weights = {path: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16) for path, spec in specs(module).items()}
    rows = jax.ShapeDtypeStruct((ROWS, length, HIDDEN), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((ROWS, length), jnp.int32)

    def total(weights: Any, x: jax.Array, memory: jax.Array, segments: jax.Array, others: jax.Array) -> jax.Array:
        index = jnp.arange(length)
        positions = jnp.broadcast_to(index, segments.shape)
        ctx = Context(positions, index, segments, memory=memory, memory_segments=others)
        return jnp.sum(bind(module, weights)(x, ctx).astype(jnp.float32))

    return compile_for("h100", jax.grad(total, (0, 1, 2)), weights, rows, rows, ids, ids)


def attention_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """One for each length, kernel and layer."""
    choices: tuple[Kernel, ...] = ("cudnn", "pallas", "reference")
    for length in (512,) if quick else (512, 2048):
        for kernel in choices:
            for name, block in layers(kernel).items():
                program = attention_program(block, length)
                calls = {target: n for target, n in kernels(program).items() if "fmha" in target or "triton" in target}
                row = {"layer": name, "tokens": length, "kernel": kernel}
                yield row | {"temporary_mib": round(temporary_mib(program), 1), "calls": calls}


class Experts(NamedTuple):
    """The experts of a layer on one device."""

    model: str
    number: int
    rows: int
    """Tokens that they receive."""
    hidden: int
    ffn: int


EXPERTS = (
    Experts("Qwen3-30B-A3B, 8192 tokens", 128, 65536, 2048, 768),
    Experts("Qwen3-30B-A3B, 65,536 tokens on 8 devices", 16, 65536, 2048, 768),
    Experts("DeepSeek-V3, 32,768 tokens on 8 devices", 32, 32768, 7168, 2048),
    Experts("Mixtral 8x7B, 8192 tokens", 8, 16384, 4096, 14336),
)


def operations_over_model(sizes: np.ndarray, inner: int, outer: int) -> float:
    """Multiply-adds of y, dx and dw in whole blocks, relative to those of the rows."""
    rows, groups, align = int(sizes.sum()), sizes.size, grouped_mosaic.ALIGN

    def padded(size: int, block: int) -> int:
        return -(-size // block) * block

    def of_rows(outer: int, inner: int) -> int:
        blocks = grouped_mosaic.blocks_for(outer, grouped_mosaic.tile_rows(rows, groups))
        live = int(tiles(jnp.asarray(sizes, jnp.int32), rows, blocks.rows, align).live)
        return live * blocks.rows * padded(outer, blocks.columns) * inner

    blocks = grouped_mosaic.blocks_for(outer)
    before = (sizes.cumsum() - sizes) % align
    summed = np.where(sizes > 0, -(-(sizes + before) // blocks.summed), 0).sum() * blocks.summed
    of_matrices = int(summed) * padded(inner, blocks.rows) * padded(outer, blocks.columns)
    return (of_rows(outer, inner) + of_rows(inner, outer) + of_matrices) / (3 * rows * inner * outer)


def grouped_program(layer: Experts, inner: int, outer: int) -> Any:
    """y, dx and dw of one matrix of all experts."""

    def all_three(x: jax.Array, w: jax.Array, dy: jax.Array, sizes: jax.Array) -> tuple:
        y, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, "mosaic"), x, w)
        return y, *pullback(dy)

    shapes = (layer.rows, inner), (layer.number, inner, outer), (layer.rows, outer)
    like = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return compile_for("h100", all_three, *like, jax.ShapeDtypeStruct((layer.number,), jnp.int32))


def expert_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """One for each layer, for an H100. Gate and up matrices have the first shape, down matrices the second."""
    for layer in EXPERTS[: 1 if quick else None]:
        shapes = (layer.hidden, layer.ffn), (layer.ffn, layer.hidden)
        programs = [grouped_program(layer, *shape) for shape in shapes]
        over_model = {}
        for name, largest in (("even", 1.0), ("uneven", 3.0)):
            sizes = uneven(layer.rows, layer.number, largest)
            up, down = (operations_over_model(sizes, *shape) for shape in shapes)
            over_model[name] = round((2 * up + down) / 3, 3)
        yield layer._asdict() | {
            "gpu": "h100",
            "kernel": "mosaic",
            "calls": [kernels(program) for program in programs],
            "temporary_mib": [temporary_mib(program) for program in programs],
            "operations_over_model": over_model,
        }


def scan_shapes(length: int, heads: int, size: int, groups: int, states: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the inputs of one row of a state-space layer."""
    state = (1, length, groups, states)
    return {"x": (1, length, heads, size), "dt": (1, length, heads), "b": state, "c": state}


def scan_gradients(method: Callable[[Scan], tuple[jax.Array, jax.Array]]) -> Callable:
    """Gradients of the sum of squares of the outputs with respect to the inputs."""

    def loss(inputs: dict[str, jax.Array]) -> jax.Array:
        heads = inputs["x"].shape[2]
        scan = Scan(**inputs, a=-jnp.linspace(1, 16, heads), skip=jnp.ones(heads))
        return jnp.sum(jnp.square(method(scan)[0].astype(jnp.float32)))

    return jax.grad(loss)


def state_space_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """One for each chunk size. The minimum: all pairs of positions in a chunk, and the states between chunks."""
    like = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32 if name == "dt" else jnp.bfloat16)
        for name, shape in scan_shapes(**LAYER).items()
    }
    inner = LAYER["heads"] * LAYER["size"]
    for chunk in (128,) if quick else (64, 128, 256):
        step = scan_gradients(partial(ssd, chunk=chunk))
        # A compiler without its device reports no costs. The matmuls are the same on CPU.
        operations = jax.jit(step).lower(like).compile().cost_analysis()["flops"]
        pairs = chunk * (LAYER["groups"] * LAYER["states"] + inner)
        least = 3 * 2 * LAYER["length"] * (pairs + 2 * inner * LAYER["states"])
        yield {
            "chunk": chunk,
            "temporary_mib": temporary_mib(compile_for("h100", step, like, options=GPU)),
            "teraoperations": round(operations / 1e12, 3),
            "over_needed": round(operations / least, 3),
        }


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
        contents = hlo.Program.read(program.as_text())
        audited, costs = audit(program.as_text()), Costs(contents, {}, GPUS["h100"], 1)
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
    layer, rows = EXPERTS[1], []
    device = devices.virtual_devices(Cluster(GPUS[gpu], 1, 1))[0]
    for inner, outer in MATMULS[: 1 if quick else 2]:
        like = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((tokens, inner), (inner, outer), (tokens, outer))]
        for cfg in (None, *(recipe() for recipe in RECIPES)):
            multiply = exact if cfg is None else RoundedMatmul(_recipe(cfg, device))

            def step(x: Any, w: Any, dy: Any, multiply: Any = multiply) -> Any:
                y, pull = jax.vjp(partial(multiply, "bd,df->bf"), x, w)
                return y, *pull(dy)

            rows.append({"gpu": gpu, "in": inner, "out": outer} | _rounding(gpu, cfg, step, like))
    shapes = (layer.rows, layer.hidden), (layer.number, layer.hidden, layer.ffn), (layer.rows, layer.ffn)
    like = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    like.append(jax.ShapeDtypeStruct((layer.number,), jnp.int32))
    for cfg in (None, *(recipe() for recipe in RECIPES)):
        rows.append({"gpu": gpu, "experts": layer.model} | _rounding(gpu, cfg, _of_experts(cfg, device, layer), like))
    return rows


def _recipe(cfg: MatmulConfig, device: jax.Device) -> Recipe:
    return recipe_of(cfg, device, 1.0, code_products(capability_of(device)))


def _of_experts(cfg: MatmulConfig | None, device: jax.Device, layer: Experts) -> Callable:
    """The products of the experts' first matrix by a recipe, by the kernel of the device."""
    kernel: GroupedKernel = "mosaic" if capability_of(device) < FIRST_WITH_BLOCKS else "reference"
    kernels = partial(capable, kernel, GroupedSizes(layer.rows, layer.number, layer.hidden, layer.ffn))

    def step(x: Any, w: Any, dy: Any, sizes: Any) -> Any:
        def multiply(x: Any, w: Any) -> Any:
            if cfg is None:
                return grouped_matmul(x, w, sizes, kernel)
            matmul = RoundedMatmul(_recipe(cfg, device))
            expected = jnp.ones((layer.number, 3)) if matmul.recipe.beside() else None
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
    program = hlo.Program.read(text)
    entry = program.computations[program.entry]
    fused = (op for op in entry.values() if op.opcode in ("fusion", "copy", "transpose", "convert", "reduce"))
    found = []
    for op in fused:
        if not program.matmuls(op):
            found.append(hlo.size(op.shape) + sum(hlo.size(entry[name].shape) for name in op.operands if name in entry))
    return found


ROWS_OF: dict[str, Callable[[bool], Iterator[dict[str, Any]]]] = {
    "attention": attention_rows,
    "experts": expert_rows,
    "state_space": state_space_rows,
    "delta_rule": delta_rows,
    "recipes": recipe_rows,
}
