"""The README and the guide: their links lead to files, and every public name is documented."""

import inspect
import re
from pathlib import Path

import pytest

import siltstone

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)")
SOURCES = ROOT / "docs" / "sources.md"
README_LINES = 200
ARCHITECTURE_WORDS = 1100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_relative_link_leads_to_a_file(page: Path) -> None:
    lost = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert lost == []


def test_the_links_of_the_readme_are_seen() -> None:
    found = LINK.findall((ROOT / "README.md").read_text())
    assert {"docs/first-hour.md", "docs/glossary.md", "ARCHITECTURE.md", "LICENSE"} <= set(found)


def test_the_first_decision_lists_the_others_by_title() -> None:
    first, *others = sorted((ROOT / "docs" / "adr").glob("*.md"))
    titles = [(page.read_text().splitlines()[0].removeprefix("# "), page.name) for page in others]
    listed = re.findall(r"^(\d+\.) \[(.+)\]\((.+)\)$", first.read_text(), re.MULTILINE)
    assert [(f"{number} {title}", name) for number, title, name in listed] == titles


def test_what_comes_from_a_source_is_where_the_page_says() -> None:
    """Each row names code or a decision, and tests that are there; links are checked above."""
    rows = re.findall(r"^\| (?!source \||-)(.+?) \| (.+?) \| (.+?) \|$", SOURCES.read_text(), re.MULTILINE)
    assert len(rows) > 40
    lost = []
    for source, here, shown in rows:
        tests = "".join((SOURCES.parent / link).read_text() for link in LINK.findall(shown))
        named = re.findall(r"`(test_\w+)`", shown)
        if not LINK.findall(here) or not named or any(f"def {name}(" not in tests for name in named):
            lost.append(source)
    assert lost == []


def test_the_architecture_stays_one_page() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().split()) <= ARCHITECTURE_WORDS


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_the_reference_lists_every_public_name() -> None:
    listed = re.findall(r"^::: siltstone\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(siltstone.__all__)


@pytest.mark.parametrize("name", siltstone.__all__)
def test_each_public_name_has_a_docstring(name: str) -> None:
    public = getattr(siltstone, name)
    assert public.__doc__, name
    methods = inspect.getmembers(public) if name in ("Client", "StreamClient") else ()
    assert [m for m, value in methods if not m.startswith("_") and inspect.isroutine(value) and not value.__doc__] == []
