"""Events of a command on standard error: what was asked for, and how they go beside a spinner on a terminal."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.text import Text

from siltstone.cli.output import err
from siltstone.log import (
    DEFAULT_LEVEL,
    Format,
    Level,
    as_format,
    as_level,
    configure,
    configured,
    unconfigure,
    write_line,
)
from siltstone.settings import PREFIX, Settings, load_settings

LEVEL, FORMAT = f"{PREFIX}LOG_LEVEL", f"{PREFIX}LOG_FORMAT"


@contextmanager
def shown_logs() -> Iterator[None]:
    """Show events as long as a command is at work; what it changes of this process for that is taken back."""
    before = {name: os.environ.get(name) for name in (LEVEL, FORMAT)}
    _show()
    try:
        yield
    finally:
        unconfigure()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def given_logs(parameter: typer.CallbackParam, value: Any) -> Any:
    """Act on `--log-level` or `--log-format` where it is read, so that an error in what follows is shown so already."""
    if value is not None:
        _show(**{"level" if parameter.name == "log_level" else "form": value})
    return value


def settled_logs(level: Level | None, form: Format | None) -> None:
    """Show events as the settings say, of which the command line named some; programs that this one starts do, too.

    Raises:
        UsageError: see `load_settings`.
    """
    show_logs_of(load_settings(log_level=level, log_format=form))


def show_logs_of(settings: Settings) -> None:
    """Show events as the settings say; programs that this one starts do, too."""
    os.environ[LEVEL], os.environ[FORMAT] = settings.log_level, settings.log_format
    _show(settings.log_level, settings.log_format)


def _show(level: Level | None = None, form: Format | None = None) -> None:
    """Show events; what is not named stays as it is, and at first is what the environment says.

    A wrong word in the environment is told of where the settings are read; until then it is the default.
    """
    now = configured() or (
        as_level(os.environ.get(LEVEL)) or DEFAULT_LEVEL,
        as_format(os.environ.get(FORMAT)) or "text",
    )
    level, form = level or now[0], form or now[1]
    on_terminal = err.is_terminal and form == "text"
    configure(level, form, _write_above if on_terminal else write_line, colour=on_terminal and not err.no_color)


def _write_above(line: str) -> None:
    """A line above the spinner, if one is there."""
    err.print(Text.from_ansi(line), soft_wrap=True)
