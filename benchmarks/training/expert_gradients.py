"""Gradients of a model with experts by each way to dispatch tokens."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.training.train_speed import program_of, synthetic_batch
from megajax.config.errors import UserError
from megajax.layers.moe.config import MoEConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import find_devices
from megajax.processes.world import process_index
from megajax.training.run_config import RunConfig

WAYS = ("gather", "ragged", "capacity")
"""The others are compared with the first, which needs no exchange of rows."""
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.2}
"""Relative error of the gradient of each weight. In bfloat16, the ways round sums in different orders, so tokens near a
tie go to other experts in later layers: 0.06 for the two layers of mixtral.py:debug."""


def expert_gradients(*, cfg: RunConfig) -> Iterator[dict[str, Any]]:
    """Compares the gradients of every way to dispatch tokens to experts, on the devices of this machine.

    The gradients of one global batch of random tokens are computed in the shipped program, with the shipped compiler
    options, for dispatch.way=gather, ragged and capacity in float32 and bfloat16, with parallel.expert of all devices.
    They must agree with those of gather; otherwise, or if one is not finite, the exit code is 1. With one device
    nothing is exchanged, so nothing is compared.

    Raises UserError for a model without experts, and ConfigError if experts or rows do not fit the devices.
    """
    devices = find_devices()
    figures: dict[str, Any] = {"device": devices[0].device_kind, "rows": [], "wrong": 0}
    if with_way(cfg.model, "ragged") == with_way(cfg.model, "gather"):
        raise UserError("the model has no mixture of experts: use a config that has one, such as qwen3_moe.py:debug")
    if len(devices) == 1:
        print("one device exchanges nothing: nothing was compared; run this on a machine with several")
        yield figures
        return
    parallel, rows = ParallelConfig(expert=len(devices)), 2 * len(devices)
    cfg = replace(cfg, parallel=parallel, batch=replace(cfg.batch, global_size=rows, micro_size=1, ramp=None))
    for dtype, tolerance in TOLERANCES.items():
        runs = replace(cfg, precision=replace(cfg.precision, compute=dtype))
        loss, expected = gradients(replace(runs, model=with_way(cfg.model, WAYS[0])))
        for way in WAYS[1:]:
            other, actual = gradients(replace(runs, model=with_way(cfg.model, way)))
            errors = {path: float(relative_error(actual[path], expected[path])) for path in expected}
            worst = max(errors, key=lambda path: errors[path])
            right = errors[worst] <= tolerance
            row = {"dtype": dtype, "way": way, "devices": len(devices), "losses": [loss, other]}
            figures["rows"].append(row | {"error": errors[worst], "worst": worst, "right": right})
            figures["wrong"] += not right
            text = f"{dtype}, {way} against {WAYS[0]}: losses {other:.6f} and {loss:.6f}, error {errors[worst]:.1e} in "
            if process_index() == 0:
                print(f"{text}{worst}" + ("" if right else " WRONG"), flush=True)
            yield figures


def with_way(cfg: Any, way: str) -> Any:
    """A copy of a config in which all mixtures of experts dispatch this way."""
    if isinstance(cfg, MoEConfig):
        return replace(cfg, dispatch=replace(cfg.dispatch, way=way, room=None))
    if isinstance(cfg, tuple):
        return tuple(with_way(part, way) for part in cfg)
    if not is_dataclass(cfg) or isinstance(cfg, type):
        return cfg
    changed = {field.name: with_way(getattr(cfg, field.name), way) for field in fields(cfg) if field.init}
    return replace(cfg, **{name: new for name, new in changed.items() if new is not getattr(cfg, name)})


def gradients(cfg: RunConfig) -> tuple[float, dict[str, jax.Array]]:
    """The loss of one batch of random tokens, and its gradients by path, in the shipped program."""
    with program_of(cfg) as (program, _):
        state, batch = program.fresh_state()(), synthetic_batch(program)
        grads = jax.jit(program.grad_fn(), compiler_options=dict(program.options))(state.inputs, batch, jnp.float32(1))
        return float(grads.loss_sum / grads.weight_sum), dict(grads.grads)


@jax.jit
def relative_error(actual: jax.Array, expected: jax.Array) -> jax.Array:
    """Norm of the difference over the norm of `expected`; inf if a value is not finite."""
    actual, expected = actual.astype(jnp.float32), expected.astype(jnp.float32)
    error = jnp.linalg.norm((actual - expected).ravel()) / jnp.maximum(jnp.linalg.norm(expected.ravel()), 1e-30)
    return jnp.where(jnp.isfinite(error), error, jnp.inf)
