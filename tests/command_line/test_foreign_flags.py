"""Names of other trainers: every row of the table names settings that exist; and flags in other words."""

import re
from functools import partial

import pytest

from megajax import evaluate, launch
from megajax.checkpoint.committed_steps import locate
from megajax.command_line.foreign_flags import ROWS, TABLE, WORDS
from megajax.command_line.parser import parse
from megajax.config import ConfigError, UserError, field_types, load
from megajax.config.compose import assemble
from megajax.config.errors import NO_SETTING
from megajax.config.hints import download_hint
from megajax.config.parse_scalar import Text
from megajax.config.settings_tree import patch_of, plain_name
from megajax.data.preprocessing.options import parse as preprocess
from megajax.interop.weights.formats import open_stored
from megajax.server.config import ServingConfig
from megajax.tasks.config import EvaluatedConfig
from megajax.train import FLAGS
from megajax.training.run_config import RunConfig


def test_every_setting_and_value_of_the_table_is_one_of_ours():
    config = load("llama3.py", "tokenizer.type=HuggingFaceTokenizer", "tokenizer.path=a")
    serving = ServingConfig(model=config.model)
    for row in ROWS:
        for target in (target for target in row.targets.split() if not target.startswith("--")):
            name = target.partition("=")[0].replace(".N.", ".0.")
            for value in WORDS[row.names.split()[0]].values() or ("2",):
                base = serving if name.startswith("inference.") else config
                _, problems = assemble(type(base), base, patch_of([(name, Text(value))]))
                wrong = [problem for problem in problems if problem.message.startswith((NO_SETTING, "expected"))]
                assert not any(problem.message == NO_SETTING or value != "2" for problem in wrong), row


def test_a_name_has_one_row_and_is_no_setting_of_ours():
    names = [name for row in ROWS for name in row.names.split()]
    assert len(names) == len(set(names)) == len(TABLE)
    assert names == [plain_name(name) for name in names]
    # Names of settings whose values may be another trainer's.
    assert set(names) & set(field_types.names(RunConfig)) == {"model", "optimizer", "precision"}
    assert not set(names) & {plain_name(flag.name) for flag in FLAGS}


def refused(*argv, **options):
    """Setting -> message and hint, of a command line that is refused."""
    with pytest.raises(ConfigError) as error:
        parse(argv, **{"verb": "train", "flags": FLAGS} | options)
    assert error.value.code == 2
    return {problem.setting: f"{problem.message}\n{problem.hint}" for problem in error.value.problems}


def test_all_names_of_a_command_are_answered_together():
    problems = refused(
        *("--config=llama3.py", "--learning-rate", "3e-4", "--tp=8", "--num_layers=16", "--bf16", "--n_head=4"),
        *("--max_grad_norm=0", "--optim=adamw_torch", "--epochs=2", "--steps=many", "--optimizer=adam"),
        *("--paralel.tensor=2", "--skip-trian", "--schedule.lrr=1", "--zzz=1"),
    )
    assert problems == {
        "--learning_rate": "is called schedule.lr here\nwrite --schedule.lr=3e-4",
        "--tp": "is called parallel.tensor here\nwrite --parallel.tensor=8",
        "--num_layers": "is called model.stack.repeats here\nwrite --model.stack.repeats=16\n"
        "layers = repeats x blocks of the pattern",
        "--bf16": "is called precision.compute here\nwrite --precision.compute=bfloat16",
        "--n_head": "is called model.stack.pattern.N.mixer.heads here\nwrite --model.stack.pattern.N.mixer.heads=4\n"
        "N: 0 for the first block",
        "--max_grad_norm": "is called optimizer.clip here\nwrite --optimizer.clip=none",
        "--optim": "is called optimizer.type here\nwrite --optimizer.type=AdamW",
        "--optimizer": "is called optimizer.type here\nwrite --optimizer.type=AdamW",
        "--epochs": "is no setting here\nsteps = epochs x training rows / batch.global_size",
        "steps": "expected a whole number, got 'many'\n",
        "paralel.tensor": "no such setting\ndid you mean parallel.tensor?",
        "--skip-trian": "no such flag or setting\ndid you mean skip-train?",
        "schedule.lrr": "no such setting\ndid you mean schedule.lr?",
        "zzz": "no such setting\n",
    }


def test_names_in_python():
    with pytest.raises(ConfigError) as error:
        load("gpt2.py", "lr=3e-4", "seed=9")
    assert str(error.value).splitlines() == [
        "1 problem in configs/gpt2.py + settings:",
        "  --lr: is called schedule.lr here",
        "      write --schedule.lr=3e-4",
    ]


def test_names_in_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("config: gpt_oss.py\nbf16: {enabled: true}\nlearning-rate: 1e-4\n")
    assert refused("--config=a.yaml", "--tp=2") == {
        "bf16": "is called precision.compute here\nwrite --precision.compute=bfloat16",
        "learning_rate": "is called schedule.lr here\nwrite --schedule.lr=1e-4",
        "--tp": "is called parallel.tensor here\nwrite --parallel.tensor=2",
    }


def test_values_of_other_trainers_for_our_names():
    problems = refused("--config=gpt2.py", "--precision=bf16", "--optimizer=dam", "--model=gpt2")
    assert problems.keys() == {"--precision", "optimizer.type", "model.type"}
    assert problems["--precision"] == "is called precision.compute here\nwrite --precision.compute=bfloat16"
    answer = refused("--config=gpt2.py", "--model=org/a-1.5B")["--model"]
    assert answer.startswith("is called checkpoint.load here\nwrite --checkpoint.load=hf:models/a-1.5B\nnothing is")


def test_names_without_a_config():
    problems = refused("train.py", "--lr=1", "--config-file=a.py", "steps=3", "-lr", "3e-4")
    assert problems["--lr"] == "is called schedule.lr here\nwrite --schedule.lr=1"
    assert "did you mean --config?" in problems["--config_file"] and "--config" in problems
    assert problems["train.py"].endswith("did you mean --config=train.py?")
    assert problems["steps=3"].endswith("did you mean --steps=3?")
    assert problems["-lr"].endswith("did you mean --lr?") and "3e-4" not in problems


def test_flags_of_other_verbs():
    options = {"verb": "evaluate", "flags": evaluate.FLAGS, "root": EvaluatedConfig, "base": evaluate.base}
    problems = refused("--model", "--pretrained=org/a", "--batch_size=4", "--tp=2", **options)
    assert "--run" in problems
    assert problems["--model"].startswith("is called --hf here\nwrite --hf=DIR\n")
    assert problems["--pretrained"].startswith("is called --hf here\nwrite --hf=models/a\nnothing is downloaded here: ")
    assert problems["--batch_size"].startswith("is called --rows here\nwrite --rows=4")
    assert problems["--tp"] == "is called parallel.tensor here\nwrite --parallel.tensor=2"
    problems = refused("--hf=org/a", "--max_model_len=9", **options)
    assert problems["hf:org/a"].startswith("there is no folder org/a\n    nothing is downloaded here: run hf download")
    assert "--max_model_len" in problems
    problems = refused("--nproc_per_node=gpu", "--lr=3", verb="launch", flags=launch.FLAGS, with_config=False)
    assert problems["--nproc_per_node"].startswith("is called --processes here\nwrite --processes=none")
    assert problems["--lr"] == "no such flag\n"


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
    (tmp_path / "org").mkdir()
    for name in ("org/a", "runs/a", "models/a", "/org/a", "./other/a", "a", "a/b/c"):
        assert download_hint(name) == ""
