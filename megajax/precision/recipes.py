"""The table of recipes for the layers' matmuls, and which of their kernels a device runs."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax

from megajax.precision.block_recipes import BlockKernel, fp8_blocks, mxfp8, nvfp4
from megajax.precision.config import (
    Fp8BlocksConfig,
    Fp8CurrentConfig,
    Fp8DelayedConfig,
    MatmulConfig,
    Mxfp8Config,
    Nvfp4Config,
    RecipeConfig,
)
from megajax.precision.fp8 import AmaxHistory, PerTensor, capability_of, refuse_old
from megajax.precision.matmul import CodeProducts, Recipe

FIRST_WITH_BLOCKS = (10, 0)
"""Compute capability of the first GPUs that multiply numbers in blocks (Blackwell)."""

OF_CODES = Fp8CurrentConfig, Fp8BlocksConfig
"""Recipes whose codes a kernel of blocks of 128 numbers multiplies; tensor cores take all but float32 scales."""

RECIPES: Mapping[type[RecipeConfig], Callable[..., Recipe]] = MappingProxyType(
    {
        Fp8CurrentConfig: lambda cfg, kernel, share: PerTensor(cfg),
        Fp8DelayedConfig: lambda cfg, kernel, share: PerTensor(cfg, AmaxHistory(cfg, share)),
        Fp8BlocksConfig: lambda cfg, kernel, share: fp8_blocks(cfg, kernel),
        Mxfp8Config: lambda cfg, kernel, share: mxfp8(cfg, kernel),
        Nvfp4Config: lambda cfg, kernel, share: nvfp4(cfg, kernel),
    }
)


def kernel_of(cfg: MatmulConfig, device: jax.Device) -> BlockKernel:
    """cuDNN's products of blocks where a device has them; elsewhere the same numbers are multiplied in bfloat16.

    Scales in float32 are for products in float32 everywhere.
    """
    hardware = capability_of(device) >= FIRST_WITH_BLOCKS and getattr(cfg, "scales", "") != "float32"
    return "cudnn" if hardware and cfg.kernel == "auto" else "reference"


def codes_of(cfg: MatmulConfig, kernel: CodeProducts | None) -> CodeProducts | None:
    """A device's kernel of codes, if it multiplies those of the recipe and the recipe may use it."""
    if kernel is None or cfg.kernel == "reference":
        return None
    able = getattr(cfg, "scales", "") != "float32" if kernel.hardware else isinstance(cfg, OF_CODES)
    return kernel if able else None


def recipe_of(cfg: MatmulConfig, device: jax.Device, token_share: float, codes: CodeProducts | None = None) -> Recipe:
    """The recipe on this device, real or virtual. token_share: as in `AmaxHistory`; codes: its kernel of codes.

    Raises UserError for a GPU without the format of a recipe with one scale per tensor.
    """
    if isinstance(cfg, Fp8CurrentConfig):
        refuse_old(device)
    recipe: Any = RECIPES[type(cfg)](cfg, kernel_of(cfg, device), token_share)
    return replace(recipe, codes=codes_of(cfg, codes))
