"""A decoder with given weights on one device, evaluated by the code of training and inference."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.batch import Batch, batch_schema
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.context import Context
from megajax.layers.moe.observations import LOSSES, REPORTED
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.param import Observation, bind, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan
from megajax.models.decoder.config import DecoderConfig
from megajax.models.reduction import LossReduction
from megajax.optim.config import OptimizerConfig, ScheduleConfig
from megajax.optim.schedule import RateSchedule
from megajax.precision.config import PrecisionConfig
from megajax.training.gradients.accumulate import accumulate
from megajax.training.gradients.grads import GradFn, Weights
from megajax.training.gradients.staged import staged
from megajax.training.state import fresh_state, parameter_shardings, state_shardings
from megajax.training.step import StepParts, compiled, plain_step

type Average = Literal["tokens", "microbatches"]

LEAVES = ("tokens", "labels", "loss_mask", "positions")
"""Of a batch of documents, one a row."""


def batch_by_rule(seed: int, rows: int, length: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, labels and loss mask, each [rows, length], that follow from the seed."""
    draw = np.random.RandomState(seed)
    text = draw.randint(0, vocabulary, (rows, length + 1))
    mask = draw.rand(rows, length) < 0.9
    return text[:, :-1].astype(np.int32), text[:, 1:].astype(np.int32), mask.astype(np.float32)


def lm_batch(microbatches: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Batch:
    """One global batch [M, B, S]; every row is one document."""
    tokens, labels, mask = (np.stack(leaf) for leaf in zip(*microbatches, strict=True))
    positions = np.broadcast_to(np.arange(tokens.shape[-1], dtype=np.int32), tokens.shape)
    sample = np.arange(tokens[..., 0].size, dtype=np.uint32).reshape(tokens.shape[:2])
    return {"tokens": tokens, "labels": labels, "loss_mask": mask, "positions": positions, "sample": sample}


def in_documents(ctx: Context, segments: np.ndarray | None) -> Context:
    """The context of rows of several documents."""
    if segments is None:
        return ctx
    starts = np.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
    index = np.arange(segments.shape[1])[None]
    first = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    return ctx._replace(positions=jnp.asarray(index - first), segments=jnp.asarray(segments, jnp.int32))


class OneDevice:
    """A decoder on one device in float32."""

    def __init__(self, cfg: DecoderConfig):
        problems = cfg.problems()
        assert not problems, problems
        parallel = ParallelConfig(data=1)
        self.cfg, self.mesh = cfg, build_mesh(parallel, jax.devices()[:1])
        self.layout, self.precision = Layout(Plan.of(parallel)), PrecisionConfig(compute="float32")
        self.abstract = nnx.eval_shape(lambda: cfg.build(self.layout))
        self.declared, self.observed = specs(self.abstract), specs(self.abstract, Observation)

    def zeros(self) -> dict[str, np.ndarray]:
        """A zero for each weight, by path."""
        return {path: np.zeros(spec.shape, np.float32) for path, spec in self.declared.items()}

    def checked(self, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The weights, after a check that their paths and shapes are those of the model."""
        shapes = {path: spec.shape for path, spec in self.declared.items()}
        assert {path: w.shape for path, w in params.items()} == shapes
        return dict(params)

    def undetermined(self) -> dict[str, np.ndarray]:
        """Path -> bool array, True where the loss does not depend on the weight, for weights that have such places.

        What is the same in all keys, but for what is rotated, adds the same to all scores of a query, which softmax
        takes out again unless there is a sink.
        """
        actual, cfg = {}, self.cfg
        blocks = {f"stack.blocks.{place}": block for place, (block, _) in enumerate(cfg.stack.stored())}
        blocks |= {f"predictions.{place}.block": block for place, block in enumerate(cfg.predicting_blocks())}
        for where, block in blocks.items():
            mixer = getattr(block, "mixer", None)
            if not isinstance(mixer, AttentionConfig) or mixer.sink != "none":
                continue
            if isinstance(mixer.qk_norm, LayerNormConfig):
                path = f"{where}.mixer.key_norm.bias"
            elif mixer.qk_norm is None and mixer.has_qkv_bias():
                path = f"{where}.mixer.key_bias"
            else:
                continue
            actual[path] = np.zeros(self.declared[path].shape, bool)
            actual[path][..., 0 if mixer.rope is None else mixer.rope.rotated(mixer.size(cfg.hidden)) :] = True
        return actual

    def __call__(self, f: Any, *args: Any) -> Any:
        """jit(f)(*args) on the mesh."""
        with jax.set_mesh(self.mesh), jax.default_matmul_precision("highest"):
            return jax.device_get(jax.jit(f)(*args))

    def forward(
        self,
        params: Mapping[str, np.ndarray],
        tokens: np.ndarray,
        labels: np.ndarray,
        kept: Mapping[str, np.ndarray] | None = None,
        segments: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Logits [B, S, V] and per-token losses [B, S], as evaluation has them. kept: see `kept`, where not zeros.

        segments: int32 [B, S], documents, whose positions begin at 0; None: a row is one.
        """
        read = self.read(kept or {})

        def compute(params: Any, tokens: Any, labels: Any) -> dict[str, Any]:
            model = bind(self.abstract, {**params, **read})
            hidden = model.hidden_states(tokens, in_documents(self.context(tokens), segments))
            return {"logits": model.logits(hidden), "per_token_loss": -model.token_scores(hidden, labels)[0]}

        return self(compute, self.checked(params), tokens, labels)

    def hidden(self, params: Mapping[str, np.ndarray], tokens: np.ndarray) -> dict[str, np.ndarray]:
        """Hidden states [B, S, D]: after the embedding, after each layer, after the last norm."""

        def compute(params: Any, tokens: Any) -> dict[str, Any]:
            actual, ctx = {}, self.context(tokens)
            for layers in range(1, self.cfg.stack.repeats + 1):
                cfg = replace(self.cfg, stack=replace(self.cfg.stack, repeats=layers))
                short = {path: w[:layers] if self.declared[path].layers else w for path, w in params.items()}
                model = bind(nnx.eval_shape(lambda cfg=cfg: cfg.build(self.layout)), short)
                x = model.enter(model.embed_tokens(tokens), ctx)
                actual[f"layer{layers - 1}_out"] = y = model.stack(x, ctx)
            return actual | {"embedding": x, "final_norm": model.final_norm(y)}

        assert len(self.cfg.stack.pattern) == 1
        return self(compute, self.checked(params), tokens)

    def context(self, tokens: Any) -> Context:
        """The loss of training where it matters: the reference ran in training mode, but for SparseMixer's draws."""
        index, keys = jnp.arange(tokens.shape[1]), jnp.zeros((tokens.shape[0], 2), jnp.uint32)
        routers = [getattr(block.mlp, "router", None) for block in self.cfg.stack.pattern]
        training = self.cfg.has_dropout() and not any(router and router.sparse_mixer for router in routers)
        return Context(jnp.broadcast_to(index[None], tokens.shape), index, row_keys=keys if training else None)

    def kept(self) -> dict[str, np.ndarray]:
        """Observations of a fresh state, by path."""
        return {path: np.zeros(spec.observed().shape(spec.shape), np.float32) for path, spec in self.observed.items()}

    def read(self, kept: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """What layers read of it. kept: entries that differ from a fresh state."""
        state = {**self.kept(), **kept}
        return {path: self.observed[path].observed().used(x, jnp.ones(())) for path, x in state.items()}

    def grad_fn(self, average: Average, rows: int, makes: Iterable[str] = LEAVES) -> GradFn:
        """rows: of a microbatch; makes: names of the leaves of the batch."""
        schema = batch_schema(self.cfg.schema(), dict.fromkeys(makes, ""))
        tokens = 1 if average == "tokens" else rows * self.cfg.row_positions()
        layout = replace(self.layout, token_weight=1 / tokens)
        abstract = nnx.eval_shape(lambda: self.cfg.build(layout))
        weights = Weights(abstract, {**self.declared, **self.observed}, schema, layout, self.precision)
        parts = staged(weights.model, weights.declared, LossReduction(average), jax.random.key(0))
        return accumulate(weights, parts, self.mesh)

    def gradients(self, params: Mapping[str, np.ndarray], batch: Batch, average: Average) -> dict[str, Any]:
        """The training step's gradients by path, their loss, and the reported loss."""
        microbatches, rows = next(iter(batch.values())).shape[:2]
        out = self(self.grad_fn(average, rows, batch), self.checked(params) | self.kept(), batch, jnp.ones(()))
        total, tokens = out.metrics["loss"]
        grads = {path: g / out.weight_sum for path, g in out.grads.items()}
        ahead = [total / count for name, (total, count) in out.metrics.items() if name.endswith("_ahead")]
        minimised = out.loss_sum / out.weight_sum
        return {
            "grads": grads,
            "minimised": minimised,
            "reported": total / tokens,
            "ahead": ahead,
            "routers": self.routers(out.observed, microbatches),
        }

    def routers(self, observed: Mapping[str, np.ndarray], microbatches: int) -> dict[int, dict[str, float]]:
        """Layer -> its router's mean losses, summed over microbatches; blocks behind the stack come after it."""
        actual = {}
        for path, seen in observed.items():
            if path.endswith(".report.sum"):
                layers = self.observed[path].layers or (self.cfg.stack.layers() + int(path.split(".")[1]),)
                for layer, row in zip(layers, seen.reshape(len(layers), -1).tolist(), strict=True):
                    report = dict(zip(REPORTED, row, strict=True))
                    actual[layer] = {name: report[name] * microbatches / report["routed"] for name in LOSSES}
        return actual

    def trainer(
        self,
        params: Mapping[str, np.ndarray],
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        *,
        steps: int,
        rows: int,
        microbatches: int,
        average: Average,
    ) -> "Trainer":
        """The real train step over these weights; rows: of a global batch."""
        rates = schedule.build(steps=steps, global_size=rows)
        return Trainer(self, params, optimizer, rates, average, rows // microbatches)


class Trainer:
    """Training state and the step that changes it."""

    def __init__(
        self,
        model: OneDevice,
        params: Mapping[str, np.ndarray],
        optimizer: OptimizerConfig,
        schedule: RateSchedule,
        average: Average,
        rows: int,
    ):
        self.model = model
        self.optimizer = optimizer.build(model.declared, model.layout.plan, model.cfg.width_ratio())
        self.schedule = schedule
        shardings = state_shardings(model.declared, self.optimizer, model.layout.plan, model.mesh, model.observed)
        # A fresh state has zeros beside its weights, and a loss scale of one: drawing weights would only cost time.
        shapes = jax.eval_shape(lambda: fresh_state(model.declared, self.optimizer, 0, observed=model.observed))
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        state = replace(zeros, params=model.checked(params), loss_scale=np.ones((), np.float32))
        with jax.set_mesh(model.mesh):
            self.state = jax.device_put(state, shardings)
        parts = StepParts(
            grad_fn=model.grad_fn(average, rows),
            observed=model.observed,
            optimizer=self.optimizer,
            schedule=schedule,
            shardings=shardings,
            gradient_shardings=parameter_shardings(model.declared, model.layout.plan.optimizer, model.mesh),
        )
        self.train_step = compiled(plain_step(parts), parts)

    def step(self, batch: Batch) -> dict[str, float]:
        """One step -> its report."""
        with jax.set_mesh(self.model.mesh), jax.default_matmul_precision("highest"):
            self.state, metrics = self.train_step(self.state, batch)
        return {name: float(value) for name, value in metrics.items() if value.ndim == 0}

    def params(self) -> dict[str, np.ndarray]:
        return {path: np.asarray(w) for path, w in self.state.params.items()}
