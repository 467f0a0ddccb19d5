"""Losses of distillation and their gradients against TRL's and against plain formulas, whole and cut over devices."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from megatron_cases import FURTHER

from megajax.kernels.cross_entropy import VocabularyShard, loss_and_gradients, token_losses
from megajax.kernels.distillation import Distillation

FOLDER = FURTHER / "distillation"
if not FOLDER.is_dir():
    pytest.skip(f"no {FOLDER}", allow_module_level=True)
CASES = json.loads((FOLDER / "distillation.json").read_text())
ARRAYS = np.load(FOLDER / "distillation.npz")


def loss_of(settings: dict[str, float]) -> Distillation:
    """Hinton's loss has the factor temperature squared, GKD none."""
    temperature = settings["temperature"]
    if "alpha" in settings:
        alpha = settings["alpha"]
        return Distillation(0.0, temperature, alpha * temperature**2, 1 - alpha)
    return Distillation(settings["beta"], temperature, 1.0, 0.0)


def run(loss: Distillation, student, teacher, labels, table, shard: VocabularyShard):
    """The loss, its gradient by logits, and the loss of an evaluation. The logits are states of a head that is one."""
    bound, weights = replace(loss, table=table), (labels >= 0) / jnp.sum(labels >= 0)
    targets = labels, teacher
    sums, dx, *_ = loss_and_gradients(student, table, targets, weights, shard, bound, chunk=7)
    losses = token_losses(student, table, targets, shard, bound, chunk=7)
    evaluated = {name: jnp.sum(values * weights) for name, values in losses.items()}
    return bound.minimised(sums), shard.sum(dx), bound.minimised(evaluated)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "k" not in case])
def test_losses_and_gradients(name: str, devices: int) -> None:
    """The table has two rows of padding after the vocabulary."""
    student, teacher = (ARRAYS[f"{kind}_logits"].reshape(-1, 32) for kind in ("student", "teacher"))
    labels, table = ARRAYS["labels"].reshape(-1), np.eye(34, 32, dtype=np.float32)
    mesh = jax.make_mesh((devices,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(*arrays):
        axes = ("tensor",) if devices > 1 else ()
        shard = VocabularyShard(jax.lax.axis_index("tensor") * arrays[-1].shape[0], 32, axes)
        return run(loss_of(CASES[name]), *arrays, shard)

    ins = P(), P(), P(), P("tensor")
    cut = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=P(), check_vma=False))
    loss, gradient, evaluated = cut(student, teacher, labels, table)
    np.testing.assert_allclose([loss, evaluated], [ARRAYS[f"{name}/loss"]] * 2, rtol=1e-5)
    np.testing.assert_allclose(gradient.reshape(3, 6, 32), ARRAYS[f"{name}/grad"], atol=1e-6)
