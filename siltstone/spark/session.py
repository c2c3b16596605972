"""The Spark session, of a driver in this process or of a Spark Connect server: one place that knows which settings
Siltstone needs.
"""

import os
import re
import shlex
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar
from urllib.parse import urlsplit

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from siltstone.errors import Fenced, StateError, Unreachable, UsageError
from siltstone.log import configured, for_workers
from siltstone.spark.datasource import register
from siltstone.spark.failures import explained
from siltstone.spark.jvm_lines import shown_jvm_lines
from siltstone.spark.source_log import FILE_SOURCE_COMPACT_INTERVAL

P = ParamSpec("P")
T = TypeVar("T")
LOG_CONFIGURATIONS = {"text": "log4j2.properties", "json": "log4j2-json.properties"}
"""what Spark's own log is told, by the format of ours"""

SETTINGS = {
    # A step is one shuffle of known size; coalescing would undo it and planning twice only costs time.
    "spark.sql.adaptive.enabled": "false",
    # A subtask's working state has one owner; a second attempt at the same time would gain nothing.
    "spark.speculation": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "131072",
    "spark.sql.session.timeZone": "UTC",
    # How often a stream that waits looks at its source; Spark's own 10 ms list a directory or a bucket all the time.
    "spark.sql.streaming.pollingDelay": "1s",
    "spark.sql.streaming.fileSource.log.compactInterval": str(FILE_SOURCE_COMPACT_INTERVAL),
    # Spark's own record of a local query is laid out anew at each start: checksum files beside it only cost time.
    "spark.hadoop.fs.AbstractFileSystem.file.impl": "org.apache.hadoop.fs.local.RawLocalFs",
    # Spark's own default, INT96, loses the zone for every other reader.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # A supervisor may signal every process of a run that is to end in a checkpoint.
    "spark.python.daemon.module": "siltstone.spark.daemon",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
CONNECT = "sc"
CONNECT_PORT = 15002
_CONNECT_WAIT_S = 10.0
_MANY_ROWS = 1 << 20
"""more than any Spark has cores"""
_COMPILED_LIGHTLY = "-XX:TieredStopAtLevel=1"
"""for a JVM that starts some tasks and ends, through which no rows pass: compiling well is most of what it would do"""
LOCAL_SETTINGS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}

FROM_FILES = "spark."
"""what the names of settings begin with that spark-submit takes from a file"""
SUBMIT_ARGUMENTS = "PYSPARK_SUBMIT_ARGS"
"""what PySpark starts the JVM with"""
SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""set where `spark-submit` runs this program; the master is then its to name"""


def spark_session(
    master: str = "local[*]", extra: Mapping[str, str] | None = None, *, steps: bool = False
) -> SparkSession:
    """The running session if there is one, else a new one on `master`.

    Worker processes get this interpreter and this module search path, so that the user's stream modules import there
    as they do here. Those of a Spark Connect server are its own to start: what they are to import is installed there.

    Args:
        master: a Spark master URL, or `sc://HOST[:PORT]` of a Spark Connect server; of no effect under `spark-submit`,
            which names its own.
        extra: further Spark settings; they win over Siltstone's own.
        steps: steps of a stream follow: functions in this process, which Spark calls only as its driver, and rows that
            pass through the JVM.

    Raises:
        Unreachable: the JVM does not start (most often: no Java 17 or newer), or no server answers.
        UsageError: Spark Connect where it cannot be used, or its packages are not installed.
    """
    spark = running_session()
    if steps and (_is_connect(master) if spark is None else not isinstance(spark, SparkSession)):
        raise UsageError(
            "this runs a query whose every batch is handed to a function in this process, which Spark Connect "
            "cannot do: give a Spark master such as local[*], spark://, yarn or k8s:// instead of sc://"
        )
    if spark is not None:
        return spark
    if _is_connect(master):
        return _connected(master, extra or {})
    return _started(master, extra or {}, java_options="" if steps else _COMPILED_LIGHTLY)


def running_session() -> SparkSession | None:
    """This thread's session, if there is one."""
    return SparkSession.getActiveSession()


def cores(spark: SparkSession) -> int:
    """How many tasks Spark runs at once by itself."""
    if isinstance(spark, SparkSession):
        return spark.sparkContext.defaultParallelism
    return spark.range(_MANY_ROWS).select(F.spark_partition_id()).distinct().count()


def _is_connect(master: str) -> bool:
    return urlsplit(master).scheme == CONNECT


def _connected(url: str, extra: Mapping[str, str]) -> SparkSession:
    """A session of the server at `url`. Its static settings are the server's own."""
    host, port = urlsplit(url).hostname, urlsplit(url).port or CONNECT_PORT
    try:
        # The client by itself would try for minutes.
        socket.create_connection((host or "", port), _CONNECT_WAIT_S).close()
    except OSError as error:
        raise Unreachable(
            f"no Spark Connect server answers at {host}:{port} ({error.strerror or error}); check the address, and "
            "start one with sbin/start-connect-server.sh"
        ) from error
    builder = SparkSession.builder.remote(url).config("spark.app.name", "siltstone")
    session = {key: value for key, value in SETTINGS.items() if key.startswith("spark.sql.")}
    try:
        spark = builder.config(map={**session, **extra}).getOrCreate()
        register(spark)
    except ImportError as error:
        raise UsageError(
            f"Spark Connect needs further packages: pip install 'siltstone[connect]' ({str(error).splitlines()[0]})"
        ) from error
    except Exception as error:
        raise Unreachable(f"Spark Connect at {host}:{port} fails: {str(error).splitlines()[0]}") from error
    return spark


def _started(master: str, extra: Mapping[str, str], java_options: str) -> SparkSession:
    """A session of a driver in this process."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # workers, too, look into no directory that merely is where they start
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(p or os.getcwd() for p in sys.path if not _zipped(p)))
    _, log_format = configured() or (None, "text")
    log4j = Path(__file__).parent / LOG_CONFIGURATIONS[log_format]
    java_options = f"-Dlog4j2.configurationFile={log4j.as_uri()} {java_options}".rstrip()
    settings = SETTINGS | {"spark.app.name": "siltstone", "spark.driver.extraJavaOptions": java_options}
    settings |= {f"spark.executorEnv.{name}": value for name, value in for_workers().items()}
    if SUBMITTED not in os.environ:
        settings |= {"spark.master": master} | (LOCAL_SETTINGS if master.startswith("local") else {})
    try:
        with shown_jvm_lines():
            spark = _with_settings(settings, extra)
    except UsageError:
        raise
    except Exception as error:
        raise Unreachable(
            f"Spark did not start on {master}: {str(error).splitlines()[0]}; check that Java 17 or newer is installed "
            "and JAVA_HOME points to it"
        ) from error
    if threading.current_thread() is threading.main_thread():
        # PySpark's handler talks to the JVM, which fails in the middle of another call.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    register(spark)
    return spark


def _with_settings(settings: Mapping[str, str], extra: Mapping[str, str]) -> SparkSession:
    """A session with these settings; `extra`, which may be secret, come before the others."""
    if SUBMITTED in os.environ:  # the JVM has started: nothing becomes an argument of it
        return SparkSession.builder.config(map={**settings, **extra}).getOrCreate()
    with _kept_private({key: value for key, value in extra.items() if key.startswith(FROM_FILES)}):
        spark = SparkSession.builder.config(map={k: v for k, v in settings.items() if k not in extra}).getOrCreate()
    for key in extra:
        if not key.startswith(FROM_FILES):
            spark.conf.set(key, extra[key])
    return spark


@contextmanager
def _kept_private(settings: Mapping[str, str]) -> Iterator[None]:
    """Have the JVM that starts meanwhile read settings from a file that only this user can, and that is gone after.

    PySpark by itself puts them into the JVM's arguments, which the list of processes shows to everybody: passwords too.
    """
    given = os.environ.get(SUBMIT_ARGUMENTS)
    if settings and "--properties-file" in (given or ""):
        raise UsageError(
            f"{SUBMIT_ARGUMENTS} names a --properties-file: write Siltstone's Spark settings into that one"
        )
    with tempfile.NamedTemporaryFile("w", prefix="siltstone-", suffix=".properties", encoding="utf-8") as file:
        file.writelines(f"{_property(key)}={_property(value)}\n" for key, value in settings.items())
        file.flush()
        read = f"--load-spark-defaults --properties-file {shlex.quote(file.name)}"
        os.environ[SUBMIT_ARGUMENTS] = f"{read} {given or 'pyspark-shell'}"
        try:
            yield
        finally:
            if given is None:
                del os.environ[SUBMIT_ARGUMENTS]
            else:
                os.environ[SUBMIT_ARGUMENTS] = given


def _property(text: str) -> str:
    """A key or value as java.util.Properties reads it back."""
    return re.sub(r"[\\\s=:#!]", lambda found: f"\\u{ord(found[0]):04x}", text)


def needs_spark(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates what works on a Spark session: whatever fails because the JVM is gone fails as Unreachable, and what
    else fails inside Spark, such as a Python worker that is killed too often, as StateError; each in one line.

    Where a newer writer has fenced a run, that is the reason that counts.
    """

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if isinstance(error, Fenced):
                raise
            if not _gone():
                if isinstance(error, PySparkException | Py4JError):
                    raise StateError(f"Spark failed: {explained(error, 'run the same command')}") from error
                raise
            raise Unreachable(
                "Spark's JVM is gone, killed or out of memory: run the same command again; a stream goes on from its "
                "last checkpoint"
            ) from error

    return guarded


def _gone() -> bool:
    """Whether there was a JVM that does not answer any more."""
    context = SparkContext._active_spark_context
    try:
        return context is not None and not context.version
    except (Py4JError, OSError):
        return True


def _zipped(path: str) -> bool:
    return path.endswith(".zip")
