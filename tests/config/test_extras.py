"""The extra `all`, and the commands of README.md that install."""

import re
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CONFLICTING = {"cuda12", "cuda13", "aot"}


def extras() -> dict[str, list[str]]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    return project["project"]["optional-dependencies"]


def test_all_has_every_extra_that_conflicts_with_none() -> None:
    (requirement,) = extras()["all"]
    named = re.fullmatch(r"megajax\[([\w,]+)\]", requirement)
    assert named and set(named[1].split(",")) == extras().keys() - CONFLICTING - {"all"}


def test_the_lock_file_knows_all_extras() -> None:
    lock = tomllib.loads((REPOSITORY / "uv.lock").read_text(encoding="utf-8"))
    (package,) = [package for package in lock["package"] if package["name"] == "megajax"]
    assert set(package["metadata"]["provides-extras"]) == extras().keys() == package["optional-dependencies"].keys()


def test_users_install_no_development_packages() -> None:
    """Plain `uv sync` and `uv run` install the group dev: only docs/development.md and .ci do that."""
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "notebooks").glob("*.ipynb")]
    commands = {
        f"{page.name}: {line.strip()}"
        for page in pages
        if page.name not in ("development.md", "decisions.md")
        for line in page.read_text(encoding="utf-8").splitlines()
        if re.search(r"\buv (sync --|run )|^uv sync", line) and "--no-dev" not in line
    }
    assert not commands
    names = re.findall(r"--extra (\w+)", (REPOSITORY / "README.md").read_text(encoding="utf-8"))
    assert {"plot", "serve", "all"} <= set(names) <= extras().keys()
