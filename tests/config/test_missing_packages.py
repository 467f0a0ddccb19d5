"""Missing packages: every front door reports them, and needs no package to do so; and the extras that install them."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from user_errors import user_error

import megajax as mj
from megajax.config import load
from megajax.config.class_references import demand_packages
from megajax.config.optional_packages import EXTRAS, REQUIRED, remedy

REPOSITORY = Path(__file__).parents[2]
SHELL = ("python", "-m", "megajax.train", "--config=quickstart.py")
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
OPTIONAL = PYPROJECT["project"]["optional-dependencies"]


def front_doors() -> list[str]:
    """Modules to run with `python -m`: those that end in `front_door(main)`."""
    doors = []
    for path in sorted((REPOSITORY / "megajax").rglob("*.py")):
        module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        if re.search(r"^    front_door\(", path.read_text(), re.MULTILINE):
            doors.append(module)
    return doors


def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python without site-packages, in the repository."""
    command = [sys.executable, "-S", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def test_front_doors_are_imported_without_any_package():
    doors = front_doors()
    assert {"megajax.train", "megajax.plan", "megajax.preprocess", "megajax.doctor"} <= set(doors)
    process = bare("-c", f"import importlib\nfor name in {doors}: importlib.import_module(name)")
    assert (process.returncode, process.stderr) == (0, "")


def test_a_bare_interpreter_gets_a_remedy():
    process = bare("-m", "megajax.train", "--config=quickstart.py", "--steps=1")
    assert process.returncode == 2 and "Traceback" not in process.stderr and process.stdout == ""
    assert f"No module named 'jax' in {sys.executable}" in process.stderr
    assert f"{REPOSITORY}/.venv/bin/activate" in process.stderr
    assert "uv run python -S -m megajax.train --config=quickstart.py --steps=1" in process.stderr


def missing(name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_in_a_checkout_and_in_an_installation(tmp_path):
    text = remedy(missing("yaml"), SHELL, tmp_path) or ""
    assert "pip install 'megajax'" in text and "activate" not in text
    (tmp_path / "pyproject.toml").touch()
    text = remedy(missing("yaml"), SHELL, tmp_path) or ""
    assert f"cd {tmp_path} && uv sync && source {tmp_path}/.venv/bin/activate" in text
    assert "  uv run python -m megajax.train --config=quickstart.py" in text
    assert f"pip install -e '{tmp_path}'" in text


def test_packages_of_settings_are_demanded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = "logging.tensorboard=true", "logging.wandb.project=a", "evaluation.every=1"
    cfg: Any = load("gpt2.py:debug", *settings)
    tasks = (mj.HarnessConfig(tasks=("arc_easy",)),)
    images: Any = load("vit.py:debug", "data.type=ClassFoldersConfig", "data.path=pictures")
    monkeypatch.setattr("megajax.config.class_references.find_spec", lambda name: None if name != "wandb" else object())
    with user_error("logging.tensorboard") as refused:
        demand_packages(cfg)
    assert "uv sync --extra log --inexact, or pip install 'megajax[log]'" in str(refused.value)
    with user_error():
        demand_packages((cfg, images.data, tasks, mj.ChatConfig(paths=("chats.jsonl",))))
    demand_packages(load("gpt2.py:debug", *settings[1:]))


@pytest.mark.parametrize(("module", "extra"), EXTRAS.items())
def test_a_package_of_an_extra_names_it(module, extra, tmp_path):
    assert f"extra {extra}" in (remedy(missing(module), SHELL, tmp_path) or "")
    assert f"pip install 'megajax[{extra}]'" in (remedy(missing(f"{module}.inner"), SHELL, tmp_path) or "")


def test_other_modules_get_no_remedy():
    assert remedy(missing("megajax.nothing"), SHELL) is remedy(missing("mine"), SHELL) is None


def test_the_names_match_pyproject():
    """Each is imported from a package that pyproject.toml lists; jax brings ml_dtypes and jaxlib, flax brings optax."""
    listed = {None: PYPROJECT["project"]["dependencies"], **OPTIONAL}
    packages = {extra: {re.split(r"[^\w-]", line)[0].lower() for line in lines} for extra, lines in listed.items()}
    provided = packages_distributions()
    imported = EXTRAS | dict.fromkeys(REQUIRED - {"ml_dtypes", "jaxlib", "optax"})
    for module, extra in imported.items():
        if module in provided:
            names = {name.lower().replace("_", "-") for name in provided[module]}
            assert {name.replace("_", "-") for name in packages[extra]} & names, module


def test_an_old_python_is_refused_before_newer_syntax():
    """No syntax newer than 3.8 comes before the refusal."""
    ast.parse((REPOSITORY / "megajax" / "__init__.py").read_text(), feature_version=(3, 8))


CONFLICTING = {"cuda12", "cuda13", "aot"}


def test_all_has_every_extra_that_conflicts_with_none() -> None:
    (requirement,) = OPTIONAL["all"]
    named = re.fullmatch(r"megajax\[([\w,]+)\]", requirement)
    assert named and set(named[1].split(",")) == OPTIONAL.keys() - CONFLICTING - {"all"}


def test_the_lock_file_knows_all_extras() -> None:
    lock = tomllib.loads((REPOSITORY / "uv.lock").read_text(encoding="utf-8"))
    (package,) = [package for package in lock["package"] if package["name"] == "megajax"]
    assert set(package["metadata"]["provides-extras"]) == OPTIONAL.keys() == package["optional-dependencies"].keys()


def test_users_install_no_development_packages() -> None:
    """Plain `uv sync` and `uv run` leave the group dev out; .ci/run and the page for developers name it."""
    assert PYPROJECT["tool"]["uv"]["default-groups"] == [] and "pytest" in PYPROJECT["dependency-groups"]["dev"]
    for file in (".ci/run", "docs/architecture.md"):
        assert "uv sync --frozen --group dev" in (REPOSITORY / file).read_text(encoding="utf-8")
    names = re.findall(r"--extra (\w+)", (REPOSITORY / "README.md").read_text(encoding="utf-8"))
    assert {"plot", "serve", "all"} <= set(names) <= OPTIONAL.keys()
