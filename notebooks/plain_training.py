"""A whole training run in one file: read it from top to bottom, change it, run it.

    python notebooks/plain_training.py                         # one CPU device
    python notebooks/plain_training.py --tensor 2 --data 4     # eight of them
    python notebooks/plain_training.py --resume                # go on from the last checkpoint

It trains the model of configs/quickstart.py with the library's layers, optimizer, data and checkpoints, without what
`python -m megajax.train` puts around them: config files, evaluation, reports, faults, restarts, pipelines. The losses
of both are equal to the last bit (tests/notebooks/test_plain_training.py).
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding

import megajax as mj
from megajax.batch import Batch, Leaf, Params, batch_schema
from megajax.checkpoint.checkpoint_manager import CheckpointManager
from megajax.command_line.parser import front_door
from megajax.layers.param import ParamSpec, bind, initial_values, specs
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan
from megajax.models.reduction import LossReduction, quotient
from megajax.optim.optimizer import Optimizer, clip_factor, global_norm
from megajax.optim.schedule import RateSchedule
from megajax.training.gradients.accumulate import accumulate
from megajax.training.gradients.grads import GradFn, Weights, batch_specs
from megajax.training.gradients.staged import staged
from megajax.training.state import parameter_shardings, state_shardings
from megajax.training.step import place

# 1. Settings: frozen dataclasses, each beside what it configures.

SEED, ROWS = 1234, 16
"""Seed of weights and of the order of the data; rows of a step."""

MODEL = mj.DecoderConfig(
    hidden=128,
    vocabulary_size=257,  # the bytes, and the end of a document
    sequence_length=128,
    stack=mj.StackConfig(
        pattern=(
            mj.BlockConfig(
                mixer=mj.AttentionConfig(heads=4, rope=mj.RopeConfig()),
                mlp=mj.GatedMLPConfig(ffn=384),
                norm=mj.RMSNormConfig(),
            ),
        ),
        repeats=4,
    ),
)
DATA = mj.StandardLibraryConfig(megabytes=8)
TOKENIZER = mj.ByteTokenizerConfig()
PRECISION = mj.PrecisionConfig(compute="float32")
OPTIMIZER = mj.AdamWConfig(beta2=0.95, weight_decay=0.1)
SCHEDULE = mj.ScheduleConfig(lr=3e-3, min_lr=3e-4, warmup_fraction=0.1)


class State(NamedTuple):
    """All that a step reads and replaces; a checkpoint holds it as a whole."""

    rows: Array
    """int32 []: rows read so far, which determine the learning rate and the position in the data."""
    params: Params
    """float32 by path."""
    moments: Any
    """Of Adam, by name and path."""


def main(argv: Sequence[str]) -> None:
    """Train; prints the loss of each step in nats per token, with all digits of a float32."""
    options = arguments(argv)
    # CPU devices are virtual, as many as asked for. On a machine with GPUs this setting has no effect.
    jax.config.update("jax_num_cpu_devices", options.data * options.tensor)

    # 2. The mesh. All axes always exist; those of size 1 cost nothing.
    parallel = mj.ParallelConfig(data=options.data, tensor=options.tensor)
    mesh = build_mesh(parallel)
    print("mesh:", ", ".join(f"{name} {size}" for name, size in mesh.shape.items()))

    # 3. The layout: tables from the logical axes of arrays (embed, heads, vocab, batch, ...) to axes of the mesh.
    #    Layers name logical axes only, so that no layer knows how many devices there are.
    plan = Plan.of(parallel)
    layout = Layout(plan, gathered=PRECISION.compute, reduced=PRECISION.reduced_in())

    # 4. The model, without values: a Flax NNX module whose weights are described by path.
    model = nnx.eval_shape(lambda: MODEL.build(layout))
    weights = specs(model)
    print(f"model: {sum(int(np.prod(spec.shape)) for spec in weights.values()):,} weights in {len(weights)} arrays")

    # 5. Optimizer and schedule.
    optimizer = OPTIMIZER.build(weights, plan)
    schedule = SCHEDULE.build(steps=options.steps, global_size=ROWS)

    # 6. Initial weights and moments, made where they stay: each device computes its own part.
    shardings = shardings_of(weights, optimizer, plan, mesh)
    with jax.set_mesh(mesh):
        state = jax.jit(partial(fresh, weights, optimizer), out_shardings=shardings)()

    # 7. Rows of data. Row i is a pure function of the seed and i.
    tokenizer = TOKENIZER.build()
    splits = DATA.build(
        tokenizer=tokenizer, schema=MODEL.schema(), rows=mj.Rows(ROWS * options.steps, ROWS, ROWS), seed=SEED
    )
    schema = batch_schema(MODEL.schema(), DATA.leaves())

    # 8. The step. Gradients are computed in one shard_map over all axes but `tensor`, which the compiler shards.
    gradients = accumulate(
        Weights(model, weights, schema, layout, PRECISION),
        staged(model, weights, LossReduction(), key=None),
        mesh,
    )
    step = jax.jit(
        partial(
            train_step, gradients, optimizer, schedule, shardings, parameter_shardings(weights, plan.optimizer, mesh)
        ),
        donate_argnums=0,
        out_shardings=(shardings, None),
    )

    # 9. Checkpoints: written in the background, renamed when they are complete, with a checksum of every file.
    with CheckpointManager(mj.CheckpointConfig(), f"{options.out}/checkpoints") as checkpoints:
        if options.resume and (last := checkpoints.newest_intact()) is not None:
            state, _ = checkpoints.restore(last, described(state, shardings))
            print(f"resumed after step {last}")
        if (done := int(state.rows) // ROWS) >= options.steps:
            raise mj.UserError(f"--steps {options.steps}: the run in {options.out} has done {done}; give more")

        # 10. The loop.
        with jax.set_mesh(mesh), jax.default_matmul_precision(PRECISION.matmul_precision()):
            for number in range(done + 1, options.steps + 1):
                state, metrics = step(state, batch_of(number, splits.train, schema, layout, mesh))
                print(f"step {number}: loss {float(metrics['loss']):.9g}, norm {float(metrics['norm']):.4g}")
                if number % options.save_every == 0 or number == options.steps:
                    checkpoints.save(number, state)

    # 11. A sample.
    with jax.set_mesh(mesh):
        print(sample(model, state.params, tokenizer, "class ", rows=options.data))


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=int, default=1, help="devices that share the rows of a step; divides 16")
    parser.add_argument("--tensor", type=int, default=1, help="devices that share each matrix; 1, 2 or 4")
    parser.add_argument("--steps", type=int, default=20, help="also of the schedule: keep the number when you resume")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints; one more at the end")
    parser.add_argument("--out", default="runs/plain", help="folder of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    options = parser.parse_args(argv)
    if options.data < 1 or ROWS % options.data:
        parser.error(f"--data {options.data}: the {ROWS} rows of a step are not divisible by it")
    if options.tensor not in (1, 2, 4):
        parser.error(f"--tensor {options.tensor}: the model has 4 heads, so it must be 1, 2 or 4")
    if min(options.steps, options.save_every) < 1:
        parser.error(f"--steps {options.steps}, --save-every {options.save_every}: both must be at least 1")
    if not options.resume and Path(options.out, "checkpoints").exists():
        parser.error(f"--out {options.out} has checkpoints: --resume continues, another --out starts a new run")
    return options


def shardings_of(weights: dict[str, ParamSpec], optimizer: Optimizer, plan: Plan, mesh: Mesh) -> State:
    """The sharding of each array of the state."""
    whole = state_shardings(weights, optimizer, plan, mesh)
    return State(whole.step, whole.params, whole.optimizer)


def fresh(weights: dict[str, ParamSpec], optimizer: Optimizer) -> State:
    """The state before the first step: the same numbers on every mesh."""
    params = initial_values(weights, SEED)
    return State(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def train_step(
    gradients: GradFn,
    optimizer: Optimizer,
    schedule: RateSchedule,
    shardings: State,
    during_update: dict[str, NamedSharding],
    state: State,
    batch: Batch,
) -> tuple[State, dict[str, Array]]:
    """A step on a batch [microbatch, row, ...].

    during_update: shardings of the gradients while the optimizer runs.
    """
    sums = gradients(state.params, batch, jnp.ones(()))  # sums over all tokens, never means
    divisor = jnp.maximum(sums.weight_sum, 1e-8)  # the only division
    grads = place({path: g / divisor for path, g in sums.grads.items()}, during_update)
    norm = global_norm(grads)
    grads = {path: g * clip_factor(norm, optimizer.cfg.clip) for path, g in grads.items()}
    rates = partial(schedule.rates, state.rows, optimizer.cfg.weight_decay)
    params, moments = optimizer.update(grads, state.moments, place(state.params, during_update), rates=rates)
    new = State(state.rows + batch["sample"].size, place(params, shardings.params), moments)
    return new, {"loss": quotient(*sums.metrics["loss"]), "norm": norm}


def batch_of(step: int, source: Any, schema: dict[str, Leaf], layout: Layout, mesh: Mesh) -> dict[str, Array]:
    """The batch of a step, counted from 1, on the devices: one microbatch of ROWS rows, cut over `data`."""
    numbers = range((step - 1) * ROWS, step * ROWS)
    rows = [{"sample": np.uint32(number), **source[number]} for number in numbers]
    arrays = {name: np.stack([row[name] for row in rows])[None].astype(leaf.dtype) for name, leaf in schema.items()}
    specs_of_leaves = batch_specs(schema, layout)
    return {name: on_devices(arrays[name], NamedSharding(mesh, specs_of_leaves[name])) for name in schema}


def on_devices(array: np.ndarray, sharding: NamedSharding) -> Array:
    """Each device gets its part; this also works if the devices belong to several processes."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def described(state: State, shardings: State) -> State:
    """Shapes, dtypes and shardings in place of arrays: a checkpoint is read into any layout."""
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, shardings)


def sample(
    model: Any, params: Params, tokenizer: Any, prompt: str, *, rows: int, length: int = 60, temperature: float = 0.7
) -> str:
    """The prompt and a continuation. The same module runs by plain jit; each token reads all before it again.

    rows: equal rows to compute, one for each device along `data`.
    """

    @jax.jit
    def logits(params: Params, tokens: Array, last: Array) -> Array:
        return bind(model, params)(tokens=tokens)[0, last]

    ids = [int(token) for token in tokenizer.encode(prompt)]
    for number in range(length):
        row = np.zeros((rows, MODEL.sequence_length), np.int32)  # what follows a position does not change its logits
        row[:, : len(ids)] = ids
        scores = logits(params, row, len(ids) - 1) / temperature
        ids.append(int(jax.random.categorical(jax.random.key(number), scores)))
    return tokenizer.decode(ids)


if __name__ == "__main__":
    front_door(main)
