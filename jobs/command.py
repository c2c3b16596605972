"""What the command lines of all jobs share: STREAM and where it lives, one JSON object out, the engine's exit codes."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from siltstone.cli import main
from siltstone.cli.logs import show_logs_of
from siltstone.settings import Settings, given_settings


def job_parser(description: str | None) -> ArgumentParser:
    """A parser with the arguments that every job takes."""
    parser = ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("stream", help="name of the stream")
    parser.add_argument("--warehouse", metavar="URL", help="where objects lie [./warehouse]")
    parser.add_argument("--catalog", metavar="URL", help="SQLAlchemy URL [SQLite inside the warehouse]")
    parser.add_argument("--parallelism", type=int, metavar="N", help="tasks an operator [cores]")
    return parser


def run_job(
    parser: ArgumentParser, work: Callable[[Settings, Namespace], Any], failed: Callable[[Any], bool] = lambda _: False
) -> None:
    """Parse, work, print the result as one JSON object; exit as `siltstone.errors` says.

    Args:
        work: gives a dataclass.
        failed: whether that result is a check that did not hold; the exit code is then 1.
    """

    def command() -> int:
        given = parser.parse_args()
        settings = given_settings(given.warehouse, given.catalog, parallelism=given.parallelism)
        show_logs_of(settings)
        result = work(settings, given)
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
        return 1 if failed(result) else 0

    main(command)
