"""What the search of the site finds first is the page for users, and figures on pages are those of the results."""

import json

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from docs.build import figures
from tests.docs.blocks import ROOT
from tests.docs.site_search import SiteSearch

FIRST = {
    "tensor parallel": "layouts",
    "resume": "checkpoints",
    "learning rate": "optimizers",
    "Slurm": "launch",
    "chat template": "data",
    "DPO": "tuning",
    "wandb": "logging",
    "LoRA": "tuning",
    "Mixtral": "models",
    "out of memory": "compiler",
    "tokenizer": "preprocess",
    "MFU": "benchmarks",
    "notebook": "notebooks",
    "ScheduleConfig": "config_reference",
}
"""Query -> the page that answers it."""


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> SiteSearch:
    """The search of the site, built into a folder: what a reader's browser downloads."""
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    return SiteSearch(json.loads((folder / "search/search_index.json").read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.parametrize("query", FIRST)
def test_the_search_finds_the_page_for_users_first(search: SiteSearch, query: str) -> None:
    found = search.pages(query)
    assert found[0] == f"{FIRST[query]}.html", found[:5]


def test_figures_of_a_page_are_those_of_the_results() -> None:
    text = figures.PAGE.read_text(encoding="utf-8")
    assert figures.with_tables(text) == text, "write them again: python -m docs.build.figures"


def test_a_page_without_marks_is_an_error() -> None:
    with pytest.raises(ValueError, match="are missing"):
        figures.with_tables("a page without marks")
