"""Evaluations of a tiny run: in training, afterwards, resumed, by lm-eval, on other devices; and refusals."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_runs import LENGTH, QUICK, VOCABULARY, llama
from user_errors import user_error

from megajax.checkpoint.config import CheckpointConfig
from megajax.config import load
from megajax.config.errors import ConfigError, UserError
from megajax.data.text.config import BlendConfig
from megajax.data.text.indexed_dataset import IndexedWriter
from megajax.evaluate import folder_config, main
from megajax.interop.huggingface.registry import families
from megajax.interop.weights.fit import all_weights
from megajax.interop.weights.foreign import declared_by
from megajax.interop.weights.name_mapping import resolved
from megajax.job.job import train
from megajax.layers.param import bind
from megajax.mesh.config import ParallelConfig
from megajax.metrics.config import LoggingConfig
from megajax.precision.config import PrecisionConfig
from megajax.processes.xla_options import XlaConfig
from megajax.tasks.cache import RequestCache
from megajax.tasks.config import ChoicesConfig, EvaluatedConfig, HarnessConfig, LambadaConfig, SplitConfig
from megajax.tasks.evaluate_command import Evaluation, Evaluator, TaskProgress, evaluate, prepare
from megajax.tokenizers.config import NullTokenizerConfig, SentencePieceTokenizerConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.run_config import RunConfig
from megajax.training.scorer import Scorer, Window, WindowScore

STEPS = 2


def write_lines(path: Path, lines: list[dict]) -> str:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files, texts of numbers for the null tokenizer, and a run of two steps that was evaluated on them."""
    folder, draw = tmp_path_factory.mktemp("evaluated"), np.random.default_rng(0)
    for name, rows in (("train", 40), ("valid", 10)):
        with IndexedWriter(folder / name, np.dtype("<u2")) as writer:
            writer.add_document([draw.integers(0, VOCABULARY - 1, rows * LENGTH + 1).astype(np.uint16)])

    def text(size: int) -> str:
        return " ".join(map(str, draw.integers(0, VOCABULARY - 1, size)))

    write_lines(folder / "texts.jsonl", [{"text": text(size)} for size in (5, 9, 12, 20)])
    questions = [{"context": text(4), "choices": [text(n) for n in (1, 2, 1)], "answer": i % 3} for i in range(12)]
    write_lines(folder / "questions.jsonl", questions)
    prefixes = BlendConfig(train_paths=(str(folder / "train"),), valid_paths=(str(folder / "valid"),))
    cfg = RunConfig(
        model=llama(repeats=2),
        data=prefixes,
        tokenizer=NullTokenizerConfig(vocabulary_size=VOCABULARY),
        parallel=ParallelConfig(data=1),
        precision=PrecisionConfig(compute="float32"),
        batch=BatchConfig(global_size=4, micro_size=4),
        evaluation=EvaluationConfig(
            full=True, tasks_every=1, tasks=(LambadaConfig(path=str(folder / "texts.jsonl")), SplitConfig())
        ),
        checkpoint=CheckpointConfig(every=1),
        logging=LoggingConfig(every=1, plot=False, sample=False, report=False, live="never"),
        xla=XlaConfig(options=dict(QUICK)),
        steps=STEPS,
        run_dir=str(folder / "run"),
    )
    assert train(cfg) == 0
    return folder


def config(folder: Path, *settings: str) -> EvaluatedConfig:
    return load(folder / "run/config.yaml", *settings, root=EvaluatedConfig)


@pytest.fixture(scope="module")
def scorer(folder) -> Scorer:
    program, tokenizer = prepare(config(folder))
    with jax.set_mesh(program.mesh):
        weights, origin = all_weights(folder / "run", program)
    assert origin == f"{folder / 'run'}, step {STEPS}"
    return Scorer(program, tokenizer, weights)


def lines(folder: Path, split: str) -> list[dict]:
    all_lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [line for line in all_lines if line.get("split") == split]


def results(folder: Path) -> dict[str, dict[str, dict]]:
    return json.loads((folder / "results.json").read_text())["results"]


def test_a_run_is_evaluated_on_its_tasks_every_n_steps(folder):
    assert [line["step"] for line in lines(folder, "lambada")] == [1, 2]
    first, last = lines(folder, "lambada")
    assert first["loss"] != last["loss"]
    assert 0 <= first["accuracy"] <= 1
    assert lines(folder, "split")[-1]["loss"] == pytest.approx(lines(folder, "validation")[-1]["loss"], rel=1e-6)


def test_figures_match_those_of_the_run(folder):
    prefix, texts = folder / "valid", folder / "texts.jsonl"
    tasks = f"split:validation,perplexity:{prefix},lambada:{texts}"
    assert main([f"--run={folder / 'run'}", f"--tasks={tasks}", f"--output={folder}"]) == 0
    expected = lines(folder, "validation")[-1]["loss"]
    for name in ("split", "perplexity"):
        figures = results(folder)[name]
        assert figures["loss"]["value"] == pytest.approx(expected, rel=1e-6)
        assert figures["perplexity"]["value"] == pytest.approx(math.exp(expected), rel=1e-5)
        assert figures["loss"]["count"] == 10 * LENGTH
    assert results(folder)["lambada"]["loss"]["value"] == pytest.approx(lines(folder, "lambada")[-1]["loss"], rel=1e-6)
    assert results(folder)["lambada"]["truncated_contexts"]["value"] == 1
    stored = json.loads((folder / "results.json").read_text())
    assert stored["weights"] == f"{folder / 'run'}, step {STEPS}"
    assert {"jax", "numpy"} <= stored["versions"].keys()


def test_an_interrupted_evaluation_resumes(folder, tmp_path, monkeypatch, capsys):
    """The second attempt scores only the batches that the first one did not, with the same bits as one attempt."""
    evaluation = Evaluation(folder / "run", [ChoicesConfig(path=str(folder / "questions.jsonl"))], tmp_path)
    calls, scores = [], Scorer.scores

    def interrupted(self, rows):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(len(rows))
        return scores(self, rows)

    monkeypatch.setattr(Scorer, "scores", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(config(folder), evaluation, all_weights)
    assert not (tmp_path / "results.json").exists()
    (cache_file,) = (tmp_path / "evaluation_cache").iterdir()
    cache_file.write_bytes(cache_file.read_bytes()[:-9])  # the last line was cut short
    scored = sum(calls) - 1
    rest = []
    monkeypatch.setattr(Scorer, "scores", lambda self, rows: (rest.append(len(rows)), scores(self, rows))[1])
    assert evaluate(config(folder), evaluation, all_weights) == 0
    assert (scored, sum(rest)) == (7, 36 - 4)
    assert f"{scored} answers of an earlier attempt" in capsys.readouterr().err
    first = results(tmp_path)
    monkeypatch.setattr(Scorer, "scores", None)
    evaluate(config(folder), evaluation, all_weights)
    assert results(tmp_path) == first
    monkeypatch.setattr(Scorer, "scores", scores)
    evaluate(config(folder), evaluation._replace(output=tmp_path / "new", cache=False), all_weights)
    assert results(tmp_path / "new") == first


def test_parts_of_an_evaluation_have_the_bits_of_the_whole(folder, tmp_path, monkeypatch):
    """Parts score the batches of the whole; only the task without windows is left for the end."""
    tasks = [ChoicesConfig(path=str(folder / "questions.jsonl")), SplitConfig(split="validation")]
    evaluation = Evaluation(folder / "run", tasks, tmp_path)
    evaluator = Evaluator(config(folder), evaluation, all_weights, TaskProgress(visible=False))
    calls, scores = [], Scorer.scores
    monkeypatch.setattr(Scorer, "scores", lambda self, rows: (calls.append(len(rows)), scores(self, rows))[1])
    for part in (2, 0, 1):
        evaluator.score(part, 3)
    assert sum(calls) == 36 and len(list((tmp_path / "evaluation_cache").iterdir())) == 3
    calls.clear()
    figures = evaluator.figures()
    assert sum(calls) == 10
    evaluator._key = None
    assert evaluator.figures() == figures and sum(calls) == 10 + 36 + 10


def test_answers_of_other_weights_are_not_reused(tmp_path):
    window = Window(np.arange(5, dtype=np.int32), 2)
    with RequestCache(tmp_path, "one") as cache:
        cache.put([window], [WindowScore(-1.5, 1)])
    with RequestCache(tmp_path, "one") as cache:
        assert cache.get([window, window._replace(counted=1)]) == [(-1.5, 1), None]
    with RequestCache(tmp_path, "two") as cache:
        assert cache.get([window]) == [None]
    cache = RequestCache(tmp_path, "one")
    content = cache.path.read_bytes()
    for bit in range(0, 8 * len(content) - 8, 5):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        cache.path.write_bytes(damaged)
        with RequestCache(tmp_path, "one") as cache:
            assert cache.get([window]) == [None] and cache.loaded == 0


HARNESS = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
"""
CHOICES = """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITTEN = """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "1"
generation_kwargs: {until: ["9"], max_gen_toks: 3, do_sample: false}
metric_list: [{metric: exact_match}]
"""
ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""


@pytest.mark.slow
def test_lm_eval_agrees_with_counts_by_hand(folder, scorer, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name, path, rest in (
        ("own_choices", folder / "questions.jsonl", CHOICES),
        ("own_texts", folder / "texts.jsonl", ROLLING),
        ("own_written", folder / "texts.jsonl", WRITTEN),
    ):
        (tmp_path / f"{name}.yaml").write_text(HARNESS.format(name=name, path=path) + rest)
    task = HarnessConfig(tasks=("own_choices", "own_texts", "own_written"), include_path=str(tmp_path)).build(scorer)
    figures = task()
    mine = ChoicesConfig(path=str(folder / "questions.jsonl")).build(scorer)()
    correct = by_hand(folder, scorer)
    assert figures["own_choices/acc"].value == mine["accuracy"].value == correct / 12
    assert figures["own_choices/acc"].count == 12
    assert figures["own_choices/acc"].error == pytest.approx(mine["accuracy"].error)
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text().splitlines()]
    total = sum(rolling(scorer, text) for text in texts)
    word_count = sum(len(text.split()) for text in texts)
    assert figures["own_texts/word_perplexity"].value == pytest.approx(math.exp(-total / word_count), rel=1e-5)
    assert figures["own_written/exact_match"].value == 0
    with user_error():
        HarnessConfig(tasks=("own_choises",), include_path=str(tmp_path)).build(scorer)
    (tmp_path / "remote.yaml").write_text((HARNESS.format(name="remote", path="/no/file.jsonl")) + CHOICES)
    with user_error():
        HarnessConfig(tasks=("remote",), include_path=str(tmp_path)).build(scorer)


def log_p(scorer: Scorer, tokens: list[int]) -> np.ndarray:
    """Log-probability of each token except the first, from the model's scores of one row."""
    row = np.array(tokens, np.int32)
    leaves = {"tokens": row[:-1], "labels": row[1:], "positions": np.arange(len(row) - 1)}
    return scorer.scores([leaves] * 4)[0][0]  # four rows, as everywhere else: no further program


def by_hand(folder: Path, scorer: Scorer) -> int:
    """The number of correct answers."""
    correct = 0
    for line in map(json.loads, (folder / "questions.jsonl").read_text().splitlines()):
        context, values = [int(word) for word in line["context"].split()], []
        for choice in line["choices"]:
            end = [int(word) for word in choice.split()]
            values.append(log_p(scorer, context + end)[len(context) - 1 : len(context) + len(end) - 1].sum())
        correct += int(np.argmax(values)) == line["answer"]
    return correct


def rolling(scorer: Scorer, text: str) -> float:
    """Log-probability of a text: the first row after an end-of-document token, the rest with a full row of context."""
    tokens = [scorer.tokenizer.eod, *map(int, text.split())]
    total = log_p(scorer, tokens[: LENGTH + 1])[: min(LENGTH, len(tokens) - 1)].sum()
    if (rest := len(tokens) - 1 - LENGTH) > 0:
        total += log_p(scorer, tokens[-LENGTH - 1 :])[LENGTH - rest : LENGTH].sum()
    return float(total)


def test_errors_are_reported_before_anything_runs(folder, tmp_path):
    with user_error("--run", kind=ConfigError):
        main(["--tasks=split:validation"])
    with user_error("--run"):
        main([f"--run={tmp_path}", "--tasks=split:validation"])
    with user_error("--tasks", kind=ConfigError):
        main([f"--run={folder / 'run'}", "--tasks=perplexty:a"])
    with user_error("--config", kind=ConfigError):
        main([f"--run={folder / 'run'}", "--config=quickstart.py"])
    with user_error("parallel.tensr", kind=ConfigError):
        main([f"--run={folder / 'run'}", "--parallel.tensr=2"])
    for tasks in ([], ["--tasks=split:validation"]):
        with user_error("--include-path", kind=ConfigError):
            main([f"--run={folder / 'run'}", f"--include-path={tmp_path}", *tasks])


def test_a_run_without_checkpoints_and_a_tokenizer_of_another_size(folder, tmp_path):
    (tmp_path / "config.yaml").write_text((folder / "run/config.yaml").read_text())
    evaluation = Evaluation(tmp_path, [SplitConfig()], tmp_path)
    with user_error():
        evaluate(config(folder), evaluation, all_weights)
    cfg = replace(config(folder), tokenizer=NullTokenizerConfig(vocabulary_size=VOCABULARY + 1))
    message = (
        f"the tokenizer has {VOCABULARY + 1} tokens, model.vocabulary_size is {VOCABULARY}: give the tokenizer that"
    )
    with pytest.raises(UserError, match=message):
        evaluate(cfg, evaluation, all_weights)
    other = config(folder, f"model.hidden={64}")
    with user_error():
        evaluate(other, Evaluation(folder / "run", [SplitConfig()], tmp_path), all_weights)


def test_a_hugging_face_folder_is_evaluated(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    tokenizers = pytest.importorskip("tokenizers")
    model, family, draw = llama(repeats=1), families()["llama"], np.random.default_rng(0)
    table = resolved(family.rows(model), declared_by(model))
    tensors = {tensor.name: 0.1 * draw.normal(size=tensor.shape()).astype(np.float32) for tensor in table}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**family.config_json(model), "depth_scale": 2.0}))
    vocabulary = {"<eos>": 0} | {f"w{number}": number for number in range(1, VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    lines = [" ".join(f"w{n}" for n in draw.integers(1, VOCABULARY, size)) for size in (3, 9, 14)]
    texts = write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in lines])
    common = [f"--hf={tmp_path}", "--precision.compute=float32", "--ignore=depth_scale"]
    settings = [*common, "--parallel.data=1", *[f"--xla={name}={str(value).lower()}" for name, value in QUICK.items()]]
    assert main([*settings, f"--tasks=lambada:{texts}:strict=true", f"--output={tmp_path}"]) == 0
    program, _ = prepare(folder_config(tmp_path, ["depth_scale"]))
    weights, source = all_weights(Path(f"hf:{tmp_path}"), program, ["depth_scale"])
    assert source == f"hf:{tmp_path}, ignored settings: depth_scale=2.0"
    total = 0.0
    with jax.default_matmul_precision("highest"):
        for text in lines:
            ids = np.array([vocabulary[word] for word in text.split()])
            log_p = jax.nn.log_softmax(bind(program.abstract, weights)(ids[None, :-1]))
            total -= float(log_p[0, -1, ids[-1]])
    assert results(tmp_path)["lambada"]["loss"]["value"] == pytest.approx(total / 3, rel=1e-5)
    with user_error():
        main([f"--hf={tmp_path / 'none'}", "--tasks=split:validation"])
    with user_error("--run"):
        main([f"--run={tmp_path}", "--tasks=split:validation"])
    (tmp_path / "tokenizer.json").unlink()
    with user_error():
        main([*settings, "--tasks=perplexity:none"])
    null = ["--tokenizer.type=NullTokenizerConfig", f"--tokenizer.vocabulary_size={VOCABULARY}"]
    with user_error("none.idx"):
        main([*settings, *null, "--tasks=perplexity:none"])

    (tmp_path / "tokenizer.model").touch()
    expected = SentencePieceTokenizerConfig(path=f"{tmp_path}/tokenizer.model")
    assert folder_config(tmp_path, ["depth_scale"]).tokenizer == expected


def test_a_folder_of_another_kind_of_model_is_refused(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file({"none": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    vit = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 32, "image_size": 32}
    sizes = {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(vit | sizes | {"hidden_act": "gelu", "num_labels": 4}))
    with user_error("--hf"):
        main([f"--hf={tmp_path}", "--tasks=split:validation"])
