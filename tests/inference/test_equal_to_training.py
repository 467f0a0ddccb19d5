"""`inference.equal_to_training`: log-probabilities of an engine with the bits of its run's, on CPUs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from user_errors import user_error

from megajax.batch import SAMPLE
from megajax.data.text.config import MockConfig
from megajax.inference.assembly import demand_equality, engine_of_run
from megajax.inference.config import InferenceConfig
from megajax.inference.engine import Engine
from megajax.inference.sampling_settings import Sampling
from megajax.inference.worker import complete
from megajax.kernels.attention.tiles import TILE
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig
from megajax.layers.position.config import RopeConfig
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.models.decoder.config import DecoderConfig
from megajax.optim.config import ScheduleConfig
from megajax.precision.config import PrecisionConfig
from megajax.processes.xla_options import XlaConfig
from megajax.tokenizers.config import ByteTokenizerConfig
from megajax.training.check_compiler_options import inference_options
from megajax.training.config import BatchConfig
from megajax.training.program import Program
from megajax.training.run_config import RunConfig
from megajax.training.scorer import Scorer, Window, counted, row

LENGTH = 3 * TILE
"""Positions of a row, in tiles of keys."""
ATTENTION = AttentionConfig(heads=4, rope=RopeConfig(), kernel="fixed")
MIXTURE = MoEConfig(experts=4, top_k=2, expert=GatedMLPConfig(ffn=64))


class Packed(MockConfig):
    """Data whose rows have several documents."""

    def leaves(self) -> dict[str, str]:
        return {**MockConfig.leaves(self), "segment_ids": "int32"}


class Case(NamedTuple):
    """A run and its engine."""

    mixture: bool = False
    compute: Any = "float32"
    sizes: tuple[tuple[str, Any], ...] = (("data", 1),)
    layers: int = 2
    length: int = LENGTH


def run_config(case: Case) -> RunConfig:
    block = BlockConfig(mixer=ATTENTION, mlp=MIXTURE if case.mixture else GatedMLPConfig(ffn=160))
    stack = StackConfig(pattern=(block,), repeats=case.layers)
    parallel = ParallelConfig(**dict(case.sizes))
    rows = 2 * (parallel.data or 1)
    return RunConfig(
        model=DecoderConfig(hidden=96, vocabulary_size=257, sequence_length=case.length, stack=stack, init_std=0.1),
        data=Packed(),
        parallel=parallel,
        precision=PrecisionConfig(compute=case.compute),
        xla=XlaConfig(options={"xla_allow_excess_precision": False}),
        schedule=ScheduleConfig(lr=0.01),
        batch=BatchConfig(global_size=2 * rows, micro_size=2),
        steps=10,
    )


@cache
def program(case: Case) -> tuple[Program, Any]:
    cfg = run_config(case)
    devices = (cfg.parallel.data or 1) * cfg.parallel.tensor
    made = Program.of(cfg, build_mesh(cfg.parallel, jax.devices()[:devices]))
    with jax.set_mesh(made.mesh):
        return made, made.fresh_state()()


def engine_of(case: Case, weights: Any, parallel: ParallelConfig | None = None, **settings: Any) -> Engine:
    made, _ = program(case)
    settings = {"rows": 8, "chunk": 96, "cache_tokens": 8 * case.length, "equal_to_training": True} | settings
    return engine_of_run(
        made.cfg,
        weights,
        made.mesh,
        inference_options(made.cfg.xla, made.mesh.devices.flat[0]),
        ByteTokenizerConfig().build(),
        InferenceConfig(**settings),
        end_tokens=(),
        length=case.length,
        queue=64,
        parallel=parallel,
    )


def sampled(
    engine: Engine, answers: int = 2, most: int = 40, prompts: Sequence[int] = (3, 70, 33, 100, 150)
) -> list[tuple[Window, np.ndarray]]:
    """Answers to prompts of several lengths, and their log-probabilities."""
    draw, results = np.random.default_rng(3), []
    texts = [tuple(draw.integers(0, 256, length).tolist()) for length in prompts]
    requests = [(prompt, Sampling(max_tokens=most, n=answers, seed=5, logprobs=0)) for prompt in texts]
    for (prompt, _), outputs in zip(requests, complete(engine, requests), strict=True):
        for output in outputs:
            assert all(score.drawn == score.logprob for score in output.scores)
            window = Window(np.array([*prompt, *output.tokens], np.int32), len(output.tokens))
            results.append((window, np.array([score.logprob for score in output.scores], np.float32)))
    return results


def demand_equal(case: Case, weights: Any, answers: list[tuple[Window, np.ndarray]]) -> None:
    scorer = Scorer(program(case)[0], ByteTokenizerConfig().build(), weights)
    size = scorer.rows_at_once(scorer.length)
    for batch in (answers[first : first + size] for first in range(0, len(answers), size)):
        for (window, log_p), wanted in zip(batch, scorer.scores([row(window) for window, _ in batch])[0], strict=True):
            np.testing.assert_array_equal(log_p, wanted[counted(window)])


def of_training_step(case: Case, state: Any, window: Window, place: int) -> float:
    """The log-probability of a token by a step of training, whose loss has no other token."""
    made, _ = program(case)
    shape = made.microbatches, made.cfg.batch.global_size // made.microbatches
    leaves = {name: np.zeros((*shape, case.length), leaf.dtype) for name, leaf in made.schema.items() if name != SAMPLE}
    for name, values in ((name, row(window)[name]) for name in leaves.keys() & row(window)):  # some read no padding
        leaves[name][..., : len(values)] = values
    leaves["loss_mask"][:] = 0
    leaves["loss_mask"][0, 0, place] = 1
    leaves[SAMPLE] = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
    with jax.set_mesh(made.mesh):
        placed = {name: jax.device_put(leaf, made.batch_shardings[name]) for name, leaf in leaves.items()}
        _, metrics = made.train_step(jax.tree.map(jnp.copy, state), placed)
    return -float(metrics["loss"])


def test_an_engine_has_the_bits_of_its_run() -> None:
    """Answers share the blocks of their prompts, long prompts take several steps, and rows are preempted."""
    case = Case(layers=1)
    _, state = program(case)
    engine = engine_of(case, state.inputs, cache_tokens=2 * LENGTH, batch_invariant=True)
    answers = sampled(engine, most=24)
    statistics = engine.statistics()
    assert statistics.shared_tokens_total > 0 and statistics.preemptions_total > 0
    demand_equal(case, state.inputs, answers)


CASES = [
    Case(True, "bfloat16", sizes=(("data", 1), ("tensor", 2))),
    Case(sizes=(("data", 2), ("tensor", 2), ("data_sharding", "fsdp"))),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts_dtypes_and_models_have_equal_bits(case: Case) -> None:
    """The step of training itself has them too, and an engine that was given other weights."""
    _, state = program(case)
    engine = engine_of(case, state.inputs)
    answers = sampled(engine)
    demand_equal(case, state.inputs, answers)
    for window, log_p in answers[::4]:
        for ahead in (0, window.counted - 1):
            place = len(window.tokens) - 1 - window.counted + ahead
            assert of_training_step(case, state, window, place) == log_p[ahead]
    other = {path: w * jnp.asarray(1.2, w.dtype) for path, w in state.inputs.items()}
    engine.refit(other)
    demand_equal(case, other, sampled(engine))


@pytest.mark.slow
def test_short_rows_have_equal_bits() -> None:
    """A microbatch of two rows has the fewest tokens that are summed in the same order."""
    case = Case(compute="bfloat16", length=TILE // 2)
    _, state = program(case)
    answers = sampled(engine_of(case, state.inputs, chunk=case.length), most=12, prompts=(3, 11, 20))
    demand_equal(case, state.inputs, answers)
    for window, log_p in answers:
        assert of_training_step(case, state, window, len(window.tokens) - 2) == log_p[-1]


@pytest.mark.slow
def test_packed_answers_have_equal_bits_from_a_tile_on() -> None:
    case = Case()
    made, state = program(case)
    answers = sampled(engine_of(case, state.inputs), 1)[:1]
    (window, log_p), scorer = answers[0], Scorer(made, ByteTokenizerConfig().build(), state.inputs)

    def behind(start: int) -> np.ndarray:
        """Its log-probabilities behind another text of this length."""
        leaves, count = row(Window(np.arange(LENGTH + 1, dtype=np.int32), 1)), len(window.tokens) - 1
        for name, values in row(window).items():
            leaves[name][start : start + count] = values
        leaves["segment_ids"][start:] = 1
        return scorer.scores([leaves])[0][0, start + count - window.counted : start + count]

    for start in (TILE, 2 * TILE):
        np.testing.assert_array_equal(behind(start), log_p)
    assert (behind(TILE // 2) != log_p).any()
    np.testing.assert_allclose(behind(TILE // 2), log_p, atol=2e-6)


def test_what_cannot_be_equal_is_refused() -> None:
    case = Case(layers=1)
    made, state = program(case)
    for settings, _message in (
        ({"kernel": "reference"}, r"inference\.kernel is reference, which equal_to_training does not allow"),
        ({"speculate": 2}, r"inference\.speculate is 2"),
        ({"cache_dtype": "int8"}, r"inference\.cache_dtype is int8"),
    ):
        with user_error("inference.equal_to_training"):
            engine_of(case, state.inputs, **settings)
    for mixer, _message in (
        (replace(ATTENTION, kernel="auto"), r"model\.stack\.pattern\.0\.mixer\.kernel is auto: set it to fixed"),
        (replace(ATTENTION, sink="learned"), r"\(Attention\) has other operations in training than in steps"),
        (LatentAttentionConfig(heads=4, kernel="fixed"), r"\(LatentAttention\) has other operations in training"),
    ):
        block = replace(made.cfg.model.stack.pattern[0], mixer=mixer)
        model = replace(made.cfg.model, stack=replace(made.cfg.model.stack, pattern=(block,)))
        loaded: Any = SimpleNamespace(cfg=model, options={"xla_allow_excess_precision": False})
        with user_error("inference.equal_to_training"):
            demand_equality(loaded, InferenceConfig(equal_to_training=True))
    loaded = SimpleNamespace(cfg=made.cfg.model, options={})
    with user_error("inference.equal_to_training"):
        demand_equality(loaded, InferenceConfig(equal_to_training=True))
    with user_error("inference.equal_to_training"):
        engine_of(Case(True, layers=1), program(Case(True, layers=1))[1].inputs)
    with user_error("inference.equal_to_training"):
        engine_of(case, state.inputs, ParallelConfig(data=1, tensor=2, data_sharding="replicate"))
    short: Any = SimpleNamespace(model=replace(made.cfg.model, sequence_length=TILE // 4), batch=made.cfg.batch)
    tokenizer, settings = ByteTokenizerConfig().build(), InferenceConfig(equal_to_training=True)
    with user_error("inference.equal_to_training"):
        engine_of_run(short, {}, made.mesh, {}, tokenizer, settings, end_tokens=(), length=8, queue=1)
