"""Hooks of mkdocs: pages that the build writes, and links to files of the repository."""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.build.pages import notebooks, python_api, reference

ROOT = Path(__file__).parents[2]
FOUND_LAST = {"config_reference.md", "decisions.md", "foreign_flags.md", "python_api.md"}
"""Pages that name everything and explain little: the search shows others first."""
NAMED = re.compile(r"\[(\w+\.md)\]\((\1[^)]*)\)")
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Link to the repository where GitHub's workflows build, which know its address."""
    repository = os.environ.get("GITHUB_REPOSITORY")
    if repository:
        config.repo_name, config.repo_url = repository, f"{os.environ['GITHUB_SERVER_URL']}/{repository}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {"config_reference.md": reference(), "python_api.md": python_api()}
    pages["notebooks.md"] = notebooks(ROOT / "notebooks", os.environ.get("GITHUB_REPOSITORY"))
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Name pages by their titles, and files outside of docs/ by their paths, as links where the repository is known."""
    if page.file.src_uri in FOUND_LAST:
        page.meta["search"] = {"boost": 0.01}

    def titled(found: re.Match) -> str:
        file = files.get_file_from_path(found[1])
        return found[0] if file is None else f"[{file.content_string.partition('\n')[0].lstrip('# ')}]({found[2]})"

    def outside(found: re.Match) -> str:
        name = f"`{found[1].strip('`')}`"
        return f"[{name}]({config.repo_url}/blob/main/{found[2]})" if config.repo_url else name

    return OUTSIDE.sub(outside, NAMED.sub(titled, markdown))
