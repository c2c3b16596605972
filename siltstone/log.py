"""Events: how modules log, and how a command line shows it on standard error.

    _LOG = get_logger(__name__)
    _LOG.warning("lease expired", stream=stream)

An event is a few words and fields. It becomes a record of the standard library's `logging`, with the text
`lease expired stream=flights`. A program that uses Siltstone as a library configures `logging` itself. Only a command
line calls `configure`, and passes the same configuration to its Spark workers (`worker_variables`).

`stream`, `epoch`, `checkpoint` and `step` are bound once they are known (`bind_fields`), and are then in every event of
that thread. A thread that starts later has them if it runs in a copy of the context (`contextvars.copy_context`).
"""

import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any, Literal, get_args

import structlog
from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.processors import LogfmtRenderer, format_exc_info
from structlog.stdlib import BoundLogger, ProcessorFormatter, filter_by_level

from siltstone.secret import HIDDEN

bind_fields = bound_contextvars
"""`with bound(stream=stream):` adds fields to every event of this thread in the block"""
Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]
DEFAULT_LEVEL: Level = "info"
WORKERS = "SILTSTONE_WORKER_LOG"
"""the environment variable that passes a command line's level and format to its Spark workers"""
_OURS = ("siltstone", "streams", "jobs", "assets", "checks", "resources", "orchestration")
_NOISY = ("py4j", "pyspark", "SQLQueryContextLogger")
"""packages whose events are shown from the configured level on; all others from warning on"""
_FIRST = ("stream", "epoch", "checkpoint", "step")
_FRAMES = 4
"""stack frames of structlog between the caller and `logging`"""
_USER = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*://)(?P<user>[^\s\"'<>]*)@")
_QUERY = re.compile(r"(?P<name>[?&][\w.-]*(?:pass|secret|token)[\w.-]*=)[^\s&\"'<>]+", re.IGNORECASE)
_COLOURS = {"debug": "2", "info": "32", "warning": "33", "error": "31", "critical": "31"}

Fields = MutableMapping[str, Any]


class Event(dict[str, Any]):
    """An event's fields, as the message of a `logging` record; its text is what any handler shows."""

    def __str__(self) -> str:
        return _text(self)


def get_logger(name: str) -> BoundLogger:
    """Return the logger of a module. It ignores structlog's global configuration, which belongs to the program."""
    return structlog.wrap_logger(
        logging.getLogger(name),
        processors=[filter_by_level, merge_contextvars, _redact, _as_record],
        wrapper_class=BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    )


def redact(text: str) -> str:
    """Return the text without what looks like the user and password of a URL, or a password among its options.

    This is a last line of defence: callers hide their secrets themselves (`siltstone.secret`, `siltstone.store.url`).
    """
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\g<name>{HIDDEN}", _USER.sub(_without_user, text))


def escape_unprintable(text: str) -> str:
    """Return the text with each character that is not printed as itself as its escape in Python, such as `\\x1b`.

    These are control characters, which a terminal obeys, line ends, and marks that change the order of what is read.
    Anybody who can write to the store or the catalog may have put them into a name or a text.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _without_user(found: re.Match[str]) -> str:
    user = found["user"]
    is_safe = not any(c in user for c in ":@/?#") or user.endswith(f":{HIDDEN}")
    return found[0] if is_safe else f"{found['scheme']}{HIDDEN}@"


# Processors of every event


def _redact(_: Any, __: str, fields: Fields) -> Fields:
    for name, value in fields.items():
        if not name.startswith("_"):  # the formatter's own
            fields[name] = _redact_value(value)
    return fields


def _redact_value(value: Any) -> Any:
    if isinstance(value, bool | int | float | None):
        return value
    if isinstance(value, Mapping):
        return {str(name): _redact_value(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_redact_value(each) for each in value]
    return redact(str(value))


def _as_record(logger: Any, name: str, fields: Fields) -> tuple[tuple[Event], dict[str, Any]]:
    arguments, named = ProcessorFormatter.wrap_for_formatter(logger, name, fields)
    return (Event(arguments[0]),), {**named, "stacklevel": _FRAMES}


def _text(fields: Mapping[str, Any]) -> str:
    """Format fields as `event key=value key="a value"`, always on one line."""
    named = {name: _text_of(fields[name]) for name in (*_FIRST, *fields) if name in fields and name != "event"}
    return " ".join(filter(None, (escape_unprintable(str(fields.get("event", ""))), _FIELDS(None, "", named))))


def _text_of(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return ",".join(escape_unprintable(str(each)) for each in value)
    return value if isinstance(value, bool | int | float | None) else escape_unprintable(str(value))


_FIELDS = LogfmtRenderer(bool_as_flag=False)


# The output of a command line


class _Handler(logging.Handler):
    """Call `write` with each line, without its newline."""

    def __init__(self, level: Level, form: Format, write: Callable[[str], None], colour: bool) -> None:
        super().__init__()
        self.form: Format = form
        self.chosen: Level = level
        self.write = write
        self.before = logging.getLogger().level, threading.excepthook
        chain = [_from_record, ProcessorFormatter.remove_processors_meta, format_exc_info, _redact]
        render = _render_json if form == "json" else _Line(colour)
        self.setFormatter(ProcessorFormatter(processors=[*chain, render], foreign_pre_chain=[merge_contextvars]))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.write(self.format(record))
        except Exception:
            self.handleError(record)


class _Line:
    """Render an event as a line for people."""

    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def __call__(self, _: Any, __: str, fields: Fields) -> str:
        at, level, logger = fields.pop("timestamp"), fields.pop("level"), fields.pop("logger")
        traceback = fields.pop("exception", "")
        if logger.partition(".")[0] not in _OURS:
            fields["logger"] = logger
        shown = f"{level:7}"
        if self._colour:
            shown = f"\x1b[{_COLOURS.get(level, '0')}m{shown}\x1b[0m"
        return "\n".join([f"{at} {shown} {_text(fields)}", *map(escape_unprintable, traceback.splitlines())])


def _from_record(_: Any, __: str, fields: Fields) -> Fields:
    record: logging.LogRecord = fields["_record"]
    at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    known = {"timestamp": at, "level": record.levelname.lower(), "event": fields.pop("event"), "logger": record.name}
    return known | {name: fields.pop(name) for name in _FIRST if name in fields} | dict(fields)


def _render_json(_: Any, __: str, fields: Fields) -> str:
    return json.dumps(fields)


def write_line(line: str) -> None:
    """Write a line to standard error in one call, so that lines of several processes do not mix."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def configure(level: Level, form: Format, write: Callable[[str], None] = write_line, *, colour: bool = False) -> None:
    """Show events on standard error from `level` on, and others' log lines from warning on.

    Replaces an earlier configuration. Only the owner of the process calls it: a command line, or a worker of one.
    """
    unconfigure()
    root, chosen = logging.getLogger(), logging.getLevelNamesMapping()[level.upper()]
    root.addHandler(_Handler(level, form, write, colour))
    root.setLevel(max(chosen, logging.WARNING))
    for package in _OURS:
        logging.getLogger(package).setLevel(chosen)
    for noisy in _NOISY:
        # The user sees what stopped a stream once, as our own error.
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    logging.captureWarnings(True)
    threading.excepthook = _log_thread_failure


def unconfigure() -> None:
    """Undo what `configure` did to this process."""
    root, handler = logging.getLogger(), _handler()
    if handler is not None:
        root.removeHandler(handler)
        level, threading.excepthook = handler.before
        root.setLevel(level)
        for name in (*_OURS, *_NOISY):
            logging.getLogger(name).setLevel(logging.NOTSET)
        logging.captureWarnings(False)


def configuration() -> tuple[Level, Format] | None:
    """Return the level and format given to `configure`; None if the program configures logging itself."""
    handler = _handler()
    return None if handler is None else (handler.chosen, handler.form)


def _handler() -> _Handler | None:
    return next((each for each in logging.getLogger().handlers if isinstance(each, _Handler)), None)


def relay_line(line: str) -> None:
    """Show a line that another program, such as Spark's JVM, wrote.

    It becomes an event if the format is JSON and it is not an object of JSON. Otherwise only what cannot be printed is
    escaped, and tabs become spaces.
    """
    handler = _handler()
    if handler is not None and handler.form == "json" and not _is_object(line):
        get_logger("jvm").warning(line)
    elif handler is not None:
        with handler.lock or nullcontext():
            handler.write(escape_unprintable(line.expandtabs()))


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def parse_level(word: str | None) -> Level | None:
    """Return the level of this name, or None."""
    return next((level for level in get_args(Level) if level == word), None)


def parse_format(word: str | None) -> Format | None:
    """Return the format of this name, or None."""
    return next((form for form in get_args(Format) if form == word), None)


def worker_variables() -> dict[str, str]:
    """Return environment variables with which this process's workers log alike; none if the program configures logging
    itself."""
    chosen = configuration()
    return {} if chosen is None else {WORKERS: " ".join(chosen)}


def configure_worker(environment: Mapping[str, str]) -> None:
    """Configure a worker's logging as in the process that started it, if that called `configure`."""
    words = environment.get(WORKERS, "").partition(" ")
    level, form = parse_level(words[0]), parse_format(words[2])
    if level and form:
        configure(level, form)


def _log_thread_failure(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None and not isinstance(failed.exc_value, SystemExit):
        name = failed.thread.name if failed.thread else "?"
        said = "".join(str(failed.exc_value).splitlines()[:1])
        get_logger(__name__).error(
            "thread failed", thread=name, error=f"{type(failed.exc_value).__name__}: {said}", exc_info=failed.exc_value
        )
