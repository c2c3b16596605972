"""The application: it lists the commands and turns every error into one line and an exit code."""

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

from siltstone.cli.logs import apply_log_option, apply_log_settings, command_logs
from siltstone.cli.output import err, out
from siltstone.errors import SiltstoneError, summarize
from siltstone.log import Format, Level, configuration, escape_unprintable, get_logger, redact
from siltstone.pipes.session import pipes_session
from siltstone.settings import load_settings
from siltstone.store.private import own_umask


class Commands(TyperGroup):
    """A command group whose help lists commands by section, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section per group of commands, in the order in which they were added."""
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
"""columns of help, rules and progress; results and rows of tables are not wrapped"""
CLICK_USAGE_ERROR = typer.BadParameter.__mro__[1]
"""click's UsageError, the base class of every mistake on the command line; typer does not export it"""


def _run_app() -> object:
    """Run the app and return the exit code that the command asked for, or None."""
    in_a_pipe = {} if out.is_terminal else {"terminal_width": WIDTH_IN_A_PIPE}
    return app(prog_name="siltstone", standalone_mode=False, max_content_width=WIDTH_IN_A_PIPE, **in_a_pipe)


def _print_version(asked: bool) -> None:
    if asked:
        out.print(f"siltstone {metadata.version('siltstone')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    log_level: Annotated[
        Level | None,
        typer.Option(help="Lowest level of log events on standard error. [info]", callback=apply_log_option),
    ] = None,
    log_format: Annotated[
        Format | None,
        typer.Option(help="Log events as text, or as one JSON object per line. [text]", callback=apply_log_option),
    ] = None,
) -> None:
    """Durable, provable state for PySpark streams."""
    apply_log_settings(load_settings(log_level=log_level, log_format=log_format))


def main(command: Callable[[], object] = _run_app) -> NoReturn:
    """Run the command as the program's entry point; an error becomes one line and an exit code."""
    # Py4J logs interrupted calls on the root logger itself; other loggers are not affected.
    logging.getLogger().addFilter(_reject)
    if not out.is_terminal:
        out.width = WIDTH_IN_A_PIPE
    before = os.umask(0o077)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _exit_on_sigterm)
    with command_logs():
        try:
            os.umask(own_umask())
            with pipes_session():
                code = command()
        except SiltstoneError as error:
            _fail(error.full_text, error.exit_code, error)
        except (KeyboardInterrupt, typer.Abort):
            _fail("interrupted", INTERRUPTED)
        except Exception as error:
            if isinstance(error, CLICK_USAGE_ERROR):
                _fail_usage(error)
            _fail(f"{summarize(error)} (--log-level debug shows the traceback)", 1, error)
        finally:
            os.umask(before)
        if code == INTERRUPTED:  # typer caught the KeyboardInterrupt
            _fail("interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def run_job(command: str, *options: str) -> NoReturn:
    """Run one command with the script's own arguments and `--json`, as the scripts in `jobs/` do."""
    sys.argv = ["siltstone", command, *options, *sys.argv[1:], "--json"]
    main()


def _exit_on_sigterm(*_: object) -> NoReturn:
    """Exit as after Ctrl-C, so that leases are released. A second SIGTERM kills at once.

    While a stream runs, `siltstone.spark.stopping` handles the signal instead.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(TERMINATED)


def _reject(_: logging.LogRecord) -> bool:
    return False


def _fail_usage(error: Any) -> NoReturn:
    """Exit with code 2 on a wrong command, argument or option. Without any command, print the help."""
    message = error.format_message()
    if not sys.argv[1:]:
        err.print(message, soft_wrap=True)
        sys.exit(2)
    command = error.ctx.command_path if error.ctx else app.info.name
    _fail(f"{' '.join(message.split()).rstrip('.')} (see {command} --help)", 2)


def _fail(message: str, code: int, error: Exception | None = None) -> NoReturn:
    """Exit with one line: text, or an event if events are JSON. At level debug the traceback is logged too."""
    level, form = configuration() or (None, "text")
    if form == "json":
        failed = {} if error is None else {"error": type(error).__name__}
        _LOG.error(redact(message), **failed, exit_code=code, exc_info=error if level == "debug" else None)
    else:
        if level == "debug" and error is not None:
            _LOG.debug("failed", error=type(error).__name__, exc_info=error)
        err.print(f"siltstone: {escape_unprintable(redact(message))}", style="red", soft_wrap=True)
    sys.exit(code)
