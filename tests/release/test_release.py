"""Versions, the container image and the workflows agree with the project; the wheel holds the package alone."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder

import megajax

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_one_version() -> None:
    lock = tomllib.loads(text("uv.lock"))
    locked = next(package["version"] for package in lock["package"] if package["name"] == "megajax")
    cited = yaml.safe_load(text("CITATION.cff"))["version"]
    changed = re.findall(r"^## (\d\S*)", text("CHANGELOG.md"), re.MULTILINE)[0]
    assert {megajax.__version__, locked, str(cited), changed} == {PROJECT["version"]}


def test_the_wheel_holds_the_package_alone_and_finds_its_configs(tmp_path: Path) -> None:
    path = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        wheel.extractall(tmp_path / "site")
    folder = f"megajax-{PROJECT['version']}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"megajax", folder}
    shipped = {f"megajax/configs/{file.name}" for file in (ROOT / "configs").glob("*.py")}
    assert shipped and {f"{folder}/METADATA", f"{folder}/licenses/LICENSE", *shipped} <= {*names}
    assert not [name for name in names if re.search(r"__pycache__|\.pyc$|/tests?/", name)]
    code = "from megajax.config import config_files, load; load('gpt3.py'); print(config_files.SHIPPED)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    (empty := tmp_path / "empty").mkdir()
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == str(tmp_path / "site/megajax/configs")


def test_a_default_install_is_small() -> None:
    """What the lock file brings on Linux without extras, beside megajax itself."""
    packages: dict[str, dict] = {package["name"]: package for package in tomllib.loads(text("uv.lock"))["package"]}
    found, open_names = {"megajax"}, [("megajax", "")]
    while open_names:
        name, extra = open_names.pop()
        package = packages[name]
        needed = package.get("optional-dependencies", {}).get(extra, []) if extra else package.get("dependencies", [])
        for one in needed:
            if re.search(r"win32|Windows|emscripten|PyPy|extra-7-megajax", one.get("marker", "")):
                continue
            found.add(one["name"])
            open_names += [(one["name"], part) for part in ("", *one.get("extra", []))]
    assert {"jax", "flax", "grain"} < found and not {"matplotlib", "pytest", "einops"} & found
    assert len(found) - 1 <= 35, sorted(found)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_the_scripts_of_this_tree(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}  # of jobs that say nothing else
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [step["run"].split()[0] for step in steps if "run" in step]
    assert commands and all(command.startswith(".ci/") for command in commands)
    for command in commands:
        assert (ROOT / command).stat().st_mode & 0o100, command


def test_every_script_is_called_by_a_workflow() -> None:
    every = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    scripts = [path.name for path in (ROOT / ".ci").iterdir() if path.stat().st_mode & 0o100]
    assert scripts and [name for name in scripts if f"run: .ci/{name}" not in every] == []


def test_the_image_runs_as_a_user_with_extras_that_exist() -> None:
    lines = text("Dockerfile").splitlines()
    assert [line.split()[1] for line in lines if line.startswith("FROM")] == ["python:3.12-slim", "${BASE}"]
    assert next(line for line in reversed(lines) if line.startswith("USER ")) == "USER 1000"
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", text("Dockerfile"), re.MULTILINE)
    assert {*extras.split(",")} <= PROJECT["optional-dependencies"].keys()


def test_the_image_s_file_has_no_faults_that_hadolint_finds(tmp_path: Path) -> None:
    hadolint, pinned = Path(sys.executable).with_name("hadolint"), tmp_path / "Dockerfile"
    pinned.write_text(re.sub(r"^FROM \S+", "FROM image", text("Dockerfile"), count=1, flags=re.MULTILINE))
    found = [
        subprocess.run([hadolint, file], capture_output=True, text=True, check=False)
        for file in (ROOT / "Dockerfile", pinned)
    ]
    assert found[0].returncode == 0, found[0].stdout
    assert "DL3006" in found[1].stdout  # an image without a version


def test_the_development_container_installs_what_the_tests_need() -> None:
    container = json.loads(text(".devcontainer/devcontainer.json"))
    assert "uv sync --frozen --group dev" in container["postCreateCommand"]


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_forms_name_settings_and_commands_that_exist(path: Path) -> None:
    form = path.read_text(encoding="utf-8")
    assert yaml.safe_load(form)
    for command in re.findall(r"python -m megajax\.(\w+)", form):
        assert (ROOT / f"megajax/{command}.py").is_file()
