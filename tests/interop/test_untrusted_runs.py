"""Runs of strangers: reading one imports only classes of MegaJAX, unless --trust-code is given."""

import ast
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from gangs import REPOSITORY
from hugging_face_folders import write_llama
from user_errors import user_error

from megajax import convert, evaluate, generate, serve
from megajax.checkpoint import manifest
from megajax.command_line.parser import parse
from megajax.config.config_files import ROOT, load, read_stored
from megajax.config.errors import UserError
from megajax.inference.config import GenerationConfig
from megajax.interop.weights.fit import source_of
from megajax.interop.weights.formats import open_stored
from megajax.report import main as report
from megajax.server.config import ServingConfig
from megajax.tasks.config import EvaluatedConfig
from megajax.tools.inspect import main as inspect

EVIL = """
from pathlib import Path
Path({marker!r}).write_text("run")
from megajax.models.decoder.config import DecoderConfig as Foo
from megajax.config import load
def config():
    return load({run!r})
def make(**settings):
    raise SystemExit(3)
"""
READERS: dict[str, tuple[Any, list[str]]] = {
    "generate": (generate, ["--prompt=a"]),
    "serve": (serve, []),
    "evaluate": (evaluate, []),
}


def read_by(verb: str, *flags: str) -> Any:
    """The config that a verb takes from a run, before it imports jax."""
    module, needed = READERS[verb]
    roots = {"generate": GenerationConfig, "serve": ServingConfig, "evaluate": EvaluatedConfig}
    return parse([*flags, *needed], verb=verb, flags=module.FLAGS, root=roots[verb], base=module.base).config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strangers")
    write_llama(folder / "base", dtype=np.float32)
    assert convert.main([f"--from=hf:{folder / 'base'}", f"--to={folder / 'run'}"]) == 0
    return folder


class Stranger:
    """A run whose config names a file that leaves a marker where it is imported."""

    def __init__(self, run: Path, folder: Path):
        self.run, self.marker, self.file = folder / "run", folder / "marker", folder / "evil.py"
        shutil.copytree(run, self.run)
        shutil.copy(run / "config.yaml", folder / "original.yaml")
        self.file.write_text(EVIL.format(marker=str(self.marker), run=str(run / "config.yaml")))

    def change(self, **settings: Any) -> None:
        """Change parts of both configs of the run."""
        document = yaml.safe_load((self.run / "config.yaml").read_text())
        for name, value in settings.items():
            mixed = isinstance(value, dict) and name in ("model", "evaluation", "xla")
            document[name] = document[name] | value if mixed else value
        (self.run / "config.yaml").write_text(yaml.safe_dump(document))
        self.store(yaml.safe_dump(document))

    def store(self, config: str) -> None:
        """Change the config of the checkpoint, and sign it anew."""
        (step,) = (self.run / "checkpoints").glob("0*")
        meta = json.loads((step / "meta.json").read_text())
        meta["meta"]["config"] = config
        (step / "meta.json").write_text(json.dumps(meta))
        (step / "manifest.json").unlink()
        manifest.complete_step(step)


@pytest.fixture
def stranger(folder: Path, tmp_path: Path) -> Stranger:
    return Stranger(folder / "run", tmp_path)


def references(file: Path) -> dict[str, dict[str, Any]]:
    """Ways to name code in a config."""
    tasks = {"type": "megajax.tasks.config:HarnessConfig", "tasks": ["t"], "include_path": "."}
    return {
        "a class": {"model": {"type": f"{file}:Foo"}},
        "a class of the data": {"data": {"type": f"{file}:Foo"}},
        "a class in one word": {"model": f"{file}:Foo"},
        "a file below": {"config": str(file)},
        "a function": {"optimizer": {"type": "OptaxConfig", "make": f"{file}:make"}},
        "a folder of tasks": {"evaluation": {"tasks": [tasks]}},
        "a program of the compiler": {"xla": {"options": {"xla_gpu_cuda_data_dir": "."}}},
    }


@pytest.mark.parametrize(
    ("verb", "way"),
    [*(("generate", way) for way in references(Path("x"))), ("serve", "a class"), ("evaluate", "a class")],
)
def test_verbs_that_read_a_run_run_none_of_its_code(stranger: Stranger, verb: str, way: str) -> None:
    stranger.change(**references(stranger.file)[way])
    refusal = r"reading a run (imports no other code|runs none|reads no other file)"
    with pytest.raises(UserError, match=refusal) as caught:
        read_by(verb, f"--run={stranger.run}")
    assert "add --trust-code" in str(caught.value) and caught.value.code == 2
    assert not stranger.marker.exists()


@pytest.mark.parametrize("part", ["from", "average", "base"])
def test_converting_a_run_runs_none_of_its_code(stranger: Stranger, folder: Path, tmp_path: Path, part: str) -> None:
    stranger.change(model={"type": f"{stranger.file}:Foo"})
    first = f"{stranger.run},{stranger.run}" if part == "average" else str(stranger.run)
    flags = [f"--{part}={first}", f"--to={tmp_path / 'out'}"]
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1}')
    with user_error():
        convert.main([*flags, f"--from=peft:{tmp_path / 'adapter'}"] if part == "base" else flags)
    assert not stranger.marker.exists() and not (tmp_path / "out").exists()


def test_with_trust_its_code_is_used(stranger: Stranger, tmp_path: Path) -> None:
    stranger.change(model={"type": f"{stranger.file}:Foo"})
    flags = ["--trust-code", "--verify", f"--from={stranger.run}", f"--to={tmp_path / 'out'}"]
    assert convert.main(flags) == 0 and stranger.marker.exists()
    stranger.marker.unlink()
    stranger.file.write_text(stranger.file.read_text() + "\n")  # An unchanged file is not run again.
    for verb in READERS:
        model = read_by(verb, f"--run={stranger.run}", "--trust-code").model
        assert model == load(stranger.run.parent / "original.yaml").model
    assert stranger.marker.exists()


def test_inspecting_a_run_or_taking_its_arrays_needs_no_trust(stranger: Stranger, capsys) -> None:
    stranger.change(model={"type": f"{stranger.file}:Foo"}, config=str(stranger.file))
    assert report([str(stranger.run), "--text"]) == 0
    assert inspect([str(stranger.run)]) == 0
    weights = source_of(stranger.run, {}, set(), (), None)
    assert weights.settings is not None and weights.vocabulary() and weights.model is None
    capsys.readouterr()
    assert not stranger.marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "this:Foo",
        "evil_package:Foo",
        "megajax.command_line.parser:front_door",
        "megajax.command_line.parser:Path",
        "megajax.command_line.parser:sys.modules",
        "megajax.no_such_module:Foo",
        "megajax.__main__:Path",
        "megajax..config:Foo",
    ],
)
def test_no_module_of_another_package_is_imported(stranger: Stranger, monkeypatch, name: str) -> None:
    shutil.copy(stranger.file, stranger.run.parent / "evil_package.py")
    monkeypatch.syspath_prepend(str(stranger.run.parent))
    stranger.change(model={"type": name})
    with user_error("model.type"):
        read_stored(stranger.run / "config.yaml", ROOT, trusted=False)
    with user_error():
        assert open_stored(stranger.run)
    assert not stranger.marker.exists() and "this" not in sys.modules


def test_a_run_with_classes_of_megajax_and_options_of_its_own_needs_no_trust(stranger: Stranger) -> None:
    classes = {"model": {"type": "megajax.models.decoder.config:DecoderConfig"}}
    optimizer = {"type": "OptaxConfig", "make": "optax:adafactor"}
    xla = {"options": {"xla_a": True, "xla_b": 1, "xla_c": "true", "xla_d": "0.5"}, "compile_cache_dir": "/evil"}
    stranger.change(**classes, optimizer=optimizer, xla=xla)
    source = generate.base(_flags(stranger.run))
    assert source.base.xla.options == xla["options"]
    # Compiled programs are machine code: a stranger's folder of them is not used.
    assert source.base.xla.compile_cache_dir is None
    assert generate.base(_flags(stranger.run, trust_code=True)).base.xla.compile_cache_dir == "/evil"


def _flags(run: Path, **flags: Any) -> dict[str, Any]:
    return {flag.name.replace("-", "_"): flag.default for flag in generate.FLAGS} | {"run": run, "prompt": "a"} | flags


def test_aliases_in_the_config_of_a_step_do_not_exhaust_the_memory(stranger: Stranger) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    stranger.store("\n".join(lines))
    with user_error():
        assert open_stored(stranger.run)


def test_code_of_a_hugging_face_folder_is_not_imported(stranger: Stranger, tmp_path: Path) -> None:
    shutil.copy(stranger.file, tmp_path / "modeling_evil.py")
    auto_map = {"AutoModelForCausalLM": "modeling_evil.Foo", "AutoConfig": "modeling_evil.Foo"}
    write_llama(tmp_path / "hf", auto_map=auto_map)
    shutil.copy(stranger.file, tmp_path / "hf" / "modeling_evil.py")
    assert read_by("generate", f"--hf={tmp_path / 'hf'}").model
    assert not stranger.marker.exists()


USERS_CONFIGS = ("command_line/parser.py", "planning/plan_command.py")
"""Files that read what --config names, which is a program."""
READERS_OF_CONFIGS = ("assembled", "read_stored")


def test_every_reader_of_stored_configs_says_whether_it_trusts_them() -> None:
    silent, pattern = [], rf"\b({'|'.join(READERS_OF_CONFIGS)})\("
    for path in sorted((REPOSITORY / "megajax").rglob("*.py")):
        place, text = str(path.relative_to(REPOSITORY / "megajax")), path.read_text()
        if place.startswith("config/") or place in USERS_CONFIGS or not re.search(pattern, text):
            continue
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        silent += [
            f"{place}, line {call.lineno}: {ast.unparse(call)}"
            for call in calls
            if ast.unparse(call.func) in READERS_OF_CONFIGS
            and "trusted" not in {keyword.arg for keyword in call.keywords}
        ]
    assert not silent
