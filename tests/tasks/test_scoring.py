"""Scores of windows: against log_softmax of the model's logits, on every layout, in any batch."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from tiny_runs import LENGTH, ONE, QUICK, VOCABULARY, llama
from user_errors import user_error

from megajax.data.text.config import MockConfig
from megajax.inference.assembly import engine_refusal
from megajax.layers.param import bind
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.mesh.zigzag_order import SequenceSharding
from megajax.models.presets.encoders import bert
from megajax.precision.config import PrecisionConfig
from megajax.processes.xla_options import XlaConfig
from megajax.tasks.greedy_generation import Generation, by_recomputation, generate
from megajax.tasks.loglikelihood import Continuation, log_likelihoods
from megajax.tokenizers.config import NullTokenizerConfig
from megajax.training.config import BatchConfig
from megajax.training.program import Program
from megajax.training.run_config import RunConfig
from megajax.training.scorer import Scorer, Stopped, Window, WindowScore

SIZES = ((5, 2), (17, 16), (9, 1), (3, 1), (12, 11), (7, 3), (17, 4), (2, 1))
"""(tokens, counted) of windows; rows have 16 positions."""


def windows() -> list[Window]:
    draw = np.random.default_rng(0)
    return [Window(draw.integers(0, VOCABULARY, size).astype(np.int32), count) for size, count in SIZES]


@cache
def scorer(parallel: ParallelConfig = ONE, micro_size: int = 4) -> Scorer:
    rows = micro_size * (parallel.data or 1) * parallel.pipeline
    cfg = RunConfig(
        model=llama(),
        data=MockConfig(documents=300),
        parallel=parallel,
        precision=PrecisionConfig(compute="float32"),
        xla=XlaConfig(options=dict(QUICK)),
        batch=BatchConfig(global_size=rows, micro_size=micro_size),
    )
    mesh = build_mesh(parallel)
    program = Program.of(cfg, mesh)
    with jax.set_mesh(mesh):
        state = program.fresh_state()()
    return Scorer(program, NullTokenizerConfig(vocabulary_size=VOCABULARY).build(), state.inputs)


@cache
def model():
    """The module on one device, without a mesh: int32 [1, LENGTH] -> logits."""
    single, weights = scorer(), jax.device_put(jax.device_get(scorer().weights), jax.devices()[0])
    return jax.jit(lambda row: bind(single.program.abstract, weights)(row))


@cache
def log_softmax(tokens: bytes) -> np.ndarray:
    """float64 [N, V] by the module itself and numpy, for int32 tokens [N]."""
    ids = np.frombuffer(tokens, np.int32)
    row = np.zeros((1, LENGTH), np.int32)
    row[0, : len(ids)] = ids
    with jax.default_matmul_precision("highest"):
        logits = np.asarray(model()(row), np.float64)[0, : len(ids)]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def by_hand(window: Window) -> WindowScore:
    log_p, labels = log_softmax(window.tokens[:-1].tobytes()), window.tokens[1:]
    places = range(len(labels) - window.counted, len(labels))
    correct = sum(int(log_p[place].argmax()) == labels[place] for place in places)
    return WindowScore(sum(float(log_p[place, labels[place]]) for place in places), correct)


def close(actual: list[WindowScore], expected: list[WindowScore]) -> None:
    np.testing.assert_allclose([a[0] for a in actual], [e[0] for e in expected], rtol=1e-5, atol=1e-5)
    assert [a.right for a in actual] == [e.right for e in expected]


def test_answers_are_log_softmax_in_numpy():
    close(scorer().answers(windows()), [by_hand(window) for window in windows()])


def test_greedy_continuations_are_recognised():
    prompt = windows()[1].tokens[:6]
    token = int(log_softmax(prompt.tobytes())[-1].argmax())
    requests = [Continuation(prompt, np.array([id])) for id in (token, (token + 1) % VOCABULARY)]
    yes, no = log_likelihoods(scorer(), requests)
    assert (yes.greedy, no.greedy) == (True, False)
    assert yes.value > no.value


LAYOUTS = {
    "fsdp, tensor, sequence": ParallelConfig(data=2, tensor=2, sequence=True, data_sharding="fsdp"),
    "pipeline, context, tensor": ParallelConfig(data=1, pipeline=2, context=2, tensor=2, sequence=True),
    "data, ring": ParallelConfig(data=2, context=4, context_strategy="ring"),
}


DEFAULT = "pipeline, context, tensor"
NAMES = pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != DEFAULT)) for n in LAYOUTS])


@NAMES
def test_layouts_agree_with_one_device(name):
    close(scorer(LAYOUTS[name], 2).answers(windows()), scorer().answers(windows()))


@pytest.mark.parametrize(("context", "rounds", "tensor", "length"), [(3, 1, 1, 72), (4, 1, 3, 96), (8, 4, 1, 128)])
def test_compiled_rows_have_equal_chunks(context, rounds, tensor, length):
    """The sizes are even, as for cuDNN: 72 = 3 devices x 2 chunks x 12, 96 = 4 x 3 of tensor x 8, 128 = 8 x 8 x 2."""
    parallel = ParallelConfig(data=1, context=context, context_rounds=rounds, tensor=tensor, sequence=tensor > 1)
    sequence_sharding = SequenceSharding.of(parallel, causal=True)
    cfg = replace(scorer().program.cfg, parallel=parallel, model=replace(llama(), sequence_length=144))
    program = replace(scorer().program, cfg=cfg, layout=replace(scorer().program.layout, rows=sequence_sharding))
    instance = Scorer(program, scorer().tokenizer, {})
    assert [instance.padded(tokens) for tokens in (1, 64, length, 144)] == [length, length, length, 144]


def test_long_contexts_are_truncated_at_the_beginning():
    draw = np.random.default_rng(1)
    context, end = draw.integers(0, VOCABULARY, 30).astype(np.int32), np.array([3, 4], np.int32)
    short, long = log_likelihoods(scorer(), [Continuation(context[-15:], end), Continuation(context, end)])
    assert (short.truncated, long.truncated) == (False, True)
    assert short == long._replace(truncated=False)
    with user_error():
        log_likelihoods(scorer(), [Continuation(end, context[:17])])


def test_generation_is_greedy():
    prompt = windows()[3].tokens
    generated, tokens = [], prompt
    for _ in range(4):
        generated.append(int(log_softmax(tokens.tobytes())[-1].argmax()))
        tokens = np.append(tokens, generated[-1]).astype(np.int32)
    # The tokenizer writes ids with spaces between them.
    assert generate(scorer(), [Generation(prompt, 4)]) == [" ".join(map(str, generated))]
    assert generate(scorer(), [Generation(prompt, 4, [f" {generated[2]}"])])[0] == " ".join(map(str, generated[:2]))
    assert by_recomputation(scorer(), [Generation(prompt, 4)]) == [" ".join(map(str, generated))]
    with user_error():
        generate(scorer(), [Generation(prompt, 16)])


@NAMES
def test_generation_on_layouts_matches_one_device(name):
    """Without an engine for a layout, its scorer computes each token anew."""

    def texts():
        return [Generation(window.tokens[:size], 4) for window, size in zip(windows(), (5, 9, 3), strict=False)]

    program = scorer(LAYOUTS[name], 2).program
    assert (engine_refusal(program.cfg.model, program.mesh) is None) == name.startswith("fsdp")
    assert generate(scorer(LAYOUTS[name], 2), texts()) == by_recomputation(scorer(), texts())


def test_an_evaluation_can_be_stopped():
    instance = scorer()
    instance.stopping = lambda: True
    try:
        with pytest.raises(Stopped):
            instance.answers(windows())
    finally:
        instance.stopping = lambda: False


def test_models_that_are_not_causal_are_refused():
    cfg = RunConfig(model=bert("debug"), data=MockConfig())
    program = scorer().program
    with user_error():
        Scorer(replace(program, cfg=cfg), scorer().tokenizer, {})
