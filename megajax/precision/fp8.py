"""Matrix products in 8-bit floating point (Micikevicius et al. 2022, "FP8 formats for deep learning").

Operands go to e4m3 (4 bits of precision, largest 448), gradients to e5m2 (3 bits, largest 57344) or, by choice, e4m3
too. One scale for a tensor brings its largest magnitude, taken from the tensor itself or from the steps before, just
below the format's largest.

Scales are powers of two. So numbers are scaled back without being rounded again, and the same number becomes the same 8
bits under any scale, unless it is so much smaller than the tensor's largest that it falls below the format's normal
numbers. Devices that scale their own parts of a tensor therefore agree on nearly everything.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.config.errors import UserError
from megajax.precision.config import MULTIPLE, Fp8Config

OLDEST = (8, 9)
"""Compute capability of the first GPUs that multiply 8-bit floats."""
SMALLEST = 2.0**-100
"""Tensors whose largest magnitude is below this are scaled as if it were this: scales stay within float32."""
_EXPONENT = 0x7F800000


@dataclass(frozen=True, slots=True)
class Fp8Matmul:
    """How a Layout multiplies: forward, and both products of the backward pass, in 8 bits. Hashable."""

    cfg: Fp8Config

    def __call__(self, equation: str, x: Array, w: Array, expected: Array | None = None) -> Array:
        """einsum of an activation and a weight, in x's dtype, accumulated in float32; w's gradient has w's dtype.

        equation: "bsd,df->bsf" and the like; each letter is in two of the three, or in all, and in none twice.
        Kept for the backward pass are x in 8 bits with its scale, and w as it came: its 8 bits are made again, which
        leaves a pipeline, whose stages hold the weights anyway, nothing of them to store.
        expected: largest magnitudes of x, w and the result's gradient that scales are made for, float32 [3]; its
        cotangent is the largest there were. None: scales are made from the tensors.

        Raises UserError where a matrix of weights has sides that are no multiples of 16.
        """
        first, second, out = terms(equation)
        refuse_odd_sides(equation, x, w)
        if expected is not None:
            return self._delayed((first, second, out), x, w, expected)
        forward, backward = self.formats()
        fast = lax.Precision.DEFAULT if self.cfg.fast_accumulation else lax.Precision.HIGHEST

        @jax.custom_vjp
        def multiply(x: Array, w: Array) -> Array:
            return keep(x, w)[0]

        def keep(x: Array, w: Array) -> tuple[Array, tuple]:
            small, letters = quantize(x, forward), (first, second, out)
            w_small = quantize(w.astype(x.dtype), forward)
            return product(letters, small, w_small, dtype=x.dtype, precision=fast), (small, w)

        def gradients(kept: tuple, dy: Array) -> tuple[Array, Array]:
            small, w = kept
            dy_small, w_small = quantize(dy, backward), quantize(w.astype(dy.dtype), forward)
            exact = lax.Precision.HIGHEST
            dx = product((out, second, first), dy_small, w_small, dtype=dy.dtype, precision=exact)
            return dx, product((first, out, second), small, dy_small, dtype=w.dtype, precision=exact)

        multiply.defvjp(keep, gradients)
        return multiply(x, w)

    def _delayed(self, letters: tuple[str, str, str], x: Array, w: Array, expected: Array) -> Array:
        first, second, out = letters
        forward, backward = self.formats()
        margin = 0 if self.cfg.delayed is None else self.cfg.delayed.margin
        fast = lax.Precision.DEFAULT if self.cfg.fast_accumulation else lax.Precision.HIGHEST

        @jax.custom_vjp
        def multiply(x: Array, w: Array, expected: Array) -> Array:
            return keep(x, w, expected)[0]

        def keep(x: Array, w: Array, expected: Array) -> tuple[Array, tuple]:
            small, seen = quantize_as(x, forward, expected[0], margin)
            w_small, _ = quantize_as(w.astype(x.dtype), forward, expected[1], margin)
            return product(letters, small, w_small, dtype=x.dtype, precision=fast), (small[0], seen, w, expected)

        def gradients(kept: tuple, dy: Array) -> tuple[Array, Array, Array]:
            x_small, seen, w, expected = kept
            small = x_small, scale_for(expected[0], forward, margin)
            w_small, w_seen = quantize_as(w.astype(dy.dtype), forward, expected[1], margin)
            dy_small, dy_seen = quantize_as(dy, backward, expected[2], margin)
            exact = lax.Precision.HIGHEST
            dx = product((out, second, first), dy_small, w_small, dtype=dy.dtype, precision=exact)
            dw = product((first, out, second), small, dy_small, dtype=w.dtype, precision=exact)
            return dx, dw, jnp.stack([seen, w_seen, dy_seen])

        multiply.defvjp(keep, gradients)
        return multiply(x, w, expected)

    def formats(self) -> tuple[jnp.dtype, jnp.dtype]:
        """Of activations and weights, and of gradients."""
        gradients = jnp.float8_e5m2 if self.cfg.format == "hybrid" else jnp.float8_e4m3fn
        return jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(gradients)


def terms(equation: str) -> tuple[str, str, str]:
    """ "bsd,df->bsf" -> ("bsd", "df", "bsf"). Raises ValueError for what isn't a product of two tensors."""
    inputs, arrow, out = equation.partition("->")
    first, comma, second = inputs.partition(",")
    found = first, second, out
    seen = "".join(found)
    once = any(len(set(term)) < len(term) for term in found)
    if not (arrow and comma) or once or any(seen.count(letter) < 2 for letter in seen):
        raise ValueError(f"{equation!r} is not a product of two tensors")
    return found


def refuse_odd_sides(equation: str, x: Array, w: Array) -> None:
    """A matrix of weights has a side for what is summed over and one for what results: both multiples of 16."""
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


def quantize(x: Array, form: jnp.dtype) -> tuple[Array, Array]:
    """x -> (x * scale in `form`, scale float32 []): the largest power of two that leaves nothing above its largest.

    What rounding would bring above that is clipped. All of a tensor with an infinity or NaN becomes NaN: an
    infinity clipped to a finite number would hide from the guard. The maximum is over what is here: all of x over mesh
    axes that are left to the compiler, each device's part over manual ones.
    """
    top, x = float(jnp.finfo(form).max), _as_stored(x)
    largest = jnp.max(jnp.abs(x))
    scale = jnp.where(jnp.isfinite(largest), scale_for(largest, form), jnp.nan)
    return jnp.clip(x * scale, -top, top).astype(form), scale


def quantize_as(x: Array, form: jnp.dtype, expected: Array, margin: int) -> tuple[tuple[Array, Array], Array]:
    """x -> ((x * scale in `form`, scale float32 []), largest magnitude of x float32 []).

    The scale is made for the largest magnitude that is expected, so that nothing waits for the one there is. What is
    larger than the scale lets through is clipped; infinities become NaN, for the guard to see.
    """
    top, x, scale = float(jnp.finfo(form).max), _as_stored(x), scale_for(expected, form, margin)
    small = jnp.where(jnp.isfinite(x), jnp.clip(x * scale, -top, top), jnp.nan).astype(form)
    return (small, scale), jnp.max(jnp.abs(x))


def scale_for(largest: Array, form: jnp.dtype, margin: int = 0) -> Array:
    """The largest power of two that brings `largest` to no more than the format's largest, over 2^margin."""
    ratio = lax.bitcast_convert_type(float(jnp.finfo(form).max) / jnp.maximum(largest, SMALLEST), jnp.uint32)
    return lax.bitcast_convert_type(ratio & jnp.uint32(_EXPONENT), jnp.float32) * 2.0**-margin


def _as_stored(x: Array) -> Array:
    # The compiler may pass the float32 numbers that x was rounded from, here and not there: they become other 8 bits.
    own = jnp.finfo(x.dtype)
    return lax.reduce_precision(x.astype(jnp.float32), own.nexp, own.nmant)


def product(
    letters: tuple[str, str, str],
    a: tuple[Array, Array],
    b: tuple[Array, Array],
    *,
    dtype: jnp.dtype,
    precision: lax.Precision,
) -> Array:
    """Quantized a times quantized b, as `dtype`; letters: of a's dimensions, of b's, of the result's.

    Written as a product of what is scaled back, which is exact in bfloat16; the compiler for GPUs makes of it a product
    in 8 bits that is scaled as it is stored (with the options in config.xla, on which tests insist). Scaling the result
    instead would stand between sums of products and their sum over devices: those would be summed one by one.

    precision: on an NVIDIA GPU, DEFAULT lets the tensor cores add up in fewer bits than float32, HIGHEST does not.
    """
    left, right, out = letters
    shared = [letter for letter in left if letter in right and letter in out]
    summed = [letter for letter in left if letter in right and letter not in out]
    made = [*shared, *(n for n in left if n not in right), *(n for n in right if n not in left)]

    def scaled_back(small: tuple[Array, Array]) -> Array:
        return small[0].astype(dtype) * (1 / small[1]).astype(dtype)

    def places(term: str, names: list[str]) -> tuple[int, ...]:
        return tuple(term.index(name) for name in names)

    y = lax.dot_general(
        scaled_back(a),
        scaled_back(b),
        ((places(left, summed), places(right, summed)), (places(left, shared), places(right, shared))),
        preferred_element_type=dtype,
        precision=precision,
    )
    return y if list(out) == made else y.transpose(places("".join(made), list(out)))


def refuse_old(device: jax.Device) -> None:
    """Raises UserError for a GPU, there or absent, that cannot multiply 8-bit floats. CPUs do it slowly."""
    if device.platform == "cpu":
        return
    written = str(getattr(device, "compute_capability", ""))
    found = tuple(int(part) for part in written.split(".") if part.isdigit())
    if found < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise UserError(
            f"precision.fp8: {device.device_kind} has compute capability {written or 'unknown'}, and 8-bit matmuls "
            f"need {needed} or later (H100, B200).\nSet precision.fp8=none."
        )
