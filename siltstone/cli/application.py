"""The command line itself: the application, and how every error becomes one line and an exit code."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from siltstone.cli.logs import given_logs, settled_logs, shown_logs
from siltstone.cli.output import err, out
from siltstone.errors import SiltstoneError
from siltstone.log import Format, Level, configured, get_logger, redact
from siltstone.store.private import own_umask


class Commands(TyperGroup):
    """The commands, listed by group, each with the whole of its first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section per group, in the order in which the groups' first commands were added."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            group, sentence = command.rich_help_panel, command.get_short_help_str(limit=1000)
            groups.setdefault(group, []).append((name, sentence))
        for group, commands in groups.items():
            with formatter.section(group):
                formatter.write_dl(commands)


app = typer.Typer(
    name="siltstone",
    cls=Commands,
    help="Durable, provable state for PySpark streams.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_LOG = get_logger(__name__)
INTERRUPTED, TERMINATED = 130, 143
WIDTH_IN_A_PIPE = 100
"""columns of rules and progress; lines and rows of tables are as long as they are"""
NOT_UNDERSTOOD = typer.BadParameter.__mro__[1]
"""what every mistake on the command line is: click's UsageError, which typer does not export"""


def _command_line() -> object:
    """The exit code that the command asked for, or None."""
    return app(prog_name="siltstone", standalone_mode=False)


def _version(asked: bool) -> None:
    if asked:
        out.print(f"siltstone {metadata.version('siltstone')}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
    log_level: Annotated[
        Level | None, typer.Option(help="From which level on events go to standard error. [info]", callback=given_logs)
    ] = None,
    log_format: Annotated[
        Format | None,
        typer.Option(help="Events as text, or as one JSON object per line. [text]", callback=given_logs),
    ] = None,
) -> None:
    """Durable, provable state for PySpark streams."""
    settled_logs(log_level, log_format)


def main(command: Callable[[], object] = _command_line) -> NoReturn:
    """Entry point: run the command, turn errors into one line and an exit code."""
    # Py4J tells of interrupted calls on the root logger itself; others' loggers are heard as before.
    logging.getLogger().addFilter(_unheard)
    if not out.is_terminal:
        out.width = WIDTH_IN_A_PIPE
    before = os.umask(0o077)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)
    with shown_logs():
        try:
            os.umask(own_umask())
            code = command()
        except SiltstoneError as error:
            _fail(error.told, error.exit_code, error)
        except (KeyboardInterrupt, typer.Abort):
            _fail("interrupted", INTERRUPTED)
        except Exception as error:
            if isinstance(error, NOT_UNDERSTOOD):
                _not_understood(error)
            first = (str(error).strip() or "no message").splitlines()[0]
            _fail(f"{type(error).__name__}: {first} (--log-level debug shows the traceback)", 1, error)
        finally:
            os.umask(before)
        if code == INTERRUPTED:  # typer has seen it before us
            _fail("interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def run_job(command: str, *options: str) -> NoReturn:
    """Run one command as a job: with the script's own arguments, and `--json`."""
    sys.argv = ["siltstone", command, *options, *sys.argv[1:], "--json"]
    main()


def _terminated(*_: object) -> NoReturn:
    """End as by Ctrl-C, so that leases are released; a run of a stream has a handler of its own. The second time,
    at once."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(TERMINATED)


def _unheard(_: logging.LogRecord) -> bool:
    return False


def _not_understood(error: Any) -> NoReturn:
    """A command, argument or option that is not there or not right; no command at all shows what there is."""
    message = error.format_message()
    if not sys.argv[1:]:
        err.print(message, markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    command = error.ctx.command_path if error.ctx else app.info.name
    _fail(f"{' '.join(message.split()).rstrip('.')} (see {command} --help)", 2)


def _fail(message: str, code: int, error: Exception | None = None) -> NoReturn:
    """End with one line: for people, or as an event where events are JSON; at level debug, with the traceback."""
    level, form = configured() or (None, "text")
    if form == "json":
        failed = {} if error is None else {"error": type(error).__name__}
        _LOG.error(redact(message), **failed, exit_code=code, exc_info=error if level == "debug" else None)
    else:
        if level == "debug" and error is not None:
            _LOG.debug("failed", error=type(error).__name__, exc_info=error)
        err.print(f"siltstone: {redact(message)}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)
