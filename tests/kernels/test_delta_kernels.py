"""The kernels of the gated delta rule, interpreted on a CPU: against the recurrence, and their choice."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import QUICK

from megajax.config.errors import UserError
from megajax.kernels.attention.capability import Choice, Device, Request
from megajax.kernels.ssm import delta_triton
from megajax.kernels.ssm import gated_delta as module
from megajax.kernels.ssm.capability import DELTA_BACKENDS, DeltaSizes, choose_delta
from megajax.kernels.ssm.chunks import runs_of
from megajax.kernels.ssm.gated_delta import (
    DeltaRule,
    Form,
    form_of,
    gated_delta,
    gated_delta_transition,
)
from megajax.layers.delta.config import GatedDeltaNetConfig

INTERPRETED = Form(*(partial(of, interpret=True) for of in form_of("triton")))
NAMES = ("q", "k", "v", "g", "beta", "state")
SLOW = pytest.mark.slow


def inputs(
    length: int, *, rows: int = 1, heads: int = 2, groups: int = 1, keys: int = 16, size: int = 16, **kind: bool
) -> dict[str, Any]:
    """channels: decays by channel; repeated: one key, and corrections of up to twice the error.

    Some decays are exp(-20).
    """
    rng, repeated = np.random.default_rng(length), kind.get("repeated", False)
    k = rng.normal(size=(rows, 1 if repeated else length, groups, keys))
    k = np.broadcast_to(k / np.linalg.norm(k, axis=-1, keepdims=True), (rows, length, groups, keys))
    decays = (rows, length, heads, *([keys] if kind.get("channels") else []))
    g = -rng.exponential(0.01 if repeated else 0.3, size=decays)
    values = {
        "q": rng.normal(size=k.shape),
        "k": k,
        "v": rng.normal(size=(rows, length, heads, size)),
        "g": np.where(rng.random(decays) < 0.05, -20.0, g),
        "beta": rng.uniform(0, 2 if repeated else 1, size=(rows, length, heads)),
        "state": rng.normal(size=(rows, heads, keys, size)),
    }
    return {name: value.astype(np.float32) for name, value in values.items()}


def documents(length: int, rows: int) -> np.ndarray:
    """The second of three documents is at places 20 to 29."""
    return np.array([[1] * 20 + [2] * 10 + [1] * (length - 30)] * rows, np.int32)


def looped(arrays: dict[str, Any], ids: np.ndarray) -> dict[str, Any]:
    """`pulled` of the recurrence in float64, one position of one head after another, and back."""
    q, k, v, g, beta, first = (arrays[name].astype(np.float64) for name in NAMES)
    share, y, last = v.shape[2] // k.shape[2], np.zeros(v.shape), np.zeros(first.shape)
    of = {name: np.zeros(arrays[name].shape) for name in NAMES}
    for row, n in np.ndindex(v.shape[0], v.shape[2]):
        state, steps, group = first[row, n], [], n // share
        for t in range(v.shape[1]):
            start = t > 0 and ids[row, t] != ids[row, t - 1]
            decay = np.exp(g[row, t, n])[..., None] * (not start)
            decayed, key = decay * state, k[row, t, group]
            error = v[row, t, n] - key @ decayed
            state = decayed + beta[row, t, n] * np.outer(key, error)
            y[row, t, n] = q[row, t, group] @ state / q.shape[-1] ** 0.5
            steps.append((decay, decayed, error, state))
        last[row, n], dstate = state, -np.sin(state)
        for t, (decay, decayed, error, state) in reversed([*enumerate(steps)]):
            dy, key = np.cos(y[row, t, n]) / q.shape[-1] ** 0.5, k[row, t, group]
            of["q"][row, t, group] += state @ dy
            dstate = dstate + np.outer(q[row, t, group], dy)
            dupdate = key @ dstate
            derror = beta[row, t, n] * dupdate
            of["k"][row, t, group] += dstate @ (beta[row, t, n] * error) - decayed @ derror
            of["v"][row, t, n], of["beta"][row, t, n] = derror, dupdate @ error
            ddecayed = dstate - np.outer(key, derror)
            of["g"][row, t, n] = (ddecayed * decayed).sum(-1 if g.ndim == 4 else None)
            dstate = decay * ddecayed
        of["state"][row, n] = dstate
    return of | {"y": y, "last": last}


def pulled(arrays: dict[str, Any], ids: np.ndarray, *, of: Any) -> dict[str, Any]:
    """Outputs, the last state, and gradients of sum(sin(outputs)) + sum(cos(last state))."""

    def loss(arrays: dict[str, Any]) -> Any:
        y, last = of(DeltaRule(**arrays, runs=runs_of(ids)))
        wide = y.astype(jnp.float32)
        return jnp.sum(jnp.sin(wide)) + jnp.sum(jnp.cos(last)), {"y": y, "last": last}

    gradients, outputs = jax.grad(loss, has_aux=True)(arrays)
    return gradients | outputs


def compiled(of: Any, arrays: dict[str, Any], ids: np.ndarray) -> Any:
    return jax.jit(partial(pulled, of=of)).lower(arrays, ids).compile(compiler_options=dict(QUICK))


def alike(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """To 1e-5 of the largest number."""
    for name, value in expected.items():
        scale = max(1.0, float(np.abs(value).max()))
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("channels", [False, pytest.param(True, marks=SLOW)])
def test_the_kernels_equal_the_recurrence_and_isolate_documents(channels: bool) -> None:
    """Of a length that no chunk divides, with a state before it. Other documents change, and where they end."""
    arrays, ids = inputs(37, channels=channels), documents(37, 1)
    run = compiled(partial(gated_delta, chunk=32, kernel=INTERPRETED), arrays, ids)
    found = run(arrays, ids)
    alike(found, looped(arrays, ids))
    other_ids = np.array([[5] * 7 + [6] * 13 + [2] * 10 + [9] * 3 + [1] * 4], np.int32)
    changed = {name: np.where(np.arange(37) // 10 == 2, 1, -3.0).astype(np.float32) for name in ("q", "v")}
    altered = arrays | {name: arrays[name] * factor[None, :, None, None] for name, factor in changed.items()}
    altered["state"] = 3 * arrays["state"]
    altered["g"] = arrays["g"] * changed["q"].reshape(1, -1, *[1] * (arrays["g"].ndim - 2)) ** 2
    another = run(altered, other_ids)
    for name in ("q", "k", "v", "g", "beta", "y"):
        np.testing.assert_array_equal(found[name][:, 20:30], another[name][:, 20:30], err_msg=name)
        assert np.any(found[name][:, :20] != another[name][:, :20])


@SLOW
@pytest.mark.parametrize(
    ("sizes", "chunk"),
    [
        ({"rows": 2, "heads": 4, "groups": 2, "size": 80}, 32),
        ({"rows": 2, "heads": 4, "groups": 2, "channels": True}, 32),
        ({"keys": 64, "size": 128, "repeated": True}, 64),
        ({"keys": 256, "size": 64}, 32),
    ],
)
def test_other_sizes_equal_the_recurrence(sizes: dict[str, Any], chunk: int) -> None:
    arrays, ids = inputs(90, **sizes), documents(90, sizes.get("rows", 1))
    found = compiled(partial(gated_delta, chunk=chunk, kernel=INTERPRETED), arrays, ids)(arrays, ids)
    alike(found, looped(arrays, ids))


@SLOW
def test_inputs_in_bfloat16_stay_close() -> None:
    arrays, ids = inputs(90, keys=32, size=32), documents(90, 1)
    halves = arrays | {name: jnp.asarray(arrays[name], jnp.bfloat16) for name in ("q", "k", "v")}
    found = compiled(partial(gated_delta, chunk=64, kernel=INTERPRETED), halves, ids)(halves, ids)
    assert found["v"].dtype == found["y"].dtype == jnp.bfloat16 and found["last"].dtype == jnp.float32
    widened = halves | {name: np.asarray(halves[name], np.float32) for name in ("q", "k", "v")}
    for name, value in looped(widened, ids).items():
        gap = np.asarray(found[name], np.float32) - value
        assert np.linalg.norm(gap) < 1.5e-2 * np.linalg.norm(value), name


@SLOW
@pytest.mark.parametrize("channels", [False, True])
def test_a_row_transforms_the_state_before_it(channels: bool) -> None:
    """With gradients, which equal those of plain JAX."""
    arrays = inputs(40, rows=2, channels=channels)
    ids = np.array([[1] * 40, [1] * 30 + [2] * 10], np.int32)

    def transformed(arrays: dict[str, Any], form: Any) -> Any:
        transition, added = gated_delta_transition(DeltaRule(**arrays, runs=runs_of(ids)), 16, form)
        return jnp.sum(jnp.sin(transition)) + jnp.sum(jnp.cos(added)), {"transition": transition, "added": added}

    results = []
    for form in (INTERPRETED, "chunks"):
        gradients, outputs = jax.jit(jax.grad(partial(transformed, form=form), has_aux=True))(arrays)
        results.append(gradients | outputs)
    assert np.all(results[0]["transition"][1] == 0) and np.any(results[0]["transition"][0] != 0)
    alike(*results)


A100, T4, CPU = (Device(name=name, capability=at) for name, at in (("A100", (8, 0)), ("T4", (7, 5)), ("cpu", None)))
B200 = Device(name="B200", capability=(10, 0))
FITTING = DeltaSizes(keys=128, values=128, chunk=64)


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "reason"),
    [
        (A100, "bfloat16", FITTING, None),
        (None, None, FITTING._replace(keys=256, values=48, chunk=16), None),
        (CPU, "bfloat16", FITTING, "needs an NVIDIA GPU, jax found cpu"),
        (T4, "bfloat16", FITTING, "runs from compute capability 8.0 on, T4 has 7.5"),
        (B200, "bfloat16", FITTING, "runs below compute capability 10.0, B200 has 10.0"),
        (A100, "float32", FITTING, "computes in bfloat16 or float16, not in float32"),
        (A100, "bfloat16", FITTING._replace(keys=96), "takes key heads of 16, 32, 64, 128, 256, not of 96"),
        (A100, "bfloat16", FITTING._replace(values=100), "takes value heads of a multiple of 16, not of 100"),
        (A100, "bfloat16", FITTING._replace(chunk=128), "takes chunks of 16, 32, 64, not of 128"),
    ],
)
def test_auto_chooses_the_fastest_supported_kernel(device, dtype, sizes, reason) -> None:
    expected = Choice("triton") if reason is None else Choice("chunks", (f"triton: {reason}",))
    assert choose_delta("auto", dtype, device, sizes) == expected
    assert choose_delta(expected.kernel, dtype, device, sizes) == Choice(expected.kernel)
    if reason is not None:
        with pytest.raises(UserError) as caught:
            choose_delta("triton", dtype, device, sizes, "model.kernel")
        text = f"model.kernel=triton: the Triton kernel of the delta rule {reason}. Set model.kernel=chunks or auto."
        assert str(caught.value) == text


def test_a_layer_has_the_kernel_of_the_device_and_of_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form is that of the first device, or the named one, which is not refused for the device."""
    assert list(DELTA_BACKENDS)[-1] == "chunks" and all(map(form_of, DELTA_BACKENDS))
    calls: list[Any] = []
    monkeypatch.setattr(
        module.jax, "checkpoint", lambda of, **_: calls.append(of.func) or (lambda rule: (rule.v, None))
    )
    shape = jnp.zeros((1, 4, 1, 16), jnp.bfloat16)
    rule = DeltaRule(shape, shape, shape, jnp.zeros((1, 4, 1)), jnp.zeros((1, 4, 1)))
    for device in (CPU, A100):
        monkeypatch.setattr(module, "local_device", lambda device=device: device)
        gated_delta(rule, 16)
        gated_delta(rule, 16, "triton")
        gated_delta(rule, 128)
    triton, chunks = delta_triton.mix_by_kernels, form_of("chunks").mix
    assert calls == [chunks, triton, chunks, triton, triton, chunks]


def test_a_config_names_its_kernel() -> None:
    cfg, request = GatedDeltaNetConfig(heads=4), Request(dtype="bfloat16")
    assert cfg.kernel_choice(64, request, A100) == Choice("triton", (), "delta net")
    assert cfg.with_kernel("chunks").kernel_choice(64, request, A100) == Choice("chunks", (), "delta net")
    with pytest.raises(UserError, match=r"mixer\.kernel=triton: .* takes chunks of 16, 32, 64, not of 128\. Set"):
        GatedDeltaNetConfig(heads=4, chunk=128, kernel="triton").kernel_choice(64, request, A100, "mixer.kernel")
