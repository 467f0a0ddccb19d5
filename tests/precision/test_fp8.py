"""8-bit matmuls with current and delayed scales: against numpy, at the ends of the formats' range, and refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from user_errors import user_error

from megajax.config import load
from megajax.config.errors import ConfigError
from megajax.layers.quantization.config import QuantizationConfig
from megajax.layers.quantization.replace_matrices import demand_device
from megajax.mesh.layer_observations import accumulated
from megajax.models.presets.llama import llama3
from megajax.precision.config import Fp8CurrentConfig, Fp8DelayedConfig
from megajax.precision.fp8 import STARTS, AmaxHistory, PerTensor, quantize, refuse_old
from megajax.precision.matmul import RoundedMatmul, terms

CURRENT = RoundedMatmul(PerTensor(Fp8CurrentConfig()))
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
FORMS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
CASES = {
    "bsd,df->bsf": ((2, 16, 32), (32, 48)),
    "bsnh,nhd->bsd": ((2, 16, 4, 8), (4, 8, 16)),
    "ecd,edf->ecf": ((3, 16, 32), (3, 32, 16)),
    "bd,df->fb": ((16, 32), (32, 16)),
}


def rounded(x: np.ndarray, form: str, expected: float | None = None, margin: int = 0) -> np.ndarray:
    """x as stored in 8 bits, float64, by the formats' definition: without any library's conversion.

    expected: the largest value that the scale is made for, by default that of x.
    """
    digits, smallest = {"e4m3": (3, -6), "e5m2": (2, -14)}[form]
    largest = np.abs(x).max() if expected is None else expected
    scale = 2.0 ** (np.floor(np.log2(LARGEST[form] / largest)) - margin) if largest else 1.0
    y = np.asarray(x, np.float64) * scale
    y = y if expected is None else np.clip(y, -LARGEST[form], LARGEST[form])
    step = np.ldexp(1.0, np.maximum(np.frexp(y)[1] - 1, smallest) - digits)
    return np.clip(np.round(y / step) * step, -LARGEST[form], LARGEST[form]) / scale


def draw(shape: tuple[int, ...], scale: float, seed: int) -> jax.Array:
    """Over several orders of magnitude, so that some fall below the normal numbers of a format."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(scale * rng.normal(size=shape) * np.exp2(rng.integers(-14, 1, shape)), jnp.float32)


@pytest.mark.parametrize(
    ("equation", "form"), [*((equation, "hybrid") for equation in [*CASES][1:]), ("bsd,df->bsf", "e4m3")]
)
def test_forward_and_both_gradients_are_products_of_8_bit_numbers(equation: str, form: str) -> None:
    shapes, (first, second, out) = CASES[equation], terms(equation)
    x, w = draw(shapes[0], 3.0, 0), draw(shapes[1], 0.02, 1)
    multiply = RoundedMatmul(PerTensor(Fp8CurrentConfig(format=form)))
    y, pull = jax.vjp(lambda x, w: multiply(equation, x, w), x, w)
    dy = draw(y.shape, 1e-5, 2)
    dx, dw = pull(dy)
    small_x, small_w = (rounded(np.asarray(a), "e4m3") for a in (x, w))
    small_dy = rounded(np.asarray(dy), "e5m2" if form == "hybrid" else "e4m3")
    for actual, expected in (
        (y, np.einsum(equation, small_x, small_w)),
        (dx, np.einsum(f"{out},{second}->{first}", small_dy, small_w)),
        (dw, np.einsum(f"{first},{out}->{second}", small_x, small_dy)),
    ):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    exact = np.einsum(equation, np.asarray(x, np.float64), np.asarray(w, np.float64))
    assert 0.003 < np.abs(y - exact).max() / np.abs(exact).max() < 0.1, "8 bits round, but not more than they do"


def test_the_input_in_8_bits_and_the_weight_are_saved_for_the_backward_pass() -> None:
    x, w = (jnp.ones(shape, jnp.bfloat16) for shape in CASES["bsd,df->bsf"])
    _, pull = jax.vjp(lambda w, x: CURRENT("bsd,df->bsf", x, w), w, x)
    assert any(leaf is w for leaf in jax.tree.leaves(pull)), "not a copy: a pipeline leaves the weights out"
    residuals = {(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(pull) if leaf is not w}
    assert residuals == {(x.shape, "float8_e4m3fn"), ((), "float32")}


@pytest.mark.parametrize("form", FORMS)
def test_scales_are_powers_of_two_that_use_the_range(form: str) -> None:
    for largest in (1e-30, 3e-7, 1.0, 1.75, 1.7578125, 448.0, float(np.nextafter(np.float32(448), np.inf)), 6e4, 3e38):
        x = jnp.asarray([largest, -largest / 3, 0.0], jnp.float32)
        small, scale, *_ = quantize(x, jnp.dtype(FORMS[form]))
        assert np.frexp(scale)[0] == 0.5, "a power of two"
        assert LARGEST[form] / 2 < largest * float(scale) <= LARGEST[form]
        # Where the scale rounds up to a power of two, the largest value is clipped, not turned into NaN.
        assert np.asarray(small).astype(np.float64).max() <= LARGEST[form]
        np.testing.assert_allclose(
            np.asarray(small).astype(np.float64) / scale, x, rtol=0.07 if form == "e4m3" else 0.13
        )


def test_zeros_stay_zeros() -> None:
    x, w = jnp.zeros((16, 16), jnp.bfloat16), jnp.ones((16, 16), jnp.bfloat16)
    y, pull = jax.vjp(lambda x, w: CURRENT("bd,df->bf", x, w), x, w)
    assert not np.asarray(y).any() and not any(np.asarray(g).any() for g in pull(jnp.zeros_like(y)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", ["x", "w", "dy"])
def test_nonfinite_values_propagate(value: float, place: str) -> None:
    arrays = {name: np.ones((16, 16), np.float32) for name in ("x", "w", "dy")}
    arrays[place][3, 5] = value
    x, w, dy = (jnp.asarray(a, jnp.bfloat16) for a in arrays.values())
    y, pull = jax.vjp(lambda x, w: CURRENT("bd,df->bf", x, w), x, w)
    dx, dw = pull(dy)
    # dx is computed from w and dy, dw from x and dy: each result of such a tensor is NaN.
    assert np.isnan(np.asarray(y, np.float32)).all() == (place != "dy")
    assert np.isnan(np.asarray(dx, np.float32)).all() == (place != "x")
    assert np.isnan(np.asarray(dw, np.float32)).all() == (place != "w")


@pytest.mark.parametrize("algorithm", ["most_recent", "max"])
def test_four_steps_equal_those_of_numpy(algorithm: str) -> None:
    """History 2; magnitudes fall and rise so that the two algorithms differ and some values are clipped."""
    cfg = Fp8DelayedConfig(history=2, algorithm=algorithm, margin=1)
    history, multiply = AmaxHistory(cfg, token_share=0.5), RoundedMatmul(PerTensor(cfg))
    state, scale = jnp.zeros((3, 2)), jnp.float32(8)
    past: list[np.ndarray] = []
    rng, clipped = np.random.default_rng(0), 0
    for size in (1.0, 0.01, 0.0001, 100.0):
        x, w, dy = (rng.normal(0, size, shape) for shape in ((2, 16, 32), (32, 48), (2, 16, 48)))
        used = history.used(state, scale)
        y, pull = jax.vjp(lambda x, w, e: multiply("bsd,df->bsf", x, w, e), jnp.float32(x), jnp.float32(w), used)
        dx, dw, observed = pull(jnp.float32(dy))

        before = past[-1:] if algorithm == "most_recent" else past[-2:]
        expected = np.max(before, axis=0) if past else np.array(STARTS) * [1, 1, 0.5]
        expected = expected * [1, 1, 8]
        now = np.array([np.abs(np.float32(a)).max() for a in (x, w, dy)])
        np.testing.assert_array_equal(observed, now)
        sx, sw, sdy = (
            rounded(np.float32(a), form, e, 1)
            for a, form, e in zip((x, w, dy), ("e4m3", "e4m3", "e5m2"), expected, strict=True)
        )
        clipped += np.abs(sx).max() < np.abs(x).max() / 2
        for actual, exact in (
            (y, np.einsum("bsd,df->bsf", sx, sw)),
            (dx, np.einsum("bsf,df->bsd", sdy, sw)),
            (dw, np.einsum("bsd,bsf->df", sx, sdy)),
        ):
            np.testing.assert_allclose(actual, exact, rtol=0, atol=2e-6 * np.abs(exact).max() + 1e-30)
        state = history.updated(state, observed, scale)
        past.append(now / [1, 1, 8])
        np.testing.assert_allclose(state[:, 0], past[-1], rtol=1e-7)
    assert clipped == 1, "the last step is far larger than what the scales were made for"


def test_values_outside_the_step_are_not_recorded_and_infinities_are_visible() -> None:
    history = AmaxHistory(Fp8DelayedConfig(history=3), token_share=1.0)
    state = jnp.arange(1.0, 10).reshape(3, 3)
    actual = history.updated(state, jnp.array([5.0, 0.0, 6.0]), jnp.float32(2))
    np.testing.assert_array_equal(actual, [[5, 1, 2], [4, 5, 6], [3, 7, 8]])
    x = jnp.ones((2, 16, 32)).at[0, 0, 0].set(jnp.inf)
    y = CURRENT("bsd,df->bsf", x, jnp.ones((32, 48)), jnp.ones(3))
    assert np.isnan(y[0, 0]).all() and np.isfinite(y[1]).all()
    total = accumulated("0.mlp.up.amax.max", jnp.array([1.0, 4.0, 1.0]), jnp.array([2.0, 3.0, jnp.nan]))
    np.testing.assert_array_equal(total, [2, 4, np.nan])
    np.testing.assert_array_equal(accumulated("0.mlp.up", jnp.ones(2), jnp.ones(2)), [2, 2])


@pytest.mark.parametrize("equation", ["bsd,df->bs", "bsd->bd", "bsd,df", "bdd,df->bf", "bd,df,fg->bg"])
def test_equations_that_are_no_product_of_two_tensors(equation: str) -> None:
    with pytest.raises(ValueError, match="not a product of two tensors"):
        terms(equation)


def test_matrices_with_odd_sides_are_refused_by_name() -> None:
    with user_error("precision.matmul"):
        CURRENT("bsd,df->bsf", jnp.ones((1, 16, 32)), jnp.ones((32, 40)))


class Device:
    """A device as jax describes it."""

    def __init__(self, platform: str, capability: str | None):
        self.platform, self.device_kind = platform, "NVIDIA A100"
        if capability is not None:
            self.compute_capability = capability


@pytest.mark.parametrize("capability", ["8.0", "8.6", "7.5", None])
def test_GPUs_without_8_bit_floats_are_refused(capability: str | None) -> None:
    device: Any = Device("gpu", capability)
    with user_error("precision.matmul"):
        refuse_old(device)


@pytest.mark.parametrize(("platform", "capability"), [("gpu", "9.0"), ("cuda", "10.0"), ("gpu", "12.1"), ("cpu", None)])
def test_GPUs_with_8_bit_floats_are_accepted(platform: str, capability: str | None) -> None:
    device: Any = Device(platform, capability)
    refuse_old(device)


def test_GPUs_without_8_bit_matmuls_are_refused_for_quantized_activations() -> None:
    device: Any = Device("gpu", "8.0")
    model: Any = llama3("8b")
    for quantization in (None, QuantizationConfig(weights="fp8")):
        demand_device(type("Model", (), {"quantization": quantization}), device)
    eight = QuantizationConfig(weights="fp8", activations="fp8")
    with user_error("model.quantization.activations"):
        demand_device(type("Model", (), {"quantization": eight}), device)
    demand_device(model, device)


REFUSED = {
    "ends": (
        ["--precision.matmul.first_layers=3", "--precision.matmul.last_layers=1"],
        "first_layers=3 and last_layers=1 leave none of the 4 layers to it",
    ),
    "no ends": (["--precision.matmul.last_layers=-1"], "precision.matmul.last_layers: must be at least 0, got -1"),
    "dtype": (["--precision.compute=float32"], "precision.matmul: needs compute=bfloat16, got float32"),
    "format": (["--precision.matmul.format=e3m4"], "precision.matmul.format: expected one of hybrid, e4m3, got 'e3m4'"),
    "tokens": (
        ["--model.sequence_length=24"],
        "rows of 24 over parallel.context=1 are 24, but precision.matmul needs a multiple of 16",
    ),
    "hidden": (["--model.hidden=72"], "model.hidden: is 72, but precision.matmul needs a multiple of 16"),
    "ffn": (["--parallel.tensor=2", "--model.stack.pattern.0.mlp.ffn=176"], "176 over parallel.tensor=2 is 88, but"),
    "heads": (
        ["--parallel.tensor=2", "--model.stack.pattern.0.mixer.head_dim=8"],
        "2 of 8 over parallel.tensor=2 are 8, but",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_exclude_each_other(case: str) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        load("llama3.py:debug", "--precision.compute=bfloat16", "--precision.matmul=Fp8Current", *overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "message"), [("expert.ffn", r"24 over parallel\.tensor=1 is 24"), ("latent", "is 24")]
)
def test_sides_of_experts_and_latents_are_multiples(setting: str, message: str) -> None:
    settings = (
        "--precision.compute=bfloat16",
        "--precision.matmul=Fp8Current",
        f"--model.stack.pattern.0.mlp.{setting}=24",
    )
    needs = rf"mlp\.{setting}: {message}, but precision.matmul needs a multiple of 16"
    with pytest.raises(ConfigError, match=needs):
        load("mixtral.py:debug", *settings)
