"""`convert --quantize`: runs of quantized weights, reports of calibration and comparison, and readers of such runs."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hugging_face_folders import ArraySource, read_all, read_weight
from tiny_runs import llama
from user_errors import user_error

from megajax import convert
from megajax.checkpoint.array_serialization import read
from megajax.checkpoint.zarr_reader import StoredArrays
from megajax.config import load
from megajax.config.dump import to_yaml
from megajax.config.errors import ConfigError, UserError
from megajax.inference.loaded_model import demand_divisible, load_weights
from megajax.interop.quantization.calibration import LayerByLayer, calibrate, compare, text_rows
from megajax.interop.weights.fit import all_weights, weights_of
from megajax.interop.weights.foreign import declared_by, one_device
from megajax.interop.weights.formats import open_stored
from megajax.interop.weights.origin import run_config
from megajax.interop.weights.quantize_on_load import QuantizedWeights, quantized_matrices
from megajax.interop.weights.step_writer import write_step
from megajax.interop.weights.weights_config import model_facts, weights_config
from megajax.layers.param import bind
from megajax.layers.quantization.config import QuantizationConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan
from megajax.precision.config import PrecisionConfig
from megajax.tasks.config import EvaluatedConfig
from megajax.tasks.evaluate_command import prepare
from megajax.tokenizers.config import ByteTokenizerConfig
from megajax.training.scorer import Scorer, Window, row

pytestmark = pytest.mark.usefixtures("small_chunks")
MODEL = replace(llama(), vocabulary_size=257, vocabulary_multiple=1)
MATRICES = 2 * 32 * (8 * 4 * 2 + 4 * 4 * 2 + 3 * 48)
OTHERS = 2 * 257 * 32 + 5 * 32
SCALES = 2 * (8 * 4 + 2 * 4 * 4 + 32 + 2 * 48 + 32)


def drawn() -> dict[str, np.ndarray]:
    """Weights whose inputs differ much in size from channel to channel, as those of trained models do."""
    rng, weights = np.random.default_rng(3), {}
    for path, spec in declared_by(MODEL).items():
        is_gain = path.endswith("gain")
        values = np.exp(rng.normal(0, 1.5, spec.shape)) if is_gain else rng.normal(0, 0.2, spec.shape)
        weights[path] = values.astype(np.float32)
    return weights


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "float"
    run.mkdir()
    cfg = replace(weights_config(MODEL, ByteTokenizerConfig(), run), precision=PrecisionConfig(compute="float32"))
    (run / "config.yaml").write_text(to_yaml(cfg))
    meta = {"facts": model_facts(cfg), "config": to_yaml(cfg), "rows": [[0, 2]], "seed": 0}
    write_step(run / "checkpoints", declared_by(MODEL), ArraySource(drawn()), meta, dtype=np.dtype(np.float32))
    (run / "text.txt").write_text("To be, or not to be, that is the question. " * 20)
    return run


def stored(run: Path) -> dict[str, np.ndarray]:
    return read_all(open_stored(run).weights)


def rows_of(count: int, length: int = 16) -> np.ndarray:
    """Random tokens of some rows."""
    return np.random.default_rng(0).integers(0, 256, (count, length)).astype(np.int32)


def dequantized(model: Any, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The float weights of a run, by the reference: numbers times scales, spread over their inputs."""
    result = {path: np.asarray(value) for path, value in values.items()}
    for path, quantized in quantized_matrices(model).items():
        spec = declared_by(MODEL)[path]
        leaves = {end: jnp.asarray(result.pop(path + end)) for end in quantized.declared(spec.shape, spec.axes)}
        result[path] = np.asarray(quantized.whole(leaves))
    return result


@pytest.mark.parametrize(
    ("words", "matrix_bytes", "error"),
    [
        pytest.param(["--quantize=int8"], MATRICES + 4 * SCALES, 1 / 254, marks=pytest.mark.slow),
        (["--quantize=int4", "--group=4", "--dtype=bfloat16"], MATRICES // 2 + MATRICES, 1 / 14),
        pytest.param(["--quantize=fp8_blocks"], MATRICES + 4 * 2 * 7, 1 / 28, marks=pytest.mark.slow),
    ],
)
def test_a_quantized_run(
    words: list[str], matrix_bytes: int, error: float, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "quantized"
    assert convert.main([f"--from={source}", f"--to={run}", "--verify", *words]) == 0
    report, values = json.loads((run / "quantization.json").read_text()), stored(run)
    rest = 2 if "--dtype=bfloat16" in words else 4
    assert report["bytes_before"] == 4 * (MATRICES + OTHERS)
    assert report["bytes_after"] == matrix_bytes + rest * OTHERS == sum(value.nbytes for value in values.values())
    model = open_stored(run).model
    assert model.quantization.weights == words[0].partition("=")[2]
    assert model == replace(MODEL, quantization=model.quantization)
    quantized = dequantized(model, values)
    for path, value in drawn().items():
        assert np.abs(quantized[path].astype(np.float32) - value).max() <= np.abs(value).max() * max(error, 2.0**-9), (
            path
        )
    assert "all equal" in capsys.readouterr().out


@pytest.mark.slow
def test_factors_minimise_the_error_of_outputs(source: Path) -> None:
    weights, tokens = open_stored(source).weights, rows_of(6)
    quantized_model = replace(MODEL, quantization=QuantizationConfig(weights="int4", group=16, balanced=True))
    matrices = quantized_matrices(quantized_model)
    calibration = calibrate(MODEL, weights, matrices, tokens, rows=2)
    assert set(calibration.matrices) == set(matrices)
    for path, (plain, calibrated) in calibration.errors.items():
        assert calibrated <= plain, path
        factor, shape = calibration.matrices[path].factor, declared_by(MODEL)[path].shape
        assert factor is not None
        assert factor.shape == (shape[:3] if path.endswith("mixer.output") else shape[:2]), "that of the inputs"
    gained = [calibrated / plain for plain, calibrated in calibration.errors.values()]
    assert np.mean(gained) < 0.9
    quantized = [
        QuantizedWeights(weights, declared_by(model), quantized_matrices(model), known)
        for model, known in ((quantized_model, calibration.matrices), (quantized_model, {}))
    ]
    models = [LayerByLayer(MODEL, weights), *(LayerByLayer(quantized_model, each) for each in quantized)]
    with_it, without = (compare(models[0], model, tokens, rows=4) for model in models[1:])
    assert with_it.kl_divergence < without.kl_divergence
    assert with_it.tokens == 6 * 15
    assert with_it.loss_before == without.loss_before


@pytest.mark.slow
def test_static_scales_cover_the_text(source: Path) -> None:
    weights, tokens = open_stored(source).weights, rows_of(4)
    quantization = QuantizationConfig(weights="fp8", activations="fp8", static=True)
    calibration = calibrate(
        MODEL, weights, quantized_matrices(replace(MODEL, quantization=quantization)), tokens, rows=2
    )
    seen: dict[tuple[str, int], float] = {}

    def watch(layer: Any, values: Any, inputs: Mapping[str, jax.Array]) -> None:
        del values
        for name, x in inputs.items():
            key = f"stack.blocks.{layer.block}.{name}", layer.row
            seen[key] = max(seen.get(key, 0.0), float(jnp.abs(x).max()))

    LayerByLayer(MODEL, weights).states(tokens, rows=4, watch=watch)
    for (path, number), largest in seen.items():
        amax = calibration.matrices[path].amax
        assert amax is not None
        np.testing.assert_allclose(amax[number], largest, rtol=1e-5)
    assert len(seen) == 2 * len(calibration.matrices)


def test_layers_one_by_one_give_the_logits_of_the_model(source: Path) -> None:
    weights, tokens = open_stored(source).weights, rows_of(3)
    runner = LayerByLayer(MODEL, weights)
    parts = [np.asarray(runner.logits(x)) for x in runner.states(tokens, rows=2)]
    expected = jax.jit(lambda values: bind(one_device(MODEL)(), values)(tokens))(drawn())
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=1e-5 * np.abs(expected).max())


def test_differences_by_numpy(source: Path) -> None:
    weights, tokens = open_stored(source).weights, rows_of(3, length=8)
    changed = drawn()
    changed["head"] *= np.float32(1.1)
    models = LayerByLayer(MODEL, weights), LayerByLayer(MODEL, ArraySource(changed))
    actual = compare(*models, tokens, rows=2)
    (a, b) = (np.concatenate([np.asarray(m.logits(x), np.float64) for x in m.states(tokens, rows=3)]) for m in models)
    a, b, labels = a[:, :-1], b[:, :-1], tokens[:, 1:, None]
    p, q = (z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in (a, b))
    np.testing.assert_allclose(actual.largest_logit_difference, np.abs(a - b).max(), rtol=1e-4)
    np.testing.assert_allclose(actual.mean_logit_difference, np.abs(a - b).mean(), rtol=1e-4)
    np.testing.assert_allclose(actual.kl_divergence, (np.exp(p) * (p - q)).sum(-1).mean(), rtol=1e-3)
    np.testing.assert_allclose(actual.loss_after, -np.take_along_axis(q, labels, -1).mean(), rtol=1e-5)
    np.testing.assert_allclose(actual.perplexity_before, np.exp(-np.take_along_axis(p, labels, -1).mean()), rtol=1e-4)
    assert actual.same_likeliest == (a.argmax(-1) == b.argmax(-1)).mean()


def test_rows_of_a_text() -> None:
    tokenizer = ByteTokenizerConfig().build()
    assert text_rows(tokenizer, "abcdefg", length=3, most=100).tolist() == [[97, 98, 99], [100, 101, 102]]
    assert text_rows(tokenizer, "abcdefg", length=3, most=5).shape == (1, 3)
    assert text_rows(tokenizer, "ab", length=3, most=100).shape == (1, 2)
    with user_error():
        text_rows(tokenizer, "a", length=3, most=100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quantize=int3"], "--quantize: must be one of "),
        (["--group=64"], "--group: applies to quantized weights"),
        (["--quantize=int8", "--group=64"], "--group: applies to int4 and nf4, not to int8"),
        (["--quantize=int4", "--group=7"], "--group: must be even"),
        (["--quantize=fp8", "--double"], "--double: applies to scales of groups, which fp8 does not have"),
        (["--quantize=int8", "--activations=fp8"], "--activations: fp8 needs weights=fp8"),
        (["--quantize=int8", "--activations=fp4"], "--activations: must be none or fp8, got fp4"),
        (["--quantize=int8", "--compare=none.txt"], "--compare: none.txt does not exist"),
        (["--quantize=int8", "--exclude=*.mixer.querry"], "model.quantization.exclude"),
        (["--quantize=int4", "--group=20"], "32 inputs are not a multiple of the group, 20"),
        (["--quantize=int8", "--compare=SHORT"], "a text of 1 tokens is too short"),
    ],
)
def test_wrong_command_lines_write_nothing(arguments: list[str], message: str, source: Path, tmp_path: Path) -> None:
    (short := tmp_path / "short.txt").write_text("a")
    arguments = [argument.replace("SHORT", str(short)) for argument in arguments]
    with pytest.raises((ConfigError, UserError)) as raised:
        convert.main([f"--from={source}", f"--to={tmp_path / 'new'}", *arguments])
    assert message in str(raised.value)
    assert [*tmp_path.iterdir()] == [short]


def test_unsupported_uses_of_quantized_weights(source: Path, tmp_path: Path) -> None:
    run = tmp_path / "quantized"
    assert convert.main([f"--from={source}", f"--to={run}", "--quantize=fp8"]) == 0
    for words, what in (
        ([f"--to={tmp_path / 'twice'}", "--quantize=int8"], r"quantized already \(fp8\)"),
        ([f"--to=hf:{tmp_path / 'theirs'}"], r"the weights are quantized \(fp8\), which is written to runs only"),
    ):
        with pytest.raises(UserError, match=what):
            convert.main([f"--from={run}", *words])
    assert convert.main([f"--from={run}", f"--to={tmp_path / 'copy'}", "--verify"]) == 0
    with user_error("optimizer", kind=ConfigError):
        load(run / "config.yaml")
    name = "params.stack.blocks.0.mixer.query"
    like = {name: jax.ShapeDtypeStruct((2, 32, 8, 4), jnp.float32)}
    with user_error():
        read(StoredArrays(run / "checkpoints/00000000"), like)


def test_weights_are_quantized_while_they_are_loaded(source: Path, tmp_path: Path) -> None:
    run, quantization = tmp_path / "quantized", QuantizationConfig(weights="int4", group=16)
    model, of_source = replace(MODEL, quantization=quantization), open_stored(source)
    assert convert.main([f"--from={source}", f"--to={run}", "--quantize=int4", "--group=16"]) == 0
    loaded = weights_of(of_source, model)
    for path, value in stored(run).items():
        np.testing.assert_array_equal(read_weight(loaded, path), value)
    reloaded = weights_of(open_stored(run), model)
    assert reloaded.shapes == loaded.shapes
    static = replace(MODEL, quantization=QuantizationConfig(weights="fp8", activations="fp8", static=True))
    with user_error("model.quantization.static"):
        weights_of(of_source, static)


def test_groups_that_devices_do_not_divide_are_refused() -> None:
    parallel = ParallelConfig(tensor=2, data=1)
    declared = declared_by(replace(MODEL, quantization=QuantizationConfig(weights="int4")))
    scales = {path: spec for path, spec in declared.items() if path.endswith("mlp.down.scale")}
    with user_error():
        demand_divisible(scales, Plan.of(parallel), build_mesh(parallel, jax.devices()[:2]))


@pytest.mark.slow
def test_evaluation_and_generation_read_a_quantized_run(source: Path, tmp_path: Path) -> None:
    run = tmp_path / "quantized"
    text = source / "text.txt"
    flags = ["--quantize=int4", "--group=16", f"--calibration={text}", f"--compare={text}"]
    assert convert.main([f"--from={source}", f"--to={run}", *flags]) == 0
    assert json.loads((run / "quantization.json").read_text())["kl_divergence"] > 0
    step, tokens = open_stored(run), np.arange(40, 56, dtype=np.int32)
    runner = LayerByLayer(step.model, step.weights)
    right = np.asarray(runner.logits(runner.states(tokens[None], rows=1)[0]))
    parallel, float32 = ParallelConfig(data=1), PrecisionConfig(compute="float32")
    cfg = replace(run_config(run, trusted=False).base, parallel=parallel, precision=float32)
    evaluated = EvaluatedConfig(**{field.name: getattr(cfg, field.name) for field in fields(cfg)})
    program, tokenizer = prepare(evaluated, 1)
    with jax.set_mesh(program.mesh):
        weights, _ = all_weights(run, program)
    log_p, _ = Scorer(program, tokenizer, weights).scores([row(Window(tokens, 1))])
    expected = jax.nn.log_softmax(right[0, :-1])[np.arange(15), tokens[1:]]
    np.testing.assert_allclose(log_p[0, :15], expected, atol=1e-4)
    mesh = build_mesh(parallel, jax.devices()[:1])
    loaded, narrow = (
        load_weights(step.model, step.weights, Plan.of(parallel), mesh, precision, {})
        for precision in (float32, PrecisionConfig(compute="bfloat16"))
    )
    with jax.set_mesh(mesh):
        logits = jax.jit(lambda values: bind(loaded.model, values)(tokens[None]))(loaded.weights)
    np.testing.assert_allclose(logits, right, atol=1e-5 * np.abs(right).max())
    assert {str(value.dtype) for path, value in narrow.weights.items() if ".query" in path} == {"uint8", "float32"}
