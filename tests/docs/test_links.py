"""Relative links of the pages lead to files and headings that exist."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.blocks import PAGES, ROOT

OTHERS = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/results/README.md")]
GENERATED = {"config_reference.md", "notebooks.md", "python_api.md"}
"""Pages that the build of the site writes."""
LINK = re.compile(r"\]\(([^)\s]+)\)")


def lines(page: Path) -> Iterator[str]:
    """Lines outside of fenced blocks."""
    fenced = False
    for line in page.read_text(encoding="utf-8").splitlines():
        fenced ^= line.startswith("```")
        if not fenced:
            yield line


def anchors(page: Path) -> list[str]:
    """Anchors of the headings, as sites of repositories and ours form them."""
    headings = [line.lstrip("#").strip() for line in lines(page) if re.match(r"#+ ", line)]
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return [re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain]


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in (*PAGES, *OTHERS):
        for target in (found for line in lines(page) for found in LINK.findall(re.sub(r"`[^`]*`", "", line))):
            path, _, anchor = target.partition("#")
            goal = (page.parent / path).resolve() if path else page
            if target.startswith(("http://", "https://", "mailto:")) or goal.name in GENERATED:
                continue
            if not goal.exists() or (anchor and goal.suffix == ".md" and anchor not in anchors(goal)):
                wrong.append(f"{page.relative_to(ROOT)}: {target}")
    assert not wrong, "\n".join(wrong)


def test_headings_of_a_page_differ() -> None:
    """Two headings with one anchor: links would lead to the first."""
    every = {page.name: anchors(page) for page in PAGES}
    doubled = {page: sorted({name for name in names if names.count(name) > 1}) for page, names in every.items()}
    assert {page: names for page, names in doubled.items() if names} == {}


def test_a_number_that_ends_a_sentence_begins_no_line() -> None:
    """Such a line would be shown as an item of a list."""
    assert [line for page in PAGES for line in lines(page) if re.match(r"\s*\d{2,}[.)] ", line)] == []
