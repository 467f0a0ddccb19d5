"""Attention kernels and temporary memory of BERT and T5 layers, compiled for a virtual H100.

Run:  python benchmarks/attention_memory.py [--quick]            (needs the extra aot; no GPU. About three minutes)

Compiles the gradient of one BERT-large layer, and of one T5 decoder block of the same width with cross-attention to
equally many tokens. Batches have 4 padded rows in bfloat16. The kernels are cuDNN's, Pallas's, and the reference, whose
scores take 4 * 16 * S * T float32 numbers per attention (4 rows, 16 heads). --quick: only rows of 512 tokens. Writes
benchmarks/results/attention_memory.json; docs/attention.md shows the table.
"""

import argparse
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import outcome
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.command_line.parser import front_door
from megajax.kernels.attention.capability import Kernel
from megajax.layers.configs import AttentionConfig, BlockConfig, CrossAttentionConfig, DenseMLPConfig, LayerNormConfig
from megajax.layers.context import Context
from megajax.layers.param import LayerSettings, bind, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.rules import Plan
from megajax.mesh.xla import DEVICELESS, compiler_options
from megajax.planning import virtual_devices as devices
from megajax.planning.virtual_devices import GPUS, MIB, Cluster

ROWS, HIDDEN, HEADS = 4, 1024, 16
TARGETS = re.compile(r'custom_call_target="(__cudnn\$fmha\w+|__gpu\$xla.gpu.triton)"')
KERNELS: tuple[Kernel, ...] = ("cudnn", "pallas", "reference")


def layers(kernel: Kernel) -> dict[str, BlockConfig]:
    """Name -> block."""
    common: dict[str, Any] = {"mlp": DenseMLPConfig(ffn=4 * HIDDEN), "norm": LayerNormConfig()}
    mixer = AttentionConfig(heads=HEADS, bias=True, kernel=kernel)
    cross = CrossAttentionConfig(heads=HEADS, bias=True, kernel=kernel)
    return {
        "bert": BlockConfig(mixer=replace(mixer, causal=False), **common),
        "t5": BlockConfig(mixer=mixer, cross=cross, **common),
    }


def compiled(block: BlockConfig, length: int, gpu: str = "h100") -> tuple[list[str], int]:
    """Attention kernels of the gradient of a block, and its bytes of temporary memory."""
    layout = Layout(Plan.of(ParallelConfig()))
    settings = LayerSettings(layout=layout, hidden=HIDDEN, std=0.02, output_std=0.02, padded=True)
    module = nnx.eval_shape(lambda: block.build(settings))
    mesh = Mesh(np.array(devices.virtual_devices(Cluster(GPUS[gpu], 1, 1))), ("data",))
    replicated = NamedSharding(mesh, PartitionSpec())

    def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)

    weights = {path: abstract(spec.shape, jnp.bfloat16) for path, spec in specs(module).items()}
    rows, ids = abstract((ROWS, length, HIDDEN), jnp.bfloat16), abstract((ROWS, length), jnp.int32)

    def total(
        weights: Any, x: jax.Array, memory: jax.Array, segments: jax.Array, decoder_segments: jax.Array
    ) -> jax.Array:
        index = jnp.arange(length)
        ctx = Context(
            jnp.broadcast_to(index, segments.shape), index, segments, memory=memory, memory_segments=decoder_segments
        )
        return jnp.sum(bind(module, weights)(x, ctx).astype(jnp.float32))

    gradient = jax.jit(jax.grad(total, (0, 1, 2)))
    with jax.set_mesh(mesh):
        lowered = gradient.lower(weights, rows, rows, ids, ids)
        program = lowered.compile(compiler_options=compiler_options(*DEVICELESS))
    return sorted(TARGETS.findall(program.as_text())), program.memory_analysis().temp_size_in_bytes


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the shorter rows")
    quick = parser.parse_args(argv).quick
    devices.prepare()
    records = []
    for length in (512, 2048)[: 1 if quick else None]:
        for kernel in KERNELS:
            for name, block in layers(kernel).items():
                targets, temporary = compiled(block, length)
                calls = {target: targets.count(target) for target in dict.fromkeys(targets)}
                records.append(
                    {
                        "layer": name,
                        "tokens": length,
                        "kernel": kernel,
                        "temporary_mib": round(temporary / MIB, 1),
                        "calls": calls,
                    }
                )
                print(records[-1], flush=True)
    if not quick:
        outcome.write("attention_memory", {"rows": records})


if __name__ == "__main__":
    front_door(main)
