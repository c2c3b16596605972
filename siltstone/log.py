"""Events: how every module says what happens, and how a command line shows it on standard error.

    _LOG = get_logger(__name__)
    _LOG.warning("lease expired", stream=stream)

An event is a few words and fields. It is a record of the standard library's `logging` in the first place, whose text is
`lease expired stream=flights`: a program that uses Siltstone as a library configures `logging` as it likes, and nothing
here changes that. Only a command line calls `configure`; its Spark workers are told to do the same (`for_workers`).

`stream`, `epoch`, `checkpoint` and `step` are bound where they become known (`bound`), and are then in every event of
that thread. A thread that is started later has them if it runs in a copy of the context (`contextvars.copy_context`).
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

bound = bound_contextvars
"""`with bound(stream=stream):` - fields of every event of this thread in the block"""
Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]
DEFAULT_LEVEL: Level = "info"
WORKERS = "SILTSTONE_WORKER_LOG"
"""the variable that tells a Spark worker the level and the format of the command line whose session it is of"""
_OURS = ("siltstone", "streams", "jobs", "assets", "checks", "resources", "orchestration")
"""packages whose events are shown from the chosen level on; all others' from warning on"""
_FIRST = ("stream", "epoch", "checkpoint", "step")
_FRAMES = 4
"""of structlog, between who logs and `logging`"""
_USER = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*://)(?P<user>[^\s\"'<>]*)@")
_QUERY = re.compile(r"(?P<name>[?&][\w.-]*(?:pass|secret|token)[\w.-]*=)[^\s&\"'<>]+", re.IGNORECASE)
_COLOURS = {"debug": "2", "info": "32", "warning": "33", "error": "31", "critical": "31"}

Fields = MutableMapping[str, Any]


class Event(dict[str, Any]):
    """The fields of an event, as a record of `logging` carries them; its text is what any handler shows."""

    def __str__(self) -> str:
        return _text(self)


def get_logger(name: str) -> BoundLogger:
    """The logger of a module. It does not look at structlog's own configuration, which is the program's to set."""
    return structlog.wrap_logger(
        logging.getLogger(name),
        processors=[filter_by_level, merge_contextvars, _redact, _as_record],
        wrapper_class=BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    )


def redact(text: str) -> str:
    """The text without what looks like the user and password of a URL, or a password among its options.

    A last line of defence: what is logged is to hide its secrets itself (`siltstone.secret`, `siltstone.store.url`).
    """
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\g<name>{HIDDEN}", _USER.sub(_without_user, text))


def _without_user(found: re.Match[str]) -> str:
    user = found["user"]
    is_safe = not any(c in user for c in ":@/?#") or user.endswith(f":{HIDDEN}")
    return found[0] if is_safe else f"{found['scheme']}{HIDDEN}@"


# What every event passes through.


def _redact(_: Any, __: str, fields: Fields) -> Fields:
    for name, value in fields.items():
        if not name.startswith("_"):  # the formatter's own
            fields[name] = _redacted(value)
    return fields


def _redacted(value: Any) -> Any:
    if isinstance(value, bool | int | float | None):
        return value
    if isinstance(value, Mapping):
        return {str(name): _redacted(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_redacted(each) for each in value]
    return redact(str(value))


def _as_record(logger: Any, name: str, fields: Fields) -> tuple[tuple[Event], dict[str, Any]]:
    arguments, named = ProcessorFormatter.wrap_for_formatter(logger, name, fields)
    return (Event(arguments[0]),), {**named, "stacklevel": _FRAMES}


def _text(fields: Mapping[str, Any]) -> str:
    """`event key=value key="a value"`, on one line whatever is in it."""
    named = {name: _listed(fields[name]) for name in (*_FIRST, *fields) if name in fields and name != "event"}
    return " ".join(filter(None, (_printable(str(fields.get("event", ""))), _FIELDS(None, "", named))))


def _listed(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return ",".join(_printable(str(each)) for each in value)
    return value if isinstance(value, bool | int | float | None) else _printable(str(value))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


_FIELDS = LogfmtRenderer(bool_as_flag=False)


# What a command line does with events.


class _Handler(logging.Handler):
    """Writes lines; `write` is called with each, without its newline."""

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
    """An event as a line for people."""

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
        return "\n".join([f"{at} {shown} {_text(fields)}", *map(_printable, traceback.splitlines())])


def _from_record(_: Any, __: str, fields: Fields) -> Fields:
    record: logging.LogRecord = fields["_record"]
    at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    known = {"timestamp": at, "level": record.levelname.lower(), "event": fields.pop("event"), "logger": record.name}
    return known | {name: fields.pop(name) for name in _FIRST if name in fields} | dict(fields)


def _render_json(_: Any, __: str, fields: Fields) -> str:
    return json.dumps(fields)


def write_line(line: str) -> None:
    """A line to standard error, in one piece, so that processes that share it do not mix theirs."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def configure(level: Level, form: Format, write: Callable[[str], None] = write_line, *, colour: bool = False) -> None:
    """Show events on standard error from `level` on, and others' log lines from warning on. Only for whoever owns this
    process: a command line, or a worker that it started. What was configured before by this is replaced."""
    unconfigure()
    root, chosen = logging.getLogger(), logging.getLevelNamesMapping()[level.upper()]
    root.addHandler(_Handler(level, form, write, colour))
    root.setLevel(max(chosen, logging.WARNING))
    for package in _OURS:
        logging.getLogger(package).setLevel(chosen)
    for noisy in ("py4j", "pyspark"):
        # What stops a stream reaches the user once, as our own error.
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    logging.captureWarnings(True)
    threading.excepthook = _log_thread_failure


def unconfigure() -> None:
    """Take back what `configure` did to this process."""
    root, handler = logging.getLogger(), _handler()
    if handler is not None:
        root.removeHandler(handler)
        level, threading.excepthook = handler.before
        root.setLevel(level)
        for name in (*_OURS, "py4j", "pyspark"):
            logging.getLogger(name).setLevel(logging.NOTSET)
        logging.captureWarnings(False)


def configured() -> tuple[Level, Format] | None:
    """What this process was configured with by `configure`; None where the program logs as it likes."""
    handler = _handler()
    return None if handler is None else (handler.chosen, handler.form)


def _handler() -> _Handler | None:
    return next((each for each in logging.getLogger().handlers if isinstance(each, _Handler)), None)


def pass_on(line: str) -> None:
    """Show a line that another program wrote for this process to show, such as Spark's JVM: as it is, but as an event
    where all are JSON and the line is not."""
    handler = _handler()
    if handler is not None and handler.form == "json" and not _is_object(line):
        get_logger("jvm").warning(line)
    elif handler is not None:
        with handler.lock or nullcontext():
            handler.write(line)


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def as_level(word: str | None) -> Level | None:
    """The level of that name, None if there is none."""
    return next((level for level in get_args(Level) if level == word), None)


def as_format(word: str | None) -> Format | None:
    """The format of that name, None if there is none."""
    return next((form for form in get_args(Format) if form == word), None)


def for_workers() -> dict[str, str]:
    """Variables for the workers of this process, so that they log alike; none where the program logs as it likes."""
    chosen = configured()
    return {} if chosen is None else {WORKERS: " ".join(chosen)}


def configure_worker(environment: Mapping[str, str]) -> None:
    """In a worker: `configure` as the process did that started it, if that did."""
    words = environment.get(WORKERS, "").partition(" ")
    level, form = as_level(words[0]), as_format(words[2])
    if level and form:
        configure(level, form)


def _log_thread_failure(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None and not isinstance(failed.exc_value, SystemExit):
        name = failed.thread.name if failed.thread else "?"
        said = "".join(str(failed.exc_value).splitlines()[:1])
        get_logger(__name__).error(
            "thread failed", thread=name, error=f"{type(failed.exc_value).__name__}: {said}", exc_info=failed.exc_value
        )
