"""The site of docs/: generated pages have every class, name and notebook; a strict build loads nothing from outside."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import megajax as mj
from docs.build import pages, pictures
from megajax.config.python_file import config_classes
from megajax.training.run_config import RunConfig
from tests.docs.blocks import PAGES, ROOT

TABS = ["Tutorials", "How-to", "Reference", "Design"]


def navigation() -> list:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return yaml.safe_load(text[text.index("\nnav:") :])["nav"]


def names(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [name for part in parts for name in names(part)]


def test_every_page_has_one_place_in_four_tabs() -> None:
    assert [*map(next, map(iter, navigation()))] == TABS
    generated = {"config_reference.md", "python_api.md", "notebooks.md"}
    stored = {page.name for page in PAGES if page.parent.name == "docs"}
    assert sorted(names(navigation())) == sorted(stored | generated) and not stored & generated
    listed = re.findall(r"^- \[(\w+\.md)\]", (ROOT / "docs/README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted([*listed, "README.md"]) == sorted(names(navigation()))


def test_the_reference_has_every_class_and_field() -> None:
    text = pages.reference()
    for cls in config_classes(RunConfig):
        section = text.partition(f"\n## {cls.__name__}\n")[2].partition("\n## ")[0]
        assert "```python\nmj." in section
        rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
        fields = [field.name for field in dataclasses.fields(cls)]
        assert [row[0].strip("| `") for row in rows] == fields
        assert all(row[3].strip("| ") for row in rows), cls


def test_the_python_page_and_the_reference_have_every_public_name() -> None:
    found = re.findall(r"^###? (\w+)$", pages.python_api() + pages.reference(), re.MULTILINE)
    assert {*found} >= {*mj._places()} and len(found) == len({*found})


def test_notebooks_have_badges_where_the_repository_has_an_address() -> None:
    folder = ROOT / "notebooks"
    plain, linked = pages.notebooks(folder, None), pages.notebooks(folder, "owner/name")
    for path in folder.glob("*.ipynb"):
        assert f"](../notebooks/{path.name})" in plain
        assert f"/github/owner/name/blob/main/notebooks/{path.name})" in linked
    assert "colab" not in plain


@pytest.mark.parametrize("name", pictures.DRAWN)
def test_pictures_are_those_that_the_code_draws(name: str) -> None:
    stored = (ROOT / f"docs/pictures/{name}.svg").read_text(encoding="utf-8")
    assert stored == pictures.DRAWN[name](), "draw them again: python -m docs.build.pictures"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    built = {path.stem for path in tmp_path.glob("*.html")}
    assert {Path(name).stem for name in names(navigation())} - {"README"} | {"index", "404"} == built
    index = (tmp_path / "search/search_index.json").read_text(encoding="utf-8")
    assert "config_reference.html#schedule" in index.lower() or "config_reference.html" in index
    loaded = re.compile(r"<(?:script|img|iframe|source)[^>]+src=\"?(https?:|//)|<link[^>]+stylesheet[^>]+(https?:|//)")
    assert not [path.name for path in tmp_path.glob("*.html") if loaded.search(path.read_text(encoding="utf-8"))]
    shown = (tmp_path / "getting_started.html").read_text(encoding="utf-8")
    assert "assets/site.css" in shown and ".md</a>" not in shown
