"""Log events of a command on standard error: level, format, and printing above a spinner."""

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
    configuration,
    configure,
    parse_format,
    parse_level,
    unconfigure,
    write_line,
)
from siltstone.settings import PREFIX, Settings

LEVEL, FORMAT = f"{PREFIX}LOG_LEVEL", f"{PREFIX}LOG_FORMAT"


@contextmanager
def command_logs() -> Iterator[None]:
    """Print events while a command runs, then restore this process's logging and environment."""
    before = {name: os.environ.get(name) for name in (LEVEL, FORMAT)}
    _configure()
    try:
        yield
    finally:
        unconfigure()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def apply_log_option(parameter: typer.CallbackParam, value: Any) -> Any:
    """Apply `--log-level` or `--log-format` as soon as it is parsed, so that it already holds for usage errors."""
    if value is not None:
        _configure(**{"level" if parameter.name == "log_level" else "form": value})
    return value


def apply_log_settings(settings: Settings) -> None:
    """Print events by the settings, in this process and, through the environment, in those it starts."""
    os.environ[LEVEL], os.environ[FORMAT] = settings.log_level, settings.log_format
    _configure(settings.log_level, settings.log_format)


def _configure(level: Level | None = None, form: Format | None = None) -> None:
    """Set level and format; None keeps the current one, which at first comes from the environment.

    A value in the environment that is not valid counts as the default; `load_settings` reports it later.
    """
    now = configuration() or (
        parse_level(os.environ.get(LEVEL)) or DEFAULT_LEVEL,
        parse_format(os.environ.get(FORMAT)) or "text",
    )
    level, form = level or now[0], form or now[1]
    on_terminal = err.is_terminal and form == "text"
    configure(level, form, _write_above if on_terminal else write_line, colour=on_terminal and not err.no_color)


def _write_above(line: str) -> None:
    """Write a line above the spinner, if there is one."""
    err.print(Text.from_ansi(line), soft_wrap=True)
