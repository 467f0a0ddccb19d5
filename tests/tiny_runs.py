"""Tiny models, one batch, and training them for a few steps on any layout."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Protocol

import jax
import numpy as np

from megajax.batch import Batch, Grads
from megajax.data.rows.config import LoaderConfig
from megajax.data.rows.splits import Splits
from megajax.data.text.config import MockConfig
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.param import Normal, ParamSpec
from megajax.layers.position.config import RopeConfig
from megajax.layers.recompute import Recompute
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.models.decoder.config import DecoderConfig
from megajax.models.reduction import quotient
from megajax.optim.config import ScheduleConfig
from megajax.optim.optimizer import global_norm
from megajax.precision.config import PrecisionConfig
from megajax.training.config import BatchConfig
from megajax.training.program import Program
from megajax.training.run_config import RunConfig
from megajax.training.state import TrainState
from megajax.training.step import mean_gradients
from megajax.training.step import place as laid_out

ROWS, LENGTH, VOCABULARY = 24, 16, 250
"""Rows of a step: 24 can be cut into 1, 2, 3, 4, 6, 8, 12 and 24 microbatches."""

READ = 12
"""Tokens that an encoder reads before the LENGTH that a decoder writes."""

ONE = ParallelConfig(data=1)
"""One device."""

QUICK = MappingProxyType({"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True})
"""Compiler options: the same program for the same devices, in slower machine code."""


def llama(recompute: Recompute = "selective", repeats: int = 2) -> DecoderConfig:
    """Grouped queries, rotary positions, gated MLP, a head of its own."""
    block = BlockConfig(mixer=AttentionConfig(heads=8, kv_heads=4, rope=RopeConfig()), mlp=GatedMLPConfig(ffn=48))
    return DecoderConfig(
        hidden=32,
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
        stack=StackConfig(pattern=(block,), repeats=repeats),
        recompute=recompute,
        init_std=0.06,
        loss_chunk=24,
    )


def with_block(model: DecoderConfig, **changes: Any) -> DecoderConfig:
    """The model with changes in its only block: new parts, or new settings of a part as a dict."""
    (block,) = model.stack.pattern
    parts = {
        name: replace(getattr(block, name), **change) if isinstance(change, dict) else change
        for name, change in changes.items()
    }
    return replace(model, stack=replace(model.stack, pattern=(replace(block, **parts),)))


def wide(repeats: int = 2) -> DecoderConfig:
    """A llama whose matrices have sides of 16 and more on two devices."""
    mixer = AttentionConfig(heads=4, kv_heads=2, head_dim=16, rope=RopeConfig())
    return replace(with_block(llama(repeats=repeats), mixer=mixer, mlp={"ffn": 64}), hidden=64)


def gpt(recompute: Recompute = "none", repeats: int = 2, dropout: float = 0.1) -> DecoderConfig:
    """Learned positions, biases everywhere, dropout everywhere, a tied head."""
    block = BlockConfig(
        mixer=AttentionConfig(heads=4, bias=True, dropout=dropout),
        mlp=DenseMLPConfig(ffn=64),
        norm=LayerNormConfig(),
        dropout=dropout,
    )
    return DecoderConfig(
        hidden=32,
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
        stack=StackConfig(pattern=(block,), repeats=repeats),
        learned_positions=True,
        norm=LayerNormConfig(),
        tied=True,
        dropout=dropout,
        recompute=recompute,
        init_std=0.06,
        loss_chunk=24,
    )


def pair(
    recompute: Recompute, repeats: int, *, tied: bool, learned_positions: bool, dropout: float = 0.0
) -> DecoderConfig:
    """Two different blocks by turns; dropout everywhere but in attention, where it takes long to compile."""
    first, second = llama().stack.pattern[0], gpt(dropout=0.0).stack.pattern[0]
    rope = None if learned_positions else RopeConfig()
    pattern = tuple(replace(block, mixer=replace(block.mixer, rope=rope), dropout=dropout) for block in (first, second))
    return replace(
        llama(recompute),
        stack=StackConfig(pattern=pattern, repeats=repeats),
        tied=tied,
        learned_positions=learned_positions,
        dropout=dropout,
    )


@dataclass(frozen=True, slots=True)
class TheseRows:
    """A data config that makes what the model reads, without building anything: tests hand in `rows`."""

    schema: tuple[tuple[str, str], ...]
    loader: LoaderConfig = field(default_factory=LoaderConfig)

    def leaves(self) -> dict[str, str]:
        return dict(self.schema)

    def build(self, **fields: Any) -> Splits:
        raise NotImplementedError("tests hand in rows")


def rows(seed: int = 0) -> Batch:
    """Leaves [ROWS, ...]: up to three documents a row, a fifth of the labels masked, unevenly over the rows.

    Those of an encoder are READ long, with some padding.
    """
    rng = np.random.default_rng(seed)
    text = rng.integers(0, VOCABULARY, (ROWS, LENGTH + 1), dtype=np.int32)
    segments = np.sort(rng.integers(0, 3, (ROWS, LENGTH), dtype=np.int32), axis=1)
    mask = (rng.random((ROWS, LENGTH)) < np.linspace(0.6, 1, ROWS)[:, None]).astype(np.float32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    sample = np.arange(40, 40 + ROWS, dtype=np.uint32)
    return {
        "tokens": text[:, :-1].copy(),
        "labels": text[:, 1:].copy(),
        "loss_mask": mask,
        "positions": positions,
        "segment_ids": segments,
        "sample": sample,
        "token_types": (segments > 0).astype(np.int32),
        "is_random": rng.integers(0, 2, ROWS, dtype=np.int32),
        "encoder_tokens": rng.integers(0, VOCABULARY, (ROWS, READ), dtype=np.int32),
        "encoder_segment_ids": (np.arange(READ) < rng.integers(READ // 2, READ, (ROWS, 1))).astype(np.int32),
        "padding": np.arange(LENGTH) >= rng.integers(LENGTH - 3, LENGTH + 1, (ROWS, 1)),
    }


def build_program(
    model: DecoderConfig,
    parallel: ParallelConfig,
    *,
    microbatches: int,
    average: str = "tokens",
    compute: str = "float32",
    isolated: bool = True,
) -> Program:
    """What `megajax.train` compiles for these settings, on as many of the devices as they say."""
    replicas = parallel.replicas(len(jax.devices()))
    micro_size, rest = divmod(ROWS, microbatches * replicas)
    assert rest == 0, f"{ROWS} rows are not {microbatches} microbatches on {replicas} devices"
    cfg = RunConfig(
        model=model,
        data=MockConfig(isolate_documents=isolated) if type(model) is DecoderConfig else _schema_rows(model),
        parallel=parallel,
        precision=PrecisionConfig(compute=compute),
        schedule=ScheduleConfig(lr=1e-2),
        batch=BatchConfig(global_size=ROWS, micro_size=micro_size, loss_average=average),
        steps=10,
        seed=7,
    )
    assert not (problems := cfg.problems(len(jax.devices()))), problems
    return Program.of(cfg, build_mesh(parallel))


def _schema_rows(model: DecoderConfig) -> TheseRows:
    return TheseRows(tuple((name, leaf.dtype) for name, leaf in model.schema().items()))


def within(program: Program) -> AbstractContextManager:
    """Where the steps of a program are compiled and called."""
    surroundings = ExitStack()
    surroundings.enter_context(jax.set_mesh(program.mesh))
    surroundings.enter_context(jax.default_matmul_precision("highest"))
    return surroundings


def start(program: Program) -> TrainState:
    """The same weights on every layout, and fresh optimizer state, where the program wants them.

    Drawn by numpy, for compiling the library's own takes seconds; every weight is random, biases too.
    """
    rng = np.random.default_rng(0)
    empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), program.state_like())
    params = {}
    for path, spec in program.declared.items():
        std = spec.init.std if isinstance(spec.init, Normal) else 0.1
        order = _order(spec)
        shape = (order.max() + 1, *spec.shape[1:]) if spec.layers else spec.shape
        values = rng.normal(spec.role == "gain", std, shape).astype(np.float32)
        if spec.layers:
            values = np.where(order.reshape(-1, *[1] * (values.ndim - 1)) >= 0, values[order], np.float32(0))
        params[path] = values
    return jax.device_put(replace(empty, params=params, loss_scale=np.float32(1)), program.shardings)


def place(program: Program, batch: Batch) -> Batch:
    """Rows [ROWS, ...] as the microbatches of a step, each of rows that follow each other; what its model reads."""
    micro, schema = program.microbatches, program.schema
    parts = {name: batch[name].reshape(micro, ROWS // micro, *batch[name].shape[1:]) for name in schema}
    parts = {name: program.layout.rows.arranged(values, schema[name].batch_axes) for name, values in parts.items()}
    return jax.device_put(parts, program.batch_shardings)


def in_order(program: Program, arrays: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], float]:
    """(by paths of weights and observations, rows in the order of the layers; the largest value that is no layer's).

    The latter is NaN where one of them is.
    """
    by_layer, padding, declared = {}, 0.0, program.arrays
    for path, array in arrays.items():
        by_layer[path], order = np.asarray(array), _order(declared[path])
        if declared[path].layers:
            padding = max(padding, np.abs(by_layer[path][order < 0]).max(initial=0.0), key=_nan_first)
            by_layer[path] = by_layer[path][order >= 0][np.argsort(order[order >= 0])]
    return by_layer, float(padding)


def _order(spec: ParamSpec) -> np.ndarray:
    """For each row of a stacked weight the place of its layer among those that have it, -1 for none."""
    ranks = {layer: rank for rank, layer in enumerate(sorted(layer for layer in spec.layers if layer >= 0))}
    return np.array([ranks.get(layer, -1) for layer in spec.layers])


def _nan_first(value: float) -> tuple[bool, float]:
    return bool(np.isnan(value)), float(value)


class Run(Protocol):
    """What two runs of a model are compared by."""

    losses: np.ndarray
    """Of each step, on the same rows."""
    norms: np.ndarray
    """Of the gradients of each step."""
    means: Mapping[str, float]
    """Means of the first step."""
    gradients: Mapping[str, np.ndarray]
    """Of the first step's mean loss; stacked ones in the order of the layers."""
    observed: Mapping[str, np.ndarray]
    """What layers observe, in the order of the layers."""
    padding: float
    """The largest absolute number that belongs to no layer."""
    evaluation: float
    """Loss on other rows after the last step, NaN if there was no evaluation."""
    tokens: float
    """Tokens that the evaluation counted, 0 if there was none."""


@dataclass(frozen=True)
class Trained:
    """What a few steps came to, as a `Run`."""

    losses: np.ndarray
    norms: np.ndarray
    gradients: dict[str, np.ndarray]
    """As the optimizer got them before clipping."""
    padding: float
    """Of weights, gradients and moments."""
    state: TrainState
    observed: dict[str, np.ndarray]
    """By the state after the last step."""
    before: float = np.nan
    """Evaluation on the rows of training before the first step."""
    evaluation: float = np.nan
    tokens: float = 0
    program: Program = field(repr=False, default=None)

    @property
    def means(self) -> dict[str, float]:
        return {"loss": self.losses[0]} | ({} if np.isnan(self.before) else {"evaluated": self.before})


def gradients_of(program: Program, state: TrainState, norm: float) -> dict[str, Any]:
    """The first step's gradients before clipping, told from the optimizer's first moments after it."""
    optimizer = program.optimizer.cfg
    factor = 1.0 if optimizer.clip is None else min(1.0, optimizer.clip / (norm + 1e-6))
    return {
        path: np.asarray(m) / ((1 - optimizer.beta1) * factor) for path, m in state.optimizer["first_moment"].items()
    }


@dataclass(frozen=True)
class Differentiated:
    """A step without its update, as a `Run`."""

    means: dict[str, float]
    """Mean of each reported metric, and of the minimised loss under `minimised`."""
    norm: float
    gradients: dict[str, np.ndarray]
    observed: dict[str, np.ndarray]
    """By this step."""
    padding: float
    evaluation: float = np.nan
    tokens: float = 0

    @property
    def loss(self) -> float:
        return self.means["loss"]

    @property
    def losses(self) -> np.ndarray:
        return np.array([self.loss])

    @property
    def norms(self) -> np.ndarray:
        return np.array([self.norm])


@cache
def differentiate(
    model: DecoderConfig,
    parallel: ParallelConfig = ONE,
    *,
    microbatches: int,
    average: str = "tokens",
    compute: str = "float32",
    isolated: bool = True,
    quick: bool = True,
    draw: Callable[[int], Batch] = rows,
) -> Differentiated:
    """The gradients that the optimizer would get. Without an optimizer two thirds are left to compile."""
    settings = {"average": average, "compute": compute, "isolated": isolated}
    program = build_program(model, parallel, microbatches=microbatches, **settings)

    def step(inputs: Any, batch: Batch, scale: Any) -> tuple[Grads, jax.Array]:
        grads = program.grad_fn()(inputs, batch, scale)
        # As in the train step, each device has a part of the mean.
        return grads, global_norm(laid_out(mean_gradients(grads, scale), program.step_parts.gradient_shardings))

    with within(program):
        arguments = start(program).inputs, place(program, draw(0)), np.float32(1)
        compiled = jax.jit(step).lower(*arguments).compile(compiler_options=dict(QUICK if quick else {}))
        grads, norm = jax.device_get(compiled(*arguments))
    gradients, padding = in_order(program, grads.grads)
    observed, unused = in_order(program, grads.observed)
    weight = float(grads.weight_sum)
    means = {name: float(quotient(*sums, np)) for name, sums in grads.metrics.items()}
    return Differentiated(
        means=means | {"minimised": float(grads.loss_sum) / weight},
        norm=float(norm),
        gradients={path: gradient / weight for path, gradient in gradients.items()},
        observed=observed,
        padding=max(padding, unused, key=_nan_first),
    )


def assert_close(
    actual: Mapping[str, Any], expected: Mapping[str, Any], *, tolerance: float = 1e-5, floor: float = 0.0
) -> None:
    """Gradients by path: each within `tolerance` of its largest element, or of `floor` times the largest of all."""
    assert actual.keys() == expected.keys()
    top = max(np.abs(gradient).max() for gradient in expected.values())
    for path, gradient in expected.items():
        scale = max(np.abs(gradient).max(), floor * top)
        np.testing.assert_allclose(actual[path], gradient, rtol=0, atol=tolerance * scale, err_msg=path)


def assert_same_step(
    model: DecoderConfig,
    parallel: ParallelConfig,
    *,
    alone: DecoderConfig | None = None,
    tolerance: float = 1e-5,
    floor: float = 0.0,
    **options: Any,
) -> Differentiated:
    """On a layout, a step has the mean loss and the gradients of one device's, which are returned.

    alone: the model of the one device.
    """
    expected, actual = differentiate(alone or model, ONE, **options), differentiate(model, parallel, **options)
    np.testing.assert_allclose(actual.loss, expected.loss, rtol=1e-5)
    assert actual.padding == 0
    assert_close(actual.gradients, expected.gradients, tolerance=tolerance, floor=floor)
    return expected


def by_plain_differentiation(plain: Callable, params: Any, batch: Batch) -> Any:
    """((value, more), gradients) of a function of weights and one microbatch, summed over the microbatches."""
    differentiated = jax.jit(jax.value_and_grad(plain, has_aux=True), compiler_options=dict(QUICK))
    count = len(next(iter(batch.values())))
    pieces = (jax.tree.map(lambda leaf, number=number: leaf[number], batch) for number in range(count))
    results = [differentiated(params, piece) for piece in pieces]
    return jax.tree.map(lambda *parts: sum(map(np.asarray, parts)), *results)


@cache
def train(
    model: DecoderConfig,
    parallel: ParallelConfig = ONE,
    *,
    microbatches: int,
    steps: int = 3,
    average: str = "tokens",
    compute: str = "float32",
    isolated: bool = True,
    evaluated: bool = True,
    quick: bool = True,
    draw: Callable[[int], Batch] = rows,
) -> Trained:
    """Train on the same rows every step, in float32 unless told otherwise.

    draw: makes rows from a seed; quick: with the compiler's optimisations of machine code turned off, which halves the
    time.
    """
    options = QUICK if quick else {}
    settings = {"average": average, "compute": compute, "isolated": isolated}
    program = build_program(model, parallel, microbatches=microbatches, **settings)
    reported, gradients, padding, evaluations = [], {}, 0.0, {}
    with within(program):
        state = start(program)
        placed, other_batch = (place(program, draw(seed)) for seed in (0, 1))
        if evaluated:
            evaluate: Any = program.eval_step
            evaluate = evaluate.lower(state.inputs, placed).compile(compiler_options=dict(options))
            before = np.divide(*evaluate(state.inputs, placed)["loss"]).item()
        if steps:
            step: Any = program.train_step
            step = step.lower(state, placed).compile(compiler_options=dict(options))
        for number in range(steps):
            state, metrics = step(state, placed)
            reported.append((float(metrics["loss"]), float(metrics["grad_norm"])))
            if number == 0:
                gradients, padding = in_order(program, gradients_of(program, state, reported[0][1]))
        if evaluated:
            total, tokens = (float(part) for part in evaluate(state.inputs, other_batch)["loss"])
            evaluations = {"before": before, "evaluation": total / tokens, "tokens": tokens}
    for arrays in (state.params, *(part for part in state.optimizer.values() if isinstance(part, dict))):
        padding = max(padding, in_order(program, arrays)[1], key=_nan_first)
    losses, norms = np.array(reported).reshape(steps, 2).T
    observed, unused = in_order(program, state.observed)
    padding = max(padding, unused, key=_nan_first)
    return Trained(losses, norms, gradients, padding, state, observed, program=program, **evaluations)


def losses_of_steps(program: Program) -> list[float]:
    """Loss and gradient norm of two steps from fresh weights."""
    state, results = program.fresh_state()(), []
    like = program.batch_like()
    for seed in range(2):
        rng = np.random.default_rng(seed)
        arrays = {name: rng.integers(0, 2, leaf.shape).astype(leaf.dtype) for name, leaf in like.items()}
        batch = {name: jax.device_put(array, like[name].sharding) for name, array in arrays.items()}
        with jax.set_mesh(program.mesh):
            state, metrics = program.train_step(state, batch)
        results += [float(metrics["loss"]), float(metrics["grad_norm"])]
    return results
