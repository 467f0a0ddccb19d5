"""Matrix products in 8-bit floating point (Micikevicius et al. 2022, "FP8 formats for deep learning").

Operands are cast to e4m3 (4 bits of precision, largest 448), gradients to e5m2 (3 bits, largest 57344) or optionally
e4m3. One scale per tensor maps its largest magnitude, taken from the tensor itself or from previous steps, to just
below the format's largest number.

Scales are powers of two. Numbers are therefore scaled back without rounding, and a number becomes the same 8 bits under
any scale, unless it is so small relative to the tensor's largest that it falls below the format's normal numbers.
Devices that scale their own parts of a tensor agree on nearly all numbers.

Delayed scaling takes scales from the largest magnitudes (amax) in previous steps: each matrix product observes three
magnitudes, of x, w and the gradient of the result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.config.errors import UserError
from megajax.mesh.layer_metrics import Measure
from megajax.mesh.layer_observations import Observed
from megajax.precision.config import MULTIPLE, DelayedScalingConfig, Fp8Config

OLDEST = (8, 9)
"""Compute capability of the first GPUs that multiply 8-bit floats."""
SMALLEST = 2.0**-100
"""Tensors with a smaller amax are scaled as if their amax were this, so that scales stay within float32."""
_EXPONENT = 0x7F800000

type Letters = tuple[str, str, str]
"""Letters of an einsum equation: dimensions of x, of w, of the result."""
STARTS = (32.0, 4.0, 32.0)
"""Initial amax of activations, weights and gradients of one token's loss, used until there is a history. Several times
that of an untrained model: 8-bit floats have range to spare below, and larger values are clipped."""


@dataclass(frozen=True, slots=True)
class AmaxHistory:
    """Keeps the observed amax of the last steps: an updater, see megajax.mesh.layer_observations."""

    cfg: DelayedScalingConfig
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
class Fp8Matmul:
    """A recipe of a Layout: the forward product and both products of the backward pass in 8 bits. Hashable."""

    cfg: Fp8Config
    history: AmaxHistory | None = None
    """With delayed scaling: the source of the amax for the scales."""

    def __call__(self, equation: str, x: Array, w: Array, amax: Array | None = None) -> Array:
        """einsum of an activation and a weight, in x's dtype, accumulated in float32; w's gradient has w's dtype.

        equation: "bsd,df->bsf" and the like; each letter is in two of the three terms, or in all.
        Saved for the backward pass: x in 8 bits, its amax, and w itself. w is cast again, so that a pipeline, whose
        stages hold the weights anyway, saves nothing of them.
        amax: of x, w and the result's gradient that scales are computed for, float32 [3]; its cotangent is what they
        were. None: scales are computed from the tensors.

        Raises UserError where a matrix of weights has sides that are not multiples of 16.
        """
        refuse_odd_sides(equation, x, w)
        return _multiply(self, terms(equation), x, w, amax)

    def beside(self, shape: tuple[int, ...], axes: Sequence[str | None]) -> Mapping[str, Observed]:
        """The auxiliary arrays of a weight: with delayed scaling, the amax of its products."""
        del shape, axes
        if self.history is None:
            return {}
        return {"amax": Observed(shape=(3,), axes=(None,), reduction="max", updater=self.history)}

    def formats(self) -> tuple[jnp.dtype, jnp.dtype]:
        """The format of activations and weights, and that of gradients."""
        gradients = jnp.float8_e5m2 if self.cfg.format == "hybrid" else jnp.float8_e4m3fn
        return jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(gradients)

    def scaling(self, amax: Array | None, tensor: Literal[0, 1, 2]) -> "Scaling":
        """The scaling of x, w or the result's gradient; amax: as in `__call__`."""
        if amax is None:
            return ITS_OWN
        return Scaling(amax[tensor], 0 if self.cfg.delayed is None else self.cfg.delayed.margin)


class Scaling(NamedTuple):
    """The inputs of a tensor's scale."""

    expected: Array | None = None
    """Expected largest magnitude, float32 []; None: the actual one."""
    margin: int = 0
    """The scale is divided by 2^margin."""


ITS_OWN = Scaling()


class Quantized(NamedTuple):
    """A tensor in 8 bits."""

    values: Array
    """The tensor times the scale, clipped to the format's range."""
    scale: Array
    """float32 []: a power of two."""
    amax: Array
    """Largest magnitude of the tensor, float32 []."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(recipe: Fp8Matmul, letters: Letters, x: Array, w: Array, amax: Array | None) -> Array:
    return _forward(recipe, letters, x, w, amax)[0]


def _forward(recipe: Fp8Matmul, letters: Letters, x: Array, w: Array, amax: Array | None) -> tuple[Array, tuple]:
    form, _ = recipe.formats()
    small = quantize(x, form, recipe.scaling(amax, 0))
    w_small = quantize(w.astype(x.dtype), form, recipe.scaling(amax, 1))
    precision = lax.Precision.DEFAULT if recipe.cfg.fast_accumulation else lax.Precision.HIGHEST
    y = product(letters, small, w_small, dtype=x.dtype, precision=precision)
    return y, (small.values, small.amax, w, amax)


def _backward(recipe: Fp8Matmul, letters: Letters, saved: tuple, dy: Array) -> tuple[Array, Array, Array | None]:
    (values, x_amax, w, amax), (first, second, out) = saved, letters
    form, gradient_form = recipe.formats()
    small = Quantized(values, scale_of(x_amax, form, recipe.scaling(amax, 0)), x_amax)
    w_small = quantize(w.astype(dy.dtype), form, recipe.scaling(amax, 1))
    dy_small = quantize(dy, gradient_form, recipe.scaling(amax, 2))
    precision = lax.Precision.HIGHEST
    dx = product((out, second, first), dy_small, w_small, dtype=dy.dtype, precision=precision)
    dw = product((first, out, second), small, dy_small, dtype=w.dtype, precision=precision)
    return dx, dw, None if amax is None else jnp.stack([x_amax, w_small.amax, dy_small.amax])


_multiply.defvjp(_forward, _backward)


def terms(equation: str) -> Letters:
    """ "bsd,df->bsf" -> ("bsd", "df", "bsf"). Raises ValueError if it is not a product of two tensors."""
    inputs, arrow, out = equation.partition("->")
    first, comma, second = inputs.partition(",")
    letters = first, second, out
    joined = "".join(letters)
    repeated = any(len(set(term)) < len(term) for term in letters)
    if not (arrow and comma) or repeated or any(joined.count(letter) < 2 for letter in joined):
        raise ValueError(f"{equation!r} is not a product of two tensors")
    return letters


def refuse_odd_sides(equation: str, x: Array, w: Array) -> None:
    """Raises UserError unless both sides of a weight matrix, contracted and output, are multiples of 16."""
    first, second, out = terms(equation)
    sizes = dict(zip(second, w.shape, strict=True))
    sides = {"in": 1, "out": 1}
    for letter, size in sizes.items():
        if letter not in out:
            sides["in"] *= size
        elif letter not in first:
            sides["out"] *= size
    odd = [f"{size} {name}" for name, size in sides.items() if size % MULTIPLE]
    if odd:
        raise UserError(
            f"precision.fp8: the product {equation} of {x.shape} and weights {w.shape} is {' and '.join(odd)}, and "
            f"8-bit matmuls need multiples of {MULTIPLE}.\nChange the model's sizes, or set precision.fp8=none."
        )


def quantize(x: Array, form: jnp.dtype, scaling: Scaling = ITS_OWN) -> Quantized:
    """x in 8 bits. Values beyond the range of the scale are clipped.

    Infinities and NaNs are not: an infinity clipped to a finite number would be hidden from the guard. With a scale
    from the tensor itself all of it becomes NaN, with an expected one the elements that are not finite do.

    The maximum is over what is here: all of x over mesh axes that are left to the compiler, each device's part over
    manual ones. With an expected maximum nothing waits for it.
    """
    top, x = float(jnp.finfo(form).max), _as_stored(x)
    amax = jnp.max(jnp.abs(x))
    scale = scale_of(amax, form, scaling)
    values = jnp.clip(x * scale, -top, top)
    values = values if scaling.expected is None else jnp.where(jnp.isfinite(x), values, jnp.nan)
    return Quantized(values.astype(form), scale, amax)


def scale_of(amax: Array, form: jnp.dtype, scaling: Scaling) -> Array:
    """Scale of a tensor with that largest magnitude; NaN where it is not finite and nothing else is expected."""
    if scaling.expected is None:
        return jnp.where(jnp.isfinite(amax), scale_for(amax, form), jnp.nan)
    return scale_for(scaling.expected, form, scaling.margin)


def scale_for(largest: Array, form: jnp.dtype, margin: int = 0) -> Array:
    """The largest power of two that keeps `largest` times it within the format's range, over 2^margin."""
    ratio = lax.bitcast_convert_type(float(jnp.finfo(form).max) / jnp.maximum(largest, SMALLEST), jnp.uint32)
    return lax.bitcast_convert_type(ratio & jnp.uint32(_EXPONENT), jnp.float32) * 2.0**-margin


def _as_stored(x: Array) -> Array:
    # The compiler may pass the float32 values from before rounding in some uses of x: these give other 8-bit values.
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x.astype(jnp.float32), info.nexp, info.nmant)


def product(letters: Letters, a: Quantized, b: Quantized, *, dtype: jnp.dtype, precision: lax.Precision) -> Array:
    """a times b, as `dtype`; letters: of a's dimensions, of b's, of the result's.

    Written as the product of the tensors scaled back, which is exact in bfloat16. The compiler for GPUs turns it into a
    product in 8 bits whose result is scaled as it is stored (given the options in mesh.xla_options; tests insist on
    it). Scaling the result here instead would separate sums of products from their sum over devices, which would then
    be done one by one.

    precision: on an NVIDIA GPU, DEFAULT lets the tensor cores accumulate in fewer bits than float32, HIGHEST does not.
    """
    lhs, rhs, out = letters
    shared = [letter for letter in lhs if letter in rhs and letter in out]
    summed = [letter for letter in lhs if letter in rhs and letter not in out]
    result = [*shared, *(n for n in lhs if n not in rhs), *(n for n in rhs if n not in lhs)]

    def scaled_back(small: Quantized) -> Array:
        return small.values.astype(dtype) * (1 / small.scale).astype(dtype)

    def places(term: str, names: list[str]) -> tuple[int, ...]:
        return tuple(term.index(name) for name in names)

    y = lax.dot_general(
        scaled_back(a),
        scaled_back(b),
        ((places(lhs, summed), places(rhs, summed)), (places(lhs, shared), places(rhs, shared))),
        preferred_element_type=dtype,
        precision=precision,
    )
    return y if list(out) == result else y.transpose(places("".join(result), list(out)))


def refuse_old(device: jax.Device, setting: str = "precision.fp8") -> None:
    """Raises UserError for a real or virtual GPU that cannot multiply 8-bit floats. CPUs do it slowly.

    setting: that asks for them, and may be none.
    """
    if device.platform == "cpu":
        return
    version = str(getattr(device, "compute_capability", ""))
    capability = tuple(int(part) for part in version.split(".") if part.isdigit())
    if capability < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise UserError(
            f"{setting}: {device.device_kind} has compute capability {version or 'unknown'}, and 8-bit matmuls "
            f"need {needed} or later (H100, B200).\nSet {setting}=none."
        )
