"""Names of other trainers: every row of the table names settings that exist, in every shipped config."""

import re
import shlex
from functools import cache, partial

import pytest

from megajax import evaluate, launch
from megajax.checkpoint.places import locate
from megajax.command_line.corrections import corrections, similar_name
from megajax.command_line.foreign_names import ROWS, TABLE
from megajax.command_line.parser import parse
from megajax.config import ConfigError, UserError, field_types, load
from megajax.config.compose import assemble
from megajax.config.dump import flatten
from megajax.config.errors import NO_SETTING
from megajax.config.files import SHIPPED, functions_of
from megajax.config.hints import download_hint
from megajax.config.overrides import patch_of, plain_name, setting
from megajax.config.parse_scalar import Text
from megajax.data.preprocessing.options import parse as preprocess
from megajax.inference.server.config import ServingConfig
from megajax.interop.formats import open_stored
from megajax.tasks.config import EvaluatedConfig
from megajax.train import FLAGS
from megajax.training.run_config import RunConfig

FILES = sorted(path.name for path in SHIPPED.glob("*.py") if not path.name.startswith("_"))
VALUES = {
    "model.lora.alpha": "16", "logging.wandb.project": "p", "logging.wandb.name": "n", "data.split": "90,5,5",
    "checkpoint.load": "runs/a", "tokenizer.path": "models/a", "data.paths": "data/a",
    "tokenizer.type": "HuggingFaceTokenizer", "run_dir": "runs/a", "schedule.anneal_style": "linear",
    "schedule.style": "cosine", "precision.params": "float32", "precision.reduce": "float32",
    "model.lora.decomposed": "true", "model.lora.rank_stabilized": "true",
}  # fmt: skip
"""Setting -> a value of the other trainer, where neither 2 nor a word of the table is one."""
NOT_IN_ALL = {
    "model.sequence_length", "model.vocabulary_size", "model.tied", "optimizer.beta1", "optimizer.beta2",
    "optimizer.epsilon", "data.split", "data.seed", "data.loader.threads", "model.label_smoothing",
    "model.z_loss",
    *(f"model.stack.pattern.N.{name}" for name in (
        "dropout", "mixer.heads", "mixer.kv_heads", "mixer.head_dim", "mixer.rope.base", "mixer.dropout",
        "mlp.ffn", "mlp.experts", "mlp.top_k", "mlp.expert.ffn")),
}  # fmt: skip
"""Settings that some models, data and optimizers do not have."""
SERVING = {row.settings for row in ROWS if row.settings.startswith(("inference.", "server."))}


def sample(row):
    """A value of the other trainer for a row."""
    theirs = [pair.partition("=")[0] for pair in row.values.split() if not pair.startswith("*")]
    return VALUES.get(row.settings) or (theirs or ["2"])[0]


@cache
def config_of(source):
    return load(source)


def suggested(problem):
    """The settings of "write --a=b --c=d"."""
    lines = [line for line in problem.hint.splitlines() if line.startswith("write --")]
    return [setting(word) for line in lines for word in shlex.split(line)[1:]]


def wrong(config, settings):
    """Problems of names and of types, not of settings that do not fit together."""
    _, problems = assemble(type(config), config, patch_of(settings))
    messages = (NO_SETTING, "expected", "needs a value")
    return {problem.setting for problem in problems if problem.message.startswith(messages)}


@pytest.mark.parametrize("file", FILES)
def test_every_row_in_every_shipped_config(file):
    """What is written is a setting of the config, with a value of its type; or the answer says that it has none."""
    lacking, seen = set(), set()
    for function in functions_of(SHIPPED / file):
        config = config_of(f"{file}:{function}")
        if (key := tuple(flatten(config))) in seen:
            continue  # the same settings, with other sizes
        seen.add(key)
        given = {row.names.split()[0]: sample(row) for row in ROWS if row.settings not in SERVING}
        answers = corrections(given, config)
        assert list(answers) == list(given)
        written = {}
        for name, problem in answers.items():
            assert problem.hint or "no such setting" in problem.message or "other verbs have" in problem.message, name
            if "this config has no such setting" in problem.message:
                lacking.add(TABLE[name].settings)
            written |= dict(suggested(problem))
        assert len(written) > 35 and "{" not in "".join(problem.hint for problem in answers.values())
        assert not wrong(config, written.items())
    assert lacking <= NOT_IN_ALL


def test_every_value_of_the_table_is_one_of_ours():
    config = config_of("mixtral.py")
    serving = ServingConfig(model=config.model)
    for row in ROWS:
        for ours in {pair.partition("=")[2] for pair in row.values.split()} if row.settings and not row.by else ():
            settings = [(name, Text(ours)) for name in row.settings.split()]
            assert not wrong(serving if row.settings in SERVING else config, settings), (row, ours)
    given = {row.names.split()[0]: sample(row) for row in ROWS if row.settings in SERVING}
    written = [pair for problem in corrections(given, serving).values() for pair in suggested(problem)]
    assert {name for name, _ in written} == SERVING and not wrong(serving, written)
    answer = corrections({"served_model_name": "a"}, config)["served_model_name"]
    assert answer.message == "is called server.name, and this config has no such setting"


def test_a_name_has_one_row_and_is_no_setting_of_ours():
    names = [name for row in ROWS for name in row.names.split()]
    assert len(names) == len(set(names)) == len(TABLE) > 300 and len(ROWS) > 60
    assert names == [plain_name(name) for name in names]
    # Names of settings whose values may be another trainer's, or that other verbs do not have.
    assert set(names) & set(field_types.names(RunConfig)) == {"model", "optimizer", "precision", "run_dir"}
    assert not set(names) & {plain_name(flag.name) for flag in FLAGS}


def refused(*argv, **options):
    """Setting -> message and hint, of a command line that is refused."""
    with pytest.raises(ConfigError) as error:
        parse(argv, **{"verb": "train", "flags": FLAGS} | options)
    assert error.value.code == 2
    return {problem.setting: f"{problem.message}\n{problem.hint}" for problem in error.value.problems}


def test_all_names_of_a_command_are_answered_together():
    problems = refused(
        *("--config=llama3.py", "--learning-rate", "3e-4", "--tp=8", "--num_layers=16", "--bf16", "--seq-len=4096"),
        *("--max_grad_norm=0", "--optim=adamw_torch", "--fsdp=full_shard auto_wrap", "--do_train", "--steps=many"),
        *("--paralel.tensor=2", "--skip-trian", "--optimizer=adam", "--lr_scheduler_type=polynomial"),
    )
    assert problems == {
        "--learning_rate": "is called schedule.lr here\nwrite --schedule.lr=3e-4",
        "--tp": "is called parallel.tensor here\nwrite --parallel.tensor=8",
        "--num_layers": "is set by model.stack.repeats here\nwrite --model.stack.repeats=16",
        "--bf16": "is called precision.compute here\nwrite --precision.compute=bfloat16",
        "--seq_len": "is called model.sequence_length here\nwrite --model.sequence_length=4096",
        "--max_grad_norm": "is called optimizer.clip here\nwrite --optimizer.clip=none",
        "--optim": "is called optimizer.type here\nwrite --optimizer.type=AdamW",
        "--optimizer": "is called optimizer.type here\nwrite --optimizer.type=AdamW",
        "--fsdp": "is called parallel.data_sharding here\nwrite --parallel.data_sharding=fsdp\n"
        "over parallel.data devices, which are all that the other axes leave",
        "--do_train": "is no setting here\nverbs: python -m megajax.train, evaluate, generate",
        "--lr_scheduler_type": "is called schedule.style here\nwrite --schedule.style=polynomial\nschedule.style: "
        "expected one of constant, linear, cosine, inverse_square_root, wsd, got 'polynomial'",
        "steps": "expected a whole number, got 'many'\n",
        "paralel.tensor": "no such setting\ndid you mean parallel.tensor?",
        "--skip-trian": "no such flag or setting\ndid you mean skip-train?",
    }


def test_misspelt_names_of_other_trainers():
    problems = refused(
        *("--config=gpt2.py", "--learnign_rate=3e-4", "--num_layer=4", "--max-step=9", "--ouput_dir=a", "--skip-trian"),
        *("--schedule.lrr=1", "--do_trian", "--zzz=1"),
    )
    assert problems == {
        "--learnign_rate": "no such flag or setting\ndid you mean learning_rate, which is called schedule.lr here?\n"
        "write --schedule.lr=3e-4",
        "--num_layer": "no such flag or setting\ndid you mean num_layers, which is set by model.stack.repeats here?\n"
        "write --model.stack.repeats=4",
        "--max_step": "no such flag or setting\ndid you mean max_steps, which is called steps here?\nwrite --steps=9",
        "--ouput_dir": "no such flag or setting\ndid you mean output_dir, which is called run_dir here?\n"
        "write --run_dir=a",
        "--do_trian": "no such flag or setting\ndid you mean do_train, which is no setting here?\n"
        "verbs: python -m megajax.train, evaluate, generate",
        "--skip-trian": "no such flag or setting\ndid you mean skip-train?",
        "schedule.lrr": "no such setting\ndid you mean schedule.lr?",
        "zzz": "no such setting\n",
    }


def test_misspelt_settings_are_ours_first():
    known = list(field_types.names(RunConfig))
    settings = [name for source in ("gpt2.py", "mixtral.py", "quickstart.py") for name in flatten(config_of(source))]
    # All letters of all settings, 11,537 names, take minutes and were tried once.
    for index, name in enumerate([*dict.fromkeys(settings)][::3]):
        at = index % (len(name) - 1)
        middle = name[at + 1 : at + 2] + name[at] * (index % 2)  # dropped or swapped
        misspelt = name[:at] + middle + name[at + 2 :]
        assert misspelt in TABLE or similar_name(misspelt, known) == "", misspelt


def test_names_in_python():
    with pytest.raises(ConfigError) as error:
        load("gpt2.py", "lr=3e-4", "num_layer=4", "seed=9")
    assert str(error.value).splitlines() == [
        "2 problems in configs/gpt2.py + settings:",
        "  --lr: is called schedule.lr here",
        "      write --schedule.lr=3e-4",
        "  --num_layer: no such flag or setting",
        "      did you mean num_layers, which is set by model.stack.repeats here?",
        "      write --model.stack.repeats=4",
    ]
    assert load("gpt2.py", "--schedule.lr=3e-4", "--model.stack.repeats=4").schedule.lr == 3e-4


@pytest.mark.parametrize(
    ("names", "written"),
    [
        ("warmup_steps=10", "schedule.warmup_steps=10"),
        ("lr_scheduler.decay_type=linear", "schedule.style=linear"),
        ("eval_steps=5", "evaluation.every=5"),
        ("dropout=0.1", "model.dropout=0.1 model.stack.pattern.0.dropout=0.1 model.stack.pattern.0.mixer.dropout=0.1"),
        ("ici_data_parallelism=2 ici_fsdp_parallelism=4", "parallel.data_sharding=fsdp"),
        ("fsdp_sharding_strategy=1", "parallel.data_sharding=fsdp"),
        ("keep_latest_k=0 checkpoint.keep_latest_k=0", "checkpoint.keep_last=none"),
        ("mixed_precision=fp8", "precision.compute=bfloat16"),
    ],
)  # fmt: skip
def test_values_that_are_computed(names, written):
    answers = corrections(
        {name: Text(value) for name, _, value in (p.partition("=") for p in names.split())}, config_of("gpt2.py")
    )
    assert {"=".join(pair) for problem in answers.values() for pair in suggested(problem)} == set(written.split())


def test_arithmetic_is_given_as_a_formula():
    given = {name: Text("4") for name in ("gradient_accumulation_steps", "epochs", "num_layers", "n_layer")}
    answers = corrections(given, config_of("gpt2.py"))
    assert answers["gradient_accumulation_steps"].hint.startswith("batch.global_size = batch.micro_size x microbatches")
    assert "steps = epochs x training rows / batch.global_size" in answers["epochs"].hint
    assert {answers[name].hint for name in ("num_layers", "n_layer")} == {"write --model.stack.repeats=4"}


@pytest.mark.parametrize(
    ("source", "name", "hint"),
    [
        ("gpt_oss.py", "num_layers", "write --model.stack.repeats=6"),  # a pattern of two blocks
        ("t5.py", "num_layers", "write --model.stack.repeats=12 --model.encoder.repeats=12"),
        ("deepseek.py", "num_layers", "segments.0.repeats = 1 x 1, model.stack.segments.1.repeats = 26 x 1"),
        ("nemotron_h.py:debug", "n_head", "write --model.stack.segments.0.pattern.3.mixer.heads=12 "
         "--model.stack.segments.2.pattern.0.mixer.heads=12"),
        ("gpt2.py", "tokenizer_name", "write --tokenizer.type=HuggingFaceTokenizer --tokenizer.path=12"),
        ("quickstart.py", "data_path", "write --data.type=Blend --data.paths=12"),
        ("gpt2.py", "num_experts", ""),
    ],
)  # fmt: skip
def test_answers_follow_the_config(source, name, hint):
    assert hint in corrections({name: Text("12")}, config_of(source))[name].hint


def test_a_setting_of_a_users_own_class_keeps_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass, replace\n"
        "from megajax.config import load\n"
        "from megajax.optim.config import AdamWConfig\n"
        "@dataclass(frozen=True)\n"
        "class Mine(AdamWConfig):\n"
        "    lr: float = 1.0\n"
        "def config():\n"
        "    return replace(load('quickstart.py'), optimizer=Mine())\n"
    )
    assert parse(["--config=mine.py", "--optimizer.lr=3"], verb="train").config.optimizer.lr == 3
    assert "is called schedule.lr here" in refused("--config=quickstart.py", "--optimizer.lr=3")["--optimizer.lr"]


def test_names_in_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("config: gpt_oss.py\nn_layer: 12\nbf16: {enabled: true}\nlearning-rate: 1e-4\n")
    problems = refused("--config=a.yaml", "--tp=2")
    assert problems == {
        "n_layer": "is set by model.stack.repeats here\nwrite --model.stack.repeats=6",
        "bf16": "is called precision.compute here\nwrite --precision.compute=bfloat16",
        "learning_rate": "is called schedule.lr here\nwrite --schedule.lr=1e-4",
        "--tp": "is called parallel.tensor here\nwrite --parallel.tensor=2",
    }
    (tmp_path / "b.json").write_text('{"learning_rate": 0.1, "lr_scheduler_type": "cosine"}')
    assert refused("--config=b.json")["learning_rate"] == "is called schedule.lr here\nwrite --schedule.lr=0.1"


def test_values_of_other_trainers_for_our_names():
    problems = refused("--config=gpt2.py", "--precision=bf16", "--optimizer=dam", "--model=gpt2")
    assert problems.keys() == {"--precision", "optimizer.type", "model.type"}
    assert problems["--precision"] == "is called precision.compute here\nwrite --precision.compute=bfloat16"
    problems = refused("--config=gpt2.py", "--precision=bf16-true", "--model=org/a", "--optim=lamb", "--device=cuda:0")
    assert problems["--precision"] == "is called precision.compute here\nwrite --precision.compute=bfloat16"
    assert problems["--model"].startswith("is set by checkpoint.load here\nwrite --checkpoint.load=hf:models/a\n")
    assert "write --optimizer.type=lamb\noptimizer.type: expected AdamWConfig" in problems["--optim"]
    assert problems["--device"] == "is called --devices here\nwrite --devices=gpu"


def test_a_blend_in_one_word():
    hint = corrections({"data_path": Text("0.5 data/a 0.5 data/b")}, config_of("gpt2.py"))["data_path"].hint
    assert hint.startswith("write --data.paths=0.5,data/a,0.5,data/b\n")


def test_names_without_a_config():
    problems = refused("train.py", "--lr=1", "--n_head=4", "--config-file=a.py", "steps=3", "-lr", "3e-4")
    assert problems["--lr"] == "is called schedule.lr here\nwrite --schedule.lr=1"
    assert problems["--n_head"] == "is called model.stack.pattern.N.mixer.heads here\n"
    assert "did you mean --config?" in problems["--config_file"] and "--config" in problems
    assert problems["train.py"].endswith("did you mean --config=train.py?")
    assert problems["steps=3"].endswith("did you mean --steps=3?")
    assert problems["-lr"].endswith("did you mean --lr?") and "3e-4" not in problems


def test_flags_of_other_verbs():
    options = {"verb": "evaluate", "flags": evaluate.FLAGS, "root": EvaluatedConfig, "base": evaluate.base}
    problems = refused("--model=hf", "--model_args=pretrained=org/a,dtype=auto", "--batch_size=4", "--tp=2", **options)
    assert "--run" in problems
    assert problems["--model"] == "is called --hf here\nwrite --hf=DIR"
    assert problems["--model_args"] == (
        "is called --hf here\nwrite --hf=models/a\n"
        "nothing is downloaded here: run hf download org/a --local-dir models/a, then give models/a instead"
    )
    assert problems["--batch_size"] == "is called --rows here\nwrite --rows=4"
    assert problems["--tp"] == "is called parallel.tensor here\nwrite --parallel.tensor=2"
    problems = refused("--hf=org/a", "--max_model_len=9", **options)
    assert problems["hf:org/a"].startswith("there is no folder org/a\n    nothing is downloaded here: run hf download")
    assert "--max_model_len" in problems
    problems = refused("--nproc_per_node=gpu", "--lr=3", verb="launch", flags=launch.FLAGS, with_config=False)
    assert problems["--nproc_per_node"] == "is called --processes here\nwrite --processes=none"
    assert problems["--lr"] == "no such flag; a setting of training is schedule.lr\n"


def test_the_command_of_a_launch_follows_two_dashes():
    with pytest.raises(ConfigError) as error:
        launch.main(["--processes=2", "-m", "megajax.train", "--config=a.py"])
    assert "python -m megajax.launch --processes=2 -- python -m megajax.train --config=a.py" in str(error.value)


@pytest.mark.parametrize(
    ("devices", "hint"),
    [("8", "without it, jax uses all GPUs"), ("cpu8", "did you mean cpu:8?"), ("8xcpu", "did you mean cpu:8?"),
     ("cuda:0", "CUDA_VISIBLE_DEVICES=0,1"), ("h100:8", "virtual GPUs are for python -m megajax.plan")],
)  # fmt: skip
def test_devices_in_other_words(devices, hint):
    assert hint in refused("--config=quickstart.py", f"--devices={devices}")["--devices"]


def tokenizer_of(name):
    preprocess(["--input=a", "--output-prefix=b", f"--tokenizer={name}"])


def test_options_of_preprocess():
    for argument, hint in (("--output=b", "write --output-prefix=b"), ("--tokenizer-model=t", "write --tokenizer=t")):
        with pytest.raises(UserError, match=hint):
            preprocess(["--input=a", argument])


def test_models_of_the_hub_are_downloaded_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    download = "nothing is downloaded here: run hf download org/a-1.5B --local-dir models/a-1.5B, then"
    hint = f"{download} give models/a-1.5B instead"
    for call, text in (
        (partial(open_stored, "hf:org/a-1.5B"), hint),
        (partial(locate, "org/a-1.5B"), f"{download} give hf:models/a-1.5B instead"),
        (partial(load, "org/a-1.5B"), f"{download} python -m megajax.convert --from=hf:models/a-1.5B --to=runs/NAME"),
        (partial(tokenizer_of, "org/a-1.5B"), f"{download} give models/a-1.5B/tokenizer.json instead"),
    ):
        with pytest.raises(UserError, match=re.escape(text)):
            call()
    answer = corrections({"model_name_or_path": "org/a-1.5B"}, config_of("gpt2.py"))["model_name_or_path"].hint
    assert answer.startswith(f"write --checkpoint.load=hf:models/a-1.5B\n{hint}\n")
    (tmp_path / "org").mkdir()
    for name in ("org/a", "runs/a", "models/a", "/org/a", "./other/a", "a", "a/b/c"):
        assert download_hint(name) == ""
