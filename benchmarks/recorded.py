"""The numbers that were last recorded, and what got slower since.

    python -m benchmarks [PART ...] [--quick] --record    keep what was measured, and write the page's table anew

Numbers of which more, or less, is better are compared. Nearly all are ratios of sides that ran in turn; seconds and
bytes compare on one machine only. A number is worse if each of its rounds is worse than each recorded one by more than
`NOISE`. The record is `recorded.json`, by part and size; the tables at the end of `docs/how-fast.md` are made from it:
a line per number, or a table of queries and systems where numbers are named "WHAT, QUERY, of SYSTEM", and their ratios
to ours "WHAT, QUERY, beside SYSTEM".
"""

import json
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import flink, nexmark_feldera
from benchmarks.goals import Goal, digits

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_name("recorded.json")
PAGE = ROOT / "docs" / "how-fast.md"
BEGIN = "<!-- recorded ratios: written by python -m benchmarks --record -->\n"
NOISE = 1.25
"""how many times worse a number may be on a busy machine"""
PACKAGES = ("pyspark", "pyarrow", "numpy")
"""packages whose versions are recorded"""
_CELL = re.compile(r"(?P<what>.+), q(?P<query>\d+), (?P<is>of|beside) (?P<system>.+)")

Record = dict[str, dict[str, Any]]
"""part, with " (quick)" if it was -> when and with what it was measured, and its numbers"""


def load(path: Path = RECORD) -> Record:
    """Read the record; it is empty where there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def compare(console: Console, parts: Mapping[str, Sequence[Goal]], *, quick: bool, record: bool) -> None:
    """Print what is slower than recorded, part by part, and record what was measured if asked."""
    known = load()
    for part, goals in parts.items():
        key = f"{part} (quick)" if quick else part
        for line in find_slower(known, key, goals):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if record:
            add(known, key, goals)
    if record:
        save(known)


def find_slower(known: Record, key: str, goals: Sequence[Goal]) -> Iterator[str]:
    """Yield a line for each number that is worse than the recorded one."""
    recorded = known.get(key, {})
    before = {each["what"]: each for each in recorded.get("ratios", ())}
    for goal in goals:
        old = before.get(goal.what)
        if old is not None and goal.less_is_better is not None and _is_recorded(goal) and _is_worse(goal, old):
            yield (
                f"slower than recorded on {recorded['date']} ({recorded['commit']}): {goal.what}: "
                f"{goal.measured:.3g}, and {old['measured']:.3g} then"
            )


def _is_recorded(goal: Goal) -> bool:
    """Whether a number may be some times another: not a difference, which may be below 0."""
    return goal.spread[0] > 0


def _is_worse(goal: Goal, old: Mapping[str, Any]) -> bool:
    low, high = goal.spread
    return low > old["high"] * NOISE if goal.less_is_better else high * NOISE < old["low"]


def add(known: Record, key: str, goals: Sequence[Goal]) -> None:
    """Add the numbers of a part that was just measured to the record, in place of older ones of the same names."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude", "*", "--dirty= and changes"]
    before = {each["what"]: each for each in known.get(key, {}).get("ratios", ())}
    found = [_to_json(goal) for goal in goals if _is_recorded(goal)]
    known[key] = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip(),
        "versions": {"Python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
        | {
            name: number
            for name, number in (("Flink", flink.VERSION), ("DBSP", nexmark_feldera.VERSION))
            if any(name in goal.what for goal in goals)
        },
        "ratios": list((before | {each["what"]: each for each in found}).values()),
    }


def _to_json(goal: Goal) -> dict[str, Any]:
    low, high = goal.spread
    return {
        "what": goal.what,
        "measured": goal.measured,
        "low": low,
        "high": high,
        "range": goal.range,
        "bound": goal.bound,
        "verdict": goal.verdict,
    }


def save(known: Record, path: Path = RECORD, page: Path = PAGE) -> None:
    """Write the record and the page's table."""
    path.write_text(json.dumps(known, indent=1) + "\n")
    text, found, _ = page.read_text().partition(BEGIN)
    if not found:
        raise ValueError(f"{page} has no line {BEGIN.strip()!r}, after which the table is written")
    page.write_text(text + BEGIN + table(known))


def table(known: Record) -> str:
    """Return the tables in Markdown, by part."""
    lines = [""]
    for key, part in sorted(known.items()):
        versions = ", ".join(f"{name} {number}" for name, number in part["versions"].items())
        lines += [f"`{key}`, {part['date']}, commit `{part['commit']}`; {versions}:", ""]
        cells = [(each, found) for each in part["ratios"] if (found := _CELL.fullmatch(each["what"]))]
        for what in dict.fromkeys(found["what"] for _, found in cells):
            lines += [*_matrix(what, [(each, found) for each, found in cells if found["what"] == what]), ""]
        if alone := [each for each in part["ratios"] if not _CELL.fullmatch(each["what"])]:
            lines += ["| | goal | measured | rounds | |", "|---|---|---|---|---|", *map(_line, alone), ""]
    return "\n".join(lines[:-1]) + "\n" if known else ""


def _line(each: Mapping[str, Any]) -> str:
    spread = each["range"] if each["low"] != each["high"] else ""
    told = [each["what"], each["bound"].strip("-"), digits(each["measured"]), spread, each["verdict"]]
    return f"| {' | '.join(told)} |"


def _matrix(what: str, cells: Sequence[tuple[Mapping[str, Any], re.Match[str]]]) -> Iterator[str]:
    """Yield the lines of a table: a query per line, a system per column, and behind a number the ratio and its goal."""
    at = {(int(found["query"]), found["system"], found["is"]): each for each, found in cells}
    beside = list(dict.fromkeys(system for _, system, kind in at if kind == "beside"))
    ours = list(dict.fromkeys(system for _, system, _ in at if system not in beside))
    queries, systems = sorted({query for query, _, _ in at}), [*ours, *beside]
    yield f"| {what} | {' | '.join(systems)} |"
    yield f"|{'---|' * (len(systems) + 1)}"
    for query in queries:
        both = [(at.get((query, system, "of")), at.get((query, system, "beside"))) for system in systems]
        yield f"| q{query} | {' | '.join(_cell(own, ratio) for own, ratio in both)} |"


def _cell(own: Mapping[str, Any] | None, ratio: Mapping[str, Any] | None) -> str:
    told = [digits(own["measured"])] if own else []
    if ratio:
        goal = f", goal {ratio['bound'].strip('>= ')}: {ratio['verdict']}" if ratio["verdict"] else ""
        told.append(f"({digits(ratio['measured'])}{goal})")
    return " ".join(told)
