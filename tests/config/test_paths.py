"""URLs given as paths are refused in every setting and flag that is a path, and nothing is created."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from user_errors import user_error

from megajax import convert, doctor, evaluate, generate, launch, plan, preprocess, report, serve, train
from megajax.config import field_types
from megajax.config.compose import assemble, check
from megajax.config.config_files import load
from megajax.config.errors import ConfigError, UserError
from megajax.config.paths_and_store_urls import PathText, StoredPath, StoredText, holds_path, store_url, url_problem
from megajax.config.python_file import config_classes
from megajax.inference.config import GenerationConfig
from megajax.tasks.config import KINDS
from megajax.tasks.evaluate_command import parse_tasks
from megajax.tools import inspect, merge, train_vocabulary
from megajax.training.run_config import RunConfig

NAMES = re.compile(r"(.*_)?(paths?|dir|folder|vocabulary|merges|template|load|run)")
"""Fields with such names are paths, if they take text."""


@pytest.mark.parametrize(
    "text",
    ["s3://bkt/run", "gs://b", "hf:s3://b/x", "https://x.org/a", "S3://b", "a+b-c.d://x", "file:///x", "hdfs://h:1/x"],
)
def test_urls(text: str) -> None:
    assert url_problem(text) is not None
    if "a+b" not in text:
        assert url_problem(Path(text)) is not None  # Path("s3://bkt") is s3:/bkt


@pytest.mark.parametrize("text", ["runs/a", "/data/x", "hf:/data/x", "hf:models/x", "a:b", "x:/y", "C:/x", "0.3", ""])
def test_paths(text: str) -> None:
    assert url_problem(text) is None and url_problem(Path(text)) is None


def test_urls_of_stores() -> None:
    for text in ("s3://bucket/a//b/", "gs://bucket"):
        assert store_url(text) == store_url(Path(text)) == text.replace("a//b/", "a/b")
    others = ("s3://B/x", "s3://u:p@bucket/x", "s3:bucket", "runs/s3://bucket", "hf:s3://b/x")
    assert not any(map(store_url, others))


def test_every_field_that_is_a_path_says_so() -> None:
    classes = {*config_classes(RunConfig), *config_classes(GenerationConfig), *(cls for cls, _ in KINDS.values())}
    paths, others = set(), set()
    for cls in classes:
        for name, annotation in field_types.hints(cls).items():
            parts = [annotation, *(field_types.entry(kind, 0) for kind in field_types.lists(annotation))]
            if any(holds_path(part) for part in parts):
                paths.add(f"{cls.__name__}.{name}")
            elif any(set(field_types.TEXT_KINDS) & set(field_types.kinds(part)) for part in parts) and NAMES.fullmatch(
                name
            ):
                others.add(f"{cls.__name__}.{name}")
    assert not others, "annotate them with PathText, or name them otherwise"
    assert {"RunConfig.run_dir", "LocalConfig.folder", "BlendConfig.paths", "HuggingFaceTokenizerConfig.path"} <= paths


@dataclass(frozen=True)
class Kinds:
    """One setting of each kind."""

    text: str = ""
    path: Path | None = None
    path_text: PathText | None = None
    paths: tuple[PathText, ...] = ()
    stored: StoredPath | None = None
    stored_texts: tuple[StoredText, ...] = ()


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"path": "s3://b/x"}, ["path"]),
        ({"path": Path("s3://b/x")}, ["path"]),
        ({"path_text": "gs://b"}, ["path_text"]),
        ({"paths": ["0.5", "a", "0.5", "s3://b"]}, ["paths.3"]),
        ({"paths": "a,s3://b"}, ["paths.1"]),
        ({"text": "https://example.org is a page"}, []),
        ({"stored": "s3://bucket/x", "stored_texts": "a,gs://bucket/y"}, []),
        ({"stored": Path("s3://bucket/x")}, []),
        ({"stored": "s3://key:secret@bucket/x"}, ["stored"]),
        ({"stored": "hdfs://b/x", "stored_texts": "s3://bucket/x?versionId=1"}, ["stored", "stored_texts.0"]),
    ],
)
def test_only_paths_are_checked(settings: dict[str, Any], wrong: list[str]) -> None:
    config, problems = assemble(Kinds, None, settings)
    assert [problem.setting for problem in problems] == wrong and (config is None) == bool(wrong)


def test_a_config_of_python_is_checked_too() -> None:
    cfg = dataclasses.replace(load("quickstart.py"), run_dir="s3://bkt/run")
    with user_error("run_dir", kind=ConfigError):
        check(cfg)


TRAIN = ["--config=quickstart.py"]
DOORS: dict[str, tuple[Any, list[str]]] = {
    "run_dir": (train, [*TRAIN, "--run_dir=s3://b/x"]),
    "generate": (generate, ["--run=hdfs://b/x", "--prompt=a"]),
    "generate --output": (generate, ["--run=a", "--prompts=p", "--output=s3://b/x"]),
    "serve": (serve, ["--adapter=s3://b/x"]),
    "evaluate": (evaluate, ["--run=hdfs://b/x"]),
    "evaluate --output": (evaluate, ["--run=a", "--output=s3://b/x"]),
    "convert --from": (convert, ["--from=hf:s3://b/x", "--to=a"]),
    "convert --to": (convert, ["--from=a", "--to=s3://b/x"]),
    "launch --log-dir": (launch, ["--processes=1", "--log-dir=s3://b/x", "--", "true"]),
    "launch --beats": (launch, ["--processes=1", "--beats=s3://b/x", "--", "true"]),
    "report": (report, ["s3://b/x"]),
    "doctor": (doctor, ["--run-dir=s3://b/x"]),
    "plan": (plan, [*TRAIN, "--json=s3://b/x"]),
    "inspect": (inspect, ["hdfs://b/x"]),
    "train_vocabulary": (train_vocabulary, ["--input=a", "--output=s3://b/x"]),
}


@pytest.mark.parametrize("door", DOORS)
def test_front_doors_refuse_them_and_create_nothing(door: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    module, argv = DOORS[door]
    with user_error() as caught:
        module.main(argv)
    assert caught.value.code == 2 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("module", "argv"),
    [
        (preprocess, ["--input", "s3://b/x", "--output-prefix", "x", "--tokenizer=byte"]),
        (preprocess, ["--input", "x", "--output-prefix=s3://b/x", "--tokenizer=byte"]),
        (merge, ["--input", "x", "--output-prefix=s3://b/x"]),
    ],
)
def test_options_of_argparse(module: Any, argv: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, SystemExit)) as caught:
        module.main(argv)
    assert getattr(caught.value, "code", None) == 2 and not list(tmp_path.iterdir())
    assert "s3://b/x is a URL" in capsys.readouterr().err + str(caught.value)


def test_tasks() -> None:
    with user_error("--tasks=text: path", kind=ConfigError):
        parse_tasks("text:s3://b/x")


def test_a_name_of_a_url_is_no_config_file() -> None:
    with user_error():
        load("s3://b/x")
