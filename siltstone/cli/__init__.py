"""The command line: each command parses its options, calls one method of the client and prints the result.

Exit codes are those of `siltstone.errors`.
With `--json`, one JSON object goes to standard output and everything for people to standard error. Without it,
results are lines and tables; long work shows progress on a terminal and is silent in a pipe.

    application                        the app, errors and exit codes
    help                               the help of commands, from the client's docstrings
    options, output                    arguments and output that several commands share
    logs                               log events on standard error
    stream, state, lifecycle,
    changing, recovery, catalog,
    doctor, tools                      the commands
"""

# The order of these imports is the order of the commands in --help.
from siltstone.cli import stream, state, lifecycle, changing, recovery, catalog, doctor, tools  # noqa: F401, I001
from siltstone.cli.application import main, run_job

__all__ = ["main", "run_job"]
