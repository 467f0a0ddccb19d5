"""The public names: `import megajax as mj` gives those of megajax/__init__.pyi, on first use."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from user_errors import user_error

import megajax as mj
from megajax.config import load
from megajax.config.config_files import SHIPPED
from megajax.config.errors import ConfigError
from megajax.config.python_file import config_classes
from megajax.server.config import ServingConfig
from megajax.tasks.config import KINDS

NAMES = sorted(mj._places())
NEED_FILES_OR_DEVICES = {"Run", "model_of", "preprocess_text", "setup", "visualize"}
PRESETS = Path(mj.__file__).parent / "models" / "presets"


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_a_docstring_with_a_true_example(name):
    value = getattr(mj, name)
    text, found, example = (value.__doc__ or "").partition("Example:")
    assert text.strip() and found
    tree = ast.parse(example.strip().strip("`"))
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "mj"]
    assert used and all(node.attr in NAMES for node in used)
    free = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {"mj"}
    if free or name in NEED_FILES_OR_DEVICES or not isinstance(tree.body[0], ast.Expr):
        return
    result = eval(ast.unparse(tree), {"mj": mj})
    assert result is not None
    assert not isinstance(value, type) or value.__name__ in repr(result)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'megajax' has no attribute 'AdamConfig'"):
        mj.AdamConfig  # noqa: B018


def test_every_config_class_is_public():
    classes = (*config_classes(mj.RunConfig), *(cls for cls, _ in KINDS.values()), *config_classes(ServingConfig))
    assert [cls for cls in classes if getattr(mj, cls.__name__, None) is not cls] == []


def test_every_preset_is_public():
    """Presets take the name of a size."""
    functions = [
        node
        for file in PRESETS.glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.args.args
    ]
    presets = {node.name for node in functions if ast.unparse(node.args.args[0]) == "size: str"}
    assert {"llama3", "gpt3", "bert"} <= presets <= set(NAMES)


def test_the_import_and_the_config_classes_are_light():
    program = (
        "import sys, megajax as mj\n"
        "assert 'ast' not in sys.modules and 'megajax.config' not in sys.modules, 'import megajax'\n"
        "[getattr(mj, name) for name in mj._places() if name.endswith('Config')]\n"
        "print(sorted({'jax', 'numpy', 'flax', 'orbax'} & set(sys.modules)))"
    )
    assert output_of(sys.executable, "-c", program) == "[]\n"


def test_type_checkers_see_the_classes(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import megajax as mj\n\n\ndef config() -> mj.RunConfig:\n    reveal_type(mj.load('gpt3.py'))\n"
        "    return mj.BatchConfig(global_size='8')\n"
    )
    text = output_of(str(Path(sys.executable).with_name("ty")), "check", "--output-format=concise", str(tmp_path))
    for part in ("5:17: info[revealed-type]", "expected `RunConfig`, found `BatchConfig`", "Expected `Size`, found"):
        assert part in text


@pytest.mark.parametrize("file", sorted(SHIPPED.glob("*.py")), ids=lambda file: file.name)
def test_shipped_configs_have_one_import_of_megajax(file):
    lines = [
        line for line in file.read_text().splitlines() if line.startswith(("import ", "from ")) and "megajax" in line
    ]
    assert lines == ["import megajax as mj"]


@pytest.mark.parametrize("name", ["RolloutsConfig", "Rollouts", "rollouts"])
def test_types_of_packages_above_a_field_have_short_names(name):
    """The class is one of its annotation; a public class of another kind is no match."""
    words = ("data.paths=prompts.jsonl", "data.rewards=rewards.py:reward")
    cfg = load("grpo.py:debug", f"data.type={name}", *words, devices=1)
    assert type(cfg.data).__name__ == "RolloutsConfig" and cfg.data.rewards == ("rewards.py:reward",)
    with user_error("data.type", kind=ConfigError):
        load("grpo.py:debug", "data.type=AdamWConfig", devices=1)
