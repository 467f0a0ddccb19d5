"""Grouped matmuls of experts, compiled for virtual GPUs; mixtures of experts and dense layers, timed on a CPU.

Run:  python benchmarks/moe.py                      both parts; `compiled` needs the extra aot. Three minutes, no GPU
      python benchmarks/moe.py --part=compiled      or --part=timed: runs and writes only this part

compiled: temporary memory and operations of the grouped matmuls of Qwen3-30B-A3B, DeepSeek-V3 and Mixtral 8x7B, forward
and both gradients. Operations are relative to the model's. Kernels compute whole blocks, so this ratio depends on the
rows of each expert. They are drawn at random, once with equal probability for all experts, and once with the last
expert three times as likely as the first.

timed: forward and backward pass of a mixture of experts, with routing, sort and both permutations, relative to a dense
layer with as many active weights. The two alternate. Times are processor time, which depends less on other programs.
kernels.py --parts=grouped measures the speed on a GPU.

Writes benchmarks/results/moe.json; docs/moe.md shows it.
"""

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import outcome
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.command_line.parser import front_door
from megajax.kernels.grouped import mosaic as grouped_mosaic
from megajax.kernels.grouped import triton as grouped_triton
from megajax.kernels.grouped.capability import GroupedKernel
from megajax.kernels.grouped.matmul import grouped_matmul
from megajax.kernels.grouped.tiles import tiles
from megajax.layers.configs import GatedMLPConfig
from megajax.layers.context import Context
from megajax.layers.moe.config import MoEConfig
from megajax.layers.param import LayerSettings
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.rules import Plan
from megajax.mesh.xla import DEVICELESS, compiler_options
from megajax.planning import virtual_devices as devices
from megajax.planning.virtual_devices import GPUS, MIB, Cluster

ROUNDS = 15


class Experts(NamedTuple):
    """Of a layer, as one device has them."""

    model: str
    number: int
    """Experts of a device."""
    rows: int
    """Tokens for them."""
    hidden: int
    ffn: int


LAYERS = (
    Experts("Qwen3-30B-A3B, 8192 tokens", 128, 65536, 2048, 768),
    Experts("Qwen3-30B-A3B, 65,536 tokens on 8 devices", 16, 65536, 2048, 768),
    Experts("DeepSeek-V3, 32,768 tokens on 8 devices", 32, 32768, 7168, 2048),
    Experts("Mixtral 8x7B, 8192 tokens", 8, 16384, 4096, 14336),
)
ON: tuple[tuple[str, GroupedKernel], ...] = (("h100", "mosaic"), ("a100-80gb", "triton"))


def counts(layer: Experts, largest: float) -> np.ndarray:
    """Rows of each expert, drawn at random: the last expert is `largest` times as likely as the first."""
    shares = np.linspace(1, largest, layer.number)
    return np.random.default_rng(0).multinomial(layer.rows, shares / shares.sum())


def computed(kernel: GroupedKernel, sizes: np.ndarray, inner: int, outer: int) -> float:
    """Multiply-adds of y, dx and dw in whole blocks, over those of the rows there are."""
    rows, groups = int(sizes.sum()), sizes.size

    def padded(size: int, block: int) -> int:
        return -(-size // block) * block

    def of_rows(outer: int, inner: int) -> int:
        if kernel == "mosaic":
            blocks, align = (
                grouped_mosaic.blocks_for(outer, grouped_mosaic.tile_rows(rows, groups)),
                grouped_mosaic.ALIGN,
            )
        else:
            blocks, align = grouped_triton.ROWS, 1
        live = int(tiles(jnp.asarray(sizes, jnp.int32), rows, blocks.rows, align).live)
        return live * blocks.rows * padded(outer, blocks.columns) * inner

    blocks, align = (
        (grouped_mosaic.blocks_for(outer), grouped_mosaic.ALIGN) if kernel == "mosaic" else (grouped_triton.MATRICES, 1)
    )
    before = (sizes.cumsum() - sizes) % align
    summed = np.where(sizes > 0, -(-(sizes + before) // blocks.summed), 0).sum() * blocks.summed
    of_matrices = int(summed) * padded(inner, blocks.rows) * padded(outer, blocks.columns)
    return (of_rows(outer, inner) + of_rows(inner, outer) + of_matrices) / (3 * rows * inner * outer)


def compiled(gpu: str, kernel: GroupedKernel, layer: Experts, inner: int, outer: int) -> tuple[int, int]:
    """Kernels of y, dx and dw of one matrix, and bytes of temporary memory."""
    mesh = Mesh(np.array(devices.virtual_devices(Cluster(GPUS[gpu], 1, 1))), ("data",))
    replicated = NamedSharding(mesh, PartitionSpec())

    def abstract(shape: Sequence[int], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)

    def all_three(x: jax.Array, w: jax.Array, dy: jax.Array, sizes: jax.Array) -> tuple:
        y, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, kernel), x, w)
        return y, *pullback(dy)

    arrays = abstract((layer.rows, inner)), abstract((layer.number, inner, outer)), abstract((layer.rows, outer))
    with jax.set_mesh(mesh):
        lowered = jax.jit(all_three).lower(*arrays, abstract((layer.number,), jnp.int32))
        program = lowered.compile(compiler_options=compiler_options(*DEVICELESS))
    calls = re.findall(r'custom_call_target="(mosaic_gpu_v2|__gpu\$xla.gpu.triton)"', program.as_text())
    return len(calls), program.memory_analysis().temp_size_in_bytes


def all_compiled() -> list[dict[str, Any]]:
    """A row for each layer and GPU: gate and up alike, and down."""
    devices.prepare()
    rows = []
    for layer in LAYERS:
        for gpu, kernel in ON:
            shapes = (layer.hidden, layer.ffn), (layer.ffn, layer.hidden)
            programs = [compiled(gpu, kernel, layer, *shape) for shape in shapes]
            ratios = {
                name: [computed(kernel, counts(layer, largest), *shape) for shape in shapes]
                for name, largest in (("even", 1.0), ("uneven", 3.0))
            }
            # Of the three matrices of an expert two have the first shape.
            rows.append(
                {
                    **layer._asdict(),
                    "gpu": gpu,
                    "kernel": kernel,
                    "calls": [calls for calls, _ in programs],
                    "temporary_mib": [round(temporary / MIB, 3) for _, temporary in programs],
                    "operations_over_model": {n: round((2 * up + down) / 3, 3) for n, (up, down) in ratios.items()},
                }
            )
            print(rows[-1], flush=True)
    return rows


class Timed(NamedTuple):
    """A mixture of experts, and the dense layer of as many active weights."""

    tokens: int
    hidden: int
    experts: int
    top_k: int
    ffn: int

    def steps(self) -> dict[str, Callable[[], Any]]:
        """Name -> forward and backward on float32 arrays; both of the same input."""
        layout = Layout(Plan.of(ParallelConfig()))
        settings = LayerSettings(layout=layout, hidden=self.hidden, std=0.02, output_std=0.02)
        x = jax.random.normal(jax.random.key(0), (1, self.tokens, self.hidden))
        index = jnp.arange(self.tokens)
        ctx = Context(index[None], index)
        dense = GatedMLPConfig(ffn=self.ffn * self.top_k)
        mixture = MoEConfig(experts=self.experts, top_k=self.top_k, expert=GatedMLPConfig(ffn=self.ffn))
        ready = {}
        for name, cfg in (("dense", dense), ("mixture", mixture)):
            graph, weights = nnx.split(cfg.build(settings))

            @jax.jit
            def step(weights: Any, x: jax.Array, graph: Any = graph) -> Any:
                return jax.grad(lambda w, x: jnp.sum(jnp.sin(nnx.merge(graph, w)(x, ctx))), (0, 1), allow_int=True)(
                    weights, x
                )

            ready[name] = lambda step=step, weights=weights: jax.block_until_ready(step(weights, x))
        return ready


CASES = (
    Timed(tokens=2048, hidden=256, experts=8, top_k=2, ffn=512),
    Timed(tokens=2048, hidden=256, experts=32, top_k=4, ffn=256),
)


def all_timed() -> list[dict[str, Any]]:
    """A row for each case."""
    rows = []
    for case in CASES:
        steps = case.steps()
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(ROUNDS + 1):
            for name, step in steps.items():
                start = time.process_time()
                step()
                if number:
                    seconds[name].append(time.process_time() - start)
        ratios = [a / b for a, b in zip(seconds["mixture"], seconds["dense"], strict=True)]
        row = {name: round(1e3 * statistics.median(samples), 2) for name, samples in seconds.items()}
        fastest = min(seconds["mixture"]) / min(seconds["dense"])
        rows.append(
            {
                **case._asdict(),
                "processor_milliseconds": row,
                "over_dense": round(statistics.median(ratios), 3),
                "over_dense_fastest": round(fastest, 3),
            }
        )
        print(rows[-1], flush=True)
    return rows


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {"compiled": all_compiled, "timed": all_timed}


def main(argv: list[str]) -> None:
    """Both parts, or one; what there is of the other stays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--part", choices=PARTS)
    part = parser.parse_args(argv).part
    file = outcome.RESULTS / "moe.json"
    figures = json.loads(file.read_text())["figures"] if file.is_file() else {}
    for name in PARTS if part is None else (part,):
        figures[name] = PARTS[name]()
    outcome.write("moe", figures)


if __name__ == "__main__":
    front_door(main)
