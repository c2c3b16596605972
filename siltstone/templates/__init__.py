"""Make a project: a stream over sample data, its deployment under Dagster, tests, a Makefile.

project/    the files to write, as jinja2 templates: NAME.jinja becomes NAME
"""

import json
import keyword
import os
import random
import re
import shutil
import tempfile
from dataclasses import dataclass
from datetime import date, timedelta
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

import jinja2

from siltstone.errors import Unreachable, UsageError
from siltstone.model import check_name
from siltstone.result import Result

DEFAULT_STREAM = "purchases"
TEMPLATE = ".jinja"
RENAMED = {"gitignore": ".gitignore"}
"""template -> file name; packages easily leave out files that begin with a dot"""
FIRST_DAY, DAYS, PURCHASES_A_DAY, CUSTOMERS = date(2026, 1, 1), 8, 40, 25
SEED = 2026
"""of the sample data, which is the same in every project"""


@dataclass(frozen=True)
class NewProject(Result):
    """A project that was written."""

    directory: str
    stream: str
    files: list[str]


def make_project(directory: Path, stream: str = DEFAULT_STREAM) -> NewProject:
    """Write a new project into a directory that is empty or does not exist yet. A new directory appears complete.

    Raises:
        UsageError: the directory is not empty or is a file, or `stream` is not a valid name.
        Unreachable: it cannot be written.
    """
    check_name("stream", stream)
    target = Path(os.path.abspath(directory))
    texts = _render(target, stream) | _sample_data()
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{target} is not an empty directory: name another one, or empty it")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as made:
            draft = Path(made, "project")
            _write(draft, texts)
            if target.exists():  # not replaced: it may be a mount, or a shell's working directory
                for path in draft.iterdir():
                    shutil.move(path, target / path.name)
            else:
                draft.rename(target)
    except OSError as error:
        raise Unreachable(f"cannot write {target}: {error.strerror}; check permissions and free space") from error
    return NewProject(str(target), stream, sorted(texts))


def _render(target: Path, stream: str) -> dict[str, str]:
    """Render all templates; return path inside the project -> text."""
    module = stream.replace("-", "_")
    module += "_stream" if keyword.iskeyword(module) else ""
    values = {
        "project": re.sub(r"[^a-z0-9]+", "-", target.name.lower()).strip("-") or stream,
        "stream": stream,
        "module": module,
        "days": DAYS,
    }
    # No escaping: the files are Python, TOML, YAML, make and Markdown, not HTML, and the names were checked.
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    found = {}
    for name, text in _templates(resources.files(__name__) / "project", PurePosixPath()):
        path = environment.from_string(str(name)).render(values)
        found[RENAMED.get(path, path)] = environment.from_string(text).render(values)
    return found


def _templates(directory: Traversable, at: PurePosixPath) -> list[tuple[PurePosixPath, str]]:
    found = []
    for entry in sorted(directory.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            found += _templates(entry, at / entry.name)
        elif entry.name.endswith(TEMPLATE):
            found.append((at / entry.name.removesuffix(TEMPLATE), entry.read_text()))
    return found


def _sample_data() -> dict[str, str]:
    """Make one file of purchases per day, the same each time."""
    chance = random.Random(SEED)
    files = {}
    for number in range(DAYS):
        day = FIRST_DAY + timedelta(days=number)
        minutes = sorted(chance.randrange(24 * 60) for _ in range(PURCHASES_A_DAY))
        purchases = [
            {
                "customer": f"customer-{chance.randrange(CUSTOMERS):02d}",
                "amount_cents": chance.randrange(100, 30_000),
                "at": f"{day}T{minute // 60:02d}:{minute % 60:02d}:00Z",
            }
            for minute in minutes
        ]
        files[f"data/{day}.json"] = "".join(json.dumps(purchase) + "\n" for purchase in purchases)
    return files


def _write(draft: Path, texts: dict[str, str]) -> None:
    for number, (name, text) in enumerate(sorted(texts.items())):
        path = draft / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if name.startswith("data/"):  # Spark reads files in the order of their times
            at_s = 1_767_225_600 + number
            os.utime(path, (at_s, at_s))
