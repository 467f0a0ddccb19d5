"""Cases of norms, matmuls, grouped matmuls and state-space layers: real sizes for GPUs, tiny ones for CPUs."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.kernels.measure import Case
from megajax.kernels.attention.request import KernelDevice
from megajax.kernels.grouped.capability import GROUPED_BACKENDS, GroupedKernel, GroupedSizes
from megajax.kernels.grouped.matmul import CodeProducts, capable, code_products, grouped_matmul
from megajax.kernels.ssm.gated_delta import DeltaRule, gated_delta, unit_length
from megajax.kernels.ssm.ssd import Scan, ssd, ssd_reference
from megajax.layers.delta.config import GatedDeltaNetConfig, KimiDeltaConfig
from megajax.layers.norm.config import LayerNormConfig, RMSNormConfig
from megajax.layers.param import LayerSettings
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.precision.block_recipes import BlockKernel
from megajax.precision.config import Fp8BlocksConfig, Fp8CurrentConfig, Fp8DelayedConfig, Mxfp8Config, Nvfp4Config
from megajax.precision.fp8 import OLDEST, PerTensor
from megajax.precision.matmul import RoundedMatmul
from megajax.precision.recipes import FIRST_WITH_BLOCKS, RECIPES, codes_of

SAME_NUMBERS = 5e-3
"""Relative error of a product of the same rounded numbers: only the result is rounded to bfloat16, and one code in
another place would be seen."""


def layer_settings(hidden: int, **more: bool) -> LayerSettings:
    """Settings of a layer on one device."""
    return LayerSettings(layout=Layout(Plan.of(ParallelConfig())), hidden=hidden, std=0.02, output_std=0.02, **more)


def norm(on_gpu: bool, device: KernelDevice) -> list[Case]:
    """RMSNorm and LayerNorm over the residual stream of 16,384 tokens."""
    tokens, hidden = (16384, 4096) if on_gpu else (64, 32)
    array = 2 * tokens * hidden
    return [
        Case(
            name=name,
            sizes={"tokens": tokens, "hidden": hidden},
            call=cfg.build(layer_settings(hidden)).normalise,
            reference=reference,
            shapes=((1, tokens, hidden), *[(hidden,)] * vectors),
            flops=(0.0, 0.0),
            moved=(2 * array, 5 * array),
        )
        for name, cfg, reference, vectors in (
            ("RMSNorm", RMSNormConfig(), _rms_norm, 1),
            ("LayerNorm", LayerNormConfig(), _layer_norm, 2),
        )
    ]


def _rms_norm(x: Array, gain: Array) -> Array:
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * gain[None, None]


def _layer_norm(x: Array, gain: Array, bias: Array) -> Array:
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5) * gain[None, None] + bias[None, None]


def matmul(on_gpu: bool, device: KernelDevice) -> list[Case]:
    """The matmuls of a Llama-3 8B layer on 8192 tokens, and a square one, in bfloat16 and, if supported, in 8 bits."""
    sizes = [(8192, 8192, 8192), (8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (8192, 2048, 8192)]
    if not on_gpu:
        sizes = [(64, 32, 48)]
    eight_bits = not on_gpu or (device.capability or ()) >= OLDEST
    return [_matmul(size, fp8) for fp8 in (False, True)[: 1 + eight_bits] for size in sizes]


def _matmul(size: tuple[int, int, int], fp8: bool) -> Case:
    tokens, inner, outer = size
    plain = partial(jnp.einsum, "ti,io->to")
    forward = 2.0 * tokens * inner * outer
    arrays = 2 * (tokens * inner + inner * outer + tokens * outer)
    return Case(
        name="matmul, fp8 with its scaling" if fp8 else "matmul, bfloat16",
        sizes={"tokens": tokens, "inner": inner, "outer": outer},
        call=partial(RoundedMatmul(PerTensor(Fp8CurrentConfig())), "ti,io->to") if fp8 else plain,
        reference=plain,
        shapes=((tokens, inner), (inner, outer)),
        flops=(forward, 3 * forward),
        moved=(arrays, 3 * arrays),
        fp8=fp8,
    )


def recipes(on_gpu: bool, device: KernelDevice) -> list[Case]:
    """A matmul of a Llama-3 8B layer by each recipe, by the device's kernel, against the same numbers in bfloat16.

    Then, where the device multiplies codes of experts, those of Qwen3-30B-A3B on one of 8 devices, in the same
    way, after the grouped matmul in bfloat16.
    """
    capability = device.capability or ()
    kernel: BlockKernel = "cudnn" if capability >= FIRST_WITH_BLOCKS else "reference"
    cases = [_matmul((8192, 4096, 14336) if on_gpu else (64, 128, 96), fp8=False)]
    codes = code_products(capability)
    for kind, make in RECIPES.items():
        # Scales of previous steps change no operation.
        if kind is not Fp8DelayedConfig and (not on_gpu or capability >= OLDEST):
            recipe: Any = make(kind(), kernel, 1.0)
            recipe = replace(recipe, codes=codes_of(kind(), codes))
            call, plain = (
                partial(RoundedMatmul(each), "ti,io->to") for each in (recipe, make(kind(), "reference", 1.0))
            )
            name = f"matmul, {kind.__name__.removesuffix('Config')}"
            cases.append(
                replace(cases[0], name=name, call=call, reference=_of_bfloat16(plain), fp8=True, tolerance=SAME_NUMBERS)
            )
    return [*cases, *_experts(on_gpu, codes)]


def _experts(on_gpu: bool, codes: CodeProducts | None) -> list[Case]:
    """Experts by the recipes of codes; without a kernel of codes, as on CPUs, tiny ones by the reference twice."""
    if on_gpu and codes is None:
        return []
    size = GroupedSizes(65536, 16, 2048, 768) if on_gpu else GroupedSizes(136, 3, 128, 256)
    kernel: GroupedKernel = "reference" if codes is None or codes.hardware else "mosaic"
    case, counts = _grouped(size, kernel), jnp.array(uneven(size.rows, size.groups), jnp.int32)

    def multiply(recipe: Any, x: Array, w: Array) -> Array:
        return RoundedMatmul(recipe).grouped(x, w, counts, partial(capable, kernel, size))

    cases = [case]
    # Random bits of stochastic rounding follow from places, which differ.
    for cfg in (Fp8CurrentConfig(), Fp8BlocksConfig(), Mxfp8Config(), Nvfp4Config(stochastic=False)):
        if on_gpu and codes_of(cfg, codes) is None:
            continue
        recipe: Any = RECIPES[type(cfg)](cfg, "reference", 1.0)
        call, plain = (partial(multiply, replace(recipe, codes=each)) for each in (codes_of(cfg, codes), None))
        name = f"grouped matmul, {type(cfg).__name__.removesuffix('Config')}"
        cases.append(
            replace(case, name=name, call=call, reference=_of_bfloat16(plain), fp8=True, tolerance=SAME_NUMBERS)
        )
    return cases


def _of_bfloat16(call: Callable[..., Array]) -> Callable[..., Array]:
    """The function of float32 arrays that computes in bfloat16."""
    return lambda *arrays: call(*(array.astype(jnp.bfloat16) for array in arrays))


def grouped(on_gpu: bool, device: KernelDevice) -> list[Case]:
    """The grouped matmul of one matrix of all experts, by every kernel that supports it.

    Sizes of Qwen3-30B-A3B, of DeepSeek-V3 with 32 experts on a device, and of Mixtral 8x7B. Beside each size is a dense
    matmul with the same number of operations.
    """
    sizes = [GroupedSizes(65536, 128, 2048, 768), GroupedSizes(32768, 32, 7168, 2048)]
    sizes.append(GroupedSizes(16384, 8, 4096, 14336))
    cases = []
    for size in sizes if on_gpu else [GroupedSizes(64, 4, 32, 48)]:
        cases.append(_grouped(size, None))
        for kernel, backend in GROUPED_BACKENDS.items():
            # The reference is slow, and the others are compared with it anyway.
            if backend.refusal("bfloat16", device, size) is None and (kernel != "reference" or not on_gpu):
                cases.append(_grouped(size, kernel))
    return cases


def uneven(rows: int, groups: int, largest: float = 3.0) -> np.ndarray:
    """Rows of each group, drawn at random: the last group is `largest` times as likely as the first."""
    shares = np.linspace(1, largest, groups)
    return np.random.default_rng(0).multinomial(rows, shares / shares.sum())


def _grouped(size: GroupedSizes, kernel: GroupedKernel | None) -> Case:
    """kernel: None for one dense matmul."""
    forward = 2.0 * size.rows * size.inner * size.outer
    matrices = 1 if kernel is None else size.groups
    shapes = (size.rows, size.inner), (size.inner, size.outer) if kernel is None else size[1:]
    arrays = 2 * (size.rows * (size.inner + size.outer) + matrices * size.inner * size.outer)
    counts = jnp.array(uneven(size.rows, size.groups), jnp.int32)
    dense = partial(jnp.einsum, "ti,io->to")
    return Case(
        name="grouped matmul, dense" if kernel is None else f"grouped matmul, {kernel}",
        sizes=size._asdict(),
        call=dense if kernel is None else partial(grouped_matmul, sizes=counts, kernel=kernel),
        reference=dense if kernel is None else partial(grouped_matmul, sizes=counts, kernel="reference"),
        shapes=shapes,
        flops=(forward, 3 * forward),
        moved=(arrays, 3 * arrays),
    )


def state_space(on_gpu: bool, device: KernelDevice) -> list[Case]:
    """The recurrence of Mamba-2 in chunks of several sizes, against a sequential scan."""
    rows, length, heads, head, states = (2, 4096, 32, 64, 128) if on_gpu else (1, 32, 2, 8, 8)
    inner, io_bytes = heads * head, rows * length * 2 * (2 * heads * head + heads + 2 * states)

    def scan(x: Array, dt: Array, b: Array, c: Array) -> Scan:
        steps = jax.nn.softplus(dt.astype(jnp.float32) - 4)
        return Scan(x, steps, -jnp.linspace(1, 16, heads), b, c, jnp.ones(heads))

    def case(chunk: int) -> Case:
        forward = 2.0 * rows * length * (chunk * (states + inner) + 2 * inner * states)
        return Case(
            name=f"state space, chunks of {chunk}",
            sizes={"rows": rows, "length": length, "heads": heads, "head_dim": head, "states": states},
            call=lambda *arrays: ssd(scan(*arrays), chunk)[0],
            reference=lambda *arrays: ssd_reference(scan(*arrays))[0],
            shapes=((rows, length, heads, head), (rows, length, heads), *[(rows, length, 1, states)] * 2),
            flops=(forward, 3 * forward),
            moved=(io_bytes, 3 * io_bytes),
        )

    return [case(chunk) for chunk in ((64, 128, 256) if on_gpu else (16,))]


def delta_rule(on_gpu: bool, device: KernelDevice) -> list[Case]:
    """Gated delta nets of Qwen3-Next and Kimi Linear in chunks, in bfloat16 and, as the reference, in float32.

    A sequential scan would store a state for each position.
    """
    rows, length, heads, size, chunk = (1, 8192, 32, 128, 64) if on_gpu else (1, 32, 2, 16, 16)
    cases = []
    for by_channel in (False, True):
        mixer: GatedDeltaNetConfig = KimiDeltaConfig(heads=heads, key_dim=size, head_dim=size, chunk=chunk)
        if not by_channel:
            mixer = GatedDeltaNetConfig(heads=heads, key_heads=heads // 2, key_dim=size, head_dim=size, chunk=chunk)
        key, head = (rows, length, mixer.groups, size), (rows, length, heads)
        shapes = (key, key, (*head, size), (*head, size) if by_channel else head, head)
        forward = 2.0 * rows * length * mixer.kernel_work(0, chunk).multiply_adds
        moved = 2 * sum(map(math.prod, shapes)) + 2 * math.prod(shapes[2])

        def call(*arrays: Array) -> Array:
            return gated_delta(_rule(*arrays), chunk)[0]

        cases.append(
            Case(
                name=f"delta rule{' by channel' * by_channel}",
                sizes={"rows": rows, "length": length, "heads": heads, "head_dim": size},
                call=call,
                reference=call,
                shapes=shapes,
                flops=(forward, 3 * forward),
                moved=(moved, 3 * moved),
            )
        )
    return cases


def _rule(q: Array, k: Array, v: Array, a: Array, b: Array) -> DeltaRule:
    """From normal numbers: keys of length 1, decays of exp(-0.02) on average."""
    rates = -jax.nn.softplus(a.astype(jnp.float32) - 4)
    return DeltaRule(unit_length(q), unit_length(k), v, rates, jax.nn.sigmoid(b.astype(jnp.float32)))
