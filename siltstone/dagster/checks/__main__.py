"""Check a stream outside Dagster: `python -m siltstone.dagster.checks STREAM`; exits 1 if a property does not hold.

Launched by Dagster Pipes, it sends the results as check results if the step wants them (`siltstone.pipes.session`).
"""

import json
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from siltstone.change.fork import find_definition
from siltstone.cli import main
from siltstone.dagster.checks.data_docs import build_data_docs
from siltstone.dagster.checks.facts import Subject
from siltstone.dagster.checks.suites import RESTORE_EQUALS_SNAPSHOT, SUITES
from siltstone.dagster.checks.validation import check
from siltstone.pipes.session import checks_session
from siltstone.settings import load_settings


def check_command() -> int:
    """Run the command; return exit code 0 if all properties hold, 1 if not."""
    parser = ArgumentParser(prog="python -m siltstone.dagster.checks", description=__doc__, allow_abbrev=False)
    parser.add_argument("stream", help="name of the stream")
    parser.add_argument("--warehouse", metavar="URL", help="where objects are [./warehouse]")
    parser.add_argument("--catalog", metavar="URL", help="SQLAlchemy URL [SQLite inside the warehouse]")
    names = [suite.name for suite in SUITES]
    parser.add_argument("--only", action="append", choices=names, help="check only this property; repeatable [all]")
    parser.add_argument("--data-docs", type=Path, metavar="DIRECTORY", help="also write the results as web pages there")
    given = parser.parse_args()
    settings = load_settings(warehouse=given.warehouse, catalog=given.catalog)
    subject = Subject(settings, find_definition(settings, given.stream))
    # Full snapshots are optional: without one, the comparison with it is checked only if requested.
    suites = [s for s in SUITES if s.name in given.only] if given.only else _default_suites(subject)
    outcomes = [check(subject, suite) for suite in suites]
    session = checks_session()
    if session is not None:
        for outcome in outcomes:
            session.tell(outcome.told(subject.name))
    result: dict[str, Any] = {
        "stream": subject.name,
        "checks": [
            {"name": o.suite.name, "holds": o.holds, "summary": o.summary, "facts": o.facts, "failing": o.rows}
            for o in outcomes
        ],
    }
    if given.data_docs is not None:
        result["data_docs"] = str(build_data_docs(subject, given.data_docs, suites))
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if session is not None or all(outcome.holds for outcome in outcomes) else 1


def _default_suites(subject: Subject) -> list[Any]:
    with subject.warehouse() as warehouse:
        snapshots = warehouse.catalog.reference_copies.list(subject.name)
    return [suite for suite in SUITES if snapshots or suite is not RESTORE_EQUALS_SNAPSHOT]


if __name__ == "__main__":
    main(check_command)
