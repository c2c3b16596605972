"""`make docs`: the site builds, asks nobody for anything, and a lost link or anchor fails the build."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.docs_hooks import ROOT, site_links

LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]*\bsrc=\"?(?:https?:)?//|<link[^>]*\brel=\"?(?:stylesheet|preconnect)[^>]*//"
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """What the site is made from, with a copy of docs/ that a test may change."""
    root = tmp_path / "sources"
    shutil.copytree(ROOT / "docs", root / "docs")
    for name in ("mkdocs.yml", "scripts", "siltstone", "README.md", "ARCHITECTURE.md", "CHANGELOG.md"):
        (root / name).symlink_to(ROOT / name)
    return root


def build(sources: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(sources / "mkdocs.yml")]
    return subprocess.run(
        [*command, "--site-dir", str(sources / "site")],
        cwd=sources,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.slow
def test_the_site_has_guide_reference_and_decisions_and_loads_nothing_from_elsewhere(sources: Path) -> None:
    done = build(sources)
    assert done.returncode == 0, done.stderr
    pages = {str(page.relative_to(sources / "site")): page.read_text() for page in sources.glob("site/**/*.html")}
    decisions = {f"adr/{path.stem}/index.html" for path in (ROOT / "docs" / "adr").glob("*.md")}
    assert {"index.html", "first-hour/index.html", "glossary/index.html", "architecture/index.html"} <= pages.keys()
    assert decisions <= pages.keys()
    reference = pages["reference/index.html"]
    assert "Nothing is read yet" in reference, "from the docstring of Client.stream"
    assert all(f'id="siltstone.StreamClient.{name}"' in reference for name in ("run", "savepoint", "table", "show"))
    assert [name for name, text in pages.items() if LOADED.search(text)] == []


@pytest.mark.slow
def test_a_lost_link_or_anchor_fails_the_build(sources: Path) -> None:
    lost = ("no-such-page.md", "operators.md#no-such-part", "../README.md#no-such-part")
    page = sources / "docs" / "life-cycle.md"
    page.write_text("\n".join([page.read_text(), *(f"[lost]({link})" for link in lost)]))
    done = build(sources)
    assert done.returncode != 0
    for link in ("no-such-page.md", "operators.md#no-such-part", "index.md#no-such-part"):
        assert any("life-cycle.md" in line and link in line for line in done.stderr.splitlines()), done.stderr


def test_links_lead_from_page_to_page_or_become_text() -> None:
    assert site_links("[a](docs/options.md#logs)", "index.md") == "[a](options.md#logs)"
    assert site_links("[a](../README.md#first)", "operators.md") == "[a](index.md#first)"
    assert site_links("[a](../threat-model.md)", "adr/0033-checksums.md") == "[a](../threat-model.md)"
    assert site_links("[a](docs/adr/0001-heap.md)", "architecture.md") == "[a](adr/0001-heap.md)"
    assert site_links("[`rows.py`](../siltstone/rows.py)", "operators.md") == "`rows.py`"
    assert (
        site_links("[a](https://example.com/x.md) [b](#part)", "index.md") == "[a](https://example.com/x.md) [b](#part)"
    )
    assert site_links("![alt](pictures/chain.png)", "first-hour-in-the-ui.md") == "![alt](pictures/chain.png)"
