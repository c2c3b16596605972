"""The command line: each command parses, calls one method of the client, prints its result.

Exit codes are those of `siltstone.errors`.
With `--json` one JSON object goes to standard output and everything for people to standard error; without it
results are tables and long work shows progress on a terminal and stays silent in a pipe.

    application                        the app, errors and exit codes
    options, output                    what several commands take and print
    stream, state, lifecycle,
    changing, recovery, catalog,
    doctor, tools                      the commands
"""

# They add their commands, in this order.
from siltstone.cli import stream, state, lifecycle, changing, recovery, catalog, doctor, tools  # noqa: F401, I001
from siltstone.cli.application import main, run_job

__all__ = ["main", "run_job"]
