"""Matrix products in fp8 with one scale per tensor (Micikevicius et al. 2022, "FP8 formats for deep learning").

Operands are cast to e4m3 (4 bits of precision, largest 448), gradients to e5m2 (3 bits, largest 57344) or optionally
e4m3. One scale per tensor maps its largest magnitude, taken from the tensor itself or from previous steps, to just
below the format's largest number.

Scales are powers of two. Numbers are therefore scaled back without rounding, and a number becomes the same 8 bits under
any scale, unless it is so small relative to the tensor's largest that it falls below the format's normal numbers.
Devices that scale their own parts of a tensor agree on nearly all numbers.

Delayed scaling takes scales from the largest magnitudes (amax) in previous steps: each matrix product observes three
magnitudes, of x, w and the gradient of the result.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.config.errors import UserError
from megajax.mesh.collectives import LetterSharding
from megajax.mesh.layer_metrics import Measure
from megajax.mesh.layer_observations import Observed
from megajax.precision.blocks import amax_of
from megajax.precision.config import MULTIPLE, Fp8CurrentConfig, Fp8DelayedConfig
from megajax.precision.matmul import CODE_BLOCK, HARDWARE_BLOCK, CodeProducts, Letters, RowGroups, Tensor, in_order

OLDEST = (8, 9)
"""Compute capability of the first GPUs that multiply 8-bit floats."""
BFLOAT16 = jnp.dtype(jnp.bfloat16)
SMALLEST = 2.0**-100
"""Tensors with a smaller amax are scaled as if their amax were this, so that scales stay within float32."""
_EXPONENT = 0x7F800000

STARTS = (32.0, 4.0, 32.0)
"""Initial amax of activations, weights and gradients of one token's loss, used until there is a history. Several times
that of an untrained model: 8-bit floats have range to spare below, and larger values are clipped."""


@dataclass(frozen=True, slots=True)
class AmaxHistory:
    """Keeps the observed amax of the last steps: an updater, see megajax.mesh.layer_observations."""

    cfg: Fp8DelayedConfig
    token_share: float
    """Approximate weight of one token's loss in the differentiated loss."""

    def shape(self, observed: tuple[int, ...]) -> tuple[int, ...]:
        """[..., 3] -> [..., 3, history], the latest step first."""
        return (*observed, self.cfg.history)

    def used(self, state: Array, scale: Array) -> Array:
        """[..., 3, history] -> [..., 3], the amax that scales are computed for; scale: of the loss, float32 []."""
        amax = state[..., 0] if self.cfg.algorithm == "most_recent" else state.max(-1)
        x, w, gradient = STARTS
        start = jnp.broadcast_to(jnp.array([x, w, gradient * self.token_share], jnp.float32), amax.shape)
        return jnp.where(amax > 0, amax, start) * _units(scale, amax.shape)

    def updated(self, state: Array, observed: Array, scale: Array) -> Array:
        """[..., 3, history] after a step that observed [..., 3]; scale: the loss scale.

        The history of gradients is for the unscaled loss. Products not computed in 8 bits and tensors of zeros leave
        their history unchanged.
        """
        observed = (observed / _units(scale, observed.shape))[..., None]
        return jnp.where(observed > 0, jnp.concatenate([observed, state[..., :-1]], axis=-1), state)

    def measures(self) -> tuple[Measure, ...]:
        return ()


def _units(scale: Array, shape: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(jnp.stack([jnp.float32(1), jnp.float32(1), scale]), shape)


@dataclass(frozen=True, slots=True)
class PerTensor:
    """Recipe of the matmuls with one scale per tensor. Hashable."""

    cfg: Fp8CurrentConfig
    history: AmaxHistory | None = None
    """With delayed scaling: the source of the amax for the scales."""
    codes: CodeProducts | None = None
    """The device's kernel of 8-bit codes, for groups."""
    multiple: ClassVar[int] = MULTIPLE

    def operand(
        self, tensor: Tensor, x: Array, term: str, letters: Letters, amax: Array | None, *, of_weight: bool = False
    ) -> "QuantizedTensor":
        """The same for all products. amax: that scales are computed for; None: of the tensors."""
        del term, letters, of_weight
        return self._rounded(tensor, x, amax)

    def _rounded(
        self, tensor: Tensor, x: Array, amax: Array | None, groups: RowGroups | None = None
    ) -> "QuantizedTensor":
        """amax: [3], or [E, 3]."""
        gradient = jnp.float8_e5m2 if self.cfg.format == "hybrid" else jnp.float8_e4m3fn
        form, scaling = jnp.dtype(gradient if tensor == "dy" else jnp.float8_e4m3fn), ITS_OWN
        if amax is not None:
            scaling = Scaling(amax[..., ("x", "w", "dy").index(tensor)], getattr(self.cfg, "margin", 0))
        return quantize(x, form, scaling, groups)

    @property
    def row_block(self) -> int:
        return 1

    @property
    def exact(self) -> jnp.dtype:
        return BFLOAT16

    def grouped_operand(
        self, tensor: Tensor, x: Array, groups: RowGroups, amax: Array | None, *, of_weight: bool = False
    ) -> "QuantizedTensor":
        """The same for all products."""
        del of_weight
        return self._rounded(tensor, x, amax, groups)

    def product(
        self, letters: Letters, a: "QuantizedTensor", b: "QuantizedTensor", dtype: jnp.dtype, *, forward: bool
    ) -> Array:
        fast = forward and self.cfg.fast_accumulation
        precision = lax.Precision.DEFAULT if fast else lax.Precision.HIGHEST
        return product(letters, a, b, dtype=dtype, precision=precision)

    def on(self, sharding: LetterSharding | None) -> "PerTensor":
        del sharding
        return self

    def observed(self, x: "QuantizedTensor", w: "QuantizedTensor", dy: "QuantizedTensor") -> Array:
        return jnp.stack([x.amax, w.amax, dy.amax], axis=-1)

    def beside(self) -> Mapping[str, Observed]:
        if self.history is None:
            return {}
        return {"amax": Observed(shape=(3,), axes=(None,), reduction="max", updater=self.history)}


class Scaling(NamedTuple):
    """The inputs of a tensor's scale."""

    expected: Array | None = None
    """Expected largest magnitude, float32 []; None: the actual one."""
    margin: int = 0
    """The scale is divided by 2^margin."""


ITS_OWN = Scaling()


class QuantizedTensor(NamedTuple):
    """A tensor in 8 bits, or rows [T, K] or matrices [E, N, K] of groups."""

    values: Array
    """The tensor times the scale, clipped to the format's range."""
    scale: Array
    """float32 []: a power of two; of groups [T, 1] or [E, 1, 1]."""
    amax: Array
    """Largest magnitude of the tensor, float32 []; of groups [E]."""
    factor: None = None

    def wide(self, dtype: jnp.dtype = BFLOAT16) -> Array:
        """The numbers, scaled back: exact."""
        return self.values.astype(dtype) * (1 / self.scale).astype(dtype)

    def coded(self, *, of_weight: bool, hardware: bool) -> tuple[Array, Array]:
        """One scale for all blocks of a group."""
        codes, scale = (array.mT if of_weight else array for array in (self.values, 1 / self.scale))
        block = HARDWARE_BLOCK if hardware else CODE_BLOCK
        shape = [*codes.shape[:-1], codes.shape[-1] // block]
        if hardware:
            scale = lax.bitcast_convert_type(scale, jnp.uint32) >> 23  # powers of two, or NaN: their exponents
            scale = lax.bitcast_convert_type(scale.astype(jnp.uint8), jnp.float8_e8m0fnu)
        elif codes.ndim == 3:
            shape[1] //= block
        return codes, jnp.broadcast_to(scale[:, ::block] if of_weight else scale, shape)


def quantize(x: Array, form: jnp.dtype, scaling: Scaling = ITS_OWN, groups: RowGroups | None = None) -> QuantizedTensor:
    """x in 8 bits. Values beyond the range of the scale are clipped.

    Infinities and NaNs are not: an infinity clipped to a finite number would be hidden from the guard. With a scale
    from the tensor itself all of it becomes NaN, with an expected one the elements that are not finite do.

    The maximum is over what is here: all of x over mesh axes that are left to the compiler, each device's part over
    manual ones. With an expected maximum nothing waits for it. groups: each has a scale.
    """
    # The compiler may pass the float32 values from before rounding in some uses of x: these give other 8-bit values.
    info = jnp.finfo(x.dtype)
    x = lax.reduce_precision(x.astype(jnp.float32), info.nexp, info.nmant)
    amax = amax_of(x) if groups is None else groups.amax(x)
    scale = scale_of(amax, form, scaling)
    scale = scale if groups is None else groups.spread(scale, x.ndim)
    top = float(jnp.finfo(form).max)
    values = jnp.clip(x * scale, -top, top)
    values = values if scaling.expected is None else jnp.where(jnp.isfinite(x), values, jnp.nan)
    return QuantizedTensor(values.astype(form), scale, amax)


def scale_of(amax: Array, form: jnp.dtype, scaling: Scaling) -> Array:
    """Scale of a tensor with that largest magnitude; NaN where it is not finite and nothing else is expected."""
    if scaling.expected is None:
        return jnp.where(jnp.isfinite(amax), scale_for(amax, form), jnp.nan)
    return scale_for(scaling.expected, form, scaling.margin)


def scale_for(largest: Array, form: jnp.dtype, margin: int = 0) -> Array:
    """The largest power of two that keeps `largest` times it within the format's range, over 2^margin."""
    ratio = lax.bitcast_convert_type(float(jnp.finfo(form).max) / jnp.maximum(largest, SMALLEST), jnp.uint32)
    return lax.bitcast_convert_type(ratio & jnp.uint32(_EXPONENT), jnp.float32) * 2.0**-margin


def product(
    letters: Letters, a: QuantizedTensor, b: QuantizedTensor, *, dtype: jnp.dtype, precision: lax.Precision
) -> Array:
    """a times b, as `dtype`; letters: of a's dimensions, of b's, of the result's.

    Written as the product of the tensors scaled back, which is exact in bfloat16. The compiler for GPUs turns it into a
    product in 8 bits whose result is scaled as it is stored (given the options in xla_options; tests insist on
    it). Scaling the result here instead would separate sums of products from their sum over devices, which would then
    be done one by one.

    precision: on an NVIDIA GPU, DEFAULT lets the tensor cores accumulate in fewer bits than float32, HIGHEST does not.
    """

    lhs, rhs, _ = letters
    summed, shared = (
        [[term.index(n) for n in names] for term in (lhs, rhs)] for names in (letters.summed(), letters.shared())
    )
    dimensions = (summed[0], summed[1]), (shared[0], shared[1])
    y = lax.dot_general(a.wide(dtype), b.wide(dtype), dimensions, preferred_element_type=dtype, precision=precision)
    return in_order(y, letters)


def refuse_old(device: jax.Device, setting: str = "precision.matmul") -> None:
    """Raises UserError for a real or virtual GPU that cannot multiply 8-bit floats. CPUs do it slowly.

    setting: that asks for them, and may be none.
    """
    version = capability_of(device)
    if device.platform != "cpu" and version < OLDEST:
        named, needed = (".".join(map(str, numbers)) for numbers in (version, OLDEST))
        raise UserError(
            f"{setting}: {device.device_kind} has compute capability {named or 'unknown'}, and 8-bit matmuls "
            f"need {needed} or later (H100, B200).\nSet {setting}=none."
        )


def capability_of(device: jax.Device) -> tuple[int, ...]:
    """Compute capability of a real or virtual NVIDIA GPU, (9, 0) for an H100; () for other devices."""
    version = str(getattr(device, "compute_capability", ""))
    return tuple(int(part) for part in version.split(".") if part.isdigit())
