"""Events: as a library, in both formats, without secrets, once per outage."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextvars import copy_context

import pytest

from siltstone import log
from siltstone.catalog.database.transactions import Outages
from siltstone.errors import Unreachable
from tests.command_line import siltstone

SECRET = "s3cr:t@with/all"
OURS = log.get_logger("siltstone.of_a_test")


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Where a test configures events to go; taken back at its end."""
    yield []
    log.unconfigure()


def test_a_program_that_uses_the_library_logs_as_it_likes(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before = list(root.handlers), root.level, logging.getLogger("siltstone").level, threading.excepthook
    with log.bind_fields(stream="s", epoch=3):
        OURS.warning("lease expired", since="a while", objects=2)
        OURS.info("not seen where the program does not ask for it")
    assert caplog.messages == ['lease expired stream=s epoch=3 since="a while" objects=2']
    assert caplog.records[0].module == "test_log", "who logged, not structlog"
    assert (list(root.handlers), root.level, logging.getLogger("siltstone").level, threading.excepthook) == before
    assert log.configuration() is None and log.worker_variables() == {}
    assert capsys.readouterr().out == ""


def test_each_event_is_a_json_object_with_what_is_bound(lines: list[str]) -> None:
    log.configure("debug", "json", lines.append)
    with log.bind_fields(stream="s", epoch=1, checkpoint=7, step=9):
        OURS.debug("step processed", rows=3)
        logging.getLogger("somebody.else").warning("theirs %d", 5)
        logging.getLogger("somebody.else").info("too much")
        inherited = copy_context()
    thread = threading.Thread(target=inherited.run, args=(OURS.info, "in a thread"))
    thread.start()
    thread.join()
    ours, theirs, threads = map(json.loads, lines)
    bound = {"stream": "s", "epoch": 1, "checkpoint": 7, "step": 9}
    assert ours.items() >= {"level": "debug", "event": "step processed", "rows": 3, **bound}.items()
    assert ours["timestamp"].endswith("Z") and ours["logger"] == "siltstone.of_a_test"
    assert theirs.items() >= {"level": "warning", "event": "theirs 5", **bound}.items()
    assert threads.items() >= {"event": "in a thread", **bound}.items()


def test_an_event_as_text_is_one_line_that_moves_no_cursor(lines: list[str]) -> None:
    log.configure("info", "text", lines.append)
    OURS.warning("odd", name="a\nb\x1b[2J\x9b", empty=None)
    OURS.debug("not at this level")
    [line] = lines
    assert line.endswith(r"Z warning odd name=a\nb\x1b[2J\x9b empty=") and line.isprintable()


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_a_url_hides_is_hidden_whoever_logs_it(lines: list[str], form: log.Format) -> None:
    log.configure("debug", form, lines.append)
    url = f"postgresql://me:{SECRET}@host/db?sslpassword={SECRET}"
    OURS.error(f"cannot reach {url}", also=[url], more={"url": url})
    logging.getLogger("boto3").error("asked %s", url)
    try:
        raise ValueError(url)
    except ValueError:
        OURS.debug("failed", exc_info=True)
    assert len(lines) == 3 and all("***" in line and "s3cr" not in line and "t@with" not in line for line in lines)
    assert "Traceback" in lines[-1]
    lines.clear()
    OURS.info("kept", url="redis://me:***@host/0", name="s3://bucket/prefix", address="someone@example.org")
    assert all(kept in lines[0] for kept in ("redis://me:***@host/0", "s3://bucket/prefix", "someone@example.org"))


def test_lines_of_other_programs_are_events_where_all_are_json(lines: list[str]) -> None:
    log.configure("info", "json", lines.append)
    for line in ("java.lang.OutOfMemoryError", '{"event": "of a worker"}'):
        log.relay_line(line)
    assert [json.loads(line)["event"] for line in lines] == ["java.lang.OutOfMemoryError", "of a worker"]
    log.configure("info", "text", lines.append)
    log.relay_line("as it is")
    assert lines[-1] == "as it is"


def test_a_worker_logs_as_the_command_line_does_that_started_it(lines: list[str]) -> None:
    log.configure("debug", "json", lines.append)
    code = """if True:
        import os, threading
        from siltstone import log
        log.configure_worker(os.environ)
        log.get_logger("siltstone.w").debug("here", n=1)
        failing = threading.Thread(target=lambda: 1 / 0)
        failing.start()
        failing.join()
    """
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | log.worker_variables(),
        capture_output=True,
        text=True,
        check=True,
    )
    here, failed = map(json.loads, told.stderr.splitlines())
    assert (here["event"], here["n"], failed["event"]) == ("here", 1, "thread failed")
    assert "ZeroDivisionError" in failed["exception"] and told.stdout == ""


def test_an_outage_is_told_of_once_not_at_each_attempt_or_thread(caplog: pytest.LogCaptureFixture) -> None:
    outages, back = Outages("the catalog", 60), threading.Event()
    failed = threading.Barrier(2, timeout=60)
    attempts = []

    def call() -> None:
        attempts.append(1)
        if len(attempts) <= 4:
            raise Unreachable("away", transient=True)
        back.set()

    def work() -> None:
        failed.wait()
        outages.call(call)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert back.is_set() and len(attempts) >= 6
    said = [message.partition(" database=")[0].partition(" error=")[0] for message in caplog.messages]
    assert said == ["catalog is unreachable, trying again", "catalog answers again"]


def test_an_unknown_level_or_format_is_an_error_of_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    siltstone("--log-level", "loud", "checkpoints", "s").failed(2, "--log-level", "'debug'")
    siltstone("--log-format", "xml", "checkpoints", "s").failed(2, "--log-format", "'json'")
    monkeypatch.setenv("SILTSTONE_LOG_LEVEL", "loud")
    siltstone("checkpoints", "s").failed(2, "option log_level", "'debug'")


def test_errors_are_events_where_all_lines_are_json_and_only_debug_shows_tracebacks(tmp_path) -> None:
    for arguments, code in ((("nosuch",), 2), (("checkpoints", "s"), 2), (("--log-level", "loud"), 2)):
        ended = siltstone("--log-format", "json", *arguments, cwd=tmp_path)
        [line] = ended.err.splitlines()
        said = json.loads(line)
        assert (ended.code, said["exit_code"], said["level"]) == (code, code, "error")
        assert len(said["event"]) > 10 and "exception" not in said
    ended = siltstone("--log-format", "json", "--log-level", "debug", "checkpoints", "s", cwd=tmp_path)
    said = json.loads(ended.err.splitlines()[-1])
    assert said["error"] == "UsageError" and "Traceback" in said["exception"]
    plain = siltstone("--log-level", "debug", "checkpoints", "s", cwd=tmp_path).err.splitlines()
    assert plain[-1].startswith("siltstone: no warehouse") and "Traceback (most recent call last):" in plain
    assert log.configuration() is None and "SILTSTONE_LOG_FORMAT" not in os.environ
