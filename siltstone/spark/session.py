"""Make the Spark session, with a driver in this process or on a Spark Connect server, and set what Siltstone needs."""

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
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.find_spark_home import _find_spark_home
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from siltstone.errors import Fenced, SiltstoneError, StateError, Unreachable, UsageError
from siltstone.log import configuration, relay_line, worker_variables
from siltstone.spark.failures import explain
from siltstone.spark.versions import checkpoint_file_manager, has_python_sources

P = ParamSpec("P")
T = TypeVar("T")
LOG_CONFIGURATIONS = {"text": "log4j2.properties", "json": "log4j2-json.properties"}
"""format of our events -> configuration file of Spark's own log"""

SETTINGS = {
    # A step is one shuffle of known size: coalescing would undo it, and planning twice takes time.
    "spark.sql.adaptive.enabled": "false",
    # A subtask's working state has one owner, so a second attempt at the same time gains nothing.
    "spark.speculation": "false",
    # A subtask runs where its state is (`spark.placement`), not where most of its rows come from.
    "spark.shuffle.reduceLocality.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "131072",
    "spark.sql.session.timeZone": "UTC",
    # How often a waiting stream polls its source. Spark's default of 10 ms keeps 0.4 cores busy with a directory of 200
    # files, 100 ms 0.1.
    "spark.sql.streaming.pollingDelay": "100ms",
    # Spark's default, INT96, loses the time zone for every other reader.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Before 4.0, Spark's default refuses times from before 1900, which older versions wrote in another calendar.
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    # A supervisor may signal every process of a run while it takes its last checkpoint.
    "spark.python.daemon.module": "siltstone.spark.daemon",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_FILE_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
CONNECT = "sc"
CONNECT_PORT = 15002
_CONNECT_WAIT_S = 10.0
_MANY_ROWS = 1 << 20
"""more rows than any Spark has cores"""
_QUICK_COMPILATION = "-XX:TieredStopAtLevel=1"
"""option of a JVM that only starts some tasks and processes no rows: optimizing code would take most of its time"""
LOCAL_SETTINGS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}

FROM_FILES = "spark."
"""prefix of settings that spark-submit takes from a file"""
SUBMIT_ARGUMENTS = "PYSPARK_SUBMIT_ARGS"
"""environment variable with the arguments of the JVM that PySpark starts"""
SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""environment variable that is set if `spark-submit` runs this program; it then names the master"""


def spark_session(
    master: str = "local[*]", extra: Mapping[str, str] | None = None, *, steps: bool = False
) -> SparkSession:
    """Return the running session if there is one, else start one on `master`.

    Worker processes get this interpreter and this module search path: the user's stream modules import there as they
    do here. A Spark Connect server starts its own workers: modules must be installed there.

    Args:
        master: a Spark master URL, or `sc://HOST[:PORT]` of a Spark Connect server; ignored under `spark-submit`,
            which names its own.
        extra: further Spark settings; they override Siltstone's own.
        steps: whether steps of a stream will run. They need the driver in this process, and pass rows through the JVM.

    Raises:
        Unreachable: the JVM does not start (most often: no Java 17 or newer), or no server answers.
        UsageError: Spark Connect cannot be used here, or its packages are not installed.
    """
    spark = running_session()
    if steps and (_is_connect(master) if spark is None else not isinstance(spark, SparkSession)):
        raise UsageError(
            "this runs a query whose every batch is handed to a function in this process, which Spark Connect "
            "cannot do: give a Spark master such as local[*], spark://, yarn or k8s:// instead of sc://, or, on "
            "Databricks, use a cluster in dedicated access mode"
        )
    if spark is not None:
        return spark
    if _is_connect(master):
        return _connect(master, extra or {})
    if not steps:
        return _start(master, SETTINGS, extra or {}, java_options=_QUICK_COMPILATION)
    spark = _start(master, SETTINGS, extra or {}, java_options="")
    _write_fast_records(spark)
    return spark


def running_session() -> SparkSession | None:
    """Return this thread's session, if there is one."""
    return SparkSession.getActiveSession()


def cores(spark: SparkSession) -> int:
    """Return the number of tasks that Spark runs at once."""
    if isinstance(spark, SparkSession):
        return spark.sparkContext.defaultParallelism
    return spark.range(_MANY_ROWS).select(F.spark_partition_id()).distinct().count()


def _is_connect(master: str) -> bool:
    return urlsplit(master).scheme == CONNECT


def _connect(url: str, extra: Mapping[str, str]) -> SparkSession:
    """Open a session of the Spark Connect server at `url`. Static settings are the server's own."""
    host, port = urlsplit(url).hostname, urlsplit(url).port or CONNECT_PORT
    try:
        # Spark's client would retry for minutes.
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
        _register_format(spark)
    except ImportError as error:
        raise UsageError(
            f"Spark Connect needs further packages: pip install 'siltstone[connect]' ({str(error).splitlines()[0]})"
        ) from error
    except Exception as error:
        raise Unreachable(
            f"Spark Connect at {host}:{port} fails: {str(error).splitlines()[0]}", advice="check its log, and try again"
        ) from error
    return spark


def _start(master: str, own: Mapping[str, str], extra: Mapping[str, str], java_options: str) -> SparkSession:
    """Start a session with the driver in this process."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # workers do not import from their working directory either
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(p or os.getcwd() for p in sys.path if not _is_zip(p)))
    _, log_format = configuration() or (None, "text")
    log4j = Path(__file__).parent / LOG_CONFIGURATIONS[log_format]
    java_options = f"-Dlog4j2.configurationFile={log4j.as_uri()} {java_options}".rstrip()
    settings = {**own, "spark.app.name": "siltstone", "spark.driver.extraJavaOptions": java_options}
    settings |= {f"spark.executorEnv.{name}": value for name, value in worker_variables().items()}
    if SUBMITTED not in os.environ:
        settings |= {"spark.master": master} | (LOCAL_SETTINGS if master.startswith("local") else {})
    try:
        with log_jvm_lines():
            spark = _build_session(settings, extra)
    except UsageError:
        raise
    except Exception as error:
        raise Unreachable(
            f"Spark did not start on {master}: {str(error).splitlines()[0]}; check that Java 17 or newer is installed "
            "and JAVA_HOME points to it"
        ) from error
    if threading.current_thread() is threading.main_thread():
        # PySpark's handler calls the JVM, which fails in the middle of another call.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _register_format(spark)
    return spark


def _register_format(spark: SparkSession) -> None:
    if has_python_sources(spark):
        from siltstone.spark.datasource import register

        register(spark)


def _write_fast_records(spark: SparkSession) -> None:
    """Let the driver's JVM write the records of queries, which are on its local disk, without running other programs.

    PySpark comes without Hadoop's native library. Therefore Spark's own choice of a file manager runs the command
    `readlink` twelve times per micro-batch, and each `.crc` file beside a local file, which nobody reads since the
    record is written again at each start, takes another process.
    """
    manager = checkpoint_file_manager(spark)
    if manager is not None and spark.conf.get(_FILE_MANAGER, None) is None:
        spark.conf.set(_FILE_MANAGER, manager)
    jvm: Any = spark._jvm
    context: Any = spark.sparkContext
    files = jvm.org.apache.hadoop.fs.FileSystem
    local = files.get(jvm.java.net.URI("file:///"), context._jsc.hadoopConfiguration())
    local.setWriteChecksum(False)


def _build_session(settings: Mapping[str, str], extra: Mapping[str, str]) -> SparkSession:
    """Make a session with these settings. `extra` override the others, and may be secret."""
    if SUBMITTED in os.environ:  # the JVM has started, so no setting becomes one of its arguments
        return SparkSession.builder.config(map={**settings, **extra}).getOrCreate()
    with _private_settings({key: value for key, value in extra.items() if key.startswith(FROM_FILES)}):
        spark = SparkSession.builder.config(map={k: v for k, v in settings.items() if k not in extra}).getOrCreate()
    for key in extra:
        if not key.startswith(FROM_FILES):
            spark.conf.set(key, extra[key])
    return spark


@contextmanager
def _private_settings(settings: Mapping[str, str]) -> Iterator[None]:
    """Give settings to a JVM that starts in this block in a temporary file that only this user can read.

    PySpark would put them into the JVM's arguments, where every user can see them in the list of processes. The file
    begins with Spark's defaults, which are read from no other file then.
    """
    given = os.environ.get(SUBMIT_ARGUMENTS)
    if settings and "--properties-file" in (given or ""):
        raise UsageError(
            f"{SUBMIT_ARGUMENTS} names a --properties-file: write Siltstone's Spark settings into that file"
        )
    own = "".join(f"{_property(key)}={_property(value)}\n" for key, value in settings.items())
    with tempfile.NamedTemporaryFile(prefix="siltstone-", suffix=".properties") as file:
        file.write(_spark_defaults() + b"\n\n")  # the last line may end in a backslash, which takes the next one
        file.write(own.encode())
        file.flush()
        read = f"--properties-file {shlex.quote(file.name)}"
        os.environ[SUBMIT_ARGUMENTS] = f"{read} {given or 'pyspark-shell'}"
        try:
            yield
        finally:
            if given is None:
                del os.environ[SUBMIT_ARGUMENTS]
            else:
                os.environ[SUBMIT_ARGUMENTS] = given


def _spark_defaults() -> bytes:
    """Return what is in `spark-defaults.conf`, if there is one.

    Raises:
        UsageError: this user cannot read it.
    """
    directory = os.environ.get("SPARK_CONF_DIR") or os.path.join(_find_spark_home(), "conf")
    path = Path(directory, "spark-defaults.conf")
    try:
        return path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): let this user read it") from error


def _property(text: str) -> str:
    """Escape a key or value for java.util.Properties."""
    return re.sub(r"[\\\s=:#!]", lambda found: f"\\u{ord(found[0]):04x}", text)


def needs_spark(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that uses Spark so that its errors are Siltstone's, in one line each.

    If the JVM has ended, any error becomes `Unreachable`. Other errors of Spark, such as a Python worker that is killed
    too often, become `StateError`. `Fenced` is raised unchanged.
    """

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if isinstance(error, Fenced):
                raise
            if not is_jvm_gone():
                if isinstance(error, PySparkException | Py4JError):
                    raise StateError(f"Spark failed: {explain(error)}", advice=SiltstoneError.general_advice) from error
                raise
            raise Unreachable(
                "Spark's JVM has ended, killed or out of memory: run the same command again; a stream continues from "
                "its last checkpoint"
            ) from error

    return wrapper


def is_jvm_gone() -> bool:
    """Whether this process started a JVM that no longer answers."""
    context = SparkContext._active_spark_context
    try:
        return context is not None and not context.version
    except (Py4JError, OSError):
        return True


def _is_zip(path: str) -> bool:
    return path.endswith(".zip")


_STANDARD_ERROR = 2
_OF_NO_USE = "WARNING: Using incubator modules:"
"""a warning that every JVM of Spark prints at its start"""


@contextmanager
def log_jvm_lines() -> Iterator[None]:
    """Log the standard error of programs started in this block, for as long as they live.

    Does nothing if Siltstone's logging is not configured in this process.
    """
    if configuration() is None:
        yield
        return
    ours, theirs = os.pipe()
    before = os.dup(_STANDARD_ERROR)
    os.dup2(theirs, _STANDARD_ERROR)
    os.close(theirs)
    threading.Thread(target=_pass_on, args=(ours,), name="siltstone-jvm-lines", daemon=True).start()
    try:
        yield
    finally:
        os.dup2(before, _STANDARD_ERROR)
        os.close(before)


def _pass_on(descriptor: int) -> None:
    with open(descriptor, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.strip() and not line.startswith(_OF_NO_USE):
                relay_line(line.rstrip())
