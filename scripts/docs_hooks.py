"""Hooks of `mkdocs.yml`: add pages of the repository's root and every ADR, and rewrite links that lead out of docs/.

The README is the site's first page. A link to something that is not a page, such as a module or a folder, becomes its
text, because the repository has no public address (tests/unit/test_docs.py checks that the file exists).
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {"README.md": "index.md", "ARCHITECTURE.md": "architecture.md", "CHANGELOG.md": "changelog.md"}
"""file in the repository's root -> page of the site"""
DECISIONS = "adr"
_LINK = re.compile(r"\[((?:[^][]|\[[^][]*\])*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace the entry `adr/` of the navigation by all ADRs."""
    found = [f"{DECISIONS}/{path.name}" for path in sorted(Path(config.docs_dir, DECISIONS).glob("*.md"))]
    for section in config.nav or []:
        for entry in next(iter(section.values())):
            if isinstance(entry, dict) and entry.get("Decisions") == f"{DECISIONS}/":
                entry["Decisions"] = found
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are files of the repository's root."""
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make each relative link lead from page to page of the site, or replace it by its text."""
    return site_links(markdown, page.file.src_uri)


def site_links(markdown: str, page: str) -> str:
    """Rewrite the links of one page.

    Args:
        markdown: the text in the repository, with links relative to the file there.
        page: the path of the page in the site.
    """
    sources = {target: name for name, target in ROOT_PAGES.items()}
    folder = posixpath.dirname(sources.get(page, f"docs/{page}"))

    def rewrite(link: re.Match[str]) -> str:
        text, target, anchor = link[1], posixpath.normpath(posixpath.join(folder, link[2])), link[3] or ""
        if target in ROOT_PAGES:
            target = ROOT_PAGES[target]
        elif target.startswith("docs/") and posixpath.splitext(target)[1]:
            target = target.removeprefix("docs/")
        else:
            return text
        return f"[{text}]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{anchor})"

    return _LINK.sub(rewrite, markdown)
