"""A run in a notebook on two by two devices: set up, stepped, called, evaluated and displayed."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from IPython.lib.pretty import pretty
from small_jobs import VOCABULARY, model, run_config
from user_errors import user_error

from megajax.config import load
from megajax.config.errors import ConfigError, UserError
from megajax.data.text.config import MockConfig
from megajax.job.notebook import set_up
from megajax.layers.param import bind
from megajax.mesh.config import ParallelConfig
from megajax.processes.xla_options import XlaConfig
from megajax.tokenizers.config import NullTokenizerConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.session import Run
from megajax.training.show_placement import drawing, visualize

CONFIG = run_config(
    model=model(dropout=0.0),
    parallel=ParallelConfig(data=2, tensor=2),
    batch=BatchConfig(global_size=8, micro_size=2),
    data=MockConfig(isolate_documents=True),
    evaluation=EvaluationConfig(every=2, batches=2),
    xla=XlaConfig(options={"xla_cpu_enable_fast_math": "false"}),
)


@pytest.fixture(scope="module")
def run() -> Run:
    run = set_up(CONFIG)
    yield run
    run.close()


def test_steps_of_a_notebook_continue_where_they_stopped(run):
    start = run.steps_done
    losses = [info.loss for info in run.steps(2)]
    assert [info.step for info in run.steps(3)] == [start + 3, start + 4, start + 5]
    assert run.steps_done == start + 5
    assert int(run.state.consumed_samples) == run.batches.consumed == 8 * run.steps_done
    assert abs(losses[0] - np.log(VOCABULARY)) < 0.3
    # The remaining steps of the config.
    assert [info.step for info in run.steps()] == list(range(start + 6, CONFIG.steps + 1))


def test_the_model_uses_the_present_weights(run):
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (3, 7))
    actual = run.model(tokens)
    assert actual.shape == (3, 7, VOCABULARY)
    np.testing.assert_array_equal(run.model(tokens=tokens), actual)
    params = jax.device_put(jax.device_get(run.state.params), jax.devices()[0])
    with jax.default_matmul_precision("highest"):
        expected = bind(run.program.abstract, params)(np.asarray(tokens, np.int32))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_model_refuses_arrays_that_its_call_does_not_take(run):
    for arrays, keywords, message in (
        ([], {}, "missing a required argument: 'tokens'"),
        ([[[1]]] * 9, {}, "too many positional arguments"),
        ([[[1]]], {"tokens": [[1]]}, "multiple values for argument 'tokens'"),
        ([[[1]]], {"words": [[1]]}, "unexpected keyword argument 'words'"),
        ([], {"positions": [[0]]}, "missing a required argument: 'tokens'"),
    ):
        with pytest.raises(ValueError, match=f"the model takes tokens.*: .*{message}"):
            run.model(*arrays, **keywords)
    for positions in ([[0], [1]], [[0, 1]]):
        with pytest.raises(ValueError, match="equally many rows and positions"):
            run.model([[1]], positions)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([1, 2], "2 dimensions"),
        ([[1, VOCABULARY]], "the model takes 0 to"),
        ([[-1]], "-1 to -1"),
        ([[0.7, 1.0]], "tokens are float64, the model takes int32"),
        ([[2**32 + 1]], "4294967297"),
    ],
)
def test_the_model_refuses_calls_without_an_answer(run, tokens, words):
    with pytest.raises(ValueError, match=words):
        run.model(tokens)


def test_setup_takes_a_config_and_says_how_to_load_one():
    with user_error():
        set_up("gpt3.py:debug")


def test_evaluation_is_the_mean_over_the_counted_tokens(run):
    """Row by row from the logits, with the positions and documents of the data."""
    source = run.parts.splits.valid
    rows = [source[n] for n in range(8, 24)]
    tokens, labels, positions, segments, mask = (
        np.stack([row[name] for row in rows]) for name in ("tokens", "labels", "positions", "segment_ids", "loss_mask")
    )
    params = jax.device_put(jax.device_get(run.state.params), jax.devices()[0])
    with jax.default_matmul_precision("highest"):
        logits = bind(run.program.abstract, params)(tokens, positions, segments)
    losses = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), labels[..., None], -1)[..., 0]
    expected = (losses * mask).sum() / mask.sum()
    assert run.evaluate(source, first=8, batches=2) == pytest.approx(expected, rel=1e-5)
    assert np.isnan(run.evaluate(source, batches=0))
    assert run.evaluate(source, batches=2, stopping=lambda: True) is None


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_nonfinite_step_changes_no_weight(run, poison):
    before = jax.device_get(run.state)
    batch, _ = next(run.parts.loader(run.parts.splits.train, 0))
    poisoned = {**batch, "loss_mask": batch["loss_mask"] * poison}
    with jax.set_mesh(run.mesh), jax.default_matmul_precision("highest"):
        run.state, metrics = run.train_step(run.state, poisoned)
    assert bool(metrics["skipped"])
    after = jax.device_get(run.state)
    restored = dataclasses.replace(
        after, step=before.step, consumed_samples=before.consumed_samples, skipped=before.skipped
    )
    for leaf, restored_leaf in zip(jax.tree.leaves(before), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(leaf, restored_leaf)
    assert (after.step, after.skipped) == (before.step + 1, before.skipped + 1)
    assert after.consumed_samples == before.consumed_samples + 8


def test_visualize_shows_every_weight_and_its_devices(run, capsys, monkeypatch):
    text = drawing(run)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert drawing(run) == text, "in a notebook too"
    assert visualize(run) is None, "the last line of a notebook's cell: shown once"
    assert capsys.readouterr().out == text + "\n"
    lines = text.splitlines()
    assert lines[0] == f"{len(run.state.params)} weights on 4 devices (data 2, tensor 2), zero1"
    end = next(n for n, line in enumerate(lines) if line.startswith("each device: "))
    table = {line.split()[0]: line for line in lines[1:end] if line.strip()}
    for path, array in run.state.params.items():
        assert " x ".join(map(str, array.shape)) in table[path]
    head = table["head"]
    assert head.split("  ")[-1].strip() == f"{128 * 16 * 4 / 4 / 2**20:.3f}"
    assert "vocab embed" in head
    assert "tensor, data" in head
    blocks = {shard.device.id: shard.index for shard in run.state.params["head"].addressable_shards}
    assert blocks[1] == (slice(64, 128), slice(0, 8))
    drawn = lines[next(n for n, line in enumerate(lines) if line.startswith("head and")) :]
    assert drawn[0].endswith(": vocab over tensor, embed over data")
    grid = [line.split("  ") for line in drawn if line.lstrip().startswith("vocab ")][:2]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in grid]
    assert cells == [["vocab 0:64", "device 0", "device 2"], ["vocab 64:128", "device 1", "device 3"]]
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    visualize(run)
    assert capsys.readouterr().out == "", "process 0 prints"
    (norm,) = [n for n, line in enumerate(lines) if line.startswith("norm.gain and")]
    assert "devices 0-1" in "".join(lines[norm:])


def test_displays_at_a_prompt_are_short(run):
    """The text of each object of a notebook; `pretty` is what IPython prints."""
    donated = run.state
    (info,) = run.steps(1)  # Takes the arrays of the old state.
    values = {"run": run, "state": run.state, "model": run.model, "batches": run.batches, "info": info, "cfg": run.cfg}
    values |= {"mesh": run.mesh, "parts": run.parts, "program": run.program, "old": donated}
    texts = {name: pretty(value) for name, value in values.items()}
    assert {name: len(text) for name, text in texts.items() if len(text) > 1000} == {}
    assert texts["run"].splitlines() == [
        "<Run",
        "  model   DecoderLM, 6,736 parameters: 2 layers, hidden 16, vocabulary 64",
        "  layout  4 cpu devices: data 2, tensor 2; zero1",
        "  batch   8 rows of 16 tokens, 2 microbatches",
        f"  step    {run.steps_done} of {run.cfg.steps}>",
    ]
    assert run._repr_html_().count("<tr>") == 4
    assert f"step={run.steps_done}, params=<{len(run.state.params)} arrays, " in texts["state"]
    assert texts["old"].startswith("TrainState(step=<1 array, 1 values>, ")
    assert texts["info"].startswith(f"StepInfo(step={run.steps_done}, loss={info.loss:.6g}, ")
    assert texts["batches"].startswith(f"<Loader: batches of 8 rows, {run.batches.consumed} of ")
    settings = texts["cfg"].splitlines()
    assert "  parallel.tensor: 2" in settings and not any("parallel.pipeline" in line for line in settings)


def test_all_problems_are_reported_before_anything_is_built():
    """A config written in Python has not been checked for problems of single settings; they are named too."""
    cfg = run_config(model=model(heads=4, kv_heads=3), parallel=ParallelConfig(tensor=0))
    with pytest.raises(ConfigError) as refused:
        set_up(cfg)
    assert "model.stack.pattern.0.mixer.kv_heads: heads=4 is not a multiple of kv_heads=3" in str(refused.value)
    assert "parallel.tensor: must be at least 1, got 0" in str(refused.value)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused():
    with user_error():
        set_up(run_config(tokenizer=NullTokenizerConfig(vocabulary_size=65)))


def test_batches_of_tokens_train_as_the_config_s_rows() -> None:
    """`step` and `batch` beside `steps`: the same numbers bit for bit; and what `batch` refuses."""
    cfg: Any = load("gpt3.py:debug", "precision.compute=float32", "steps=4", "model.stack.repeats=1")
    run = set_up(cfg)
    parts, source = run.parts, run.parts.splits.train
    with jax.set_mesh(run.mesh):
        reference = Run(parts, run.program.fresh_state()(), parts.loader(source, 0, training=True))
    for number, expected in enumerate(reference.steps(2)):
        rows = [source[8 * number + row] for row in range(8)]
        tokens = np.stack([np.append(row["tokens"], row["labels"][-1]) for row in rows])
        batch = run.batch(tokens)
        before, info = run.loss(batch), run.step(batch)
        assert (info.loss, info.grad_norm) == (expected.loss, expected.grad_norm)
        assert (
            (info.step, info.consumed_samples)
            == (expected.step, expected.consumed_samples)
            == (number + 1, 8 * number + 8)
        )
        assert before == pytest.approx(info.loss, rel=1e-6) and run.steps_done == number + 1
    # Shorter rows: padding has no loss, and a causal model does not see it.
    short = run.batch(tokens[:, :10])
    assert float(short["loss_mask"].sum()) == 8 * 9
    logits = np.asarray(run.model(tokens[:, :9]), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert run.loss(short) == pytest.approx(-np.take_along_axis(log_p, tokens[:, 1:10, None], -1).mean(), rel=1e-5)
    for wrong, message in (
        ({"tokens": tokens[:3]}, "a step has 8 rows .batch.global_size., and there are 3 rows of tokens"),
        ({"tokens": tokens[:, :1]}, "expected rows of 2 to 65"),
        ({"tokens": tokens + 1000}, "the model reads 0 to 511"),
        ({"tokens": tokens, "token": tokens}, "the model reads no token; it reads tokens, labels"),
        ({"positions": tokens[:, 1:]}, "has no tokens, which the model reads"),
        ({"tokens": tokens, "labels": 3}, "there are 0 rows of labels"),
    ):
        with pytest.raises(UserError, match=message):
            run.batch(**wrong)
    for use in (run.step, run.loss):
        with user_error():
            use(tokens)
    for each in (reference, run):
        each.close()
