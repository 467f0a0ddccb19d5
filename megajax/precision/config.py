"""Dtypes of a run, without importing jax."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from megajax.config.bounds import Bounds, Count, Index, Positive
from megajax.config.class_references import Builds, resolve
from megajax.config.errors import Problem


@dataclass(frozen=True, kw_only=True)
class DynamicScaleConfig(Builds):
    """Dynamic loss scaling, for float16: the scale falls at an overflow and grows after steps without one.

    Example: `mj.PrecisionConfig(compute="float16", loss_scale=mj.DynamicScaleConfig())`
    """

    target: ClassVar[str] = "megajax.precision.loss_scale:DynamicScale"
    initial: float = 2.0**32
    """Initial scale. Steps are skipped until it is low enough."""
    floor: Positive = 1.0
    """Lowest scale. An overflow at this scale ends the run."""
    window: Count = 1000
    """Steps without an overflow after which the scale grows."""
    hysteresis: Count = 2
    """The scale is lowered from this many overflows on, counted since it last grew."""
    growth: Annotated[float, Bounds(above=1)] = 2.0
    """Factor by which the scale grows."""
    backoff: Annotated[float, Bounds(above=0, below=1)] = 0.5
    """Factor on the scale at an overflow."""

    def build(self) -> Any:
        """The scaler."""
        return resolve(self.target)(self.initial, self.floor, self.window, self.hysteresis, self.growth, self.backoff)

    def problems(self) -> list[Problem]:
        message = f"must be at most initial={self.initial:g}, got {self.floor:g}"
        return [] if self.floor <= self.initial else [Problem("floor", message)]


@dataclass(frozen=True, kw_only=True)
class ConstantScaleConfig(Builds):
    """A constant loss scale.

    Example: `mj.PrecisionConfig(compute="float16", loss_scale=mj.ConstantScaleConfig(value=1024))`
    """

    target: ClassVar[str] = "megajax.precision.loss_scale:ConstantScale"
    value: Positive = 1.0
    """The scale; 1 turns loss scaling off."""

    def build(self) -> Any:
        """The scaler."""
        return resolve(self.target)(self.value)


type LossScaleConfig = DynamicScaleConfig | ConstantScaleConfig

MULTIPLE = 16
"""The sides of matrices in 8-bit matmuls must be multiples of this (cuBLAS, "8-bit floating point")."""


type Rate = Literal["fp8", "fp8_blocks", "mxfp8", "nvfp4"]


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """What all recipes of the layers' matmuls have.

    Embeddings, the head with its loss, attention scores, norms and everything between matmuls stay as they are.
    """

    multiple: ClassVar[int] = MULTIPLE
    """Sides of matrices, and tokens, are multiples of this."""
    rate: ClassVar[Rate] = "fp8"
    """Whose rate the products have on GPUs that multiply this format: see `megajax.planning.compiled.devices`."""
    saved_bytes: ClassVar[float] = 1
    """Of a number that is saved for the backward pass, with its share of the scales."""
    label: ClassVar[str]
    """For people."""
    first_layers: Index = 0
    """Number of layers at the start of the stack that stay in bfloat16."""
    last_layers: Index = 0
    """Number of layers at its end that stay in bfloat16."""
    kernel: Literal["auto", "reference"] = "auto"
    """reference: rounded numbers of blocks and of experts are multiplied in bfloat16, float32 scales in float32, on
    devices with a kernel for them too. auto: by that kernel. cuBLASLt's matmuls with one scale are not affected."""

    def layers(self, count: int) -> tuple[int, int] | None:
        """Numbers [first, end) of the layers with the recipe among `count`; None for all."""
        return (self.first_layers, count - self.last_layers) if self.first_layers or self.last_layers else None

    def once_a_step(self, *, fsdp: bool) -> bool:
        """Whether experts' matrices are rounded once a step rather than for each microbatch: with layers in bfloat16
        both copies would need memory, and FSDP gathers matrices where they are used."""
        return not (fsdp or self.first_layers or self.last_layers)


@dataclass(frozen=True, kw_only=True)
class Fp8CurrentConfig(RecipeConfig):
    """fp8 with one scale per tensor, from its current amax (largest magnitude).

    Example: `mj.PrecisionConfig(matmul=mj.Fp8CurrentConfig(format="hybrid"))`
    """

    label: ClassVar[str] = "fp8, scales from each tensor"
    format: Literal["hybrid", "e4m3"] = "hybrid"
    """hybrid: activations and weights in e4m3, gradients in e5m2. e4m3: all, with more precision and less range."""
    fast_accumulation: bool = True
    """Allow forward matmuls on NVIDIA GPUs to accumulate in fewer bits than float32. Backward ones never do."""


@dataclass(frozen=True, kw_only=True)
class Fp8DelayedConfig(Fp8CurrentConfig):
    """fp8 with one scale per tensor, from its amax (largest magnitude) in previous steps.

    Example: `mj.PrecisionConfig(matmul=mj.Fp8DelayedConfig(history=16))`
    """

    label: ClassVar[str] = "fp8, scales from previous steps"
    history: Count = 1
    """Length of the amax history in steps."""
    algorithm: Literal["most_recent", "max"] = "most_recent"
    """Which amax is used: of the previous step, or the largest in the history."""
    margin: Annotated[int, Bounds(at_least=-64, at_most=64)] = 0
    """Bits of headroom above the amax: scales are divided by 2^margin."""


@dataclass(frozen=True, kw_only=True)
class Fp8BlocksConfig(RecipeConfig):
    """fp8 with a scale for each 128 numbers of activations and gradients, and each 128 x 128 of weights (DeepSeek-V3).

    Example: `mj.PrecisionConfig(matmul=mj.Fp8BlocksConfig())`
    """

    multiple: ClassVar[int] = 32
    saved_bytes: ClassVar[float] = 1 + 1 / 128
    rate: ClassVar[Rate] = "fp8_blocks"
    label: ClassVar[str] = "fp8 in blocks of 1 x 128, weights 128 x 128"
    format: Literal["hybrid", "e4m3"] = "e4m3"
    """e4m3: all tensors. hybrid: gradients in e5m2."""
    scales: Literal["power_of_two", "float32"] = "power_of_two"
    """power_of_two: rounded up; Hopper and Blackwell multiply them. float32: amax / 448; Hopper multiplies them, and
    elsewhere products are in float32, slowly."""


@dataclass(frozen=True, kw_only=True)
class Mxfp8Config(RecipeConfig):
    """MXFP8: a scale for each 32 numbers, a power of two (OCP Microscaling formats, version 1.0).

    Example: `mj.PrecisionConfig(matmul=mj.Mxfp8Config())`
    """

    multiple: ClassVar[int] = 32
    rate: ClassVar[Rate] = "mxfp8"
    saved_bytes: ClassVar[float] = 1 + 1 / 32
    label: ClassVar[str] = "MXFP8, blocks of 32"
    format: Literal["hybrid", "e4m3"] = "e4m3"
    """e4m3: all tensors. hybrid: gradients in e5m2."""
    rounding: Literal["floor", "ceil", "even", "up"] = "up"
    """Of scales. floor: as in the specification, which clips the largest numbers of some blocks. ceil: one more, unless
    amax is a power of two. even: one more, if amax rounds to the next one. up: one more, if it would be clipped."""


@dataclass(frozen=True, kw_only=True)
class Nvfp4Config(RecipeConfig):
    """NVFP4: 4-bit numbers with a scale for each 16 of them, 16 x 16 of weights (NVIDIA 2025, "Pretraining Large
    Language Models with NVFP4").

    Example: `mj.PrecisionConfig(matmul=mj.Nvfp4Config(last_layers=4))`
    """

    rate: ClassVar[Rate] = "nvfp4"
    saved_bytes: ClassVar[float] = 1 / 2 + 1 / 16
    label: ClassVar[str] = "NVFP4, blocks of 16, weights 16 x 16"
    first_layers: Index = 1
    """Number of layers at the start of the stack that stay in bfloat16."""
    last_layers: Index = 1
    """Number of layers at its end that stay in bfloat16."""
    hadamard: bool = True
    """Mix each 16 tokens of both inputs of weights' gradients by a random Hadamard transform: outliers spread."""
    stochastic: bool = True
    """Round gradients stochastically, so that their mean is kept."""


type MatmulConfig = Fp8CurrentConfig | Fp8DelayedConfig | Fp8BlocksConfig | Mxfp8Config | Nvfp4Config


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtypes of a run. Softmax, norms and loss are always in float32.

    Example: `mj.PrecisionConfig(compute="float32")`
    """

    compute: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Activations, and weights when they are used."""
    params: Literal["float32"] = "float32"
    """Master weights."""
    gradients: Literal["float32", "bfloat16"] = "float32"
    """Accumulation over microbatches and reduction over devices. The optimizer always works in float32."""
    reduce: Literal["float32", "bfloat16"] | None = None
    """Reduction of gradients over devices, once a step, or per layer with fsdp; none: the dtype of accumulation."""
    loss_scale: LossScaleConfig | None = None
    """Loss scaling; none: dynamic for float16, otherwise off."""
    matmul: MatmulConfig | None = None
    """Recipe of the layers' matmuls in 8 or 4 bits; needs compute=bfloat16. none: matmuls in `compute`."""

    def problems(self) -> list[Problem]:
        problems = []
        if self.compute == "float16" and self.gradients == "bfloat16":
            problems.append(
                Problem(
                    "gradients",
                    "bfloat16 with compute=float16 would lose three bits of every gradient",
                    "use gradients=float32, or compute=bfloat16",
                )
            )
        if self.matmul is not None and self.compute != "bfloat16":
            hint = "set compute=bfloat16, or matmul=none"
            problems.append(Problem("matmul", f"needs compute=bfloat16, got {self.compute}", hint))
        return problems

    def scale(self) -> LossScaleConfig:
        """The loss scale in force."""
        if self.loss_scale is not None:
            return self.loss_scale
        return DynamicScaleConfig() if self.compute == "float16" else ConstantScaleConfig()

    def reduced_in(self) -> str:
        """Dtype in which gradients cross the network."""
        return self.reduce or self.gradients

    def floor(self) -> float | None:
        """The scale at which an overflow is a fault, None where overflows always are."""
        scale = self.scale()
        return scale.floor if isinstance(scale, DynamicScaleConfig) else None

    def matmul_precision(self) -> str | None:
        """jax_default_matmul_precision of the run: float32 means float32, not TF32."""
        return "highest" if self.compute == "float32" else None
