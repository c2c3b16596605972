"""The README and the guide, as their code blocks and the names of commands in their text."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
NO_GUIDE = ("third-party-licenses.md", "threat-model.md", "protocol.md", "performance.md", "sources.md")
"""pages of docs/ that tell a user nothing to do"""
MARKDOWN = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: str
    line: int
    language: str
    """as the fence says it; empty without a fence"""
    text: str
    note: str
    """of the comment right before it: `file: NAME` if the block is a file, `not run: WHY`, or nothing"""

    @property
    def file(self) -> str | None:
        """The name of the file that the block is, if it is one."""
        return self.note.removeprefix("file: ") if self.note.startswith("file: ") else None

    @property
    def unrun(self) -> str | None:
        """Why nobody can run the block as it stands, if so."""
        return self.note.removeprefix("not run: ") if self.note.startswith("not run: ") else None


def pages() -> list[str]:
    """The README, then the pages of docs/ in the order of the site's navigation."""
    text = (ROOT / "mkdocs.yml").read_text()
    listed = [str(leaf) for leaf in _leaves(yaml.safe_load(text)["nav"])]
    guide = {path.name for path in ROOT.glob("docs/*.md")} - set(NO_GUIDE)
    return ["README.md", *(f"docs/{name}" for name in sorted(guide, key=listed.index))]


def blocks(page: str) -> list[Block]:
    """The code blocks of a page, in order."""
    found, note = [], ""
    for token in _tokens(page):
        if token.type in ("fence", "code_block"):
            line = token.map[0] + 1 if token.map else 0
            found.append(Block(page, line, token.info.strip(), token.content, note))
        note = token.content.strip().removeprefix("<!--").removesuffix("-->").strip()
        note = note if token.type == "html_block" else ""
    return found


def named_in_text(page: str) -> list[str]:
    """What a page sets in code within its sentences and tables."""
    return [child.content for token in _tokens(page) for child in token.children or () if child.type == "code_inline"]


def _tokens(page: str) -> list[Token]:
    return MARKDOWN.parse((ROOT / page).read_text())


def _leaves(node: object) -> Iterator[object]:
    """The leaves of lists and mappings inside one another."""
    if isinstance(node, dict):
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from _leaves(each)
    else:
        yield node
